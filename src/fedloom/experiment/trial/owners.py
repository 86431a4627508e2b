"""The rows of several owners: read as `fedloom data` reads them, and standardized by each owner
alone.

`read_owners` and `owners_of` make `Owners` of any data, `in_doubt` looks for rows in a series, and
`run_trial` begins with `distinct`, which looks for copies. All owners' rows are in one data set of
n rows; arrays (n,) of integer codes say what rows belong together: equal codes do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.objects import find
from fedloom.data.copies import (
    Copies,
    codes_of_rows,
    copies_of,
    elsewhere,
    joined_codes,
    label_copies,
    places_among,
    times_of,
)
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import undo
from fedloom.data.options import DataOptions, SplitColumns
from fedloom.data.own import encoded, interpret
from fedloom.experiment.trial.words import some

FEWEST_ROWS = 12
"""Rows of an owner below which it is left out."""
MOST_NAMED = 10
"""Owners that a note names, at most."""
ALIKE, CLEARLY = 0.2, 5.0
"""The correlation of labels of rows that follow each other, and its size in standard errors, from
which on rows may be a series.
"""
SORTED = 0.95
"""The share of steps up, or down, from which on numbers are sorted."""
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
        copies: (n,) int64; rows of one value are copies, never divided between training and test
            rows either: see `distinct`. None: each row is the only one of its kind.
        doubt: whether nothing excludes that rows depend on each other, as those of a day do.
    """

    data: Dataset
    unit: np.ndarray | None = None
    order: np.ndarray | None = None
    notes: tuple[str, ...] = ()
    copies: np.ndarray | None = None
    doubt: bool = False

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

    @property
    def together(self) -> np.ndarray | None:
        """(n,) what rows count as one: units, or copies; None: each row counts."""
        return self.copies if self.unit is None else self.unit

    def rows(self, i: int) -> np.ndarray:
        """The row numbers of owner i."""
        return np.flatnonzero(self.owner == i)

    def only(self, kept: np.ndarray) -> "Owners":
        """The rows where a mask (n,) is true, without owners that then have few."""
        unit, order, copies = (
            _kept_codes(codes, kept) for codes in (self.unit, self.order, self.copies)
        )
        data = _only_rows(self.data, kept)
        return replace(owners_of(data, unit, order, copies, self.notes), doubt=self.doubt)


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
    doubt = bool(found.unit_guess)
    if found.unit_guess:
        notes.append(
            f"Values of column {found.unit_guess!r} repeat: if rows of one value belong "
            f"together, as a patient's do, set unit = {found.unit_guess!r}, or these gains are "
            "not to be trusted."
        )
    order = _ranks(found.time) if found.time else None
    groups, day, days = found.table.groups, found.day_guess, found.days
    if order is not None and ordered.time is None:
        names = ", ".join(found.time_guess)
        if _together(order, groups):
            days = None
            notes.append(
                f"Test rows come after training rows by {names}; --no-time splits at random."
            )
        else:
            order = None
    elif ordered.time or (
        # without time by request, days that owners share stay whole
        ordered.time == () and days is not None and elsewhere(days, groups).mean() < 0.5
    ):
        days = None
    if days is not None and unit is None:
        told = ordered.time is not None
        doubt |= not told
        if min(len(np.unique(days[groups == i])) for i in np.unique(groups)) >= FEWEST_ROWS:
            unit = days
            notes.append(f"Rows of one time by {day} are kept together, also at several owners.")
        if found.time_guess and not told:
            notes.append(
                f"Splits are random: the owners' rows are not of the same time by {day}. Rows of "
                "times in a row may be alike, which random splits take for gains."
            )
        elif not told:
            notes.append(
                "Rows of times in a row may be alike, which random splits take for gains: set "
                f"time = {day!r} if they are, or time = () if rows do not depend on {day!r}."
            )
    owners = owners_of(encoded(found, images), unit, order, notes=tuple(notes))
    return replace(owners, doubt=doubt)


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
    copies: np.ndarray | None = None,
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
            copies,
        )
    left = some([f"{names[i]} ({counts[i]})" for i in small], MOST_NAMED)
    kept = ~np.isin(groups, small)
    unit, order, copies = (_kept_codes(codes, kept) for codes in (unit, order, copies))
    note = (
        f"{len(small)} of {len(names)} owners have fewer than {FEWEST_ROWS} rows and are "
        f"left out: {left}."
    )
    return owners_of(_only_rows(data, kept), unit, order, copies, (*notes, note))


def _kept_codes(codes: np.ndarray | None, kept: np.ndarray) -> np.ndarray | None:
    """The codes (n,) where a mask (n,) is true; None if there are none."""
    return None if codes is None else codes[kept]


def _only_rows(data: Dataset, kept: np.ndarray) -> Dataset:
    """The rows of a data set with owners where a mask (n,) is true."""
    assert data.groups is not None
    return replace(
        data,
        x=np.ascontiguousarray(data.x[kept]),
        y=data.y[kept],
        groups=data.groups[kept],
        test=None,
    )


def in_doubt(owners: Owners) -> Owners:
    """The owners; with a note and in doubt if labels of rows that follow each other are alike, as
    in a series, but not sorted, and no unit or order says how rows depend.
    """
    if owners.unit is not None or owners.order is not None:
        return owners
    told = [
        (_alike(owners.data.y[rows], owners.data.task), len(rows))
        for rows in map(owners.rows, range(len(owners.names)))
    ]
    alike, n = sum(one * rows for one, rows in told) / len(owners.owner), len(owners.owner)
    if alike < ALIKE or alike * np.sqrt(n) < CLEARLY:
        return owners
    note = (
        f"Labels of rows that follow each other are alike (correlation {alike:.2f}): if rows are "
        "in order of time, or several are of one person, name time or unit, or these gains are "
        "not to be trusted; time = () if rows do not depend on each other."
    )
    return replace(owners, doubt=True, notes=(*owners.notes, note))


