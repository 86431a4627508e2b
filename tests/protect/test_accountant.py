"""ε against an exact curve, integration of the privacy loss, Rényi's bound, and the figures of
dp-accounting 0.6.0.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, special

from fedloom.protect.accountant import (
    Releases,
    composed_sigma,
    delta_of,
    epsilon,
    gaussian_delta,
    noise_for,
)

DELTA = 1e-5
# σ, releases, rate, ε: PLDAccountant(ADD_OR_REMOVE_ONE, value_discretization_interval=1e-4) of
# dp-accounting 0.6.0
PUBLISHED = [
    (1.0, 1, 1.0, 4.37718),
    (2.0, 1, 1.0, 1.99309),
    (0.5, 1, 1.0, 9.99726),
    (2.5, 20, 1.0, 8.72076),
    (1.0, 400, 0.05, 6.69997),
    (0.7, 1000, 0.01, 4.61829),
    (4.0, 200, 0.1, 1.42167),
    (2.0, 50, 0.5, 9.47359),
    (0.5, 30, 0.02, 7.0328),
    (8.0, 1000, 0.3, 5.3847),
    (0.8, 20_000, 0.001, 1.10041),
]


def by_integration(sigma: float, rate: float, eps: float) -> float:
    """δ of one release, the larger of both directions, by quadrature over the outputs."""

    def density(x: float, mean: float) -> float:
        return math.exp(-(((x - mean) / sigma) ** 2) / 2) / (sigma * math.sqrt(2 * math.pi))

    def mixed(x: float) -> float:
        return (1 - rate) * density(x, 0) + rate * density(x, 1)

    ends, break_ = (-14 * sigma, 1 + 14 * sigma), [0.0, 0.5, 1.0]
    removed = integrate.quad(
        lambda x: max(mixed(x) - math.exp(eps) * density(x, 0), 0), *ends, points=break_, limit=400
    )
    added = integrate.quad(
        lambda x: max(density(x, 0) - math.exp(eps) * mixed(x), 0), *ends, points=break_, limit=400
    )
    return float(max(removed[0], added[0]))


def renyi_bound(sigma: float, count: int, rate: float, delta: float) -> float:
    """ε by Rényi's accountant at integer orders.

    Mironov, Talwar, Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019,
    Section 3.3.
    """
    best = math.inf
    for order in range(2, 128):
        k = np.arange(order + 1)
        weight = 0.0 if rate == 1 else (order - k) * math.log1p(-rate)
        binomial = (
            special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1)
        )
        terms = binomial + k * math.log(rate) + weight + (k * k - k) / (2 * sigma**2)
        divergence = (
            count
            * (special.logsumexp(terms) if rate < 1 else (order * order - order) / (2 * sigma**2))
            / (order - 1)
        )
        best = min(
            best,
            divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1),
        )
    return best


@pytest.mark.parametrize(("sigma", "count", "rate", "found"), PUBLISHED)
def test_epsilon_is_that_of_dp_accounting_and_at_most_renyis(
    sigma: float, count: int, rate: float, found: float
) -> None:
    mine = epsilon([Releases(sigma, count, rate)], DELTA)
    assert mine == pytest.approx(found, rel=5e-4)
    assert mine <= renyi_bound(sigma, count, rate, DELTA)


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.02), (1.0, 0.3), (3.0, 0.1), (1.0, 1.0)])
@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
def test_delta_of_one_release_is_the_integral_over_outputs(
    sigma: float, rate: float, eps: float
) -> None:
    exact = by_integration(sigma, rate, eps)
    mine = delta_of([Releases(sigma, 1, rate)], eps)
    assert exact * (1 - 1e-6) - 1e-9 <= mine <= exact * 1.01 + 1e-8


def test_releases_of_different_kinds_add_up() -> None:
    mixed = [Releases(2.0, 100, 0.1), Releases(1.0, 40, 0.05), Releases(4.0)]
    assert epsilon(mixed, DELTA) == pytest.approx(3.45065, rel=5e-4)  # dp-accounting 0.6.0
    assert epsilon(mixed[::-1], DELTA) == pytest.approx(epsilon(mixed, DELTA), rel=1e-6)
    assert epsilon(mixed, DELTA) > max(epsilon([one], DELTA) for one in mixed)
    whole = [Releases(10.0, 100), Releases(3.0)]
    assert composed_sigma(whole) == pytest.approx(1 / math.sqrt(1 + 1 / 9))
    assert epsilon(whole, DELTA) == pytest.approx(epsilon([Releases(composed_sigma(whole))], DELTA))
    assert epsilon([Releases(10.0, 100)], DELTA) == pytest.approx(4.37718, rel=1e-5)


def test_sampling_helps_and_a_rate_near_1_does_not() -> None:
    by_rate = [epsilon([Releases(1.0, 10, rate)], DELTA) for rate in (0.01, 0.1, 0.5, 0.99, 1.0)]
    assert by_rate == sorted(by_rate)
    assert by_rate[3] == pytest.approx(by_rate[4], rel=0.02)


def test_the_multiplier_of_an_epsilon_gives_it() -> None:
    assert noise_for(math.inf, DELTA) == 0
    for found in (0.1, 1.0, 8.0):
        assert epsilon([Releases(noise_for(found, DELTA))], DELTA) == pytest.approx(found, rel=1e-9)
    sigma = noise_for(4.0, DELTA, 400, 0.05)
    assert 3.99 < epsilon([Releases(sigma, 400, 0.05)], DELTA) <= 4.0


def test_the_curve_is_what_it_is_known_to_be_at_its_ends() -> None:
    """At ε = 0 it is the total variation of two normals."""
    assert gaussian_delta(1.0, 0) == pytest.approx(math.erf(0.5 / math.sqrt(2)))
    assert (
        epsilon([], DELTA)
        == epsilon([Releases(1.0, 0)], DELTA)
        == epsilon([Releases(1e6)], DELTA)
        == 0
    )
    assert 500_000 < epsilon([Releases(1e-3)], DELTA) < 510_000  # beyond the range of e^ε
    assert epsilon([Releases(0.04, 1, 0.1)], DELTA) <= epsilon([Releases(0.04)], DELTA) < math.inf
