"""Execute a sweep: the file's own setting, the proposed trials, then the best one on
further seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedloom.core.errors import ConfigError, EngineError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.pool.fetch import absent, fetch
from fedloom.experiment.pool.pool import Ended, Job, Standing, digest, is_finished, run_all
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.report.metrics import value_of
from fedloom.report.read import read_run
from fedloom.sweep.config import SettingValues, Sweep, setting_text
from fedloom.sweep.search import proposals


@dataclass(frozen=True)
class Trial:
    """A setting and its results.

    Attributes:
        number: from 1 in order of proposal; 0 is the file's own setting.
        stage: index of the table of `over` that proposed it.
        setting: its differences from the file.
        folders: folders of its runs by seed.
        values: values of the metric by seed, for finished runs.
    """

    number: int
    stage: int
    setting: SettingValues
    folders: Mapping[int, Path]
    values: Mapping[int, float]

    @property
    def name(self) -> str:
        """Its display name."""
        return f"trial {self.number}" if self.number else "the file's own"

    @property
    def mean(self) -> float:
        """The mean over seeds; nan if a run is missing."""
        return (
            float(np.mean([*self.values.values()]))
            if len(self.values) == len(self.folders)
            else math.nan
        )

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; None if undefined."""
        known = [*self.values.values()]
        return float(np.std(known, ddof=1)) if len(known) > 1 and np.isfinite(known).all() else None


@dataclass
class SweepResults:
    """The results of a sweep.

    Attributes:
        own: the file's own setting.
        trials: the proposed trials in order, possibly with duplicates.
        confirmed: the best and the file's own setting on the confirming seeds, if run.
        ended: end states of runs by folder.
    """

    sweep: Sweep
    own: Trial
    trials: list[Trial] = field(default_factory=list)
    confirmed: tuple[Trial, Trial] | None = None
    ended: dict[Path, Ended] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Trial]:
        """Distinct settings with a finite value, best first; ties favor the file's own, then the
        earliest.
        """
        sign = 1 if self.sweep.config.less else -1
        every = [self.own, *reversed(self.trials)]
        known = {tuple(t.folders.values()): t for t in every if math.isfinite(t.mean)}
        return sorted(
            known.values(), key=lambda t: (sign * t.mean, t.folders != self.own.folders, t.number)
        )

    @property
    def own_is_best(self) -> bool:
        """Whether no trial is better than the file's own setting."""
        return bool(self.ranked) and self.ranked[0].folders == self.own.folders

    @property
    def failed(self) -> list[Ended]:
        """The failed runs."""
        return [one for one in self.ended.values() if one.state == "failed"]

    @property
    def stopped(self) -> bool:
        """Whether runs were stopped or skipped."""
        return any(one.state in ("stopped", "left") for one in self.ended.values())


def planned(sweep: Sweep) -> int:
    """The maximum number of runs of a sweep."""
    trials = sum(sweep.config.trials_of(over) for over in sweep.config.over)
    return (1 + trials) * len(sweep.config.seeds) + 2 * len(sweep.config.confirm)


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., RunResult] = execute,
) -> SweepResults:
    """Execute the unfinished runs of a sweep. Returns partial results if stopped.

    Args:
        sweep: the sweep.
        out: its folder; each run has a folder in `out/runs`, named by its digest.
        workers, progress, stop, execute: see `fedloom.experiment.pool.pool.run_all`.

    Raises:
        ConfigError: no run has the metric, or a drawn setting is invalid.
        DataError: a data set is not available.
        EngineError: no worker process can be started, or no trial has a finite value.
    """
    runner = _TrialRunner(sweep, out, workers, progress, stop, execute)
    config, best = sweep.config, SettingValues()
    (own,) = runner.try_all([(0, 0, {})], config.seeds)
    found = SweepResults(sweep, own, ended=runner.ended)
    for stage in range(len(config.over)):
        search, values = proposals(config, stage), None
        while not found.stopped:
            try:
                proposed = next(search) if values is None else search.send(values)
            except StopIteration:
                break
            first = len(found.trials) + 1
            numbered = [
                (first + i, stage, {**best, **setting}) for i, setting in enumerate(proposed)
            ]
            tried = runner.try_all(numbered, config.seeds)
            found.trials += tried
            values = [trial.mean for trial in tried]
        if found.stopped:
            return found
        if not found.ranked or all(math.isnan(trial.mean) for trial in found.trials):
            reason = (
                found.failed[0].reason if found.failed else f"none has a finite {config.metric}"
            )
            raise EngineError(
                f"no trial has a valid result ({reason}). See the logs in {out / 'runs'}."
            )
        best = found.ranked[0].setting
    if config.confirm:
        winner = found.ranked[0]
        both = [(winner.number, winner.stage, winner.setting), (0, 0, SettingValues())]
        tried = runner.try_all(both, config.confirm, confirm=True)
        found.confirmed = tried[0], tried[1]
    return found


