"""The encoded data of each party of a vertical federation, and the recipe that encodes its raw
rows.

Parties have different columns of the same people. `PartyView` is what one party has, `x` with rows
in an order of its own; `aligned` and `test` are row numbers by which the views fit together: entry
k is the same person at every party. `VerticalDataset` holds all views of a simulation and the
labels, which only the first party has. Both check themselves when they are made.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.statistics import deviations
from fedloom.data.dataset import Kind, array_problem
from fedloom.data.encoder import TableEncoder
from fedloom.data.grammar import PLAIN, Grammar
from fedloom.data.images import crop_cells, grid_cells
from fedloom.data.options import Kind as ColumnKind


@dataclass(frozen=True, eq=False)
class PartyView:
    """The columns of one party, as numbers.

    Raises:
        DataError: the arrays are inconsistent, or a number is not finite.
    """

    name: str
    """"party-0", or the stem of a file's name."""
    x: np.ndarray
    """(n, C, H, W) uint8 images, or (n, F) float32 columns; C-contiguous. Only rows that are used.
    """
    shift: np.ndarray
    """(C,) or (F,) float32. The input of a network is (x - shift) / scale."""
    scale: np.ndarray
    """(C,) or (F,) float32, above 0."""
    aligned: np.ndarray
    """(N_a,) int64 row numbers of x: the same people in the same order at every party."""
    unaligned: np.ndarray
    """(N_u,) int64 row numbers of people that some parties lack; in simulations, of people of this
    party only.
    """
    test: np.ndarray
    """(T,) int64 row numbers of test rows: the same people in the same order at every party."""
    truth: np.ndarray | None
    """(N_u,) int64 classes of the unaligned rows, or None if unknown. For statistics only; methods
    do not get them.
    """
    recipe: dict[str, Any]
    """The encoding of raw rows as x, as plain JSON values, for `prepare`."""
    present: np.ndarray | None = None
    """(n,) bool, whether the party has each row of x; None if it has all. The rows that it lacks
    are 0 in x.
    """

    def __post_init__(self) -> None:
        for problem in _view_problems(self):
            raise DataError(f"Party {self.name!r}: {problem}.")

    @property
    def kind(self) -> Kind:
        """Whether the rows are images or rows of a table."""
        return "image" if self.x.ndim == 4 else "table"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row: (C, H, W) or (F,)."""
        return self.x.shape[1:]

    def has(self, rows: np.ndarray) -> np.ndarray:
        """(r,) bool, whether the party has these rows (r,) of x."""
        found: np.ndarray = (
            np.ones(len(rows), dtype=bool) if self.present is None else self.present[rows]
        )
        return found


@dataclass(frozen=True, eq=False)
class VerticalDataset:
    """A vertical federation's data. The first view is the active party's, the only one with labels.

    Raises:
        DataError: the views or labels are inconsistent.
    """

    name: str
    kind: Kind
    classes: tuple[str, ...]
    """K names; () for a number to predict."""
    views: tuple[PartyView, ...]
    """One for each party, the active one first."""
    labels: np.ndarray
    """(N_a,) int64 classes of the aligned rows, or float64 numbers."""
    test_labels: np.ndarray
    """(T,) int64 classes of the test rows, or float64 numbers."""
    label: str = ""
    """The name of the label, if it is known."""
    target: tuple[float, float] = (0.0, 1.0)
    """Of a number: the active party learns (number - shift) / scale. No other party needs these
    two.
    """

    range_parts: tuple[tuple[str, ...], np.ndarray, np.ndarray] | None = None
    """Of a number: the names of parts of its range, and those of the aligned and of the test rows:
    see `strata_of`.
    """

    @property
    def parts(self) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
        """The names of the classes, or of parts of a number's range, and those of the aligned and
        of the test rows.
        """
        return self.range_parts or (self.classes, self.labels, self.test_labels)

    def __post_init__(self) -> None:
        for problem in _dataset_problems(self):
            raise DataError(f"Parties of {self.name!r}: {problem}.")


def scale_of(labels: np.ndarray) -> tuple[float, float]:
    """Mean and s.d. of numbers to predict (N_a,), 1 if they are equal."""
    return float(labels.mean()), float(deviations(labels))


def ranges(aligned: int, unaligned: int, test: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row numbers of consecutive aligned, unaligned and test rows."""
    ends = np.cumsum([aligned, unaligned, test])
    return np.arange(ends[0]), np.arange(ends[0], ends[1]), np.arange(ends[1], ends[2])


