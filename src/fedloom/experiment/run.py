"""One run, from a config to a folder. Only here are results logged, saved and evaluated."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch

from fedloom.core.engine import UNREACHABLE, Failure
from fedloom.core.errors import ConfigError, DataError, EngineError
from fedloom.core.paths import refuse_file
from fedloom.engines import Engine, Lost
from fedloom.experiment.config import RunConfig
from fedloom.experiment.engine import start
from fedloom.experiment.own import Files
from fedloom.experiment.secret import secret
from fedloom.experiment.session import Result, Session, Status, Stopped
from fedloom.experiment.world import build

if TYPE_CHECKING:
    from fedloom.remote.federation import FederationConfig

__all__ = ["Result", "Status", "Stopped", "agree", "execute", "settle"]


def execute(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    start: Callable[..., Engine] = start,
    files: Files | None = None,
) -> Result:
    """Do one run.

    Args:
        run: its config.
        folder: where to write; None writes nothing.
        resume: go on from the folder's last checkpoint, if it has one. The results are bit-identical to those
            of a run that was never interrupted.
        progress: told after each round.
        stop: asked after each round; when it says so, the run saves a checkpoint and raises `Stopped`.
        start: makes the engine: see `fedloom.experiment.engine.start`.
        files: what the coordinator of a run whose parties are at nodes has of its data; None for what the federation's
            file says.

    Raises:
        ConfigError, DataError, ModelError: the run can't be built; nothing was written.
        CheckpointError: the folder's checkpoints are torn or belong to another run.
        Stopped: see `stop`.
    """
    with _alone():
        started = perf_counter()
        files = files or _files(run)
        if run.columns.own and files is not None and run.engine.name == "net":
            files = _matched(run, folder, files, resume)
        world = build(run, files, secret=_secret(run))
        with start(world, folder, resume=resume, stop=stop) as engine:
            if not engine.remote:  # whose parties have been compared already
                _steadily(lambda: agree(engine, world.held.public_digest))
            session = Session(world, engine, folder)
            _steadily(lambda: session.begin(resume))
            session.record.spend("setup", perf_counter() - started)
            with session.live.until_the_end(session.done):
                return session.go(progress or (lambda _: None), stop)


def _federation(run: RunConfig) -> FederationConfig | None:
    """What the coordinator knows of the federation; None where all parties are on this machine, or an extra is missing,
    as the engine will say."""
    if run.engine.name != "net":
        return None
    try:
        from fedloom.remote.federation import DEFAULT, read
    except ImportError:
        return None
    return read(Path(run.engine.federation or DEFAULT))


def _files(run: RunConfig) -> Files | None:
    """What a coordinator has of a run's data; None where all parties are on this machine."""
    if run.engine.name != "net":
        return None
    found = _federation(run)
    own = None if found is None else found.data.get(run.data.name)
    return Files() if own is None else Files(rows=own.rows, public=own.public)


def _secret(run: RunConfig) -> int | None:
    """What the noise of parties in the coordinator's house depends on; None for the seed alone."""
    found = _federation(run)
    return None if found is None or not found.secret_noise else secret(found.secret)


def _matched(run: RunConfig, folder: Path | None, files: Files, resume: bool) -> Files:
    """The same files, once it is known whose rows are the same person's."""
    try:
        from fedloom.experiment.matching import match
    except ImportError as error:
        raise EngineError(f"the net engine needs an extra ({error}): pip install 'fedloom[net]'") from None
    return match(run, folder, files, resume=resume)


def _steadily(work: Callable[[], None]) -> None:
    """Do what begins with parties as they were made, again if a machine was lost in it."""
    while True:
        try:
            return work()
        except Lost as lost:
            logging.getLogger("fedloom").warning("%s; beginning again", lost)


def agree(engine: Engine, digest: str) -> None:
    """Every party must hold the same public rows in the same order.

    Raises:
        DataError: one holds others; what it would learn from, and answer to, would be other rows.
    """
    for party, found in zip(engine.ids, engine.call(engine.ids, "public_digest", {}, None, None), strict=True):
        if isinstance(found, Failure) and found.reason == UNREACHABLE:
            continue  # it was compared when it was there
        if found not in (digest, None):
            raise DataError(
                f"{engine.name(party)} holds another public set: its digest is {str(found)[:16]}…, not "
                f"{digest[:16]}…. All parties must hold the same rows in the same order."
            )


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One thread, and torch's generator as it was before.

    More threads a process are slower for networks of this size, and not repeatable.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(before)


def settle(folder: Path, *, resume: bool, several: bool = False) -> None:
    """Refuse a folder that a run must not write to, or `several` runs, each in a folder within.

    Raises:
        ConfigError: it is no folder; it is not empty and `resume` is not set; or it is to be resumed, and holds
            things but no run.
    """
    refuse_file(folder)
    if not resume and folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; add --resume to go on with its run, or choose another --out")
    held = {p.name for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    if held and not (("config.toml" in held) if several else (folder / "config.toml").is_file()):
        raise ConfigError(f"{folder} holds files but no run to go on with; choose another --out")
