"""Estimate the cost of a run before it starts and without its data: passes, operations, hours.

A miniature of the run is timed for three rounds: the same method and settings, on random rows, with
a small network that counts its rows. Its cost per round and evaluation is scaled to the run's
rounds and clients, and to its networks by timing a few steps of each
(`fedloom_papers.estimate.speed`), so that it covers every method. The estimate is within a
factor of two if all clients fit into the miniature; it does not see rounds that differ from the
first three.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core.engine import Engine
from fedloom.core.faults import Faults
from fedloom.core.method import Method
from fedloom.data.images import default_grid
from fedloom.data.sources import load
from fedloom.experiment.config.pretrained import AUTO, PretrainedConfig
from fedloom.experiment.config.run import BlackBoxConfig, EngineConfig, EvaluateConfig, RunConfig
from fedloom.experiment.config.section import validated
from fedloom.experiment.config.sections import ChurnConfig
from fedloom.experiment.plan.demand import evaluated
from fedloom.experiment.plan.networks import COMMON, EXTRACTORS, architectures_of
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.pool.pool import digest
from fedloom.experiment.run.engine import Backend, start
from fedloom.experiment.run.execute import execute
from fedloom.models import BLACK_BOXES, MODELS
from fedloom.models.parts import Classifier
from fedloom.models.small import mlp
from fedloom.support.paths import cache_folder, write_atomically
from fedloom_papers.estimate.speed import NetworkSpeed, Passes, Shape, speed

CLIENTS = 16
"""Maximum number of clients of a miniature; the cost of more is proportional."""
ROUNDS = 3
"""Rounds of a miniature: the second is timed without evaluation, the third with it."""
DataSize = tuple[Shape, int, int, int]
KNOWN: dict[str, DataSize] = {
    "digits": ((1, 8, 8), 10, 1_797, 0),
    "breast_cancer": ((30,), 2, 569, 0),
    "wine": ((13,), 3, 178, 0),
    "mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "fashion_mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "emnist": ((1, 28, 28), 26, 124_800, 20_800),
    "femnist": ((1, 28, 28), 62, 814_277, 0),
    "cifar10": ((3, 32, 32), 10, 50_000, 10_000),
    "cifar100": ((3, 32, 32), 100, 50_000, 10_000),
    "svhn": ((3, 32, 32), 10, 73_257, 26_032),
    "cinic10": ((3, 32, 32), 10, 90_000, 90_000),
    "celeba": ((3, 84, 84), 2, 162_770, 19_962),
    "tiny-imagenet": ((3, 64, 64), 200, 100_000, 10_000),
    "mini-imagenet": ((3, 84, 84), 100, 50_000, 5_000),
    "adult": ((108,), 2, 48_842, 0),
    "credit": ((23,), 2, 30_000, 0),
}
"""Shape of a row, classes, training rows, and rows of the official test split, of each registered
data set.
"""
OWNERS = {"femnist": 226, "celeba": 20}
"""Mean number of rows per owner, for natural partitions."""
UNSEEN: DataSize = ((64,), 10, 5_000, 0)
"""The assumed size of data that is not available here."""
COUNTED_COLUMNS = {"aligned", "unaligned", "blocks_per_party", "grid"}
"""Settings of `[columns]` that affect the cost; the others select classes."""
STAND_IN = "fedloom_papers.estimate.cost:stand_in"
"""The network of a miniature."""


@dataclass(frozen=True)
class Cost:
    """Passes, operations and seconds of runs.

    Attributes:
        passes: forward passes of one row; a row in a training step counts 3.
        seconds: seconds on one core of this machine.
        gpu: rough seconds on one GPU: see `GPU_RATE` and `GPU_STEP` of
            `fedloom_papers.estimate.speed`.
        once: costs of pretraining by key; runs may share one.
    """

    passes: float = 0.0
    seconds: float = 0.0
    gpu: float = 0.0
    once: "tuple[tuple[str, Cost], ...]" = ()

    def __add__(self, other: "Cost") -> "Cost":
        """The sum; a shared pretraining counts once."""
        once = tuple(sorted(dict(self.once + other.once).items(), key=lambda item: item[0]))
        return Cost(
            self.passes + other.passes, self.seconds + other.seconds, self.gpu + other.gpu, once
        )

    def whole(self) -> "Cost":
        """The cost including pretraining."""
        return sum((cost for _, cost in self.once), replace(self, once=()))


def cost(run: RunConfig) -> Cost:
    """Estimate the cost of a run from its miniature. Timings are kept in the user's cache.

    Raises:
        FedloomError: the run is invalid, or its method fails.
    """
    method, cfg, rounds = run.resolve()
    shape, classes, rows, _ = _size(run)
    networks = _networks(run, method, shape)
    mini = miniature(run)
    setup, first, second, last = measured(mini)
    evaluations = 1 + len(evaluated(run, rounds)) if rounds else 1
    participants = cfg.participants(run.data.training) / cfg.participants(mini.data.training)
    work = (setup + last.minus(second) * (evaluations - 1) + first.minus(second)) * (
        run.data.clients / mini.data.clients
    )
    work += second * (rounds * participants)
    once = _pretraining(run, method, cfg, shape, classes, run.data.rows_at_server(rows))
    if "no network" in method.needs:
        return Cost(seconds=work.seconds)
    if method.setting == "vertical":
        shape, classes = _part(run, shape), cfg.learned
    small = speed(STAND_IN, mini_shape(shape), classes, None)
    total = Cost(seconds=work.seconds, once=once)
    for name, count in Counter(networks).items():
        if name not in BLACK_BOXES:  # those are in the miniature as they are
            share = work * (count / len(networks))
            total += _cost(speed(name, shape, classes, run.models.norm), share, small)
    return total


def _cost(real: NetworkSpeed, work: Passes, small: NetworkSpeed | None = None) -> Cost:
    """The cost of passes through a network, less that of the small network that was timed in its
    place.
    """
    seconds = real.seconds(work) - (small.seconds(work) if small else 0.0)
    return Cost(work.asked + 3 * work.trained, max(0.0, seconds), real.gpu(work))


def describe(costs: Iterable[Cost], workers: int = 1) -> str:
    """Runs, passes and hours in a sentence. Batched parties and runs in lock-step, which `auto` may
    choose by measuring
    this machine, take less: what they save is not estimated.

    Args:
        costs: the cost of each run.
        workers: number of cores in use.
    """
    every = list(costs)
    total = sum(every, Cost()).whole()
    seconds, passes = total.seconds / workers, f"{total.passes:,.0f}"
    if total.passes >= 1e5:
        passes = f"{total.passes:.1e}".replace("e+0", "e").replace("e+", "e")
    text = f"{len(every)} run{'s' * (len(every) != 1)}, {passes} sample passes, "
    text += (
        f"about {_rounded(seconds)} on {workers} core{'s' * (workers != 1)} with parties one by one"
    )
    return text + (f", some {_rounded(total.gpu)} on one GPU (rough)" if seconds > 2 * 3600 else "")


def _rounded(seconds: float) -> str:
    """A duration in two digits and a whole unit."""
    for size, name in ((3600.0, "hour"), (60.0, "minute")):
        if seconds >= 1.5 * size:
            digits = 2 - math.ceil(math.log10(seconds / size))
            return f"{round(seconds / size, min(0, digits)):,.0f} {name}s"
    return f"{max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"


# -- a miniature of the run ------------------------------------------------------------------------


class _CountRows(nn.Module):
    """The identity, which counts rows (B, ...)."""

    total = Passes()

    def forward(self, x: Tensor) -> Tensor:
        """Returns x."""
        new = (
            Passes(trained=len(x), steps=1)
            if torch.is_grad_enabled()
            else Passes(asked=len(x), asks=1)
        )
        _CountRows.total += new
        return x


def stand_in(input_shape: Shape, classes: int) -> Classifier:
    """A network with one hidden layer that counts its rows."""
    network = mlp(input_shape, classes, "none", (64,))
    network.body = nn.Sequential(_CountRows(), *network.body.children())
    return network


def miniature(run: RunConfig) -> RunConfig:
    """Three rounds of the run on synthetic rows with small networks and at most 16 clients, each
    with as many rows as in the run. Equal for runs that differ in their networks, length or number
    of clients alone.
    """
    method, cfg, _ = run.resolve()
    shape, classes, rows, official = _size(run)
    data = run.data
    if method.setting == "vertical":
        clients, rows = data.clients, rows + official
        split: dict[str, Any] = {"test_fraction": official / rows if official else data.test_share}
        split |= {"test_rows": data.test_rows, "validation": data.validation}
    else:
        clients, server = min(data.clients, CLIENTS), data.rows_at_server(rows)
        held = official or int((rows - server) * data.test_share)
        left = max(rows - server - (0 if official else held), 1)
        if data.validation:
            held = max(1, int(left * data.validation))
            left = max(left - held, 1)
        public = min(1000, left // 5) if data.public_rows is None else data.public_rows
        test = min(held, data.test_rows or held) or 1
        own, partition = _shared_out(run, method, max(left - public, 0) // data.clients)
        rows = server + public + clients * own + test
        split = {
            "server_rows": server,
            "public_rows": public,
            "test_fraction": (test + 0.5) / (rows - server),
        }
        split |= {**partition, "unseen": data.unseen if clients == data.clients else 0.0}
    pool = [
        name if name in BLACK_BOXES else STAND_IN
        for name in dict.fromkeys(_networks(run, method, shape))
    ]
    pretrained = (
        PretrainedConfig(model=STAND_IN, epochs=1) if run.pretrained.given else PretrainedConfig()
    )
    topology = run.topology.model_dump()
    if clients < data.clients:
        topology["kind"] = "full" if topology["kind"] == "edges" else topology["kind"]
        topology |= {
            "file": None,
            "degree": topology["degree"] and min(topology["degree"], clients - 1),
        }
        if topology["kind"] == "groups":
            topology["groups"] = max(1, topology["groups"] * clients // data.clients)
    mini: RunConfig = validated(
        RunConfig,
        {
            **run.model_dump(include={"method", "preset", "params"}),
            "columns": {}
            if run.columns.own_data
            else run.columns.model_dump(include=COUNTED_COLUMNS),
            "rounds": max(ROUNDS, cfg.min_rounds + 2),
            "data": {
                "name": f"noise:{rows}x{'x'.join(map(str, mini_shape(shape)))}:{classes}",
                "clients": clients,
                "own_test_rows": data.own_test_rows,
                **split,
            },
            "models": {
                "pool": tuple(dict.fromkeys(pool)),
                "black_box": run.models.black_box
                if {*pool} & BLACK_BOXES.keys()
                else BlackBoxConfig(),
            },
            "pretrained": pretrained,
            "topology": topology,
            "churn": ChurnConfig(),
            "engine": EngineConfig(),
            "evaluate": EvaluateConfig(points=1, attack_labels=run.evaluate.attack_labels),
            "faults": Faults(),
        },
    )
    return mini


def mini_shape(shape: Shape) -> Shape:
    """An image (C, H, W) in gray and at most 16 by 16; a row of a table as it is."""
    return shape if len(shape) == 1 else (1, *(min(16, side) for side in shape[1:]))


def measured(mini: RunConfig) -> list[Passes]:
    """Time a miniature: setup, the first round with the evaluation before it, the mean of the
    middle rounds, and the last round with the evaluation after it. Kept in the user's cache.
    """
    kept = _kept(mini)
    with suppress(OSError, ValueError, TypeError):
        setup, first, between, last = (
            Passes(**each) for each in json.loads(kept.read_text(encoding="utf-8"))
        )
        return [setup, first, between, last]
    import sklearn.metrics  # noqa: F401  # imported by the first evaluation of a process

    marks = [_now()]

    def begin(plan: RunPlan) -> Engine:
        # without the passes of a pretraining
        marks.append(replace(marks[0], seconds=_now().seconds))
        engine = start(plan)
        marks.append(_now())
        return engine

    log = logging.getLogger("fedloom")
    silent, log.disabled = log.disabled, True  # the run itself will log its warnings
    try:
        execute(
            mini,
            progress=lambda _: marks.append(_now()),
            backend=lambda *_, **__: Backend(start=begin),
        )
    finally:
        log.disabled = silent
    first, *middle, last = (after.minus(before) for before, after in pairwise(marks[2:]))
    setup = Passes(seconds=marks[1].seconds - marks[0].seconds)
    found = [setup, first, sum(middle, Passes()) * (1 / len(middle)), last]
    with suppress(OSError):  # the cache only saves time
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps([asdict(each) for each in found]).encode())
    return found


def _kept(mini: RunConfig) -> Path:
    return cache_folder("costs") / f"{digest(mini)}.json"


def unmeasured(runs: Iterable[RunConfig]) -> int:
    """The number of miniatures without a timing in the cache.

    Raises:
        FedloomError: a run is invalid.
    """
    return sum(not file.is_file() for file in {_kept(miniature(run)) for run in runs})


def _now() -> Passes:
    return replace(_CountRows.total, seconds=process_time())


# -- the numbers of a run --------------------------------------------------------------------------


def _size(run: RunConfig) -> DataSize:
    """The size of the run's data; a guess if the files are not available."""
    if run.data.row_schema is not None:
        form = run.data.row_schema.build()
        return form.input_shape, len(form.classes), run.data.clients * 500, 0
    if run.columns.own_data:
        return (
            (3, run.columns.image_size, run.columns.image_size)
            if run.columns.manifest
            else UNSEEN[0]
        ), *UNSEEN[1:]
    if run.data.name in KNOWN:
        return KNOWN[run.data.name]
    if not Path(run.data.name).expanduser().exists():
        return UNSEEN
    data = load(run.data.name)
    return (
        data.input_shape,
        len(data.classes),
        len(data.train),
        0 if data.test is None else len(data.test),
    )


