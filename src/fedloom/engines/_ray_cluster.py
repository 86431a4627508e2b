"""The driver's side of Ray: join a cluster, start workers, call them, and detect their loss."""

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import ray
from ray import exceptions as lost
from ray._private import ray_constants

from fedloom.core.errors import EngineError, FedloomError
from fedloom.engines._party_bundle import WorkerLost
from fedloom.engines._shard import Shard, versions

START: Final = 180.0
"""Seconds for the first workers to start: on a busy node or from a shared disk, importing torch
takes a minute.
"""
PATIENCE: Final = 20.0
"""Seconds for a replacement worker to start, before the remaining workers take over its parties."""
KNOCK: Final = 5.0
"""Seconds for the head of a cluster to answer."""
STARTS: Final = 4
"""Attempts to start a cluster on this machine if Ray times out."""
ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage statistics
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_timeout_ms": "60000",
}
"""Settings of a cluster that fedloom starts, unless the user has set them. The timeouts tolerate a
busy machine.
"""
_LOSS: Final = (
    lost.RayActorError,
    lost.ObjectLostError,
    lost.NodeDiedError,
    lost.WorkerCrashedError,
    lost.OutOfMemoryError,
)


class RayCluster:
    """Workers on a cluster, by number; numbers are never reused. `RayEngine` describes the
    arguments. Raises EngineError if the cluster does not exist, has another version, or is too
    small for the workers.
    """

    def __init__(self, address: str | None, workers: int, cpus: float, gpus: float) -> None:
        self._started = not ray.is_initialized()
        if self._started:
            _join(address, math.ceil(workers * cpus))
        self._actor = ray.remote(Shard).options(
            num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy="SPREAD"
        )
        self._wanted = f"{_many(workers, 'worker')} of {_counts({'CPU': cpus, 'GPU': gpus})} each"
        self._next = 0
        self.workers: dict[int, Any] = {}
        self.nodes: dict[int, str] = {}
        total = ray.cluster_resources()
        if total.get("CPU", 0) < workers * cpus or total.get("GPU", 0) < workers * gpus:
            has = f"{_counts(total)} on {_many(_nodes(), 'node')}"
            self.close()
            raise EngineError(
                f"the cluster has {has}, too little for {self._wanted}; set fewer "
                "engine.workers, or add nodes with `ray start --address=…`"
            )

    def start(self, workers: int) -> None:
        """Start the first workers. Raises EngineError, with the cluster's resources, if they do not
        start in time.
        """
        if len(self.add_workers(workers, START)) < workers:
            total, free = ray.cluster_resources(), ray.available_resources()
            raise EngineError(
                f"only {len(self.workers)} of {self._wanted} started within {START:g} s: the "
                f"cluster has {_counts(total)} on {_many(_nodes(), 'node')}, of which "
                f"{_counts(free)} are free; wait for the others, or set fewer engine.workers"
            )

    def add_workers(self, count: int, patience: float) -> list[int]:
        """Start up to `count` more workers; the numbers of those that are ready in time."""
        started = [self._actor.remote() for _ in range(count)]
        replies = [worker.about.remote() for worker in started]
        if replies:
            ray.wait(replies, num_returns=count, timeout=patience)
        added = []
        for worker, reply in zip(started, replies, strict=True):
            ready, _ = ray.wait([reply], timeout=0)
            if not ready:
                ray.kill(worker)
                continue
            try:
                about = ray.get(reply)
            except lost.RayError as error:
                if "creation task" not in str(error):
                    continue
                last_line = str(error).strip().splitlines()[-1].strip()
                raise EngineError(
                    f"a worker cannot start on the cluster ({last_line}); install fedloom "
                    f"{versions()['fedloom']} on every node"
                ) from None
            self.workers[self._next], self.nodes[self._next] = worker, about["node"]
            added.append(self._next)
            self._next += 1
            _compare(about)
        return added

    def ask(self, method: str, orders: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of several workers in parallel; their replies by number. Raises WorkerLost,
        EngineError if an order cannot be sent, or the error of a worker.
        """
        try:
            calls = {
                number: getattr(self.workers[number], method).remote(*order)
                for number, order in orders.items()
            }
        except Exception as error:  # pickling fails with many kinds of error
            raise EngineError(
                f"cannot send a party to its worker ({str(error).strip().splitlines()[0]}); keep "
                "open files and locks out of its class, config and network"
            ) from error
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls))
        replies: dict[int, Any] = {}
        errors: list[Exception] = []
        lost_worker = False
        for number, reply in calls.items():
            try:
                replies[number] = ray.get(reply)
            except lost.RayTaskError as error:  # raised by the worker itself
                lost_worker |= isinstance(error.cause, _LOSS)
                errors.append(_cause(error, self.nodes[number]))
            except _LOSS:
                lost_worker = True
        if lost_worker:
            raise WorkerLost
        if errors:
            raise errors[0]
        return replies

    def missing(self) -> list[int]:
        """The numbers of the workers that do not answer. They are removed."""
        calls = {number: worker.about.remote() for number, worker in self.workers.items()}
        if calls:
            ray.wait(list(calls.values()), num_returns=len(calls), timeout=START)
        silent = []
        for number, reply in calls.items():
            try:
                ray.get(reply, timeout=0)
            except lost.RayError:  # also if it has not answered in time
                silent.append(number)
        for number in silent:
            ray.kill(self.workers.pop(number))
            del self.nodes[number]
        return silent

    def close(self) -> None:
        """End all workers, and the cluster if it was started here."""
        if ray.is_initialized():
            for worker in self.workers.values():
                ray.kill(worker)
        self.workers.clear()
        if self._started:
            ray.shutdown()
        self._started = False


def _join(address: str | None, cpus: int) -> None:
    """Connect this process to a cluster, or start one."""
    os.environ.update(ENVIRONMENT | os.environ)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        _knock(os.environ.get("RAY_ADDRESS", address) if address == "auto" else address)
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            with _on_loopback():
                _start(
                    lambda: ray.init(
                        "local", num_cpus=max(1, cpus), include_dashboard=False, **quiet
                    )
                )
        else:
            ray.init(address, **quiet)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        if "ersion mismatch" in reason:
            raise EngineError(
                f"install the same Ray and Python here and on the cluster: {reason}"
            ) from None
        if address is None:
            raise EngineError(f"Ray cannot start a cluster on this machine: {reason}") from None
        raise EngineError(
            f"this machine cannot join the Ray cluster at {address!r} ({reason}); first run `ray "
            "start --address=…` on it; if that says that tokens are enabled, export "
            "RAY_AUTH_MODE=token here, with the same token"
        ) from None
    finally:
        # a run saves before it stops; Ray's handler would end it at once
        if main and callable(before):
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Within it, a new cluster listens on 127.0.0.1 only, and the token that Ray creates (since
    2.60) is private.

    Whoever reaches a port of a cluster could otherwise run code here. Ray has no argument for it:
    it takes the loopback address where it starts no clusters of several machines, as on Windows and
    macOS.
    """
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, several, umask = os.environ.get(name), ray_constants.ENABLE_RAY_CLUSTER, os.umask(0o077)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        os.umask(umask)
        ray_constants.ENABLE_RAY_CLUSTER = several
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _start(start: Callable[[], object]) -> None:
    """Start a cluster on this machine; try again if Ray times out."""
    for attempt in range(1, STARTS + 1):
        try:
            start()
            return
        except Exception as error:
            if "timed out" not in str(error) or attempt == STARTS:
                raise
            logging.getLogger("fedloom").warning("Ray timed out while starting; trying again")
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise EngineError unless Ray answers at the address. Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise EngineError(
            "engine.address must be host:port of the cluster's head, such as 10.0.0.1:6379, or "
            f"auto, not {address!r}"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK) as link:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5))
                if link.recv(9)[3:4] != b"\4":  # in HTTP/2 both sides begin with settings
                    raise ConnectionError("another service listens there")
    except (OSError, OverflowError, UnicodeError) as error:
        raise EngineError(
            f"no Ray cluster at {address!r} ({error}); start one with `ray start --head`, which "
            "prints its address"
        ) from None


