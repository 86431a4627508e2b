"""Dis-PFL's page against its paper: densities, masks, their messages, the average
where they meet.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.methods import find
from fedloom.methods.peer.dispfl import (
    DisPFLConfig,
    bits_of,
    erk,
    intersection_mean,
    kept_counts,
    mask_of,
    packed,
    renewal,
    renewed_mask,
    unpacked,
)
from fedloom.models.parts import Classifier
from tests.toy import CLASSES, FEATURES, Toy

DISPFL, GOSSIP = find("dispfl"), find("gossip")
SMALL: dict[str, Any] = {"batch_size": 8, "epochs": 2}


def twin(toy: Toy, i: int) -> Any:
    """Party i once more, in the same state."""
    party = toy.method.client(toy.cfg, toy.client_contexts[i])
    party.load(toy.party(i).state())
    return party


def deep(_: int = 0) -> nn.Module:
    """Three matrices, of which the middle one is the largest."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        body = [nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, 20), nn.ReLU()]
        return Classifier(nn.Sequential(*body), 20, CLASSES)


# -- densities -------------------------------------------------------------------------------------


def test_densities_on_hand_numbers() -> None:
    found = erk({"a": (10, 10), "b": (2, 20)}, 0.5)  # raw 0.2 and 0.55, scaled by 70 / 42
    assert found == pytest.approx({"a": 1 / 3, "b": 11 / 12})


def test_a_layer_that_would_exceed_1_is_dense_and_the_rest_makes_up_for_it() -> None:
    found = erk({"a": (100, 100), "b": (2, 2)}, 0.5)
    assert found == pytest.approx({"a": 4998 / 10000, "b": 1.0})


layers = st.lists(st.lists(st.integers(1, 40), min_size=2, max_size=4), min_size=1, max_size=6)


@given(layers, st.floats(0.01, 1))
def test_densities_come_to_the_target_and_fall_with_the_size_of_a_layer(
    shapes: list[list[int]], density: float
) -> None:
    named = {str(i): tuple(s) for i, s in enumerate(shapes)}
    found, size = erk(named, density), {k: math.prod(s) for k, s in named.items()}
    assert all(0 < d <= 1 + 1e-9 for d in found.values())
    assert sum(found[k] * n for k, n in size.items()) == pytest.approx(
        density * sum(size.values()), rel=1e-6
    )
    order = sorted(named, key=lambda k: sum(named[k]) / size[k])
    assert all(found[a] <= found[b] + 1e-9 for a, b in pairwise(order))


def test_masks_begin_random_each_its_own_and_of_the_same_size() -> None:
    toy = Toy(DISPFL, 3, make=deep, density=0.4)
    peers = [toy.party(i) for i in range(3)]
    counts = kept_counts(peers[0].params, toy.cfg)
    assert list(counts) == ["body.0.weight", "body.2.weight"]
    assert sum(counts.values()) == pytest.approx(0.4 * (6 * 12 + 12 * 20), abs=1)
    assert counts["body.0.weight"] / 72 > counts["body.2.weight"] / 240
    for peer in peers:
        assert {k: int(m.sum()) for k, m in peer.mask.items()} == counts
    assert not torch.equal(peers[0].mask["body.2.weight"], peers[1].mask["body.2.weight"])
    whole = Toy(DISPFL, 2, make=deep, personal_head=False).party(0)
    assert "head.weight" in whole.mask and "head.bias" not in whole.mask


# -- renewal ---------------------------------------------------------------------------------------


def test_the_share_renewed_falls_as_a_cosine_and_then_stays_0() -> None:
    cfg = DisPFLConfig(anneal=0.4, anneal_rounds=10)
    assert [renewal(t, cfg) for t in (0, 5, 10, 11, 99)] == pytest.approx([0.4, 0.2, 0.0, 0.0, 0.0])
    assert renewal(10, cfg) == renewal(99, cfg) == 0


