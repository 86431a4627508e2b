"""Entity Augmentation in split learning: other people where a party lacks a row, and
mixed labels.
"""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.message import leaves
from fedloom.methods.vertical.split import mixed_labels
from fedloom.methods.vertical.steps import batch_indices, labels
from tests.methods.columns import CLASSES, WIDTH, Columns, moved, same
from tests.methods.test_laser import lacking, some

SPLIT = methods.find("split")


def test_with_every_row_it_is_split_learning_bit_for_bit() -> None:
    assert same(*(Columns(SPLIT, incomplete=how).run(2).states() for how in ("drop", "mix")))


def test_targets_are_the_mean_of_the_people_s_labels() -> None:
    found = mixed_labels(torch.tensor([[0, 0, 2], [1, 1, 1]]), CLASSES)
    assert torch.allclose(found, torch.tensor([[2 / 3, 0, 1 / 3], [0, 1, 0]]))
    y = torch.randint(CLASSES, (40, 4))
    assert torch.allclose(mixed_labels(y, CLASSES).sum(1), torch.ones(40))
    # one party: its labels
    assert torch.equal(mixed_labels(y[:, :1], CLASSES), F.one_hot(y[:, 0], CLASSES).float())


def test_over_all_permutations_half_of_a_party_s_gradient_is_its_own_rows_labels() -> None:
    """Two parties, four rows, a linear sum of both: party 0's slots are in order, party 1's in
    every order. The term of the labels in the gradient of W_0 is, in expectation, 1/2 that of its
    own rows and 1/2 that of the class mix.
    """
    torch.manual_seed(0)
    h, y = torch.randn(4, WIDTH, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    own = F.one_hot(y, CLASSES).double()
    terms = []
    for order in permutations(range(4)):
        target = mixed_labels(torch.stack([y, y[list(order)]], 1), CLASSES).double()
        weight = torch.zeros(CLASSES, WIDTH, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(-(target * (h @ weight.T)).sum(), weight)
        terms.append(g)
    expected = -0.5 * own.T @ h - 0.5 * own.mean(0)[:, None] * h.sum(0)
    assert torch.allclose(torch.stack(terms).mean(0), expected, atol=1e-12)


def test_a_party_fills_the_place_of_a_row_that_it_lacks_with_one_that_it_has() -> None:
    had = some(30, 3)
    toy = lacking(Columns(SPLIT, incomplete="mix"), had)
    start = toy.states()
    toy.run(2)
    assert moved(start, toy.states()) == {"active", "0", "1", "2"} and not toy.fed.failures
    for heard in toy.heard:
        if heard.method == "embed_mixed":
            rows = batch_indices(toy.active, heard.put["number"], heard.put["step"])
            people = heard.reply["people"]
            mine = had[:, heard.party]
            assert mine[people].all() and torch.equal(people[mine[rows]], rows[mine[rows]])
    toy.active.take_notes()
    assert {e.what for e in toy.fed.ledger} == {
        "number int; step int",
        f"embedded float32[8,{WIDTH}]; people int64[8]",
        f"number int; step int; cut float32[8,{WIDTH}]",
        "none",
    }
    assert all(v.isfinite().all() for _, v in leaves(toy.active.state()) if hasattr(v, "isfinite"))
    assert labels(toy.active).shape == (30,)


@pytest.mark.parametrize("incomplete", ["zeros", "mix"])
def test_the_isolated_engine_gives_the_same_bits(incomplete: str) -> None:
    toys = [
        lacking(Columns(SPLIT, isolated=i, incomplete=incomplete), some(30, 3))
        for i in (False, True)
    ]
    assert same(*(toy.run(2).states() for toy in toys))


def test_zeros_stand_for_an_absent_embedding_and_a_party_learns_from_its_own_rows_alone() -> None:
    had = torch.cat([some(30, 2), torch.zeros(30, 1, dtype=torch.bool)], 1)
    toy = lacking(Columns(SPLIT, incomplete="zeros"), had)
    start = toy.states()
    toy.run(1)
    assert moved(start, toy.states()) == {"active", "0", "1"}


def test_people_outside_of_the_aligned_rows_are_refused() -> None:
    toy = lacking(Columns(SPLIT, incomplete="mix"), some(30, 3))
    call = toy.engine.call

    def wrong(ids, method, shared, each, number):
        replies = call(ids, method, shared, each, number)
        if method == "embed_mixed":
            replies[1]["people"][0] = 30
        return replies

    toy.engine.call = wrong
    toy.run(1)
    assert {f.reason for f in toy.fed.failures} >= {"refused"} and not any(
        h.method == "update_mixed" for h in toy.heard
    )
