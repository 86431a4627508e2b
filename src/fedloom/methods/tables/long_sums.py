"""Exact sums of floats, as whole numbers of 36 bits that owners add up; and the decimal numbers of floats."""

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


_TENS = np.array([float(f"1e{k}") for k in range(60)])


def shortest(x: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """For each number x (…) float64 the one with the fewest digits that is within its `reach` (…), else x itself.

    So a float32, whose reach is half the distance to the next one, becomes the decimal number that was read.
    """
    out, left = x.copy(), np.isfinite(x) & (x != 0)
    first = np.floor(np.frexp(x)[1] * 0.30103).astype(np.int64)
    for digits in range(18):
        if not left.any():
            break
        v, places = x[left], digits - first[left]
        up, down = _TENS[places.clip(0, 59)], _TENS[(-places).clip(0, 59)]
        found = np.rint(v * up / down) / up * down
        close = np.abs(found - v) <= reach[left]
        at = np.flatnonzero(left)[close] if x.ndim == 1 else tuple(np.argwhere(left)[close].T)
        out[at] = found[close]
        left[at] = False
    return out


def decimal(x: np.ndarray) -> np.ndarray:
    """The decimal numbers (…) float64 that were read as these float32 numbers."""
    return shortest(x.astype(np.float64), np.spacing(np.abs(x)).astype(np.float64) / 2)
