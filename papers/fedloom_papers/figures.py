"""The figures of a reproduction, and the values behind curves and heat maps as tidy tables."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.comparison_page import BANDS
from fedloom.report.heatmaps import class_counts, rows_legend
from fedloom.report.learning import ACROSS, ITERATION, bytes_sent
from fedloom.report.metrics import RunMetric, curve
from fedloom.report.mixing import mixing_of_run
from fedloom.report.page import Figure, Key, PageSection
from fedloom.report.plots import Dots, Form, Level, Line
from fedloom.report.read import Run
from fedloom.report.styles import SeriesStyle, series_style
from fedloom_papers.results import TableResults
from fedloom_papers.units import Unit

POINTS = 40
"""Maximum number of points of a line."""
EVEN = 20.0
"""Ratio of the largest to the smallest column value from which columns are spaced evenly."""
CURVES = ("row", "column", "seed", "iteration", "bytes", "value", "unit")
"""The header of the values behind curves."""


@dataclass(frozen=True)
class PlotSection:
    """A section of the page with figures, and the table behind them.

    Attributes:
        name: of the CSV file, without suffix.
        header: of the table; empty if the page's table has the same numbers.
    """

    name: str
    section: PageSection
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()


def picture(
    name: str,
    heading: str,
    text: str,
    figures: Sequence[Figure],
    header: Sequence[str] = (),
    rows: Sequence[Sequence[Any]] = (),
    legend: Sequence[Key] = (),
) -> PlotSection | None:
    """A section, or None without figures. Equal legends become one."""
    if not figures:
        return None
    texts = {tuple(key.text for key in figure.legend) for figure in figures}
    if not legend and len(texts) == 1 and len(figures) > 1 and name in ("curves", "bytes"):
        legend = figures[0].legend
        figures = [replace(figure, legend=()) for figure in figures]
    return PlotSection(
        name, PageSection(heading, text=[text], figures=figures, legend=legend), header, rows
    )


def row_style(found: TableResults, row: str) -> SeriesStyle:
    """The style of a row, in all figures and in the table."""
    return series_style([r.name for r in found.reproduction.rows].index(row))


@dataclass(frozen=True)
class MetricAxis:
    """The metric on an axis, and the format of its raw values."""

    metric: RunMetric
    unit: Unit

    @property
    def title(self) -> str:
        """The metric with an initial capital."""
        return fmt.capital(str(self.metric))

    @property
    def form(self) -> Form | None:
        """The format of ticks; None for plain numbers."""
        if self.unit.name in ("kB", "MB", "GB"):
            return plots.volume
        return plots.share if self.unit.name == "%" else None

    def text(self, value: float) -> str:
        """A value with its unit."""
        return f"{self.unit.number(self.unit.factor * value)}{fmt.NBSP}{self.unit.name}".rstrip()

    def ends(self, lines: Iterable[Line]) -> str:
        """The last value of each line."""
        known = [(line.label, line.y[np.isfinite(line.y)]) for line in lines]
        return fmt.together([f"{label} {self.text(float(y[-1]))}" for label, y in known if len(y)])


def table_axis(found: TableResults) -> MetricAxis:
    """The metric of the table."""
    return MetricAxis(found.reproduction.measured, found.unit)


def curve_axis(found: TableResults) -> MetricAxis:
    """The metric of the table, or accuracy if it has no curve."""
    metric = found.reproduction.measured
    return MetricAxis(metric.drawn, found.unit if metric.is_level else Unit("%"))


def levels(found: TableResults, columns: Iterable[str]) -> list[Level]:
    """The chance level, if columns have the same one."""
    known = {chance for column in columns if (chance := found.chance(column)) is not None}
    return [Level("chance: always the most frequent class", known.pop())] if len(known) == 1 else []


@dataclass(frozen=True)
class _SeedCurves:
    """The curves of a cell: iterations (points,), raw values and bytes sent (seeds, points)."""

    row: str
    column: str
    seeds: tuple[int, ...]
    x: np.ndarray
    y: np.ndarray
    sent: np.ndarray

    def line(self, found: TableResults, x: np.ndarray, band: bool) -> Line:
        """The mean over seeds at up to `POINTS` points, with its standard deviation as a band."""
        at = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
        deviation = self.y.std(0, ddof=1)[at] if band and len(self.y) > 1 else None
        return Line(self.row, x[at], self.y.mean(0)[at], row_style(found, self.row), deviation)


def _series(found: TableResults) -> dict[str, list[_SeedCurves]]:
    """The curves of all rows by column."""
    metric, series = found.reproduction.measured.drawn, dict[str, list[_SeedCurves]]()
    for (row, column), place in found.places.items():
        curves = [(run, *curve(run, metric)) for run in place.runs]
        if not curves or not all(len(x) for _, x, _ in curves):
            continue
        points = min(len(x) for _, x, _ in curves)
        total = [
            np.interp(x[:points], run.curve("bytes up", run.last)[0], bytes_sent(run))
            for run, x, _ in curves
        ]
        seeds = tuple(run.summary.seed for run, _, _ in curves)
        y = np.stack([y[:points] for _, _, y in curves])
        series.setdefault(column, []).append(
            _SeedCurves(row, column, seeds, curves[0][1][:points], y, np.stack(total))
        )
    return {column: series[column] for column in found.columns if column in series}


def _curve_rows(series: dict[str, list[_SeedCurves]], unit: Unit) -> list[Sequence[Any]]:
    """The rows under `CURVES`."""
    return [
        (one.row, one.column, seed, int(x), float(total), float(unit.factor * y), unit.name)
        for group in series.values()
        for one in group
        for seed, sums, values in zip(one.seeds, one.sent, one.y, strict=True)
        for x, total, y in zip(one.x, sums, values, strict=True)
    ]


def learning_curves(found: TableResults) -> PlotSection | None:
    """The metric by iteration."""
    axis, every = curve_axis(found), _series(found)
    figures = []
    for number, (column, group) in enumerate(every.items()):
        lines = [one.line(found, one.x, len(group) <= BANDS) for one in group]
        figures.append(_chart(found, f"curves {number}", column, lines, ACROSS, fmt.whole))
    few = all(len(group) <= BANDS for group in every.values())
    several = any(len(one.seeds) > 1 for group in every.values() for one in group)
    bands = "; the band is ± one s.d. over seeds" if few and several else ""
    text = f"{axis.title} by iteration, mean over seeds{bands}. {ITERATION}"
    return picture("curves", "Learning", text, figures, CURVES, _curve_rows(every, axis.unit))


def bytes_plot(found: TableResults) -> PlotSection | None:
    """The metric by the bytes that clients had sent."""
    axis, every = curve_axis(found), _series(found)
    figures = []
    for number, (column, group) in enumerate(every.items()):
        lines, silent = [], []
        for one in group:
            total = one.sent.mean(0)
            line = one.line(found, total, False)
            if total[-1] > 0:
                lines.append(line)
            else:
                style = replace(line.style, dash=(6, 3))
                silent.append(Level(f"{one.row}, which sends nothing", float(line.y[-1]), style))
        if lines:
            figures.append(
                _chart(found, f"bytes {number}", column, lines, "sent", plots.volume, silent)
            )
    text = f"{axis.title} by the tensor data that all clients had sent, mean over seeds."
    return picture("bytes", "Communication", text, figures, CURVES, _curve_rows(every, axis.unit))


def _chart(
    found: TableResults,
    slug: str,
    column: str,
    lines: Sequence[Line],
    across: str,
    form_x: Form,
    silent: Sequence[Level] = (),
) -> Figure:
    """The chart of one column."""
    axis, every = curve_axis(found), [*silent, *levels(found, [column])]
    alt = f"{column}: {axis.title}; at the end {axis.ends(lines)}."
    svg, legend = plots.chart(
        slug, alt, lines, every, across=across, form_x=form_x, form_y=axis.form
    )
    return Figure(column, svg, legend)


def line_plot(found: TableResults) -> PlotSection | None:
    """Rows as lines over the columns' values, ours and the paper's."""
    columns = [column for column in found.reproduction.columns if column.name in found.columns]
    columns = sorted(columns, key=lambda column: column.value or 0.0)
    names = [column.name for column in columns]
    values = np.array([column.value for column in columns], dtype=float)
    positive = values[values > 0]
    even = len(positive) > 0 and positive.max() > EVEN * (
        positive.min() if len(positive) == len(values) else 1e-9
    )
    x = np.arange(len(values), dtype=float) if even else values
    ours, paper = list[Line](), list[Line]()
    for row in found.rows:
        y, deviations, printed = _means(found, [(row, name) for name in names])
        style = row_style(found, row)
        if np.isfinite(y).any():
            band = np.nan_to_num(deviations) if np.isfinite(deviations).any() else None
            ours.append(Line(row, x, y, style, band))
        if np.isfinite(printed).any():
            paper.append(
                Line(f"{row}, paper", x, printed, replace(style, dash=(3, 2), filled=False))
            )
    if not ours:
        return None
    bands = len(ours) <= BANDS
    lines = [*(ours if bands else [replace(line, band=None) for line in ours]), *paper]
    ticks = {at: f"{value:g}".replace("-", fmt.MINUS) for at, value in zip(x, values, strict=True)}
    axis, across = table_axis(found), found.reproduction.across
    title = f"{axis.title} by {across or 'column'}"
    alt = f"{title}; at the last value {axis.ends(lines)}."
    known = levels(found, found.columns) if axis.metric.drawn == axis.metric else []
    svg, legend = plots.chart(
        "columns", alt, lines, known, across=across, form_y=axis.form, ticks=ticks
    )
    caption = (
        f"Filled: ours, mean over seeds{' ± s.d.' if bands else ''}; hollow and dashed: the "
        "paper's."
    )
    caption += " Values are spaced evenly." if even else ""
    return PlotSection(
        "columns", PageSection(f"By {across}", figures=[Figure(title, svg, legend, caption)])
    )


def bar_plot(found: TableResults) -> PlotSection | None:
    """Rows side by side, ours and the paper's."""
    axis = table_axis(found)
    figures, legend = list[Figure](), tuple[Key, ...]()
    for number, column in enumerate(found.columns):
        names = [row for row in found.rows if (row, column) in found.numbers]
        ours, deviations, paper = _means(found, [(row, column) for row in names])
        if not np.isfinite(ours).any():
            continue
        series = [Dots("ours, mean over seeds ± s.d.", ours, series_style(0), deviations)]
        if np.isfinite(paper).any():
            series.append(
                Dots("the paper's", paper, replace(series_style(1), shape="diamond", filled=False))
            )
        means = [
            f"{name} {axis.text(y)}" for name, y in zip(names, ours, strict=True) if np.isfinite(y)
        ]
        alt = f"{column}: {fmt.together(means)}."
        svg, legend = plots.dots(
            f"bars {number}", alt, names, series, form=axis.form or (lambda value: f"{value:.3g}")
        )
        figures.append(Figure(column, svg))
    text = f"{axis.title}; the number beside a row is ours."
    return picture("bars", "Side by side", text, figures, legend=legend)


