"""Which rows a trial predicts by models of which others: repeats of folds, or windows of time."""

from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.experiment.trial.owners import Owners

FOLDS = 4
"""Folds of a repeat."""
WINDOWS = 10
"""Windows over the later half of all times, at most."""
BLOCKS = 100
"""Blocks of time over the later half, by which the correlation of owners' errors is estimated.
Fewer blocks estimate it worse; more miss that days in a row are alike.
"""
WINDOW_ROWS = 10
"""Rows of an owner of median size in a window of time, at least."""


@dataclass(frozen=True, eq=False)
class Fold:
    """Row numbers of each owner, for training and to predict; and the seed of weights
    and batches.
    """

    seed: int
    train: list[np.ndarray]
    test: list[np.ndarray]


def draw_folds(owners: Owners, seed: int, repeat: int) -> np.ndarray:
    """The fold (n,) of each row in this repeat: a unit, or a share of each class of each owner, is
    in one fold.

    In time, the number of the window, the same points in time for all owners; -1 for rows of the
    earlier half, which are for training alone.
    """
    if owners.order is not None:
        return _windows(owners)
    folds = np.full(len(owners.owner), -1)
    for i in range(len(owners.names)):
        rows, rng = owners.rows(i), stream(seed, "trial.folds", repeat, i)
        if owners.unit is None:
            folds[rows] = by_class(owners.data.y[rows], rng)
            continue
        # an earlier owner may have rows of the same unit
        new = np.unique(owners.unit[rows[folds[rows] < 0]])
        for unit, fold in zip(new, rng.permutation(len(new)) % FOLDS, strict=True):
            folds[owners.unit == unit] = fold
    return folds if owners.copies is None else of_first(folds, owners.copies)


def of_first(folds: np.ndarray, copies: np.ndarray) -> np.ndarray:
    """(n,) the fold of the first of each row's copies."""
    _, first, place = np.unique(copies, return_index=True, return_inverse=True)
    found: np.ndarray = folds[first[place.reshape(-1)]]
    return found


def by_class(y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(n,) folds, each with its share of each class."""
    order, folds = rng.permutation(len(y)), np.zeros(len(y), np.int64)
    folds[order[np.argsort(y[order], kind="stable")]] = (
        np.arange(len(y)) + rng.integers(FOLDS)
    ) % FOLDS
    return folds


def by_unit(unit: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(n,) folds, rows of one unit in one."""
    names, place = np.unique(unit, return_inverse=True)
    folds: np.ndarray = (rng.permutation(len(names)) % FOLDS)[place.reshape(-1)]
    return folds


def _windows(owners: Owners) -> np.ndarray:
    assert owners.order is not None
    last, order = int(owners.order.max()) + 1, owners.order
    if owners.copies is not None:  # a copy trains no model that is tested on a later one
        latest = np.zeros(int(owners.copies.max()) + 1, np.int64)
        np.maximum.at(latest, owners.copies, order)
        order = latest[owners.copies]
    count = windows(float(np.median(np.bincount(owners.owner))), last)
    cuts = np.linspace(last / 2, last, count + 1)
    return np.searchsorted(cuts, order, side="right") - 1


def blocks(order: np.ndarray) -> np.ndarray:
    """(n,) the block of each place in time, of `BLOCKS` over the later half."""
    last = int(order.max()) + 1
    found: np.ndarray = order * (2 * BLOCKS) // last
    return found


def windows(rows: float, times: int) -> int:
    """The number of windows of time for an owner of median size with so many rows, at so many
    times.
    """
    return int(np.clip(rows / 2 / WINDOW_ROWS, 2, min(WINDOWS, max(2, times // 2))))


def split(owners: Owners, folds: np.ndarray, k: int, seed: int) -> Fold:
    """The rows to train and to predict for fold k. In time, all earlier rows train.

    Raises:
        DataError: an owner has no row to train on.
    """
    train = folds < k if owners.order is not None else folds != k
    fold = Fold(seed, [], [])
    for i, name in enumerate(owners.names):
        rows = owners.rows(i)
        fold.train.append(rows[train[rows]])
        fold.test.append(rows[folds[rows] == k])
        if not len(fold.train[-1]):
            unit = "unit" if owners.unit is not None else "time"
            raise DataError(
                f"Owner {name!r} has rows of a single {unit}: it cannot be tried. Drop it, or "
                "add rows."
            )
    return fold
