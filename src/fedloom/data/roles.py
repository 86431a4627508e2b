"""The role of each column of a user's table: label, owner, id, split, feature, or none.

`understand` decides it from the settings of `[data]`, guesses what they leave open, and says so in sentences.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.options import UNORDERED, DataOptions, Kind, OwnFile, SplitColumns, Understanding
from fedloom.data.tables import MISSING, RawTable, different, is_number, refuse_mistakes, texts, typed

LABELS = ("label", "labels", "target", "class", "y")
"""Column names that mean a label."""
MAX_WORDS = 50
"""A text column with more different words is free text."""
MIN_UNIQUE = 20
"""A column with so many values, all different, may be an identifier."""
_OUTCOMES = (*LABELS, "outcome", "diagnosis", "disease", "default", "churn", "activity", "digit", "result", "status")
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
_IDENTIFIER = re.compile(
    r"(^|[_\W])(ids?|uuid|guid|mrn|ssn|e-?mail|phone)$|^(idx|index|key|name|pid|record|unnamed: ?\d+)$", re.I
)
_CAMEL = re.compile(r"[a-z]I[dD]$")
_DATE = re.compile(r"\d{4}-\d\d?-\d\d?([T ].*)?|\d\d?[./]\d\d?[./]\d{2,4}( .*)?")
_NUMBER_AS_TEXT = re.compile(r"[-+]?[$€£]? ?\d[\d.,' ]*[%$€£]?")
_TIMES = ("year", "month", "day", "hour", "minute", "second")
_DATES = ("date", "datetime", "timestamp", "time")
_SORTED = re.compile(r"\d{4}-\d\d-\d\d")
_PARTS = {
    **dict.fromkeys(("train", "training", "false", "0"), "train"),
    **dict.fromkeys(("test", "testing", "true", "1"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
_SEPARATORS = re.compile(r"\s*[|;,]\s*")


class FreeTextError(DataError):
    """A table has columns of free text.

    Args:
        name: of the table.
        columns: of free text, each with the number of its different values, in words.
    """

    def __init__(self, name: str, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self.found = (
            f"{name!r} has {'a column' if len(columns) == 1 else 'columns'} of free text: "
            f"{', '.join(f'{column!r} ({what})' for column, what in columns.items())}"
        )
        super().__init__(
            f"{self.found}. Leave out with data.drop = {[*columns]}, or name in data.keep, as in {['*', *columns]}, to "
            "hash each word into one of 32 columns."
        )


@dataclass
class _Candidates:
    """Raw columns by name; those that have a role are taken out."""

    name: str
    values: dict[str, np.ndarray]
    dropped: dict[str, str] = field(default_factory=dict)

    def take(self, column: str, setting: str) -> np.ndarray:
        """Remove a named column, and return its values."""
        if column not in self.values:
            known = [*self.values, *self.dropped]
            if column in self.dropped:
                raise DataError(f"data.{setting} names the column {column!r}, which is {self.dropped[column]} already.")
            raise DataError(
                f"data.{setting} names the column {column!r}, but {self.name!r} has only {_some(known)}."
                f"{did_you_mean(column, known) if len(known) > 8 else ''}"
            )
        return self.values.pop(column)

    def drop(self, column: str, reason: str) -> None:
        """Remove a column, and record the reason."""
        del self.values[column]
        self.dropped[column] = reason


def understand(
    columns: Mapping[str, np.ndarray],
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
        columns: name -> (n,) numbers, booleans, or objects that are text or None.
        options: the settings.
        name: of the data, for errors.
        named: columns of class numbers -> the names of their classes.
        test: row numbers of a test split that the files state.
        picture: whether each row has a picture, so that other columns are no features.
        ordered: columns whose values `Understanding.unit` and `Understanding.time` have.

    Raises:
        DataError: a named column does not exist; there is no label, one class only, or a number to predict; an owner is
            missing.
        FreeTextError: a column is free text.
    """
    table, named = _Candidates(name, dict(columns)), named or {}
    notes: list[str] = []
    if not table.values or not len(next(iter(table.values.values()))):
        raise DataError(f"{name!r} has no rows; add rows below the header.")
    group = None if options.group is None else table.take(options.group, "group")
    if options.id is not None:
        ids = table.take(options.id, "id")
        table.dropped[options.id] = "the id"
        if repeated := len(ids) - len(np.unique(ids.astype(str))):
            notes.append(
                f"Column {options.id!r} (id) repeats in {repeated} rows: rows of one id may be in training and in test."
            )
    split = table.take(options.test, "test") if isinstance(options.test, str) else None
    guessed = options.label is None
    label = options.label or _guess_label(table, list(named), picture)
    raw = table.take(label, "label")
    try:
        y, classes = _classes(raw, label, name, named.get(label))
    except DataError as error:
        raise DataError(f"{error} The label is a guess: name it as data.label." if guessed else str(error)) from None
    if guessed:
        notes.append(f"The label is taken to be {label!r}: name it as data.label.")
    owners: tuple[str, ...] = ()
    groups = None
    if group is not None:
        owners, groups = _owners(group, str(options.group), options)
    kept = _outside_split(split, y, options.test)
    present = np.unique(y[kept])
    if len(present) < 2:
        only = classes[int(present[0])] if len(present) else "none"
        raise DataError(f"Column {label!r} of {name!r} must have at least 2 classes, but has {only!r} only.")
    if (gone := int((y < 0).sum())) > 0:
        notes.append(f"{gone} of {len(y)} rows have no label in {label!r} and are left out.")
    if split is not None:
        test = np.flatnonzero(_split_parts(split, str(options.test)) == "test")
    elif options.test:
        test = _held_out_owners(options, owners, groups)
    time_guess = _guess_time(columns, label)
    unit, time = ordered.unit, time_guess if ordered.time is None else ordered.time
    for column in (*([] if unit is None else [unit]), *time):
        if column not in columns:
            raise DataError(f"{name!r} has no column {column!r}, but {_some(list(columns))}.")
        if column in table.values and (column == unit or typed(column, table.values[column]).dtype.kind == "O"):
            table.drop(column, "the unit" if column == unit else "the time")
    kinds: dict[str, Kind] = {}
    if picture:
        table.values.clear()
    else:
        for column in table.values.keys() & named.keys():  # class numbers become their names, or None if missing
            codes = np.nan_to_num(table.values[column], nan=-1).astype(np.int64)
            table.values[column] = np.array([*named[column], None], dtype=object)[codes]
        kinds = _features(table, options, kept, notes)
    missing = {column: count for column, values in table.values.items() if (count := int(_gaps(values[kept]).sum()))}
    guess = None if options.group else _guess_group(columns, label, options)
    if test is not None:
        mask = np.zeros(len(y), dtype=bool)
        mask[test] = True
        test = np.flatnonzero(mask[kept]).astype(np.int64)
        if not 0 < len(test) < len(kept):
            raise DataError(f"{name!r} has {len(test)} test rows of {len(kept)}; both parts need rows.")
    raw_table = RawTable(
        name,
        {column: values[kept] for column, values in table.values.items()},
        y[kept],
        classes,
        test,
        None if groups is None else groups[kept],
        owners,
    )
    dropped = {**table.dropped, label: "the label"}
    if options.group:
        dropped[options.group] = "the owner"
    if isinstance(options.test, str):
        dropped[options.test] = "the split"
    return Understanding(
        raw_table, label, guessed, options, kinds, missing, dropped, tuple(notes), kept, guess,
        time_guess, None if unit is None else columns[unit][kept], tuple(columns[column][kept] for column in time),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class OwnRows:
    """The rows of a node's own file that a run may use."""

    kept: np.ndarray
    """(r,) int64 numbers of those with a label that are for training or testing."""
    test: np.ndarray | None
    """(t,) int64 places among `kept` of the test rows, or None to draw them."""
    notes: tuple[str, ...]


def own_rows(
    columns: Mapping[str, np.ndarray],
    file: OwnFile,
    name: str,
    *,
    wanted: Collection[str] = (),
    test: np.ndarray | None = None,
) -> OwnRows:
    """The rows that the owner of a node's file lets runs use, by the rules of `understand` and without guesses.

    Args:
        columns, name, test: as in `understand`.
        file: the owner's settings.
        wanted: the columns that a run uses as input.

    Raises:
        DataError: a named column or owner does not exist, the rows have several owners and none is named, or a wanted
            column is not allowed or looks like an identifier.
    """
    table, options, notes = _Candidates(name, dict(columns)), file.options, list[str]()
    used = np.ones(len(next(iter(columns.values()))), dtype=bool)
    if options.group is not None:
        values = table.take(options.group, "group")
        _refuse_unowned(values, options.group)
        words = np.array([str(word) for word in _whole(values)], dtype=object)
        known = different(words)
        if file.owner is None and len(known) > 1:
            raise DataError(
                f"Column {options.group!r} (data.group) names {len(known)} owners, but a node has the rows of one: set "
                f"owner in [data.{name}] to its name, or use a file with its rows only."
            )
        if file.owner is not None and file.owner not in known:
            raise DataError(
                f"There is no owner {file.owner!r} in column {options.group!r}.{did_you_mean(file.owner, known)}"
            )
        used &= (words == file.owner) if file.owner is not None else used
    if options.id is not None:
        table.take(options.id, "id")
        table.dropped[options.id] = "the id"
    if isinstance(options.test, str):
        parts = _split_parts(table.take(options.test, "test"), options.test)
        used &= parts != "validation"
        test = np.flatnonzero(parts == "test")
    if options.label is not None:
        gaps = _gaps(table.take(options.label, "label"))
        if count := int((gaps & used).sum()):
            notes.append(f"{count} of {used.sum()} rows have no label in {options.label!r} and are left out.")
        used &= ~gaps
    _check_patterns(table, options)
    kept = np.flatnonzero(used)
    if not len(kept):
        raise DataError(f"{name!r} has no row with a label that is for training or testing; correct its file.")
    for column in wanted:
        if column not in columns:
            raise DataError(f"{name!r} must have a column {column!r}, but has {_some(list(columns))}.")
        if reason := left_out(column, options) or table.dropped.get(column, ""):
            raise DataError(f"The run uses column {column!r} of {name!r}, which is {reason}.")
        values = typed(column, columns[column])[kept]
        known_values = values[~_gaps(values)]
        reason = _suspicion(column, known_values, len(different(known_values)), len(kept))
        if reason and column not in options.keep:
            raise DataError(f"The run uses column {column!r}, which is {reason}. Name it in data.keep to allow it.")
    if test is not None:
        test = np.flatnonzero(np.isin(kept, test)).astype(np.int64)
        if not 0 < len(test) < len(kept):
            raise DataError(f"{name!r} has {len(test)} test rows of {len(kept)}; both parts need rows.")
    return OwnRows(kept, test, tuple(notes))


def allowed(column: str, options: DataOptions) -> bool:
    """Whether runs may use a column of a node's file: `keep` names or matches it, and it has no other role."""
    roles = {options.label, options.group, options.id, options.test}
    return bool(options.keep) and column not in roles and not left_out(column, options)


def left_out(column: str, options: DataOptions) -> str:
    """Why `drop` or `keep` makes a column no feature; "" if they do not."""
    if any(_matches(pattern, column) for pattern in options.drop):
        return "dropped as you said"
    return "not in data.keep" if options.keep and not any(_matches(p, column) for p in options.keep) else ""


def _guess_label(table: _Candidates, typed_columns: Sequence[str], picture: bool) -> str:
    """The label column: by type, else by name, else a table's last."""
    names = list(table.values)
    by_name = [column for column in names if column.lower() in LABELS]
    outcomes = [column for column in names if column.lower() in _OUTCOMES]
    candidates = [*typed_columns] or by_name or (outcomes if len(outcomes) == 1 else [] if picture else names[-1:])
    if len(candidates) != 1:
        raise DataError(
            f"{table.name!r} must have one label column, but {_some(candidates) or 'none'} of its columns "
            f"{_some(names)} "
            "could be it; name it as data.label."
        )
    return candidates[0]


def _classes(
    values: np.ndarray, label: str, name: str, known: Sequence[str] | None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes, -1 for a missing label, and the classes' names, sorted unless the files number them."""
    where = f"Column {label!r} of {name!r}"
    if values.dtype.kind == "O" and any(isinstance(value, list | tuple | set | np.ndarray) for value in values):
        raise DataError(f"{where} holds several labels in a row; fedloom predicts one class: choose another label.")
    gaps = _gaps(values)
    if known is not None:
        return np.where(gaps, -1, np.nan_to_num(values, nan=-1)).astype(np.int64), tuple(known)
    values = typed(label, values)
    present = values[~gaps]
    if values.dtype.kind == "f":
        if not np.array_equal(present, np.floor(present)):
            raise DataError(
                f"{where} holds decimal numbers, such as {present[present != np.floor(present)][0]:g}: predicting a "
                "number (regression) is not supported; choose a class column, or divide the numbers into classes first."
            )
        present = present.astype(np.int64)
    names, codes = np.unique(present, return_inverse=True)
    if len(names) > max(MAX_WORDS, len(present) // 10):
        raise DataError(
            f"{where} has {len(names)} different values in {len(present)} rows: it looks like "
            f"{'a number to predict (regression)' if present.dtype.kind != 'O' else 'free text or an id'}, which is "
            "not "
            "supported; choose a class column, or divide the values into classes first."
        )
    if present.dtype.kind == "O":
        parts = [_SEPARATORS.split(word) for word in names]
        single = {part[0] for part in parts if len(part) == 1}
        if any(len(part) > 1 and set(part) <= single for part in parts):
            raise DataError(
                f"{where} holds several labels in a row, such as {next(w for w in names if _SEPARATORS.search(w))!r}; "
                "fedloom predicts one class: choose another label, or write each combination as one word."
            )
    y = np.full(len(values), -1, dtype=np.int64)
    y[~gaps] = codes
    return y, tuple(str(word) for word in names)


def _owners(values: np.ndarray, column: str, options: DataOptions) -> tuple[tuple[str, ...], np.ndarray]:
    """Names of the owners, the unseen ones last, and (n,) int64 owner of each row."""
    _refuse_unowned(values, column)
    words = _whole(values)
    words = texts(column, words) if words.dtype.kind not in "biuf" else words
    names, codes = np.unique(words, return_inverse=True)
    if len(names) < 2 or len(names) > len(values) // 2:
        raise DataError(
            f"Column {column!r} (data.group) has {len(names)} owners in {len(values)} rows; there must be at least 2, "
            "with 2 rows each on average. Name another column."
        )
    order = [str(word) for word in names]
    for owner in {*options.unseen, *(options.test if isinstance(options.test, tuple) else ())}:
        if owner not in order:
            raise DataError(f"There is no owner {owner!r} in column {column!r}.{did_you_mean(owner, order)}")
    last = sorted(range(len(order)), key=lambda number: order[number] in options.unseen)
    places = np.argsort(last)
    return tuple(order[number] for number in last), places[codes].astype(np.int64)


def _refuse_unowned(values: np.ndarray, column: str) -> None:
    """Raise DataError if the column of owners has gaps."""
    if (gaps := _gaps(values)).any():
        raise DataError(
            f"Column {column!r} (data.group) must name an owner in each row, but {gaps.sum()} of {len(gaps)} are "
            "empty; correct or drop those rows."
        )


def _split_parts(values: np.ndarray, column: str) -> np.ndarray:
    """(n,) "train", "test" or "validation" of each row."""
    words = [str(value).strip().lower() for value in _whole(values)]
    odd = sorted(set(words) - _PARTS.keys())
    if odd:
        raise DataError(
            f"Column {column!r} (data.test) must say train or test (or false or true, 0 or 1) in each row, but has "
            f"{odd[0]!r}."
        )
    return np.array([_PARTS[word] for word in words])


def _whole(values: np.ndarray) -> np.ndarray:
    """(n,) values, as integers if all are whole numbers."""
    whole = values.dtype.kind == "f" and np.array_equal(values, np.floor(values))
    return values.astype(np.int64) if whole else values


def _outside_split(split: np.ndarray | None, y: np.ndarray, column: object) -> np.ndarray:
    """Numbers of the rows that have a label and are for training or testing."""
    used = y >= 0
    return np.flatnonzero(used if split is None else used & (_split_parts(split, str(column)) != "validation"))


def _held_out_owners(options: DataOptions, owners: Sequence[str], groups: np.ndarray | None) -> np.ndarray:
    """Rows of the owners that `data.test` names."""
    if groups is None:
        raise DataError(f"data.test names owners, {_some(options.test or ())}; name their column as data.group.")
    return np.flatnonzero(np.isin(groups, [owners.index(name) for name in options.test or ()]))


def _guess_group(columns: Mapping[str, np.ndarray], label: str, options: DataOptions) -> str | None:
    """A column that looks like the rows' owners, by its name and its number of values."""
    for column, values in columns.items():
        word = re.sub(r"[_\W]?(id|no|nr|name|code)$", "", column.lower())
        plausible = column not in (label, options.id) and word.split("_")[-1] in _OWNERS and not _gaps(values).any()
        if plausible and 2 <= len(np.unique(values.astype(str))) <= max(2, len(values) // 10):
            return column
    return None


def _guess_time(columns: Mapping[str, np.ndarray], label: str) -> tuple[str, ...]:
    """Columns that order the rows in time: year, month, day and so on, or one of dates that sort as text."""
    lower = {column.lower(): column for column in columns if column != label}
    parts = [lower[part] for part in _TIMES if part in lower]
    if len(parts) > 1 and parts[0] == lower.get("year") and not any(_gaps(columns[part]).any() for part in parts):
        return tuple(parts)
    dates = [lower[word] for word in _DATES if word in lower]
    words = [] if len(dates) != 1 else columns[dates[0]].tolist()
    return tuple(dates) if words and all(isinstance(w, str) and _SORTED.match(w) for w in words) else ()


def _features(table: _Candidates, options: DataOptions, kept: np.ndarray, notes: list[str]) -> dict[str, Kind]:
    """The kind of each feature. Other columns are dropped, with a reason."""
    _check_patterns(table, options)
    for column in [*table.values]:
        if reason := left_out(column, options):
            table.drop(column, reason)
    kinds: dict[str, Kind] = {}
    free: dict[str, str] = {}
    for column in [*table.values]:
        table.values[column] = values = typed(column, table.values[column])
        known = values[kept]
        known = known[~_gaps(known)]
        count = len(different(known))
        reason = "" if column in options.keep else _suspicion(column, known, count, len(kept))
        if count < 2 and (not count or len(known) == len(kept)):
            table.drop(column, "empty" if not count else "the same in every row")
        elif reason:
            table.drop(column, reason)
            notes.append(f"Column {column!r} is dropped: it is {reason}. Name it in data.keep to use it.")
        elif values.dtype.kind != "O":
            kinds[column] = "number"
        else:
            refuse_mistakes(column, known)
            kinds[column] = "category" if count <= MAX_WORDS else "text"
            if kinds[column] == "text" and column not in options.keep:
                free[column] = f"{count} different {_kind_of_text(known)}"
    if free:
        raise FreeTextError(table.name, free)
    if not table.values:
        raise DataError(f"{table.name!r} has no column that can be a feature: {table.dropped}. Name some in data.keep.")
    return kinds


def _check_patterns(table: _Candidates, options: DataOptions) -> None:
    """Raise DataError if an entry of `drop` or `keep` fits no column that is left."""
    for setting, patterns in (("drop", options.drop), ("keep", options.keep)):
        for pattern in patterns:
            if not any(_matches(pattern, column) for column in table.values):
                table.take(pattern, setting)


def _suspicion(column: str, known: np.ndarray, count: int, rows: int) -> str:
    """Why a column with `count` different known values is probably an identifier; "" if it is not."""
    if _IDENTIFIER.search(column) or _CAMEL.search(column):
        return "an identifier by its name"
    if not count == len(known) >= MIN_UNIQUE:
        return ""
    if known.dtype.kind == "O":
        other = _dates(known) or _mostly(_NUMBER_AS_TEXT, known)
        words = not other and np.mean([len(word.split()) for word in known]) < 3
        return "an identifier: another word in every row" if words else ""
    numbered = len(known) == rows and known.max() - known.min() == rows - 1
    return "an identifier: it counts the rows" if numbered else ""


def _kind_of_text(known: np.ndarray) -> str:
    if _dates(known):
        return "dates"
    if _mostly(_NUMBER_AS_TEXT, known):
        odd = next((word for word in known if not is_number(word)), "")
        return f"numbers such as {odd!r}: write digits and a decimal point only" if odd else "numbers as text"
    return "texts"


def _dates(known: np.ndarray) -> bool:
    return _mostly(_DATE, known)


def _mostly(form: re.Pattern[str], known: np.ndarray) -> bool:
    return sum(bool(form.fullmatch(word)) for word in known) > len(known) / 2


def _matches(pattern: str, column: str) -> bool:
    return pattern == column or (
        "*" in pattern and bool(re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), column))
    )


def _gaps(values: np.ndarray) -> np.ndarray:
    """(n,) whether each value is missing."""
    if values.dtype.kind == "f":
        return np.asarray(np.isnan(values))
    if values.dtype.kind != "O":
        return np.zeros(len(values), dtype=bool)
    gaps = [v for v in different(values) if v is None or v != v or (isinstance(v, str) and v.strip() in ("", MISSING))]
    return np.array([v in gaps for v in values], dtype=bool) if gaps else np.zeros(len(values), dtype=bool)


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, [*names][:12])) + (", …" if len(names) > 12 else "")
