"""Equal cells of a stretch of numbers, in which rows are counted to find a quantile."""

from fractions import Fraction
from math import ceil, floor, log10

import numpy as np

CELLS = 32
"""Cells of a stretch."""


def ends_of_cells(low: float, high: float) -> np.ndarray:
    """The ends (33,) of 32 equal cells, whose last one is `high` itself."""
    ends: np.ndarray = low + (high - low) / CELLS * np.arange(CELLS + 1)
    ends[-1] = high
    return ends


def rows_below(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The number (e,) of values (n,) below each of the ends (e,)."""
    return np.searchsorted(np.sort(values), ends, side="left")


def rounded(low: float, high: float) -> float:
    """The number in [low, high) with the fewest decimals, so that the quartile of whole numbers is one."""
    if not low < high:
        return low
    size = floor(log10(high - low))
    for decimals in range(-size - 20, 20 - size):
        step = Fraction(10) ** -decimals
        found = ceil(Fraction(low) / step) * step
        if found < high:
            return float(found)
    return low
