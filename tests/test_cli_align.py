"""`fedloom align` as a new user would type it."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.cli import main
from fedloom.data.alignment import align
from fedloom.experiment.run import aligning

# Byte order mark, CRLF, quotes, a line break in a field, no newline at the end; and a plain file
# with other columns.
CLINIC = (
    b'\xef\xbb\xbfpatient,age,note\r\nP 1,30,"a, '
    b'""b"""\r\np2,040,"two\r\nlines"\r\n\r\nP3,50,caf\xc3\xa9'
)
LAB = b'x,subject_no\n1.50,p3\n2,"  p  1 "\n3,q9\n'


@pytest.fixture
def fedloom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The command, called in a folder with two files; what it prints, to both streams."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clinic.csv").write_bytes(CLINIC)
    (tmp_path / "lab.csv").write_bytes(LAB)

    def call(*arguments: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedloom", "align", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert (stop.value.code or 0) == code, out + err
        return out + err

    return call


IDS = ["--id", "patient", "--id", "subject_no"]


@pytest.mark.parametrize("backend", ["openmined", "plain"])
def test_two_files(backend: str, fedloom: Callable[..., str], tmp_path: Path) -> None:
    text = fedloom("clinic.csv", "lab.csv", *IDS, "--out", "a/b", "--backend", backend)
    out = tmp_path / "a" / "b"
    assert [
        line.split() for line in text.splitlines() if line.startswith(("clinic  ", "lab  "))
    ] == [
        ["clinic", "3", "2", "1"],
        ["lab", "3", "2", "1"],
    ]
    assert ("Nothing was private" in text) == (backend == "plain")
    assert ("1/4  lab, shard 1 of 1: request" in text) == (backend == "openmined")

    clinic, lab = ((out / f"{name}.aligned.csv").read_bytes() for name in ("clinic", "lab"))
    header, one, three = b"patient,age,note\r\n", b'P 1,30,"a, ""b"""\r\n', b"P3,50,caf\xc3\xa9\r\n"
    first, second = (b'2,"  p  1 "\n', b"1.50,p3\n")
    assert (clinic, lab) in [
        (header + one + three, b"x,subject_no\n" + first + second),
        (header + three + one, b"x,subject_no\n" + second + first),
    ]
    assert (out / "clinic.unaligned.csv").read_bytes() == header + b'p2,040,"two\r\nlines"\r\n'
    assert (out / "lab.unaligned.csv").read_bytes() == b"x,subject_no\n3,q9\n"

    report = json.loads((out / "alignment.json").read_text())
    assert report["backend"] == backend and all(sentence in text for sentence in report["learned"])
    assert report["parties"][1] == {
        "name": "lab", "id": "subject_no", "rows": 3, "aligned": 2, "unaligned": 1,
        "files": ["lab.aligned.csv", "lab.unaligned.csv"],
    }  # fmt: skip
    assert len(list(out.iterdir())) == 5  # nothing else, no drafts


def test_a_note_on_ids_is_shown_and_not_kept(fedloom: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,x\n71001,1\n71002,2\n")
    (tmp_path / "b.csv").write_text("id,y\n071001,1\n71002,2\n")
    text = fedloom("a.csv", "b.csv", "--id", "id", "--out", "o")
    assert "differ from one of a in writing only, such as '071001' and '71001'" in " ".join(
        text.split()
    )
    assert "71001" not in (tmp_path / "o" / "alignment.json").read_text()


def test_three_files_of_many_rows(fedloom: Callable[..., str], tmp_path: Path) -> None:
    whom = {"a": range(0, 300), "b": range(100, 400), "c": range(399, 50, -1)}
    for name, people in whom.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["id", name], *([f"p{i}", f"{name}, {i}"] for i in people)])
    fedloom("a.csv", "b.csv", "c.csv", "--id", "id", "--out", "o")
    rows = {}
    for name in whom:
        with (tmp_path / "o" / f"{name}.aligned.csv").open(newline="") as file:
            header, *rows[name] = csv.reader(file)
        assert header == ["id", name]
        assert all(value == f"{name}, {who[1:]}" for who, value in rows[name])
    order = [who for who, _ in rows["a"]]
    assert sorted(order) == sorted(f"p{i}" for i in range(100, 300)) and order != sorted(order)
    assert all([who for who, _ in rows[name]] == order for name in "bc")


def test_force_replaces_and_without_it_nothing_is_touched(
    fedloom: Callable[..., str], tmp_path: Path
) -> None:
    command = ["clinic.csv", "lab.csv", *IDS, "--backend", "plain", "--out", "o"]
    fedloom(*command)
    (tmp_path / "o" / "lab.aligned.csv").write_text("old")
    assert "already exists: add --force" in fedloom(*command, code=2)
    assert (tmp_path / "o" / "lab.aligned.csv").read_text() == "old"
    fedloom(*command, "--force")
    assert len((tmp_path / "o" / "lab.aligned.csv").read_text().splitlines()) == 3


