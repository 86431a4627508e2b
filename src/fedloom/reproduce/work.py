"""Do what a plan says: data first, then the runs, then the pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.pool import Ended, Job, Standing, run_all
from fedloom.experiment.run import Result, execute
from fedloom.reproduce.plan import Plan, absent, fetch, unlisted

if TYPE_CHECKING:
    from fedloom.reproduce.outcome import Outcome


@dataclass(frozen=True)
class Done:
    """What came of a plan.

    Attributes:
        ended: how each run ended.
        outcomes: what each table or figure comes to, with what there is of it.
        page: the page to open.
    """

    ended: Sequence[Ended]
    outcomes: Sequence[Outcome]
    page: Path


def work(
    plan: Plan,
    *,
    workers: int | None = None,
    ray: str | None = None,
    gpus: float = 0.0,
    costs: Sequence[float] = (),
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., Result] = execute,
) -> Done:
    """Do the runs that are not finished, and write the pages of all tables and figures.

    Args:
        plan: what to do.
        workers, ray, gpus, progress, stop, execute: see `fedloom.experiment.pool.run_all`.
        costs: how long each of the plan's runs takes, in any unit; empty for alike.

    Raises:
        ConfigError: something of the plan can't be run here.
        DataError: a data set can't be had.
        EngineError: no process can be started.
    """
    if plan.problems:
        raise ConfigError("\n".join(f"{name}: {reason}" for name, reason in plan.problems.items()))
    runs, kept, titles = plan.runs, plan.finished, plan.titles()
    left = {key: run for key, run in runs.items() if key not in kept}
    if lists := unlisted(left):
        raise DataError(
            f"{', '.join(lists)}: not here. Make such a list of pictures first (docs/vertical.md), or leave its "
            "columns out with --only"
        )
    fetch(absent(left))
    each = costs or [1.0] * len(runs)
    jobs = [
        Job(run, plan.out / "runs" / key, titles[key], cost, key)
        for (key, run), cost in zip(runs.items(), each, strict=True)
    ]
    ended = run_all(jobs, workers=workers, ray=ray, gpus=gpus, progress=progress, stop=stop, execute=execute)
    outcomes = write(plan, {one.job.folder: one.reason for one in ended if one.state == "failed"})
    from fedloom.reproduce.index import write_index

    page = write_index(plan.pages)
    return Done(ended, outcomes, plan.target(outcomes[0].name) / page.name if len(outcomes) == 1 else page)


def write(plan: Plan, problems: Mapping[Path, str]) -> list[Outcome]:
    """The pages of a plan's tables and figures, from the runs that are finished. Of others it is said why they failed,
    by folder."""
    from fedloom.reproduce import page

    return [
        page.write(one.reproduction, one.scale, one.cells, plan.folder, plan.target(one.name), problems, one.asked)
        for one in plan.planned
    ]
