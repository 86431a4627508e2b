"""The cases of the documentation: their files are valid, their upper bound sees all rows, their
table pairs seeds. Then kinds of tables that gave wrong answers in silence, through every door.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given as draws
from hypothesis import settings
from hypothesis import strategies as st

import fedloom
from fedloom import FederatedClassifier, FederatedRegressor, methods
from fedloom.core.errors import DataError
from fedloom.core.scores import number_scores
from fedloom.core.statistics import constant, deviations
from fedloom.data.grammar import moments
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.data.own import interpret, read_data
from fedloom.deploy import export
from fedloom.deploy.models import load_model
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
from fedloom.experiment.trial.owners import read_owners
from tests.methods.groups import planted
from tests.toy import Toy

CASES = Path(__file__).parents[1] / "examples" / "cases"
TABLE = runpy.run_path(str(CASES / "table.py"))
REBUILD = runpy.run_path(str(CASES / "rebuild.py"))
PAGES = sorted((CASES.parents[1] / "docs" / "cases").glob("*.md"))


@pytest.mark.parametrize("file", sorted(CASES.glob("*.toml")), ids=lambda f: f.stem)
def test_a_case_is_a_valid_comparison(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CASES.parents[1])
    content = tomllib.loads(file.read_text())
    title, compare = content.pop("title"), content.pop("compare")
    # a search, or the case itself
    assert len(compare["seeds"]) >= (1 if file.stem.endswith("-rates") else 5)
    if "columns" not in content:
        content["data"] = {
            "name": "digits",
            "clients": 4,
            "public_rows": content["data"]["public_rows"],
        }
    runs = check({"title": title, "run": content, "compare": compare}).runs()
    assert len(runs) == len(compare["seeds"]) * len(compare["methods"])
    assert all(run.resolve() for run in runs)


def test_pooled_rows_are_those_of_all_clients_and_one_model_results() -> None:
    method = methods.load(str(CASES / "pooled.py"))
    toy = Toy(method, client_contexts=planted(0, m=3, n=20), epochs=1, batch_size=8, lr=0.05).run(2)
    assert len(toy.server.y) == 60
    sent = sum(e.bytes for e in toy.fed.ledger if e.receiver == "server")
    assert sent == 60 * (6 * 4 + 8)
    before = toy.server.params
    assert not torch.equal(before["head.weight"], toy.party(0).params["head.weight"])
    toy.party(0).prepare(eval_mode="", broadcast=toy.server.broadcast())
    assert torch.equal(before["head.weight"], toy.party(0).params["head.weight"])


def test_differences_are_paired_by_seed_and_averaged_over_clients() -> None:
    a, b = [[3.0, 5.0], [4.0, 8.0], [2.0, 6.0]], [[1.0, 3.0], [1.0, 5.0], [1.0, 5.0]]
    seeds, clients = (TABLE["difference"](a, b, 0.0, over) for over in ("seeds", "clients"))
    assert seeds.mean == pytest.approx(2.0) == clients.mean
    assert seeds.low == pytest.approx(2 - 4.303 * 1 / 3**0.5, abs=1e-3)  # differences 2, 3 and 1
    both = TABLE["difference"](a, b, 0.0, "seeds", 2)
    # Bonferroni: t at 1 - 0.025 / 2
    assert both.low == pytest.approx(2 - 6.205 * 1 / 3**0.5, abs=1e-3)


def test_seconds_are_of_rounds_and_shared_in_lockstep_and_auc_is_of_own_rows() -> None:
    result: dict[str, Any] = {"engine": {"remarks": ["in lock-step, runs: 5"]}, "scores": {}}
    result["seconds"] = {
        "total": 99.0,
        "setup": 1.0,
        "evaluate": 9.0,
        "save": 1.0,
        "local": 20.0,
        "transfer": 30.0,
    }
    assert TABLE["seconds"](result) == pytest.approx(10.0)
    result["client_scores"] = {"auc": {"per_client": [0.1]}, "own auc": {"per_client": [0.5, 0.75]}}
    assert TABLE["values"](result, True) == [50.0, 75.0]
    assert TABLE["values"]({"scores": {"auc": 0.625}}, True) == [62.5]


def test_a_case_makes_its_table_and_picture(
    tmp_path: Path,
    fedloom: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(CASES, tmp_path / "examples" / "cases")
    rows = ["hospital,age,disease"] + [f"{'ab'[i % 2]},{i % 7},{i % 3 % 2}" for i in range(80)]
    (tmp_path / "heart.csv").write_text("\n".join(rows))
    entries = '[{method="alone"}, {method="examples/cases/pooled.py", name="pooled"}]'
    some = [
        f"compare.methods={entries}",
        "compare.seeds=[0, 1, 2]",
        "data.public_rows=8",
        "rounds=1",
    ]
    options = [part for value in some for part in ("-s", value)]
    fedloom("run", "examples/cases/heart.toml", "--quiet", "--out", "out", *options)
    found = TABLE["read"](tmp_path / "out")
    assert {name: sorted(results) for name, results in found.items()} == {
        "alone": [0, 1, 2],
        "pooled": [0, 1, 2],
    }
    monkeypatch.setattr("sys.argv", ["table.py", "out", "--picture", "a.svg"])
    TABLE["main"]()
    table = capsys.readouterr().out
    assert "| pooled |" in table
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    for module in (REBUILD["archive"], TABLE["main"]):
        monkeypatch.setitem(module.__globals__, "ARCHIVE", tmp_path)
    REBUILD["archive"](tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    monkeypatch.setattr("sys.argv", ["table.py", "out"])
    TABLE["main"]()
    assert capsys.readouterr().out == table
    monkeypatch.setattr("sys.argv", ["table.py", "out", "--corrected", "--only", "pooled"])
    TABLE["main"]()
    assert "corrected for 1" in capsys.readouterr().out


def test_a_page_is_rebuilt_by_one_command() -> None:
    """Each table after its marker is replaced, and nothing else."""
    page = "Text\n\n<!-- table.py runs/a --auc -->\n| old |\n|---|\n| 1 |\n\n| mine |\n"
    found = REBUILD["rebuilt"](page, lambda options: f"| {' '.join(options)} |\n")
    assert found == "Text\n\n<!-- table.py runs/a --auc -->\n| runs/a --auc |\n\n| mine |\n"
    text = "fedloom run examples/cases/a.toml --out runs/a    # some minutes\n"
    assert REBUILD["commands"](text) == [["run", "examples/cases/a.toml", "--out", "runs/a"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_rebuilt_tables_are_of_a_command_on_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    run = REBUILD["commands"](text) + (
        [REBUILD["again"](page.stem)] if f"{page.stem} --again" in text else []
    )
    folders = {words[words.index("--out") + 1] for words in run if "--out" in words}
    for options, table in REBUILD["tables"](text):
        assert options.split()[0] in folders and table.count("\n") > 2


@pytest.mark.parametrize(
    "archive", sorted((CASES / "archive").glob("*.json")), ids=lambda file: file.stem
)
def test_tables_and_pictures_are_those_of_the_archive(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table of a page, and its picture, is what table.py makes of the archived runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "cases").mkdir(parents=True)
    found = 0
    for page in PAGES:
        for options, table in REBUILD["tables"](page.read_text(encoding="utf-8")):
            words = shlex.split(options)
            if words[0] == f"runs/{archive.stem}":
                assert REBUILD["printed"](words) == table, page
                found += 1
    assert found
    for picture in (tmp_path / "docs" / "cases").glob("*.svg"):
        assert picture.read_text() == (PAGES[0].parent / picture.name).read_text()


@pytest.mark.parametrize(
    "archive", sorted((CASES / "archive").glob("*-rates.json")), ids=lambda file: file.stem
)
def test_a_case_has_the_rates_that_its_search_chose_of_equally_many(archive: Path) -> None:
    case = archive.stem.removesuffix("-rates")
    entries = tomllib.loads((CASES / f"{case}.toml").read_text())["compare"]["methods"]
    found = TABLE["read"](Path(archive.stem))
    measure = (
        "rmse" if "rmse" in json.loads(archive.read_text())["runs"][0]["measures"] else "accuracy"
    )
    rates = TABLE["searched"](found, measure)
    assert len({len(each) for each in rates.values()}) == 1
    taken = {entry["name"]: entry["params"]["lr"] for entry in entries}
    assert {
        method: float(TABLE["chosen"](each, measure)) for method, each in rates.items()
    }.items() <= taken.items()


def test_a_search_names_the_best_of_all_rates() -> None:
    runs = [("a 0.1", [50.0, 60.0]), ("a 0.3", [70.0, 60.0]), ("own heads 0.1", [1.0, 3.0])]
    runs.append(("own heads 0.3", [float("nan"), 9.0]))
    found = {name: {0: {"measures": {"accuracy": each, "rmse": each}}} for name, each in runs}
    table = TABLE["search"](found, "accuracy").splitlines()
    assert table[2:] == [
        "| a | 0.3 | 0.1: 55.0, 0.3: 65.0 |",
        "| own heads | 0.1 | 0.1: 2.0, 0.3: diverged |",
    ]
    assert TABLE["chosen"](TABLE["searched"](found, "rmse")["a"], "rmse") == "0.1"


def test_cheap_rows_are_of_the_cases_file() -> None:
    for page, (case, names) in REBUILD["AGAIN"].items():
        found = REBUILD["rows"](case, names)
        assert [entry if isinstance(entry, str) else entry["name"] for entry in found] == names
        value = REBUILD["again"](page)[-1].removeprefix("compare.methods=")
        assert tomllib.loads(f"a = {value}")["a"] == found


@pytest.mark.parametrize(
    "archive", sorted((CASES / "archive").glob("*.json")), ids=lambda file: file.stem
)
def test_the_first_row_of_an_archive_repeats(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the case's files are at hand: the first row, run again, has the same test rows and
    nearly its score.
    """
    case = archive.stem.removesuffix("-again")
    content = tomllib.loads((CASES / f"{case}.toml").read_text())
    data, columns = content.get("data", {}).get("name"), content.get("columns", {}).get("files", [])
    folder, hub = (
        Path(os.environ.get(name) or tmp_path) for name in ("FEDLOOM_CASES", "FEDLOOM_DATA")
    )
    at_hand = all((folder / file).exists() for file in columns or [data]) or (
        data == case and hub != tmp_path
    )
    if not at_hand:
        pytest.skip(
            "name the folder of the cases' files in FEDLOOM_CASES, and that of the hub's data in "
            "FEDLOOM_DATA"
        )
    old = json.loads(archive.read_text())["runs"]
    first = [run for run in old if run["name"] == old[0]["name"]]
    about = {
        "title": content.pop("title"),
        "compare": content.pop("compare") | {"methods": REBUILD["rows"](case, [first[0]["name"]])},
    }
    monkeypatch.chdir(folder)
    runs = check({**about, "run": content}).runs()
    new = []
    for run in runs:
        execute(run, tmp_path / str(run.seed))
        new.append(
            TABLE["record"](json.loads((tmp_path / str(run.seed) / "result.json").read_text()))
        )
    assert [run["test_sha256"] for run in new] == [run["test_sha256"] for run in first]
    for measure in first[0]["measures"]:
        means = [
            sum(sum(run["measures"][measure]) / len(run["measures"][measure]) for run in each)
            for each in (new, first)
        ]
        assert means[0] / len(first) == pytest.approx(means[1] / len(first), abs=0.5), measure


