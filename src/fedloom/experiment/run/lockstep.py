"""Executes several runs in lock-step, so that their parties are batched together: see
`fedloom.engines.lockstep`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedloom import models
from fedloom.core.errors import FedloomError, MethodError
from fedloom.data.sources import load
from fedloom.engines.batched import FEW, gainful
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep
from fedloom.engines.repeatable import repeatable
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import RunResult

T = TypeVar("T")
MOST = 256
"""Maximum number of runs in lock-step, as each holds its data in memory."""
MANY = 30
"""Clients of all runs together from which `advice` recommends lock-step. Measured: 0.9× with 12,
1.6× with 30.
"""


def lots(runs: Sequence[RunConfig], pieces: int = 1) -> list[list[int]]:
    """The indices of the runs, in groups that should run in lock-step. On a GPU a group has all
    runs of one method and size; on a CPU, those with small networks without convolutions, if they
    have enough clients in total. Only the engines `batched` and `auto` qualify, as the order of
    sums differs from that of the local engine.

    Args:
        runs: all runs.
        pieces: number of processes that execute them; on a CPU, equal runs form as many groups if
            each is large enough.
    """
    alike: dict[Any, list[int]] = {}
    for n, run in enumerate(runs):
        alike.setdefault(_kind(run) or n, []).append(n)
    found = []
    for numbers in alike.values():
        first = runs[numbers[0]]
        count = -(-len(numbers) // MOST)
        if len(numbers) > 1 and first.engine.device == "cpu":
            if first.data.clients * len(numbers) < FEW * pieces:
                found += [[n] for n in numbers]
                continue
            count = max(count, min(pieces, len(numbers)))
        size = -(-len(numbers) // count)
        found += [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return found


def advice(runs: Sequence[RunConfig], pieces: int = 1) -> str:
    """The advice to run these in lock-step if they would be faster; "" if not, or if they already
    are.

    It is not the default, as sums in another order change the last digits, and after long training
    more than those.
    """
    auto = [
        run.model_copy(update={"engine": run.engine.model_copy(update={"name": "auto"})})
        for run in runs
    ]
    if any(run.engine.name != "local" for run in runs):
        return ""
    together = [
        lot
        for lot in lots(auto, pieces)
        if len(lot) > 1 and len(lot) * runs[lot[0]].data.clients >= MANY
    ]
    if not together:
        return ""
    most = max(map(len, together))
    return (
        f"{most} of these runs can train together, 1.6 to 3.8 times as fast where measured: add "
        "-s engine.name=auto"
    )


def _kind(run: RunConfig) -> Any:
    """A key that is equal for runs that can share a lock-step; None if this run cannot or would not
    be faster.
    """
    engine = run.engine
    if engine.name not in ("auto", "batched") or engine.workers > 1 or run.evaluate.leaks:
        return None
    if engine.device == "cpu" and not (
        run.models.pool and all(_gains(name, run.data) for name in run.models.pool)
    ):
        return None
    try:
        method, cfg, rounds = run.resolve()
    except FedloomError:  # its own execution reports it
        return None
    fixed = tuple((k, v == 0 if isinstance(v, float) else repr(v)) for k, v in cfg)
    data = (run.data.name, run.data.clients)
    return (
        method.name,
        run.method,
        fixed,
        rounds,
        data,
        repr(run.models),
        engine.model_dump_json(),
    )


def _gains(network: str, data: DataConfig) -> bool:
    """Whether this network on these rows is faster in lock-step on a CPU."""
    if data.own or network in models.BLACK_BOXES:
        return False
    try:
        return faster_in_lockstep(network, *_shape(data.name, data.root))
    except Exception:  # also of a user's network; its own execution reports it
        return False


def faster_in_lockstep(network: str, shape: tuple[int, ...], classes: int) -> bool:
    """Whether a network is faster in lock-step on a CPU: it is small, without convolutions."""
    with torch.device("meta"):
        module = models.build(network, shape, classes)
    return gainful(module)


@lru_cache
def _shape(name: str, root: str | None) -> tuple[tuple[int, ...], int]:
    """The shape of a row of a data set, and the number of its classes."""
    with torch.device("cpu"):
        dataset = load(name, root=None if root is None else Path(root))
    return dataset.input_shape, len(dataset.classes)


def execute_lots(
    runs: Sequence[RunConfig],
    folders: Sequence[Path | None],
    *,
    execute: Callable[..., RunResult],
    **options: Any,
) -> list[RunResult | MethodError]:
    """Execute all runs, each group in lock-step; returns the results in order. `execute` executes
    one with `options`.

    A run whose method fails or diverges does not stop the others: its error is its result. Any
    other error is raised, after the runs of its group have ended.
    """
    results: dict[int, RunResult | MethodError] = {}
    for lot in lots(runs):
        works = [partial(execute, runs[n], folders[n], **options) for n in lot]
        ended = (
            run_in_lockstep(runs[lot[0]].engine, works) if len(works) > 1 else [_tried(works[0])]
        )
        for n, result in zip(lot, ended, strict=True):
            if isinstance(result, BaseException) and not isinstance(result, MethodError):
                raise result
            results[n] = result
    return [results[n] for n in range(len(runs))]


def _tried(work: Callable[[], RunResult]) -> RunResult | MethodError:
    try:
        return work()
    except MethodError as error:
        return error


def run_in_lockstep(
    engine: EngineConfig, works: Sequence[Callable[..., T]]
) -> list[T | BaseException]:
    """Call all `works` in lock-step, each with the `backend` of one run on a batching engine;
    returns the result of each, or the error that it raised.
    """

    def job(work: Callable[..., T]) -> Callable[[Lane[T]], T]:
        return lambda lane: work(backend=_backend(lane))

    everything = engine.name == "batched"
    # around all, as a run that ends would switch it off for the others
    with repeatable(engine.device):
        return in_lockstep(
            [job(work) for work in works], chunk_size=engine.chunk_size, everything=everything
        )


def _backend(lane: Lane[Any]) -> Callable[..., Backend]:
    """The backend of a run in a lane."""

    def start(plan: RunPlan) -> LockstepEngine:
        plan.run.engine.check()
        return LockstepEngine(
            (make() for make in plan.clients), lane, seed=plan.run.seed, faults=plan.run.faults
        )

    return lambda *_, **__: Backend(start=start)
