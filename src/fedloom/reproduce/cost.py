"""What a run will cost, before it is begun and without its data: passes, operations, hours.

The passes come from what each method declares (`fedloom.reproduce.declared`), the operations of a pass from counting
them once for each network, and the seconds from timing a few steps of that network here. An estimate, to choose a scale
by: within a factor of two for networks, without that of black boxes, which nobody counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from fedloom import models
from fedloom.core.method import Method
from fedloom.data.image_grid import default_grid
from fedloom.data.sources import load
from fedloom.experiment.config import RunConfig
from fedloom.experiment.networks import COMMON, EXTRACTORS, architectures_of
from fedloom.experiment.pretrained import AUTO
from fedloom.models import BLACK_BOXES, MODELS
from fedloom.reproduce.declared import testing, training
from fedloom.reproduce.passes import Scene, epochs
from fedloom.reproduce.speed import JUDGE, PARTY, SETUP, Cost, Shape, speed

__all__ = ["Cost", "cost", "describe"]

Sizes: TypeAlias = tuple[Shape, int, int, int]
KNOWN: dict[str, Sizes] = {
    "digits": ((1, 8, 8), 10, 1_797, 0),
    "breast_cancer": ((30,), 2, 569, 0),
    "wine": ((13,), 3, 178, 0),
    "mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "fashion_mnist": ((1, 28, 28), 10, 60_000, 10_000),
    "emnist": ((1, 28, 28), 26, 88_800, 14_800),
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
"""Shape of a row, classes, training rows, and rows of the official test split, of each registered data set."""
OWNERS = {"femnist": 226, "celeba": 20}
"""Rows that one owner has on average, where the partition is by owner."""
UNSEEN: Sizes = ((64,), 10, 5_000, 0)
"""In place of data that lies elsewhere."""


def cost(run: RunConfig, *, rate: float | None = None) -> Cost:
    """What a run will cost; it is not begun, and no data is read but files of one's own.

    Args:
        run: the run.
        rate: operations a second of a core; None: as fast as this machine turns out to be.

    Raises:
        ConfigError: the run is not valid.
    """
    method, cfg, rounds = run.resolve()
    shape, classes, rows, test = _sizes(run)
    names = (_taught(run, shape),) if "pretrained encoder" in method.needs else _architectures(run, method, shape)
    scene = _scene(run, method, cfg, rounds, (shape, classes, rows, test), names)
    work = training(method.name, scene) + testing(
        method.name, scene, run.evaluate.points, (method.setting == "vertical")
    )
    if method.setting == "vertical":
        shape, classes = _part(run, shape), cfg.learnt
    total = Cost(seconds=SETUP + PARTY * scene.clients + JUDGE * (method.setting == "vertical"))
    for name, count in Counter(names).items():
        share = count / len(names)
        total += speed(name, shape, classes, run.models.norm).cost(work * share, rate) if _is_network(name) else Cost()
    return replace(total, once=_pretraining(run, method, scene, shape, classes, rate))


def describe(costs: Iterable[Cost], workers: int = 1) -> str:
    """Runs, passes and hours in one sentence.

    Args:
        costs: one of each run.
        workers: cores that work at once.
    """
    every = list(costs)
    total = sum(every, Cost()).whole()
    told = f"{len(every)} run{'s' * (len(every) != 1)}, {_power(total.passes)} sample passes, "
    told += f"about {_lasting(total.seconds / workers)} on {workers} core{'s' * (workers != 1)}"
    if total.seconds / workers > 2 * 3600:
        told += f", some {_lasting(total.gpu)} on one GPU (rough)"
    return told


def _power(number: float) -> str:
    return f"{number:.1e}".replace("e+0", "e").replace("e+", "e") if number >= 1e5 else f"{number:,.0f}"


def _lasting(seconds: float) -> str:
    for size, name in ((3600.0, "hour"), (60.0, "minute")):
        if seconds >= 1.5 * size:
            digits = 2 - math.ceil(math.log10(seconds / size))
            return f"{round(seconds / size, min(0, digits)):,.0f} {name}s"
    return f"{max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"


# -- the numbers of a run --------------------------------------------------------------------------


def _sizes(run: RunConfig) -> Sizes:
    """Of the run's data; of files that are not here, a guess."""
    if run.data.form is not None:
        form = run.data.form.form()
        return form.input_shape, len(form.classes), run.data.clients * 500, 0
    if run.columns.own_data:
        return ((3, run.columns.size, run.columns.size) if run.columns.manifest else UNSEEN[0]), *UNSEEN[1:]
    if run.data.name in KNOWN:
        return KNOWN[run.data.name]
    if not Path(run.data.name).expanduser().exists():
        return UNSEEN
    data = load(run.data.name)
    return data.input_shape, len(data.classes), len(data.train), 0 if data.test is None else len(data.test)


