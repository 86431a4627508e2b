from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.sources import load, load_raw
from fedloom.data.tables import RawTable


def words(*values: str | None) -> np.ndarray:
    return np.array(values, dtype=object)


def fit(columns: dict[str, np.ndarray], **options: Any) -> TableEncoder:
    return TableEncoder.fit(columns, np.arange(len(next(iter(columns.values())))), **options)


def test_numbers_are_standardized_by_the_rows_that_may_be_seen() -> None:
    columns = {"age": np.array([1.0, 3.0, 500.0])}
    encoder = TableEncoder.fit(columns, np.array([0, 1]))
    assert encoder.transform(columns)[:, 0].tolist() == [-1.0, 1.0, 498.0]
    assert encoder.names == ("age",) and encoder.transform(columns).dtype == np.float32


def test_gaps_become_the_median_and_a_column() -> None:
    columns = {"a": np.array([1.0, np.nan, 3.0, 8.0]), "b": words("1", "?", "3", " 8 ")}
    encoder = fit(columns)
    assert encoder.names == ("a", "a missing", "b", "b missing")
    x = encoder.transform(columns)
    assert (x[:, :2] == x[:, 2:]).all() and x[:, 1].tolist() == [0, 1, 0, 0]
    assert x[1, 0] == pytest.approx((3 - 3.75) / np.std([1, 3, 3, 8]))
    assert encoder.transform({"a": np.array([np.nan]), "b": words(None)}).tolist() == [
        [x[1, 0], 1, x[1, 0], 1]
    ]


def test_gaps_that_no_seen_row_has_are_filled_silently() -> None:
    encoder = fit({"a": np.array([1.0, 2.0, 9.0])})
    assert encoder.names == ("a",)
    first, second = encoder.transform({"a": np.array([np.nan, 2.0])})[:, 0]
    assert first == second


def test_heavy_tails_are_logged() -> None:
    money = np.array([0.0] * 50 + [10.0**k for k in range(7)])
    encoder = fit({"money": money, "debt": -money, "even": np.arange(57.0)})
    assert [rule.log for rule in encoder.columns] == [True, True, False]
    x = encoder.transform({"money": money, "debt": -money, "even": np.arange(57.0)})
    assert np.allclose(x[:, 0], -x[:, 1]) and x[:, 0].max() < 5
    left = 1e6 - money  # a logarithm would make this tail longer
    assert not fit({"left": left}).columns[0].log


def test_rare_and_new_words_fall_together() -> None:
    work = words(*["state"] * 5, *["private "] * 4, "army", "church", None, "?", "")
    encoder = fit({"work": work}, rare=3)
    assert encoder.names == ("work=?", "work=private", "work=state", "work=other")
    new = encoder.transform({"work": words("state", "army", "never seen", " ")})
    assert new.tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0]]
    full = fit({"work": words("a", "a", "b", "b")}, rare=2)
    assert full.names == ("work=a", "work=b") and full.transform({"work": words("c")}).tolist() == [
        [0, 0]
    ]


def test_constant_columns_are_left_out_by_name() -> None:
    columns = {
        "one": np.ones(4),
        "word": words("x", "x", "x", "x"),
        "names": words("a", "b", "c", "d"),  # each is rare: all are "other"
        "none": np.full(4, np.nan),
        "gaps": np.array([7.0, np.nan, 7.0, 7.0]),
    }
    encoder = fit(columns)
    assert encoder.dropped == ("one", "word", "names", "none") and encoder.names == (
        "gaps missing",
    )
    assert encoder.transform({"gaps": columns["gaps"]}).tolist() == [[0], [1], [0], [0]]
    with pytest.raises(DataError, match="'one', 'word'"):
        fit({"one": columns["one"], "word": columns["word"]})


