"""The role of each column of a user's table: label, owner, id, split, feature, or none.

`understand` decides it from the settings of `[data]`, guesses what they leave open, and says so in
sentences.

In come the columns as `fedloom.data.own` has read them, each of n cells that are not interpreted
yet. A column that gets a role is taken out of the candidates (`_Candidates`); what is left at the
end are the features. Out goes an `Understanding`: the table of the features and of the rows that
are used (`RawTable`), which `fedloom.data.encoder` turns into numbers, and notes for the user.

Three kinds of rows are not used: those without a label, those without an owner, and those that the
column of the split says are for validation. `kept` holds the numbers of all others.

A node reads its own file by `own_rows` instead, which guesses nothing: only what the file's owner
has allowed in node.toml may be used.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.core.statistics import constant
from fedloom.data.amounts import is_pair
from fedloom.data.columns import RawColumn, known_words
from fedloom.data.copies import label_copies
from fedloom.data.grammar import (
    MOST_NUMBERS,
    Grammar,
    date_order,
    dated,
    is_number,
    like_date,
    moments,
    nearly_equal,
    refuse_disordered,
    unread,
)
from fedloom.data.options import UNORDERED, DataOptions, Kind, OwnFile, SplitColumns, Understanding
from fedloom.data.tables import (
    MISSING,
    RawTable,
    different,
    filled,
    mistakes,
    numbers_of,
    refuse_mistakes,
)

LABELS = ("label", "labels", "target", "class", "y")
"""Column names that mean a label."""
MAX_WORDS = 50
"""A text column with more different words is no category but text."""
MIN_UNIQUE = 20
"""A column with so many values, all different, may be an identifier."""
_OUTCOMES = (
    *LABELS,
    "outcome",
    "diagnosis",
    "disease",
    "default",
    "churn",
    "activity",
    "digit",
    "result",
    "status",
)
_OWNERS: tuple[str, ...] = (
    "hospital",
    "clinic",
    "site",
    "center",
    "centre",
    "institution",
    "owner",
    "client",
    "bank",
    "branch",
    "school",
    "inst",
    "institute",
    "company",
    "firm",
    "store",
    "ward",
    "university",
    "precinct",
)
_OWNERS += (
    "station",
    "device",
    "person",
    "patient",
    "subject",
    "user",
    "speaker",
    "writer",
    "drawer",
    "member",
    "group",
)
DATES = "dates"
_ROLES = {"group": "the owner", "id": "the id", "test": "the split", "label": "the label"}
"""Setting -> what a column that it names is, for an error about another use of the column."""
ALLOW = 'Set data.missing_columns = "allow" to take what an owner lacks as missing there'
_SAYS = "Say so, or otherwise, by data.encode,"
BY_NAME = "an identifier by its name"
_PEOPLE = (
    "patient|subject|person|participant|individual|child|pupil|student|woman|mother|animal|user|speaker|writer|member|"
    "customer|employee|household|family"
)
_IDENTIFIER = re.compile(
    r"(^|[_\W])(ids?|uuid|guid|mrn|ssn|e-?mail|phone)$|^(idx|index|key|name|pid|record|unnamed: "
    r"?\d+)$|^row[_ .]?(names?|num(ber)?|nr|no)$|"
    rf"({_PEOPLE}|school|client|account|loan|order|case|sample|visit|record|site)ids?$",
    re.I,
)
_UNIT = re.compile(rf"(^|[_\W])({_PEOPLE})([_\W]?(no|nr|num|number|code|name))?$", re.I)
"""A column of this name, or an identifier, whose values repeat may name people with several rows.
"""
_CAMEL = re.compile(r"[a-z]I[dD]$")
_TIMES = ("year", "month", "day", "hour", "minute", "second")
_DATES = ("date", "datetime", "timestamp", "time")
_PARTS = {
    **dict.fromkeys(("train", "training", "false", "0"), "train"),
    **dict.fromkeys(("test", "testing", "true", "1"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_SOME_ROWS = 200
"""Rows by which a column is looked at before all are."""
_EXCEL_ERROR = re.compile("#[A-Z0-9/]+[!?]")
_LIKE_MISSING = re.compile(
    r"[-–—_*]{1,5}|n[./]?a[.]?|n[./]d[.]?|nan|nil|none|null|#null!|missing|unknown|unk|undefined|blank|empty|"
    r"not (available|applicable|known|recorded|stated|specified)|no (data|answer|value)|k\.? "
    r"?a\.?|s/d|n\.? ?v\.?",
    re.I,
)
"""Words that are often written where a value is missing."""
_NINES = {10.0**digits - 1 for digits in range(2, 8)}
_SEPARATORS = re.compile(r"\s*[|;,]\s*")


class UnclearError(DataError):
    """A table has columns that are neither numbers nor words.

    Args:
        name: of the table.
        columns: each with the number of its different values, in words.
    """

    def __init__(self, name: str, columns: Mapping[str, str]) -> None:
        self.columns = columns
        listed = ", ".join(f"{column!r} ({what})" for column, what in columns.items())
        one = next(iter(columns))
        super().__init__(
            f"{name!r} has {'a column' if len(columns) == 1 else 'columns'} that cannot be read: "
            f"{listed}. Or leave out with data.drop = {[*columns]}, or take as words with "
            f"data.encode.{one} = 'category' or 'text'."
        )


@dataclass
class _Candidates:
    """Columns by name; those that have a role are taken out."""

    name: str
    """Of the table, for errors."""
    values: dict[str, RawColumn]
    """The columns that may still be features."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Column that is no feature -> the reason, as a clause that follows "is"."""

    def take_out(self, column: str, setting: str) -> RawColumn:
        """Remove the column that `data.<setting>` names, and return it. Raises DataError if there
        is none of this name, or if it has another role already.
        """
        if column not in self.values:
            known = [*self.values, *self.dropped]
            if column in self.dropped:
                raise DataError(
                    f"data.{setting} names the column {column!r}, which is "
                    f"{self.dropped[column]} already; name another."
                )
            raise DataError(
                f"data.{setting} names the column {column!r}, but {self.name!r} has only "
                f"{_some(known)}.{did_you_mean(column, known) if len(known) > 8 else ''}"
            )
        self.dropped |= {column: _ROLES[setting]} if setting in _ROLES else {}
        return self.values.pop(column)

    def drop(self, column: str, reason: str) -> None:
        """Remove a column, and record the reason."""
        del self.values[column]
        self.dropped[column] = reason


