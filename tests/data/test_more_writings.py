"""Further tables that people meet, neighbors of those in `test_writings`: each is read as meant, or
refused.
"""

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn, columns_of
from fedloom.data.encoder import TableEncoder
from fedloom.data.own import read_data
from fedloom.data.tables import read_csv

ROWS = range(40)
PLAIN: dict[str, Any] = {"x": [row * row % 17 / 4 for row in ROWS], "y": ["a", "a", "b", "b"] * 10}
CSV = "".join(f"{x},{y}\n" for x, y in zip(PLAIN["x"], PLAIN["y"], strict=True))
DAYS = [f"2022-{row % 12 + 1:02}-{row % 28 + 1:02}" for row in ROWS]


@pytest.mark.parametrize(
    ("odd", "repair"),
    [
        (
            lambda row: f"({row}.50)",
            r"numbers such as '\(0\.50\)': write digits and a decimal point only\)",
        ),
        (lambda row: f"{row}.50-", "numbers such as '0.50-'"),
        (lambda row: f"{row}.5D+01", "numbers such as"),
        (lambda row: f"~{row}.5", "numbers such as"),
        (lambda row: f"'{row}.5'", "numbers such as"),
        (lambda row: f"{row}.5*", "numbers such as"),
        (lambda row: f"2022-01-{row % 28 + 1:02} 10:00 AM", "dates such as"),
        (lambda row: f"01/{row % 28 + 1:02}/2022, 10:00:00 PM", "dates such as"),
        (lambda row: f"202201{row % 28 + 1:02}T1000", "dates such as"),
        (lambda row: f"2022-W{row % 50 + 1:02}", "dates such as"),
        (lambda row: f"{2010 + row % 9}Q{row % 4 + 1}", "dates such as"),
        (lambda row: f"Mon, {row % 28 + 1} Jan 2022 10:00:00 GMT", "dates such as"),
        (lambda row: f"{row % 28 + 1}. März 2022", "dates such as"),
        (lambda row: f"{100 + row}/80", "pairs of numbers such as '100/80'"),
        (lambda row: f"{row}e-50", "numbers that differ by too little, such as 1e-50: multiply"),
    ],
)
def test_further_numbers_and_dates_are_no_words(odd: Callable[[int], str], repair: str) -> None:
    with pytest.raises(DataError, match=repair):
        read_data({**PLAIN, "z": [odd(row) for row in ROWS]}, label="y")


@pytest.mark.parametrize(
    "word", [">200", "<30", "10-19", "3-", "5*", "120/80", "(a)", "1:1", "IV", "2022-045", "A1"]
)
def test_words_that_only_resemble_numbers_are_categories(word: str) -> None:
    assert read_data({**PLAIN, "z": [word, "other"] * 20}, label="y").columns[1:] == (
        f"z={word}",
        "z=other",
    )


def test_points_between_thousands_are_no_identifier() -> None:
    with pytest.raises(
        DataError, match=r"numbers such as '1\.000': write digits and a decimal comma only"
    ):
        read_data({**PLAIN, "z": [f"1.{row:03}" for row in ROWS]}, label="y", decimal=",")


def test_rows_that_are_not_used_decide_no_type(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"x,y\n{CSV}Total,\n")
    data = read_data(tmp_path / "t.csv", label="y")
    assert data.columns == ("x",) and data.x.shape == (40, 1)


def test_names_of_columns_are_in_one_form(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\ufeff\ufeffe\u0301,\u200by\n" + CSV)
    assert read_data(tmp_path / "t.csv", label="y", keep=["\u00e9"]).columns == ("\u00e9",)
    with pytest.raises(DataError, match="'x' repeats"):
        read_data({**PLAIN, "x\u200b": PLAIN["x"]}, label="y")
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="column 1 of 2 has no name"):
        read_data(pandas.DataFrame({None: PLAIN["x"], "y": PLAIN["y"]}), label="y")