def _means(
    found: TableResults, cells: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Raw means over seeds, their deviations, and the paper's means, (cells,) each;
    nan if unknown.
    """
    numbers = [found.numbers.get(cell) for cell in cells]
    values = [
        (n.mean, n.deviation, n.paper and n.paper[0]) if n else (None, None, None) for n in numbers
    ]
    raw = np.array(values, dtype=float).reshape(len(cells), 3) / found.unit.factor
    raw[~np.isfinite(raw)] = np.nan
    return raw[:, 0], raw[:, 1], raw[:, 2]


def partition_plot(found: TableResults) -> PlotSection | None:
    """The partition of each column in the first seed."""
    figures, rows = list[Figure](), list[Sequence[Any]]()
    for number, column in enumerate(found.columns):
        run = _first(found, column)
        if run is None or run.partition.private_clients:
            continue
        held = run.partition
        if held.parties is None:
            counts, names, parties = np.array(held.counts), list[str](), [*run.names]
        else:
            known = [
                p for p in held.parties.parties if p.unaligned_counts is not None and p.unaligned
            ]
            counts = np.array(
                [held.parties.aligned_counts, *(p.unaligned_counts for p in known)], dtype=int
            )
            parties = names = ["aligned", *(p.name for p in known)]
        kinds = fmt.times(counts.shape[1], "class", "classes")
        alt = (
            f"{column}: rows of {kinds} at {fmt.times(len(counts), 'holder')}, at most "
            f"{counts.max()} in a cell."
        )
        svg = class_counts(f"partition {number}", alt, counts, held.classes, names)
        figures.append(
            Figure(column, svg, (rows_legend(int(counts.max())),), wide=len(counts) > 20)
        )
        rows += [
            (column, run.summary.seed, party, kind, int(count))
            for party, line in zip(parties, counts, strict=True)
            for kind, count in zip(held.classes, line, strict=True)
        ]
    text = "Training rows by class and holder in the first seed; other seeds have other partitions."
    return picture(
        "partition", "Partition", text, figures, ("column", "seed", "party", "class", "rows"), rows
    )


def mixing_plot(found: TableResults) -> PlotSection | None:
    """The mixing weights of each client, for the first row that records them."""
    figures, rows, row = list[Figure](), list[Sequence[Any]](), ""
    for column in found.columns:
        mixed = [
            name
            for name in found.rows
            if (run := _first(found, column, name)) is not None and run.mixing
        ]
        row = row or (mixed[0] if mixed else "")
        run = _first(found, column, row) if row in mixed else None
        section = None if run is None else mixing_of_run(run)
        if run is None or section is None:
            continue
        figures += [
            replace(figure, title=f"{column}: {figure.title}") for figure in section.figures[:1]
        ]
        rows += [
            (row, column, run.summary.seed, round, run.names[i], run.names[j], float(weights[i, j]))
            for round, weights in run.mixing.items()
            for i, j in np.argwhere(weights > 0)
        ]
    header = ("row", "column", "seed", "round", "party", "other", "weight")
    return picture(
        "mixing", "Chosen neighbours", f"{row} in the first seed.", figures, header, rows
    )


def _first(found: TableResults, column: str, row: str | None = None) -> Run | None:
    """The run with the lowest seed in a column, of one row or of all."""
    names = found.rows if row is None else [row]
    runs = [
        run
        for name in names
        if (name, column) in found.places
        for run in found.places[name, column].runs
    ]
    return min(runs, key=lambda run: run.summary.seed, default=None)


def pictures(found: TableResults) -> list[PlotSection]:
    """The pictures that the reproduction lists, if their runs are finished."""
    makers: dict[str, Callable[[TableResults], PlotSection | None]] = {
        "curves": learning_curves,
        "bytes": bytes_plot,
        "columns": line_plot,
        "bars": bar_plot,
        "partition": partition_plot,
        "mixing": mixing_plot,
    }
    made = (makers[name](found) for name in found.reproduction.pictures)
    return [picture for picture in made if picture is not None]
