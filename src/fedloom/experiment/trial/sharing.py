"""What all owners together say about each owner's gain.

    gain_i = f_i (a + τ z_i)        f_i = (n_i / n)^(-3/4)        z_i ~ N(0, 1)

n is the geometric mean of the owners' numbers of rows n_i. What pooling adds falls with the rows
that an owner has: of a squared error about as 1 / n_i, of an area under the curve, which is
bounded, more slowly. 3/4 has the largest likelihood, by the AUC and the log loss, of federations
that `benchmarks.decisions` simulates. So the gains of large owners tell a small one that it gains
more.

a, what is common, has a normal prior. τ, the spread, is uncertain and integrated over a grid, with
a half-Cauchy prior. Each owner in turn may be unlike all others: with probability `UNLIKE` its gain
is off by a further N(0, (0.1 f_i)²), so that others never make it sure of a gain against its own
rows.

Estimates have errors, which may be correlated, as owners have rows of the same days: then many
owners that seem to gain are less evidence than if each had days of its own.
"""

from dataclasses import dataclass

import numpy as np

FALL = 0.75
"""The power of its rows with which an owner's gain falls."""
COMMON, SPREAD = 0.1, 0.03
"""Prior scales of a and τ."""
UNLIKE = 0.05
"""The prior probability that an owner is unlike all others: then it is as far from them as a gain
is from 0, by `COMMON`.
"""
SPREADS = np.concatenate([[0.0005], np.geomspace(0.002, 0.4, 40)])
"""The grid of τ."""


@dataclass(frozen=True, eq=False)
class SharedGains:
    """Probabilities (N,) of each owner's true gain, given the rows of all owners.

    Attributes:
        mean, deviation: the expected gain, and its standard deviation.
        above_zero: P(gain > 0).
        above_worth: P(gain > worth).
        within_worth: P(|gain| < worth).
    """

    mean: np.ndarray
    deviation: np.ndarray
    above_zero: np.ndarray
    above_worth: np.ndarray
    within_worth: np.ndarray


def share(
    gains: np.ndarray,
    errors: np.ndarray,
    rows: np.ndarray,
    worth: float,
    alike: np.ndarray | None = None,
) -> SharedGains:
    """The posterior of N owners' gains.

    Args:
        gains, errors: (N,) estimates and standard errors.
        rows: (N,) numbers of rows.
        worth: the smallest gain that matters.
        alike: (N, N) the correlations of the errors; None: they are independent.
    """
    from scipy import stats  # slow to import

    size = np.exp(-FALL * (np.log(rows) - np.log(rows).mean()))
    noise = np.outer(errors, errors) * (np.eye(len(gains)) if alike is None else alike)
    fits = [_fit(gains, noise, size, spread) for spread in SPREADS]
    prior = np.log(SPREADS) - np.log1p(np.square(SPREADS / SPREAD))  # the grid is even in log τ
    evidence = np.array([fit[0] for fit in fits]) + prior[:, None, None]  # (T, 2, N)
    means, deviations = np.array([fit[1] for fit in fits]), np.array([fit[2] for fit in fits])
    weight = np.exp(evidence - evidence.max((0, 1)))
    weight /= weight.sum((0, 1))

    def above(value: float) -> np.ndarray:
        tails: np.ndarray = (weight * stats.norm.sf((value - means) / deviations)).sum((0, 1))
        return tails

    mean = (weight * means).sum((0, 1))
    deviation = np.sqrt((weight * (np.square(deviations) + np.square(means - mean))).sum((0, 1)))
    return SharedGains(mean, deviation, above(0.0), above(worth), above(-worth) - above(worth))


def _fit(
    gains: np.ndarray, noise: np.ndarray, size: np.ndarray, spread: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """With τ = `spread`, if each owner is like the others, and if it is unlike them (2, N): the log
    of prior times likelihood, and the gain's mean and deviation. `noise` (N, N) is the covariance
    of the estimates' errors.
    """
    # of true gains
    likely = np.square(COMMON) * np.outer(size, size) + np.diag(np.square(spread * size))
    precision = np.linalg.inv(likely + noise)
    pull = precision @ gains
    likelihood = 0.5 * (np.linalg.slogdet(precision)[1] - gains @ pull)
    # (2, N): an owner's own further variance
    further = np.stack([np.zeros(len(gains)), np.square(COMMON * size)])
    own = np.diag(precision)
    share_of = further / (1 + further * own)  # the update of the inverse, of rank one
    toward = noise @ precision
    mean = gains - noise @ pull + share_of * np.diag(toward) * pull
    variance = np.diag(noise) - np.diag(toward @ noise) + share_of * np.square(np.diag(toward))
    evidence = likelihood + 0.5 * (share_of * np.square(pull) - np.log1p(further * own))
    chance = np.log([1 - UNLIKE, UNLIKE])[:, None]
    return evidence + chance, mean, np.sqrt(np.maximum(variance, 1e-14))