@dataclass
class _TrialRunner:
    """Runs trials and tracks the progress of the sweep."""

    sweep: Sweep
    out: Path
    workers: int | None
    progress: Callable[[Standing], None]
    stop: Callable[[], bool]
    execute: Callable[..., RunResult]
    ended: dict[Path, Ended] = field(default_factory=dict)

    def try_all(
        self,
        settings: Sequence[tuple[int, int, SettingValues]],
        seeds: Sequence[int],
        *,
        confirm: bool = False,
    ) -> list[Trial]:
        """Run settings, given with number and stage, on all seeds; with `confirm` on
        the test rows.
        """
        jobs: dict[Path, Job] = {}
        folders: list[dict[int, Path]] = []
        for number, _, setting in settings:
            runs = {
                seed: self._run(setting, seed, 0.0 if confirm else self.sweep.config.validation)
                for seed in seeds
            }
            folders.append({seed: self.out / "runs" / digest(run) for seed, run in runs.items()})
            for seed, folder in folders[-1].items():
                name = f"trial {number} seed {seed}" if number else f"the file's own, seed {seed}"
                jobs.setdefault(folder, Job(runs[seed], folder, name, digest=folder.name))
        new = {folder: job for folder, job in jobs.items() if folder not in self.ended}
        if not self.stop():
            left = {
                str(folder): job.run
                for folder, job in new.items()
                if not is_finished(job.run, folder)
            }
            fetch(absent(left))
        before: Counter[str] = Counter(one.state for one in self.ended.values())
        ended = run_all(
            [*new.values()],
            workers=self.workers,
            progress=lambda now: self.progress(self._whole(now, before)),
            stop=self.stop,
            execute=self.execute,
        )
        self.ended |= {one.job.folder: one for one in ended}
        return [
            Trial(number, stage, setting, each, self._values(each))
            for (number, stage, setting), each in zip(settings, folders, strict=True)
        ]

    def _run(self, setting: SettingValues, seed: int, validation: float) -> RunConfig:
        try:
            return self.sweep.run(setting, seed, validation=validation)
        except ConfigError as error:
            raise ConfigError(f"{setting_text(setting)}: {error}") from None

    def _whole(self, now: Standing, before: Counter[str]) -> Standing:
        """The progress of the whole sweep; the time left is known for its last batch only."""
        over = before.total()
        of = max(planned(self.sweep), over + now.of)
        return replace(
            now,
            of=of,
            done=now.done + before["kept"] + before["finished"],
            failed=now.failed + before["failed"],
            left=now.left if over + now.of == of else None,
        )

    def _values(self, folders: Mapping[int, Path]) -> dict[int, float]:
        """The metric of each finished run."""
        found, metric = {}, self.sweep.config.ranked
        for seed, folder in folders.items():
            if self.ended[folder].state not in ("kept", "finished"):
                continue
            run = read_run(folder)
            value = value_of(run, metric)
            if value is None:
                s = run.summary
                known = sorted(
                    {*map(str, (*s.scores, *s.accuracies)), *(what for what, _, _ in run.measured)}
                )
                raise ConfigError(
                    f"sweep.metric: runs have no metric {str(metric)!r}. Valid metrics are "
                    f"{', '.join(known)}."
                )
            found[seed] = value
        return found
