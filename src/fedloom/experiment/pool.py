"""Many runs side by side: in processes on this machine that are kept from run to run, or as tasks of a Ray cluster.

A run that fails leaves the others alone. A finished run is not done again, and an unfinished one resumes from its
checkpoint, so that the same call after a stop or a kill ends with the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from fedloom.core.errors import ConfigError, EngineError, FedloomError
from fedloom.data.cache import files_key
from fedloom.data.sources import SOURCES
from fedloom.experiment.config import RunConfig, validated
from fedloom.experiment.node_party import config_sha256
from fedloom.experiment.run import Result, execute
from fedloom.experiment.view import FILE
from fedloom.models import external

if TYPE_CHECKING:
    from fedloom.experiment._pool_processes import Processes
    from fedloom.experiment._pool_ray import RayTasks

State = Literal["kept", "finished", "failed", "stopped", "left"]
"""How a job ended: it was finished before; it is now; it failed; it was stopped, or never begun, as all should stop."""
CHANGED = "its page, or another file of your own, was changed since this was planned: repeat the command"
LOCAL = "local"
"""In place of a Ray cluster's address: one that is started on this machine."""
PAUSE = 1.0
"""Least seconds between two looks at how far jobs are."""
TOGETHER = ("auto", "batched")
"""Engines that add up in another order."""


@dataclass(frozen=True)
class Job:
    """A run to do.

    Attributes:
        folder: its own, which nothing else is written to.
        name: what a person calls it; its method and seed if empty.
        cost: how long it takes, in any unit; the longest is done first.
        digest: of the run when it was planned; empty for that when all are begun.
    """

    run: RunConfig
    folder: Path
    name: str = ""
    cost: float = 1.0
    digest: str = ""

    @property
    def title(self) -> str:
        """The name."""
        return self.name or f"{self.run.name or self.run.method} seed {self.run.seed}"

    @property
    def as_planned(self) -> bool:
        """Whether its run still has the digest of the plan: a page may be edited while others are at work."""
        try:
            return digest(self.run) == self.digest
        except (FedloomError, OSError):  # in the middle of an edit
            return False


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        reason: why it failed or where it stopped, in a line that holds nothing of the data.
        seconds: that it took this time.
    """

    job: Job
    state: State
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """How far all are.

    Attributes:
        of: how many jobs there are.
        done: how many are finished, with the `kept` that were before.
        running: names and shares done of those under way; none where a cluster doesn't tell.
        left: seconds until all are done, if something is known of it.
        ended: the job that has just ended, if that is the news.
    """

    of: int
    done: int
    kept: int
    failed: int
    running: tuple[tuple[str, float], ...] = ()
    left: float | None = None
    ended: Ended | None = None


def run_all(
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    ray: str | None = None,
    gpus: float = 0.0,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., Result] = execute,
) -> list[Ended]:
    """Do all jobs that are not finished yet; how each ended, in their order.

    Args:
        jobs: what to do; no two in one folder.
        workers: processes of one thread each; None for `usual_workers`. Of a cluster that is there already: not asked.
        ray: do each as a task of a Ray cluster: its address, `auto`, or `local` for one on this machine. The folders
            must be on a disk that all its nodes share.
        gpus: of a GPU what each task on Ray takes; 0 for what the run's engine says.
        progress: called at each change.
        stop: polled; once it returns True, runs under way save a checkpoint after their round.
        execute: does one run; a function of a module, which workers import.

    Raises:
        ConfigError: a folder holds another run, two jobs share one, or a run is not valid.
        EngineError: no process can be started, or there is no such cluster.
    """
    jobs = [replace(job, digest=job.digest or digest(job.run)) for job in jobs]
    folders = [job.folder.resolve() for job in jobs]
    if len(set(folders)) < len(folders):
        raise ConfigError("two runs can't share a folder: name one for each")
    board = Board(jobs, progress)
    waiting = []
    for job in jobs:
        if is_finished(job.run, job.folder):
            board.end(job, "kept")
        else:
            waiting.append(job)
    waiting.sort(key=lambda job: -job.cost)
    if waiting and not stop():
        board.workers = max(1, min(workers or usual_workers([job.run for job in waiting]), len(waiting)))
        _work(waiting, board, stop, _executor(board, waiting, ray, gpus), gpus, execute)
    return [board.ended.get(id(job), Ended(job, "left")) for job in jobs]


def usual_workers(runs: Iterable[RunConfig]) -> int:
    """As many as this process may use cores; one where a run is on a GPU."""
    if any(run.engine.device != "cpu" for run in runs):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digest(run: RunConfig) -> str:
    """16 hex digits of all that can move a number of a run: equal for equal runs, whatever they are called, and
    however many workers they have. What is in files and modules of one's own counts too.

    Raises:
        ConfigError: as `RunConfig.resolve` does.
    """
    method, cfg, _ = run.resolve()
    named = (run.pretrained.file, run.topology.file, run.columns.manifest, *(run.columns.files or ()))
    files = [_content(Path(path)) for path in named if path and Path(path).is_file()]
    which = [method.name] if run.method_is_file else []  # the page itself counts anyway, but may hold several
    place = [run.engine.name in TOGETHER, run.engine.device, *files, *_own(run), *which]
    return hashlib.sha256(f"{config_sha256(run, cfg)}\n{json.dumps(place)}".encode()).hexdigest()[:16]


def _own(run: RunConfig) -> Iterator[str]:
    """What data and modules of one's own come to, where a run names such; a folder by its files' sizes and times."""
    if run.data.name not in SOURCES and not run.data.own:
        path = Path(run.data.name).expanduser()
        if path.is_file():
            yield _content(path)
        elif path.is_dir():
            yield files_key(path)
    for name in (*(run.models.pool or ()), run.data.partition, run.pretrained.model or ""):
        if source := _source(name):
            yield _content(source)


def _source(name: str) -> Path | None:
    """The file behind `package.module:name`; None for what is fedloom's own or no such name."""
    module, colon, _ = name.partition(":")
    if not colon or module.partition(".")[0] == "fedloom" or external.is_external(name):
        return None
    try:
        spec = find_spec(module)
    except Exception:  # whatever its package does when imported; the run will say so
        return None
    source = Path(spec.origin) if spec is not None and spec.origin else None
    return source if source is not None and source.is_file() else None


