"""Worker processes at work: who gets which task, and who takes the place of one that dies."""

from __future__ import annotations

import contextlib
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from fedloom.core.engine import Failure, Task
from fedloom.core.errors import ConfigError
from fedloom.engines._fork_server import Nursery
from fedloom.engines._queue import Queue
from fedloom.engines._shared_buffer import receive, send
from fedloom.engines._worker import Shared, serve

DEATHS = 3
"""How many workers may die of one task until it counts as failed."""


class _Sent(NamedTuple):
    """A task that a worker was given: its number in the batch, and where in the inbox its arguments lie."""

    serial: int
    number: int
    start: int
    end: int


class Seat:
    """A worker's place, which outlives the process in it.

    Attributes:
        number: of the worker.
        outbox, inbox: numbers of the boxes that it writes, and that we write for it.
        floor: where the parcels in the outbox end, as far as we know.
        sent: what it has not answered yet.
        words: why its last process ended, if that could say so.
    """

    def __init__(self, shared: Shared, number: int) -> None:
        self.number, self.outbox, self.inbox = number, 1 + number, 1 + len(shared.undos) + number
        self.undo = shared.undos[number]
        self.floor = 0
        self.sent: deque[_Sent] = deque()
        self.words = ""
        self.pid = 0
        self.socket = socket.socket()
        self._box = shared.boxes[self.inbox]
        self._put = (0, 0)

    def put(self, *parts: bytes) -> list[tuple[int, int, int]]:
        """Write into the inbox, beside the arguments of the one task that is still to be done; where the parts lie."""
        size, live = sum(map(len, parts)), self.sent[-1] if self.sent else None
        start = self._box.end = 0 if live is None or size <= live.start else live.end
        places = [(self.inbox, *self._box.write(part)) for part in parts]
        self._put = (start, self._box.end)
        return places

    def give(self, serial: int, number: int, order: Mapping[str, Any]) -> None:
        """Send an order, whose arguments were put last."""
        self.sent.append(_Sent(serial, number, *self._put))
        with contextlib.suppress(OSError):  # that it died shows when we listen
            send(self.socket, {**order, "serial": serial})


Order: TypeAlias = Callable[[Seat, Task, bool], "dict[str, Any] | Failure"]
"""What a worker must know of a task, given whether its party comes from elsewhere. A failure settles it at once.

It must be short: where socket buffers are full both ways, nobody reads.
"""
Take: TypeAlias = Callable[[Seat, Task, dict[str, Any], memoryview], Any]
"""What a reply to a task comes to."""


@dataclass
class _Batch:
    """Tasks to be done together, what came of them, and how many workers died of each."""

    tasks: Sequence[Task]
    order: Order
    take: Take
    queue: Queue
    results: dict[int, Any] = field(default_factory=dict)
    deaths: dict[int, int] = field(default_factory=dict)


class Crew:
    """All workers.

    Attributes:
        seats: theirs, in order.
        where: the worker that had a party last.
    """

    def __init__(self, shared: Shared) -> None:
        self._parties = shared.parties
        self._work = partial(serve, shared)
        self._nursery = Nursery(self._work)
        self._serial = 0
        self._poll = select.poll()
        self._at: dict[int, Seat] = {}  # by the number of the socket's file
        self.where: dict[int, int] = {}
        self.seats = [Seat(shared, number) for number in range(len(shared.undos))]
        weakref.finalize(self, _let_go, self.seats)
        for seat in self.seats:
            self._hatch(seat)

    def do(self, tasks: Sequence[Task], order: Order, take: Take) -> list[Any]:
        """Do all tasks; what came of them, in order."""
        queue = Queue([task.party for task in tasks], self.where, len(self.seats))
        batch = _Batch(tasks, order, take, queue)
        try:
            for seat in self.seats:
                self._feed(seat, batch)
            while len(batch.results) < len(tasks):
                for file, _ in self._poll.poll():
                    self._listen(self._at[file], batch)
        except BaseException:  # nobody waits any more for what the workers do
            self.close()
            raise
        return [batch.results[number] for number in range(len(tasks))]

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._nursery.close()
        _let_go(self.seats)

    def _feed(self, seat: Seat, batch: _Batch) -> None:
        """Give a worker its next task, and one of another party to go on with, unless others could run dry for that."""
        while len(seat.sent) < (2 if batch.queue.left > len(self.seats) else 1):
            number = batch.queue.take(seat.number, ahead=bool(seat.sent))
            if number is None:
                return
            task = batch.tasks[number]
            order = batch.order(seat, task, self.where.get(task.party) != seat.number)
            if isinstance(order, Failure):
                batch.results[number] = order
                continue
            self._serial += 1
            self.where[task.party] = seat.number
            seat.give(self._serial, number, order)

    def _listen(self, seat: Seat, batch: _Batch) -> None:
        """Take what a worker has to say, or find that it died."""
        frame = receive(seat.socket)
        if frame is None:
            self._replace(seat, batch)
        elif "last words" in frame[0]:
            seat.words = frame[0]["last words"]
            return
        elif "refused" in frame[0]:
            raise ConfigError(
                "this process trained before its workers were made, after which torch refuses to train in them beside "
                "a GPU: do the run in a process of its own, or hide the GPU with CUDA_VISIBLE_DEVICES="
            )
        else:
            number = seat.sent.popleft().number
            batch.results[number] = batch.take(seat, batch.tasks[number], *frame)
        self._feed(seat, batch)

    def _replace(self, seat: Seat, batch: _Batch) -> None:
        """Put a new process in a dead one's place, undo what that had begun, and let it be done again."""
        code = self._hatch(seat)
        self.where = {i: number for i, number in self.where.items() if number != seat.number}
        for sent in seat.sent:
            network = self._parties[batch.tasks[sent.number].party]._network
            if network is not None:
                seat.undo.restore(sent.serial, network.memory)
        again = [sent.number for sent in seat.sent]
        seat.sent.clear()
        if again:  # the first of them was under way
            first = again[0]
            died = batch.deaths[first] = batch.deaths.get(first, 0) + 1
            if died == DEATHS:
                cause = f"signal {-code}" if code < 0 else f"exit code {code}"
                trace = seat.words or f"{died} processes died at {batch.tasks[first].method}, the last of {cause}"
                batch.results[first] = Failure("its process died", trace)
                del again[0]
        seat.words = ""
        batch.queue.put_back(seat.number, again)

    def _hatch(self, seat: Seat) -> int:
        """Let a process take this seat; how the one that had it ended."""
        if seat.pid:
            self._poll.unregister(seat.socket)
            del self._at[seat.socket.fileno()]
        seat.socket.close()
        try:
            seat.pid, seat.socket, code = self._nursery.hatch(seat.number, seat.pid)
        except OSError:  # somebody has ended the nursery itself
            self._nursery.close()
            self._nursery = Nursery(self._work)
            seat.pid, seat.socket, code = self._nursery.hatch(seat.number)
        self._at[seat.socket.fileno()] = seat
        self._poll.register(seat.socket, select.POLLIN)
        return code


def _let_go(seats: Sequence[Seat]) -> None:
    for seat in seats:
        seat.socket.close()
