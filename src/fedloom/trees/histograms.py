"""What an owner computes for a tree: sums of integers by node and bin, and the node of each row.

Rows n, columns F, trees T that grow at the same time. An owner keeps `bins` (n, F) of its rows, and
`node` (T, n), the node that each row has reached in each tree. Once a level of the trees it moves
rows to the children of nodes that were split (`move`), and counts in the nodes that are asked for:

    gradient_histograms   boosting: (S, m, width), the statistics g, h and rows in all cells of all
                          columns, of each of m nodes
    class_histograms      forests: (K, N), rows by class in the bins of the columns that were drawn
                          for each node, whose numbers differ

Sums travel as words int64 that add up as the sums in them do, because several small ones fit one:
`sent` and `received` for sums with a sign, `bundled` and `unbundled` for counts.

Each loop exists twice: in NumPy, and compiled by Numba, whose loading pays off in a long process
(`_loops`). Both give the same integers.
"""

from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Final

import numpy as np

from fedloom.trees.bins import Bins
from fedloom.trees.exact import MOST_BITS

PAIRS: Final = 2**17
"""Pairs of a row and a tree that are counted at once."""
MANY: Final = 2**28
"""Values that a process has gone through when compiled loops become worth their loading, which
takes a second.
"""
FEW: Final = 2**8
"""Nodes of a tree up to which all rows are moved at once."""
BLOCK: Final = 2**15 - 1
"""Rows whose sums fit one word: see `packed`."""
CACHED: Final = 2**13
"""Rows whose numbers stay in the processor's cache."""
COUNT: Final = 15
"""Bits of a count in a word."""
_H: Final = COUNT + 13 + MOST_BITS  # 38: bits of a count and a sum of h, below 2^(13 + MOST_BITS)


def packed(g: np.ndarray, h: np.ndarray) -> np.ndarray:
    """One word (…) int64 of each row: g 2^38 + h 2^15 + 1, with |g| <= 2^10 and h <= 2^8. Added
    over up to `BLOCK` rows, none of the three sums reaches the next.
    """
    words: np.ndarray = (g << _H) + (h << COUNT) + 1
    return words


def unpacked(words: np.ndarray) -> np.ndarray:
    """The three sums (3, …) int64 of g, h and rows in sums of words (…)."""
    # g alone may be negative. It is the highest part, and the shift rounds down: h and rows, which
    # are below it, only ever add to the word.
    low = words & ((1 << _H) - 1)
    return np.stack([words >> _H, low >> COUNT, low & ((1 << COUNT) - 1)])


