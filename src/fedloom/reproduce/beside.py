"""Our numbers beside the paper's: along the values of the columns, or row by row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.comparison_page import BANDS
from fedloom.report.page import Figure, Key, PageSection
from fedloom.report.plots import Dots, Line
from fedloom.report.styles import series_style
from fedloom.reproduce.found import Found
from fedloom.reproduce.measure import drawn
from fedloom.reproduce.picture import Picture, levels, of_cells, picture, row_look

APART = 20.0
"""Values of columns whose greatest is so many times the least stand at even distances."""


def along(found: Found) -> Picture | None:
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
    return Picture("columns", section, header, rows)


def bars(found: Found) -> Picture | None:
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


def _means(found: Found, row: str, columns: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(columns,) raw means over seeds and their deviations; nan where there is none."""
    numbers = [found.numbers.get((row, column)) for column in columns]
    values = [(n.mean, n.deviation) if n else (None, None) for n in numbers]
    raw = np.array([[np.nan if v is None else v for v in pair] for pair in values], dtype=float) / found.unit.factor
    raw[~np.isfinite(raw)] = np.nan
    return raw[:, 0], raw[:, 1]


def _dots_rows(found: Found, row: str, columns: Sequence[str], values: Sequence[float]) -> Iterator[Sequence[Any]]:
    for column, value in zip(columns, values, strict=True):
        if number := found.numbers.get((row, column)):
            paper = number.paper or (None, None)
            own = number.mean, number.deviation, len(number.by_seed)
            yield row, column, value, *own, *paper, found.unit.name
