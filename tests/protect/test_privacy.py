"""Clipping, and noise without a guarantee."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedloom.core.rng import stream
from fedloom.protect.privacy import clipped_tree, noisy


def normal(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


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
    assert (
        noisy(torch.zeros((), dtype=torch.float64), 1.0, stream(1, "privacy", 3)).dtype
        == torch.float64
    )
