"""Robust aggregation: hand numbers, symmetries, and each rule's breakdown point."""

import numpy as np
import pytest
import torch
from torch import Tensor

from fedloom.protect.robust import (
    Rule,
    clipped,
    combine,
    combine_logits,
    combine_probabilities,
    combine_trees,
    combine_values,
    needed,
)

RULES: tuple[Rule, ...] = ("clip", "median", "trimmed", "krum", "multikrum", "centered")
LINE = torch.tensor([[1.0], [2.0], [3.0], [4.0], [1e9]], dtype=torch.float64)
ZERO = torch.zeros(1, dtype=torch.float64)


def honest(n: int, d: int = 6, seed: int = 0) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(1.0, 0.1, (n, d)))


@pytest.mark.parametrize(
    ("rule", "radius", "expected"),
    [
        ("none", None, 200_000_002.0),
        ("median", None, 3.0),
        ("trimmed", None, 3.0),
        ("krum", None, 2.0),
        ("multikrum", None, 2.5),
        ("clip", 1.0, 1.0),
        ("centered", 1.0, 2.28),
    ],
)
def test_hand_numbers(rule: Rule, radius: float | None, expected: float) -> None:
    assert combine(LINE, rule, f=1, center=ZERO, radius=radius).item() == pytest.approx(expected)


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two() -> None:
    assert combine(LINE[:4], "median", center=ZERO).item() == 2.5


def test_without_liars_to_withstand_trimmed_and_multikrum_are_means() -> None:
    x = honest(7)
    for rule in ("trimmed", "multikrum"):
        assert torch.allclose(combine(x, rule, f=0, center=x[0]), x.mean(0))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1e3, 1e9, 1e30])
def test_f_liars_do_not_move_the_aggregate_far(rule: Rule, size: float) -> None:
    f, n = 2, 9
    x = torch.cat([honest(n - f), torch.full((f, 6), size, dtype=torch.float64)])
    start = torch.zeros(6, dtype=torch.float64)
    value = combine(x, rule, f=f, center=start)
    good = x[: n - f]
    if rule in ("median", "trimmed", "krum", "multikrum"):
        assert bool(
            ((value >= good.min(0).values - 1e-9) & (value <= good.max(0).values + 1e-9)).all()
        )
    else:  # each liar moves a step by at most the radius, over n
        radius = float((x - start).norm(dim=1).median())
        assert float((value - good.mean(0)).norm()) <= 3 * (f / n) * radius + float(
            (good.mean(0) - start).norm()
        )


@pytest.mark.parametrize(
    ("rule", "liars"), [("median", 5), ("trimmed", 3), ("krum", 7), ("multikrum", 7)]
)
def test_more_liars_than_the_bound_own_the_aggregate(rule: Rule, liars: int) -> None:
    """The bound is the bound: beyond it colluding vectors drag the aggregate along."""
    x = torch.cat([honest(9 - liars), torch.full((liars, 6), 1e9, dtype=torch.float64)])
    assert float(combine(x, rule, f=2, center=torch.zeros(6)).abs().max()) > 1e6


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_clients_does_not_matter(rule: Rule) -> None:
    x, start = honest(9), torch.zeros(6, dtype=torch.float64)
    shuffled = x[torch.tensor([3, 1, 8, 0, 5, 7, 2, 6, 4])]
    assert torch.allclose(
        combine(x, rule, f=2, center=start), combine(shuffled, rule, f=2, center=start)
    )


@pytest.mark.parametrize("rule", ["clip", "krum", "multikrum", "centered"])
def test_rules_of_distances_commute_with_a_rotation(rule: Rule) -> None:
    x, start = honest(9), torch.ones(6, dtype=torch.float64)
    q = torch.linalg.qr(torch.tensor(np.random.default_rng(1).normal(size=(6, 6)))).Q
    turned = combine(x @ q, rule, f=2, center=start @ q)
    assert torch.allclose(turned, combine(x, rule, f=2, center=start) @ q)


def test_the_median_does_not_commute_with_a_rotation() -> None:
    x = honest(9)
    q = torch.linalg.qr(torch.tensor(np.random.default_rng(1).normal(size=(6, 6)))).Q
    assert not torch.allclose(
        combine(x @ q, "median", center=x[0]), combine(x, "median", center=x[0]) @ q
    )


@pytest.mark.parametrize("rule", RULES)
def test_too_few_vectors_are_refused(rule: Rule) -> None:
    n = needed(rule, 2)
    combine(honest(n), rule, f=2, center=torch.zeros(6))
    with pytest.raises(ValueError, match=f"at least {n} vectors, not {n - 1}"):
        combine(honest(n - 1), rule, f=2, center=torch.zeros(6))


