"""The pool of worker processes: it queues tasks, assigns them, and replaces workers that die."""

import contextlib
import select
import socket
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from fedloom.core.engine import Failure, Lost, Task
from fedloom.core.errors import ConfigError
from fedloom.engines._fork_server import ForkServer
from fedloom.engines._shared_buffer import receive, send
from fedloom.engines._worker import Shared, serve

DEATHS = 2
"""The number of workers that may die in one task before it counts as failed."""


class Queue:
    """The tasks of a batch, by number. The tasks of one party run in order at one worker.

    A party goes to the worker that ran it last, which may have cached a pass of its network. An
    idle worker takes a party from the longest queue. `left` tasks have been taken by no worker.
    """

    def __init__(self, parties: Sequence[int], last: Mapping[int, int], workers: int) -> None:
        groups: dict[int, deque[int]] = {}
        for number, party in enumerate(parties):
            groups.setdefault(party, deque()).append(number)
        self._queues: list[deque[deque[int]]] = [deque() for _ in range(workers)]
        self._begun: list[deque[int]] = [deque() for _ in range(workers)]
        for party, group in groups.items():
            (self._queues[last[party]] if party in last else min(self._queues, key=len)).append(
                group
            )
        self.left = len(parties)

    def take(self, worker: int, *, ahead: bool = False) -> int | None:
        """The worker's next task, or None; with `ahead`, a task of another party than its current
        one.
        """
        if ahead and self._begun[worker]:
            return None
        if not self._begun[worker]:
            own, most = self._queues[worker], max(self._queues, key=len)
            if not most:
                return None
            self._begun[worker] = own.popleft() if own else most.pop()
        self.left -= 1
        return self._begun[worker].popleft()


class _Sent(NamedTuple):
    """A task sent to a worker: its number in the batch, and the position of its arguments in the
    inbox.
    """

    number: int
    start: int
    end: int


class WorkerSlot:
    """A worker, whose process may be replaced: the numbers of the buffers that it writes (`outbox`)
    and reads (`inbox`), the tasks that it has not answered yet, and the traceback of its previous
    process.
    """

    def __init__(self, shared: Shared, number: int) -> None:
        self.number, self.outbox, self.inbox = number, 1 + number, 1 + shared.workers + number
        self.sent: deque[_Sent] = deque()
        self.last_words = ""
        self.pid = 0
        self.socket = socket.socket()
        self._buffer = shared.buffers[self.inbox]
        self._written = (0, 0)

    def put(self, *parts: bytes) -> list[tuple[int, int, int]]:
        """Write into the inbox without overwriting the arguments of the unfinished task; the
        positions of the parts.
        """
        size, live = sum(map(len, parts)), self.sent[-1] if self.sent else None
        start = self._buffer.end = 0 if live is None or size <= live.start else live.end
        positions = [(self.inbox, *self._buffer.write(part)) for part in parts]
        self._written = (start, self._buffer.end)
        return positions

    def give(self, number: int, order: Mapping[str, Any]) -> None:
        """Send an order whose arguments were written last."""
        self.sent.append(_Sent(number, *self._written))
        with contextlib.suppress(OSError):  # the pool detects a dead worker when it listens
            send(self.socket, order)


Order: TypeAlias = Callable[[WorkerSlot, Task, bool], "dict[str, Any] | Failure"]
"""Makes the order for a task, given whether another worker ran its party last. A failure is the
task's result.

Orders must be short: if the socket buffers of both sides are full, neither side reads.
"""
Take: TypeAlias = Callable[[WorkerSlot, Task, dict[str, Any], memoryview], Any]
"""Converts a reply to a task into its result."""


@dataclass
class _Batch:
    """The tasks of one call, and their results so far."""

    tasks: Sequence[Task]
    order: Order
    take: Take
    queue: Queue
    results: dict[int, Any] = field(default_factory=dict)
    lost: str = ""


