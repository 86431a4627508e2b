"""From a plan to the engine that runs its parties: what `[engine]` asks for, or what `auto` picks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedloom.core.engine import Account
from fedloom.core.errors import ConfigError, EngineError
from fedloom.engines import BatchedEngine, Engine, IsolatedEngine, LocalEngine
from fedloom.experiment.config import EngineConfig, RunConfig
from fedloom.experiment.plan import RunPlan
from fedloom.experiment.private import PrivateData


def start(plan: RunPlan) -> Engine:
    """The engine of a run on this machine, or on workers that this machine starts. Close it at the end.

    Raises:
        ConfigError, EngineError: it cannot be had here.
    """
    run, asked = plan.run, plan.run.engine
    check(asked)
    if asked.name == "net":
        raise EngineError("the net engine needs nodes: start the run by fedloom.run() or by the command fedloom run")
    common = {"seed": run.seed, "faults": run.faults}
    memory = None if asked.memory_mb is None else asked.memory_mb * 10**6
    parties = (make() for make in plan.clients)
    if asked.name == "isolated":
        return IsolatedEngine(plan.clients, **common)  # type: ignore[arg-type]
    if asked.name == "ray":
        from fedloom.engines.ray import RayEngine

        return RayEngine(
            plan.clients,
            ids=range(len(plan.clients)),
            workers=asked.workers,
            address=asked.address,
            gpus=asked.gpus_per_worker,
            memory=memory,
            **common,  # type: ignore[arg-type]
        )
    if asked.workers > 1:
        from fedloom.engines.workers import WorkersEngine

        return WorkersEngine(parties, workers=asked.workers, memory=memory, **common)  # type: ignore[arg-type]
    if asked.name == "batched" or (asked.name == "auto" and memory is None):
        everything = asked.name == "batched"
        return BatchedEngine(parties, chunk_size=asked.chunk_size, everything=everything, **common)  # type: ignore[arg-type]
    return LocalEngine(parties, memory=memory, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Backend:
    """Where a run's parties are, and what its coordinator adds to the config.

    Attributes:
        start: makes the engine, with its parties: see `start`.
        files: the coordinator's own data files; None where all parties are on this machine.
        secret: what the noise of colocated parties depends on, see `ClientContext`; None for the seed alone.
    """

    start: Callable[[RunPlan], Engine] = start
    files: PrivateData | None = None
    secret: int | None = None


def local_backend(run: RunConfig, folder: Path | None = None, *, resume: bool, stop: Callable[[], bool]) -> Backend:
    """All parties on this machine, or on workers that this machine starts; arguments as those of `execute`."""
    return Backend()


def account(engine: Engine, asked: EngineConfig) -> Account:
    """Where the parties are, and whether that was picked for the user."""
    found = engine.account()
    return replace(found, remarks=("picked by auto", *found.remarks)) if asked.name == "auto" else found


def check(asked: EngineConfig) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: with what to change.
    """
    one_process = {
        "batched": "it does many parties at once in one process",
        "isolated": "it is a check, in one process",
        "net": "each party works at its own node",
    }
    if asked.name in one_process and asked.workers > 1:
        raise ConfigError(
            f"the {asked.name} engine takes one worker, not {asked.workers}: {one_process[asked.name]}. "
            "Leave workers out, or take the engine local"
        )
    if asked.name in ("local", "auto") and asked.workers > 1 and asked.device != "cpu":
        raise ConfigError(
            f"workers are processes on the CPU; on {asked.device!r} take the engine batched with one worker, "
            "or ray with gpus_per_worker"
        )
    if asked.name == "ray" and asked.device != "cpu":
        raise ConfigError(
            f"the ray engine places its workers itself: give gpus_per_worker, such as 0.25, not {asked.device!r}"
        )
    if asked.name in ("isolated", "net") and asked.device != "cpu":
        raise ConfigError(f"the {asked.name} engine works on the CPU only, not on {asked.device!r}")
    for name, engines in (
        ("address", ("ray",)),
        ("federation", ("net",)),
        ("gpus_per_worker", ("ray",)),
        ("chunk_size", ("batched", "auto")),
        ("memory_mb", ("local", "auto", "ray")),
    ):
        if getattr(asked, name) and asked.name not in engines:
            raise ConfigError(f"{name} belongs to the engine {engines[0]}, not to {asked.name}: leave it out")
    if asked.memory_mb is not None and asked.device != "cpu":
        raise ConfigError("memory_mb bounds parties' state in main memory; leave it out with another device")
