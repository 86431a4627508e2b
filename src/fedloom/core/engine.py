"""The interface of engines, and the one function that runs a party's method."""

from __future__ import annotations

import hashlib
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias, final

import torch

from fedloom.core import message
from fedloom.core.errors import MessageError, MethodError, NotReady
from fedloom.core.evaluation import EVALUATIONS
from fedloom.core.faults import Crash, Faults, spoil
from fedloom.core.message import Size, Template, Tree
from fedloom.core.network import Keep
from fedloom.core.party import Note, Party

CallId: TypeAlias = tuple[int, int] | None
"""(round, number of the call in the round): the same in a run that resumes or repeats. None for a look from
outside the protocol, such as evaluation, which no injected fault disturbs."""


UNREACHABLE = "unreachable"
"""The reason of a failure whose party cannot be reached now, and may return."""


@dataclass(frozen=True)
class Failure:
    """A call that gave no usable reply.

    Attributes:
        reason: one of a fixed set of words; all that others learn.
        trace: the party's own traceback. It stays with the engine and the run's own log.
        injected: whether the fault was ordered.
    """

    reason: str
    trace: str = ""
    injected: bool = False


@dataclass(frozen=True)
class Delivery:
    """One message between two peers, as the coordinator gets to know of it: never the payload."""

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
        shared: arguments that are the same for all parties of the call: one object.
        each: further arguments, this party's own. May hold refs, or a dict of refs.
        fault: what is ordered to go wrong.
        seed: of torch's generator while the party works, so that chance does not depend on the order of parties.
        round: the round under way; -1 for a look from outside.
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
    """A reference to a reply that stays where it was made, and its description for the ledger.

    Attributes:
        held: the engine's own way to find the reply; nothing if it failed.
        what, size: the ledger's description.
    """

    held: Any
    what: str = ""
    size: Size = NOTHING
    failure: Failure | None = None


@dataclass(frozen=True)
class Account:
    """Where a run's parties were, for its record.

    Attributes:
        engine: the engine's name.
        workers: processes that run parties.
        device: where tensors live.
        remarks: sentences for the reader of a report, such as what was not batched and why.
    """

    engine: str
    workers: int = 1
    device: str = "cpu"
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.engine}, {self.workers} worker{'s' * (self.workers > 1)}, {self.device}"


class Lost(Exception):
    """Workers died in a call, and other workers hold their parties now. The state of any party may be wrong.

    Whoever drives the engine loads the last snapshot of all parties, and repeats the calls since then.
    """


