"""What owners and server compute for exact linear models: sums over rows as integers, and Newton's steps.

Each row's part of a sum is rounded to a whole number of steps of 2^-bits before it is added, so that a sum has the same
bits however rows are split over owners. `bits` leave room for the largest possible sum, n, below 2^62: columns are
standardized, so that the sum of |z_i z_j| over n rows is at most n.
"""

from typing import Final

import numpy as np

from fedloom.trees.exact import exp

LARGEST: Final = 62
"""No sum reaches 2^62."""
_FARTHEST: Final = 40.0


def bits_for(rows: int, most: int = 1) -> int:
    """The bits behind the point of parts of at most `most` times the number of rows, all together."""
    return LARGEST - (max(rows, 1) * most).bit_length()


def added(parts: np.ndarray, bits: int) -> np.ndarray:
    """The sums (…) int64 over rows of parts (n, …), in steps of 2^-bits."""
    total: np.ndarray = np.rint(parts * 2.0**bits).astype(np.int64).sum(0)
    return total


def exponents(x: np.ndarray) -> np.ndarray:
    """How many float32 numbers of each column of x (n, p) have each exponent, (p, 256) int64: those of place e > 1 are
    below 2^(e - 127) and not below half of it; those of place 1 are smaller, and those of place 0 are 0."""
    place = np.where(x == 0, 0, (np.frexp(x)[1] + 127).clip(1, 255))
    return np.stack([np.bincount(column, minlength=256) for column in place.T]).astype(np.int64)


def largest_exponents(counts: np.ndarray) -> np.ndarray:
    """(p,) int64 the e with |x| < 2^e for all numbers of a column, from the summed `exponents`."""
    return np.array([np.flatnonzero(row)[-1] - 127 if row.any() else 0 for row in counts], np.int64)


def probabilities(z: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Probabilities (K, n) from standardized columns with an intercept z (n, p) and coefficients (K - 1, p); the first
    class has 0."""
    scores = np.zeros((len(beta) + 1, len(z)))
    for k, own in enumerate(beta, 1):
        for j, b in enumerate(own):  # a sum in a fixed order
            scores[k] += b * z[:, j]
    e = exp(np.maximum(scores - scores.max(0), -_FARTHEST))
    total = e[0].copy()
    for row in e[1:]:
        total += row
    p: np.ndarray = e / total
    return p


def derivatives(z: np.ndarray, y: np.ndarray, beta: np.ndarray, rows: int) -> np.ndarray:
    """The log-likelihood, its gradient and its negative Hessian over own rows, in one vector of integers: see `opened`.

    Args:
        z: (n, p) standardized columns with an intercept.
        y: (n,) labels.
        beta: (K - 1, p).
        rows: of all owners.
    """
    p = probabilities(z, beta)
    bits, K = bits_for(rows), len(p)
    own = np.take_along_axis(p, y[None], 0)[0]
    parts = [added(np.log(own), bits_for(rows, 64))[None]]
    parts += [added(z * ((y == k) - p[k])[:, None], bits) for k in range(1, K)]
    for k in range(1, K):
        for m in range(k, K):
            weighted = z * (p[k] * ((k == m) - p[m]))[:, None]
            parts += [added(z[:, [i]] * weighted[:, i:], bits) for i in range(z.shape[1])]
    return np.concatenate(parts)


def size(columns: int, classes: int) -> int:
    """The length of the vector of `derivatives`."""
    k = classes - 1
    return 1 + k * columns + k * (k + 1) // 2 * columns * (columns + 1) // 2


def opened(sums: np.ndarray, columns: int, classes: int, rows: int) -> tuple[float, np.ndarray, np.ndarray]:
    """The log-likelihood, gradient (q,) and negative Hessian (q, q) of q = (K - 1) p coefficients."""
    k, bits = classes - 1, bits_for(rows)
    value = float(sums[0]) * 2.0 ** -bits_for(rows, 64)
    rest = sums[1:] * 2.0**-bits
    gradient, rest = rest[: k * columns], rest[k * columns :]
    hessian = np.zeros((k, columns, k, columns))
    upper = np.triu_indices(columns)
    for a in range(k):
        for b in range(a, k):
            block, rest = rest[: len(upper[0])], rest[len(upper[0]) :]
            square = np.zeros((columns, columns))
            square[upper] = block
            square += np.triu(square, 1).T
            hessian[a, :, b], hessian[b, :, a] = square, square
    return value, gradient, hessian.reshape(k * columns, k * columns)


def inverse(hessian: np.ndarray) -> np.ndarray | None:
    """The inverse of a positive definite matrix, or None if columns are collinear."""
    scale = np.sqrt(np.diag(hessian).clip(1e-300))
    values, vectors = np.linalg.eigh(hessian / np.outer(scale, scale))
    if values[0] < 1e-11 * values[-1]:
        return None
    found: np.ndarray = (vectors / values @ vectors.T) / np.outer(scale, scale)
    return found


def raw_scale(
    beta: np.ndarray, covariance: np.ndarray, mean: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients (K - 1, p), the intercept first, and their covariance (q, q) for columns as they were."""
    back = np.diag(1 / np.concatenate([[1.0], scale]))
    back[0, 1:] = -mean / scale
    whole = np.kron(np.eye(len(beta)), back)
    return beta @ back.T, whole @ covariance @ whole.T
