"""Integers of owners: the same on every machine, and within the bounds that sums rely on."""

from __future__ import annotations

import numpy as np
import pytest

from fedloom.trees.exact import (
    MOST_BITS,
    MOST_ROWS,
    STEP,
    bits_for,
    copies,
    exp,
    gradients,
    probabilities,
)
from fedloom.trees.histograms import BLOCK, packed, two_in_one, unpacked, untwined


def test_exp_has_these_bits_on_every_machine() -> None:
    x = np.array([0.0, -1e-9, -0.1, -0.5, -1.0, -2.5, -7.0, -13.37, -25.0, -39.99, -40.0])
    expected = [
        "0x1.0000000000000p+0",
        "0x1.fffffff768fa1p-1",
        "0x1.cf46d99d52b3ap-1",
        "0x1.368b2fc6f95afp-1",
        "0x1.78b56362ca968p-2",
        "0x1.50385c094e8e2p-4",
        "0x1.de16b9c24a98fp-11",
        "0x1.a31ad57ba11f8p-20",
        "0x1.e8a37a45fc32ep-37",
        "0x1.3c9fa90727130p-58",
        "0x1.39792499b1991p-58",
    ]
    assert [value.hex() for value in exp(x).tolist()] == expected
    assert np.abs(exp(x) / np.exp(x) - 1).max() < 1e-10


def test_probabilities_are_those_of_softmax() -> None:
    scores = np.random.default_rng(0).integers(-30 * 2**20, 30 * 2**20, (3, 500))
    e = np.exp((scores - scores.max(0)) * STEP)
    assert np.abs(probabilities(scores) - e / e.sum(0)).max() < 1e-10
    assert np.abs(probabilities(scores[:1]) - 1 / (1 + np.exp(-scores[:1] * STEP))).max() < 1e-10


@pytest.mark.parametrize("classes", [2, 5])
def test_derivatives_are_those_of_the_loss_and_stay_in_their_bounds(classes: int) -> None:
    rng = np.random.default_rng(1)
    scores = rng.integers(-60 * 2**20, 60 * 2**20, (1 if classes == 2 else classes, 2000))
    scores[:, :1000] //= 20
    y = rng.integers(0, classes, 2000)
    g, h = gradients(scores, y, MOST_BITS)
    assert np.abs(g).max() <= 2**MOST_BITS and h.min() >= 1 and h.max() <= 2 ** (MOST_BITS - 2)
    p = probabilities(scores)
    own = np.arange(len(scores))[:, None] + (classes == 2) == y
    assert np.abs(g * 2.0**-MOST_BITS - (p - own)).max() <= 2.0 ** -(MOST_BITS + 1)
    assert np.abs(h * 2.0**-MOST_BITS - p * (1 - p)).max() <= 2.0**-MOST_BITS


def test_no_sum_overflows_at_its_bound() -> None:
    for sign in (-1, 1):
        word = packed(np.array([sign << MOST_BITS]), np.array([1 << (MOST_BITS - 2)]))
        assert unpacked(word * BLOCK)[:, 0].tolist() == [
            sign * BLOCK << MOST_BITS,
            BLOCK << (MOST_BITS - 2),
            BLOCK,
        ]
    for rows in (1, BLOCK, 10**6, 2**21, MOST_ROWS - 1):
        bits = bits_for(rows)
        assert bits >= 4 and rows << bits < 2**31
        most = np.array([[-rows << bits], [rows << bits >> 2], [rows]])
        assert (untwined(two_in_one(most.ravel()), 3) == most.ravel()).all()
    with pytest.raises(ValueError, match="fewer than 134217728 rows"):
        bits_for(MOST_ROWS)


def test_draws_depend_on_content_alone_and_are_poisson() -> None:
    rng = np.random.default_rng(2)
    bins, y = rng.integers(0, 64, (20_000, 5)).astype(np.uint8), rng.integers(0, 2, 20_000)
    drawn = copies(bins, y, tree=3, seed=1)
    order = rng.permutation(len(y))
    assert (copies(bins[order], y[order], tree=3, seed=1) == drawn[order]).all()
    assert (copies(bins, y, tree=4, seed=1) != drawn).any() and (
        copies(bins, y, tree=3, seed=2) != drawn
    ).any()
    shares = np.bincount(drawn, minlength=3)[:3] / len(y)
    assert (
        np.abs(shares - np.array([1, 1, 0.5]) / np.e).max() < 0.015 and abs(drawn.mean() - 1) < 0.03
    )