def two_in_one(sums: np.ndarray) -> np.ndarray:
    """Words (ceil(n / 2),) int64, each of two sums of (n,) that are within ±2^31. Words add up as
    their sums do.
    """
    words: np.ndarray = sums[0::2] << 32
    words[: len(sums) // 2] += sums[1::2]  # of an odd n the last word has one sum
    return words


def untwined(words: np.ndarray, n: int) -> np.ndarray:
    """The n sums (n,) int64 of words."""
    both = np.empty(2 * len(words), np.int64)
    both[1::2] = words.astype(np.int32)  # the lower 32 bits, with their sign
    # without it: a lower half below 0 has borrowed 1 from the upper one
    np.right_shift(words - both[1::2], 32, out=both[0::2])
    return both[:n]


def sent(sums: np.ndarray, wide: bool) -> np.ndarray:
    """Words of sums (S, N), two in one; if `wide`, the first statistic has words of its own."""
    if not wide:
        return two_in_one(sums.ravel())
    return np.concatenate([sums[0], two_in_one(sums[1:].ravel())])


def words_sent(statistics: int, cells: int, wide: bool) -> int:
    """The words of sums (statistics, cells): see `sent`."""
    return wide * cells + -(-(statistics - wide) * cells // 2)


def received(words: np.ndarray, statistics: int, cells: int, wide: bool) -> np.ndarray:
    """The sums (statistics, cells) int64 of words: see `sent`."""
    own, rest = np.split(words, [wide * cells])
    return np.concatenate([own, untwined(rest, (statistics - wide) * cells)]).reshape(
        statistics, cells
    )


def bundled(counts: np.ndarray, most: int) -> np.ndarray:
    """Counts (n,) as words int64 of as many counts as fit, whose sums over owners are at most
    `most`.
    """
    bits = max(most.bit_length(), 1)
    # (words, counts in a word); 63 bits, as the sign is left alone
    each = np.zeros((bundles(len(counts), most), 63 // bits), np.int64)
    each.ravel()[: len(counts)] = counts
    words: np.ndarray = (each << bits * np.arange(each.shape[1])).sum(1)
    return words


def bundles(n: int, most: int) -> int:
    """The words of n counts: see `bundled`."""
    return -(-n // (63 // max(most.bit_length(), 1)))


def unbundled(words: np.ndarray, n: int, most: int) -> np.ndarray:
    """The n sums (n,) int64 of counts in sums of `bundled` words."""
    bits = max(most.bit_length(), 1)
    each: np.ndarray = words[:, None] >> bits * np.arange(63 // bits) & ((1 << bits) - 1)
    return each.ravel()[:n]


def bundled_by(counts: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """Counts (K, N) as words int64 of as many as fit, whose sums over owners have the `bits` (N,)
    of their cell.
    """
    # cells with equal bits together, the fewest bits first, as `unbundled_by` reads them
    parts = [bundled(counts[:, bits == b].ravel(), 2**b - 1) for b in np.unique(bits).tolist()]
    return np.concatenate([np.empty(0, np.int64), *parts])


def bundles_by(kinds: int, bits: np.ndarray) -> int:
    """The words of counts (kinds, N): see `bundled_by`."""
    sizes = zip(*(x.tolist() for x in np.unique(bits, return_counts=True)), strict=True)
    return sum(bundles(kinds * n, 2**b - 1) for b, n in sizes)


def unbundled_by(words: np.ndarray, kinds: int, bits: np.ndarray) -> np.ndarray:
    """The sums (kinds, N) int64 of counts in sums of words: see `bundled_by`."""
    out, start = np.empty((kinds, len(bits)), np.int64), 0
    for b, n in zip(*(x.tolist() for x in np.unique(bits, return_counts=True)), strict=True):
        end = start + bundles(kinds * n, 2**b - 1)
        out[:, bits == b] = unbundled(words[start:end], kinds * n, 2**b - 1).reshape(kinds, n)
        start = end
    return out


def cells_of(bins: np.ndarray, layout: Bins) -> np.ndarray:
    """The cell (n, F) int32 of each value from its bin (n, F): `Bins.starts` and the bin."""
    cells: np.ndarray = bins + layout.starts.astype(np.int32)
    return cells


_seen = 0  # values that this process has gone through so far


def _loops(values: int) -> ModuleType | None:
    """The compiled loops, if they are installed and the process has gone through many values, with
    these.
    """
    global _seen
    _seen += values
    return _compiled() if _seen >= MANY else None


@cache
def _compiled() -> ModuleType | None:
    from fedloom.trees import compiled

    return compiled if compiled.INSTALLED else None


def gradient_histograms(
    cells: np.ndarray,
    words: np.ndarray,
    node: np.ndarray,
    asked: np.ndarray,
    tree: np.ndarray,
    width: int,
    opened: Callable[[np.ndarray], np.ndarray] = unpacked,
) -> np.ndarray:
    """Sums (S, m, width) int64 of S statistics by node and cell: of g, h and rows.

    Args:
        cells: (n, F) the cell of each value, below `width`.
        words: (T, n) `packed` derivatives for each tree.
        node: (T, n) the node of each row.
        asked: (m,) ascending nodes, those of a tree side by side.
        tree: (m,) their trees.
        width: the cells of all columns.
        opened: the statistics (S, …) in sums of words (…).
    """
    found = []
    for t, mine in _by_tree(tree):
        # A slot is one of the tree's asked nodes, by its place among them. Words are added over at
        # most `BLOCK` rows, opened, and only then added up, so that no sum in a word overflows.
        # There is a turn without rows, too, from which `total` has its shape.
        slots, place, total = mine.stop - mine.start, _places(asked[mine]), np.zeros(1, np.int64)
        if (loops := _loops(cells.size)) is not None:
            for first in range(0, max(len(cells), 1), BLOCK):
                some, out = slice(first, first + BLOCK), np.zeros(slots * width, np.int64)
                loops.add_words(cells[some], words[t, some], node[t, some], place, width, out)
                total = total + opened(out)
        else:
            slot = place.take(node[t], mode="clip")  # (n,); -1 for a node that is not asked for
            rows = np.flatnonzero(slot >= 0)
            for first in range(0, max(len(rows), 1), BLOCK):
                which = rows[first : first + BLOCK]
                if len(rows) == len(cells):  # all, such as of a root: views, not copies
                    index, own = cells[first : first + BLOCK], words[t, first : first + BLOCK]
                else:
                    index, own = cells.take(which, 0), words[t].take(which)
                if slots > 1:  # the cells of one node after the other's; int32, as `sums` takes it
                    index = index + (slot.take(which) * np.int32(width))[:, None]
                total = total + opened(sums(index, own, slots * width))
        found.append(total.reshape(-1, slots, width))
    return np.concatenate(found, axis=1) if len(found) > 1 else found[0]


def class_histograms(
    bins: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    node: np.ndarray,
    asked: np.ndarray,
    tree: np.ndarray,
    columns: np.ndarray,
    widths: np.ndarray,
    classes: int,
) -> np.ndarray:
    """Sums (K, N) int64 of row weights by class in the bins of some columns of each asked node, one
    node's after the other's.

    Args:
        bins: (n, F).
        y: (n,) labels.
        weight: (T, n) int64 of each row in each tree; with one class, of any sign.
        node: (T, n) the node of each row.
        asked: (m,) ascending nodes.
        tree: (m,) their trees, ascending.
        columns: (m, k) the columns of each.
        widths: (F,) the bins of each column.
        classes: K.
    """
    if len(asked) and (loops := _loops(node.size * columns.shape[1])) is not None:
        starts, cells = _starts(widths[columns])
        out = np.zeros((cells, classes), np.int64)
        loops.add_classes(
            bins, y, weight, node, _places(asked), starts, columns.astype(np.int64), out
        )
        return out.T

    # So many trees at once that their rows are about `PAIRS`; `mine` are the asked nodes of these
    # trees, which are side by side, as `tree` ascends.
    parts = [np.zeros((classes, 0), np.int64)]
    at_once = max(1, PAIRS // max(1, len(y)))
    for first in range(0, len(node), at_once):
        mine = slice(*np.searchsorted(tree, (first, first + at_once)))
        if mine.start == mine.stop:
            continue
        some = slice(first, first + at_once)
        slot = _places(asked[mine]).take(node[some], mode="clip")
        starts, cells = _starts(widths[columns[mine]])
        # pairs of a tree and a row that count: places in the flat (trees, n), with node and row
        each = np.flatnonzero((slot >= 0) & (weight[some] != 0))
        at, rows = slot.take(each), each % len(y)
        # (pairs, k): the cell of the row's bin in each of its node's columns, then of its class
        index = starts.take(at, 0)
        index += bins.take(columns[mine].take(at, 0) + (rows * bins.shape[1])[:, None])
        index *= classes
        index += y.take(rows)[:, None]
        found = sums(index.astype(np.int32), weight[some].take(each), cells * classes)
        parts.append(found.reshape(-1, classes).T)
    return np.concatenate(parts, axis=1)


def sums(index: np.ndarray, weights: np.ndarray, cells: int) -> np.ndarray:
    """The sum (cells,) int64 of the weights (m,) int64 of all rows with each cell in their index
    (m, k) int32.

    It is the product of a sparse matrix of ones with the weights: SciPy's loop over it is three
    times as fast as `np.bincount`, and adds integers.
    """
    from scipy.sparse import csc_array

    # The matrix (cells, m) has in column i, of row i, a 1 at each of its k cells: `index` has the
    # cells column by column, `ends` where each column ends, as SciPy's CSC format wants them.
    m, k = index.shape
    ends = np.arange(0, m * k + 1, k, dtype=np.int32)
    # ones of a power of two, so that the cache of `_ones` keeps few lengths
    ones = _ones(1 << max(m * k - 1, 0).bit_length())[: m * k]
    found: np.ndarray = csc_array((ones, index.ravel(), ends), shape=(cells, m)) @ weights
    return found


@lru_cache(maxsize=32)
def _ones(size: int) -> np.ndarray:
    return np.ones(size, np.int64)


def move(
    node: np.ndarray,
    bins: np.ndarray,
    split: np.ndarray,
    tree: np.ndarray,
    column: np.ndarray,
    left: np.ndarray,
    child: np.ndarray,
) -> None:
    """Move the rows of some nodes to their children, in place.

    Args:
        node: (T, n) the node of each row in each tree.
        bins: (n, F).
        split: (s,) ascending nodes, those of a tree side by side.
        tree: (s,) their trees.
        column: (s,) the column that each looks at.
        left: (s, B) the bins that go left.
        child: (s,) the left child; the right one has the next number.
    """
    for t, mine in _by_tree(tree):
        # `to` (s, B): the child to which each bin goes; the right one is the left one plus 1
        place, to = _places(split[mine]), (child[mine, None] + ~left[mine]).astype(np.int32)
        if (loops := _loops(node.size)) is not None:
            loops.move(node[t], bins, place, column[mine].astype(np.int64), to)
        elif node.size and (nodes := int(node[t].max()) + 1) <= FEW:
            _move_all(node[t], bins, nodes, split[mine], column[mine], to)
        else:
            # only the rows in nodes that were split, which may be few in a deep tree
            at = place.take(node[t], mode="clip")
            rows = np.flatnonzero(at >= 0)
            at = at.take(rows)
            seen = bins.ravel().take(rows * bins.shape[1] + column[mine].take(at))
            node[t, rows] = to.ravel().take(at * to.shape[1] + seen)


def _move_all(
    node: np.ndarray,
    bins: np.ndarray,
    nodes: int,
    split: np.ndarray,
    column: np.ndarray,
    to: np.ndarray,
) -> None:
    """As `move`, of one tree with few nodes: also the rows of the others move, to
    their own node.
    """
    # Of every node the column that its rows look at (any one, if it was not split), and the next
    # node by bin, flat (nodes B,): the node itself, if it was not split.
    columns = np.zeros(nodes, np.int64)
    next_ = np.repeat(np.arange(nodes, dtype=np.int32), to.shape[1])
    here = slice(None, np.searchsorted(split, nodes))  # a split node may have no rows
    columns[split[here]] = column[here]
    next_.reshape(nodes, -1)[split[here]] = to[here]
    begins = np.arange(0, CACHED * bins.shape[1], bins.shape[1])  # of rows in `flat`
    # A few rows at a time, which stay in the cache; `own` is a view, so that `node` is written.
    for first in range(0, len(node), CACHED):
        own, flat = node[first : first + CACHED], bins[first : first + CACHED].ravel()
        at = columns.take(own)
        at += begins[: len(own)]
        which = own * np.int64(to.shape[1])
        which += flat.take(at)
        next_.take(which, out=own, mode="clip")


def _by_tree(tree: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each tree with the slice of its nodes, of nodes whose trees (m,) are side by side."""
    if len(tree) and tree[0] == tree[-1]:  # one tree, as for two classes or a number
        yield int(tree[0]), slice(0, len(tree))
        return
    borders = [0, *(np.flatnonzero(np.diff(tree)) + 1).tolist(), len(tree)]
    for first, last in pairwise(borders):
        if last > first:
            yield int(tree[first]), slice(first, last)


def _places(among: np.ndarray) -> np.ndarray:
    """The place of each node among some ascending nodes, -1 for none, as for all nodes from the
    last place on.
    """
    # The last place is -1, and so is what `take` with mode "clip" finds for all nodes above.
    places = np.full(int(among[-1]) + 2, -1, np.int32)
    places[among] = np.arange(len(among))
    return places


def _starts(widths: np.ndarray) -> tuple[np.ndarray, int]:
    """The first cell (m, k) of each column of each node, and the number of cells, from their widths
    (m, k).
    """
    ends = widths.ravel().cumsum()
    return (ends - widths.ravel()).reshape(widths.shape), int(ends[-1])
