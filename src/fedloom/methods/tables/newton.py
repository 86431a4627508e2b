"""What owners and server compute for exact linear models: sums over rows as integers, and Newton's
steps.

Each row's part of a sum is rounded to a whole number of steps of 2^-bits before it is added, so
that a sum has the same bits however rows are split over owners. `bits` leave room for the largest
possible sum below 2^62. Columns are standardized, so that the sum of |z_i z_j| over n rows is at
most n; where rows have weights without a bound, their largest parts are counted by exponent first
(`reach`).
"""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from fedloom.methods.tables import steps
from fedloom.trees.exact import exp

LARGEST: Final = 62
"""No sum reaches 2^62."""
SMALL_STEP: Final = 1e-9
"""A step below this, of coefficients of standardized columns, is the last."""
NOT_UNIQUE: Final = (
    "no unique coefficients: columns are collinear, or separate the classes, counts of 0 or "
    "events; leave a column out with data.drop, or set params.l2 above 0"
)
_FLAT: Final = 1e6
"""Variance of a coefficient of a standardized column, above which it would grow forever: see
`bounded`.
"""
NOT_SPARSE: Final = (
    "no coefficients were found: columns are nearly collinear; set params.l2 above 0"
)
_SWEEPS: Final = 1000
"""Of coordinate descent, each over all coefficients."""
_CACHED: Final = 2**16
"""Numbers of one of the arrays of a few rows, which stay in the processor's cache."""
_LIFT: Final = 1.5 * 2.0**52
"""The last 51 bits of this plus a number below 2^51 in size are the nearest whole number, as a
signed integer.
"""
_LIFTED: Final = 0x4338
"""The first 16 bits of `_LIFT`; the rest are 0."""
_FARTHEST: Final = 40.0
FARTHEST_MEAN: Final = 60.0
"""A row whose mean would be above e^60 or below e^-60 has no bound: the step was too long."""


def bits_for(rows: int, most: int = 1) -> int:
    """The bits behind the point of parts of at most `most` times the number of rows,
    all together.
    """
    return LARGEST - (max(rows, 1) * most).bit_length()


def added(parts: np.ndarray, bits: int) -> np.ndarray:
    """The sums (…) int64 over rows of parts (n, …), in steps of 2^-bits."""
    scaled = parts * 2.0**bits
    return rounded_sums(scaled, float(np.abs(scaled).max(initial=0)), 0)


def rounded_sums(x: np.ndarray, largest: float, axis: int) -> np.ndarray:
    """The sums int64, along an axis, of the whole numbers nearest to numbers x, which are not kept.

    Numbers of at most `largest` < 2^51 in size are rounded by one addition, and their bits added
    up: the same integers in half of the time.
    """
    if not largest < 2.0**51:
        total: np.ndarray = np.rint(x, out=x).astype(np.int64).sum(axis)
        return total
    x += _LIFT
    lifted: np.ndarray = x.view(np.int64).sum(axis) - np.left_shift(
        np.int64(x.shape[axis] * _LIFTED), 48
    )
    return lifted


def exponents(x: np.ndarray) -> np.ndarray:
    """How many numbers of each column of x (n, p) have each exponent, (p, 256) int64: see
    `steps.exponents`.
    """
    return np.array([steps.exponents(column) for column in x.T], np.int64).reshape(-1, 256)


def largest_exponents(counts: np.ndarray) -> np.ndarray:
    """(p,) int64 the e with |x| < 2^e for all numbers of a column, from the summed `exponents`."""
    return np.array([steps.largest_exponent(row) for row in counts], np.int64)