def _content(path: Path) -> str:
    stat = path.stat()
    return _sha256(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=256)
def _sha256(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_finished(run: RunConfig, folder: Path) -> bool:
    """Whether the folder has the results of this run.

    Raises:
        ConfigError: it holds another run.
    """
    try:
        values = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.toml'} can't be read ({type(error).__name__}): remove {folder}") from None
    try:
        same = digest(validated(RunConfig, values)) == digest(run)
    except FedloomError:  # of another version, perhaps
        same = False
    if not same:
        raise ConfigError(f"{folder} holds a run with other settings: remove it, or choose another folder")
    return (folder / "result.json").is_file()


@dataclass
class Board:
    """The state of all jobs, and who is notified of changes."""

    jobs: Sequence[Job]
    progress: Callable[[Standing], None]
    workers: int = 1
    ended: dict[int, Ended] = field(default_factory=dict)
    under_way: dict[int, tuple[Job, float, float]] = field(default_factory=dict)
    next_look: float = 0.0

    def is_due(self, job: Job) -> bool:
        """Whether it is still to be done; it has failed if it was changed."""
        if not (due := job.as_planned):
            self.end(job, "failed", CHANGED)
        return due

    def begin(self, job: Job) -> None:
        """It is under way."""
        self.under_way[id(job)] = (job, monotonic(), 0.0)
        self._show()

    def look(self) -> None:
        """See how far the jobs under way are, now and then."""
        if monotonic() < self.next_look:
            return
        self.next_look = monotonic() + PAUSE
        found = {key: (job, since, _share(job)) for key, (job, since, _) in self.under_way.items()}
        if found != self.under_way:
            self.under_way = found
            self._show()

    def end(self, job: Job, state: State, reason: str = "", seconds: float = 0.0) -> None:
        """It has ended so; but a run that is finished and was changed meanwhile has failed, and leaves no result."""
        if state == "finished" and not job.as_planned:
            (job.folder / "result.json").unlink(missing_ok=True)
            state, reason = "failed", CHANGED
        self.under_way.pop(id(job), None)
        self.ended[id(job)] = ended = Ended(job, state, reason, seconds)
        self._show(ended)

    def _show(self, ended: Ended | None = None) -> None:
        states = [e.state for e in self.ended.values()]
        kept, failed = states.count("kept"), states.count("failed")
        running = tuple((job.title, share) for job, _, share in self.under_way.values())
        done = kept + states.count("finished")
        self.progress(Standing(len(self.jobs), done, kept, failed, running, self._left(), ended))

    def _left(self) -> float | None:
        """At the pace of what finished."""
        new = [e for e in self.ended.values() if e.state == "finished"]
        if not new:
            return None
        pace = sum(e.seconds for e in new) / sum(e.job.cost for e in new)
        gone = {id(job): monotonic() - since for job, since, _ in self.under_way.values()}
        each = [max(j.cost * pace - gone.get(id(j), 0.0), 0.0) for j in self.jobs if id(j) not in self.ended]
        return max(sum(each) / self.workers, max(each, default=0.0))


def _executor(board: Board, waiting: Sequence[Job], ray: str | None, gpus: float) -> Processes | RayTasks:
    """What does the jobs."""
    if ray is None:
        from fedloom.experiment._pool_processes import Processes

        return Processes(board.workers)
    try:
        from fedloom.experiment._pool_ray import RayTasks
    except ImportError as error:
        raise EngineError(f"--ray needs an extra ({error}): pip install 'fedloom[ray]'") from None
    tasks = RayTasks(None if ray == LOCAL else ray, board.workers, max(gpus or _gpus(job) for job in waiting))
    board.workers = max(board.workers, min(len(waiting), tasks.room))
    return tasks


def _work(
    waiting: Sequence[Job],
    board: Board,
    stop: Callable[[], bool],
    executor: Processes | RayTasks,
    gpus: float,
    execute: Callable[..., Result],
) -> None:
    """Do the jobs. A file, on a disk that all share, tells them to save and stop."""
    flag = waiting[0].folder.resolve().parent / f".stop-{uuid.uuid4().hex}"
    left, running = deque(waiting), dict[Any, Job]()
    try:
        while left or running:
            if not flag.exists() and stop():
                flag.parent.mkdir(parents=True, exist_ok=True)
                flag.touch()
                left.clear()
            while left and executor.room:
                job = left.popleft()
                if not board.is_due(job):
                    continue
                order = (job.run.model_dump_json(), str(job.folder.resolve()), str(flag), execute)
                running[executor.submit(*order, gpus=gpus or _gpus(job))] = job
                board.begin(job)
            for done in executor.wait([*running]):
                board.end(running.pop(done), **executor.result(done))
            board.look()
    finally:
        executor.close()
        flag.unlink(missing_ok=True)


def _gpus(job: Job) -> float:
    """What of a GPU the run's engine takes."""
    engine = job.run.engine
    return engine.gpus_per_worker or float(engine.device != "cpu")


def _share(job: Job) -> float:
    """How much of a run under way is done, as its folder shows."""
    try:
        seen = json.loads((job.folder / FILE).read_bytes())
        return float(seen["round"] / seen["rounds"])
    except (OSError, ValueError, KeyError):  # it has not begun
        return 0.0