def test_equal_vectors_stay_as_they_are() -> None:
    x = torch.ones(5, 3)
    for rule in RULES:
        assert torch.equal(combine(x, rule, f=1, center=torch.ones(3)), torch.ones(3))
    assert torch.equal(clipped(torch.zeros(3, 2), None), torch.zeros(3, 2))


def test_trees_are_taken_as_one_vector() -> None:
    """Krum judges a client by all of its weights: one wild tensor rules out the others too."""
    trees = [
        {"w": torch.full((2, 2), float(i)), "b": torch.full((3,), float(i))} for i in (1, 2, 3, 4)
    ]
    trees.append({"w": torch.full((2, 2), 2.0), "b": torch.full((3,), 1e6)})
    start = {"w": torch.zeros(2, 2), "b": torch.zeros(3)}
    found = combine_trees(trees, "multikrum", f=1, center=start)
    assert torch.equal(found["w"], torch.full((2, 2), 2.5)) and found["b"].shape == (3,)


def test_trees_may_be_nested_and_keep_their_types() -> None:
    trees = [
        {"a": {"w": torch.full((2,), float(i))}, "n": torch.full((), float(i), dtype=torch.float64)}
        for i in range(5)
    ]
    found = combine_trees(trees, "median", f=1, center=trees[0])
    assert torch.equal(found["a"]["w"], torch.full((2,), 2.0)) and found["n"].dtype == torch.float64


def test_weights_of_the_receiver_are_kept_by_the_rules_of_distances() -> None:
    weights = torch.tensor([0.6, 0.2, 0.1, 0.1, 0.0], dtype=torch.float64)
    for rule, expected in (("clip", 1.0), ("centered", 1.48)):
        found = combine(LINE, rule, center=ZERO, radius=1.0, weights=weights)  # type: ignore[arg-type]
        assert found.item() == pytest.approx(expected)
    alike = torch.full((5,), 0.2, dtype=torch.float64)
    assert torch.allclose(
        combine(LINE, "clip", center=ZERO, weights=alike), combine(LINE, "clip", center=ZERO)
    )


def test_without_a_center_the_median_is_it() -> None:
    x = honest(9)
    for rule in ("clip", "centered"):
        assert torch.equal(combine(x, rule), combine(x, rule, center=combine(x, "median")))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lie", [-1.0, 1e6, 1e30, -1e36])
def test_liars_do_not_move_answers_beyond_the_honest_ones(rule: Rule, lie: float) -> None:
    """Two of nine clients' logits; their rows differ by constants, which mean nothing."""
    rng = np.random.default_rng(1)
    logits = torch.tensor(
        rng.normal(size=(9, 6, 4)) * 0.1
        + rng.normal(size=(9, 6, 1)) * 20
        + np.eye(4)[rng.integers(4, size=6)] * 3
    )
    logits = logits.float()
    truth = logits[2:].softmax(-1)
    logits[:2] *= lie
    found = combine_logits(logits, rule, f=2).softmax(-1)
    assert bool(found.isfinite().all())
    assert bool(((found > truth.amin(0) - 0.05) & (found < truth.amax(0) + 0.05)).all())
    assert bool((found.argmax(-1) == truth.mean(0).argmax(-1)).all())


@pytest.mark.parametrize("rule", RULES)
def test_probabilities_stay_probabilities(rule: Rule) -> None:
    rng = np.random.default_rng(2)
    p = torch.tensor(rng.dirichlet(np.ones(4) * 5, size=(9, 6)))
    p[:2] = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    found = combine_probabilities(p, rule, f=2)
    assert torch.allclose(found.sum(-1), torch.ones(6, dtype=torch.float64)) and bool(
        (found >= 0).all()
    )
    if rule in ("median", "trimmed"):
        assert bool((found[:, 3] <= p[2:, :, 3].amax(0) * 1.3).all())


def test_where_no_label_has_a_majority_the_mean_is_left() -> None:
    labels = torch.eye(4)[torch.tensor([[0], [0], [1], [1], [2], [3]])]  # (6, 1, 4)
    found = combine_probabilities(labels, "median", f=1)
    assert torch.allclose(found, torch.tensor([[2.0, 2.0, 1.0, 1.0]]) / 6)
    assert torch.equal(
        combine_probabilities(labels[:3], "median", f=1), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    )


def test_a_constant_in_a_row_of_logits_changes_nothing() -> None:
    x = torch.tensor(np.random.default_rng(3).normal(size=(7, 5, 4)))
    moved = x + torch.tensor(np.random.default_rng(4).normal(size=(7, 5, 1)))
    for rule in RULES:
        assert torch.allclose(
            combine_logits(x, rule, f=1).softmax(-1), combine_logits(moved, rule, f=1).softmax(-1)
        )
    assert not torch.allclose(
        combine_values(x, "median", f=1).softmax(-1),
        combine_values(moved, "median", f=1).softmax(-1),
    )