# -- kinds of tables that gave wrong answers in silence --------------------------------------------

ROWS = 120
DAYS = [datetime.date(2021, 11, 1) + datetime.timedelta(3 * row) for row in range(ROWS)]
VALUES = [40 + row * 7 % 37 for row in range(ROWS)]


def door(name: str, table: dict[str, list[Any]], folder: Path) -> Any:
    """The same columns as a file, a folder, a frame or a mapping."""
    frame = pd.DataFrame(table)
    if name == "csv":
        frame.to_csv(folder / "t.csv", index=False)
    elif name == "parquet":
        frame.to_parquet(folder / "t.parquet")
    elif name == "folder":
        (folder / "t").mkdir(exist_ok=True)
        for part in range(2):
            frame[part::2].to_csv(folder / "t" / f"{part}.csv", index=False)
    elif name == "polars":
        return pytest.importorskip("polars").DataFrame(table)
    forms = {"csv": folder / "t.csv", "parquet": folder / "t.parquet", "folder": folder / "t"}
    return forms.get(name, {"pandas": frame, "mapping": table}.get(name))


def table_with(column: str, values: list[Any]) -> dict[str, list[Any]]:
    """A table of owners and classes, one number, and a column of `values`."""
    more = [row * row % 23 / 4 for row in range(ROWS)]
    sites, labels = [["a", "b"][row % 2] for row in range(ROWS)], ["no", "no", "yes", "yes"]
    return {"more": more, column: values, "site": sites, "y": labels * (ROWS // 4)}


DOORS = ("csv", "parquet", "folder", "pandas", "polars", "mapping")


@pytest.mark.parametrize("level", [0.1, 14.62, 7.0, 1e9 + 0.1, 1e-300, 0.0])
@pytest.mark.parametrize("kind", [FederatedClassifier, FederatedRegressor])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_column_that_was_constant_changes_no_prediction(
    kind: Any, level: float, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3)).astype(dtype)
    x[:, 2] = level
    y = x[:, 0] > 0 if kind is FederatedClassifier else 3 * x[:, 0]
    model = kind("fedavg", models="linear", iterations=20, clients=2, random_state=0).fit(x, y)
    new = x.copy()
    new[:, 2] += 1
    assert model.scale_[2] == 1
    np.testing.assert_array_equal(model.predict(new), model.predict(x))


def test_numbers_that_differ_by_rounding_are_constant_and_small_or_large_ones_are_not() -> None:
    """Equal sums in another order are constant; one other value, a large offset of whole numbers,
    and numbers whose squares are 0 or infinite vary.
    """
    rng = np.random.default_rng(0)
    for same in ([0.1] * 300, [0.3, 0.1 + 0.2] * 50, [0.0] * 5, [5.0] * 5):
        assert constant(np.array(same)) and deviations(np.array(same)) == 1
    offset = 2.0**53 + 2 * (np.arange(64) % 8)
    tiny, huge = 1e-200 * rng.normal(size=50), 1e200 * rng.normal(size=50)
    for other in (np.array([0.1] * 299 + [0.2]), offset, tiny, huge, np.array([5e-324, 0.0])):
        assert not constant(other) and 0 < deviations(other) < np.inf
    np.testing.assert_allclose(deviations(tiny) / 1e-200, deviations(tiny * 1e200), rtol=1e-12)


def test_a_constant_target_is_predicted_as_it_is_and_has_no_r2() -> None:
    x, y = np.random.default_rng(0).normal(size=(300, 2)), np.full(300, 0.1)
    model = FederatedRegressor("fedavg", models="linear", iterations=5).fit(x, y)
    assert model.spread_ == 1
    np.testing.assert_allclose(model.predict(x + 9), 0.1)
    assert np.isnan(number_scores(y, y + 0.01)["r2"])


@pytest.mark.parametrize("name", DOORS)
def test_a_column_that_differs_by_rounding_is_dropped_by_every_door(
    name: str, tmp_path: Path
) -> None:
    values = [0.3 if row % 3 else 0.1 + 0.2 for row in range(ROWS)]
    given = door(name, table_with("same", values), tmp_path)
    assert read_data(given, label="y", group="site").columns == ("more",)


PACKED: dict[str, Callable[[datetime.date], str]] = {
    "day, month, year": lambda day: f"{day:%d%m%Y}",
    "month, day, year": lambda day: f"{day:%m%d%Y}",
    "two digits": lambda day: f"{day:%d%m%y}",
    "month first, two digits": lambda day: f"{day:%m%d%y}",
    "with a time": lambda day: f"{day:%d%m%Y}1030",
    "month and year": lambda day: f"{day:%m%Y}",
    "month and short year": lambda day: f"{day:%m%y}",
    "day and month": lambda day: f"{day:%d%m}",
    "no zeros": lambda day: f"{day.year}{day.month}",
    "months behind a point": lambda day: f"{day.year}.{day.month}",
    "years behind a point": lambda day: f"{day:%m.%Y}",
    "days before a point": lambda day: f"{day:%d.%m}",
}
IN_ORDER: dict[str, Callable[[datetime.date], str]] = {
    "year, month, day": lambda day: f"{day:%Y%m%d}",
    "short year first": lambda day: f"{day:%y%m%d}",
    "day of the year": lambda day: f"{day:%Y%j}",
    "with a time": lambda day: f"{day:%Y%m%d}1030",
    "Excel": lambda day: str((day - datetime.date(1899, 12, 30)).days),
    "seconds": lambda day: str((day - datetime.date(1970, 1, 1)).days * 86_400),
    "milliseconds": lambda day: str((day - datetime.date(1970, 1, 1)).days * 86_400_000),
    "months behind a point": lambda day: f"{day:%Y.%m}",
    "ordinal": lambda day: str(day.toordinal()),
}
BY_TIME = SplitColumns(time=("t",))


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("form", PACKED)
def test_packed_dates_are_no_order_of_time(form: str, name: str, tmp_path: Path) -> None:
    words = [PACKED[form](day) for day in DAYS]
    typed = name not in ("csv", "folder", "mapping")  # then zeros are lost
    values: list[Any] = [float(w) if "." in w else int(w) for w in words] if typed else words
    with pytest.raises(DataError, match=r"'t' has numbers such as .* not in the order of time"):
        read_owners(
            door(name, table_with("t", values), tmp_path), DataOptions("y", "site"), BY_TIME
        )


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("form", IN_ORDER)
def test_numbers_in_the_order_of_time_are_taken_as_they_are(
    form: str, name: str, tmp_path: Path
) -> None:
    words = [IN_ORDER[form](day) for day in DAYS]
    values: list[Any] = [float(w) if "." in w else int(w) for w in words]
    given = door(name, table_with("t", values), tmp_path)
    order = read_owners(given, DataOptions("y", "site"), BY_TIME).order
    days = [*DAYS[::2], *DAYS[1::2]] if name == "folder" else DAYS
    assert (
        order is not None
        and (np.diff(order[np.argsort(np.array(days, "datetime64[D]"), kind="stable")]) >= 0).all()
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@draws(
    start=st.integers(0, 10**7),
    step=st.integers(1, 50),
    rows=st.integers(30, 80),
    unit=st.booleans(),
)
def test_counts_are_no_packed_dates(start: int, step: int, rows: int, unit: bool) -> None:
    step = 1 if unit else step * 1000
    numbers = [start + step * row for row in range(rows)]
    assert list(moments([*map(str, numbers)], "t").values()) == numbers


def test_years_of_two_digits_are_no_order_across_a_century() -> None:
    for words in (
        ["98", "99", "00", "01"],
        [f"{year}0{month}05" for year in ("99", "00") for month in range(1, 7)],
    ):
        with pytest.raises(DataError, match="two digits"):
            moments(words, "t")


# what a reader takes for the number v, or for v / 10
AMOUNTS = (
    "{v} kg|{v}kg|{d} mmol/L|{v} mg/dl|{d} °C|{v}°|{v} min|{v} months|{v}y|{v} years old|>{v}|"
    "≥ {v}|<{v}|{d}x10^9/L|{d}×10⁹/L|{v}*|{v} (H)|{v} H|1h {v}m|{v}m 30s|5'{v}\"|5 ft {v}|"
    '\'0{v}|="{v}"|${v}|€ {v}|{v} EUR|${v}k|{v} %|1,2{v}.50 €|1,2{v} kg|{v} 1/2|{v}½|1/{v}|'
    "120/{v} mmHg|{v} mmHg|{v} bpm|{v} beats/min|{v}/min|{d} kg/m²|{v} mL/min/1.73m2|"
    "{v} ml min-1|{v} cells/µL|~{v}|ca. {v}|{d} ± 0.2|{d} (4.1)|{v} (12%)|{v} Jahre|{v} rooms|"
    "{v}\u00a0kg|{v}  kg|\u2212{v} kg|{v} weeks|2w{v}d|{v} sq ft|{v}+|{v},-|38+{v}"
)


@pytest.mark.parametrize("written", AMOUNTS.split("|"))
def test_numbers_with_a_unit_or_a_mark_are_refused_by_every_door(
    written: str, tmp_path: Path
) -> None:
    words = [written.format(v=value, d=value / 10) for value in VALUES]
    for name in DOORS:
        for label in ("y", "v"):  # a feature, and a label
            given = door(name, table_with("v", [*words]), tmp_path)
            with pytest.raises(DataError, match=r"'v'.* different .* such as .*: write"):
                read_data(given, label=label, group="site")


CATEGORIES = (
    "stage 1,stage 2,stage 3|T1,T2,T3|A1,A2,B1|10-20,20-30,30-40|1st,2nd,3rd|3 or more,1,2|"
    "<50,50-70,>70|<18,18+|0-17,18-64,65+|3*,4*,5*|1+,2+,3+,negative|"
    "1 (low),2 (medium),3 (high)|3a,3b,3c|1A,1B,2A|2 doors,4 doors|4x4,4x2|2D,3D|<=50K,>50K|"
    "'1','2'|(1),(2)|#1,#2|10 to 20,20 to 30|10-20 kg,20-30 kg|>5 kg,1-5 kg,<1 kg|1M,2M,1F|"
    "week 1,week 2|Rh+,Rh-|2x,3x"
)


@pytest.mark.parametrize("words", CATEGORIES.split("|"))
def test_categories_with_numbers_in_them_stay_categories(words: str) -> None:
    given = table_with("v", [words.split(",")[row % len(words.split(","))] for row in range(ROWS)])
    assert interpret(given, DataOptions("y", "site"))[0].kinds["v"] == "category"


@pytest.mark.parametrize(
    "many",
    [lambda k: f"{k}-{k + 9}", lambda k: f"ward {k}", lambda k: f"{k}th", lambda k: f"C{k}.1"],
)
def test_many_ranges_names_and_ordinals_stay_categories(many: Callable[[int], str]) -> None:
    given = table_with("v", [many(value) for value in VALUES])
    assert interpret(given, DataOptions("y", "site"))[0].kinds["v"] == "category"


ODD_DATES: dict[str, tuple[Callable[[int, datetime.date], str], str]] = {
    "two forms": (lambda k, day: f"{day:%d.%m.%Y}" if k % 2 else f"{day}", "several forms"),
    "numbers of Excel": (lambda k, day: f"{day}" if k % 9 else "44564", "dates, but also '44564'"),
    "a word": (lambda k, day: f"{day}" if k else "soon", "dates, but also 'soon'"),
    "month words": (lambda k, day: f"{day}" if k % 3 else "Jan", "dates, but also 'Jan'"),
    "two digits": (lambda k, day: f"{day:%d.%m.%y}", "years of two digits"),
    "some zones": (lambda k, day: f"{day} 10:00{'Z' * (k % 2)}", "with and without a time zone"),
}


@pytest.mark.parametrize("name", DOORS)
@pytest.mark.parametrize("form", ODD_DATES)
def test_dates_of_several_forms_are_an_error_by_every_name_and_door(
    form: str, name: str, tmp_path: Path
) -> None:
    write, problem = ODD_DATES[form]
    words = [write(row, day) for row, day in enumerate(DAYS)]
    for column in ("date", "timestamp", "seen"):
        given = door(name, table_with(column, [*words]), tmp_path)
        with pytest.raises(DataError, match=problem):
            read_data(given, label="y", group="site")
        with pytest.raises(DataError, match=problem):
            read_owners(given, DataOptions("y", "site"), SplitColumns(time=(column,)))
        notes = interpret(given, DataOptions("y", "site"))[0].notes  # of `fedloom data`
        assert any(re.search(problem, note) for note in notes)


@pytest.mark.parametrize("odd", ["0000-00-00", "2022-02-30", "0001-01-01 00:00+05:00"])
def test_a_date_that_does_not_exist_orders_nothing(odd: str) -> None:
    zone = " 00:00Z" if "+" in odd else ""
    with pytest.raises(DataError, match="which is no date"):
        moments([odd, *(f"{day}{zone}" for day in DAYS)], "t")
    early = ["0001-01-01", "1066-10-14", "2022-01-01", "9999-12-31"]  # pandas' ns have fewer years
    found = [*moments(early, "t").values()]
    assert found == sorted(found)


@pytest.mark.parametrize("name", DOORS)
def test_large_floats_are_a_feature_and_no_owner_by_every_door(name: str, tmp_path: Path) -> None:
    values = [6e23 * np.sin(row + 1) for row in range(ROWS)]
    for column in ("density", "station"):  # also by a name that owners have
        given = door(name, table_with(column, values), tmp_path)
        data = read_data(given, label="y", group="site")
        assert data.columns == ("more", column) and not data.notes
        order = [*range(0, ROWS, 2), *range(1, ROWS, 2)] if name == "folder" else [*range(ROWS)]
        assert data.x[:, 1].tolist() == np.array(values, np.float32)[order].tolist()
    if name not in ("csv", "folder"):
        with pytest.raises(DataError, match="do not tell whole numbers"):
            read_data(given, label="y", group="station")


def test_a_prediction_refuses_units_and_takes_large_floats(tmp_path: Path) -> None:
    large = table_with("v", [6e23 * np.sin(row + 1) for row in range(ROWS)])
    data = door("pandas", large, tmp_path)
    known: dict[str, Any] = {"label": "y", "group": "site", "rounds": 1, "models": "linear"}
    fedloom.run("fedavg", data=data, out=tmp_path / "run", **known)
    export(tmp_path / "run")
    model = load_model(tmp_path / "run" / "export" / "a")
    for name in ("csv", "pandas"):
        assert len(model.predict(door(name, large, tmp_path))) == ROWS
    with pytest.raises(DataError, match="'v' must hold a finite number"):
        model.predict(pd.DataFrame(table_with("v", [f"{value} kg" for value in VALUES])))
