"""PENS: who is taken, who is selected, and who is asked then."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import methods
from fedloom.core.faults import Faults
from fedloom.methods.peer.pens import PensPeer, lowest
from tests.methods.groups import accuracy, asked, mates, planted, received, row_losses, weights_of
from tests.toy import Toy, equal

PENS, GOSSIP, ALONE = (methods.find(n) for n in ("pens", "gossip", "alone"))
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 20, "lr": 0.05}


def selected(toy: Toy) -> list[set[int]]:
    return [set(toy.party(i).selected().nonzero().flatten().tolist()) for i in toy.engine.ids]


def select_by_hand(toy: Toy, whom: dict[int, list[int]]) -> None:
    """Set the counts that select these peers."""
    for i, others in whom.items():
        party: PensPeer = toy.party(i)
        taken = torch.zeros_like(party.counts["taken"])
        taken[others] = 1
        party.counts = {"taken": taken, "expected": torch.zeros_like(taken)}


# -- stage 1 ---------------------------------------------------------------------------------------


def test_the_lowest_losses_win_and_the_first_of_equals() -> None:
    assert lowest(torch.tensor([0.5, 0.2, math.nan, 0.1, 0.2]), 2) == [1, 3]
    assert lowest(torch.tensor([math.nan, math.inf, 3.0]), 2) == [1, 2]
    assert lowest(torch.tensor([0.3]), 4) == [0]
    assert lowest(torch.zeros(0), 4) == []


@pytest.mark.parametrize("personal_head", [True, False])
def test_a_round_of_stage_1_by_hand(personal_head: bool) -> None:
    """NumPy: losses of received bodies on own rows, the two lowest of three, the plain mean with
    one's own.
    """
    common: dict[str, Any] = {"personal_head": personal_head, **TRAINING}
    trained = weights_of(Toy(ALONE, 6, **common).run(1))
    toy = Toy(PENS, 6, neighbours=3, top_m=2, **common)
    links = toy.fed.sample_peers(toy.engine.ids, 3, 0)
    toy.run(1)
    notes = toy.engine.notes()
    for i in range(6):
        own: dict[str, Any] = {
            k: v for k, v in trained[i].items() if k.startswith("head.") and personal_head
        }
        losses = [row_losses({**trained[j], **own}, toy.party(i).data).mean() for j in links[i]]
        best = {links[i][n] for n in np.argsort(losses)[:2]}
        counts = toy.party(i).counts
        assert counts["taken"].tolist() == [float(j in best) for j in range(6)]
        assert torch.allclose(
            counts["expected"], torch.tensor([2 / 3 * (j in links[i]) for j in range(6)]).double()
        )
        assert np.allclose(notes[i]["mixing"], [(j in best or j == i) / 3 for j in range(6)])
        assert math.isclose(sum(notes[i]["mixing"]), 1)
        for k, v in toy.party(i).params.items():
            mean = sum(trained[j][k].double() for j in (i, *best)) / 3
            assert torch.allclose(v.double(), own[k].double() if k in own else mean, atol=1e-6)


def test_expected_counts_follow_how_many_answered() -> None:
    toy = Toy(PENS, 6, neighbours=None, top_m=2)
    party, models = toy.party(0), weights_of(toy)
    inbox = {
        str(j): {"weights": {k: v for k, v in models[j].items() if "head" not in k}}
        for j in range(1, 6)
    }
    party.select(t=0, inbox={j: inbox[j] for j in "1234"})
    party.select(t=1, inbox={j: inbox[j] for j in "125"})
    party.select(t=2, inbox={j: inbox[j] for j in "1"})
    party.select(t=3, inbox={})
    assert np.allclose(
        party.counts["expected"], [0, 1 / 2 + 2 / 3 + 1, 1 / 2 + 2 / 3, 1 / 2, 1 / 2, 2 / 3]
    )
    assert party.counts["taken"].tolist() == [0, 3, 2, 0, 0, 0]  # all are equal: the first ones
    assert selected(toy)[0] == {1, 2}


def test_as_often_as_by_chance_is_not_selected() -> None:
    party = Toy(PENS).party(0)
    tenths = torch.zeros(4, dtype=torch.float64)
    for _ in range(10):
        tenths += 3 / 10
    assert (3 - tenths != 0).all()  # sums of 3/10 are not exact
    party.counts = {"taken": torch.tensor([0.0, 3, 4, 2]).double(), "expected": tenths}
    assert party.selected().tolist() == [False, False, True, False]


def test_loss_rows_bounds_what_is_compared_on() -> None:
    toy = Toy(PENS, 6, neighbours=3, top_m=1, loss_rows=7, personal_head=False, **TRAINING)
    links = toy.fed.sample_peers(toy.engine.ids, 3, 0)
    trained = weights_of(Toy(ALONE, 6, personal_head=False, **TRAINING).run(1))
    toy.run(1)
    for i in range(6):
        party = toy.party(i)
        x, y = party.sample_batch(0, size=7)
        which = [int((party.data.every == row).all(-1).nonzero()[0]) for row in x]
        assert len(set(which)) == 7 and len(y) == 7
        losses = [row_losses(trained[j], party.data)[which].mean() for j in links[i]]
        assert party.counts["taken"].nonzero().flatten().tolist() == [
            links[i][int(np.argmin(losses))]
        ]


# -- what it comes down to -------------------------------------------------------------------------


@pytest.mark.parametrize("top_m", [2, 5])
def test_stage_1_that_takes_all_is_gossip_and_selects_no_peers(top_m: int) -> None:
    pens = Toy(PENS, 5, neighbours=2, top_m=top_m, stage1_rounds=3, **TRAINING).run(3)
    assert equal(pens.tensors(), Toy(GOSSIP, 5, neighbours=2, **TRAINING).run(3).tensors())
    assert selected(pens) == [set()] * 5


def test_without_neighbours_everybody_is_alone_in_both_stages() -> None:
    pens = Toy(PENS, neighbours=0, stage1_rounds=1, **TRAINING).run(3)
    assert equal(pens.tensors(), Toy(ALONE, **TRAINING).run(3).tensors())
    assert not asked(pens)


def test_stage_2_among_selected_peers_with_everybody_is_gossip_with_all() -> None:
    pens, gossip = (Toy(m, 4, neighbours=None, **TRAINING) for m in (PENS, GOSSIP))
    select_by_hand(pens, {i: [j for j in range(4) if j != i] for i in range(4)})
    assert equal(pens.run(2, start=100).tensors(), gossip.run(2, start=100).tensors())


# -- stage 2 ---------------------------------------------------------------------------------------


def test_stage_2_asks_some_neighbours_that_are_present_and_nobody_else() -> None:
    toy = Toy(PENS, 6, neighbours=2, stage1_rounds=1)
    select_by_hand(toy, {0: [1, 2, 3, 5], 1: [4], 2: [0, 1]})
    toy.run(8, start=1, present=[0, 1, 2, 3, 5])
    notes, pairs = toy.engine.notes(), asked(toy)
    assert {whom for who, whom in pairs if who == 0} == {1, 2, 3, 5}
    assert sum(n for (who, _), n in pairs.items() if who == 0) == 2 * 8
    assert {p: n for p, n in pairs.items() if p[0] != 0} == {(2, 0): 8, (2, 1): 8}
    assert [notes[i]["selected peers"] for i in (0, 1, 2, 3)] == [4, 1, 2, 0]
    assert [notes[i]["no selected peer present"] for i in (0, 1, 2, 3)] == [0, 1, 0, 1]
    assert notes[1]["mixing"] == [0, 1, 0, 0, 0, 0]
    assert np.allclose(notes[2]["mixing"], [1 / 3, 1 / 3, 1 / 3, 0, 0, 0])


def test_only_neighbours_are_asked_in_both_stages() -> None:
    ring = {i: sorted({(i - 1) % 6, (i + 1) % 6}) for i in range(6)}
    toy = Toy(PENS, 6, graph=ring, neighbours=None, top_m=1, stage1_rounds=5, **TRAINING).run(5)
    first = asked(toy)
    assert first == {(i, j): 5 for i in ring for j in ring[i]}
    toy.run(5, start=5)
    later = {p: n - first[p] for p, n in asked(toy).items() if n > first[p]}
    assert later and later == {(i, j): 5 for i, found in enumerate(selected(toy)) for j in found}
    assert sum(later.values()) < sum(first.values())


def test_a_mask_of_non_neighbours_leads_nowhere() -> None:
    """A peer that names whom it may not ask stops nobody's run."""
    toy = Toy(
        PENS, 4, graph={0: [1], 1: [0, 2], 2: [1, 3], 3: [2]}, neighbours=None, stage1_rounds=1
    )
    select_by_hand(toy, {0: [0, 1, 3]})
    toy.run(1, start=1)
    assert set(asked(toy)) == {(0, 1)}


