"""Federation: the three primitives of a round, the ledger, and what happens when a reply is missing.

A method's round is written in the place of one party, its home: a server, the party with the labels, or a
coordinator that only sets the clock. It speaks to the others through `call`, lets them speak to each other
through `exchange`, and draws participants with `sample`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom import message
from fedloom.engines.base import Engine, Failure, verdict
from fedloom.errors import MethodError
from fedloom.ledger import Ledger
from fedloom.message import Template
from fedloom.party import Party
from fedloom.rng import stream


@dataclass(frozen=True)
class Trouble:
    """A call that failed: where, why, and the party's own trace (for the run's own log only)."""

    round: int
    party: str
    kind: str
    reason: str
    trace: str = ""


class Federation:
    """Speaks to the parties that an engine holds.

    Attributes:
        round: the round under way; the run sets it.
        ledger: every message so far.
        failures: every failed call so far.
    """

    def __init__(self, engine: Engine, *, seed: int = 0, home: str = "server") -> None:
        self.engine = engine
        self.seed = seed
        self.home = home
        self.ledger = Ledger()
        self.failures: list[Trouble] = []
        self._round = 0
        self._calls = 0

    @property
    def round(self) -> int:
        """The round under way."""
        return self._round

    @round.setter
    def round(self, t: int) -> None:
        self._round, self._calls = t, 0

    def call(
        self,
        parties: Iterable[int],
        method: str,
        *,
        shared: Mapping[str, Any] | None = None,
        each: Mapping[int, Mapping[str, Any]] | None = None,
        expect: Template = object,
        need: int = 0,
    ) -> dict[int, Any]:
        """One message to each party, one reply from each, in order.

        Args:
            parties: their ids.
            method: the name of the method that the message calls.
            shared: arguments that are the same for all.
            each: further arguments by id.
            expect: a template of a good reply; one of another structure, dtype or shape is dropped.
            need: how many replies the step makes sense with.

        Returns:
            The good replies by id. A party that failed, or whose reply is malformed or not finite, is
            left out and counted in `failures`. With fewer than `need`, nothing: `{}`.

        Raises:
            MethodError: every party raised, which is a mistake in the page and not a party's; or the method is
                not one that the page defines.
        """
        _of_the_page(method)
        ids = list(parties)
        common = dict(shared or {})
        if each:
            for i in ids:
                self.ledger.record(self.round, self.home, self.engine.name(i), method, {**common, **each[i]})
        else:
            self._same(ids, method, common)
        replies = self.engine.call(ids, method, common, each, self._next())
        if ids and all(isinstance(r, Failure) and r.trace and not r.injected for r in replies):
            trace = replies[0].trace  # type: ignore[union-attr]
            raise MethodError(f"every party failed in {method!r}; the first one:\n{trace}")
        good: dict[int, Any] = {}
        for i, reply in zip(ids, replies, strict=True):
            failure = verdict(reply, expect)
            if failure is None:
                self.ledger.record(self.round, self.engine.name(i), self.home, method, reply)  # type: ignore[arg-type]
                good[i] = reply
            else:
                self._failed(self.engine.name(i), method, failure)
        if len(good) < need:
            self._failed(self.home, method, Failure(f"fewer than {need} replies"))
            return {}
        return good

    def exchange(
        self,
        links: Mapping[int, Sequence[int]],
        *,
        answer: str,
        take: str,
        ask: str | None = None,
        shared: Mapping[str, Any] | None = None,
        expect: Template = object,
    ) -> None:
        """Neighbour to neighbour: what crosses never passes through here.

        Peer i asks every j in `links[i]`. Each j runs `answer` (given i's question as `asked`, and `by`,
        if `ask` names the method of i that puts it), and i runs `take` with `inbox`, the good answers by
        the neighbour's id as text. All answers are made before any is taken.
        """
        for method in filter(None, (ask, answer, take)):
            _of_the_page(method)
        put = dict(shared or {})
        if put:
            self._same(links, take, put)
        log = self.engine.exchange(links, ask, answer, take, put, expect, self._next())
        for d in log:
            sender, receiver = self.engine.name(d.sender), self.engine.name(d.receiver)
            if d.failure is None:
                self.ledger.add(self.round, sender, receiver, d.kind, d.what, d.size)
            else:
                self._failed(sender, d.kind, d.failure)

    def sample(self, parties: Sequence[int], k: int | None, t: int) -> tuple[int, ...]:
        """`k` of the parties (all, if None), in their order; the same for every method on this seed."""
        if k is None or k >= len(parties):
            return tuple(parties)
        chosen = stream(self.seed, "participants", t).choice(len(parties), k, replace=False)
        return tuple(parties[i] for i in sorted(chosen))

    def _next(self) -> tuple[int, int]:
        self._calls += 1
        return self.round, self._calls - 1

    def _same(self, receivers: Iterable[int], kind: str, tree: Mapping[str, Any]) -> None:
        """Record one message that goes to many."""
        what, size = message.describe(tree), message.size(tree)
        for i in receivers:
            self.ledger.add(self.round, self.home, self.engine.name(i), kind, what, size)

    def _failed(self, party: str, kind: str, failure: Failure) -> None:
        self.failures.append(Trouble(self.round, party, kind, failure.reason, failure.trace))


def _of_the_page(method: str) -> None:
    """A message may call what a page defines, and nothing of the core's, such as a party's whole state."""
    if hasattr(Party, method):
        raise MethodError(
            f"{method!r} belongs to every Party: no message may call it; give the page's own another name"
        )
