"""One run among many: how it is done and how it may end; and the life of a process that does one after the other.

Such a process reads orders from its standard input and writes news to its standard output, one JSON a line. It ends
when its input does, so that none outlives who started it, not even one that was killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, Final

from fedloom.core.errors import CheckpointError, FedloomError
from fedloom.core.paths import lock
from fedloom.experiment.config import RunConfig
from fedloom.experiment.pool import is_finished
from fedloom.experiment.run import Result, Status, Stopped, execute

LOG: Final = "run.log"
"""What a run warned of, and why it failed, in its folder."""
LOCK: Final = ".lock"
"""A file in its folder that the process holds which does it."""
BUSY: Final = "another process is at it"
PAUSE: Final = 0.5
"""Least seconds between two pieces of news of one run."""
MEMORY: Final = "out of memory: take fewer workers, or a smaller run"


def do(
    text: str, folder: str, stop: Callable[[], bool], tell: Callable[[Status], None] = lambda _: None
) -> dict[str, Any]:
    """Do a run, or go on with it, and keep no checkpoint of one that is finished.

    Args:
        text: its config as JSON.
        folder: where it writes to.
        stop: see `execute`.
        tell: told after each round.

    Returns:
        How it ended: its state (kept if another process has finished it, finished, failed, stopped, or left, also to
        a process that is at it), a reason that holds nothing of the data, seconds.
    """
    started, where = perf_counter(), Path(folder)
    if stop():
        return _ended("left", started)
    try:
        where.mkdir(parents=True, exist_ok=True)
        with _alone(where) as alone:
            state, reason = _done(text, where, stop, tell) if alone else ("left", BUSY)
    except OSError as error:  # of its folder, so it could not be logged either
        state, reason = "failed", _words(error)
    return _ended(state, started, reason)


def _done(text: str, where: Path, stop: Callable[[], bool], tell: Callable[[Status], None]) -> tuple[str, str]:
    """Its state and the reason, in a folder that is this process's."""
    with _logged(where / LOG):
        try:
            run = RunConfig.model_validate_json(text)
            if is_finished(run, where):
                return "kept", ""
            _execute(run, where, stop, tell)
        except Stopped as stopped:
            return "stopped", str(stopped)
        except FedloomError as error:
            logging.getLogger("fedloom").error("%s", error)
            return "failed", str(error).partition("\n")[0][:300]
        except Exception as error:
            logging.getLogger("fedloom").exception("the run failed")
            return "failed", _words(error)
    shutil.rmtree(where / "checkpoints", ignore_errors=True)
    return "finished", ""


def _execute(run: RunConfig, folder: Path, stop: Callable[[], bool], tell: Callable[[Status], None]) -> Result:
    """Go on from the run's checkpoint, or begin again where it can't be used: that costs time alone."""
    try:
        return execute(run, folder, resume=True, progress=tell, stop=stop)
    except CheckpointError as error:
        if not (folder / "checkpoints").is_dir():
            raise
        logging.getLogger("fedloom").warning("%s; beginning again", error)
        shutil.rmtree(folder / "checkpoints")
        return execute(run, folder, resume=True, progress=tell, stop=stop)


def _ended(state: str, started: float, reason: str = "") -> dict[str, Any]:
    return {"state": state, "reason": reason, "seconds": perf_counter() - started}


def _words(error: Exception) -> str:
    """What of an error that nobody foresaw may be told: its kind."""
    kind = type(error).__name__
    short = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if isinstance(error, OSError) and error.strerror and not short:  # such as a full disk
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return MEMORY if short else f"{kind}: see {LOG} in its folder"


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no other process is at this folder, as none will be within it: the kernel lets go even after a kill."""
    with (folder / LOCK).open("a") as file:
        yield lock(file)


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that is full is told of by the run that fails of it."""


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Within it what is logged or warned of goes to the file."""
    root, handler = logging.getLogger(), _Log(file, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s"))
    handler.setLevel("WARNING")
    before, root.handlers = root.handlers, [handler]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers = before
        handler.close()


def serve() -> None:
    """Do what the parent orders, until it lets go."""
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, signal.SIG_IGN)  # the parent says when to stop
    news = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anybody prints is no news
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    stopping = threading.Event()
    threading.Thread(target=_listen, args=(orders, stopping), daemon=True).start()

    def send(frame: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # then we are about to end
            print(json.dumps(frame), file=news, flush=True)

    send({"ready": os.getpid()})
    while True:
        order = orders.get()
        send({"ended": do(order["run"], order["folder"], stopping.is_set, _reporter(send))})


def _listen(orders: queue.SimpleQueue[dict[str, Any]], stopping: threading.Event) -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if "stop" in order:
            stopping.set()
        else:
            orders.put(order)
    os._exit(0)  # the parent is gone: its checkpoints are what is left of the run


def _reporter(send: Callable[[dict[str, Any]], None]) -> Callable[[Status], None]:
    """Sends how far a run is, not too often."""
    last = monotonic()

    def tell(status: Status) -> None:
        nonlocal last
        if monotonic() - last >= PAUSE:
            last = monotonic()
            send({"share": status.round / status.rounds})

    return tell


if __name__ == "__main__":
    serve()
