"""Scores of predictions on labeled rows, in NumPy.

Those of classes take the true classes `y` (n,), integers; most also take the probabilities `p` (n,
K). n must be positive.
"""

import numpy as np

from fedloom.core.statistics import constant

SCORED = ("auc", "balanced accuracy", "loss", "calibration error")
"""The names of `scored`, in its order."""
NUMBER_SCORED = ("mae", "r2")
"""The names of `number_scores` beside the root mean squared error."""


def scored(y: np.ndarray, p: np.ndarray) -> dict[str, float]:
    """The AUC, balanced accuracy, log loss and calibration error."""
    values = auc(y, p), balanced_accuracy(y, p.argmax(1)), log_loss(y, p), calibration_error(y, p)
    return dict(zip(SCORED, values, strict=True))


def auc(y: np.ndarray, p: np.ndarray) -> float:
    """Mean over the classes of the area under the ROC curve of class against rest; ties count half.

    Only classes that some rows have and some have not count. NaN if there is none, as when all rows
    have one class.
    """
    areas = []
    # of two classes both areas are equal
    for k in range(1, 2) if p.shape[1] == 2 else range(p.shape[1]):
        positive = y == k
        if 0 < (number := int(positive.sum())) < len(y):
            # Mann-Whitney: the mean rank of positive rows, where equal values share the mean of
            # their ranks.
            _, place, counts = np.unique(p[:, k], return_inverse=True, return_counts=True)
            ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
            areas.append(
                (ranks[positive].sum() - number * (number + 1) / 2) / (number * (len(y) - number))
            )
    return float(np.mean(areas)) if areas else float("nan")


def balanced_accuracy(y: np.ndarray, predicted: np.ndarray) -> float:
    """Mean over the classes that occur in y of the share of their rows that `predicted` (n,) has
    right.
    """
    return float(np.mean([(predicted[y == k] == k).mean() for k in np.unique(y)]))


def log_loss(y: np.ndarray, p: np.ndarray) -> float:
    """Mean of -log p of the true class, in nats. Probabilities below 1e-7 count as 1e-7: at most
    16.1.
    """
    true = p[np.arange(len(y)), y].astype(np.float64)
    return float(-np.log(np.maximum(true, 1e-7)).mean())


def calibration_error(y: np.ndarray, p: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: rows are divided by the probability of their most probable class
    into `bins` of equal width; the mean over rows of the difference, in their bin, of mean
    probability and share of right answers.

    0 is perfect; source: Guo et al. (2017), "On Calibration of Modern Neural Networks", ICML,
    equation 3.
    """
    confidence, right = p.max(axis=1).astype(np.float64), p.argmax(axis=1) == y
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    difference = np.bincount(place, confidence - right, minlength=bins)
    return float(np.abs(difference).sum() / len(y))


def number_scores(y: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """The root of the mean squared error and the mean absolute error, in the numbers' unit, and R²,
    of predictions (n,) of y (n,), n >= 1. R² is 0 for the mean of y, and NaN if all y are equal.
    """
    error = predicted.astype(np.float64) - y
    squared, spread = float(np.mean(error**2)), float(np.var(y))
    return {
        "rmse": float(np.sqrt(squared)),
        "mae": float(np.abs(error).mean()),
        "r2": 1 - squared / spread if not constant(y) else float("nan"),
    }


def chance_error(y: np.ndarray) -> float:
    """The root of the mean squared error of the best constant, the mean of y (n,): its s.d., in the
    numbers' unit.
    """
    return float(np.std(y))
