"""Loops over rows, compiled by Numba if it is installed: the same integers as
`fedloom.trees.histograms` by NumPy.

Import it only for large work, as Numba takes a second to load. Its code is kept on disk between
processes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import numpy as np

Loop = TypeVar("Loop", bound=Callable[..., None])
INSTALLED = find_spec("numba") is not None


def njit(loop: Loop) -> Loop:
    """The loop, compiled when it first runs; as it is without Numba, as tests run it."""
    if not INSTALLED:
        return loop
    import numba

    compiled: Loop = numba.njit(cache=True, nogil=True)(loop)
    return compiled


@njit
def add_words(
    cells: np.ndarray,
    words: np.ndarray,
    node: np.ndarray,
    place: np.ndarray,
    width: int,
    out: np.ndarray,
) -> None:
    """Add the word (n,) of each row to its cells (n, F) in `out` (m * width,), at the place of its
    node (n,).

    `place` has that of each node, -1 for none; the nodes beyond it have none.
    """
    for i in range(len(node)):
        at = place[min(node[i], len(place) - 1)]
        if at >= 0:
            for f in range(cells.shape[1]):
                out[at * width + cells[i, f]] += words[i]


@njit
def add_classes(
    bins: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray,
    node: np.ndarray,
    place: np.ndarray,
    starts: np.ndarray,
    columns: np.ndarray,
    out: np.ndarray,
) -> None:
    """Add the weights (T, n) of rows to `out` (cells, K), by the class y (n,): at the bins (n, F)
    of the columns (m, k) of the nodes (T, n), each of which has its first cell in `starts` (m, k).
    """
    for t in range(len(node)):
        for i in range(len(y)):
            at = place[min(node[t, i], len(place) - 1)]
            if at >= 0 and weight[t, i] != 0:
                for j in range(columns.shape[1]):
                    out[starts[at, j] + bins[i, columns[at, j]], y[i]] += weight[t, i]


@njit
def move(
    node: np.ndarray, bins: np.ndarray, place: np.ndarray, column: np.ndarray, to: np.ndarray
) -> None:
    """Move rows from their node (n,) to the child `to` (s, B) of their bin, in place."""
    for i in range(len(node)):
        at = place[min(node[i], len(place) - 1)]
        if at >= 0:
            node[i] = to[at, bins[i, column[at]]]
