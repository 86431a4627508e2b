"""The choice of one way to train among candidates, by rows that it is not scored on."""

import numpy as np


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
