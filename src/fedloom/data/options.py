"""The settings of a user's own data, and the interpretation of its columns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from fedloom.data.grammar import MISSING_WORDS, Decimal, Decimals, Grammar, plain_name
from fedloom.data.tables import RawTable

Task = Literal["classes", "number"]
Missing = Literal["refuse", "median", "most-frequent", "indicator"]
MissingColumns = Literal["refuse", "allow"]
Kind = Literal["number", "category", "text", "date"]


Encoding = Literal["text", "date"]
"""The kinds of columns that a fixed encoder reads."""


@dataclass(frozen=True)
class DataOptions:
    """How to read a user's table or pictures: settings of `[data]` with the same names."""

    label: str | None = None
    """The column to predict; None to guess it."""
    group: str | None = None
    """The column of the rows' owners, such as a hospital or person; None if there is none."""
    id: str | None = None
    """The column that names each row; never a feature."""
    drop: tuple[str, ...] = ()
    """Columns that are no features; "*" stands for any text."""
    keep: tuple[str, ...] = ()
    """The only columns that are features; empty for all; "*" stands for any text. A column named in
    full is kept also if it looks like an identifier.
    """
    missing: Missing = "refuse"
    """The replacement of a missing number: see `docs/data.md`."""
    test: str | tuple[str, ...] | None = None
    """The column that says which rows are test rows, or the names of owners whose rows are; None to
    draw them.
    """
    unseen: tuple[str, ...] = ()
    """Names of the owners that take part in no round; they are numbered last."""
    task: Task | None = None
    """What the label is: "classes" if whole numbers are names of classes, however many; "number"
    for a number to predict; None to guess.
    """
    missing_words: tuple[str, ...] = MISSING_WORDS
    """Words that stand for a missing value, in every column; an empty cell always does."""
    decimal: Decimals = "."
    """The sign before the decimals of a number, or that of files by name; others have a point."""
    encode: Mapping[str, Kind] = field(default_factory=dict)
    """The kind of columns whose kind is not to be guessed."""
    missing_columns: MissingColumns = "refuse"
    """Whether owners may have different columns: what an owner has no value of is missing there."""

    def __post_init__(self) -> None:
        """Names of columns are plain, as in all tables."""
        for setting in ("label", "group", "id", "test"):
            if isinstance(name := getattr(self, setting), str):
                object.__setattr__(self, setting, plain_name(name))
        for setting in ("drop", "keep"):
            object.__setattr__(self, setting, tuple(map(plain_name, getattr(self, setting))))
        object.__setattr__(
            self, "encode", {plain_name(name): kind for name, kind in self.encode.items()}
        )

    @property
    def fills(self) -> Missing:
        """The replacement of a missing number: with `missing_columns` an indicator, unless
        `missing` says otherwise.
        """
        return (
            "indicator"
            if self.missing_columns == "allow" and self.missing == "refuse"
            else self.missing
        )

    @property
    def grammar(self) -> Grammar:
        """How cells are read; where files have signs of their own, how their numbers are written
        when all are read.
        """
        return Grammar(self.missing_words, self.decimal if isinstance(self.decimal, str) else ".")

    @property
    def decimals(self) -> Mapping[str, Decimal]:
        """The decimal signs of files by name; empty if all files have one."""
        return {} if isinstance(self.decimal, str) else self.decimal

    def of_file(self, name: str) -> "DataOptions":
        """The settings with the decimal sign of one file."""
        return replace(self, decimal=self.decimals.get(name, self.grammar.decimal))

    def given(self) -> str:
        """The names of the settings that differ from their defaults."""
        return ", ".join(
            f"data.{name}" for name, value in vars(self).items() if value != getattr(GUESS, name)
        )


GUESS = DataOptions()
"""No settings: everything is guessed."""


