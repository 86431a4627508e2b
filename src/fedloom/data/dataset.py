"""A pool of labeled rows in memory."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.statistics import deviations
from fedloom.data.tables import MISSING, strata_of

Kind = Literal["image", "table"]
Fill = Literal["", "median", "most-frequent"]
_SHAPES = {(4, np.dtype(np.uint8)), *((dims, np.dtype(np.float32)) for dims in (2, 3, 4))}
"""Numbers of dimensions and types of rows."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled rows in memory, decoded; training and test rows together.

    Raises:
        DataError: the arrays are inconsistent, a label is out of range, or a number is not finite.
    """

    name: str
    x: np.ndarray
    """(n, C, H, W) uint8 or float32 images, (n, F) float32 columns, or (n, F, L) float32 series;
    C-contiguous.
    """
    y: np.ndarray
    """(n,) int64 labels, 0..K-1, or float64 numbers to predict, in their own unit."""
    classes: tuple[str, ...]
    """K names; () for numbers to predict."""
    shift: np.ndarray
    """(C,) or (F,) float32. The input of a network is (x - shift) / scale."""
    scale: np.ndarray
    """(C,) or (F,) float32, above 0."""
    test: np.ndarray | None = None
    """(t,) int64 row numbers of the official test split, or None if the set has none."""
    groups: np.ndarray | None = None
    """(n,) int64 owner of each row, such as a writer; None without owners."""
    columns: tuple[str, ...] = ()
    """F names of table columns; one value of a category is called "column=value"."""
    owners: tuple[str, ...] = ()
    """Names of the owners, if they are known: row i belongs to `owners[groups[i]]`."""
    fill: Fill = ""
    """The replacement of missing numbers in a table, which are NaN until it is standardized; "" for
    none.
    """
    notes: tuple[str, ...] = ()
    """Notes on the decisions that were made when the data was read."""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """The encoding of a user's table, as plain JSON values: `TableEncoder.from_dict` reads it."""
    fits: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...] = ()
    """The fill (F,), shift and scale of a table's columns: one for each owner, by which x is scaled
    already, or one for all, by which only missing numbers are filled.
    """
    words: tuple[tuple[str, ...], ...] = ()
    """For each column of a table as it was read, the words of a category, whose values are 0, 1, …;
    () for numbers. Empty for encoded columns.
    """
    offset: np.ndarray | None = None
    """(F,) float64: what was subtracted from each column of x, so that float32 tells its numbers
    apart; None for 0.
    """
    ready: bool = False
    """Whether rows are inputs of networks as they are, so that they are not standardized."""
    target: tuple[float, float] = (0.0, 1.0)
    """Of numbers to predict: a network learns (y - shift) / scale, this shift and scale."""
    label: str = ""
    """The name of the label, if it is known; it stands for the unit of a number to predict."""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise DataError(f"Data set {self.name!r}: {problem}.")

    @property
    def kind(self) -> Kind:
        """Whether the rows are images or rows of a table."""
        return "image" if self.x.ndim == 4 else "table"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one row: (C, H, W) or (F,)."""
        return self.x.shape[1:]

    @property
    def task(self) -> Literal["classes", "number"]:
        """What the labels are."""
        return "classes" if self.classes else "number"

    @property
    def strata(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """See `fedloom.data.tables.strata_of`."""
        return strata_of(self.y, self.classes)

    def with_target(self, rows: np.ndarray) -> "Dataset":
        """The same rows with `target` set to mean and s.d. over `rows` (r,), r >= 1; of classes
        unchanged.
        """
        if self.classes:
            return self
        known = self.y[rows]
        return replace(self, target=(float(known.mean()), float(deviations(known))))

    @property
    def train(self) -> np.ndarray:
        """(n - t,) int64 numbers of all rows outside the official test split, ascending."""
        rows = np.arange(len(self.y))
        return rows if self.test is None else np.setdiff1d(rows, self.test, assume_unique=True)

    def standardized(self, rows: np.ndarray) -> "Dataset":
        """The same rows with shift and scale set to the mean and s.d. of each column over `rows`.

        Images, and rows that are `ready`, keep their shift and scale: statistics of the pixels
        would have to be pooled from the clients.

        Args:
            rows: (r,) row numbers, r >= 1. A column that is constant over them gets scale 1.
        """
        if self.kind == "image" or self.ready:
            return self
        if len(rows) == 0:
            raise DataError(
                f"Data set {self.name!r}: standardizing needs at least one row, but none was given."
            )
        if self.fill:
            fill, shift, scale = fit_columns(self.x[rows], self.fill)
            x = np.where(np.isnan(self.x), fill, self.x)
            return replace(
                self, x=x, shift=shift, scale=scale, fill="", fits=((fill, shift, scale),)
            )
        shift, scale = moments(self.x[rows])
        return replace(self, shift=shift, scale=scale)

    def standardized_by_owner(self, train: np.ndarray) -> "Dataset":
        """The same rows, each column filled and scaled by its owner's own rows among `train` (r,):
        see `fits`.

        An owner without such rows is filled and scaled by all its rows.
        """
        if self.kind == "image":
            return self
        assert self.groups is not None
        x, fits, chosen = self.x.copy(), [], np.zeros(len(self.y), dtype=bool)
        chosen[train] = True
        for owner in range(int(self.groups.max()) + 1):
            own = self.groups == owner
            fill, shift, scale = fit_columns(
                self.x[own & chosen if (own & chosen).any() else own], self.fill or "median"
            )
            shift, scale = unscaled(shift, scale, self.columns, self.recipe.get("optional", ()))
            x[own] = (np.where(np.isnan(x[own]), fill, x[own]) - shift) / scale
            fits.append((fill, shift, scale))
        return replace(self, x=x, fill="", fits=tuple(fits))


@dataclass(frozen=True)
class DatasetInfo:
    """A data set without its rows; the attributes are those of `Dataset`."""

    name: str
    kind: Kind
    input_shape: tuple[int, ...]
    classes: tuple[str, ...]
    columns: tuple[str, ...]
    shift: np.ndarray
    scale: np.ndarray
    words: tuple[tuple[str, ...], ...] = ()
    target: tuple[float, float] = (0.0, 1.0)
    label: str = ""


DatasetLike: TypeAlias = Dataset | DatasetInfo


def fit_columns(x: np.ndarray, fill: Fill) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The replacement of missing numbers in each column of rows (r, F), 0 in an empty one; and the
    `moments` afterwards.
    """
    empty = np.isnan(x).all(axis=0)
    known = np.where(empty, np.float32(0), x)
    if fill == "median":
        values = np.nanmedian(known, axis=0)
    else:
        values = np.array([_most_frequent(column[~np.isnan(column)]) for column in known.T])
    filling = values.astype(np.float32)
    return filling, *moments(np.where(np.isnan(x), filling, x))


