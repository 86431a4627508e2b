"""The choice of one way to train among candidates, and of owners' weights, by rows that are not scored with it."""

import numpy as np

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The weights of an owner's own model beside the model of all, from which each owner's is chosen."""
BORROWED = 50
"""Rows of all owners that count beside an owner's own when its weight is chosen."""


def best(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The number (...) of the candidate with the best mean score over all owners and folds; the first of equal ones.

    A fold of a later repeat chooses by the first repeat, on the rows that are not in it: the rows that are scored never
    choose, and later repeats train the chosen candidates alone.

    Args:
        scores: (M, ..., K, N) of M candidates in K folds for N owners; nan where undefined.
        weights: (N,) of the owners.
    """
    known = np.isfinite(scores)
    weight = np.where(known, weights, 0.0)
    total, count = (np.where(known, scores, 0.0) * weight).sum((-2, -1)), weight.sum((-2, -1))
    found: np.ndarray = np.where(count > 0, total / np.maximum(count, 1e-12), -np.inf).argmax(0)
    return found


def personal(losses: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each fold, each owner's weight of its own model: the one of least loss on the owner's rows of the other
    folds, and on `BORROWED` rows at the mean loss of all owners. Joining then costs an owner little whose rows are
    unlike the others'.

    Args:
        losses: (W, K, N) the sum of the rows' losses by each of `WEIGHTS` in K folds for N owners.
        rows: (K, N) their number.

    Returns:
        (K, N) weights for the folds, and (N,) by all rows.
    """
    of_fold = _least(losses.sum(1, keepdims=True) - losses, rows.sum(0) - rows)
    return of_fold, _least(losses.sum(1), rows.sum(0))


def _least(losses: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The weight (..., N) of least loss, from sums (W, ..., N) over rows (..., N)."""
    common = losses.sum(-1, keepdims=True) / np.maximum(rows.sum(-1, keepdims=True), 1)
    found: np.ndarray = np.array(WEIGHTS)[(losses + BORROWED * common).argmin(0)]
    return found