def test_a_csv_file_of_several_that_were_put_together(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("w,y\n" + "u,a\nv,b\n" * 20 + "w,y\n" + "u,a\nv,b\n" * 20)
    with pytest.raises(DataError, match="its header again in row 41"):
        read_csv(file)
    file.write_text("x\tw, or, so\ty\n" + "1\tu, v, w\ta\n" * 3)
    assert [*read_csv(file)] == ["x", "w, or, so", "y"]
    file.write_text('a,b\n1,"' + "w" * 3_000_000 + '"\n')
    with pytest.raises(DataError, match="line 2, cannot be read"):
        read_csv(file)


def test_features_that_tell_label_or_owner_get_a_note() -> None:
    sites = ["A", "B"] * 20
    for cells, note in (
        (["one" if y == "a" else "two" for y in PLAIN["y"]], "'z' tells the label of every row"),
        ([5 if site == "A" else 7 for site in sites], "'z' tells the owner of every row"),
        (PLAIN["x"], "Columns 'x' and 'z' are equal"),
    ):
        data = read_data({**PLAIN, "z": cells, "site": sites}, label="y", group="site")
        assert [*data.notes] == [found for found in data.notes if note in found] != []
    numbers = [row / 7 for row in ROWS]
    leak = read_data({"x": numbers, "z": [row % 7 for row in ROWS], "y": numbers}, label="y").notes
    assert leak == ("Column 'x' tells the label of every row: drop it if it is known only later.",)


def test_a_file_without_a_header_gets_a_note(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "".join(f"{x},{'uv'[row % 2]},{PLAIN['y'][row]}\n" for row, x in enumerate(PLAIN["x"]))
    )
    assert "check that the first row is the header" in "\n".join(
        read_data(tmp_path / "t.csv", label="a").notes
    )
    (tmp_path / "t.csv").write_text('w,y\n"u", "a"\n"v", "b"\n' * 20)
    with pytest.raises(DataError, match="a cell with spaces before its quotes"):
        read_csv(tmp_path / "t.csv")


def test_odd_values_get_a_note() -> None:
    for cells, note in (([-999 if row % 9 == 0 else row % 7 for row in ROWS], "has -999 in 5 rows"),
                        (["#REF!", "u", "v", "v"] * 10, "errors of a spreadsheet, '#REF!'"),
                        (["u", "u\x00", "v", "v"] * 10, "differ in writing only"),
                        (["u", "v", "-", "n.a."] * 10, "has '-', 'n.a.', taken as written"),
                        (["120/80", "130/85"] * 20, "pairs of numbers such as '120/80'"),
                        ([2**53 + row for row in ROWS], "whose last digits are lost"),
                        (np.arange(40, dtype=np.uint64) + np.uint64(2**63), "does not tell apart")):  # fmt: skip  # noqa: E501
        assert note in "\n".join(read_data({**PLAIN, "z": cells}, label="y").notes)
    for labels, note in (([-999, 0, 1, 2] * 10, "has -999 in 10 rows"),
                         (["a", "b", "unknown", "a"] * 10, "has 'unknown'"),
                         (["7", "8", "<5", "7"] * 10, "such as '7' and '<5': all are classes")):  # fmt: skip  # noqa: E501
        assert note in "\n".join(read_data({**PLAIN, "y": labels}, label="y").notes)
    ages = [99 if row == 0 else row % 7 * 15 for row in ROWS]
    assert read_data({**PLAIN, "age": ages}, label="y").notes == ()


def test_numbers_that_are_missing_words_are_missing_at_every_door(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**PLAIN, "z": [-999 if row % 9 == 0 else row % 7 for row in ROWS]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    forms = [
        tmp_path / "t.csv",
        tmp_path / "t.parquet",
        frame,
        frame.astype({"z": "float32"}),
        frame.convert_dtypes(),
    ]
    read = [read_data(form, label="y", missing_words=["-999"], missing="median") for form in forms]
    assert all(
        np.isnan(data.x[:, 1]).sum() == 5 and np.array_equal(data.x, read[0].x, equal_nan=True)
        for data in read
    )


def folder(path: Path, *names: str, text: str = f"x,y\n{CSV}") -> Path:
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


def test_files_beside_a_table_are_no_tables(tmp_path: Path) -> None:
    folder(
        tmp_path,
        "n/a.csv",
        "n/._a.csv",
        "n/~$a.csv",
        ".ipynb_checkpoints/a.csv",
        "__MACOSX/n/a.csv",
    )
    assert len(read_data(tmp_path, label="y").y) == 40


def test_folders_of_csv_and_parquet_are_one_table(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    folder(tmp_path, "site=n/a.csv")
    (tmp_path / "site=n%20o").mkdir()
    pandas.DataFrame({"y": PLAIN["y"], "x": [row % 5 for row in ROWS]}).to_parquet(
        tmp_path / "site=n%20o" / "b.parquet"
    )
    data = read_data(tmp_path, label="y", group="site")
    assert data.columns == ("x",) and len(data.y) == 80 and data.owners == ("n", "n o")
    comma = folder(
        tmp_path / "comma", "a.csv", text="x;y\n" + CSV.replace(",", ";").replace(".", ",")
    )
    pandas.DataFrame(PLAIN).to_parquet(comma / "b.parquet")
    first, second = np.split(read_data(comma, label="y", decimal=",").x, 2)
    assert np.array_equal(first, second)


def test_each_file_has_its_own_decimal_sign(tmp_path: Path) -> None:
    plain = folder(tmp_path / "plain", "a.csv", "b.csv")
    mixed = folder(
        folder(tmp_path / "mixed", "a.csv"),
        "b.csv",
        text="x;y\n" + CSV.replace(",", ";").replace(".", ","),
    )
    one, other = read_data(plain, label="y"), read_data(mixed, label="y", decimal={"b.csv": ","})
    assert (one.x == other.x).all() and one.recipe == other.recipe
    several: tuple[tuple[dict[str, Literal[".", ","]], str], ...] = (
        ({"a.csv": ","}, "which is no number with ','"),
        ({"c.csv": ","}, "the file 'c.csv'"),
    )
    for signs, problem in several:
        with pytest.raises(DataError, match=problem):
            read_data(mixed, label="y", decimal=signs)


def test_types_of_polars_are_read_as_those_of_pandas() -> None:
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({**PLAIN, "z": ["u", "v", None, "u"] * 10})
    plain = read_data(frame, label="y")
    forms = [frame.lazy(), frame.with_columns(pl.col("z").cast(pl.Categorical))]
    forms += [
        frame.with_columns(pl.col("z").cast(kind)) for kind in (pl.Enum(["u", "v"]), pl.Binary)
    ]
    for form in forms:
        data = read_data(form, label="y")
        assert (data.columns, data.notes) == (plain.columns, plain.notes) and (
            data.x == plain.x
        ).all()
    times = frame.with_columns(
        z=pl.Series([datetime.datetime(2022, 1, 1, row % 24) for row in ROWS])
    )
    hours = read_data(
        times.with_columns(pl.col("z").dt.replace_time_zone("Europe/Berlin")),
        label="y",
        encode={"z": "date"},
    )
    assert np.array_equal(
        hours.x[1:23, -2:], read_data(times, label="y", encode={"z": "date"}).x[:22, -2:]
    )
    for kind, cells in ((pl.Object, [object()] * 40), (pl.List(pl.Int64), [[1, 2]] * 40)):
        with pytest.raises(DataError, match="Column 'z' holds"):
            read_data(frame.with_columns(z=pl.Series(cells, dtype=kind)), label="y")


def test_tensors_and_masked_arrays_of_any_kind() -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 2)), torch.tensor([0, 1] * 20)
    want = read_data((x, y))
    for form in (torch.tensor(x, requires_grad=True), torch.tensor(x).to_sparse()):
        assert (read_data((form, y)).x == want.x).all()
    assert (read_data((torch.tensor(x).bfloat16(), y.bfloat16())).y == want.y).all()
    masked = read_data((np.ma.masked_where(x > 1, x), y), missing="median")
    assert np.isnan(masked.x).sum() == (x > 1).sum()
    for wrong, problem in (
        (x * 1j, "complex numbers"),
        ({"a": dict(enumerate(x[:, 0]))}, "not in a dict"),
        ({"a": set(range(40))}, "not in a set"),
    ):
        with pytest.raises(DataError, match=problem):
            read_data((wrong, y))
    with pytest.raises(DataError, match="not a DataFrameGroupBy"):
        columns_of(pytest.importorskip("pandas").DataFrame(PLAIN).groupby("y"))
    assert (
        RawColumn.of("t", np.array([torch.tensor(1.5), None], dtype=object)).values.tolist()[0]
        == 1.5
    )


def test_bytes_that_are_no_words_are_refused() -> None:
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="no words, numbers or dates"):
        RawColumn.of("z", pa.array([bytes(range(row, row + 16)) for row in ROWS], pa.binary(16)))