class Engine(ABC):
    """Holds parties and runs their methods.

    Attributes:
        ids: the parties, in order.
        durable: whether the state of parties survives the loss of a process. If not, a call may raise `Lost`.
        remote: whether parties keep their state to themselves, wherever they are. `states` and `load` are then of those
            alone that live with the home; the others go back to an earlier round by `restore`.
        changed: called, from any thread, when a party comes or goes; whoever wants to know sets it.
    """

    durable = True
    remote = False

    def __init__(self, names: Mapping[int, str], *, seed: int = 0, faults: Faults | None = None) -> None:
        self.ids = tuple(names)
        self._names = dict(names)
        self._seed = seed
        self._faults = faults
        self.changed: Callable[[], None] = lambda: None

    @final
    def name(self, party: int) -> str:
        """The party's name in the ledger, such as `client-3`."""
        if party not in self._names:
            raise MethodError(f"there is no party {party}; there are {list(self._names)}")
        return self._names[party]

    @final
    def call(
        self,
        parties: Sequence[int],
        method: str,
        shared: Mapping[str, Tree],
        each: Mapping[int, Mapping[str, Tree]] | None,
        call: CallId,
    ) -> list[Tree | Failure]:
        """Run `method` at each party with the shared arguments and its own; one reply or failure each, in order."""
        return self._call([self._task(i, method, shared, each[i] if each else {}, call) for i in parties])

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
        """Peer i asks each j in `links[i]` and takes their answers; payloads stay between the two.

        All ask, then all answer, then all take: nobody sees a neighbour's next state.
        """
        log: list[Delivery] = []
        pairs = [(i, j) for i, neighbours in links.items() for j in neighbours]
        if ask:
            asking = [self._task(i, ask, shared, {}, call) for i in links]
            questions = dict(zip(links, self._leave(asking, question), strict=True))
            pairs = [(i, j) for i, j in pairs if _deliver(log, i, j, ask, questions[i])]
            who = {i: torch.tensor(i) for i in links}  # a tensor, so that the answers to several can be given together
            turns = sorted(pairs, key=lambda pair: pair[1])  # who answers several does so in a row, on the same rows
            answering = [
                self._task(j, answer, shared, {"asked": questions[i], "by": who[i]}, call, i + 1) for i, j in turns
            ]
            given = dict(zip(turns, self._leave(answering, expect), strict=True))
            answers = {pair: given[pair] for pair in pairs}
        else:  # one answer serves all who ask
            asked = list(dict.fromkeys(j for _, j in pairs))
            left = self._leave([self._task(j, answer, shared, {}, call) for j in asked], expect)
            once = dict(zip(asked, left, strict=True))
            answers = {(i, j): once[j] for i, j in pairs}
        inboxes: dict[int, dict[str, ReplyRef]] = {i: {} for i in links}
        for (i, j), ref in answers.items():
            if _deliver(log, j, i, answer, ref):
                inboxes[i][str(j)] = ref
        taking = [self._task(i, take, shared, {"inbox": inbox}, call) for i, inbox in inboxes.items()]
        replies = self._call(taking)
        lost = {(sender, receiver, answer) for sender, receiver in self._undelivered()}
        gone = Failure(UNREACHABLE)
        log = [replace(d, failure=d.failure or gone) if (d.sender, d.receiver, d.kind) in lost else d for d in log]
        for i, taken in zip(inboxes, replies, strict=True):
            if isinstance(taken, Failure):
                log.append(Delivery(i, i, take, "", NOTHING, taken))
        return log

    @abstractmethod
    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        """Do all tasks; their replies, in order."""

    @abstractmethod
    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        """Do all tasks; leave the replies, held to `expect`, where they are."""

    def _undelivered(self) -> set[tuple[int, int]]:
        """(who answered, who asked) of the answers that could not be delivered in the last `_call`."""
        return set()

    @abstractmethod
    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: to be read at once, not kept."""

    @abstractmethod
    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""

    def digests(self) -> dict[int, str]:
        """The SHA-256 of every party's state, see `message.digest`, wherever the state is."""
        return {i: message.digest(state) for i, state in self.states().items()}

    def saved(self, round: int) -> None:  # noqa: B027  only engines that keep state elsewhere need it
        """The experiment has a checkpoint on disk after so many rounds: it may ask to be back there."""

    def restore(self, round: int) -> None:
        """Make all parties that keep their state to themselves what they were after so many rounds.

        Raises:
            MethodError: the parties of this engine are given their state by `load`.
            EngineError: a party cannot go back there.
        """
        raise MethodError(f"the parties of {type(self).__name__} take a state by load(), not by restore()")

    def presence(self) -> dict[int, bool]:
        """Which parties can be reached now."""
        return dict.fromkeys(self.ids, True)

    @abstractmethod
    def notes(self) -> dict[int, dict[str, Note]]:
        """The parties' notes since the last call."""

    @abstractmethod
    def account(self) -> Account:
        """Where the parties are."""

    def close(self) -> None:  # noqa: B027  most engines hold nothing
        """Release everything outside this process. Nothing may be called after it."""

    @final
    def __enter__(self) -> Engine:
        return self

    @final
    def __exit__(self, *_: object) -> None:
        self.close()

    @final
    def _task(
        self, party: int, method: str, shared: Mapping[str, Tree], each: Mapping[str, Any], call: CallId, part: int = 0
    ) -> Task:
        self.name(party)
        if call is None:
            return Task(party, method, shared, each)
        fault = None if self._faults is None else self._faults.draw(self._seed, *call, party)
        words = f"{self._seed} {call[0]} {call[1]} {party} {method} {part}".encode()
        seed = int.from_bytes(hashlib.blake2b(words, digest_size=7).digest(), "little")
        return Task(party, method, shared, each, fault, seed, call[0])