class WorkerPool:
    """All workers (`slots`), and for each party the number of the worker that ran it last."""

    def __init__(self, shared: Shared) -> None:
        self._work = partial(serve, shared)
        self._fork_server = ForkServer(self._work)
        self._poll = select.poll()
        self._at: dict[int, WorkerSlot] = {}  # by the number of the socket's file
        self._deaths: Counter[tuple[Any, ...]] = Counter()  # by task, over its repetitions
        self._causes: dict[tuple[Any, ...], str] = {}
        self.last: dict[int, int] = {}
        self.slots = [WorkerSlot(shared, number) for number in range(shared.workers)]
        weakref.finalize(self, _close_sockets, self.slots)
        for slot in self.slots:
            self._spawn(slot)

    def do(self, tasks: Sequence[Task], order: Order, take: Take) -> list[Any]:
        """Run all tasks; their results, in order. Raises Lost if a worker died in a task: it has
        been replaced, and the others have finished the tasks they had begun.
        """
        batch = _Batch(
            tasks, order, take, Queue([task.party for task in tasks], self.last, len(self.slots))
        )
        try:
            for slot in self.slots:
                self._feed(slot, batch)
            while any(slot.sent for slot in self.slots):
                for file, _ in self._poll.poll():
                    self._listen(self._at[file], batch)
        except BaseException:  # no caller waits for the workers any more
            self.close()
            raise
        if batch.lost:
            raise Lost(batch.lost)
        return [batch.results[number] for number in range(len(tasks))]

    def close(self) -> None:
        """Kill all workers."""
        self._fork_server.close()
        _close_sockets(self.slots)

    def _feed(self, slot: WorkerSlot, batch: _Batch) -> None:
        """Give a worker its next task, and one of another party in advance if enough tasks are left
        for the others.
        """
        while not batch.lost and len(slot.sent) < (2 if batch.queue.left > len(self.slots) else 1):
            number = batch.queue.take(slot.number, ahead=bool(slot.sent))
            if number is None:
                return
            task = batch.tasks[number]
            if self._deaths[_key(task)] >= DEATHS:
                batch.results[number] = Failure("its process died", self._causes[_key(task)])
                continue
            order = batch.order(slot, task, self.last.get(task.party) != slot.number)
            if isinstance(order, Failure):
                batch.results[number] = order
                continue
            self.last[task.party] = slot.number
            slot.give(number, order)

    def _listen(self, slot: WorkerSlot, batch: _Batch) -> None:
        """Receive a frame of a worker, or replace it if it died."""
        frame = receive(slot.socket)
        if frame is None:
            self._replace(slot, batch)
        elif "last words" in frame[0]:
            slot.last_words = frame[0]["last words"]
            return
        elif "refused" in frame[0]:
            raise ConfigError(
                "this process trained beside a GPU before it started workers, so torch refuses "
                "to train in them; start the run in a new process, or hide the GPU with "
                "CUDA_VISIBLE_DEVICES="
            )
        else:
            number = slot.sent.popleft().number
            batch.results[number] = batch.take(slot, batch.tasks[number], *frame)
        self._feed(slot, batch)

    def _replace(self, slot: WorkerSlot, batch: _Batch) -> None:
        """Replace a dead process. The tasks that were sent to it are lost."""
        code = self._spawn(slot)
        self.last = {i: number for i, number in self.last.items() if number != slot.number}
        if slot.sent:  # the first of them was running
            task = batch.tasks[slot.sent[0].number]
            self._deaths[_key(task)] += 1
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._causes[_key(task)] = (
                slot.last_words or f"{DEATHS} processes died at {task.method}, the last: {cause}"
            )
            batch.lost = f"a worker process died ({cause})"
            slot.sent.clear()
        slot.last_words = ""

    def _spawn(self, slot: WorkerSlot) -> int:
        """Start a process in this slot; the exit code of the previous one."""
        if slot.pid:
            self._poll.unregister(slot.socket)
            del self._at[slot.socket.fileno()]
        slot.socket.close()
        try:
            slot.pid, slot.socket, code = self._fork_server.spawn(slot.number, slot.pid)
        except OSError:  # the fork server itself was killed
            self._fork_server.close()
            self._fork_server = ForkServer(self._work)
            slot.pid, slot.socket, code = self._fork_server.spawn(slot.number)
        self._at[slot.socket.fileno()] = slot
        self._poll.register(slot.socket, select.POLLIN)
        return code


def _key(task: Task) -> tuple[Any, ...]:
    """Equal for a task and its repetition."""
    return task.party, task.method, task.seed, task.round


def _close_sockets(slots: Sequence[WorkerSlot]) -> None:
    for slot in slots:
        slot.socket.close()
