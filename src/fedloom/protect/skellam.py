"""Skellam noise: integers whose sum over parties is again Skellam, so that a secure sum has central
privacy.

Paper: N. Agarwal, P. Kairouz, Z. Liu, "The Skellam Mechanism for Differentially Private Federated
    Learning", NeurIPS
2021. A Skellam variable of variance μ is the difference of two Poisson variables of mean μ / 2.

A Poisson variable is drawn by inversion of its distribution function, in 128 bits: integers alone,
so that no rounding of floats tells anything. The drawn distribution is within 2^-100 of Poisson's,
in total variation.
"""

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np

BITS: Final = 128
"""Bits of a uniform number."""
_GUARD: Final = 200  # bits of the table's weights, of which 128 are kept


class Poisson:
    """A Poisson distribution.

    Args:
        mean: λ, a whole number above 0.
    """

    def __init__(self, mean: int) -> None:
        up, down = [1 << _GUARD], list[int]()
        while up[-1] >> 60:  # weights below 2^-140 of the largest are left out
            up.append(up[-1] * mean // (mean + len(up)))
        weight, k = up[0], mean
        while k and (weight := weight * k // mean) >> 60:
            k -= 1
            down.append(weight)
        self._first = mean - len(down)
        below, total, weights = list[int](), 0, [*reversed(down), *up]
        for one in weights:
            total += one
            below.append(total)
        self._below = [(one << BITS) // total for one in below[:-1]]
        self._words = np.array([one >> 64 for one in self._below], dtype=np.uint64)

    def draw(self, count: int, random: Callable[[int], bytes] = os.urandom) -> np.ndarray:
        """Numbers (count,) int64, from this many random bytes."""
        high = np.frombuffer(random(8 * count), dtype="<u8")
        at = np.searchsorted(self._words, high, side="right")
        for k in np.flatnonzero((at > 0) & (self._words[at - 1] == high)):  # 64 bits do not decide
            at[k] = bisect_right(
                self._below, (int(high[k]) << 64) + int.from_bytes(random(8), "little")
            )
        return at.astype(np.int64) + self._first


poisson = lru_cache(maxsize=4)(Poisson)
"""The distribution of a mean; its table is kept."""


def skellam(half: int, count: int, random: Callable[[int], bytes] = os.urandom) -> np.ndarray:
    """Skellam noise (count,) int64 of variance 2 · `half`."""
    one = poisson(half)
    found: np.ndarray = one.draw(count, random) - one.draw(count, random)
    return found


def excess(sigma: float, norm: float, d: int) -> float:
    """By how much the Rényi divergence of a release of d integers exceeds that of Gaussian noise,
    at most, at any
    order: Theorem 3.5, with 3 Δ₁ / 2μ and Δ₁ <= √d Δ₂.

    Args:
        sigma: the deviation of the noise over the norm.
        norm: Δ₂, the largest distance in L2 norm between adjacent sums.
        d: the count of numbers.
    """
    return 3 * math.sqrt(d) / (2 * sigma**2 * norm)
