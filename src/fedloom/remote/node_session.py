"""The coordinator's session with one node: open the run, send tasks, receive replies.

Every answer of a node is checked, and no answer can end the run.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Final, NamedTuple

from torch import Tensor

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.engine import Failure, ReplyRef, Task, refusal
from fedloom.core.errors import EngineError, MessageError
from fedloom.core.message import Size, Template, Tree
from fedloom.core.party import Note
from fedloom.core.templates import spell
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import Connection, Timeouts
from fedloom.remote.loop import aside
from fedloom.remote.rpc_errors import CallRefused

REASONS: Final = frozenset(
    {
        "dropped out",
        "not ready",
        "raised",
        "late",
        "not a message",
        "wrong shape",
        "not finite",
        "refused",
    }
    | {"refused what it was sent: not finite", *rpc_errors.CODES}
)
"""Reasons that a node may give for a failed call; any other counts as "raised"."""
PARTING: Final = 5.0
"""Seconds to close a run at a node."""
FINISHING: Final = 60.0
"""Seconds to wait until a node has written the model of a finished run. It may take longer."""
MOST_NOTES: Final = 64
"""Limit of the notes of one reply; further ones are dropped."""
_ANSWER: Final = {"lines": object, "notes": object, "missing": object}
_OPENED: Final = {"resumed": bool, "call": int, "evaluates": bool, "facts": object}
_LATER: Final = (rpc_errors.UNREACHABLE, rpc_errors.TAKEN)
_log = logging.getLogger("fedloom.net")


@dataclass
class RunContext:
    """The values that all calls of a run share.

    Attributes:
        run: its id.
        start: number of this start of the coordinator; nodes refuse calls of earlier starts.
        config: of the run, as text.
        resume: whether nodes may be asked to return to an earlier checkpoint.
        timeouts: of calls and waits.
        nodes: names of all nodes, by the number of their party.
        max_rows: the largest number of rows that a node may claim, by its name.
        numbers: increasing numbers for calls.
        kept: the rounds of the coordinator's checkpoints.
        floor: nodes may drop replies left for peers by calls before this number.
        stale: parties whose nodes report a newer start.
        refused: whether a node has refused the run, so that others need not be waited for.
        answers: rows of the coordinator that nodes are asked to answer in the run.
    """

    run: str
    start: int
    config: str
    resume: bool
    timeouts: Timeouts
    nodes: Mapping[int, str]
    max_rows: Mapping[str, int] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)
    kept: tuple[int, ...] = ()
    floor: int = 0
    stale: set[int] = field(default_factory=set)
    refused: bool = False
    answers: int = 0

    def which(self, **more: Tree) -> bytes:
        """The body of a call about the run."""
        return payload.pack({"run": self.run, "start": self.start, **more})

    def id(self, number: int | None = None) -> str:
        """The id of a call; without a number, of the next call."""
        return f"{self.run}/{self.start}/{next(self.numbers) if number is None else number}"


class TaskResults(NamedTuple):
    """The results of tasks.

    Attributes:
        results: a reply, a reply reference or a failure for each task.
        notes: of the party.
        lost: (sender, receiver) of exchanged messages that could not be fetched.
    """

    results: list[Any]
    notes: Mapping[str, Note] = {}
    lost: frozenset[tuple[int, int]] = frozenset()


class NodeSession:
    """The coordinator's session with one node and its party.

    Attributes:
        opened: whether the run was ever opened there.
        lost: whether the node lost its state during the run and started again.
    """

    def __init__(self, party: int, name: str, link: Connection, common: RunContext) -> None:
        self.party, self.name, self.link, self._common = party, name, link, common
        self.opened = self.lost = self._worked = False
        self._evaluates = True
        self._lock = asyncio.Lock()

    # -- start and end of a run --------------------------------------------------------------------

    async def reach(self, end: float) -> None:
        """Wait until `end` for the node. Raises Interrupted if the run was stopped meanwhile."""
        logged, now = False, asyncio.get_running_loop().time
        while not await self.link.wait(min(0.5, end - now())) and now() < end:
            if not logged:
                _log.warning(
                    "waiting for %s, at most %.0f s: %s", self.name, end - now(), self.link.problem
                )
                logged = True
            self._common.timeouts.check_stop()

    async def start(self, end: float) -> dict[str, Any]:
        """Open the run, waiting until `end` for a node that is unreachable or busy with another
        run, and without end for one whose site has not approved it yet.

        Raises:
            CallRefused: the node is still unreachable or busy, or refuses the run.
            Interrupted: the run was stopped meanwhile.
        """
        logged, now = "", asyncio.get_running_loop().time
        while True:
            try:
                if await self.link.wait(min(0.5, end - now())) or now() >= end:
                    return await self.open()
                words = self.link.problem or "no answer yet"
            except CallRefused as error:
                later = error.code in _LATER and now() < end
                # a person decides, perhaps tomorrow
                if error.code == rpc_errors.PENDING and not self._common.refused:
                    later, end = True, max(end, now() + self._common.timeouts.start)
                if not later:
                    self._common.refused = True
                    raise
                words = error.words
                await asyncio.sleep(0.5)
            if words != logged:
                _log.warning("waiting for %s: %s", self.name, words)
                logged = words
            self._common.timeouts.check_stop()

    async def open(self) -> dict[str, Any]:
        """Open the run at the node, or open it again, and return the node's facts
        about its party.
        """
        common = self._common
        members = {str(i): name for i, name in common.nodes.items() if i != self.party}
        body = common.which(
            protocol=payload.PROTOCOL,
            version=__version__,
            party=self.party,
            members=members,
            config=payload.cut(common.config),
            resume=common.resume,
            answers=common.answers,
        )
        answer = await self.link.ask("open", body, id=common.id(), deadline=common.timeouts.call)
        self.opened = True
        head, _ = await asyncio.to_thread(payload.unpack, answer, _OPENED)
        self._evaluates = head["evaluates"]
        if not isinstance(head["facts"], dict):
            raise MessageError("a node's facts must be a table")
        if self._worked and not head["resumed"]:
            self.lost = True
            _log.warning("%s has lost its state and starts again", self.name)
        facts: dict[str, Any] = head["facts"]
        return facts

    async def ask(self, kind: str, body: bytes, number: int | None = None) -> bytes:
        """Make a call; a `do` is repeated after opening the run again if the node no longer knows
        it.
        """
        id, deadline = self._common.id(number), self._common.timeouts.call
        try:
            return await self.link.ask(kind, body, id=id, deadline=deadline)
        except CallRefused as error:
            # a new party has no state to hash or restore
            if error.code != rpc_errors.UNKNOWN or kind != "do":
                raise
        await self.open()
        return await self.link.ask(kind, body, id=id, deadline=deadline)

    async def sum_step(
        self,
        name: str,
        step: str,
        call: tuple[int, str],
        names: Sequence[str] = (),
        parts: Sequence[bytes] = (),
    ) -> tuple[list[str], list[bytes]]:
        """A step of a secure sum for a call (round, method): the names and parts of the node's
        reply.

        Raises:
            CallRefused, MessageError: the node takes no part, or its reply is invalid.
        """
        common = self._common
        about: dict[str, Tree] = {
            "run": common.run,
            "start": common.start,
            "round": call[0],
            "method": call[1],
        }
        head: Tree = {**about, "sum": name, "step": step, "names": [*names]}
        answer = await self.ask("sum", payload.pack(head, *parts))
        answered, rest = await aside(len(answer), lambda: payload.unpack(answer, {"names": object}))
        theirs = answered["names"]
        if not isinstance(theirs, list) or not all(isinstance(one, str) for one in theirs):
            raise MessageError("the names of a sum must be a list")
        return theirs, [bytes(part) for part in rest]

    async def finish(self, broadcast: bytes) -> None:
        """Close the run at the node after its last round, with what it got for the last
        evaluation.
        """
        await self._goodbye(FINISHING, True, broadcast)

    async def close(self) -> None:
        """Close the run at the node, if it is reachable, and the connection."""
        await self._goodbye(PARTING, False)
        await self.link.close()

    async def _goodbye(self, deadline: float, finished: bool, *rest: bytes) -> None:
        if not (self.link.up and self.opened):
            return
        common, self.opened = self._common, False
        head: Tree = {"run": common.run, "start": common.start, "finished": finished}
        goodbye = self.link.ask(
            "close", payload.pack(head, *rest), id=common.id(), deadline=deadline
        )
        await asyncio.gather(goodbye, return_exceptions=True)

    # -- tasks -------------------------------------------------------------------------------------

    async def run_tasks(
        self, tasks: Sequence[Task], shared: bytes, leave: bool, expect: Template, mask: Tree = None
    ) -> TaskResults:
        """Run tasks, which share their method and arguments, in one call; with `mask` the reply is
        part of a sum.
        """
        if tasks[0].round < 0 and not self._evaluates:  # the node would refuse to evaluate
            return TaskResults([Failure(rpc_errors.REFUSED) for _ in tasks])
        rest, lines, refused = [shared], list[Tree](), dict[int, Failure]()
        for n, task in enumerate(tasks):
            own = plain_arguments(task)
            refs = {name: ref for name, value in task.each.items() if (ref := reply_refs(value))}
            line: dict[str, Any] = {
                "each": None,
                "reply_refs": refs,
                "fault": task.fault,
                "seed": task.seed,
            }
            try:
                if own:
                    rest.append(message.encode(own))
                    line["each"] = len(rest) - 1
                lines.append(line)
            except MessageError as error:
                refused[n] = refusal(task, {**task.shared, **own}, error)
        sent = [task for n, task in enumerate(tasks) if n not in refused]
        answered = (
            await self._send(sent, lines, rest, leave, expect, mask) if sent else TaskResults([])
        )
        results = iter(answered.results)
        return answered._replace(
            results=[refused[n] if n in refused else next(results) for n in range(len(tasks))]
        )

    async def _send(
        self,
        tasks: Sequence[Task],
        lines: Sequence[Tree],
        rest: Sequence[bytes],
        leave: bool,
        expect: Template,
        mask: Tree,
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
                    "deadline": float(common.timeouts.call),
                    "mask": mask,
                },
                *rest,
            )
            try:
                answer = await self.ask("do", body, number)
                self._worked = True
                common.stale.discard(self.party)
                return await aside(len(answer), lambda: self._parse(tasks, answer, number))
            except CallRefused as error:
                if error.code in (rpc_errors.STALE, rpc_errors.STOPPED):
                    self._note_gone(error)
                traced = error.code in (rpc_errors.FAILED, rpc_errors.MALFORMED)
                trace = self._pointer(number, error.words) if traced else ""
                if error.code in (rpc_errors.REFUSED, rpc_errors.MISMATCH):
                    trace = f"{self.name}: {error.words}"
                return TaskResults([Failure(error.code, trace) for _ in tasks])
            except (MessageError, LookupError, TypeError, ValueError, AttributeError) as error:
                return TaskResults(
                    [Failure("not a message", f"{self.name}: {error}") for _ in tasks]
                )

    def _note_gone(self, error: CallRefused) -> None:
        """Record that a node reports a newer start of the coordinator, or that its site has stopped
        the run; one node alone does not stop this one.

        Raises:
            EngineError: too few nodes are left for a round.
        """
        common, words = self._common, error.words
        why = (
            "Too few nodes are left."
            if error.code == rpc_errors.STOPPED
            else "A newer coordinator took over."
        )
        if self.party not in common.stale:
            _log.warning("%s: %s; continuing without it", self.name, words)
        common.stale.add(self.party)
        if len(common.nodes) - len(common.stale) < common.timeouts.fewest:
            raise EngineError(f"{self.name}: {words}. {why} Stopping.")

    def _parse(self, tasks: Sequence[Task], answer: bytes, number: int) -> TaskResults:
        """The results in an answer. Any invalid answer raises one of the errors that `_send`
        catches.
        """
        head, rest = payload.unpack(answer, _ANSWER)
        message.check_like(head["lines"], [object] * len(tasks))
        results = [self._result(line, rest, number) for line in head["lines"]]
        lost = frozenset(
            (tasks[n].each[name][k].held[0], self.party) for n, name, k in head["missing"]
        )
        return TaskResults(results, noted(head["notes"]), lost)

    def _result(self, line: Any, rest: Sequence[memoryview], number: int) -> Any:
        if not isinstance(line, dict):
            raise MessageError("a result must be a table")
        if "reply" in line:
            reply = payload.decoded(rest, line["reply"])
            limit = self._common.max_rows.get(self.name)
            if limit is not None and (claimed := claimed_rows(reply)) > limit:
                return Failure(
                    rpc_errors.REFUSED, f"{self.name} claims {claimed} rows; max_rows is {limit}"
                )
            return reply
        if "reply_ref" in line:
            message.check_like(line, {"reply_ref": str, "what": str, "payload": int, "wire": int})
            if not 0 <= line["payload"] <= line["wire"]:
                raise MessageError("a reply reference must have a size")
            held = (self.party, line["reply_ref"], line["what"])
            return ReplyRef(held, line["what"], Size(line["payload"], line["wire"]))
        message.check_like(line, {"failure": str, "injected": bool})
        reason = line["failure"] if line["failure"] in REASONS else "raised"
        return Failure(
            reason, self._pointer(number) if reason == "raised" else "", line["injected"]
        )

    def _pointer(self, number: int, words: str = "") -> str:
        """Where to read why a call failed, as a node does not send the reason."""
        return f"{words} (see the log of {self.name}: run {self._common.run[:8]}, call {number})".strip()  # noqa: E501


def claimed_rows(reply: Any) -> int:
    """The number of rows by which a reply would count in a mean: its `rows`, or the sum of its
    `counts` by class.
    """
    if not isinstance(reply, dict):
        return 0
    claims = [reply.get("rows", 0), reply.get("counts", 0)]
    whole = [
        c.sum().item() if isinstance(c, Tensor) and not c.is_floating_point() else c for c in claims
    ]
    return max(claim if isinstance(claim, int) else 0 for claim in whole)


def plain_arguments(task: Task) -> dict[str, Any]:
    """A task's own arguments that are not reply references."""
    return {name: value for name, value in task.each.items() if not reply_refs(value)}


def reply_refs(value: Any) -> Any:
    """A reply reference, or a dict of them, as a message holds it; None for any other value."""
    if isinstance(value, ReplyRef):
        return list(value.held)
    if isinstance(value, dict) and any(isinstance(v, ReplyRef) for v in value.values()):
        return {name: list(sent.held) for name, sent in value.items()}
    return None


def noted(notes: Any) -> dict[str, Note]:
    """The valid notes among these, at most `MOST_NOTES`."""
    if not isinstance(notes, dict):
        return {}
    return {
        name: value
        for name, value in islice(notes.items(), MOST_NOTES)
        if isinstance(value, float)
        or (isinstance(value, list) and all(isinstance(v, float) for v in value))
    }
