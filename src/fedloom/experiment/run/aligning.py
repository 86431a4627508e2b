"""Aligns CSV files of several parties: writes them with the same ids in the same order.

A file is read once for its ids and row offsets. Rows are copied as bytes, so quotes and decimals do
not change, and files may be larger than memory.
"""

import csv
import mmap
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.alignment import Alignment, Progress, align, near_misses
from fedloom.data.columns import RawColumn
from fedloom.experiment.run.record import write_json
from fedloom.support.paths import write_atomically

_SHOWN = 20  # columns that an error names
_BOM = b"\xef\xbb\xbf"
REPORT = "alignment.json"


@dataclass(frozen=True)
class Table:
    """One party's file.

    Attributes:
        path: of the file.
        column: the id column.
        ids: (n,) as written; see `RawColumn.text`.
        header: the first record, in bytes, without a byte order mark.
        starts, ends: (n,) int64 offsets of each row in bytes.
        seen: size and modification time of the file when it was read.
    """

    path: Path
    column: str
    ids: list[str]
    header: bytes
    starts: np.ndarray
    ends: np.ndarray
    seen: tuple[int, int]

    @property
    def name(self) -> str:
        """The party's name."""
        return self.path.stem

    def copy(self, rows: np.ndarray, target: Path) -> None:
        """Write the header and these rows, in this order."""
        newline = b"\r\n" if self.header.endswith(b"\r\n") else b"\n"
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            records = (data[self.starts[row] : self.ends[row]] for row in rows)
            write_atomically(
                target,
                (r if r.endswith(b"\n") else r + newline for r in chain([self.header], records)),
            )


def align_files(
    files: Sequence[Path],
    columns: Sequence[str],
    folder: Path,
    backend: str,
    progress: Progress,
    force: bool = False,
) -> dict[str, Any]:
    """Align the rows of files; write `<stem>.aligned.csv` and `<stem>.unaligned.csv` for each, and
    alignment.json.

    Args:
        files: of two parties or more, comma-separated, UTF-8, with a header; the first is the
            active party's.
        columns: the name of the id column, one for all files or one for each.
        folder: to write to.
        backend: see `align`.
        progress: called after each step.
        force: overwrite existing results.

    Returns:
        The content of alignment.json: backend, counts and files of the parties, and what each
        learned, no ids; besides, `notes` on ids that differ in writing only, each with one example.

    Raises:
        ConfigError: the arguments are inconsistent, results exist already, or cannot be written.
        DataError: a file cannot be read, has no such column, or its ids cannot be aligned.
    """
    if len(files) < 2:
        raise ConfigError(f"alignment needs the files of at least two parties, not {len(files)}")
    if len(columns) not in (1, len(files)):
        raise ConfigError(
            f"give --id once for all files, or once for each of the {len(files)} files, not "
            f"{len(columns)} times"
        )
    columns = list(columns) * (len(files) if len(columns) == 1 else 1)
    targets = _targets(files, folder, force)
    tables = [read(file, column) for file, column in zip(files, columns, strict=True)]
    names = [table.name for table in tables]
    found = align(
        [table.ids for table in tables],
        backend=backend,
        names=names,
        local=range(len(tables)),
        progress=progress,
    )
    for table in tables:
        if _stamp(table.path) != table.seen:
            raise DataError(
                f"{table.path} changed while the ids were aligned; run the command again"
            )
    report = _report(found, tables, targets)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for table, rows, rest, (aligned, unaligned) in zip(
            tables, found.aligned, found.rest, targets, strict=True
        ):
            table.copy(rows, aligned)
            table.copy(rest, unaligned)
        write_json(folder / REPORT, report)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror}): choose another --out"
        ) from None
    return report | {"notes": near_misses([table.ids for table in tables], names)}


