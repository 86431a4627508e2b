"""Statistics of repeated runs, and the scale of columns of numbers."""

from collections.abc import Sequence

import numpy as np

_LEAST = float(np.nextafter(0, 1))
_ROUNDED = 1e-13  # of the largest number: numbers that are computed in other orders differ by less


def confidence_interval(
    values: Sequence[float], most: float = np.inf
) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean (Student's t), clipped to ±`most`; None below two
    values.
    """
    if len(values) < 2:
        return None
    from scipy.stats import t

    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return max(-most, mean - half), min(most, mean + half)


def constant(x: np.ndarray) -> np.ndarray:
    """(F,) whether the numbers of each column of x (n, F), n >= 1, are equal or differ by rounding
    alone. Whole numbers are never rounded. Of x (n,) the answer has no dimension.
    """
    low, high = x.min(axis=0), x.max(axis=0)
    largest = np.maximum(np.abs(low), np.abs(high))
    rounded = ~(x == np.floor(x)).all(axis=0) & (largest < np.inf)
    with np.errstate(over="ignore", invalid="ignore"):  # of infinite numbers
        near: np.ndarray = rounded & (high - low <= largest * _ROUNDED)
    found: np.ndarray = near | (low == high)
    return found


def deviations(x: np.ndarray) -> np.ndarray:
    """(F,) the s.d. of each column of numbers x (n, F), n >= 1; 1 where it is `constant`. The s.d.
    of equal numbers is often not 0: of 300 times 0.1 it is 1e-16. Of x (n,) the answer has no
    dimension.
    """
    same = constant(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        spread = x.std(axis=0)
        lost = ~same & ~((spread > 0) & (spread < np.inf))
        if lost.any():  # squares of numbers such as 1e-200 and 1e200 are 0 and infinite
            largest = np.where(lost, np.abs(x).max(axis=0), 1.0)
            spread = np.where(lost, np.maximum((x / largest).std(axis=0) * largest, _LEAST), spread)
    found: np.ndarray = np.where(same, x.dtype.type(1), spread)
    return found
