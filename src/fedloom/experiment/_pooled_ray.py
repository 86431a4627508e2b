"""Many runs as tasks of a Ray cluster, each in a folder on a disk that all nodes share."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import exceptions as lost

from fedloom.engines._ray_pool import Fleet
from fedloom.experiment import _pooled

if TYPE_CHECKING:
    from fedloom.experiment.pool import Board, Job

TICK: Final = 0.5
"""Seconds between two looks at whether to stop."""


def run_all(waiting: Sequence[Job], board: Board, stop: Callable[[], bool], address: str | None, gpus: float) -> None:
    """See `fedloom.experiment.pool.run_all`. A flag on the shared disk tells tasks to save and stop."""
    needs = [gpus or _gpus(job) for job in waiting]
    room = board.hands if address is None else 1  # a cluster that is there runs as many as it has room for
    fleet = Fleet(address, room, 1.0, max(needs))
    flag = waiting[0].folder.resolve().parent / f".stop-{uuid.uuid4().hex}"
    running: dict[Any, Job] = {}
    try:
        board.hands = max(board.hands, min(len(waiting), int(ray.cluster_resources().get("CPU", 1))))
        task = ray.remote(_do)
        for job, share in zip(waiting, needs, strict=True):
            order = task.options(num_cpus=1, num_gpus=share, max_retries=0)
            running[order.remote(job.run.model_dump_json(), str(job.folder.resolve()), str(flag))] = job
        while running:
            if stop() and not flag.exists():
                flag.parent.mkdir(parents=True, exist_ok=True)
                flag.touch()
            for done in ray.wait([*running], num_returns=1, timeout=TICK)[0]:
                board.end(running.pop(done), **_answer(done))
    finally:
        for reference in running:
            with contextlib.suppress(lost.RayError):
                ray.cancel(reference, force=True)
        fleet.close()
        flag.unlink(missing_ok=True)


def _gpus(job: Job) -> float:
    """What of a GPU the run's engine takes."""
    engine = job.run.engine
    return engine.gpus_per_worker or float(engine.device != "cpu")


def _do(text: str, folder: str, flag: str) -> dict[str, Any]:
    return _pooled.do(text, folder, partial(Path.exists, Path(flag)))


def _answer(reference: Any) -> dict[str, Any]:
    """How a task ended."""
    try:
        found: dict[str, Any] = ray.get(reference)
    except lost.OutOfMemoryError:
        return {"state": "failed", "reason": _pooled.MEMORY}
    except lost.RayError as error:
        return {"state": "failed", "reason": f"the cluster lost it ({type(error).__name__})"}
    return found
