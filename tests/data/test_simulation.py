from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import TableEncoder, encode_table
from fedloom.data.images import crop_cells, default_grid, grid_cells
from fedloom.data.simulation import simulate
from fedloom.data.sources import load, load_raw
from fedloom.data.split import split
from fedloom.data.stats import ratio
from fedloom.data.tables import RawTable
from fedloom.data.vertical import PartyView, VerticalDataset, encode_new_rows

DIGITS = load("digits")


def numbers(parties: VerticalDataset, party: int, part: str) -> list[int]:
    """Which rows of digits a part of a party's view is, found by its pixels."""
    view = parties.views[party]
    recipe = view.recipe
    whole = {
        row.tobytes(): number
        for number, row in enumerate(crop_cells(DIGITS.x, tuple(recipe["grid"]), recipe["cells"]))
    }
    return [whole[row.tobytes()] for row in view.x[getattr(view, part)]]


def digits(**options: Any) -> VerticalDataset:
    """Digits whose every party sees the whole image, so that a row says who it is."""
    return simulate(
        "digits",
        **{"parties": 4, "blocks_per_party": 4, "seed": 3, "aligned": 40, "unaligned": 60}
        | options,
    )


# The grid


def test_cells_walk_through_neighbours() -> None:
    assert grid_cells((4, 4), (2, 2)) == [(0, 0, 2, 2), (0, 2, 2, 2), (2, 2, 2, 2), (2, 0, 2, 2)]
    assert [place[:2] for place in grid_cells((2, 6), (2, 3))] == [
        (0, 0),
        (0, 2),
        (0, 4),
        (1, 4),
        (1, 2),
        (1, 0),
    ]
    assert [place[1] for place in grid_cells((3, 9), (1, 3))] == [0, 3, 6]
    assert [default_grid(parties) for parties in (2, 3, 4, 5, 6, 8)] == [
        (2, 1),
        (1, 3),
        (2, 2),
        (1, 5),
        (2, 3),
        (2, 4),
    ]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_cells_have_one_size_and_lose_nothing(
    height: int, width: int, rows: int, columns: int
) -> None:
    if rows > height or columns > width:
        with pytest.raises(DataError, match="does not fit"):
            grid_cells((height, width), (rows, columns))
        return
    seen = np.zeros((height, width), dtype=int)
    places = grid_cells((height, width), (rows, columns))
    for top, left, h, w in places:
        assert (
            (h, w) == (-(-height // rows), -(-width // columns))
            and top + h <= height
            and left + w <= width
        )
        seen[top : top + h, left : left + w] += 1
    assert seen.min() >= 1 and len(set(places)) == rows * columns
    if height % rows == 0 and width % columns == 0:
        assert seen.max() == 1


# Images


def test_each_party_sees_its_cells_of_the_same_people() -> None:
    parties = simulate("digits", parties=4, seed=0, aligned=50, unaligned=30)
    assert [view.name for view in parties.views] == [f"party-{m}" for m in range(4)]
    assert [view.recipe["cells"] for view in parties.views] == [[0, 1], [1, 2], [2, 3], [3, 0]]
    first, second = parties.views[:2]
    assert first.input_shape == (2, 4, 4) and first.shift.tolist() == [8.0, 8.0]
    # both see the top right
    assert (first.x[first.aligned, 1] == second.x[second.aligned, 0]).all()
    assert (first.x[first.test, 1] == second.x[second.test, 0]).all()
    last = parties.views[3]
    rows = numbers(parties, 0, "aligned")
    assert (parties.labels == DIGITS.y[rows]).all() and numbers(parties, 3, "aligned") == rows
    assert (last.x[last.aligned, 1] == DIGITS.x[rows, 0, :4, :4]).all()
    assert parties.test_labels.tolist() == DIGITS.y[numbers(parties, 0, "test")].tolist()


@pytest.mark.parametrize("number", [2, 3, 5, 6, 7, 8])
def test_any_number_of_parties(number: int) -> None:
    parties = simulate("digits", parties=number, seed=0, aligned=20, unaligned=10)
    assert len(parties.views) == number
    assert {view.x.shape for view in parties.views} == {
        (30 + 451, 1 if number == 2 else 2, *windows_of(number))
    }


def windows_of(number: int) -> tuple[int, int]:
    return grid_cells((8, 8), default_grid(number))[0][2:]


def test_a_finer_grid() -> None:
    parties = simulate(
        "digits", parties=4, seed=0, aligned=20, unaligned=10, grid=(4, 4), blocks_per_party=5
    )
    assert parties.views[3].recipe["cells"] == [3, 4, 5, 6, 7] and parties.views[0].input_shape == (
        5,
        2,
        2,
    )


def test_nobody_is_in_two_places() -> None:
    parties = digits(unaligned=None, imbalance_ratio=3, majority_classes=4)
    parts = [numbers(parties, 0, "aligned"), numbers(parties, 0, "test")]
    parts += [numbers(parties, party, "unaligned") for party in range(4)]
    everybody = np.concatenate(parts)
    assert len(np.unique(everybody)) == len(everybody)
    assert len({len(part) for part in parts[2:]}) == 1 and len(parts[2]) > 100
    for party, view in enumerate(parties.views):
        assert view.truth is not None and (view.truth == DIGITS.y[parts[2 + party]]).all()
        assert len(view.x) == len(parts[0]) + len(parts[1]) + len(parts[2])


def test_neither_parties_nor_aligned_rows_move_the_others() -> None:
    few = digits()
    many = digits(aligned=120)
    eight = digits(parties=8, grid=(2, 4), blocks_per_party=8, unaligned=60)
    assert (
        numbers(many, 0, "aligned")[:40]
        == numbers(few, 0, "aligned")
        == numbers(eight, 0, "aligned")
    )
    assert numbers(many, 0, "test") == numbers(few, 0, "test") == numbers(eight, 0, "test")
    for party in range(4):
        rows = numbers(few, party, "unaligned")
        assert rows == numbers(many, party, "unaligned") == numbers(eight, party, "unaligned")
    assert numbers(few, 0, "test") == split(DIGITS, clients=2, seed=3).test.tolist()
    assert numbers(digits(seed=4), 0, "aligned") != numbers(few, 0, "aligned")


def test_aligned_rows_are_even_over_the_classes_for_images() -> None:
    assert np.bincount(digits().labels).tolist() == [4] * 10
    assert len(set(np.bincount(digits(balanced=False, aligned=200).labels).tolist())) > 1


def test_the_test_rows_can_be_cut() -> None:
    few = digits(test_rows=30)
    assert (
        set(numbers(few, 0, "test")) < set(numbers(digits(), 0, "test"))
        and len(few.test_labels) == 30
    )


def test_rare_classes_are_rare_among_the_aligned_only() -> None:
    zero = digits(rare_classes=[3, 7])
    counts = np.bincount(zero.labels, minlength=10)
    assert (
        counts[[3, 7]].tolist() == [0, 0]
        and counts.sum() == 40
        and set(counts[[0, 1, 2, 4]]) == {5}
    )
    few = np.bincount(
        digits(rare_classes=[3], rare_rows=2, balanced=False, aligned=200).labels, minlength=10
    )
    assert few[3] == 2 and few.sum() == 200
    truth = zero.views[1].truth
    assert (
        truth is not None
        and {3, 7} <= set(truth.tolist())
        and {3, 7} <= set(zero.test_labels.tolist())
    )


def test_majority_classes() -> None:
    parties = digits(unaligned=None, imbalance_ratio=[4, 4, 2, 1], majority_classes=3)
    counts = [
        np.bincount(view.truth, minlength=10) for view in parties.views if view.truth is not None
    ]
    for party, wanted in enumerate((4, 4, 2)):
        top = np.sort(counts[party])[::-1]
        assert top[2] > 1.5 * top[3] and ratio(counts[party]) == pytest.approx(wanted, rel=0.15)
        assert top[0] - top[2] <= 1 and top[3] - top[9] <= 1
    assert ratio(counts[3]) < 1.2
    assert len({tuple(np.flatnonzero(row > row.mean())) for row in counts[:3]}) > 1


def test_the_upper_boundary_aligns_everything() -> None:
    parts, whole = (
        digits(imbalance_ratio=2, majority_classes=2),
        digits(imbalance_ratio=2, majority_classes=2, everything=True),
    )
    everybody = numbers(parts, 0, "aligned")
    for party in range(4):
        everybody += numbers(parts, party, "unaligned")
    for party in range(4):
        assert numbers(whole, party, "aligned") == everybody
        assert len(whole.views[party].unaligned) == 0 and whole.views[party].truth is not None
    assert (whole.labels == DIGITS.y[everybody]).all()
    assert numbers(whole, 2, "test") == numbers(parts, 2, "test")


def test_new_images_go_through_the_recipe() -> None:
    parties = simulate("digits", parties=4, seed=0, aligned=50, unaligned=30)
    view = parties.views[2]
    recipe = json.loads(json.dumps(view.recipe))
    assert (
        encode_new_rows(recipe, DIGITS.x)[numbers(parties, 2, "test")] == view.x[view.test]
    ).all()
    for raw in (DIGITS.x[:, :, :4], DIGITS.x.astype(np.float32), {"a": np.zeros(3)}):
        with pytest.raises(DataError):
            encode_new_rows(recipe, raw)
    damage: dict[str, Any]
    for damage in (
        {"cells": [9]},
        {"grid": []},
        {"shape": None},
        {"kind": "x"},
        {"cells": []},
        {"grid": [0, 2]},
    ):
        with pytest.raises(DataError):
            encode_new_rows(recipe | damage, DIGITS.x)


# Tables


def test_blocks_of_columns_overlap() -> None:
    parties = simulate("breast_cancer", parties=4, seed=1, aligned=60)
    held = [{column["name"] for column in view.recipe["columns"]} for view in parties.views]
    assert set().union(*held) == set(load("breast_cancer").columns)
    assert not held[0] & held[2] and not held[1] & held[3]
    assert all(len(held[m] & held[(m + 1) % 4]) in (7, 8) for m in range(4))
    alone = simulate("breast_cancer", parties=4, seed=1, aligned=60, blocks_per_party=1)
    assert sum(view.x.shape[1] for view in alone.views) == 30
    assert parties.kind == "table" and parties.labels.mean() != 0.5  # as they come


def test_an_encoder_sees_its_party_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = load_raw("breast_cancer")
    assert isinstance(table, RawTable)
    before = simulate("breast_cancer", parties=3, seed=1, aligned=60, unaligned=40)
    view = before.views[1]
    local = np.concatenate([view.aligned, view.unaligned])
    assert view.x[local, 0].mean() == pytest.approx(0, abs=1e-5)
    assert view.x[local, 0].std() == pytest.approx(1, abs=1e-4)
    assert abs(view.x[view.test, 0].mean()) > 1e-4
    raw = {name: values.copy() for name, values in table.columns.items()}
    name = view.recipe["columns"][0]["name"]
    seen = encode_new_rows(view.recipe, raw)[:, 0]
    used = set(view.x[local, 0].tolist())
    foreign = np.array([value not in used for value in seen.tolist()])
    raw[name][foreign] += 1e3  # test rows and the other parties' rows
    monkeypatch.setattr(
        "fedloom.data.simulation.load_raw", lambda *_, **__: replace(table, columns=raw)
    )
    after = simulate("breast_cancer", parties=3, seed=1, aligned=60, unaligned=40).views[1]
    assert after.recipe == view.recipe and (after.x[local] == view.x[local]).all()
    assert (after.x[view.test, 0] != view.x[view.test, 0]).any()


def test_two_classes_have_a_fixed_majority() -> None:
    parties = simulate("breast_cancer", parties=4, seed=1, aligned=40, imbalance_ratio=[5, 2, 3, 4])
    for view, wanted in zip(parties.views, [5, 2, 3, 4], strict=True):
        assert view.truth is not None
        malignant, benign = np.bincount(view.truth)
        assert malignant / benign == pytest.approx(wanted, rel=0.1)


def test_raw_tables_are_what_load_encodes() -> None:
    for name in ("wine", "breast_cancer"):
        table, data = load_raw(name), load(name)
        assert isinstance(table, RawTable)
        encoded = encode_table(table)
        assert (encoded.x == data.x).all() and encoded.columns == data.columns == tuple(
            table.columns
        )
    assert isinstance(load_raw("digits"), Dataset)


# What can't be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parties": 1}, "parties must be at least 2"),
        ({"aligned": 0}, "aligned must be at least 1"),
        ({"unaligned": -1}, "unaligned must be"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"test_rows": 0}, "test_rows"),
        ({"aligned": 5000}, "at most 1346"),
        ({"unaligned": 400}, r"at most 32\d"),
        ({"unaligned": 200, "imbalance_ratio": 50}, "at most"),
        ({"imbalance_ratio": [2, 2]}, "one for each of 4 parties"),
        ({"imbalance_ratio": 0.5}, "at least 1"),
        ({"imbalance_ratio": float("nan")}, "at least 1"),
        ({"imbalance_ratio": 2, "majority_classes": 10}, "majority_classes must be from 1 to 9"),
        ({"rare_classes": [10]}, "rare_classes must be"),
        ({"rare_classes": range(10)}, "rare_classes must be"),
        ({"blocks_per_party": 5}, "blocks_per_party must be from 1 to 4"),
        ({"grid": (1, 2), "blocks_per_party": 1}, "at least 4"),
        ({"grid": (9, 1)}, "does not fit"),
    ],
)
def test_numbers_that_cannot_be_met(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        digits(**options)


def test_tables_have_no_grid_and_need_columns() -> None:
    with pytest.raises(DataError, match="applies to images"):
        simulate("wine", parties=3, seed=0, aligned=20, grid=(1, 3))
    with pytest.raises(DataError, match="at least 14 columns"):
        simulate("wine", parties=14, seed=0, aligned=20)


def test_a_class_without_rows_left_is_named() -> None:
    with pytest.raises(DataError, match="'class_2' has too few rows"):
        simulate("wine", parties=3, seed=0, aligned=120, balanced=True)
    alone = simulate("wine", parties=3, seed=0, aligned=120, balanced=True, unaligned=0)
    assert (
        all(len(view.unaligned) == 0 for view in alone.views) and np.bincount(alone.labels)[2] == 36
    )


def view(name: str = "a", **changes: Any) -> PartyView:
    parts = {"aligned": [0, 1], "unaligned": [2], "test": [3]}
    arrays = {part: np.array(rows, dtype=np.int64) for part, rows in parts.items()}
    x = np.zeros((4, 2), np.float32)
    zeros, ones, truth = np.zeros(2, np.float32), np.ones(2, np.float32), np.array([1])
    fields: dict[str, Any] = {
        "name": name,
        "x": x,
        "shift": zeros,
        "scale": ones,
        **arrays,
        "truth": truth,
        "recipe": {},
    }
    return PartyView(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros((4, 2))}, "convert it first"),
        ({"x": np.zeros((2, 4), np.float32).T}, "C-contiguous"),
        ({"x": np.full((4, 2), np.nan, np.float32)}, "not finite"),
        ({"shift": np.zeros(3, np.float32)}, "shift and scale must be"),
        ({"scale": np.zeros(2, np.float32)}, "above 0"),
        ({"test": np.array([4])}, "from 0 to 3"),
        ({"test": np.array([0])}, "be disjoint"),
        ({"test": np.array([3.0])}, "int64"),
        ({"truth": np.array([1, 1])}, "1 unaligned"),
        ({"recipe": {"rows": np.zeros(2)}}, "JSON"),
    ],
)
def test_a_view_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        view(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": (view(),)}, "at least 2 parties"),
        ({"views": (view(), view())}, "must be unique"),
        ({"kind": "image"}, "must hold images"),
        ({"views": (view(), view("b", aligned=np.array([0])))}, r"aligned rows, .* \[2, 1\]"),
        ({"labels": np.array([0])}, r"labels must be \(2,\) int64"),
        ({"test_labels": np.array([2])}, "test_labels must be in 0..1"),
        ({"views": (view(), view("b", truth=np.array([-1])))}, "truth of 'b'"),
        ({"classes": ("yes",)}, "2 classes"),
    ],
)
def test_views_are_checked_against_each_other(changes: dict[str, Any], message: str) -> None:
    views, labels = (view(), view("b")), np.array([0, 1])
    fields: dict[str, Any] = {
        "name": "n",
        "kind": "table",
        "classes": ("no", "yes"),
        "views": views,
        "labels": labels,
    }
    fields |= {"test_labels": np.array([1])}
    assert len(VerticalDataset(**fields).views) == 2
    with pytest.raises(DataError, match=message):
        VerticalDataset(**(fields | changes))


def test_encoders_travel_in_the_recipe() -> None:
    parties = simulate("wine", parties=3, seed=0, aligned=30)
    encoder = TableEncoder.from_dict(json.loads(json.dumps(parties.views[0].recipe)))
    assert len(encoder.names) == parties.views[0].x.shape[1]


def test_validation_rows_stand_in_for_the_test_rows() -> None:
    tested, found = digits(), digits(validation=0.2)
    rows: dict[str, set[int]] = {
        part: set(numbers(found, 0, part)) for part in ("aligned", "unaligned", "test")
    }
    test = set(numbers(tested, 0, "test"))
    assert not test & set[int]().union(*rows.values()) and not rows["test"] & (
        rows["aligned"] | rows["unaligned"]
    )
    assert abs(len(rows["test"]) - 0.2 * (len(DIGITS.y) - len(test))) <= 10
    assert all(numbers(found, party, "test") == numbers(found, 0, "test") for party in range(4))
