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
    part = np.repeat(np.arange(W * k), widths)
    if (words := np.flatnonzero(layout.category[columns].ravel())).size:
        inside = 1 + np.arange(widths[words].max() - 1)
        cells, real = starts[words, None] + inside, inside < widths[words, None]
        rank = np.where(real, criterion.rank(s.take(cells, axis=1, mode="clip")), np.inf)
        order = starts[words, None] + 1 + rank.argsort(1, kind="stable")
        place[cells[real]] = order[real]
        s = s.take(place, axis=1)
    missing = s[:, starts]
    s[:, starts] = 0
    known = np.add.reduceat(s, starts, axis=1)
    s[:, starts[1:]] = -known[:, :-1]  # so that running sums begin anew
    left = s.cumsum(1)[:, None]  # (S, ways, cells): the left child after each cell, with missing values right, and left
    if missing.any():
        left = np.concatenate([left, left + missing.take(part, axis=1)[:, None]], axis=1)
    total = (known + missing)[:, ::k]
    node = part // k
    right = total.take(node, axis=1)[:, None] - left
    gains = criterion.score(left) + criterion.score(right) - criterion.score(total).take(node)
    gains[np.minimum(criterion.rows(left), criterion.rows(right)) < min_rows] = -np.inf
    gains[:, starts] = -np.inf
    tops = np.maximum.reduceat(gains, first, axis=1)
    way, top = tops.argmax(0), tops.max(0)
    equal = np.flatnonzero(gains[way.take(node), np.arange(len(node))] == top.take(node))
    at = equal[np.searchsorted(equal, first)]  # the first of each node
    begin = starts[part[at]]  # of the column
    bins = at - begin  # that go left
    cells = np.arange(bins.sum()) + np.repeat(begin + 1 + bins - bins.cumsum(), bins)
    table = np.zeros((W, int(layout.widths.max())), bool)
    table[node[cells], place[cells] - starts[part[cells]]] = True
    table[:, 0] = way == 1
    return Best(top, columns.ravel()[part[at]], table, left[:, way, at].astype(np.int64))
