"""Small CSV files as they are: every value is text, so that an id keeps its leading zeros."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.tables import is_number

_GAPS = {"", "?", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"}


def read_csv(path: Path, *, needed: Sequence[str] = ()) -> dict[str, list[str]]:
    """Column name -> the stripped text of each row, from a UTF-8 file with commas and a header.

    Raises:
        DataError: the file can't be read, has no rows, a row has another number of values than the header, or a
            name comes twice, is empty, or is needed and not there.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            names = [name.strip() for name in next(lines, [])]
            rows = []
            for row in lines:
                if row and len(row) != len(names):
                    raise DataError(
                        f"{path}, line {lines.line_num}: there must be {len(names)} values, as in the header, but "
                        f"there are {len(row)}."
                    )
                rows += [row] if row else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read as a CSV file in UTF-8 ({error}).") from error
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{path}: each column needs a name of its own, but they are called {names}.")
    for name in needed:
        if name not in names:
            raise DataError(f"{path} must have a column {name!r}, but has not.{did_you_mean(name, names)}")
    if not rows:
        raise DataError(f"{path} must have rows below its header, but has none.")
    return {
        name: [value.strip() for value in column] for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def column_values(words: Sequence[str]) -> np.ndarray:
    """(n,) float64 with NaN for gaps if all else are numbers; else words, with None for gaps.

    Gaps are empty, "?", and the usual NA, N/A, NaN, null and None.
    """
    known = {word for word in words if word not in _GAPS}
    if known and all(map(is_number, known)):
        return np.array(["nan" if word in _GAPS else word for word in words], dtype=np.float64)
    return np.array([None if word in _GAPS else word for word in words], dtype=object)


def class_numbers(words: Sequence[str], what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes, -1 where the label is a gap, and the classes' names: numbers by size, else as text.

    Raises:
        DataError: there are fewer than two classes.
    """
    known = {word for word in words if word not in _GAPS}
    names = sorted(known, key=lambda word: (float(word), word)) if all(map(is_number, known)) else sorted(known)
    if len(names) < 2:
        raise DataError(f"{what} must name at least 2 classes, but the labels there are {names}.")
    places = {name: place for place, name in enumerate(names)}
    return np.array([places.get(word, -1) for word in words], dtype=np.int64), tuple(names)
