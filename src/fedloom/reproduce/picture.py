"""What the figures of a reproduction have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.report import formatting as fmt
from fedloom.report import plots
from fedloom.report.page import Figure, Key, PageSection
from fedloom.report.plots import Form, Level, Line
from fedloom.report.styles import SeriesStyle, series_style
from fedloom.reproduce.found import Found
from fedloom.reproduce.measure import Unit, drawn


@dataclass(frozen=True)
class Picture:
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
) -> Picture | None:
    """None without figures. Legends that are alike become one."""
    if not figures:
        return None
    texts = {tuple(key.text for key in figure.legend) for figure in figures}
    if not legend and len(texts) == 1 and len(figures) > 1 and name in ("curves", "bytes"):
        legend = figures[0].legend
        figures = [replace(figure, legend=()) for figure in figures]
    return Picture(name, PageSection(heading, text=[text], figures=figures, legend=legend), header, rows)


def row_look(found: Found, row: str) -> SeriesStyle:
    """The look of a row, in all figures and in the table."""
    return series_style([r.name for r in found.reproduction.rows].index(row))


@dataclass(frozen=True)
class Axis:
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


def of_cells(found: Found) -> Axis:
    """The measure of the table."""
    return Axis(found.reproduction.measure, found.unit)


def of_curves(found: Found) -> Axis:
    """The measure itself, or the accuracy where it has no curve."""
    measure = found.reproduction.measure
    shown = drawn(measure)
    return Axis(shown, found.unit if measure.endswith(shown) else Unit("%"))


def levels(found: Found, columns: Sequence[str]) -> list[Level]:
    """Chance, where it is one and the same."""
    known = {chance for column in columns if (chance := found.chance(column)) is not None}
    return [Level("chance: always the most frequent class", known.pop())] if len(known) == 1 else []
