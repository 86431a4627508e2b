"""The networks of a run: architectures, initial weights, black boxes, and checks of a method's
requirements.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TypeAlias

from torch import nn

from fedloom import models
from fedloom.core.black_box import BlackBoxModel
from fedloom.core.context import ClientContext
from fedloom.core.errors import ConfigError, ModelError, warn_once
from fedloom.core.method import Method
from fedloom.core.rng import stream
from fedloom.core.task import Task
from fedloom.data.dataset import DatasetLike
from fedloom.experiment.config.run import RunConfig, refuse_black_boxes, refuse_settings
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.methods.features import Features
from fedloom.models.black_boxes import make

SMALL = {
    "image": ("mlp", "mlp-large", "mlp-deep", "cnn-small"),
    "table": ("linear", "mlp", "mlp-large", "mlp-deep"),
}

COMMON = {"image": ("cnn-small",), "table": ("mlp",)}
"""Default of methods that average weights or compare features."""

EXTRACTORS = {"image": ("lenet5",), "table": ("mlp-5",)}
"""Default of parties with columns, from Proto-EVFL."""


def architectures_of(run: RunConfig, method: Method, kind: str) -> tuple[str, ...]:
    """The network of each client."""
    return run.models.assigned(default_pool(method, kind), run.data.clients, run.seed)


def default_pool(method: Method, kind: str) -> tuple[str, ...]:
    """The networks of a run that names none."""
    return (COMMON if {"one network", "same feature dim"} & {*method.needs} else SMALL)[kind]


Network: TypeAlias = Callable[[], nn.Module]


def networks(
    run: RunConfig, method: Method, dataset: DatasetLike, outputs: int, architectures: Sequence[str]
) -> tuple[Network, list[Network]]:
    """Functions that build the server's network and each client's, with separate or common initial
    weights.
    """
    shape = dataset.input_shape

    def network(n: int, purpose: str) -> Network:
        seed = int(stream(run.seed, purpose, n).integers(2**31))
        return partial(
            models.build, architectures[n], shape, outputs, norm=run.models.norm, seed=seed
        )

    clients = range(len(architectures))
    if "one network" in method.needs:
        return network(0, "common initial weights"), [
            network(0, "common initial weights") for _ in clients
        ]
    first = (
        map(architectures.index, architectures)
        if "architecture groups" in method.needs
        else clients
    )  # equal weights in a group
    return network(0, "server's initial weights"), [network(n, "initial weights") for n in first]


def sizes(run: RunConfig, method: Method) -> dict[str, int | None]:
    """The numbers of each network that a run on rows of a schema may use, by its name; None of a
    network that is not fedloom's own. It reads no rows and runs no foreign code.
    """
    form = run.data.row_schema
    if form is None or method.without_network:
        return {}
    built, outputs = form.build(run.data.missing), len(form.classes) or 1 + run.models.variance
    shape = built.input_shape
    names = run.models.names or default_pool(method, built.kind)
    return {
        name: _size(name, shape, outputs, run.models.norm) if name in models.MODELS else None
        for name in names
    }


@lru_cache(maxsize=64)
def _size(name: str, shape: tuple[int, ...], outputs: int, norm: models.Norm) -> int | None:
    try:
        return sum(
            p.numel() for p in models.build(name, shape, outputs, norm=norm, seed=0).parameters()
        )
    except ModelError:  # such as pictures that are too small for it: the run will be refused
        return None


def replace_black_boxes(
    run: RunConfig,
    method: Method,
    dataset: DatasetLike,
    task: Task,
    architectures: Sequence[str],
    server: ClientContext,
    contexts: list[ClientContext],
) -> tuple[ClientContext, list[ClientContext]]:
    """Replace the networks of clients that drew a black box. The server's network is then a
    client's, or the common one if all clients have black boxes.

    Raises:
        ConfigError: the method does not support them, they have settings without being in the pool,
            or their floor is too high.
        ModelError: a factory of the pool fails, or its result is not a model.
    """
    shape, outputs, number = dataset.input_shape, task.width, task.kind == "number"
    level = run.models.black_box
    boxes = {name for name in run.models.names if models.is_black_box(name, shape, outputs, number)}
    if not boxes:
        refuse_settings(run)
        return server, contexts
    refuse_black_boxes(method, boxes)
    if run.models.variance:
        raise ConfigError(
            "models.variance: black boxes predict no variance: leave it out, or leave them out"
        )
    if not number and level.min_probability * outputs >= 1:
        raise ConfigError(
            f"models.black_box.min_probability: {level.min_probability:g} times {outputs} "
            f"classes is 1 or more: set less than {1 / outputs:g}"
        )

    def seed(purpose: str, n: int) -> int:
        return int(stream(run.seed, purpose, n).integers(2**31))

    def black_box(n: int) -> BlackBoxModel:
        drawn = seed("black box", n)
        return BlackBoxModel(
            architectures[n],
            partial(make, architectures[n], shape, outputs, drawn, number),
            outputs,
            drawn,
            **level.model_dump(),
            number=number,
        )

    name = next((name for name in architectures if name not in boxes), COMMON[dataset.kind][0])
    weights = seed("server's initial weights", 0)
    server = replace(
        server,
        network=partial(models.build, name, shape, outputs, norm=run.models.norm, seed=weights),
    )
    return server, [
        replace(context, network=None, black_box=black_box(n))
        if architectures[n] in boxes
        else context
        for n, context in enumerate(contexts)
    ]


def warn_of_refits(plan: RunPlan) -> None:
    """Warn if the run ends before its black boxes are refitted to others' predictions."""
    box, last = plan.run.models.black_box, (plan.rounds - 1) * plan.cfg.iterations_per_round
    learns = plan.cfg.exchanges and box.learn
    if (
        learns
        and 0 <= last < box.refit_every
        and any(context.black_box is not None for context in plan.contexts)
    ):
        name = plan.method.name
        warn_once(
            f"models.black_box: the last round of {name} begins after {last} iterations, so no "
            "black box is fitted to others' predictions, which happens first after "
            f"{box.refit_every}: set refit_every to at most {last}, or increase rounds"
            if last
            else f"models.black_box: {name} has only one round, so no black box is fitted to "
            "others' predictions"
        )


