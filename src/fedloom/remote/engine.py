"""The net engine: parties at nodes, each beside its own data.

The coordinator holds colocated parties only. It sends tasks to nodes and receives their replies.
Messages between peers pass through the coordinator sealed end to end: it learns who sent how much
to whom, never the content. Calls to an unreachable node fail until it is back.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from time import time_ns
from types import CoroutineType
from typing import Any, TypeVar

import numpy as np

from fedloom.core import message
from fedloom.core.engine import Account, Engine, Failure, ReplyRef, Task, refusal
from fedloom.core.errors import CheckpointError, ConfigError, EngineError, MessageError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.fixed_point import size
from fedloom.core.message import Template, Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Note, Party
from fedloom.core.templates import spell
from fedloom.engines.local import LocalEngine
from fedloom.protect.masks import question
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import Timeouts, Transport
from fedloom.remote.loop import ListeningLoop
from fedloom.remote.node_session import (
    NodeSession,
    RunContext,
    TaskResults,
    plain_arguments,
    reply_refs,
)
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.secure_sum import secure_sum

_log = logging.getLogger("fedloom.net")
STOPPING = 1.0
"""Seconds that calls in progress have to end when the engine stops."""
T = TypeVar("T")


class NetEngine(Engine):
    """Parties at nodes. Close it, or use it in a `with`.

    Args:
        nodes: names of the nodes, by the number of their party.
        colocated: parties in the coordinator's process.
        names: of all parties in the ledger.
        config: of the run, as text that nodes read.
        differences: compares a node's facts about its party with the expected ones, and returns a
            sentence for each difference.
        run: the run's id, 32 hexadecimal digits, the same when it is resumed.
        transport: how nodes are reached.
        resume: whether nodes may be asked to return to an earlier checkpoint.
        start: a number above all earlier starts of the run; None for the time in nanoseconds.
        timeouts: of calls and waits.
        max_rows: the largest number of rows that a node may claim, by its name.
        terms: hash of what nodes approve, which is part of secure sums.
        colluders: nodes of a secure sum that may help the coordinator.
        answers: rows of the coordinator that nodes are asked to answer in the run.

    Raises:
        EngineError: a node is unreachable; nothing was run.
        ConfigError: a node refuses the run, or its facts differ from the expected ones.
    """

    remote = True

    def __init__(
        self,
        nodes: Mapping[int, str],
        colocated: Sequence[Party[MethodConfig]],
        names: Mapping[int, str],
        *,
        config: str,
        differences: Callable[[int, Mapping[str, Any]], list[str]],
        run: str,
        transport: Transport,
        timeouts: Timeouts,
        resume: bool = False,
        start: int | None = None,
        seed: int = 0,
        faults: Faults | None = None,
        max_rows: Mapping[str, int] | None = None,
        terms: str = "",
        colluders: int = 0,
        answers: int = 0,
    ) -> None:
        super().__init__(names, seed=seed, faults=faults)
        self._colocated = LocalEngine(colocated, seed=seed) if colocated else None
        self._differences, self._transport, self._timeouts = differences, transport, timeouts
        self._terms = terms
        self._colluders = colluders
        number = time_ns() if start is None else start
        self._common = RunContext(
            run, number, config, resume, timeouts, dict(nodes), max_rows or {}, answers=answers
        )
        self._notes: dict[int, dict[str, Note]] = {}
        self._lost: set[tuple[int, int]] = set()
        self._sessions: dict[int, NodeSession] = {}
        self._begun = False
        self._loop = ListeningLoop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="fedloom-net", daemon=True
        )
        self._thread.start()
        try:
            self._await(self._begin())
        except BaseException:
            self.close()
            raise

    # -- the interface of engines ------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        self._lost.clear()
        replies = self._do(tasks, leave=False, expect=None)
        self._common.floor = next(self._common.numbers)  # reply references have been fetched
        return replies

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        if not self._transport.peers:
            raise ConfigError(
                f"nodes cannot reach each other over {self._transport.name}: use the engine net"
            )
        replies = self._do(tasks, leave=True, expect=expect)
        return [
            ReplyRef(None, failure=reply) if isinstance(reply, Failure) else reply
            for reply in replies
        ]

    def _sum(
        self, tasks: Sequence[Task], expect: Template, weight: str | None, whole: bool
    ) -> tuple[np.ndarray | None, list[Failure | None]]:
        by_name = {
            self._sessions[task.party].name: task for task in tasks if task.party in self._sessions
        }
        if len(by_name) < len(tasks):
            raise MethodError(
                "a secure sum is among nodes: parties colocated with the coordinator take no part"
            )
        try:
            shared = message.encode(dict(tasks[0].shared))
        except MessageError as error:
            return None, [refusal(task, task.shared, error) for task in tasks]

        async def run_masked(session: NodeSession, mask: Mapping[str, Any]) -> TaskResults:
            return await session.run_tasks(
                [by_name[session.name]], shared, False, expect, dict(mask)
            )

        async def summed() -> tuple[np.ndarray | None, dict[str, Any], dict[str, Failure]]:
            await self._wait_for_nodes()
            sessions = [self._sessions[task.party] for task in tasks]
            context = f"{self._common.run}/{self._common.start}/{self._terms}"
            call = tasks[0].round, tasks[0].method
            d = size(expect, weight)
            return await secure_sum(
                sessions, run_masked, context, weight, d, asked, call, self._colluders, whole
            )

        def asked(names: Sequence[str], past: str) -> bytes:
            first, arguments = tasks[0], message.decode(shared)
            return question(
                first.round, first.method, weight or "", spell(expect), names, arguments, past
            )

        total, notes, lost = self._await(summed())
        for name, task in by_name.items():
            self._notes.setdefault(task.party, {}).update(notes.get(name, {}))
        self._common.floor = next(self._common.numbers)
        return total, [lost.get(name) for name in by_name]

    def _undelivered(self) -> set[tuple[int, int]]:
        return self._lost

    def states(self) -> dict[int, dict[str, Tree]]:
        """The state of colocated parties; nodes keep theirs."""
        return self._colocated.states() if self._colocated else {}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give colocated parties the state that `states()` returned."""
        if self._colocated:
            self._colocated.load(states)

    def digests(self) -> dict[int, str]:
        """The SHA-256 of each party's state, as its node reports it; "" where it has rows of its
        own, or its site has stopped the run.

        Raises:
            EngineError: a node is unreachable.
        """

        async def ask(session: NodeSession) -> str:
            try:
                answer = await session.ask("digest", self._common.which())
            except CallRefused as refusal:
                if refusal.code != rpc_errors.STOPPED:
                    raise
                return ""  # the others go on to the end
            head, _ = await asyncio.to_thread(payload.unpack, answer, {"sha256": str})
            sha: str = head["sha256"]
            return sha

        colocated = self._colocated.digests() if self._colocated else {}
        return colocated | self._everywhere(ask, "send the hash of its state")

    def saved(self, round: int) -> None:
        """Have nodes keep their states of the coordinator's last two checkpoints."""
        self._common.kept = (*self._common.kept[-1:], round)

    def restore(self, round: int) -> None:
        """Return all nodes to their states after `round` rounds.

        Raises:
            EngineError: a node is unreachable.
            CheckpointError: a node no longer has that state.
        """

        async def ask(session: NodeSession) -> None:
            try:
                await session.ask("restore", self._common.which(round=round))
            except CallRefused as refusal:
                if refusal.code == rpc_errors.UNKNOWN:
                    raise CheckpointError(
                        f"{session.name} cannot return to round {round}: {refusal.words}"
                    ) from None
                raise

        self._everywhere(ask, f"return to round {round}")

    def finish(self, broadcast: Mapping[str, Tree]) -> None:
        """Have each node write its model, and close the run there."""
        try:
            last = message.encode(dict(broadcast))
        except MessageError as error:
            _log.warning("nodes get no last model: %s", error)
            return

        async def closed() -> None:
            await asyncio.gather(*(session.finish(last) for session in self._sessions.values()))

        self._await(closed())

    def notes(self) -> dict[int, dict[str, Note]]:
        """The parties' notes since the last call, as far as their nodes send them."""
        notes = {i: self._notes.get(i, {}) for i in self.ids}
        self._notes = {}
        return notes | (self._colocated.notes() if self._colocated else {})

    def owner(self, party: int) -> str:
        """The name of the party's node; "" for a colocated party."""
        return self._sessions[party].name if party in self._sessions else ""

    def presence(self) -> dict[int, bool]:
        """Which parties are reachable now."""
        return {i: i not in self._sessions or self._sessions[i].link.up for i in self.ids}

    def account(self) -> Account:
        """The nodes, and the bytes sent to and received from them."""
        sessions = self._sessions.values()
        sent, received = sum(s.link.sent for s in sessions), sum(s.link.received for s in sessions)
        names = ", ".join(session.name for session in sessions)
        remarks = [
            f"parties at {names}",
            f"{sent:,} bytes sent to nodes and {received:,} received, protocol included",
        ]
        remarks += [f"{s.name} lost its state and started again" for s in sessions if s.lost]
        return Account(self._transport.name, workers=len(self._sessions), remarks=tuple(remarks))

    def close(self) -> None:
        """Close the connections; nodes keep their state."""
        if self._loop.is_closed():
            return
        with suppress(Exception):
            self._await(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- start and end -----------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Connect to all nodes, and have them build their parties."""
        nodes = self._common.nodes
        links = await self._transport.connect(
            [*nodes.values()], self._common.run, self._link_changed
        )
        for (i, name), link in zip(nodes.items(), links, strict=True):
            self._sessions[i] = NodeSession(i, name, link, self._common)
        end = self._loop.time() + self._timeouts.start
        sessions = self._sessions.values()
        # so that all are opened at once
        await asyncio.gather(*(session.reach(end) for session in sessions))
        answers = await asyncio.gather(
            *(session.start(end) for session in sessions), return_exceptions=True
        )
        away, problems = list[NodeSession](), list[str]()
        for session, answer in zip(sessions, answers, strict=True):
            if isinstance(answer, CallRefused) and answer.code == rpc_errors.UNREACHABLE:
                away.append(session)
            elif isinstance(answer, CallRefused):
                problems.append(f"{session.name} refuses the run: {answer.words}")
            elif not isinstance(answer, BaseException):
                problems += [
                    f"{session.name}: {line}" for line in self._differences(session.party, answer)
                ]
        if away:
            raise EngineError(
                "unreachable nodes: start fedloom node there; its log says why it cannot "
                f"connect\n{_named(away)}"
            )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, CallRefused):
                raise answer
        if problems:
            raise ConfigError("\n".join(problems))
        self._begun = True

    async def _end(self) -> None:
        await asyncio.gather(
            *(session.close() for session in self._sessions.values()), return_exceptions=True
        )
        others = asyncio.all_tasks() - {asyncio.current_task()}
        ours = {task for task in others if isinstance(task.get_coro(), CoroutineType)}
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
        # gRPC prints a traceback for a call of its own that is cancelled
        if theirs := others - ours:
            _, late = await asyncio.wait(theirs, timeout=STOPPING)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for work in the asyncio loop, from the thread that runs the rounds."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _link_changed(self, name: str, up: bool) -> None:
        if self._begun:
            _log.warning("%s is %s", name, "reachable again" if up else "unreachable")
        self.changed()

    # -- calls -------------------------------------------------------------------------------------

    def _everywhere(
        self, ask: Callable[[NodeSession], Coroutine[Any, Any, T]], what: str
    ) -> dict[int, T]:
        """The answers of all nodes; an error if one is missing."""
        end = self._loop.time() + self._timeouts.start

        async def retry(session: NodeSession) -> T:
            while True:
                await session.link.wait(max(0.0, end - self._loop.time()))
                try:
                    return await ask(session)
                except CallRefused as error:
                    if error.code != rpc_errors.UNREACHABLE or self._loop.time() >= end:
                        raise EngineError(
                            f"{session.name} cannot {what} ({error.words}); fix it and continue "
                            "with --resume"
                        ) from None
                self._timeouts.check_stop()

        async def gathered() -> list[T]:
            return await asyncio.gather(*map(retry, self._sessions.values()))

        return dict(zip(self._sessions, self._await(gathered()), strict=True))

    def _do(self, tasks: Sequence[Task], *, leave: bool, expect: Template) -> list[Any]:
        """The results of all tasks, in order; parties work at the same time.

        Args:
            tasks: of one method and round, which share their arguments.
            leave: whether replies stay at the nodes for peers; results are then references.
            expect: the template of a reply, by which nodes check it; None for none.
        """
        # A node gets all tasks of its party in one call. The numbers are places in `tasks`.
        by_party: dict[int, list[int]] = {}
        for n, task in enumerate(tasks):
            by_party.setdefault(task.party, []).append(n)
        remote = {i: ns for i, ns in by_party.items() if i in self._sessions}

        # Shared arguments are encoded once. If they cannot be sent, each task is refused with what
        # it would have got, as in every engine.
        try:
            shared = message.encode(dict(tasks[0].shared)) if remote else b""
        except MessageError as error:
            return [
                refusal(task, {**task.shared, **plain_arguments(task)}, error) for task in tasks
            ]

        # Nodes work while this thread runs the colocated parties, which needs no asyncio loop.
        async def answers_of_nodes() -> list[TaskResults]:
            await self._wait_for_nodes()
            sent = (
                self._sessions[i].run_tasks([tasks[n] for n in ns], shared, leave, expect)
                for i, ns in remote.items()
            )
            return await asyncio.gather(*sent)

        results: dict[int, Any] = {}  # by the place of the task
        future = (
            asyncio.run_coroutine_threadsafe(answers_of_nodes(), self._loop) if remote else None
        )
        for i in by_party.keys() - remote.keys():
            results.update(
                zip(
                    by_party[i],
                    self._run_colocated([tasks[n] for n in by_party[i]], leave),
                    strict=True,
                )
            )
        if future is not None:
            try:
                answers = future.result()
            except BaseException:  # also when the run is stopped from the keyboard
                future.cancel()
                raise
            for (i, ns), answer in zip(remote.items(), answers, strict=True):
                results.update(zip(ns, answer.results, strict=True))
                self._notes.setdefault(i, {}).update(answer.notes)
                self._lost |= answer.lost
        return [results[n] for n in range(len(tasks))]

    def _run_colocated(self, tasks: Sequence[Task], leave: bool) -> list[Any]:
        assert self._colocated is not None
        if leave or any(reply_refs(value) for task in tasks for value in task.each.values()):
            raise MethodError(
                "parties colocated with the coordinator cannot exchange messages with peers at "
                "nodes"
            )
        return list(self._colocated._call(tasks))

    async def _wait_for_nodes(self) -> None:
        """Wait until as many nodes are reachable as a round needs."""
        sessions, logged, timeouts = self._sessions.values(), False, self._timeouts
        end = self._loop.time() + timeouts.start
        while sum(session.link.up for session in sessions) < timeouts.fewest:
            away = [session for session in sessions if not session.link.up]
            if not logged:
                names = ", ".join(session.name for session in away)
                _log.warning(
                    "a round needs %d nodes: waiting up to %g s for %s",
                    timeouts.fewest,
                    timeouts.start,
                    names,
                )
                logged = True
            if self._loop.time() > end:
                raise EngineError(
                    f"a round needs {timeouts.fewest} nodes, but these have been unreachable for "
                    f"{timeouts.start:g} seconds; restart them and continue with "
                    f"--resume\n{_named(away)}"
                )
            timeouts.check_stop()
            await asyncio.sleep(0.1)


def _named(sessions: Iterable[NodeSession]) -> str:
    """Unreachable nodes with the last problem of each, a line each."""
    return "\n".join(
        f"{session.name}: {session.link.problem or 'no answer'}" for session in sessions
    )
