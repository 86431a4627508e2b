"""Spend a time budget on the runs that would decide most claims per hour."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.pool.fetch import absent, fetch
from fedloom.experiment.pool.pool import Ended, Job, Standing, digest, run_all
from fedloom.experiment.run.execute import RunResult, execute
from fedloom_papers.claims import ClaimTest, check_claims
from fedloom_papers.keys import archive_key
from fedloom_papers.plan import Plan, Planned, unlisted
from fedloom_papers.results import gather
from fedloom_papers.spec import Claim
from fedloom_papers.verdicts import RELEVANT, look, power

NEW = 0.8
"""The assumed probability that the planned seeds decide a claim without any."""
SHARE = 10
"""Seconds of runs for each second of choosing them, which reads all results."""


@dataclass(frozen=True)
class Batch:
    """The runs that bring a claim to its next look.

    Attributes:
        claim: its table and text.
        runs: the unfinished runs by digest.
        chance: the probability that they decide the claim.
    """

    claim: str
    runs: Mapping[str, RunConfig]
    chance: float


def batches(plan: Plan) -> list[Batch]:
    """The next batch of each claim without a verdict."""
    return [batch for one in plan.planned for batch in _batches(plan, one)]


def _batches(plan: Plan, one: Planned) -> list[Batch]:
    archived = plan.archive.usable(one.scale, one.name, one.reproduction)
    found = gather(
        one.name,
        one.reproduction,
        one.scale,
        one.cells,
        plan.folder,
        {},
        one.asked,
        archived,
        plan.archive_key,
    )
    results = check_claims(one.reproduction.claims, found)
    made: dict[str, Batch] = {}
    for claim, result in zip(one.reproduction.claims, results, strict=True):
        test = ClaimTest(claim, found)
        places = [found.places[cell] for cell in test.cells if cell in found.places]
        if (
            claim.untestable.get(one.scale)
            or not places
            or any(not place.cell.runs for place in places)
        ):
            continue
        done = min(sum(1 for _ in place.records) for place in places)
        planned = min(
            one.reproduction.scale(one.scale).seeds, *(len(place.cell.runs) for place in places)
        )
        if not result.settled:
            target = planned
            while target <= done:
                target *= 2
            chance = _chance(claim, [*result.seeds.values()], result.printed, planned, target)
        elif result.gate == "runs" and done < planned:
            target, chance = planned, NEW
        else:
            continue
        finished = {record.digest for place in places for record in place.records}
        runs = [
            place.cell.runs[0].model_copy(update={"seed": s})
            for place in places
            for s in range(target)
        ]
        left = {digest(run): run for run in runs if archive_key(run) not in finished}
        if left and chance > 0:
            made.setdefault(
                result.evidence or claim.text, Batch(f"{one.name}: {claim.text}", left, chance)
            )
    return [*made.values()]


def _chance(
    claim: Claim,
    differences: Sequence[float | None],
    printed: float | None,
    planned: int,
    target: int,
) -> float:
    """The power at the next look for the printed effect, or the observed one if that is larger."""
    known = [value for value in differences if value is not None]
    if len(known) < 2:
        return NEW
    goal = max(
        abs(printed) if printed is not None else claim.by or RELEVANT,
        abs(float(np.mean(known))) - claim.by,
    )
    return power(target, goal, float(np.std(known, ddof=1)), look(target, planned)[1])


def spend(
    replan: Callable[[], Plan],
    seconds: float,
    cost: Callable[[RunConfig], float],
    *,
    workers: int | None = None,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., RunResult] = execute,
    clock: Callable[[], float] = monotonic,
    tell: Callable[[Batch], None] = lambda _: None,
) -> list[Ended]:
    """Run the most informative batches first until the budget is spent; runs in progress are saved
    for another day.

    Args:
        replan: the plan with all seeds that are finished.
        seconds: the budget.
        cost: estimated seconds of a run.
        workers, progress, stop, execute: see `fedloom.experiment.pool.pool.run_all`.
        clock: seconds from any start.
        tell: called with each batch before it starts; several start together if they are short.

    Returns:
        How each run ended.

    Raises:
        ConfigError: a table or figure cannot be run.
        DataError: a data set is not available.
    """
    deadline, ended, tried = clock() + seconds, list[Ended](), set[str]()

    def over() -> bool:
        return stop() or clock() >= deadline

    while not over():
        started = clock()
        plan = replan()
        if plan.problems:
            raise ConfigError(
                "\n".join(f"{name}: {reason}" for name, reason in plan.problems.items())
            )
        usable = [
            one for one in batches(plan) if not tried & one.runs.keys() and not unlisted(one.runs)
        ]
        if not usable:
            break
        usable.sort(key=lambda one: one.chance / sum(map(cost, one.runs.values())), reverse=True)
        worth, jobs = SHARE * (clock() - started), dict[str, Job]()
        for one in usable:
            if jobs and sum(cost(job.run) for job in jobs.values()) >= worth:
                break
            tell(one)
            jobs |= {
                key: Job(run, plan.out / "runs" / key, f"{one.claim} seed {run.seed}", 1.0, key)
                for key, run in one.runs.items()
                if key not in jobs
            }
        fetch(absent({key: job.run for key, job in jobs.items()}))
        shown = plan.archiving(progress)
        ended += run_all(
            [*jobs.values()], workers=workers, progress=shown, stop=over, execute=execute
        )
        tried |= {
            one.job.folder.name for one in ended if one.state in ("failed", "left", "stopped")
        }
    return ended
