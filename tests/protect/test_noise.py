"""Noise and subsets for differential privacy: their distribution, where they come from, and an
audit of the claim.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedloom.core.context import ClientContext
from fedloom.core.party import Party
from fedloom.core.rng import stream
from fedloom.protect.accountant import gaussian_delta, noise_for
from fedloom.protect.noise import LATTICE, SIMULATED, Draws, charge, draws

COUNT = 200_000


def party(**context: Any) -> Party[Any]:
    return Party(None, ClientContext(3, seed=5, **context))


def test_fresh_noise_is_standard_normal_and_never_repeats() -> None:
    rng = Draws(None)
    zero = torch.zeros(COUNT, dtype=torch.float64)
    one, two = (rng.blur(zero, 3.0, 2.0).numpy() for _ in range(2))
    assert stats.kstest(one / 3, "norm").pvalue > 1e-6
    assert not (one == two).any() and abs(np.corrcoef(one, two)[0, 1]) < 6 / math.sqrt(COUNT)
    assert abs(np.corrcoef(one[: COUNT // 2], one[COUNT // 2 :])[0, 1]) < 9 / math.sqrt(COUNT)
    assert Draws(None).blur(torch.zeros(3, 5), 1.0, 1.0).shape == (3, 5)
    assert Draws(None).blur(torch.zeros(()), 1.0, 1.0).dtype == torch.float32


def test_fresh_releases_lie_on_a_lattice() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    steps = Draws(None).blur(x, 0.7, 0.5) / (0.5 * LATTICE)
    assert torch.equal(steps, steps.round())


def test_a_random_subset_includes_each_row_independently() -> None:
    for rng in (Draws(None), Draws(stream(0, "subset"))):
        found = torch.zeros(400, 50)
        for row in found:
            row[rng.included(50, 0.3)] = 1
        assert abs(float(found.mean()) - 0.3) < 5 * math.sqrt(0.21 / found.numel())
        assert float(found.sum(1).var()) == pytest.approx(50 * 0.21, rel=0.4)  # not of one size
        pairs = torch.corrcoef(found.T) - torch.eye(50)
        assert float(pairs.abs().max()) < 6 / math.sqrt(400)
        assert len(rng.included(50, 1.0)) == 50


def test_only_a_party_with_a_secret_takes_fresh_draws() -> None:
    x = torch.zeros(4)
    simulated = [draws(party(), "p", 1).blur(x, 1.0, 1.0) for _ in range(2)]
    stream_ = torch.from_numpy(party().stream("p", 1).standard_normal(4, np.float32))
    assert torch.equal(*simulated) and torch.equal(simulated[0], stream_)
    hidden = [draws(party(secret=7), "p", 1).blur(x, 1.0, 1.0) for _ in range(2)]
    assert not torch.equal(*hidden)
    for secret, value in ((None, 1.0), (7, 0.0)):
        one = party(secret=secret)
        draws(one, "p")
        assert one.take_notes() == {SIMULATED: value}


def test_a_release_is_charged_where_there_is_a_budget() -> None:
    charge(party(), 1.0)
    seen: list[tuple[float, int, float]] = []
    charge(party(privacy_budget=lambda *of: seen.append(of), secret=1), 2.0, 3, 0.1)
    # noise from the seed is no private release
    charge(party(privacy_budget=lambda *of: seen.append(of)), 2.0)
    assert seen == [(2.0, 3, 0.1)]


@pytest.mark.parametrize(("noise", "holds"), [(1.0, True), (0.25, False)])
def test_an_attack_finds_no_more_than_epsilon_allows(noise: float, holds: bool) -> None:
    """A lower bound of ε from 20,000 releases of two adjacent data sets: it exceeds 1 with a
    quarter of the noise.
    """
    sigma, trials = noise_for(1.0, 1e-5) * noise, 20_000
    # each number is a release
    releases = [torch.full((trials,), s, dtype=torch.float64) for s in (0.0, 1.0)]
    without, with_ = (Draws(None).blur(x, sigma, 1.0).numpy() for x in releases)
    bounds = []
    for threshold in (0.0, 1.0, 2 * sigma, 3 * sigma):
        hits, false = int((with_ > threshold).sum()), int((without > threshold).sum())
        low = stats.beta.ppf(0.0005, hits, trials - hits + 1) if hits else 0.0
        high = stats.beta.ppf(0.9995, false + 1, trials - false) if false < trials else 1.0
        bounds.append(math.log(max(low - 1e-5, 1e-12) / high))
    assert (max(bounds) <= 1.0) == holds
    assert gaussian_delta(sigma, 1.0) <= 1e-5 * 1.0001 or not holds
