"""FedeRiCo: the mixture, whom it draws, and how it weighs rows and models."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.context import epoch_plan
from fedloom.core.faults import Faults
from fedloom.methods.peer.federico import WORST, draw_neighbours, expectation
from tests.methods.groups import accuracy, asked, mates, planted, received, row_losses, weights_of
from tests.toy import Toy, common, contexts, equal, rows

FEDERICO, ALONE, GOSSIP = (methods.find(n) for n in ("federico", "alone", "gossip"))
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 20, "lr": 0.05}


def pi(toy: Toy) -> np.ndarray:
    """Every peer's shares (m, m)."""
    return torch.stack([toy.party(i).mixture["log_pi"].exp() for i in toy.engine.ids]).numpy()


# -- the equations ---------------------------------------------------------------------------------


def test_expectation_by_hand() -> None:
    losses = np.array([[0.1, 2.0, 0.7, 0.0], [1.5, 0.3, 0.7, 3.0], [0.2, 0.2, 4.0, 1.0]])
    shares = np.array([0.2, 0.1, 0.3])  # the other 0.4 belong to those whose loss is not known
    r = shares[:, None] * np.exp(-losses)
    r /= r.sum(0)
    log_pi, log_r = expectation(torch.from_numpy(np.log(shares)), torch.from_numpy(losses))
    assert np.abs(log_r.exp().numpy() - r).max() < 1e-15
    assert np.abs(log_pi.exp().numpy() - 0.6 * r.mean(1)).max() < 1e-15
    assert math.isclose(log_pi.exp().sum(), 0.6)


def test_expectation_stands_hopeless_models_and_recovers() -> None:
    log_pi = torch.log(torch.tensor([0.5, 0.5]).double())
    losses = torch.tensor([[0.0] * 3, [WORST] * 3]).double()
    for _ in range(10):
        log_pi, log_r = expectation(log_pi, losses)
        assert log_pi.isfinite().all() and log_r.isfinite().all()
    assert log_pi[0].exp() == 1 and log_pi[1].exp() == 0
    for _ in range(12):
        log_pi, _ = expectation(log_pi, losses.flip(0))
    assert log_pi[1].exp() == 1  # had π itself been kept, it would be 0


def test_draws_follow_the_shares_or_chance() -> None:
    shares, rng = {3: math.log(0.6), 5: math.log(0.3), 8: math.log(0.1)}, np.random.default_rng(0)
    for epsilon, p in (
        (0.0, (0.6, 0.3, 0.1)),
        (1.0, (1 / 3,) * 3),
        (0.5, (7 / 15, 19 / 60, 13 / 60)),
    ):
        first = [draw_neighbours(rng, shares, 1, epsilon)[0] for _ in range(4000)]
        for j, expected in zip(shares, p, strict=True):
            assert abs(first.count(j) / 4000 - expected) < 4 * math.sqrt(
                expected * (1 - expected) / 4000
            )


def test_draws_are_different_and_at_most_all() -> None:
    rng, far = np.random.default_rng(0), {j: -1e4 * j for j in range(5)}
    for k in range(8):
        found = draw_neighbours(rng, far, k, 0.3)
        assert len(set(found)) == len(found) == min(k, 5)
    assert draw_neighbours(rng, far, 3, 0.0) == [0, 1, 2]
    assert draw_neighbours(rng, {}, 3, 0.3) == []


# -- the mixture, by NumPy -------------------------------------------------------------------------


