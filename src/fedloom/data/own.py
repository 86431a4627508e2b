"""A user's own data: a file, a folder, a data frame or arrays, and the settings that say what its columns are."""

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.encoder import encode_own
from fedloom.data.hub import read_content, table_endings
from fedloom.data.images import class_folders, decode_images, is_image, list_class_folders
from fedloom.data.options import UNORDERED, DataOptions, Missing, SplitColumns, Understanding
from fedloom.data.roles import understand
from fedloom.data.tables import column_values, read_csv

Table: TypeAlias = Any
"""A mapping of column names to values, or a pandas or polars data frame."""
Source: TypeAlias = str | Path | Table | tuple[Any, Any]
"""A path, a table, or inputs and labels (X, y)."""


def read_data(
    source: Source,
    *,
    label: str | None = None,
    group: str | None = None,
    id: str | None = None,
    drop: Sequence[str] = (),
    keep: Sequence[str] = (),
    missing: Missing = "refuse",
    test: str | Sequence[str] | None = None,
    unseen: Sequence[str] = (),
    name: str | None = None,
) -> Dataset:
    """The data set of a user's table or pictures, whose rows have their owners if `group` is given.

    Missing numbers, if `missing` allows them, stay NaN, and columns are not scaled: both are fitted when rows are
    assigned to clients, on public rows or on each owner's own training rows (`Dataset.standardized_by_owner`).

    Args:
        source: the path of a CSV or Parquet file or of a folder (see `fedloom.data.sources.load`); a mapping of
            columns, or a pandas or polars frame; or (X, y) with y (n,) and X (n, F) numbers, a mapping or frame, or
            (n, C, H, W) uint8 images.
        label: the column to predict; None to guess it, which `Dataset.notes` says.
        group: the column of the rows' owners.
        id: the column that names each row; never a feature.
        drop: columns that are no features; "*" stands for any text.
        keep: the only columns that are features; empty for all. A column named in full is kept even if it looks like
            an identifier, and hashed if it is free text.
        missing: "refuse"; or what replaces a missing number: "median", "most-frequent", or "indicator" (the median,
            and a column that says so). A missing word is a category of its own, "?".
        test: the column that says which rows are test rows, or the names of owners whose rows are; None for none.
        unseen: names of owners that take part in no round; they are numbered last.
        name: of the data set; None for the file's name, or "data".

    Raises:
        DataError: see `fedloom.data.roles.understand` and `fedloom.data.encoder.encode_own`.
    """
    held_out = test if test is None or isinstance(test, str) else tuple(test)
    options = DataOptions(label, group, id, tuple(drop), tuple(keep), missing, held_out, tuple(unseen))
    return read_own(source, options, name)[0]


def read_own(source: Source, options: DataOptions, name: str | None = None) -> tuple[Dataset, Understanding]:
    """As `read_data`, with the interpretation of the columns.

    Raises:
        DataError: as `read_data`.
    """
    found, images = interpret(source, options, name)
    return encoded(found, images), found


def encoded(found: Understanding, images: np.ndarray | None) -> Dataset:
    """The data set of the interpretation that `interpret` returned.

    Raises:
        DataError: as `encode_own`.
    """
    if images is None:
        return encode_own(found)
    table = found.table
    return image_dataset(
        table.name, np.ascontiguousarray(images[found.kept]), table.y, table.classes, test=table.test,
        groups=table.groups, owners=table.owners, notes=found.notes,
    )  # fmt: skip


def interpret(
    source: Source, options: DataOptions, name: str | None = None, ordered: SplitColumns = UNORDERED
) -> tuple[Understanding, np.ndarray | None]:
    """The interpretation of a source, and its images (n, C, H, W), if it has any; a table is not encoded.

    `ordered` names columns whose values `Understanding.unit` and `Understanding.time` have.

    Raises:
        DataError: the source cannot be read, or as `understand`.
    """
    if isinstance(source, str | Path):
        path = Path(source).expanduser()
        title = name or (path.resolve().stem if path.is_file() else path.resolve().name)
        return _look_at_path(path, options, title, ordered)
    title = name or "data"
    if isinstance(source, tuple):
        if len(source) != 2:
            raise DataError(f"Arrays must be (X, y), inputs and labels, not {len(source)} arrays.")
        x, y = source
        label = options.label or "label"
        options = replace(options, label=label)
        if not hasattr(x, "keys"):
            x = np.asarray(x)
            if x.ndim == 4:
                return understand({label: _array(label, y)}, options, title, picture=True), _pixels(x)
            if x.ndim != 2:
                raise DataError(f"X must be (n, F) numbers or (n, C, H, W) images, not {x.shape}.")
            x = {f"x{number}": column for number, column in enumerate(x.T)}
        source = {**{str(column): x[column] for column in x.keys()}, label: y}  # noqa: SIM118 - or a data frame
    columns = columns_of(source)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"All columns must have the same number of rows, but have {lengths}.")
    return understand(columns, options, title, ordered=ordered), None


