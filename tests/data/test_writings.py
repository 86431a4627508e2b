"""Ways of writing a table that people meet: each is read as meant, or refused with the place and
the repair.
"""

import datetime
import runpy
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn
from fedloom.data.encoder import OneHot, TableEncoder
from fedloom.data.own import read_data
from fedloom.data.tables import read_csv
from fedloom.deploy import export
from fedloom.deploy.models import load_model
from tests.exported import predict

ROWS = range(40)
PLAIN: dict[str, Any] = {"x": [row * row % 17 / 4 for row in ROWS], "y": ["a", "a", "b", "b"] * 10}


@pytest.mark.parametrize(
    ("odd", "repair"),
    [
        (
            lambda row: "inf" if row == 3 else row * 1.5,
            "numbers, but 1 of its 40 values are not, such as 'inf'",
        ),
        (
            lambda row: "-" if row % 9 == 0 else row,
            "data.missing_words; .*data.encode.z = 'category'",
        ),
        (lambda row: "unknown" if row % 3 == 0 else row, "such as 'unknown'"),
        (lambda row: f"{row}.50 EUR", "numbers such as '0.50 EUR'"),
        (lambda row: f"{row}.5 kg", "numbers such as '0.5 kg'"),
        (lambda row: f"\u2212{row}.5" if row % 2 else f"{row}", "numbers such as '\u22121.5'"),
        (lambda row: "١٢" if row % 2 else "٣", "numbers such as '٣'"),
        (
            lambda row: f"{row % 28 + 1}-Jan-2022",
            "dates such as '1-Jan-2022': write them as 2022-01-31",
        ),
        (lambda row: f"January {row % 28 + 1}, 2022", "dates such as"),
        (lambda row: f"2022-{row % 12 + 1:02}", "dates such as '2022-01'"),
        (lambda row: f"{row % 24:02}:30", "times of day such as '00:30': write them as numbers"),
        (lambda row: datetime.time(row % 24, 30), "times of day such as '00:30:00'"),
        (lambda row: f"{row} days 01:30:00", "spans of time such as '0 days 01:30:00'"),
    ],
)
def test_what_is_nearly_a_number_or_a_date_is_refused_whatever_its_number_of_values(
    odd: Any, repair: str
) -> None:
    with pytest.raises(DataError, match=repair):
        read_data({**PLAIN, "z": [odd(row) for row in ROWS]}, label="y")
    few = [odd(row % 4 + 1) for row in ROWS]
    if len({map(str, few)}) > 1:
        assert (
            repair == ""
            or read_data({**PLAIN, "z": few}, label="y", encode={"z": "category"}).notes == ()
        )


def test_a_label_that_is_nearly_a_number_is_refused() -> None:
    for odd, repair in (
        (lambda row: f"{row},5", "numbers such as '0,5'"),
        (lambda row: f"{row}%", "such as '0%'"),
        (lambda row: "low" if row == 5 else row / 2, "1 of its 40 values are not, such as 'low'"),
        (lambda row: f"2022-01-{row % 28 + 1:02}", "dates such as '2022-01-01'"),
        (lambda row: f"person {row}", "free text or an id"),
    ):
        table = {"x": PLAIN["x"], "y": [odd(row) for row in ROWS]}
        with pytest.raises(DataError, match=repair):
            read_data(table, label="y")
        assert len(read_data(table, label="y", task="classes").classes) > 20
    comma = {"x": PLAIN["x"], "y": [f"{row},5" for row in ROWS]}
    assert read_data(comma, label="y", decimal=",").y[:2].tolist() == [0.5, 1.5]


def test_numbers_with_a_point_are_no_words_where_the_sign_is_a_comma() -> None:
    table = {**PLAIN, "z": [f"{row % 5}.5" for row in ROWS]}
    with pytest.raises(DataError, match=r"numbers such as '0\.5'"):
        read_data(table, label="y", decimal=",")


def test_numbers_that_may_be_codes_dates_or_a_category_get_a_note() -> None:
    table = {
        **PLAIN,
        "zip": [f"{row % 7:05}" for row in ROWS],
        "day": [20220101 + row % 28 for row in ROWS],
    }
    notes = "\n".join(read_data({**table, "stage": ["1", "2", "3a", "3b"] * 10}, label="y").notes)
    for part in (
        "'00000', of which the first zeros are lost",
        "20220101, which may be dates",
        "'1' and '3a'",
    ):
        assert part in notes