@pytest.mark.parametrize("personal_head", [True, False])
def test_three_rounds_by_hand(personal_head: bool) -> None:
    """Losses, their memory, responsibilities, shares, weights of rows, and mixed models, from
    trained weights.
    """
    settings: dict[str, Any] = {
        "neighbours": 2,
        "loss_momentum": 0.4,
        "personal_head": personal_head,
        **TRAINING,
    }
    toy, m = Toy(FEDERICO, 5, **settings), 5
    shares = np.full((m, m), 1 / m)
    losses: list[dict[int, np.ndarray]] = [{} for _ in range(m)]
    met = set()
    for t in range(3):
        twin = Toy(FEDERICO, 5, **settings)
        twin.engine.load(copy.deepcopy(toy.engine.states()))
        twin.fed.call(twin.engine.ids, "update", shared={"t": t})
        trained = weights_of(twin)
        toy.run(1, start=t)
        notes = toy.engine.notes()
        for i in range(m):
            took = [j for j in range(m) if j != i and notes[i]["mixing"][j] > 0]
            own = {k: v for k, v in trained[i].items() if k.startswith("head.") and personal_head}
            for j in (i, *took):
                new = row_losses({**trained[j], **own}, toy.party(i).data)
                losses[i][j] = 0.4 * losses[i][j] + 0.6 * new if j in losses[i] else new
            known = sorted(losses[i])
            r = shares[i, known, None] * np.exp(-np.stack([losses[i][j] for j in known]))
            r /= r.sum(0)
            shares[i, known] = shares[i, known].sum() * r.mean(1)
            mixing = np.array([shares[i, j] * (j in (i, *took)) for j in range(m)])
            mixing /= mixing.sum()
            assert len(took) == 2
            assert np.allclose(notes[i]["mixing"], mixing, atol=1e-6)
            assert np.allclose(pi(toy)[i], shares[i], atol=1e-6)
            assert math.isclose(notes[i]["own weight in pi"], shares[i, i], abs_tol=1e-6)
            weights = toy.party(i).mixture["weights"].numpy()
            assert np.allclose(weights, r[known.index(i)] / r[known.index(i)].mean(), atol=1e-5)
            assert toy.party(i).mixture["known"].nonzero().flatten().tolist() == known
            for k, v in toy.party(i).params.items():
                mean = sum(mixing[j] * trained[j][k].double() for j in range(m))
                assert torch.allclose(v.double(), own[k].double() if k in own else mean, atol=1e-6)
            met.add(len(known))
    assert met > {3}  # somebody met somebody new later, whose share had stayed what it was
    assert np.allclose(pi(toy).sum(1), 1)


def test_who_never_answered_keeps_its_share() -> None:
    toy = Toy(FEDERICO, 6, neighbours=None, **TRAINING).run(4, present=[0, 1, 2, 3])
    for i in range(4):
        assert np.allclose(pi(toy)[i, 4:], 1 / 6)
        assert math.isclose(pi(toy)[i, :4].sum(), 4 / 6)
    assert np.allclose(pi(toy)[4:], 1 / 6)


def test_equal_peers_have_equal_shares() -> None:
    client_contexts = contexts(4, make=common, data=lambda i: rows(16, 5))
    toy = Toy(FEDERICO, client_contexts=client_contexts, neighbours=None, batch_size=16).run(
        4
    )  # all 16 rows in each batch
    assert np.allclose(pi(toy), 1 / 4, atol=1e-5)
    assert np.allclose(toy.engine.notes()[0]["mixing"], 1 / 4, atol=1e-5)


def test_a_model_that_has_diverged_gets_nothing() -> None:
    toy = Toy(FEDERICO, 3, neighbours=None, **TRAINING).run(1)
    party = toy.party(0)
    body = {k: v for k, v in weights_of(toy)[0].items() if not k.startswith("head.")}
    broken = [
        {k: torch.full_like(v, x) for k, v in body.items()} for x in (1e4, math.inf, math.nan)
    ]
    losses = party.losses([body, *broken])
    assert losses.isfinite().all() and (losses[3] == WORST).all()
    assert losses.max() == WORST and losses[0].max() < WORST and (losses[1:3] == WORST).any(1).all()
    party.update_mixture([0, 1, 2], losses[[0, 3, 0]])
    assert party.mixture["log_pi"][1].exp() < 1e-12
    assert math.isclose(pi(toy)[0].sum(), 1)


# -- local training --------------------------------------------------------------------------------


def test_rows_are_weighted_in_training() -> None:
    """SGD by hand on the weighted mean, pass by pass: head alone, then body alone."""
    toy = Toy(FEDERICO, 2, lr=0.1, epochs=2, batch_size=8)
    party, net = toy.party(1), common()
    n = len(party.data)
    weights = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 2
    party.mixture = {**party.mixture, "weights": weights / weights.mean()}
    party.update(t=0)
    x, y = party.data.every, party.data.labels[party.data.index]
    for part, passes in ((net.head, [0]), (net.body, [1, 2])):
        momentum = {k: torch.zeros_like(p) for k, p in part.named_parameters()}
        for number in passes:
            for which in epoch_plan(party.stream("batches", number), n, 1, 8):
                each = F.cross_entropy(net(x[which]), y[which], reduction="none")
                found = torch.autograd.grad(
                    (each * party.mixture["weights"][which]).mean(), list(part.parameters())
                )
                for (k, p), g in zip(part.named_parameters(), found, strict=True):
                    momentum[k] = 0.9 * momentum[k] + g
                    p.data -= 0.1 * momentum[k]
    for k, v in net.state_dict().items():
        assert torch.allclose(party.params[k], v, atol=1e-6)
    plain = Toy(ALONE, 2, lr=0.1, epochs=2, batch_size=8).run(1).party(1).params
    assert any((plain[k] - v).abs().max() > 1e-4 for k, v in party.params.items())


