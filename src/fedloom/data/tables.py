"""Raw tables: CSV files read as text, and columns of numbers or text."""

import csv
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, did_you_mean

MISSING = "?"
"""The category of missing text."""
_MOSTLY = 0.9  # of a column's words; if so many are numbers, the others are probably errors
_LARGEST = 1e30  # so that squares fit into float64 and scaled values into float32
_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_BOOLEANS = {"True": True, "true": True, "TRUE": True, "False": False, "false": False, "FALSE": False}
_MISSING_VALUES = {"", MISSING, ".", "NA", "N/A", "n/a", "#N/A", "<NA>", "NaN", "nan", "null", "NULL", "None"}


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table as in its file: not encoded, imputed or scaled."""

    name: str
    columns: Mapping[str, np.ndarray]
    """Name -> (n,) numbers, booleans, or objects that are text or None; without the labels."""
    y: np.ndarray
    """(n,) int64 labels, 0..K-1."""
    classes: tuple[str, ...]
    """K names."""
    test: np.ndarray | None
    """(t,) int64 row numbers of the official test split, or None if there is none."""
    groups: np.ndarray | None = None
    """(n,) int64 natural owner of each row, or None."""
    owners: tuple[str, ...] = ()
    """Names of the owners, if they are known."""


def read_csv(path: Path, *, needed: Sequence[str] = ()) -> dict[str, list[str]]:
    """Column name -> the stripped text of each row, from a UTF-8 file with commas and a header.

    All values stay text, so that an id keeps its leading zeros.

    Raises:
        DataError: the file is unreadable, has no rows or no commas, a row's length differs from the header's, a column
            name is empty or repeated, or a needed column is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True)
            names = [name.strip() for name in next(lines, [])]
            refuse_other_separators(path, names)
            values: list[str] = []  # of all rows, one after the other: quicker than a list for each row
            for row in lines:
                if row and len(row) != len(names):
                    raise DataError(
                        f"{path}, line {lines.line_num}: expected {len(names)} values, as in the header, but found "
                        f"{len(row)}; correct that line."
                    )
                values += row
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}). Save it as CSV in UTF-8.") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as a CSV file ({error}).") from error
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{path}: column names must be unique and not empty, but the header is {names}; rename them.")
    for name in needed:
        if name not in names:
            raise DataError(f"{path} must have a column {name!r}, but has {names}.{did_you_mean(name, names)}")
    if not values:
        raise DataError(f"{path} must have rows below its header, but has none.")
    stripped = {word: word.strip() for word in set(values)}  # equal words become one object, whose hash is known
    values = [*map(stripped.__getitem__, values)]
    return {name: values[place :: len(names)] for place, name in enumerate(names)}


def refuse_other_separators(path: Path, names: Sequence[str]) -> None:
    """Raise DataError if the only column name looks like several that no comma separates."""
    for mark, word in _OTHER_SEPARATORS.items():
        if len(names) == 1 and mark in names[0]:
            raise DataError(
                f"{path}: the columns are separated by {word}. Separate them by commas, and write decimals with a "
                "point."
            )


def text_values(words: Sequence[str]) -> np.ndarray:
    """(n,) objects: the words, or None for a missing value: empty, "?", NA, N/A, NaN, null or None."""
    values = {word: None if word in _MISSING_VALUES else word for word in set(words)}
    return np.array([*map(values.__getitem__, words)], dtype=object)


def column_values(words: Sequence[str]) -> np.ndarray:
    """(n,) float64 with NaN for missing values if all others are numbers, else `text_values`."""
    try:
        values = {word: np.nan if word in _MISSING_VALUES else float(word) for word in set(words)}  # most words repeat
    except ValueError:
        return text_values(words)
    numbers = np.array([*map(values.__getitem__, words)])
    return text_values(words) if np.isnan(numbers).all() else numbers


def typed_values(words: Sequence[str]) -> np.ndarray:
    """`column_values`, or (n,) booleans if all words are true or false."""
    values = column_values(words)
    boolean = values.dtype.kind == "O" and all(value in _BOOLEANS for value in values)
    return np.array([_BOOLEANS[value] for value in values]) if boolean else values


def class_numbers(words: Sequence[str], what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes, -1 for a missing label, and the classes' names, sorted as numbers if all are, else as text.

    Raises:
        DataError: fewer than two classes.
    """
    known = set(words) - _MISSING_VALUES
    names = sorted(known, key=lambda word: (float(word), word)) if all(map(is_number, known)) else sorted(known)
    if len(names) < 2:
        raise DataError(f"{what} must have at least 2 classes, but its labels are {names}.")
    places = {name: place for place, name in enumerate(names)}
    return np.array([places.get(word, -1) for word in words], dtype=np.int64), tuple(names)


def texts(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) stripped words as objects, `MISSING` for None and empty text.

    Raises:
        DataError: something is neither text nor None.
    """
    if values.dtype.kind in "US":
        values = values.astype(object)
    kinds = set(map(type, values))
    if values.dtype.kind != "O" or not all(issubclass(kind, str | NoneType) for kind in kinds):
        raise DataError(
            f"Columns must have numbers or text, but {name!r} has other values ({values.dtype}); drop or convert it."
        )
    words = {v: MISSING if v is None else v.strip() or MISSING for v in different(values)}
    return np.array([words[v] for v in values.tolist()], dtype=object)


def different(values: np.ndarray) -> Collection[Any]:
    """The values (n,) without repetitions, unsorted if they are objects; np.unique would sort them, which is slow."""
    if values.dtype.kind != "O":
        return np.unique(values)
    try:
        return set(values.tolist())
    except TypeError:  # lists have no hash
        return values


def is_missing(word: str) -> bool:
    """Whether a word stands for a missing value."""
    return word in _MISSING_VALUES


def is_number(word: str) -> bool:
    """Whether a word can be read as a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def typed(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) numbers unchanged, numbers in text with gaps as float64 with NaN, or else stripped words.

    Raises:
        DataError: a value is neither a number nor text.
    """
    if values.dtype.kind in "biuf":
        return values
    words = texts(name, values)
    known = words[words != MISSING]
    numbers = 0 < len(known) < len(words) and all(map(is_number, different(known)))
    return numbers_of(name, words) if numbers else words


def numbers_of(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) float64, with NaN for missing values."""
    if values.dtype.kind in "biuf":
        numbers: np.ndarray = values.astype(np.float64)
    else:
        words = texts(name, values)
        bad = [word for word in different(words) if word != MISSING and not is_number(word)]
        if bad:
            raise DataError(f"Column {name!r} must have numbers, but has {min(bad)!r}; correct or drop those rows.")
        numbers = np.array(["nan" if word == MISSING else word for word in words], dtype=np.float64)
    outside = int((np.abs(numbers) > _LARGEST).sum())
    if outside:
        raise DataError(
            f"Numbers must be within ±{_LARGEST:.0e}, but column {name!r} has {outside} outside; correct them."
        )
    return numbers


def refuse_mistakes(name: str, known: np.ndarray) -> None:
    """Raise DataError if a column's `known` words (n,) are numbers but for a few."""
    odd = {word: count for word, count in Counter(known.tolist()).items() if not is_number(word)}
    wrong = sum(odd.values())
    if odd and len(known) - wrong >= _MOSTLY * len(known):
        raise DataError(
            f"Column {name!r} has numbers, but {wrong} of its {len(known)} values are not, such as "
            f"{next(iter(odd))[:40]!r}; "
            "correct them, or leave them empty (if the numbers are codes, prefix each with a letter)."
        )
