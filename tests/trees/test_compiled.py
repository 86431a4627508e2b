"""The loops that Numba compiles give the integers of NumPy. Without Numba they run
here in Python.
"""

import numpy as np
import pytest

from fedloom.trees import compiled, histograms
from fedloom.trees.bins import Bins
from fedloom.trees.histograms import cells_of, class_histograms, gradient_histograms, packed

ROWS, TREES, COLUMNS = 60, 3, 4


def both(monkeypatch: pytest.MonkeyPatch, work):
    """What NumPy makes of it, and what the loops do."""
    monkeypatch.setattr(histograms, "_compiled", lambda: None)
    by_numpy = work()
    monkeypatch.setattr(histograms, "_compiled", lambda: compiled)
    monkeypatch.setattr(histograms, "MANY", 0)
    return by_numpy, work()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def bins(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 6, (ROWS, COLUMNS)).astype(np.uint8)


@pytest.fixture
def layout() -> Bins:
    return Bins(tuple(np.arange(4) for _ in range(COLUMNS)), np.zeros(COLUMNS, bool))


@pytest.fixture
def node(rng: np.random.Generator) -> np.ndarray:
    """Nodes 9 and 10 of the first tree, 11 and 12 of the second one, …; in each tree one node of
    another kind.
    """
    return (9 + 2 * np.arange(TREES)[:, None] + rng.integers(-1, 2, (TREES, ROWS))).astype(np.int32)


def test_sums_of_gradients(monkeypatch, rng, bins, layout, node) -> None:
    words = packed(rng.integers(-1024, 1025, (TREES, ROWS)), rng.integers(1, 257, (TREES, ROWS)))
    asked, tree = np.array([9, 10, 12, 13]), np.array([0, 0, 1, 2])
    monkeypatch.setattr(histograms, "BLOCK", 25)
    cells = cells_of(bins, layout)
    a, b = both(
        monkeypatch, lambda: gradient_histograms(cells, words, node, asked, tree, layout.cells)
    )
    assert a.any()
    assert a.dtype == b.dtype
    assert a.tolist() == b.tolist()


def test_sums_of_classes(monkeypatch, rng, bins, layout, node) -> None:
    y, weight = rng.integers(0, 3, ROWS), rng.poisson(1, (TREES, ROWS))
    asked, tree = np.array([9, 10, 12, 13]), np.array([0, 0, 1, 2])
    columns = np.array([[0, 2], [1, 3], [0, 1], [2, 3]])
    shared = (bins, y, weight, node, asked, tree, columns, layout.widths, 3)
    a, b = both(monkeypatch, lambda: class_histograms(*shared))
    assert a.any()
    assert a.dtype == b.dtype
    assert a.tolist() == b.tolist()


def test_rows_that_move(monkeypatch, rng, bins, node) -> None:
    split, tree, column = np.array([9, 12]), np.array([0, 1]), np.array([3, 0])
    left, child = rng.random((2, 6)) < 0.5, np.array([20, 22])

    def work() -> np.ndarray:
        moved = node.copy()
        histograms.move(moved, bins, split, tree, column, left, child)
        return moved

    a, b = both(monkeypatch, work)
    assert set(a.ravel()) >= {20, 21, 22, 23}
    assert a.tolist() == b.tolist()


def test_loops_are_loaded_for_much_work_alone(monkeypatch) -> None:
    monkeypatch.setattr(histograms, "_compiled", lambda: compiled)
    monkeypatch.setattr(histograms, "_seen", 0)
    assert histograms._loops(histograms.MANY - 1) is None
    assert histograms._loops(1) is compiled


def test_an_owner_without_rows_adds_zeros_after_many_rows_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(histograms, "_compiled", lambda: compiled)
    monkeypatch.setattr(histograms, "MANY", 0)
    none = np.zeros((1, 0), np.int64)
    asked, tree = np.zeros(1, np.int64), np.zeros(1, np.int64)
    found = histograms.gradient_histograms(
        np.zeros((0, 2), np.int32), none, none.astype(np.int32), asked, tree, 10
    )
    assert found.shape[1:] == (1, 10) and not found.any()
