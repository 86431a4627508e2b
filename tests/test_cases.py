"""The cases of the documentation: their files are valid, their upper bound sees all rows, their
table pairs seeds.
"""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import methods
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
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
