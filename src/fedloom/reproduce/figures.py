"""The figures of a reproduction, and the numbers behind each as a tidy table in its unit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.comparison_page import BANDS
from fedloom.report.heatmaps import class_counts, rows_legend
from fedloom.report.learning import ACROSS, ITERATION, sent
from fedloom.report.mixing import chosen
from fedloom.report.page import Figure, Key, PageSection
from fedloom.report.plots import Dots, Form, Level, Line
from fedloom.report.read import Run
from fedloom.report.styles import SeriesStyle, series_style
from fedloom.reproduce.measure import Unit, curve, drawn
from fedloom.reproduce.results import TableResults


@dataclass(frozen=True)
class PlotSection:
    """A part of the page with figures, and the table behind it.

    Attributes:
        name: of its file, without `.csv`.
    """

    name: str
    section: PageSection
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]


def picture(
    name: str,
    heading: str,
    text: str,
    figures: Sequence[Figure],
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    legend: Sequence[Key] = (),
) -> PlotSection | None:
    """None without figures. Legends that are alike become one."""
    if not figures:
        return None
    texts = {tuple(key.text for key in figure.legend) for figure in figures}
    if not legend and len(texts) == 1 and len(figures) > 1 and name in ("curves", "bytes"):
        legend = figures[0].legend
        figures = [replace(figure, legend=()) for figure in figures]
    return PlotSection(name, PageSection(heading, text=[text], figures=figures, legend=legend), header, rows)


def row_look(found: TableResults, row: str) -> SeriesStyle:
    """The look of a row, in all figures and in the table."""
    return series_style([r.name for r in found.reproduction.rows].index(row))


@dataclass(frozen=True)
class MeasureAxis:
    """What is drawn, and how its raw values are written."""

    measure: str
    unit: Unit

    @property
    def title(self) -> str:
        """The measure at the beginning of a sentence."""
        return fmt.capital(self.measure)

    @property
    def form(self) -> Form | None:
        """At an axis; None for plain numbers."""
        if self.unit.name in ("kB", "MB", "GB"):
            return plots.volume
        return plots.share if self.unit.name == "%" else None

    def text(self, value: float) -> str:
        """Within a sentence."""
        return f"{self.unit.number(self.unit.factor * value)}{fmt.NBSP}{self.unit.name}".rstrip()

    def ends(self, lines: Sequence[Line]) -> str:
        """Each line's last value."""
        known = [(line.label, line.y[np.isfinite(line.y)]) for line in lines]
        return fmt.together([f"{label} {self.text(float(y[-1]))}" for label, y in known if len(y)])


def of_cells(found: TableResults) -> MeasureAxis:
    """The measure of the table."""
    return MeasureAxis(found.reproduction.measure, found.unit)


def of_curves(found: TableResults) -> MeasureAxis:
    """The measure itself, or the accuracy where it has no curve."""
    measure = found.reproduction.measure
    shown = drawn(measure)
    return MeasureAxis(shown, found.unit if measure.endswith(shown) else Unit("%"))


def levels(found: TableResults, columns: Sequence[str]) -> list[Level]:
    """Chance, where it is one and the same."""
    known = {chance for column in columns if (chance := found.chance(column)) is not None}
    return [Level("chance: always the most frequent class", known.pop())] if len(known) == 1 else []


POINTS = 40
"""A line is drawn through at most so many of its points."""


@dataclass(frozen=True)
class _SeedCurves:
    """A row's curves in one column: (points,) places and raw values, for each seed."""

    row: str
    column: str
    seeds: tuple[int, ...]
    x: np.ndarray
    y: np.ndarray
    sent: np.ndarray

    def line(self, found: TableResults, x: np.ndarray, band: bool) -> Line:
        """Their mean over seeds, thinned, with its deviation."""
        at = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
        deviation = self.y.std(0, ddof=1)[at] if band and len(self.y) > 1 else None
        return Line(self.row, x[at], self.y.mean(0)[at], row_look(found, self.row), deviation)


def _series(found: TableResults) -> dict[str, list[_SeedCurves]]:
    """By column, the curves of its rows."""
    measure, series = drawn(found.reproduction.measure), dict[str, list[_SeedCurves]]()
    for (row, column), place in found.places.items():
        curves = [(run, *curve(run, measure)) for run in place.runs]
        if not curves or not all(len(x) for _, x, _ in curves):
            continue
        points = min(len(x) for _, x, _ in curves)
        sent = [_over(x, run, points) for run, x, _ in curves]
        seeds = tuple(run.summary.seed for run, _, _ in curves)
        y = np.stack([y[:points] for _, _, y in curves])
        series.setdefault(column, []).append(_SeedCurves(row, column, seeds, curves[0][1][:points], y, np.stack(sent)))
    return {column: series[column] for column in found.columns if column in series}


