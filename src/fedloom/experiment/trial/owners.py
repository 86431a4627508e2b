"""The rows of several owners: read as `fedloom data` reads them, and standardized by each owner
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.objects import find
from fedloom.data.dataset import Dataset
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.data.own import encoded, interpret
from fedloom.experiment.trial.words import some

FEWEST_ROWS = 12
"""Rows of an owner below which it is left out."""
MOST_NAMED = 10
"""Owners that a note names, at most."""
FARTHEST = 10.0
"""Numbers of a table are clipped to this many standard deviations, so that one row does not
dominate.
"""


@dataclass(frozen=True, eq=False)
class Owners:
    """The labeled rows of N owners.

    Attributes:
        data: the rows, whose `groups` are the numbers of the owners and `owners` their names; not
            standardized.
        unit: (n,) int64; rows of one value are never split between training and test rows. None:
            each row alone.
        order: (n,) int64 place in time; test rows then come after training rows. None: splits are
            random.
        notes: notes on the decisions that no setting made.
    """

    data: Dataset
    unit: np.ndarray | None = None
    order: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = np.bincount(self.owner, minlength=len(self.names))
        if len(self.names) < 2 or counts.min() < FEWEST_ROWS:
            few = some(
                [f"{name} ({count})" for name, count in zip(self.names, counts, strict=True)],
                MOST_NAMED,
            )
            raise DataError(
                f"A trial needs at least 2 owners with at least {FEWEST_ROWS} labeled rows each, "
                f"but there are {few}."
            )

        if all(len(np.unique(self.data.y[self.owner == i])) < 2 for i in range(len(self.names))):
            raise DataError(
                "A trial scores each owner's predictions on its own rows, but every owner has "
                "rows of one class only: add owners, or rows, with several classes."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The owners' names."""
        return self.data.owners

    @property
    def owner(self) -> np.ndarray:
        """(n,) int64, the owner of each row."""
        assert self.data.groups is not None
        return self.data.groups

    def rows(self, i: int) -> np.ndarray:
        """The row numbers of owner i."""
        return np.flatnonzero(self.owner == i)


def read_owners(source: Any, options: DataOptions, ordered: SplitColumns) -> Owners:
    """The owners of a file, a folder, a frame or columns, understood as by `fedloom data`.

    Rows without a label are left out, and so are owners with few rows. An id that repeats is the
    unit.

    Raises:
        DataError: as `fedloom.data.own.interpret`, or there are fewer than two owners.
    """
    found, images = interpret(source, options, ordered=ordered)
    if found.table.groups is None:
        guess = f", perhaps {found.group_guess!r}" if found.group_guess else ""
        raise DataError(
            f"A trial needs the column of the owners, such as hospitals: name it as group{guess}."
        )
    notes = list(found.notes)
    unit = None if found.unit is None else _ranks([found.unit])
    if unit is not None and len(np.unique(unit)) == len(unit):
        unit = None
    if found.unit_guess:
        notes.append(
            f"Values of column {found.unit_guess!r} repeat: if rows of one value belong "
            f"together, as a patient's do, set unit = {found.unit_guess!r}, or these gains are "
            "not to be trusted."
        )
    order = _ranks(found.time) if found.time else None
    if order is not None and ordered.time is None:
        names = ", ".join(found.time_guess)
        if _together(order, found.table.groups):
            notes.append(
                f"Test rows come after training rows by {names}; --no-time splits at random."
            )
        else:
            order = None
            notes.append(
                f"Splits are random: the owners' rows are not of the same time by {names}."
            )
    return owners_of(encoded(found, images), unit, order, tuple(notes))


def _together(order: np.ndarray, groups: np.ndarray) -> bool:
    """Whether each owner has rows to train on in the first half of all times, and to test on in the
    second.
    """
    late = order >= (order.max() + 1) // 2
    return all(len(np.unique(late[groups == i])) == 2 for i in np.unique(groups))


def owners_of(
    data: Dataset,
    unit: np.ndarray | None = None,
    order: np.ndarray | None = None,
    notes: tuple[str, ...] = (),
) -> Owners:
    """Owners of a data set with groups, without those of few rows.

    Raises:
        DataError: the data set has no groups, or fewer than two owners.
    """
    if data.groups is None:
        raise DataError(
            f"{data.name!r} does not say who has which row: give group, the owner of each row."
        )
    codes, groups = np.unique(data.groups, return_inverse=True)
    names = tuple(data.owners[code] if data.owners else f"client-{code}" for code in codes)
    counts = np.bincount(groups)
    small = [i for i in range(len(names)) if counts[i] < FEWEST_ROWS]
    if not small or len(names) - len(small) < 2:
        return Owners(
            replace(data, groups=groups.reshape(-1).astype(np.int64), owners=names),
            unit,
            order,
            notes,
        )
    left = some([f"{names[i]} ({counts[i]})" for i in small], MOST_NAMED)
    kept = ~np.isin(groups, small)
    large = replace(
        data,
        x=np.ascontiguousarray(data.x[kept]),
        y=data.y[kept],
        groups=data.groups[kept],
        test=None,
    )
    return owners_of(
        large,
        None if unit is None else unit[kept],
        None if order is None else order[kept],
        (
            *notes,
            f"{len(small)} of {len(names)} owners have fewer than {FEWEST_ROWS} rows and are "
            f"left out: {left}.",
        ),
    )


def held_owners(name: str) -> Owners:
    """The owners of a data set that is held under this name: see
    `fedloom.experiment.config.objects.data_settings`.
    """
    data: Dataset = find(name, DataError)
    return owners_of(data, notes=data.notes)


def _ranks(columns: Sequence[np.ndarray]) -> np.ndarray:
    """(n,) int64 ranks of the rows by these columns, the most significant first."""
    ranks = [
        np.unique(v if v.dtype.kind == "f" else v.astype(str), return_inverse=True)[1]
        for v in columns
    ]
    codes: np.ndarray = (
        np.unique(np.stack(ranks, axis=1), axis=0, return_inverse=True)[1]
        .reshape(-1)
        .astype(np.int64)
    )
    return codes


# -- encoding --------------------------------------------------------------------------------------


def standardized(owners: Owners, train: Sequence[np.ndarray]) -> Dataset:
    """All rows; those of a table filled and scaled by their owner's training rows alone.

    Owners share only the names of columns, of words, and which columns have gaps somewhere.
    """
    data = owners.data
    if data.kind == "image" or data.ready:
        return data
    data = data.standardized_by_owner(np.concatenate(train))
    return replace(data, x=np.clip(data.x, -FARTHEST, FARTHEST))