def test_without_neighbours_everybody_is_alone() -> None:
    toy, alone = Toy(FEDERICO, neighbours=0, **TRAINING).run(4), Toy(ALONE, **TRAINING).run(4)
    assert all(torch.allclose(v, alone.tensors()[k], atol=1e-5) for k, v in toy.tensors().items())
    assert all((toy.party(i).mixture["weights"] == 1).all() for i in range(4))
    assert np.allclose([n["mixing"] for n in toy.engine.notes().values()], np.eye(4))
    assert not asked(toy)


def test_fine_tuning_is_that_of_any_learner() -> None:
    ours, plain = (Toy(m, **TRAINING).party(2) for m in (FEDERICO, ALONE))
    ours.mixture = {**ours.mixture, "weights": torch.rand(len(ours.data))}
    tuned: list[dict[str, Tensor]] = []
    for party in (ours, plain):
        party.prepare(eval_mode="tuned", broadcast={})
        tuned.append(party.params)
    assert equal(*tuned)
    assert not equal(tuned[0], Toy(ALONE, **TRAINING).party(2).params)


# -- whom it speaks to -----------------------------------------------------------------------------


def test_only_neighbours_that_are_present_are_asked() -> None:
    ring = {i: sorted({(i - 1) % 6, (i + 1) % 6}) for i in range(6)}
    toy = Toy(FEDERICO, 6, graph=ring, neighbours=2, **TRAINING).run(3)
    assert asked(toy) == {(i, j): 3 for i in ring for j in ring[i]}
    assert all((pi(toy)[i] > 0).nonzero()[0].tolist() == sorted([i, *ring[i]]) for i in range(6))
    toy.run(2, start=3, present=[0, 1, 2, 4])
    for (i, j), n in asked(toy).items():
        assert n == 3 + 2 * ({i, j} <= {0, 1, 2, 4})


def test_so_many_are_asked_as_were_asked_for() -> None:
    toy = Toy(FEDERICO, 6, neighbours=2, epsilon=1.0).run(6)
    pairs = asked(toy)
    assert all(sum(n for (i, _), n in pairs.items() if i == k) == 12 for k in range(6))
    assert all(len({j for i, j in pairs if i == k}) > 2 for k in range(6))
    toy.run(6, start=6, present=[0, 1, 3, 5])  # of those that are there, as many
    assert all(
        sum(n for (i, _), n in asked(toy).items() if i == k) == 12 + 12 * (k in {0, 1, 3, 5})
        for k in range(6)
    )


def test_the_coordinator_gets_no_number() -> None:
    toy = Toy(FEDERICO, 5, neighbours=3).run(3)
    assert len(received(toy)) == 1
    assert "bool" in next(iter(received(toy))) and "float" not in next(iter(received(toy)))
    assert asked(toy)


# -- whether it works ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found_and_learn(seed: int) -> None:
    settings: dict[str, Any] = {
        "neighbours": 3,
        "personal_head": False,
        "epochs": 2,
        "batch_size": 40,
        "lr": 0.1,
    }
    toy = Toy(FEDERICO, client_contexts=planted(seed), **settings).run(25)
    shares = pi(toy)
    for i in range(8):
        inside = shares[i, sorted(mates(i))].sum()
        outside = 1 - inside - shares[i, i]
        assert inside > 10 * outside and inside > 0.05
    gossip = Toy(GOSSIP, client_contexts=planted(seed), **settings).run(25)
    assert accuracy(toy) > max(0.6, accuracy(gossip) + 0.1)


# -- engines and faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [None, Faults(dropout=0.1, crash=0.1, nan=0.1)])
def test_isolated_parties_give_the_same_bits(faults: Faults | None) -> None:
    settings: dict[str, Any] = {"neighbours": 2, "faults": faults, **TRAINING}
    one, two = (
        Toy(FEDERICO, 5, isolated=isolated, **settings).run(5) for isolated in (False, True)
    )
    assert equal(one.tensors(), two.tensors())
    assert one.engine.notes() == two.engine.notes()
    assert np.abs(pi(one).sum(1) - 1).max() < 1e-12
    assert bool(one.fed.failures) == (faults is not None)
