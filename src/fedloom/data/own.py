"""A user's own data: a file, a folder, a data frame or arrays, and the settings that say what its
columns are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn, Table, array_of, columns_of
from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.encoder import encode_own
from fedloom.data.grammar import MISSING_WORDS, Decimals, Grammar
from fedloom.data.hub import read_content, table_endings
from fedloom.data.images import class_folders, decode_images, is_image, list_class_folders
from fedloom.data.options import (
    UNORDERED,
    DataOptions,
    Kind,
    Missing,
    MissingColumns,
    SplitColumns,
    Task,
    Understanding,
)
from fedloom.data.roles import understand
from fedloom.data.tables import read_csv

Source: TypeAlias = str | Path | Table | tuple[Any, Any]
"""A path, a table, or inputs and labels (X, y)."""
_NAMES = Grammar(missing_words=())
"""Names of folders, such as None, are no missing values."""


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
    task: Task | None = None,
    missing_words: Sequence[str] = MISSING_WORDS,
    decimal: Decimals = ".",
    encode: Mapping[str, Kind] = MappingProxyType({}),
    missing_columns: MissingColumns = "refuse",
    name: str | None = None,
) -> Dataset:
    """The data set of a user's table or pictures, whose rows have their owners if `group` is given.

    Missing numbers, if `missing` allows them, stay NaN, and columns are not scaled: both are fitted
    when rows are assigned to clients, on public rows or on each owner's own training rows
    (`Dataset.standardized_by_owner`).

    Args:
        source: the path of a CSV or Parquet file or of a folder (see `fedloom.data.sources.load`);
            a mapping of columns, or a pandas, Polars or Arrow table; or (X, y) with y (n,) and X
            (n, F) numbers, a mapping or frame, or (n, C, H, W) uint8 images.
        label: the column to predict; None to guess it, which `Dataset.notes` says.
        group: the column of the rows' owners.
        id: the column that names each row; never a feature.
        drop: columns that are no features; "*" stands for any text.
        keep: the only columns that are features; empty for all. A column named in full is kept even
            if it looks like an identifier.
        missing: "refuse"; or what replaces a missing number: "median", "most-frequent", or
            "indicator" (the median, and a column that says so). A missing word is a category of its
            own, "?".
        test: the column that says which rows are test rows, or the names of owners whose rows are;
            None for none.
        unseen: names of owners that take part in no round; they are numbered last.
        task: "classes" if whole numbers in the label are names of classes, however many; None to
            guess.
        missing_words: words that stand for a missing value, in every column; an empty cell always
            does.
        decimal: the sign before the decimals of a number, "." or ","; or that of files by name.
        encode: columns whose kind is not to be guessed: "number", "category", "text" or "date".
        missing_columns: "allow" takes what an owner has no value of as missing there, with an
            indicator.
        name: of the data set; None for the file's name, or "data".

    Raises:
        DataError: see `fedloom.data.roles.understand` and `fedloom.data.encoder.encode_own`.
    """
    held_out = test if test is None or isinstance(test, str) else tuple(test)
    options = DataOptions(
        label,
        group,
        id,
        tuple(drop),
        tuple(keep),
        missing,
        held_out,
        tuple(unseen),
        task,
        tuple(missing_words),
        decimal,
        dict(encode),
        missing_columns,
    )
    return read_own(source, options, name)[0]


def read_own(
    source: Source, options: DataOptions, name: str | None = None
) -> tuple[Dataset, Understanding]:
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
        table.name,
        np.ascontiguousarray(images[found.kept]),
        table.y,
        table.classes,
        test=table.test,
        groups=table.groups,
        owners=table.owners,
        notes=found.notes,
        label=found.label,
    )


def interpret(
    source: Source, options: DataOptions, name: str | None = None, ordered: SplitColumns = UNORDERED
) -> tuple[Understanding, np.ndarray | None]:
    """The interpretation of a source, and its images (n, C, H, W), if it has any; a table is not
    encoded.

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
            x = array_of(x)
            if x.ndim == 4:
                pictured = {label: RawColumn.of(label, y, options.grammar)}
                return understand(pictured, options, title, picture=True), _pixels(x)
            if x.ndim != 2:
                raise DataError(f"X must be (n, F) numbers or (n, C, H, W) images, not {x.shape}.")
            x = {f"x{number}": column for number, column in enumerate(x.T)}
        source = {**{str(column): x[column] for column in x.keys()}, label: y}  # noqa: SIM118 - or a data frame
    columns = columns_of(source, options.grammar)
    lengths = {column: len(values) for column, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"All columns must have the same number of rows, but have {lengths}.")
    return understand(columns, options, title, ordered=ordered), None


def _look_at_path(
    path: Path, options: DataOptions, name: str, ordered: SplitColumns
) -> tuple[Understanding, np.ndarray | None]:
    """A file, a folder of tables, or a folder of pictures: class folders, or listed in its
    metadata.csv.
    """
    listing = path / "metadata.csv"
    if listing.is_file() and table_endings(path) == {".csv"}:
        columns = read_csv(listing, needed=["file_name"], grammar=options.grammar)
        files = [path / file for file in columns.pop("file_name").text]
        return understand(columns, options, name, picture=True, ordered=ordered), decode_images(
            files
        )
    if path.exists() and not table_endings(path):
        if path.is_dir() and any(map(is_image, path.rglob("*"))):
            return _look_at_folders(path, options, name)
        raise DataError(
            f"{str(path)!r} must be a .parquet or .csv file, a folder of such files, or a folder "
            "of class folders of PNG or JPEG files."
        )
    if not path.exists():
        raise DataError(f"There is no file or folder {str(path)!r}.")
    content = read_content(
        path,
        name,
        grammar=options.grammar,
        union=options.missing_columns == "allow",
        decimals=options.decimals,
    )
    picture = content.images is not None
    found = understand(
        content.columns,
        options,
        name,
        named=content.named,
        test=content.test,
        picture=picture,
        ordered=ordered,
    )
    return found, None if content.images is None else decode_images(content.images)


def _look_at_folders(
    path: Path, options: DataOptions, name: str
) -> tuple[Understanding, np.ndarray]:
    """Class folders, with or without train/ and test/ above; or below a folder for each owner."""
    folders = [
        folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith(".")
    ]
    parts = {folder.name for folder in folders} <= {"train", "test"}
    if parts or not any(child.is_dir() for folder in folders for child in folder.iterdir()):
        files, y, classes, test = list_class_folders(path)
        label = options.label or "label"
        columns = {label: RawColumn.of(label, [classes[number] for number in y], _NAMES)}
        return understand(
            columns, replace(options, label=label), name, test=test, picture=True
        ), decode_images(files)
    options = replace(options, label=options.label or "label", group=options.group or "owner")
    rows = [
        (owner.name, word, file)
        for owner in sorted(folders)
        for word, all_ in class_folders(owner).items()
        for file in all_
    ]
    named = {str(options.group): 0, str(options.label): 1}
    columns = {
        column: RawColumn.of(column, [row[place] for row in rows], _NAMES)
        for column, place in named.items()
    }
    return understand(columns, options, name, picture=True), decode_images(
        file for *_, file in rows
    )


def _pixels(x: np.ndarray) -> np.ndarray:
    if x.dtype != np.uint8 or x.shape[1] not in (1, 3):
        raise DataError(
            f"Images must be (n, C, H, W) uint8 with 1 or 3 channels, not {x.shape} {x.dtype}; "
            "convert them first."
        )
    return np.ascontiguousarray(x)
