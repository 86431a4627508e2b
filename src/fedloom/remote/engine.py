"""The net: parties at nodes of their own, beside their own data.

This process holds no party but those of its own house. It tells nodes what to do and hears their replies; what peers
say to each other goes over their own connections, and all that comes here is who spoke to whom and how much. A node
that gives no sign of life fails its calls until it is back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any, TypeVar

from fedloom.core import message
from fedloom.core.engine import Account, Engine, Failure, ReplyRef, Task, refusal
from fedloom.core.errors import CheckpointError, ConfigError, EngineError, MessageError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note, Party
from fedloom.engines.local import LocalEngine
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import NodeAddress, Timeouts, Transport
from fedloom.remote.node_session import NodeSession, RunContext, TaskResults, plain, reply_refs
from fedloom.remote.rpc_errors import CallRefused

_log = logging.getLogger("fedloom.net")
T = TypeVar("T")


class NetEngine(Engine):
    """Parties at nodes. Close it, or use it in a `with`.

    Args:
        members: where each party lives, by number.
        house: parties that live here.
        names: of all parties in the ledger.
        config: of the run, as text that a node's own fedloom reads.
        differences: sentences on what a node holds otherwise than it must, by its party and what it says of itself.
        run: the run's id, 32 hexadecimal digits, the same when it is resumed.
        wire: how nodes are reached.
        resume: whether nodes may be asked to go back to an earlier checkpoint.
        start: a number above those of all earlier starts of the run; None for the time in nanoseconds.
        waiting: see there.

    Raises:
        EngineError: a node can't be reached, or refuses; nothing was run.
        ConfigError: a node holds something else than it must.
    """

    remote = True

    def __init__(
        self,
        members: Mapping[int, NodeAddress],
        colocated: Sequence[Party[Any]],
        names: Mapping[int, str],
        *,
        config: str,
        differences: Callable[[int, Mapping[str, Any]], list[str]],
        run: str,
        wire: Transport,
        waiting: Timeouts,
        resume: bool = False,
        start: int | None = None,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(names, seed=seed, faults=faults)
        self._colocated = LocalEngine(colocated, seed=seed) if colocated else None
        self._differences, self._wire, self._waiting = differences, wire, waiting
        self._common = RunContext(run, time_ns() if start is None else start, config, resume, waiting, dict(members))
        self._notes: dict[int, dict[str, Note]] = {}
        self._lost: set[tuple[int, int]] = set()
        self._sessions: dict[int, NodeSession] = {}
        self._begun = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fedloom-net", daemon=True)
        self._thread.start()
        try:
            self._await(self._begin())
        except BaseException:
            self.close()
            raise

    # -- what every engine offers -------------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        self._lost.clear()
        replies = self._do(tasks, leave=False, expect=None)
        self._common.floor = next(self._common.numbers)  # parcels have been taken
        return replies

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        if not self._wire.peers:
            raise ConfigError(
                f"nodes can't speak to each other over {self._wire.name}: take the engine net for this method"
            )
        left = self._do(tasks, leave=True, expect=expect)
        return [ReplyRef(None, failure=reply) if isinstance(reply, Failure) else reply for reply in left]

    def _undelivered(self) -> set[tuple[int, int]]:
        return self._lost

    def states(self) -> dict[int, dict[str, Tree]]:
        """The state of the parties of our own house; the others' never comes here."""
        return self._colocated.states() if self._colocated else {}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give the parties of our own house the state that `states()` gave."""
        if self._colocated:
            self._colocated.load(states)

    def digests(self) -> dict[int, str]:
        """The SHA-256 of each party's state, as its node says it.

        Raises:
            EngineError: a node is away.
        """
        found = self._colocated.digests() if self._colocated else {}

        async def ask(session: NodeSession) -> str:
            head, _ = payload.unpack(await session.ask("digest", self._common.which()), {"sha256": str})
            sha: str = head["sha256"]
            return sha

        return found | self._everywhere(ask, "tell the hash of its state")

    def saved(self, round: int) -> None:
        """Nodes keep what they need to come back to the coordinator's last two checkpoints."""
        self._common.kept = (*self._common.kept[-1:], round)

    def restore(self, round: int) -> None:
        """Let all nodes go back to where they were after so many rounds.

        Raises:
            EngineError: a node is away.
            CheckpointError: a node does not know any more.
        """

        async def ask(session: NodeSession) -> None:
            try:
                await session.ask("restore", self._common.which(round=round))
            except CallRefused as refusal:
                if refusal.code == rpc_errors.UNKNOWN:
                    raise CheckpointError(
                        f"{session.member.name} can't go back to round {round}: {refusal.words}"
                    ) from None
                raise

        self._everywhere(ask, f"go back to round {round}")

    def notes(self) -> dict[int, dict[str, Note]]:
        """What the parties noted since the last call, as far as their nodes tell it."""
        taken = {i: self._notes.get(i, {}) for i in self.ids}
        self._notes = {}
        return taken | (self._colocated.notes() if self._colocated else {})

    def presence(self) -> dict[int, bool]:
        """Which parties can be reached now."""
        return {i: i not in self._sessions or self._sessions[i].link.up for i in self.ids}

    def account(self) -> Account:
        """The nodes, and what crossed between them and us."""
        sent = sum(session.link.sent for session in self._sessions.values())
        received = sum(session.link.received for session in self._sessions.values())
        who = ", ".join(session.member.name for session in self._sessions.values())
        remarks = [f"parties at {who}", f"{sent:,} bytes sent to nodes and {received:,} received, protocol included"]
        remarks += [f"{s.member.name} lost its state and began anew" for s in self._sessions.values() if s.lost]
        return Account(self._wire.name, workers=len(self._sessions), remarks=tuple(remarks))

    def close(self) -> None:
        """End the connections; nodes keep their state."""
        if self._loop.is_closed():
            return
        with suppress(Exception):
            self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- the beginning and the end ----------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Reach all nodes, and let them make their parties."""
        for i, member in self._common.members.items():
            link = await self._wire.connect(member, self._came_or_went)
            link.run = self._common.run
            self._sessions[i] = NodeSession(i, member, link, self._common)
        end = self._loop.time() + self._waiting.start
        found = await asyncio.gather(
            *(session.enter(end) for session in self._sessions.values()), return_exceptions=True
        )
        away = [
            s for s, facts in zip(self._sessions.values(), found, strict=True) if _is(facts, rpc_errors.UNREACHABLE)
        ]
        if away:
            raise EngineError(f"these nodes can't be reached; is fedloom node running there?\n{_named(away)}")
        wrong = []
        for session, facts in zip(self._sessions.values(), found, strict=True):
            if isinstance(facts, CallRefused):
                wrong.append(f"{session.member.name} takes no part: {facts.words}")
            elif isinstance(facts, BaseException):
                raise facts
            else:
                wrong += [f"{session.member.name}: {line}" for line in self._differences(session.party, facts)]
        if wrong:
            raise ConfigError("\n".join(wrong))
        self._begun = True

    async def _end(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions.values()), return_exceptions=True)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work of the loop, from the thread that runs the rounds."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _came_or_went(self, name: str, up: bool) -> None:
        if self._begun:
            _log.warning("%s is %s", name, "back" if up else "not reachable")
        self.changed()

    # -- calls ------------------------------------------------------------------------------------------------

    def _everywhere(self, ask: Callable[[NodeSession], Coroutine[Any, Any, T]], what: str) -> dict[int, T]:
        """What all nodes answer; an error if one can't."""

        end = self._loop.time() + self._waiting.start

        async def patiently(session: NodeSession) -> T:
            while True:
                await session.link.wait(max(0.0, end - self._loop.time()))
                try:
                    return await ask(session)
                except CallRefused as why:
                    if why.code != rpc_errors.UNREACHABLE or self._loop.time() >= end:
                        raise EngineError(
                            f"{session.member.name} can't {what} ({why.words}); see to it, and go on with --resume"
                        ) from None
                self._waiting.check_stop()

        async def gathered() -> list[T]:
            return await asyncio.gather(*map(patiently, self._sessions.values()))

        return dict(zip(self._sessions, self._await(gathered()), strict=True))

    def _do(self, tasks: Sequence[Task], *, leave: bool, expect: Template) -> list[Any]:
        """All tasks, those of different parties at the same time; their results, in order."""
        places: dict[int, list[int]] = {}
        for n, task in enumerate(tasks):
            places.setdefault(task.party, []).append(n)
        away = {i: ns for i, ns in places.items() if i in self._sessions}
        try:
            shared = message.encode(dict(tasks[0].shared)) if away else b""
        except MessageError as error:
            return [refusal(task, {**task.shared, **plain(task)}, error) for task in tasks]

        async def gathered() -> list[TaskResults]:
            await self._enough()
            told = (self._sessions[i].tell([tasks[n] for n in ns], shared, leave, expect) for i, ns in away.items())
            return await asyncio.gather(*told)

        results: dict[int, Any] = {}
        future = asyncio.run_coroutine_threadsafe(gathered(), self._loop) if away else None
        for i in places.keys() - away.keys():
            results.update(zip(places[i], self._at_home([tasks[n] for n in places[i]], leave, expect), strict=True))
        if future is not None:
            try:
                found = future.result()
            except BaseException:
                future.cancel()
                raise
            for (i, ns), told in zip(away.items(), found, strict=True):
                results.update(zip(ns, told.results, strict=True))
                self._notes.setdefault(i, {}).update(told.notes)
                self._lost |= told.lost
        return [results[n] for n in range(len(tasks))]

    def _at_home(self, tasks: Sequence[Task], leave: bool, expect: Template) -> list[Any]:
        assert self._colocated is not None
        if leave or any(reply_refs(value) for task in tasks for value in task.each.values()):
            raise MethodError("parties of the coordinator's house can't exchange with peers over the net")
        return list(self._colocated._call(tasks))

    async def _enough(self) -> None:
        """Wait until there are as many nodes as a round needs: rounds that come to nothing are soon used up."""
        sessions, told = self._sessions.values(), False
        end = self._loop.time() + self._waiting.start
        while sum(session.link.up for session in sessions) < self._waiting.fewest:
            away = [session for session in sessions if not session.link.up]
            if not told:
                who = ", ".join(session.member.name for session in away)
                _log.warning(
                    "a round needs %d nodes: waiting up to %g s for %s", self._waiting.fewest, self._waiting.start, who
                )
                told = True
            if self._loop.time() > end:
                raise EngineError(
                    f"a round needs {self._waiting.fewest} nodes, and these have been away for "
                    f"{self._waiting.start:g} seconds; see to them, and go on with --resume\n{_named(away)}"
                )
            self._waiting.check_stop()
            await asyncio.sleep(0.1)


def _is(found: object, code: str) -> bool:
    return isinstance(found, CallRefused) and found.code == code


def _named(sessions: Iterable[NodeSession]) -> str:
    """Nodes that are away, and what is known of why, a line each."""
    return "\n".join(
        f"{session.member.name} at {session.link.where}: {session.link.problem or 'no answer'}" for session in sessions
    )
