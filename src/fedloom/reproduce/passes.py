"""How often rows go through networks: the unit in which `fedloom.reproduce.cost` reckons, and a run's numbers."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True)
class Passes:
    """Work of networks of one kind.

    Attributes:
        trained: rows that went forward and back.
        steps: batches of these, and updates of weights.
        asked: rows that went forward alone.
        asks: batches of these.
        beside: floating-point operations outside of the networks that count.
        calls: messages that were answered.
    """

    trained: float = 0.0
    steps: float = 0.0
    asked: float = 0.0
    asks: float = 0.0
    beside: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Passes) -> Passes:
        return Passes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, times: float) -> Passes:
        return Passes(*(a * times for a in astuple(self)))


@dataclass(frozen=True)
class Scene:
    """The numbers of a run.

    Attributes:
        cfg: the method's config.
        rounds: how many.
        clients: all of them; `present` train, `chosen` of them a round, and each may ask `near` others.
        rows: of a client; or, of a party with columns, all it has.
        aligned: rows that all parties with columns have.
        classes: how many.
        public: rows that everybody holds; `server` that the server alone has; `test` that all are tested on, and
            `own_test` that each is besides.
        groups: architectures among the clients.
        even: whether all clients have as many rows.
        width: of a network's features.
    """

    cfg: Any
    rounds: int
    clients: int
    present: int
    chosen: int
    near: int
    rows: int
    aligned: int
    classes: int
    public: int
    server: int
    test: int
    own_test: int
    groups: int
    even: bool
    width: int

    def links(self, most: int | None) -> int:
        """How many neighbours a peer asks, at most so many."""
        return self.near if most is None else min(most, self.near)

    def epochs(self, number: float, rows: float | None = None) -> Passes:
        """So many passes over a client's own rows, in full batches: on average half of one is filled up."""
        rows, size = self.rows if rows is None else rows, self.cfg.batch_size
        steps = -(-rows // size) if self.even else max(1.0, rows / size + 0.5)
        return train(steps * size, steps) * number


def train(rows: float, steps: float = 1.0) -> Passes:
    """So many rows forward and back, in so many steps."""
    return Passes(trained=rows, steps=steps)


def ask(rows: float, asks: float = 1.0) -> Passes:
    """So many rows forward."""
    return Passes(asked=rows, asks=asks)


def calls(number: float) -> Passes:
    """So many messages answered."""
    return Passes(calls=number)


def products(number: float) -> Passes:
    """So many products beside the networks, each with its addition."""
    return Passes(beside=2 * number)


def epochs(rows: int, size: int, number: float) -> Passes:
    """So many passes over the rows, in full batches."""
    steps = -(-rows // size)
    return train(steps * size, steps) * number
