"""Execute a sweep: an Optuna study proposes the trials, and the pool runs each with all seeds.

    OUT/study.log ──► trials that an earlier command left open, then new ones ──► runs in OUT/runs
          ▲                                                                            │
          └──────────────── the mean of each trial whose runs are all finished ◄───────┘

A trial stays open in the study until its runs are finished, so the next command takes up what a
kill, a stop or a failed run left. The values are read from the folders of the runs, which are named
by the digest of all that affects them: another study in the folder does not repeat them.
"""

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import ConfigError, EngineError
from fedloom.experiment.config.run import toml
from fedloom.experiment.pool.fetch import absent, fetch
from fedloom.experiment.pool.pool import Ended, Job, Standing, digest, is_finished, run_all
from fedloom.experiment.run.record import write_csv
from fedloom.report import formatting as fmt
from fedloom.report.metrics import value_of
from fedloom.report.read import read_run
from fedloom.support.paths import write_atomically
from fedloom.sweep.config import Range, SettingValues, Sweep, Values, setting_text

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

STUDY = "study.log"
"""The journal of the studies, for Optuna and its dashboard."""
BEST = "best.toml"
"""The best setting, for `fedloom run`."""
OWN = -1
"""The number of the file's own setting, which is no trial of the study."""


@dataclass
class Trial:
    """A setting and its results.

    Attributes:
        number: its number in the study; `OWN` is the file's own setting.
        setting: its differences from the file.
        jobs: its runs, one for each seed.
        values: values of the metric by seed, for finished runs.
    """

    number: int
    setting: SettingValues
    jobs: Sequence[Job]
    values: dict[int, float] = field(default_factory=dict)

    @property
    def is_finished(self) -> bool:
        """Whether all of its runs are."""
        return len(self.values) == len(self.jobs)

    @property
    def mean(self) -> float:
        """The mean over seeds; nan if a run is missing."""
        return float(np.mean([*self.values.values()])) if self.is_finished else math.nan


@dataclass
class SweepResults:
    """The results of a sweep.

    Attributes:
        trials: the file's own setting, then the trials in order, possibly with duplicates.
        ended: end states of runs by folder.
    """

    sweep: Sweep
    trials: list[Trial] = field(default_factory=list)
    ended: dict[Path, Ended] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Trial]:
        """Distinct settings with a finite value, best first; ties favor the file's own, then the
        earliest.
        """
        sign = 1 if self.sweep.config.less else -1
        known = {tuple(job.folder for job in t.jobs): t for t in reversed(self.trials)}
        finite = [trial for trial in known.values() if math.isfinite(trial.mean)]
        return sorted(finite, key=lambda t: (sign * t.mean, t.number))

    @property
    def failed(self) -> list[Ended]:
        """The failed runs."""
        return [one for one in self.ended.values() if one.state == "failed"]

    @property
    def stopped(self) -> bool:
        """Whether runs were stopped or skipped."""
        return any(one.state in ("stopped", "left") for one in self.ended.values())

    def worth(self, trial: Trial) -> str:
        """`86.7 % ± 0.9`, with the sample standard deviation over seeds."""
        metric, values = self.sweep.config.ranked, [*trial.values.values()]
        if (metric.cost or metric.metric.name).startswith("bytes"):
            return fmt.size(trial.mean)
        deviation = float(np.std(values, ddof=1)) if values[1:] else None
        return fmt.spread(trial.mean, deviation, metric.metric.share and not metric.cost)

    def write(self, out: Path) -> None:
        """Write `trials.csv` and, once there is a best setting, `best.toml`."""
        config = self.sweep.config
        header = ["trial", *config.over, "seed", config.metric, "state", "folder"]
        write_csv(out / "trials.csv", header, self._rows(out))
        if self.ranked:
            best = self.sweep.run(self.ranked[0].setting, config.seeds[0])
            write_atomically(out / BEST, toml(best).encode())
        else:  # left by another sweep
            (out / BEST).unlink(missing_ok=True)

    def _rows(self, out: Path) -> Iterator[list[object]]:
        """A row of raw values per trial and seed."""
        for trial in self.trials:
            name = "own" if trial.number == OWN else trial.number
            setting = [trial.setting.get(key, "") for key in self.sweep.config.over]
            for job in trial.jobs:
                ended = [self.ended[job.folder].state, job.folder.relative_to(out).as_posix()]
                seed = job.run.seed
                yield [name, *setting, seed, trial.values.get(seed, ""), *ended]


