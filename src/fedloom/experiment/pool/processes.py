"""Runs jobs in reused processes of one thread each."""

import contextlib
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
from fedloom.experiment.pool.job import do_all

if TYPE_CHECKING:
    from concurrent.futures import Future

TICK: Final = 0.2
"""Seconds between two polls."""
THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Processes:
    """Executors of one process each, so that a killed process fails only its own jobs.

    Raises:
        EngineError: a process cannot be started.
    """

    def __init__(self, count: int) -> None:
        warnings.filterwarnings(
            "ignore", "A worker stopped while some jobs", UserWarning
        )  # one that uses much memory is replaced
        self._idle = [_executor() for _ in range(count)]
        self._busy: dict[Any, ProcessPoolExecutor] = {}
        try:
            for started in [_submit(executor, os.getpid) for executor in self._idle]:
                started.result()
        except BrokenProcessPool as error:
            self.close()
            raise EngineError(f"cannot start a worker process ({_cause(error)})") from None

    @property
    def room(self) -> int:
        """Number of idle processes."""
        return len(self._idle)

    def submit(self, *order: Any, gpus: float) -> "Future[list[dict[str, Any]]]":
        """Start a job; arguments as in `do_all`. All processes see all GPUs."""
        executor = self._idle.pop()
        future = _submit(executor, do_all, *order)
        self._busy[future] = executor
        return future

    def wait(self, running: "Sequence[Future[Any]]") -> "set[Future[Any]]":
        """The jobs that have ended, after at most `TICK` seconds."""
        return futures.wait(running, TICK, futures.FIRST_COMPLETED).done

    def result(self, future: "Future[list[dict[str, Any]]]", jobs: int) -> list[dict[str, Any]]:
        """How the jobs of an order ended. A killed process is replaced."""
        executor = self._busy.pop(future)
        try:
            result = future.result()
        except BrokenProcessPool as error:
            executor.shutdown(kill_workers=True)
            executor, result = _executor(), [{"state": "failed", "reason": _cause(error)}] * jobs
        self._idle.append(executor)
        return result

    def close(self) -> None:
        """Kill all processes."""
        for executor in (*self._idle, *self._busy.values()):
            executor.shutdown(kill_workers=True)


def _executor() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, env=dict.fromkeys(THREADS, "1"), initializer=_begin, initargs=(os.getpid(),)
    )


def _submit(
    executor: ProcessPoolExecutor, work: Callable[..., Any], *arguments: Any
) -> "Future[Any]":
    """Submit work with signals blocked, which a new process inherits: Ctrl-C must reach only the
    parent.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        return executor.submit(work, *arguments)  # type: ignore[no-any-return]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int) -> None:
    """Initialize a new process: ignore signals, print to stderr, and exit with the parent."""
    for one in _SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    os.dup2(2, 1)
    with contextlib.suppress(ImportError):  # comes with `datasets`
        from tqdm import tqdm

        # its own is a semaphore, which Python reports as leaked after the kill
        tqdm.set_lock(threading.RLock())
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(TICK)
    os._exit(0)  # the run can resume from its checkpoints


def _cause(error: BaseException) -> str:
    """Why a process ended, from loky's error."""
    codes = re.search(r"\{(.*)\}", str(error))
    if codes and "SIGKILL" in codes[1]:
        return "its process was killed, perhaps out of memory: use fewer workers, or a smaller run"
    return f"its process ended with {codes[1] if codes else error}"
