"""Scores as means of rows' contributions, so that one variance serves every score.

A score S of n rows is written S - truth ≈ Σ_j u_j, where u_j is the contribution of row j, its
influence function divided by n. The contributions of a score sum to 0, and those of a difference
are the differences. For the AUC they are the placements of E. R. DeLong, D. M. DeLong and D. L.
Clarke-Pearson (Biometrics 44, 1988).

Higher is better for every score here: losses and errors are negated.
"""

from typing import Final

import numpy as np

CLASS_SCORES: Final = ("auc", "balanced accuracy", "accuracy", "log loss", "brier")
"""Scores of probabilities (n, K) of classes."""
NUMBER_SCORES: Final = ("rmse", "mae", "r2")
"""Scores of predicted numbers (n,)."""
LEAST_PROBABILITY: Final = 1e-3
"""Probabilities below count as this in the log loss, so that one row cannot decide."""
TINY: Final = 1e-12


def contributions(
    metric: str,
    y: np.ndarray,
    predicted: np.ndarray,
    folds: np.ndarray,
    priors: np.ndarray | None = None,
) -> tuple[float, np.ndarray]:
    """The score and the contribution (n,) of each row.

    Args:
        metric: one of `CLASS_SCORES` or `NUMBER_SCORES`.
        y: (n,) classes as integers, or numbers.
        predicted: (n, K) probabilities, or (n,) numbers, of models that did not see the row.
        folds: (n,) the fold of each row. Probabilities of different models are not compared, so the
            AUC is taken within folds.
        priors: (n, K) shares of the classes in each row's training rows; balanced accuracy predicts
            the class whose
            probability exceeds its share most. None: the most probable class.

    Returns:
        A score of nan, and zeros, where the score is not defined, as for the AUC of rows of one
        class.
    """
    if metric == "auc":
        return _area(y, predicted, folds)
    if metric == "balanced accuracy":
        return _balanced(y, (predicted if priors is None else predicted / priors).argmax(1) == y)
    if metric == "accuracy":
        return _mean((predicted.argmax(1) == y).astype(float))
    if metric == "log loss":
        return _mean(np.log(np.clip(predicted[np.arange(len(y)), y], LEAST_PROBABILITY, 1.0)))
    if metric == "brier":
        return _mean(-np.square(predicted - np.eye(predicted.shape[1])[y]).sum(1))
    if metric == "mae":
        return _mean(-np.abs(predicted - y))
    squared = np.square(predicted - y)
    if metric == "rmse":
        root = max(float(np.sqrt(squared.mean())), TINY)
        return -root, (squared.mean() - squared) / (2 * root * len(y))
    spread = np.square(y - y.mean())
    whole = max(float(spread.mean()), TINY)
    share = squared.mean() / whole
    return 1 - share, (squared.mean() - squared + share * (spread - whole)) / (whole * len(y))


def scores_of(
    metric: str, y: np.ndarray, predicted: np.ndarray, priors: np.ndarray | None = None
) -> np.ndarray:
    """The scores (M,) of M models on rows of one fold, as `contributions` has them; predicted (M,
    n, ...).
    """
    if metric != "auc":
        one_fold = np.zeros(len(y))
        return np.array([contributions(metric, y, one, one_fold, priors)[0] for one in predicted])
    classes = (1,) if predicted.shape[2] == 2 else range(predicted.shape[2])
    areas = [_areas(y == k, predicted[:, :, k]) for k in classes if 0 < (y == k).sum() < len(y)]
    found: np.ndarray = np.mean(areas, axis=0) if areas else np.full(len(predicted), np.nan)
    return found


def told(predicted: np.ndarray) -> np.ndarray:
    """Probabilities (..., K) as they are; numbers (..., 1) as (...)."""
    return predicted[..., 0] if predicted.shape[-1] == 1 else predicted


def _areas(positive: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The areas (M,) by the ranks of values (M, n); ties have the mean of their ranks."""
    from scipy import stats  # slow to import

    ahead = stats.rankdata(values, axis=1)[:, positive].sum(1)
    count = int(positive.sum())
    found: np.ndarray = (ahead - count * (count + 1) / 2) / (count * (len(positive) - count))
    return found


def _mean(values: np.ndarray) -> tuple[float, np.ndarray]:
    return float(values.mean()), (values - values.mean()) / len(values)


def _balanced(y: np.ndarray, right: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean over classes of the share of their rows that is right."""
    classes = np.unique(y)
    total, parts = 0.0, np.zeros(len(y))
    for k in classes:
        share, each = _mean(right[y == k].astype(float))
        total += share / len(classes)
        parts[y == k] = each / len(classes)
    return total, parts


def _area(y: np.ndarray, predicted: np.ndarray, folds: np.ndarray) -> tuple[float, np.ndarray]:
    """The mean over classes of the area of class against rest; of two classes both are equal."""
    classes = (1,) if predicted.shape[1] == 2 else range(predicted.shape[1])
    areas = [
        _one_area(y == k, predicted[:, k], folds) for k in classes if 0 < (y == k).sum() < len(y)
    ]
    areas = [(area, parts) for area, parts in areas if np.isfinite(area)]
    if not areas:
        return np.nan, np.zeros(len(y))
    return float(np.mean([area for area, _ in areas])), np.mean(
        [parts for _, parts in areas], axis=0
    )


def _one_area(
    positive: np.ndarray, values: np.ndarray, folds: np.ndarray
) -> tuple[float, np.ndarray]:
    """The area over pairs within a fold, and contributions from placements within folds.

    A row of class c whose fold holds m rows of the other class is in m pairs; its placement V is
    the share of them that it wins. The area is the mean of V over the rows of either class,
    weighted by m.
    """
    placed, pairs = _placements(positive, values, folds)
    total = pairs[positive].sum()
    if not total:
        return np.nan, np.zeros(len(values))
    area = float((pairs * placed)[positive].sum() / total)
    return area, pairs * (placed - area) / total


def _placements(
    positive: np.ndarray, values: np.ndarray, folds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The share (n,) of the rows of the other class in its fold that each row wins, ties as half,
    and their number (n,), from counts along all rows in the order of folds and values.
    """
    n, order = len(values), np.lexsort((values, folds))
    value, fold, own = values[order], folds[order], positive[order].astype(np.int64)
    before = np.zeros((2, n + 1), np.int64)  # rows of class 1, then of class 0, before each place
    np.cumsum([own, 1 - own], axis=1, out=before[:, 1:])
    new = np.ones(n, bool)
    new[1:] = fold[1:] != fold[:-1]
    start, end = _runs(new)
    least, count = before[own, start], before[own, end] - before[own, start]
    new[1:] |= value[1:] != value[:-1]
    first, last = _runs(new)
    below = (before[own, first] + before[own, last] - 2 * least) / np.maximum(2 * count, 1)
    placed, pairs = np.empty(n), np.empty(n)
    placed[order], pairs[order] = np.where(own == 1, below, 1 - below), count
    return placed, pairs


def _runs(new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first place (n,) of the run that each place is in, and the place (n,) behind its last, if
    runs begin where `new` (n,).
    """
    first = np.flatnonzero(new)
    run = np.cumsum(new) - 1
    return first[run], np.append(first[1:], len(new))[run]
