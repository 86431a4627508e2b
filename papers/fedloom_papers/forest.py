"""Forest plots: our interval and, on the paper's data, its effect for each claim."""

import re
import textwrap
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape

from fedloom.report.page import Figure, Key
from fedloom.report.styles import SeriesStyle
from fedloom.report.svg import (
    GRID,
    INK,
    PAPER,
    SERIES,
    SOFT,
    TEXT,
    VARIABLES,
    canvas,
    drawing,
    inline,
)
from fedloom_papers.claims import ClaimResult
from fedloom_papers.verdicts import UNTESTED, VERDICTS, Verdict

WIDTH = 820
"""Width of a figure in pixels: little more than that of a page's text, which it is shrunk to."""
LABEL, LINE, ROW = 56, 14, 12
"""Characters of a line of a claim; pixels of a line, and between two claims."""
REACH = 40.0
"""Points at which the axis ends; intervals beyond are cut and end in an arrow."""
STYLES: dict[Verdict, SeriesStyle] = {
    "reproduced": SeriesStyle(SERIES[2], "circle", None),
    "smaller than printed": SeriesStyle(SERIES[5], "square", None),
    "not reproduced": SeriesStyle(SERIES[1], "down", None),
    "seen": SeriesStyle(SERIES[2], "circle", None, filled=False),
    "not seen": SeriesStyle(SERIES[1], "down", None, filled=False),
    UNTESTED: SeriesStyle(SOFT, "up", None, filled=False),
}
PRINTED = SeriesStyle(INK, "diamond", None, filled=False)
LEGEND, LETTER = 30, 7
"""Pixels of a line of the legend above a figure in a file of its own, and of a letter in it at
most.
"""
LIGHT = {
    INK: "#1b1b1b",
    SOFT: "#666666",
    GRID: "#dddddd",
    PAPER: "#ffffff",
    **{color: color for color in SERIES},
}
"""Colors of a figure in a file of its own."""


def can_be_drawn(claim: ClaimResult) -> bool:
    """Whether a claim has a finite interval in percentage points."""
    return claim.unit == "%" and claim.mean is not None and claim.ends is not None


@drawing()
def forest(slug: str, claims: Sequence[tuple[ClaimResult, str]]) -> tuple[Markup, tuple[Key, ...]]:
    """Claims, each with its place, one per row: our interval, the paper's effect, and a sentence.

    The claimed side is right; a claim of less is mirrored.
    """
    names = [f"{claim.text} ({claim.bed})" for claim, _ in claims]
    labels = [
        textwrap.wrap(f"{claims[i][1]}: {name}", LABEL, break_on_hyphens=False)
        for i, name in enumerate(names)
    ]
    heights = [LINE * len(label) + ROW for label in labels]
    centres = np.cumsum(heights) - np.array(heights) / 2
    total = float(sum(heights))
    signs = [-1.0 if claim.rule == "less" else 1.0 for claim, _ in claims]
    values = [
        sign * value
        for (claim, _), sign in zip(claims, signs, strict=True)
        for value in (*(claim.ends or ()), claim.mean, claim.printed)
        if value is not None
    ]
    reach = min(REACH, 1.1 * max((abs(value) for value in values), default=1.0))
    figure, axes = canvas(WIDTH, total + 68, left=6.0 * LABEL + 20, right=110, top=24, bottom=44)
    for (claim, _), sign, label, y in zip(claims, signs, labels, centres, strict=True):
        style, mean = STYLES[claim.verdict], sign * (claim.mean or 0.0)
        low, high = sorted(sign * end for end in claim.ends or (mean, mean))
        ends = np.clip([low, high], -reach, reach)
        axes.hlines(y, *ends, color=style.color, linewidth=2.2, zorder=3, clip_on=False)
        for end, cut, arrow in ((low, -reach, "<"), (high, reach, ">")):
            if abs(end) > reach and np.sign(end) == np.sign(cut):
                axes.plot(
                    [cut],
                    [y],
                    marker=arrow,
                    color=style.color,
                    markersize=7,
                    clip_on=False,
                    zorder=3,
                )
        if abs(mean) <= reach:
            axes.plot([mean], [y], **style.options(9), zorder=5)
        if claim.printed is not None:
            axes.plot(
                [np.clip(sign * claim.printed, -reach, reach)], [y], **PRINTED.options(9), zorder=4
            )
        at = {
            "xycoords": ("axes fraction", "data"),
            "textcoords": "offset points",
            "va": "center",
            "fontsize": TEXT - 1,
        }
        for number, line in enumerate(label):
            up = LINE * ((len(label) - 1) / 2 - number)
            axes.annotate(line, (0, y), xytext=(-12, up), ha="right", color=INK, **at)
        text = (
            f"not tested:\n{claim.gate}" if claim.gate else claim.verdict.replace(" than", "\nthan")
        )
        axes.annotate(text, (1, y), xytext=(12, 0), ha="left", ma="left", color=style.color, **at)
    axes.axvline(0, color=SOFT, linewidth=1.2, zorder=2)
    axes.set_xlim(-reach, reach)
    axes.set_ylim(total, 0)
    axes.set_yticks([])
    axes.tick_params(labeltop=True)  # a plot may be several screens high
    axes.set_xlabel("percentage points; the claimed side is right of zero")
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    shown = [
        verdict for verdict in VERDICTS if any(claim.verdict == verdict for claim, _ in claims)
    ]
    alt = "; ".join(
        f"{label[0]} {claim.found}" for (claim, _), label in zip(claims, labels, strict=True)
    )
    keys = (*(STYLES[verdict].key(verdict) for verdict in shown), PRINTED.key("the paper's effect"))
    return inline(figure, slug, alt), keys


def file_of(figure: Figure) -> str:
    """A figure as an SVG file of its own, in light colors, with its legend above it."""
    text = str(figure.svg).replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1
    )
    if figure.legend:
        placed, start, down = [], 10, 0
        for key in figure.legend:
            width = 34 + LETTER * len(key.text)
            if start > 10 and start + width > WIDTH:
                start, down = 10, down + LINE + 4
            placed.append((key, start, down))
            start += width + 20
        above, parts = LEGEND + down, []
        for key, left, down in placed:
            parts.append(
                str(key.sample).replace("<svg ", f'<svg x="{left}" y="{7 + down - above}" ', 1)
            )
            at = f'x="{left + 34}" y="{18 + down - above}" font-size="{TEXT:.0f}"'
            parts.append(f'<text {at} fill="{VARIABLES[INK]}">{escape(key.text)}</text>')
        higher = r'viewBox="0 0 (\d+) (\d+)"([^>]*>)'
        text = re.sub(
            higher,
            lambda found: (
                f'viewBox="0 {-above} {found[1]} {int(found[2]) + above}"{found[3]}{"".join(parts)}'
            ),
            text,
            count=1,
        )
    for placeholder, variable in VARIABLES.items():
        text = text.replace(variable, LIGHT.get(placeholder, "#888888"))
    return f"{text}\n"
