"""Reads a party's private rows by a schema that all parties share, and refuses rows that do not fit it.

Errors name file, column and row, and never show a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, Fill, Kind, fit_columns, image_dataset, moments, pixel_scaling, table_dataset
from fedloom.data.encoder import OneHot, RawNumber, TableEncoder, refuse_rows
from fedloom.data.hub import Hints, read_files
from fedloom.data.images import class_folders, decode_images, is_image
from fedloom.data.tables import MISSING, RawTable, read_csv


@dataclass(frozen=True)
class DataSchema:
    """The format of the rows of all parties."""

    kind: Kind
    classes: tuple[str, ...]
    """K names."""
    label: str = "label"
    """The column of the classes, in a table."""
    table: tuple[RawNumber | OneHot, ...] = ()
    """The columns of a table, in order; empty for images."""
    shape: tuple[int, ...] = ()
    """(C, H, W) of an image."""
    fill: Fill = ""
    """The replacement of missing numbers in a table, which are NaN until then; "" refuses them."""

    @property
    def columns(self) -> tuple[str, ...]:
        """F names of a table's encoded columns."""
        return TableEncoder(self.table).names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape if self.kind == "image" else (len(self.columns),)

    def scaling(self, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The replacement of missing numbers, shift and scale: constant for images; for a table those of rows x (n, F),
        or 0, 0 and 1 without rows."""
        if self.kind == "image":
            return np.zeros(self.shape[0], np.float32), *pixel_scaling(self.shape[0])
        if x is None:
            zeros = np.zeros(len(self.columns), np.float32)
            return zeros, zeros, zeros + 1
        return fit_columns(x, self.fill) if self.fill else (np.zeros(x.shape[1], np.float32), *moments(x))


def read_rows(path: Path, schema: DataSchema, name: str) -> Dataset:
    """Labeled rows: a CSV or Parquet file, or a folder with one folder of PNG or JPEG files for each class. Columns
    that are not in the schema are ignored. The result is not standardized.

    Raises:
        DataError: the rows do not fit the schema.
    """
    if schema.kind == "image" and path.is_dir() and not any(path.rglob("*.parquet")):
        return _read_image_folders(path, schema, name)
    if path.suffix == ".csv" and schema.kind == "table":
        table = _read_csv(path, schema, schema.label)
        y = _labels(path, schema, table[schema.label])
        return table_dataset(name, _encode(path, schema, table), y, schema.classes, schema.columns, fill=schema.fill)
    if not path.exists():
        raise DataError(f"{path} does not exist; name a file or folder with rows.")
    raw = read_files(path, name=name, hints=Hints(label=schema.label))
    y = _labels(path, schema, [raw.classes[k] for k in raw.y])
    if isinstance(raw, RawTable):
        if schema.kind != "table":
            raise DataError(f"{path} must hold images, but it is a table.")
        x = _encode(path, schema, raw.columns)
        return table_dataset(name, x, y, schema.classes, schema.columns, test=raw.test, fill=schema.fill)
    return image_dataset(name, _check_shape(path, schema, raw.x), y, schema.classes, test=raw.test)


def read_public(path: Path, schema: DataSchema) -> np.ndarray:
    """(n, ...) rows without labels: a CSV file, or a folder of PNG or JPEG files in the order of their names.

    Raises:
        DataError: the rows do not fit the schema.
    """
    if schema.kind == "table":
        if path.suffix != ".csv":
            raise DataError(f"Public rows of a table must be a CSV file, not {path}.")
        return _encode(path, schema, _read_csv(path, schema))
    files = sorted(filter(is_image, path.iterdir())) if path.is_dir() else []
    if not files:
        raise DataError(f"Public images must be a folder of PNG or JPEG files, but {path} has none.")
    return _check_shape(path, schema, decode_images(files, channels=schema.shape[0]))


def _read_csv(path: Path, schema: DataSchema, *more: str) -> dict[str, np.ndarray]:
    table = read_csv(path, needed=[*(column.name for column in schema.table), *more])
    return {name: np.array(words, dtype=object) for name, words in table.items()}


def _encode(path: Path, schema: DataSchema, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """(n, F) float32 of a table."""
    columns = dict(columns)
    try:
        for column in schema.table:
            if isinstance(column, OneHot) and column.name in columns:
                values = columns[column.name]
                columns[column.name] = values = values.astype(str) if values.dtype.kind in "biu" else values
                refuse_rows(column.name, f"one of its {len(column.words)} words", column.unknown(values))
        return TableEncoder(schema.table).transform(columns)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _labels(path: Path, schema: DataSchema, words: Sequence[str] | np.ndarray) -> np.ndarray:
    """(n,) int64 classes."""
    places = {name: k for k, name in enumerate(schema.classes)}
    codes = np.array([places.get(str(word).strip() or MISSING, -1) for word in words], dtype=np.int64)
    refuse_rows(schema.label, f"one of the {len(places)} classes", codes < 0, where=f"{path}: ")
    return codes


def _read_image_folders(path: Path, schema: DataSchema, name: str) -> Dataset:
    """Images in folders named after classes; a class may have no folder."""
    folders = class_folders(path)
    unknown = [label for label in folders if label not in schema.classes]
    if unknown:
        raise DataError(f"{path} has {len(unknown)} folders that are not classes of the schema; remove or rename them.")
    files = [(file, schema.classes.index(label)) for label, images in folders.items() for file in images]
    if not files:
        raise DataError(f"{path} must have a folder of PNG or JPEG files for each class, but has no such files.")
    x = _check_shape(path, schema, decode_images((file for file, _ in files), channels=schema.shape[0]))
    return image_dataset(name, x, np.array([k for _, k in files], dtype=np.int64), schema.classes)


def _check_shape(path: Path, schema: DataSchema, x: np.ndarray) -> np.ndarray:
    if x.shape[1:] != schema.input_shape:
        raise DataError(f"{path} must have rows of shape {schema.input_shape}, not {x.shape[1:]}.")
    return x
