"""Runs jobs as tasks of a Ray cluster, in folders on a shared file system."""

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import ray
from ray import exceptions

from fedloom.engines._ray_cluster import RayCluster
from fedloom.experiment.pool.job import MEMORY, do_all

TICK: Final = 0.5
"""Seconds between two polls."""


class RayTasks:
    """Runs one task per CPU of the cluster.

    Args:
        address: of the cluster; None starts one on this machine.
        workers: tasks at a time, on a cluster that is started.
        gpus: largest share of a GPU that a job takes.
    """

    def __init__(self, address: str | None, workers: int, gpus: float) -> None:
        self._cluster = RayCluster(address, workers if address is None else 1, 1.0, gpus)
        self._task = ray.remote(do_all)
        self._running: set[Any] = set()

    @property
    def room(self) -> int:
        """Number of free slots."""
        return int(ray.cluster_resources().get("CPU", 1)) - len(self._running)

    def submit(self, *order: Any, gpus: float) -> Any:
        """Start a job; arguments as in `do_all`, and its share of a GPU."""
        reference = self._task.options(num_cpus=1, num_gpus=gpus, max_retries=0).remote(*order)
        self._running.add(reference)
        return reference

    def wait(self, running: Sequence[Any]) -> list[Any]:
        """The jobs that have ended, after at most `TICK` seconds."""
        done: list[Any] = ray.wait([*running], num_returns=1, timeout=TICK)[0]
        return done

    def result(self, reference: Any, jobs: int) -> list[dict[str, Any]]:
        """How the jobs of an order ended."""
        self._running.discard(reference)
        try:
            result: list[dict[str, Any]] = ray.get(reference)
        except exceptions.OutOfMemoryError:
            return [{"state": "failed", "reason": MEMORY}] * jobs
        except exceptions.RayError as error:
            return [
                {"state": "failed", "reason": f"lost by the cluster ({type(error).__name__})"}
            ] * jobs
        return result

    def close(self) -> None:
        """Cancel all jobs, and stop the cluster if it was started here."""
        for reference in self._running:
            with contextlib.suppress(exceptions.RayError):
                ray.cancel(reference, force=True)
        self._cluster.close()