def _look_at_path(
    path: Path, options: DataOptions, name: str, ordered: SplitColumns
) -> tuple[Understanding, np.ndarray | None]:
    """A file, a folder of tables, or a folder of pictures: class folders, or listed in its metadata.csv."""
    listing = path / "metadata.csv"
    if listing.is_file() and table_endings(path) == {".csv"}:
        table = read_csv(listing, needed=["file_name"])
        files = [path / file for file in table.pop("file_name")]
        columns = {column: column_values(words) for column, words in table.items()}
        return understand(columns, options, name, picture=True, ordered=ordered), decode_images(files)
    if path.exists() and not table_endings(path):
        if path.is_dir() and any(map(is_image, path.rglob("*"))):
            return _look_at_folders(path, options, name)
        raise DataError(
            f"{str(path)!r} must be a .parquet or .csv file, a folder of such files, or a folder of class folders of "
            "PNG or JPEG files."
        )
    if not path.exists():
        raise DataError(f"There is no file or folder {str(path)!r}.")
    content = read_content(path, name)
    columns = {column: content.values(column) for column in content.columns}
    picture = content.images is not None
    found = understand(columns, options, name, named=content.named, test=content.test, picture=picture, ordered=ordered)
    return found, None if content.images is None else decode_images(content.images)


def _look_at_folders(path: Path, options: DataOptions, name: str) -> tuple[Understanding, np.ndarray]:
    """Class folders, with or without train/ and test/ above; or below a folder for each owner."""
    folders = [folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    parts = {folder.name for folder in folders} <= {"train", "test"}
    if parts or not any(child.is_dir() for folder in folders for child in folder.iterdir()):
        files, y, classes, test = list_class_folders(path)
        label = options.label or "label"
        columns = {label: np.array([classes[number] for number in y], dtype=object)}
        return understand(columns, replace(options, label=label), name, test=test, picture=True), decode_images(files)
    options = replace(options, label=options.label or "label", group=options.group or "owner")
    rows = [
        (owner.name, word, file)
        for owner in sorted(folders)
        for word, all_ in class_folders(owner).items()
        for file in all_
    ]
    owners, words = (np.array([row[place] for row in rows], dtype=object) for place in (0, 1))
    columns = {str(options.group): owners, str(options.label): words}
    return understand(columns, options, name, picture=True), decode_images(file for *_, file in rows)


def _pixels(x: np.ndarray) -> np.ndarray:
    if x.dtype != np.uint8 or x.shape[1] not in (1, 3):
        raise DataError(
            f"Images must be (n, C, H, W) uint8 with 1 or 3 channels, not {x.shape} {x.dtype}; convert them first."
        )
    return np.ascontiguousarray(x)


def columns_of(table: Table) -> dict[str, np.ndarray]:
    """Name -> (n,) numbers with NaN, booleans, or objects that are text or None.

    Raises:
        DataError: this is no table, a name repeats, or a column has more than one value for a row.
    """
    if not hasattr(table, "keys") and not hasattr(table, "columns"):
        raise DataError(
            "Data must be a path, a mapping of columns, a pandas or polars frame, or (X, y), not a "
            f"{type(table).__name__}."
        )
    keys = list(table.keys() if hasattr(table, "keys") else table.columns)
    names = [str(key) for key in keys]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"Column names must be unique, but {repeated[0]!r} repeats; rename all but one.")
    return {name: _array(name, table[key]) for name, key in zip(names, keys, strict=True)}


def _array(name: str, column: Any) -> np.ndarray:
    """(n,) numbers with NaN, booleans, or objects that are text or None, from a list, array, or column of a frame."""
    missing = column.isna() if hasattr(column, "isna") else column.is_null() if hasattr(column, "is_null") else None
    try:
        values = np.asarray(column)
    except ValueError:  # rows of lists of different lengths
        values = np.empty(len(column), dtype=object)
        values[:] = column
    if values.ndim != 1:
        raise DataError(f"Column {name!r} must have one value for each row, not the shape {values.shape}.")
    if values.dtype.kind in "biuf":
        return values
    values = values.astype(object)
    gaps = np.zeros(len(values), dtype=bool) if missing is None else np.array(missing, dtype=bool)
    gaps |= np.fromiter((value is None or (isinstance(value, float) and value != value) for value in values), bool)
    known = values[~gaps]
    if len(known) and all(isinstance(value, bool | np.bool_) for value in known):
        known = known.astype(float) if gaps.any() else known.astype(bool)
    elif len(known) and all(isinstance(value, int | float | np.number | Decimal) for value in known):
        known = known.astype(np.float64)
    if known.dtype.kind in "fb":
        numbers = np.full(len(values), np.nan)
        numbers[~gaps] = known
        return numbers if gaps.any() or known.dtype.kind == "f" else known
    values[gaps] = None
    if not all(isinstance(value, str | list | tuple | set | np.ndarray) for value in known):  # such as dates
        values[~gaps] = [str(value) for value in known]
    return values
