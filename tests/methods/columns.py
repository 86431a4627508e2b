"""A vertical federation small enough to reason about: made-up people, of whom each party sees other
columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.core.context import ClientContext, Rows
from fedloom.core.engine import Failure
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import leaves, map_tensors
from fedloom.core.method import Method
from fedloom.engines import IsolatedEngine, LocalEngine

FEATURES, CLASSES, WIDTH, TESTED = 5, 3, 4, 25


def extractor(m: int, width: int = WIDTH) -> nn.Module:
    """Party m's own. Its last layer has no bias: before centering that would have a gradient of
    pure rounding.
    """
    with torch.random.fork_rng():
        torch.manual_seed(300 + m)
        return nn.Sequential(
            nn.Linear(FEATURES, 6 + m), nn.Tanh(), nn.Linear(6 + m, width, bias=False)
        )


def people(
    parties: int, aligned: int, unaligned: int, seed: int, rare: Sequence[int]
) -> tuple[Tensor, list[Rows]]:
    """Labels (aligned,); and each party's rows: the aligned people, its own, the tested ones, in a
    shuffled pool.
    """
    rng = np.random.default_rng(seed)
    y = rng.integers(CLASSES, size=aligned)
    y[: 2 * CLASSES] = np.arange(2 * CLASSES) % CLASSES  # none is missing by chance
    for k in rare:
        y[y == k] = (k + 1) % CLASSES
    tested, found = rng.integers(CLASSES, size=TESTED), []
    for _ in range(parties):
        classes = np.concatenate([y, rng.integers(CLASSES, size=unaligned), tested])
        x = (
            rng.normal(size=(len(classes), FEATURES))
            + 2 * rng.normal(size=(CLASSES, FEATURES))[classes]
        )
        order = rng.permutation(len(x))
        pool = torch.from_numpy(x[order].astype(np.float32))
        found.append(
            Rows(pool, None, torch.from_numpy(np.argsort(order)), torch.zeros(1), torch.ones(1))
        )
    return torch.from_numpy(y), found


def part(rows: Rows, first: int, last: int | None) -> Rows:
    """Some of the rows."""
    return Rows(rows.pool, rows.labels, rows.index[first:last], rows.shift, rows.scale)


@dataclass(frozen=True)
class Heard:
    """One message to a party, and its reply."""

    round: int
    party: int
    method: str
    put: Mapping[str, Any]
    reply: Any


class Columns:
    """A method with columns on that federation, ready to run.

    Args:
        method: any such page's.
        parties, aligned, unaligned, seed, rare: the federation; see `people`.
        isolated: which engine, if not the loop.
        faults: ordered ones.
        preset: of the method, with `params` over it.
        relabel: changes the active party's labels.
        make: the parties' networks.
        means: how means are taken.

    Attributes:
        heard: every message so far, as it was handed over.
    """

    def __init__(
        self,
        method: Method,
        parties: int = 3,
        *,
        aligned: int = 30,
        unaligned: int = 20,
        seed: int = 0,
        rare: Sequence[int] = (),
        isolated: bool = False,
        faults: Faults | None = None,
        preset: str = "recommended",
        relabel: Callable[[Tensor], Tensor] = lambda y: y,
        make: Callable[[int], nn.Module] = extractor,
        means: Aggregator = MEAN,
        **params: Any,
    ) -> None:
        self.method = method
        small = {"embedding_dim": WIDTH, "batch_size": 8}
        small = {name: value for name, value in small.items() if name in method.config.model_fields}
        self.cfg = method.configure(preset, {**small, **params})
        y, every = people(parties, aligned, unaligned, seed, rare)
        known = aligned + unaligned
        labels = torch.full((len(every[0].pool),), -1)
        labels[every[0].index[:aligned]] = relabel(y)
        first = every[0]
        shared: dict[str, Any] = {
            "seed": seed,
            "parties": parties,
            "classes": CLASSES,
            "aligned": aligned,
        }
        shared["aggregator"] = means
        own = Rows(first.pool, labels, first.index[:aligned], first.shift, first.scale)
        assert method.server is not None
        self.active: Any = method.server(self.cfg, ClientContext(id=0, data=own, **shared))
        self.contexts = [
            ClientContext(
                id=m,
                data=part(rows, 0, known),
                network=partial(make, m),
                tests={"test": part(rows, known, None), "own": part(rows, aligned, known)},
                **shared,
            )
            for m, rows in enumerate(every)
        ]
        builders = [partial(method.client, self.cfg, context) for context in self.contexts]
        engine: type[Any] = IsolatedEngine if isolated else LocalEngine
        self.engine: Any = engine(
            builders if isolated else [b() for b in builders], seed=seed, faults=faults
        )
        how: dict[str, Any] = {"aggregator": means, "means": method.client.MEANS}
        self.fed = Federation(self.engine, seed=seed, coordinator="active", colocated=(0,), **how)
        self.heard: list[Heard] = []
        self._listen()

    def _listen(self) -> None:
        call = self.engine.call

        def listen(ids: Any, method: Any, shared: Any, each: Any, number: Any) -> Any:
            puts: dict[int, Any] = {
                i: map_tensors(Tensor.clone, {**shared, **(each[i] if each else {})}) for i in ids
            }
            replies = call(ids, method, shared, each, number)
            self.heard += [
                Heard(
                    self.fed.round,
                    i,
                    method,
                    puts[i],
                    r if isinstance(r, Failure) else map_tensors(Tensor.clone, r),
                )
                for i, r in zip(ids, replies, strict=True)
            ]
            return replies

        self.engine.call = listen

    def party(self, m: int) -> Any:
        """Party m itself."""
        return self.engine._parties[m]

    def run(self, rounds: int = 1, start: int = 0, present: Sequence[int] | None = None) -> Columns:
        for t in range(start, start + rounds):
            self.fed.round = t
            parties = self.engine.ids if present is None else present
            for _ in self.method.round(self.fed, self.active, parties, self.cfg, t):
                pass
        return self

    def states(self) -> dict[str, Any]:
        """All leaves of everybody's state by path, copied."""
        every = {
            "active": self.active.state(),
            **{str(m): s for m, s in self.engine.states().items()},
        }
        return {k: v.clone() if isinstance(v, Tensor) else v for k, v in leaves(every)}

    def sent(self, method: str, t: int) -> dict[int, Any]:
        """The replies to that message in round t."""
        return {h.party: h.reply for h in self.heard if (h.method, h.round) == (method, t)}

    def received(self, method: str, t: int) -> dict[int, Mapping[str, Any]]:
        """What that message said to each party in round t."""
        return {h.party: h.put for h in self.heard if (h.method, h.round) == (method, t)}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two states are the same to the bit."""
    return a.keys() == b.keys() and all(
        torch.equal(x, b[k]) if isinstance(x, Tensor) else x == b[k] for k, x in a.items()
    )


def moved(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    """Whose state differs."""
    return {k.split(".")[0] for k in a if not same({k: a[k]}, {k: b[k]})}
