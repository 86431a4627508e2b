"""The driver's side of Ray: join a cluster, place workers on it, call them, and notice their loss."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray
from ray import exceptions as lost

from fedloom.core.errors import EngineError, FedloomError
from fedloom.engines._party_bundle import WorkerLost
from fedloom.engines._shard import Shard, versions

START: Final = 180.0
"""Seconds that the first workers may take to start: on a busy node or from a shared disk torch takes a minute."""
PATIENCE: Final = 20.0
"""Seconds that a worker in a lost one's place may take, before the others take over."""
KNOCK: Final = 5.0
"""Seconds that the head of a cluster may take to answer."""
STARTS: Final = 4
"""How often a cluster on this machine is started, when Ray finds a busy machine too slow."""
ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage statistics
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_timeout_ms": "60000",
}
"""Settings of a cluster that is started here, unless the user has set them: a busy machine is no failure."""
_LOSS: Final = (
    lost.RayActorError,
    lost.ObjectLostError,
    lost.NodeDiedError,
    lost.WorkerCrashedError,
    lost.OutOfMemoryError,
)


class RayCluster:
    """Workers on a cluster, by number. A number is never used twice.

    Args:
        address: of the cluster's head, `host:port` or `auto`; None starts a cluster on this machine.
        workers: how many the cluster must have room for.
        cpus, gpus: what each takes; fractions of a GPU can be shared.

    Raises:
        EngineError: there is no such cluster, it is of another version, or too small.
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
                f"the cluster has {has}, too little for {self._wanted}: ask for fewer, or add nodes with "
                "`ray start --address=…`"
            )

    def start(self, workers: int) -> None:
        """Place the first workers. Raises EngineError where they don't start, with what the cluster has."""
        if len(self.add_workers(workers, START)) < workers:
            total, free = ray.cluster_resources(), ray.available_resources()
            raise EngineError(
                f"{len(self.workers)} of {self._wanted} could start within {START:g} s: of {_counts(total)} on "
                f"{_many(_nodes(), 'node')} {_counts(free)} are free; wait for the rest, or ask for fewer"
            )

    def add_workers(self, count: int, patience: float) -> list[int]:
        """Start up to `count` more workers; the numbers of those that are ready in time."""
        fresh = [self._actor.remote() for _ in range(count)]
        asked = [worker.about.remote() for worker in fresh]
        if asked:
            ray.wait(asked, num_returns=count, timeout=patience)
        added = []
        for worker, answer in zip(fresh, asked, strict=True):
            ready, _ = ray.wait([answer], timeout=0)
            if not ready:
                ray.kill(worker)
                continue
            try:
                about = ray.get(answer)
            except lost.RayError as error:
                if "creation task" not in str(error):
                    continue
                raise EngineError(
                    f"a worker can't start on the cluster ({_last_line(error)}): install fedloom "
                    f"{versions()['fedloom']} on every node"
                ) from None
            self.workers[self._next], self.nodes[self._next] = worker, about["node"]
            added.append(self._next)
            self._next += 1
            _compare(about)
        return added

    def put(self, value: Any) -> Any:
        """Store a value that many workers read; a reference to it."""
        return ray.put(value)

    def ask(self, method: str, orders: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of some workers, all at once; their answers by number, when all are done.

        Raises:
            WorkerLost: one was lost.
            EngineError: an order can't be sent.
            FedloomError: one raised it.
        """
        try:
            asked = {number: getattr(self.workers[number], method).remote(*order) for number, order in orders.items()}
        except Exception as error:  # pickling fails with many kinds of error
            raise EngineError(
                f"what a worker needs can't be sent to it ({str(error).strip().splitlines()[0]}): let a party's class, "
                "config and network hold no open files, locks or the like"
            ) from error
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked))
        answers: dict[int, Any] = {}
        wrong: list[Exception] = []
        gone = False
        for number, answer in asked.items():
            try:
                answers[number] = ray.get(answer)
            except lost.RayTaskError as error:  # raised by the worker itself
                gone |= isinstance(error.cause, _LOSS)
                wrong.append(error.cause if isinstance(error.cause, FedloomError) else error)
            except _LOSS:
                gone = True
        if gone:
            raise WorkerLost
        if wrong:
            raise wrong[0]
        return answers

    def missing(self) -> list[int]:
        """Which workers do not answer. They are removed."""
        asked = {number: worker.about.remote() for number, worker in self.workers.items()}
        if asked:
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=START)
        found = [number for number, answer in asked.items() if not _answered(answer)]
        for number in found:
            ray.kill(self.workers.pop(number))
            del self.nodes[number]
        return found

    def close(self) -> None:
        """End all workers, and the cluster if we started it."""
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
            _start(lambda: ray.init("local", num_cpus=max(1, cpus), include_dashboard=False, **quiet))
        else:
            ray.init(address, **quiet)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        if "ersion mismatch" in reason:
            raise EngineError(f"install the same Ray and Python here and on the cluster: {reason}") from None
        if address is None:
            raise EngineError(f"Ray can't start a cluster on this machine: {reason}") from None
        raise EngineError(
            f"this machine can't join the Ray cluster at {address!r} ({reason}): run `ray start --address=…` on it "
            "first, with the cluster's RAY_AUTH_MODE and token"
        ) from None
    finally:
        if main and callable(before):  # a run that is asked to stop saves first; Ray would end it at once
            signal.signal(signal.SIGTERM, before)


def _start(start: Callable[[], object]) -> None:
    """Start a cluster on this machine, again where Ray gave up waiting for its own processes."""
    for attempt in range(1, STARTS + 1):
        try:
            start()
            return
        except Exception as error:
            if "timed out" not in str(error) or attempt == STARTS:
                raise
            logging.getLogger("fedloom").warning("Ray's start timed out on this busy machine; starting it again")
            ray.shutdown()


def _knock(address: str) -> None:
    """Raise EngineError unless something at the address speaks as Ray does, which would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise EngineError(
            f"engine.address must be host:port of the cluster's head, such as 10.0.0.1:6379, or auto, not {address!r}"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK) as link:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5))
                if link.recv(9)[3:4] != b"\4":  # HTTP/2 begins with settings from both sides
                    raise EngineError(_no_cluster(address, "something else listens there"))
    except (OSError, OverflowError, UnicodeError) as error:
        raise EngineError(_no_cluster(address, str(error))) from None


def _no_cluster(address: str, reason: str) -> str:
    return (
        f"there is no Ray cluster at {address!r} ({reason}): `ray start --head` starts one on the machine where it is "
        "run, and prints its address"
    )


def _compare(about: Mapping[str, str]) -> None:
    """Raise EngineError unless a worker has what we have."""
    ours = versions()
    theirs = {name: about[name] for name in ours}
    if theirs != ours:
        have = ["{} {}".format(*item) for item in theirs.items()]
        want = ["{} {}".format(*item) for item in ours.items()]
        raise EngineError(
            f"the node {about['address']} has {' and '.join(have)}, this one {' and '.join(want)}: install the same "
            "on every node"
        )


def _answered(answer: Any) -> bool:
    ready, _ = ray.wait([answer], timeout=0)
    try:
        return bool(ready and ray.get(answer))
    except lost.RayError:
        return False


def _counts(resources: Mapping[str, float]) -> str:
    cpus, gpus = (resources.get(kind, 0) for kind in ("CPU", "GPU"))
    return f"{_many(cpus, 'CPU')} and {_many(gpus, 'GPU')}"


def _nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _many(n: float, what: str) -> str:
    return f"{n:g} {what}{'s' * (n != 1)}"


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
