"""Clipping, noise, and what the accountant proves against the exact curve of the Gaussian mechanism."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedloom.core.rng import stream
from fedloom.protect.privacy import clipped_tree, epsilon, noisy


def normal(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def exact_delta(eps: float, mu: float) -> float:
    """The least δ at this ε where sensitivity over noise is `mu`: Balle and Wang 2018, Theorem 8."""
    return normal(mu / 2 - eps / mu) - math.exp(eps) * normal(-mu / 2 - eps / mu)


def exact_epsilon(mu: float, delta: float) -> float:
    """The least ε at this δ, by bisection: δ falls with ε."""
    if exact_delta(0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while exact_delta(high, mu) > delta:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if exact_delta(middle, mu) > delta else (low, middle)
    return high


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-8])
@pytest.mark.parametrize("releases", [1, 10, 300])
@pytest.mark.parametrize("multiplier", [0.7, 2.0, 8.0, 30.0])
def test_epsilon_is_at_least_the_true_one_and_close_to_it(multiplier: float, releases: int, delta: float) -> None:
    true = exact_epsilon(math.sqrt(releases) / multiplier, delta)
    assert true <= epsilon(multiplier, releases, delta) <= 1.35 * true


def test_the_exact_curve_is_what_it_is_known_to_be() -> None:
    """At ε = 0 it is the total variation of two normals, 2 Φ(μ/2) - 1."""
    assert exact_delta(0, 1.0) == pytest.approx(2 * normal(0.5) - 1)
    assert exact_delta(exact_epsilon(0.5, 1e-5), 0.5) == pytest.approx(1e-5, rel=1e-6)


def test_epsilon_rises_with_releases_and_falls_with_noise_and_delta() -> None:
    assert epsilon(2.0, 0, 1e-5) == 0.0
    by_releases = [epsilon(2.0, n, 1e-5) for n in (0, 1, 2, 5, 20, 100, 1000)]
    assert by_releases == sorted(set(by_releases))
    by_noise = [epsilon(s, 10, 1e-5) for s in (0.3, 0.5, 1.0, 2.0, 8.0, 50.0)]
    assert by_noise == sorted(set(by_noise), reverse=True)
    by_delta = [epsilon(2.0, 10, d) for d in (1e-9, 1e-6, 1e-3, 0.1)]
    assert by_delta == sorted(set(by_delta), reverse=True)


@pytest.mark.parametrize(("multiplier", "releases"), [(1e-3, 1), (0.05, 10_000), (1e6, 1), (1e3, 10**6)])
def test_epsilon_is_a_number_at_the_ends(multiplier: float, releases: int) -> None:
    found = epsilon(multiplier, releases, 1e-5)
    assert 0 <= found < math.inf
    mu = math.sqrt(releases) / multiplier
    if mu < 30:  # beyond, the exact curve leaves the range of floats
        assert found >= exact_epsilon(mu, 1e-5)


def test_a_tree_is_clipped_as_one_vector() -> None:
    tree = {"a": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([0.0, 4.0, 0.0])}
    cut = clipped_tree(tree, 2.5)
    assert torch.allclose(cut["a"], tree["a"] / 2) and torch.allclose(cut["b"], tree["b"] / 2)
    assert all(torch.equal(v, tree[k]) for k, v in clipped_tree(tree, 5.0).items())


def test_noise_has_the_deviation_asked_for_and_repeats() -> None:
    x = torch.full((200, 300), 7.0)
    one, again = (noisy(x, 0.5, stream(1, "privacy", 3)) for _ in range(2))
    other = noisy(x, 0.5, stream(1, "privacy", 4))
    assert torch.equal(one, again) and not torch.equal(one, other)
    noise = (one - x).double()
    assert one.dtype == x.dtype and one.shape == x.shape
    assert abs(float(noise.mean())) < 4 * 0.5 / math.sqrt(60_000)
    assert float(noise.std()) == pytest.approx(0.5, rel=4 / math.sqrt(2 * 60_000))
    within = np.abs(noise.numpy()) < 0.5
    assert within.mean() == pytest.approx(2 * normal(1.0) - 1, abs=0.01)
    assert torch.equal(noisy(x, 0.0, stream(1, "privacy", 3)), x)
    assert noisy(torch.zeros((), dtype=torch.float64), 1.0, stream(1, "privacy", 3)).dtype == torch.float64