def read(path: Path, column: str) -> Table:
    """The ids and row offsets of a CSV file.

    Raises:
        DataError: the file cannot be read as CSV in UTF-8, has no such column or no rows, or a row
            has too few or too many fields.
    """
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    ids: list[str] = []
    starts, ends = array("q"), array("q")
    with path.open("rb") as file:
        lines = _Lines(file, path)
        records = csv.reader(lines, strict=True)
        try:
            header = next(records, [])
            place = _column(path, header, column)
            body = lines.at
            while True:
                start = lines.at
                record = next(records, None)
                if record is None:
                    break
                if not record:  # an empty line
                    continue
                if len(record) != len(header):
                    raise DataError(
                        f"{path}, line {records.line_num}: {len(record)} fields, but the header "
                        f"has {len(header)}; fix the row, or quote fields that contain commas"
                    )
                ids.append(record[place])
                starts.append(start)
                ends.append(lines.at)
        except csv.Error as error:
            raise DataError(
                f"{path}, line {records.line_num}: {error}; it must be comma-separated CSV"
            ) from error
        file.seek(0)
        first = file.read(body).removeprefix(_BOM)
    if not ids:
        raise DataError(f"{path} has a header but no rows")
    return Table(
        path,
        column,
        RawColumn.of(column, ids).text,
        first,
        np.array(starts),
        np.array(ends),
        _stamp(path),
    )


class _Lines:
    """Iterates over the lines of a file as text; `at` is the offset after the last one."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file, self._path, self.at = file, path, 0

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(self._file, 1):
            self.at += len(line)
            try:
                yield (line.removeprefix(_BOM) if number == 1 else line).decode()
            except UnicodeDecodeError:
                raise DataError(
                    f"{self._path}, line {number} is not UTF-8 text; save the file as CSV UTF-8"
                ) from None


def _column(path: Path, header: Sequence[str], column: str) -> int:
    """The index of the id column."""
    names = [name.strip() for name in header]
    if not names:
        raise DataError(
            f"{path} must begin with a line of column names, but its first line is empty"
        )
    _refuse_other_separators(path, names)
    if names.count(column) == 1:
        return names.index(column)
    if column in names:
        raise DataError(
            f"{path} has {names.count(column)} columns called {column!r}; rename all but one"
        )
    shown = ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    )
    raise DataError(f"{path} has no column {column!r}; it has: {shown}")


def _targets(files: Sequence[Path], folder: Path, force: bool) -> list[tuple[Path, Path]]:
    """The two output paths of each party, after checking that they can be written."""
    stems = [file.stem for file in files]
    same = sorted({stem for stem in stems if stems.count(stem) > 1})
    if same:
        raise ConfigError(
            f"outputs are named after the files, but several are named {', '.join(same)}: rename "
            "them to distinct names"
        )
    targets = [(folder / f"{stem}.aligned.csv", folder / f"{stem}.unaligned.csv") for stem in stems]
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not place.is_dir():
        raise ConfigError(
            f"cannot write to {folder}, because {place} is a file: choose another --out"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write to {place}, which is read-only: choose another --out")
    every = [*chain(*targets), folder / REPORT]
    inputs = {file.resolve() for file in files}
    for target in every:
        if target.resolve() in inputs:
            raise ConfigError(f"{target} is both an input and an output: choose another --out")
        if target.exists() and not force:
            raise ConfigError(
                f"{target} already exists: add --force to replace it, or choose another --out"
            )
    return targets


def _report(
    found: Alignment, tables: Sequence[Table], targets: Sequence[tuple[Path, Path]]
) -> dict[str, Any]:
    parties = [
        {
            "name": table.name,
            "id": table.column,
            **count._asdict(),
            "files": [target.name for target in pair],
        }
        for table, count, pair in zip(tables, found.counts, targets, strict=True)
    ]
    return {"backend": found.backend, "parties": parties, "learned": list(found.learned)}


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _refuse_other_separators(path: Path, names: Sequence[str]) -> None:
    """Raise DataError if the only column name looks like several that no comma separates."""
    for mark, word in {";": "semicolons", "\t": "tabs", "|": "vertical bars"}.items():
        if len(names) == 1 and mark in names[0]:
            raise DataError(
                f"{path}: the columns are separated by {word}. Separate them by commas."
            )
