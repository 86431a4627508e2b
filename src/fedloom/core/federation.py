"""Federation: the primitives of a round, the ledger, and the handling of failed calls.

A method's round runs at one party: a server, the active party, or a coordinator that only sets the
order of calls. It calls the other parties with `call`, lets them exchange messages with `exchange`,
and draws participants with `sample`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.aggregate import MEAN, Aggregator, Combined, Kinds, Weights
from fedloom.core.engine import Engine, Failure, reply_problem
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.fixed_point import LEAST, added, decoded, size, threshold, totaled, weight_count
from fedloom.core.graphs import Others
from fedloom.core.ledger import Ledger
from fedloom.core.message import Shape, Template
from fedloom.core.party import Party
from fedloom.core.rng import stream


@dataclass(frozen=True)
class CallFailure:
    """A failed call: its round, party and kind, the reason, and the party's traceback (for the
    run's log only).
    """

    round: int
    party: str
    kind: str
    reason: str
    trace: str = ""


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

    Example:
        >>> class Client(Party):
        ...     def add(self, *, to):
        ...         return {"sum": to + self.context.id, "rows": torch.tensor(10)}
        ...
        ...     def count(self):
        ...         return {"rows": torch.tensor([10])}
        ...
        ...     def near(self, *, here):
        ...         return here  # asks all that are present
        ...
        ...     def ask(self):
        ...         return {"x": torch.ones(2)}
        ...
        ...     def take(self, *, inbox):
        ...         assert [*inbox] == ["1"]
        >>> from fedloom import ClientContext
        >>> from fedloom.engines import LocalEngine
        >>> fed = Federation(LocalEngine([Client(None, ClientContext(id=i)) for i in range(3)]))
        >>> fed.call([0, 2], "add", shared={"to": torch.ones(1)})[2]["sum"]
        tensor([3.])
        >>> template = {"sum": Shape("float32", 1), "rows": Shape("int64")}
        >>> fed.mean([0, 1, 2], "add", shared={"to": torch.ones(1)}, expect=template, weight="rows").value
        {'sum': tensor([2.])}
        >>> replies = {i: {"sum": torch.full((1,), float(i)), "rows": torch.tensor(10)} for i in (1, 2)}
        >>> fed.combine(replies, weight="rows").ids
        (1, 2)
        >>> fed.total([0, 1, 2], "count", expect={"rows": Shape("int64", 1)}).value
        {'rows': tensor([30])}
        >>> fed.exchange({0: [1]}, answer="ask", take="take")  # peer 0 asks peer 1
        >>> len(fed.sample([0, 1, 2], 2, t=0)), fed.neighbours(0, [0, 1, 2]), fed.sample_peers([0, 1], 1, t=0)
        (2, (1, 2), {0: [1], 1: [0]})
        >>> fed.choose_peers([0, 1], "near", {}), fed.round, fed.failures
        ({0: [1], 1: [0]}, 0, [])

    Args:
        engine: holds the parties.
        seed: the run's seed.
        coordinator: the ledger name of the party that runs the round.
        graph: the peers that each peer may exchange messages with; None for a complete graph.
        param_shapes: names and shapes of the network's parameters, without values, if all parties
            have one network.
        colocated: parties in the coordinator's organization, such as the active party's own
            columns. Messages between them and the coordinator are not counted.
        aggregator: how the run takes means.
        means: the methods of the clients' page whose replies only enter means (`MEANS`); None if it
            is not known.

    Attributes:
        round: the current round; set by the run.
        ledger: all messages so far.
        failures: all failed calls so far.
        contributions: the number of means of the current round that each party is part of.
    """  # noqa: E501

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        coordinator: str = "server",
        graph: Mapping[int, Sequence[int]] | None = None,
        param_shapes: Mapping[str, Tensor] | None = None,
        colocated: Iterable[int] = (),
        aggregator: Aggregator = MEAN,
        means: Collection[str] | None = None,
    ) -> None:
        self.engine = engine
        self.seed = seed
        self.coordinator = coordinator
        self.param_shapes = param_shapes or {}
        self.colocated = frozenset(colocated)
        self.aggregator = aggregator
        self.means_of_page = means
        self.graph = None if graph is None else {i: frozenset(near) for i, near in graph.items()}
        self.ledger = Ledger()
        self.failures: list[CallFailure] = []
        self.usable: set[tuple[str, str]] = set()  # party and kind of each usable reply
        self.contributions: Counter[int] = Counter()
        self._round = self._calls = self._means = 0

    @property
    def round(self) -> int:
        """The current round."""
        return self._round

    @round.setter
    def round(self, t: int) -> None:
        self._round, self._calls, self._means = t, 0, 0
        self.contributions = Counter()

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
            expect: the template of a valid reply; replies of another structure, dtype or shape are
                dropped.
            expects: templates by id, instead of `expect`.
            check: called with the id and the reply of each party whose reply fits and is finite. It
                raises MessageError to refuse the reply; the text appears in the run's log only.
            min_replies: the least number of replies that the step needs.

        Returns:
            The valid replies by id. A party that failed, or whose reply is malformed or not finite,
            is left out and recorded in `failures`. `{}` if there are fewer than `min_replies`.

        Raises:
            MethodError: every party raised, which means an error in the page; the page does not
                define the method; or both `expect` and `expects` are given.
        """
        ids = list(parties)
        if (
            self.aggregator.hidden
            and method in (self.means_of_page or ())
            and not self.colocated.issuperset(ids)
        ):
            raise MethodError(
                f"[aggregate] {self.aggregator} hides single replies to {method!r} of MEANS: "
                "call it by fed.mean"
            )
        return self._call(ids, method, shared, each, expect, expects, check, min_replies)

    def _call(
        self,
        ids: Sequence[int],
        method: str,
        shared: Mapping[str, Any] | None,
        each: Mapping[int, Mapping[str, Any]] | None,
        expect: Template = object,
        expects: Mapping[int, Template] | None = None,
        check: Callable[[int, Any], None] | None = None,
        min_replies: int = 0,
    ) -> dict[int, Any]:
        """See `call`."""
        _check_callable(method)
        if expects is not None and expect is not object:
            raise MethodError(
                f"the call of {method!r} has both expect and expects; pass only one of them"
            )
        common = dict(shared or {})
        self._record_down(ids, method, common, each)
        replies = self.engine.call(ids, method, common, each, self._next())
        if ids and all(
            isinstance(r, Failure) and r.trace and not r.injected and r.reason != "refused"
            for r in replies
        ):
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

    def mean(
        self,
        parties: Iterable[int],
        method: str,
        *,
        expect: Template,
        shared: Mapping[str, Any] | None = None,
        each: Mapping[int, Mapping[str, Any]] | None = None,
        weight: str | None = None,
        around: Any = None,
        kind: Kinds = "values",
        read: Callable[[int, Any], Any] | None = None,
        check: Callable[[int, Any], None] | None = None,
        min_replies: int = 1,
    ) -> Combined | None:
        """One message to each party, and the mean of their replies as the run's `[aggregate]` takes
        it: the weighted mean, or by a robust rule, as a secure sum, or with noise. The page has no
        line about it.

        Args:
            parties: their ids.
            method: the name of the method that the message calls; the page's clients list it in
                `MEANS`.
            expect: the template of a valid reply. A secure sum needs tensors of floats with every
                dimension known.
            shared, each, check: as in `call`.
            weight: the name of the weight in a reply: a whole number, such as `rows`, or numbers
                (K,) for means of each class of tensors (K, ...); None for equal weights. A reply
                without a weight above 0 is refused.
            around: a tree like a reply without its weight, from which replies differ, such as the
                weights that were sent; None if there is none.
            kind: what the numbers are: see `fedloom.core.aggregate`.
            read: makes a tree of tensors of a party's id and its reply, such as by decoding. A
                secure sum has no reply
                to read: a page that cannot do without refuses it by `refuses` of its config.
            min_replies: the least number of replies that the step needs.

        Returns:
            None if fewer than `min_replies`, or fewer than the run's `[aggregate]` needs, were
            left.

        Raises:
            MethodError: as in `call`; or the page's clients do not list the method in `MEANS`.
        """
        self._check_listed(method)
        ids = list(parties)
        if self.aggregator.secure:
            return self._sum(ids, method, expect, shared, each, weight, min_replies)
        least = max(min_replies, self.aggregator.least)
        replies = self._call(
            ids, method, shared, each, expect, None, _weighted(weight, check), least
        )
        return self.combine(replies, weight=weight, around=around, kind=kind, read=read)

    def means(
        self,
        groups: Mapping[str, Sequence[int]],
        method: str,
        *,
        expect: Mapping[str, Template],
        around: Mapping[str, Any],
        shared: Mapping[str, Any] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        weight: str | None = None,
    ) -> dict[str, Combined]:
        """As `mean`, of each group of parties; `expect`, `each` and `around` are by group. Groups
        with too few replies are left out.
        """
        self._check_listed(method)
        group = {i: g for g, ids in groups.items() for i in ids}
        if self.aggregator.secure:  # each group's arguments are the same for all of its parties
            common = {g: {**(shared or {}), **(each or {}).get(g, {})} for g in groups}
            sums = {
                g: self._sum(ids, method, expect[g], common[g], None, weight)
                for g, ids in groups.items()
            }
            return {g: mean for g, mean in sums.items() if mean is not None}
        own = {i: each[g] for i, g in group.items()} if each else None
        expects = {i: expect[g] for i, g in group.items()}
        replies = self._call(
            sorted(group), method, shared, own, object, expects, _weighted(weight, None)
        )
        found = {}
        for g in groups:
            members = {i: reply for i, reply in replies.items() if group[i] == g}
            if (mean := self.combine(members, weight=weight, around=around[g])) is not None:
                found[g] = mean
        return found

    def combine(
        self,
        replies: Mapping[int, Any],
        *,
        weight: str | None = None,
        around: Any = None,
        kind: Kinds = "values",
        read: Callable[[int, Any], Any] | None = None,
    ) -> Combined | None:
        """The mean, as the run's `[aggregate]` takes it, of replies that the coordinator has, by
        id, such as the last one of each party. For the other arguments see `mean`.

        Returns:
            None if there are none with a weight above 0, or fewer than the run's `[aggregate]`
            needs.

        Raises:
            MethodError: the run has secure sums, of which the coordinator has no replies.
        """
        how = self.aggregator
        if how.secure:
            raise MethodError(
                "with aggregate.secure = true a page takes means by fed.mean, which adds masked "
                "replies"
            )
        replies = {
            i: reply
            for i, reply in replies.items()
            if weight is None or bool((reply[weight] > 0).any())
        }
        if len(replies) < max(how.least, 1):
            return None
        values = replies if read is None else {i: read(i, reply) for i, reply in replies.items()}
        weights, total = None, len(replies)
        if weight is not None:
            weights, total = _claims(
                [torch.as_tensor(reply[weight]) for reply in replies.values()], how
            )
            values = {
                i: {k: x for k, x in value.items() if k != weight} for i, value in values.items()
            }
        key = (self.round, self._means) if self._means else (self.round,)
        self._means += 1
        value = how.combine(list(values.values()), weights, around=around, kind=kind, key=key)
        self.contributions.update(replies.keys())
        return Combined(value, total, tuple(replies), None if how.hidden else replies)

    def _sum(
        self,
        ids: Sequence[int],
        method: str,
        expect: Template,
        shared: Mapping[str, Any] | None,
        each: Mapping[int, Mapping[str, Any]] | None,
        weight: str | None,
        min_replies: int = 1,
    ) -> Combined | None:
        """The weighted mean of replies, none of which anybody sees alone: rounded to steps of
        2^-24, and added as integers, so that every engine gives the same bits. For None see
        `_masked`.
        """
        found = self._masked(ids, method, expect, shared, each, weight, min_replies)
        if found is None or self._lacking(
            method, not found[0][-weight_count(expect, weight) :].any()
        ):
            return None
        whole, mean = decoded(found[0], expect, weight)
        return Combined(mean, whole, found[1])

    def _masked(
        self,
        ids: Sequence[int],
        method: str,
        expect: Template,
        shared: Mapping[str, Any] | None,
        each: Mapping[int, Mapping[str, Any]] | None,
        weight: str | None,
        min_replies: int,
    ) -> tuple[np.ndarray, tuple[int, ...]] | None:
        """The sum (d + k,) uint64 of replies, none of which anybody sees alone, and the parties
        that are part of it.

        At nodes the coordinator gets masked replies that only their sum unmasks: see
        `fedloom.protect.masks`. None if fewer than `min_replies`, fewer than two thirds of the
        parties, or fewer than 3 were left.
        """
        _check_callable(method)
        least = max(min_replies, threshold(len(ids), self.aggregator.colluders))
        whole = min_replies >= len(ids)
        if len(ids) < LEAST:
            self._fail(
                self.coordinator, method, Failure(f"fewer than {least} parties for a secure sum")
            )
            return None
        common = dict(shared or {})
        self._record_down(ids, method, common, each)
        total, failures = self.engine.sum(
            ids, method, common, each, expect, weight, self._next(), whole
        )
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
        self._record_masks(valid, whole)
        if total is None or len(valid) < least:
            self._fail(
                self.coordinator, method, Failure(f"fewer than {least} replies for a secure sum")
            )
            return None
        return total, tuple(valid)

    def _lacking(self, method: str, lacking: bool) -> bool:
        """Whether a secure sum lacks replies that it cannot do without, whose parties only they
        themselves know.
        """
        if lacking:
            self._fail(
                self.coordinator,
                method,
                Failure("a reply counts as nothing in a secure sum: see nodes' logs"),
            )
        return lacking

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
        """One message to each party, and the exact sum of their replies, modulo 2^64; a secure sum
        if the run's `[aggregate]` says so, with the same bits.

        Args:
            parties: their ids.
            method: the name of the method that the message calls; the page's clients list it in
                `MEANS`.
            expect: the template of a valid reply: tensors of int64 with every dimension known.
            shared, each: as in `call`.
            min_replies: the least number of replies that the step needs. If it needs all, a secure
                sum takes half of the calls and, of many parties, few of the bytes.

        Returns:
            None if fewer than `min_replies`, or fewer than a secure sum needs, were left.

        Raises:
            MethodError: as in `mean`.
        """
        self._check_listed(method)
        ids = list(parties)
        if self.aggregator.secure:
            found = self._masked(ids, method, expect, shared, each, None, min_replies)
            if found is None or self._lacking(method, int(found[0][-1]) < len(found[1])):
                return None
            return Total(totaled(found[0], expect), found[1])
        if (
            not each
            and min_replies <= len(ids)
            and (at_once := self._at_once(ids, method, shared, expect))
        ):
            return Total(added(at_once), tuple(ids))
        replies = self._call(ids, method, shared, each, expect, min_replies=max(1, min_replies))
        if not replies:
            return None
        return Total(added([*replies.values()]), tuple(replies))

    def _at_once(
        self, ids: Sequence[int], method: str, shared: Mapping[str, Any] | None, expect: Template
    ) -> list[Any]:
        """The sum of all replies as the only entry, with the messages recorded that it stands for;
        [] if the engine does not compute it at once.
        """
        _check_callable(method)
        common = dict(shared or {})
        found = self.engine.total(ids, method, common, (self.round, self._calls))
        if not found or reply_problem(found[0], expect) is not None:
            return []
        self._next()
        self._record_down(ids, method, common, None)
        what, size = message.measured(found[0])
        for i in ids:
            if i not in self.colocated:
                self.ledger.add(
                    self.round, self.engine.name(i), self.coordinator, method, what, size
                )
            self.usable.add((self.engine.name(i), method))
        return found

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

        Peer i asks every j in `links[i]`. Each j runs `answer`, and i runs `take` with `inbox`, the
        valid answers by the neighbour's id as text. If `ask` names a method, i runs it first, and
        `answer` gets its reply as `asked` and i as `by`. All answers are computed before the first
        `take`.

        Args:
            question, expect: templates of a valid question and a valid answer.
            at_once: the largest number of answers in memory; None for all. The asking peers then
                run in groups of at least one, each group as a call of its own with its own random
                draws. Set it only if `take` changes nothing that `ask` or `answer` reads, as each
                group takes before the next one asks.

        Raises:
            MethodError: a link is not in the graph, or leads from a peer to itself; nothing was
                sent.
        """
        for method in filter(None, (ask, answer, take)):
            _check_callable(method)
        self._check_links(links)
        common = dict(shared or {})
        if common:
            self._record_shared(links, take, common)
        for group in _groups(links, at_once):
            for d in self.engine.exchange(
                group, ask, answer, take, common, question, expect, self._next()
            ):
                sender, receiver = self.engine.name(d.sender), self.engine.name(d.receiver)
                if d.failure is None:
                    self.ledger.add(self.round, sender, receiver, d.kind, d.what, d.size)
                    self.usable.add((sender, d.kind))
                else:
                    self._fail(sender, d.kind, d.failure)

    def sample(self, parties: Sequence[int], k: int | None, t: int) -> tuple[int, ...]:
        """Draw `k` of the parties (None: all), in order; every method on this seed
        draws the same.
        """
        return participants(self.seed, parties, k, t)

    def neighbours(self, i: int, among: Iterable[int]) -> tuple[int, ...]:
        """The neighbours of peer i in `among`, in that order."""
        near = None if self.graph is None else self.graph.get(i, frozenset())
        return tuple(j for j in among if (j != i if near is None else j in near))

    def sample_peers(self, peers: Sequence[int], k: int | None, t: int) -> dict[int, list[int]]:
        """Draw `k` neighbours of each peer (None: all) among the peers, sorted: links for
        `exchange`.

        Drawn from (seed, t, peer), so all methods on this seed draw the same.
        """
        links, present = {}, sorted(peers)
        position = {i: n for n, i in enumerate(present)}
        for i in peers:
            # positions; a complete graph is never listed
            near: Sequence[int] = Others(len(present), position[i])
            if self.graph is not None:
                near = [position[j] for j in sorted(self.graph.get(i, ())) if j in position]
            drawn: Sequence[int] = range(len(near))
            if k is not None and k < len(near):
                drawn = sorted(
                    stream(self.seed, "links", t, i).choice(len(near), k, replace=False).tolist()
                )
            links[i] = [present[near[n]] for n in drawn]
        return links

    def choose_peers(
        self, peers: Sequence[int], method: str, shared: Mapping[str, Any]
    ) -> dict[int, list[int]]:
        """Links for `exchange` that the peers choose themselves. The coordinator learns the links
        and nothing else.

        `method` gets `here`, a mask (m,) of the peers that are present, and returns a mask (m,) of
        the peers to ask. Peers that are absent or no neighbours are ignored.
        """
        here = torch.zeros(max(self.engine.ids) + 1, dtype=torch.bool)
        here[list(peers)] = True
        replies = self.call(
            peers, method, shared={**shared, "here": here}, expect=Shape("bool", len(here))
        )
        present = sorted(peers)
        masks = {i: mask.tolist() for i, mask in replies.items()}
        return {i: [j for j in self.neighbours(i, present) if mask[j]] for i, mask in masks.items()}

    def _check_listed(self, method: str) -> None:
        """Raise MethodError if the page's clients do not list the method in MEANS."""
        if self.means_of_page is not None and method not in self.means_of_page:
            raise MethodError(
                f"fed.mean or fed.total calls {method!r}: list it in MEANS of the page's client, "
                "as in CALLS"
            )

    def _check_links(self, links: Mapping[int, Sequence[int]]) -> None:
        for i, neighbours in links.items():
            for j in neighbours:
                if i == j:
                    raise MethodError(
                        f"peer {i} cannot exchange messages with itself; remove it from its own "
                        "links"
                    )
                if self.graph is not None and j not in self.graph.get(i, ()):
                    raise MethodError(
                        f"peer {j} is not a neighbour of peer {i}; choose from "
                        f"fed.neighbours({i}, clients)"
                    )

    def _next(self) -> tuple[int, int]:
        self._calls += 1
        return self.round, self._calls - 1

    def _record(self, i: int, kind: str, tree: Any, *, down: bool) -> None:
        """Record one message between the coordinator and party i, unless they are colocated."""
        if i not in self.colocated:
            ends = (self.coordinator, self.engine.name(i))
            self.ledger.record(self.round, *(ends if down else ends[::-1]), kind, tree)

    def _record_down(
        self,
        ids: Sequence[int],
        kind: str,
        common: Mapping[str, Any],
        each: Mapping[int, Mapping[str, Any]] | None,
    ) -> None:
        """Record one message to each party, with its own arguments if there are any."""
        if not each:
            self._record_shared([i for i in ids if i not in self.colocated], kind, common)
            return
        for i in ids:
            self._record(i, kind, {**common, **each[i]}, down=True)

    def _record_shared(self, receivers: Iterable[int], kind: str, tree: Mapping[str, Any]) -> None:
        """Record one message to each receiver, all with the same content."""
        what, size = message.measured(tree)
        for i in receivers:
            self.ledger.add(self.round, self.coordinator, self.engine.name(i), kind, what, size)

    def _record_masks(self, parties: Sequence[int], whole: bool) -> None:
        """Record what a secure sum of these parties sends besides: keys and, unless all must be in
        it, sealed shares, signatures and opened shares.
        """
        n = len(parties)
        if n == 0:
            return
        up = {"keys": 136, "sealed": 82 * (n - 1), "signature": 72, "opened": 33 * n}
        down = {"keys": 136 * n, "sealed": 82 * (n - 1), "signatures": 72 * n}
        if whole:
            up, down = {"keys": up["keys"]}, {"keys": down["keys"]}
        for parts, is_down in ((down, True), (up, False)):
            tree = {
                name: torch.empty(count, dtype=torch.uint8, device="meta")
                for name, count in parts.items()
            }
            for i in parties:
                self._record(i, "masks", tree, down=is_down)

    def _fail(self, party: str, kind: str, failure: Failure) -> None:
        self.failures.append(CallFailure(self.round, party, kind, failure.reason, failure.trace))


