"""DPFL: the double greedy on rewards that are known, one round written out, and whom it asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.methods import find, steps
from fedloom.methods.peer import dpfl, held_out
from fedloom.methods.peer.dpfl import greedy
from tests.methods.groups import asked, mates, planted, received, row_losses, weights_of
from tests.toy import Toy, equal

DPFL = find("dpfl")
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 20, "lr": 0.05}


def masks(toy: Toy, name: str) -> list[set[int]]:
    return [set(toy.party(i).peers[name].nonzero().flatten().tolist()) for i in toy.engine.ids]


# -- the double greedy -----------------------------------------------------------------------------


def test_with_additive_rewards_it_takes_exactly_the_gains_in_any_order() -> None:
    gains = {"a": 0.5, "b": -0.1, "c": 0.2, "d": -2.0}
    for order in permutations(gains):
        for draw in (0.0, 0.5, 0.999):
            assert set(greedy(lambda s: sum(gains[i] for i in s), order, [draw] * 4, 4)) == {
                "a",
                "c",
            }


def test_a_candidate_that_changes_nothing_is_taken_and_the_budget_ends_the_search() -> None:
    assert greedy(lambda s: 0.0, ["a", "b", "c"], [0.999] * 3, 2) == ["a", "b"]
    assert greedy(lambda s: 1 / 0, ["a"], [0.5], 0) == []
    assert greedy(lambda s: 1 / 0, [], [], 3) == []


def test_a_tie_is_decided_by_a_fair_draw() -> None:
    """Either of two is worth as much as both are not: a = b = 1."""

    def reward(s: Sequence[str]) -> float:
        return float(len(s) == 1)

    assert [greedy(reward, ["a", "b"], [draw, 0.5], 2) for draw in (0.49, 0.5)] == [["a"], ["b"]]


def test_half_of_the_optimum_is_reached_in_expectation() -> None:
    """Coverage minus cost, six elements: the mean over many draws."""
    covers = [{0, 1, 2}, {2, 3}, {3, 4, 5}, {0, 5}, {1, 4, 6}, {6, 7}]

    def reward(s: Sequence[str]) -> float:
        sets = [covers[int(i)] for i in s]
        return len(set().union(*sets)) - 1.1 * len(sets) + 2

    optimum = max(reward([str(i) for i in range(6) if n >> i & 1]) for n in range(64))
    grid = (np.arange(5) + 0.5) / 5
    rng = np.random.default_rng(0)
    values = [
        reward(greedy(reward, [str(i) for i in range(6)], rng.choice(grid, 6).tolist(), 6))
        for _ in range(300)
    ]
    assert np.mean(values) >= optimum / 2


def test_the_number_of_rewards_is_linear() -> None:
    calls = []

    def reward(s: Sequence[str]) -> float:
        calls.append(tuple(s))
        return -float(len(s))

    greedy(reward, [str(i) for i in range(9)], [0.5] * 9, 9)
    assert len(calls) <= 2 * 9 + 2


# -- rounds ----------------------------------------------------------------------------------------


def test_a_choosing_round_tries_the_averages_written_out() -> None:
    toy = Toy(DPFL, client_contexts=planted(0, m=6, n=60), **TRAINING, choose_every=1).run(1)
    trained = weights_of(
        Toy(DPFL, client_contexts=toy.client_contexts, **TRAINING, choose_every=1, budget=0).run(1)
    )
    for i, pool in enumerate(masks(toy, "pool")):
        head = {k: v for k, v in trained[i].items() if k.startswith("head.")}
        members = sorted({i, *pool})
        for k, v in toy.party(i).params.items():
            mean = torch.stack([trained[j][k].double() for j in members]).mean(0)
            assert torch.allclose(v.double(), head[k].double() if k in head else mean, atol=1e-5)


def test_the_pool_is_of_the_own_group_and_helpers_are_of_the_pool() -> None:
    toy = Toy(DPFL, client_contexts=planted(0, n=80), **{**TRAINING, "epochs": 20}).run(5)
    for i, (pool, helpers) in enumerate(
        zip(masks(toy, "pool"), masks(toy, "helpers"), strict=True)
    ):
        assert pool and pool <= mates(i)
        assert helpers <= pool


def test_who_lies_about_labels_is_not_taken() -> None:
    """The other group has opposite labels; of it nobody is chosen, whatever the draws."""
    toy = Toy(DPFL, client_contexts=planted(3, m=5, n=80), **{**TRAINING, "epochs": 20}).run(3)
    assert all(helpers <= mates(i, 5) for i, helpers in enumerate(masks(toy, "helpers")))


def test_rewards_are_of_the_rows_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def nobody(reward: Any, *rest: Any) -> list[str]:
        seen.append(reward([]))
        return []

    monkeypatch.setattr(dpfl, "greedy", nobody)
    peer = Toy(DPFL, client_contexts=planted(0, m=3), **TRAINING).party(0)
    peer.update(t=0)
    peer.search(peer.give(t=0), {"1": peer.give(t=0)}, 1, 0)
    held = held_out.training_and_held_out(peer)[1].numpy()
    assert np.isclose(
        seen[0], (10 - row_losses(peer.params, peer.data)[held].mean()) / 10, atol=1e-6
    )


def test_without_a_budget_nobody_is_asked() -> None:
    toy = Toy(DPFL, 4, **TRAINING, budget=0).run(3)
    assert not asked(toy)
    lone = Toy(DPFL, 1, **TRAINING).run(3)
    assert masks(lone, "helpers") == [set()]


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_the_budget_holds_and_no_more_models_come_at_once(budget: int) -> None:
    toy = Toy(DPFL, 6, **TRAINING, budget=budget).run(1)
    batches = [e.count for e in toy.fed.ledger if e.kind == "give"]
    assert max(batches, default=0) <= 6 * 5
    toy.run(3, start=1)
    assert all(len(helpers) <= len(pool) <= budget for helpers, pool in
               zip(masks(toy, "helpers"), masks(toy, "pool"), strict=True))  # fmt: skip


def test_only_neighbours_are_asked() -> None:
    ring = {i: ((i - 1) % 6, (i + 1) % 6) for i in range(6)}
    toy = Toy(DPFL, 6, **TRAINING, graph=ring, budget=1).run(4)
    assert all(whom in ring[who] for who, whom in asked(toy))
    assert received(toy) <= {"bool[6]"}


def test_everybody_as_a_helper_is_gossip_on_the_training_share() -> None:
    """With the masks set by hand, a round is the mean by rows of all."""
    toy = Toy(DPFL, 3, **TRAINING, choose_every=9).run(1)
    for i in range(3):
        everybody = torch.tensor([j != i for j in range(3)])
        toy.party(i).peers = {**toy.party(i).peers, "helpers": everybody}
    toy.run(1, start=1)
    shared = [steps.shared_weights(toy.party(i)) for i in range(3)]
    rows = [len(context.rows) for context in toy.client_contexts]
    assert toy.engine.notes()[0]["mixing"] == pytest.approx([n / sum(rows) for n in rows])
    assert all(
        torch.allclose(shared[0][k], other[k], atol=1e-6) for other in shared for k in shared[0]
    )


def test_an_absent_peer_and_engines_that_agree() -> None:
    toys = [Toy(DPFL, 4, **TRAINING, budget=2, isolated=isolated) for isolated in (False, True)]
    for toy in toys:
        toy.run(1, present=[0, 1, 2]).run(2, start=1)
    assert equal(toys[0].tensors(), toys[1].tensors())
    assert not masks(toys[0], "pool")[3]
