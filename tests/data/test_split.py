from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.split import Split, public_hash, split
from fedloom.errors import DataError

seeds = st.integers(0, 2**32 - 1)


def pool(n: int = 400, classes: int = 4, official: bool = False, groups: bool = False) -> Dataset:
    """Images that say which row they are; with an official test split, it is every fourth row."""
    x = np.arange(n, dtype=np.uint16).view(np.uint8).reshape(n, 1, 1, 2)
    owners = np.arange(n) // 20 if groups else None
    test = np.arange(0, n, 4) if official else None
    names = tuple("abcdefgh"[:classes])
    return image_dataset("pool", x, np.arange(n) // 4 % classes, names, test=test, groups=owners)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and bool((one == other).all())


@given(
    seed=seeds,
    clients=st.integers(1, 12),
    public=st.integers(0, 100),
    official=st.booleans(),
    partition=st.sampled_from(["dirichlet", "dirichlet-classwise", "pathological", "two-class", "iid", "natural"]),
    rows=st.none() | st.integers(1, 200),
)
def test_shards_public_and_test_have_no_row_in_common(
    seed: int, clients: int, public: int, official: bool, partition: str, rows: int | None
) -> None:
    data = pool(official=official, groups=True)
    options = {"m": 5} if partition == "two-class" else {}
    found = split(
        data,
        clients=clients,
        seed=seed,
        partition=partition,
        options=options,
        public=public,
        test_rows=rows,
        own_test_rows=10,
    )
    assert len(found.shards) == len(found.own_test) == clients and len(found.public) == public
    everything = np.concatenate([*found.shards, found.public, found.test])
    assert len(set(everything.tolist())) == len(everything)
    for own in found.own_test:
        assert len(set(own.tolist())) == len(own) == 10
        assert not set(own.tolist()) & set(np.concatenate([*found.shards, found.public]).tolist())
    for part in (*found.shards, found.public, found.test, *found.own_test):
        assert part.dtype == np.int64 and (np.diff(part) > 0).all()


def test_whole_set_partitions_use_every_row() -> None:
    found = split(pool(), clients=5, seed=1, public=30)
    assert sum(map(len, found.shards)) + len(found.public) + len(found.test) == 400


def test_an_official_test_split_is_kept_as_it_is() -> None:
    found = split(pool(official=True), clients=5, seed=1, test_fraction=0.9)
    assert found.test.tolist() == list(range(0, 400, 4))


def test_without_one_the_same_share_of_each_class_is_held_out() -> None:
    data = replace(pool(), y=np.repeat([0, 1, 2, 3], [200, 150, 49, 1]))
    found = split(data, clients=2, seed=1, test_fraction=0.1, partition="iid")
    assert np.bincount(data.y[found.test], minlength=4).tolist() == [20, 15, 5, 0]  # 4.9 -> 5; one row trains


def test_draws_for_one_purpose_move_nothing_else() -> None:
    def make(**changes: Any) -> Split:
        plain: dict[str, Any] = {"clients": 5, "seed": 3, "public": 40, "test_rows": 50, "own_test_rows": 8}
        return split(pool(), **{**plain, **changes})

    base = make()
    for changes in ({"clients": 9}, {"partition": "iid"}, {"own_test_rows": 0}, {"options": {"alpha": 9.0}}):
        found = make(**changes)
        assert same(found.test, base.test) and same(found.public, base.public), changes
    for changes in ({"own_test_rows": 3}, {"test_rows": 20}):
        found = make(**changes)
        assert all(map(same, found.shards, base.shards)) and same(found.public, base.public), changes
    assert same(make(public=0).test, base.test)
    again, other = make(), make(seed=4)
    assert all(map(same, again.shards, base.shards)) and all(map(same, again.own_test, base.own_test))
    assert not same(other.test, base.test) and not same(other.public, base.public)


def test_test_rows_caps_the_common_test_set_only() -> None:
    data = pool(official=True)
    found = split(data, clients=3, seed=0, partition="iid", test_rows=10, own_test_rows=40)
    assert len(found.test) == 10 and set(found.test.tolist()) < set(range(0, 400, 4))
    assert {len(own) for own in found.own_test} == {40}
    assert len(split(data, clients=3, seed=0, test_rows=1000).test) == 100


def test_own_test_rows_have_the_mix_of_the_shard() -> None:
    data = pool()
    found = split(data, clients=6, seed=2, options={"alpha": 0.3}, own_test_rows=15)
    for shard, own in zip(found.shards, found.own_test, strict=True):
        mix = np.bincount(data.y[shard], minlength=4) / len(shard)
        assert np.abs(np.bincount(data.y[own], minlength=4) - 15 * mix).max() < 1
        assert len(own) == 15


def test_own_test_rows_are_never_repeated() -> None:
    """A client of one class asks for 60 rows, but the test split has 25 of that class."""
    data = pool()
    found = split(data, clients=4, seed=2, partition="pathological", options={"classes": 1}, own_test_rows=60)
    assert [len(set(own.tolist())) for own in found.own_test] == [25] * 4
    assert [len(own) for own in found.own_test] == [25] * 4


def test_clients_of_one_mix_draw_different_own_test_rows() -> None:
    found = split(pool(), clients=8, seed=2, partition="pathological", options={"classes": 1}, own_test_rows=8)
    assert len({tuple(own.tolist()) for own in found.own_test}) == 8


def test_own_test_rows_are_none_by_default() -> None:
    assert [len(own) for own in split(pool(), clients=4, seed=2).own_test] == [0] * 4


def test_the_public_set_is_drawn_from_all_classes_alike() -> None:
    data = pool(n=8000)
    public = split(data, clients=2, seed=0, public=2000).public
    assert np.bincount(data.y[public]) == pytest.approx([500] * 4, abs=60)


def test_natural_shards_have_one_owner_each() -> None:
    data = pool(groups=True)
    found = split(data, clients=7, seed=0, partition="natural", public=20)
    assert data.groups is not None
    owners = [set(data.groups[shard].tolist()) for shard in found.shards]
    assert all(len(those) == 1 for those in owners) and len(set().union(*owners)) == 7


def test_the_public_hash_is_of_the_rows_and_not_of_the_labels() -> None:
    data = pool()
    found = split(data, clients=2, seed=0, public=3)
    rows = data.x[found.public]
    by_hand = hashlib.sha256(b"|u1 (3, 1, 1, 2) " + rows.tobytes()).hexdigest()
    assert public_hash(data, found) == by_hand
    assert public_hash(replace(data, y=1 - data.y % 2), found) == by_hand
    changed = data.x.copy()
    changed[found.public[1], 0, 0, 0] ^= 1
    assert public_hash(replace(data, x=changed), found) != by_hand
    assert public_hash(data, replace(found, public=found.public[::-1])) != by_hand
    assert public_hash(data, replace(found, public=found.public[:2])) != by_hand


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clients": 0}, "clients must be at least 1, but it is 0"),
        ({"public": -1}, "public must be at least 0"),
        ({"public": 300}, "takes 300 of 300"),
        ({"test_fraction": 1.0}, "test_fraction must be between 0 and 1"),
        ({"test_rows": 0}, "test_rows must be at least 1"),
        ({"own_test_rows": -2}, "own_test_rows must be at least 0"),
        ({"partition": "natrual"}, "Did you mean 'natural'"),
        ({"partition": "natural"}, "rows have owners"),
        ({"options": {"alfa": 1}}, "Did you mean 'alpha'"),
        ({"partition": lambda labels, clients, rng: [np.array([0, 1]), np.array([1, 2])]}, "1 of them twice"),
        ({"partition": lambda labels, clients, rng: [np.array([0, 1])]}, "each of 2 clients"),
        ({"partition": lambda labels, clients, rng: [np.array([0]), np.array([300])]}, "from 0 to 299"),
        ({"partition": lambda labels, clients, rng: [np.arange(3), np.arange(0)]}, r"\[3, 0\] rows"),
        ({"partition": lambda labels, clients, rng: []}, "0 parts"),
    ],
)
def test_impossible_splits_say_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(pool(), **{"clients": 2, "seed": 0, **arguments})


def test_all_wrong_numbers_are_told_at_once() -> None:
    with pytest.raises(DataError) as caught:
        split(pool(), clients=-1, seed=0, public=-1, own_test_rows=-1)
    assert len(str(caught.value).splitlines()) == 3