def understand(
    columns: Mapping[str, RawColumn],
    options: DataOptions,
    name: str,
    *,
    named: Mapping[str, Sequence[str]] | None = None,
    test: np.ndarray | None = None,
    picture: bool = False,
    ordered: SplitColumns = UNORDERED,
) -> Understanding:
    """The roles of a table's columns.

    Args:
        columns: by name, each of n cells.
        options: the settings.
        name: of the data, for errors.
        named: columns of class numbers -> the names of their classes.
        test: row numbers of a test split that the files state.
        picture: whether each row has a picture, so that other columns are no features.
        ordered: columns whose values `Understanding.unit` and `Understanding.time` have.

    Raises:
        DataError: a named column does not exist; there is no label, or one class only; an owner is
            missing.
        UnclearError: a column has numbers that the grammar does not read.
    """
    table, named = _Candidates(name, dict(columns)), named or {}
    notes: list[str] = []
    if not table.values or not len(next(iter(table.values.values()))):
        raise DataError(f"{name!r} has no rows; add rows below the header.")

    # the columns that settings name, before the label is guessed among those that are left
    group = None if options.group is None else table.take_out(options.group, "group")
    if options.id is not None:
        ids = table.take_out(options.id, "id")
        # rows of one unit are kept together anyway, so an id that is the unit may repeat
        if (repeated := len(ids) - len({*ids.text})) and ordered.unit != options.id:
            notes.append(
                f"Column {options.id!r} (id) repeats in {repeated} rows: rows of one id may be "
                "in training and in test."
            )
    # a string names the column of the split; a tuple names owners whose rows are test rows
    split = table.take_out(options.test, "test") if isinstance(options.test, str) else None

    # the label: y (n,) are classes (int64, -1 for a gap) or numbers (float64, NaN for a gap)
    guessed = options.label is None
    label = options.label or _guess_label(table, list(named), picture)
    label_cells = table.take_out(label, "label")
    try:
        y, classes = labels_of(label_cells, name, named.get(label), options)
    except DataError as error:
        raise DataError(
            f"{error} The label is a guess: name it as data.label." if guessed else str(error)
        ) from None
    if guessed:
        notes.append(f"The label is taken to be {label!r}: name it as data.label.")
    if y.dtype.kind == "f" and options.task is None and _whole(y):
        notes.append(
            f"Column {label!r} has {len(np.unique(y[~unlabeled(y)]))} different whole numbers "
            "and is taken to be a "
            'number to predict: if they are numbers of classes, set data.task = "classes", else '
            '"number".'
        )
    # the rows that are used: `kept` (r,) numbers them among all n
    owners: tuple[str, ...] = ()
    groups = None
    if group is not None:
        owners, groups = _owners(group, options)
    unowned = np.zeros(len(y), bool) if group is None else group.missing
    kept = _outside_split(split, y)
    kept = kept[~unowned[kept]]
    rows = kept if len(kept) < len(y) else slice(None)  # a slice takes all rows without a copy
    y_kept, groups_kept = y[rows], None if groups is None else groups[rows]

    # all rows that are left may have one label, though the whole column has several
    labels = np.unique(y_kept)
    if y.dtype.kind == "f" and (len(labels) < 2 or constant(y_kept)):
        raise DataError(
            f"Column {label!r} of {name!r} must have different numbers, but has "
            f"{min(len(labels), 1)}."
        )
    if len(labels) < 2:
        only = classes[int(labels[0])] if len(labels) else "none"
        raise DataError(
            f"Column {label!r} of {name!r} must have at least 2 classes, but has {only!r} only."
        )
    if (gone := int(unlabeled(y).sum())) > 0:
        notes.append(f"{gone} of {len(y)} rows have no label in {label!r} and are left out.")
    if group is not None and (gone := int(unowned.sum())):
        notes.append(
            f"{gone} of {len(y)} rows have no owner in {options.group!r} and are left out."
        )
    notes += _label_notes(label_cells, y[~unlabeled(y)], classes)
    notes += [
        f"Owners {_some(names)} differ in writing only: correct the data if they are one."
        for names in nearly_equal(owners)
    ]

    # the test rows (t,), among all n: a setting goes before the split that the files state
    if split is not None:
        test = np.flatnonzero(_split_parts(split) == "test")
    elif options.test:
        test = _rows_of_test_owners(options, owners, groups)

    # the columns that keep rows together (unit) and that order them (time), among all columns:
    # an id or an owner may be one, too
    dates = [name for name, found in columns.items() if name != label and _holds_dates(found)]
    time_guess = _guess_time(columns, label) or _guess_days(columns, dates, groups)
    unit, time = ordered.unit, time_guess if ordered.time is None else ordered.time
    for column in (*([] if unit is None else [unit]), *time):
        if column not in columns:
            raise DataError(
                f"{name!r} has no column {column!r}, but "
                f"{_some(list(columns))}.{did_you_mean(column, list(columns))}"
            )
        if count := int(columns[column].missing[kept].sum()):
            raise DataError(
                f"Column {column!r} lacks {count} of {len(kept)} values; correct or drop those "
                "rows."
            )
        # a year as a number stays a feature, a date as text does not: see `SplitColumns.time`
        if column in table.values and (column == unit or columns[column].values.dtype.kind == "O"):
            table.drop(column, "the unit" if column == unit else "the time")

    # the features: (r,) numbers or words of each candidate that is left
    kinds: dict[str, Kind] = {}
    if picture:
        table.values.clear()
    else:
        # class numbers become their names, or None if missing
        for column in table.values.keys() & named.keys():
            table.values[column] = class_names(table.values[column], named[column])
        kinds = _kinds_of_features(table, options, kept, notes)
    features = {
        column: _typed(found, kinds[column])[rows] for column, found in table.values.items()
    }

    # what the user should look at
    notes += _copy_notes(features, y_kept, groups_kept)
    notes += label_copies(features, y_kept, groups_kept)
    odd_names = [name for name, values in features.items() if _names_value(name, values)]
    if 2 * len(odd_names) > len(features):
        notes.append(
            f"Columns' names are values, such as {odd_names[0]!r}: check that the first row is "
            "the header."
        )
    missing = {
        column: count for column, values in features.items() if (count := int(_gaps(values).sum()))
    }
    notes += _missing_notes([label_cells, *table.values.values()])
    # owner -> features that it has no value of: a gap, unless owners may differ in columns
    lacking = (
        {}
        if options.missing_columns == "refuse" or groups_kept is None
        else _lacking(features, groups_kept, owners)
    )
    notes += [
        f"Owner {owner!r} lacks {_some(names)}: values are missing there."
        for owner, names in lacking.items()
    ]

    # guesses of what no setting names, which change nothing here: callers suggest the settings
    group_guess = None if options.group else _guess_group(columns, label, options)
    others = {
        name: c
        for name, c in columns.items()
        if name not in (label, options.group, group_guess, options.test)
    }
    unit_guess = None if ordered.unit or options.id else _guess_unit(others, groups)
    day = time_guess or tuple(dates[:1])
    return Understanding(
        table=RawTable(
            name,
            features,
            y_kept,
            classes,
            _among_kept(test, kept, name),
            groups_kept,
            owners,
            label,
        ),
        label=label,
        guessed=guessed,
        options=options,
        kinds=kinds,
        missing=missing,
        dropped=table.dropped,
        notes=tuple(notes),
        kept=kept,
        group_guess=group_guess,
        optional=tuple(
            column for column in features if any(column in names for names in lacking.values())
        ),
        time_guess=time_guess,
        unit=None if unit is None else columns[unit].words[kept],
        time=tuple(_times(columns[column])[kept] for column in time),
        unit_guess=unit_guess,
        day_guess=", ".join(day),
        # coded over all n rows, so that a date has one code whichever rows are used
        days=_codes([columns[column].text for column in day])[kept] if day else None,
    )


