"""What boosting learns by: derivatives of rows as words of integers, and what the coordinator makes
of their sums.
"""

from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias

import numpy as np

from fedloom.trees import exact
from fedloom.trees.exact import MOST_BITS, STEP
from fedloom.trees.histograms import CACHED, COUNT, packed, unpacked
from fedloom.trees.splits import Criterion, Newton, Squares

FINEST: Final = 20
"""The most bits behind the point of a number's residual, if two sums share a word."""
WIDE: Final = 31
"""The same if the sum of residuals has a word of its own."""
STEPS: Final = 8
"""Steps of residuals over which at most a sixteenth of all rows lies, else they are too coarse."""
FARTHEST: Final = 2.0
"""Residuals are clipped to twice the power of 2 that is above all numbers."""


@dataclass(frozen=True)
class CrossEntropy:
    """Of classes, with sums of g, h and rows.

    Attributes:
        bits: behind the point.
    """

    bits: int
    exponent: int = 0
    statistics: ClassVar[int] = 3
    wide: ClassVar[bool] = False
    opened = staticmethod(unpacked)

    def words(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """One word (T, n) of each row, of labels y (n,)."""
        words = np.empty(scores.shape, np.int64)
        for first in range(0, len(y), CACHED):
            some = slice(first, first + CACHED)
            words[:, some] = packed(*exact.gradients(scores[:, some], y[some], self.bits))
        return words

    def criterion(self, l2: float) -> Criterion:
        """What splits are judged by."""
        return Newton(l2 * self.unit)

    def leaf(self, s: np.ndarray, rate: float, l2: float) -> np.ndarray:
        """The values (nodes, 1) of leaves with sums (3, nodes), in steps of 2^-20."""
        value: np.ndarray = np.rint(-rate * s[0] / (s[1] + l2 * self.unit) / STEP).astype(np.int64)
        return value[:, None]

    @property
    def unit(self) -> float:
        """The unit of g, of h and of gains."""
        return 2.0**self.bits


@dataclass(frozen=True)
class SquaredError:
    """Of numbers, with sums of residuals and rows: the second derivative is 1.

    Attributes:
        bits: behind the point.
        exponent: all numbers are below 2^exponent; residuals are in this unit.
    """

    bits: int
    exponent: int
    statistics: ClassVar[int] = 2

    @staticmethod
    def opened(words: np.ndarray) -> np.ndarray:
        """The sums (2, …) of residuals and rows in sums of words (…)."""
        return np.stack([words >> COUNT, words & ((1 << COUNT) - 1)])

    def words(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """One word (1, n) of each row, of standardized numbers y (n,)."""
        residual = np.ldexp(scores * STEP - y.astype(np.float64), -self.exponent)
        g = np.rint(residual.clip(-FARTHEST, FARTHEST) * 2.0**self.bits).astype(np.int64)
        words: np.ndarray = (g << COUNT) + 1
        return words

    def criterion(self, l2: float) -> Criterion:
        """What splits are judged by."""
        return Squares(l2)

    def leaf(self, s: np.ndarray, rate: float, l2: float) -> np.ndarray:
        """The values (nodes, 1) of leaves with sums (2, nodes), in steps of 2^-20."""
        step = 2.0 ** (self.exponent - self.bits) / STEP
        value: np.ndarray = np.rint(-rate * step * s[0] / (s[1] + l2)).astype(np.int64)
        return value[:, None]

    @property
    def wide(self) -> bool:
        """Whether the sum of residuals has a word of its own."""
        return self.bits > FINEST

    @property
    def unit(self) -> float:
        """The unit of gains."""
        return 4.0**self.bits


Loss: TypeAlias = CrossEntropy | SquaredError
"""A loss of scores (T, n) int64 in steps of 2^-20. Both have the same methods and `statistics`, the
number of sums of a histogram, the last of which is that of rows.
"""


def of_classes(rows: int) -> CrossEntropy:
    """The loss of classes over this many rows of all owners."""
    return CrossEntropy(exact.bits_for(rows))


def coarse(exponent: int, spread: float) -> bool:
    """Whether steps of 2^exponent are too coarse for numbers with this `Agreement.spread`: most of
    them are close to each other, and the largest are far away.
    """
    return STEPS * 2.0**exponent > spread


def of_numbers(rows: int, exponent: int, spread: float, most: int = 1) -> SquaredError:
    """The loss of numbers below 2^exponent over this many rows of all owners, each of which counts
    at most `most` times. No sum reaches 2^31; or 2^52, with finer steps, if these were too coarse
    for the numbers' `spread`.

    Raises:
        ValueError: too many rows.
    """
    room = (int(rows) * most).bit_length()
    bits = min(FINEST, 30 - room)
    if bits < MOST_BITS - 6:
        raise ValueError(
            f"trees take fewer than {2**26 // most} rows of all owners together, not {rows}"
        )
    if coarse(exponent - bits, spread):
        bits = min(WIDE, 51 - room)
    return SquaredError(bits, exponent)