@given(
    st.lists(
        st.tuples(
            st.floats(-1e30, 1e30) | st.just(float("nan")),
            st.sampled_from(["a", "b", "?", "other", "0"]) | st.none(),
        ),
        min_size=2,
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_whatever_comes_the_rules_survive_json(
    rows: list[tuple[float, str | None]], rare: int
) -> None:
    columns = {
        "n": np.array([n for n, _ in rows]),
        "w": words(*(w for _, w in rows)),
        "safe": np.arange(len(rows)),
    }
    encoder = TableEncoder.fit(
        columns,
        np.arange(0, len(rows) + 1, 2)[:-1] if len(rows) > 3 else np.arange(len(rows)),
        rare=rare,
    )
    again = TableEncoder.from_dict(json.loads(json.dumps(encoder.to_dict(), allow_nan=False)))
    x = encoder.transform(columns)
    assert again == encoder and (again.transform(columns) == x).all()
    assert (
        x.shape == (len(rows), len(encoder.names)) and np.isfinite(x).all() and x.flags.c_contiguous
    )
    assert len(set(encoder.names)) == len(encoder.names)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ({"b": words("x")}, "'a' is missing"),
        ({"a": words("one"), "b": words("x")}, "'a' must have numbers, but has 'one'"),
        ({"a": np.array([np.inf]), "b": words("x")}, "'a' has 1 outside"),
        ({"a": np.array([1.0]), "b": [["x"]]}, "'b' holds several values"),
        ({"a": np.array([1.0, 2.0]), "b": words("x")}, "same number of rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_name(new: dict[str, np.ndarray], message: str) -> None:
    encoder = fit({"a": np.array([1.0, 2.0]), "b": words("x", "y")}, rare=1)
    with pytest.raises(DataError, match=message):
        encoder.transform(new)


def test_what_cannot_be_fitted() -> None:
    with pytest.raises(DataError, match="at least one row"):
        TableEncoder.fit({"a": np.arange(3)}, np.arange(0))
    with pytest.raises(DataError, match="'when'"):
        fit({"when": np.array(["2020-01-01"] * 3, dtype="datetime64[D]")})


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"columns": [{}], "dropped": []},
        {
            "columns": [
                {"name": "a", "log": False, "fill": None, "mean": 0, "scale": 1, "gaps": False}
            ],
            "dropped": [],
        },
        {
            "columns": [
                {"name": "a", "log": False, "fill": 0, "mean": 0, "scale": -1, "gaps": False}
            ],
            "dropped": [],
        },
        {"columns": [{"name": "a", "words": 3, "other": False}], "dropped": []},
        {"columns": 3, "dropped": []},
    ],
)
def test_damaged_rules_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="are invalid"):
        TableEncoder.from_dict(rules)


@pytest.mark.parametrize("odd", [["12,5"], ["unknown"] * 10])
def test_numbers_with_a_few_words_between_them_are_refused(odd: list[str]) -> None:
    words = np.array([str(n / 2) for n in range(100 - len(odd))] + odd + ["?"], dtype=object)
    with pytest.raises(
        DataError, match=rf"Column 'hb' has numbers, but {len(odd)} of its 100 values .* '{odd[0]}'"
    ):
        TableEncoder.fit({"hb": words}, np.arange(50))
    words[: 60 - len(odd)] = "unknown"  # most are words
    if len(odd) == 10:
        assert TableEncoder.fit({"hb": words}, np.arange(101)).names == ("hb=unknown", "hb=other")


# Raw tables


def test_a_csv_keeps_its_gaps(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    path = tmp_path / "people.csv"
    path.write_text("age,work,label\n30,state,no\n,?,yes\n50,private,no\n40,,yes\n")
    table = load_raw(str(path))
    assert (
        isinstance(table, RawTable)
        and table.name == "people"
        and table.classes == ("no", "yes")
        and table.y.tolist() == [0, 1, 0, 1]
    )
    assert np.isnan(table.columns["age"]).tolist() == [False, True, False, False]
    encoder = TableEncoder.fit(table.columns, np.arange(4), rare=1)
    assert encoder.names == ("age", "age missing", "work=?", "work=private", "work=state")
    with pytest.raises(DataError, match=r"'age' of 'people' lacks 1 of 4 numbers"):
        load(str(path))
