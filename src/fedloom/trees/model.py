"""Trees as arrays, and their predictions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_AT_ONCE = 2**21
"""Pairs of a row and a tree that are in memory at once."""


@dataclass(frozen=True)
class Trees:
    """T trees over bins, each with its nodes side by side.

    Attributes:
        root: (T,) int32 the first node of each.
        feature: (m,) int16 the column that a node looks at; -1 for a leaf.
        left: (m, ceil(B / 8)) uint8 the bins that go left, one bit each, the first bin highest.
        child: (m,) int32 the left child; the right one is the next node.
        value: (m, V) int64 in steps of 2^-20; of a leaf.
    """

    root: np.ndarray
    feature: np.ndarray
    left: np.ndarray
    child: np.ndarray
    value: np.ndarray

    def __len__(self) -> int:
        return len(self.root)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.root.astype(np.int32))

    def after(self, first: int) -> "Trees":
        """The trees from number `first` on."""
        start = int(self.root[first]) if first < len(self.root) else len(self.feature)
        child = np.where(self.feature[start:] >= 0, self.child[start:] - start, 0).astype(np.int32)
        return Trees(
            self.root[first:] - start,
            self.feature[start:],
            self.left[start:],
            child,
            self.value[start:],
        )

    def before(self, end: int) -> "Trees":
        """The first `end` trees."""
        stop = int(self.root[end]) if end < len(self.root) else len(self.feature)
        return Trees(
            self.root[:end],
            self.feature[:stop],
            self.left[:stop],
            self.child[:stop],
            self.value[:stop],
        )

    def problem(self, columns: int, bins: int) -> str:
        """What is wrong with trees of unknown origin over this many columns and bins; "" if they
        can predict.
        """
        m = len(self.feature)
        inner, own = self.feature >= 0, np.arange(m)
        starts = self.root.astype(np.int64)
        if not len(starts) or starts[0] != 0 or (np.diff(starts) <= 0).any() or starts[-1] >= m:
            return f"roots must ascend from 0 to below {m}"
        if {len(self.left), len(self.child), len(self.value)} != {m} or (
            inner.any() and self.left.shape[1] * 8 < bins
        ):
            return f"all arrays must have {m} nodes, with a bit for each of {bins} bins"
        if (self.feature >= columns).any() or (self.feature < -1).any():
            return f"a node must look at a column from 0 to {columns - 1}, or at none"
        if (inner & ((self.child <= own) | (self.child >= m - 1))).any():
            return "children must come after their node"
        return ""

    def leaves(self, bins: np.ndarray) -> np.ndarray:
        """The leaf (T, n) int32 of each row of bins (n, F) uint8."""
        goes = np.unpackbits(self.left, axis=1).view(bool)
        n, width = len(bins), goes.shape[1]
        flat, sides = bins.ravel(), goes.ravel()
        node = np.repeat(self.root[:, None], n, axis=1)
        rows = np.broadcast_to(np.arange(n) * bins.shape[1], node.shape)
        open_ = np.arange(node.size)
        at, row = node.ravel(), rows.ravel()
        while True:
            feature = self.feature.take(at[open_])
            inner = feature >= 0
            open_, feature = open_[inner], feature[inner]
            if not len(open_):
                return at.reshape(node.shape)
            now = at[open_]
            to_left = sides.take(now.astype(np.int64) * width + flat.take(row[open_] + feature))
            at[open_] = self.child.take(now) + ~to_left

    def scores(self, bins: np.ndarray, outputs: int) -> np.ndarray:
        """The sums (outputs, n) int64 of the values of each row's leaves. If leaves have one value,
        tree t adds it to output t modulo `outputs`; else it adds one to each output.
        """
        total = np.zeros((outputs, len(bins)), np.int64)
        size = max(1, _AT_ONCE // max(1, len(self)))
        for first in range(0, len(bins), size):
            part = slice(first, first + size)
            leaf = self.leaves(bins[part])
            for t, at in enumerate(leaf):
                if self.value.shape[1] == 1:
                    total[t % outputs, part] += self.value[at, 0]
                else:
                    total[:, part] += self.value[at].T
        return total


def stumps(values: np.ndarray) -> Trees:
    """Trees of one leaf each, with these values (T,)."""
    T = len(values)
    return Trees(
        np.arange(T),
        np.full(T, -1, np.int16),
        np.zeros((T, 1), np.uint8),
        np.zeros(T, np.int32),
        values[:, None],
    )


def joined(parts: Sequence[Trees]) -> Trees:
    """The trees of all parts, in order."""
    sizes = [len(part.feature) for part in parts]
    starts = np.cumsum(sizes) - sizes
    feature, child = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("feature", "child")
    )
    left = np.zeros((len(feature), max(part.left.shape[1] for part in parts)), np.uint8)
    for part, start in zip(parts, starts.tolist(), strict=True):
        left[start : start + len(part.left), : part.left.shape[1]] = part.left
    return Trees(
        root=np.concatenate([part.root for part in parts])
        + np.repeat(starts, [len(part) for part in parts]),
        feature=feature,
        left=left,
        child=np.where(feature >= 0, child + np.repeat(starts, sizes), 0).astype(np.int32),
        value=np.concatenate([part.value for part in parts]),
    )