def run(party: Party[Any], task: Task, arguments: Mapping[str, Tree], keep: Keep = torch.clone) -> Tree | Failure:
    """Do one task; the party's reply, or why there is none. A failing call changes nothing.

    Args:
        party: whose method it is.
        task: what to do.
        arguments: its shared and own arguments, refs opened.
        keep: how to copy the network's memory before its first change.
    """
    if task.fault == "dropout":
        return Failure("dropped out", injected=True)
    work = bound(party, task.method)
    try:
        message.check_finite(arguments)
    except MessageError as error:
        return Failure("refused what it was sent: not finite", str(error))
    # torch.manual_seed is slow, and needed only where chance has a generator of the device's own
    (torch.default_generator if party.context.device == "cpu" else torch).manual_seed(task.seed)
    try:
        with party.transaction(keep):
            if task.fault == "crash":
                raise Crash(f"injected at {task.method}")
            reply = message.map_tensors(own_copy, work(**arguments))
    except NotReady:
        return Failure("not ready")
    except Exception as error:  # whatever a party's code raises is that party's failure
        if isinstance(error, MessageError):
            return Failure("not a message", traceback.format_exc())
        return Failure("raised", traceback.format_exc(), injected=isinstance(error, Crash))
    return disturbed(reply, task.fault)


def bound(party: Party[Any], method: str) -> Callable[..., Tree]:
    """The evaluation, or else the party's method, of this name.

    Raises:
        MethodError: there is none that a message could call.
    """
    if method in EVALUATIONS:
        return partial(EVALUATIONS[method], party)
    work = None if method.startswith("_") else getattr(party, method, None)
    if work is None:
        raise MethodError(f"{type(party).__name__} has no method {method!r} that a message could call")
    return work  # type: ignore[no-any-return]


def disturbed(reply: Tree, fault: str | None) -> Tree | Failure:
    """The reply as this injected fault leaves it."""
    if fault == "late":
        return Failure("late", injected=True)
    return reply if fault is None else spoil(reply, fault)  # type: ignore[return-value]


def verdict(reply: object, expect: Template) -> Failure | None:
    """Why a reply cannot be used, or None, in words that hold no value and no text of the party."""
    if isinstance(reply, Failure):
        return reply
    reason = "not a message"
    try:
        message.check(reply)  # type: ignore[arg-type]
        reason = "wrong shape"
        message.check_like(reply, expect)  # type: ignore[arg-type]
        reason = "not finite"
        message.check_finite(reply)  # type: ignore[arg-type]
    except MessageError as error:
        return Failure(reason, str(error))
    return None


def reply_ref(held: Any, reply: Tree | Failure, expect: Template) -> ReplyRef:
    """A ref with this reply, which can be found as `held`."""
    failure = verdict(reply, expect)
    if failure is not None:
        return ReplyRef(None, failure=failure)
    return ReplyRef(held, message.describe(reply), message.size(reply))  # type: ignore[arg-type]


def arguments(task: Task, opened: Callable[[ReplyRef], Any] = attrgetter("held")) -> dict[str, Tree]:
    """The arguments of a task, its references replaced by the replies that `opened` finds."""

    def plain(value: Any) -> Any:
        if isinstance(value, ReplyRef):
            return opened(value)
        if isinstance(value, dict) and any(isinstance(v, ReplyRef) for v in value.values()):
            return {k: opened(v) for k, v in value.items()}
        return value

    return {**task.shared, **{k: plain(v) for k, v in task.each.items()}}


def refusal(task: Task, put: Mapping[str, Tree], error: MessageError) -> Failure:
    """The failure of a task that cannot be sent, as its arguments are not finite; raises any other error."""
    try:
        message.check_finite(put)
    except MessageError as found:
        if task.fault == "dropout":
            return Failure("dropped out", injected=True)
        return Failure("refused what it was sent: not finite", str(found))
    raise error


def names(parties: Iterable[tuple[int, type[Party[Any]]]]) -> dict[int, str]:
    """Role and number of each party: `client-3`."""
    return {i: f"{kind.ROLE or kind.__name__.lower()}-{i}" for i, kind in parties}


def own_copy(x: torch.Tensor) -> torch.Tensor:
    """A message is a value: later changes at the sender must not reach the receiver."""
    return x.detach().clone()


def _deliver(log: list[Delivery], sender: int, receiver: int, kind: str, sent: ReplyRef) -> bool:
    """Log one message between peers; whether the receiver may use it."""
    log.append(Delivery(sender, receiver, kind, sent.what, sent.size, sent.failure))
    return sent.failure is None
