"""How much each setting matters: a figure for each that was varied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.page import Figure, PageSection
from fedloom.report.plots import Level, Line
from fedloom.report.styles import SeriesStyle, series_style
from fedloom.reproduce.sweep.config import Range, shown
from fedloom.reproduce.sweep.run import SweepResults, Trial

LONG = 12
"""Names of values are cut to so many characters."""


def pictures(found: SweepResults) -> list[PageSection]:
    """The measure by each setting; empty before a trial is finished."""
    config, figures = found.sweep.config, []
    for stage, over in enumerate(config.over):
        trials = [t for t in found.trials if t.stage == stage and math.isfinite(t.mean)]
        for key, values in over.items():
            if trials:
                known = (
                    _range(found, key, values, trials)
                    if isinstance(values, Range)
                    else _values(found, key, values, trials)
                )
                figures.append(known)
    if not figures:
        return []
    text = "Only trials of the table of [sweep] that varies the setting."
    legend = figures[0].legend if len({tuple(key.text for key in f.legend) for f in figures}) == 1 else ()
    figures = [replace(figure, legend=()) for figure in figures] if legend else figures
    return [PageSection("How much each setting matters", text=[text], figures=figures, legend=legend)]


def _values(found: SweepResults, key: str, values: Sequence[object], trials: Sequence[Trial]) -> Figure:
    """Listed values at even distances: the best trial with each, and the mean of all with it."""
    less = found.sweep.config.less
    means = [[t.mean for t in trials if t.setting[key] == value] for value in values]
    best = np.array([(min(m) if less else max(m)) if m else np.nan for m in means])
    every = np.array([np.mean(m) if m else np.nan for m in means])
    x = np.arange(len(values), dtype=float)
    numbers = all(isinstance(value, int | float) for value in values)
    lines = [Line("best trial with the value", x, best, _joined(series_style(0), numbers))]
    if any(len(m) > 1 for m in means):
        second = replace(series_style(1), filled=False)
        lines.append(Line("mean of all trials with it", x, every, _joined(second, numbers)))
    ticks = {float(i): fmt.shortened(shown(value), LONG) for i, value in enumerate(values)}
    told = [f"{shown(value)} {_written(found, y)}" for value, y in zip(values, best, strict=True) if np.isfinite(y)]
    return _figure(found, key, lines, ticks, f"best with {fmt.together(told)}")


def _range(found: SweepResults, key: str, one: Range, trials: Sequence[Trial]) -> Figure:
    """Values that were drawn: a dot for each trial."""
    raw = np.array([t.setting[key] for t in trials], dtype=float)
    x, y = (np.log10(raw) if one.log else raw), np.array([t.mean for t in trials])
    order = np.argsort(x)
    lines = [Line("a trial", x[order], y[order], _joined(series_style(0), False))]
    best = next((t for t in trials if t.folders == found.ranked[0].folders), None)
    if best is not None:
        at = math.log10(best.setting[key]) if one.log else best.setting[key]
        lines.insert(0, Line("the best", np.array([at]), np.array([best.mean]), _joined(series_style(1), False)))
    ends = (math.log10(one.low), math.log10(one.high)) if one.log else (one.low, one.high)
    places = np.linspace(*ends, 5) if not one.int or one.high - one.low >= 4 else np.arange(one.low, one.high + 1)
    ticks = {float(at): shown(float(f"{10**at:.2g}") if one.log else float(f"{at:.3g}")) for at in places}
    told = f"{fmt.times(len(trials), 'trial')}, from {_written(found, y.min())} to {_written(found, y.max())}"
    return _figure(found, key, lines, ticks, told)


def _joined(style: SeriesStyle, joined: bool) -> SeriesStyle:
    """With a line through the points, or without: words have no order."""
    return style if joined else replace(style, dash=None)


def _figure(found: SweepResults, key: str, lines: Sequence[Line], ticks: dict[float, str], told: str) -> Figure:
    config = found.sweep.config
    levels = [Level("the file's own", found.own.mean)] if math.isfinite(found.own.mean) else []
    form = plots.share if config.unit.name == "%" else plots.volume if config.unit.name else None
    alt = f"{fmt.capital(config.measure)} by {key}: {told}."
    svg, legend = plots.chart(f"by {key}", alt, lines, levels, across=key, form_y=form, ticks=ticks)
    return Figure(f"{fmt.capital(config.measure)} by {key}", svg, legend)


def _written(found: SweepResults, value: float) -> str:
    unit = found.sweep.config.unit
    return f"{unit.number(unit.factor * value)}{fmt.NBSP}{unit.name}".strip()
