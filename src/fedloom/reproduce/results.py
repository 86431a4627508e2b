"""The results of a reproduction's runs, read once for its table, claims and figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.experiment.config import RunConfig
from fedloom.report import formatting as fmt
from fedloom.report.read import Run, read_run
from fedloom.reproduce import measure as measures
from fedloom.reproduce.measure import Unit, unit_of
from fedloom.reproduce.selection import EVERYTHING, Selection
from fedloom.reproduce.spec import Cell, Reproduction, Scale


@dataclass(frozen=True)
class Attempt:
    """One run of a cell.

    Attributes:
        run: its results; None if unfinished.
        problem: the reason for that.
    """

    config: RunConfig
    folder: Path
    run: Run | None
    problem: str = ""


@dataclass(frozen=True)
class CellResults:
    """A cell and its runs, one for each seed."""

    cell: Cell
    attempts: tuple[Attempt, ...]

    @property
    def runs(self) -> list[Run]:
        """The finished runs."""
        return [one.run for one in self.attempts if one.run is not None]

    @property
    def missing(self) -> list[Attempt]:
        """The unfinished runs."""
        return [one for one in self.attempts if one.run is None]


@dataclass(frozen=True)
class CellValue:
    """A measure of a cell, in the unit.

    Attributes:
        by_seed: a value for each seed that has one.
        paper: the paper's mean and standard deviation, if it has them.
    """

    by_seed: Mapping[int, float]
    paper: tuple[float, float | None] | None = None

    @property
    def mean(self) -> float | None:
        """Over seeds; None without any."""
        return float(np.mean([*self.by_seed.values()])) if self.by_seed else None

    @property
    def deviation(self) -> float | None:
        """The sample standard deviation over seeds; None below two seeds or if a value is infinite."""
        values = [*self.by_seed.values()]
        return float(np.std(values, ddof=1)) if len(values) > 1 and np.isfinite(values).all() else None

    @property
    def difference(self) -> float | None:
        """Ours minus the paper's."""
        mean = self.mean
        known = mean is not None and math.isfinite(mean) and self.paper is not None
        return mean - self.paper[0] if known and mean is not None and self.paper else None


@dataclass(frozen=True)
class TableResults:
    """All places of a table at one scale, by row and column.

    Attributes:
        name: of the reproduction, such as `fedal-table-6`.
        asked: what was asked for beyond its file.
    """

    name: str
    reproduction: Reproduction
    scale: Scale
    places: Mapping[tuple[str, str], CellResults] = field(repr=False)
    asked: Selection = EVERYTHING

    @property
    def unit(self) -> Unit:
        """Of the table's numbers."""
        return unit_of(self.reproduction)

    @cached_property
    def rows(self) -> list[str]:
        """Names of the rows that were asked for, in order."""
        return list(dict.fromkeys(row for row, _ in self.places))

    @cached_property
    def columns(self) -> list[str]:
        """The same of columns, as the file orders them."""
        asked = {column for _, column in self.places}
        return [column.name for column in self.reproduction.columns if column.name in asked]

    @cached_property
    def attempts(self) -> list[tuple[CellResults, Attempt]]:
        """Every run of every cell; some cells may share one."""
        return [(place, one) for place in self.places.values() for one in place.attempts]

    @cached_property
    def runs(self) -> dict[Path, Run]:
        """The distinct finished runs by folder."""
        return {one.folder: one.run for _, one in self.attempts if one.run is not None}

    def number(self, row: str, column: str, measure: str | None = None, unit: str | None = None) -> CellValue:
        """A measure of a cell, or the table's own, in a unit, or the table's own."""
        place = self.places[row, column]
        factor = self.unit.factor if unit is None else Unit(unit).factor
        raw = {run.summary.seed: measures.of(run, measure or self.reproduction.measure) for run in place.runs}
        values = {seed: factor * value for seed, value in raw.items() if value is not None}
        return CellValue(values, place.cell.published if measure is None else None)

    @cached_property
    def numbers(self) -> dict[tuple[str, str], CellValue]:
        """The table."""
        return {at: self.number(*at) for at in self.places}

    def best(self, column: str, *, paper: bool = False) -> set[str]:
        """The rows with the best number of a column, ours or the paper's; none where there is nothing to choose."""
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
        best = max(values.values()) if self.reproduction.better == "more" else min(values.values())
        return {row for row, value in values.items() if value == best} if math.isfinite(best) else set()

    def chance(self, column: str) -> float | None:
        """The accuracy in [0, 1] of always answering the most frequent class, mean over a column's runs; None where
        the measure is no accuracy, or nobody knows it."""
        measure = measures.drawn(self.reproduction.measure)
        found = []
        for (_, at), place in self.places.items():
            for run in place.runs if at == column else ():
                if measure in run.summary.accuracies:
                    found.append(run.summary.chance_of(measure))
        known = [chance for chance in found if chance is not None]
        return float(np.mean(known)) if known and len(known) == len(found) else None


def gather(
    name: str,
    reproduction: Reproduction,
    scale: Scale,
    cells: Iterable[Cell],
    folder_of: Callable[[RunConfig], Path],
    problems: Mapping[Path, str],
    asked: Selection = EVERYTHING,
) -> TableResults:
    """Read the folders of all runs; one that failed, by its folder in `problems`, or is missing, unfinished or damaged,
    says so in its `Attempt`."""
    known: dict[Path, tuple[Run | None, str]] = {}

    def attempt_of(config: RunConfig) -> Attempt:
        folder = folder_of(config)
        if folder not in known:
            known[folder] = _read(folder, problems.get(folder, ""))
        return Attempt(config, folder, *known[folder])

    places = {(c.row.name, c.column.name): CellResults(c, tuple(attempt_of(run) for run in c.runs)) for c in cells}
    return TableResults(name, reproduction, scale, places, asked)


def _read(folder: Path, failure: str) -> tuple[Run | None, str]:
    """A finished run, or why there is none."""
    if not (folder / "result.json").is_file():
        unfinished = "not finished" if (folder / "metrics.csv").is_file() else "not run"
        return None, f"failed: {failure}" if failure else unfinished
    try:
        return read_run(folder), ""
    except DataError as error:
        return None, str(error)


def seeds(found: TableResults) -> list[int]:
    """How many seeds the cells have that have any, in order and each once."""
    return sorted({len(number.by_seed) for number in found.numbers.values() if number.by_seed})


def untestable(found: TableResults) -> Iterator[str]:
    """A line for each row, column or cell that can't be run at this scale, and why."""
    r = found.reproduction
    for part in (*r.rows, *r.columns):
        if (why := part.untestable.get(found.scale)) and part.name in (*found.rows, *found.columns):
            yield f"{part.name}: {why.rstrip('.')}."


def missing(found: TableResults) -> Iterator[str]:
    """A line for each cell that lacks runs."""
    for place in found.places.values():
        problems: dict[str, list[str]] = {}
        for one in place.missing:
            problems.setdefault(one.problem, []).append(str(one.config.seed))
        for problem, which in problems.items():
            yield f"{place.cell.name}, seed{'s' * (len(which) > 1)} {fmt.together(which)}: {problem}"
