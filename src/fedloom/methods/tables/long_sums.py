"""Exact sums of floats, as whole numbers of 36 bits that owners add up; and the decimal numbers of
floats.
"""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

WORD = 36
"""Bits of each part of a row's number; 2^26 rows of them stay below 2^62."""
LOWEST, PARTS = -60, 6
"""The unit of an exact sum of numbers, as power of 2, and the parts of a row's number."""
LOWEST_SQUARE, PARTS_SQUARE = -120, 11
"""The same for squares."""
BITS, BITS_SQUARE = 215, 397
"""Bits of a sum in these units: of 2^26 float32 numbers."""
FEW, FEW_SQUARE = 2, 3
"""Digits of the sums of most columns: see `few_bits`."""


def parts(x: np.ndarray, lowest: int, count: int) -> np.ndarray:
    """Numbers (...) as whole numbers (..., count) of 2^lowest, 2^(lowest + 36), …, each below 2^36
    in size; what is smaller than the first is left out.
    """
    rest, found = x.astype(np.float64), np.zeros((*x.shape, count), np.int64)
    for k in reversed(range(count)):
        unit = 2.0 ** (lowest + WORD * k)
        whole = np.trunc(rest / unit)
        found[..., k] = whole
        rest = rest - whole * unit
    return found


def total_of(x: np.ndarray, lowest: int, count: int) -> int:
    """The sum of numbers x (n,) as a whole number of 2^lowest, from `count` parts of each."""
    return _whole(parts(x, lowest, count).sum(0).tolist(), WORD)


def exact_sums(x: np.ndarray) -> tuple[int, int]:
    """The exact sums of numbers x (n,) and of their squares, in units of 2^LOWEST and
    2^LOWEST_SQUARE.
    """
    return total_of(x, LOWEST, PARTS), total_of(x * x, LOWEST_SQUARE, PARTS_SQUARE)


def table_of(sums: Sequence[int], size: int, parties: int) -> np.ndarray:
    """The `digits_of` sums (q,), as (q, count) int64."""
    return np.array([digits_of(x, size, parties) for x in sums], np.int64).reshape(len(sums), -1)


def wider(
    table: np.ndarray, size: int, parties: int, column: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """A table of digits (q, few) with as many digits as a sum of `size` bits has, and these values
    in some columns.
    """
    found = np.pad(table, ((0, 0), (0, digits(size, parties)[0] - table.shape[1])))
    found[column] = values
    return found


def digits(size: int, parties: int) -> tuple[int, int]:
    """How many digits a whole number of `size` bits has, and the bits of each, so that digits of as
    many parties add up below 2^63.
    """
    bits = 63 - (parties - 1).bit_length()
    return -(-size // bits), bits


def few_bits(parties: int) -> tuple[int, int]:
    """Bits of a sum and of a sum of squares in few digits. Of 50 parties each has room for 100,000
    numbers of up to 100,000 in size.
    """
    bits = digits(1, parties)[1]
    return FEW * bits, FEW_SQUARE * bits


def digits_of(number: int, size: int, parties: int) -> list[int]:
    """The digits of a whole number, the lowest first; the last one has its sign."""
    count, bits = digits(size, parties)
    low = [number >> (bits * k) & (2**bits - 1) for k in range(count - 1)]
    return [*low, number >> (bits * (count - 1))]


def opened(sums: np.ndarray, lowest: int, size: int, parties: int) -> list[Fraction]:
    """The exact numbers (n,) whose summed `digits_of` (n, count) these are, in units
    of 2^lowest.
    """
    _, bits = digits(size, parties)
    return [Fraction(_whole(row, bits)) * Fraction(2) ** lowest for row in sums.tolist()]


def _whole(row: Sequence[int], bits: int) -> int:
    return sum(int(digit) << (bits * k) for k, digit in enumerate(row))


_TENS = np.array([float(f"1e{k}") for k in range(60)])
_MOST, _SOME = 18, 6
"""Digits that are tried at most; whether this many suffice is asked first."""
_CACHED = 2**14
"""Numbers whose arrays stay in the processor's cache."""


def shortest(x: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """For each number x (n,) float64 the one with the fewest digits that is within its `reach`
    (n,), else x itself.

    So a float32, whose reach is half the distance to the next one, becomes the decimal number that
    was read, and a count of 0 that was standardized becomes 0.
    """
    out = np.where(np.abs(x) <= reach, 0.0, x)
    used = np.flatnonzero(np.isfinite(out) & (out != 0))
    v, near = out[used], reach[used]
    first = np.floor(np.frexp(v)[1] * 0.30103).astype(np.int64)
    few = _close(v, near, first, _SOME - 1)[1]
    for chosen, start in ((few, 0), (~few, _SOME)):
        left = np.flatnonzero(chosen)
        for digits in range(start, _MOST):
            if not len(left):
                break
            found, close = _close(v[left], near[left], first[left], digits)
            v[left[close]] = found[close]
            left = left[~close]
    out[used] = v
    return out


def _close(
    v: np.ndarray, reach: np.ndarray, first: np.ndarray, digits: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers v (n,) of 10^`first` in about so many digits, and whether they are within reach."""
    places = digits - first
    up = _TENS.take(places, mode="clip")
    if places.min(initial=0) < 0:
        down = _TENS.take(-places, mode="clip")
        found = np.rint(v * up / down) / up * down
    else:
        found = np.rint(v * up) / up
    return found, np.abs(found - v) <= reach


def decimal(x: np.ndarray) -> np.ndarray:
    """The decimal numbers (…) float64 that were read as these float32 numbers."""
    out = x.astype(np.float64, order="A")
    flat, found = x.reshape(-1, order="A"), out.reshape(-1, order="A")
    for first in range(0, len(flat), _CACHED):
        some = slice(first, first + _CACHED)
        found[some] = shortest(found[some], np.spacing(np.abs(flat[some])).astype(np.float64) / 2)
    return out
