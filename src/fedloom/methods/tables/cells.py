"""Cells of rows: equal ones of a stretch of numbers, in which a quantile is found; and small ones,
which are hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor, log10

import numpy as np

CELLS = 16
"""Cells of a stretch."""
PARTS_OF_CELL = 8
"""Parts of the cell in which a quantile lies. Few at a time cost the fewest counts."""
CUTS = PARTS_OF_CELL + 2
"""Ends that are asked for: those of all parts but the last one, and of a likely number."""
QUESTIONS = 64
"""The most divisions of a cell; three or four find a quartile of most columns."""
PRECISION = 1e-3
"""Of the distance between the quartiles, the length of a cell that is not divided further."""
FINE = 2.0**-23
"""The relative distance of float32 numbers."""
TINY = 1e-45
"""The least float32 number above 0."""


def known_of(values: np.ndarray) -> np.ndarray:
    """The values (n,) that are not missing, as float64."""
    return np.array(values[~np.isnan(values)], np.float64)


def ends_of_cells(low: float, high: float, cells: int) -> np.ndarray:
    """The ends (cells + 1,) of equal cells, whose last one is `high` itself."""
    ends: np.ndarray = low + (high - low) / cells * np.arange(cells + 1)
    ends[-1] = high
    return ends


def rows_below(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The number (e,) of values (n,) below each of the ends (e,)."""
    cell = np.searchsorted(ends, values, side="right")
    found: np.ndarray = np.bincount(cell, minlength=len(ends) + 1)[: len(ends)].cumsum()
    return found


def rounded(low: float, high: float) -> float:
    """The number in [low, high) with the fewest decimals, so that the quartile of whole numbers is
    one.
    """
    if not low < high:
        return low
    size = floor(log10(high - low))
    for decimals in range(-size - 20, 20 - size):
        step = Fraction(10) ** -decimals
        found = ceil(Fraction(low) / step) * step
        if found < high:
            return float(found)
    return low


@dataclass(frozen=True)
class Placed:
    """What is known of a row of a column.

    Attributes:
        column: its number.
        rank: the row has this place in the order of its column, from 1.
        low, high: the cell that its number is in, without `high`.
        below, inside: the rows below and in the cell.
        by_size: whether the next parts are equally long in the logarithm of the numbers' size, as
            equally long ones left most rows in one part.
        exact: the number itself, if it is known.
        shift: what was subtracted from the column before its numbers were rounded to float32.
    """

    column: int
    rank: int
    low: float
    high: float
    below: int
    inside: int
    by_size: bool = False
    exact: float | None = None
    shift: float = 0.0

    @property
    def _size(self) -> float:
        """The size of the numbers in the cell as float32."""
        ends = (self.low, self.high)
        return max(max(abs(x), abs(x - self.shift)) for x in ends) + TINY

    def known(self, span: float) -> bool:
        """Whether the cell is short enough, where quartiles are `span` apart; a cell without rows
        below it is to be a single number, as it may begin below the smallest one.
        """
        length = self.high - self.low
        few = length <= PRECISION * span and self.below > 0
        return self.exact is not None or few or length <= FINE / 8 * self._size

    @property
    def cell(self) -> tuple[int, float, float, bool]:
        """What is asked for; rows in one cell share a question."""
        return self.column, self.low, self.high, self.by_size

    @property
    def ends(self) -> np.ndarray:
        """(2,) between which the number lies."""
        return np.array([self.low, self.high] if self.exact is None else [self.exact] * 2)

    def cuts(self) -> np.ndarray:
        """The ends (CUTS,) of parts of the cell, without `high`: those of equal parts, and around
        the number with the fewest decimals, as many rows may have it.
        """
        if self.by_size:
            unit = FINE * max(abs(self.low), abs(self.high))
            first, last = (np.sign(x) * np.log2(1 + abs(x) / unit) for x in (self.low, self.high))
            logs = ends_of_cells(first, last, PARTS_OF_CELL)[1:-1]
            inner = np.sign(logs) * unit * (2 ** np.abs(logs) - 1)
        else:
            inner = ends_of_cells(self.low, self.high, PARTS_OF_CELL)[1:-1]
        cuts = np.concatenate([[self.low], inner, self._likely])
        found: np.ndarray = np.sort(cuts.clip(self.low, self.high))
        return found

    @property
    def _likely(self) -> tuple[float, float]:
        """The ends of a cell around the number with the fewest decimals, in the cell."""
        likely = rounded(self.low, self.high)
        reach = FINE * max(abs(likely), abs(likely - self.shift)) + TINY
        return max(likely - reach, self.low), min(likely + reach, self.high)

    def after(self, cuts: np.ndarray, counts: np.ndarray) -> "Placed":
        """What is known after the rows (CUTS - 1,) in all parts but the last one are counted."""
        below = self.below + np.concatenate([[0], counts.cumsum(), [self.inside]])
        low, high, before, inside = cell_of(self.rank, np.append(cuts, self.high), below)
        exact = rounded(self.low, self.high) if (low, high) == self._likely else None
        by_size = not self.by_size if 2 * inside > self.inside else self.by_size
        return replace(
            self, low=low, high=high, below=before, inside=inside, by_size=by_size, exact=exact
        )


def neighbors(share: float, n: int) -> tuple[int, int, float]:
    """The ranks of the rows, of n, that a quantile lies between, and its place there, from 0 to 1:
    that of pandas, which is linear between rows.
    """
    below, part = divmod(share * (n - 1), 1)
    return int(below) + 1, int(below) + 1 + (part > 0), part


def between(first: Placed, second: Placed, part: float) -> float:
    """The number with the fewest decimals that a quantile may be, at this part of the way from the
    first row to the second.
    """
    low, high = (1 - part) * first.ends + part * second.ends
    return rounded(float(low), float(high))


def cell_of(rank: float, ends: np.ndarray, below: np.ndarray) -> tuple[float, float, int, int]:
    """The cell with the row of this rank, by ends (k + 1,) and rows below each: its ends, the rows
    below and in it.
    """
    at = int(np.clip(np.searchsorted(below, rank) - 1, 0, len(ends) - 2))
    return float(ends[at]), float(ends[at + 1]), int(below[at]), int(below[at + 1] - below[at])


def shown(count: int, least: int) -> float | str:
    """The count, or that it is small."""
    return f"< {least}" if 0 < count < least else float(count)


def masked(counts: Sequence[int], least: int) -> list[float | str]:
    """The counts, the small ones hidden; if there is one, so is the next larger one, as the rest
    would tell it.
    """
    found = [shown(c, least) for c in counts]
    small = [i for i, c in enumerate(counts) if 0 < c < least]
    if len(small) == 1 and (others := [i for i, c in enumerate(counts) if c >= least]):
        found[min(others, key=lambda i: counts[i])] = "hidden"
    return found
