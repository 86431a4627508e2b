"""Rows that depend on each other: copies, days, people, and what a trial says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.data.copies import copies_of, joined_codes, label_copies
from fedloom.data.dataset import table_dataset
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.experiment.trial import Owners, read_owners
from fedloom.experiment.trial.folds import draw_folds
from fedloom.experiment.trial.owners import distinct, in_doubt
from fedloom.experiment.trial.partners import partners_of
from fedloom.experiment.trial.words import adds_nothing, answer, head, heading, next_step
from fedloom.report import trial_page
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

QUICK: dict[str, Any] = {"methods": ["fedforest"], "alone": ("forest",), "repeats": 1}


def groups_of(codes: np.ndarray) -> int:
    """How many codes several rows have."""
    return int((np.unique(codes, return_counts=True)[1] > 1).sum())


# -- what a copy is --------------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [None, 4, 2, 1])
def test_copies_are_found_although_numbers_are_rounded(digits: int | None) -> None:
    x = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    again = x[:50] if digits is None else x[:50].round(digits)
    found = copies_of(np.concatenate([x, again]), np.ones(6, bool)).copies
    assert (found[200:] == found[:50]).mean() >= 0.98 and groups_of(found) <= 50


@pytest.mark.parametrize(("words", "columns", "rows"), [(2, 10, 500), (3, 3, 500), (4, 6, 1000)])
def test_people_who_happen_to_be_alike_are_no_copies(words: int, columns: int, rows: int) -> None:
    x = np.random.default_rng(1).integers(0, words, (rows, columns)).astype(float)
    found = copies_of(x, np.ones(columns, bool))
    assert groups_of(found.equal) > 20 and groups_of(found.copies) == 0


def test_columns_that_are_one_in_another_unit_count_once() -> None:
    rng = np.random.default_rng(2)
    age = rng.integers(20, 70, 1000).astype(float)
    x = np.stack([age, age**2, 2020 - age, rng.integers(0, 2, 1000)], axis=1)
    assert groups_of(copies_of(x, np.ones(4, bool)).copies) == 0


def test_copies_of_people_with_many_answers_are_found_among_words() -> None:
    x = np.random.default_rng(3).integers(0, 3, (400, 25)).astype(float)
    assert groups_of(copies_of(x, np.zeros(25, bool)).copies) == 0
    found = copies_of(np.concatenate([x, x[:40]]), np.zeros(25, bool)).copies
    assert (found[400:] == found[:40]).all()


def test_a_chain_of_units_and_copies_is_one_unit() -> None:
    assert joined_codes(np.array([0, 0, 1, 2, 3]), np.array([0, 1, 1, 1, 4])).tolist() == [
        0,
        0,
        0,
        0,
        4,
    ]


# -- a trial with copies ---------------------------------------------------------------------------


def owners_with(x: np.ndarray, y: np.ndarray, owner: np.ndarray, **more: Any) -> Owners:
    columns = tuple(f"c{j}" for j in range(x.shape[1]))
    names = tuple(f"owner-{i}" for i in range(int(owner.max()) + 1))
    rows = np.ascontiguousarray(x.astype(np.float32))
    data = table_dataset("t", rows, y, ("no", "yes"), columns, groups=owner, owners=names)
    return Owners(data, **more)


def noise(rows: int = 60, owners: int = 3, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    n = rows * owners
    return rng.normal(size=(n, 4)), rng.integers(0, 2, n), np.repeat(np.arange(owners), rows)


def test_copies_of_several_owners_are_in_one_fold_whatever_their_labels() -> None:
    x, y, owner = noise()
    x[60:90] = x[:30].round(2)  # the second owner has rows of the first, rounded
    found = distinct(owners_with(x, y, owner))
    assert found.copies is not None and "60 of 180 rows are also at another owner" in found.notes[0]
    for repeat in range(3):
        folds = draw_folds(found, 0, repeat)
        np.testing.assert_array_equal(folds[60:90], folds[:30])
        assert (np.bincount(folds[owner == 0], minlength=4) >= 10).all()


def test_copies_of_several_units_join_them() -> None:
    x, y, owner = noise()
    x[60:64] = x[:4]
    unit = np.arange(180) // 2
    found = distinct(owners_with(x, y, owner, unit=unit))
    folds = draw_folds(found, 0, 0)
    assert found.unit is not None and len(np.unique(found.unit)) == 88
    assert (folds[60:64] == folds[:4]).all() and (folds[::2] == folds[1::2]).all()


def test_a_copy_trains_no_model_that_is_tested_on_a_later_one() -> None:
    x, y, owner = noise()
    order = np.tile(np.arange(60), 3)
    x[owner == 1] = x[owner == 0][::-1]  # the same rows, at other times
    found = distinct(owners_with(x, y, owner, order=order))
    folds = draw_folds(found, 0, 0)
    np.testing.assert_array_equal(folds[owner == 1][::-1], folds[owner == 0])


def test_rows_that_are_there_twice_give_the_folds_of_rows_that_are_there_once() -> None:
    """Also where people are alike by chance, as each row is there twice."""
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(90, 4)), rng.integers(0, 3, (90, 3)).astype(float)):
        y, owner = rng.integers(0, 2, 90), np.repeat(np.arange(3), 30)
        once = distinct(owners_with(x, y, owner))
        for order in (np.tile(np.arange(90), 2), np.repeat(np.arange(90), 2)):
            twice = distinct(owners_with(x[order], y[order], owner[order]))
            assert len(twice.owner) == 90 and "90 of 180 rows are copies" in twice.notes[0]
            np.testing.assert_array_equal(draw_folds(twice, 0, 1), draw_folds(once, 0, 1))
            np.testing.assert_array_equal(twice.data.x, once.data.x)


def test_an_owner_whose_rows_are_few_without_copies_is_left_out() -> None:
    x, y, owner = noise()
    x[120:] = np.tile(x[120:130], (6, 1))
    y[120:] = np.tile(y[120:130], 6)
    found = distinct(owners_with(x, y, owner))
    assert found.names == ("owner-0", "owner-1") and any("left out" in n for n in found.notes)


def test_a_copy_with_another_label_is_kept_with_it() -> None:
    x, y, owner = noise()
    x[1], y[:2] = x[0], (0, 1)
    found = distinct(owners_with(x, y, owner))
    folds = draw_folds(found, 0, 0)
    assert len(found.owner) == 180 and folds[0] == folds[1]
    assert "1 of 180 rows are copies of a row of their owner with another label" in found.notes[0]


def as_columns(x: np.ndarray, y: np.ndarray, owner: np.ndarray) -> dict[str, Any]:
    return {
        **{f"c{j}": column for j, column in enumerate(x.T)},
        "site": [f"s{i}" for i in owner],
        "ill": np.where(y > 0, "yes", "no"),
    }


@pytest.mark.parametrize("door", ["file", "frame", "frames", "arrays", "parts", "data"])
def test_no_door_takes_copies_at_other_owners_for_a_gain(door: str, tmp_path: Path) -> None:
    """Three owners have the same rows of noise: each row of a test fold was trained elsewhere."""
    pandas = pytest.importorskip("pandas")
    x, y, _ = noise(60, 1)
    x, y, owner = np.tile(x, (3, 1)), np.tile(y, 3), np.repeat(np.arange(3), 60)
    frame = pandas.DataFrame(as_columns(x, y, owner))
    words: dict[str, Any] = {"label": "ill", "group": "site"}
    data: Any = frame
    if door == "file":
        data = tmp_path / "my.csv"
        frame.to_csv(data, index=False)
    elif door == "frames":
        data = [part.drop(columns="site") for _, part in frame.groupby("site")]
        words = {"label": "ill"}
    elif door == "arrays":
        data, words = (x, y), {"group": owner}
    elif door == "parts":
        data, words = [(x[owner == i], y[owner == i]) for i in range(3)], {}
    elif door == "data":
        data, words = owners_with(x, y, owner).data, {}
    found = fedloom.trial(data, **words, **QUICK)
    assert not any(card.decision == "join" for card in found.owners.values())
    assert all(abs(card.gain or 0) < 0.2 for card in found.owners.values())
    assert any("180 of 180 rows are also at another owner" in note for note in found.notes)


def test_people_who_are_copies_are_in_one_fold_of_a_trial_of_columns(tmp_path: Path) -> None:
    x, y, _ = noise(60, 1)
    x[30:], y[30:] = x[:30], y[:30]
    for name, columns, first in (("clinic", x[:, :2], "a,b"), ("lab", x[:, 2:], "c,d")):
        label = y if name == "clinic" else None
        lines = [f"id,{first}" + (",ill" if label is not None else "")]
        lines += [
            f"p{i},{row[0]},{row[1]}" + (f",{label[i]}" if label is not None else "")
            for i, row in enumerate(columns)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.csv") for name in ("clinic", "lab")]
    found = fedloom.trial(files, id="id", label="ill", alone=("forest",), repeats=1)
    card = found.owners["all people"]
    assert any("30 of 60 people are copies" in note for note in found.notes)
    assert card.alone is not None and card.alone < 0.75  # 1.0 where a copy was trained


def test_the_command_data_tells_of_copies(command: Callable[..., Done], tmp_path: Path) -> None:
    x, y, owner = noise()
    x[60:90] = x[:30]
    columns = as_columns(x, y, owner)
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    (tmp_path / "my.csv").write_text("\n".join(lines))
    text = command("data", "my.csv", "--label", "ill", "--group", "site").stdout
    assert "60 of 180 rows are at several owners" in text


# -- days ------------------------------------------------------------------------------------------


def stations(column: str = "sampled_on", owners: int = 4, days: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    dates = [f"2024-{1 + d // 28:02d}-{1 + d % 28:02d}" for d in range(days)]
    n = owners * days
    return {
        column: dates * owners,
        "site": np.repeat([f"s{i}" for i in range(owners)], days).tolist(),
        "a": rng.normal(size=n),
        "b": rng.normal(size=n),
        "ill": rng.choice(["no", "yes"], n).tolist(),
    }


def dated(columns: dict[str, Any], time: tuple[str, ...] | None = None) -> Owners:
    options = DataOptions("ill", "site", missing="indicator")
    return read_owners(columns, options, SplitColumns(None, time))


def test_days_that_owners_share_are_their_order_whatever_the_column_is_called() -> None:
    found = dated(stations())
    assert found.order is not None and not found.doubt and "by sampled_on" in found.notes[-1]


def test_days_that_owners_share_stay_whole_without_time() -> None:
    found = dated(stations(), time=())
    assert found.order is None and found.unit is not None and not found.doubt
    folds = draw_folds(found, 0, 0)
    np.testing.assert_array_equal(folds.reshape(4, 60), np.tile(folds[:60], (4, 1)))


def test_dates_of_one_s_own_are_units_and_joining_has_a_condition() -> None:
    """Such as days of birth: no order of the rows, and yet several rows may be of one day."""
    columns, rng = stations("born"), np.random.default_rng(1)
    columns["born"] = [
        f"{rng.integers(1920, 2000)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"
        for _ in range(240)
    ]
    columns["born"][5] = columns["born"][100]
    found = dated(columns)
    assert found.order is None and found.doubt and found.unit is not None
    assert found.unit[5] == found.unit[100]
    assert "set time = 'born' if they are, or time = () if rows do not" in found.notes[-1]
    assert dated(columns, time=("born",)).order is not None
    asked = dated(columns, time=())
    assert asked.unit is None and not asked.doubt


def test_labels_in_a_row_that_are_alike_are_told_but_not_sorted_ones() -> None:
    x, y, owner = noise(120)
    series = np.repeat(np.random.default_rng(1).integers(0, 2, 60), 6)
    assert in_doubt(owners_with(x, series, owner)).doubt
    assert "correlation 0." in in_doubt(owners_with(x, series, owner)).notes[0]
    rows = np.tile(np.repeat([0, 1], 60), 3)  # sorted by the label
    for labels in (y, rows):
        assert not in_doubt(owners_with(x, labels, owner)).doubt


# -- what is said ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> fedloom.TrialResult:
    x, y, owner = noise()
    return fedloom.trial((x, y), group=owner, **QUICK)


def test_no_join_stands_without_its_condition(plain: Any) -> None:
    card = replace(
        next(iter(plain.owners.values())), decision="join", condition="if rows are independent"
    )
    told = replace(plain, owners=dict.fromkeys(plain.owners, card))
    assert heading(card).startswith("Join if rows are independent, with ")
    assert head(card) == "Join if rows are independent"
    texts = (
        str(told),
        answer(told),
        told.to_latex(),
        told._repr_html_(),
        trial_page.html(told, "my"),
    )
    assert all("if rows are independent" in text for text in texts)
    assert told.content()["owners"]["client-0"]["condition"] == "if rows are independent"


def test_a_recipe_that_is_training_alone_is_told_as_that(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedloom.experiment.trial import run as trial_run

    class Alone(trial_run.TrialRun):
        def _own_weights(self, *of: Any) -> tuple[np.ndarray, np.ndarray]:
            return np.ones(len(self.owners.owner)), np.ones(len(self.owners.names))

        def _final(self, kind: Any) -> Any:
            mine = [one for one in kind.first if one in kind.weights]
            return mine[0] if mine else super()._final(kind)

    monkeypatch.setattr(trial_run, "TrialRun", Alone)
    x, y, owner = noise()
    found = fedloom.trial((x, y), group=owner, **{**QUICK, "methods": ["fedglm"]})
    card = found.owners["client-0"]
    assert (card.decision, card.by, card.own_weight) == ("alone", "weight", 1.0)
    assert "federating adds nothing, own weight 1" in str(found) and adds_nothing(found)
    page = trial_page.html(found, "my")
    assert "Train alone, with" in page and "fedloom run recipe.toml" not in page
    half = replace(card, decision="join", by="own", own_weight=0.5)
    assert "your own model counts 0.5" in next_step(half)


def test_a_group_is_named_only_if_it_is_better_than_alone_and_all() -> None:
    rng = np.random.default_rng(0)
    y, folds, names = rng.integers(0, 2, 200), np.arange(200) % 4, tuple("abcdef")

    def told(strength: float) -> np.ndarray:
        p = 1 / (1 + np.exp(-strength * (2 * y - 1) - 1.5 * rng.normal(size=200)))
        return np.stack([1 - p, p], axis=1)

    models = np.stack([told(1.0) for _ in range(3)] + [told(-1.0) for _ in range(3)])
    weak, strong = told(0.0), told(6.0)
    for rivals, named in (([weak, weak], True), ([strong, weak], False), ([weak, strong], False)):
        found = partners_of(0, names, "auc", y, models, folds, None, 0.01, rivals)
        assert bool(found.advised) == named


# -- the label -------------------------------------------------------------------------------------


def test_a_number_in_another_unit_is_told_at_every_owner() -> None:
    rng = np.random.default_rng(0)
    euros, celsius = rng.lognormal(3, 1, 200).round(2), rng.normal(15, 8, 200).round(1)
    owner = np.repeat([0, 1], 100)
    columns = {
        "cents": (100 * euros).round(),
        "near": euros + rng.normal(size=200),
    }
    assert [note.split("'")[1] for note in label_copies(columns, euros)] == ["cents"]
    fahrenheit = celsius * 1.8 + 32
    columns = {
        "rounded": fahrenheit.round(),
        "by owner": np.where(owner == 0, celsius, fahrenheit),
        "gaps": np.where(rng.random(200) < 0.2, np.nan, fahrenheit),
        "other": celsius + 0.5 * rng.normal(size=200),
    }
    told = label_copies(columns, celsius, owner)
    assert [note.split("'")[1] for note in told] == ["rounded", "by owner", "gaps"]


def test_limits_between_classes_are_told() -> None:
    income = np.random.default_rng(0).lognormal(3, 1, 200)
    rich = (income > 20).astype(np.int64)
    assert "by limits between classes" in label_copies({"income": income}, rich)[0]
    rich[0] = 1 - rich[0]
    assert label_copies({"income": income}, rich) == []


def test_a_column_is_no_label_because_each_owner_has_one_class() -> None:
    age, owner = np.random.default_rng(0).integers(20, 90, 180).astype(float), np.arange(180) % 3
    assert label_copies({"age": age}, (owner == 1).astype(int), owner) == []
    # an owner of one class says nothing against a column that tells the others' labels
    rich = np.where(owner == 2, 1, age > 50).astype(int)
    assert len(label_copies({"age": age}, rich, owner)) == 1


@pytest.mark.parametrize("door", ["columns", "arrays"])
def test_a_trial_tells_of_a_label_in_another_unit(door: str) -> None:
    rng = np.random.default_rng(0)
    x, euros = rng.normal(size=(160, 2)), rng.normal(2, 0.5, 160)
    cents, site = 100 * euros, np.repeat(["a", "b"], 80)
    words: dict[str, Any] = {"methods": ["fedglm"], "alone": ("ridge",), "repeats": 1}
    if door == "columns":
        columns = {"x": x[:, 0], "cents": cents, "euros": euros, "site": site}
        found = fedloom.trial(columns, label="euros", group="site", **words)
    else:
        found = fedloom.trial((np.column_stack([x, cents]), euros), group=site, **words)
    told = [note for note in found.notes if "tells the label of every row" in note]
    assert len(told) == 1 and "another unit" in told[0]
    assert any("nearly perfect" in note for note in found.notes)
