"""Texts and dates become numbers by fixed encoders: the same in training, in exported code, and for
every writing.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.options import DataOptions
from fedloom.data.own import read_data
from fedloom.data.sources import load_raw
from fedloom.data.standalone import date_numbers, hashed_text, moment_of
from fedloom.data.text_and_dates import DateParts, HashedText, hashed_texts

pandas = pytest.importorskip("pandas")
VECTOR = (
    [3, 4, 6, 7, 13, 14, 18, 25, 29, 31],
    [0.27735, -0.27735, -0.27735, 0.27735, 0.27735, -0.27735, -0.27735, -0.5547, 0.27735, 0.27735],
)


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text(max_size=12), max_size=6))
def test_texts_are_hashed_at_once_as_one_by_one(texts: list[str]) -> None:
    found = hashed_texts([*texts, None], 16)
    assert not found[-1].any() and (np.abs(found) <= 1).all()
    for row, text in zip(found, texts, strict=False):
        np.testing.assert_array_equal(row, np.array(hashed_text(text, 16), np.float32))


def test_the_hash_is_that_of_this_version() -> None:
    """Owners with other versions of Python or NumPy must have the same columns."""
    assert np.flatnonzero(hashed_text("Fieber", 32)).tolist() == VECTOR[0]
    np.testing.assert_allclose(np.array(hashed_text("Fieber", 32))[VECTOR[0]], VECTOR[1], atol=1e-6)


def test_writings_of_a_word_are_near_and_other_words_far() -> None:
    words = ["Pneumonia", "pneumonia ", "pneumonias", "appendicitis"]
    a, b, c, d = HashedText("x", 256).encode(np.array(words, dtype=object))
    assert a @ b == pytest.approx(1) and a @ c > 0.7 and abs(a @ d) < 0.3


def test_long_and_many_texts() -> None:
    long = "a" * 100_000 + " 😀"
    found = hashed_texts([long, *map(str, range(30_000))], 32)
    assert np.isfinite(found).all() and len({row.tobytes() for row in found}) > 27_000
    np.testing.assert_array_equal(found[0], np.array(hashed_text(long, 32), np.float32))


def test_a_date_is_years_and_points_of_circles() -> None:
    at = moment_of("2000-01-01 06:00", "iso")
    assert at is not None and date_numbers(at) == [
        round(0.25 / 365.2425, 9),
        0,
        1,
        0,
        1,
        -0.974928,
        -0.222521,
        1,
        0,
    ]
    assert moment_of("1850-12-31T23:30-01:00", "iso") == datetime(1851, 1, 1, 0, 30, tzinfo=UTC)
    assert (
        moment_of("03/04/2022", "month")
        == moment_of("04.03.2022", "day")
        == moment_of("2022-03-04", "iso")
    )
    assert moment_of("03/04/2022", "iso") is None and moment_of("week 1", "day") is None


def table(**more: Any) -> dict[str, Any]:
    return {"x": [row % 20 for row in range(40)], **more, "y": ["a", "b"] * 20}


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        (
            ["2024-01-01", "01.02.2024"] * 20,
            "dates of several forms, such as '2024-01-01' and '01.02.2024'",
        ),
        ([*["2024-01-01", "2024-01-02"] * 19, "soon", "2024-01-01"], "has dates, but also 'soon'"),
        (["2024-01-01T00:00Z", "2024-01-01T00:00"] * 20, "with and without a time zone"),
        (["01/02/2024", "03/04/2024"] * 20, "day and month may be confused"),
        (["2024-02-30", "2024-02-28"] * 20, "must hold a date in each row"),
        (["0000-02-10", "2024-02-28"] * 20, "must hold a date in each row"),
        (["0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00"] * 20, "must hold a date in each row"),
        (["2024-01-01", "", "2024-01-02", "2024-01-03"] * 10, "lacks 10 of 40 dates"),
    ],
)
def test_dates_that_cannot_be_read_are_refused_with_the_repair(
    column: list[str], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        read_data(table(seen=column), label="y")


def test_columns_that_hold_nothing_or_anything() -> None:
    data = read_data(
        table(empty=[""] * 40, odd=[f"{'😀' * k}{k}"[: k + 3] for k in range(40)]),
        label="y",
        encode={"odd": "text"},
    )
    assert len(data.columns) == 33 and np.isfinite(data.x).all()
    with pytest.raises(DataError, match="which is no Unicode text"):
        read_data(table(odd=["a\ud800", "b"] * 20), label="y")
    with pytest.raises(DataError, match=r"data\.encode names the column 'z'"):
        read_data(table(), label="y", encode={"z": "text"})
    with pytest.raises(DataError, match="must have numbers, but has 'a'"):
        read_data(table(word=["a", "b"] * 20), label="y", encode={"word": "number"})
    assert read_data(table(code=[1, 2] * 20), label="y", encode={"code": "category"}).columns[
        1:
    ] == (
        "code=1",
        "code=2",
    )


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_a_zone_is_kept_by_every_form(zone: str | None, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        table(seen=pandas.date_range("1920-03-01", periods=40, freq="977h", tz=zone))
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    forms = [frame, tmp_path / "t.csv", pyarrow.Table.from_pandas(frame)]
    one, *others = (read_data(form, label="y", name="t").x for form in forms)
    assert all(np.array_equal(one, other) for other in others)


def test_the_rules_are_kept_as_data() -> None:
    encoder = TableEncoder((HashedText("note", 8), DateParts("seen", "day", True, True)))
    assert TableEncoder.from_dict(encoder.to_dict()) == encoder
    wrong = encoder.to_dict()
    wrong["columns"][0]["hash"] = "words-0"
    with pytest.raises(DataError, match="is hashed by 'words-0', but this version has"):
        TableEncoder.from_dict(wrong)
    x = encoder.transform({"note": ["a tie", ""], "seen": ["01.02.2024", ""]})
    assert x.shape == (2, 18) and np.isnan(x[1, 8:17]).all() and x[:, 17].tolist() == [0, 1]


def test_methods_for_columns_refuse_texts_and_dates(tmp_path: Path) -> None:
    pandas.DataFrame(table(seen=["2024-01-01", "2024-01-02"] * 20)).to_csv(
        tmp_path / "t.csv", index=False
    )
    with pytest.raises(DataError, match=r"\['seen'\] of .* hold texts or dates"):
        load_raw(str(tmp_path / "t.csv"), options=DataOptions("y"))