def unscaled(
    shift: np.ndarray, scale: np.ndarray, columns: Sequence[str], optional: Collection[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale (F,), but 0 and 1 for the columns that say where a value of `optional`
    columns is missing.

    Where an owner lacks a column they are 1 in all its rows, which its own mean would make 0, as
    where none is missing.
    """
    marks = {f"{name} missing" for name in optional} | {f"{name}={MISSING}" for name in optional}
    marked = np.array([column in marks for column in columns], dtype=bool)
    return np.where(marked, np.float32(0), shift), np.where(marked, np.float32(1), scale)


def _most_frequent(values: np.ndarray) -> float:
    """The most frequent value, the smallest of several."""
    names, counts = np.unique(values, return_counts=True)
    return float(names[counts.argmax()])


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and s.d. (F,) float32 of rows (r, F); the s.d. is 1 where a column is constant."""
    exact = x.astype(np.float64)
    mean, std = exact.mean(axis=0).astype(np.float32), deviations(exact).astype(np.float32)
    return mean, np.where(std > 0, std, np.float32(1))


def pixel_scaling(channels: int, half_range: float = 127.5) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale (C,) float32 that map pixels 0..2 * half_range to -1..1."""
    return np.full(channels, half_range, dtype=np.float32), np.full(
        channels, half_range, dtype=np.float32
    )


def image_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    *,
    half_range: float = 127.5,
    **more: Any,
) -> Dataset:
    """Images (n, C, H, W) with pixels 0..2 * half_range, which a network receives as -1..1; `more`
    as in `Dataset`.
    """
    shift, scale = pixel_scaling(x.shape[1], half_range)
    return Dataset(name, x, y, classes, shift, scale, **more)


def table_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    columns: tuple[str, ...],
    **more: Any,
) -> Dataset:
    """A table (n, F), not standardized; see `Dataset.standardized`. `more` as in `Dataset`."""
    zeros, ones = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    return Dataset(name, x, y, classes, zeros, ones, columns=columns, **more)


def array_problem(
    x: np.ndarray, shift: np.ndarray, scale: np.ndarray, *, gaps: bool = False
) -> str:
    """The problem with rows and their scaling, or ""; with `gaps`, a number may be
    missing (NaN).
    """
    if (x.ndim, x.dtype) not in _SHAPES:
        return (
            f"x must be (n, C, H, W) uint8 or (n, F) float32, not {x.shape} {x.dtype}; convert "
            "it first"
        )
    if not x.flags.c_contiguous:
        return "x must be C-contiguous; use np.ascontiguousarray"
    if not (shift.shape == scale.shape == x.shape[1:2]):
        return (
            f"shift and scale must be {x.shape[1:2]}, but they are {shift.shape} and {scale.shape}"
        )
    if not (np.isfinite(shift).all() and np.isfinite(scale).all()):
        return "shift and scale must be finite"
    if not (scale > 0).all():
        return "scale must be above 0"
    if x.dtype == np.float32 and not (~np.isinf(x) if gaps else np.isfinite(x)).all():
        return "the table has numbers that are not finite; impute or drop missing values"
    return ""


def _problems(data: Dataset) -> Iterator[str]:
    """Problems with a data set. Later checks assume that the earlier ones passed, so only the first
    is reported.
    """
    y, n, classes = data.y, len(data.y), len(data.classes)  # no classes: y are numbers to predict

    # rows and labels: their shapes and types
    if n == 0:
        yield "it has no rows"
    # NaN is allowed only where `fill` says what will replace it
    if problem := array_problem(data.x, data.shift, data.scale, gaps=bool(data.fill)):
        yield problem
    if y.shape != (len(data.x),):
        yield f"x has {len(data.x)} rows, but y has the shape {y.shape}"
    if y.dtype != (np.int64 if classes else np.float64):
        yield (
            "labels must be int64 classes, or float64 numbers without names of classes, not "
            f"{y.dtype}"
        )

    # the values of labels
    if classes == 1:
        yield f"it needs at least 2 classes, but has {data.classes}"
    if not classes and not np.isfinite(y).all():
        yield "numbers to predict must be finite"
    if not classes and not (np.isfinite(data.target).all() and data.target[1] > 0):
        yield (
            f"the target's shift and scale must be finite, and the scale above 0, not {data.target}"
        )
    if classes and (y.min() < 0 or y.max() >= classes):
        yield (
            f"labels must be in 0..{classes - 1}, one for each class, but range from {y.min()} "
            f"to {y.max()}"
        )

    # what is told of rows and columns beside
    if data.groups is not None and data.groups.shape != y.shape:
        yield f"groups must give an owner for each of the {n} rows"
    if data.owners and (
        # groups without names of owners may have any numbers
        data.groups is None or not 0 <= data.groups.min() <= data.groups.max() < len(data.owners)
    ):
        yield f"groups must be in 0..{len(data.owners) - 1}, one for each owner"
    if not _are_row_numbers(data.test, n):
        yield f"test must hold distinct row numbers from 0 to {n - 1}"
    if data.kind == "table" and len(data.columns) != data.x.shape[1]:
        yield f"the table has {data.x.shape[1]} columns, but {len(data.columns)} column names"


def _are_row_numbers(rows: np.ndarray | None, n: int) -> bool:
    """Whether these are distinct numbers of some of n rows, at least one; or None."""
    if rows is None:
        return True
    if rows.dtype != np.int64 or rows.ndim != 1 or not len(rows):
        return False
    return bool(rows.min() >= 0 and rows.max() < n and len(np.unique(rows)) == len(rows))
