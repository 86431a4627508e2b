"""Reads a party's private rows by a schema that all parties share, and refuses rows that do not fit
it.

Errors name file, column and row, and never show a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.columns import RawColumn
from fedloom.data.dataset import (
    Dataset,
    Fill,
    Kind,
    fit_columns,
    image_dataset,
    moments,
    pixel_scaling,
    table_dataset,
    unscaled,
)
from fedloom.data.encoder import OneHot, RawNumber, TableEncoder, offset_of
from fedloom.data.grammar import PLAIN, Grammar
from fedloom.data.hub import Hints, read_content, read_files
from fedloom.data.images import class_folders, decode_images, is_image
from fedloom.data.options import OwnFile
from fedloom.data.roles import allowed, class_names, own_rows, refuse_identifier
from fedloom.data.standalone import DATE_PARTS
from fedloom.data.tables import RawTable, as_words, read_csv, refuse_rows
from fedloom.data.text_and_dates import DateParts, HashedText

FARTHEST = 5
"""Agreed standard deviations within which numbers are kept."""


@dataclass(frozen=True)
class DataSchema:
    """The format of the rows of all parties."""

    kind: Kind
    classes: tuple[str, ...]
    """K names; () for a number to predict."""
    label: str = "label"
    """The column of the classes, in a table."""
    table: tuple[RawNumber | OneHot | HashedText | DateParts, ...] = ()
    """The columns of a table, in order; empty for images."""
    shape: tuple[int, ...] = ()
    """(C, H, W) of an image."""
    fill: Fill = ""
    """The replacement of missing numbers in a table, which are NaN until then; "" refuses them."""
    scale: Mapping[str, tuple[float, float]] | None = None
    """The agreed mean and s.d. of each numeric column of a table, and of the years of each column
    of dates; None to fit them to rows.
    """
    target: tuple[float, float] = (0.0, 1.0)
    """The agreed mean and s.d. of a number to predict."""
    optional: bool = False
    """Whether a party may lack columns of a table: their values are missing there."""

    @property
    def columns(self) -> tuple[str, ...]:
        """F names of a table's encoded columns."""
        return TableEncoder(self.table).names

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape if self.kind == "image" else (len(self.columns),)

    def scaling(self, x: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The replacement of missing numbers, shift and scale: constant for images; for a table the
        agreed ones, or those of rows x (n, F), or 0, 0 and 1 without rows.
        """
        if self.kind == "image":
            return np.zeros(self.shape[0], np.float32), *pixel_scaling(self.shape[0])
        if self.scale is not None:
            years = {
                f"{rule.name} {DATE_PARTS[0]}": rule.name
                for rule in self.table
                if isinstance(rule, DateParts)
            }
            agreed = {**self.scale}
            for column, name in years.items():
                mean, spread = agreed.pop(name)
                agreed[column] = (mean - 2000, spread)
            shift, scale = np.array(
                [agreed.get(name, (0, 1)) for name in self.columns], np.float32
            ).T.copy()
            return shift, shift, scale
        if x is None:
            zeros = np.zeros(len(self.columns), np.float32)
            return zeros, zeros, zeros + 1
        fill, shift, scale = (
            fit_columns(x, self.fill)
            if self.fill
            else (np.zeros(x.shape[1], np.float32), *moments(x))
        )
        optional = [rule.name for rule in self.table] if self.optional else []
        return fill, *unscaled(shift, scale, self.columns, optional)

    def cut(self, x: np.ndarray) -> np.ndarray:
        """Rows x (n, F) of a table, cut off at `FARTHEST` s.d. from the mean if these
        are agreed.
        """
        if self.scale is None:
            return x
        _, shift, scale = self.scaling()
        near: np.ndarray = np.clip(x, shift - FARTHEST * scale, shift + FARTHEST * scale)
        return near


def read_rows(path: Path, schema: DataSchema, name: str, own: OwnFile | None = None) -> Dataset:
    """Labeled rows: a CSV or Parquet file, or a folder with one folder of PNG or JPEG files for
    each class. Columns that are not in the schema are ignored. The result is not standardized.

    `own` are the settings of the file's owner, at a node.

    Raises:
        DataError: the rows do not fit the schema, or as `own_rows`.
    """
    if own is not None and schema.kind == "table":
        return _read_own(path, schema, name, own)
    if own is not None and (given := replace(own.options, label=None, missing="refuse").given()):
        raise DataError(
            f"{given} of {name!r} apply to tables: leave them out, as the run uses images."
        )
    if schema.kind == "image" and path.is_dir() and not any(path.rglob("*.parquet")):
        return _read_image_folders(path, schema, name, strict=own is None)
    if schema.kind == "table":
        columns, test = read_columns(path, name)
        if schema.optional:
            labels = _column(path, columns, schema.label)
            columns |= {
                rule.name: labels.empty(len(labels))
                for rule in schema.table
                if rule.name not in columns
            }
        x = _encode(path, schema, columns)
        y = _labels(path, schema, _column(path, columns, schema.label))
        return table_dataset(
            name,
            x,
            y,
            schema.classes,
            schema.columns,
            test=test,
            fill=schema.fill,
            target=schema.target,
            label=schema.label,
        )
    if not path.exists():
        raise DataError(f"{path} does not exist; name a file or folder with rows.")
    raw = read_files(path, name=name, hints=Hints(label=schema.label))
    if isinstance(raw, RawTable):
        raise DataError(f"{path} must hold images, but it is a table.")
    x = _check_shape(path, schema, raw.x)
    words = np.array(raw.classes, dtype=object)[raw.y]
    test = raw.test
    if own is not None:  # a run that failed would tell of a label
        kept = np.flatnonzero(np.isin(words, schema.classes))
        x, words, test = (
            x[kept],
            words[kept],
            None if test is None else np.flatnonzero(np.isin(kept, test)),
        )
    y = _labels(path, schema, RawColumn.of(schema.label, list(words)))
    return image_dataset(name, x, y, schema.classes, test=test)


def read_public(path: Path, schema: DataSchema) -> np.ndarray:
    """(n, ...) rows without labels: a CSV file, or a folder of PNG or JPEG files in the order of
    their names.

    Raises:
        DataError: the rows do not fit the schema.
    """
    if schema.kind == "table":
        if path.suffix.lower() != ".csv":
            raise DataError(f"Public rows of a table must be a CSV file, not {path}.")
        return _encode(path, schema, read_csv(path))
    files = sorted(filter(is_image, path.iterdir())) if path.is_dir() else []
    if not files:
        raise DataError(
            f"Public images must be a folder of PNG or JPEG files, but {path} has none."
        )
    return _check_shape(path, schema, decode_images(files, channels=schema.shape[0]))


def _read_own(path: Path, schema: DataSchema, name: str, own: OwnFile) -> Dataset:
    """The rows of a table that their owner allows. Raises DataError."""
    wanted = [column.name for column in schema.table if column.name not in own.lacks]
    own = replace(own, options=replace(own.options, label=schema.label), classes=schema.classes)
    values, test = read_columns(path, name, own.options.grammar)
    found = own_rows(values, own, name, wanted=wanted, test=test)
    columns = {column: values[column].take(found.kept) for column in (*wanted, schema.label)}
    columns |= {column: columns[schema.label].empty(len(found.kept)) for column in own.lacks}
    encoded = [
        rule.encode_any(columns[rule.name])
        if isinstance(rule, RawNumber | DateParts)
        else rule.encode(columns[rule.name])
        for rule in schema.table
    ]
    x = np.ascontiguousarray(np.concatenate(encoded, axis=1).astype(np.float32))
    return table_dataset(
        name,
        x,
        _labels(path, schema, columns[schema.label]),
        schema.classes,
        schema.columns,
        test=found.test,
        fill=schema.fill or "median",
        notes=found.notes,
        target=schema.target,
        label=schema.label,
    )


def check_own(path: Path, name: str, own: OwnFile) -> tuple[str, ...]:
    """Check a node's own table when the node starts, for its owner: a run must not fail by values
    in it.

    Returns:
        A sentence for each column with words outside its categories, and on rows that are left out.

    Raises:
        DataError: a column that runs may use, or a label without classes, is no number in some row;
            or as `own_rows`.
    """
    columns, test = read_columns(path, name, own.options.grammar)
    found = own_rows(columns, own, name, test=test)
    notes = [*found.notes]

    # the label, and the names of columns in the owner's settings
    if own.options.label is not None and not own.classes:  # a number to predict
        numbers, wrong = columns[own.options.label].take(found.kept).numbers()
        refuse_rows(
            own.options.label, "a finite number", wrong | ~np.isfinite(numbers), where=f"{path}: "
        )
    for column in own.lacks:
        if column in columns:
            raise DataError(
                f"data.lacks names the column {column!r}, which {path} has: remove it from lacks."
            )
    for setting, listed in (("categories", own.categories), ("encode", own.encode)):
        for column in listed:
            if column not in columns:
                raise DataError(
                    f"data.{setting} names the column {column!r}, but {name!r} has only "
                    f"{[*columns]}."
                )

    # each column that runs may use, by its kind: words, texts, dates, or else numbers
    for column, cells in columns.items():
        if own.options.label is None or not allowed(column, own.options):
            continue
        used = cells.take(found.kept)
        if column not in own.encode:
            refuse_identifier(column, used, own.options)
        if column in own.categories:
            if outside := int(OneHot(column, own.categories[column]).unknown(used).sum()):
                notes.append(
                    f"{outside} of {len(used)} values of column {column!r} are outside its "
                    "categories."
                )
            continue
        kind = own.encode.get(column)
        if kind == "text":
            continue
        gaps = int(used.missing.sum())
        if gaps and own.missing in (None, "refuse"):
            raise DataError(
                f"Column {column!r} of {path} lacks {gaps} of {len(used)} {kind or 'number'}s: "
                f"set missing in [data.{name}] to median or most-frequent, or correct those rows."
            )
        if kind == "date":
            DateParts(column, gaps=True).encode(used)  # raises for what is no date
            continue
        # NaN for a gap, which is allowed by now, and for what is no number
        numbers = RawNumber(column).encode_any(used)[:, 0]
        wrong = np.isnan(numbers) & ~used.missing
        try:
            refuse_rows(column, "a finite number", wrong, where=f"{path}: ")
        except DataError as error:
            raise DataError(
                f"{error} If it is a category, list its words in categories of [data.{name}]; if "
                f"it holds texts or dates, set encode.{column} there."
            ) from None
        if offset := offset_of(numbers):
            raise DataError(
                f"Column {column!r} of {path} has numbers that differ little for their size, "
                f"such as {offset:.0f}: subtract the same number from them in all files."
            )
    return tuple(notes)


def read_columns(
    path: Path, name: str, grammar: Grammar = PLAIN
) -> tuple[dict[str, RawColumn], np.ndarray | None]:
    """The columns of a table, and the row numbers of a test split that its files state.

    Raises:
        DataError: the file cannot be read, or has pictures.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist; name a file or folder with rows.")
    content = read_content(path, name, grammar=grammar)
    if content.images is not None:
        raise DataError(f"{path} must hold a table, but it has pictures.")
    columns = dict(content.columns)
    return columns | {
        c: class_names(columns[c], names) for c, names in content.named.items()
    }, content.test


def _column(path: Path, columns: Mapping[str, RawColumn], name: str) -> RawColumn:
    if name not in columns:
        raise DataError(
            f"{path} must have a column {name!r}, but has "
            f"{[*columns]}.{did_you_mean(name, columns)}"
        )
    return columns[name]


def _encode(path: Path, schema: DataSchema, columns: Mapping[str, RawColumn]) -> np.ndarray:
    """(n, F) float32 of a table."""
    for rule in schema.table:
        column = _column(path, columns, rule.name)
        if isinstance(rule, OneHot) and not (schema.optional and column.missing.all()):
            refuse_rows(
                rule.name,
                f"one of its {len(rule.words)} words",
                rule.unknown(column),
                where=f"{path}: ",
            )
    try:
        return TableEncoder(schema.table).transform(columns)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _labels(path: Path, schema: DataSchema, labels: RawColumn) -> np.ndarray:
    """(n,) int64 classes, or float64 numbers to predict."""
    if not schema.classes:
        numbers, wrong = labels.numbers()
        refuse_rows(
            schema.label, "a finite number", wrong | ~np.isfinite(numbers), where=f"{path}: "
        )
        return numbers
    places = {name: k for k, name in enumerate(schema.classes)}
    codes = np.array(
        [places.get(word, -1) for word in as_words(labels.name, labels)], dtype=np.int64
    )
    refuse_rows(schema.label, f"one of the {len(places)} classes", codes < 0, where=f"{path}: ")
    return codes


def _read_image_folders(path: Path, schema: DataSchema, name: str, *, strict: bool) -> Dataset:
    """Images in folders named after classes; a class may have no folder. Others are refused if
    `strict`, else left out.
    """
    folders = class_folders(path)
    unknown = [label for label in folders if label not in schema.classes]
    folders = {label: images for label, images in folders.items() if label in schema.classes}
    if unknown and strict:
        raise DataError(
            f"{path} has {len(unknown)} folders that are not classes of the schema; remove or "
            "rename them."
        )
    files = [
        (file, schema.classes.index(label)) for label, images in folders.items() for file in images
    ]
    if not files:
        raise DataError(
            f"{path} must have a folder of PNG or JPEG files for each class, but has no such files."
        )
    x = _check_shape(
        path, schema, decode_images((file for file, _ in files), channels=schema.shape[0])
    )
    return image_dataset(name, x, np.array([k for _, k in files], dtype=np.int64), schema.classes)


def _check_shape(path: Path, schema: DataSchema, x: np.ndarray) -> np.ndarray:
    if x.shape[1:] != schema.input_shape:
        raise DataError(f"{path} must have rows of shape {schema.input_shape}, not {x.shape[1:]}.")
    return x