def _among_kept(test: np.ndarray | None, kept: np.ndarray, name: str) -> np.ndarray | None:
    """(t,) int64 places among `kept` (r,) of the test rows, given by their numbers among all rows.
    Raises DataError if no row is left for the test, or for training.
    """
    if test is not None:
        test = np.flatnonzero(np.isin(kept, test)).astype(np.int64)
        if not 0 < len(test) < len(kept):
            raise DataError(
                f"{name!r} has {len(test)} test rows of {len(kept)}; both parts need rows."
            )
    return test


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The rows of a node's own file that a run may use."""

    kept: np.ndarray
    """(r,) int64 numbers of those with a label that are for training or testing."""
    test: np.ndarray | None
    """(t,) int64 places among `kept` of the test rows, or None to draw them."""
    notes: tuple[str, ...]


def own_rows(
    columns: Mapping[str, RawColumn],
    file: OwnFile,
    name: str,
    *,
    wanted: Collection[str] = (),
    test: np.ndarray | None = None,
) -> OwnRows:
    """The rows that the owner of a node's file lets runs use, by the rules of `understand` and
    without guesses.

    Args:
        columns, name, test: as in `understand`.
        file: the owner's settings.
        wanted: the columns that a run uses as input.

    Raises:
        DataError: a named column or owner does not exist, the rows have several owners and none is
            named, or a wanted column is not allowed or is an identifier by its name.
    """
    table, options, notes = _Candidates(name, dict(columns)), file.options, list[str]()
    used = np.ones(len(next(iter(columns.values()))), dtype=bool)  # (n,), narrowed step by step

    # of a file with the rows of several owners, those of the one that this node is
    if options.group is not None:
        owner_cells = table.take_out(options.group, "group")
        # a row without an owner may be anybody's: refused, not left out as in `understand`
        _refuse_unowned(owner_cells)
        words = owner_cells.words
        known = known_words(words)
        if file.owner is None and len(known) > 1:
            raise DataError(
                f"Column {options.group!r} (data.group) names {len(known)} owners, but a node "
                f"has the rows of one: set owner in [data.{name}] to its name, or use a file "
                "with its rows only."
            )
        if file.owner is not None and file.owner not in known:
            raise DataError(
                f"There is no owner {file.owner!r} in column "
                f"{options.group!r}.{did_you_mean(file.owner, known)}"
            )
        used &= (words == file.owner) if file.owner is not None else used
    if options.id is not None:
        table.take_out(
            options.id, "id"
        )  # is `dropped` then, so that a run that wants it is refused

    # the split that the file's owner names goes before the one that the file states
    if isinstance(options.test, str):
        parts = _split_parts(table.take_out(options.test, "test"))
        used &= parts != "validation"
        test = np.flatnonzero(parts == "test")

    # rows without a label, and then rows whose label is none of the agreed classes: both notes
    # count among the rows that are still used
    if options.label is not None:
        gaps = table.take_out(options.label, "label").missing
        if count := int((gaps & used).sum()):
            notes.append(
                f"{count} of {used.sum()} rows have no label in {options.label!r} and are left out."
            )
        used &= ~gaps
        if file.classes:
            foreign = used & ~np.isin(columns[options.label].words, file.classes)
            if count := int(foreign.sum()):
                notes.append(
                    f"{count} of {used.sum()} rows have a label outside classes and are left out."
                )
            used &= ~foreign
    _check_patterns(table, options)  # against all columns without another role
    kept = np.flatnonzero(used)
    if not len(kept):
        raise DataError(
            f"{name!r} has no row with a label that is for training or testing; correct its file."
        )

    # what the run asks for, against what the file's owner allows
    for column in wanted:
        if column not in columns:
            raise DataError(
                f"{name!r} must have a column {column!r}, but has {_some(list(columns))}."
            )
        if reason := left_out(column, options) or table.dropped.get(column, ""):
            raise DataError(f"The run uses column {column!r} of {name!r}, which is {reason}.")
        # by the name alone: a refusal that depended on values would tell the run about them
        if column not in options.keep and _names_rows(column):
            raise DataError(
                f"The run uses column {column!r}, which is {BY_NAME}. Name it in data.keep to "
                "allow it."
            )
    return OwnRows(kept, _among_kept(test, kept, name), tuple(notes))