def probabilities(z: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Probabilities (K, n) from standardized columns with an intercept z (n, p) and coefficients (K
    - 1, p); the first class has 0.
    """
    scores = np.stack([np.zeros(len(z)), *(predictor(z, own) for own in beta)])
    e = exp(np.maximum(scores - scores.max(0), -_FARTHEST))
    total = e[0].copy()
    for row in e[1:]:
        total += row
    p: np.ndarray = e / total
    return p


def likelihood(
    family: str, z: np.ndarray, y: np.ndarray, beta: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's log-likelihood (n,), its derivatives (k, n) by the k linear predictors, and its
    negative second derivatives (k, k, n).

    Args:
        family: "classes", the first of which has the predictor 0; "normal" with variance 1, without
            its constant; or "poisson" with the logarithm as link.
        z: (n, p) standardized columns with an intercept.
        y: (n,) labels, or numbers.
        beta: (k, p).
    """
    if family == "classes":
        p, k = probabilities(z, beta), len(beta)
        own, rest = np.take_along_axis(p, y[None], 0)[0], p[1:]
        weight = rest * (np.eye(k)[:, :, None] - rest[:, None])
        return np.log(own), (y == np.arange(1, k + 1)[:, None]) - rest, weight
    from scipy.special import gammaln  # slow to import

    eta = predictor(z, beta[0])
    if family == "normal":
        return -0.5 * (y - eta) ** 2, (y - eta)[None], np.ones((1, 1, len(y)))
    mu = exp(eta.clip(-FARTHEST_MEAN, FARTHEST_MEAN))
    return y * eta - mu - gammaln(y + 1), (y - mu)[None], mu[None, None]


def predictor(z: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The linear predictor (n,) of columns z (n, p) with coefficients (p,), added in a
    fixed order.
    """
    eta = np.zeros(len(z))
    for j, b in enumerate(beta):
        eta += b * z[:, j]
    return eta


def derivatives(
    family: str, z: np.ndarray, y: np.ndarray, beta: np.ndarray, bits: int
) -> np.ndarray:
    """The log-likelihood, its gradient and its negative Hessian over own rows, in one vector of
    integers in steps of 2^-bits: see `likelihood` and `opened`.
    """
    value, slope, weight = likelihood(family, z, y, beta)
    parts = [added(value, bits)[None], *(weighted(z, own, bits) for own in slope)]
    parts += [
        products(z, weight[a, b], bits) for a, b in zip(*np.triu_indices(len(beta)), strict=True)
    ]
    return np.concatenate(parts)


def weighted(z: np.ndarray, weight: np.ndarray, bits: int) -> np.ndarray:
    """The sums (p,) int64 over rows of weight_n z_ni, each rounded to steps of 2^-bits."""
    total = np.zeros(z.shape[1], np.int64)
    for rows in _blocks(z):
        total += added(z[rows] * weight[rows, None], bits)
    return total


def _blocks(z: np.ndarray) -> Iterator[slice]:
    """A few rows of z (n, p) at a time."""
    some = max(_CACHED // z.shape[1], 1)
    return (slice(first, first + some) for first in range(0, len(z), some))


def products(z: np.ndarray, weight: np.ndarray, bits: int) -> np.ndarray:
    """The sums (p (p + 1) / 2,) int64 of weight_n z_ni z_nj, j >= i, each rounded to steps of
    2^-bits.
    """
    p = z.shape[1]
    ends = np.arange(p, 0, -1).cumsum()
    total = np.zeros(p * (p + 1) // 2, np.int64)
    for rows in _blocks(z):
        x = np.ascontiguousarray(z[rows].T)
        scaled, found = x * (weight[rows] * 2.0**bits), np.empty_like(x)
        largest = float(np.abs(scaled).max() * np.abs(x).max())
        for i, end in enumerate(ends):
            total[end - p + i : end] += rounded_sums(
                np.multiply(scaled[i:], x[i], out=found[i:]), largest, 1
            )
    return total


def reach(largest: np.ndarray) -> np.ndarray:
    """How many rows have a largest part (n,) of each exponent, (256,) int64."""
    return steps.exponents(largest)


def bits_of(counts: np.ndarray) -> int | None:
    """The bits behind the point with which no sum reaches 2^62, by the summed `reach` of all rows;
    None if a row has no bound.
    """
    if counts[-1]:
        return None
    bound = float(counts @ np.ldexp(1.0, np.arange(256) - 127))
    return LARGEST - int(np.frexp(bound)[1])


def largest(family: str, z: np.ndarray, y: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """The largest part (n,) of each row in the sums of `derivatives`."""
    value, slope, weight = likelihood(family, z, y, beta)
    side = np.abs(z).max(1)
    parts = [np.abs(value), side * np.abs(slope[0]), side * side * weight[0, 0]]
    eta = predictor(z, beta[0])
    return np.where(np.abs(eta) > FARTHEST_MEAN, np.inf, np.max(parts, axis=0))


def size(columns: int, k: int) -> int:
    """The length of the vector of `derivatives` of k linear predictors."""
    return 1 + k * columns + k * (k + 1) // 2 * columns * (columns + 1) // 2


def opened(
    sums: np.ndarray, columns: int, k: int, bits: int
) -> tuple[float, np.ndarray, np.ndarray]:
    """The log-likelihood, gradient (q,) and negative Hessian (q, q) of q = k p coefficients."""
    value, rest = float(sums[0]) * 2.0**-bits, sums[1:] * 2.0**-bits
    gradient, rest = rest[: k * columns], rest[k * columns :]
    hessian = np.zeros((k, columns, k, columns))
    blocks = rest.reshape(-1, columns * (columns + 1) // 2)
    for a, b, block in zip(*np.triu_indices(k), blocks, strict=True):
        hessian[a, :, b] = hessian[b, :, a] = square(block, columns)
    return value, gradient, hessian.reshape(k * columns, k * columns)


def square(upper: np.ndarray, columns: int) -> np.ndarray:
    """The symmetric matrices (..., p, p) with these upper triangles (..., p (p + 1) / 2)."""
    found = np.zeros((*upper.shape[:-1], columns, columns))
    i, j = np.triu_indices(columns)
    found[..., i, j] = found[..., j, i] = upper
    return found


def inverse(hessian: np.ndarray) -> np.ndarray | None:
    """The inverse of a positive definite matrix, or None if columns are collinear."""
    scale = np.sqrt(np.diag(hessian).clip(1e-300))
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    if values[0] < 1e-11 * values[-1]:
        return None
    found: np.ndarray = (vectors / values @ vectors.T) / np.outer(scale, scale)
    return found


def not_unique(hessian: np.ndarray, names: Sequence[str]) -> str:
    """Why there are no unique coefficients, with the names of some columns (p,) that are the cause:
    those along which the likelihood changes least, whose negative Hessian is (k p, k p).
    """
    flat = np.abs(np.linalg.eigh(hessian)[1][:, 0])
    some = [
        names[i % len(names)]
        for i in np.argsort(-flat, kind="stable")
        if flat[i] > 0.1 * flat.max()
    ]
    return f"{NOT_UNIQUE}; begin with {', '.join([*dict.fromkeys(some)][:4])}"


def bounded(hessian: np.ndarray) -> np.ndarray | None:
    """As `inverse`; also None if a coefficient has next to no information, as those of columns that
    separate counts of 0 from others, or early events from late ones.
    """
    found = inverse(hessian)
    return None if found is None or np.diag(found).max() > _FLAT else found


def sparse(
    hessian: np.ndarray, gradient: np.ndarray, beta: np.ndarray, l1: np.ndarray
) -> np.ndarray | None:
    """The b (q,) that minimizes (b - beta)' H (b - beta) / 2 - g' (b - beta) + sum l1 |b|, with
    exact zeros; None if none is found.

    Coordinate descent (J. Friedman, T. Hastie, R. Tibshirani, 2010) finds the coefficients that are
    not 0 and their signs, for which one linear system then has the solution; it holds if no other
    coefficient would gain.
    """
    b, linear = beta.copy(), hessian @ beta + gradient
    for _ in range(_SWEEPS):
        for j in np.flatnonzero(np.diag(hessian) > 0):
            rest = linear[j] - hessian[j] @ b + hessian[j, j] * b[j]
            b[j] = np.sign(rest) * max(abs(rest) - l1[j], 0.0) / hessian[j, j]
        used = np.flatnonzero(b)
        sign, inner = np.sign(b[used]), hessian[np.ix_(used, used)]
        if len(used) and inverse(inner) is None:
            continue
        exact = np.zeros_like(b)
        exact[used] = np.linalg.solve(inner, linear[used] - l1[used] * sign)
        slack = l1 - np.abs(linear - hessian @ exact)
        slack[used] = 0.0
        if (np.sign(exact[used]) == sign)[l1[used] > 0].all() and (slack >= -1e-9 * (1 + l1)).all():
            return exact
    return None


def raw_scale(
    beta: np.ndarray, covariance: np.ndarray, mean: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients (K - 1, p), the intercept first, and their covariance (q, q) for columns as they
    were.
    """
    back = np.diag(1 / np.concatenate([[1.0], scale]))
    back[0, 1:] = -mean / scale
    whole = np.kron(np.eye(len(beta)), back)
    return beta @ back.T, whole @ covariance @ whole.T
