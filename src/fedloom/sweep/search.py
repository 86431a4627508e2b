"""Search algorithms: propose the next trials, given the values of earlier ones.

A search is a generator that yields settings to run in parallel and receives their values. Its
proposals depend only on the config and on these values, not on the number of workers, so a stopped
sweep is resumed by a replay in which finished runs return at once.
"""

import math
from collections.abc import Generator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

from fedloom.sweep.config import Over, Range, SettingValues, SweepConfig

if TYPE_CHECKING:
    from optuna import Study

Proposals: TypeAlias = Generator[list[SettingValues], Sequence[float], None]
"""Yields settings and receives their values; nan for missing ones."""


def proposals(config: SweepConfig, stage: int) -> Proposals:
    """The proposals for one table of `over`."""
    over = config.over[stage]
    return _grid(over) if config.search == "grid" else _drawn(config, stage, over)


def _grid(over: Over) -> Proposals:
    """All combinations at once."""
    values = [each for each in over.values() if isinstance(each, list)]
    yield [dict(zip(over, each, strict=True)) for each in product(*values)]


def _drawn(config: SweepConfig, stage: int, over: Over) -> Proposals:
    """Optuna's proposals in batches; those of one batch do not see each other's values."""
    from optuna.trial import TrialState

    study, space = _study(config, stage), {key: _distribution(one) for key, one in over.items()}
    trials = config.trials_of(over)
    together = config.together if config.search == "tpe" else trials
    for done in range(0, trials, together):
        asked = [study.ask(space) for _ in range(min(together, trials - done))]
        values = yield [
            {key: _value(over[key], trial.params[key]) for key in over} for trial in asked
        ]
        for trial, value in zip(asked, values, strict=True):
            study.tell(trial, *([value] if math.isfinite(value) else [None, TrialState.FAIL]))


def _study(config: SweepConfig, stage: int) -> "Study":
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (config.seed + stage) % 2**32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about experimental options, which differ between versions
        samplers = optuna.samplers
        sampler = (
            samplers.TPESampler(seed=seed, constant_liar=True)
            if config.search == "tpe"
            else samplers.RandomSampler(seed=seed)
        )
    return optuna.create_study(sampler=sampler, direction="minimize" if config.less else "maximize")


def _distribution(one: Range | list[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(one, list):
        return CategoricalDistribution([*range(len(one))])  # by index, as a value may be a list
    if one.int:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


def _value(one: Range | list[Any], drawn: Any) -> Any:
    return one[drawn] if isinstance(one, list) else drawn