def test_a_partys_dates_are_features() -> None:
    words = np.array([*DAYS[:-1], None], dtype=object)
    encoder = TableEncoder.fit({"d": words, "z": np.arange(40)}, np.arange(40))
    x = encoder.transform({"d": words, "z": np.arange(40)})
    assert encoder.names[:3] == ("d year", "d year missing", "d month sin") and x.shape == (40, 11)
    assert abs(x[:, 0].mean()) < 1e-6 and x[-1, 1] == 1 and not x[-1, 2:10].any()
    assert TableEncoder.from_dict(encoder.to_dict()) == encoder
    assert (
        TableEncoder.fit({"d": np.array(DAYS, dtype=object)}, np.arange(40)).names[1]
        == "d month sin"
    )
    for odd, repair in (
        (
            "soon",
            "also 'soon': write it as 2022-01-31, or leave it empty.*; or leave the column out",
        ),
        ("01/02/2022", "several forms"),
    ):
        with pytest.raises(DataError, match=repair):
            TableEncoder.fit({"d": np.array([*DAYS[:-1], odd], dtype=object)}, np.arange(40))
    with pytest.raises(DataError, match="must hold a date, or nothing,"):
        encoder.transform({"d": np.array(["soon"], dtype=object), "z": np.arange(1)})