@dataclass(frozen=True)
class OwnFile:
    """How to read a node's own file: settings of `[data.NAME]` in `node.toml`, with the words of
    `[data]`.
    """

    options: DataOptions
    """Of the columns. Only columns that `keep` names or matches may be used."""
    owner: str | None = None
    """The only owner in the column `group` whose rows are used; None where all rows have one owner.
    """
    missing: Missing | None = None
    """The replacement of a missing number; None for the run's."""
    test_fraction: float | None = None
    """The share of test rows; None for the run's."""
    classes: tuple[str, ...] = ()
    """The words of the label; rows with another one are left out."""
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The words of each column that is a category; another one counts as none of them."""
    encode: Mapping[str, Encoding] = field(default_factory=dict)
    """The columns that are texts or dates."""
    lacks: tuple[str, ...] = ()
    """Columns that the file does not have, and that a run may take as missing."""


@dataclass(frozen=True)
class SplitColumns:
    """Columns that say how rows may be divided into training and test rows."""

    unit: str | None = None
    """A column, such as a patient, whose rows of one value are never divided; never a feature."""
    time: tuple[str, ...] | None = ()
    """Columns by which rows are ordered in time, the most significant first; None to guess them.
    Text in them, such as a date, is no feature.
    """


UNORDERED = SplitColumns()
"""Rows may be divided at random."""


@dataclass(frozen=True, eq=False)
class Understanding:
    """The columns of a table and their roles, as `roles.understand` infers them."""

    table: RawTable
    """The features, with labels, owners and test rows."""
    label: str
    """The name of the label column."""
    guessed: bool
    """Whether the label was guessed."""
    options: DataOptions
    """The settings that were asked for."""
    kinds: Mapping[str, Kind]
    """The kind of each feature."""
    missing: Mapping[str, int]
    """The number of missing values of each feature that has any."""
    dropped: Mapping[str, str]
    """The reason, as a clause, for each column that is no feature."""
    notes: tuple[str, ...] = ()
    """Notes on the decisions that no setting made."""
    kept: np.ndarray = field(default_factory=lambda: np.arange(0))
    """Numbers of the rows that are used."""
    group_guess: str | None = None
    """A column that looks like the owners, if none is named."""
    optional: tuple[str, ...] = ()
    """The features that an owner has no value of, with `data.missing_columns`."""
    time_guess: tuple[str, ...] = ()
    """Columns that look like a time, such as year, month and day, the most significant first."""
    unit: np.ndarray | None = None
    """(n,) words of `SplitColumns.unit`, as written."""
    time: tuple[np.ndarray, ...] = ()
    """(n,) float64 of each of `SplitColumns.time`, which grow with time."""
    unit_guess: str | None = None
    """A column that looks like people with several rows, if no id or unit is named."""
    day_guess: str = ""
    """The columns of `time_guess`, or a column of dates; "" if there is none."""
    days: np.ndarray | None = None
    """(n,) int64; rows of one value are of one day by `day_guess`."""

    def counts(self) -> dict[str, int]:
        """Rows of each class; empty for a number."""
        numbers = (
            np.bincount(self.table.y, minlength=len(self.table.classes)).tolist()
            if self.table.classes
            else []
        )
        return dict(zip(self.table.classes, numbers, strict=True))

    def spread(self, owner: int | None = None) -> dict[str, float]:
        """Of a number to predict: the least, the mean, the s.d. and the largest, over all rows or
        an owner's; empty for classes.
        """
        if self.table.classes:
            return {}
        y = (
            self.table.y
            if owner is None or self.table.groups is None
            else self.table.y[self.table.groups == owner]
        )
        return {
            "min": float(y.min()),
            "mean": float(y.mean()),
            "sd": float(y.std()),
            "max": float(y.max()),
        }

    def owners(self) -> dict[str, list[int]]:
        """Owner -> rows of each class, or all its rows if the label is a number; empty without
        owners.
        """
        y, groups, k = self.table.y, self.table.groups, len(self.table.classes)
        if groups is None:
            return {}
        if not k:
            return {
                name: [int((groups == number).sum())]
                for number, name in enumerate(self.table.owners)
            }
        return {
            name: np.bincount(y[groups == number], minlength=k).tolist()
            for number, name in enumerate(self.table.owners)
        }

    def settings(self) -> dict[str, Any]:
        """Settings of `[data]` that state the decisions, as TOML values: a run with them reads the
        data in the same way, and guesses nothing.
        """
        options = self.options
        group = options.group or self.group_guess
        # columns that another setting names, and that `drop` must not name again; `test` may also
        # be names of owners
        named = {
            group,
            self.label,
            options.id,
            options.test if isinstance(options.test, str) else None,
        }
        drop = [name for name in self.dropped if name not in named]

        # which columns have a role
        values: dict[str, Any] = {"label": self.label}
        values |= {"group": group} if group else {"partition": "iid"}
        values |= {"id": options.id} if options.id else {}
        values |= {"drop": drop} if drop else {}
        values |= {"keep": list(options.keep)} if options.keep else {}

        # how cells are read: what was set, and guesses that a run would have to repeat
        values |= {"task": self.table.task} if options.task or self.table.task == "number" else {}
        if options.missing_words != MISSING_WORDS:
            values["missing_words"] = list(options.missing_words)
        values |= {"decimal": options.decimal} if options.decimal != "." else {}
        # numbers and categories are guessed again from the same cells; hashed texts and dates are
        # stated, as the user may want to know
        encode = {name: kind for name, kind in self.kinds.items() if kind in ("text", "date")}
        values |= {"encode": {**encode, **options.encode}} if encode or options.encode else {}

        # what replaces a missing number: without a setting a run would refuse it. A missing word is
        # a category of its own, and needs none
        numbers = [name for name in self.missing if self.kinds[name] in ("number", "date")]
        if options.fills != "refuse" or numbers:
            values["missing"] = options.fills if options.fills != "refuse" else "median"
        values |= {"missing_columns": "allow"} if options.missing_columns == "allow" else {}

        # which rows are tested, and which owners take no part
        if options.test:
            values["test"] = options.test if isinstance(options.test, str) else list(options.test)
        return values | ({"unseen": list(options.unseen)} if options.unseen else {})
