"""The job that all peers do, from PyTorch alone: its size, its rows, its network, and what a job
prints.

FedAvg, LeNet-5, 20 clients of 300 MNIST-shaped rows, ten batches of 32 a client and round, SGD, no
evaluation.
"""

import argparse
import functools
import json
import time
from collections.abc import Mapping
from importlib.metadata import version

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLIENTS, ROWS, BATCH, LR, ROUNDS = 20, 300, 32, 0.01, 10
SHAPE, CLASSES = (1, 28, 28), 10
HALF = 127.5  # a network sees (pixel - HALF) / HALF


@functools.cache
def pixels() -> tuple[Tensor, Tensor]:
    """All clients' rows one after the other, (6000, 1, 28, 28) uint8, and labels (6000,).

    A class is a pattern of black and white blocks under some noise: ten rounds lower the loss by a
    little, and by the same in every job that takes the same steps.
    """
    g = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (CLIENTS * ROWS,), generator=g)
    patterns = 255 * torch.randint(0, 2, (CLASSES, 1, 7, 7), generator=g)
    patterns = patterns.repeat_interleave(4, 2).repeat_interleave(4, 3)
    noise = torch.randint(0, 256, (CLIENTS * ROWS, *SHAPE), generator=g)
    return ((7 * patterns[labels] + noise) // 8).to(torch.uint8), labels


@functools.cache
def clients() -> tuple[tuple[Tensor, Tensor], ...]:
    """What each client has: inputs (300, 1, 28, 28) float32, made once, and labels (300,)."""
    x, y = pixels()
    return tuple(zip(x.float().sub_(HALF).div_(HALF).split(ROWS), y.split(ROWS), strict=True))


def lenet5() -> nn.Sequential:
    """fedloom's `lenet5`, layer by layer and, by its seed, weight by weight: 61,706 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, CLASSES),
    )


def workers() -> int:
    """The `--workers` that the job was started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=1)
    return int(parser.parse_args().workers)


class Marks(list[float]):
    """When each round ended, by the clock that all processes of a machine share."""

    def mark(self) -> None:
        self.append(time.monotonic())


def report(marks: Marks, weights: Mapping[str, Tensor], packages: tuple[str, ...]) -> None:
    """Print the job's one line: versions, the ends of its rounds, the loss of the weights before
    and after.

    The weights are the final global model's, in the order of `lenet5`.
    """
    net = lenet5()
    before = _loss(net)
    net.load_state_dict(dict(zip(net.state_dict(), weights.values(), strict=True)))
    versions = {name: version(name) for name in (*packages, "torch")}
    print(
        json.dumps(
            {"versions": versions, "marks": marks, "loss before": before, "loss": _loss(net)}
        ),
        flush=True,
    )


def _loss(net: nn.Module) -> float:
    """Mean loss on every tenth row."""
    x, y = (torch.cat(part)[::10] for part in zip(*clients(), strict=True))
    with torch.no_grad():
        return round(float(F.cross_entropy(net(x), y)), 5)
