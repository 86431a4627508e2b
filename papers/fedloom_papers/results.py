"""The results of a reproduction's runs, read once for its table, claims and figures."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.experiment.config.run import RunConfig
from fedloom.report import formatting as fmt
from fedloom.report import metrics
from fedloom.report.metrics import RunMetric
from fedloom.report.read import Run, read_run
from fedloom_papers.archive import ArchivedRun, record_of
from fedloom_papers.keys import archive_key
from fedloom_papers.selection import EVERYTHING, Selection
from fedloom_papers.spec import SCALES, Cell, Reproduction, Row, Scale
from fedloom_papers.units import Unit


@dataclass(frozen=True)
class Attempt:
    """One run of a cell.

    Attributes:
        run: its folder's content; None if it has no finished run.
        record: its numbers, of the folder or of the archive; None if there are none.
        problem: the reason for that.
    """

    config: RunConfig
    folder: Path
    run: Run | None = None
    record: ArchivedRun | None = None
    problem: str = ""

    def value(self, metric: RunMetric) -> float | None:
        """The raw value of a metric; None if not measured."""
        if self.run is not None:
            return metrics.value_of(self.run, metric)
        return None if self.record is None else self.record.metrics.get(str(metric))


@dataclass(frozen=True)
class CellResults:
    """A cell and its runs, one for each seed."""

    cell: Cell
    attempts: tuple[Attempt, ...]

    @property
    def runs(self) -> list[Run]:
        """The finished runs whose folders are here."""
        return [one.run for one in self.attempts if one.run is not None]

    @property
    def records(self) -> list[ArchivedRun]:
        """The numbers of all finished runs."""
        return [one.record for one in self.attempts if one.record is not None]

    @property
    def missing(self) -> list[Attempt]:
        """The unfinished runs."""
        return [one for one in self.attempts if one.record is None]

    @property
    def remark(self) -> str:
        """Why runs are missing; empty if none is."""
        return self.cell.untestable or "; ".join(dict.fromkeys(one.problem for one in self.missing))


@dataclass(frozen=True)
class CellValue:
    """A metric of a cell in the unit.

    Attributes:
        by_seed: the values by seed.
        paper: the paper's mean and standard deviation, if published.
        same_data: whether ours is on the paper's data set.
    """

    by_seed: Mapping[int, float]
    paper: tuple[float, float | None] | None = None
    same_data: bool = True

    @property
    def mean(self) -> float | None:
        """The mean over seeds; None without any."""
        return float(np.mean([*self.by_seed.values()])) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; None below two seeds or if a value
        is infinite.
        """
        values = [*self.by_seed.values()]
        return (
            float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else None
        )

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's; None on other data."""
        mean = self.mean
        if mean is None or not math.isfinite(mean) or self.paper is None or not self.same_data:
            return None
        return mean - self.paper[0]


