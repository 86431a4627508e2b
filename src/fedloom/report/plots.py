"""The figures of a report: lines, dots for each client, and who holds what.

Legends are part of the page, above the figure, where they cover no data and wrap on a narrow screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.report import words
from fedloom.report.page import Key
from fedloom.report.svg import GRID, INK, PAPER, SERIES, SOFT, TEXT, VARIABLES, canvas, drawing, inline

SHAPES: dict[str, list[tuple[float, float]]] = {
    "circle": [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 25)[:-1]],
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "up": [(0, 1), (-1, -0.85), (1, -0.85)],
    "diamond": [(0, 1), (1, 0), (0, -1), (-1, 0)],
    "down": [(0, -1), (-1, 0.85), (1, 0.85)],
    "cross": [(-1, -0.6), (-0.4, 0), (-1, 0.6), (-0.6, 1), (0, 0.4), (0.6, 1), (1, 0.6), (0.4, 0), (1, -0.6)]
    + [(0.6, -1), (0, -0.4), (-0.6, -1)],
}
"""Corners of the markers within a square of side 2."""

ROWS = 40
"""At most so many clients have a line of their own."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn.

    Attributes:
        colour: as matplotlib draws it, a key of `VARIABLES`.
        shape: of its markers, a key of `SHAPES`; None for none.
        dash: lengths of dashes and gaps; empty for a whole line, None for no line.
        filled: whether its markers are.
    """

    colour: str
    shape: str | None = None
    dash: tuple[float, ...] | None = ()
    filled: bool = True

    def key(self, text: str, *, band: bool = False) -> Key:
        """Its entry in a legend."""
        colour = VARIABLES[self.colour]
        parts = []
        if band:
            parts.append(f'<rect x="0" y="1" width="28" height="12" style="fill:{colour};fill-opacity:.16"/>')
        if self.dash is not None:
            dash = f";stroke-dasharray:{' '.join(map(str, self.dash))}" if self.dash else ""
            parts.append(f'<path d="M0 7H28" style="stroke:{colour};stroke-width:2;fill:none{dash}"/>')
        if self.shape:
            corners = " ".join(f"{14 + 4 * x:.1f},{7 - 4 * y:.1f}" for x, y in SHAPES[self.shape])
            fill = colour if self.filled else VARIABLES[PAPER]
            parts.append(
                f'<polygon points="{corners}" style="fill:{fill};stroke:{colour};stroke-width:1.4"/>'
            )
        svg = f'<svg viewBox="0 0 28 14" width="28" height="14" aria-hidden="true">{"".join(parts)}</svg>'
        return Key(Markup(svg), text)


LEVEL = Look(INK, dash=(1.5, 3))
"""A value to hold others against, such as chance."""


DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (3, 2), (8, 3, 2, 3))
"""Lengths of dashes and gaps."""


def look(number: int) -> Look:
    """The look of series 0, 1, 2, …: colour, marker and dashes change, so that no one of them is needed."""
    colours = (*SERIES, INK)
    turns, i = divmod(number, len(colours))
    return Look(colours[i], list(SHAPES)[number % len(SHAPES)], DASHES[turns % len(DASHES)])


@dataclass(frozen=True)
class Line:
    """A series of (n,) x and y, with a band of half height `band` (n,) around it."""

    label: str
    x: np.ndarray
    y: np.ndarray
    look: Look
    band: np.ndarray | None = None

    @property
    def key(self) -> Key:
        """Its entry in the legend."""
        return self.look.key(self.label, band=self.band is not None)


@dataclass(frozen=True)
class Level:
    """A horizontal line across the figure."""

    label: str
    y: float
    look: Look = LEVEL


Form = Callable[[float], str]


def share(value: float) -> str:
    """A tick of an axis of shares: `80 %`."""
    return f"{100 * value:.3g}{words.NBSP}%"


@drawing()
def chart(
    slug: str,
    alt: str,
    lines: Sequence[Line],
    levels: Sequence[Level] = (),
    *,
    across: str,
    form_x: Form = words.whole,
    form_y: Form | None = share,
    small: bool = False,
) -> tuple[Markup, tuple[Key, ...]]:
    """Lines over one axis, and their legend.

    Args:
        slug, alt: see `inline`.
        across: what the x axis counts.
        form_x, form_y: how ticks are written; None for plain numbers, on a logarithmic axis where they span more
            than a factor of 30.
        small: one of many.
    """
    figure, axes = canvas(360 if small else 520, 230 if small else 330, left=50, right=14, top=14, bottom=44)
    for line in lines:
        style = dict(color=line.look.colour, clip_on=False, zorder=3)
        if line.look.shape and len(line.x) <= 60:
            style |= dict(marker=SHAPES[line.look.shape], markersize=5.5, markeredgewidth=1.2)
            style["markerfacecolor"] = line.look.colour if line.look.filled else PAPER
        dash = (0, line.look.dash) if line.look.dash else "-"
        (drawn,) = axes.plot(line.x, line.y, linewidth=1.5 if small else 1.9, **style)
        drawn.set_linestyle("none" if line.look.dash is None else dash)
        if line.band is not None:
            low, high = line.y - line.band, line.y + line.band
            axes.fill_between(line.x, low, high, color=line.look.colour, alpha=0.16, linewidth=0)
    for level in levels:
        axes.axhline(
            level.y, color=level.look.colour, linewidth=1.4, linestyle=(0, level.look.dash), zorder=2
        )
    _scale_y(axes, lines, levels, form_y)
    _scale_x(axes, lines, form_x)
    axes.set_xlabel(across, loc="right", fontsize=TEXT - 1, labelpad=5)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    keys = [line.key for line in lines] + [level.look.key(level.label) for level in levels]
    return inline(figure, slug, alt), tuple(keys)


def _scale_y(axes: Any, lines: Sequence[Line], levels: Sequence[Level], form: Form | None) -> None:
    """Limits and ticks that hold all values: in tens of percent, or as they come."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    ends = [line.y for line in lines] + [np.array([level.y for level in levels])]
    ends += [line.y + sign * line.band for line in lines if line.band is not None for sign in (-1, 1)]
    values = np.concatenate(ends)
    values = values[np.isfinite(values)]
    if form is not None and len(values):
        low = max(0.0, math.floor(10 * values.min() + 1e-9) / 10)
        high = min(1.0, math.ceil(10 * values.max() - 1e-9) / 10)
        axes.set_ylim(low, max(high, low + 0.1))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    elif len(values) and values.min() > 0 and values.max() > 30 * values.min():
        axes.set_yscale("log")
        axes.minorticks_off()
    else:
        axes.margins(y=0.08)
        axes.yaxis.set_major_locator(MaxNLocator(5))
    if form is None:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", words.MINUS)))


