"""Mean embeddings: the kernel that they stand for, their sensitivity, and the noise that an ε
needs.
"""

import numpy as np
import pytest
import torch

from fedloom.protect.accountant import gaussian_delta, noise_for
from fedloom.protect.kernel import (
    features,
    frequencies,
    mean_embedding,
    private_mean,
)
from fedloom.protect.noise import Draws

SIZE, WIDTH = 2048, 1.5


def omega(seed: int = 0, inputs: int = 3) -> torch.Tensor:
    return frequencies(inputs, SIZE, WIDTH, np.random.default_rng(seed))


def test_features_have_length_1_and_approximate_a_gaussian_kernel() -> None:
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    phi = features(x, omega())
    assert phi.shape == (40, SIZE) and torch.allclose(
        phi.norm(dim=1), torch.ones(40, dtype=torch.float64)
    )
    exact = torch.exp(-torch.cdist(x, x).square() / (2 * WIDTH**2))
    # the largest of 1,600 errors of size 1 / sqrt(D)
    assert (phi @ phi.T - exact).abs().max() < 5 / SIZE**0.5
    assert (phi @ phi.T - exact).abs().mean() < 1 / SIZE**0.5


@pytest.mark.parametrize("n", [1, 7, 50])
def test_a_replaced_row_moves_the_mean_by_at_most_2_over_n(n: int) -> None:
    generator, worst = torch.Generator().manual_seed(n), 0.0
    for _ in range(50):
        x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
        y = x.clone()
        y[0] = 30 * torch.randn(3, generator=generator, dtype=torch.float64)
        worst = max(worst, float((mean_embedding(x, omega()) - mean_embedding(y, omega())).norm()))
    assert worst <= 2 / n + 1e-12
    assert worst > 1.2 / n  # far rows are nearly orthogonal: sqrt(2) / n


def test_noise_of_scores_does_not_depend_on_the_size() -> None:
    phi = features(torch.zeros(1, 3, dtype=torch.float64), omega())[0]
    clean = torch.zeros(SIZE, dtype=torch.float64)
    scores = [
        float(private_mean(clean, 50, 2.0, Draws(np.random.default_rng(seed))) @ phi)
        for seed in range(1000)
    ]
    assert np.std(scores) == pytest.approx(2 * 2.0 / 50, rel=0.1)
    assert abs(np.mean(scores)) < 4 * 2 * 2.0 / 50 / 1000**0.5


@pytest.mark.parametrize(
    ("multiplier", "epsilon"), [(0.5, 9.9973), (1, 4.3772), (2, 1.9931), (4, 0.9263)]
)
def test_the_multiplier_is_exact(multiplier: float, epsilon: float) -> None:
    """Against the numbers of dp-accounting's privacy loss distribution at δ = 1e-5."""
    assert noise_for(epsilon, 1e-5) == pytest.approx(multiplier, rel=2e-4)
    assert gaussian_delta(multiplier, epsilon) == pytest.approx(1e-5, rel=2e-3)


def test_no_epsilon_is_no_noise_and_a_smaller_one_needs_more() -> None:
    assert noise_for(float("inf"), 1e-5) == 0
    found = [noise_for(epsilon, 1e-5) for epsilon in (0.1, 0.5, 1, 2, 8)]
    assert found == sorted(found, reverse=True)
