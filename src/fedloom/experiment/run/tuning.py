"""Tunes the learning rate of every method of a comparison alike, on validation rows, before they
are compared.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedloom.core.errors import ConfigError, TrainingDiverged
from fedloom.core.method import MethodConfig
from fedloom.experiment.config.run import Experiment, RunConfig
from fedloom.experiment.config.section import validated
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.experiment.run.metrics import Metric
from fedloom.experiment.run.result import RunSummary, shared_metrics

FACTORS = (0.1, 0.3, 1.0, 3.0, 10.0)
"""The rates that are tried, as multiples of each method's own."""
VALIDATION = 0.25
"""Share of the training rows on which rates are compared."""
SEED = 9_999
"""The seed of the runs that tune; no comparison should have it, so that none of its splits has been
seen.
"""
TUNED = "tuned alike: "
"""The beginning of the sentence on how rates were chosen."""
TUNING = "tuning"
"""The folder of the runs that tune, in that of the comparison."""


def trials(experiment: Experiment) -> list[dict[float, RunConfig]]:
    """The runs that tune each method of a comparison, by the factor of its rates
    (`MethodConfig.rates`); none of a method without a rate.

    Raises:
        ConfigError: there is nothing to compare, or the run tests on validation rows already.
    """
    compared = experiment.compare
    if compared is None:
        raise ConfigError("tuning needs a comparison: name several methods")
    if experiment.run.data.validation:
        raise ConfigError("tuning sets data.validation itself: leave it out")
    if SEED in compared.seeds:
        raise ConfigError(f"the seed {SEED} is that of tuning: compare with other seeds")
    runs = experiment.runs()[:: len(compared.seeds)]
    return [
        {factor: _at(run, rates) for factor, rates in _tried(run.resolve()[1]).items()}
        for run in runs
    ]


def _tried(config: MethodConfig) -> dict[float, dict[str, float]]:
    """The rates to try by factor: all that the method allows."""
    own = {name: getattr(config, name) for name in config.rates}
    found = {}
    for factor in FACTORS if own else ():
        rates = {name: rate * factor for name, rate in own.items()}
        try:
            type(config).model_validate({**config.model_dump(), **rates})
        except ValidationError:  # such as a share above 1
            continue
        found[factor] = rates
    return found


def tuned(
    experiment: Experiment,
    folder: Path | None = None,
    *,
    execute: Callable[..., RunResult] = execute,
    **options: Any,
) -> tuple[Experiment, list[str]]:
    """The comparison with the best learning rate of each method, and a sentence on how it was
    chosen.

    Each method is trained at every multiple `FACTORS` of its own rate, as long as in the
    comparison, and evaluated on `VALIDATION` of the training rows with a seed that the comparison
    lacks; the test rows take no part. The best rate is that of the best value of the metric that
    compares the methods. A method without a rate is named.

    Args:
        experiment: the comparison.
        folder: where each run has a folder of its own, from which it resumes; None writes nothing.
        execute: executes one run.
        options: its further arguments: `resume`, `progress`, `stop`.

    Raises:
        ConfigError: see `trials`.
    """
    tried, compared = trials(experiment), experiment.compare
    assert compared is not None
    entries, chosen, ends, without, lost = [], [], [], [], []
    ran = [
        {
            factor: _summary(run, None if folder is None else folder / run.name, execute, options)
            for factor, run in runs.items()
        }
        for runs in tried
    ]
    usable = [s for each in ran for s in each.values() if s is not None]
    metric = shared_metrics(usable)[0] if usable else None
    for entry, runs, each, first in zip(
        compared.methods, tried, ran, experiment.runs()[:: len(compared.seeds)], strict=True
    ):
        if not runs:
            entries.append(entry)
            without.append(first.label)
            continue
        scores = {factor: _score(s, metric) for factor, s in each.items()}
        # of equal ones that nearest to the method's own
        best = max(scores, key=lambda one: (scores[one], -abs(math.log(one))))
        if scores[best] == -math.inf:
            entries.append(entry)
            lost.append(first.label)
            continue
        rates = _tried(first.resolve()[1])[best]
        given: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
        entries.append(
            {**given, "name": first.label, "params": {**given.get("params", {}), **rates}}
        )
        shown = ", ".join(f"{'' if k == 'lr' else f'{k} '}{v:g}" for k, v in rates.items())
        chosen.append(f"{first.label} {shown}")
        ends += [first.label] * (best in (min(runs), max(runs)))
    values = {**compared.model_dump(), "methods": entries}
    found = experiment.model_copy(update={"compare": validated(type(compared), values, "compare")})
    factors = ", ".join(f"{factor:g}" for factor in FACTORS)
    remarks = [
        f"{TUNED}the learning rate of each method is the best of {factors} times its own on "
        f"{100 * VALIDATION:g} % of the training rows (seed {SEED}): "
        f"{', '.join(chosen) or 'no method has one'}"
    ]
    if chosen and without:
        remarks.append(f"no learning rate to tune: {', '.join(without)}")
    if lost:
        remarks.append(f"training diverged at every rate that was tried: {', '.join(lost)}")
    if ends:
        remarks.append(
            f"the largest or smallest rate that was tried is the best of {', '.join(ends)}, and "
            "one beyond it may be better: set the method's params to it, and tune again"
        )
    return found, remarks


def _at(run: RunConfig, rates: Mapping[str, float]) -> RunConfig:
    """The run that evaluates learning rates."""
    data: Mapping[str, Any] = {**run.data.model_dump(), "validation": VALIDATION}
    values = {**run.model_dump(), "seed": SEED, "data": data, "params": {**run.params, **rates}}
    name = "-".join(f"{key}{rate:.4g}" for key, rate in rates.items())
    values |= {"name": f"{run.label}-{name}", "evaluate": {"points": 1}}
    return validated(RunConfig, values)  # type: ignore[no-any-return]


def _score(s: RunSummary | None, metric: Metric | None) -> float:
    """The metric at the end of a run, negative if lower is better; minus infinity without one."""
    found = None if s is None or metric is None else s.of(metric)
    if found is None or metric is None:
        return -math.inf
    return -found.mean if metric.lower_is_better else found.mean


def _summary(
    run: RunConfig,
    folder: Path | None,
    execute: Callable[..., RunResult],
    options: Mapping[str, Any],
) -> RunSummary | None:
    """The result of a run; None if it diverged."""
    try:
        s = RunSummary(**execute(run, folder, **options).summary)
    except TrainingDiverged:
        return None
    return None if s.diverged else s
