"""Probabilities and gradients as integers, equal on every machine.

The `exp` of libraries differs in the last bit between machines. Here it is made of IEEE additions
and products, one array operation each, so nothing is fused or reordered.
"""

from typing import Final

import numpy as np

PARTS: Final = 2**20
"""Scores and leaf values are whole numbers of parts of 1."""
STEP: Final = 1 / PARTS
MOST_BITS: Final = 10
"""Bits of a gradient behind the point."""
MOST_ROWS: Final = 2**27
"""Limit of the rows of all owners together."""
_LOWEST: Final = -40.0
_LOG2_E: Final = 1.4426950408889634
# their sum is ln 2; the first has 21 zero bits at its end
_LN2: Final = (0.6931471803691238, 1.9082149292705877e-10)
_MOST: Final = 1022
_POWERS: Final = np.ldexp(1.0, np.arange(-_MOST, _MOST + 1))
_INVERSE_FACTORIALS: Final = tuple(1 / n for n in (362880, 40320, 5040, 720, 120, 24, 6, 2, 1, 1))


def bits_for(rows: int) -> int:
    """The bits behind the point of gradients, so that no sum over all rows reaches 2^31.

    Raises:
        ValueError: 2^27 rows or more.
    """
    if rows >= MOST_ROWS:
        raise ValueError(
            f"trees take fewer than {MOST_ROWS} rows of all owners together, not {rows}"
        )
    return min(MOST_BITS, 31 - int(rows).bit_length())


def exp(x: np.ndarray) -> np.ndarray:
    """e^x for -40 <= x <= 0, within 1e-11 of its value."""
    k = np.rint(x * _LOG2_E)
    r = x - k * _LN2[0]
    r -= k * _LN2[1]
    y = np.full_like(r, _INVERSE_FACTORIALS[0])
    for coefficient in _INVERSE_FACTORIALS[1:]:
        y *= r
        y += coefficient
    scaled: np.ndarray = y * _POWERS.take(k.astype(np.int64) + _MOST, mode="clip")
    return scaled


def probabilities(scores: np.ndarray) -> np.ndarray:
    """The probabilities (K, n) of classes whose scores are (K, n) int64; or, from scores (1, n) of
    the second of two classes against the first, its probability (1, n).
    """
    s = scores * STEP
    if len(s) == 1:
        e = exp(np.maximum(-np.abs(s), _LOWEST))
        p: np.ndarray = np.where(s > 0, 1.0, e) / (1.0 + e)
        return p
    e = exp(np.maximum(s - s.max(0), _LOWEST))
    total = e[0].copy()
    for row in e[1:]:  # a sum in a fixed order
        total += row
    p = e / total
    return p


def gradients(scores: np.ndarray, y: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and second derivative (T, n) int64 of the cross-entropy by each score, in steps of
    2^-bits.

    |g| <= 2^bits and 1 <= h <= 2^bits / 4.

    Args:
        scores: (T, n) int64, T = K classes, or 1 for two.
        y: (n,) labels.
    """
    p = probabilities(scores)
    own = y == np.arange(len(p))[:, None] + (len(scores) == 1)
    g = np.rint((p - own) * 2.0**bits)
    h = np.maximum(np.rint(p * (1 - p) * 2.0**bits), 1)
    return g.astype(np.int64), h.astype(np.int64)


def residuals(
    scores: np.ndarray, y: np.ndarray, bits: int, most: float
) -> tuple[np.ndarray, np.ndarray]:
    """The first and second derivative (1, n) int64 of half the squared error by the scores (1, n)
    int64 of standardized numbers y (n,), in steps of 2^-bits; |g| <= most · 2^bits, and h is
    2^bits.
    """
    g = np.rint((scores * STEP - y.astype(np.float64)).clip(-most, most) * 2.0**bits).astype(
        np.int64
    )
    return g, np.full_like(g, 2**bits)


def copies(bins: np.ndarray, y: np.ndarray, tree: int, seed: int) -> np.ndarray:
    """How often each row is drawn for a tree, (n,) int64: Poisson with mean 1, by a hash of the
    row's bins (n, F) and label, of the tree's number and of the seed. So the draw does not depend
    on the owner, and equal rows are drawn alike.
    """
    h = y.astype(np.uint64) + np.uint64(
        (tree * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03) % 2**64
    )
    for column in (*bins.T, *bins.T[:1]):
        h = (h ^ (h >> np.uint64(29)) ^ column) * np.uint64(0xBF58476D1CE4E5B9)
    return np.searchsorted(_POISSON, (h ^ (h >> np.uint64(32))) >> np.uint64(32), side="right")


MOST_COPIES: Final = 7
"""Limit of the copies of a row."""
_POISSON: Final = np.array(
    [1580030168, 3160060337, 3950075421, 4213413783, 4279248373, 4292415291, 4294609777], np.uint64
)
"""2^32 times the probability of at most 0, 1, … 6 draws, rounded down."""
