"""One job of a pool, in whichever process it is done: its folder's lock and log, and how it may end."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from fedloom.core.errors import CheckpointError, FedloomError
from fedloom.core.paths import lock
from fedloom.experiment.config import RunConfig
from fedloom.experiment.pool import is_finished
from fedloom.experiment.run import Result, Stopped

LOG: Final = "run.log"
"""A run's warnings, and why it failed, in its folder."""
LOCK: Final = ".lock"
"""A file in the folder, locked by the process that works there."""
BUSY: Final = "another process is at it"
MEMORY: Final = "out of memory: take fewer workers, or a smaller run"


def do(text: str, folder: str, flag: str, execute: Callable[..., Result]) -> dict[str, Any]:
    """Do a run, or resume it, and keep no checkpoint of one that is finished.

    Args:
        text: its config as JSON.
        folder: where it writes to.
        flag: a file; once it exists, the run saves a checkpoint after its round and stops.
        execute: does one run, see `fedloom.experiment.run.execute`.

    Returns:
        How it ended: its state (kept if another process has finished it, finished, failed, stopped, or left, also to
        another process), a reason that holds nothing of the data, seconds.
    """
    started, where = perf_counter(), Path(folder)
    if Path(flag).exists():
        return _ended("left", started)
    work = partial(execute, resume=True, stop=Path(flag).exists)
    try:
        where.mkdir(parents=True, exist_ok=True)
        with _locked(where) as locked:
            state, reason = _done(text, where, work) if locked else ("left", BUSY)
    except OSError as error:  # of its folder, so it could not be logged either
        state, reason = "failed", _words(error)
    return _ended(state, started, reason)


def _done(text: str, where: Path, work: Callable[[RunConfig, Path], Result]) -> tuple[str, str]:
    """Its state and the reason, in a folder that this process has locked."""
    with _logged(where / LOG):
        try:
            run = RunConfig.model_validate_json(text)
            if is_finished(run, where):
                return "kept", ""
            try:
                work(run, where)
            except CheckpointError as error:  # to begin again costs time alone
                if not (where / "checkpoints").is_dir():
                    raise
                logging.getLogger("fedloom").warning("%s; beginning again", error)
                shutil.rmtree(where / "checkpoints")
                work(run, where)
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


def _ended(state: str, started: float, reason: str = "") -> dict[str, Any]:
    return {"state": state, "reason": reason, "seconds": perf_counter() - started}


def _words(error: Exception) -> str:
    """An unforeseen error in words that hold nothing of the data: its kind."""
    kind = type(error).__name__
    short = isinstance(error, MemoryError) or kind == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if isinstance(error, OSError) and error.strerror and not short:  # such as a full disk
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return MEMORY if short else f"{kind}: see {LOG} in its folder"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock the folder; whether no other process holds the lock. The kernel frees it even after a kill."""
    with (folder / LOCK).open("a") as file:
        yield lock(file)


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: the run itself fails of it."""


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Within it log records and warnings go to the file."""
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
