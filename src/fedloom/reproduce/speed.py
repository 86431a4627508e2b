"""The cost of a pass through a network: counted operations and timed seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import lru_cache
from typing import TypeAlias

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedloom import models
from fedloom.core.network import Network
from fedloom.core.optim import Adam
from fedloom.models import Norm

Shape: TypeAlias = tuple[int, ...]
GPU_RATE = 1e13
"""Operations a second that convolutions keep up on one GPU of the H100's class: assumed, not measured."""
GPU_STEP = 1e-3
"""Seconds of a step there at the least, of one party after the other."""
DIRECT = 3e8
"""Operations of the largest step that is timed; beyond, a network that is alike tells how fast they are."""
LARGE = 1_000_000
"""Weights of the largest network that is timed."""
WEIGHT = 2e-8
"""Seconds that a step takes for each weight of a larger one."""
LIKE = ("resnet8", (3, 32, 32))
"""That network."""


@dataclass(frozen=True)
class Passes:
    """Rows that go through networks, and how long all of it took.

    Attributes:
        trained: rows that went forward and back.
        steps: batches of these, and updates of weights.
        asked: rows that went forward alone.
        asks: batches of these.
        seconds: of a core, with all that is done beside the networks.
    """

    trained: float = 0.0
    steps: float = 0.0
    asked: float = 0.0
    asks: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Passes:
        return Passes(*(a * times for a in astuple(self)))

    def minus(self, other: Passes) -> Passes:
        """What is left of it, nothing below zero."""
        return Passes(*(max(0.0, a - b) for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class NetworkSpeed:
    """Of one network: operations of a row, forward and in a training step; and seconds a step and a row."""

    forward: float
    training: float
    step: float
    trained: float
    ask: float
    asked: float

    def seconds(self, work: Passes) -> float:
        """Of a core, for the passes alone."""
        rows = work.trained * self.trained + work.asked * self.asked
        return rows + work.steps * self.step + work.asks * self.ask

    def gpu(self, work: Passes) -> float:
        """Seconds on a GPU."""
        flops = work.asked * self.forward + work.trained * self.training
        return flops / GPU_RATE + (work.steps + work.asks) * GPU_STEP


@lru_cache(maxsize=256)
def speed(name: str, shape: Shape, classes: int, norm: Norm | None) -> NetworkSpeed:
    """How fast a network is here: a few steps of 2 rows and of more, timed once in a process.

    Raises:
        ModelError: there is no such network for such rows.
    """
    forward, training, weights = flops(name, shape, classes, norm)
    if 2 * training > DIRECT or weights > LARGE:
        like = speed(*LIKE, 10, None)
        trained, asked = like.trained * training / like.training, like.asked * forward / like.forward
        return NetworkSpeed(forward, training, like.step + WEIGHT * weights, trained, like.ask, asked)
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
    return NetworkSpeed(forward, training, step, trained, ask, asked)


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


@lru_cache(maxsize=256)
def flops(name: str, shape: Shape, classes: int, norm: Norm | None) -> tuple[float, float, int]:
    """Floating-point operations of a row, forward and in a training step, counted without any being done; and weights.

    Raises:
        ModelError: there is no such network for such rows.
    """
    with torch.device("meta"):
        network = models.build(name, shape, classes, norm=norm)
        x = torch.empty(2, *shape)
        with FlopCounterMode(display=False) as forward:
            out = network(x)
        with FlopCounterMode(display=False) as back:
            out.sum().backward()
    once = forward.get_total_flops() / 2
    return once, once + back.get_total_flops() / 2, sum(p.numel() for p in network.parameters())
