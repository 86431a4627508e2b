"""A federation small enough to reason about: made-up rows, tiny networks, any method page."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.engines import IsolatedEngine, LocalEngine
from fedloom.faults import Faults
from fedloom.federation import Federation
from fedloom.method import Method
from fedloom.party import Party
from fedloom.site import PublicSet, Rows, Site

FEATURES, CLASSES = 6, 4


def rows(n: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    y = rng.integers(CLASSES, size=n)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    x[np.arange(n), y] += 2.0
    one, zero = torch.ones(1), torch.zeros(1)
    return Rows(torch.from_numpy(x), torch.from_numpy(y), torch.arange(n), zero, one)


def network(n: int, *, norm: bool = False, dropout: bool = False) -> nn.Module:
    """Client n's own architecture: widths differ, and every third has no hidden layer."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + n)
        if n % 3 == 2 and not norm:
            return nn.Linear(FEATURES, CLASSES)
        width = 5 + n
        middle = [nn.BatchNorm1d(width)] if norm else []
        return nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.ReLU(), nn.Linear(width, CLASSES))


def sites(
    n: int,
    *,
    seed: int = 0,
    make: Callable[[int], nn.Module] = network,
    data: Callable[[int], Rows] = lambda i: rows(20 + 10 * i, i),
) -> list[Site]:
    public, test = PublicSet(rows(64, 77), seed, "toy"), rows(50, 88)
    return [
        Site(
            id=i,
            seed=seed,
            parties=n,
            classes=CLASSES,
            data=data(i),
            public=public,
            network=partial(make, i),
            tests={"test": test},
        )
        for i in range(n)
    ]


class Toy:
    """A method on a toy federation, ready to run."""

    def __init__(
        self,
        method: Method,
        n: int = 4,
        *,
        isolated: bool = False,
        faults: Faults | None = None,
        preset: str = "recommended",
        places: list[Site] | None = None,
        **params: Any,
    ) -> None:
        places = places if places is not None else sites(n)
        self.method = method
        self.cfg = method.configure(preset, params)
        home = Site(id=0, seed=places[0].seed, parties=len(places), classes=CLASSES)
        self.server: Party[Any] | None = method.server(self.cfg, home) if method.server else None
        builders = [partial(method.client, self.cfg, place) for place in places]
        self.engine = (
            IsolatedEngine(builders, faults=faults) if isolated else LocalEngine([b() for b in builders], faults=faults)
        )
        self.fed = Federation(self.engine)

    def run(self, rounds: int, start: int = 0) -> Toy:
        for t in range(start, start + rounds):
            self.fed.round = t
            for _ in self.method.round(self.fed, self.server, self.engine.ids, self.cfg, t):
                pass
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every client's parameters and buffers, and the server's."""
        found = {}
        for i, state in self.engine.states().items():
            for part in ("params", "buffers"):
                found.update({f"{i}.{k}": v.clone() for k, v in state[part].items()})
        if self.server is not None:
            found.update({f"server.{k}": v.clone() for k, v in self.server.params.items()})
        return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
