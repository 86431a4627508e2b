"""The coordinator's choice of splits from summed histograms. Floats are compared here only, at one place."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from fedloom.trees.bins import Bins


class Criterion(Protocol):
    """What splits are judged by, from the statistics (S, …) of nodes or bins."""

    def score(self, s: np.ndarray) -> np.ndarray:
        """The score (…) of nodes: a split gains the scores of its children less that of its node."""

    def rank(self, s: np.ndarray) -> np.ndarray:
        """The number (…) by which the words of a category are sorted."""

    def rows(self, s: np.ndarray) -> np.ndarray:
        """The number (…) of rows."""


@dataclass(frozen=True)
class Newton:
    """Boosting, with the statistics (G, H, rows): G^2 / (H + penalty)."""

    penalty: float

    def score(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[0] * s[0] / (s[1] + self.penalty)
        return found

    def rank(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[0] / (s[1] + self.penalty + 1)
        return found

    def rows(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[2]
        return found


@dataclass(frozen=True)
class Squares:
    """Numbers, with the statistics (G, rows), the sum of residuals: G^2 / (rows + penalty)."""

    penalty: float = 0.0

    def score(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[0] * s[0] / np.maximum(s[1] + self.penalty, 1e-300)
        return found

    def rank(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[0] / (s[1] + self.penalty + 1)
        return found

    def rows(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[1]
        return found


@dataclass(frozen=True)
class Gini:
    """Forests, with the statistics (N_1, …, N_K), the rows of each class: sum_k N_k^2 / N."""

    def score(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = (s * s).sum(0) / np.maximum(s.sum(0), 1)
        return found

    def rank(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s[0] / (s.sum(0) + 1)
        return found

    def rows(self, s: np.ndarray) -> np.ndarray:
        """See `Criterion`."""
        found: np.ndarray = s.sum(0)
        return found


@dataclass(frozen=True)
class Best:
    """The best split of each of W nodes.

    Attributes:
        gain: (W,) float64; -inf where no split leaves enough rows on both sides.
        column: (W,) int64.
        left: (W, B) bool, the bins of the column that go left; B is the largest number of bins of a column.
        sums: (S, W) int64, the statistics of the left child.
    """

    gain: np.ndarray
    column: np.ndarray
    left: np.ndarray
    sums: np.ndarray


def best(hist: np.ndarray, columns: np.ndarray, layout: Bins, criterion: Criterion, min_rows: int) -> Best:
    """The best split of each node.

    Missing values go right, or left if that gains more. The words of a category are split in the order of
    `Criterion.rank`, ties by number. Of equal gains the first in the order (missing right or left, column, bin) is
    taken.

    Args:
        hist: (S, N) int64 statistics in the bins of some columns of each node, one node's bins after the other's.
        columns: (W, k) the columns of each node, in the order of `hist`.
        min_rows: the least number of rows of a child.
    """
    W, k = columns.shape
    widths = layout.widths[columns].ravel()
    starts = np.cumsum(widths) - widths  # the bin of missing values of each (node, column)
    first, place = starts[::k], np.arange(hist.shape[1])
    s = hist.astype(np.float64)  # sums are below 2^53, so they stay exact
    if layout.category.any():
        part = np.repeat(np.where(layout.category[columns].ravel(), np.arange(W * k), -1), widths)
        part[starts] = -1
        words = np.flatnonzero(part >= 0)
        place[words] = words[np.lexsort((criterion.rank(s[:, words]), part[words]))]
        s[:, words] = s[:, place[words]]
    missing, inside = s[:, starts], np.add.reduceat(s, starts, axis=1)
    total = inside[:, ::k]
    ways = []  # statistics of the left child after each cell, with missing values right, and left
    for at_left in (np.zeros_like(missing), missing) if missing.any() else (np.zeros_like(missing),):
        before = np.roll(inside - missing + at_left, 1, axis=1)
        before[:, 0] = 0
        s[:, starts] = at_left - before  # so that running sums begin anew
        ways.append(s.cumsum(1))
    sizes = np.add.reduceat(widths, np.arange(0, W * k, k))
    every, whole = np.repeat(total, sizes, axis=1), np.repeat(criterion.score(total), sizes)
    gains = np.empty((len(ways), hist.shape[1]))
    for way, left in enumerate(ways):
        right = every - left
        gain = criterion.score(left) + criterion.score(right) - whole
        few = np.minimum(criterion.rows(left), criterion.rows(right)) < min_rows
        gain[few] = -np.inf
        gains[way] = gain
    gains[:, starts] = -np.inf
    tops = np.maximum.reduceat(gains, first, axis=1)
    way, top = tops.argmax(0), tops.max(0)
    at = np.empty(W, np.int64)
    table = np.zeros((W, int(layout.widths.max())), bool)
    for w, begin in enumerate(first):
        at[w] = begin + gains[way[w], begin : begin + sizes[w]].argmax()
    chosen = np.searchsorted(starts, at, side="right") - 1
    for w, begin in enumerate(starts[chosen]):
        table[w, place[begin + 1 : at[w] + 1] - begin] = True
    table[:, 0] = way == 1
    sums = np.stack([left[:, at] for left in ways])[way, :, np.arange(W)].T
    return Best(top, columns.ravel()[chosen], table, sums.astype(np.int64))
