"""Executes one job of a pool in a worker: locks its folder, logs to a file, and maps errors to
states.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import get_ident
from time import perf_counter
from typing import Any, Final

from fedloom.core.errors import CheckpointError, FedloomError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.run_digest import is_finished
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import RunResult, Stopped
from fedloom.experiment.run.lockstep import run_in_lockstep
from fedloom.support.paths import locked

LOG: Final = "run.log"
"""Log of warnings and errors in the run folder."""
LOCK: Final = ".lock"
"""Lock file in the run folder."""
BUSY: Final = "another process is running it"
_BEFORE: Final[list[logging.Handler]] = []
"""The process's own log handlers while runs log to their files."""
MEMORY: Final = "out of memory: use fewer workers, or a smaller run"


def do(text: str, folder: str, flag: str, execute: Callable[..., RunResult]) -> dict[str, Any]:
    """Execute or resume a run; delete its checkpoints when it has finished.

    Args:
        text: its config as JSON.
        folder: the run folder.
        flag: path of a file; once it exists, the run saves a checkpoint after its round and stops.
        execute: executes one run, see `fedloom.experiment.run.execute`.

    Returns:
        The arguments of `Ended`, without the job: state, reason and seconds. A run in another
        process is "left".
    """
    started, path = perf_counter(), Path(folder)
    if Path(flag).exists():
        return _ended("left", started)
    work = partial(execute, resume=True, stop=Path(flag).exists)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with locked(path / LOCK) as free:
            state, reason = _run(text, path, work) if free else ("left", BUSY)
    except OSError as error:  # no log can be written
        state, reason = "failed", _describe(error)
    return _ended(state, started, reason)


def do_all(
    orders: Sequence[tuple[str, str]], flag: str, execute: Callable[..., RunResult]
) -> list[dict[str, Any]]:
    """Execute runs, each given by its config as JSON and its folder; several in lock-step, which
    share the seconds.
    """
    if len(orders) == 1:
        return [do(*orders[0], flag, execute)]
    started = perf_counter()
    first = RunConfig.model_validate_json(orders[0][0])
    ended = run_in_lockstep(
        first.engine,
        [partial(_do_with, text, folder, flag, execute) for text, folder in orders],
    )
    seconds = (perf_counter() - started) / len(orders)
    failed = [
        _ended("failed", started, _describe(e)) if isinstance(e, BaseException) else e
        for e in ended
    ]
    return [{**result, "seconds": seconds} for result in failed]


def _do_with(
    text: str,
    folder: str,
    flag: str,
    execute: Callable[..., RunResult],
    backend: Callable[..., Backend],
) -> dict[str, Any]:
    return do(text, folder, flag, partial(execute, backend=backend))


def _run(text: str, folder: Path, work: Callable[[RunConfig, Path], RunResult]) -> tuple[str, str]:
    """Execute the run in its locked folder; its state and a reason."""
    with _logged(folder / LOG):
        try:
            run = RunConfig.model_validate_json(text)
            if is_finished(run, folder):
                return "kept", ""
            try:
                work(run, folder)
            except CheckpointError as error:  # starting again is safe
                if not (folder / "checkpoints").is_dir():
                    raise
                logging.getLogger("fedloom").warning("%s; starting again", error)
                shutil.rmtree(folder / "checkpoints")
                work(run, folder)
        except Stopped as stopped:
            return "stopped", str(stopped)
        except FedloomError as error:
            logging.getLogger("fedloom").error("%s", error)
            return "failed", str(error).partition("\n")[0][:300]
        except Exception as error:
            logging.getLogger("fedloom").exception("the run failed")
            return "failed", _describe(error)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return "finished", ""


def _ended(state: str, started: float, reason: str = "") -> dict[str, Any]:
    return {"state": state, "reason": reason, "seconds": perf_counter() - started}


def _describe(error: BaseException) -> str:
    """An unexpected error without private content."""
    kind = type(error).__name__
    memory = (
        isinstance(error, MemoryError)
        or kind == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
    if isinstance(error, OSError) and error.strerror and not memory:  # such as a full disk
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return MEMORY if memory else f"{kind}: see {LOG} in its folder"


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore a full disk: the run itself fails."""


@contextlib.contextmanager
def _logged(file: Path) -> Iterator[None]:
    """Send this thread's log records and warnings to the file."""
    root = logging.getLogger()
    thread = get_ident()
    handler = _Log(file, delay=True, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-8s %(message)s"))
    handler.setLevel("WARNING")
    handler.addFilter(lambda record: record.thread == thread)
    _BEFORE.extend(h for h in root.handlers if not isinstance(h, _Log))
    root.handlers = [*(h for h in root.handlers if isinstance(h, _Log)), handler]
    logging.captureWarnings(True)
    try:
        yield
    finally:
        root.handlers.remove(handler)
        handler.close()
        if not root.handlers:  # the last run that was in lock-step
            logging.captureWarnings(False)
            root.handlers = [*_BEFORE]
            _BEFORE.clear()