def _scale_x(axes: Any, lines: Sequence[Line], form: Form) -> None:
    """From the first value to the last; on a logarithmic axis where the lines end orders apart."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    last = [line.x[-1] for line in lines if len(line.x) and line.x[-1] > 0]
    if last and max(last) > 30 * min(last):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(right=max(last))
    elif last:
        axes.set_xlim(min(line.x[0] for line in lines if len(line.x)), max(last))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))


@dataclass(frozen=True)
class Dots:
    """One value (n,) for each row of a dot plot; nan for none."""

    label: str
    values: np.ndarray
    look: Look


@drawing()
def dots(
    slug: str,
    alt: str,
    names: Sequence[str],
    series: Sequence[Dots],
    levels: Sequence[Level] = (),
    *,
    notes: bool = True,
) -> tuple[Markup, tuple[Key, ...]]:
    """Shares as dots, one row for each name, from the top; `notes` writes the first series' values beside.

    Beyond `ROWS` names the rows become ranks along the x axis.
    """
    if len(names) > ROWS:
        ranks = np.arange(1.0, len(names) + 1)
        lines = [
            Line(s.label, ranks, s.values, Look(s.look.colour, s.look.shape, None, s.look.filled))
            for s in series
        ]
        return _ranks(slug, alt, lines, levels)
    labels = [words.shortened(name, 30) for name in names]
    left = 14 + 6.4 * max(len(label) for label in labels)
    figure, axes = canvas(520, 54 + 22 * len(names), left=left, right=52 if notes else 16, top=8, bottom=34)
    rows = np.arange(len(names))
    for s in series:
        axes.plot(s.values, rows, linestyle="none", marker=SHAPES[s.look.shape or "circle"], markersize=7,
                  markerfacecolor=s.look.colour if s.look.filled else PAPER, markeredgecolor=s.look.colour,
                  markeredgewidth=1.4, clip_on=False, zorder=4 if s.look.filled else 3)  # fmt: skip
    for level in levels:
        axes.axvline(
            level.y, color=level.look.colour, linewidth=1.4, linestyle=(0, level.look.dash), zorder=2
        )
    if notes:
        for row, value in zip(rows, series[0].values, strict=True):
            axes.annotate(f"{100 * value:.1f}", (1, row), xycoords=("axes fraction", "data"), xytext=(46, 0),
                          textcoords="offset points", ha="right", va="center", fontsize=TEXT - 1)  # fmt: skip
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(rows, labels, color=INK, fontsize=TEXT - 1)
    _scale_shares(axes, [s.values for s in series] + [np.array([level.y]) for level in levels])
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    keys = [s.look.key(s.label) for s in series] + [level.look.key(level.label) for level in levels]
    return inline(figure, slug, alt), tuple(keys)


def _ranks(
    slug: str, alt: str, lines: Sequence[Line], levels: Sequence[Level]
) -> tuple[Markup, tuple[Key, ...]]:
    return chart(slug, alt, lines, levels, across="clients by rank")


def _scale_shares(axes: Any, values: Sequence[np.ndarray]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    found = np.concatenate(values)
    found = found[np.isfinite(found)]
    low = max(0.0, math.floor(10 * found.min() + 1e-9) / 10)
    high = min(1.0, math.ceil(10 * found.max() - 1e-9) / 10)
    axes.set_xlim(low, max(high, low + 0.1))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: share(value)))


@drawing()
def holdings(slug: str, alt: str, counts: np.ndarray, classes: Sequence[str]) -> Markup:
    """Who holds what: clients across, classes down, a cell the darker the more rows it stands for.

    Args:
        slug, alt: see `inline`.
        counts: (N, K) rows.
        classes: K names.
    """
    from matplotlib.colors import to_rgba

    clients, kinds = counts.shape
    labels = [words.shortened(name, 20) for name in classes]
    left = 16 + 6.6 * max(len(label) for label in labels)
    inner = float(np.clip(46 * clients, 320, 1080 - left - 14))
    cell = inner / clients
    tall = kinds * float(np.clip(320 / kinds, 5, 26))
    figure, axes = canvas(left + inner + 14, tall + 70, left=left, right=14, top=26, bottom=44)
    colour = np.array([*to_rgba(SERIES[0])])
    shades = np.tile(colour, (kinds, clients, 1))
    shades[..., 3] = counts.T / max(1, counts.max())
    if np.count_nonzero(counts) > 2500:  # a picture is smaller than so many shapes
        axes.imshow(
            shades, aspect="auto", interpolation="none", extent=(-0.5, clients - 0.5, kinds - 0.5, -0.5)
        )
    else:
        _cells(axes, counts.T, shades)
    if cell >= 22 and tall / kinds >= 14 and counts.max() < 10 ** (cell / 7.5):
        for (k, n), rows in np.ndenumerate(counts.T):
            if rows:
                ink = PAPER if shades[k, n, 3] > 0.55 else INK
                axes.text(n, k, f"{rows}", ha="center", va="center_baseline", fontsize=TEXT - 1.5, color=ink)
    if cell >= 30:
        for n, rows in enumerate(counts.sum(1)):
            axes.annotate(words.whole(rows), (n, 1), xycoords=("data", "axes fraction"), xytext=(0, 7),
                          textcoords="offset points", ha="center", fontsize=TEXT - 1.5, color=SOFT)  # fmt: skip
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(kinds - 0.5, -0.5))
    axes.set_xticks(*_some(range(clients), inner, 30))
    at, _ = _some(range(kinds), tall, 13)
    axes.set_yticks(at, [labels[k] for k in at], color=INK, fontsize=TEXT - 1)
    axes.set_xlabel("client", loc="right", fontsize=TEXT - 1)
    axes.spines["bottom"].set_visible(False)
    return inline(figure, slug, alt)


def _cells(axes: Any, counts: np.ndarray, shades: np.ndarray) -> None:
    """One square for each cell that holds rows, on a faint ground."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    kinds, clients = counts.shape
    axes.add_patch(Rectangle((-0.5, -0.5), clients, kinds, facecolor=GRID, alpha=0.35, linewidth=0, zorder=0))
    where = np.argwhere(counts > 0)
    squares = [Rectangle((n - 0.5, k - 0.5), 1, 1) for k, n in where]
    faces = shades[where[:, 0], where[:, 1]]
    axes.add_collection(PatchCollection(squares, facecolors=faces, edgecolors=PAPER, linewidths=1))


def _some(numbers: range, room: float, each: float) -> tuple[list[int], list[str]]:
    """So many ticks as there is room for, and their labels."""
    steps = [s * 10**e for e in range(6) for s in (1, 2, 5)]
    step = next(s for s in steps if room / len(numbers) * s >= each or s >= len(numbers))
    at = list(numbers[::step])
    return at, [words.whole(n) for n in at]


def shades(most: int) -> Key:
    """The legend of `holdings`."""
    bar = Markup('<span class="shades" aria-hidden="true"></span>')
    return Key(bar, f"0 to {words.whole(most)} rows")
