"""Boosted trees of rows that are all in one place."""

from dataclasses import dataclass

import numpy as np

from fedloom.trees.bins import Bins
from fedloom.trees.exact import STEP
from fedloom.trees.growth import Growth
from fedloom.trees.histograms import gradient_histograms
from fedloom.trees.losses import Loss
from fedloom.trees.model import Trees, stumps


@dataclass(frozen=True)
class BoostingSettings:
    """How trees grow.

    Attributes:
        depth: the most splits above a leaf.
        min_rows: the least number of rows of a leaf.
        rate: the share of a leaf's Newton step that is taken.
        l2: λ, added to the sum of h of a leaf.
    """

    depth: int
    min_rows: int
    rate: float
    l2: float


def outputs(classes: int) -> int:
    """T, the number of scores of a row: 1 for two classes, and for a number, whose
    `classes` are 1.
    """
    return 1 if classes == 2 else classes


def base(rows: np.ndarray | None) -> Trees:
    """The first T trees: leaves alone, with the log odds, or the logarithms of the shares, of the
    classes in all `rows` (K,), to each of which one is added; 0 for a standardized number, which
    has no `rows`.
    """
    if rows is None:
        return stumps(np.zeros(1, np.int64))
    p = (rows + 1) / (rows.sum() + len(rows))
    return stumps(np.rint(np.log(p if len(p) > 2 else p[1:] / p[:1]) / STEP).astype(np.int64))


def grow(
    layout: Bins,
    bins: np.ndarray,
    cells: np.ndarray,
    y: np.ndarray,
    scores: np.ndarray,
    loss: Loss,
    rounds: int,
    how: BoostingSettings,
) -> tuple[list[Trees], np.ndarray]:
    """T new trees for each of some rounds, and the gains (F,) of all splits by column.

    Args:
        layout: the bins of all F columns.
        bins, cells: (n, F) of the rows.
        y: (n,) labels, or standardized numbers.
        scores: (T, n) int64 of the model before, in steps of 2^-20.
        loss: of the rows.
        rounds: how often T trees are added.
        how: they grow.
    """
    T, n = scores.shape
    parts, gains = list[Trees](), np.zeros(len(layout.edges))
    for _ in range(rounds):
        words = loss.words(scores, y)
        node = np.repeat(np.arange(T, dtype=np.int32)[:, None], n, axis=1)
        trees = Growth(T, layout, loss.criterion(how.l2), depth=how.depth, min_rows=how.min_rows)
        while len(trees.asked):
            found = gradient_histograms(
                cells, words, node, trees.asked, trees.tree, layout.cells, loss.opened
            )
            trees.answer(found.reshape(loss.statistics, -1))
            trees.splits.move(node, bins)
        parts.append(trees.grown(lambda s: loss.leaf(s, how.rate, how.l2)))
        gains += trees.gains / loss.unit
        scores = scores + parts[-1].value[trees.places[node], 0]
    return parts, gains
