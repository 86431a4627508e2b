"""What the coordinator and one node say to each other: the run is opened, tasks are told, replies are taken.

Nothing that a node says is believed further than it can be checked, and nothing that it says can end the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final, NamedTuple

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.engine import Failure, ReplyRef, Task, refusal
from fedloom.core.errors import EngineError, MessageError
from fedloom.core.message import Size, Template, Tree
from fedloom.core.party import Note
from fedloom.engines._shared_buffer import spell
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import Connection, NodeAddress, Timeouts
from fedloom.remote.rpc_errors import CallRefused

REASONS: Final = frozenset(
    {"dropped out", "not ready", "raised", "late", "not a message", "wrong shape", "not finite", "refused"}
    | {"refused what it was sent: not finite", *rpc_errors.CODES}
)
"""What a node may say of a call that gave no reply; anything else is taken for "raised"."""
PARTING: Final = 5.0
"""Seconds that a node has to hear that a run is closed."""
MOST_NOTES: Final = 64
"""Notes of one reply that are taken."""
_ANSWER: Final = {"lines": object, "notes": object, "missing": object}
_OPENED: Final = {"goes_on": bool, "call": int, "tells": bool, "facts": object}
_log = logging.getLogger("fedloom.net")


@dataclass
class RunContext:
    """What all calls of a run have in common.

    Attributes:
        run: its id.
        start: of this coordinator; calls of earlier ones count no more.
        config: of the run, as text.
        resume: whether nodes may be asked to go back to an earlier checkpoint.
        waiting: how long for.
        members: all nodes by the number of their party.
        numbers: of the calls, rising.
        kept: the rounds of the coordinator's checkpoints.
        floor: what calls before this number left for peers has been taken.
        stale: parties whose nodes say that a newer start has taken over.
    """

    run: str
    start: int
    config: str
    resume: bool
    waiting: Timeouts
    members: Mapping[int, NodeAddress]
    numbers: Iterator[int] = field(default_factory=count)
    kept: tuple[int, ...] = ()
    floor: int = 0
    stale: set[int] = field(default_factory=set)

    def which(self, **more: Tree) -> bytes:
        """The body of a call that is about the run."""
        return payload.pack({"run": self.run, "start": self.start, **more})

    def id(self, number: int | None = None) -> str:
        """Of a call, the next one if it has no number yet."""
        return f"{self.run}/{self.start}/{next(self.numbers) if number is None else number}"


class TaskResults(NamedTuple):
    """What came of tasks.

    Attributes:
        results: of each task a reply, a parcel or a failure.
        notes: of the party.
        lost: (who answered, who asked) of answers that could not be fetched.
    """

    results: list[Any]
    notes: Mapping[str, Note] = {}
    lost: frozenset[tuple[int, int]] = frozenset()


class NodeSession:
    """A node with its party.

    Attributes:
        opened: whether the run was ever opened there.
        lost: whether the node lost its state in the run, and began anew.
    """

    def __init__(self, party: int, member: NodeAddress, link: Connection, common: RunContext) -> None:
        self.party, self.member, self.link, self._common = party, member, link, common
        self.opened = self.lost = self._worked = False
        self._tells = True
        self._lock = asyncio.Lock()

    # -- a run begins and ends ------------------------------------------------------------------------------

    async def enter(self, end: float) -> dict[str, Any]:
        """Open the run, waiting until `end` for a node that is not there yet, or busy with a run that may end.

        Raises:
            Refused: it can't be had.
            Interrupted: we were told to stop.
        """
        told, now = False, asyncio.get_running_loop().time
        while True:
            try:
                if await self.link.wait(min(0.5, end - now())) or now() >= end:
                    return await self.open()
                words = self.link.problem or "no answer yet"
            except CallRefused as why:
                if why.code not in (rpc_errors.UNREACHABLE, rpc_errors.TAKEN) or now() >= end:
                    raise
                words = why.words
                await asyncio.sleep(0.5)
            if not told:
                _log.warning("waiting for %s, at most %.0f s: %s", self.member.name, end - now(), words)
                told = True
            self._common.waiting.check_stop()

    async def open(self) -> dict[str, Any]:
        """Begin the run, or take it up there again; what the node says of its party."""
        common = self._common
        others = {str(i): member.to_message() for i, member in common.members.items() if i != self.party}
        body = common.which(
            protocol=payload.PROTOCOL,
            version=__version__,
            party=self.party,
            members=others,
            config=payload.cut(common.config),
            resume=common.resume,
        )
        answer = await self.link.ask("open", body, id=common.id(), deadline=common.waiting.call)
        self.opened = True
        head, _ = payload.unpack(answer, _OPENED)
        self._tells = head["tells"]
        if not isinstance(head["facts"], dict):
            raise MessageError("what a node says of itself must be a table")
        if self._worked and not head["goes_on"]:
            self.lost = True
            _log.warning("%s has lost its state and begins anew", self.member.name)
        facts: dict[str, Any] = head["facts"]
        return facts

    async def ask(self, kind: str, body: bytes, number: int | None = None) -> bytes:
        """A call, made again after the run was opened anew if the node does not know it any more."""
        id, deadline = self._common.id(number), self._common.waiting.call
        try:
            return await self.link.ask(kind, body, id=id, deadline=deadline)
        except CallRefused as why:
            if why.code != rpc_errors.UNKNOWN or kind != "do":  # a party made anew is none to hash, or to go back with
                raise
        await self.open()
        return await self.link.ask(kind, body, id=id, deadline=deadline)

    async def close(self) -> None:
        """Tell the node that the run is closed, if it is there, and let go of it."""
        if self.link.up and self.opened:
            goodbye = self.link.ask("close", self._common.which(), id=self._common.id(), deadline=PARTING)
            await asyncio.gather(goodbye, return_exceptions=True)
        await self.link.close()

    # -- tasks ------------------------------------------------------------------------------------------------

    async def tell(self, tasks: Sequence[Task], shared: bytes, leave: bool, expect: Template) -> TaskResults:
        """Let the party do tasks, which share their method and arguments, in one call."""
        if tasks[0].round < 0 and not self._tells:  # it would refuse to say how good its model is
            return TaskResults([Failure(rpc_errors.REFUSED) for _ in tasks])
        rest, lines, refused = [shared], list[Tree](), dict[int, Failure]()
        for n, task in enumerate(tasks):
            own = plain(task)
            held = {name: to_message for name, value in task.each.items() if (to_message := reply_refs(value))}
            line: dict[str, Any] = {"each": None, "reply_refs": held, "fault": task.fault, "seed": task.seed}
            try:
                if own:
                    rest.append(message.encode(own))
                    line["each"] = len(rest) - 1
                lines.append(line)
            except MessageError as error:
                refused[n] = refusal(task, {**task.shared, **own}, error)
        sent = [task for n, task in enumerate(tasks) if n not in refused]
        told = await self._told(sent, lines, rest, leave, expect) if sent else TaskResults([])
        found = iter(told.results)
        return told._replace(results=[refused[n] if n in refused else next(found) for n in range(len(tasks))])

    async def _told(
        self, tasks: Sequence[Task], lines: Sequence[Tree], rest: Sequence[bytes], leave: bool, expect: Template
    ) -> TaskResults:
        common = self._common
        async with self._lock:
            number = next(common.numbers)
            body = payload.pack(
                {
                    "run": common.run,
                    "start": common.start,
                    "call": number,
                    "round": tasks[0].round,
                    "method": tasks[0].method,
                    "tasks": list(lines),
                    "leave": leave,
                    "expect": spell(expect),
                    "kept": list(common.kept),
                    "floor": common.floor,
                    "deadline": float(common.waiting.call),
                },
                *rest,
            )
            try:
                answer = await self.ask("do", body, number)
                self._worked = True
                common.stale.discard(self.party)
                return self._taken(tasks, answer, number)
            except CallRefused as why:
                if why.code == rpc_errors.STALE:
                    self._give_way(why.words)
                trace = (
                    self._pointer(number, why.words) if why.code in (rpc_errors.FAILED, rpc_errors.MALFORMED) else ""
                )
                return TaskResults([Failure(why.code, trace) for _ in tasks])
            except (MessageError, LookupError, TypeError, ValueError, AttributeError) as error:
                return TaskResults([Failure("not a message", f"{self.member.name}: {error}") for _ in tasks])

    def _give_way(self, words: str) -> None:
        """A node says that a newer start of the coordinator has taken over. Where there is one, the others say so too.

        Raises:
            EngineError: too few nodes are left for a round.
        """
        common = self._common
        if self.party not in common.stale:
            _log.warning("%s: %s; so far without it", self.member.name, words)
        common.stale.add(self.party)
        if len(common.members) - len(common.stale) < common.waiting.fewest:
            raise EngineError(f"{self.member.name}: {words}; this process gives way to the other")

    def _taken(self, tasks: Sequence[Task], answer: bytes, number: int) -> TaskResults:
        """What an answer holds. Whatever a node may have put there, only these errors come of it: see above."""
        head, rest = payload.unpack(answer, _ANSWER)
        message.check_like(head["lines"], [object] * len(tasks))
        results = [self._result(line, rest, number) for line in head["lines"]]
        lost = frozenset((tasks[n].each[name][k].held[0], self.party) for n, name, k in head["missing"])
        return TaskResults(results, noted(head["notes"]), lost)

    def _result(self, line: Any, rest: Sequence[memoryview], number: int) -> Any:
        if not isinstance(line, dict):
            raise MessageError("a result must be a table")
        if "reply" in line:
            return payload.decoded(rest, line["reply"])
        if "reply_ref" in line:
            message.check_like(line, {"reply_ref": str, "what": str, "payload": int, "wire": int})
            if not 0 <= line["payload"] <= line["wire"]:
                raise MessageError("a parcel must have a size")
            held = (self.party, line["reply_ref"], line["what"])
            return ReplyRef(held, line["what"], Size(line["payload"], line["wire"]))
        message.check_like(line, {"failure": str, "injected": bool})
        reason = line["failure"] if line["failure"] in REASONS else "raised"
        return Failure(reason, self._pointer(number) if reason == "raised" else "", line["injected"])

    def _pointer(self, number: int, words: str = "") -> str:
        """Where to read why a call failed; a node does not tell it."""
        return f"{words} (the log of {self.member.name} has it: run {self._common.run[:8]}, call {number})".strip()


def plain(task: Task) -> dict[str, Any]:
    """A task's own arguments that are no parcels."""
    return {name: value for name, value in task.each.items() if not reply_refs(value)}


def reply_refs(value: Any) -> Any:
    """Where a parcel lies, or each of a dict of parcels; None for any other value."""
    if isinstance(value, ReplyRef):
        return list(value.held)
    if isinstance(value, dict) and any(isinstance(v, ReplyRef) for v in value.values()):
        return {name: list(sent.held) for name, sent in value.items()}
    return None


def noted(notes: Any) -> dict[str, Note]:
    """Notes that are notes, as far as there are not too many."""
    if not isinstance(notes, dict):
        return {}
    return {
        name: value
        for name, value in islice(notes.items(), MOST_NOTES)
        if isinstance(value, float) or (isinstance(value, list) and all(isinstance(v, float) for v in value))
    }