def _shared_out(run: RunConfig, method: Method, even: int) -> tuple[int, dict[str, Any]]:
    """Rows per client of a miniature, and their partition. Only peers, which may choose neighbours
    by their rows, keep a skewed one.
    """
    options, name = run.data.options, run.data.partition
    if name == "natural":
        return OWNERS.get(run.data.name, max(1, even)), {"partition": "iid"}
    if method.server is None:
        return max(1, even), {"partition": name, "options": options}
    drawn = (
        int(1.5 * options.get("rows", 20))
        if name == "random-classes"
        else min(even, options.get("rows") or even)
    )
    return max(1, drawn), {"partition": "iid"}


def _networks(run: RunConfig, method: Method, shape: Shape) -> tuple[str, ...]:
    """The network of each client, or the pool that parties draw from."""
    kind = "image" if len(shape) == 3 else "table"
    if "pretrained encoder" in method.needs:
        return (_teacher(run, shape),)
    if method.setting == "vertical":
        return run.models.names or EXTRACTORS[kind]
    return architectures_of(run, method, kind)


def _part(run: RunConfig, shape: Shape) -> Shape:
    """The shape of a party's columns of a row."""
    if run.columns.own_data:
        return shape
    parties = run.data.clients
    held = run.columns.blocks_per_party or min(2, parties - 1)
    if len(shape) == 1:
        return (max(1, round(shape[0] * held / parties)),)
    down, right = run.columns.grid or default_grid(parties)
    return (shape[0] * held, -(-shape[1] // down), -(-shape[2] // right))


def _teacher(run: RunConfig, shape: Shape) -> str:
    """The server's pretrained network if fedloom has it, otherwise a small substitute."""
    pool = {*run.models.names}
    usual = pool.pop() if len(pool) == 1 else COMMON["image" if len(shape) == 3 else "table"][0]
    return run.pretrained.model if run.pretrained.model in MODELS else usual


def _pretraining(
    run: RunConfig, method: Method, cfg: Any, shape: Shape, classes: int, rows: int
) -> tuple[tuple[str, Cost], ...]:
    """The cost of pretraining the server's model on its rows, by a key that runs share."""
    own, name = run.pretrained, _teacher(run, shape)
    needed = getattr(
        cfg, "taught", bool({"pretrained server model", "pretrained encoder"} & {*method.needs})
    )
    if (
        not needed
        or own.file
        or own.model not in {*MODELS, AUTO}
        or not rows
        or name in BLACK_BOXES
    ):
        return ()
    norm = own.norm or (run.models.norm if own.model == AUTO else None)
    key = f"{run.data.name} {rows} {name} {norm} {own.epochs} {own.batch_size} {own.lr} {own.seed}"
    steps = -(-rows // own.batch_size) * own.epochs
    work = Passes(trained=steps * own.batch_size, steps=steps)
    return ((key, _cost(speed(name, shape, classes, norm), work)),)
