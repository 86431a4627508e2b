"""MNIST-shaped rows and the clients that hold them: no data set is needed to measure speed."""

from functools import partial

import torch

from fedloom import models
from fedloom.core.context import ClientContext, PublicSet, Rows

SHAPE, CLASSES = (1, 28, 28), 10


def pool(
    rows: int, seed: int = 0, shape: tuple[int, ...] = SHAPE
) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, (rows, *shape), generator=g, dtype=torch.uint8)
    return x, torch.randint(0, CLASSES, (rows,), generator=g)


def contexts(
    clients: int,
    rows: int,
    architecture: str,
    public: int = 1000,
    shape: tuple[int, ...] = SHAPE,
    device: str = "cpu",
) -> list[ClientContext]:
    x, y = (a.to(device) for a in pool(clients * rows + public, shape=shape))
    half = torch.tensor(127.5, device=device)
    part = lambda a, b: Rows(x, y, torch.arange(a, b, device=device), half, half)
    shared = PublicSet(part(clients * rows, clients * rows + public), 0, "benchmark")
    return [
        ClientContext(
            id=n,
            parties=clients,
            classes=CLASSES,
            data=part(n * rows, (n + 1) * rows),
            public=shared,
            network=partial(models.build, architecture, shape, CLASSES, seed=n),
            device=device,
        )
        for n in range(clients)
    ]
