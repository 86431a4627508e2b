"""Runs many runs in parallel: in a pool of processes on this machine, or as tasks of a Ray cluster.

A failing run does not affect the others. Finished runs are skipped and unfinished ones resume from
checkpoints, so repeating a call after an interruption gives the same files.
"""

import json
import os
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from fedloom.core.errors import ConfigError, EngineError, FedloomError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.run_digest import digest, is_finished
from fedloom.experiment.pool.processes import Processes
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.experiment.run.lockstep import lots
from fedloom.experiment.run.view import FILE

if TYPE_CHECKING:
    from fedloom.experiment.pool.ray import RayTasks

__all__ = ["Ended", "Job", "Standing", "digest", "is_finished", "run_all", "usual_workers"]

State = Literal["kept", "finished", "failed", "stopped", "left"]
"""How a job ended: finished earlier, finished, failed, stopped at a checkpoint, or not started."""
CHANGED = "its method page or another of its files changed since it was planned: repeat the command"
LOCAL = "local"
"""The address that starts a Ray cluster on this machine."""
PAUSE = 1.0
"""Minimum seconds between two reads of the jobs' progress."""


@dataclass(frozen=True)
class Job:
    """A run to execute.

    Attributes:
        folder: its output folder, used by no other job.
        name: display name; "" for the method and seed.
        cost: expected duration in any unit; the longest jobs start first.
        digest: of the run when it was planned; "" to compute it at the start.
    """

    run: RunConfig
    folder: Path
    name: str = ""
    cost: float = 1.0
    digest: str = ""

    @property
    def title(self) -> str:
        """The display name."""
        return self.name or f"{self.run.label} seed {self.run.seed}"

    @property
    def as_planned(self) -> bool:
        """Whether the run's digest is unchanged: files may be edited while other jobs run."""
        try:
            return digest(self.run) == self.digest
        except (FedloomError, OSError):  # a half-edited file
            return False


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        reason: why it failed or where it stopped, in a line without private content.
        seconds: duration of this attempt.
    """

    job: Job
    state: State
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Standing:
    """Progress of all jobs.

    Attributes:
        of: number of jobs.
        done: number of finished jobs, including the `kept` ones.
        running: titles and completed shares of running jobs.
        left: estimated seconds until all are done; None if unknown.
        ended: the job that has just ended, if any.
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
    execute: Callable[..., RunResult] = execute,
) -> list[Ended]:
    """Execute all unfinished jobs; returns how each job ended, in order.

    Args:
        jobs: with distinct folders.
        workers: processes of one thread each; None for `usual_workers`. Ignored on a running Ray
            cluster.
        ray: run the jobs as tasks of a Ray cluster: its address, `auto`, or `local` to start one on
            this machine. The folders must be on a file system that all its nodes share.
        gpus: share of a GPU for each Ray task; 0 for that of the run's engine.
        progress: called at each change.
        stop: polled; once it returns True, running jobs save a checkpoint after their round.
        execute: executes one run; a module-level function, which workers import.

    Raises:
        ConfigError: a folder has another run, two jobs share a folder, or a run is invalid.
        EngineError: a process cannot be started, or the cluster cannot be reached.
    """
    jobs = [replace(job, digest=job.digest or digest(job.run)) for job in jobs]
    folders = [job.folder.resolve() for job in jobs]
    if len(set(folders)) < len(folders):
        raise ConfigError("two runs share a folder: give each its own")
    board = Board(jobs, progress)
    waiting = []
    for job in jobs:
        if is_finished(job.run, job.folder):
            board.end(job, "kept")
        else:
            waiting.append(job)
    waiting.sort(key=lambda job: -job.cost)
    if waiting and not stop():
        board.workers = max(
            1, min(workers or usual_workers([job.run for job in waiting]), len(waiting))
        )
        _work(waiting, board, stop, _executor(board, waiting, ray, gpus), gpus, execute)
    return [board.ended.get(id(job), Ended(job, "left")) for job in jobs]


