"""What all owners together say about each owner's gain.

    gain_i = a + b (log n_i - mean log n) + τ z_i / sqrt(w_i)        z_i ~ N(0, 1)

τ, the spread of the owners' gains, is uncertain and integrated over a grid, with a half-Cauchy prior; a and b have
normal priors. The weights w_i make z a t variable of 4 degrees of freedom, so that an owner that contradicts the others
keeps its own evidence. The slope b keeps large owners from deciding for small ones.

The estimate of gain_i has an error. A part of it may be common to owners, as they have rows of the same days: then many
owners that seem to gain are less evidence than if each had days of its own.
"""

from dataclasses import dataclass

import numpy as np

COMMON, SLOPE, SPREAD = 0.1, 0.02, 0.03
"""Prior scales of a, b and τ, for gains on the scale of the AUC."""
SPREADS = np.concatenate([[0.0005], np.geomspace(0.002, 0.4, 40)])
"""The grid of τ."""
TAILS = 4.0
"""Degrees of freedom of the owners' gains."""
ROUNDS = 4
"""Updates of the weights w."""
LEAST = 1e-3
"""The least share of an error's variance that is not common to owners."""


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
    gains: np.ndarray, errors: np.ndarray, rows: np.ndarray, worth: float, common: np.ndarray | None = None
) -> SharedGains:
    """The posterior of N owners' gains.

    Args:
        gains, errors: (N,) estimates and standard errors.
        rows: (N,) numbers of rows.
        worth: the smallest gain that matters.
        common: (N, M) the common parts of the errors, by M independent causes of variance 1; None: there are none.
    """
    from scipy import stats  # slow to import

    size = np.log(rows) - np.log(rows).mean()
    line, common = (
        np.stack([np.ones(len(gains)), size], axis=1),
        np.zeros((len(gains), 0)) if common is None else common,
    )
    errors = np.sqrt(np.maximum(np.square(errors) - np.square(common).sum(1), LEAST * np.square(errors)))
    w = np.ones(len(gains))
    for _ in range(ROUNDS):
        fits = [_fit(gains, errors, common, line, w, spread) for spread in SPREADS]
        evidence = np.array([fit[0] for fit in fits]) - np.log1p(np.square(SPREADS / SPREAD)) + np.log(SPREADS)
        weight = np.exp(evidence - evidence.max())
        weight /= weight.sum()
        w = np.minimum((TAILS + 1) / (TAILS + weight @ np.array([fit[3] for fit in fits])), 1.0)
    means, deviations = np.array([fit[1] for fit in fits]), np.array([fit[2] for fit in fits])

    def above(value: float) -> np.ndarray:
        tails: np.ndarray = weight @ stats.norm.sf((value - means) / deviations)
        return tails

    mean = weight @ means
    deviation = np.sqrt(weight @ (np.square(deviations) + np.square(means - mean)))
    return SharedGains(mean, deviation, above(0.0), above(worth), above(-worth) - above(worth))


def _fit(
    gains: np.ndarray, errors: np.ndarray, common: np.ndarray, line: np.ndarray, w: np.ndarray, spread: float
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """With τ = `spread`: the log marginal likelihood, each gain's mean and deviation, and its squared standardized
    distance from the line and the common errors; `errors` are without these."""
    between = spread**2 / w
    total = np.square(errors) + between
    design, of_gains = np.hstack([line, common]), np.hstack([line, 0 * common])
    precise = design.T / total
    priors = np.diag([COMMON**-2, SLOPE**-2, *np.ones(common.shape[1])])
    covariance = np.linalg.inv(precise @ design + priors)
    fitted = covariance @ (precise @ gains)
    residual = float((np.square(gains) / total).sum() - fitted @ (precise @ gains))
    likelihood = 0.5 * (np.linalg.slogdet(covariance)[1] - np.log(total).sum() - residual)
    own = between / total  # the weight of an owner's own estimate
    mean = of_gains @ fitted + own * (gains - design @ fitted)
    left = of_gains - own[:, None] * design
    deviation = np.sqrt(own * np.square(errors) + np.einsum("ij,jk,ik->i", left, covariance, left))
    return likelihood, mean, deviation, np.square(gains - design @ fitted) / total
