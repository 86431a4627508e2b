"""Attacks find what was planted, and nothing where there is nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.protect import leaks

K, N = 4, 12


def world(seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Rows that each client trained on, and rows that nobody did, of one distribution."""
    chance = torch.Generator().manual_seed(seed)

    def rows() -> tuple[Tensor, Tensor]:
        y = torch.arange(60) % K
        return torch.randn(60, 5, generator=chance) + y[:, None], y

    return [rows() for _ in range(N)], [rows() for _ in range(N)]


def test_shares_by_hand() -> None:
    overall = torch.tensor([0.5, 0.5])
    mean = torch.tensor([[0.6, 0.4], [0.2, 0.8]])  # means over clients: 0.4, 0.6
    expected = torch.tensor([[1.5, 0.4 / 0.6], [0.5, 0.8 / 0.6]])
    expected = expected / expected.sum(-1, keepdim=True)
    assert torch.allclose(leaks.guessed_shares(mean, overall), expected)


def test_exact_shares_are_found_and_equal_messages_tell_no_more_than_chance() -> None:
    true = torch.from_numpy(np.random.default_rng(0).dirichlet([0.5] * K, N))
    overall = true.mean(0)
    told = leaks.labels("m", true, true), leaks.class_shares("m", true, true, overall)
    assert [one.success for one in told] == [1.0, 1.0] and told[1].chance < 0.8
    silent = leaks.guessed_shares(torch.full((N, K), 0.25, dtype=torch.float64), overall)
    nothing = leaks.class_shares("m", silent, true, overall)
    assert nothing.success == pytest.approx(nothing.chance)
    guess = leaks.labels("m", silent, true)
    assert guess.success <= guess.chance
    assert guess.gain is not None and guess.gain[0] < 0 < guess.gain[1]


def memorized(rows: tuple[Tensor, Tensor]) -> leaks.Predict:
    """A model that is sure of the class of the rows that it knows."""

    def predict(x: Tensor) -> Tensor:
        same = (x[:, None] == rows[0][None]).all(-1)
        logits = torch.zeros(len(x), K, dtype=torch.float64)
        for n, k in same.nonzero().tolist():
            logits[n, rows[1][k]] = 5.0
        return logits.log_softmax(-1)

    return predict


def test_rows_that_models_memorized_are_told_apart() -> None:
    members, others = world()
    found = leaks.membership("m", [memorized(rows) for rows in members], members, others)
    assert found.success == 1.0 and found.chance == 0.5 and found.parties == N


def test_models_that_saw_no_row_tell_nothing_of_membership() -> None:
    members, others = world()
    weights = [
        torch.randn(5, K, generator=torch.Generator().manual_seed(i)).double() for i in range(N)
    ]
    models = [lambda x, w=w: (x.double() @ w).log_softmax(-1) for w in weights]
    found = leaks.membership("m", models, members, others)
    assert found.gain is not None and found.gain[0] < 0 < found.gain[1]
    assert found.success == pytest.approx(0.5, abs=0.05)


def test_the_class_shares_of_a_client_are_no_membership() -> None:
    """A model that always says class 0 is right for a client of class 0 alone, of which nothing
    else is known.
    """
    members, others = world()
    alone = [(x[y == 0], y[y == 0]) for x, y in members]
    constant = torch.tensor([5.0, 0, 0, 0]).double().log_softmax(-1)
    found = leaks.membership("m", [lambda x: constant.expand(len(x), K)] * N, alone, others)
    assert found.success == 0.5


def test_linear_messages_are_inverted_and_unrelated_ones_are_not() -> None:
    chance = torch.Generator().manual_seed(0)
    rows, mixing = torch.randn(200, 6, generator=chance), torch.randn(6, 6, generator=chance)
    sent, noise = rows @ mixing, torch.randn(200, 6, generator=chance)
    inverted = leaks.explained(sent[100:], rows[100:], (sent[:100], rows[:100]))
    nothing = leaks.explained(noise[100:], rows[100:], (noise[:100], rows[:100]))
    assert inverted > 0.99
    assert nothing < 0.05


def test_an_imitation_answers_like_the_client() -> None:
    chance = torch.Generator().manual_seed(0)
    x, weights = torch.randn(300, 3, generator=chance), torch.randn(3, K, generator=chance)
    answers = (x @ weights).log_softmax(-1)
    found = leaks.imitation(x[:200], answers[:200])(x[200:])
    assert float((found.argmax(-1) == answers[200:].argmax(-1)).double().mean()) > 0.85
