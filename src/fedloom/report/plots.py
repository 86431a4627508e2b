"""Line charts and dot plots.

Legends are HTML above the figure, so that they cover no data and wrap on narrow screens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.report import formatting as fmt
from fedloom.report.page import Key
from fedloom.report.styles import LEVEL, SeriesStyle
from fedloom.report.svg import GRID, INK, SOFT, TEXT, VARIABLES, canvas, drawing, inline

ROWS = 40
"""Maximum number of rows with names."""
HOVERED = 150
"""Maximum number of positions with values under the pointer."""
WIDTHS = {"small": 360, "normal": 460, "wide": 1080}
"""In pixels."""


@dataclass(frozen=True)
class Line:
    """A series with x and y (n,), and a band of half height `band` (n,)."""

    label: str
    x: np.ndarray
    y: np.ndarray
    style: SeriesStyle
    band: np.ndarray | None = None

    @property
    def key(self) -> Key:
        """The legend entry."""
        return self.style.key(self.label, band=self.band is not None)


@dataclass(frozen=True)
class Level:
    """A horizontal reference line."""

    label: str
    y: float
    style: SeriesStyle = LEVEL


Form = Callable[[float], str]


def share(value: float) -> str:
    """A tick of an axis of shares: `80 %`."""
    return f"{100 * value:.3g}{fmt.NBSP}%"


def volume(value: float) -> str:
    """A tick of an axis of bytes: `2.5 MB`."""
    number, unit = fmt.size(value).split(fmt.NBSP)
    return f"{float(number):g}{fmt.NBSP}{unit}"


@drawing()
def chart(
    slug: str,
    alt: str,
    lines: Sequence[Line],
    levels: Sequence[Level] = (),
    *,
    across: str,
    form_x: Form = fmt.whole,
    form_y: Form | None = share,
    width: str = "normal",
    joined: bool = False,
    ticks: Mapping[float, str] | None = None,
) -> tuple[Markup, tuple[Key, ...]]:
    """A line chart and its legend; the first line is on top.

    Args:
        slug, alt: see `inline`.
        across: label of the x axis.
        form_x, form_y: formatters of ticks; None for plain numbers, on a logarithmic axis if they
            span more than a factor of 30.
        width: a key of `WIDTHS`.
        joined: whether vertical lines connect the points of the first two lines.
        ticks: labels by position on the x axis; None for round values.
    """
    small = width == "small"
    if _orders_apart(lines):
        lines = [replace(line, x=np.where(line.x > 0, line.x, np.nan)) for line in lines]
    height = 230 if small else 300
    figure, axes = canvas(WIDTHS[width], height, left=48, right=24, top=12, bottom=44)
    for number, line in enumerate(lines):
        few = len(line.x) <= 60
        style = line.style.options(6.5 if few else 4.0 if line.style.dash is None else 0.0)
        axes.plot(line.x, line.y, linewidth=1.5 if small else 1.9, zorder=4 - number / 100, **style)
        if line.band is not None:
            low, high = line.y - line.band, line.y + line.band
            axes.fill_between(line.x, low, high, color=line.style.color, alpha=0.16, linewidth=0)
    if joined:
        axes.vlines(lines[0].x, lines[0].y, lines[1].y, color=SOFT, linewidth=1.2, zorder=2)
    for level in levels:
        axes.axhline(level.y, linewidth=1.4, zorder=2, **level.style.options(0))
    _scale_y(axes, lines, levels, form_y)
    _scale_x(axes, lines, form_x)
    if ticks is not None:
        axes.set_xticks([*ticks], [*ticks.values()])
    axes.set_xlabel(across, loc="right", fontsize=TEXT - 1, labelpad=5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    keys = [line.key for line in lines] + [level.style.key(level.label) for level in levels]
    return inline(figure, slug, alt, _hover(axes, lines, across, form_x, form_y)), tuple(keys)


def _hover(
    axes: Any, lines: Sequence[Line], across: str, form_x: Form, form_y: Form | None
) -> dict[str, Any]:
    """The values of all lines at each x, at most `HOVERED`."""
    values: dict[float, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines):
        for x, y in zip(line.x.tolist(), line.y.tolist(), strict=True):
            if math.isfinite(x) and math.isfinite(y):
                text = (
                    fmt.percent(y)
                    if form_y is share
                    else f"{y:.4g}"
                    if form_y is None
                    else form_y(y)
                )
                values.setdefault(x, []).append((number, text))
    every = sorted(values)[:: -(-len(values) // HOVERED) or 1]
    points = [(_pixels(axes, x, 0)[0], f"{form_x(x)} {across}", values[x]) for x in every]
    return {
        "across": True,
        "names": [_named(line.label, line.style) for line in lines],
        "points": points,
        **_box(axes),
    }


def _named(label: str, style: SeriesStyle) -> tuple[str, str]:
    return label, VARIABLES[style.color]


def _pixels(axes: Any, x: float, y: float, frame: str = "transData") -> tuple[float, float]:
    """The position of a point of the axes in the SVG, from the top left corner."""
    across, up = getattr(axes, frame).transform((x, y)) * 72 / axes.figure.dpi
    return round(float(across), 1), round(
        72 * float(axes.figure.get_size_inches()[1]) - float(up), 1
    )


def _box(axes: Any) -> dict[str, float]:
    """The edges of the axes in the SVG."""
    (left, bottom), (right, top) = (_pixels(axes, corner, corner, "transAxes") for corner in (0, 1))
    return {"left": left, "right": right, "top": top, "bottom": bottom}


def scale(
    axes: Any, lines: Sequence[Line], levels: Sequence[Level], form_y: Form | None = share
) -> None:
    """Limits and ticks of both axes of a line chart."""
    _scale_y(axes, lines, levels, form_y)
    _scale_x(axes, lines, fmt.whole)


def _scale_y(axes: Any, lines: Sequence[Line], levels: Sequence[Level], form: Form | None) -> None:
    """Limits and ticks: shares in tens of percent, other formatted values from 0, plain numbers as
    they are.
    """
    ends = [line.y for line in lines] + [np.array([level.y for level in levels])]
    ends += [
        line.y + sign * line.band for line in lines if line.band is not None for sign in (-1, 1)
    ]
    values = np.concatenate(ends)
    if form is share:
        axes.set_ylim(*tens(values))
        _ticks(axes.yaxis, form)
        return
    values = values[np.isfinite(values)]
    if form is not None:
        axes.set_ylim(0, 1.08 * max([*values, 1]))
        _ticks(axes.yaxis, form)
        return
    if len(values) and values.min() > 0 and values.max() > 30 * values.min():
        axes.set_yscale("log", subs=())
        if values.max() < 1000 * values.min():
            axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.margins(y=0.08)
    _ticks(axes.yaxis, lambda value: f"{value:,.10g}".replace("-", fmt.MINUS))


def tens(values: np.ndarray) -> tuple[float, float]:
    """Limits in tens of percent, at least 20 % apart, that contain all shares."""
    found = values[np.isfinite(values)]
    if not len(found):
        return 0.0, 1.0
    low, high = math.floor(10 * found.min() + 1e-9), math.ceil(10 * found.max() - 1e-9)
    low, high = max(0, min(low, 8)), min(10, high)
    return low / 10, max(high, low + 2) / 10


def _ticks(axis: Any, form: Form) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if axis.get_scale() == "linear":
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10], integer=form is fmt.whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


def _orders_apart(lines: Sequence[Line]) -> bool:
    """Whether a line would end within the first fifth of a linear axis, where it is not legible."""
    last = [line.x[-1] for line in lines if len(line.x) and line.x[-1] > 0]
    return bool(last) and bool(max(last) > 5 * min(last))


def _scale_x(axes: Any, lines: Sequence[Line], form: Form) -> None:
    """Limits from the first value to the last, on a logarithmic axis if `_orders_apart`."""
    values = np.concatenate([line.x for line in lines])
    values = values[np.isfinite(values)]
    if _orders_apart(lines):
        axes.set_xscale("log")
        axes.minorticks_off()
        span = values.max() / values.min()
        axes.xaxis.get_major_locator().set_params(
            subs=(1, 2, 5) if span < 30 else (1, 3) if span < 1000 else (1,)
        )
    if len(values) and values.min() < values.max():
        axes.set_xlim(values.min(), values.max())
    _ticks(axes.xaxis, form)


@dataclass(frozen=True)
class Dots:
    """Values (n,) of the rows of a dot plot, with bars of half length `spread` (n,);
    nan for none.
    """

    label: str
    values: np.ndarray
    style: SeriesStyle
    spread: np.ndarray | None = None

    @property
    def key(self) -> Key:
        """The legend entry."""
        return replace(self.style, dash=None).key(self.label)


@drawing()
def dots(
    slug: str,
    alt: str,
    names: Sequence[str],
    series: Sequence[Dots],
    *,
    width: str = "normal",
    joined: bool = False,
    form: Form = share,
) -> tuple[Markup, tuple[Key, ...]]:
    """A dot plot with one row per name, and its legend.

    With one or two series, the values of the first are printed beside the rows. With more than
    `ROWS` names, names become ranks on the x axis. `joined` connects the first two series in each
    row.

    Values are on the x axis, and row i, from the top, is at y = i.
    """
    # too many rows to name: the same dots over the rank; dash=None draws no line between them
    if len(names) > ROWS:
        ranks = np.arange(1.0, len(names) + 1)
        lines = [
            Line(one.label, ranks, one.values, replace(one.style, dash=None)) for one in series
        ]
        return chart(slug, alt, lines, across="clients by rank", width=width, joined=joined)

    # the canvas: room for the names at the left and for printed values at the right, in pixels
    labels = [fmt.shortened(name, 20 if width == "small" else 30) for name in names]
    beside = len(series) < 3
    sides = {
        # 6.3 pixels for a character of the names' size
        "left": 24 + 6.3 * max(map(len, labels), default=0),
        "right": 54 if beside else 24,
        "top": 6,
        "bottom": 32,
    }
    figure, axes = canvas(WIDTHS[width], 38 + (26 if beside else 30) * len(names), **sides)

    # the dots: series are a little apart within a row, from -reach to reach
    rows = np.arange(len(names))
    reach = 0.0 if beside else 0.28  # so that dots do not overlap
    for one, shift in zip(series, np.linspace(-reach, reach, len(series)), strict=True):
        style = replace(one.style, dash=None).options(8)  # no line between rows
        # filled dots are drawn above hollow ones and bars
        axes.plot(one.values, rows + shift, zorder=4 if one.style.filled else 3, **style)
        if one.spread is not None:
            ends = one.values - one.spread, one.values + one.spread
            axes.hlines(rows + shift, *ends, color=one.style.color, linewidth=1.6, zorder=3)
    if joined:
        axes.hlines(rows, series[0].values, series[1].values, color=SOFT, linewidth=1.2, zorder=2)
    # the first series' values, which end 48 pixels to the right of the axes
    for row, value in zip(rows, series[0].values, strict=True):
        if beside and np.isfinite(value):
            text = f"{100 * value:.1f}" if form is share else form(value)
            note(axes, (1, row), ("axes fraction", "data"), (48, 0), text, "right")

    # the axes: y from large to small puts row 0 at the top, with the same room above and below
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(rows, labels, color=INK, fontsize=TEXT - 1)
    axes.tick_params(axis="y", pad=12)
    # limits at whole tens of percent that hold all dots and bars; others as matplotlib chooses
    if form is share:
        reached = [one.values for one in series]
        reached += [
            one.values + sign * one.spread
            for one in series
            if one.spread is not None
            for sign in (-1, 1)
        ]
        axes.set_xlim(*tens(np.concatenate(reached)))
    _ticks(axes.xaxis, form)
    axes.grid(axis="y", color=GRID, linewidth=0.8)

    # What is shown under the pointer: for each row its place in the picture, its name in full, and
    # (number of a series, its value as text) for the series that have one.
    texts = [
        [
            (number, fmt.percent(value) if form is share else form(value))
            for number, value in enumerate(of_row)
            if math.isfinite(value)
        ]
        for of_row in zip(*(one.values.tolist() for one in series), strict=True)
    ]
    points = [
        (_pixels(axes, 0, row)[1], name, text)
        for row, (name, text) in enumerate(zip(names, texts, strict=True))
    ]
    hover = {
        "across": False,
        "names": [_named(one.label, one.style) for one in series],
        "points": points,
        **_box(axes),
    }
    return inline(figure, slug, alt, hover), tuple(one.key for one in series)


def note(axes: Any, at: Any, frame: Any, shift: tuple[float, float], text: str, side: str) -> None:
    """A small text, shifted by pixels from a position in the axes."""
    place = {"xytext": shift, "textcoords": "offset points"}
    axes.annotate(
        text, at, xycoords=frame, ha=side, va="center", fontsize=TEXT - 1, color=SOFT, **place
    )
