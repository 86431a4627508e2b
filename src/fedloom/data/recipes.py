"""How raw rows become what a party's network gets: kept with the party, so that it can be used on new rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.encoder import TableEncoder
from fedloom.data.image_grid import cut, windows
from fedloom.data.vertical import PartyView


def table_view(
    name: str,
    columns: Mapping[str, np.ndarray],
    aligned: np.ndarray,
    unaligned: np.ndarray,
    test: np.ndarray,
    truth: np.ndarray | None,
) -> PartyView:
    """A party's view of its raw columns, encoded by rules that are fitted on its aligned and unaligned rows."""
    try:
        encoder = TableEncoder.fit(columns, np.concatenate([aligned, unaligned]))
        x = encoder.transform(columns)
    except DataError as error:
        raise DataError(f"Party {name!r}: {error}") from error
    if encoder.dropped:
        logging.getLogger("fedloom").warning(
            "party %r: %d columns are left out, as they hardly vary over its training rows: %s",
            name, len(encoder.dropped), ", ".join(encoder.dropped[:10]) + (", …" if len(encoder.dropped) > 10 else ""),
        )  # fmt: skip
    zeros, ones = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    recipe = {"kind": "table", **encoder.to_dict()}
    return PartyView(name, x, zeros, ones, aligned, unaligned, test, truth, recipe)


def prepare(recipe: Mapping[str, Any], raw: Mapping[str, np.ndarray] | np.ndarray) -> np.ndarray:
    """New rows as `PartyView.x` holds them.

    Args:
        recipe: of the party's view.
        raw: for a table, name -> (n,) raw columns; for cells, (n, C, H, W) uint8 whole images; for several pictures
            of an object, (n, V * C, size, size) uint8 from `fedloom.data.manifest.read_views`.

    Raises:
        DataError: the recipe is damaged or of another kind of data, or the rows don't fit it.
    """
    kind = recipe.get("kind")
    if isinstance(raw, Mapping) != (kind == "table") or kind not in ("table", "cells", "pictures"):
        raise DataError(f"Rows of the kind {type(raw).__name__} don't fit a recipe of the kind {kind!r}.")
    if isinstance(raw, Mapping):
        return TableEncoder.from_dict(recipe).transform(raw)
    try:
        shape, grid, cells = (tuple(int(n) for n in recipe.get(key, ())) for key in ("shape", "grid", "cells"))
        number = len(windows((shape[1], shape[2]), (grid[0], grid[1]))) if kind == "cells" else 0
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(f"The recipe of a party's images is damaged; save the party again ({error!r}).") from error
    if raw.dtype != np.uint8 or raw.ndim != 4 or raw.shape[1:] != shape:
        raise DataError(f"Images must be (n, {', '.join(map(str, shape))}) uint8, but are {raw.shape} {raw.dtype}.")
    if kind == "pictures":
        return np.require(raw, requirements=("C", "W"))  # a file's pages can't be written to
    if not cells or not all(0 <= cell < number for cell in cells):
        raise DataError(f"The recipe of a party's images names the cells {list(cells)}, but there are {number}.")
    return cut(raw, (grid[0], grid[1]), cells)
