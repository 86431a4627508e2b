"""Tunes the learning rate of every method of a comparison alike, on validation rows, before they are compared."""

import math
from collections.abc import Callable, Mapping
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
"""The seed of the runs that tune; no comparison should have it, so that none of its splits has been seen."""


def tuned(experiment: Experiment, execute: Callable[..., RunResult] = execute) -> tuple[Experiment, list[str]]:
    """The comparison with the best learning rate of each method, and a sentence on how it was chosen.

    Each method is trained at every multiple `FACTORS` of its own rate, as long as in the comparison, and evaluated on
    `VALIDATION` of the training rows with a seed that the comparison lacks; the test rows take no part. Methods without
    a setting `lr` keep their settings.

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
    entries, chosen = [], []
    for entry, run in zip(compared.methods, experiment.runs()[:: len(compared.seeds)], strict=True):
        rate = getattr(run.resolve()[1], "lr", None)
        if not isinstance(rate, float):
            entries.append(entry)
            continue
        scores = {rate * factor: _score(_at(run, rate * factor), execute) for factor in FACTORS}
        best = max(scores, key=lambda one: scores[one])
        given: dict[str, Any] = {"method": entry} if isinstance(entry, str) else dict(entry)
        entries.append({**given, "name": run.label, "params": {**given.get("params", {}), "lr": best}})
        chosen.append(f"{run.label} {best:g}")
    values = {**compared.model_dump(), "methods": entries}
    found = experiment.model_copy(update={"compare": validated(type(compared), values, "compare")})
    rates = ", ".join(f"{factor:g}" for factor in FACTORS)
    return found, [
        f"tuned alike: the learning rate of each method is the best of {rates} times its own on {100 * VALIDATION:g} % "
        f"of the training rows (seed {SEED}): {', '.join(chosen) or 'no method has one'}"
    ]


def _at(run: RunConfig, rate: float) -> RunConfig:
    """The run that evaluates a learning rate."""
    data: Mapping[str, Any] = {**run.data.model_dump(), "validation": VALIDATION}
    values = {**run.model_dump(), "seed": SEED, "data": data, "params": {**run.params, "lr": rate}}
    return validated(RunConfig, {**values, "evaluate": {"points": 1}})  # type: ignore[no-any-return]


def _score(run: RunConfig, execute: Callable[..., RunResult]) -> float:
    """The main metric at the end of a run; minus infinity if it diverged."""
    try:
        s = RunSummary(**execute(run).summary)
    except TrainingDiverged:
        return -math.inf
    return -math.inf if s.diverged else s.compared[next(iter(s.compared))].mean
