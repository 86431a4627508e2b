"""Several runs in lock-step: the calls that they make at the same point are batched over the
parties of all runs.

Runs of one method with several seeds, rates or partitions differ in numbers, not in operations.
Each run is a thread,
but only one thread works at a time: a run continues until its engine has tasks, then the next run
does. When all runs wait, their tasks are one call of a `Batcher`. A run sees neither the others nor
their random numbers.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch

from fedloom.core.engine import Account, Failure, Task
from fedloom.core.faults import Faults
from fedloom.core.message import Tree
from fedloom.core.party import Party
from fedloom.engines.batched import STRIDE, Batcher
from fedloom.engines.local import LocalEngine

T = TypeVar("T")


class Aborted(BaseException):
    """Raised in a run's thread when the process stops waiting for it."""


class Lane(Generic[T]):
    """One of the runs: its thread, and the tasks that it waits for.

    Attributes:
        engine: the run's engine, once it has one.
        tasks: the tasks that it waits for.
        round: the latest round that it called in.
        ended: whether its work has returned or raised.
        outcome: the result of its work, or the error that it raised.
    """

    def __init__(self, number: int, of: int, work: "Callable[[Lane[T]], T]") -> None:
        self.number, self.of = number, of
        self.engine: LockstepEngine | None = None
        self.batcher: Batcher | None = None
        self.tasks: list[Task] = []
        self.replies: list[Any] | BaseException = []
        self.round = -1
        self.ended = self._aborted = False
        self.outcome: T | BaseException = Aborted()
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(
            target=self._run, args=(work,), name=f"run {number}", daemon=True
        )
        self._thread.start()

    def _run(self, work: "Callable[[Lane[T]], T]") -> None:
        self._go.acquire()
        try:
            torch.set_num_threads(1)  # of this thread
            if not self._aborted:
                self.outcome = work(self)
        except BaseException as error:
            self.outcome = error
        finally:
            self.ended = True
            self._waits.release()

    def advance(self) -> None:
        """Let the run continue until it has tasks or ends. Called by the process's own thread."""
        self._go.release()
        self._waits.acquire()

    def call(self, tasks: Sequence[Task]) -> list[Any]:
        """Wait for the replies to these tasks. Called by the run."""
        if self._aborted:
            raise Aborted
        self.tasks = [replace(task, party=self.number * STRIDE + task.party) for task in tasks]
        self.round = max([self.round, *(task.round for task in tasks)])
        generator = torch.get_rng_state()
        self._waits.release()
        self._go.acquire()
        torch.set_rng_state(generator)
        if self._aborted:
            raise Aborted
        if isinstance(self.replies, BaseException):
            raise self.replies
        return self.replies

    def abort(self) -> None:
        """End the run at its next call, and wait for its thread."""
        self._aborted = True
        self._go.release()
        self._thread.join()


class LockstepEngine(LocalEngine):
    """The parties of one run, whose calls a lane makes together with the calls of the
    other runs.
    """

    def __init__(
        self,
        parties: Iterable[Party[object]],
        lane: Lane[Any],
        *,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(parties, seed=seed, faults=faults)
        self.enter(lane)

    def enter(self, lane: Lane[Any]) -> None:
        """Make the next calls in this lane."""
        self._lane = lane
        lane.engine = self

    @property
    def parties(self) -> dict[int, Party[object]]:
        """The parties by their numbers among the parties of all runs."""
        return {self._lane.number * STRIDE + i: party for i, party in self._parties.items()}

    def _each(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return self._lane.call(tasks)

    def account(self) -> Account:
        """One process; how the parties are batched, and with how many runs."""
        batcher = self._lane.batcher
        device = next(iter(self._parties.values())).context.device
        if batcher is None:
            return Account("batched", device=device)
        together = any(n in batcher.groups for n in self.parties)
        remarks = (f"in lock-step, runs: {self._lane.of}", *batcher.remarks(self.parties))
        return Account("batched" if together else "local", device=device, remarks=remarks)


def in_lockstep(
    works: "Sequence[Callable[[Lane[T]], T]]",
    *,
    chunk_size: int | None = None,
    everything: bool = True,
) -> "list[T | BaseException]":
    """Call all `works`, each of which makes a `LockstepEngine` of its lane; returns the result of
    each, or its error.

    A run that is behind the others, because it was resumed at an earlier round, first catches up
    with them. A run that fails does not affect the others.

    Args:
        works: called with their lanes, each in a thread of its own.
        chunk_size, everything: as of `BatchedEngine`.
    """
    lanes = [Lane(n, len(works), work) for n, work in enumerate(works)]
    batcher: Batcher | None = None
    ready = lanes
    try:
        while True:
            for lane in ready:
                lane.advance()
            waiting = [lane for lane in lanes if not lane.ended]
            if not waiting:
                return [lane.outcome for lane in lanes]
            if batcher is None:
                parties = {
                    n: party
                    for lane in waiting
                    if lane.engine
                    for n, party in lane.engine.parties.items()
                }
                batcher = Batcher(parties, chunk_size=chunk_size, everything=everything)
                for lane in waiting:
                    lane.batcher = batcher
            earliest = min(lane.round for lane in waiting)
            ready = [lane for lane in waiting if lane.round == earliest]
            _reply(ready, batcher)
    finally:
        for lane in lanes:
            lane.abort()


def _reply(lanes: Sequence[Lane[Any]], batcher: Batcher) -> None:
    """Run the tasks of these runs together."""
    try:
        replies = iter(batcher.call([task for lane in lanes for task in lane.tasks]))
    except Exception as error:  # of the page: each run reports it
        for lane in lanes:
            lane.replies = error
        return
    for lane in lanes:
        lane.replies = [next(replies) for _ in lane.tasks]
