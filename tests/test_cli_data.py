"""`fedloom data` on a file: what it understands, and settings that say the same."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from fedloom.cli.app import main
from fedloom.experiment.plan.build import build, data_of
from fedloom.experiment.plan.node_party import build_party, for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check, read
from fedloom.remote.node.config import NodeData


def command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fedloom", "data", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = ["patient_id,hospital,age,sex,disease"]
    for row in range(60):
        age = "" if row == 5 else 30 + row * 7 % 40
        lines.append(
            f"p{row:02},{'ABC'[row % 3]},{age},{'fm'[row % 2]},{'yes' if row % 4 == 0 else 'no'}"
        )
    Path("my.csv").write_text("\n".join(lines) + "\n")
    return Path("my.csv")


def test_a_file_is_shown_with_settings_that_work(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, "my.csv") == 0
    shown = capsys.readouterr().out
    assert "label     disease (a guess): no (45), yes (15)" in shown
    assert "owners    perhaps hospital: --group hospital" in shown
    assert (
        "dropped   patient_id: an identifier by its name" in shown and "missing   age (1)" in shown
    )
    settings = shown[shown.index("[data]") :]
    assert tomllib.loads(settings)["data"] == {
        "name": "my.csv",
        "label": "disease",
        "group": "hospital",
        "drop": ["patient_id"],
        "missing": "median",
    }
    Path("my.toml").write_text(settings)
    dataset, split = data_of(read("my.toml").run)
    assert len(split.shards) == 3 and dataset.columns == ("age", "sex=f", "sex=m")


def test_sections_for_nodes_build_a_party_of_each_owner(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        command(monkeypatch, "my.csv", "--label", "disease", "-s", "data.test=0.5", "--at-nodes")
        == 0
    )
    first, _, second = capsys.readouterr().out.partition("# For node.toml")
    for_run, for_node = (tomllib.loads(text)["data"] for text in (first, f"#{second}"))
    assert for_run["row_schema"] == {
        "columns": ["age", {"name": "sex", "categories": ["f", "m"]}],
        "label": "disease",
        "classes": ["no", "yes"],
    }
    assert for_node == {
        "my": {
            "rows": "my.csv",
            "label": "disease",
            "classes": ["no", "yes"],
            "keep": ["age", "sex"],
            "group": "hospital",
            "missing": "median",
            "owner": "A",
            "test": 0.5,
            "categories": {"sex": ["f", "m"]},
        }
    }
    values = {
        "method": "local",
        "rounds": 1,
        "models": {"pool": ["linear"]},
        "data": {**for_run, "clients": 3},
    }
    run = check({"run": values}).run
    own = NodeData.model_validate(for_node["my"]).own
    party = build_party(
        for_nodes(build(run, PrivateData())), 0, PrivateData(rows=table, own=own)
    ).party
    assert party.context.data is not None
    # half of each class, rounded up
    assert (len(party.context.data), len(party.context.tests["own"])) == (9, 11)
    assert command(monkeypatch, "digits", "--at-nodes") == 2


def test_dates_are_shown_and_the_settings_name_them(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rows = table.read_text().splitlines()
    texts = [f"{row},2024-01-{place % 28 + 1:02} 10:{place:02}" for place, row in enumerate(rows)]
    table.write_text("\n".join([f"{first},seen", *texts, ""]))
    assert command(monkeypatch, "my.csv", "--label", "disease") == 0
    shown = capsys.readouterr().out
    assert "features  dates (1): seen" in shown and "note      Column 'seen' has dates" in shown
    settings = shown[shown.index("[data]") :]
    assert tomllib.loads(settings)["data"]["encode"] == {"seen": "date"}
    Path("my.toml").write_text(settings)
    assert data_of(read("my.toml").run)[0].columns[3:5] == ("seen year", "seen month sin")
    assert command(monkeypatch, "my.csv", "--label", "disease", "-s", "data.encode.seen=text") == 0
    assert "texts, hashed (1): seen" in capsys.readouterr().out
    assert command(monkeypatch, "my.csv", "--label", "disease", "--at-nodes") == 0
    shown = capsys.readouterr().out
    assert '{ name = "seen", encode = "date" }' in shown and 'encode."seen" = "date"' in shown
    assert command(monkeypatch, "my.csv", "-s", "data.drop=seen,sex") == 2
    assert "must be a list, such as ['seen', 'sex']" in capsys.readouterr().err


def test_owners_and_settings_are_shown(
    table: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--label",
        "disease",
        "--group",
        "hospital",
        "-s",
        "data.missing=indicator",
        "-s",
        'data.unseen=["B"]',
    ]
    assert command(monkeypatch, "my.csv", *options) == 0
    shown = capsys.readouterr().out
    assert "(a guess)" not in shown and [
        line.split()[:2] for line in shown.splitlines() if line[:2] in ("A ", "B ", "C ")
    ] == [
        ["A", "20"],
        ["C", "20"],
        ["B", "20"],
    ]
    assert command(monkeypatch, "my.csv", *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["owners"]["A"] == [15, 5] and found["classes"] == {"no": 45, "yes": 15}
    assert found["settings"]["data"]["unseen"] == ["B"] and found["features"] == {
        "age": "number",
        "sex": "category",
    }
    assert command(monkeypatch, "my.csv", *options, "--clients", "3") == 0
    assert "unseen in training: B\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["my.csv", "--label", "diseases"], "data.label names the column 'diseases'"),
        (["my.csv", "--group", "clinic"], "data.group names the column 'clinic'"),
        (["none.csv"], "there is no file or folder none.csv"),
        (["my.csv", "-s", "data.missing=mean"], "missing"),
        (["my.csv", "-s", 'data.unseen=["B"]'], "--group"),
    ],
)
def test_mistakes_are_named(
    table: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    assert command(monkeypatch, *words) != 0
    assert message in " ".join(capsys.readouterr().err.split())
