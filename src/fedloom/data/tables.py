"""Columns of numbers and of words to one matrix of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, table_dataset

MISSING = "?"
_MOST_CATEGORIES = 1000


@dataclass(frozen=True, eq=False)
class Table:
    """A table as its file holds it: nothing is encoded, filled in or scaled yet."""

    name: str
    columns: Mapping[str, np.ndarray]
    """Name -> (n,) numbers, truth values, or objects that are text or None; without the labels."""
    y: np.ndarray
    """(n,) int64 labels, 0..K-1."""
    classes: tuple[str, ...]
    """K names."""
    test: np.ndarray | None
    """(t,) int64 row numbers of the official test split, or None if there is none."""
    groups: np.ndarray | None = None
    """(n,) int64 natural owner of each row, or None."""

    def encoded(self) -> Dataset:
        """Numbers as they are, words as columns of 0 and 1, as `encode_table` has it."""
        x, names = encode_table(self.columns)
        return table_dataset(self.name, x, self.y, self.classes, names, test=self.test, groups=self.groups)


def encode_table(columns: Mapping[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Numbers as they are, words as one column of 0 and 1 for each different word.

    Args:
        columns: name -> (n,) integers, decimals, truth values, or objects that are text or None.
            Text is stripped; "?" and missing text are a category of their own, called "?".

    Returns:
        (n, F) float32, C-contiguous, and F names: the column's own, or "column=word" in the order
        of the words.

    Raises:
        DataError: no columns, a number is missing, words that are nearly all different, or a type
            that is neither.
    """
    if not columns:
        raise DataError("A table needs at least one column besides the label, but there is none.")
    parts: list[np.ndarray] = []
    names: list[str] = []
    for name, values in columns.items():
        if values.dtype.kind in "biuf":
            parts.append(_number(name, values))
            names.append(name)
        else:
            words, part = _one_hot(name, texts(name, values))
            parts.append(part)
            names.extend(f"{name}={word}" for word in words)
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), tuple(names)


def _number(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        column = values.astype(np.float32)[:, None]
    gaps = len(column) - int(np.isfinite(column).sum())
    if gaps:
        raise DataError(_gap_text(name, gaps))
    return column


def texts(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) stripped words as objects; "?" where there is none.

    Raises:
        DataError: something is neither text nor None.
    """
    if values.dtype.kind in "US":
        values = values.astype(object)
    if values.dtype.kind != "O" or not all(v is None or isinstance(v, str) for v in values):
        raise DataError(
            f"A table holds numbers and text, but column {name!r} holds something else "
            f"({values.dtype}); drop it or turn it into numbers first."
        )
    return np.array([MISSING if v is None else v.strip() or MISSING for v in values], dtype=object)


def _one_hot(name: str, texts: np.ndarray) -> tuple[list[str], np.ndarray]:
    words, codes = np.unique(texts, return_inverse=True)
    gaps = int((texts == MISSING).sum())
    if 0 < gaps < len(texts) and all(is_number(word) for word in words if word != MISSING):
        raise DataError(_gap_text(name, gaps))
    if len(words) > _MOST_CATEGORIES:
        raise DataError(
            f"A column of text may hold at most {_MOST_CATEGORIES} different words, each of which "
            f"becomes a column, but {name!r} holds {len(words)} in {len(texts)} rows; drop it or put "
            "the words into groups first."
        )
    part = np.zeros((len(texts), len(words)), dtype=np.float32)
    part[np.arange(len(texts)), codes] = 1.0
    return list(words), part


def is_number(word: str) -> bool:
    """Whether a word can be read as a number."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _gap_text(name: str, gaps: int) -> str:
    return (
        f"Numbers must be complete and finite, but column {name!r} lacks {gaps}; fill them in, or drop "
        "the column or those rows first."
    )
