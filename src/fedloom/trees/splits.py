"""The coordinator's choice of splits from summed histograms. Floats are compared here only, at one
place.

`Growth.answer` calls `best` once a level, with the histograms (S, N) of W nodes: S statistics, such
as G, H and rows, in N cells. A node has a block of cells for each of its k columns, in which cell 0
counts missing values, and the others the column's bins in order: so many as `Bins.widths` says.
All nodes are judged at once by running sums over the N cells: the sum up to a cell is the left
child of the split after this cell.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from fedloom.trees.bins import Bins


class Criterion(Protocol):
    """What splits are judged by, from the statistics (S, …) of nodes or bins."""

    def score(self, s: np.ndarray) -> np.ndarray:
        """The score (…) of nodes: a split gains the scores of its children less that
        of its node.
        """

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
        left: (W, B) bool, the bins of the column that go left; B is the largest number of bins of a
            column.
        sums: (S, W) int64, the statistics of the left child.
    """

    gain: np.ndarray
    column: np.ndarray
    left: np.ndarray
    sums: np.ndarray

    def taken(self, order: np.ndarray) -> "Best":
        """The splits of some nodes, in this order."""
        return Best(self.gain[order], self.column[order], self.left[order], self.sums[:, order])


CELLS: Final = 2**14
"""Bins whose splits are judged at once, which stay in the processor's cache."""


def best(
    hist: np.ndarray, columns: np.ndarray, layout: Bins, criterion: Criterion, min_rows: int
) -> Best:
    """The best split of each node, as `_best`, of a few nodes at a time."""
    ends = layout.widths[columns].sum(1).cumsum()  # (W,) the cells up to the end of each node
    if not len(ends) or ends[-1] <= CELLS:
        return _best(hist, columns, layout, criterion, min_rows)
    found, first, cell = [], 0, 0  # the next node, and its first cell
    while first < len(ends):
        # as many nodes as have `CELLS` cells together, but at least one
        last = max(int(np.searchsorted(ends, cell + CELLS, side="right")), first + 1)
        some = hist[:, cell : ends[last - 1]]
        found.append(_best(some, columns[first:last], layout, criterion, min_rows))
        first, cell = last, int(ends[last - 1])
    return Best(
        np.concatenate([one.gain for one in found]),
        np.concatenate([one.column for one in found]),
        np.concatenate([one.left for one in found]),
        np.concatenate([one.sums for one in found], axis=1),
    )


def _best(
    hist: np.ndarray, columns: np.ndarray, layout: Bins, criterion: Criterion, min_rows: int
) -> Best:
    """The best split of each node.

    Missing values go right, or left if that gains more. The words of a category are split in the
    order of `Criterion.rank`, ties by number. Of equal gains the first in the order (missing right
    or left, column, bin) is taken.

    Args:
        hist: (S, N) int64 statistics in the bins of some columns of each node, one node's bins
            after the other's.
        columns: (W, k) the columns of each node, in the order of `hist`.
        min_rows: the least number of rows of a child.
    """
    # A block is the cells of one column of one node: W k of them, numbered node by node.
    W, k = columns.shape
    widths = layout.widths[columns].ravel()  # (W k,) the cells of each block
    starts = np.cumsum(widths) - widths  # (W k,) the cell of missing values of each block
    first, size = starts[::k], widths.reshape(W, k).sum(1)  # (W,) of the cells of each node
    s, block = hist.copy(), np.repeat(np.arange(W * k), widths)

    # Sort the words of categories by rank, so that the best set of words is a beginning of the
    # block, as for numbers. `place` (N,) is the cell in `hist` that each sorted cell came from.
    place = np.arange(hist.shape[1])
    if (words := np.flatnonzero(layout.category[columns].ravel())).size:
        inside = 1 + np.arange(widths[words].max() - 1)  # up to the widest block; 0 is missing
        cells, real = starts[words, None] + inside, inside < widths[words, None]
        # cells beyond a narrower block are clipped, read in vain, and sorted to the end by inf
        rank = np.where(
            real, criterion.rank(s.take(cells, axis=1, mode="clip").astype(np.float64)), np.inf
        )
        order = starts[words, None] + 1 + rank.argsort(1, kind="stable")
        place[cells[real]] = order[real]
        s[:, cells[real]] = s.take(order[real], axis=1)

    # The left child (S, ways, N) after each cell: way 0 has missing values right, way 1 left. One
    # running sum over all cells does for all blocks: the first cell of a block, free without the
    # missing values, takes the sum of the block before away again.
    missing = s[:, starts]
    s[:, starts] = 0
    known = np.add.reduceat(s, starts, axis=1)
    s[:, starts[1:]] = -known[:, :-1]
    left = s.cumsum(1).astype(np.float64)[:, None]  # sums are below 2^53, so they stay exact
    if missing.any():
        left = np.concatenate([left, left + np.repeat(missing, widths, axis=1)[:, None]], axis=1)

    # The gain (ways, N) of the split after each cell. Each block of a node has all its rows, so the
    # first one tells the node's sums (S, W).
    total = (known + missing)[:, ::k].astype(np.float64)
    right = np.repeat(total, size, axis=1)[:, None] - left
    gains = criterion.score(left)
    gains += criterion.score(right)
    gains -= np.repeat(criterion.score(total), size)
    np.copyto(
        gains, -np.inf, where=np.minimum(criterion.rows(left), criterion.rows(right)) < min_rows
    )
    # No bin would go left there, or that of missing values alone: the same split as that after the
    # last cell of a block, by which all known values go left.
    gains[:, starts] = -np.inf

    # The first best cell `at` (W,) of each node: the way first, then the cell.
    tops = np.maximum.reduceat(gains, first, axis=1)
    way, top = tops.argmax(0), tops.max(0)
    of_way = gains[0] if len(gains) == 1 else np.where(np.repeat(way, size), gains[1], gains[0])
    equal = np.flatnonzero(of_way == np.repeat(top, size))
    at = equal[np.searchsorted(equal, first)]

    # The bins (W, B) that go left: of each node the `bins` cells from `begin` + 1 to `at`, here in
    # a row, by their places before the words were sorted.
    begin = starts[block[at]]
    bins = at - begin
    cells = np.arange(bins.sum()) + np.repeat(begin + 1 + bins - bins.cumsum(), bins)
    table = np.zeros((W, int(layout.widths.max())), bool)
    table[block[cells] // k, place[cells] - starts[block[cells]]] = True
    table[:, 0] = way == 1
    return Best(top, columns.ravel()[block[at]], table, left[:, way, at].astype(np.int64))
