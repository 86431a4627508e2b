"""Colors, markers and dashes of series in figures and legends."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.report.page import Key
from fedloom.report.svg import INK, PAPER, SERIES, VARIABLES

SHAPES: dict[str, list[tuple[float, float]]] = {
    "circle": [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 25)[:-1]],
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "up": [(0, 1), (-1, -0.85), (1, -0.85)],
    "diamond": [(0, 1), (1, 0), (0, -1), (-1, 0)],
    "down": [(0, -1), (-1, 0.85), (1, 0.85)],
    "plus": [
        (sign * x, sign * y)
        for sign in (1, -1)
        for x, y in ((-0.35, 1), (0.35, 1), (0.35, 0.35), (1, 0.35), (1, -0.35), (0.35, -0.35))
    ],
}
"""Corners of the markers in a square of side 2."""
DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (3, 2), (8, 3, 2, 3))
"""Lengths of dashes and gaps."""


@dataclass(frozen=True)
class SeriesStyle:
    """The style of a series.

    Attributes:
        color: a key of `VARIABLES`.
        shape: marker shape, a key of `SHAPES`; None for no markers.
        dash: lengths of dashes and gaps; empty for a solid line, None for no line.
        filled: whether markers are filled.
    """

    color: str
    shape: str | None = None
    dash: tuple[float, ...] | None = ()
    filled: bool = True

    def options(self, size: float) -> dict[str, Any]:
        """Options for matplotlib; `size` is that of markers in pixels."""
        from matplotlib.path import Path

        line = "none" if self.dash is None else (0, self.dash) if self.dash else "-"
        style: dict[str, Any] = {"color": self.color, "linestyle": line, "clip_on": False}
        if self.shape and size:
            corners = SHAPES[self.shape]
            style["marker"] = Path([*corners, corners[0]], closed=True)
            rim = PAPER if self.filled and size > 5 else self.color  # separates overlapping markers
            style |= {"markersize": size, "markeredgewidth": 1.0 if self.filled else 1.5}
            style |= {
                "markeredgecolor": rim,
                "markerfacecolor": self.color if self.filled else PAPER,
            }
        return style

    def key(self, text: str, *, band: bool = False) -> Key:
        """The legend entry."""
        color = VARIABLES[self.color]
        parts = []
        if band:
            parts.append(
                f'<rect y="1" width="28" height="12" style="fill:{color};fill-opacity:.16"/>'
            )
        if self.dash is not None:
            dash = f";stroke-dasharray:{' '.join(map(str, self.dash))}" if self.dash else ""
            parts.append(
                f'<path d="M0 7H28" style="stroke:{color};stroke-width:2;fill:none{dash}"/>'
            )
        if self.shape:
            corners = " ".join(f"{14 + 4 * x:.1f},{7 - 4 * y:.1f}" for x, y in SHAPES[self.shape])
            fill = color if self.filled else VARIABLES[PAPER]
            parts.append(
                f'<polygon points="{corners}" style="fill:{fill};stroke:{color};stroke-width:1.4"/>'
            )
        svg = (
            '<svg viewBox="0 0 28 14" width="28" height="14" '
            f'aria-hidden="true">{"".join(parts)}</svg>'
        )
        return Key(Markup(svg), text)


LEVEL = SeriesStyle(INK, dash=(1.5, 3))
"""The style of reference values, such as chance."""


def series_style(number: int) -> SeriesStyle:
    """The style of series 0, 1, 2, …; color, marker and dashes all vary, so that none is needed
    alone.
    """
    colors = (*SERIES, INK)
    turns, i = divmod(number, len(colors))
    return SeriesStyle(colors[i], list(SHAPES)[number % len(SHAPES)], DASHES[turns % len(DASHES)])


HOLLOW = replace(series_style(1), shape="diamond", filled=False)
"""The style of a second series that is compared with the first."""
