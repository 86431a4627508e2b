"""A random forest of rows that are all in one place."""

import numpy as np

from fedloom.trees import losses
from fedloom.trees.bins import Bins
from fedloom.trees.exact import PARTS
from fedloom.trees.growth import Growth
from fedloom.trees.histograms import class_histograms
from fedloom.trees.model import Trees
from fedloom.trees.splits import Criterion, Gini

GINI = Gini()


def growth(
    layout: Bins,
    trees: int,
    columns: int | None,
    depth: int,
    min_rows: int,
    rng: np.random.Generator,
    criterion: Criterion = GINI,
) -> Growth:
    """New trees of a forest.

    Args:
        layout: the bins of all F columns.
        trees: their number.
        columns: the columns that a node may split; None for the square root of F.
        depth: the most splits above a leaf.
        min_rows: the least number of rows of a leaf, each counted as often as it is drawn.
        rng: draws the columns of each node.
        criterion: what a split gains; by default that of classes.
    """
    F = len(layout.edges)
    k = min(F, columns or max(1, int(np.sqrt(F))))

    def draw(nodes: int) -> np.ndarray:
        chosen: np.ndarray = np.sort(rng.random((nodes, F)).argsort(1)[:, :k], 1)
        return chosen

    return Growth(trees, layout, criterion, depth=depth, min_rows=min_rows, draw=draw)


def grown(trees: Growth) -> Trees:
    """The trees with their leaves N_k / N, in steps of 2^-20."""
    return trees.grown(lambda s: (s.T * PARTS) // np.maximum(s.sum(0), 1)[:, None])


def grow(
    trees: Growth, layout: Bins, bins: np.ndarray, y: np.ndarray, drawn: np.ndarray, classes: int
) -> Trees:
    """Grow trees from rows.

    Args:
        trees: new trees.
        layout: their bins.
        bins: (n, F) uint8.
        y: (n,) labels.
        drawn: (T, n) int64, how often each row is drawn for each tree.
        classes: K.
    """
    node = np.repeat(np.arange(len(drawn), dtype=np.int32)[:, None], len(y), axis=1)
    while len(trees.asked):
        trees.splits.move(node, bins)
        found = class_histograms(
            bins, y, drawn, node, trees.asked, trees.tree, trees.columns, layout.widths, classes
        )
        trees.answer(found)
    return grown(trees)


def grow_of_numbers(
    trees: Growth,
    layout: Bins,
    bins: np.ndarray,
    y: np.ndarray,
    drawn: np.ndarray,
    spread: float,
) -> Trees:
    """As `grow`, of standardized numbers y (n,) with this `Agreement.spread`, by squared error;
    `trees` are judged by `Squares`.
    """
    exponent = int(np.frexp(np.abs(y).max(initial=0.0))[1])
    bits = losses.WIDE if losses.coarse(exponent - losses.FINEST, spread) else losses.FINEST
    numbers = whole(y, bits, exponent)
    node = np.repeat(np.arange(len(drawn), dtype=np.int32)[:, None], len(y), axis=1)
    while len(trees.asked):
        trees.splits.move(node, bins)
        where = (node, trees.asked, trees.tree, trees.columns, layout.widths)
        trees.answer(number_histograms(bins, numbers, drawn, *where))
    return grown_of_numbers(trees, bits, exponent)


def whole(y: np.ndarray, bits: int, exponent: int) -> np.ndarray:
    """Numbers (n,) as whole numbers of 2^(exponent - bits), int64; what is above 2^exponent in size
    counts as that.
    """
    scaled = np.ldexp(y.astype(np.float64), -exponent).clip(-1, 1)
    found: np.ndarray = np.rint(scaled * 2.0**bits).astype(np.int64)
    return found


def number_histograms(
    bins: np.ndarray,
    y: np.ndarray,
    drawn: np.ndarray,
    node: np.ndarray,
    asked: np.ndarray,
    tree: np.ndarray,
    columns: np.ndarray,
    widths: np.ndarray,
) -> np.ndarray:
    """The sums (2, N) of whole numbers y (n,) and of the drawn rows: see `class_histograms`."""
    same = np.zeros(len(y), np.int64)
    parts = [
        class_histograms(bins, same, each, node, asked, tree, columns, widths, 1)
        for each in (drawn * y, drawn)
    ]
    return np.concatenate(parts)


def grown_of_numbers(trees: Growth, bits: int, exponent: int) -> Trees:
    """The trees with the means of `whole` numbers as leaves, in steps of 2^-20."""
    unit = PARTS * 2.0 ** (exponent - bits)
    return trees.grown(
        lambda s: np.floor(unit * s[0] / np.maximum(s[1], 1)).astype(np.int64)[:, None]
    )


def shares(scores: np.ndarray) -> np.ndarray:
    """Probabilities (n, K) from the summed shares (K, n) of all trees; equal ones where no tree has
    seen a row, as of an owner without rows.
    """
    known = scores.sum(0)
    p: np.ndarray = np.where(known > 0, scores / np.maximum(known, 1), 1 / len(scores)).T
    return p
