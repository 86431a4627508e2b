"""CoBo: the weights' and the pull's fixed points on quadratics, one round written out, and what is
sent.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedloom.core.errors import MethodError
from fedloom.methods import find, steps
from fedloom.methods.peer.cobo import flat_gradient, new_weight, similarity
from tests.methods.groups import accuracy, mates, planted, received, weights_of
from tests.toy import Toy, equal

COBO, ALONE = find("cobo"), find("alone")
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 20, "lr": 0.05}


def weights(toy: Toy, i: int) -> torch.Tensor:
    return toy.party(i).helpers["w"]


# -- the equations on quadratics f_i = a_i/2 |x - μ_i|² --------------------------------------------


def test_two_models_settle_where_the_pull_balances_the_losses() -> None:
    """x_1 - x_2 -> (μ_1 - μ_2) / (1 + 2ρ), and their mean is that of μ."""
    rho, lr = 0.3, 0.1
    mu = torch.tensor([[1.0, -2.0], [3.0, 4.0]], dtype=torch.float64)
    x = torch.zeros_like(mu)
    for _ in range(400):
        x = x - lr * (x - mu + rho * (x - x.flip(0)))
    assert torch.allclose(x[0] - x[1], (mu[0] - mu[1]) / (1 + 2 * rho))
    assert torch.allclose(x.mean(0), mu.mean(0))


def test_peers_with_one_optimum_keep_their_weight() -> None:
    """⟨g_i, g_j⟩ = a_i a_j |z - μ|² is never negative."""
    rng = torch.Generator().manual_seed(0)
    mu, w = torch.randn(5, generator=rng), torch.tensor(1.0)
    for _ in range(50):
        gap = torch.randn(5, generator=rng) - mu
        w = new_weight(w, similarity(2.0 * gap, 0.5 * gap, "product"), 0.1)
        assert w == 1


def test_peers_with_different_optima_lose_their_weight_in_the_time_that_the_formula_gives() -> None:
    """At x_i = μ_i each test adds -γ a_i a_j |μ_i - μ_j|² / 4."""
    gamma, a, b = 0.03, 2.0, 1.5
    mu = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    z, w, tests = mu.mean(0), torch.tensor(1.0), 0
    while w > 0:
        w = new_weight(w, similarity(a * (z - mu[0]), b * (z - mu[1]), "product"), gamma)
        tests += 1
    assert tests == math.ceil(4 / (gamma * a * b * 5.0))


def test_a_cosine_ignores_lengths_and_zero_vectors() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0])
    assert similarity(a, b, "product") == 3
    assert math.isclose(similarity(a, b, "cosine").item(), math.sqrt(0.5), rel_tol=1e-6)
    assert similarity(a, torch.zeros(2), "cosine") == 0


# -- a round ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("personal_head", [True, False])
def test_a_round_is_the_formula_written_out(personal_head: bool) -> None:
    """One full batch, one step: w from gradients at the middles, then x from the models before the
    round.
    """
    lr, rho, gamma = 0.05, 0.4, 0.8
    some: dict[str, Any] = {
        "lr": lr,
        "momentum": 0.0,
        "batch_size": 64,
        "epochs": 1,
        "head_epochs": 0,
    }
    some["personal_head"] = personal_head
    client_contexts = planted(0, m=3, n=64)
    toy = Toy(COBO, client_contexts=client_contexts, **some, rho=rho, gamma=gamma, pairs="all")
    for i in range(3):  # different models
        toy.party(i).params = {k: v + 0.1 * (i + 1) for k, v in toy.party(i).params.items()}
    before = weights_of(toy)
    names = steps.shared_names(before[0], personal_head)
    sums = {}
    for i in range(3):
        for j in range(3):
            middle = {k: (before[i][k] + before[j][k]) / 2 for k in names}
            sums[i, j] = flat_gradient(gradient(toy, i, {**before[i], **middle}, names)).double()
    toy.run(1)
    for i in range(3):
        w = [
            0.0 if i == j else min(max(1 + gamma * float(sums[i, j] @ sums[j, i]), 0), 1)
            for j in range(3)
        ]
        assert torch.allclose(weights(toy, i), torch.tensor(w).double(), atol=1e-5)
        own = gradient(toy, i, before[i], names)
        for k in names:
            pull = sum(w[j] * (before[i][k] - before[j][k]) for j in range(3))
            assert torch.allclose(
                toy.party(i).params[k], before[i][k] - lr * (own[k] + rho * pull), atol=1e-5
            )


def gradient(
    toy: Toy, i: int, at: dict[str, torch.Tensor], names: list[str]
) -> dict[str, torch.Tensor]:
    """By autograd, on all rows."""
    module = toy.client_contexts[i].build()
    module.load_state_dict(at)
    data = toy.client_contexts[i].rows
    torch.nn.functional.cross_entropy(module(data.every), data.labels[data.index]).backward()
    return {k: p.grad for k, p in module.named_parameters() if k in names and p.grad is not None}


def test_without_a_pull_it_is_alone() -> None:
    pulled, alone = Toy(COBO, 4, **TRAINING, rho=0.0).run(3), Toy(ALONE, 4, **TRAINING).run(3)
    assert equal(pulled.tensors(), alone.tensors())


def test_weights_are_symmetric_to_the_bit() -> None:
    toy = Toy(COBO, client_contexts=planted(1), **TRAINING, preset="cosine", gamma=0.1).run(4)
    w = torch.stack([weights(toy, i) for i in toy.engine.ids])
    assert torch.equal(w, w.T)
    assert ((w > 0) & (w < 1)).any()


def test_planted_groups_are_found_and_kept() -> None:
    toy = Toy(COBO, client_contexts=planted(0), **TRAINING, preset="cosine").run(20)
    for i in toy.engine.ids:
        assert set(weights(toy, i).nonzero().flatten().tolist()) == mates(i)
    assert accuracy(toy) > 0.8


# -- what is sent ----------------------------------------------------------------------------------


def test_a_pair_costs_two_models_up_and_four_back() -> None:
    toy = Toy(COBO, 4, **TRAINING, pairs="all", gamma=1e-9).run(1)
    d = sum(v.numel() for v in steps.shared_weights(toy.party(0)).values())
    sent = dict.fromkeys(("request", "test", "give"), 0)
    for entry in toy.fed.ledger:
        if entry.kind in sent:
            sent[entry.kind] += entry.bytes
    assert sent == {"request": 12 * 4 * d, "test": 12 * 8 * d, "give": 12 * 4 * d}
    assert received(toy) == {"bool[4]"}


def test_pairs_are_few_after_the_first_rounds_and_never_outside_the_graph() -> None:
    ring = {i: ((i - 1) % 6, (i + 1) % 6) for i in range(6)}
    toy = Toy(COBO, 6, **TRAINING, graph=ring).run(10)
    asked = [e for e in toy.fed.ledger if e.kind == "test"]
    assert sum(e.count for e in asked if e.round == 0) == 4  # 2/6 of six pairs, both ways
    assert sum(e.count for e in asked if e.round == 1) == 12
    assert sum(e.count for e in asked if e.round == 9) == 4
    assert all(weights(toy, i).nonzero().flatten().tolist() == sorted(ring[i]) for i in range(6))


def test_a_pull_that_overshoots_is_refused() -> None:
    with pytest.raises(MethodError, match=r"lower params\.rho"):
        Toy(COBO, 4, lr=0.5, rho=1.0).run(1)


def test_an_absent_peer_and_engines_that_agree() -> None:
    toys = [Toy(COBO, 4, **TRAINING, isolated=isolated, pairs="all") for isolated in (False, True)]
    for toy in toys:
        toy.run(1).run(1, start=1, present=[0, 2, 3]).run(1, start=2)
    assert equal(toys[0].tensors(), toys[1].tensors())
