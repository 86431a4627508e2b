"""The differential privacy of Gaussian noise: (ε, δ) of releases, alone, repeated, on random
subsets, and mixed.

A release adds noise of standard deviation σ Δ to a vector of sensitivity Δ: adjacent data sets move
it by at most Δ in L2 norm. The caller defines adjacency, and with it Δ. A release on a random
subset is that of a sum over rows, of which each is included independently with the same
probability, the rate; adjacent data sets then differ in one row that one of them lacks or counts as
nothing, and the draw of the subset must be secret.

Releases of all rows compose exactly, to one with 1 / σ² = Σ 1 / σ_i²: B. Balle, Y.-X. Wang,
"Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8. Those on subsets
are composed numerically, by the Fourier transform of their privacy loss distributions: A. Koskela,
J. Jälkö, A. Honkela, "Computing Tight Differential Privacy Guarantees Using FFT", AISTATS 2020.
Their discretization never understates δ: V. Doroshenko, B. Ghazi, P. Kamath, R. Kumar, P.
Manurangsi, "Connect the Dots: Tighter Discrete Approximations of Privacy Loss Distributions", PETS
2022. The pair of distributions that dominates both directions is that of Y. Zhu, J. Dong, Y.-X.
Wang, "Optimal Accounting of Differential Privacy via Characteristic Function", AISTATS 2022.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

Direction: TypeAlias = Literal["removed", "added"]
REPLACED: Final = "one row of a client is replaced by another; the number of rows is public"
ABSENT: Final = "one row of a client counts as nothing; the number of rows is public"
CLIENT: Final = "the updates of one client count as nothing"
"""The difference between adjacent data sets."""
POINTS: Final = 1 << 16
"""Points of the grid on which privacy losses are composed."""
TAIL: Final = 1e-15
"""Probability that the grid may miss; it counts as lost."""
REACH: Final = 12.0
"""Standard deviations of the noise beyond which nothing is left in a float64."""
BISECTIONS, ROUGHLY = 80, 14
"""Halvings of an interval; few where each takes a composition."""
SMALLEST: Final = 0.05
"""Smallest σ with amplification by sampling; below it there is hardly any, and none is counted."""


@dataclass(frozen=True)
class Releases:
    """Equal releases.

    Attributes:
        sigma: the noise multiplier σ.
        count: their number.
        rate: at which each row is included.
        excess: by how much the Rényi divergence of each exceeds that of Gaussian noise, at most, at
            any order.
    """

    sigma: float
    count: int = 1
    rate: float = 1.0
    excess: float = 0.0


def epsilon(releases: Sequence[Releases], delta: float) -> float:
    """The smallest ε for which all these releases together are (ε, δ)-differentially private; 0 for
    none.

    Exact without sampling. With it, an upper bound that is tight to about 1 %. With an `excess`, an
    upper bound by Rényi divergences, without amplification by sampling.
    """
    if any(r.excess for r in releases):
        return renyi_epsilon(releases, delta)
    curve = _Curve(releases)
    return (
        0.0 if curve(0.0) <= delta else _smallest(lambda found: curve(found) <= delta, BISECTIONS)
    )


def renyi_epsilon(releases: Sequence[Releases], delta: float) -> float:
    """An ε of all these releases together, by their Rényi divergences α / 2σ² + excess at whole
    orders α, as if each
    had all rows: C. Canonne, G. Kamath, T. Steinke, "The Discrete Gaussian for Differential
    Privacy", NeurIPS 2020, Proposition 12.
    """
    slope = math.fsum(r.count / (2 * r.sigma**2) for r in releases)
    excess = math.fsum(r.count * r.excess for r in releases)
    orders = np.unique(np.geomspace(2, 1e5, 400).round())
    found = (
        orders * slope
        + excess
        + np.log1p(-1 / orders)
        - (math.log(delta) + np.log(orders)) / (orders - 1)
    )
    return max(0.0, float(found.min()))


def delta_of(releases: Sequence[Releases], epsilon: float) -> float:
    """The smallest δ for which all these releases together are (ε, δ)-differentially private."""
    return _Curve(releases)(epsilon)


def noise_for(epsilon: float, delta: float, count: int = 1, rate: float = 1.0) -> float:
    """The smallest noise multiplier of this many releases that are (ε, δ)-differentially private; 0
    if ε is inf.
    """
    if math.isinf(epsilon) or not count:
        return 0.0
    if rate >= 1:
        return math.sqrt(count) * _smallest(
            lambda sigma: gaussian_delta(sigma, epsilon) <= delta, BISECTIONS
        )
    return _smallest(
        lambda sigma: delta_of([Releases(sigma, count, rate)], epsilon) <= delta, ROUGHLY
    )


def gaussian_delta(sigma: float, epsilon: float) -> float:
    """The smallest δ of one release of all rows, at this ε: Balle and Wang, Theorem 8."""
    a, b = 1 / (2 * sigma), epsilon * sigma
    if epsilon < 700:
        return _below(a - b) - math.exp(epsilon) * _below(-a - b)
    return _below(a - b) - math.exp(epsilon + _log_below(-a - b))  # e^ε alone overflows


def composed_sigma(releases: Sequence[Releases]) -> float:
    """σ of the one release that equals these without sampling; inf for none."""
    rate = math.fsum(r.count / r.sigma**2 for r in releases)
    return 1 / math.sqrt(rate) if rate else math.inf


class _Curve:
    """δ as a function of ε of some releases. Sampled ones are composed when it is made."""

    def __init__(self, releases: Sequence[Releases]) -> None:
        some = [r for r in releases if r.count and r.rate > 0]
        sampled = [r for r in some if r.rate < 1 and r.sigma >= SMALLEST]
        whole = composed_sigma([r for r in some if r not in sampled])
        self._unsampled = composed_sigma(some)
        self._composed = []
        if sampled and whole >= SMALLEST:
            every = [*sampled, *([Releases(whole)] if math.isfinite(whole) else [])]
            self._composed = [_composed(every, direction) for direction in ("removed", "added")]

    def __call__(self, epsilon: float) -> float:
        unsampled = (
            gaussian_delta(self._unsampled, epsilon) if math.isfinite(self._unsampled) else 0.0
        )
        exact = [_exceeding(losses, p, infinite, epsilon) for losses, p, infinite in self._composed]
        return min(unsampled, max(exact, default=unsampled))


def _smallest(enough: Callable[[float], bool], bisections: int) -> float:
    """The smallest number > 0 that is enough, by bisection; the result is enough."""
    low, high = 0.0, 1.0
    while not enough(high):
        high *= 2
    for _ in range(bisections):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# -- privacy loss distributions --------------------------------------------------------------------


def _composed(
    releases: Sequence[Releases], direction: Direction
) -> tuple[np.ndarray, np.ndarray, float]:
    """The losses (n,), their probabilities (n,), and the probability of an infinite loss, of all
    releases.
    """
    low, high = _window(releases, direction)
    step = (high - low) / POINTS
    spectrum, finite, offset = np.ones(POINTS // 2 + 1, dtype=complex), 0.0, 0
    for r in releases:
        start, p, infinite = _discrete(r, direction, step)
        folded = np.pad(p, (0, -len(p) % POINTS)).reshape(-1, POINTS).sum(0)
        spectrum *= np.fft.rfft(folded) ** r.count
        finite += r.count * math.log1p(-infinite)
        offset += r.count * start
    p = np.fft.irfft(spectrum, POINTS)
    # p[k] is the probability of the losses offset + k, modulo POINTS, in steps
    first = math.ceil(low / step)
    p = np.roll(p, (offset - first) % POINTS)
    return (first + np.arange(POINTS)) * step, p, -math.expm1(finite) + TAIL


def _discrete(r: Releases, direction: Direction, step: float) -> tuple[int, np.ndarray, float]:
    """A distribution of losses on multiples of `step` whose δ is nowhere below that of one release:
    the number of the first, probabilities (n,), and the probability of an infinite loss. Between
    grid points its δ is linear in e^ε.
    """
    ends = _loss(np.array([-REACH * r.sigma, 1 + REACH * r.sigma]), r)
    low, high = ends if direction == "removed" else -ends[::-1]
    start, end = math.floor(low / step), math.ceil(high / step)
    losses = np.arange(start, end + 1) * step
    delta = _one_release(losses, r, direction)
    alpha = np.exp(losses)
    slopes = np.diff(delta, prepend=1.0) / np.diff(alpha, prepend=0.0)
    other = np.diff(slopes, append=0.0)  # probabilities under the other data set
    return start, other * alpha, float(delta[-1])


def _one_release(epsilon: np.ndarray, r: Releases, direction: Direction) -> np.ndarray:
    """δ (n,) of one release at each ε (n,), between q N(1, σ²) + (1 - q) N(0, σ²) and N(0, σ²)."""
    from scipy.special import ndtr

    with np.errstate(divide="ignore", invalid="ignore"):
        sign = 1.0 if direction == "removed" else -1.0
        inner = np.expm1(sign * epsilon) + r.rate  # of the mixture's excess over 1 - q
        at = np.where(inner > 0, r.sigma**2 * np.log(np.maximum(inner, 0) / r.rate) + 0.5, -np.inf)
    above = (ndtr(-at / r.sigma), ndtr((1 - at) / r.sigma))  # of N(0, σ²) and N(1, σ²)
    below = (ndtr(at / r.sigma), ndtr((at - 1) / r.sigma))
    alpha = np.exp(epsilon)
    if direction == "removed":
        found = r.rate * above[1] + (1 - r.rate) * above[0] - alpha * above[0]
    else:
        found = below[0] - alpha * (r.rate * below[1] + (1 - r.rate) * below[0])
    delta: np.ndarray = np.clip(found, np.maximum(0.0, 1 - alpha), 1.0)
    return delta


def _loss(x: np.ndarray, r: Releases) -> np.ndarray:
    """The privacy loss of the output x (n,), where the row is removed."""
    return np.logaddexp(
        math.log1p(-r.rate) if r.rate < 1 else -np.inf,
        math.log(r.rate) + (2 * x - 1) / (2 * r.sigma**2),
    )


def _window(releases: Sequence[Releases], direction: Direction) -> tuple[float, float]:
    """Bounds of the sum of all losses, each missed with probability `TAIL` / 2 at most: Chernoff's,
    on quadrature.
    """
    pairs = []
    for r in releases:
        x = np.linspace(-REACH * r.sigma, 1 + REACH * r.sigma, 1 << 12)
        none, one = (np.exp(-0.5 * ((x - m) / r.sigma) ** 2) for m in (0.0, 1.0))
        density = (1 - r.rate) * none + r.rate * one if direction == "removed" else none
        losses = _loss(x, r) if direction == "removed" else -_loss(x, r)
        pairs.append((losses, density / density.sum(), r.count))
    reach = math.log(2 / TAIL)
    orders = np.geomspace(1e-3, 1e4, 60)

    def bound(sign: float) -> float:
        found = math.inf
        for order in orders:
            total = 0.0
            for losses, p, count in pairs:
                tilted = sign * order * losses
                most = tilted.max()
                total += count * (most + math.log(float(p @ np.exp(tilted - most))))
            found = min(found, (total + reach) / float(order))
        return sign * found

    return bound(-1.0), bound(1.0)


def _exceeding(losses: np.ndarray, p: np.ndarray, infinite: float, epsilon: float) -> float:
    """δ at this ε of a distribution of losses."""
    first = int(np.searchsorted(losses, epsilon, side="right"))
    return float(-np.expm1(epsilon - losses[first:]) @ p[first:]) + infinite


def _below(x: float) -> float:
    """The distribution function of a standard normal variable."""
    return math.erfc(-x / math.sqrt(2)) / 2


def _log_below(x: float) -> float:
    """Its logarithm, also where it underflows."""
    if x > -30:
        return math.log(_below(x))
    return -0.5 * x * x - math.log(-x * math.sqrt(2 * math.pi)) + math.log1p(-1 / x**2)