def refuse_identifier(column: str, cells: RawColumn, options: DataOptions) -> None:
    """Raise DataError if a column that `keep` does not name in full has the values of an
    identifier.
    """
    known = cells.values[~cells.missing]
    words = _counted(known) if known.dtype.kind == "O" else {}
    count = len(words) or len(different(known))
    reason = "" if column in options.keep else _suspicion(cells, known, count, words)
    if reason and reason != BY_NAME:
        raise DataError(f"Column {column!r} is {reason}. Name it in keep to allow it, or in drop.")


def allowed(column: str, options: DataOptions) -> bool:
    """Whether runs may use a column of a node's file: `keep` names or matches it, and it has no
    other role.
    """
    roles = {options.label, options.group, options.id, options.test}
    return bool(options.keep) and column not in roles and not left_out(column, options)


def left_out(column: str, options: DataOptions) -> str:
    """Why `drop` or `keep` makes a column no feature; "" if they do not."""
    if any(matches(pattern, column) for pattern in options.drop):
        return "dropped as you said"
    return (
        "not in data.keep"
        if options.keep and not any(matches(p, column) for p in options.keep)
        else ""
    )


def _guess_label(table: _Candidates, typed_columns: Sequence[str], picture: bool) -> str:
    """The label column: by type, else by name, else a table's last."""
    names = list(table.values)
    by_name = [column for column in names if column.lower() in LABELS]
    outcomes = [column for column in names if column.lower() in _OUTCOMES]
    candidates = (
        [*typed_columns]
        or by_name
        or (outcomes if len(outcomes) == 1 else [] if picture else names[-1:])
    )
    if len(candidates) != 1:
        raise DataError(
            f"{table.name!r} must have one label column, but {_some(candidates) or 'none'} of "
            f"its columns {_some(names)} could be it; name it as data.label."
        )
    return candidates[0]


