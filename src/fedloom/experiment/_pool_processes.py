"""Jobs in processes on this machine, of one thread each, that are kept from job to job."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any, Final

from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool

from fedloom.core.errors import EngineError
from fedloom.experiment._pool_job import do

if TYPE_CHECKING:
    from concurrent.futures import Future

TICK: Final = 0.2
"""Seconds between two looks at whether to stop."""
THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Processes:
    """Executors of one process each, so that a process that is killed fails its own job alone.

    Raises:
        EngineError: no process can be started.
    """

    def __init__(self, count: int) -> None:
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)  # a large one, replaced
        self._idle = [_executor() for _ in range(count)]
        self._busy: dict[Any, ProcessPoolExecutor] = {}
        try:
            for started in [_submit(executor, os.getpid) for executor in self._idle]:
                started.result()
        except BrokenProcessPool as error:
            self.close()
            raise EngineError(f"a worker process can't start ({_cause(error)})") from None

    @property
    def room(self) -> int:
        """How many more jobs can begin now."""
        return len(self._idle)

    def submit(self, *order: Any, gpus: float) -> Future[dict[str, Any]]:
        """Begin a job; arguments as those of `do`. A process on this machine sees all GPUs."""
        executor = self._idle.pop()
        future = _submit(executor, do, *order)
        self._busy[future] = executor
        return future

    def wait(self, running: Sequence[Future[Any]]) -> set[Future[Any]]:
        """Those that have ended, after at most a tick."""
        return futures.wait(running, TICK, futures.FIRST_COMPLETED).done

    def result(self, future: Future[dict[str, Any]]) -> dict[str, Any]:
        """How a job ended; a killed process is replaced."""
        executor = self._busy.pop(future)
        try:
            found = future.result()
        except BrokenProcessPool as error:
            executor.shutdown(kill_workers=True)
            executor, found = _executor(), {"state": "failed", "reason": _cause(error)}
        self._idle.append(executor)
        return found

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for executor in (*self._idle, *self._busy.values()):
            executor.shutdown(kill_workers=True)


def _executor() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, env=dict.fromkeys(THREADS, "1"), initializer=_begin, initargs=(os.getpid(),))


def _submit(executor: ProcessPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Submit work. A process that is started for it inherits blocked signals: a Ctrl-C is for the parent, which says
    when to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return executor.submit(work, *arguments)  # type: ignore[no-any-return]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """In a new process: let nothing that is printed mix with the parent's output, and end when the parent does."""
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK)
    os._exit(0)  # its checkpoints are what is left of the run


def _cause(error: BaseException) -> str:
    """Why a process ended, as loky reports it."""
    codes = re.search(r"\{(.*)\}", str(error))
    if codes and "SIGKILL" in codes[1]:
        return "its process was killed, perhaps for want of memory: take fewer workers, or a smaller run"
    return f"its process ended with {codes[1] if codes else error}"