def test_the_coordinator_gets_no_number() -> None:
    toy = Toy(PENS, 5, neighbours=3, top_m=1, stage1_rounds=4).run(8)
    assert len(received(toy)) == 1
    assert "bool" in next(iter(received(toy))) and "float" not in next(iter(received(toy)))
    assert asked(toy)


# -- whether it works ------------------------------------------------------------------------------


@pytest.mark.each_time("0-True", "1-False")
@pytest.mark.parametrize("personal_head", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_found_and_learn(seed: int, personal_head: bool) -> None:
    settings: dict[str, Any] = {
        "neighbours": 4,
        "personal_head": personal_head,
        "epochs": 2,
        "batch_size": 40,
        "lr": 0.1,
    }
    toy = Toy(PENS, client_contexts=planted(seed), top_m=2, stage1_rounds=20, **settings).run(20)
    found, first = selected(toy), asked(toy)
    assert all(mates(i) <= found[i] for i in range(8))
    assert sum(len(found[i] - mates(i)) for i in range(8)) <= 3
    toy.run(5, start=20)
    later = {p for p, n in asked(toy).items() if n > first.get(p, 0)}
    assert later == {(i, j) for i in range(8) for j in found[i]}
    if not personal_head:  # a head could undo that the groups have other labels
        gossip = Toy(GOSSIP, client_contexts=planted(seed), **settings).run(25)
        assert accuracy(toy) > max(0.6, accuracy(gossip) + 0.1)


# -- engines and faults ----------------------------------------------------------------------------


@pytest.mark.parametrize("faults", [None, Faults(dropout=0.1, crash=0.1, nan=0.1)])
def test_isolated_parties_give_the_same_bits(faults: Faults | None) -> None:
    settings: dict[str, Any] = {
        "neighbours": 3,
        "top_m": 1,
        "stage1_rounds": 4,
        "faults": faults,
        **TRAINING,
    }
    one, two = (Toy(PENS, 5, isolated=isolated, **settings).run(7) for isolated in (False, True))
    assert equal(one.tensors(), two.tensors())
    assert one.engine.notes() == two.engine.notes()
    assert all(v.isfinite().all() for v in one.tensors().values())
    assert bool(one.fed.failures) == (faults is not None)
