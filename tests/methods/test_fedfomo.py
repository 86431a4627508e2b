"""FedFomo's page against its paper: weights on hand numbers, one round written out, held-out rows,
whom it asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.methods import find, steps
from fedloom.methods.peer import held_out
from fedloom.methods.peer.fedfomo import first_order, normalized
from tests.toy import Toy, common, contexts, equal, rows

FEDFOMO, ALONE = find("fedfomo"), find("alone")
SMALL: dict[str, Any] = {"batch_size": 8, "epochs": 2}


def twin(toy: Toy, i: int) -> Any:
    """Party i once more, in the same state."""
    party = toy.method.client(toy.cfg, toy.client_contexts[i])
    party.load(toy.party(i).state())
    return party


# -- weights ---------------------------------------------------------------------------------------


def test_weights_on_hand_numbers() -> None:
    w = first_order(
        torch.tensor(2.0), torch.tensor([1.0, 1.5, 3.0, 2.0]), torch.tensor([2.0, 0.25, 1.0, 5.0])
    )
    assert torch.equal(w, torch.tensor([0.5, 2.0, -1.0, 0.0]))
    assert torch.allclose(normalized(w), torch.tensor([0.2, 0.8, 0.0, 0.0], dtype=torch.float64))


def test_who_does_not_help_has_no_weight_even_if_nobody_does() -> None:
    w = first_order(torch.tensor(1.0), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))
    assert torch.equal(normalized(w), torch.zeros(2, dtype=torch.float64))


def test_a_model_at_no_distance_or_without_a_finite_loss_has_weight_0() -> None:
    nan, inf = float("nan"), float("inf")
    w = first_order(
        torch.tensor(1.0), torch.tensor([1.0, nan, inf, 0.5]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    )
    assert torch.equal(w, torch.tensor([0.0, 0.0, 0.0, 0.5]))


# -- one round, written out ------------------------------------------------------------------------


def judged(peer: Any, body: dict[str, Tensor], head: dict[str, Tensor]) -> float:
    module = common().eval()
    module.load_state_dict({**body, **head})
    held = held_out.training_and_held_out(peer)[1]
    return F.cross_entropy(module(peer.data.x(held)), peer.data.y(held)).item()


@pytest.mark.parametrize("personal_head", [False, True])
def test_a_round_is_the_formula_written_out(personal_head: bool) -> None:
    n = 4
    toy = Toy(FEDFOMO, n, **SMALL, lr=0.05, neighbours=None, personal_head=personal_head).run(2)
    start = [
        {k: v.clone() for k, v in steps.shared_weights(toy.party(i)).items()} for i in range(n)
    ]
    peers = [twin(toy, i) for i in range(n)]
    for peer in peers:
        peer.update(t=2)
    trained = [{k: v.clone() for k, v in steps.shared_weights(p).items()} for p in peers]
    toy.run(1, start=2)
    mixing = toy.engine.notes()
    for i, peer in enumerate(peers):
        head = {k: v.clone() for k, v in peer.params.items() if k not in start[i]}
        base, w = judged(peer, start[i], head), np.zeros(n)
        for j in range(n):
            gap = np.sqrt(
                sum(((trained[j][k] - start[i][k]).double().numpy() ** 2).sum() for k in start[i])
            )
            w[j] = (base - judged(peer, trained[j], head)) / gap
        share = np.maximum(w, 0) / (np.maximum(w, 0).sum() or 1)
        assert (
            np.abs(np.array(mixing[i]["mixing"]) - (share if share.any() else np.eye(n)[i])).max()
            < 1e-4
        )
        for k, x in start[i].items():
            expected = x + sum(share[j] * (trained[j][k] - x) for j in range(n))
            assert torch.allclose(toy.party(i).params[k], expected, atol=1e-5), (i, k)
        for k, v in head.items():
            assert torch.equal(toy.party(i).params[k], v)
    assert {len(np.flatnonzero(m["mixing"])) for m in mixing.values()} - {1}  # others did help


def test_where_nothing_helps_the_weights_are_those_before_training() -> None:
    toy = Toy(FEDFOMO, 3, **SMALL, lr=1e4, momentum=0.0, head_epochs=0)
    before = {k: v.clone() for k, v in toy.tensors().items()}
    toy.run(1)
    for i, notes in toy.engine.notes().items():
        assert notes["no model lowered the loss"] == 1
        assert notes["mixing"] == [float(i == j) for j in range(3)]
    assert equal(before, toy.tensors())


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "share", "held"), [(20, 0.2, 4), (3, 0.2, 1), (2, 0.9, 1), (1, 0.5, 1)]
)
def test_a_share_of_the_rows_is_held_out_once_and_for_all(
    count: int, share: float, held: int
) -> None:
    client_contexts = contexts(2, make=common, data=lambda i: rows(count, i))
    peer = Toy(FEDFOMO, client_contexts=client_contexts, validation=share).party(0)
    train, kept = held_out.training_and_held_out(peer)
    assert len(kept) == held
    assert sorted({*train.tolist(), *kept.tolist()}) == list(range(count))
    assert count == 1 or not {*train.tolist()} & {*kept.tolist()}
    assert all(
        torch.equal(a, b)
        for a, b in zip(held_out.training_and_held_out(peer), (train, kept), strict=True)
    )
    Toy(FEDFOMO, client_contexts=client_contexts, validation=share, batch_size=4).run(1)


def test_no_training_and_no_tuning_reads_a_held_out_row() -> None:
    client_contexts = contexts(2, make=common)
    held = held_out.training_and_held_out(Toy(FEDFOMO, client_contexts=client_contexts).party(0))[1]
    other = client_contexts[0].rows.labels.clone()
    other[held] = (other[held] + 1) % 4
    poisoned = [
        replace(client_contexts[0], data=replace(client_contexts[0].rows, labels=other)),
        client_contexts[1],
    ]
    peers = [Toy(FEDFOMO, client_contexts=p, **SMALL).party(0) for p in (client_contexts, poisoned)]
    for peer in peers:
        peer.update(t=0)
        peer.prepare(eval_mode="tuned", broadcast={})
    assert equal(*(dict(p.params) for p in peers))
    assert held_out.validation_loss(
        peers[0], steps.shared_weights(peers[0])
    ) != held_out.validation_loss(peers[1], steps.shared_weights(peers[1]))


def test_with_nobody_to_ask_it_is_alone_on_the_training_share() -> None:
    client_contexts = contexts(3, make=common)
    toy = Toy(FEDFOMO, client_contexts=client_contexts, neighbours=0, lr=0.02, **SMALL)
    for t in range(3):
        toy.run(1, start=t)
        assert all(n["no model lowered the loss"] == 0 for n in toy.engine.notes().values())
    fewer = []
    for i, context in enumerate(client_contexts):
        kept = held_out.training_and_held_out(toy.party(i))[0]
        fewer.append(replace(context, data=replace(context.rows, index=context.rows.index[kept])))
    assert equal(
        toy.tensors(), Toy(ALONE, client_contexts=fewer, lr=0.02, **SMALL).run(3).tensors()
    )


# -- whom it asks ----------------------------------------------------------------------------------


def asked(peer: Any, t: int, here: list[int]) -> set[int]:
    mask = torch.zeros(8, dtype=torch.bool)
    mask[here] = True
    return set(peer.pick(t=t, here=mask).nonzero().flatten().tolist())


def test_it_asks_those_that_have_helped_most_and_are_there() -> None:
    peer = Toy(FEDFOMO, 8, neighbours=3, epsilon=0.0).party(0)
    peer.helped = {
        "p": torch.tensor([9.0, 0.5, -1.0, 0.0, 2.0, 0.3, -2.0, 0.1], dtype=torch.float64)
    }
    assert asked(peer, 0, list(range(8))) == {4, 1, 5}
    assert asked(peer, 1, [0, 1, 2, 6, 7]) == {1, 7, 2}
    assert asked(peer, 1, [0, 3]) == {3}


def test_half_of_the_time_it_asks_random_neighbours() -> None:
    peer = Toy(FEDFOMO, 8, neighbours=3).party(0)
    peer.helped = {"p": torch.tensor([0.0, 7, 6, 5, 0, 0, 0, 0], dtype=torch.float64)}
    found = [asked(peer, t, list(range(8))) for t in range(200)]
    assert found == [asked(peer, t, list(range(8))) for t in range(200)]
    assert all(len(f) == 3 and 0 not in f for f in found)
    assert 75 < sum(f != {1, 2, 3} for f in found) < 125
    assert set().union(*found) == set(range(1, 8))


def test_before_anybody_has_helped_chance_decides() -> None:
    peer = Toy(FEDFOMO, 8, neighbours=2, epsilon=0.0).party(3)
    assert len({tuple(sorted(asked(peer, t, list(range(8))))) for t in range(30)}) > 10


def test_p_adds_up_the_unclipped_weights_of_those_who_answered() -> None:
    toy = Toy(FEDFOMO, 6, neighbours=2, **SMALL).run(1)
    given = {
        i: {j for j in range(6) if (f"peer-{j}", f"peer-{i}") in toy.fed.ledger.pairs}
        for i in range(6)
    }
    for i in range(6):
        p = toy.party(i).helped["p"]
        assert set(p.nonzero().flatten().tolist()) == {i, *given[i]} and len(given[i]) == 2
    toy.run(9, start=1)
    assert any(float(toy.party(i).helped["p"].min()) < 0 for i in range(6))


def test_what_has_helped_is_remembered_and_training_that_failed_is_no_model() -> None:
    toy = Toy(FEDFOMO, 2, **SMALL)
    peer, other = toy.party(0), toy.party(1)
    for t in range(2):
        peer.update(t=t)
        other.update(t=t)
        peer.mix(t=t, inbox={"1": other.give(t=t)})
        assert peer.began == {} and (peer.helped["p"] != 0).all()
    before = {k: v.clone() for k, v in peer.params.items()}
    p = peer.helped["p"].clone()
    peer.mix(t=2, inbox={})  # its own training was lost
    assert equal(before, dict(peer.params)) and torch.equal(peer.helped["p"], p)
