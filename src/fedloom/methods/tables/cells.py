"""Cells of rows: equal ones of a stretch of numbers, in which a quantile is found; and small ones,
which are hidden.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, log10

import numpy as np

CELLS = 16
"""Cells of a stretch."""
PARTS_OF_CELL = (8, 8)
"""Parts of each cell in which a quantile lies, and of each of these parts. Few at a time cost the
fewest counts.
"""


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
    return np.searchsorted(np.sort(values), ends, side="left")


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


def cell_of(rank: float, ends: np.ndarray, below: np.ndarray) -> tuple[float, float, int, int]:
    """The cell with the row of this rank, by ends (k + 1,) and rows below each: its ends, the rows
    below and in it.
    """
    at = int(np.clip(np.searchsorted(below, rank) - 1, 0, len(ends) - 2))
    return ends[at], ends[at + 1], below[at], below[at + 1] - below[at]


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
