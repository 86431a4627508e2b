"""Builds the `RunPlan` of a config."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.core.rng import hidden_stream
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.networks import (
    COMMON,
    check_feature_dims,
    check_groups,
    check_statistics,
    warn_of_refits,
)
from fedloom.experiment.plan.pretrained import server_pretrained
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.run_plan import Planner, RunPlan
from fedloom.experiment.plan.settings.horizontal import Horizontal
from fedloom.experiment.plan.settings.rows import data_of
from fedloom.experiment.plan.settings.vertical import Vertical, parties_of

__all__ = ["PLANNERS", "build", "data_of", "parties_of", "pretrained_of", "resolve"]

PLANNERS: Final[dict[str, Planner]] = {"horizontal": Horizontal(), "vertical": Vertical()}
"""By `Method.setting`."""


def resolve(run: RunConfig, *, at_node: bool = False) -> tuple[Method, Any, int, Planner]:
    """The method of a run, its config, the number of rounds, and its planner.

    Args:
        run: the config.
        at_node: whether this is a node, so that the server's rows are not here.

    Raises:
        ConfigError, MethodError: see `RunConfig.resolve` and `Planner.check`.
    """
    method, cfg, rounds = run.resolve()
    planner = PLANNERS[method.setting]
    planner.check(run, method, server=at_node or bool(run.data.server_rows))
    return method, cfg, rounds, planner


def build(
    run: RunConfig, files: PrivateData | None = None, *, secret: int | None = None
) -> RunPlan:
    """The plan of a run. With equal data, seed and models, all methods get equal splits and initial
    weights.

    Args:
        run: the config.
        files: the coordinator's private data, in a run at nodes.
        secret: of the parties on this machine, see `ClientContext`.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the run cannot be built.
    """
    method, cfg, rounds, planner = resolve(run)
    run.churn.check(run.data.clients, rounds, run.data.unseen_clients(run.seed))
    for own, section, noun in (
        (run.data.own, "data.row_schema", "rows"),
        (run.columns.private, "columns.private", "columns"),
    ):
        if own and files is None:
            raise ConfigError(
                f"{section}: parties with private {noun} run at nodes: add --engine net"
            )
    files = files or PrivateData()
    here = run
    if method.without_network:
        here = run.model_copy(update={"engine": run.engine.model_copy(update={"device": "cpu"})})
    plan = with_local(
        with_aggregator(with_secret(planner.build(here, method, cfg, rounds, files), secret))
    )
    plan = replace(plan, run=run, known_as="" if files.matched is None else files.matched.run)
    data = plan.data.dataset
    own_model = (
        None
        if data is None
        else server_pretrained(
            pretrained_of(run, data.kind),
            data,
            plan.data.server_rows,
            run.engine.device,
            run.models.variance,
        )
    )
    warn_of_refits(plan)
    check_feature_dims(plan)
    check_groups(plan)
    check_statistics(plan)
    if own_model is not None:
        clients = plan.contexts
        if "pretrained encoder" in method.needs:
            clients = [replace(context, encoder=own_model.encoder) for context in clients]
        server = replace(
            plan.server_context, pretrained=own_model.teacher, encoder=own_model.encoder
        )
        plan = replace(plan, server_context=server, contexts=clients, pretrained=own_model.digest)
    _ = plan.server  # errors in its constructor are raised here, before any work
    return plan


def with_secret(plan: RunPlan, secret: int | None) -> RunPlan:
    """The plan with the secret of the parties on this machine.

    Networks for private columns start from weights that nobody else can draw: with those of the
    run's seed, the coordinator would find the columns behind the first embeddings. The parties
    beside it send none.
    """
    if secret is None:
        return plan
    contexts = [replace(context, secret=secret) for context in plan.contexts]
    if plan.run.columns.private:
        seed = plan.run.seed
        contexts = [
            c if c.id in plan.colocated else replace(c, network=_hidden(c, seed)) for c in contexts
        ]
    return replace(
        plan, server_context=replace(plan.server_context, secret=secret), contexts=contexts
    )


def _hidden(context: ClientContext, seed: int) -> Callable[[], nn.Module] | None:
    """The context's network, with initial weights that only the party's secret tells."""
    if context.network is None or context.secret is None:
        return context.network
    return partial(_shuffled, context.network, context.secret, f"{seed}/{context.id}".encode())


def _shuffled(network: Callable[[], nn.Module], secret: int, on: bytes) -> nn.Module:
    """The network, with the numbers of each initial tensor in an order that the secret draws.

    A secret seed would not do: torch's generator has 2**32 of them, which can be tried one by one.
    """
    made, rng = network(), hidden_stream(secret, "initial weights", on)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.copy_(
                tensor.flatten()[torch.from_numpy(rng.permutation(tensor.numel()))].view_as(tensor)
            )
    return made


def with_aggregator(plan: RunPlan) -> RunPlan:
    """The plan in which all parties know how the run takes means."""
    how = plan.run.aggregate.aggregator()
    contexts = [replace(context, aggregator=how) for context in plan.contexts]
    return replace(
        plan, server_context=replace(plan.server_context, aggregator=how), contexts=contexts
    )


def with_local(plan: RunPlan) -> RunPlan:
    """The plan in which all parties know how to train: the clients, and the active party, which has
    the labels.

    Raises:
        ConfigError: the label does not have the classes of `local.class_weights`.
    """
    if not plan.run.local.given:
        return plan
    how = plan.run.local.training(
        plan.rounds, plan.data.classes if plan.data.task.kind == "classes" else ()
    )
    contexts = [replace(context, local=how) for context in plan.contexts]
    active = plan.method.setting == "vertical"
    server = replace(plan.server_context, local=how) if active else plan.server_context
    return replace(plan, server_context=server, contexts=contexts)


def pretrained_of(run: RunConfig, kind: str) -> PretrainedConfig:
    """The section `[pretrained]` with "auto" resolved to a network for this kind of data."""
    pool = run.models.names
    return run.pretrained.like(pool[0] if len(pool) == 1 else COMMON[kind][0], run.models.norm)
