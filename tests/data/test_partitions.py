from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.allocation import fill_up
from fedloom.data.partitions import (
    PARTITIONS,
    check_options,
    dirichlet,
    dirichlet_classwise,
    find_partition,
    iid,
    label_sets,
    natural,
    pathological,
    random_classes,
)
from fedloom.data.stats import describe

seeds = st.integers(0, 2**31)
alphas = st.floats(-4, 4).map(lambda power: 10.0**power)


@st.composite
def labeled(draw: st.DrawFn, least: int = 1) -> np.ndarray:
    """Labels of two to six classes, of at least so many rows each, in mixed order."""
    sizes = draw(st.lists(st.integers(least, 40), min_size=2, max_size=6))
    # numbers with gaps: only those that occur count
    labels = np.repeat(np.arange(len(sizes)) * 3, sizes)
    return np.random.default_rng(draw(seeds)).permutation(labels)


def check(parts: list[np.ndarray], labels: np.ndarray, clients: int, least: int = 1) -> np.ndarray:
    """What all partitions promise; gives all rows that were handed out."""
    assert len(parts) == clients
    rows = np.concatenate(parts)
    assert len(set(rows.tolist())) == len(rows)
    assert rows.min() >= 0 and rows.max() < len(labels)
    for part in parts:
        assert len(part) >= least and part.dtype == np.int64
        assert all(one < other for one, other in pairwise(part.tolist()))
    return rows


def even(classes: int, each: int) -> np.ndarray:
    return np.tile(np.arange(classes), each)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


whole_set = pytest.mark.parametrize("function", [dirichlet, dirichlet_classwise])


