"""Exact sums of floats: each number as whole numbers of 36 bits, which owners add up."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

WORD = 36
"""Bits of each part of an exact sum; 2^26 rows of them stay below 2^62."""
LOWEST, LONG = -60, 4
"""The unit of an exact sum of numbers, as power of 2, and its parts."""
LOWEST_SQUARE, LONG_SQUARE = -120, 10
"""The same for squares."""


def parts(x: np.ndarray, lowest: int, count: int) -> np.ndarray:
    """Numbers (...) as whole numbers (..., count) of 2^lowest, 2^(lowest + 36), …, each below 2^36 in size; what is
    smaller than the first is left out."""
    rest, found = x.astype(np.float64), np.zeros((*x.shape, count), np.int64)
    for k in reversed(range(count)):
        unit = 2.0 ** (lowest + WORD * k)
        whole = np.trunc(rest / unit)
        found[..., k] = whole
        rest = rest - whole * unit
    return found


def totals_of(x: np.ndarray, lowest: int, count: int) -> np.ndarray:
    """The sums (p, count) of the parts of each column of x (n, p), of one column at a time to spare memory."""
    return np.array([parts(column, lowest, count).sum(0) for column in x.T], np.int64).reshape(-1, count)


def divided(own: np.ndarray, n: int) -> list[int]:
    """The parts of S²/n, exactly, from those (LONG,) of S."""
    square = whole(own.tolist()) ** 2 // n
    return [square >> (WORD * k) & (2**WORD - 1) for k in range(LONG_SQUARE)]


def opened(sums: np.ndarray, lowest: int) -> list[Fraction]:
    """The exact numbers (n,) whose summed `parts` (n, count) these are."""
    return [Fraction(whole(row)) * Fraction(2) ** lowest for row in sums.tolist()]


def whole(row: Sequence[int]) -> int:
    """The whole number whose parts these are."""
    return sum(int(part) << (WORD * k) for k, part in enumerate(row))
