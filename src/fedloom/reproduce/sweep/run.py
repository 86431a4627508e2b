"""Do a sweep: the file's own setting first, then what the search proposes, then the best on seeds of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from fedloom.core.errors import ConfigError, EngineError
from fedloom.experiment.config import RunConfig
from fedloom.experiment.pool import Ended, Job, Standing, digest, is_finished, run_all
from fedloom.experiment.run import Result, execute
from fedloom.report.read import read_run
from fedloom.reproduce.measure import of
from fedloom.reproduce.plan import absent, fetch
from fedloom.reproduce.sweep.config import Setting, Sweep, told
from fedloom.reproduce.sweep.search import proposals


@dataclass(frozen=True)
class Trial:
    """A setting and what it came to.

    Attributes:
        number: from 1 in the order in which they were proposed; 0 is the file's own setting.
        stage: by which table of `over` it was proposed, from 0.
        setting: all that it has other than the file.
        folders: of its runs, by seed.
        values: of the measure, of those seeds whose run is finished.
    """

    number: int
    stage: int
    setting: Setting
    folders: Mapping[int, Path]
    values: Mapping[int, float]

    @property
    def name(self) -> str:
        """What people call it."""
        return f"trial {self.number}" if self.number else "the file's own"

    @property
    def mean(self) -> float:
        """Over seeds; nan where a run is missing."""
        return float(np.mean([*self.values.values()])) if len(self.values) == len(self.folders) else math.nan

    @property
    def deviation(self) -> float | None:
        """Over seeds, of a sample; None where that has no meaning."""
        known = [*self.values.values()]
        return float(np.std(known, ddof=1)) if len(known) > 1 and np.isfinite(known).all() else None


@dataclass
class SweepResults:
    """What a sweep came to.

    Attributes:
        own: the file's own setting.
        trials: those that were proposed, in that order; one may be like another.
        confirmed: the best and the file's own on the seeds that confirm, once these are run.
        ended: how runs ended, by folder.
    """

    sweep: Sweep
    own: Trial
    trials: list[Trial] = field(default_factory=list)
    confirmed: tuple[Trial, Trial] | None = None
    ended: dict[Path, Ended] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Trial]:
        """The different settings with a finite value, the best first; of those alike the file's own, then the first."""
        sign = 1 if self.sweep.config.less else -1
        every = [self.own, *reversed(self.trials)]
        known = {tuple(t.folders.values()): t for t in every if math.isfinite(t.mean)}
        return sorted(known.values(), key=lambda t: (sign * t.mean, t.folders != self.own.folders, t.number))

    @property
    def own_is_best(self) -> bool:
        """Whether nothing that was tried is better than the file's own setting."""
        return bool(self.ranked) and self.ranked[0].folders == self.own.folders

    @property
    def failed(self) -> list[Ended]:
        """Runs that failed."""
        return [one for one in self.ended.values() if one.state == "failed"]

    @property
    def stopped(self) -> bool:
        """Whether some runs were stopped, or left."""
        return any(one.state in ("stopped", "left") for one in self.ended.values())


def planned(sweep: Sweep) -> int:
    """How many runs a sweep has at most."""
    trials = sum(sweep.config.trials_of(over) for over in sweep.config.over)
    return (1 + trials) * len(sweep.config.seeds) + 2 * len(sweep.config.confirm)


def run_sweep(
    sweep: Sweep,
    out: Path,
    *,
    workers: int | None = None,
    progress: Callable[[Standing], None] = lambda _: None,
    stop: Callable[[], bool] = lambda: False,
    execute: Callable[..., Result] = execute,
) -> SweepResults:
    """Do what is not finished of a sweep. When it is stopped, what there is so far.

    Args:
        sweep: what to do.
        out: its folder; each run has one in `out/runs`, by its digest.
        workers, progress, stop, execute: see `fedloom.experiment.pool.run_all`.

    Raises:
        ConfigError: no run has the measure; or a setting that was drawn is no valid run.
        DataError: a data set can't be had.
        EngineError: no process can be started; or every setting that was tried failed, or none has a finite value.
    """
    runner = _TrialRunner(sweep, out, workers, progress, stop, execute)
    config, best = sweep.config, Setting()
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
            numbered = [(first + i, stage, {**best, **setting}) for i, setting in enumerate(proposed)]
            tried = runner.try_all(numbered, config.seeds)
            found.trials += tried
            values = [trial.mean for trial in tried]
        if found.stopped:
            return found
        if not found.ranked or all(math.isnan(trial.mean) for trial in found.trials):
            reason = found.failed[0].reason if found.failed else f"none has a finite {config.measure}"
            raise EngineError(f"no setting has a result that could be the best ({reason}): see {out / 'runs'}")
        best = found.ranked[0].setting
    if config.confirm:
        winner = found.ranked[0]
        tried = runner.try_all([(winner.number, winner.stage, winner.setting), (0, 0, {})], config.confirm)
        found.confirmed = tried[0], tried[1]
    return found


@dataclass
class _TrialRunner:
    """Does settings, and remembers how far the whole is."""

    sweep: Sweep
    out: Path
    workers: int | None
    progress: Callable[[Standing], None]
    stop: Callable[[], bool]
    execute: Callable[..., Result]
    ended: dict[Path, Ended] = field(default_factory=dict)

    def try_all(self, settings: Sequence[tuple[int, int, Setting]], seeds: Sequence[int]) -> list[Trial]:
        """Run settings, each with its number and stage, with all seeds."""
        jobs: dict[Path, Job] = {}
        folders: list[dict[int, Path]] = []
        for number, _, setting in settings:
            runs = {seed: self._run(setting, seed) for seed in seeds}
            folders.append({seed: self.out / "runs" / digest(run) for seed, run in runs.items()})
            for seed, folder in folders[-1].items():
                name = f"trial {number} seed {seed}" if number else f"the file's own, seed {seed}"
                jobs.setdefault(folder, Job(runs[seed], folder, name, digest=folder.name))
        new = {folder: job for folder, job in jobs.items() if folder not in self.ended}
        if not self.stop():
            left = {str(folder): job.run for folder, job in new.items() if not is_finished(job.run, folder)}
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

    def _run(self, setting: Setting, seed: int) -> RunConfig:
        try:
            return self.sweep.run(setting, seed)
        except ConfigError as error:
            raise ConfigError(f"{told(setting)}: {error}") from None

    def _whole(self, now: Standing, before: Counter[str]) -> Standing:
        """How far the whole sweep is. How long it takes is known where nothing else follows."""
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
        """The measure in each folder that has a result."""
        found, measure = {}, self.sweep.config.measure
        for seed, folder in folders.items():
            if self.ended[folder].state not in ("kept", "finished"):
                continue
            run = read_run(folder)
            value = of(run, measure)
            if value is None:
                there = sorted({*run.summary.scores, *run.summary.accuracies} | {what for what, _, _ in run.measured})
                raise ConfigError(f"sweep.measure: runs have no {measure!r}; they have {', '.join(there)}")
            found[seed] = value
        return found
