"""The choice of one way to train among candidates, and of owners' weights, by rows that are not
scored with it.
"""

import numpy as np

from fedloom.experiment.trial.contributions import contributions
from fedloom.experiment.trial.evidence import difference

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The weights of an owner's own model beside the model of all, from which each owner's is chosen.
"""
LIKELY = 0.8
"""The probability of a gain from which an owner does not predict by its own model alone."""
AGAINST = 0.4
"""The p-value of a gain of 0 or more by own rows, below which an owner does not take a weight for
what others gain.
"""
CAUTION = 0.5
"""How many standard deviations of an expected gain are taken off before gains of weights are
compared: weights far from an owner's own model gain most by chance.
"""
BORROWED = 40
"""Units of all owners that count in the variance of an owner's gain."""
PAIRS = 1.3
"""How much larger a variance is than that of rows, as rows both train and test: see `evidence`."""


def best(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The number (...) of the candidate with the best mean score over all owners and folds; the
    first of equal ones.

    A fold of a later repeat chooses by the first repeat, on the rows that are not in it: the rows
    that are scored never choose, and later repeats train the chosen candidates alone.

    Args:
        scores: (M, ..., K, N) of M candidates in K folds for N owners; nan where undefined.
        weights: (N,) of the owners.
    """
    known = np.isfinite(scores)
    weight = np.where(known, weights, 0.0)
    total, count = (np.where(known, scores, 0.0) * weight).sum((-2, -1)), weight.sum((-2, -1))
    found: np.ndarray = np.where(count > 0, total / np.maximum(count, 1e-12), -np.inf).argmax(0)
    return found


def personal(gains: np.ndarray, spread: np.ndarray, units: np.ndarray) -> np.ndarray:
    """Each owner's weight of its own model: that of the largest expected gain over training alone,
    less its `CAUTION`, among those that gain with probability `LIKELY` and that its own rows are
    not `AGAINST`; 1 if there is none. So joining costs an owner little whose rows are unlike the
    others'.

    What to expect: an owner's gain varies about the mean of all owners with a spread that their
    gains tell (R. DerSimonian, N. Laird, Controlled Clinical Trials 7, 1986). The score itself
    decides. A model that tells nothing lowers the log loss of one that is too sure of itself, but
    ranks no better.

    Args:
        gains, spread: (W - 1, ..., N) of all `WEIGHTS` but the last: see `gains_of_weights`.
        units: (..., N).

    Returns:
        (..., N).
    """
    from scipy.special import ndtr  # slow to import

    # All arrays are (W - 1, ..., N), and means are over the N owners, for each weight. An unknown
    # gain has an infinite variance, and so no part in a mean.
    known = np.isfinite(gains)
    gain = np.where(known, gains, 0.0)
    variance = np.where(known, _variances(known, spread, units), np.inf)

    def mean(precision: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = np.maximum(precision.sum(-1, keepdims=True), 1e-30)
        return (precision * gain).sum(-1, keepdims=True) / total, total

    # The variance of true gains between owners: by how much gains differ more than their own
    # variances explain, of which the expectation is the number of known gains less 1.
    precision = 1 / variance
    middle, total = mean(precision)
    excess = (
        (precision * np.square(gain - middle)).sum(-1, keepdims=True)
        - known.sum(-1, keepdims=True)
        + 1
    )
    between = np.maximum(
        excess / np.maximum(total - np.square(precision).sum(-1, keepdims=True) / total, 1e-12), 0.0
    )

    # each owner's expected gain: its own, drawn to the mean of all the more, the less its rows tell
    middle, total = mean(1 / (variance + between))
    own = between / (variance + between)
    expected = own * gain + (1 - own) * middle
    deviation = np.sqrt((1 - own) * between + np.square(1 - own) / total)

    # the weight with the largest expected gain, among those that are safe for this owner
    likely = (ndtr(expected / np.maximum(deviation, 1e-12)) >= LIKELY) & (
        ndtr(gain / np.sqrt(variance)) > AGAINST
    )
    best = np.where(likely, expected - CAUTION * deviation, -np.inf).argmax(0)
    found: np.ndarray = np.where(likely.any(0), np.array(WEIGHTS)[best], 1.0)
    return found


def _variances(known: np.ndarray, spread: np.ndarray, units: np.ndarray) -> np.ndarray:
    """The variances (W - 1, ..., N) of gains. That of a unit is shrunk to the mean over owners,
    with the weight of `BORROWED` units.
    """
    mean = np.where(known, spread, 0.0).sum(-1, keepdims=True) / np.maximum(
        known.sum(-1, keepdims=True), 1
    )
    shrunk = (BORROWED * mean + units * spread) / (BORROWED + units)
    found: np.ndarray = np.maximum(PAIRS * shrunk / np.maximum(units, 1), 1e-12)
    return found


def gains_of_weights(
    metric: str,
    y: np.ndarray,
    alone: np.ndarray,
    joint: np.ndarray,
    folds: np.ndarray,
    *,
    unit: np.ndarray | None = None,
    priors: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, int]:
    """What an owner's rows say about its gain over training alone by each of `WEIGHTS` but the
    last.

    Args:
        metric, y, folds, priors: see `contributions`.
        alone, joint: (n, K) or (n,) predictions of the two models that are mixed.
        unit: (n,) rows of one value belong together.

    Returns:
        gains (W - 1,), nan where they are not defined; the variances (W - 1,) of a unit's
        contribution, times the squared number of units; and that number.
    """
    if not len(y):
        return np.full(len(WEIGHTS) - 1, np.nan), np.full(len(WEIGHTS) - 1, np.nan), 0
    own = contributions(metric, y, alone, folds, priors)
    mixes = [
        contributions(metric, y, (1 - w) * joint + w * alone, folds, priors) for w in WEIGHTS[:-1]
    ]
    found = [difference(metric, own, mix) for mix in mixes]
    place = (
        np.arange(len(y)) if unit is None else np.unique(unit, return_inverse=True)[1].reshape(-1)
    )
    units = int(place.max()) + 1
    spread = [units * float(np.square(np.bincount(place, parts)).sum()) for _, parts in found]
    return np.array([gain for gain, _ in found]), np.array(spread), units
