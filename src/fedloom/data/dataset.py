"""A pool of labelled rows in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from fedloom.core.errors import DataError

Kind = Literal["image", "table"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled rows in memory, decoded; training and test rows together.

    Raises:
        DataError: the arrays are inconsistent, a label is out of range, or a number is not finite.
    """

    name: str
    x: np.ndarray
    """(n, C, H, W) uint8 images, or (n, F) float32 columns; C-contiguous."""
    y: np.ndarray
    """(n,) int64 labels, 0..K-1."""
    classes: tuple[str, ...]
    """K names."""
    shift: np.ndarray
    """(C,) or (F,) float32. The input of a network is (x - shift) / scale."""
    scale: np.ndarray
    """(C,) or (F,) float32, above 0."""
    test: np.ndarray | None
    """(t,) int64 row numbers of the official test split, or None if the set has none."""
    groups: np.ndarray | None = None
    """(n,) int64 natural owner of each row (a writer, a celebrity), or None."""
    columns: tuple[str, ...] = ()
    """F names of table columns; one value of a category is called "column=value"."""

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
    def train(self) -> np.ndarray:
        """(n - t,) int64 numbers of all rows outside the official test split, ascending."""
        rows = np.arange(len(self.y))
        return rows if self.test is None else np.setdiff1d(rows, self.test, assume_unique=True)

    def standardised(self, rows: np.ndarray) -> Dataset:
        """The same rows with shift and scale set to the mean and s.d. of each column over `rows`.

        Images keep their fixed shift and scale: statistics of the pixels would have to be pooled from the clients.

        Args:
            rows: (r,) row numbers, r >= 1. A column that is constant over them gets scale 1.
        """
        if self.kind == "image":
            return self
        if len(rows) == 0:
            raise DataError(f"Data set {self.name!r}: standardising needs at least one row, but none was given.")
        shift, scale = moments(self.x[rows])
        return replace(self, shift=shift, scale=scale)


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


DatasetLike: TypeAlias = Dataset | DatasetInfo


def moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and s.d. (F,) float32 of rows (r, F); the s.d. is 1 where a column is constant."""
    exact = x.astype(np.float64)
    mean, std = exact.mean(axis=0).astype(np.float32), exact.std(axis=0).astype(np.float32)
    return mean, np.where(std > 0, std, np.float32(1))


def pixel_scaling(channels: int, half_range: float = 127.5) -> tuple[np.ndarray, np.ndarray]:
    """Shift and scale (C,) float32 that map pixels 0..2 * half_range to -1..1."""
    return np.full(channels, half_range, dtype=np.float32), np.full(channels, half_range, dtype=np.float32)


def image_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    *,
    test: np.ndarray | None = None,
    groups: np.ndarray | None = None,
    half_range: float = 127.5,
) -> Dataset:
    """Images (n, C, H, W) with pixels 0..2 * half_range, which a network receives as -1..1."""
    return Dataset(name, x, y, classes, *pixel_scaling(x.shape[1], half_range), test, groups)


def table_dataset(
    name: str,
    x: np.ndarray,
    y: np.ndarray,
    classes: tuple[str, ...],
    columns: tuple[str, ...],
    *,
    test: np.ndarray | None = None,
    groups: np.ndarray | None = None,
) -> Dataset:
    """A table (n, F), not standardised; see `Dataset.standardised`."""
    zeros, ones = np.zeros(x.shape[1], np.float32), np.ones(x.shape[1], np.float32)
    return Dataset(name, x, y, classes, zeros, ones, test, groups, columns)


def array_problem(x: np.ndarray, shift: np.ndarray, scale: np.ndarray) -> str:
    """The problem with rows and their scaling, or ""."""
    if (x.ndim, x.dtype) not in ((4, np.dtype(np.uint8)), (2, np.dtype(np.float32))):
        return f"x must be (n, C, H, W) uint8 or (n, F) float32, not {x.shape} {x.dtype}; convert it first"
    if not x.flags.c_contiguous:
        return "x must be C-contiguous; use np.ascontiguousarray"
    if not (shift.shape == scale.shape == x.shape[1:2]):
        return f"shift and scale must be {x.shape[1:2]}, but they are {shift.shape} and {scale.shape}"
    if not (np.isfinite(shift).all() and np.isfinite(scale).all()):
        return "shift and scale must be finite"
    if not (scale > 0).all():
        return "scale must be above 0"
    if x.ndim == 2 and not np.isfinite(x).all():
        return "the table has numbers that are not finite; impute or drop missing values"
    return ""


def _problems(data: Dataset) -> Iterator[str]:
    """Problems with a data set. Later checks assume that the earlier ones passed, so only the first is reported."""
    y, n, classes = data.y, len(data.y), len(data.classes)
    if n == 0:
        yield "it has no rows"
    if problem := array_problem(data.x, data.shift, data.scale):
        yield problem
    if y.shape != (len(data.x),):
        yield f"x has {len(data.x)} rows, but y has the shape {y.shape}"
    if y.dtype != np.int64:
        yield f"labels must be int64, not {y.dtype}"
    if classes < 2:
        yield f"it needs at least 2 classes, but has {data.classes}"
    if y.min() < 0 or y.max() >= classes:
        yield f"labels must be in 0..{classes - 1}, one for each class, but range from {y.min()} to {y.max()}"
    if data.groups is not None and data.groups.shape != y.shape:
        yield f"groups must give an owner for each of the {n} rows"
    if not _valid_rows(data.test, n):
        yield f"test must hold distinct row numbers from 0 to {n - 1}"
    if data.kind == "table" and len(data.columns) != data.x.shape[1]:
        yield f"the table has {data.x.shape[1]} columns, but {len(data.columns)} column names"


def _valid_rows(rows: np.ndarray | None, n: int) -> bool:
    """Whether these are distinct numbers of some of n rows."""
    if rows is None:
        return True
    if rows.dtype != np.int64 or rows.ndim != 1 or not len(rows):
        return False
    return bool(rows.min() >= 0 and rows.max() < n and len(np.unique(rows)) == len(rows))
