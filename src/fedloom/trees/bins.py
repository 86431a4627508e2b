"""Bins of columns, agreed by sums of counts alone: nobody sends a value, a minimum or a maximum.

A float32 is read as a whole number in the same order, its key. Owners count their rows in 4,096
segments of the keys; the coordinator divides segments with many rows into 16, up to five times, and
puts edges between what it then knows. Sums do not depend on how rows are split over owners, so
neither do the edges. (A merge of quantile sketches does.)

Bin 0 of a column is a missing value. A number has bin 1 and up. The words of a category are
numbered 0, 1, …; the most frequent have bins of their own, and the others share the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

FIRST: Final = 4096
"""Segments of the first count, each of 2^20 keys."""
FINER: Final = 16
"""Segments that a crowded one is divided into."""
SIZES: Final = {2**32 // FIRST: FIRST} | {FINER**k: FINER for k in range(5)}
"""The sizes of segments that are asked for, and how many lie side by side."""
MOST_BINS: Final = 255
PARTS: Final = 16
"""Parts of the rows whose extent is measured: see `Agreement.spread`."""


def keys(x: np.ndarray) -> np.ndarray:
    """Whole numbers (n,) int64 from 0 to 2^32 - 1 in the order of the float32 numbers x (n,); -0
    counts as 0.
    """
    bits = (x.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.int64)


def numbers_of(keys: np.ndarray) -> np.ndarray:
    """The numbers (n,) float64 with these `keys` (n,)."""
    bits = np.where(keys >> 31, keys ^ (1 << 31), ~keys & (2**32 - 1))
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Question:
    """Segments whose rows are to be counted: equal parts of stretches of keys.

    Attributes:
        column: (p,) int64 column of each stretch.
        start: (p,) int64 its first key.
        size: keys in one part.
        parts: parts of each stretch.
    """

    column: np.ndarray
    start: np.ndarray
    size: int
    parts: int


def count(columns: Sequence[np.ndarray], asked: Question) -> np.ndarray:
    """The rows (p, parts) int64 of one owner in the asked segments.

    Args:
        columns: for each column the sorted keys of its known values.
    """
    out = np.empty((len(asked.start), asked.parts), np.int64)
    borders = asked.start[:, None] + asked.size * np.arange(asked.parts + 1)
    for f in np.unique(asked.column):
        mine = asked.column == f
        out[mine] = np.diff(np.searchsorted(columns[f], borders[mine]), axis=1)
    return out


class Agreement:
    """The coordinator's knowledge of the columns of numbers.

    Args:
        columns: their numbers.
        bins: the most bins of a column, with that of missing values.
    """

    def __init__(self, columns: Sequence[int], bins: int) -> None:
        self._columns, self._bins = list(columns), bins
        self._known = {f: (np.empty(0, np.int64), np.empty(0, np.int64)) for f in columns}
        self.question: Question | None = Question(
            np.array(self._columns, np.int64),
            np.zeros(len(self._columns), np.int64),
            2**32 // FIRST,
            FIRST,
        )
        if not self._columns:
            self.question = None

    def answer(self, counts: np.ndarray) -> None:
        """Take the summed counts (p, parts) of the current question, and ask the next
        one, if any.
        """
        asked = self.question
        assert asked is not None
        starts = asked.start[:, None] + asked.size * np.arange(asked.parts)
        crowded = []
        for f in self._columns:
            mine = asked.column == f
            start, rows = starts[mine].ravel(), counts[mine].ravel()
            start, rows = start[rows > 0], rows[rows > 0]
            known, had = self._known[f]
            split = np.zeros(len(rows), bool)
            if asked.size > 1:
                split = rows > (had.sum() + rows.sum()) // (2 * self._bins)
            crowded.append(start[split])
            self._known[f] = (
                np.concatenate([known, start[~split]]),
                np.concatenate([had, rows[~split]]),
            )
            # the rows of divided segments come back with the next answer
        column = np.repeat(self._columns, [*map(len, crowded)])
        self.question = (
            Question(column, np.concatenate(crowded), asked.size // FINER, FINER)
            if len(column)
            else None
        )

    def edges(self, column: int) -> np.ndarray:
        """The first keys (e,) int64, e <= bins - 2, of all bins of a column but the first."""
        start, rows = self._known[column]
        order = np.argsort(start)
        return _edges(start[order], rows[order], self._bins - 1)

    def spread(self, column: int) -> float:
        """The least distance over which a sixteenth of the rows of a column lies, so that a step
        far below it leaves all parts of the column in their order; infinity of a constant.
        """
        start, rows = self._known[column]
        order = np.argsort(start)
        values, rows = numbers_of(start[order]), rows[order]
        ends = rows.cumsum()
        after = np.searchsorted(ends, ends - rows + rows.sum() / PARTS) + 1
        inside = after < len(ends)
        return float((values[after[inside]] - values[inside]).min(initial=np.inf))


def _edges(start: np.ndarray, rows: np.ndarray, bins: int) -> np.ndarray:
    """The first keys of the bins but the first. A segment with a bin's share of rows has a bin of
    its own; the others share the bins that are left, with equally many rows.
    """
    left, places, light = int(rows.sum()), bins, np.ones(len(rows), bool)
    while light.any() and (heavy := light & (rows * places >= left)).any():
        light, left, places = (
            light & ~heavy,
            left - int(rows[heavy].sum()),
            places - int(heavy.sum()),
        )
    first: list[int] = []
    filled, alone = 0, False
    for key, inside, shares in zip(start.tolist(), rows.tolist(), light.tolist(), strict=True):
        if first and (alone or not shares or filled * max(places, 1) >= left):
            filled = 0
        if filled == 0:
            first.append(key)
        filled, alone = filled + inside, not shares
    return np.array(first[1:bins], np.int64)


def own_edges(x: np.ndarray, bins: int) -> tuple[np.ndarray, ...]:
    """For each column of numbers x (n, F) of one owner, the first keys of its bins from the second
    on.
    """
    agreement = _agreed(x, bins)
    return tuple(agreement.edges(f) for f in range(x.shape[1]))


def own_spread(y: np.ndarray, bins: int) -> float:
    """See `Agreement.spread`: that of the numbers y (n,) of one owner."""
    return _agreed(y[:, None], bins).spread(0)


def _agreed(x: np.ndarray, bins: int) -> Agreement:
    known = [np.sort(keys(values[~np.isnan(values)])) for values in x.T]
    agreement = Agreement(range(len(known)), bins)
    while (asked := agreement.question) is not None:
        agreement.answer(count(known, asked))
    return agreement


def frequent(rows: np.ndarray, bins: int) -> np.ndarray:
    """The numbers of the words with a bin of their own, at most bins - 2: the most frequent by
    their `rows` (v,), of equally many the first.
    """
    order = np.argsort(-rows, kind="stable")
    chosen: np.ndarray = order[rows[order] > 0][: bins - 2].astype(np.int64)
    return chosen


@dataclass(frozen=True)
class Bins:
    """The agreed bins of all F columns. The bins of all columns in a row are the cells of a
    histogram.

    Attributes:
        edges: for each column of numbers the first keys of its bins from the second on; for a
            category the numbers of the words with bins of their own.
        category: (F,) bool.
    """

    edges: tuple[np.ndarray, ...]
    category: np.ndarray

    def problem(self, category: Sequence[bool], bins: int) -> str:
        """What is wrong with bins of unknown origin for these columns, of at most so many bins
        each; "" if nothing.
        """
        if self.category.tolist() != [*category] or len(self.edges) != len(category):
            return f"bins are of {len(category)} columns, categories and numbers in their order"
        if any(len(edges) > bins - 2 for edges in self.edges):
            return f"a column has at most {bins} bins"
        numbers = (edges for edges, words in zip(self.edges, category, strict=True) if not words)
        return "edges must ascend" if any((np.diff(edges) <= 0).any() for edges in numbers) else ""

    @cached_property
    def widths(self) -> np.ndarray:
        """(F,) the number of bins of each column, with that of missing values."""
        return np.array([len(e) + 2 for e in self.edges], np.int64)

    @cached_property
    def starts(self) -> np.ndarray:
        """(F,) the first cell of each column."""
        starts: np.ndarray = np.cumsum(self.widths) - self.widths
        return starts

    @cached_property
    def cells(self) -> int:
        """The cells of a histogram."""
        return int(self.widths.sum())

    @cached_property
    def column(self) -> np.ndarray:
        """(cells,) the column of each cell."""
        return np.repeat(np.arange(len(self.edges)), self.widths)

    def of(self, x: np.ndarray) -> np.ndarray:
        """The bins (n, F) uint8 of rows x (n, F) float32, NaN where a value is missing. An unknown
        word has the last bin of its column.
        """
        out = np.zeros(x.shape, np.uint8)
        for f, edges in enumerate(self.edges):
            known = ~np.isnan(x[:, f])
            values = x[known, f]
            if self.category[f]:
                places = np.full(int(edges.max(initial=-1)) + 2, len(edges) + 1)
                places[edges] = 1 + np.arange(len(edges))
                listed = (values >= 0) & (values < len(places))
                out[known, f] = places[np.where(listed, values, len(places) - 1).astype(np.int64)]
            else:
                out[known, f] = np.searchsorted(edges, keys(values), side="right") + 1
        return out