def planned(sweep: Sweep) -> int:
    """The maximum number of runs of a sweep."""
    return (1 + sweep.config.number) * len(sweep.config.seeds)


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    **pool: Any,
) -> SweepResults:
    """Execute the unfinished runs of a sweep. Returns partial results if stopped.

    Args:
        sweep: the sweep.
        out: its folder; each run has a folder in `out/runs`, named by its digest.
        progress, stop, pool: see `fedloom.experiment.pool.pool.run_all`.

    Raises:
        ConfigError: no run has the metric, or a drawn setting is invalid.
        DataError: a data set is not available.
        EngineError: no worker process can be started, or no trial has a finite value.
    """
    from optuna.trial import TrialState

    config, found, study = sweep.config, SweepResults(sweep), _study(sweep, out)
    # A grid and random draws need no values of earlier trials.
    batch = config.together if config.search == "tpe" else config.number
    for first in range(0, config.number, batch):
        drawn = _drawn(study, sweep, min(first + batch, config.number))[first:]
        settings = {OWN: SettingValues()} if first == 0 else {}
        settings |= {one.number: _setting(sweep, one.params) for one in drawn}
        tried = [Trial(n, setting, _jobs(sweep, setting, out)) for n, setting in settings.items()]
        jobs = {job.folder: job for trial in tried for job in trial.jobs}
        new = [job for folder, job in jobs.items() if folder not in found.ended]
        if not stop():
            left = {str(job.folder): job.run for job in new if not is_finished(job.run, job.folder)}
            fetch(absent(left))
        known, failed, is_last = len(found.ended), len(found.failed), first + batch >= config.number

        def show(
            now: Standing, known: int = known, failed: int = failed, is_last: bool = is_last
        ) -> None:
            """The progress of the whole sweep; the time left is known in its last batch."""
            of, left = (known + now.of, now.left) if is_last else (planned(sweep), None)
            done = known - failed + now.done
            progress(replace(now, of=of, done=done, failed=failed + now.failed, left=left))

        found.ended |= {
            one.job.folder: one for one in run_all(new, progress=show, stop=stop, **pool)
        }
        for trial in tried:
            trial.values |= {
                job.run.seed: _value(sweep, job.folder)
                for job in trial.jobs
                if found.ended[job.folder].state in ("kept", "finished")
            }
            if trial.number != OWN and trial.is_finished:
                is_finite = math.isfinite(trial.mean)
                study.tell(
                    trial.number,
                    trial.mean if is_finite else None,
                    state=None if is_finite else TrialState.FAIL,
                    skip_if_finished=True,
                )
        found.trials += tried
        if found.stopped:
            return found
    if not found.ranked:
        none = f"none has a finite {config.metric}"
        reason = found.failed[0].reason if found.failed else none
        raise EngineError(
            f"no trial has a valid result ({reason}). See the logs in {out / 'runs'}."
        )
    return found


def _jobs(sweep: Sweep, setting: SettingValues, out: Path) -> list[Job]:
    """The runs of a setting, one for each seed."""
    jobs = []
    for seed in sweep.config.seeds:
        try:
            run = sweep.run(setting, seed, validation=sweep.config.validation)
        except ConfigError as error:
            raise ConfigError(f"{setting_text(setting)}: {error}") from None
        folder = out / "runs" / digest(run)
        name = f"{setting_text(setting)}, seed {seed}"
        jobs.append(Job(run, folder, name, digest=folder.name))
    return jobs


def _value(sweep: Sweep, folder: Path) -> float:
    """The metric of a finished run."""
    run = read_run(folder)
    value = value_of(run, metric := sweep.config.ranked)
    if value is None:
        others = {*run.summary.scores, *run.summary.accuracies, *(of for of, _, _ in run.measured)}
        raise ConfigError(
            f"sweep.metric: runs have no metric {str(metric)!r}. Valid metrics are "
            f"{', '.join(sorted(map(str, others)))}."
        )
    return value


def _study(sweep: Sweep, out: Path) -> "Study":
    """The study of the sweep in its folder. All that affects its draws and values names it, so an
    edited file starts another one, and more trials continue it.
    """
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    out.mkdir(parents=True, exist_ok=True)
    text = digest(sweep.own()) + sweep.config.model_dump_json(exclude={"trials"})
    file = out / STUDY
    try:
        if file.exists() and not file.read_bytes().endswith(b"\n"):
            raise ValueError("a line without an end")  # to which the next one would be joined
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(file))),
            study_name=f"{sweep.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}",
            direction="minimize" if sweep.config.less else "maximize",
            load_if_exists=True,
        )
    except ValueError as error:
        raise EngineError(
            f"{file} is damaged ({error}). Delete it, and repeat the command: finished runs are "
            "not repeated."
        ) from None


def _drawn(study: "Study", sweep: Sweep, count: int) -> "list[FrozenTrial]":
    """The first trials of the study, to which it adds those that are missing."""
    from optuna.samplers import RandomSampler, TPESampler
    from optuna.trial import TrialState, create_trial

    config = sweep.config
    space = {key: _distribution(values) for key, values in config.over.items()}
    grid = config.search == "grid" and [*product(*(one.choices for one in space.values()))]
    # A kill may have left a trial without some of its settings.
    while len(known := [t for t in study.trials if t.params.keys() == space.keys()]) < count:
        if grid:  # in one step, and GridSampler is no sampler for `ask` and `tell`
            params = dict(zip(space, grid[len(known)], strict=True))
            study.add_trial(
                create_trial(state=TrialState.RUNNING, params=params, distributions=space)
            )
            continue
        # By the number of the trial, so that a stopped sweep goes on as it would have.
        seed = int(np.random.SeedSequence((config.seed, len(known))).generate_state(1)[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # options that are experimental in some versions
            study.sampler = (
                TPESampler(seed=seed, constant_liar=True)
                if config.search == "tpe"
                else RandomSampler(seed=seed)
            )
        study.ask(space)
    return known[:count]


def _distribution(one: Values) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(one, list):
        return CategoricalDistribution(_choices(one))
    if one.int:
        return IntDistribution(int(one.low), int(one.high), log=one.log)
    return FloatDistribution(one.low, one.high, log=one.log)


def _choices(values: Sequence[Any]) -> list[Any]:
    """The values as Optuna stores them: it has no lists and no tables."""
    return [one if isinstance(one, str | float | bool) else str(one) for one in values]


def _setting(sweep: Sweep, params: Mapping[str, Any]) -> SettingValues:
    """What a trial of the study sets, in the order of the file."""
    return {
        key: params[key] if isinstance(one, Range) else one[_choices(one).index(params[key])]
        for key, one in sweep.config.over.items()
    }
