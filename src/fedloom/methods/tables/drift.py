"""What summed moments and counts tell of a column: mean, s.d., and drift between owners with its
p-value.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, sqrt

import numpy as np

UNIT = 2.0**-36
"""Of c²/n and of n (own mean - mean)²/s.d.², whose sums over owners are at most 2^26, the number of
rows.
"""


def spread(
    n: int, owners: int, total: Fraction, squares: Fraction, between: int
) -> tuple[float, ...]:
    """Mean, s.d. (of n - 1), η² between owners and the p-value of its F test; `between` is in
    `UNIT`s: see `cells`.
    """
    if not n:
        return (np.nan,) * 4
    apart = squares - total * total / n
    mean, sd = float(total / n), sqrt(max(apart, Fraction(0)) / (n - 1)) if n > 1 else np.nan
    if owners < 2 or n <= owners or apart <= 0:
        return mean, sd, np.nan, np.nan
    from scipy.stats import f

    share = min(between * UNIT / (n - 1), 1.0)
    statistic = share / max(1 - share, 1e-300) * (n - owners) / (owners - 1)
    return mean, sd, share, float(f.sf(statistic, owners - 1, n - owners))


def association(counts: Sequence[int], shares: Sequence[float], owners: int) -> tuple[float, float]:
    """Cramér's V of words and owners, and the p-value of the chi-squared test."""
    n, filled = sum(counts), sum(c > 0 for c in counts)
    if owners < 2 or filled < 2:
        return np.nan, np.nan
    from scipy.stats import chi2

    statistic = max(n * (sum(s / c for s, c in zip(shares, counts, strict=True) if c) - 1), 0.0)
    freedom = min(owners, filled) - 1
    return sqrt(min(statistic / n / freedom, 1)), float(
        chi2.sf(statistic, (owners - 1) * (filled - 1))
    )


def finite(x: float | None) -> float | None:
    """The number, None for what is not finite."""
    return x if x is not None and isfinite(x) else None
