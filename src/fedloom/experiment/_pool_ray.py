"""Jobs as tasks of a Ray cluster, each in a folder on a disk that all nodes share."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray import exceptions as lost

from fedloom.engines._ray_cluster import RayCluster
from fedloom.experiment._pool_job import MEMORY, do

TICK: Final = 0.5
"""Seconds between two looks at whether to stop."""


class RayTasks:
    """As many tasks at a time as the cluster has CPUs.

    Args:
        address: of the cluster; None starts one on this machine.
        workers: for how many jobs it must have room.
        gpus: of a GPU what the most demanding job takes.
    """

    def __init__(self, address: str | None, workers: int, gpus: float) -> None:
        self._cluster = RayCluster(address, workers if address is None else 1, 1.0, gpus)
        self._task = ray.remote(do)
        self._running: set[Any] = set()

    @property
    def room(self) -> int:
        """How many more jobs can begin now."""
        return int(ray.cluster_resources().get("CPU", 1)) - len(self._running)

    def submit(self, *order: Any, gpus: float) -> Any:
        """Begin a job; arguments as those of `do`, and what of a GPU it takes."""
        reference = self._task.options(num_cpus=1, num_gpus=gpus, max_retries=0).remote(*order)
        self._running.add(reference)
        return reference

    def wait(self, running: Sequence[Any]) -> list[Any]:
        """Those that have ended, after at most a tick."""
        done: list[Any] = ray.wait([*running], num_returns=1, timeout=TICK)[0]
        return done

    def result(self, reference: Any) -> dict[str, Any]:
        """How a job ended."""
        self._running.discard(reference)
        try:
            found: dict[str, Any] = ray.get(reference)
        except lost.OutOfMemoryError:
            return {"state": "failed", "reason": MEMORY}
        except lost.RayError as error:
            return {"state": "failed", "reason": f"the cluster lost it ({type(error).__name__})"}
        return found

    def close(self) -> None:
        """Cancel all jobs, and end the cluster if it was started for them."""
        for reference in self._running:
            with contextlib.suppress(lost.RayError):
                ray.cancel(reference, force=True)
        self._cluster.close()