def _weighted(
    weight: str | None, check: Callable[[int, Any], None] | None
) -> Callable[[int, Any], None] | None:
    """`check`, after one that a reply has a weight above 0, and no negative one."""
    if weight is None:
        return check

    def weighted(i: int, reply: Any) -> None:
        if bool((reply[weight] < 0).any()) or not bool((reply[weight] > 0).any()):
            raise MessageError(f"{weight!r} must be above 0 to be a weight")
        if check is not None:
            check(i, reply)

    return weighted


def _claims(each: Sequence[Tensor], how: Aggregator) -> tuple[Weights, Any]:
    """The weights of replies from what they claim, () or (K,) by class, and the sum of the weights
    that count.
    """
    if each[0].dim() == 0:
        return (None, len(each)) if how.even else ([int(w) for w in each], sum(map(int, each)))
    weights = torch.stack([*each])
    have = (weights > 0).sum(0)
    return weights, torch.where(have >= how.least, have if how.even else weights.sum(0), 0)


def _groups(
    links: Mapping[int, Sequence[int]], at_once: int | None
) -> Iterator[dict[int, Sequence[int]]]:
    """The links in groups of at most `at_once` answers; a peer with more forms a group
    of its own.
    """
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
    """Raise MethodError for methods of Party, such as `state`: messages call methods of the page
    only.
    """
    if hasattr(Party, method) or method in EVALUATIONS:
        raise MethodError(
            f"no message may call {method!r}, a method of every Party; rename the page's own method"
        )


def participants(seed: int, parties: Sequence[int], k: int | None, t: int) -> tuple[int, ...]:
    """The `k` of the parties (None: all), in order, that take part in round t: see
    `Federation.sample`.
    """
    if k is None or k >= len(parties):
        return tuple(parties)
    chosen = stream(seed, "participants", t).choice(len(parties), k, replace=False)
    return tuple(parties[i] for i in sorted(chosen))