def _cause(error: lost.RayTaskError, node: str) -> Exception:
    """What a worker's error on a node is raised as: a sentence where its parties do not fit into
    memory.
    """
    if isinstance(error.cause, MemoryError) or "can't allocate memory" in str(error.cause):
        return EngineError(
            f"the parties of a worker on node {node} do not fit into its memory; add nodes and "
            "raise engine.workers, or lower data.clients"
        )
    return error.cause if isinstance(error.cause, FedloomError) else error


def _compare(about: Mapping[str, str]) -> None:
    """Raise EngineError if a worker has other versions than this process."""
    ours = versions()
    theirs = {name: about[name] for name in ours}
    if theirs != ours:
        have, want = (
            " and ".join(f"{name} {v}" for name, v in each.items()) for each in (theirs, ours)
        )
        raise EngineError(
            f"the node {about['address']} has {have}, but this one has {want}; install the same "
            "versions on every node"
        )


def _counts(resources: Mapping[str, float]) -> str:
    cpus, gpus = (resources.get(kind, 0) for kind in ("CPU", "GPU"))
    return f"{_many(cpus, 'CPU')} and {_many(gpus, 'GPU')}"


def _nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _many(n: float, noun: str) -> str:
    return f"{n:g} {noun}{'s' * (n != 1)}"
