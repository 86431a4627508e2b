"""Tunes the learning rate of every method of a comparison alike, on validation rows, before they
are compared.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedloom.core.errors import ConfigError, TrainingDiverged
from fedloom.experiment.config.run import Experiment, RunConfig
from fedloom.experiment.config.section import validated
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.experiment.run.result import RunSummary

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
    """The runs that tune each method of a comparison, by their learning rate; none of a method
    without a setting `lr`.

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
    own = [getattr(run.resolve()[1], "lr", None) for run in runs]
    return [
        {rate * factor: _at(run, rate * factor) for factor in FACTORS}
        if isinstance(rate, float)
        else {}
        for rate, run in zip(own, runs, strict=True)
    ]


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
    lacks; the test rows take no part. Methods without a setting `lr` keep their settings.

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
    entries, chosen, ends = [], [], []
    for entry, runs, first in zip(
        compared.methods, tried, experiment.runs()[:: len(compared.seeds)], strict=True
    ):
        if not runs:
            entries.append(entry)
            continue
        scores = {
            rate: _score(run, None if folder is None else folder / run.name, execute, options)
            for rate, run in runs.items()
        }
        best = max(scores, key=lambda one: scores[one])
        given: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
        entries.append(
            {**given, "name": first.label, "params": {**given.get("params", {}), "lr": best}}
        )
        chosen.append(f"{first.label} {best:g}")
        ends += [first.label] * (best in (min(runs), max(runs)))
    values = {**compared.model_dump(), "methods": entries}
    found = experiment.model_copy(update={"compare": validated(type(compared), values, "compare")})
    rates = ", ".join(f"{factor:g}" for factor in FACTORS)
    remarks = [
        f"{TUNED}the learning rate of each method is the best of {rates} times its own on "
        f"{100 * VALIDATION:g} % of the training rows (seed {SEED}): "
        f"{', '.join(chosen) or 'no method has one'}"
    ]
    if ends:
        remarks.append(
            f"the largest or smallest rate that was tried is the best of {', '.join(ends)}, and "
            "one beyond it may be better: set params.lr of the method to it, and tune again"
        )
    return found, remarks


def _at(run: RunConfig, rate: float) -> RunConfig:
    """The run that evaluates a learning rate."""
    data: Mapping[str, Any] = {**run.data.model_dump(), "validation": VALIDATION}
    values = {**run.model_dump(), "seed": SEED, "data": data, "params": {**run.params, "lr": rate}}
    values |= {"name": f"{run.label}-lr{rate:.4g}", "evaluate": {"points": 1}}
    return validated(RunConfig, values)  # type: ignore[no-any-return]


def _score(
    run: RunConfig,
    folder: Path | None,
    execute: Callable[..., RunResult],
    options: Mapping[str, Any],
) -> float:
    """The main metric at the end of a run; minus infinity if it diverged."""
    try:
        s = RunSummary(**execute(run, folder, **options).summary)
    except TrainingDiverged:
        return -math.inf
    return -math.inf if s.diverged else s.compared[next(iter(s.compared))].mean
