"""From a config to a plan of its run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.experiment.config import RunConfig
from fedloom.experiment.networks import COMMON, check_feature_dims, check_statistics, warn_of_refits
from fedloom.experiment.plan import RunPlan, Setting
from fedloom.experiment.pretrained import PretrainedConfig, prepare
from fedloom.experiment.private import PrivateData
from fedloom.experiment.settings.horizontal import Horizontal, data_of
from fedloom.experiment.settings.vertical import Vertical, parties_of

__all__ = ["SETTINGS", "build", "data_of", "parties_of", "pretrained_of", "resolve"]

SETTINGS: Final[dict[str, Setting]] = {"horizontal": Horizontal(), "vertical": Vertical()}
"""By the name on a method's page."""


def resolve(run: RunConfig, *, at_node: bool = False) -> tuple[Method, Any, int, Setting]:
    """The method of a run, its config, the number of rounds, and its setting.

    Args:
        run: the run.
        at_node: whether the server, with its rows and its model, is elsewhere.

    Raises:
        ConfigError, MethodError: see `RunConfig.resolve` and `Setting.check`.
    """
    method, cfg, rounds = run.resolve()
    setting = SETTINGS[method.setting]
    setting.check(run, method, server=at_node or bool(run.data.server))
    return method, cfg, rounds, setting


def build(run: RunConfig, files: PrivateData | None = None, *, secret: int | None = None) -> RunPlan:
    """The plan of a run. Equal data, seed and models give equal splits and initial weights to all methods.

    Args:
        run: its config.
        files: private data of the coordinator of a run at nodes; None for other runs.
        secret: of the parties on this machine, see `ClientContext`.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: the run can't be built; nothing has been done.
    """
    method, cfg, rounds, setting = resolve(run)
    run.churn.check(run.data.clients, rounds, run.data.unseen_clients(run.seed))
    for own, what, noun in ((run.data.own, "data.form", "rows"), (run.columns.own, "columns.own", "columns")):
        if own and files is None:
            raise ConfigError(f"{what}: parties with {noun} of their own are at nodes of their own: add --engine net")
    files = files or PrivateData()
    plan = with_secret(setting.build(run, method, cfg, rounds, files), secret)
    plan = replace(plan, known_as="" if files.matched is None else files.matched.run)
    data = plan.data.dataset
    own_model = (
        None if data is None else prepare(pretrained_of(run, data.kind), data, plan.data.server_rows, run.engine.device)
    )
    warn_of_refits(plan)
    check_feature_dims(plan)
    check_statistics(plan)
    if own_model is not None:
        clients = plan.contexts
        if "pretrained encoder" in method.needs:
            clients = [replace(context, encoder=own_model.encoder) for context in clients]
        server = replace(plan.server_site, pretrained=own_model.teacher, encoder=own_model.encoder)
        plan = replace(plan, server_site=server, contexts=clients, pretrained=own_model.digest)
    _ = plan.server  # made now: what is wrong with it stops the run before any work
    return plan


def with_secret(plan: RunPlan, secret: int | None) -> RunPlan:
    """The plan with the secret of the parties on this machine, see `ClientContext`."""
    if secret is None:
        return plan
    hidden = [replace(context, secret=secret) for context in plan.contexts]
    return replace(plan, server_site=replace(plan.server_site, secret=secret), contexts=hidden)


def pretrained_of(run: RunConfig, kind: str) -> PretrainedConfig:
    """The section `[pretrained]` with the name of its network in place of "auto", for this kind of data."""
    pool = {*(run.models.pool or ())}
    return run.pretrained.like(pool.pop() if len(pool) == 1 else COMMON[kind][0], run.models.norm)
