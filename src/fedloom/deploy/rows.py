"""Encodes new raw rows, from files or memory, as inputs of a party's network."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.columns import RawColumn
from fedloom.data.encoder import ColumnEncoder, OneHot, TableEncoder
from fedloom.data.grammar import PLAIN, Grammar, plain_name
from fedloom.data.hub import read_content
from fedloom.data.images import decode_images, grid_cells
from fedloom.data.manifest import read_views
from fedloom.data.tables import read_csv
from fedloom.data.vertical import encode_new_rows
from fedloom.deploy.folder import InputSpec

RawRows: TypeAlias = Mapping[str, Any] | np.ndarray | Sequence[Any] | str | os.PathLike[str]
"""Rows of a table: a CSV or Parquet file, or column -> values. Images: (n, C, H, W) uint8, whole or
the party's part, or their `.npy` file; or a list of files, one (or view -> file) for each row; or a
CSV file that lists them in the column `path`, or in one column for each view.
"""


def check_inputs(inputs: InputSpec) -> None:
    """Check that a recipe gives rows of the network's input shape.

    Raises:
        DataError, KeyError, TypeError, ValueError: the recipe is invalid.
    """
    recipe, shape = inputs.recipe, inputs.shape
    kind = recipe["kind"]
    if kind == "table":
        gives: tuple[int, ...] = (len(TableEncoder.from_dict(recipe).names),)
    elif kind == "cells":
        (channels, height, width), grid = recipe["shape"], tuple(recipe["grid"])
        if max(height, width) > 1 << 14 or grid[0] * grid[1] > 1 << 12:
            raise DataError("its pictures must have at most 2**14 pixels a side and 2**12 cells")
        cells = grid_cells((height, width), (grid[0], grid[1]))
        gives = (channels * len([cells[number] for number in recipe["cells"]]), *cells[0][2:])
    elif kind == "pictures":
        gives = tuple(recipe["shape"])
        if gives[0] % len(recipe["views"]) or gives[1:] != (recipe["size"],) * 2:
            raise DataError(
                f"pictures of {recipe['size']} pixels a side cannot make rows of shape {gives}"
            )
    else:
        raise DataError(f"its recipe must be of the kind table, cells or pictures, not {kind!r}")
    if gives != shape:
        raise DataError(f"its recipe gives rows of shape {gives}, but its network takes {shape}")


def read_rows(
    path: Path, recipe: Mapping[str, Any], id: str | None = None
) -> tuple[RawRows, list[str] | None]:
    """The rows of a file, and the ids in the column `id`, if it is given.

    The recipe's kind says what the rows are: of a table, column -> cells; of cells, files of whole
    images; of pictures, view -> file for each object.

    Raises:
        DataError: the file cannot be read, or a column is missing.
    """
    # images in an array, of any kind; mapped into memory, as they may be many
    if path.suffix == ".npy":
        if id is not None:
            raise DataError(
                f"{path} has no columns, so no id {id!r}; leave out --id, or list files in a CSV."
            )
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False)), None
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as an array of numbers ({error}).") from None

    # a table: the columns of the recipe, of which optional ones may be missing
    if recipe["kind"] == "table":
        if not path.is_file():
            raise DataError(f"{path} is no file; name a CSV or Parquet file.")
        columns = read_content(path, path.stem, grammar=grammar_of(recipe)).columns
        names = [str(column["name"]) for column in recipe["columns"]]
        optional = recipe.get("optional", ())
        _check_complete([name for name in names if name not in optional], columns, str(path))
        if id is not None and id not in columns:
            raise DataError(
                f"{path} must have a column {id!r}, but has "
                f"{[*columns]}.{did_you_mean(id, columns)}"
            )
        return {
            name: columns[name] for name in names if name in columns
        }, None if id is None else columns[id].text

    # a CSV file that lists images, whose paths are relative to its folder
    table = {
        name: column.text
        for name, column in read_csv(path, needed=[] if id is None else [id]).items()
    }
    ids = None if id is None else table[id]
    views = list(recipe["views"]) if recipe["kind"] == "pictures" else ["path"]
    _check_complete(views, table, f"{path}, which lists images,")
    files_of_rows = [
        [path.parent / name for name in names]
        for names in zip(*(table[view] for view in views), strict=True)
    ]
    by_view = recipe["kind"] == "pictures"
    rows = [
        dict(zip(views, files, strict=True)) if by_view else files[0] for files in files_of_rows
    ]
    return rows, ids


def encode_rows(inputs: InputSpec, rows: RawRows) -> np.ndarray:
    """(n, *shape) of new rows, n >= 1, float32 columns or uint8 pixels, as `PartyView.x` holds
    them.

    Raises:
        DataError: the rows do not fit the party.
    """
    data: Any = (
        read_rows(Path(rows), inputs.recipe)[0] if isinstance(rows, str | os.PathLike) else rows
    )
    if not isinstance(data, Mapping) and hasattr(data, "keys"):  # a data frame
        data = {plain_name(name): data[name] for name in data.keys()}  # noqa: SIM118
    if inputs.recipe["kind"] != "table":
        if isinstance(data, Mapping):
            raise DataError(
                "This party takes images: a uint8 array (n, C, H, W) or files, not columns of a "
                "table."
            )
        x = encode_images(
            inputs.recipe, inputs.shape, data if isinstance(data, np.ndarray) else list(data)
        )
    elif isinstance(data, Mapping):
        rules = TableEncoder.from_dict(inputs.recipe).columns
        _check_complete([rule.name for rule in rules], data, "The rows")
        x = encode_new_rows(
            inputs.recipe, {rule.name: raw_column(rule, data[rule.name]) for rule in rules}
        )
    else:
        kind = (
            f"an array of {data.dtype}"
            if isinstance(data, np.ndarray)
            else f"a {type(data).__name__}"
        )
        raise DataError(
            f"This party takes rows of a table: a CSV file, or column -> values, not {kind}."
        )
    if not len(x):
        raise DataError("At least one row is needed, but there is none.")
    return x


def grammar_of(recipe: Mapping[str, Any]) -> Grammar:
    """How cells of new rows are read, as in training."""
    words = recipe.get("missing_words")
    return PLAIN if words is None else Grammar(tuple(words), recipe["decimal"])


def raw_column(rule: ColumnEncoder, values: Any, grammar: Grammar = PLAIN) -> RawColumn:
    """A column of a file, a data frame or a list; a warning tells of words that training did not
    have.
    """
    column = RawColumn.of(rule.name, values, grammar)
    if isinstance(rule, OneHot):
        unknown = rule.unknown(column)
        count = int(unknown.sum())
        if count and (not rule.other or count == len(column)):
            logging.getLogger("fedloom").warning(
                "column %r: %d of %d rows hold words that training did not have, such as %r; "
                "they count as %s",
                rule.name, count, len(column), column.text[int(np.flatnonzero(unknown)[0])][:40],
                "rare ones" if rule.other else "none of its words",
            )  # fmt: skip
    return column


def encode_images(
    recipe: Mapping[str, Any], shape: tuple[int, ...], rows: np.ndarray | list[Any]
) -> np.ndarray:
    """(n, *shape) uint8 of whole images, of images as the party holds them, or of files."""
    if isinstance(rows, np.ndarray):
        encoded = rows.dtype == np.uint8 and rows.shape[1:] == shape != tuple(recipe["shape"])
        if not encoded:
            return encode_new_rows(recipe, rows)
        return np.require(rows, requirements=("C", "W"))  # a file is read-only
    if not rows:
        raise DataError("At least one row is needed, but there is none.")
    if recipe["kind"] == "pictures":
        views = list(recipe["views"])
        if not all(isinstance(files, Mapping) for files in rows):
            raise DataError(f"Each row must be view -> file, with the views {views}.")
        return encode_new_rows(
            recipe, read_views(recipe, [{v: Path(f) for v, f in files.items()} for files in rows])
        )
    if not all(isinstance(file, str | os.PathLike) for file in rows):
        raise DataError("Images must be a uint8 array (n, C, H, W) or a list of files.")
    return encode_new_rows(
        recipe, decode_images([Path(file) for file in rows], channels=int(recipe["shape"][0]))
    )


def _check_complete(needed: Sequence[str], columns: Mapping[str, Any], what: str) -> None:
    """Refuse rows that lack a column, naming all that are missing."""
    missing = [name for name in needed if name not in columns]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise DataError(
            f"{what} must have the {len(needed)} columns of this party, but {len(missing)} are "
            "missing: "
            f"{', '.join(map(repr, missing[:10]))}{more}.{did_you_mean(missing[0], map(str, columns))}"  # noqa: E501
        )