def _over(x: np.ndarray, run: Run, points: int) -> np.ndarray:
    """Bytes (points,) that were sent until the evaluations at iterations x."""
    total = sent(run)
    at = run.curve("bytes up", run.last)[0]
    spent: np.ndarray = np.interp(x[:points], at, total)
    return spent


def learning_curves(found: TableResults) -> PlotSection | None:
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


def bytes_plot(found: TableResults) -> PlotSection | None:
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
    found: TableResults,
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


def _bands(every: dict[str, list[_SeedCurves]]) -> str:
    few = all(len(group) <= BANDS for group in every.values())
    several = any(len(one.seeds) > 1 for group in every.values() for one in group)
    return "; the band is ± one s.d. over seeds" if few and several else ""


APART = 20.0
"""Values of columns whose greatest is so many times the least stand at even distances."""


def line_plot(found: TableResults) -> PlotSection | None:
    """Rows as lines over the columns' values; the paper's numbers beside them."""
    columns = [column for column in found.reproduction.columns if column.name in found.columns]
    columns = sorted(columns, key=lambda column: column.value or 0.0)
    values = np.array([column.value for column in columns], dtype=float)
    positive = values[values > 0]
    even = len(positive) > 0 and positive.max() > APART * (positive.min() if len(positive) == len(values) else 1e-9)
    x = np.arange(len(values), dtype=float) if even else values
    factor, ours, paper = found.unit.factor, list[Line](), list[Line]()
    rows: list[Sequence[Any]] = []
    for row in found.rows:
        numbers = [found.numbers.get((row, column.name)) for column in columns]
        y, deviations = _means(found, row, [column.name for column in columns])
        printed = np.array([n.paper[0] / factor if n and n.paper else np.nan for n in numbers])
        style = row_look(found, row)
        if np.isfinite(y).any():
            band = np.nan_to_num(deviations) if np.isfinite(deviations).any() else None
            ours.append(Line(row, x, y, style, band))
        if np.isfinite(printed).any():
            paper.append(Line(f"{row}, paper", x, printed, replace(style, dash=(3, 2), filled=False)))
        rows += _dots_rows(found, row, [column.name for column in columns], list(values))
    lines = [*(ours if len(ours) <= BANDS else [replace(line, band=None) for line in ours]), *paper]
    if not ours:
        return None
    ticks = {at: f"{value:g}".replace("-", fmt.MINUS) for at, value in zip(x, values, strict=True)}
    axis = of_cells(found)
    title = f"{axis.title} by {found.reproduction.across or 'column'}"
    alt = f"{title}; at the last value {axis.ends(lines)}."
    svg, legend = plots.chart(
        "columns",
        alt,
        lines,
        levels(found, found.columns) if drawn(axis.measure) == axis.measure else [],
        across=found.reproduction.across,
        form_y=axis.form,
        ticks=ticks,
    )
    caption = f"Filled: ours, mean over seeds{' ± s.d.' if len(ours) <= BANDS else ''}; hollow and dashed: the paper's."
    caption += " The values stand at even distances." if even else ""
    section = PageSection(f"Along {found.reproduction.across}", figures=[Figure(title, svg, legend, caption)])
    header = ("row", "column", "value of column", "mean", "sd", "seeds", "paper", "paper sd", "unit")
    return PlotSection("columns", section, header, rows)


def bar_plot(found: TableResults) -> PlotSection | None:
    """Rows side by side, the paper's numbers beside ours."""
    axis, factor = of_cells(found), found.unit.factor
    figures, legend, rows = list[Figure](), tuple[Key, ...](), list[Sequence[Any]]()
    for number, column in enumerate(found.columns):
        names = [row for row in found.rows if (row, column) in found.numbers]
        numbers = [found.numbers[row, column] for row in names]
        each = [_means(found, row, [column]) for row in names]
        ours = np.array([mean[0] for mean, _ in each])
        paper = np.array([n.paper[0] / factor if n.paper else np.nan for n in numbers])
        for row in names:
            rows += [(one[0], one[1], *one[3:]) for one in _dots_rows(found, row, [column], [0.0])]
        if not np.isfinite(ours).any():
            continue
        series = [Dots("ours, mean over seeds ± s.d.", ours, series_style(0), np.array([sd[0] for _, sd in each]))]
        if np.isfinite(paper).any():
            series.append(Dots("the paper's", paper, replace(series_style(1), shape="diamond", filled=False)))
        said = [f"{name} {axis.text(y)}" for name, y in zip(names, ours, strict=True) if np.isfinite(y)]
        alt = f"{column}: {fmt.together(said)}."
        svg, legend = plots.dots(f"bars {number}", alt, names, series, form=axis.form or (lambda value: f"{value:.3g}"))
        figures.append(Figure(column, svg))
    header = ("row", "column", "mean", "sd", "seeds", "paper", "paper sd", "unit")
    text = f"{axis.title}; the number beside a row is ours."
    return picture("bars", "Side by side", text, figures, header, rows, legend)


