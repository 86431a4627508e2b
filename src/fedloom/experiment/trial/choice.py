"""The choice of one way to train among candidates, and of owners' weights, by rows that are not scored with it."""

import numpy as np

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The weights of an owner's own model beside the model of all, from which each owner's is chosen."""
BORROWED = 50
"""Rows of all owners that count beside an owner's own when its weight is chosen."""


def choose(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """For each fold of each repeat, the candidate with the best mean score on the other folds of that repeat, over all
    owners: the rows that are scored never choose, and the choice hardly varies. The first of equal ones.

    Args:
        scores: (M, C, K, N) of M candidates in C repeats of K folds for N owners; nan where undefined.
        weights: (N,) of the owners.

    Returns:
        (C, K) int64 numbers of candidates.
    """
    known = np.isfinite(scores)
    weight = np.where(known, weights, 0.0)
    total, count = (np.where(known, scores, 0.0) * weight).sum(3), weight.sum(3)
    others, number = total.sum(2, keepdims=True) - total, count.sum(2, keepdims=True) - count
    chosen: np.ndarray = np.where(number > 0, others / np.maximum(number, 1e-12), -np.inf).argmax(0)
    return chosen


def best(scores: np.ndarray, weights: np.ndarray) -> int:
    """The number of the candidate with the best mean score on all folds; the first of equal ones. Arguments as for
    `choose`."""
    known = np.isfinite(scores)
    weight = np.where(known, weights, 0.0)
    total, count = (np.where(known, scores, 0.0) * weight).sum((1, 2, 3)), weight.sum((1, 2, 3))
    return int(np.where(count > 0, total / np.maximum(count, 1e-12), -np.inf).argmax())


def personal(losses: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each fold of each repeat, each owner's weight of its own model: the one of least loss on the owner's rows of
    the other folds, and on `BORROWED` rows at the mean loss of all owners. Joining then costs an owner little whose
    rows are unlike the others'.

    Args:
        losses: (W, C, K, N) the sum of the rows' losses by each of `WEIGHTS` in C repeats of K folds for N owners.
        rows: (C, K, N) their number.

    Returns:
        (C, K, N) weights for the folds, and (N,) by all rows.
    """
    others, count = losses.sum(2, keepdims=True) - losses, rows.sum(1, keepdims=True) - rows
    of_fold = _least(others, count)
    return of_fold, _least(losses.sum((1, 2)), rows.sum((0, 1)))


def _least(losses: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The weight (..., N) of least loss, from sums (W, ..., N) over rows (..., N)."""
    common = losses.sum(-1, keepdims=True) / np.maximum(rows.sum(-1, keepdims=True), 1)
    found: np.ndarray = np.array(WEIGHTS)[(losses + BORROWED * common).argmin(0)]
    return found
