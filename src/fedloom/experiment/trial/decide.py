"""Decisions from repeated splits: whether an owner gains by federating, with intervals that do not overstate it.

The splits of one table share rows, so their differences are not independent: the ordinary variance of their mean is too
small. The corrected resampled t statistic replaces 1/R by 1/R + n_test / n_train (C. Nadeau and Y. Bengio, "Inference
for the Generalization Error", Machine Learning 52, 2003). With several owners some would seem to gain by chance, so
decisions control the false discovery rate (Y. Benjamini and Y. Hochberg, JRSS B 57, 1995): of the owners that are
advised to join, a share of at most `ALPHA` is expected to gain nothing.

Joining has a price, so it needs an owner's own evidence. Staying alone has none, and a federation exists only if others
join: an owner whose own rows leave it open stays alone if the mean gain over all owners is below the smallest
worthwhile gain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Decision: TypeAlias = Literal["join", "alone", "undecided"]
ALPHA = 0.025
"""One-sided error rate of a decision, see above. Intervals cover 95 %, each on its own."""
FEWEST = 3
"""Splits below which nothing is decided."""
MOST_SPLITS, MOST_ROWS = 1000, 100.0
"""Beyond so many splits, or so many times the rows, "more" is no advice."""


@dataclass(frozen=True)
class Gain:
    """A mean paired difference over R splits.

    Attributes:
        mean: of the R differences, federated minus alone.
        low, high: the 95 % interval of the corrected resampled t statistic; infinite below `FEWEST` splits.
        error: its standard error.
        splits: R.
        ratio: test rows per training row.
    """

    mean: float
    low: float
    high: float
    error: float
    splits: int
    ratio: float


@dataclass(frozen=True)
class OwnerVerdict:
    """The decision for one owner.

    Attributes:
        decision: "join" if the gain is above 0; "alone" if it, or the mean gain over all owners, is below the smallest
            gain that is worth it.
        by: whether the owner's own rows decided, or all owners together; "" if undecided.
        p_join, p_alone: one-sided p-values of the two, adjusted for the number of owners.
        more_splits: number of splits that would probably decide; None if decided, or if more splits would not.
        more_rows: number of times as many rows that would probably decide; None if decided, or if beyond `MOST_ROWS`.
    """

    decision: Decision
    by: Literal["own", "all", ""]
    p_join: float
    p_alone: float
    more_splits: int | None = None
    more_rows: float | None = None


def gain(differences: Sequence[float], ratio: float) -> Gain:
    """The mean of paired differences over splits of the same rows, with its corrected interval.

    Args:
        differences: (R,) federated minus alone; nan where a split could not be scored.
        ratio: test rows per training row, n_test / n_train.
    """
    from scipy import stats  # slow to import

    known = np.asarray(differences, dtype=float)
    known = known[np.isfinite(known)]
    count = len(known)
    mean = float(known.mean()) if count else 0.0
    if count < FEWEST:
        return Gain(mean, -math.inf, math.inf, math.inf, count, ratio)
    error = float(known.std(ddof=1)) * math.sqrt(1 / count + ratio)
    half = float(stats.t.ppf(1 - ALPHA, count - 1)) * error
    return Gain(mean, mean - half, mean + half, error, count, ratio)


def tail(value: float, found: Gain) -> float:
    """The one-sided p-value of a gain above `value`; 1 minus it is that of a gain below."""
    from scipy import stats

    if found.splits < FEWEST:
        return 0.5
    if found.error == 0:
        return 0.5 if found.mean == value else float(found.mean < value)
    return float(stats.t.sf((found.mean - value) / found.error, found.splits - 1))


def decide_owners(gains: Sequence[Gain], worth: float, common: Gain) -> list[OwnerVerdict]:
    """The verdict for each owner.

    Args:
        gains: of all owners.
        worth: the smallest gain that is worth federating for, at least 0. At 0, "alone" is decided only if federating
            harms.
        common: the mean gain over owners.
    """
    from scipy import stats

    joins = stats.false_discovery_control([tail(0.0, one) for one in gains]).tolist()
    stays = stats.false_discovery_control([_below(worth, one) for one in gains]).tolist()
    nobody = _below(worth, common) <= ALPHA
    verdicts = []
    for one, join, alone in zip(gains, joins, stays, strict=True):
        if join <= ALPHA and one.splits >= FEWEST:
            verdicts.append(OwnerVerdict("join", "own", join, alone))
        elif alone <= ALPHA and one.splits >= FEWEST:
            verdicts.append(OwnerVerdict("alone", "own", join, alone))
        elif nobody and not one.low > worth:
            verdicts.append(OwnerVerdict("alone", "all", join, alone))
        else:
            verdicts.append(OwnerVerdict("undecided", "", join, alone, *_more(one, worth)))
    return verdicts


def _below(worth: float, found: Gain) -> float:
    """The one-sided p-value of a gain below `worth`."""
    return 1 - tail(worth, found) if found.splits >= FEWEST else 0.5


def _more(one: Gain, worth: float) -> tuple[int | None, float | None]:
    """Splits, and else times as many rows, with which a mean and deviation as found would decide."""
    from scipy import stats

    if one.splits < FEWEST:
        return 10, None
    distance = max(one.mean, worth - one.mean)
    level = 1 - ALPHA
    deviation = one.error / math.sqrt(1 / one.splits + one.ratio)
    if distance <= 0 or deviation == 0:
        return None, None
    for splits in (*range(one.splits + 1, 60), *range(60, MOST_SPLITS, 20)):
        if stats.t.ppf(level, splits - 1) * deviation * math.sqrt(1 / splits + one.ratio) < distance:
            return splits, None
    # The deviation of a difference falls with the root of the number of test rows.
    rows = (stats.norm.ppf(level) * deviation * math.sqrt(one.ratio) / distance) ** 2
    return None, rows if rows <= MOST_ROWS else None