def usual_workers(runs: Iterable[RunConfig]) -> int:
    """The number of available cores; 1 if a run is on a GPU."""
    if any(run.engine.device != "cpu" for run in runs):
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Board:
    """Tracks all jobs and reports their progress."""

    jobs: Sequence[Job]
    progress: Callable[[Standing], None]
    workers: int = 1
    ended: dict[int, Ended] = field(default_factory=dict)
    running: dict[int, tuple[Job, float, float]] = field(default_factory=dict)
    next_look: float = 0.0

    def is_due(self, job: Job) -> bool:
        """Whether to run the job. One whose files have changed fails instead."""
        if not (due := job.as_planned):
            self.end(job, "failed", CHANGED)
        return due

    def begin(self, job: Job) -> None:
        """Mark a job as running."""
        self.running[id(job)] = (job, monotonic(), 0.0)
        self._show()

    def look(self) -> None:
        """Read the progress of running jobs, at most every `PAUSE` seconds."""
        if monotonic() < self.next_look:
            return
        self.next_look = monotonic() + PAUSE
        running = {key: (job, since, _share(job)) for key, (job, since, _) in self.running.items()}
        if running != self.running:
            self.running = running
            self._show()

    def end(self, job: Job, state: State, reason: str = "", seconds: float = 0.0) -> None:
        """Mark a job as ended. A finished job whose files changed meanwhile fails, and its result
        is deleted.
        """
        if state == "finished" and not job.as_planned:
            (job.folder / "result.json").unlink(missing_ok=True)
            state, reason = "failed", CHANGED
        self.running.pop(id(job), None)
        self.ended[id(job)] = ended = Ended(job, state, reason, seconds)
        self._show(ended)

    def _show(self, ended: Ended | None = None) -> None:
        states = [e.state for e in self.ended.values()]
        kept, failed = states.count("kept"), states.count("failed")
        running = tuple((job.title, share) for job, _, share in self.running.values())
        done = kept + states.count("finished")
        self.progress(Standing(len(self.jobs), done, kept, failed, running, self._left(), ended))

    def _left(self) -> float | None:
        """Estimated seconds until all are done, at the pace of the finished jobs."""
        new = [e for e in self.ended.values() if e.state == "finished"]
        if not new:
            return None
        pace = sum(e.seconds for e in new) / sum(e.job.cost for e in new)
        elapsed = {id(job): monotonic() - since for job, since, _ in self.running.values()}
        each = [
            max(j.cost * pace - elapsed.get(id(j), 0.0), 0.0)
            for j in self.jobs
            if id(j) not in self.ended
        ]
        return max(sum(each) / self.workers, max(each, default=0.0))


def _executor(
    board: Board, waiting: Sequence[Job], ray: str | None, gpus: float
) -> "Processes | RayTasks":
    if ray is None:
        return Processes(board.workers)
    try:
        from fedloom.experiment.pool.ray import RayTasks
    except ImportError as error:
        raise EngineError(f"--ray needs an extra ({error}): pip install -e '.[ray]'") from None
    tasks = RayTasks(
        None if ray == LOCAL else ray, board.workers, max(gpus or _gpus(job) for job in waiting)
    )
    board.workers = max(board.workers, min(len(waiting), tasks.room))
    return tasks


def _work(
    waiting: Sequence[Job],
    board: Board,
    stop: Callable[[], bool],
    executor: "Processes | RayTasks",
    gpus: float,
    execute: Callable[..., RunResult],
) -> None:
    """Run the jobs. A flag file in the shared folder tells running ones to save and stop."""
    flag = waiting[0].folder.resolve().parent / f".stop-{uuid.uuid4().hex}"
    left = deque(
        [waiting[n] for n in numbers]
        for numbers in lots([job.run for job in waiting], board.workers)
    )
    running = dict[Any, list[Job]]()
    try:
        while left or running:
            if not flag.exists() and stop():
                flag.parent.mkdir(parents=True, exist_ok=True)
                flag.touch()
                left.clear()
            while left and executor.room:
                lot = [job for job in left.popleft() if board.is_due(job)]
                if not lot:
                    continue
                orders = [(job.run.model_dump_json(), str(job.folder.resolve())) for job in lot]
                running[executor.submit(orders, str(flag), execute, gpus=gpus or _gpus(lot[0]))] = (
                    lot
                )
                for job in lot:
                    board.begin(job)
            for done in executor.wait([*running]):
                for job, result in zip(
                    lot := running.pop(done), executor.result(done, len(lot)), strict=True
                ):
                    board.end(job, **result)
            board.look()
    finally:
        executor.close()
        flag.unlink(missing_ok=True)


def _gpus(job: Job) -> float:
    """Share of a GPU that the run's engine takes."""
    engine = job.run.engine
    return engine.gpus_per_worker or float(engine.device != "cpu")


def _share(job: Job) -> float:
    """Completed share of a running job, from its `live.json`."""
    try:
        view = json.loads((job.folder / FILE).read_bytes())
        return float(view["round"] / max(1, view["rounds"]))  # a run may have no rounds
    except (OSError, ValueError, KeyError):  # not started
        return 0.0
