"""Heatmaps: classes by client, and weights by pair."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedloom.report import formatting as fmt
from fedloom.report.page import Key
from fedloom.report.plots import note
from fedloom.report.svg import (
    GRID,
    HEAT,
    INK,
    PAPER,
    SERIES,
    TEXT,
    VARIABLES,
    canvas,
    drawing,
    inline,
)


@drawing()
def class_counts(
    slug: str, alt: str, counts: np.ndarray, classes: Sequence[str], names: Sequence[str] = ()
) -> Markup:
    """Numbers of rows by class (vertical) and client (horizontal); darker cells have more rows.

    Args:
        slug, alt: see `inline`.
        counts: numbers of rows (N, K).
        classes: K class names.
        names: names of the N clients; by default their numbers.
    """
    clients, kinds = counts.shape
    labels = [fmt.shortened(name, 20) for name in classes]
    left = 16 + 6.6 * max(len(label) for label in labels)
    inner = float(np.clip((76 if names else 40) * clients, 320, 1080 - left - 10))
    tall = kinds * float(np.clip(320 / kinds, 5, 27))
    figure, axes = canvas(left + inner + 10, tall + 70, left=left, right=10, top=26, bottom=44)
    shades = counts.T / max(1, counts.max())
    draw_shades(axes, shades)
    _numbers(axes, counts, shades, (inner / clients, tall / kinds))
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(kinds - 0.5, -0.5))
    at, numbers = _ticks(clients, inner, 76 if names else 30)
    axes.set_xticks(at, [fmt.shortened(names[n], 12) for n in at] if names else numbers)
    at, _ = _ticks(kinds, tall, 13)
    axes.set_yticks(at, [labels[k] for k in at], color=INK, fontsize=TEXT - 1)
    axes.set_xlabel("" if names else "client", loc="right", fontsize=TEXT - 1)
    axes.spines["bottom"].set_visible(False)
    return inline(figure, slug, alt)


def draw_shades(
    axes: Any, shades: np.ndarray, color: str = HEAT, *, ground: bool = True, most: int = 1500
) -> None:
    """Shades (K, N) in [0, 1] of a color: rectangles, or one image if there are more
    than `most`.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    kinds, clients = shades.shape
    if ground:
        axes.add_patch(
            Rectangle(
                (-0.5, -0.5), clients, kinds, facecolor=GRID, alpha=0.35, linewidth=0, zorder=0
            )
        )
    if np.count_nonzero(shades) > most:
        colors = np.tile([*to_rgba(SERIES[0] if color == HEAT else color)], (kinds, clients, 1))
        colors[..., 3] = shades
        extent = (-0.5, clients - 0.5, kinds - 0.5, -0.5)
        axes.imshow(colors, aspect="auto", interpolation="none", extent=extent)
        return
    for k, n in np.argwhere(shades > 0):
        corner = (n - 0.46, k - 0.46)
        axes.add_patch(
            Rectangle(corner, 0.92, 0.92, facecolor=color, alpha=shades[k, n], linewidth=0)
        )


def _numbers(axes: Any, counts: np.ndarray, shades: np.ndarray, cell: tuple[float, float]) -> None:
    if cell[1] >= 14 and cell[0] >= max(22, 7 * len(str(counts.max()))):
        for (n, k), rows in np.ndenumerate(counts):
            ink = PAPER if shades[k, n] > 0.7 else INK
            if rows:
                axes.text(
                    n,
                    k,
                    f"{rows}",
                    ha="center",
                    va="center_baseline",
                    fontsize=TEXT - 1.5,
                    color=ink,
                )
    totals = [fmt.whole(rows) for rows in counts.sum(1)]
    if cell[0] >= max(22, 7 * max(map(len, totals))):
        for n, total in enumerate(totals):
            note(axes, (n, 1), ("data", "axes fraction"), (0, 12), total, "center")


def _ticks(number: int, room: float, each: float) -> tuple[list[int], list[str]]:
    """As many of the ticks 0, 1, … as fit, and their labels."""
    steps = [s * 10**e for e in range(6) for s in (1, 2, 5)]
    step = next(s for s in steps if room / number * s >= each or s >= number)
    at = list(range(0, number, step))
    return at, [fmt.whole(n) for n in at]


def rows_legend(most: int) -> Key:
    """The legend entry of `class_counts`."""
    return shade_legend(f"0 to {fmt.whole(most)} rows")


def shade_legend(text: str, color: str = HEAT) -> Key:
    """The legend entry of shades of a color."""
    style = f"background-image:linear-gradient(90deg,transparent,{VARIABLES[color]})"
    return Key(Markup(f'<span class="shades" style="{style}"></span>'), text)
