"""A federation small enough to reason about: made-up rows, tiny networks, any method page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedloom.core.aggregate import MEAN, Aggregator, Combined
from fedloom.core.context import ClientContext, PublicSet, Rows
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.core.method import Method
from fedloom.engines import BatchedEngine, IsolatedEngine, LocalEngine
from fedloom.models.parts import Classifier

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
        return nn.Sequential(
            nn.Linear(FEATURES, width), *middle, nn.ReLU(), nn.Linear(width, CLASSES)
        )


def common(_: int = 0, *, norm: bool = False, width: int = 8) -> nn.Module:
    """The network that all begin with where a method averages weights: a `body` and a `head`, the
    same at each call.
    """
    with torch.random.fork_rng():
        torch.manual_seed(99)
        middle = [nn.BatchNorm1d(width)] if norm else []
        return Classifier(
            nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.ReLU()), width, CLASSES
        )


def contexts(
    n: int,
    *,
    seed: int = 0,
    make: Callable[[int], nn.Module] = network,
    data: Callable[[int], Rows] = lambda i: rows(20 + 10 * i, i),
    graph: Mapping[int, Sequence[int]] | None = None,
) -> list[ClientContext]:
    """The client contexts of n parties; without a graph all are neighbours."""
    public, test = PublicSet(rows(64, 77), seed, "toy"), rows(50, 88)
    return [
        ClientContext(
            id=i,
            seed=seed,
            parties=n,
            classes=CLASSES,
            neighbours=tuple(j for j in range(n) if j != i) if graph is None else tuple(graph[i]),
            data=data(i),
            public=public,
            network=partial(make, i),
            tests={"test": test},
        )
        for i in range(n)
    ]


class Toy:
    """A method on a toy federation, ready to run.

    Args:
        method: any page's.
        n: how many parties, if no `client_contexts` are given.
        isolated, batched: which engine, if not the loop.
        faults: ordered ones.
        preset: of the method, with `params` over it.
        client_contexts: of the parties; the toy's own if None, all with the `common` network if the
            method needs one.
        graph: the links; None for a complete graph.
        make: the parties' networks.
        server_side: further fields of the server's context, such as rows of its own and a
            pretrained model.
        means: how means are taken.
    """

    def __init__(
        self,
        method: Method,
        n: int = 4,
        *,
        isolated: bool = False,
        batched: bool = False,
        faults: Faults | None = None,
        preset: str = "recommended",
        client_contexts: list[ClientContext] | None = None,
        graph: Mapping[int, Sequence[int]] | None = None,
        make: Callable[[int], nn.Module] | None = None,
        server_side: Mapping[str, Any] | None = None,
        means: Aggregator = MEAN,
        **params: Any,
    ) -> None:
        make = make or (common if "one network" in method.needs else network)
        client_contexts = (
            client_contexts if client_contexts is not None else contexts(n, make=make, graph=graph)
        )
        client_contexts = [replace(context, aggregator=means) for context in client_contexts]
        self.method, self.client_contexts = method, client_contexts
        self.cfg = method.configure(preset, params)
        first = client_contexts[0]
        at_home = {
            "parties": len(client_contexts),
            "classes": CLASSES,
            "network": first.network,
            **(server_side or {}),
        }
        place = ClientContext(id=0, seed=first.seed, aggregator=means, **at_home)
        self.server: Any = method.server(self.cfg, place) if method.server else None
        builders = [partial(method.party_at(place), self.cfg, place) for place in client_contexts]
        self.engine: Any  # its replies and states are trees of any kind
        if isolated:
            self.engine = IsolatedEngine(builders, faults=faults)
        else:
            self.engine = (BatchedEngine if batched else LocalEngine)(
                [b() for b in builders], faults=faults
            )
        form = (
            {k: p.detach().to("meta") for k, p in first.build().named_parameters()}
            if "one network" in method.needs
            else None
        )
        how: dict[str, Any] = {"aggregator": means, "means": method.client.MEANS}
        self.fed = Federation(self.engine, seed=first.seed, graph=graph, param_shapes=form, **how)

    def party(self, i: int) -> Any:
        """Party i itself, where it is in this process."""
        return self.engine._parties[i]

    def run(self, rounds: int, start: int = 0, present: Sequence[int] | None = None) -> Toy:
        for t in range(start, start + rounds):
            self.fed.round = t
            for _ in self.method.round(
                self.fed, self.server, present or self.engine.ids, self.cfg, t
            ):
                pass
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every client's parameters and buffers, and all tensors of the server's state but its
        optimizer's.
        """
        found = {}
        for i, state in self.engine.states().items():
            for part in ("params", "buffers"):
                found.update({f"{i}.{k}": v.clone() for k, v in state[part].items()})
        if self.server is not None:
            state = {k: v for k, v in self.server.state().items() if k != "opt"}
            found.update(
                {f"server.{k}": v.clone() for k, v in leaves(state) if isinstance(v, torch.Tensor)}
            )
        return found


def combined(replies: Mapping[int, Any], **how: Any) -> Combined:
    """What a server gets of these replies, by the mean."""
    found = Federation(LocalEngine([])).combine(replies, **how)
    assert found is not None
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
