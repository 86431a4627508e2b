"""Trees whose splits are drawn without looking at rows, so that only their leaves can tell of a
row.
"""

import numpy as np

from fedloom.trees.bins import Bins
from fedloom.trees.model import Trees


def drawn(layout: Bins, trees: int, depth: int, rng: np.random.Generator) -> Trees:
    """Trees whose leaves have the value 0 (1,).

    A node looks at a column that has two bins or more left on its path, each alike; it cuts them
    anywhere, numbers in their order and words in a random one. Missing values go to either side.
    """
    width = int(layout.widths.max())
    known = np.arange(width) < layout.widths[:, None]
    known[:, 0] = False
    feature: list[int] = []
    left: list[np.ndarray] = []
    child: list[int] = []
    roots: list[int] = []
    for _ in range(trees):
        first = len(feature)
        roots.append(first)
        # of nodes in the order of their numbers
        open_: list[tuple[np.ndarray, int]] = [(known, depth)]
        for bins, levels in open_:
            able = np.flatnonzero(bins.sum(1) >= 2) if levels else np.empty(0, np.int64)
            goes = np.zeros(width, bool)
            if len(able):
                f = int(rng.choice(able))
                rest = np.flatnonzero(bins[f])
                if layout.category[f]:
                    rest = rng.permutation(rest)
                goes[rest[: rng.integers(1, len(rest))]] = True
                sides = []
                for side in (goes, ~goes):
                    part = bins.copy()
                    part[f] &= side
                    sides.append((part, levels - 1))
                goes[0] = rng.integers(2)
            feature.append(f if len(able) else -1)
            child.append(first + len(open_) if len(able) else 0)
            left.append(goes)
            if len(able):
                open_ += sides
    return Trees(
        root=np.array(roots, np.int32),
        feature=np.array(feature, np.int16),
        left=np.packbits(np.array(left), axis=1),
        child=np.array(child, np.int32),
        value=np.zeros((len(feature), 1), np.int64),
    )