def test_nobody_in_common_is_reported(fedloom: Callable[..., str], tmp_path: Path) -> None:
    text = fedloom("clinic.csv", "lab.csv", "--id", "patient", "--id", "x", "--out", "o")
    assert "No id is in every file." in text
    assert (tmp_path / "o" / "clinic.aligned.csv").read_bytes() == b"patient,age,note\r\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["clinic.csv", "lab.csv", "--id", "patient"],
            "lab.csv has no column 'patient'; it has: x, subject_no",
        ),
        (["clinic.csv", "--id", "patient"], "files of at least two parties, not 1"),
        (
            ["clinic.csv", "lab.csv", *IDS, "--id", "third"],
            "once for each of the 2 files, not 3 times",
        ),
        (["clinic.csv", "nowhere.csv", "--id", "patient"], "there is no file nowhere.csv"),
        (["clinic.csv", "x/clinic.csv", "--id", "patient"], "several are named clinic"),
        (
            ["clinic.csv", "lab.csv", *IDS, "--backend", "open"],
            "The backend must be openmined or plain, not 'open'",
        ),
        (["clinic.csv", "lab.csv"], "--id"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], text: str, fedloom: Callable[..., str], tmp_path: Path
) -> None:
    said = fedloom(*arguments, "--out", "o", code=2)
    assert text in said and "Traceback" not in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "must begin with a line of column names"),
        (b"patient,y\n", "has a header but no rows"),
        (b"patient;y\na;1\n", "columns are separated by semicolons. Separate them by commas"),
        (b"patient,patient\na,b\n", "has 2 columns called 'patient'"),
        (b"patient,y\na,1\nb,1,2\n", "bad.csv, line 3: 3 fields, but the header has 2"),
        (b"patient,y\na,1\nb,\xff\n", "bad.csv, line 3 is not UTF-8 text"),
        (b'patient,y\na,1\nb,"open\n', "unexpected end of data"),
        (
            b"patient,y\na,1\nA ,2\n,3\n",
            "bad: 1 of 3 rows lack an id (3, counted from 1) and 2 of 3 rows share an id",
        ),
        ("patient,y\n".encode("utf-16"), "bad.csv, line 1 is not UTF-8 text"),
        (b",".join(b"c%d" % i for i in range(30)) + b"\n", "c18, c19 and 10 more"),
    ],
)
def test_files_that_cannot_be_read(
    content: bytes, text: str, fedloom: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    said = fedloom("clinic.csv", "bad.csv", "--id", "patient", "--out", "o", code=2)
    assert text in said and "Traceback" not in said
    assert not (tmp_path / "o").exists()


def test_an_input_is_never_written_over(fedloom: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "lab.csv").rename(tmp_path / "clinic.aligned.csv")
    said = fedloom("clinic.csv", "clinic.aligned.csv", *IDS, "--out", ".", "--force", code=2)
    assert "is both an input and an output" in said
    assert (tmp_path / "clinic.aligned.csv").read_bytes() == LAB


def test_a_place_that_cannot_be_written_is_reported_before_anything_is_matched(
    fedloom: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["clinic.csv", "lab.csv", *IDS, "--backend", "plain", "--force", "--out"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "clinic.aligned.csv").mkdir()
    said = fedloom(*command, "full", code=2)
    assert "cannot write to" in said and "Traceback" not in said
    monkeypatch.setattr(aligning, "align", lambda *_, **__: pytest.fail("it went on"))
    for out in ("lab.csv", "lab.csv/a/b"):
        said = fedloom(*command, out, code=2)
        assert "lab.csv is a file" in said and "Traceback" not in said
    monkeypatch.setattr("os.access", lambda place, mode: not mode & os.W_OK)
    assert "which is read-only: choose another --out" in fedloom(*command, "o", code=2)
    assert (tmp_path / "lab.csv").read_bytes() == LAB and not (tmp_path / "o").exists()


def test_a_file_that_changes_meanwhile(
    fedloom: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Any = align

    def change(*given: object, **named: object) -> object:
        (tmp_path / "lab.csv").write_bytes(LAB + b"4,late\n")
        return real(*given, **named)

    monkeypatch.setattr(aligning, "align", change)
    said = fedloom("clinic.csv", "lab.csv", *IDS, "--out", "o", code=2)
    assert "lab.csv changed while the ids were aligned; run the command again" in said
    assert not (tmp_path / "o").exists()


def test_help_teaches(fedloom: Callable[..., str]) -> None:
    said = fedloom("--help")
    assert "fedloom align clinic.csv lab.csv --id patient --out aligned" in said
    assert "openmined" in said and "plain" in said