def table_view(
    name: str,
    columns: Mapping[str, np.ndarray],
    aligned: np.ndarray,
    unaligned: np.ndarray,
    test: np.ndarray,
    truth: np.ndarray | None,
    present: np.ndarray | None = None,
    kinds: Mapping[str, ColumnKind] = MappingProxyType({}),
    grammar: Grammar = PLAIN,
) -> PartyView:
    """A party's view of its raw columns, encoded by rules fitted on the aligned and unaligned rows
    that it has.

    `kinds` are those of columns that are not guessed; `grammar` is how new rows' cells are read.
    """
    known = np.concatenate([aligned, unaligned])
    if present is not None:
        known = known[present[known]]
        if not len(known):
            raise DataError(
                f"Party {name!r} lacks every row for training: lower columns.missing, or leave "
                "it out."
            )
    try:
        encoder = TableEncoder.fit(columns, known, kinds=kinds, grammar=grammar)
        x = encoder.transform(columns)
    except DataError as error:
        raise DataError(f"Party {name!r}: {error}") from error
    if encoder.dropped:
        logging.getLogger("fedloom").warning(
            "party %r: dropped %d columns that are constant or nearly so over its training rows: "
            "%s",
            name,
            len(encoder.dropped),
            ", ".join(encoder.dropped[:10]) + (", …" if len(encoder.dropped) > 10 else ""),
        )
    zeros, ones = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    recipe = {"kind": "table", **encoder.to_dict()}
    if grammar != PLAIN:
        recipe |= {"missing_words": list(grammar.missing_words), "decimal": grammar.decimal}
    return PartyView(
        name, blank(x, present), zeros, ones, aligned, unaligned, test, truth, recipe, present
    )


def blank(x: np.ndarray, present: np.ndarray | None) -> np.ndarray:
    """The rows (n, ...) with zeros for those that are not present (n,)."""
    if present is None:
        return x
    found: np.ndarray = np.ascontiguousarray(
        x * present.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)
    )
    return found


def encode_new_rows(recipe: Mapping[str, Any], raw: Mapping[str, Any] | np.ndarray) -> np.ndarray:
    """Encode new rows like `PartyView.x`.

    Args:
        recipe: of the party's view.
        raw: for a table, name -> a `RawColumn` of n cells; for cells, (n, C, H, W) uint8 whole
            images; for several pictures of an object, (n, V * C, size, size) uint8 from
            `fedloom.data.manifest.read_views`.

    Raises:
        DataError: the recipe is invalid or for another kind of data, or the rows do not fit it.
    """
    kind = recipe.get("kind")
    if isinstance(raw, Mapping) != (kind == "table") or kind not in ("table", "cells", "pictures"):
        raise DataError(f"Rows of type {type(raw).__name__} do not fit a recipe of kind {kind!r}.")
    if isinstance(raw, Mapping):
        return TableEncoder.from_dict(recipe).transform(raw)
    try:
        shape, grid, cells = (
            tuple(int(n) for n in recipe.get(key, ())) for key in ("shape", "grid", "cells")
        )
        number = len(grid_cells((shape[1], shape[2]), (grid[0], grid[1]))) if kind == "cells" else 0
    except (IndexError, TypeError, ValueError) as error:
        raise DataError(
            f"The recipe of a party's images is invalid; save the party again ({error!r})."
        ) from error
    if raw.dtype != np.uint8 or raw.ndim != 4 or raw.shape[1:] != shape:
        raise DataError(
            f"Images must be (n, {', '.join(map(str, shape))}) uint8, not {raw.shape} {raw.dtype}."
        )
    if kind == "pictures":
        return np.require(raw, requirements=("C", "W"))  # a memory-mapped file is read-only
    if not cells or not all(0 <= cell < number for cell in cells):
        raise DataError(
            f"The recipe of a party's images has the cells {list(cells)}, but valid cells are "
            f"0..{number - 1}."
        )
    return crop_cells(raw, (grid[0], grid[1]), cells)


