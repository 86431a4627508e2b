"""A round of AugFL against the loop that one writes in plain PyTorch, and its cost in gradient
evaluations.

40 clients with 20 to 40 rows of 28x28 pixels, half of them support, and no pretrained model. The
bar is Algorithm 1 with the exact product, differentiated through the step as MAML is usually
written. A gradient evaluation is one forward and backward pass of all clients over a half.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from benchmarks.timing import compare, ratio
from fedloom import models
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.engines import BatchedEngine, Engine, LocalEngine
from fedloom.methods import find

CLIENTS, CLASSES, SHAPE = 40, 10, (1, 28, 28)


class Job:
    """The method on made-up pixels, and how to do one of its rounds."""

    def __init__(self, model: str, *, batched: bool = False, **params: Any) -> None:
        method, chance = find("augfl"), np.random.default_rng(0)
        pool = torch.from_numpy(chance.integers(256, size=(CLIENTS * 40, *SHAPE), dtype=np.uint8))
        labels = torch.from_numpy(chance.integers(CLASSES, size=len(pool)))
        half = torch.full((1, 1, 1), 127.5)
        network = partial(models.build, model, SHAPE, CLASSES, seed=0)
        home = ClientContext(id=0, parties=CLIENTS, classes=CLASSES, network=network)
        counts = chance.integers(20, 41, size=CLIENTS)
        self.contexts = [
            ClientContext(
                id=i,
                parties=CLIENTS,
                classes=CLASSES,
                network=network,
                data=Rows(pool, labels, rows, half, half),
            )
            for i, count in enumerate(counts)
            for rows in (torch.arange(40 * i, 40 * i + count),)
        ]
        self.cfg = method.configure(params={"lam": 0.0, **params})
        assert method.server is not None
        self.server: Any = method.server(self.cfg, home)
        parties = [method.client(self.cfg, context) for context in self.contexts]
        engine: Engine = BatchedEngine(parties) if batched else LocalEngine(parties)
        form = {k: p.detach().to("meta") for k, p in network().named_parameters()}
        self.fed, self.method, self.t = Federation(engine, param_shapes=form), method, 0

    def round(self) -> None:
        """The next one."""
        self.fed.round = self.t
        for _ in self.method.round(self.fed, self.server, self.fed.engine.ids, self.cfg, self.t):
            pass
        self.t += 1


def box(job: Job) -> Callable[[], None]:
    """A round of Algorithm 1."""
    module, alpha, rho = job.contexts[0].build(), job.cfg.alpha, job.cfg.penalty(CLIENTS)
    theta = {k: p.detach() for k, p in module.named_parameters()}
    y = [{k: torch.zeros_like(w) for k, w in theta.items()} for _ in job.contexts]
    halves = [((s.support.x, s.support.y), (s.query.x, s.query.y)) for s in job.contexts]
    weights = [len(s.rows) / sum(len(other.rows) for other in job.contexts) for s in job.contexts]

    def loss(w: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, w, (x,)), labels)

    def round() -> None:
        nonlocal theta
        sums = {k: torch.zeros_like(w) for k, w in theta.items()}
        for dual, weight, (support, query) in zip(y, weights, halves, strict=True):
            start = {k: w.clone().requires_grad_() for k, w in theta.items()}
            inner = torch.autograd.grad(
                loss(start, *support), list(start.values()), create_graph=True
            )
            phi = {k: w - alpha * g for (k, w), g in zip(start.items(), inner, strict=True)}
            slopes = torch.autograd.grad(loss(phi, *query), list(start.values()))
            for (k, w), g in zip(theta.items(), slopes, strict=True):
                local = w - (dual[k] + weight * g) / rho
                dual[k] = dual[k] + rho * (local - w)
                sums[k] += dual[k] + rho * local
        theta = {k: total / (CLIENTS * rho) for k, total in sums.items()}

    return round


def gradients(job: Job) -> Callable[[], None]:
    """One plain gradient of every client over its support half."""
    module = job.contexts[0].build()
    halves = [(s.support.x, s.support.y) for s in job.contexts]

    def once() -> None:
        for x, y in halves:
            torch.autograd.grad(F.cross_entropy(module(x), y), list(module.parameters()))

    return once


def against_box(pairs: int) -> None:
    """Print the ratio to a loop by hand."""
    torch.set_num_threads(1)
    for model in ("mlp-large", "cnn-strided"):
        job = Job(model)
        compare(f"AugFL, {model}, a round", "a loop by hand", job.round, box(job), pairs)


def main(pairs: int = 5) -> None:
    """Print the ratios."""
    against_box(pairs)
    for model in ("mlp-large", "cnn-strided", "resnet8"):
        few = pairs if model != "resnet8" else min(pairs, 3)
        job = Job(model)
        for hvp in ("exact", "fd", "first_order"):
            _, _, rate = ratio(Job(model, hvp=hvp).round, gradients(job), few)
            print(f"  {hvp}: {rate:.1f} gradient evaluations")
        if model != "resnet8":
            _, _, rate = ratio(Job(model, batched=True).round, job.round, few)
            print(f"  batched against one after the other: {rate:.2f}")


if __name__ == "__main__":
    main()
