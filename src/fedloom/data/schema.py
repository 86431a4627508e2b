"""Rows of one's own, read by a form that all parties of a federation share: what fits it is taken, all else refused.

What is wrong is told by file, column and line, for whoever has the file; no text here holds one of its values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.csvfiles import read_csv
from fedloom.data.dataset import Dataset, Kind, image_dataset, level, table_dataset
from fedloom.data.folders import is_image
from fedloom.data.hub import Hints, read_raw_files
from fedloom.data.images import decode_images
from fedloom.data.tables import MISSING, Table, is_number, texts

SHOWN = 5
"""How many lines of a file an error names."""


@dataclass(frozen=True)
class Column:
    """A column of a table: numbers; or words, of which these are all that there may be."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What it is called once it is numbers: each word has a column of 0 and 1."""
        return tuple(f"{self.name}={word}" for word in self.words) or (self.name,)


@dataclass(frozen=True)
class DataSchema:
    """What the rows of all parties look like.

    Attributes:
        classes: K names.
        label: the column of the classes, in a table.
        table: the columns of a table, in order; none for images.
        shape: (C, H, W) of an image.
    """

    kind: Kind
    classes: tuple[str, ...]
    label: str = "label"
    table: tuple[Column, ...] = ()
    shape: tuple[int, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """F names of a table's numbers."""
        return tuple(name for column in self.table for name in column.names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one row."""
        return self.shape if self.kind == "image" else (len(self.columns),)

    def level(self, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Shift and scale: of images always the same; of a table those of some rows (n, F), or 0 and 1."""
        if self.kind == "image":
            return np.full(self.shape[0], 127.5, np.float32), np.full(self.shape[0], 127.5, np.float32)
        if x is None:
            return np.zeros(len(self.columns), np.float32), np.ones(len(self.columns), np.float32)
        return level(x)


def read_rows(path: Path, form: DataSchema, name: str) -> Dataset:
    """Labelled rows: a CSV or Parquet file, or a folder with one folder of PNG or JPEG files for each class. What the
    form does not name, such as further columns, is passed over. Not standardised yet.

    Raises:
        DataError: they are not of this form.
    """
    if form.kind == "image" and path.is_dir() and not any(path.rglob("*.parquet")):
        return _class_folders(path, form, name)
    if path.suffix == ".csv" and form.kind == "table":
        held: Mapping[str, Sequence[str] | np.ndarray] = _csv(path, form, form.label)
        return table_dataset(
            name, _encoded(path, form, held), _labels(path, form, held[form.label]), form.classes, form.columns
        )
    if not path.exists():
        raise DataError(f"{path} does not exist; name a file or folder with rows.")
    found = read_raw_files(path, name=name, hints=Hints(label=form.label))
    y = _labels(path, form, [found.classes[k] for k in found.y])
    if isinstance(found, Table):
        if form.kind != "table":
            raise DataError(f"{path} must hold images, but holds a table.")
        return table_dataset(name, _encoded(path, form, found.columns), y, form.classes, form.columns, test=found.test)
    return image_dataset(name, _shaped(path, form, found.x), y, form.classes, test=found.test)


def read_public(path: Path, form: DataSchema) -> np.ndarray:
    """(n, ...) rows without labels: a CSV file, or a folder of PNG or JPEG files in the order of their names.

    Raises:
        DataError: they are not of this form.
    """
    if form.kind == "table":
        if path.suffix != ".csv":
            raise DataError(f"{path} must be a CSV file, as public rows of a table are.")
        return _encoded(path, form, _csv(path, form))
    files = sorted(filter(is_image, path.iterdir())) if path.is_dir() else []
    if not files:
        raise DataError(f"{path} must be a folder of PNG or JPEG files, as public images are.")
    return _shaped(path, form, decode_images(files, channels=form.shape[0]))


def _csv(path: Path, form: DataSchema, *more: str) -> dict[str, list[str]]:
    return read_csv(path, needed=[*(column.name for column in form.table), *more])


def _encoded(path: Path, form: DataSchema, held: Mapping[str, Sequence[str] | np.ndarray]) -> np.ndarray:
    """(n, F) float32 of a table."""
    parts = []
    for column in form.table:
        if column.name not in held:
            raise DataError(f"{path} must have a column {column.name!r}, but has not.")
        values = held[column.name]
        words = values if isinstance(values, np.ndarray) else np.array(values, dtype=object)
        parts.append(_hot(path, column, words) if column.words else _numbers(path, column, words)[:, None])
    return np.ascontiguousarray(np.concatenate(parts, axis=1))


def _numbers(path: Path, column: Column, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        values = np.array([word if is_number(word) else "nan" for word in texts(column.name, values)])
    with np.errstate(over="ignore"):
        numbers: np.ndarray = values.astype(np.float64).astype(np.float32)
    _refuse(path, column.name, "a finite number", ~np.isfinite(numbers))
    return numbers


def _hot(path: Path, column: Column, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "biu":
        values = values.astype(str)
    places = {word: k for k, word in enumerate(column.words)}
    codes = np.array([places.get(word, -1) for word in texts(column.name, values)], dtype=np.int64)
    _refuse(path, column.name, f"one of its {len(places)} words", codes < 0)
    hot: np.ndarray = np.eye(len(places), dtype=np.float32)[codes]
    return hot


def _labels(path: Path, form: DataSchema, words: Sequence[str] | np.ndarray) -> np.ndarray:
    """(n,) int64 classes."""
    places = {name: k for k, name in enumerate(form.classes)}
    codes = np.array([places.get(str(word).strip() or MISSING, -1) for word in words], dtype=np.int64)
    _refuse(path, form.label, f"one of the {len(places)} classes", codes < 0)
    return codes


def _refuse(path: Path, column: str, what: str, wrong: np.ndarray) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        named = ", ".join(str(row + 1) for row in rows[:SHOWN]) + (", …" if len(rows) > SHOWN else "")
        raise DataError(
            f"{path}: each row must have {what} in column {column!r}, but {len(rows)} of {len(wrong)} have not (row "
            f"{named}, counted from 1 below the header); mend or drop them."
        )


def _class_folders(path: Path, form: DataSchema, name: str) -> Dataset:
    """Images in folders that are called after classes; not every class needs one."""
    folders = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    strange = [folder.name for folder in folders if folder.name not in form.classes]
    if strange:
        raise DataError(f"{path} has {len(strange)} folders that are no classes of the form; remove or rename them.")
    files = [(file, form.classes.index(f.name)) for f in folders for file in sorted(filter(is_image, f.iterdir()))]
    if not files:
        raise DataError(f"{path} must hold a folder of PNG or JPEG files for each class, but there are none.")
    x = decode_images((file for file, _ in files), channels=form.shape[0])
    return image_dataset(name, _shaped(path, form, x), np.array([k for _, k in files], dtype=np.int64), form.classes)


def _shaped(path: Path, form: DataSchema, x: np.ndarray) -> np.ndarray:
    if x.shape[1:] != form.input_shape:
        raise DataError(f"{path} must hold rows of shape {form.input_shape}, but they are {x.shape[1:]}.")
    return x