def _view_problems(view: PartyView) -> Iterator[str]:
    """Problems with a view. Later checks assume that the earlier ones passed, so only the first is
    reported.
    """
    if problem := array_problem(view.x, view.shift, view.scale):
        yield problem
    if not view.x[0:1].size:  # empty without rows, and without columns
        yield f"x must have rows and columns, not the shape {view.x.shape}"

    # the three parts are disjoint row numbers of x
    parts, n = (view.aligned, view.unaligned, view.test), len(view.x)
    for part in parts:
        if part.dtype != np.int64 or part.ndim != 1:
            yield (
                f"aligned, unaligned and test must be int64 row numbers, not {part.dtype} "
                f"{part.shape}"
            )
    rows = np.concatenate(parts)
    if len(rows) and (rows.min() < 0 or rows.max() >= n):
        yield f"aligned, unaligned and test must hold row numbers from 0 to {n - 1}"
    if twice := len(rows) - len(np.unique(rows)):
        yield f"aligned, unaligned and test must be disjoint, but {twice} rows occur twice"

    # truth and presence have one entry for each row that they speak of
    if view.truth is not None and (
        view.truth.dtype != np.int64 or view.truth.shape != view.unaligned.shape
    ):
        yield f"truth must be an int64 class for each of the {len(view.unaligned)} unaligned rows"
    if view.present is not None and (view.present.dtype != bool or view.present.shape != (n,)):
        yield f"present must be ({n},) bool, not {view.present.shape} {view.present.dtype}"
    try:  # the recipe is written into the folder of a deployed model
        json.dumps(view.recipe, allow_nan=False)
    except (TypeError, ValueError):
        yield "the recipe must consist of plain JSON values"


def _dataset_problems(data: VerticalDataset) -> Iterator[str]:
    """Inconsistencies between the views. Later checks assume that the earlier ones passed, so only
    the first is reported.
    """
    views, classes = data.views, len(data.classes)  # no classes: the labels are numbers

    # parties and classes
    if len(views) < 2:
        yield f"at least 2 parties are needed, not {len(views)}"
    names = [view.name for view in views]
    if len(set(names)) < len(names):
        yield f"names of parties must be unique, but are {names}"
    if classes == 1:
        yield f"at least 2 classes are needed, not {data.classes}"
    for view in views:
        if view.kind != data.kind:
            yield f"all must hold {data.kind}s, but {view.name!r} holds {view.kind}s"

    # aligned and test rows are the same people at all parties: as many, and some
    sizes = {
        "aligned": [len(view.aligned) for view in views],
        "test": [len(view.test) for view in views],
    }
    for what, counts in sizes.items():
        if len(set(counts)) > 1 or counts[0] == 0:
            yield f"all must have the same number of {what} rows, at least 1, but have {counts}"

    # name -> labels, and how many there must be; the length of a truth was checked by its view
    known = {
        "labels": (data.labels, sizes["aligned"][0]),
        "test_labels": (data.test_labels, sizes["test"][0]),
    }
    known |= {
        f"the truth of {v.name!r}": (v.truth, len(v.truth)) for v in views if v.truth is not None
    }
    for what, (labels, size) in known.items():
        # of a number to predict, a truth holds the parts of its range: see `strata_of`
        kind = np.int64 if classes or what.startswith("the truth") else np.float64
        if labels.dtype != kind or labels.shape != (size,):
            yield f"{what} must be ({size},) {np.dtype(kind)}, not {labels.shape} {labels.dtype}"
        if not classes and not np.isfinite(labels).all():
            yield f"{what} must be finite"
        # a party may have no unaligned row, and so an empty truth
        if classes and len(labels) and (labels.min() < 0 or labels.max() >= classes):
            yield (
                f"{what} must be in 0..{classes - 1}, but range from {labels.min()} to "
                f"{labels.max()}"
            )
