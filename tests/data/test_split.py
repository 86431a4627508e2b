from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, image_dataset, table_dataset
from fedloom.data.split import Split, public_hash, split

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
    server=st.just(0) | st.integers(1, 80),
    public=st.integers(0, 60),
    official=st.booleans(),
    partition=st.sampled_from(
        ["dirichlet", "dirichlet-classwise", "pathological", "random-classes", "iid", "natural"]
    ),
    rows=st.none() | st.integers(1, 200),
)
def test_server_shards_public_and_test_have_no_row_in_common(
    seed: int,
    clients: int,
    server: int,
    public: int,
    official: bool,
    partition: str,
    rows: int | None,
) -> None:
    data = pool(official=official, groups=True)
    options = {"rows": 5} if partition == "random-classes" else {}
    found = split(
        data,
        clients=clients,
        seed=seed,
        partition=partition,
        options=options,
        server=server,
        public=public,
        test_rows=rows,
        own_test_rows=10,
    )
    assert len(found.shards) == len(found.own_test) == clients
    assert (len(found.server), len(found.public)) == (server, public)
    everything = np.concatenate([*found.shards, found.server, found.public, found.test])
    assert len(set(everything.tolist())) == len(everything)
    for own, shard in zip(found.own_test, found.shards, strict=True):
        assert len(set(own.tolist())) == len(own) and 0 < len(own) <= 10
        if partition == "natural":
            assert (
                data.groups is not None and len({*data.groups[own], *data.groups[shard]}) == 1
            ) or official
        else:
            assert len(own) == 10
        assert not set(own.tolist()) & set(
            np.concatenate([*found.shards, found.server, found.public]).tolist()
        )
    for part in (*found.shards, found.server, found.public, found.test, *found.own_test):
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
    # 4.9 -> 5; one row trains
    assert np.bincount(data.y[found.test], minlength=4).tolist() == [20, 15, 5, 0]


def test_draws_for_one_purpose_move_nothing_else() -> None:
    def make(**changes: Any) -> Split:
        plain: dict[str, Any] = {
            "clients": 5,
            "seed": 3,
            "public": 40,
            "test_rows": 50,
            "own_test_rows": 8,
        }
        return split(pool(), **{**plain, **changes})

    base = make()
    for changes in (
        {"clients": 9},
        {"partition": "iid"},
        {"own_test_rows": 0},
        {"options": {"alpha": 9.0}},
    ):
        found = make(**changes)
        assert same(found.test, base.test) and same(found.public, base.public), changes
    for changes in ({"own_test_rows": 3}, {"test_rows": 20}):
        found = make(**changes)
        assert all(map(same, found.shards, base.shards)) and same(found.public, base.public), (
            changes
        )
    assert same(make(public=0).test, base.test)
    again, other = make(), make(seed=4)
    assert all(map(same, again.shards, base.shards)) and all(
        map(same, again.own_test, base.own_test)
    )
    assert not same(other.test, base.test) and not same(other.public, base.public)


@pytest.mark.parametrize("official", [False, True])
def test_the_server_s_rows_are_the_same_for_every_seed_and_split(official: bool) -> None:
    data = pool(n=1200, official=official)
    base = split(data, clients=4, seed=0, server=200)
    assert len(base.server) == 200 and not (official and (base.server % 4 == 0).any())
    # evenly, as chance has it
    assert np.bincount(data.y[base.server]) == pytest.approx([50] * 4, abs=20)
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2**32 - 1},
        {"clients": 9},
        {"public": 50},
        {"partition": "iid"},
        {"test_rows": 30},
        {"test_fraction": 0.5},
        {"own_test_rows": 20},
    ]
    for change in changes:
        found = split(data, **{"clients": 4, "seed": 0, "server": 200, **change})
        assert same(found.server, base.server), change
    assert official == same(split(data, clients=4, seed=1, server=200).test, base.test)
    assert same(base.test, split(data, clients=4, seed=0).test) == official


def test_without_an_official_split_the_test_is_drawn_from_what_the_server_leaves() -> None:
    data = pool(n=1200)
    found = split(data, clients=2, seed=5, server=200, partition="iid")
    left = np.setdiff1d(np.arange(1200), found.server)
    counts = np.bincount(data.y[left])
    assert np.bincount(data.y[found.test]).tolist() == [int(0.25 * count + 0.5) for count in counts]
    assert same(np.sort(np.concatenate([*found.shards, found.test])), left)


SPLITS = [
    (False, "dirichlet", {}, "93f862ee"),
    (True, "dirichlet", {}, "d5642b1f"),
    (False, "random-classes", {"rows": 5}, "94709fcf"),
    (True, "random-classes", {"rows": 5}, "47907fc6"),
]


@pytest.mark.parametrize(("official", "partition", "options", "digest"), SPLITS)
def test_a_split_without_a_server_stays_what_it_was(
    official: bool, partition: str, options: dict[str, Any], digest: str
) -> None:
    """Digests of splits that were made before servers had rows: a published run must keep its
    shards.
    """
    data = pool(official=official)
    found = split(
        data,
        clients=5,
        seed=3,
        partition=partition,
        options=options,
        public=40,
        test_rows=50,
        own_test_rows=8,
    )
    assert len(found.server) == 0
    parts = (*found.shards, found.public, found.test, *found.own_test)
    text = ";".join(",".join(map(str, part.tolist())) for part in parts)
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == digest


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
    found = split(
        data, clients=4, seed=2, partition="pathological", options={"classes": 1}, own_test_rows=60
    )
    assert [len(set(own.tolist())) for own in found.own_test] == [25] * 4
    assert [len(own) for own in found.own_test] == [25] * 4


