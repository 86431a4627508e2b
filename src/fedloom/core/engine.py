"""The interface of engines, and `run`, which executes one task of a party."""

import hashlib
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.errors import MessageError, MethodError, NotReady, PrivacyBudgetSpent
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.faults import Crash, Faults, spoil
from fedloom.core.fixed_point import encoded
from fedloom.core.message import Size, Template, Tree
from fedloom.core.network import Keep
from fedloom.core.party import Note, Party

CallId: TypeAlias = tuple[int, int] | None
"""(round, number of the call in the round): unchanged when a run resumes or repeats. None for calls
outside the protocol, such as evaluation, which get no injected faults.
"""

NOT_FINITE = "refused what it was sent: not finite"
"""The reason of a failure whose arguments hold NaN or infinity."""
NOT_READY = "not ready"
"""The reason of a failure of a party that cannot answer yet: see `NotReady`."""
RAISED = "raised"
"""The reason of a failure by any error in a party's code."""
WRONG_SHAPE = "wrong shape"
"""The reason of a failure whose reply has not the shape that was expected."""
UNREACHABLE = "unreachable"
"""The reason of a failure whose party cannot be reached now but may return."""


@dataclass(frozen=True)
class Failure:
    """A call without a usable reply.

    Attributes:
        reason: one of a fixed set of texts, the only part that other parties learn.
        trace: the party's traceback, for the run's log only.
        injected: whether `[faults]` caused it.
    """

    reason: str
    trace: str = ""
    injected: bool = False


@dataclass(frozen=True)
class Delivery:
    """A message between two peers as the coordinator records it, without content."""

    sender: int
    receiver: int
    kind: str
    what: str
    size: Size
    failure: Failure | None = None


@dataclass(frozen=True)
class Task:
    """One call of one party.

    Attributes:
        shared: arguments for all parties of the call: one object.
        each: further arguments for this party. Values may be reply references or dicts of them.
        fault: the injected fault, if any.
        seed: seeds torch's generator for this task, so that draws do not depend on the order of
            parties.
        round: the current round; -1 outside the protocol.
    """

    party: int
    method: str
    shared: Mapping[str, Tree]
    each: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None
    seed: int = 0
    round: int = -1


NOTHING = Size(0, 0)


@dataclass(frozen=True)
class ReplyRef:
    """A reference to a reply that stays where it was made.

    Attributes:
        held: the engine's key of the reply; None if it failed.
        what, size: content and sizes, for the ledger.
    """

    held: Any
    what: str = ""
    size: Size = NOTHING
    failure: Failure | None = None


@dataclass(frozen=True)
class Account:
    """Where the parties of a run were, for the run's record.

    Attributes:
        engine: the engine's name.
        workers: processes that run parties.
        device: the device of their tensors.
        remarks: sentences for the report, such as which methods were not batched and why.
    """

    engine: str
    workers: int = 1
    device: str = "cpu"
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.engine}, {self.workers} worker{'s' * (self.workers > 1)}, {self.device}"


class Lost(Exception):
    """Workers died in a call and were replaced. The state of every party is undefined.

    The caller must load the last snapshot of all parties and repeat the calls since then.
    """


