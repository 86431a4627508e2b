"""One run, from a config to a folder. Only here are results logged, saved and evaluated."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from fedloom.core.engine import UNREACHABLE, Failure
from fedloom.core.errors import ConfigError, DataError
from fedloom.core.paths import refuse_file
from fedloom.engines import Engine, Lost
from fedloom.experiment.build import build
from fedloom.experiment.config import RunConfig
from fedloom.experiment.engine import Backend, local_backend
from fedloom.experiment.live import Stopped
from fedloom.experiment.session import Result, Session, Status

__all__ = ["Result", "Status", "Stopped", "agree", "execute", "settle"]


def execute(
    run: RunConfig,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    backend: Callable[..., Backend] = local_backend,
) -> Result:
    """Do one run.

    Args:
        run: its config.
        folder: where to write; None writes nothing.
        resume: go on from the folder's last checkpoint, if it has one. The results are bit-identical to those
            of a run that was never interrupted.
        progress: told after each round.
        stop: asked after each round; when it says so, the run saves a checkpoint and raises `Stopped`.
        backend: called with the run, its folder, `resume` and `stop`: where the parties are.

    Raises:
        ConfigError, DataError, ModelError: the run can't be built; nothing was written.
        CheckpointError: the folder's checkpoints are torn or belong to another run.
        Stopped: see `stop`.
    """
    with _alone():
        started = perf_counter()
        found = backend(run, folder, resume=resume, stop=stop)
        plan = build(run, found.files, secret=found.secret)
        with found.start(plan) as engine:
            if not engine.remote:  # whose parties have been compared already
                _steadily(lambda: agree(engine, plan.data.public_digest))
            session = Session(plan, engine, folder)
            _steadily(lambda: session.begin(resume))
            session.record.spend("setup", perf_counter() - started)
            with session.live.until_the_end(session.done):
                return session.go(progress or (lambda _: None), stop)


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
