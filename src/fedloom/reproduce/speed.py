"""What a pass through a network costs: its operations, counted once, and its seconds, timed here."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedloom import models
from fedloom.core.network import Network
from fedloom.core.optim import Adam
from fedloom.models import Norm
from fedloom.reproduce.passes import Passes

Shape: TypeAlias = tuple[int, ...]
GPU_RATE = 1e13
"""Operations a second that convolutions keep up on one GPU of the H100's class: assumed, not measured."""
GPU_STEP = 1e-3
"""Seconds of a step there at the least, of one party after the other."""
CALL, SETUP, PARTY = 2.5e-4, 0.25, 2e-3
"""Seconds of a message here, of the beginning of a run, and of making a party: measured on digits."""
JUDGE = 1.5
"""Seconds until what judges methods with columns is imported."""
DIRECT = 3e8
"""Operations of the largest step that is timed; beyond, a network that is alike tells how fast they are."""
LARGE = 1_000_000
"""Weights of the largest network that is timed."""
WEIGHT = 2e-8
"""Seconds that a step takes for each weight of a larger one."""
LIKE = ("resnet8", (3, 32, 32))
"""That network."""


@dataclass(frozen=True)
class Cost:
    """What runs come to.

    Attributes:
        passes: of one row forward through a network; a row in a training step counts 3.
        flops: floating-point operations of matrix products and convolutions, a product and its addition as two.
        seconds: on one core of this machine.
        gpu: seconds on one GPU, roughly: see `GPU_RATE`, `GPU_STEP`.
        once: a pretraining that other runs may share, by what it is.
    """

    passes: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    gpu: float = 0.0
    once: tuple[tuple[str, Cost], ...] = ()

    def __add__(self, other: Cost) -> Cost:
        """Both; a pretraining that they share counts once."""
        mine, theirs = self, other
        return Cost(
            mine.passes + theirs.passes,
            mine.flops + theirs.flops,
            mine.seconds + theirs.seconds,
            mine.gpu + theirs.gpu,
            tuple(sorted({**dict(mine.once), **dict(theirs.once)}.items(), key=lambda item: item[0])),
        )

    def whole(self) -> Cost:
        """With the pretraining."""
        return sum((cost for _, cost in self.once), replace(self, once=()))


@dataclass(frozen=True)
class Speed:
    """Of one network: operations of a row, forward and in a training step; and seconds a step and a row."""

    forward: float
    training: float
    step: float
    trained: float
    ask: float
    asked: float

    def cost(self, work: Passes, rate: float | None) -> Cost:
        """What passes of it come to, at so many operations a second or as fast as here."""
        flops = work.asked * self.forward + work.trained * self.training + work.beside
        seconds = work.steps * self.step + work.asks * self.ask + work.calls * CALL
        if rate:
            seconds += flops / rate
        else:
            seconds += work.trained * self.trained + work.asked * self.asked + work.beside / _products()
        gpu = flops / GPU_RATE + (work.steps + work.asks) * GPU_STEP
        return Cost(work.asked + 3 * work.trained, flops, seconds, gpu)


@lru_cache(maxsize=256)
def speed(name: str, shape: Shape, classes: int, norm: Norm | None) -> Speed:
    """How fast a network is here: a few steps of 2 rows and of more, timed once in a process.

    Raises:
        ModelError: there is no such network for such rows.
    """
    forward, training, weights = flops(name, shape, classes, norm)
    if 2 * training > DIRECT or weights > LARGE:
        like = speed(*LIKE, 10, None)
        trained, asked = like.trained * training / like.training, like.asked * forward / like.forward
        return Speed(forward, training, like.step + WEIGHT * weights, trained, like.ask, asked)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        network = Network(models.build(name, shape, classes, norm=norm, seed=0), Adam(1e-3))
        many = int(min(64, max(4, DIRECT // training)))

        def learn(rows: int) -> Callable[[], object]:
            x, y = torch.randn(rows, *shape), torch.zeros(rows, dtype=torch.int64)
            return lambda: network.minimise(lambda: F.cross_entropy(network(x), y))

        def answer(rows: int) -> Callable[[], object]:
            x = torch.randn(rows, *shape)
            return lambda: network.infer(x)

        with torch.random.fork_rng(devices=[]):
            step, trained = _line(learn(2), learn(many), many)
            ask, asked = _line(answer(2), answer(2 * many), 2 * many)
    finally:
        torch.set_num_threads(threads)
    return Speed(forward, training, step, trained, ask, asked)


def _line(few: Callable[[], object], more: Callable[[], object], rows: int) -> tuple[float, float]:
    """Seconds of a call itself and of each row, from calls with 2 rows and with more."""
    small, large = _seconds(few), _seconds(more)
    row = max(0.0, large - small) / (rows - 2)
    return max(0.0, small - 2 * row), row


def _seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call: the median of a few, after a first that nobody counts."""
    work()
    found: list[float] = []
    while len(found) < 7 and sum(found) < 0.1:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


@lru_cache(maxsize=1)
def _products() -> float:
    """Operations a second of a matrix product here."""
    a = torch.randn(256, 256)
    return 2 * 256**3 / _seconds(lambda: a @ a)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts floating-point operations as they are done: torch's own counter, but it looks at what counts alone.

    Attributes:
        total: of matrix products and convolutions so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += int(count(*args, **(kwargs or {}), out_val=out))
        return out


@lru_cache(maxsize=256)
def flops(name: str, shape: Shape, classes: int, norm: Norm | None) -> tuple[float, float, int]:
    """Floating-point operations of a row, forward and in a training step, counted without any being done; and weights.

    Raises:
        ModelError: there is no such network for such rows.
    """
    with torch.device("meta"):
        network = models.build(name, shape, classes, norm=norm)
        x = torch.empty(2, *shape)
        with Operations() as forward:
            out = network(x)
        with Operations() as back:
            out.sum().backward()
    once = forward.total / 2
    return once, once + back.total / 2, sum(p.numel() for p in network.parameters())
