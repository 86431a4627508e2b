"""Large tables: the text of numbers is read again where it is needed, and few copies of a table are
held.
"""

import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from fedloom.core.errors import DataError
from fedloom.data import hub, tables
from fedloom.data.columns import OnDisk, RawColumn, joined
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import plain_own, undo
from fedloom.data.grammar import Grammar
from fedloom.data.options import DataOptions
from fedloom.data.own import encoded, interpret
from fedloom.data.tables import read_csv

CELLS = {
    "plain": ["1", "2.50", "-3e2", ".5"],
    "gaps": ["NA", "", "7", " 8 "],
    "late word": ["1", "2", "3", "north"],
    "words": ["north", "NA", "south", "1"],
    "codes": ["007", "1", "23", "4"],
    "zeros": ["1.0", "2.0", "NA", "3.0"],
    "flags": ["True", "False", "True", "NA"],
    "empty": ["", "", "NA", ""],
    "huge": ["9007199254740993", "9007199254740992", "1", "2"],
    "infinite": ["1e400", "1", "2", "3"],
    "late inf": ["1", "2", "3", "inf"],
    "commas": ["1,5", "2,5", "NA", "3,5"],
}


@pytest.fixture
def of_large_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every file counts as large, and is read in small pieces."""
    monkeypatch.setattr(tables, "LARGE", -1)
    monkeypatch.setattr(tables, "BLOCK", 400)
    yield


def written(path: Path, repeat: int = 30) -> Path:
    """A file in which each cell is the first of `repeat` rows, whose others are the column's first
    cell.
    """
    rows = [
        [cells[place if not i else 0] for cells in CELLS.values()]
        for place in range(4)
        for i in range(repeat)
    ]
    path.write_text("\n".join(";".join(row) for row in [[*CELLS], *rows]) + "\n")
    return path


def seen(column: RawColumn) -> list[object]:
    """All that is read from a column."""
    codes, names = column.codes()
    values = column.values
    shown = values.tolist() if values.dtype.kind == "O" else values.astype(float).tobytes()
    return [
        column.text,
        column.words.tolist(),
        [*column.missing],
        column.missing_words,
        codes.tolist(),
        names,
        shown,
        column.is_number,
        column.is_text,
        dict(column.counts),
        [x.tobytes() for x in column.numbers()],
        len(column),
        column.is_text and column.padded,
    ]


@pytest.mark.parametrize("grammar", [Grammar(), Grammar(decimal=","), Grammar(("7", "1"))])
def test_columns_of_a_large_file_are_those_of_a_small_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grammar: Grammar
) -> None:
    file = written(tmp_path / "t.csv")
    small = read_csv(file, grammar=grammar)
    monkeypatch.setattr(tables, "LARGE", -1)
    monkeypatch.setattr(tables, "BLOCK", 400)
    large = read_csv(file, grammar=grammar)
    assert {name: seen(column) for name, column in large.items()} == {
        name: seen(c) for name, c in small.items()
    }
    rows = np.array([119, 3, 40])
    for name, column in large.items():
        assert seen(column.take(rows)) == seen(small[name].take(rows))
        assert seen(joined([column, small[name], column])) == seen(joined([small[name]] * 3))
    if grammar == Grammar():
        held = {name for name, column in large.items() if isinstance(column.held, OnDisk)}
        assert held == {"plain", "gaps", "codes", "zeros", "huge", "infinite"}
        assert not any(isinstance(column.held, OnDisk) for column in small.values())


@pytest.mark.usefixtures("of_large_files")
def test_a_file_that_changes_is_not_read_again(tmp_path: Path) -> None:
    column = read_csv(written(tmp_path / "t.csv"))["plain"]
    os.utime(tmp_path / "t.csv", ns=(0, 0))
    with pytest.raises(DataError, match="has changed while it was read"):
        column.text  # noqa: B018
    (tmp_path / "t.csv").unlink()
    with pytest.raises(DataError, match="cannot be read again"):
        column.text  # noqa: B018


def test_a_table_is_held_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays and objects of Python, beside which Arrow has one piece of the file."""
    monkeypatch.setattr(tables, "LARGE", -1)
    monkeypatch.setattr(tables, "BLOCK", 1 << 16)
    monkeypatch.setattr(hub, "BATCH", 1000)
    rng, rows = np.random.default_rng(0), 30_000
    columns: dict[str, np.ndarray] = {f"x{i}": rng.normal(size=rows).round(4) for i in range(10)}
    columns |= {"label": rng.integers(2, size=rows), "owner": rng.integers(10, size=rows)}
    csv.write_csv(pa.table(columns), tmp_path / "t.csv")
    parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    options = DataOptions(label="label", group="owner")
    read = [lambda kind=kind: plain(tmp_path / f"t.{kind}", options) for kind in ("csv", "parquet")]
    warm = [one() for one in read]  # imports
    for one, first in zip(read, warm, strict=True):
        tracemalloc.start()
        try:
            again = one()
            # label and owner are a fifth
            assert tracemalloc.get_traced_memory()[1] < 2.2 * 80 * rows
        finally:
            tracemalloc.stop()
        assert np.array_equal(again.x, first.x) and np.array_equal(again.x, warm[0].x)


def plain(source: object, options: DataOptions) -> Dataset:
    """The rows of a table of which no other copy is held."""
    found, _ = interpret(source, options)
    columns = dict(found.table.columns)
    found = replace(found, table=replace(found.table, columns={}))
    return plain_own(found, columns)


def test_plain_columns_are_those_of_encoded_ones_undone() -> None:
    rng, rows = np.random.default_rng(1), 200
    frame = {
        "number": [None, *rng.normal(size=rows - 1)],
        "large": 1e9 + np.arange(rows) % 3,
        "word": [None, *rng.choice(["a", "b", "?"], rows - 1)],
        "flag": rng.integers(2, size=rows).astype(bool),
        "label": rng.normal(size=rows),
        "owner": rng.choice(["n", "s"], rows),
    }
    options = DataOptions(label="label", group="owner", missing="indicator", missing_words=())
    found, images = interpret(frame, options)
    expected, seen_ = undo(encoded(found, images)), plain(frame, options)
    assert seen_.x.tobytes() == expected.x.tobytes() and np.array_equal(seen_.y, expected.y)
    for name in ("columns", "words", "owners", "classes", "fill", "notes", "label"):
        assert getattr(seen_, name) == getattr(expected, name), name