def _alike(y: np.ndarray, task: str) -> float:
    """How alike the labels y (n,) of rows that follow each other are: 0 by chance, 1 if they are
    equal; 0 for sorted rows.
    """
    steps = np.diff(y)
    if task == "classes":
        counts = np.bincount(y)
        chance = float(np.square(counts / len(y)).sum())
        if np.count_nonzero(steps) < 2 * (counts > 0).sum() or chance == 1:
            return 0.0
        return (float((steps == 0).mean()) - chance) / (1 - chance)
    ranks = np.argsort(np.argsort(y, kind="stable")).astype(float)
    if max((steps >= 0).mean(), (steps <= 0).mean()) > SORTED or len(y) < FEWEST_ROWS:
        return 0.0
    return float(np.corrcoef(ranks[1:], ranks[:-1])[0, 1])


# -- copies ----------------------------------------------------------------------------------------


def raw_copies(data: Dataset) -> tuple[Copies, list[str]]:
    """The copies among a data set's rows, and notes on those of its label, by its columns before
    they were encoded.
    """
    # one column for each of the file's, with the numbers that were written there: only these show
    # who is a rounded copy of whom
    raw = undo(data)
    x = raw.x if raw.offset is None else raw.x + raw.offset
    if x.ndim != 2:  # pictures: pixels are not rounded, and tell no label
        return copies_of(x, np.zeros(0, bool)), []
    numbers = np.array([not words for words in raw.words or [()] * x.shape[1]])  # others are codes
    named = zip(raw.columns or map(str, range(x.shape[1])), x.T, numbers, strict=True)
    columns = {name: column for name, column, number in named if number}
    return copies_of(x, numbers), label_copies(columns, data.y, data.groups)


def distinct(owners: Owners) -> Owners:
    """The owners without rows that only repeat one of their own; other copies, as of several
    owners, rounded, or with another label, are never divided. Notes say so.

    A row that trains and whose copy tests gives the answer away, and what is counted twice looks
    surer than it is.
    """
    copies, label_notes = raw_copies(owners.data)
    owner, n = owners.owner, len(owners.owner)
    # a row only repeats another one if, beside its inputs, all of these are the same
    parts = [owner, np.unique(owners.data.y, return_inverse=True)[1].reshape(-1)]
    parts += [codes for codes in (owners.unit, owners.order) if codes is not None]

    # First, tables in which every row is there 2, 3, … times, as when one was exported twice. That
    # is no chance, even of rows with few columns, which `copies_of` takes for people who are alike.
    kept, equal = np.ones(n, bool), codes_of_rows(copies.equal, *parts)
    for own in map(owners.rows, range(len(owners.names))):
        if (times := times_of(equal[own])) > 1:
            # the first 1 / times of the rows of each code stay: a code that is there 4 times in a
            # table that was doubled is of two people
            place, count = places_among(equal[own])
            again = place >= count // times
            # Where each row is followed by its copies, the first of each lot stays instead, so that
            # the others keep their order: folds are drawn by it, and are those of the single table.
            if (equal[own].reshape(-1, times) == equal[own][::times, None]).all():
                again = np.arange(len(own)) % times > 0
            kept[own[again]] = False

    # Then copies among the rows that are left, looked for anew: how many rows are equal by chance
    # is told by all the others, and in a doubled table nearly all look like copies. Codes are row
    # numbers of the smaller table, and `left` makes them those of all n.
    left, codes = np.flatnonzero(kept), copies.copies
    if len(left) < n:
        codes = np.arange(n)
        codes[left] = left[raw_copies(_only_rows(owners.data, kept))[0].copies]
    same = codes_of_rows(codes, *parts)
    kept[left[places_among(same[left])[0] > 0]] = False  # all but the first of each

    # what is still there more than once, at several owners or with another label or time
    kept_codes, kept_owner = codes[kept], owner[kept]
    shared, rows = elsewhere(kept_codes, kept_owner), len(kept_codes)
    notes = [note for note in label_notes if note not in owners.notes]
    if rows < n:
        notes.append(
            f"{n - rows} of {n} rows are copies of another row of their owner, equal or equal but "
            "for rounding: they are left out, so that each counts once."
        )
    if shared.any():
        whole = [name for i, name in enumerate(owners.names) if shared[kept_owner == i].all()]
        notes.append(
            f"{int(shared.sum())} of {rows} rows are also at another owner, equal or equal but for "
            "rounding or the label: copies are kept in one fold, and count together."
            + (f" All rows of {some(whole, MOST_NAMED)} are such." if whole else "")
        )
    if twice := rows - len(np.unique(codes_of_rows(kept_codes, kept_owner))):
        notes.append(
            f"{twice} of {rows} rows are copies of a row of their owner with another label or "
            "time: they are kept in one fold, and count together."
        )

    # Codes of all n rows, which `only` cuts. Copies join the units that they are in: patient A's
    # row that is also patient B's keeps all rows of both in one fold.
    marked = replace(
        owners,
        unit=None if owners.unit is None else joined_codes(owners.unit, codes),
        copies=codes if len(np.unique(kept_codes)) < rows else None,
        notes=(*owners.notes, *notes),
    )
    return marked.only(kept) if rows < n else marked


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
