"""One table means the same by every door: files, frames, arrays, nodes; and what it cannot mean is
refused alike.
"""

from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedloom
from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn
from fedloom.data.encoder import RawNumber
from fedloom.data.grammar import Grammar, moments, nearly_equal
from fedloom.data.options import DataOptions, OwnFile, SplitColumns
from fedloom.data.own import interpret, read_data
from fedloom.data.schema import DataSchema, read_rows
from fedloom.data.split import rows_hash
from fedloom.data.standalone import DATE_PARTS
from fedloom.data.tables import read_csv
from fedloom.experiment.trial.owners import read_owners

pandas = pytest.importorskip("pandas")
WORDS = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=3).map(
    lambda word: f"w{word}"
)
MOMENTS = st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1)).map(
    lambda at: at.replace(microsecond=0)
)
NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)


@st.composite
def tables(draw: Any) -> Any:
    """A frame of a label, owners, and features: numbers, whole numbers, booleans and words, some
    with gaps.
    """
    n = draw(st.integers(12, 24))
    written = [["1_12", "11_2", "112"], ["01", "1", "001"], ["1E2", "100", "1e2"], ["a", "b", "NL"]]
    owners = draw(st.sampled_from(written))
    numbers = draw(st.lists(NUMBERS, min_size=n, max_size=n))
    labels = draw(st.sampled_from([["yes", "no"], ["1", "01"], ["10", "9"]]))
    columns = {
        "x": draw(st.lists(NUMBERS, min_size=n, max_size=n, unique=True)),
        "gaps": [None if row % 5 == 0 else number for row, number in enumerate(numbers)],
        "stamp": [10**9 + row * row % 11 for row in range(n)],
        "flag": [True, False, *draw(st.lists(st.booleans(), min_size=n - 2, max_size=n - 2))],
        "seen": pandas.to_datetime(draw(st.lists(MOMENTS, min_size=n, max_size=n))),
        "text": [f"{word} Größe 😀" for word in draw(st.lists(WORDS, min_size=n, max_size=n))],
        "word": ["wone", "wtwo", *draw(st.lists(WORDS, min_size=n - 2, max_size=n - 2))],
        "site": [owners[row % len(owners)] for row in range(n)],
        "y": [labels[(row // 3) % 2] for row in range(n)],
    }  # fmt: skip
    return pandas.DataFrame(columns)


KINDS: dict[str, Any] = {"encode": {"seen": "date", "text": "text"}}


def print_of(data: Any) -> tuple[Any, ...]:
    """All that a run sees of a data set."""
    assert data.groups is not None and data.offset is not None
    return (
        rows_hash(data.x),
        rows_hash(data.y),
        rows_hash(data.groups),
        rows_hash(data.offset),
        data.classes,
        data.owners,
        data.columns,
        data.fill,
        dict(data.recipe),
    )


@settings(max_examples=20, deadline=None)
@given(table=tables())
def test_a_table_in_every_form_is_one_data_set(
    table: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("forms")
    table.to_csv(folder / "comma.csv", index=False)
    table.to_csv(
        folder / "semicolon.csv",
        index=False,
        sep=";",
        decimal=",",
        na_rep="NA",
        lineterminator="\r\n",
    )
    table.to_csv(folder / "tab.csv", index=False, sep="\t", quoting=1, encoding="utf-8-sig")
    table.to_parquet(folder / "table.parquet")
    objects = table.astype(object).where(table.notna(), None)
    objects["seen"] = [str(at) for at in table["seen"]]
    arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
    views = pyarrow.array(list(table["text"]), pyarrow.string_view())  # the text of Polars
    forms: list[tuple[Any, dict[str, Any]]] = [
        (folder / "comma.csv", {}),
        (folder / "semicolon.csv", {"decimal": ","}),
        (folder / "tab.csv", {}),
        (folder / "table.parquet", {}),
        (table, {}),
        (objects, {}),
        (table.convert_dtypes(), {}),
        (table.astype({"word": "category", "site": "category"}), {}),
        (table.astype({"seen": "datetime64[ms]"}), {}),
        (pyarrow.Table.from_pandas(table, preserve_index=False), {}),
        (arrow.set_column(arrow.column_names.index("text"), "text", views), {}),
        ({name: list(objects[name]) for name in table}, {}),
    ]
    if find_spec("polars") is not None:
        forms.append((import_module("polars").from_arrow(arrow), {}))
    prints = []
    for form, more in forms:
        data = read_data(
            form,
            label="y",
            group="site",
            missing="indicator",
            name="table",
            keep=["*"],
            **KINDS,
            **more,
        )
        prints.append(print_of(data))
        prints[-1][-1].pop("decimal")
    assert all(one == prints[0] for one in prints)


def test_a_file_and_a_frame_give_one_model(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pandas.DataFrame(
        {"x": rng.normal(size=80), "flag": rng.random(80) > 0.5, "site": ["1_2", "12"] * 40}
    )
    table["y"] = np.where(table["x"] > 0, "ill", "well")
    table.to_csv(tmp_path / "t.csv", index=False)
    known: dict[str, Any] = {"label": "y", "group": "site", "rounds": 2, "models": "linear"}
    one, other = (
        fedloom.run("fedavg", data=data, **known) for data in (str(tmp_path / "t.csv"), table)
    )
    assert one.summary["accuracy"] == other.summary["accuracy"]
    for mine, theirs in zip(one.models, other.models, strict=True):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert bool((a == b).all())


def test_a_node_uses_the_rows_of_its_owner_alone(tmp_path: Path) -> None:
    sites, stages = ["1_2", "12"] * 20, ["1_2", "1_2", "12", "12"] * 10
    rows = [
        f"{row / 10},{site},{stage}"
        for row, (site, stage) in enumerate(zip(sites, stages, strict=True))
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["x,site,stage", *rows, ""]))
    schema = DataSchema("table", ("1_2", "12"), "stage", (RawNumber("x"),))
    own = OwnFile(DataOptions(group="site", keep=("x",)), owner="12")
    assert np.bincount(read_rows(tmp_path / "rows.csv", schema, "rows", own).y).tolist() == [10, 10]


def test_missing_words_are_named_and_can_be_kept() -> None:
    table = {"x": [1, 2, 3, 4, 5] * 6, "grade": ["None", "Mild", "Severe"] * 10}
    for form in (table, pandas.DataFrame(table)):
        data = read_data(form, label="grade")
        assert data.classes == ("Mild", "Severe") and any(
            "'None' (10 in grade)" in note for note in data.notes
        )
        assert len(read_data(form, label="grade", missing_words=["?"]).classes) == 3
    with pytest.raises(DataError, match="'NA' count as empty"):
        read_data({**table, "site": ["NA", "FR", "DE"] * 10}, label="grade", group="site")


def test_numbers_that_the_grammar_does_not_read_are_refused_with_few_or_many_values() -> None:
    for odd in ("36,9", "45 %", "1'000", "10_000", "１２"):
        with pytest.raises(DataError, match="numbers such as"):
            read_data(
                {"x": [odd, "37", odd] * 10, "z": range(30), "y": ["a", "b", "b"] * 10}, label="y"
            )
    comma = read_data(
        {"x": ["36,9", "37", "1,5"] * 10, "y": ["a", "b", "b"] * 10}, label="y", decimal=","
    )
    assert comma.x[:3, 0].tolist() == [np.float32(36.9), 37, 1.5]


def test_names_that_differ_in_writing_only_get_a_note() -> None:
    assert nearly_equal(["Ill", "ill", "i\u200bll", "well"]) == [["Ill", "ill", "i\u200bll"]]
    assert nearly_equal(["True", "true", "1", "1.0"]) == [["True", "true", "1", "1.0"]]
    assert nearly_equal(["é", "e\u0301"]) == [["é", "e\u0301"]]
    data = read_data({"x": [1, 2, 3, 4, 5] * 6, "y": ["True", "true", "no"] * 10}, label="y")
    assert len(data.classes) == 3 and any(
        "'True', 'true' differ in writing only" in note for note in data.notes
    )


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_are_parts_and_spans_are_numbers_in_every_unit(unit: str) -> None:
    table = pandas.DataFrame({"x": [0, 1] * 20, "y": [0, 0, 1, 1] * 10})
    table["seen"] = pandas.date_range("2024-01-01", periods=40).astype(f"datetime64[{unit}]")
    data = read_data(table, label="y")
    assert (
        data.columns[1:] == tuple(f"seen {part}" for part in DATE_PARTS)
        and "has dates" in data.notes[0]
    )
    assert rows_hash(data.x) == rows_hash(
        read_data({**table, "seen": list(table["seen"].astype(str))}, label="y").x
    )
    table["seen"] = pandas.to_timedelta(np.arange(40) % 7, unit="D").astype(f"timedelta64[{unit}]")
    assert set(read_data(table, label="y").x[:, 1]) == {86400.0 * day for day in range(7)}


def test_times_are_ordered_as_times_or_refused(tmp_path: Path) -> None:
    assert moments(["31.01.2022", "01.02.2022"], "t") == {
        "31.01.2022": 1643587200,
        "01.02.2022": 1643673600,
    }
    assert moments(["Jan", "feb.", "December"], "t") == {"Jan": 1, "feb.": 2, "December": 12}
    assert (
        moments(["2022-01-01T00:00+01:00", "2021-12-31T23:00Z"], "t")["2021-12-31T23:00Z"]
        == 1640991600
    )
    for odd in (
        ["01/02/2022", "03/04/2022"],
        ["31.01.22"],
        ["31012022", "01022022"],
        ["week 1", "week 2"],
        ["2022-02-30"],
        ["2022-01-01T00:00Z", "2022-01-02T00:00"],
    ):
        with pytest.raises(DataError, match="'t'"):
            moments(odd, "t")
    dates = [f"{1 + day % 28:02}.{1 + day // 28:02}.2022" for day in range(96)]
    rows = [f"{day % 7},{date},{'ns'[day % 2]},{day // 2 % 2}" for day, date in enumerate(dates)]
    (tmp_path / "t.csv").write_text("\n".join(["x,date,site,y", *rows, ""]))
    owners = read_owners(tmp_path / "t.csv", DataOptions("y", "site"), SplitColumns(time=("date",)))
    assert owners.order is not None and (np.diff(owners.order) > 0).all()


def test_a_column_that_float32_cannot_hold_is_shifted_first() -> None:
    small: dict[str, Any] = {"x": [row % 16 for row in range(64)], "y": ["a", "b", "b", "a"] * 16}
    large = {**small, "x": [10**9 + number for number in small["x"]]}
    one, other = (
        read_data(table, label="y").standardized(np.arange(64)) for table in (small, large)
    )
    np.testing.assert_array_equal(
        (one.x - one.shift) / one.scale, (other.x - other.shift) / other.scale
    )
    assert other.offset is not None and other.offset.tolist() == [1e9]
    with pytest.raises(DataError, match="float32 cannot tell apart"):
        fedloom.run(
            "local", data=(np.array(large["x"], float)[:, None], small["y"]), clients=2, rounds=1
        )


def test_many_whole_numbers_are_a_number_to_predict_with_a_note() -> None:
    x = np.random.default_rng(0).normal(size=(210, 2)).astype(np.float32)
    y = np.arange(210) % 30
    found = read_data({"a": x[:, 0], "y": y}, label="y")
    assert found.classes == () and found.y.dtype == np.float64 and found.y.tolist() == y.tolist()
    assert 'data.task = "classes"' in found.notes[0]
    assert fedloom.run("fedavg", data=(x, y), clients=2, rounds=1).summary["task"] == "number"
    assert len(read_data({"a": x[:, 0], "y": y}, label="y", task="classes").classes) == 30
    assert (
        read_data({"a": x[:, 0], "y": y % 3}, label="y", task="number").y.tolist()
        == (y % 3).tolist()
    )


@pytest.mark.parametrize(
    "form", [lambda y: y, lambda y: y.to_numpy(dtype=object), lambda y: y.astype("string"), list]
)
def test_a_missing_label_is_no_class(form: Any) -> None:
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    y = pandas.Series(np.where(x[:, 0] > 0, "ill", "well"), dtype=object)
    y[:10] = None
    result = fedloom.run("fedavg", data=(x, form(y)), clients=2, rounds=1, models="linear")
    assert [*result.models[0].parameters()][-1].shape == (2,)


def test_quotes_that_nothing_ends_and_rows_of_other_lengths_are_refused(tmp_path: Path) -> None:
    for text, problem in (
        ('a,b\n1,"2\n3,4\n', "unexpected end"),
        ("a,b\n1,2\n3\n", "line 3: expected 2"),
        (",".join(map(str, range(100_001))) + "\n", "100,001 columns"),
    ):
        (tmp_path / "t.csv").write_text(text)
        with pytest.raises(DataError, match=problem):
            read_csv(tmp_path / "t.csv")


def test_text_is_kept_as_written_unless_all_of_it_ends_in_zero() -> None:
    assert RawColumn.of("a", ["1.0", "", "12.0"]).text == ["1", "", "12"]
    assert RawColumn.of("a", ["1.0", "1"]).text == ["1.0", "1"]
    assert RawColumn.of("a", ["NA", "x"], Grammar(())).words.tolist() == ["NA", "x"]
    table = {"x": [0, 1] * 9, "site": ["01", "1", "1.0"] * 6, "y": ["a", "b"] * 9}
    found, _ = interpret(table, DataOptions("y", "site"))
    assert set(found.table.owners) == {"01", "1", "1.0"}
