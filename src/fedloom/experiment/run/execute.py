"""Executes one run, from its config to the files of its folder."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from fedloom.core.black_box import libraries_on_one_thread
from fedloom.core.engine import UNREACHABLE, Failure
from fedloom.core.errors import ConfigError, DataError
from fedloom.engines import Engine, Lost
from fedloom.engines.repeatable import repeatable
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.run.engine import Backend, local_backend
from fedloom.experiment.run.live import Stopped
from fedloom.experiment.run.session import RunResult, Session, Status
from fedloom.support.paths import locked, refuse_file

__all__ = ["RunResult", "Status", "Stopped", "agree", "execute", "settle"]


def execute(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    backend: Callable[..., Backend] = local_backend,
    keep_models: bool = False,
) -> RunResult:
    """Execute one run.

    Args:
        run: the config.
        folder: the run folder; None writes nothing.
        resume: continue from the folder's last checkpoint, if any. The results are bit-identical to
            those of an uninterrupted run.
        progress: called after each round.
        stop: called after each round; if it returns True, the run saves a checkpoint and raises
            `Stopped`.
        backend: called with the run, its folder, `resume` and `stop`; returns where the parties
            run.
        keep_models: whether the result has the trained networks, in `trained`.

    Raises:
        ConfigError, DataError, ModelError: the run cannot be built; nothing was written.
        CheckpointError: the folder's checkpoints are corrupt or belong to another run.
        Stopped: see `stop`.
    """
    with one_thread(), repeatable(run.engine.device):
        started = perf_counter()
        place = backend(run, folder, resume=resume, stop=stop)
        plan = build(run, place.files, secret=place.secret)
        # a later coordinator takes over
        with place.start(plan) as engine, alone_in(None if engine.remote else folder):
            if not engine.remote:  # remote parties are checked when they connect
                _repeat_if_lost(lambda: agree(engine, plan.data.public_digest))
            session = Session(plan, engine, folder)
            _repeat_if_lost(lambda: session.begin(resume))
            session.record.spend("setup", perf_counter() - started)
            with session.live.reporting(session.done):
                return session.go(progress or (lambda _: None), stop, keep_models)


@contextlib.contextmanager
def alone_in(folder: Path | None) -> Iterator[None]:
    """A context in which no other process runs in this folder.

    Raises:
        ConfigError: another one does.
    """
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / ".running"
    with locked(file) as free:
        if not free:
            raise ConfigError(
                f"another process is running in {folder}: wait until it ends, or choose another "
                "--out"
            )
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _repeat_if_lost(work: Callable[[], None]) -> None:
    """Do the work, and repeat it as long as a machine is lost."""
    while True:
        try:
            return work()
        except Lost as lost:
            logging.getLogger("fedloom").warning("%s; repeating the setup", lost)


def agree(engine: Engine, digest: str) -> None:
    """Check that all parties hold the same public rows in the same order.

    Raises:
        DataError: a party holds different rows.
    """
    for party, reply in zip(
        engine.ids, engine.call(engine.ids, "public_digest", {}, None, None), strict=True
    ):
        if isinstance(reply, Failure) and reply.reason == UNREACHABLE:
            continue  # it was checked when it connected
        if reply not in (digest, None):
            raise DataError(
                f"{engine.name(party)} holds different public rows: their digest is "
                f"{str(reply)[:16]}…, not {digest[:16]}…; give all parties the same rows in the "
                "same order"
            )


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread in torch and NumPy, and restore torch's generator on exit. More threads are
    slower for small networks and matrices, much so on a busy machine, and their sums are not
    repeatable.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), libraries_on_one_thread():
            yield
    finally:
        torch.set_num_threads(before)


def settle(folder: Path, *, resume: bool, several: bool = False) -> None:
    """Check the output folder of a run, or of `several` runs in subfolders.

    Raises:
        ConfigError: it is a file; or it is not empty, and there is no `resume` or no run to resume.
    """
    refuse_file(folder)
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} is not empty; add --resume to continue its run, or choose another --out"
        )
    names = {p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    if names and not (("config.toml" in names) if several else (folder / "config.toml").is_file()):
        raise ConfigError(f"{folder} has files but no run to resume; choose another --out")
