"""Starts the engine that `[engine]` names, or that `auto` picks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fedloom.core.engine import Account
from fedloom.core.errors import ConfigError, EngineError
from fedloom.engines import BatchedEngine, Engine, IsolatedEngine, LocalEngine, ObservedEngine
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.run_plan import RunPlan


def start(plan: RunPlan) -> Engine:
    """Start the engine of a run without nodes. The caller closes it.

    Args:
        plan: the run.

    Raises:
        ConfigError, EngineError: the engine cannot run here.
    """
    run, cfg = plan.run, plan.run.engine
    cfg.check()
    if cfg.name == "net":
        raise EngineError(
            "the net engine needs nodes: start the run with fedloom.run() or the command fedloom "
            "run"
        )
    common = {"seed": run.seed, "faults": run.faults}
    parties = (make() for make in plan.clients)
    if run.evaluate.leaks and plan.method.setting == "horizontal":
        if cfg.name not in ("auto", "local") or cfg.workers > 1:
            raise ConfigError(
                "evaluate.leaks reads every message in one process, not with the engine "
                f"{cfg.name} and {cfg.workers} workers: set engine.name = local and "
                "engine.workers = 1"
            )
        return ObservedEngine(parties, **common)
    if cfg.name == "isolated":
        return IsolatedEngine(plan.clients, **common)  # type: ignore[arg-type]
    if cfg.name == "ray":
        from fedloom.engines.ray import RayEngine

        return RayEngine(
            plan.clients,
            ids=range(len(plan.clients)),
            workers=cfg.workers,
            address=cfg.address,
            gpus=0.0 if plan.method.without_network else cfg.gpus_per_worker,
            **common,  # type: ignore[arg-type]
        )
    if cfg.workers > 1:
        from fedloom.engines.workers import WorkersEngine

        return WorkersEngine(parties, workers=cfg.workers, **common)  # type: ignore[arg-type]
    if cfg.name in ("batched", "auto"):
        picky = {"everything": cfg.name == "batched"}
        return BatchedEngine(parties, chunk_size=cfg.chunk_size, **picky, **common)  # type: ignore[arg-type]
    return LocalEngine(parties, **common)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Backend:
    """Where the parties of a run are, and what the coordinator adds to the config.

    Attributes:
        start: starts the engine of a plan, see `start`.
        files: the coordinator's private data; None where all parties are on this machine.
        secret: seeds the noise of colocated parties, see `ClientContext`; None for the run's seed
            alone.
    """

    start: Callable[[RunPlan], Engine] = start
    files: PrivateData | None = None
    secret: int | None = None


def local_backend(
    run: RunConfig, folder: Path | None = None, *, resume: bool, stop: Callable[[], bool]
) -> Backend:
    """The backend of all engines but `net`; arguments as in `execute`."""
    return Backend()


def account(engine: Engine, cfg: EngineConfig) -> Account:
    """Where the parties run, with a remark if `auto` picked the engine."""
    used = engine.account()
    return replace(used, remarks=("picked by auto", *used.remarks)) if cfg.name == "auto" else used