@whole_set
@given(labels=labeled(), alpha=alphas, seed=seeds, data=st.data())
def test_whole_set_splits_hand_out_every_row_once(
    function: Any, labels: np.ndarray, alpha: float, seed: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    least = data.draw(st.integers(1, len(labels) // clients))
    parts = function(labels, clients, rng(seed), alpha=alpha, min_rows=least)
    assert len(check(parts, labels, clients, least)) == len(labels)


@given(labels=labeled(), alpha=alphas, seed=seeds, data=st.data())
def test_fixed_sizes_are_met_to_the_last_row(
    labels: np.ndarray, alpha: float, seed: int, data: st.DataObject
) -> None:
    """Also where the classes run out: with clients * rows = n every row is handed out."""
    clients = data.draw(st.integers(1, len(labels)))
    size = data.draw(st.integers(1, len(labels) // clients))
    parts = dirichlet(labels, clients, rng(seed), alpha=alpha, rows=size)
    assert {len(part) for part in parts} == {size}
    check(parts, labels, clients)


@given(labels=labeled(), seed=seeds, data=st.data())
def test_iid_deals_every_row_evenly(labels: np.ndarray, seed: int, data: st.DataObject) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    parts = iid(labels, clients, rng(seed))
    assert len(check(parts, labels, clients)) == len(labels)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(labels=labeled(least=20), seed=seeds, clients=st.integers(1, 20), data=st.data())
def test_pathological_gives_each_client_exactly_so_many_classes(
    labels: np.ndarray, seed: int, clients: int, data: st.DataObject
) -> None:
    kinds = len(np.unique(labels))
    wanted = data.draw(st.integers(1, kinds))
    parts = pathological(labels, clients, rng(seed), classes=wanted)
    rows = check(parts, labels, clients)
    assert {len(np.unique(labels[part])) for part in parts} == {wanted}
    if clients * wanted >= kinds:
        assert len(rows) == len(labels)
    held = [[int((labels[part] == label).sum()) for part in parts] for label in np.unique(labels)]
    shares = [[count for count in counts if count] for counts in held]
    holders = [len(those) for those in shares]
    assert max(holders) - min(holders) <= 1
    assert all(max(those) - min(those) <= 1 for those in shares if those)


@given(seed=seeds, clients=st.integers(1, 12), rows=st.integers(3, 10), classes=st.integers(1, 3))
def test_random_classes_are_so_many_and_even(
    seed: int, clients: int, rows: int, classes: int
) -> None:
    labels = rng(seed).permutation(even(5, 120))
    parts = random_classes(labels, clients, rng(seed), classes=classes, rows=rows)
    check(parts, labels, clients, least=rows)
    for part in parts:
        _, counts = np.unique(labels[part], return_counts=True)
        assert len(part) <= 2 * rows and len(counts) == classes
        assert counts.max() - counts.min() <= 1


def test_sizes_with_random_classes_take_all_values_evenly() -> None:
    labels = even(10, 2000)
    parts = random_classes(labels, 600, rng(), rows=5)
    sizes = np.bincount([len(part) for part in parts])
    assert np.flatnonzero(sizes).tolist() == [5, 6, 7, 8, 9, 10]
    expected = 600 / 6
    # chi-squared, 5 degrees of freedom: p = 0.001
    assert float(((sizes[5:] - expected) ** 2 / expected).sum()) < 20.5


def test_every_pair_of_classes_is_drawn() -> None:
    labels = even(5, 4000)
    parts = random_classes(labels, 500, rng(3), rows=4)
    pairs = [tuple(np.unique(labels[part]).tolist()) for part in parts]
    # 50 on average
    assert len(set(pairs)) == 10 and min(pairs.count(pair) for pair in set(pairs)) > 25


@given(seed=seeds, data=st.data())
def test_natural_clients_are_owners(seed: int, data: st.DataObject) -> None:
    groups = np.array(data.draw(st.lists(st.sampled_from([2, 5, 7, 90]), min_size=4, max_size=50)))
    owners, sizes = np.unique(groups, return_counts=True)
    clients = data.draw(st.integers(1, len(owners)))
    parts = natural(np.zeros(len(groups), np.int64), clients, rng(seed), groups=groups)
    check(parts, groups, clients)
    for part in parts:
        assert len(set(groups[part].tolist())) == 1
        assert len(part) == sizes[owners == groups[part[0]]]


def test_natural_chooses_owners_at_random_among_those_with_enough_rows() -> None:
    groups = np.repeat(np.arange(10), [1] + [3] * 9)
    labels = np.zeros(len(groups), np.int64)
    chosen = {
        tuple(
            int(groups[part[0]])
            for part in natural(labels, 3, rng(seed), groups=groups, min_rows=2)
        )
        for seed in range(50)
    }
    assert len(chosen) > 20
    assert {owner for owners in chosen for owner in owners} == set(range(1, 10))


def test_label_sets_gives_each_client_its_classes_evenly() -> None:
    labels, sets = even(10, 12), [[4, 5, 6, 7], [4, 5, 6, 7], [0, 1, 2, 3]]
    parts = label_sets(labels, 3, rng(), sets=sets)
    check(parts, labels, 3)
    held = [np.bincount(labels[part], minlength=10).tolist() for part in parts]
    assert held == [[0] * 4 + [6] * 4 + [0] * 2] * 2 + [[12] * 4 + [0] * 6]
    few = label_sets(labels, 3, rng(), sets=sets, rows=8)
    assert [np.bincount(labels[part], minlength=10).max() for part in few] == [2, 2, 2]
    assert [len(part) for part in few] == [8, 8, 8]


@pytest.mark.parametrize("sets", [[[0]], [[0], []], [[0], [9]]])
def test_label_sets_refuses_what_no_client_can_hold(sets: list[list[int]]) -> None:
    with pytest.raises(DataError, match="classes of each of 2 clients"):
        label_sets(even(3, 4), 2, rng(), sets=sets)


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
def test_the_generator_alone_decides(name: str) -> None:
    function, labels = PARTITIONS[name].function, even(5, 60)
    clients = 5 if name == "groups" else 4
    one, same, other = (function(labels, clients, rng(seed)) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, same, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(one, other, strict=True))


# What the draws are like


def mixes(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    counts = np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])
    return np.asarray(counts / counts.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("options", [{}, {"rows": 500}])
def test_large_alpha_is_nearly_iid(options: dict[str, int]) -> None:
    labels = even(5, 2000)
    found = mixes(labels, dirichlet(labels, 10, rng(), alpha=1e6, **options))
    # 0.06 is three s.d. of 500 draws
    assert np.abs(found - 0.2).max() < (0.06 if options else 0.001)
    found = mixes(labels, dirichlet_classwise(labels, 10, rng(), alpha=1e6))
    assert np.abs(found - 0.2).max() < 0.001


@pytest.mark.parametrize("options", [{}, {"rows": 100}])
def test_small_alpha_gives_each_client_few_classes(options: dict[str, int]) -> None:
    labels = even(10, 500)
    stats = describe(
        labels, dirichlet(labels, 20, rng(), alpha=0.01, **options), list("abcdefghij")
    )
    assert stats.entropy.mean() < 0.5 and stats.pairwise > 0.8
    wide = describe(labels, dirichlet(labels, 20, rng(), alpha=1.0, **options), list("abcdefghij"))
    assert wide.entropy.mean() > 2 > stats.entropy.mean()


def test_fixed_sizes_draw_each_client_its_own_mix() -> None:
    """Var q_k = (1/K)(1 - 1/K) / (alpha K + 1) of Dir(alpha 1_K), and the multinomial's own spread
    on top.

    Tells the client-wise draw from the class-wise one, whose shares depend on the number of
    clients.
    """
    kinds, alpha, size = 4, 1.0, 50
    labels = even(kinds, 100_000)
    shares = mixes(labels, dirichlet(labels, 2000, rng(), alpha=alpha, rows=size))
    of_mix = (1 / kinds) * (1 - 1 / kinds) / (alpha * kinds + 1)
    of_draw = (1 / kinds * (1 - 1 / kinds) - of_mix) / size
    assert shares.mean(axis=0) == pytest.approx([0.25] * 4, abs=0.02)
    assert shares.var(axis=0) == pytest.approx([of_mix + of_draw] * 4, rel=0.1)


def test_fixed_sizes_fall_back_on_the_classes_that_are_left() -> None:
    """One class for each client, and more clients than classes hold: the last ones take what there
    is.
    """
    labels = np.array([0] * 10 + [1] * 10)
    parts = dirichlet(labels, 4, rng(3), alpha=1e-4, rows=5)
    assert sorted(np.concatenate(parts).tolist()) == list(range(20))


def test_the_whole_set_is_shared_in_proportion_to_the_mixes() -> None:
    """By the same draws: q is the first that is drawn after the order of each class."""
    labels, source = even(3, 100), rng(5)
    for label in range(3):
        source.permutation(np.flatnonzero(labels == label))
    q = source.dirichlet(np.full(3, 0.7), size=4)  # (N, K)
    counts = np.stack(
        [np.bincount(labels[part], minlength=3) for part in dirichlet(labels, 4, rng(5), alpha=0.7)]
    )
    assert np.abs(counts - 100 * q / q.sum(axis=0)).max() < 1


def test_classwise_gives_no_more_to_whom_has_a_fair_share() -> None:
    """With the cap a client has less than n / N plus one class; without it, one gets 3 classes of
    10.
    """
    labels = even(10, 100)
    largest = max(
        max(len(part) for part in dirichlet_classwise(labels, 12, rng(seed), alpha=0.01))
        for seed in range(20)
    )
    assert largest < 1000 / 12 + 100


def test_tiny_alpha_does_not_underflow() -> None:
    labels = even(5, 40)
    for function in (dirichlet, dirichlet_classwise):
        check(function(labels, 10, rng(), alpha=1e-12), labels, 10)


def test_clients_with_too_few_rows_get_some_of_the_largest() -> None:
    parts = np.split(np.arange(17), [10, 16])  # 10, 6 and 1 rows
    filled = fill_up([*parts, np.arange(0)], 3, rng())
    assert [len(part) for part in filled] == [5, 6, 3, 3]
    assert sorted(np.concatenate(filled).tolist()) == list(range(17))
    assert 16 in filled[2] and set(filled[3].tolist()) < set(range(10))


# What can't be done


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("iid", 0, {}, "clients must be at least 1, not 0"),
        ("iid", 21, {}, "21 clients need at least 1 row each, 21 in all, but there are 20"),
        ("dirichlet", 5, {"rows": 5}, "at least 5 rows each, 25 in all, but there are 20"),
        ("dirichlet", 5, {"min_rows": 5}, "25 in all, but there are 20"),
        ("dirichlet-classwise", 5, {"min_rows": 5}, "25 in all, but there are 20"),
        ("pathological", 2, {"classes": 3}, "hold 3 classes, but the data has 2"),
        ("pathological", 11, {"classes": 2}, "11 clients share a class of 10 rows"),
        ("random-classes", 2, {"rows": 20}, "40 in all, but there are 20"),
        ("random-classes", 2, {"rows": 8}, "only .* classes have .* of the 20 rows left"),
        ("random-classes", 1, {"rows": 5, "classes": 3}, "hold 3 classes, but the data has 2"),
        ("random-classes", 1, {"rows": 1}, "rows must be at least 2"),
        ("natural", 1, {"groups": None}, "rows have owners"),
        (
            "natural",
            3,
            {"groups": even(2, 10)},
            "3 clients need 3 owners of at least 1 rows, not 2",
        ),
        ("natural", 1, {"groups": even(2, 10), "min_rows": 11}, "at least 11 rows, not 0"),
    ],
)
def test_impossible_requests_say_why(
    name: str, clients: int, options: dict[str, Any], message: str
) -> None:
    labels = np.append(even(2, 10), [1, 1]) if clients == 11 else even(2, 10)
    with pytest.raises(DataError, match=message):
        PARTITIONS[name].function(labels, clients, rng(), **options)


def test_requests_that_are_just_possible() -> None:
    labels = even(2, 10)
    assert {len(part) for part in pathological(labels, 10, rng(), classes=2)} == {2}
    assert {len(part) for part in dirichlet(labels, 20, rng(), rows=1)} == {1}
    assert {len(part) for part in dirichlet_classwise(labels, 5, rng(), min_rows=4)} == {4}


# The registry


def test_options_have_the_defaults_of_the_functions() -> None:
    for name, partition in PARTITIONS.items():
        listed = {option.name: option.default for option in partition.options}
        assert listed == (partition.function.__kwdefaults__ or {}), name
        assert check_options(name, {}) == listed


def test_options_get_their_types() -> None:
    checked = check_options("dirichlet", {"alpha": 1, "rows": np.int64(20)})
    assert checked == {"alpha": 1.0, "rows": 20, "min_rows": 1}
    assert type(checked["alpha"]) is float and type(checked["rows"]) is int
    assert check_options("dirichlet", {"rows": None})["rows"] is None


def test_all_wrong_options_are_reported_at_once() -> None:
    with pytest.raises(DataError) as caught:
        check_options("dirichlet", {"alhpa": 1, "alpha": 0, "rows": 2.5, "min_rows": True})
    lines = str(caught.value).splitlines()
    assert lines == [
        "Unknown option 'alhpa' of partition 'dirichlet'. Did you mean 'alpha'?",
        "dirichlet.alpha must be a number above 0, not 0.",
        "dirichlet.rows must be a whole number above 0, not 2.5.",
        "dirichlet.min_rows must be a whole number above 0, not True.",
    ]
    for value in (None, "1", float("nan"), float("inf"), -1.0):
        with pytest.raises(DataError, match="alpha must be a number above 0"):
            check_options("dirichlet", {"alpha": value})


def test_an_unknown_partition_gets_a_hint() -> None:
    with pytest.raises(DataError, match="Did you mean 'dirichlet'"):
        find_partition("dirichelt")
