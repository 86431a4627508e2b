"""The coordinator's side of growing trees: what it asks next, and what it has decided.

One level of T trees is one question and one answer, until `Growth.asked` is empty:

    asked, columns   the nodes whose histograms are needed, and the columns that each may split
    owners           move their rows by the last `splits`, and count: `fedloom.trees.histograms`
    answer(hist)     of the sums over all owners: chooses a split for each node by
                     `fedloom.trees.splits`, makes two children of each node that gains, and asks
                     for the next level

Who calls it is the server of a method over owners (`methods.tables.steps.grow`), or a loop over
rows that are all in one place (`forest`, `boosting`). A histogram has S statistics, such as G, H
and rows, in N cells: the bins of all columns of the first node, then those of the second, and so
on. Statistics are integers, so that a child's sums are exactly its parent's less its sibling's.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedloom.trees.bins import Bins
from fedloom.trees.histograms import move
from fedloom.trees.model import Trees
from fedloom.trees.splits import Criterion, best


@dataclass(frozen=True)
class Splits:
    """The nodes that were split.

    Attributes:
        node: (s,) int64, ascending.
        tree: (s,) int64.
        column: (s,) int64.
        left: (s, B) bool, the bins that go left.
        child: (s,) int64 the left child; the right one has the next number.
    """

    node: np.ndarray
    tree: np.ndarray
    column: np.ndarray
    left: np.ndarray
    child: np.ndarray

    def move(self, node: np.ndarray, bins: np.ndarray) -> None:
        """Move rows to the children, in place: `node` (T, n) in each tree, of rows with bins (n,
        F).
        """
        move(node, bins, self.node, self.tree, self.column, self.left, self.child)


class Growth:
    """T trees that grow at once, level by level. Nodes 0 to T - 1 are the roots; two children have
    successive numbers.

    Args:
        trees: T.
        layout: the agreed bins.
        criterion: what splits are judged by.
        depth: the most splits above a leaf.
        min_rows: the least number of rows of a child.
        draw: draws the columns (m, k) that m nodes may split; None for all columns. Then of two
            children only one is asked for, as the other's sums are the parent's less its own.

    Attributes:
        asked: (m,) int64 nodes whose histograms are needed next, ascending; empty when the trees
            are grown.
        columns: (m, k) the columns of each asked node.
        splits: the last level's.
        gains: (F,) the sum of the gains of all splits by each column.
    """

    def __init__(
        self,
        trees: int,
        layout: Bins,
        criterion: Criterion,
        *,
        depth: int,
        min_rows: int,
        draw: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self._layout = layout
        self._criterion = criterion
        self._min_rows = min_rows
        self._draw = draw
        self._levels_left, self._trees = depth, trees
        width = int(layout.widths.max())

        # Of all nodes so far, by their number: the tree, the column that they look at (-1 for a
        # leaf), the bins (B,) that go left, and the left child (0 for a leaf).
        self._tree, self._feature = np.arange(trees), np.full(trees, -1)
        self._goes_left, self._child = np.zeros((trees, width), bool), np.zeros(trees, np.int64)
        self._sums: np.ndarray | None = None  # (S, nodes), known from the first answer on

        # Without drawn columns one child of each pair is asked for. Of the other one, which is not,
        # the number (m,), and of their parent the histograms (S, m, cells).
        self._sibling = np.empty(0, np.int64)
        self._above: np.ndarray | None = None
        self.splits = Splits(
            *(np.empty(0, np.int64),) * 3, np.empty((0, width), bool), np.empty(0, np.int64)
        )
        self.gains = np.zeros(len(layout.edges))
        self._ask(np.arange(trees))

    @property
    def tree(self) -> np.ndarray:
        """(m,) the tree of each asked node."""
        trees: np.ndarray = self._tree[self.asked]
        return trees

    @property
    def draws(self) -> bool:
        """Whether the columns of a node are drawn."""
        return self._draw is not None

    @property
    def sizes(self) -> np.ndarray:
        """(m,) the bins of each asked node's columns, all together."""
        sizes: np.ndarray = self._layout.widths[self.columns].sum(1)
        return sizes

    @property
    def bits(self) -> np.ndarray:
        """(m,) uint8 the bits of the number of rows in each asked node, 31 for roots, whose rows
        are not known.
        """
        if self._sums is None:
            return np.full(len(self.asked), 31, np.uint8)
        bits: np.ndarray = np.frexp(self._criterion.rows(self._sums[:, self.asked]))[1].astype(
            np.uint8
        )
        return bits

    def answer(self, hist: np.ndarray) -> None:
        """Take the summed histograms (S, N) of the asked nodes, one node's bins after the other's,
        and split.
        """
        nodes, columns, k = self.asked, self.columns, self.columns.shape[1]

        # The roots' own sums (S, T) are known from the first histograms alone: every row has one
        # bin in each column, so that those of a node's first column add up to the node. Later nodes
        # get theirs from the split that made them.
        if self._sums is None:
            ends = self._layout.widths[columns[:, 0]]
            sizes = self._layout.widths[columns].sum(1)
            first = np.cumsum(sizes) - sizes
            running = np.concatenate([np.zeros((len(hist), 1), np.int64), hist.cumsum(1)], axis=1)
            self._sums = running[:, first + ends] - running[:, first]

        # The histograms of the siblings, which nobody sent: those of the parents less the answer.
        # All nodes have all columns here, hence equally many cells. `hist` has the asked nodes
        # first, then their siblings; nodes must ascend (see `Splits`), so `order` sorts them.
        order = np.arange(len(nodes))
        if self._above is not None:
            own = hist.reshape(len(hist), len(nodes), -1)
            both = np.empty((len(hist), 2 * len(nodes), own.shape[2]), np.int64)
            both[:, : len(nodes)] = own
            np.subtract(self._above, own, out=both[:, len(nodes) :])
            nodes, hist = np.concatenate([nodes, self._sibling]), both.reshape(len(hist), -1)
            order = np.argsort(nodes)
            nodes, columns = nodes[order], np.broadcast_to(columns[:1], (len(nodes), k))

        # Split each node that gains; the others stay leaves. `best` follows the order of `hist`,
        # `taken` brings its splits into that of `nodes`.
        found = best(hist, columns, self._layout, self._criterion, self._min_rows).taken(order)
        gains = found.gain > 0
        split, of_left = nodes[gains], found.sums[:, gains]
        np.add.at(self.gains, found.column[gains], found.gain[gains])  # a column may occur twice
        child = len(self._tree) + 2 * np.arange(len(split))  # new nodes come after all others
        self.splits = Splits(
            split, self._tree[split], found.column[gains], found.left[gains], child
        )
        self._feature[split], self._goes_left[split], self._child[split] = (
            found.column[gains],
            found.left[gains],
            child,
        )

        # Add the children, leaves as yet: left and right of the first split, of the second, …
        pairs = np.stack([of_left, self._sums[:, split] - of_left], axis=2)
        self._sums = np.concatenate([self._sums, pairs.reshape(len(of_left), -1)], axis=1)
        added = 2 * len(split)
        self._tree = np.concatenate([self._tree, np.repeat(self._tree[split], 2)])
        self._feature = np.concatenate([self._feature, np.full(added, -1)])
        self._goes_left = np.concatenate(
            [self._goes_left, np.zeros((added, self._goes_left.shape[1]), bool)]
        )
        self._child = np.concatenate([self._child, np.zeros(added, np.int64)])

        # Ask for the next level. A node with fewer than twice the least rows has no split.
        self._levels_left -= 1
        rows = self._criterion.rows(self._sums)
        if self._levels_left == 0:
            self._ask(np.empty(0, np.int64))
        elif self._draw is not None:  # two children have different columns: both are asked for
            children = (child[:, None] + np.arange(2)).ravel()
            self._ask(children[rows[children] >= 2 * self._min_rows])
        else:
            # Owners count the rows of the smaller child, which is less work. A pair is kept if the
            # larger one, whose sums follow from the smaller one's, may still be split.
            small = child + (rows[child + 1] < rows[child])
            large = 2 * child + 1 - small  # the other one of child and child + 1
            keep = rows[large] >= 2 * self._min_rows
            self._sibling = large[keep]
            self._above = hist.reshape(len(hist), len(nodes), -1)[:, order[gains][keep]]
            self._ask(small[keep])

    def _ask(self, nodes: np.ndarray) -> None:
        self.asked = nodes
        every = np.arange(len(self._layout.edges))
        self.columns = (
            np.broadcast_to(every, (len(nodes), len(every)))
            if self._draw is None
            else self._draw(len(nodes))
        )

    @property
    def places(self) -> np.ndarray:
        """(nodes,) int64 the number of each node in `grown`, where each tree's nodes are side by
        side.
        """
        places = np.empty(len(self._tree), np.int64)
        places[np.argsort(self._tree, kind="stable")] = np.arange(len(places))
        return places

    def grown(self, value: Callable[[np.ndarray], np.ndarray]) -> Trees:
        """The trees, with the values (nodes, V) int64 of leaves from the statistics (S, nodes) of
        all nodes.
        """
        assert self._sums is not None
        # Nodes are numbered by level here, over all trees; in `Trees` each tree's are side by side.
        places, order = self.places, np.argsort(self._tree, kind="stable")
        return Trees(
            root=places[: self._trees],
            feature=self._feature[order].astype(np.int16),
            left=np.packbits(self._goes_left[order], axis=1),
            child=np.where(self._feature < 0, 0, places[self._child])[order].astype(np.int32),
            value=value(self._sums)[order],
        )