def labels_of(
    column: RawColumn, name: str, known: Sequence[str] | None, options: DataOptions
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes, -1 for a missing label, and the classes' names, sorted unless the files
    number them; or (n,) float64 numbers to predict, NaN for a missing one, and no names.

    Args:
        column: of the labels.
        name: of the table, for errors.
        known: the classes' names in order, if the file numbers them.
        options: how the table is read; its `task` decides what the label is.

    Raises:
        DataError: the column holds free text, several labels in a row, or not what `task` says.
    """
    where = f"Column {column.name!r} of {name!r}"  # how an error begins
    if column.several:
        raise DataError(
            f"{where} holds several labels in a row; fedloom predicts one: choose another label."
        )
    values = column.values

    # what a setting or the file decides
    if known is not None and options.task != "number":
        # the cells are class numbers already
        codes = np.where(column.missing, -1, np.nan_to_num(values, nan=-1)).astype(np.int64)
        refuse_unnamed(codes, known, where)
        return codes, tuple(known)
    if options.task == "number":
        return numbers_of(column.name, column), ()

    # what the values decide: fractions, or many whole numbers, are numbers to predict
    numbers = values[~np.isnan(values)] if column.is_number else np.empty(0)
    fractions = numbers[np.floor(numbers) != numbers]
    if options.task is None and (len(fractions) or len(np.unique(numbers)) > MOST_NUMBERS):
        return numbers_of(column.name, column), ()

    # classes: `y` (n,) are places in `names`
    y, names = column.codes()
    if len(fractions):  # only with task = "classes", as others are numbers by now
        raise DataError(
            f'{where} holds decimal numbers, such as {fractions[0]:g}: set data.task = "number" '
            "to predict them, "
            "choose a class column, or divide the numbers into classes first."
        )
    if options.task is None and not len(numbers):
        refuse_no_classes(column, where)

    # "a|b" holds two labels if "a" and "b" are labels, too; "Paris, France" is one name
    parts = [_SEPARATORS.split(word) for word in names]
    single = {part[0] for part in parts if len(part) == 1}
    if any(len(part) > 1 and set(part) <= single for part in parts):
        raise DataError(
            f"{where} holds several labels in a row, such as "
            f"{next(w for w in names if _SEPARATORS.search(w))!r}; fedloom predicts one class: "
            "choose another label, or write each combination as one word."
        )
    return y, names


def refuse_no_classes(labels: RawColumn, where: str) -> None:
    """Raise DataError if words are no classes but numbers that the grammar does not read, dates or
    free text.
    """
    words, rows = labels.counts, sum(labels.counts.values())
    says = 'set data.task = "classes" if they are classes'
    if odd := mistakes(words, labels.grammar):
        raise DataError(
            f"{where} has numbers, but {sum(odd.values())} of its {rows} values are not, such as "
            f"{next(iter(odd))[:40]!r}; correct them, or leave them empty, or list the word in "
            f"data.missing_words; or {says}."
        )
    what = unread(words, labels.grammar)
    if dated(words) or what.startswith(DATES):
        what = f"dates such as {next(iter(words))!r}: write numbers, such as days"
    if what:
        raise DataError(f"{where} has {len(words)} different {what}; or {says}.")
    if len(words) > max(MAX_WORDS, rows // 10) or 2 * len(words) > max(rows, MIN_UNIQUE):
        raise DataError(
            f"{where} has {len(words)} different values in {rows} rows: it looks like free text "
            "or an id; choose a class column, or divide the values into classes first; or "
            f"{says}."
        )


def refuse_unnamed(codes: np.ndarray, names: Sequence[str], where: str) -> None:
    """Raise DataError for class numbers (n,) that are not -1, for none, or the place of a name."""
    wrong = codes[(codes < -1) | (codes >= len(names))]
    if len(wrong):
        raise DataError(
            f"{where} has the class number {wrong[0]}, but the file names {len(names)} classes, "
            f"0 to {len(names) - 1}; correct the column or its names."
        )


def class_names(column: RawColumn, names: Sequence[str]) -> RawColumn:
    """A column of class numbers as their names, empty where they are missing.

    Raises:
        DataError: a number has no name.
    """
    codes = np.where(column.missing, -1, np.nan_to_num(column.values, nan=-1)).astype(np.int64)
    refuse_unnamed(codes, names, f"Column {column.name!r}")
    return RawColumn.of(column.name, np.array([*names, None], dtype=object)[codes], column.grammar)


def _owners(column: RawColumn, options: DataOptions) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the owners as written, the unseen ones last, and (n,) int64 owner of each row, 0 for
    a gap.
    """
    if column.missing_words:  # "NA" may be an owner's name, which must not get lost
        _refuse_unowned(column)
    codes, order = column.codes()  # (n,) places in `order`, -1 for a gap
    rows = int((codes >= 0).sum())
    if len(order) < 2 or len(order) > rows // 2:
        raise DataError(
            f"Column {column.name!r} (data.group) has {len(order)} owners in {rows} rows; there "
            "must be at least 2, with 2 rows each on average. Name another column."
        )
    for owner in {*options.unseen, *(options.test if isinstance(options.test, tuple) else ())}:
        if owner not in order:
            raise DataError(
                f"There is no owner {owner!r} in column "
                f"{column.name!r}.{did_you_mean(owner, order)}"
            )
    # the sort is stable: seen owners keep their order, and so do unseen ones behind them
    seen_first = sorted(range(len(order)), key=lambda number: order[number] in options.unseen)
    places = np.argsort(seen_first)  # the inverse: old number of an owner -> new one
    names = tuple(order[number] for number in seen_first)
    return names, places[np.maximum(codes, 0)].astype(np.int64)


def _refuse_unowned(column: RawColumn) -> None:
    """Raise DataError if the column of owners has gaps."""
    if count := int(column.missing.sum()):
        words = f" ({_some(list(column.missing_words))} count as empty: see data.missing_words)"
        raise DataError(
            f"Column {column.name!r} (data.group) must name an owner in each row, but {count} of "
            f"{len(column)} are empty{words if column.missing_words else ''}; correct or drop "
            "those rows."
        )


def _split_parts(column: RawColumn) -> np.ndarray:
    """(n,) "train", "test" or "validation" of each row."""
    words = [word.lower() for word in column.text]
    odd = sorted(set(words) - _PARTS.keys())
    if odd:
        raise DataError(
            f"Column {column.name!r} (data.test) must say train or test (or false or true, 0 or "
            f"1) in each row, but has {odd[0]!r}."
        )
    return np.array([_PARTS[word] for word in words])


def _whole(y: np.ndarray) -> bool:
    """Whether all known numbers (n,) are whole."""
    known = y[~np.isnan(y)]
    return bool((known == np.floor(known)).all())


def unlabeled(y: np.ndarray) -> np.ndarray:
    """(n,) whether each row lacks a label, as from `labels_of`."""
    gone: np.ndarray = np.isnan(y) if y.dtype.kind == "f" else y < 0
    return gone


def _outside_split(split: RawColumn | None, y: np.ndarray) -> np.ndarray:
    """Numbers of the rows that have a label and are for training or testing."""
    used = ~unlabeled(y)
    return np.flatnonzero(used if split is None else used & (_split_parts(split) != "validation"))


def _rows_of_test_owners(
    options: DataOptions, owners: Sequence[str], groups: np.ndarray | None
) -> np.ndarray:
    """(t,) numbers of the rows of the owners that `data.test` names."""
    if groups is None:
        raise DataError(
            f"data.test names owners, {_some(options.test or ())}; name their column as data.group."
        )
    return np.flatnonzero(np.isin(groups, [owners.index(name) for name in options.test or ()]))


def _guess_group(columns: Mapping[str, RawColumn], label: str, options: DataOptions) -> str | None:
    """A column that looks like the rows' owners, by its name and its number of values."""
    for column, found in columns.items():
        # of "site_id" and "first_site" the word is "site"
        word = re.sub(r"[_\W]?(id|no|nr|name|code)$", "", column.lower())
        plausible = (
            column not in (label, options.id)
            and word.split("_")[-1] in _OWNERS
            and not found.missing.any()
            and not found.is_inexact
        )
        if plausible and 2 <= len({*found.text}) <= max(2, len(found) // 10):
            return column
    return None


def _guess_unit(columns: Mapping[str, RawColumn], groups: np.ndarray | None) -> str | None:
    """A column that looks like people with several rows, each of one owner: by its name, and by
    values that repeat.
    """
    for column, found in columns.items():
        if not (_names_rows(column) or _UNIT.search(column)) or found.missing.any():
            continue
        if found.is_inexact:
            continue
        codes = np.unique(found.text, return_inverse=True)[1].reshape(-1)  # (n,) a person's
        count = int(codes.max()) + 1
        owner = np.zeros(len(codes), np.int64) if groups is None else groups
        pairs = len(np.unique(np.stack([codes, owner]), axis=1).T)  # of a person and an owner
        # several people for each owner, some with more rows than one, and nobody at two owners
        if (
            max(MIN_UNIQUE, 2 * (int(owner.max()) + 1)) <= count <= len(codes) - MIN_UNIQUE
            and pairs == count
        ):
            return column
    return None


def _guess_time(columns: Mapping[str, RawColumn], label: str) -> tuple[str, ...]:
    """Columns that order the rows in time: year, month, day and so on, or one of dates."""
    lower = {column.lower(): column for column in columns if column != label}
    parts = tuple(lower[part] for part in _TIMES if part in lower)
    # a month without a year orders nothing, and a year alone may be anything, such as of a birth
    if len(parts) < 2 or parts[0] != lower.get("year"):
        parts = tuple(lower[word] for word in _DATES if word in lower)
        # of two dates neither is *the* date; a number called "time" may be a duration
        if len(parts) != 1 or columns[parts[0]].values.dtype.kind != "O":
            return ()
    try:  # `_times` raises for words that are no times
        ordered = not any(columns[part].missing.any() for part in parts) and all(
            len(_times(columns[part])) for part in parts
        )
    except DataError:
        return ()
    return parts if ordered else ()


def _codes(columns: Sequence[Sequence[str]]) -> np.ndarray:
    """(n,) one number for each combination of texts."""
    numbers: dict[tuple[str, ...], int] = {}
    rows = zip(*columns, strict=True)
    return np.array([numbers.setdefault(row, len(numbers)) for row in rows])


def _holds_dates(column: RawColumn) -> bool:
    """Whether a column has a date in each row."""
    if column.values.dtype.kind != "O" or column.missing.any():
        return False
    return like_date(str(column.words[0])) and dated(column.counts)


def _guess_days(
    columns: Mapping[str, RawColumn], dates: Sequence[str], groups: np.ndarray | None
) -> tuple[str, ...]:
    """The only column of `dates` that has the same days at several owners, about one row of each
    day, as in measurements of each day.
    """
    found = []
    if groups is None:
        return ()
    for name in dates:
        # (n,) the number of each row's day; (2, P) the different pairs of a day and an owner
        days = np.unique(columns[name].words.astype(str), return_inverse=True)[1].reshape(-1)
        pairs = np.unique(np.stack([days, groups]), axis=1)
        owners = np.bincount(pairs[0])  # of each day
        shared = (owners[days] > 1).mean()  # the share of rows on days that several owners have
        if len(owners) >= MIN_UNIQUE and len(days) <= 2 * len(pairs.T) and 2 * shared >= 1:
            found.append(name)
    try:  # `_times` raises for words that are no times
        return tuple(found) if len(found) == 1 and len(_times(columns[found[0]])) else ()
    except DataError:
        return ()


def _times(column: RawColumn) -> np.ndarray:
    """(n,) float64 that grow with time, NaN for a gap. Raises DataError if the words
    are no times.
    """
    if column.values.dtype.kind != "O" and not column.is_text:
        numbers = column.values.astype(np.float64)
        known = np.unique(numbers[~np.isnan(numbers)]).tolist()
        # 31012022 is a date that is not in order as a number
        refuse_disordered([str(int(n)) if n.is_integer() else repr(n) for n in known], column.name)
        return numbers
    places = moments(known_words(column.words), column.name)
    return np.array([np.nan if word is None else places[word] for word in column.words])


def _kinds_of_features(
    table: _Candidates, options: DataOptions, kept: np.ndarray, notes: list[str]
) -> dict[str, Kind]:
    """The kind of each feature. Other columns are dropped, with a reason.

    Args:
        table: the candidates; in the end the features alone.
        options: the settings.
        kept: (r,) numbers of the rows that are used, among the n of each column.
        notes: to be extended by what the user should know.
    """
    # what the settings say of names
    _check_patterns(table, options)
    for column in [*table.values]:
        if reason := left_out(column, options):
            table.drop(column, reason)
    for column in options.encode:
        if column not in table.values:
            table.take_out(column, "encode")  # raises: the column is unknown, or has another role

    # what the known values of the rows that are used say
    kinds: dict[str, Kind] = {}
    unclear_columns: dict[str, str] = {}
    for column, cells in [*table.values.items()]:
        # a row that is not used decides no type: a word there would make numbers words
        if len(kept) < len(cells) and cells.values.dtype.kind == "O":
            cells = table.values[column] = cells.only(kept)
        values = cells.values
        known = values[kept][~cells.missing[kept]]
        words = _counted(known) if known.dtype.kind == "O" else {}  # empty for numbers
        # numbers that differ by rounding alone are one value
        one_number = known.dtype.kind == "f" and len(known) > 0 and bool(constant(known))
        count = len(words) or (1 if one_number else len(different(known)))
        asked = options.encode.get(column)
        # a column that will be dropped for its name may have mistakes
        if words and not asked and not (column not in options.keep and _names_rows(column)):
            refuse_mistakes(column, words, cells.grammar)
        reason = "" if asked or column in options.keep else _suspicion(cells, known, count, words)

        # first the columns that are dropped, whatever `encode` asks for if they do not vary; a
        # value with gaps beside it does vary
        if (
            count == 1
            and len(known) == len(kept)
            and not words
            and abs(known[0]) >= 2.0**53
            and cells.merges
        ):
            # they look constant, but are not
            reason = "whole numbers above 2**53, which float64 does not tell apart"
            table.drop(column, reason)
            notes.append(
                f"Column {column!r} is dropped: it has {reason}. Subtract the same number from "
                "them."
            )
        elif count < 2 and (not count or len(known) == len(kept)):
            table.drop(column, "empty" if not count else "the same in every row")
            notes += [f"Column {column!r} is dropped: it has no value."] * (not count)
        elif reason:
            table.drop(column, reason)
            notes.append(
                f"Column {column!r} is dropped: it is {reason}. data.keep = ['*', {column!r}] "
                "uses it."
            )
        # then the features, by what is asked for, by numbers, and by words
        elif asked:
            kinds[column] = asked
        elif values.dtype.kind != "O":
            kinds[column] = "number"
            notes += _number_notes(column, cells, known)
        else:
            unclear = _unclear(words, cells.grammar)
            kinds[column] = "category" if count <= MAX_WORDS else "text"
            if unclear == DATES:
                kinds[column] = "date"
                notes.append(_date_note(column, words))
            elif unclear and column not in options.keep:
                # numbers that are not read would become categories unnoticed
                unclear_columns[column] = f"{count} different {unclear}"
            elif kinds[column] == "text":
                notes.append(
                    f"Column {column!r} has {count} different texts, which are hashed. {_SAYS} "
                    "or data.drop."
                )
            else:
                notes += [
                    f"Words {_some(group)} of column {column!r} differ in writing only: correct "
                    "them if they are one."
                    for group in nearly_equal(words)
                ]
                notes += _word_notes(
                    column,
                    words,
                    cells.grammar,
                    f"it is a category. {_SAYS} or data.missing_words.",
                )
    if unclear_columns:  # all in one error, so that they are corrected at once
        raise UnclearError(table.name, unclear_columns)
    if not table.values:
        raise DataError(
            f"{table.name!r} has no column that can be a feature: {table.dropped}. Name some in "
            "data.keep."
        )
    return kinds


def _date_note(column: str, words: Collection[str]) -> str:
    """A note on a column of dates: what becomes of them, or why a run will refuse them."""
    try:
        date_order(words, column)
    except DataError as error:
        return str(error)
    return (
        f"Column {column!r} has dates, which become years and parts of a circle. {_SAYS} or "
        "data.drop."
    )


def _typed(column: RawColumn, kind: Kind) -> np.ndarray:
    """(n,) numbers of a feature, or its words, `MISSING` for a gap."""
    if kind != "number":
        return filled(column.words)
    return column.values if column.values.dtype.kind != "O" else numbers_of(column.name, column)


def _names_value(name: str, values: np.ndarray) -> bool:
    """Whether a column's name is one of its first words, or a number that counts no columns, as
    without a header.
    """
    if values.dtype.kind == "O":
        return name in values[:_SOME_ROWS].tolist()
    return is_number(name) and not name.isdigit()


def _copy_notes(
    features: Mapping[str, np.ndarray], y: np.ndarray, groups: np.ndarray | None
) -> list[str]:
    """Notes on features that tell the label or the owner of every row, and on numbers that are
    another feature's.
    """
    notes, seen = list[str](), dict[tuple[float, ...], str]()
    for column, values in features.items():
        if np.array_equal(values, y) if y.dtype.kind == "f" else _same_parts(values, y):
            notes.append(
                f"Column {column!r} tells the label of every row: drop it if it is known only "
                "later."
            )
        elif groups is not None and _same_parts(values, groups):
            notes.append(
                f"Column {column!r} tells the owner of every row: models can then tell owners "
                "apart."
            )
        if values.dtype.kind == "O":
            continue
        # equal columns have equal keys, so that each is compared with one other at most
        key = (float(values[0]), float(values[-1]), float(np.nansum(values)))
        if key in seen and np.array_equal(
            features[seen[key]], values, equal_nan=values.dtype.kind == "f"
        ):
            notes.append(f"Columns {seen[key]!r} and {column!r} are equal: drop one.")
        seen.setdefault(key, column)
    return notes


def _same_parts(values: np.ndarray, codes: np.ndarray) -> bool:
    """Whether the values (n,) have one code each, and the codes one value; each has two rows on
    average.
    """

    def same(step: int) -> bool:
        pairs = {*zip(values[::step].tolist(), codes[::step].tolist(), strict=True)}
        few = 1 < len(pairs) <= len(codes[::step]) // 2
        return few and len({value for value, _ in pairs}) == len(
            {code for _, code in pairs}
        ) == len(pairs)

    # some rows tell most columns apart at little cost
    return same(max(1, len(codes) // _SOME_ROWS)) and same(1)


def _lacking(
    features: Mapping[str, np.ndarray], groups: np.ndarray, owners: Sequence[str]
) -> dict[str, list[str]]:
    """Owner -> the features that it has no value of, for owners that lack any."""
    gaps = {column: _gaps(values) for column, values in features.items()}
    every = {
        owner: [column for column, gone in gaps.items() if gone[groups == number].all()]
        for number, owner in enumerate(owners)
        if (groups == number).any()
    }
    return {owner: columns for owner, columns in every.items() if columns}


def _missing_notes(columns: Sequence[RawColumn]) -> list[str]:
    """A note on the words that count as missing."""
    found = [
        f"{word!r} ({count} in {c.name})"
        for c in columns
        for word, count in c.missing_words.items()
        if word != MISSING
    ]
    more = f" and {len(found) - 12} more" if len(found) > 12 else ""
    words = "Words that count as missing: "
    return (
        [f"{words}{', '.join(found[:12])}{more}. Set data.missing_words to keep them."]
        if found
        else []
    )


def _check_patterns(table: _Candidates, options: DataOptions) -> None:
    """Raise DataError if an entry of `drop` or `keep` fits no column that is left."""
    for setting, patterns in (("drop", options.drop), ("keep", options.keep)):
        for pattern in patterns:
            if not any(matches(pattern, column) for column in table.values):
                table.take_out(pattern, setting)


def _label_notes(label: RawColumn, y: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Notes on known labels y (r,), classes or numbers, that may be meant otherwise."""
    if not classes:
        return _far_notes(label.name, y)
    notes = [
        f"Classes {_some(names)} differ in writing only: correct the data if they are one."
        for names in nearly_equal(classes)
    ]
    numbers = label.values[~label.missing]
    if numbers.dtype.kind != "O":
        return [*notes, *_far_notes(label.name, numbers)]
    return [
        *notes,
        *_word_notes(
            label.name, classes, label.grammar, "all are classes. Correct the data if they are not."
        ),
    ]


def _word_notes(column: str, words: Collection[str], grammar: Grammar, so: str) -> list[str]:
    """Notes on words that may be meant otherwise; `so` says what numbers with other words are taken
    to be.
    """
    notes = []
    if errors := [word for word in words if _EXCEL_ERROR.fullmatch(word)]:
        notes.append(
            f"Column {column!r} has errors of a spreadsheet, {_some(errors)}, as words: correct "
            "them."
        )
    if gaps := [word for word in words if word != MISSING and _LIKE_MISSING.fullmatch(word)]:
        notes.append(
            f"Column {column!r} has {_some(gaps)}, taken as written: if missing values are "
            "meant, list them in data.missing_words."
        )
    if (pairs := [word for word in words if is_pair(word)]) and 2 * len(pairs) > len(words):
        notes.append(
            f"Column {column!r} has pairs of numbers such as {pairs[0]!r}, taken as words: if "
            "they are measured, write each number in a column of its own."
        )
    numbers = [word for word in words if grammar.is_number(word)]
    if 0 < len(numbers) < len(words):
        other = next(word for word in words if word not in numbers)
        notes.append(
            f"Column {column!r} has numbers and other words, such as {numbers[0]!r} and "
            f"{other!r}: {so}"
        )
    return notes


def _far_notes(column: str, known: np.ndarray) -> list[str]:
    """A note on a number far from the others, such as -999, that may stand for a missing value."""
    far = _far_code(known) if len(known) and known.dtype.kind in "fiu" else 0.0
    if not far:
        return []
    return [
        f"Column {column!r} has {far:.0f} in {int((known == far).sum())} rows, far from its "
        "other numbers: if it stands for a missing value, list it in data.missing_words."
    ]


def _number_notes(column: str, found: RawColumn, known: np.ndarray) -> list[str]:
    """Notes on a column of numbers that may be meant otherwise."""
    if found.is_duration:
        return [f"Column {column!r} holds spans of time: they are numbers of seconds."]
    if known.dtype.kind not in "fiu":
        return []
    if notes := _far_notes(column, known):
        return notes
    if np.abs(known).max() >= 2.0**53 and found.merges:
        return [
            f"Column {column!r} has whole numbers of 2**53 or more, whose last digits are lost: "
            f"if they are codes, set data.encode.{column} = 'category'; else subtract the same "
            "number from them."
        ]
    if not np.array_equal(known, np.floor(known)):
        return []
    if known.min() >= 18000101 and known.max() <= 22001231:
        day, month = known % 100, known // 100 % 100
        if ((day >= 1) & (day <= 31) & (month >= 1) & (month <= 12)).all():
            return [
                f"Column {column!r} has numbers such as {known[0]:.0f}, which may be dates: "
                "write those as 2022-01-31."
            ]
    if found.is_text and (code := found.padded):
        return [
            f"Column {column!r} has numbers such as {code!r}, of which the first zeros are lost: "
            f"if they are codes, set data.encode.{column} = 'category'."
        ]
    return []


def _far_code(known: np.ndarray) -> float:
    """The least or the largest of the known numbers if it is of nines, such as -999, in several
    rows, and farther from the others than these are from each other; else 0.
    """
    for code in (float(known.min()), float(known.max())):
        if abs(code) in _NINES:
            others = known[known != code]
            gap = np.abs(others - code).min() if len(others) else 0
            # several rows (an error would be in one), and no continuation of the others
            if len(known) - len(others) > 1 and gap > 2 * np.ptp(others):
                return code
    return 0.0


def _suspicion(column: RawColumn, known: np.ndarray, count: int, words: Mapping[str, int]) -> str:
    """Why a column with `count` different known values, or known words -> rows, is probably an
    identifier; "" if it is not.
    """
    # "phone" of 0 and 1 says whether there is one
    flag = not words and count <= 2 and set(different(known)) <= {0, 1}
    if not flag and _names_rows(column.name):
        return BY_NAME
    if not count == len(known) >= MIN_UNIQUE:
        return ""
    if words:
        # dates and long texts differ in every row, too, and tell more than a name
        short = (
            not _unclear(words, column.grammar)
            and np.mean([len(word.split()) for word in words]) < 3
        )
        return "an identifier: another word in every row" if short else ""
    every = column.values  # also of rows that are not used, without which a count has gaps
    numbered = len(different(every)) == len(every) and every.max() - every.min() == len(every) - 1
    return "an identifier: it counts the rows" if numbered else ""


def _names_rows(column: str) -> bool:
    return bool(_IDENTIFIER.search(column) or _CAMEL.search(column))


def _counted(known: np.ndarray) -> dict[str, int]:
    """Words -> rows, in the order in which they are first met."""
    return dict(Counter(known.tolist()))


def _unclear(words: Mapping[str, int], grammar: Grammar) -> str:
    """What the known words -> rows of a feature are, if most are dates, or numbers or times that
    the grammar does not read; else "".
    """
    return DATES if dated(words) else unread(words, grammar)


def matches(pattern: str, column: str) -> bool:
    """Whether a column has this name, in which "*" stands for any text."""
    return pattern == column or (
        "*" in pattern and bool(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), column))
    )


def _gaps(values: np.ndarray) -> np.ndarray:
    """(n,) whether each value of a feature is missing."""
    gaps: np.ndarray = np.isnan(values) if values.dtype.kind == "f" else values == MISSING
    return gaps if values.dtype.kind in "fO" else np.zeros(len(values), dtype=bool)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, [*names][:12])) + (", …" if len(names) > 12 else "")
