"""Federation: the primitives of a round, the ledger, and the handling of failed calls.

A method's round runs at one party: a server, the active party, or a coordinator that only sets the order of calls. It
calls the other parties with `call`, lets them exchange messages with `exchange`, and draws participants with `sample`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.engine import Engine, Failure, reply_problem
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.fixed_point import LEAST, decoded, encoded, size, threshold, totaled
from fedloom.core.graphs import Others
from fedloom.core.ledger import Ledger
from fedloom.core.message import Shape, Template
from fedloom.core.party import Party
from fedloom.core.rng import stream


@dataclass(frozen=True)
class CallFailure:
    """A failed call: its round, party and kind, the reason, and the party's traceback (for the run's log only)."""

    round: int
    party: str
    kind: str
    reason: str
    trace: str = ""


@dataclass(frozen=True)
class SecureMean:
    """The result of `Federation.sum`.

    Attributes:
        mean: the weighted mean of the replies, a float32 tree without the weight.
        weight: the sum of all weights.
        ids: the parties whose replies are part of it.
    """

    mean: Any
    weight: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Total:
    """The result of `Federation.total`.

    Attributes:
        value: the sum of the replies, a tree of int64 tensors.
        ids: the parties whose replies are part of it.
    """

    value: Any
    ids: tuple[int, ...]


class Federation:
    """Calls the parties of an engine and records their messages.

    Args:
        engine: holds the parties.
        seed: the run's seed.
        coordinator: the ledger name of the party that runs the round.
        graph: the peers that each peer may exchange messages with; None for a complete graph.
        param_shapes: names and shapes of the network's parameters, without values, if all parties have one network.
        colocated: parties in the coordinator's organization, such as the active party's own columns. Messages between
            them and the coordinator are not counted.

    Attributes:
        round: the current round; set by the run.
        ledger: all messages so far.
        failures: all failed calls so far.
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
        self.usable: set[tuple[str, str]] = set()  # party and kind of each usable reply
        self._round = 0
        self._calls = 0

    @property
    def round(self) -> int:
        """The current round."""
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
            shared: arguments for all parties.
            each: further arguments by id.
            expect: the template of a valid reply; replies of another structure, dtype or shape are dropped.
            expects: templates by id, instead of `expect`.
            check: called with the id and the reply of each party whose reply fits and is finite. It raises MessageError
                to refuse the reply; the text appears in the run's log only.
            min_replies: the least number of replies that the step needs.

        Returns:
            The valid replies by id. A party that failed, or whose reply is malformed or not finite, is left out and
            recorded in `failures`. `{}` if there are fewer than `min_replies`.

        Raises:
            MethodError: every party raised, which means an error in the page; the page does not define the method; or
                both `expect` and `expects` are given.
        """
        _check_callable(method)
        if expects is not None and expect is not object:
            raise MethodError(f"the call of {method!r} has both expect and expects; pass only one of them")
        ids = list(parties)
        common = dict(shared or {})
        if each:
            for i in ids:
                self._record(i, method, {**common, **each[i]}, down=True)
        else:
            self._record_shared([i for i in ids if i not in self.colocated], method, common)
        replies = self.engine.call(ids, method, common, each, self._next())
        if ids and all(isinstance(r, Failure) and r.trace and not r.injected for r in replies):
            trace = replies[0].trace  # type: ignore[union-attr]
            raise MethodError(f"every party failed in {method!r}; traceback of the first:\n{trace}")
        valid: dict[int, Any] = {}
        for i, reply in zip(ids, replies, strict=True):
            failure = reply_problem(reply, expect if expects is None else expects[i])
            if failure is None and check is not None:
                try:
                    check(i, reply)
                except MessageError as error:
                    failure = Failure("refused", str(error))
            if failure is None:
                self._record(i, method, reply, down=False)
                self.usable.add((self.engine.name(i), method))
                valid[i] = reply
            else:
                self._fail(self.engine.name(i), method, failure)
        if len(valid) < min_replies:
            self._fail(self.coordinator, method, Failure(f"fewer than {min_replies} replies"))
            return {}
        return valid

    def sum(
        self,
        parties: Iterable[int],
        method: str,
        *,
        expect: Template,
        shared: Mapping[str, Any] | None = None,
        weight: str | None = None,
        min_replies: int = 0,
    ) -> SecureMean | None:
        """One message to each party, and the weighted mean of their replies, none of which anybody sees alone.

        At nodes the coordinator gets masked replies that only their sum unmasks: see `fedloom.protect.masks`. Replies
        are rounded to steps of 2^-24 and added as integers, so every engine gives the same bits.

        Args:
            parties: their ids, at least 3.
            method: the name of the method that the message calls; the page lists it in `SUMMED`.
            expect: the template of a valid reply, tensors of floats with every dimension known. A party checks its own
                reply by it.
            shared: arguments for all parties.
            weight: the name of the weight in a reply, such as `rows`; None for equal weights.
            min_replies: the least number of replies that the step needs.

        Returns:
            None if fewer than `min_replies`, or fewer than two thirds of the parties, were left.

        Raises:
            MethodError: fewer than 3 parties, or every party raised.
        """
        _check_callable(method)
        ids, common = list(parties), dict(shared or {})
        if len(ids) < LEAST:
            raise MethodError(
                f"a secure sum needs at least {LEAST} parties, not {len(ids)}: add clients, or set secure = false"
            )
        self._record_shared(ids, method, common)
        total, failures = self.engine.sum(ids, method, common, expect, weight, self._next())
        if all(f is not None and f.reason == "raised" and not f.injected for f in failures):
            trace = failures[0].trace  # type: ignore[union-attr]
            raise MethodError(f"every party failed in {method!r}; traceback of the first:\n{trace}")
        valid = [i for i, failure in zip(ids, failures, strict=True) if failure is None]
        masked = torch.empty(size(expect, weight), dtype=torch.int64, device="meta")
        for i, failure in zip(ids, failures, strict=True):
            if failure is None:
                self._record(i, method, {"masked": masked}, down=False)
                self.usable.add((self.engine.name(i), method))
            else:
                self._fail(self.engine.name(i), method, failure)
        self._record_masks(valid)
        least = max(min_replies, threshold(len(ids)))
        if total is None or len(valid) < least:
            self._fail(self.coordinator, method, Failure(f"fewer than {least} replies for a secure sum"))
            return None
        whole, mean = decoded(total, expect, weight)
        return SecureMean(mean, whole, tuple(valid))

    def total(
        self,
        parties: Iterable[int],
        method: str,
        *,
        expect: Template,
        shared: Mapping[str, Any] | None = None,
        each: Mapping[int, Mapping[str, Any]] | None = None,
        min_replies: int = 1,
    ) -> Total | None:
        """One message to each party, and the exact sum of their replies, modulo 2^64.

        Args:
            parties: their ids.
            method: the name of the method that the message calls.
            expect: the template of a valid reply: tensors of int64 with every dimension known.
            shared, each: as in `call`.
            min_replies: the least number of replies that the step needs.

        Returns:
            None if fewer than `min_replies` were left.

        Raises:
            MethodError: as in `call`.
        """
        replies = self.call(
            parties, method, shared=shared, each=each, expect=expect, min_replies=max(1, min_replies)
        )  # fmt: skip
        if not replies:
            return None
        first, *others = (encoded(reply, None, len(replies)) for reply in replies.values())
        return Total(totaled(sum(others, first), expect), tuple(replies))

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
        """Messages between neighbours; the coordinator does not see their content.

        Peer i asks every j in `links[i]`. Each j runs `answer`, and i runs `take` with `inbox`, the valid answers by
        the neighbour's id as text. If `ask` names a method, i runs it first, and `answer` gets its reply as `asked` and
        i as `by`. All answers are computed before the first `take`.

        Args:
            question, expect: templates of a valid question and a valid answer.
            at_once: the largest number of answers in memory; None for all. The asking peers then run in groups of at
                least one, each group as a call of its own with its own random draws. Set it only if `take` changes
                nothing that `ask` or `answer` reads, as each group takes before the next one asks.

        Raises:
            MethodError: a link is not in the graph, or leads from a peer to itself; nothing was sent.
        """
        for method in filter(None, (ask, answer, take)):
            _check_callable(method)
        self._check_links(links)
        common = dict(shared or {})
        if common:
            self._record_shared(links, take, common)
        for group in _groups(links, at_once):
            for d in self.engine.exchange(group, ask, answer, take, common, question, expect, self._next()):
                sender, receiver = self.engine.name(d.sender), self.engine.name(d.receiver)
                if d.failure is None:
                    self.ledger.add(self.round, sender, receiver, d.kind, d.what, d.size)
                    self.usable.add((sender, d.kind))
                else:
                    self._fail(sender, d.kind, d.failure)

    def sample(self, parties: Sequence[int], k: int | None, t: int) -> tuple[int, ...]:
        """Draw `k` of the parties (None: all), in order; every method on this seed draws the same."""
        if k is None or k >= len(parties):
            return tuple(parties)
        chosen = stream(self.seed, "participants", t).choice(len(parties), k, replace=False)
        return tuple(parties[i] for i in sorted(chosen))

    def neighbours(self, i: int, among: Iterable[int]) -> tuple[int, ...]:
        """The neighbours of peer i in `among`, in that order."""
        near = None if self.graph is None else self.graph.get(i, frozenset())
        return tuple(j for j in among if (j != i if near is None else j in near))

    def sample_peers(self, peers: Sequence[int], k: int | None, t: int) -> dict[int, list[int]]:
        """Draw `k` neighbours of each peer (None: all) among the peers, sorted: links for `exchange`.

        Drawn from (seed, t, peer), so all methods on this seed draw the same.
        """
        links, present = {}, sorted(peers)
        position = {i: n for n, i in enumerate(present)}
        for i in peers:
            near: Sequence[int] = Others(len(present), position[i])  # positions; a complete graph is never listed
            if self.graph is not None:
                near = [position[j] for j in sorted(self.graph.get(i, ())) if j in position]
            drawn: Sequence[int] = range(len(near))
            if k is not None and k < len(near):
                drawn = sorted(stream(self.seed, "links", t, i).choice(len(near), k, replace=False).tolist())
            links[i] = [present[near[n]] for n in drawn]
        return links

    def choose_peers(self, peers: Sequence[int], method: str, shared: Mapping[str, Any]) -> dict[int, list[int]]:
        """Links for `exchange` that the peers choose themselves. The coordinator learns the links and nothing else.

        `method` gets `here`, a mask (m,) of the peers that are present, and returns a mask (m,) of the peers to ask.
        Peers that are absent or no neighbours are ignored.
        """
        here = torch.zeros(max(self.engine.ids) + 1, dtype=torch.bool)
        here[list(peers)] = True
        replies = self.call(peers, method, shared={**shared, "here": here}, expect=Shape("bool", len(here)))
        present = sorted(peers)
        masks = {i: mask.tolist() for i, mask in replies.items()}
        return {i: [j for j in self.neighbours(i, present) if mask[j]] for i, mask in masks.items()}

    def _check_links(self, links: Mapping[int, Sequence[int]]) -> None:
        for i, neighbours in links.items():
            for j in neighbours:
                if i == j:
                    raise MethodError(f"peer {i} cannot exchange messages with itself; remove it from its own links")
                if self.graph is not None and j not in self.graph.get(i, ()):
                    raise MethodError(
                        f"peer {j} is not a neighbour of peer {i}; choose from fed.neighbours({i}, clients)"
                    )

    def _next(self) -> tuple[int, int]:
        self._calls += 1
        return self.round, self._calls - 1

    def _record(self, i: int, kind: str, tree: Any, *, down: bool) -> None:
        """Record one message between the coordinator and party i, unless they are colocated."""
        if i not in self.colocated:
            ends = (self.coordinator, self.engine.name(i))
            self.ledger.record(self.round, *(ends if down else ends[::-1]), kind, tree)

    def _record_shared(self, receivers: Iterable[int], kind: str, tree: Mapping[str, Any]) -> None:
        """Record one message to each receiver, all with the same content."""
        what, size = message.describe(tree), message.size(tree)
        for i in receivers:
            self.ledger.add(self.round, self.coordinator, self.engine.name(i), kind, what, size)

    def _record_masks(self, parties: Sequence[int]) -> None:
        """Record what a secure sum of these parties sends besides: keys, sealed shares, signatures, opened shares."""
        n = len(parties)
        if n == 0:
            return
        up = {"keys": 136, "sealed": 82 * (n - 1), "signature": 72, "opened": 33 * n}
        down = {"keys": 136 * n, "sealed": 82 * (n - 1), "signatures": 72 * n}
        for parts, is_down in ((down, True), (up, False)):
            tree = {name: torch.empty(count, dtype=torch.uint8, device="meta") for name, count in parts.items()}
            for i in parties:
                self._record(i, "masks", tree, down=is_down)

    def _fail(self, party: str, kind: str, failure: Failure) -> None:
        self.failures.append(CallFailure(self.round, party, kind, failure.reason, failure.trace))


def _groups(links: Mapping[int, Sequence[int]], at_once: int | None) -> Iterator[dict[int, Sequence[int]]]:
    """The links in groups of at most `at_once` answers; a peer with more forms a group of its own."""
    group: dict[int, Sequence[int]] = {}
    answers = 0
    for i, neighbours in links.items():
        if group and at_once is not None and answers + len(neighbours) > at_once:
            yield group
            group, answers = {}, 0
        group[i] = neighbours
        answers += len(neighbours)
    yield group


def _check_callable(method: str) -> None:
    """Raise MethodError for methods of Party, such as `state`: messages call methods of the page only."""
    if hasattr(Party, method) or method in EVALUATIONS:
        raise MethodError(f"no message may call {method!r}, a method of every Party; rename the page's own method")