def _scene(run: RunConfig, method: Method, cfg: object, rounds: int, sizes: Sizes, names: tuple[str, ...]) -> Scene:
    _, classes, rows, official = sizes
    data = run.data
    server = data.server_rows(rows) if method.setting == "horizontal" else 0
    left = max(rows - server, 0)  # too few rows are told by who runs it
    held = official or int(left * data.test_fraction)
    rest = left - (0 if official else held)
    public = min(1000, rest // 5) if data.public is None else data.public
    test = min(held, data.test_rows or held)
    present = data.training
    own = _share(run, max(rest - public, 0) / data.clients)
    aligned = 0
    if method.setting == "vertical":
        aligned = min(run.columns.aligned or 200, rest)
        each = (rest - aligned) // data.clients
        own = aligned + min(each if run.columns.unaligned is None else run.columns.unaligned, each)
    return Scene(
        cfg=cfg,
        rounds=rounds,
        clients=data.clients,
        present=present,
        chosen=min(present, getattr(cfg, "clients_per_round", None) or present),
        near=min(present - 1, _degree(run, present)),
        rows=max(1, own),
        aligned=aligned,
        classes=classes,
        public=public,
        server=server,
        test=test,
        own_test=own - aligned if (method.setting == "vertical") else min(data.own_test_rows, test),
        groups=len(set(names)),
        even=(method.setting == "vertical") or bool(data.options.get("rows")) or data.partition == "iid",
        width=_width(names[0], sizes[0], classes),
    )


def _share(run: RunConfig, even: float) -> int:
    """Rows of a client."""
    options, name = run.data.options, run.data.partition
    if name == "random-classes":
        return int(1.5 * options.get("rows", 20))
    if name == "natural":
        return OWNERS.get(run.data.name, int(even))
    return int(min(even, options.get("rows") or even))


def _degree(run: RunConfig, clients: int) -> int:
    """Neighbours of a client."""
    topology = run.topology
    usual = {"ring": 2, "groups": max(1, clients // topology.number) - 1, "small-world": topology.degree or 4}
    usual["regular"] = topology.degree or (clients - 1) // 2
    return usual.get(topology.kind, clients - 1)


def _architectures(run: RunConfig, method: Method, shape: Shape) -> tuple[str, ...]:
    kind = "image" if len(shape) == 3 else "table"
    return (
        (run.models.pool or EXTRACTORS[kind]) if (method.setting == "vertical") else architectures_of(run, method, kind)
    )


def _part(run: RunConfig, shape: Shape) -> Shape:
    """What a party with columns sees of a row."""
    if run.columns.own_data:
        return shape
    parties = run.data.clients
    held = run.columns.held or min(2, parties - 1)
    if len(shape) == 1:
        return (max(1, round(shape[0] * held / parties)),)
    down, right = run.columns.grid or default_grid(parties)
    return (shape[0] * held, -(-shape[1] // down), -(-shape[2] // right))


def _width(name: str, shape: Shape, classes: int) -> int:
    """Of a network's features."""
    if not _is_network(name):
        return 0
    with torch.device("meta"):
        return int(getattr(getattr(models.build(name, shape, classes), "head", None), "in_features", 64))


def _taught(run: RunConfig, shape: Shape) -> str:
    """The server's pretrained network, if it is one of ours; else a small one in its place."""
    pool = {*(run.models.pool or ())}
    usual = pool.pop() if len(pool) == 1 else COMMON["image" if len(shape) == 3 else "table"][0]
    return run.pretrained.model if run.pretrained.model in MODELS else usual


def _pretraining(
    run: RunConfig, method: Method, scene: Scene, shape: Shape, classes: int, rate: float | None
) -> tuple[tuple[str, Cost], ...]:
    """Of the server's model, which is kept: once for all runs that share it."""
    own = run.pretrained
    taught = getattr(scene.cfg, "taught", bool({"pretrained server model", "pretrained encoder"} & {*method.needs}))
    if (
        (method.setting == "vertical")
        or not (taught and scene.server)
        or own.file
        or own.model is None
        or own.model not in {*MODELS, AUTO}
    ):
        return ()
    name = _taught(run, shape)
    if not _is_network(name):
        return ()
    work = epochs(scene.server, own.batch_size, own.epochs)
    norm = own.norm or (run.models.norm if own.model == AUTO else None)
    key = f"{run.data.name} {scene.server} {name} {norm} {own.epochs} {own.batch_size} {own.lr} {own.seed}"
    return ((key, speed(name, shape, classes, norm).cost(work, rate)),)


def _is_network(name: str) -> bool:
    return name not in BLACK_BOXES