def test_clients_of_one_mix_draw_different_own_test_rows() -> None:
    found = split(
        pool(), clients=8, seed=2, partition="pathological", options={"classes": 1}, own_test_rows=8
    )
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
        ({"clients": 0}, "clients must be at least 1, not 0"),
        ({"public": -1}, "public must be at least 0"),
        ({"server": -1}, "server must be at least 0"),
        ({"server": 400}, "below the 400 training rows, not 400"),
        ({"public": 300}, "below 300"),
        ({"test_fraction": 1.0}, "test_fraction must be at least 0, and below 1"),
        ({"test_rows": 0}, "test_rows must be at least 1"),
        ({"own_test_rows": -2}, "own_test_rows must be at least 0"),
        ({"partition": "natrual"}, "Did you mean 'natural'"),
        ({"partition": "natural"}, "rows have owners"),
        ({"options": {"alfa": 1}}, "Did you mean 'alpha'"),
        (
            {"partition": lambda labels, clients, rng: [np.array([0, 1]), np.array([1, 2])]},
            "1 of them twice",
        ),
        ({"partition": lambda labels, clients, rng: [np.array([0, 1])]}, "for 2 clients"),
        ({"partition": lambda labels, clients, rng: [np.array([0]), np.array([300])]}, "0..299"),
        (
            {"partition": lambda labels, clients, rng: [np.arange(3), np.arange(0)]},
            r"\[3, 0\] rows",
        ),
        ({"partition": lambda labels, clients, rng: []}, "0 parts"),
    ],
)
def test_impossible_splits_say_why(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        split(pool(), **{"clients": 2, "seed": 0, **arguments})


def test_owners_of_one_row_leave_none_for_the_test() -> None:
    few = replace(pool(), x=pool().x[:2], y=np.array([0, 1]), groups=np.array([0, 1]))
    with pytest.raises(DataError, match=r"2 rows leave none for the test at test_fraction = 0.25"):
        split(few, clients=2, seed=0, partition="natural")


def test_all_wrong_numbers_are_reported_at_once() -> None:
    with pytest.raises(DataError) as caught:
        split(pool(), clients=-1, seed=0, public=-1, own_test_rows=-1)
    assert len(str(caught.value).splitlines()) == 3


def test_each_owner_has_the_same_share_of_test_rows_in_its_class_mix() -> None:
    sizes = {0: (30, 10), 1: (4, 40), 2: (2, 2), 3: (1, 0)}  # rows of both classes
    groups = np.repeat([*sizes], [sum(rows) for rows in sizes.values()])
    y = np.concatenate([np.repeat([0, 1], rows) for rows in sizes.values()])
    data = table_dataset(
        "owned", np.zeros((len(y), 1), np.float32), y, ("a", "b"), ("c",), groups=groups
    )
    found = split(data, clients=4, seed=3, partition="natural", own_test_rows=None)
    for owner, rows in sizes.items():
        tested = found.test[groups[found.test] == owner]
        assert len(tested) == {0: 10, 1: 11, 2: 1, 3: 0}[owner]
        share = len(tested) / sum(rows)
        for label in (0, 1):
            assert abs((y[tested] == label).sum() - share * rows[label]) < 1
        if owner < 3:
            assert same(found.own_test[owner], tested)
    again = split(data, clients=2, seed=3, partition="iid", own_test_rows=None)
    assert (
        same(again.test, found.test)
        and [len(own) for own in again.own_test] == [len(found.test)] * 2
    )


@given(
    seed=seeds,
    share=st.sampled_from([0.1, 0.25, 0.5]),
    official=st.booleans(),
    partition=st.sampled_from(["dirichlet", "iid", "natural"]),
)
def test_validation_rows_stand_in_for_the_test_rows(
    seed: int, share: float, official: bool, partition: str
) -> None:
    """Nobody trains or is tested on the test rows, which are the same for every share."""
    data = pool(official=official, groups=True)
    options: dict[str, Any] = {
        "clients": 4,
        "seed": seed,
        "partition": partition,
        "server": 20,
        "public": 30,
    }
    tested, found = (
        split(data, **options, own_test_rows=10, validation=share) for share in (0.0, share)
    )
    rest = 400 - 20 - len(tested.test)
    assert abs(len(found.test) - share * rest) <= 20
    used = np.concatenate([*found.shards, found.server, found.public, found.test])
    assert len(set(used.tolist())) == len(used) == rest + 20 or partition == "natural"
    assert not set(used.tolist()) & set(tested.test.tolist())
    assert set(np.concatenate(found.own_test).tolist()) <= set(found.test.tolist())
    assert same(found.server, tested.server)


def test_the_classes_have_the_same_share_of_validation_rows() -> None:
    data = pool(official=True)
    found = split(data, clients=5, seed=1, validation=0.2)
    assert (np.bincount(data.y[found.test]) == np.bincount(data.y[data.train]) // 5).all()
    assert len(split(data, clients=5, seed=1, validation=0.2, test_rows=7).test) == 7