class Engine(AbstractContextManager["Engine"]):
    """Holds parties and runs their methods.

    Attributes:
        ids: the parties, in order.
        durable: whether the parties' state survives the loss of a process. If not, a call may raise
            `Lost`.
        remote: whether parties keep their state at their nodes. `states` and `load` then cover the
            coordinator's own parties only; `restore` returns the others to an earlier round.
        changed: a callback, called from any thread when a party connects or disconnects.
    """

    durable = True
    remote = False

    def __init__(
        self, names: Mapping[int, str], *, seed: int = 0, faults: Faults | None = None
    ) -> None:
        self.ids = tuple(names)
        self._names = dict(names)
        self._seed = seed
        self._faults = faults
        self._notes: dict[int, dict[str, Note]] = {i: {} for i in self.ids}
        self.changed: Callable[[], None] = lambda: None

    @final
    def name(self, party: int) -> str:
        """The party's name in the ledger, such as `client-3`."""
        if party not in self._names:
            raise MethodError(f"unknown party {party}; the ids are {list(self._names)}")
        return self._names[party]

    def owner(self, party: int) -> str:
        """The name of the organization whose node runs the party; "" if it has none."""
        return ""

    @final
    def call(
        self,
        parties: Sequence[int],
        method: str,
        shared: Mapping[str, Tree],
        each: Mapping[int, Mapping[str, Tree]] | None,
        call: CallId,
    ) -> list[Tree | Failure]:
        """Run `method` at each party with the shared and its own arguments; one reply or failure
        each, in order.
        """
        return self._call(
            [self._task(i, method, shared, each[i] if each else {}, call) for i in parties]
        )

    @final
    def sum(
        self,
        parties: Sequence[int],
        method: str,
        shared: Mapping[str, Tree],
        each: Mapping[int, Mapping[str, Tree]] | None,
        expect: Template,
        weight: str | None,
        call: CallId,
        whole: bool = False,
    ) -> tuple[np.ndarray | None, list[Failure | None]]:
        """As `call`, but add up the replies as integers: see `fedloom.core.fixed_point`. With
        `whole` there is no sum unless all replies are in it.

        Returns:
            The sum (d + 1,) uint64, or None if too few parties were left for one; and for each
            party the reason why its reply is not part of it.
        """
        return self._sum(
            [self._task(i, method, shared, each[i] if each else {}, call) for i in parties],
            expect,
            weight,
            whole,
        )

    @final
    def total(
        self, parties: Sequence[int], method: str, shared: Mapping[str, Tree], call: CallId
    ) -> list[Tree]:
        """The sum of the parties' replies to a method of `MEANS`, as the only entry, where the
        engine computes it at once from the rows of all; else [], and no party has run.
        """
        return self._total([self._task(i, method, shared, {}, call) for i in parties])

    @final
    def exchange(
        self,
        links: Mapping[int, Sequence[int]],
        ask: str | None,
        answer: str,
        take: str,
        shared: Mapping[str, Tree],
        question: Template,
        expect: Template,
        call: CallId,
    ) -> list[Delivery]:
        """Peer i asks each j in `links[i]` and takes their answers; no payload passes through the
        coordinator.

        All peers ask, then all answer, then all take, so no peer sees a neighbour's next state.
        """
        log: list[Delivery] = []
        pairs = [(i, j) for i, neighbours in links.items() for j in neighbours]
        if ask:
            asking = [self._task(i, ask, shared, {}, call) for i in links]
            questions = dict(zip(links, self._leave(asking, question), strict=True))
            pairs = [(i, j) for i, j in pairs if _deliver(log, i, j, ask, questions[i])]
            by = {i: torch.tensor(i) for i in links}  # a tensor, so that answers can be batched
            # a peer's answers in a row, to reuse its cached batches
            order = sorted(pairs, key=lambda pair: pair[1])
            answering = [
                self._task(j, answer, shared, {"asked": questions[i], "by": by[i]}, call, i + 1)
                for i, j in order
            ]
            refs = dict(zip(order, self._leave(answering, expect), strict=True))
            answers = {pair: refs[pair] for pair in pairs}
        else:  # one answer of each peer for all that ask it
            senders = list(dict.fromkeys(j for _, j in pairs))
            left = self._leave([self._task(j, answer, shared, {}, call) for j in senders], expect)
            shared_refs = dict(zip(senders, left, strict=True))
            answers = {(i, j): shared_refs[j] for i, j in pairs}
        inboxes: dict[int, dict[str, ReplyRef]] = {i: {} for i in links}
        for (i, j), ref in answers.items():
            if _deliver(log, j, i, answer, ref):
                inboxes[i][str(j)] = ref
        taking = [
            self._task(i, take, shared, {"inbox": inbox}, call) for i, inbox in inboxes.items()
        ]
        replies = self._call(taking)
        lost = {(*ends, answer) for ends in self._undelivered()}
        for n, d in enumerate(log):
            if (d.sender, d.receiver, d.kind) in lost:
                log[n] = replace(d, failure=d.failure or Failure(UNREACHABLE))
        for i, reply in zip(inboxes, replies, strict=True):
            if isinstance(reply, Failure):
                log.append(Delivery(i, i, take, "", NOTHING, reply))
        return log

    @abstractmethod
    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        """Run all tasks; their replies, in order."""

    @abstractmethod
    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        """Run all tasks, check the replies against `expect`, and leave them where they are."""

    def _sum(
        self, tasks: Sequence[Task], expect: Template, weight: str | None, whole: bool
    ) -> tuple[np.ndarray | None, list[Failure | None]]:
        """The sum of the tasks' replies. Parties of one process have one owner, so nothing is
        masked.
        """
        total, failures = None, list[Failure | None]()
        for reply in self._call(tasks):
            failure = reply_problem(reply, expect)
            if failure is None:
                assert not isinstance(reply, Failure)
                try:
                    x = encoded(reply, weight, len(tasks))
                    total = x if total is None else total + x
                except (MessageError, KeyError, TypeError) as error:
                    failure = Failure("not a message", str(error))
            failures.append(failure)
        return None if whole and any(failures) else total, failures

    def _total(self, tasks: Sequence[Task]) -> list[Tree]:
        """See `total`."""
        return []

    def _undelivered(self) -> set[tuple[int, int]]:
        """(sender, receiver) of the answers that could not be delivered in the last `_call`."""
        return set()

    @abstractmethod
    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state. Read it before the next call, which may change it."""

    @abstractmethod
    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Load every party's state as `states()` returned it."""

    def digests(self) -> dict[int, str]:
        """The SHA-256 of every party's state (`message.digest`), wherever the state is."""
        return {i: message.digest(state) for i, state in self.states().items()}

    def saved(self, round: int) -> None:
        """Called when the experiment has saved a checkpoint after `round` rounds, to which it may
        return.
        """

    def restore(self, round: int) -> None:
        """Return all parties that keep their own state to that after `round` rounds. Raises
        EngineError if a party has no such state.
        """
        raise MethodError(f"{type(self).__name__} does not support restore(); use load()")

    def finish(self, broadcast: Mapping[str, Tree]) -> None:
        """Called once the last round is evaluated: parties that keep their own model get what they
        got for that evaluation.
        """

    def presence(self) -> dict[int, bool]:
        """Whether each party can be reached now."""
        return dict.fromkeys(self.ids, True)

    def notes(self) -> dict[int, dict[str, Note]]:
        """Return and clear the parties' notes."""
        notes, self._notes = self._notes, {i: {} for i in self.ids}
        return notes

    @abstractmethod
    def account(self) -> Account:
        """Where the parties run."""

    def close(self) -> None:
        """Release all resources outside this process. The engine cannot be used afterwards."""

    @final
    def __exit__(self, *_: object) -> None:
        self.close()

    @final
    def _task(
        self,
        party: int,
        method: str,
        shared: Mapping[str, Tree],
        each: Mapping[str, Any],
        call: CallId,
        part: int = 0,
    ) -> Task:
        self.name(party)
        if call is None:
            return Task(party, method, shared, each)
        fault = None if self._faults is None else self._faults.draw(self._seed, *call, party)
        key = f"{self._seed} {call[0]} {call[1]} {party} {method} {part}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        return Task(party, method, shared, each, fault, seed, call[0])


