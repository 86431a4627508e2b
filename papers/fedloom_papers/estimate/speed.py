"""The cost of a pass through a network: counted operations and timed seconds."""

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
"""Assumed operations per second of convolutions on one GPU of the H100 class."""
GPU_STEP = 1e-3
"""Assumed minimum seconds of a step on it, one party after the other."""
DIRECT = 3e8
"""Operations of the largest step that is timed; larger ones are extrapolated from `REFERENCE`."""
LARGE = 1_000_000
"""Number of weights of the largest network that is timed."""
WEIGHT = 2e-8
"""Seconds per step for each weight of a larger network."""
REFERENCE = ("resnet8", (3, 32, 32))
"""The network whose seconds per operation stand for those of larger ones."""


@dataclass(frozen=True)
class Passes:
    """Rows that pass through networks, and the time of everything.

    Attributes:
        trained: rows of training steps.
        steps: number of training steps.
        asked: rows of forward passes alone.
        asks: number of batches of these.
        seconds: CPU seconds, including all other work.
    """

    trained: float = 0.0
    steps: float = 0.0
    asked: float = 0.0
    asks: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> "Passes":
        return Passes(*(a * times for a in astuple(self)))

    def minus(self, other: "Passes") -> "Passes":
        """The difference, clipped at 0."""
        return Passes(
            *(max(0.0, a - b) for a, b in zip(astuple(self), astuple(other), strict=True))
        )


@dataclass(frozen=True)
class NetworkSpeed:
    """Operations per row (forward, training step), and seconds per step and row (training,
    forward).
    """

    forward: float
    training: float
    step: float
    trained: float
    ask: float
    asked: float

    def seconds(self, work: Passes) -> float:
        """CPU seconds of the passes alone."""
        rows = work.trained * self.trained + work.asked * self.asked
        return rows + work.steps * self.step + work.asks * self.ask

    def gpu(self, work: Passes) -> float:
        """Rough seconds on a GPU."""
        flops = work.asked * self.forward + work.trained * self.training
        return flops / GPU_RATE + (work.steps + work.asks) * GPU_STEP


@lru_cache(maxsize=256)
def speed(name: str, shape: Shape, classes: int, norm: Norm | None) -> NetworkSpeed:
    """Time a few training steps and forward passes of a network, once per process.

    Raises:
        ModelError: there is no such network for rows of this shape.
    """
    forward, training, weights = flops(name, shape, classes, norm)
    if 2 * training > DIRECT or weights > LARGE:
        like = speed(*REFERENCE, 10, None)
        trained = like.trained * training / like.training
        asked = like.asked * forward / like.forward
        return NetworkSpeed(
            forward, training, like.step + WEIGHT * weights, trained, like.ask, asked
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            network = Network(models.build(name, shape, classes, norm=norm, seed=0), Adam(1e-3))
            many = int(min(64, max(4, DIRECT // training)))
            x, y = torch.randn(2 * many, *shape), torch.zeros(2 * many, dtype=torch.int64)

            def learn(rows: int) -> object:
                return network.minimize(lambda: F.cross_entropy(network(x[:rows]), y[:rows]))

            step, trained = _line(learn, many)
            ask, asked = _line(lambda rows: network.infer(x[:rows]), 2 * many)
    finally:
        torch.set_num_threads(threads)
    return NetworkSpeed(forward, training, step, trained, ask, asked)


def _line(work: Callable[[int], object], rows: int) -> tuple[float, float]:
    """Seconds per call and per row, from calls with 2 and with `rows` rows."""
    small, large = _seconds(lambda: work(2)), _seconds(lambda: work(rows))
    row = max(0.0, large - small) / (rows - 2)
    return max(0.0, small - 2 * row), row


def _seconds(work: Callable[[], object]) -> float:
    """Median CPU seconds of a call, after a warm-up."""
    work()
    found: list[float] = []
    while len(found) < 7 and sum(found) < 0.1:
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return statistics.median(found)


@lru_cache(maxsize=256)
def flops(name: str, shape: Shape, classes: int, norm: Norm | None) -> tuple[float, float, int]:
    """Operations per row (forward, training step), counted without computation, and the number of
    weights.

    Raises:
        ModelError: there is no such network for rows of this shape.
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
