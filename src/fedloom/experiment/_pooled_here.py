"""Many runs in processes on this machine, one thread each, that are kept from run to run."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from fedloom.core.errors import EngineError

if TYPE_CHECKING:
    from fedloom.experiment.pool import Board, Job

TICK: Final = 0.2
"""Seconds between two looks at whether to stop."""
THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_News: TypeAlias = "queue.SimpleQueue[tuple[_Hand, dict[str, Any] | None]]"
"""Who says what; None is the last that one says."""


def run_all(waiting: Sequence[Job], board: Board, stop: Callable[[], bool]) -> None:
    """See `fedloom.experiment.pool.run_all`. No process outlives it."""
    crew = _Crew(waiting, board)
    try:
        crew.work(stop)
    finally:
        crew.close()


class _Crew:
    """The processes, and the jobs that none of them has begun."""

    def __init__(self, waiting: Sequence[Job], board: Board) -> None:
        self._left = [*waiting]
        self._board = board
        self._news: _News = queue.SimpleQueue()
        self._stopping = False
        self._hands: list[_Hand] = []

    def work(self, stop: Callable[[], bool]) -> None:
        """Until all is done, or saved and stopped."""
        for _ in range(self._board.hands):
            self._hire()
        while any(hand.job or not hand.ready for hand in self._hands):
            if not self._stopping and stop():
                self._stopping = True
                for hand in self._hands:
                    hand.send({"stop": True})
            with contextlib.suppress(queue.Empty):
                self._take(*self._news.get(timeout=TICK))

    def close(self) -> None:
        """End all processes, whatever they do."""
        for hand in self._hands:
            hand.close()

    def _hire(self) -> None:
        self._hands.append(_Hand(self._news))

    def _take(self, hand: _Hand, frame: Mapping[str, Any] | None) -> None:
        """A piece of news."""
        if frame is None:
            self._lose(hand)
        elif "ready" in frame:
            hand.ready = True
            self._order(hand)
        elif hand.job and "share" in frame:
            self._board.share(hand.job, frame["share"])
        elif hand.job:
            self._board.end(hand.job, **frame["ended"])
            self._order(hand)

    def _order(self, hand: _Hand) -> None:
        """Give it the next job, if there is one."""
        hand.job = None
        while self._left and not self._stopping and not hand.job:
            job = self._left.pop(0)
            if self._board.is_due(job):
                hand.job = job
                hand.send({"run": job.run.model_dump_json(), "folder": str(job.folder.resolve())})
                self._board.begin(job)

    def _lose(self, hand: _Hand) -> None:
        """Its process has ended by itself, or was killed: only its job fails."""
        self._hands.remove(hand)
        reason = hand.bury()
        if not hand.ready:
            raise EngineError(f"a worker can't start ({reason}): `python -m fedloom.experiment._pooled` says why")
        if hand.job:
            self._board.end(hand.job, "failed", reason)
        if self._left and not self._stopping:
            self._hire()


class _Hand:
    """A process that does one job after the other, and a thread that listens to it."""

    def __init__(self, news: _News) -> None:
        self.job: Job | None = None
        self.ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fedloom.experiment._pooled"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            env={**os.environ, **dict.fromkeys(THREADS, "1")},
            process_group=0,  # a Ctrl-C is for the parent, which says when to stop
        )
        self._news = news
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self._news.put((self, json.loads(line)))
        self._news.put((self, None))

    def send(self, frame: Mapping[str, Any]) -> None:
        """Tell it something."""
        assert self._process.stdin
        with contextlib.suppress(OSError):  # it has ended, as its silence will tell
            self._process.stdin.write(json.dumps(frame) + "\n")
            self._process.stdin.flush()

    def bury(self) -> str:
        """How the process ended, which has fallen silent."""
        code = self._process.wait()
        self.close()
        if code == -signal.SIGKILL:
            return "its process was killed, perhaps for want of memory: take fewer workers, or a smaller run"
        return f"its process ended with {signal.Signals(-code).name if code < 0 else f'status {code}'}"

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._ear.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe
                pipe.close()
