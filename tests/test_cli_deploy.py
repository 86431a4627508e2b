"""`fedloom export`, `embed` and `predict` as a new user would type them."""

from __future__ import annotations

import csv
import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedloom
from fedloom.cli import main
from fedloom.data.sources import load_raw
from fedloom.data.tables import RawTable
from fedloom.deploy import load_active, load_party

PEOPLE = [f"p{n}" for n in range(30)]


def write(path: Path, columns: dict[str, list[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of two methods, and the rows of some people at each party."""
    folder = tmp_path_factory.mktemp("finished")
    data = {"name": "breast_cancer", "clients": 2}
    fedloom.run(
        "proto-evfl",
        out=folder / "runs" / "mine",
        rounds=2,
        params={"steps": 4, "embedding_dim": 8},
        data=data,
    )
    fedloom.run(
        "split", out=folder / "runs" / "split", rounds=1, params={"embedding_dim": 8}, data=data
    )
    table = load_raw("breast_cancer")
    assert isinstance(table, RawTable)
    columns: dict[str, list[object]] = {
        name: values[:30].tolist() for name, values in table.columns.items()
    }
    write(folder / "clinic.csv", {"patient": [p.upper() for p in PEOPLE], **columns})
    write(
        folder / "lab.csv",
        {**dict(reversed(columns.items())), "patient": [*PEOPLE], "note": ["-"] * 30},
    )
    return folder


Command = Callable[..., str]


@pytest.fixture
def fedloom_(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """The command, called in a copy of that folder; what it prints, to both streams."""
    place = Path(shutil.copytree(finished, tmp_path / "place"))
    monkeypatch.chdir(place)

    def call(line: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedloom", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert (stop.value.code or 0) == code, out + err
        assert "Traceback" not in out + err
        return out + err

    return call


def test_from_a_run_to_predictions(fedloom_: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    text = fedloom_("export runs/mine --out parties")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["party-0", "party-1", "active"]
    assert "predictions match the run on 142 test rows" in text
    assert "add --force" in fedloom_("export runs/mine --out parties", code=2)
    fedloom_("export runs/mine --out parties --force")

    text = fedloom_("embed parties/party-0 clinic.csv --id patient --out e0.safetensors")
    assert "party 0: 30 rows, 8 numbers each" in text
    fedloom_("embed parties/party-1 lab.csv --id patient --out e1.safetensors")
    shutil.rmtree("parties/party-0")
    shutil.move("parties/party-1", "elsewhere")
    text = fedloom_(
        "predict parties/active clinic.csv --id patient -e 0=e0.safetensors --embeddings "
        "e1.safetensors --out p.csv"
    )
    assert "all 2 parties together: 30 rows" in text and "written  p.csv" in text
    with Path("p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["patient", "predicted", "p malignant", "p benign"]
    assert [row[0] for row in rows] == [p.upper() for p in PEOPLE]
    found = np.array([[float(p) for p in row[2:]] for row in rows])
    assert [row[1] for row in rows] == [("malignant", "benign")[k] for k in found.argmax(1)]
    counts = {
        line.split()[0]: line.split()[1]
        for line in text.splitlines()
        if line.startswith(("malignant", "benign"))
    }
    assert counts == {
        name: str([row[1] for row in rows].count(name)) for name in ("malignant", "benign")
    }

    text = fedloom_("predict elsewhere lab.csv --id patient --out alone.csv")
    assert "party 1 alone, from its prototypes: 30 rows" in text
    with Path("alone.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    alone = load_party("elsewhere").predict_alone("lab.csv")
    np.testing.assert_allclose([[float(p) for p in row[2:]] for row in rows], alone, atol=1e-7)
    assert load_active("parties/active").classes == ("malignant", "benign")

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("lab.csv").read_bytes())))
    text = fedloom_("predict elsewhere -")  # to look at, no file
    assert "… and 20 more; --out predictions.csv writes all" in text
    assert [line.split()[0] for line in text.splitlines()[2:12]] == [str(n) for n in range(1, 11)]


def test_without_ids_it_is_reported_that_nobody_checked(fedloom_: Command) -> None:
    fedloom_("export runs/mine")
    for m, rows in enumerate(("clinic.csv", "lab.csv")):
        assert "No --id" in fedloom_(f"embed runs/mine/export/party-{m} {rows} --out e{m}")
    text = fedloom_("predict runs/mine/export/active -e 0=e0 -e 1=e1")
    assert "whether their rows are of the same people was not checked" in text


def test_mistakes_get_a_sentence(fedloom_: Command) -> None:
    fedloom_("export runs/mine --out parties")
    fedloom_("export runs/split --out split")
    fedloom_("embed parties/party-0 clinic.csv --id patient --out e0")
    fedloom_("embed split/party-1 lab.csv --id patient --out s1")
    lines = Path("lab.csv").read_text().splitlines()
    Path("turned.csv").write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    fedloom_("embed parties/party-1 turned.csv --id patient --out turned")
    for line, text in [
        ("export nowhere", "nowhere is not a run's folder"),
        ("export runs", "choose one of: runs/mine, runs/split"),
        ("embed parties lab.csv --out x", "choose one of its folders: active, party-0, party-1"),
        ("embed parties/active lab.csv --out x", "is the folder of the active party"),
        ("embed parties/party-1 no.csv --out x", "no.csv is no file"),
        ("embed parties/party-1 lab.csv --id who --out x", "must have a column 'who'"),
        ("embed parties/party-1 lab.csv --out lab.csv", "lab.csv already exists; add --force"),
        ("embed parties/party-1 lab.csv --out no/x", "the folder no does not exist"),
        ("embed parties/party-1 lab.csv --id note --out x", "30 of 30 rows share an id"),
        ("predict parties/party-1", "which predicts from its own rows"),
        (
            "predict parties/party-1 lab.csv -e 0=e0",
            "use --embeddings with the active party's folder",
        ),
        ("predict split/party-1 lab.csv", "parties of split cannot predict alone"),
        ("predict parties/active", "give a file for each"),
        ("predict parties/active lab.csv -e 0=e0", "needs --id"),
        ("predict parties/active -e 0=e0", "Embeddings of party 1 are missing"),
        ("predict split/active -e 1=s1", "Parties of split cannot predict alone"),
        ("predict parties/active -e 0=e0 -e 1=s1", "were made with a folder of another export"),
        ("predict parties/active -e 1=e0", "holds embeddings of party 0, not of party 1"),
        ("predict parties/active -e 0=e0 -e 1=turned", "in another order"),
        ("predict parties/active -e 0=lab.csv", "is not a valid file of embeddings"),
        ("predict nowhere lab.csv", "nowhere is not a party's folder"),
    ]:
        said = fedloom_(line, code=2)
        assert text in said, (line, said)
    assert not Path("x").exists() and Path("lab.csv").read_text().splitlines() == lines


@pytest.mark.parametrize("command", ["export", "embed", "predict"])
def test_help_teaches_with_an_example(command: str, fedloom_: Command) -> None:
    assert f"fedloom {command} " in fedloom_(f"{command} --help")