@pytest.mark.parametrize(
    ("encoding", "said"),
    [("utf-16", "but in UTF-16"), ("latin-1", "the byte 0xe9, in Windows-1252 'é'")],
)
def test_a_file_in_another_encoding_says_which(encoding: str, said: str, tmp_path: Path) -> None:
    rows = [f"{row},Orléans,{'ab'[row % 2]}" for row in range(40)]
    (tmp_path / "rows.csv").write_bytes("\n".join(["age,town,y", *rows]).encode(encoding))
    with pytest.raises(DataError, match=f"is not text in UTF-8.*{said}.*Save it as CSV in UTF-8"):
        read_data(str(tmp_path / "rows.csv"), label="y")


def test_a_column_without_a_value_is_named() -> None:
    data = read_data({**PLAIN, "void": [None] * 40}, label="y")
    assert data.columns == read_data(PLAIN, label="y").columns
    assert "Column 'void' is dropped: it has no value." in data.notes


def test_types_of_arrow_are_read_as_plain_text_and_numbers(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    words, numbers = ["u", "v", None, "u"] * 10, [row % 7 + 0.25 for row in range(40)]
    plain = read_data({**PLAIN, "w": words, "q": numbers}, label="y")
    texts = [
        pa.array(words, kind) for kind in (pa.large_string(), pa.string_view(), pa.large_binary())
    ]
    texts.append(pa.array(words).dictionary_encode())
    amounts = [pa.array([decimal.Decimal(str(q)) for q in numbers], kind) for kind in
               (pa.decimal128(10, 2), pa.decimal256(50, 2))]  # fmt: skip
    amounts += [pa.array(numbers, pa.float64()), pa.array(numbers, pa.float32())]
    for number, (text, amount) in enumerate(zip(texts, amounts, strict=True)):
        table = pa.table({**PLAIN, "w": text, "q": amount})
        pq.write_table(table, tmp_path / f"{number}.parquet")
        for form in (table, str(tmp_path / f"{number}.parquet")):
            data = read_data(form, label="y")
            assert data.columns == plain.columns and (data.x == plain.x).all(), (
                text.type,
                amount.type,
            )
    nested = pa.table({**PLAIN, "w": pa.array([{"a": 1}] * 40)})
    pq.write_table(nested, tmp_path / "nested.parquet")
    for wrong in (nested, str(tmp_path / "nested.parquet")):
        with pytest.raises(DataError, match="'w' holds several values in a row"):
            read_data(wrong, label="y")


def test_a_column_whose_library_cannot_hand_it_over_is_a_sentence() -> None:
    class Categories(list[str]):
        dtype = "Categorical"

        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            raise OSError("The iterator produced an item of data type UInt32")

    with pytest.raises(DataError, match=r"type Categorical, which the .* convert the column"):
        read_data({**PLAIN, "z": Categories("uv" * 20)}, label="y")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"info": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe{",
        b"null",
        b'{"info": []}',
        b'{"info": {"features": [1]}}',
    ],
    ids=["deep", "deep objects", "many digits", "no text", "null", "a list", "features in a list"],
)
def test_metadata_of_parquet_that_take_a_parser_down_are_one_sentence(
    text: bytes, tmp_path: Path
) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    pq.write_table(pyarrow.table(PLAIN, metadata={b"huggingface": text}), tmp_path / "t.parquet")
    with pytest.raises(
        DataError, match="its metadata 'huggingface' cannot be read; write the file without them"
    ):
        read_data(str(tmp_path / "t.parquet"), label="y")


def test_metadata_of_parquet_of_other_programs_change_nothing(tmp_path: Path) -> None:
    """Also where they are deep, of other shapes, or large."""
    import json

    import pyarrow
    import pyarrow.parquet as pq

    features = {f"c{k}": {"_type": "Value"} for k in range(50_000)} | {
        "y": {"_type": "ClassLabel", "names": 7},
        "x": 3,
    }
    odd = {
        b"pandas": b"[" * 200_000,
        b"ARROW": b"\x00" * 1000,
        b"huggingface": json.dumps({"info": {"features": features}}).encode(),
    }
    tables = [pyarrow.table(PLAIN), pyarrow.table(PLAIN, metadata=odd)]
    for k, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{k}.parquet")
    plain, other = (read_data(str(tmp_path / f"{k}.parquet"), label="y") for k in range(2))
    assert (plain.x == other.x).all() and (plain.y == other.y).all()