@dataclass(frozen=True)
class TableResults:
    """The selected cells of a table at one scale, by row and column.

    Attributes:
        name: of the reproduction, such as `fedal-table-6`.
        asked: the selection on the command line.
    """

    name: str
    reproduction: Reproduction
    scale: Scale
    places: Mapping[tuple[str, str], CellResults] = field(repr=False)
    asked: Selection = EVERYTHING

    @property
    def unit(self) -> Unit:
        """The unit of the table's numbers."""
        return Unit(self.reproduction.unit)

    @cached_property
    def rows(self) -> list[str]:
        """The names of the selected rows, in order."""
        return list(dict.fromkeys(row for row, _ in self.places))

    @cached_property
    def columns(self) -> list[str]:
        """The names of the selected columns, in the file's order."""
        selected = {column for _, column in self.places}
        return [column.name for column in self.reproduction.columns if column.name in selected]

    @cached_property
    def attempts(self) -> list[tuple[CellResults, Attempt]]:
        """Every run of every cell; cells may share runs."""
        return [(place, one) for place in self.places.values() for one in place.attempts]

    @cached_property
    def records(self) -> dict[Path, ArchivedRun]:
        """The numbers of the distinct finished runs by folder."""
        return {one.folder: one.record for _, one in self.attempts if one.record is not None}

    @cached_property
    def seconds(self) -> float:
        """The total wall time of the runs."""
        return sum(record.seconds for record in self.records.values())

    def number(
        self, row: str, column: str, metric: RunMetric | None = None, unit: str | None = None
    ) -> CellValue:
        """A metric of a cell in a unit; None for those of the table."""
        place = self.places[row, column]
        factor = self.unit.factor if unit is None else Unit(unit).factor
        raw = {
            one.config.seed: one.value(metric or self.reproduction.measured)
            for one in place.attempts
        }
        values = {seed: factor * value for seed, value in raw.items() if value is not None}
        ours, theirs = self._data(row, column)
        return CellValue(values, place.cell.published if metric is None else None, ours == theirs)

    @cached_property
    def numbers(self) -> dict[tuple[str, str], CellValue]:
        """The numbers of all cells."""
        return {at: self.number(*at) for at in self.places}

    def best(self, column: str, *, paper: bool = False) -> set[str]:
        """The rows with the best number of a column, ours or the paper's; none if fewer than two
        have one.
        """
        values = {}
        for row in self.rows:
            number = self.numbers.get((row, column))
            if number is None:
                continue
            shown = number.mean if not paper else number.paper[0] if number.paper else None
            if shown is not None and not math.isnan(shown):
                values[row] = shown
        if len(values) < 2:
            return set()
        best = (
            max(values.values()) if self.reproduction.better == "higher" else min(values.values())
        )
        return (
            {row for row, value in values.items() if value == best}
            if math.isfinite(best)
            else set()
        )

    def row(self, name: str) -> Row:
        """A row of the reproduction."""
        return next(row for row in self.reproduction.rows if row.name == name)

    def _data(self, row: str, column: str) -> tuple[str, str]:
        """The data set of a cell, and that of the paper; empty if the column cannot be run."""
        at = next(one for one in self.reproduction.columns if one.name == column)
        if at.untestable.get(self.scale):
            return "", ""
        ours, theirs = (
            self.reproduction.data(self.row(row), at, scale) for scale in (self.scale, SCALES[1])
        )
        return ours, theirs

    def data_used(self, columns: Collection[str]) -> str:
        """`Fashion-MNIST for CIFAR-10`: the data sets of columns, and the paper's if
        they differ.
        """
        pairs = dict.fromkeys(
            self._data(self.rows[0], column) for column in self.columns if column in columns
        )
        return ", ".join(
            ours if ours == theirs else f"{ours} for {theirs}" for ours, theirs in pairs if ours
        )

    def beds(self, columns: Collection[str]) -> list[str]:
        """The data sets that were used in columns."""
        pairs = [self._data(self.rows[0], column) for column in self.columns if column in columns]
        return [*dict.fromkeys(ours for ours, _ in pairs if ours)]

    def stands_in(self, columns: Collection[str]) -> bool:
        """Whether one of the columns was run on other data than the paper's."""
        return any(
            ours != theirs
            for ours, theirs in (self._data(self.rows[0], c) for c in self.columns if c in columns)
        )

    def heading(self, column: str) -> str:
        """The name of a column, with the data set that was used."""
        ours, theirs = self._data(self.rows[0], column)
        if ours == theirs:
            return column
        name = re.compile(rf"(?<![\w-]){re.escape(theirs.split()[0])}(?![\w-])")
        return (
            name.sub(f"{ours} for {theirs.split()[0]}", column)
            if name.search(column)
            else f"{column}, {ours}"
        )

    def chance(self, column: str, metric: RunMetric | None = None) -> float | None:
        """The accuracy in [0, 1] of always predicting the most frequent class, mean over a column's
        runs; None if it is unknown or the metric is no accuracy.
        """
        name = str((metric or self.reproduction.measured).drawn)
        records = [
            record
            for (_, at), place in self.places.items()
            if at == column
            for record in place.records
        ]
        measured = [record for record in records if name in record.metrics]
        known = [record.chances[name] for record in measured if name in record.chances]
        return float(np.mean(known)) if known and len(known) == len(measured) else None


def gather(
    name: str,
    reproduction: Reproduction,
    scale: Scale,
    cells: Iterable[Cell],
    folder_of: Callable[[RunConfig], Path],
    problems: Mapping[Path, str],
    asked: Selection = EVERYTHING,
    archived: Mapping[str, ArchivedRun] | None = None,
    key_of: Callable[[RunConfig], str] = archive_key,
) -> TableResults:
    """Read the folders of all runs. An `Attempt` without a run says why: it failed (`problems` has
    the reason by folder), or is missing, unfinished or damaged. For a run without a folder the
    archive has the numbers by digest.
    """
    known: dict[Path, Attempt] = {}

    def attempt_of(cell: Cell, config: RunConfig) -> Attempt:
        folder = folder_of(config)
        if folder not in known:
            run, problem = _read(folder, problems.get(folder, ""))
            key = key_of(config)
            record = None if run is None else record_of(run, config, key, cell.name, reproduction)
            known[folder] = Attempt(
                config, folder, run, record or (archived or {}).get(key), problem
            )
        return known[folder]

    places = {
        (c.row.name, c.column.name): CellResults(c, tuple(attempt_of(c, run) for run in c.runs))
        for c in cells
    }
    return TableResults(name, reproduction, scale, places, asked)


def _read(folder: Path, failure: str) -> tuple[Run | None, str]:
    """A finished run, or the reason why there is none."""
    if not (folder / "result.json").is_file():
        unfinished = "not finished" if (folder / "metrics.csv").is_file() else "not run"
        return None, f"failed: {failure}" if failure else unfinished
    try:
        return read_run(folder), ""
    except DataError as error:
        return None, str(error)


def seeds(found: TableResults) -> list[int]:
    """The distinct numbers of seeds of cells with any, in order."""
    return sorted({len(number.by_seed) for number in found.numbers.values() if number.by_seed})


def untestable(found: TableResults) -> Iterator[str]:
    """A line for each row or column that cannot be run at this scale, with the reason."""
    r = found.reproduction
    for part in (*r.rows, *r.columns):
        if (why := part.untestable.get(found.scale)) and part.name in (*found.rows, *found.columns):
            yield f"{part.name}: {why.rstrip('.')}."


def missing(found: TableResults) -> Iterator[str]:
    """A line for each cell with missing runs."""
    for place in found.places.values():
        problems: dict[str, list[str]] = {}
        for one in place.missing:
            problems.setdefault(one.problem, []).append(str(one.config.seed))
        for problem, which in problems.items():
            yield (
                f"{place.cell.name}, seed{'s' * (len(which) > 1)} {fmt.together(which)}: {problem}"
            )
