"""Least squares with a random intercept for each owner, by restricted maximum likelihood, from sums
over owners.

y = Z beta + u_i + e, where u_i, of owner i, has variance lambda s^2, and e variance s^2. An owner
of n rows with sums c of its columns and number adds to the products of all rows only - w c c',
where w = lambda / (1 + n lambda), the logarithm of 1 + n lambda, and the first two derivatives of
both by the logarithm of lambda. From the sum over owners the server has beta, s^2 and the
derivatives of the restricted likelihood, which is maximized over lambda by Newton's method within
an interval that closes (N. Laird, J. Ware, 1982; D. Bates et al., lme4, 2015).
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from fedloom.methods.tables import newton

START: Final = 0.1
"""The first ratio lambda of the two variances."""
LEAST, MOST = 1e-8, 1e8
"""The best ratio is sought between these."""
_NEARLY: Final = 3.0
"""If the best ratio is below so many times the least, it is 0."""


@dataclass(frozen=True)
class Fit:
    """The best coefficients at one ratio, and how the restricted likelihood changes with it."""

    beta: np.ndarray
    """(p,)"""
    covariance: np.ndarray
    """(p, p)"""
    residual: float
    """The variance s^2 of the residuals."""
    value: float
    """The restricted log-likelihood."""
    slope: float
    """Its derivative by the logarithm of the ratio."""
    curvature: float
    """Its second derivative."""
    owners: int
    """How many have rows."""


def size(columns: int) -> int:
    """The length of the vector of `effects`, of p columns with the intercept."""
    q = columns + 1
    return 4 + 3 * q * (q + 1) // 2


def effects(z: np.ndarray, y: np.ndarray, ratio: float, bits: int) -> np.ndarray:
    """One owner's part of the sums at a ratio, as integers in steps of 2^-bits, of standardized
    columns with an
    intercept z (n, p) and numbers y (n,): see `opened`.
    """
    x, n = np.c_[z, y], len(y)
    own = x.sum(0)
    upper = np.outer(own, own)[np.triu_indices(x.shape[1])]
    share = n * ratio / (1 + n * ratio)
    weights = np.array([1, 1 - share, (1 - share) * (1 - 2 * share)]) * ratio / (1 + n * ratio)
    scaled = np.rint(np.ldexp(weights[:, None] * upper, bits)).astype(np.int64)
    scaled[0] -= newton.products(x, np.ones(n), bits)
    logs = np.array([np.log1p(n * ratio), share, share * (1 - share), min(n, 1)])
    return np.concatenate([np.rint(np.ldexp(logs, bits)).astype(np.int64), *-scaled])


def opened(sums: np.ndarray, columns: int, rows: int, bits: int) -> Fit | None:
    """The fit from the summed `effects` of all owners; None if the columns are collinear."""
    numbers = np.ldexp(sums.astype(np.float64), -bits)
    logs, (whole, first, second) = (
        numbers[:4],
        newton.square(numbers[4:].reshape(3, -1), columns + 1),
    )
    inverse = newton.inverse(whole[:-1, :-1])
    if inverse is None:
        return None
    beta, left = inverse @ whole[:-1, -1], rows - columns
    v = np.r_[-beta, 1.0]
    residual = float(v @ whole @ v) / left
    moved = first[:-1] @ v
    change, bend = inverse @ first[:-1, :-1], inverse @ second[:-1, :-1]
    slope = v @ first @ v / residual + logs[1] + np.trace(change)
    apart = (v @ second @ v - 2 * moved @ inverse @ moved) / residual - (
        v @ first @ v / residual
    ) ** 2 / left
    curvature = apart + logs[2] + np.trace(bend) - np.trace(change @ change)
    spread = float(np.linalg.slogdet(whole[:-1, :-1])[1])
    value = -0.5 * (left * (np.log(2 * np.pi * residual) + 1) + logs[0] + spread)
    return Fit(
        beta, residual * inverse, residual, float(value), -slope / 2, -curvature / 2, round(logs[3])
    )


def following(fit: Fit, ratio: float, low: float, high: float) -> tuple[float, float, float]:
    """The next ratio, and the ends of the interval that has the best one; the same ratio if it is
    the best.

    A step of Newton's method, or to the middle of the logarithms where that would leave the
    interval.
    """
    if ratio == 0:
        return ratio, low, high
    low, high = (ratio, high) if fit.slope > 0 else (low, ratio)
    if high < _NEARLY * LEAST:
        return 0.0, low, high
    if low > MOST / _NEARLY:
        return ratio, low, high
    at = np.log(ratio) - fit.slope / fit.curvature if fit.curvature < 0 else np.inf
    if abs(at - np.log(ratio)) < newton.SMALL_STEP:
        return ratio, low, high
    inside = np.log(low) < at < np.log(high)
    return float(np.exp(at) if inside else np.sqrt(low * high)), low, high


def effect(z: np.ndarray, y: np.ndarray, beta: np.ndarray, ratio: float) -> float:
    """An owner's own effect: the mean of its residuals, shrunk to 0."""
    rest = y - newton.predictor(z, beta)
    return float(ratio * rest.sum() / (1 + len(y) * ratio))