def test_a_csv_file_says_what_is_wrong_with_its_header(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    for text, problem in (
        ("", "is empty"),
        ("\n", "is empty"),
        ("sep=;\na;b\n1;2\n", "delete that line"),
        (",a\n0,1\n", "column 1 of 2 has no name"),
        ("a,a \n1,2\n", "'a' repeats"),
        ('a,b\n1,"2', "unexpected end"),
    ):
        file.write_text(text)
        with pytest.raises(DataError, match=problem):
            read_csv(file)
    for text, last in (
        ('a,b\n1,""', ""),
        ('a,b\n1,""""', '"'),
        ('a,b\n1,"x"', "x"),
        ('a,b\n1,5"', '5"'),
    ):
        file.write_text(text)  # closed quotes at the end of a file without a last line's end
        assert read_csv(file)["b"].text == [last]


def test_names_of_columns_are_stripped_by_every_door(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({" x": PLAIN["x"], "y ": PLAIN["y"]})
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_parquet(tmp_path / "t.parquet")
    for form in (frame, tmp_path / "t.csv", tmp_path / "t.parquet", {**frame}):
        assert read_data(form, label="y ").columns == ("x",)
    with pytest.raises(DataError, match="column 2 of 2 has no name"):
        read_data({"y": PLAIN["y"], " ": PLAIN["x"]}, label="y")


def test_types_of_arrow_are_their_words_or_refused() -> None:
    pa = pytest.importorskip("pyarrow")
    words = [b"uu", b"vv"] * 20
    views = pa.array(["uu", "vv"] * 20, pa.string_view())
    coded = pa.array(["uu", "vv"] * 20).dictionary_encode()
    for cells in (pa.array(words, pa.binary(2)), pa.array(words), views, coded):
        assert read_data(pa.table({**PLAIN, "z": cells}), label="y").columns == (
            "x",
            "z=uu",
            "z=vv",
        )
    for cells in (pa.array([b"\xff", b"v"] * 20), pa.array([pa.MonthDayNano([1, 2, 3])] * 40)):
        with pytest.raises(
            DataError, match=r"Column 'z' holds values of the type .* leave the column out"
        ):
            read_data(pa.table({**PLAIN, "z": cells}), label="y")
    assert RawColumn.of(
        "d", pa.array([Decimal("9007199254740993"), None], pa.decimal128(20, 2))
    ).text == [
        "9007199254740993",
        "",
    ]


def test_intervals_and_periods_of_pandas_are_their_text() -> None:
    pandas = pytest.importorskip("pandas")
    months = pandas.Series(pandas.PeriodIndex(["2022-01", "2022-02"], freq="M"))
    assert RawColumn.of("m", months).text == ["2022-01", "2022-02"]
    assert RawColumn.of("p", pandas.Series(pandas.cut([0.5, 1.5], [0, 1, 2]))).text == [
        "(0, 1]",
        "(1, 2]",
    ]


def test_floats_that_have_lost_digits_are_no_names() -> None:
    ids = np.array([2.0**53 + 2 * (row % 2) for row in ROWS])
    with pytest.raises(DataError, match="'site' holds floats such as 9007199254740992"):
        read_data({**PLAIN, "site": ids}, label="y", group="site")
    assert (
        read_data({**PLAIN, "site": ids.astype(np.int64)}, label="y", group="site").owners[0]
        == "9007199254740992"
    )


def test_a_rows_code_does_not_depend_on_other_rows() -> None:
    rule = OneHot("code", ("01", "1", "2.0"))
    alone = [
        rule.encode(RawColumn.of("code", [word])).argmax(1)[0] for word in ("01", "1.0", "2", "1")
    ]
    assert (
        alone
        == rule.encode(RawColumn.of("code", ["01", "1.0", "2", "1"])).argmax(1).tolist()
        == [0, 1, 2, 1]
    )
    assert not rule.encode(RawColumn.of("code", ["3.0"])).any()


def test_a_column_has_one_role() -> None:
    table = {**PLAIN, "site": ["n", "s"] * 20}
    for settings, role in (
        ({"label": "site"}, "the owner already"),
        ({"drop": ["y"]}, "the label already"),
        ({"encode": {"site": "text"}}, "the owner already"),
    ):
        with pytest.raises(DataError, match=role):
            read_data(table, **{"label": "y", "group": "site", **settings})  # type: ignore[arg-type]


def test_arrays_and_frames_of_a_list_are_read_alike() -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    for labels, problem in (
        ([f"{row},5" for row in ROWS], "y has 40 different numbers such as '0,5'"),
        ([f"p{row}" for row in ROWS], "free text or an id"),
        (np.full(40, np.nan), "no label"),
        (["a", "b"] * 20, "different numbers of values"),
    ):
        rows: Any = [[1, 2], [3]] * 20 if "values" in problem else x
        with pytest.raises(DataError, match=problem):
            fedloom.run("local", data=(rows, labels), clients=2, rounds=1)
    pandas = pytest.importorskip("pandas")
    one = pandas.DataFrame({**PLAIN, "client": ["u", "v"] * 20})
    found = fedloom.run(
        "local", data=[one, one[["client", "y", "x"]]], label="y", rounds=1, models="linear"
    )
    assert found.summary["clients"] == 2 and found.models[0](torch.zeros(1, 3)).shape == (1, 2)


def test_the_ending_of_a_file_may_be_in_capitals(tmp_path: Path) -> None:
    lines = [f"{x},{y}" for x, y in zip(PLAIN["x"], PLAIN["y"], strict=True)]
    (tmp_path / "T.CSV").write_text("\n".join(["x,y", *lines, ""]))
    for path in (tmp_path / "T.CSV", tmp_path):
        assert read_data(path, label="y").x.shape == (40, 1)


def test_partners_files_refuse_the_same_numbers() -> None:
    words = np.array([f"{row},5" for row in ROWS], dtype=object)
    with pytest.raises(DataError, match="numbers such as '0,5': write digits"):
        TableEncoder.fit({"z": words}, np.arange(40))


HEAD = "x,flag,code,word"
GOOD = "0.5,True,01,u"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, of a column of numbers, one of true and false, and two of words."""
    folder = tmp_path_factory.mktemp("exported")
    rows = [
        f"{row * row % 17 / 4},{row % 3 == 0},{('01', '1', '002')[row % 3]},{'uv'[row % 2]},{'ab'[row // 2 % 2]},"  # noqa: E501
        f"{'ns'[row // 4 % 2]}"
        for row in range(48)
    ]
    (folder / "t.csv").write_text("\n".join([f"{HEAD},y,site", *rows, ""]))
    known: dict[str, Any] = {
        "label": "y",
        "group": "site",
        "encode": {"code": "category"},
        "rounds": 1,
    }
    fedloom.run("fedavg", data=str(folder / "t.csv"), models="linear", out=folder / "run", **known)
    export(folder / "run")
    return folder / "run" / "export" / "n"


def test_an_exported_file_notes_unknown_words(
    exported: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: Any
) -> None:
    (tmp_path / "new.csv").write_text(f"{HEAD}\n{GOOD}\n0.5,True,01,new\n")
    load_model(exported).predict(tmp_path / "new.csv")
    predict(exported, tmp_path / "new.csv")
    note = (
        "column 'word': 1 of 2 rows hold words that training did not have, such as 'new'; they "
        "count as none"
    )
    assert note in caplog.text and note in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}\n{GOOD}\n",
        f"\n\n{HEAD}\n{GOOD}\n\n{GOOD}",
        f"\ufeff{HEAD}\r\n{GOOD}\r\n",
        "",
        f"{HEAD}\n",
        f"{HEAD}\n{GOOD}\n0.5,True\n",
        f"{HEAD}\n{GOOD},9\n",
        f"{HEAD}\n{GOOD}\n  \n",
        f"{HEAD},x\n{GOOD},1\n",
        f",{HEAD}\n0,{GOOD}\n",
        f'{HEAD}\n0.5,True,01,"u',
        f'{HEAD}\n0.5,True,01,""',
        f"{HEAD}\n1e400,True,01,u\n",
        f"{HEAD}\n1e39,True,01,u\n",
        f"{HEAD}\n0.5,1,1.0,u\n",
        f"{HEAD}\n0.5,1,1.0,u\n{GOOD}\n",
        f"{HEAD}\n0.5,TRUE,2,v \n",
        f"{HEAD}\ninf,True,01,u\n",
        " x ,flag,word,other,code\n0.5,True,u,9,01\n",
        f'{HEAD}\n0.5,True,"0""1","u\nv"\n',
        "x,flag\n1,1\n",
        f"{HEAD}\n0.5,True,\u00e9,u\n",
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_exported_file_reads_rows_as_fedloom_does(
    exported: Path,
    text: str,
    encoding: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    if encoding == "utf-16" and not text.startswith(f"{HEAD}\n{GOOD}\n"):
        return
    file = tmp_path / "new.csv"
    file.write_bytes(text.encode(encoding))
    monkeypatch.setattr(sys, "argv", ["predict.py", str(file)])
    monkeypatch.setattr(sys, "path", [str(exported), *sys.path])
    monkeypatch.delitem(sys.modules, "network", raising=False)
    try:
        found = load_model(exported, trust=["network.py"]).predict(file)
    except DataError:
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(exported / "predict.py"), run_name="__main__")
        assert isinstance(stop.value.code, str) and stop.value.code
    else:
        runpy.run_path(str(exported / "predict.py"), run_name="__main__")
        lines = capsys.readouterr().out.splitlines()[1:]
        mine = np.array([[float(word) for word in line.split(",")[1:]] for line in lines])
        np.testing.assert_allclose(mine, found, atol=1e-5)
    monkeypatch.delitem(sys.modules, "network", raising=False)
