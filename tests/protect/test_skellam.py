"""Skellam noise: the exact distribution, closed under sums, and an ε that its exact privacy loss
stays below.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from scipy import stats

from fedloom.protect.accountant import Releases, epsilon, renyi_epsilon
from fedloom.protect.skellam import Poisson, excess, skellam


def source(seed: int):
    return np.random.default_rng(seed).bytes


def _next(given: list[bytes], _: int) -> bytes:
    return given.pop(0)


def chi_square(values: np.ndarray, law: stats.rv_frozen) -> float:
    """The p-value of the counts of values, in cells of at least 20 that are expected."""
    low, high = int(law.ppf(1e-3)), int(law.ppf(1 - 1e-3))
    edges = np.unique(np.linspace(low, high, 40).round())
    cells = np.concatenate([[-np.inf], edges, [np.inf]])
    expected = np.diff(np.concatenate([[0.0], law.cdf(edges), [1.0]])) * len(values)
    counts = np.histogram(values, np.concatenate([cells[:1], edges + 0.5, cells[-1:]]))[0]
    keep = expected > 20
    rest = [expected[~keep].sum(), counts[~keep].sum()]
    e, c = np.append(expected[keep], max(rest[0], 1e-9)), np.append(counts[keep], rest[1])
    return float(stats.chi2.sf(((c - e) ** 2 / e)[e > 5].sum(), int((e > 5).sum()) - 1))


@pytest.mark.parametrize("mean", [1, 7, 400, 123_457])
def test_poisson_is_exact(mean: int) -> None:
    values = Poisson(mean).draw(100_000, source(mean))
    assert chi_square(values, stats.poisson(mean)) > 1e-4
    table = Poisson(mean)
    exact = stats.poisson(mean).cdf(table._first + np.arange(len(table._below)))
    assert np.allclose([below / 2**128 for below in table._below], exact, rtol=1e-9, atol=1e-13)


def test_sixty_four_bits_that_do_not_decide_are_followed_by_others() -> None:
    table = Poisson(9)
    place = 5
    high, low = int(table._words[place]), table._below[place] & (2**64 - 1)
    for more, expected in ((low - 1, place), (low, place + 1)):
        given = [high.to_bytes(8, "little"), more.to_bytes(8, "little")]
        assert table.draw(1, partial(_next, given)).item() == table._first + expected


def test_sums_of_shares_are_skellam() -> None:
    total = sum(skellam(50, 60_000, source(k)) for k in range(4))
    assert chi_square(np.asarray(total), stats.skellam(200, 200)) > 1e-4
    assert chi_square(np.asarray(total), stats.skellam(150, 150)) < 1e-9  # a share less is noticed


@pytest.mark.parametrize(("sigma", "norm"), [(1.0, 8), (2.0, 20), (0.7, 64)])
def test_epsilon_is_above_that_of_the_exact_privacy_loss(sigma: float, norm: int) -> None:
    """One number: δ of Skellam noise of variance (σ Δ)² that is moved by Δ, summed over all
    integers.
    """
    half = math.ceil((sigma * norm) ** 2 / 2)
    claimed = epsilon([Releases(sigma, 1, 1.0, excess(sigma, norm, 1))], 1e-5)
    k = np.arange(-40 * int(sigma * norm) - norm, 40 * int(sigma * norm) + norm)
    law = stats.skellam(half, half)
    delta = np.maximum(0.0, law.pmf(k) - math.exp(claimed) * law.pmf(k + norm)).sum()
    assert delta <= 1e-5
    fewer = np.maximum(0.0, law.pmf(k) - math.exp(claimed / 2) * law.pmf(k + norm)).sum()
    assert fewer > 1e-5  # and half of it would be too little


def test_renyi_composition_is_above_the_exact_one_of_gaussian_noise() -> None:
    some = [Releases(3.0, 10), Releases(5.0, 40)]
    exact = epsilon(some, 1e-5)
    assert exact < renyi_epsilon(some, 1e-5) < 1.35 * exact
    more = [*some, Releases(4.0, 2, 1.0, 0.01)]
    assert epsilon(more, 1e-5) > renyi_epsilon([*some, Releases(4.0, 2)], 1e-5) > exact