def run_task(
    party: Party[object], task: Task, arguments: Mapping[str, Tree], keep: Keep = torch.clone
) -> Tree | Failure:
    """Run one task with its resolved `arguments`; the party's reply, or a failure, which leaves its
    state unchanged. `keep` copies the network's memory before its first change.
    """
    if task.fault == "dropout":
        return Failure("dropped out", injected=True)
    function = bound(party, task.method)
    try:
        message.check_finite(arguments)
    except MessageError as error:
        return Failure(NOT_FINITE, str(error))
    # torch.manual_seed is slow, and needed only if the device has a generator of its own
    (torch.default_generator if party.context.device == "cpu" else torch).manual_seed(task.seed)
    party.at_round(task.round)
    try:
        with party.transaction(keep):
            if task.fault == "crash":
                raise Crash(f"injected at {task.method}")
            reply = message.map_tensors(lambda x: x.detach().clone(), function(**arguments))
    except NotReady:
        return Failure(NOT_READY)
    except PrivacyBudgetSpent:  # for the node's owner to decide, not a failure of this party
        raise
    except Exception as error:  # any error in a party's code is that party's failure
        if isinstance(error, MessageError):
            return Failure("not a message", traceback.format_exc())
        return Failure(RAISED, traceback.format_exc(), injected=isinstance(error, Crash))
    return disturbed(reply, task.fault)


