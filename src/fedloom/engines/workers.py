"""Worker processes on this machine, one thread each: the numbers of the loop, sooner.

Which worker runs a party, how many there are, and whether one is killed, changes no number: chance is seeded per call
and party, a party's tasks are done in order, and a task whose worker died is undone and done again.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fedloom import message
from fedloom.engines._boxes import LIMITS, Box, Undo, receive, send, spell
from fedloom.engines._nursery import Nursery
from fedloom.engines._queue import Queue
from fedloom.engines._worker import Shared, serve
from fedloom.engines.base import Account, Engine, Failure, Parcel, Size, Task, names, run
from fedloom.engines.memory import Arena
from fedloom.errors import ConfigError, MessageError, MethodError
from fedloom.faults import Faults
from fedloom.message import Template, Tree
from fedloom.party import Party

DEATHS = 3
"""How many workers may die of one task until it counts as failed."""
KEEP = 1 << 26
"""Bytes of a box that stay in memory between two calls, because fresh memory is slow."""


@dataclass
class _Seat:
    """A worker's place, which outlives the process in it.

    Attributes:
        sent: tasks that it was given and has not answered, as (serial number, number in the batch).
        floor: where the parcels in its box end, as far as we know.
        words: why its last process ended, if it could say so.
    """

    number: int
    pid: int
    socket: socket.socket
    sent: deque[tuple[int, int]] = field(default_factory=deque)
    floor: int = 0
    words: str = ""


@dataclass
class _Batch:
    """Tasks to be done together, what came of them, and how many workers died of each."""

    tasks: Sequence[Task]
    queue: Queue
    leave: bool
    expect: Template
    results: dict[int, Any] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)
    heads: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)


class WorkersEngine(Engine):
    """Parties in processes of their own. Close it, or use it in a `with`: no process outlives it.

    Make it before this process trains anything, if the machine has a GPU.

    Args:
        parties: all of them. With a budget each is put away before the next is taken, so let them be made one by one.
        workers: how many processes; no more are started than there are parties.
        memory: bytes of the parties' state that stay in memory, the rest lies on disk; None for all.

    Raises:
        ConfigError: a party lives on another device than the CPU; this system can't fork; or the disk has no room.
    """

    def __init__(
        self,
        parties: Iterable[Party[Any]],
        *,
        workers: int,
        seed: int = 0,
        faults: Faults | None = None,
        memory: int | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"engine.workers must be at least 1, not {workers}")
        self._arena = Arena(memory)
        self._parties: dict[int, Party[Any]] = {}
        self._spilled: set[int] = set()
        for party in parties:
            self._house(party)
        super().__init__(names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults)
        self._own: dict[int, bytes] = {}  # the newest of what parties remember beside their networks
        self._where: dict[int, int] = {}  # the worker that ran a party last
        self._notes: dict[int, dict[str, float]] = {i: {} for i in self._parties}
        self._serial = self._era = 0
        count = max(1, min(workers, len(self._parties)))
        largest = max((p._network.memory.numel() for p in self._parties.values() if p._network), default=0)
        self._boxes = [Box() for _ in range(count + 1)]
        self._undos = [Undo(largest) for _ in range(count)]
        self._work = partial(serve, Shared(self._parties, self._arena, self._boxes, self._undos))
        self._nursery = Nursery(self._work)
        self._poll = select.poll()
        self._seats: dict[int, _Seat] = {}  # by the number of the socket's file
        for number in range(count):
            self._sit(_Seat(number, *self._nursery.hatch(number)[:2]))

    def _house(self, party: Party[Any]) -> None:
        i = party.site.id
        if party.site.device != "cpu":
            raise ConfigError(
                f"workers are processes on the CPU, but party {i} is to live on {party.site.device!r}: "
                'set engine.device = "cpu", or engine.name = "batched" to use a GPU'
            )
        before = self._arena.spilled
        self._arena.house(party)
        if self._arena.spilled > before:
            self._spilled.add(i)
        for rows in party.site.tests.values():
            _ = rows.every  # made here, it is one for all workers
        self._parties[i] = party

    # -- what every engine offers ------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        try:
            return self._do(tasks, leave=False, expect=None)
        finally:  # whatever was left has been taken
            self._era += 1
            for box, used in zip(self._boxes, [self._boxes[0].end, *(s.floor for s in self._sorted())], strict=True):
                box.end = 0
                if used > KEEP:
                    box.empty()
            for seat in self._seats.values():
                seat.floor = 0

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[Parcel]:
        return self._do(tasks, leave=True, expect=expect)

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views of shared memory, not copies."""
        return {i: self._state(p) for i, p in self._parties.items()}

    def _state(self, party: Party[Any]) -> dict[str, Tree]:
        state = self._arena.state(party)
        return state | _decoded(self._own[party.site.id]) if party.site.id in self._own else state

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        for i, state in states.items():
            with self._arena.awake(self._parties[i]):
                self._parties[i].load(state)
            self._own.pop(i, None)
            self._where.pop(i, None)

    def notes(self) -> dict[int, dict[str, float]]:
        """What the parties noted since the last call."""
        taken, self._notes = self._notes, {i: {} for i in self._parties}
        return taken

    def account(self) -> Account:
        """The workers; how many parties lie on disk."""
        n = len(self._spilled)
        remarks = (f"the state of {n} of {len(self.ids)} parties lies on disk between calls",) if n else ()
        return Account("local", workers=len(self._seats), remarks=remarks)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._nursery.close()
        for seat in self._seats.values():
            seat.socket.close()
        for box in self._boxes:
            box.close()

    # -- batches -----------------------------------------------------------------------------------

    def _do(self, tasks: Sequence[Task], *, leave: bool, expect: Template) -> list[Any]:
        """Do all tasks; their replies or parcels, in order."""
        batch = _Batch(tasks, Queue([t.party for t in tasks], self._where, len(self._seats)), leave, expect)
        try:
            for seat in self._sorted():
                self._feed(seat, batch)
            while len(batch.results) < len(tasks):
                for file, _ in self._poll.poll():
                    self._listen(self._seats[file], batch)
        except BaseException:  # what the workers do is nobody's any more
            self.close()
            raise
        results = [batch.results[n] for n in range(len(tasks))]
        for result in results:
            if isinstance(result, MethodError):
                raise result
        return [Parcel(None, failure=r) if leave and isinstance(r, Failure) else r for r in results]

    def _feed(self, seat: _Seat, batch: _Batch) -> None:
        """Give a worker its next task, and one to go on with, unless the others could run dry for that."""
        while len(seat.sent) < (2 if batch.queue.left > len(self._seats) else 1):
            number = batch.queue.take(seat.number)
            if number is None:
                return
            task = batch.tasks[number]
            try:
                order = self._order(seat, batch, task)
            except MessageError:
                batch.results[number] = self._refusal(task)
                continue
            self._serial += 1
            seat.sent.append((self._serial, number))
            self._where[task.party] = seat.number
            with contextlib.suppress(OSError):  # that it died shows when we listen
                send(seat.socket, order | {"serial": self._serial})

    def _order(self, seat: _Seat, batch: _Batch, task: Task) -> dict[str, Any]:
        """What the worker must know, as JSON; trees go into our box."""
        key = (id(task.shared), task.method)
        if key not in batch.heads:
            head = {"method": task.method, "shared": dict(task.shared), "expect": spell(batch.expect)}
            batch.heads[key] = self._put(head)
        parcels = {name: held for name, value in task.each.items() if (held := _held(value)) is not None}
        plain = {name: value for name, value in task.each.items() if name not in parcels}
        each = self._put(plain) if plain else None
        moved = self._where.get(task.party) != seat.number or task.party in self._spilled
        return {
            "party": task.party,
            "fault": task.fault,
            "seed": task.seed,
            "head": batch.heads[key],
            "each": each,
            "parcels": parcels,
            "moved": moved,
            "own": self._boxes[0].write(own) if moved and (own := self._belongings(task.party)) else None,
            "leave": batch.leave,
            "era": self._era,
            "floor": seat.floor,
        }

    def _put(self, tree: Mapping[str, Tree]) -> tuple[int, int]:
        return self._boxes[0].write(message.encode(tree, LIMITS))

    def _refusal(self, task: Task) -> Any:
        """What a party says to what can't be sent: numbers that are not finite it refuses, as it would in the loop."""
        plain = {name: value for name, value in task.each.items() if _held(value) is None}
        put = {**task.shared, **plain}
        with contextlib.suppress(MessageError):
            message.check_finite(put)
            raise MethodError("x")
        return run(self._parties[task.party], task, put)