def assign_groups(
    server: ClientContext,
    contexts: Sequence[ClientContext],
    makers: Sequence[Network],
    architectures: Sequence[str],
) -> tuple[ClientContext, list[ClientContext]]:
    """Give each client its group, those with its architecture, and the server all groups and their
    networks.
    """
    # of each group, the first client
    first = list(dict.fromkeys(map(architectures.index, architectures)))
    groups = [first.index(architectures.index(a)) for a in architectures]
    server = replace(server, groups=groups, group_networks=[makers[n] for n in first])
    return server, [replace(context, group=g) for context, g in zip(contexts, groups, strict=True)]


def check_feature_dims(plan: RunPlan) -> None:
    """Refuse networks of different feature dimensions, if the method compares features.

    Raises:
        ConfigError: the dimensions differ.
        ModelError: a network has no features.
    """
    method, cfg = plan.method, plan.cfg
    if "same feature dim" not in method.needs or (
        cfg.FEATURE_DIM and getattr(cfg, cfg.FEATURE_DIM) is not None
    ):
        return
    first = {name: plan.contexts[plan.architectures.index(name)] for name in plan.architectures}
    widths = {name: Features(context.build()).width for name, context in first.items()}
    (one, a), *others = widths.items()
    for other, b in others:
        if a != b:
            adapted = (
                f", or set params.{cfg.FEATURE_DIM} to one width for all" if cfg.FEATURE_DIM else ""
            )
            raise ConfigError(
                f"models.pool: {method.name} needs features of one dimension, but {one} has {a} "
                f"and {other} {b}: use networks whose last layers have inputs of one "
                f"width{adapted}"
            )


def check_groups(plan: RunPlan) -> None:
    """Raise ConfigError if a mean of the clients of one architecture needs more than there are."""
    how, members = plan.aggregator, Counter(plan.server_context.groups).values()
    if plan.method.client.MEANS and members and min(members) < how.least:
        raise ConfigError(
            f"aggregate: {how} needs {how.least} clients of each architecture, not "
            f"{min(members)}: add clients, or name fewer networks in models.pool"
        )


def check_statistics(plan: RunPlan) -> None:
    """Raise ConfigError for BatchNorm at unseen clients, if its statistics stay at each client."""
    norms = (m for i in plan.unseen for m in plan.contexts[i].build().modules())
    if plan.cfg.keeps_batch_statistics and any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in norms
    ):
        raise ConfigError(
            "data.unseen: unseen clients have no BatchNorm statistics: set models.norm=group, or "
            "params.batchnorm=batch to predict with the statistics of the test rows"
        )