def bound(party: Party[object], method: str) -> Callable[..., Tree]:
    """The evaluation, or else the party's method, of this name. Raises MethodError if there is
    none, or messages may not call it.
    """
    if method in EVALUATIONS:
        return partial(EVALUATIONS[method], party)
    function = None if method.startswith("_") else getattr(party, method, None)
    if function is None:
        raise MethodError(
            f"{type(party).__name__} has no method {method!r}; define it, without a leading "
            "underscore"
        )
    return function  # type: ignore[no-any-return]


def disturbed(reply: Tree, fault: str | None) -> Tree | Failure:
    """The reply after this injected fault."""
    if fault == "late":
        return Failure("late", injected=True)
    return reply if fault is None else spoil(reply, fault)  # type: ignore[return-value]


def reply_problem(reply: object, expect: Template) -> Failure | None:
    """The reason why a reply cannot be used, or None. The reason holds no value and no text of the
    party.
    """
    if isinstance(reply, Failure):
        return reply
    reason = "not a message"
    try:
        message.check(reply)  # type: ignore[arg-type]
        reason = WRONG_SHAPE
        message.check_like(reply, expect)
        reason = "not finite"
        message.check_finite(reply)  # type: ignore[arg-type]
    except MessageError as error:
        return Failure(reason, str(error))
    return None


def reply_ref(held: Any, reply: Tree | Failure, expect: Template) -> ReplyRef:
    """A reference with the key `held` to this reply, or to its failure."""
    failure = reply_problem(reply, expect)
    if failure is not None:
        return ReplyRef(None, failure=failure)
    return ReplyRef(held, *message.measured(reply))  # type: ignore[arg-type]


def references(value: Any) -> list[ReplyRef]:
    """The references in an argument: one, all in a dict, or none."""
    return [
        v
        for v in (value.values() if isinstance(value, dict) else [value])
        if isinstance(v, ReplyRef)
    ]


def map_references(fn: Callable[[ReplyRef], Any], value: Any) -> Any:
    """An argument with `fn` applied to its references."""
    if not references(value):
        return value
    return {k: fn(v) for k, v in value.items()} if isinstance(value, dict) else fn(value)


def arguments(
    task: Task, opened: Callable[[ReplyRef], Any] = attrgetter("held")
) -> dict[str, Tree]:
    """The arguments of a task, with references resolved by `opened`."""
    return {**task.shared, **{k: map_references(opened, v) for k, v in task.each.items()}}


def refusal(task: Task, arguments: Mapping[str, Tree], error: MessageError) -> Failure:
    """The failure of a task whose arguments are not finite and cannot be sent; raises any other
    error.
    """
    try:
        message.check_finite(arguments)
    except MessageError as not_finite:
        if task.fault == "dropout":
            return Failure("dropped out", injected=True)
        return Failure(NOT_FINITE, str(not_finite))
    raise error


def names(parties: Iterable[tuple[int, type[Party[object]]]]) -> dict[int, str]:
    """The ledger name of each party, its role and id: `client-3`."""
    return {i: f"{kind.ROLE or kind.__name__.lower()}-{i}" for i, kind in parties}


def _deliver(log: list[Delivery], sender: int, receiver: int, kind: str, ref: ReplyRef) -> bool:
    """Log one message between peers; True if it is valid."""
    log.append(Delivery(sender, receiver, kind, ref.what, ref.size, ref.failure))
    return ref.failure is None
