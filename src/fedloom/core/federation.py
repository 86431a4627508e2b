"""Federation: the three primitives of a round, the ledger, and what happens when a reply is missing.

A method's round is written in the place of one party, its home: a server, the party with the labels, or a
coordinator that only sets the clock. It speaks to the others through `call`, lets them speak to each other
through `exchange`, and draws participants with `sample`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.engine import Engine, Failure, verdict
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.graphs import Others
from fedloom.core.ledger import Ledger
from fedloom.core.message import Shape, Template
from fedloom.core.party import Party
from fedloom.core.rng import stream


@dataclass(frozen=True)
class CallFailure:
    """A call that failed: where, why, and the party's own trace (for the run's own log only)."""

    round: int
    party: str
    kind: str
    reason: str
    trace: str = ""


class Federation:
    """Speaks to the parties that an engine holds.

    Args:
        engine: holds them.
        seed: of what is drawn by chance here.
        home: the name of the party in whose place the round runs.
        graph: whom each peer may exchange messages with; None for everybody with everybody.
        form: the parameters of the network that all have, where all have one: names and shapes, no values.
        house: parties that live with the home, such as its own columns: what they say to each other crosses no border,
            so the ledger does not have it.

    Attributes:
        round: the round under way; the run sets it.
        ledger: every message so far.
        failures: every failed call so far.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        coordinator: str = "server",
        graph: Mapping[int, Sequence[int]] | None = None,
        param_shapes: Mapping[str, Tensor] | None = None,
        colocated: Iterable[int] = (),
    ) -> None:
        self.engine = engine
        self.seed = seed
        self.coordinator = coordinator
        self.param_shapes = param_shapes or {}
        self.colocated = frozenset(colocated)
        self.graph = None if graph is None else {i: frozenset(near) for i, near in graph.items()}
        self.ledger = Ledger()
        self.failures: list[CallFailure] = []
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
        expects: Mapping[int, Template] | None = None,
        check: Callable[[int, Any], None] | None = None,
        min_replies: int = 0,
    ) -> dict[int, Any]:
        """One message to each party, one reply from each, in order.

        Args:
            parties: their ids.
            method: the name of the method that the message calls.
            shared: arguments that are the same for all.
            each: further arguments by id.
            expect: a template of a good reply; one of another structure, dtype or shape is dropped.
            expects: templates by id, where good replies differ; then without `expect`.
            check: looks at what a template can't tell, in each reply that fits and is finite, given its sender's id. It
                raises MessageError to refuse the reply; the text stays in the run's own log.
            need: how many replies the step makes sense with.

        Returns:
            The good replies by id. A party that failed, or whose reply is malformed or not finite, is
            left out and counted in `failures`. With fewer than `min_replies`, nothing: `{}`.

        Raises:
            MethodError: every party raised, which is a mistake in the page and not a party's; or the method is
                not one that the page defines; or there are both `expect` and `expects`.
        """
        _of_the_page(method)
        if expects is not None and expect is not object:
            raise MethodError(
                f"the call of {method!r} has expect and expects: give one template, or one for each party"
            )
        ids = list(parties)
        common = dict(shared or {})
        if each:
            for i in ids:
                self._count(i, method, {**common, **each[i]}, down=True)
        else:
            self._same([i for i in ids if i not in self.colocated], method, common)
        replies = self.engine.call(ids, method, common, each, self._next())
        if ids and all(isinstance(r, Failure) and r.trace and not r.injected for r in replies):
            trace = replies[0].trace  # type: ignore[union-attr]
            raise MethodError(f"every party failed in {method!r}; the first one:\n{trace}")
        good: dict[int, Any] = {}
        for i, reply in zip(ids, replies, strict=True):
            failure = verdict(reply, expect if expects is None else expects[i])
            if failure is None and check is not None:
                failure = _refusal(partial(check, i, reply))
            if failure is None:
                self._count(i, method, reply, down=False)
                good[i] = reply
            else:
                self._failed(self.engine.name(i), method, failure)
        if len(good) < min_replies:
            self._failed(self.coordinator, method, Failure(f"fewer than {min_replies} replies"))
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
        question: Template = object,
        expect: Template = object,
        at_once: int | None = None,
    ) -> None:
        """Neighbour to neighbour: what crosses never passes through here.

        Peer i asks every j in `links[i]`. Each j runs `answer` (given i's question as `asked`, and `by`,
        if `ask` names the method of i that puts it), and i runs `take` with `inbox`, the good answers by
        the neighbour's id as text. All answers are made before any is taken. `question` and `expect` are
        templates of a good question and a good answer.

        Args:
            at_once: the most answers that are held at once; None for all. Those who ask are then served in groups,
                at least one a group, each group as a call of its own with its own draws by chance. Only for pages
                whose `take` changes nothing that `ask` or `answer` reads: one group takes before the next one asks.

        Raises:
            MethodError: a link is not in the graph, or leads to oneself; nothing was sent.
        """
        for method in filter(None, (ask, answer, take)):
            _of_the_page(method)
        self._check(links)
        put = dict(shared or {})
        if put:
            self._same(links, take, put)
        for group in _groups(links, at_once):
            for d in self.engine.exchange(group, ask, answer, take, put, question, expect, self._next()):
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

    def neighbours(self, i: int, among: Iterable[int]) -> tuple[int, ...]:
        """Those of `among` that peer i may speak to, in their order."""
        near = None if self.graph is None else self.graph.get(i, frozenset())
        return tuple(j for j in among if (j != i if near is None else j in near))

    def sample_peers(self, peers: Sequence[int], k: int | None, t: int) -> dict[int, list[int]]:
        """For each peer `k` of its neighbours among the peers (all, if None), rising: whom it asks in round t.

        Drawn from (seed, t, peer), so that all methods on this seed ask the same.
        """
        found, everybody = {}, sorted(peers)
        place = {i: n for n, i in enumerate(everybody)}
        for i in peers:
            near: Sequence[int] = Others(len(everybody), place[i])  # places; nothing is listed that is not drawn
            if self.graph is not None:
                near = [place[j] for j in sorted(self.graph.get(i, ())) if j in place]
            picked: Sequence[int] = range(len(near))
            if k is not None and k < len(near):
                picked = sorted(stream(self.seed, "links", t, i).choice(len(near), k, replace=False).tolist())
            found[i] = [everybody[near[n]] for n in picked]
        return found

    def choose_peers(self, peers: Sequence[int], method: str, shared: Mapping[str, Any]) -> dict[int, list[int]]:
        """Whom each peer wants to ask: links for `exchange`. The home learns who asks whom, and nothing else.

        `method` is given `here`, a mask (m,) of who is there, and answers with a mask (m,). Of it only neighbours that
        are there count.
        """
        here = torch.zeros(max(self.engine.ids) + 1, dtype=torch.bool)
        here[list(peers)] = True
        masks = self.call(peers, method, shared={**shared, "here": here}, expect=Shape("bool", len(here)))
        everybody = sorted(peers)
        wanted = {i: mask.tolist() for i, mask in masks.items()}
        return {i: [j for j in self.neighbours(i, everybody) if mask[j]] for i, mask in wanted.items()}

    def _check(self, links: Mapping[int, Sequence[int]]) -> None:
        """Refuse a link that must not be."""
        for i, asked in links.items():
            for j in asked:
                if i == j:
                    raise MethodError(f"peer {i} can't exchange with itself: leave it out of its own links")
                if self.graph is not None and j not in self.graph.get(i, ()):
                    raise MethodError(
                        f"peer {j} is no neighbour of {i}: let it ask those of fed.neighbours({i}, clients)"
                    )

    def _next(self) -> tuple[int, int]:
        self._calls += 1
        return self.round, self._calls - 1

    def _count(self, i: int, kind: str, tree: Any, *, down: bool) -> None:
        """Record one message between the home and party i, unless both are in one house."""
        if i not in self.colocated:
            ends = (self.coordinator, self.engine.name(i))
            self.ledger.record(self.round, *(ends if down else ends[::-1]), kind, tree)

    def _same(self, receivers: Iterable[int], kind: str, tree: Mapping[str, Any]) -> None:
        """Record one message that goes to many."""
        what, size = message.describe(tree), message.size(tree)
        for i in receivers:
            self.ledger.add(self.round, self.coordinator, self.engine.name(i), kind, what, size)

    def _failed(self, party: str, kind: str, failure: Failure) -> None:
        self.failures.append(CallFailure(self.round, party, kind, failure.reason, failure.trace))


def _groups(links: Mapping[int, Sequence[int]], at_once: int | None) -> Iterator[dict[int, Sequence[int]]]:
    """The links in groups of at most `at_once`, or of one peer that has more."""
    group: dict[int, Sequence[int]] = {}
    held = 0
    for i, asked in links.items():
        if group and at_once is not None and held + len(asked) > at_once:
            yield group
            group, held = {}, 0
        group[i] = asked
        held += len(asked)
    yield group


def _refusal(check: Callable[[], None]) -> Failure | None:
    """Why a page refuses a reply, or None."""
    try:
        check()
    except MessageError as error:
        return Failure("refused", str(error))
    return None


def _of_the_page(method: str) -> None:
    """A message may call what a page defines, and nothing of the core's, such as a party's whole state."""
    if hasattr(Party, method) or method in EVALUATIONS:
        raise MethodError(
            f"{method!r} belongs to every Party: no message may call it; give the page's own another name"
        )