def _means(found: TableResults, row: str, columns: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(columns,) raw means over seeds and their deviations; nan where there is none."""
    numbers = [found.numbers.get((row, column)) for column in columns]
    values = [(n.mean, n.deviation) if n else (None, None) for n in numbers]
    raw = np.array([[np.nan if v is None else v for v in pair] for pair in values], dtype=float) / found.unit.factor
    raw[~np.isfinite(raw)] = np.nan
    return raw[:, 0], raw[:, 1]


def _dots_rows(
    found: TableResults, row: str, columns: Sequence[str], values: Sequence[float]
) -> Iterator[Sequence[Any]]:
    for column, value in zip(columns, values, strict=True):
        if number := found.numbers.get((row, column)):
            paper = number.paper or (None, None)
            own = number.mean, number.deviation, len(number.by_seed)
            yield row, column, value, *own, *paper, found.unit.name


def partition_plot(found: TableResults) -> PlotSection | None:
    """Who holds what in each column, in the first seed."""
    figures, rows, most = list[Figure](), list[Sequence[Any]](), 0
    header = ("column", "seed", "party", "class", "rows")
    for number, column in enumerate(found.columns):
        run = _first(found, column)
        if run is None or run.partition.apart:
            continue
        held = run.partition
        if held.parties is None:
            counts, names = np.array(held.counts), list[str]()
            parties = list(run.names)
        else:
            known = [p for p in held.parties.parties if p.unaligned_counts is not None and p.unaligned]
            counts = np.array([held.parties.aligned_counts, *(p.unaligned_counts for p in known)], dtype=int)
            parties = names = ["aligned", *(p.name for p in known)]
        most = max(most, int(counts.max()))
        kinds = fmt.times(counts.shape[1], "class", "classes")
        alt = f"{column}: rows of {kinds} at {fmt.times(len(counts), 'holder')}, at most {counts.max()} in a cell."
        svg = class_counts(f"holdings {number}", alt, counts, held.classes, names)
        figures.append(Figure(column, svg, (rows_legend(int(counts.max())),), wide=len(counts) > 20))
        rows += [
            (column, run.summary.seed, party, kind, int(count))
            for party, line in zip(parties, counts, strict=True)
            for kind, count in zip(held.classes, line, strict=True)
        ]
    text = "Training rows by class and holder in the first seed; seeds differ in who holds what."
    return picture("holdings", "Who holds what", text, figures, header, rows)


def mixing_plot(found: TableResults) -> PlotSection | None:
    """Whose models each client took, for the first row that notes it."""
    figures, rows, row = list[Figure](), list[Sequence[Any]](), ""
    header = ("row", "column", "seed", "round", "party", "other", "weight")
    for column in found.columns:
        mixed = [name for name in found.rows if (run := _first(found, column, name)) is not None and run.mixing]
        row = row or (mixed[0] if mixed else "")
        run = _first(found, column, row) if row in mixed else None
        section = None if run is None else chosen(run)
        if run is None or section is None:
            continue
        figures += [replace(figure, title=f"{column}: {figure.title}") for figure in section.figures[:1]]
        rows += [
            (row, column, run.summary.seed, round, run.names[i], run.names[j], float(weights[i, j]))
            for round, weights in run.mixing.items()
            for i, j in np.argwhere(weights > 0)
        ]
    return picture("choices", "Who chose whom", f"{row} in the first seed.", figures, header, rows)


def _first(found: TableResults, column: str, row: str | None = None) -> Run | None:
    """The run of the lowest seed in a column, of a row or of the first that has one."""
    names = found.rows if row is None else [row]
    runs = [run for name in names if (name, column) in found.places for run in found.places[name, column].runs]
    return min(runs, key=lambda run: run.summary.seed) if runs else None


def pictures(found: TableResults) -> list[PlotSection]:
    """Those that the reproduction asks for, as far as there are runs for them."""
    makers: dict[str, Callable[[TableResults], PlotSection | None]] = {
        "curves": learning_curves,
        "bytes": bytes_plot,
        "columns": line_plot,
        "bars": bar_plot,
        "holdings": partition_plot,
        "choices": mixing_plot,
    }
    made = (makers[name](found) for name in found.reproduction.pictures)
    return [picture for picture in made if picture is not None]
