"""A measure by iteration, and by what clients had sent: a panel for each column, a line for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.comparison_page import BANDS
from fedloom.report.learning import ACROSS, ITERATION, sent
from fedloom.report.page import Figure
from fedloom.report.plots import Form, Level, Line
from fedloom.report.read import Run
from fedloom.reproduce.found import Found
from fedloom.reproduce.measure import curve, drawn
from fedloom.reproduce.picture import Picture, levels, of_curves, picture, row_look

POINTS = 40
"""A line is drawn through at most so many of its points."""


@dataclass(frozen=True)
class _Series:
    """A row's curves in one column: (points,) places and raw values, for each seed."""

    row: str
    column: str
    seeds: tuple[int, ...]
    x: np.ndarray
    y: np.ndarray
    sent: np.ndarray

    def line(self, found: Found, x: np.ndarray, band: bool) -> Line:
        """Their mean over seeds, thinned, with its deviation."""
        at = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
        deviation = self.y.std(0, ddof=1)[at] if band and len(self.y) > 1 else None
        return Line(self.row, x[at], self.y.mean(0)[at], row_look(found, self.row), deviation)


def _series(found: Found) -> dict[str, list[_Series]]:
    """By column, the curves of its rows."""
    measure, series = drawn(found.reproduction.measure), dict[str, list[_Series]]()
    for (row, column), place in found.places.items():
        curves = [(run, *curve(run, measure)) for run in place.runs]
        if not curves or not all(len(x) for _, x, _ in curves):
            continue
        points = min(len(x) for _, x, _ in curves)
        sent = [_over(x, run, points) for run, x, _ in curves]
        seeds = tuple(run.summary.seed for run, _, _ in curves)
        y = np.stack([y[:points] for _, _, y in curves])
        series.setdefault(column, []).append(_Series(row, column, seeds, curves[0][1][:points], y, np.stack(sent)))
    return {column: series[column] for column in found.columns if column in series}


def _over(x: np.ndarray, run: Run, points: int) -> np.ndarray:
    """Bytes (points,) that were sent until the evaluations at iterations x."""
    total = sent(run)
    at = run.curve("bytes up", run.last)[0]
    spent: np.ndarray = np.interp(x[:points], at, total)
    return spent


def curves(found: Found) -> Picture | None:
    """The measure by iteration."""
    header = ("row", "column", "seed", "iteration", "value", "unit")
    axis = of_curves(found)
    every = _series(found)
    figures, rows = [], list[Sequence[Any]]()
    for number, (column, group) in enumerate(every.items()):
        lines = [one.line(found, one.x, len(group) <= BANDS) for one in group]
        rows += [
            (one.row, column, seed, int(x), float(axis.unit.factor * y), axis.unit.name)
            for one in group
            for seed, values in zip(one.seeds, one.y, strict=True)
            for x, y in zip(one.x, values, strict=True)
        ]
        figures.append(_chart(found, f"curves {number}", column, lines, ACROSS, fmt.whole))
    text = f"{axis.title} by iteration, mean over seeds{_bands(every)}. {ITERATION}"
    return picture("curves", "Learning", text, figures, header, rows)


def spending(found: Found) -> Picture | None:
    """The measure by what clients had sent."""
    header = ("row", "column", "seed", "iteration", "bytes", "value", "unit")
    axis = of_curves(found)
    figures, rows = [], list[Sequence[Any]]()
    for number, (column, group) in enumerate(_series(found).items()):
        lines, silent = [], []
        for one in group:
            total = one.sent.mean(0)
            line = one.line(found, total, False)
            level = Level(f"{one.row}, which sends nothing", float(line.y[-1]), replace(line.style, dash=(6, 3)))
            lines += [line] if total[-1] > 0 else []
            silent += [] if total[-1] > 0 else [level]
            rows += [
                (one.row, column, seed, int(x), float(sent), float(axis.unit.factor * y), axis.unit.name)
                for seed, sums, values in zip(one.seeds, one.sent, one.y, strict=True)
                for x, sent, y in zip(one.x, sums, values, strict=True)
            ]
        if lines:
            figures.append(_chart(found, f"bytes {number}", column, lines, "sent", plots.volume, silent))
    text = f"{axis.title} by the tensor data that all clients had sent, mean over seeds."
    return picture("bytes", "What it cost to send", text, figures, header, rows)


def _chart(
    found: Found,
    slug: str,
    column: str,
    lines: Sequence[Line],
    across: str,
    form_x: Form,
    silent: Sequence[Level] = (),
) -> Figure:
    """A panel of one column."""
    axis, every = of_curves(found), [*silent, *levels(found, [column])]
    alt = f"{column}: {axis.title}; at the end {axis.ends(lines)}."
    svg, legend = plots.chart(slug, alt, lines, every, across=across, form_x=form_x, form_y=axis.form)
    return Figure(column, svg, legend)


def _bands(every: dict[str, list[_Series]]) -> str:
    few = all(len(group) <= BANDS for group in every.values())
    several = any(len(one.seeds) > 1 for group in every.values() for one in group)
    return "; the band is ± one s.d. over seeds" if few and several else ""
