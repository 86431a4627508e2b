"""Multiverse maps: where a paper's headline claim holds over readings of its setting, metrics,
rivals and data.

A map is no test: each cell has its own 95 % interval, without a correction over cells. It shows
under which reading a verdict would turn.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedloom.report import formatting as fmt
from fedloom.report.page import Key
from fedloom.report.styles import SeriesStyle
from fedloom.report.svg import GRID, INK, PAPER, SERIES, TEXT, canvas, drawing, inline
from fedloom_papers.claims import ClaimTest
from fedloom_papers.results import TableResults
from fedloom_papers.spec import AT, Claim

WIDTH, LABEL, SIDE, HIGH, HEAD, GAP = 820, 330, 108, 26, 78, 20
"""Sizes in pixels: the figure, its labels, the width and height of a cell, the space above a map's
cells, and between two maps.
"""
WORDS = {"holds": (SERIES[2], PAPER), "open": (GRID, INK), "fails": (SERIES[1], PAPER)}
"""Colors of a cell and its number if the interval is above zero, covers it, or is below."""


@dataclass(frozen=True)
class MapCell:
    """A difference in points: mean, interval, number of seeds."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def word(self) -> str:
        """Whether the claimed direction holds."""
        return "holds" if self.low > 0 else "fails" if self.high < 0 else "open"


@dataclass(frozen=True)
class Map:
    """Differences by reading (rows) and data (columns); None where nothing was run."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[MapCell | None, ...], ...]


def maps(found: TableResults) -> tuple[Map, ...]:
    """The maps of a table, without rows and columns that have no cell."""
    made = []
    for spec in found.reproduction.multiverse:
        columns = [
            c.name
            for c in found.reproduction.columns
            if c.name in found.columns
            and not c.untestable.get(found.scale)
            and c.name not in spec.without
        ]
        labels = [
            (pair, name, metric) for pair in spec.pairs for name, metric in spec.metrics.items()
        ]
        grid = {
            f"{a} {fmt.MINUS} {b}" + (f", {name}" if name else ""): {
                c: _cell(found, a, b, metric, c) for c in columns
            }
            for (a, b), name, metric in labels
        }
        rows = tuple(name for name, row in grid.items() if any(row.values()))
        columns = [c for c in columns if any(row[c] for row in grid.values())]
        cells = tuple(tuple(grid[name][c] for c in columns) for name in rows)
        heads = tuple(found.heading(column) for column in columns)
        made += (
            [Map(f"{found.reproduction.place}: {spec.text}", heads, rows, cells)] if rows else []
        )
    return tuple(made)


def _cell(found: TableResults, left: str, right: str, metric: str, column: str) -> MapCell | None:
    sides = [f"{row}{AT}{column}" for row in (left, right)]
    test = ClaimTest(
        Claim(text="a cell", left=sides[0], right=sides[1], metric=metric, unit="%"), found
    )
    decision = test.decision()
    if decision.mean is None or decision.ends is None:
        return None
    return MapCell(decision.mean, *decision.ends, decision.seeds)


@drawing()
def draw(slug: str, shown: Sequence[Map]) -> tuple[Markup, tuple[Key, ...]]:
    """All maps of a paper below each other; a cell has the mean difference in points."""
    heights = [HEAD + HIGH * len(one.rows) + GAP for one in shown]
    figure, axes = canvas(WIDTH, sum(heights), left=0, right=0, top=0, bottom=0)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(sum(heights), 0)
    axes.axis("off")
    top, texts = 0, []
    for one, height in zip(shown, heights, strict=True):
        side = min(SIDE, (WIDTH - LABEL - 10) / max(1, len(one.columns)))
        axes.text(
            0,
            top + 14,
            f"{one.title} In percentage points.",
            color=INK,
            fontsize=TEXT,
            fontweight="bold",
            va="center",
        )
        for k, name in enumerate(one.columns):
            label = "\n".join(textwrap.wrap(name, int(side / 5.8))[:4])
            axes.text(
                LABEL + side * (k + 0.5),
                top + HEAD - 4,
                label,
                ha="center",
                va="bottom",
                fontsize=TEXT - 2,
            )
        for row, (label, cells) in enumerate(zip(one.rows, one.cells, strict=True)):
            y = top + HEAD + HIGH * row
            text = "\n".join(textwrap.wrap(label, 58))
            axes.text(
                LABEL - 10,
                y + HIGH / 2,
                text,
                ha="right",
                va="center",
                fontsize=TEXT - 2,
                color=INK,
            )
            for k, cell in enumerate(cells):
                if cell is None:
                    continue
                x = LABEL + side * k
                color, ink = WORDS[cell.word]
                axes.broken_barh([(x + 1, side - 2)], (y + 1, HIGH - 2), color=color, linewidth=0)
                number = fmt.number(cell.mean, "+.1f")
                axes.text(
                    x + side / 2,
                    y + HIGH / 2,
                    number,
                    ha="center",
                    va="center",
                    fontsize=TEXT - 1,
                    color=ink,
                )
                texts.append(f"{label}, {one.columns[k]}: {number}, {cell.word}")
        top += height
    keys = tuple(
        SeriesStyle(color, "square", None).key(name)
        for name, (color, _) in zip(
            ("holds: interval above zero", "open: it covers zero", "fails: below zero"),
            WORDS.values(),
            strict=True,
        )
    )
    return inline(figure, slug, "; ".join(texts)), keys


def counted(shown: Sequence[Map]) -> str:
    """`Of 48 combinations the direction holds in 12, fails in 10, and is open in 26.`"""
    words = [cell.word for one in shown for row in one.cells for cell in row if cell]
    holds, fails, unclear = (words.count(word) for word in ("holds", "fails", "open"))
    return (
        f"Of {fmt.times(len(words), 'combination')} the claimed direction holds in {holds}, "
        f"fails in {fails} and is open in {unclear}, each by its own 95{fmt.NBSP}% interval, "
        "without a correction over cells."
    )