def test_the_smallest_weights_go_and_the_largest_gradients_come() -> None:
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    weights = torch.tensor([[0.1, -3.0, 0.2], [-2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    gradient = torch.tensor([[0.5, 9.0, 0.1], [9.0, -7.0, 0.2], [0.3, 0.4, 0.0]])
    # two of four: 0.1 and 0.2 go; 7 and 0.5, just pruned, come
    new = renewed_mask(mask, weights, gradient, 0.5)
    assert torch.equal(
        new, torch.tensor([[True, True, False], [True, True, False], [False, False, False]])
    )
    assert torch.equal(renewed_mask(mask, weights, gradient, 0.0), mask)


@given(st.integers(1, 60), st.integers(0, 2**30), st.floats(0, 1))
def test_a_renewed_mask_has_as_many_entries(n: int, seed: int, rate: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    mask, weights, gradient = (torch.randn(n, generator=draw) for _ in range(3))
    new = renewed_mask(mask > 0, weights * (mask > 0), gradient.round(), rate)
    assert int(new.sum()) == int((mask > 0).sum())


# -- messages --------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_a_mask_survives_its_packing(bits: list[bool]) -> None:
    mask = torch.tensor(bits)
    assert bits_of(mask).shape == (-(-len(bits) // 8),)
    assert torch.equal(mask_of(bits_of(mask), mask.shape), mask)


def test_the_first_entry_is_the_highest_bit() -> None:
    assert bits_of(torch.tensor([True] + [False] * 6 + [True, False, True])).tolist() == [129, 64]


def test_weights_survive_their_packing_in_any_memory_format() -> None:
    draw = torch.Generator().manual_seed(0)
    kernel = torch.randn(4, 3, 3, 5, generator=draw).to(memory_format=torch.channels_last)
    weights = {
        "a": torch.randn(6, 7, generator=draw),
        "b": torch.randn(7, generator=draw),
        "c": kernel,
    }
    mask = {k: torch.rand(weights[k].shape, generator=draw) < 0.3 for k in ("a", "c")}
    weights = {k: w * mask[k] if k in mask else w for k, w in weights.items()}
    message: Any = packed(weights, mask)
    assert len(message["values"]) == sum(int(m.sum()) for m in mask.values())
    found = unpacked(message, mask)
    assert found is not None
    assert all(torch.equal(found[0][k], w) for k, w in weights.items())
    assert all(torch.equal(found[1][k], m) for k, m in mask.items())


def test_an_answer_whose_mask_has_another_size_than_its_values_is_left_out() -> None:
    toy = Toy(DISPFL, 2, **SMALL)
    peer, alone, answer = toy.party(0), twin(toy, 0), toy.party(1).give(t=0)
    answer["mask"] = {k: torch.full_like(b, 255) for k, b in answer["mask"].items()}
    assert unpacked(answer, peer.mask) is None
    peer.mix(t=0, inbox={"1": answer})
    alone.mix(t=0, inbox={})
    assert all(torch.equal(v, alone.params[k]) for k, v in peer.params.items())
    assert peer.take_notes()["mixing"] == [1.0, 0.0]


@pytest.mark.parametrize("density", [0.5, 0.1])
def test_bytes_are_the_kept_values_the_masks_bits_and_what_is_dense(density: float) -> None:
    toy = Toy(DISPFL, 4, make=deep, density=density, neighbours=2, **SMALL).run(2)
    kept = sum(kept_counts(toy.party(0).params, toy.cfg).values())
    assert kept == pytest.approx(density * 312, abs=1)
    (sent,) = {e.bytes // e.count for e in toy.fed.ledger if e.kind == "give"}
    assert sent == 4 * kept + 72 // 8 + 240 // 8 + 4 * (12 + 20)
    assert sum(e.count for e in toy.fed.ledger if e.kind == "give") == 4 * 2 * 2


# -- the average -----------------------------------------------------------------------------------


def test_an_entry_is_the_mean_of_those_that_have_it() -> None:
    models = [
        {"w": torch.tensor([2.0, 4.0, 0.0, 0.0]), "b": torch.tensor([1.0])},
        {"w": torch.tensor([6.0, 0.0, 8.0, 0.0]), "b": torch.tensor([3.0])},
    ]
    masks = [{"w": m["w"] != 0} for m in models]
    even = intersection_mean(models, masks, [1.0, 1.0])
    assert torch.equal(even["w"], torch.tensor([4.0, 4.0, 8.0, 0.0])) and torch.equal(
        even["b"], torch.tensor([2.0])
    )
    uneven = intersection_mean(models, masks, [0.75, 0.25])
    assert torch.equal(uneven["w"], torch.tensor([3.0, 4.0, 8.0, 0.0]))
    assert torch.equal(uneven["b"], torch.tensor([1.5]))


def test_a_round_written_out() -> None:
    """From the trained weights on: the new masks, then the average under them."""
    n = 3
    toy = Toy(DISPFL, n, make=deep, neighbours=None, anneal=0.3, anneal_rounds=7, **SMALL).run(1)
    peers = [twin(toy, i) for i in range(n)]
    for peer in peers:
        peer.update(t=1)
    toy.run(1, start=1)
    rate = 0.15 * (1 + math.cos(math.pi / 7))
    for i, peer in enumerate(peers):
        module = deep()
        module.load_state_dict(dict(peer.params))
        x, y = peer.sample_batch(1, size=8)
        nn.functional.cross_entropy(module(x), y).backward()
        for k, old in peer.mask.items():
            w, g = peer.params[k].flatten(), dict(module.named_parameters())[k].grad
            assert g is not None
            count = math.ceil(rate * int(old.sum()))
            kept = sorted(
                old.flatten().nonzero().flatten().tolist(), key=lambda e: float(w[e].abs())
            )[count:]
            outside = sorted(
                set(range(len(w))) - set(kept), key=lambda e: -float(g.flatten()[e].abs())
            )
            new = torch.zeros(len(w), dtype=torch.bool)
            new[kept + outside[:count]] = True
            assert torch.equal(toy.party(i).mask[k].flatten(), new)
            having = torch.stack([p.mask[k] for p in peers]).sum(0)
            total = torch.stack([p.params[k] for p in peers]).sum(0)
            expected = torch.where(having > 0, total / having.clamp_min(1), 0.0) * new.view(
                old.shape
            )
            assert torch.allclose(toy.party(i).params[k], expected, atol=1e-6)
            fresh = new.view(old.shape) & ~old
            assert (toy.party(i).params[k][fresh] != 0).any()  # what others knew, grown here
        bias = torch.stack([p.params["body.0.bias"] for p in peers]).mean(0)
        assert torch.allclose(toy.party(i).params["body.0.bias"], bias, atol=1e-6)
        assert torch.equal(toy.party(i).params["head.weight"], peer.params["head.weight"])


@pytest.mark.parametrize("name", ["dispfl", "dispfl-afind"])
@pytest.mark.parametrize("personal_head", [False, True])
def test_what_is_outside_of_the_mask_is_exactly_0_always(name: str, personal_head: bool) -> None:
    toy = Toy(
        find(name), 4, make=deep, personal_head=personal_head, density=0.3, anneal_rounds=3, **SMALL
    )
    first = {i: dict(toy.party(i).mask) for i in range(4)}
    counts = kept_counts(toy.party(0).params, toy.cfg)
    for t in range(4):
        toy.run(1, start=t)
        for i in range(4):
            peer = twin(toy, i)
            assert {k: int(m.sum()) for k, m in peer.mask.items()} == counts
            assert all((peer.params[k][~m] == 0).all() for k, m in peer.mask.items())
            before = {k: v.clone() for k, v in peer.params.items()}
            peer.prepare(eval_mode="tuned", broadcast={})
            peer.update(t=t + 1)
            assert all((peer.params[k][~m] == 0).all() for k, m in peer.mask.items())
            assert all(not torch.equal(peer.params[k], v) for k, v in before.items())
        notes = toy.engine.notes()
        assert all((notes[i].get("updated mask entries", 0) > 0) == (t < 3) for i in range(4))
    assert all(
        not torch.equal(m, toy.party(i).mask[k]) for i in range(4) for k, m in first[i].items()
    )


@pytest.mark.parametrize("personal_head", [False, True])
@pytest.mark.parametrize("anneal", [0.0, 0.5])
def test_at_density_1_it_is_gossip(personal_head: bool, anneal: float) -> None:
    both: dict[str, Any] = {"make": deep, "personal_head": personal_head, "neighbours": 2, **SMALL}
    a = Toy(DISPFL, 4, density=1.0, anneal=anneal, **both).run(3).tensors()
    b = Toy(GOSSIP, 4, **both).run(3).tensors()
    for k, v in a.items():
        assert torch.allclose(v, b[k], atol=1e-6), k


def test_the_gradient_for_the_mask_leaves_the_statistics_alone() -> None:
    def normed(_: int = 0) -> nn.Module:
        plain = deep()
        plain.body.insert(1, nn.BatchNorm1d(12))  # type: ignore[operator]
        return plain

    peer = Toy(DISPFL, 2, make=normed, **SMALL).party(0)
    assert set(peer.mask) == {"body.0.weight", "body.3.weight"}
    before: dict[str, Tensor] = {k: v.clone() for k, v in peer.buffers.items()}
    peer.update_mask(0)
    assert before and all(torch.equal(v, peer.buffers[k]) for k, v in before.items())
