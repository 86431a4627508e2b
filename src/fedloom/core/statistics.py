"""Statistics of repeated runs."""

from collections.abc import Sequence

import numpy as np


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
