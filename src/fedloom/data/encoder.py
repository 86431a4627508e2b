"""Encodes raw columns as one matrix of numbers, by one rule per column that is fitted once and
saved as JSON.

The rules are those of scikit-learn's OneHotEncoder(min_frequency) and SimpleImputer(add_indicator),
with a logarithm for heavy tails. They are implemented in NumPy, because rules must load from JSON
without pickle, and because importing scikit-learn takes seconds.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.core.statistics import constant, deviations
from fedloom.data.columns import RawColumn
from fedloom.data.dataset import Dataset, Fill, table_dataset
from fedloom.data.grammar import PLAIN, Grammar, Order, dated, unread
from fedloom.data.options import Kind, Understanding
from fedloom.data.standalone import known_word
from fedloom.data.tables import (
    MISSING,
    RawTable,
    as_numbers,
    as_words,
    filled,
    numbers_of,
    refuse_mistakes,
    refuse_rows,
    typed,
)
from fedloom.data.text_and_dates import DateParts, HashedText

OTHER = "other"
_SKEW = 3.0  # beyond this a column has a heavy tail; an exponential one has 2
LARGEST = float(np.finfo(np.float32).max)
"""Numbers of a column must be below it."""
_COARSE = 1e-3  # of a column's s.d.; float32 must not round its numbers by more
_FARTHEST = 1e4  # standard deviations; none of n rows that were fitted is farther out than sqrt(n)
_MOST_CATEGORIES = 1000


@dataclass(frozen=True)
class RawNumber:
    """A column of numbers without scaling."""

    name: str
    gaps: bool = False
    """Whether a number may be missing: it is encoded as NaN."""
    indicator: bool = False
    """Whether a further column says which numbers are missing."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (self.name, f"{self.name} missing") if self.indicator else (self.name,)

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, 1) float64 from n raw values, or (n, 2) with an indicator."""
        numbers, wrong = as_numbers(self.name, values)
        if self.gaps:
            refuse_rows(self.name, "a number, or nothing,", wrong)
        refuse_rows(
            self.name,
            "a finite number",
            ~(np.abs(numbers) < LARGEST) & ~(self.gaps & np.isnan(numbers)),
        )
        return self._marked(numbers)

    def encode_any(self, values: RawColumn) -> np.ndarray:
        """As `encode`, of any n values: what is no finite number is missing."""
        numbers, _ = as_numbers(self.name, values)
        return self._marked(np.where(np.abs(numbers) < LARGEST, numbers, np.nan))

    def _marked(self, numbers: np.ndarray) -> np.ndarray:
        missing = [np.isnan(numbers)] if self.indicator else []
        return np.stack([numbers, *missing], axis=1).astype(np.float64)


@dataclass(frozen=True)
class ScaledNumber:
    """A column of numbers: the value, or its logarithm, standardized; then 1 if it was missing."""

    name: str
    log: bool
    """Whether sign(v) log(1 + |v|) replaces v."""
    fill: float
    """The median, which replaces a missing number."""
    mean: float
    scale: float
    """The s.d.; 0 if all fitted numbers are equal: only the indicator is encoded."""
    gaps: bool
    """Whether some fitted rows lack a number: there is an indicator column."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (self.name,) * (self.scale > 0) + (f"{self.name} missing",) * self.gaps

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, 0..2) float32 from (n,) raw values."""
        numbers = numbers_of(self.name, values)
        missing = np.isnan(numbers)
        filled = _log(np.where(missing, self.fill, numbers), self.log)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scaled = (filled - self.mean) / self.scale
        parts = [np.clip(scaled, -_FARTHEST, _FARTHEST)] if self.scale > 0 else []
        return np.stack([*parts, *([missing] if self.gaps else [])], axis=1).astype(np.float32)


@dataclass(frozen=True)
class ScaledDate:
    """A column of dates, whose training rows are known: the year as `ScaledNumber`, and the points
    of circles of `DateParts`, which are 0 for a missing date.
    """

    name: str
    order: Order
    """The form of the dates."""
    year: ScaledNumber

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (*self.year.names, *self._parts.names[1:])

    @property
    def _parts(self) -> DateParts:
        return DateParts(self.name, self.order, gaps=True)

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, 8..10) float32 from (n,) raw values. Raises DataError for a value that is no date."""
        numbers = self._parts.encode(values)
        return np.concatenate(
            [self.year.encode(numbers[:, 0]), np.nan_to_num(numbers[:, 1:])],
            axis=1,
            dtype=np.float32,
        )


@dataclass(frozen=True)
class OneHot:
    """A column of words, one-hot encoded."""

    name: str
    words: tuple[str, ...]
    other: bool = False
    """Whether rare and unknown words share a column; otherwise an unknown word is 0 in all columns.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(
            f"{self.name}={word}" for word in (*self.words, *([OTHER] if self.other else []))
        )

    def unknown(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n,) bool, whether each of (n,) raw values is not among the words."""
        missed: np.ndarray = self._codes(values) == len(self.words)
        return missed

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, len(names)) float32 from (n,) raw values."""
        codes = self._codes(values)
        hot: np.ndarray = np.eye(len(self.words) + 1, dtype=np.float32)[codes]
        return hot if self.other else hot[:, :-1]

    def places(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n,) float32 places of the raw values (n,) among the words, NaN for a missing or unknown
        one.
        """
        codes = self._codes(values)
        found = codes.astype(np.float32)
        found[codes == len(self.words)] = np.nan
        if MISSING in self.words:
            found[codes == self.words.index(MISSING)] = np.nan
        return found

    def _codes(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n,) int64 places among the words, their number for an unknown one. A word that differs
        from a known one by the ".0" that pandas writes counts as this, so that a row's code does
        not depend on other rows.
        """
        words = (
            filled(values.written) if isinstance(values, RawColumn) else as_words(self.name, values)
        )
        places = {word: place for place, word in enumerate(self.words)}
        found = {word: places.get(known_word(places, word), len(places)) for word in {*words}}
        return np.fromiter(map(found.__getitem__, words), np.int64, len(words))


ColumnEncoder: TypeAlias = RawNumber | ScaledNumber | ScaledDate | OneHot | HashedText | DateParts


@dataclass(frozen=True)
class TableEncoder:
    """Raw columns to one matrix, by one rule per column."""

    columns: tuple[ColumnEncoder, ...]
    dropped: tuple[str, ...] = ()
    """Names of constant raw columns."""

    @classmethod
    def plain(cls, columns: Mapping[str, np.ndarray]) -> "TableEncoder":
        """Numbers unchanged, and text one-hot encoded in the order of the words.

        Args:
            columns: name -> (n,) numbers, booleans, or objects that are text or None. Missing text
                is the word "?".

        Raises:
            DataError: no columns, more than 1000 different words in a column, or another type.
        """
        if not columns:
            raise DataError("A table needs at least one column besides the label.")
        rules: list[ColumnEncoder] = []
        for name, values in columns.items():
            values = typed(name, values)
            words = np.unique(values).tolist() if values.dtype.kind == "O" else []
            rules.append(OneHot(name, _categories(name, values)) if len(words) else RawNumber(name))
        return cls(tuple(rules))

    @classmethod
    def fit(
        cls,
        columns: Mapping[str, np.ndarray],
        rows: np.ndarray,
        *,
        rare: int = 10,
        kinds: Mapping[str, Kind] = MappingProxyType({}),
        grammar: Grammar = PLAIN,
    ) -> "TableEncoder":
        """Fit the rules on some rows.

        Numbers: missing values become the median, and a column "<name> missing" marks them if a
        fitted row lacks one. If the absolute skewness exceeds 3 and a logarithm reduces it, sign(v)
        log(1 + |v|) replaces v. Then mean 0 and
        s.d. 1. Words: stripped; a missing value is the word "?"; words of fewer than `rare` fitted
        rows, and unknown words, share the column "other". Dates: see `ScaledDate`. Sentences: see
        `HashedText`. Constant columns are dropped. The type of a column depends on all its rows:
        see `typed`.

        Args:
            columns: name -> (n,) numbers, booleans, or objects that are text or None.
            rows: (r,) numbers of the rows to fit on, r >= 1.
            rare: minimum number of fitted rows for a word to have its own column.
            kinds: of columns whose kind is not to be guessed.
            grammar: by which cells were read.

        Raises:
            DataError: no rows, a column that is neither numbers nor text, a column of numbers or
                dates with a few words, or only constant columns.
        """
        if len(rows) == 0:
            raise DataError("A table's encoder needs at least one row to fit on.")
        if not columns:
            raise DataError("A party needs a column besides ids and label, but has none.")
        fitted = {
            name: _fit(name, typed(name, values), rows, rare, kinds.get(name), grammar)
            for name, values in columns.items()
        }
        dropped = tuple(name for name, rule in fitted.items() if rule is None)
        if len(dropped) == len(fitted):
            raise DataError(
                f"A party needs a column that is not constant, but all of {list(dropped)} are."
            )
        return cls(tuple(rule for rule in fitted.values() if rule is not None), dropped)

    @property
    def names(self) -> tuple[str, ...]:
        """F names of the encoded columns."""
        return tuple(name for rule in self.columns for name in rule.names)

    def transform(self, columns: Mapping[str, Any]) -> np.ndarray:
        """(n, F) float32, C-contiguous and finite. Columns without a rule are ignored.

        Args:
            columns: name -> (n,) numbers, booleans, or objects that are text or None; or a
                `RawColumn`.

        Raises:
            DataError: a column is missing, has another type or length, or numbers that float32
                cannot tell apart.
        """
        x, offset = self.centered(columns)
        if offset.any():
            name = self.names[int(np.flatnonzero(offset)[0])]
            raise DataError(
                f"Column {name!r} has numbers that differ little for their size, such as "
                f"{offset.max():.0f}: subtract the same number from them in all files."
            )
        return x

    def centered(self, columns: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """(n, F) float32 as of `transform`, and (F,) float64: what is subtracted from each column
        because float32 could not tell its numbers apart otherwise, such as 1e9 + {0, 1, 2}; 0 for
        others.

        Raises:
            DataError: a column is missing, or has another type or length.
        """
        for rule in self.columns:
            if rule.name not in columns:
                raise DataError(
                    f"Column {rule.name!r} is missing.{did_you_mean(rule.name, columns)}"
                )
        parts, offsets = {}, []
        for rule in self.columns:
            part = rule.encode(columns[rule.name])
            offset = np.zeros(part.shape[1])
            if isinstance(rule, RawNumber):
                offset[0] = offset_of(part[:, 0])
                part = part - offset if offset[0] else part
                _refuse_coarse(rule.name, part[:, 0])
            parts[rule.name] = part.astype(np.float32, copy=False)
            offsets.append(offset)
        lengths = {name: len(part) for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"All columns must have the same number of rows, but have {lengths}.")
        return np.ascontiguousarray(np.concatenate(list(parts.values()), axis=1)), np.concatenate(
            offsets
        )

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain JSON values."""
        rules = [
            asdict(rule) | ({"words": list(rule.words)} if isinstance(rule, OneHot) else {})
            for rule in self.columns
        ]
        return {"columns": rules, "dropped": list(self.dropped)}

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any]) -> "TableEncoder":
        """The encoder from the output of `to_dict`.

        Raises:
            DataError: the rules are incomplete or invalid.
        """
        try:
            columns = tuple(_rule(dict(column)) for column in rules["columns"])
            return cls(columns, tuple(str(name) for name in rules["dropped"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"The rules of a table's encoder are invalid; save the party again ({error!r})."
            ) from error


def _categories(name: str, values: np.ndarray) -> tuple[str, ...]:
    """The different words of a column, in order. Raises DataError for too many."""
    words = np.unique(values).tolist()
    if len(words) > _MOST_CATEGORIES:
        raise DataError(
            f"A category may have at most {_MOST_CATEGORIES} different words, but column "
            f"{name!r} has {len(words)} in {len(values)} rows: drop it, group the words first, "
            f"or set data.encode.{name} = 'text'."
        )
    return tuple(words)


def undo(data: Dataset) -> Dataset:
    """The data set with one column for each raw one: see `decoded`. Pictures, and tables that were
    given as numbers, stay as they are.
    """
    if not data.recipe:
        return data
    rules = TableEncoder.from_dict(data.recipe).columns
    x, words, names = decoded(rules, data.x)
    offset = None if data.offset is None else _raw_offset(rules, data.offset)
    plain = np.zeros(len(names), np.float32)
    fill: Fill = data.fill or "median" if np.isnan(x).any() else ""
    return replace(
        data,
        x=x,
        shift=plain,
        scale=plain + 1,
        columns=names,
        words=words,
        fill=fill,
        offset=offset,
    )


def _raw_offset(rules: Sequence[ColumnEncoder], offset: np.ndarray) -> np.ndarray:
    """What was subtracted from each raw column (G,), from that of each encoded one (F,)."""
    parts, at = list[np.ndarray](), 0
    for rule in rules:
        parts.append(np.zeros(1) if isinstance(rule, OneHot) else offset[at : at + used_of(rule)])
        at += len(rule.names)
    return np.concatenate(parts)


def encode_table(table: RawTable) -> Dataset:
    """A table encoded by `TableEncoder.plain`.

    Raises:
        DataError: a number is missing, or as `TableEncoder.plain`.
    """
    encoder = TableEncoder.plain(table.columns)
    x = encoder.transform(table.columns)
    return table_dataset(
        table.name, x, table.y, table.classes, encoder.names, test=table.test, groups=table.groups,
        recipe=encoder.to_dict(),
    )  # fmt: skip


def encode_own(found: Understanding) -> Dataset:
    """A user's table: numbers as they are, words of a category one-hot, text and dates by fixed
    encoders.

    The words are those of all rows. Missing numbers are NaN until the data set is standardized:
    what replaces them and the scale of each column are fitted later, on rows that are then known to
    be public or of one owner.

    Raises:
        DataError: numbers are missing, and `data.missing` is "refuse".
    """
    table = found.table
    encoder, gaps = _own_encoder(found, table.columns)
    x, offset = encoder.centered(table.columns)
    grammar, missing = found.options.grammar, found.options.fills
    recipe = {
        **encoder.to_dict(),
        "missing_words": list(grammar.missing_words),
        "decimal": grammar.decimal,
    }
    recipe |= {"optional": list(found.optional)} if found.optional else {}
    fill: Fill = "" if not gaps else "most-frequent" if missing == "most-frequent" else "median"
    return table_dataset(
        table.name,
        x,
        table.y,
        table.classes,
        encoder.names,
        test=table.test,
        groups=table.groups,
        owners=table.owners,
        fill=fill,
        notes=found.notes,
        recipe=recipe,
        offset=offset if offset.any() else None,
        label=found.label,
    )


def plain_own(found: Understanding, columns: dict[str, np.ndarray]) -> Dataset:
    """The rows, columns and words of `undo(encode_own(found))`, in the memory of a table of float64
    at most.

    Args:
        found: of the table.
        columns: those of the table, which are taken out of the mapping, one after the other.

    Raises:
        DataError: as `encode_own`.
    """
    encoder, _ = _own_encoder(found, columns)
    parts = list[np.ndarray]()
    words = list[tuple[str, ...]]()
    names = list[str]()
    offset = list[float]()
    for rule in encoder.columns:
        values = columns.pop(rule.name)
        if isinstance(rule, OneHot):
            parts, words, names = (
                [*parts, rule.places(values)[:, None]],
                [*words, rule.words],
                [*names, rule.name],
            )
            offset.append(0.0)
        else:
            encoded, its_offset = TableEncoder((rule,)).centered({rule.name: values})
            part, its_words, its_names = decoded([rule], encoded)
            offset += _raw_offset([rule], its_offset).tolist()
            parts, words, names = [*parts, part], [*words, *its_words], [*names, *its_names]
    x, at = np.empty((len(found.table.y), len(names)), np.float32), 0
    while parts:
        part = parts.pop(0)
        x[:, at : at + part.shape[1]] = part
        at += part.shape[1]
    table, fill = found.table, "median" if np.isnan(x).any() else ""
    return table_dataset(
        table.name,
        x,
        table.y,
        table.classes,
        tuple(names),
        groups=table.groups,
        owners=table.owners,
        fill=fill,
        notes=found.notes,
        label=found.label,
        words=tuple(words),
        offset=np.array(offset) if any(offset) else None,
    )


def _own_encoder(
    found: Understanding, columns: Mapping[str, np.ndarray]
) -> tuple[TableEncoder, dict[str, int]]:
    """The rules of a user's columns, and the columns with missing numbers -> how many."""
    table, missing = found.table, found.options.fills
    gaps = {
        name: count
        for name, count in found.missing.items()
        if found.kinds[name] in ("number", "date")
    }
    if gaps and missing == "refuse":
        first, *others = sorted(gaps, key=lambda name: -gaps[name])
        more = f", and so do {', '.join(others[:5])}{', …' * (len(others) > 5)}" if others else ""
        raise DataError(
            f"Column {first!r} of {table.name!r} lacks {gaps[first]} of {len(table.y)} "
            f"{found.kinds[first]}s{more}. Set data.missing to median, most-frequent or "
            "indicator to fill them, or leave the columns out with data.drop."
        )
    rules: list[ColumnEncoder] = []
    for name, values in columns.items():
        if found.kinds[name] == "number":
            rules.append(RawNumber(name, name in gaps, name in gaps and missing == "indicator"))
        elif found.kinds[name] == "category":
            rules.append(OneHot(name, _categories(name, values)))
        elif found.kinds[name] == "date":
            rules.append(
                DateParts(
                    name, "any", name in gaps, name in gaps and missing == "indicator"
                ).fitted(values)
            )
        else:
            rules.append(HashedText(name))
    return TableEncoder(tuple(rules), tuple(found.dropped)), gaps


def decoded(
    rules: Sequence[ColumnEncoder], x: np.ndarray
) -> tuple[np.ndarray, tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Encoded rows x (n, F) as one column for each raw one: rows (n, G) float32, for each column
    the words of a category, () for numbers, and the columns' names.

    A word is its number among the rule's words, a missing one NaN. Columns that say which values
    are missing are left out; those of text and dates stay.
    """
    parts, words, names, at = list[np.ndarray](), list[tuple[str, ...]](), list[str](), 0
    for rule in rules:
        part = x[:, at : at + len(rule.names)]
        at += len(rule.names)
        if isinstance(rule, OneHot):
            place = part.argmax(1).astype(np.float32)
            missing = ~part.any(1)
            if MISSING in rule.words:
                missing |= place == rule.words.index(MISSING)
            place[missing] = np.nan
            parts, names = [*parts, place[:, None]], [*names, rule.name]
            words.append((*rule.words, *([OTHER] if rule.other else [])))
        else:
            kept = used_of(rule)
            parts, names = [*parts, part[:, :kept]], [*names, *rule.names[:kept]]
            words += [()] * kept
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), tuple(words), tuple(names)


def used_of(rule: ColumnEncoder) -> int:
    """How many of a rule's columns models of raw columns use: all but the one that says which
    values are missing.
    """
    return len(rule.names) - (isinstance(rule, RawNumber | DateParts) and rule.indicator)


def offset_of(numbers: np.ndarray) -> float:
    """The whole number to subtract from numbers (n,) that float32 would round by too much for their
    spread; else 0.
    """
    known = numbers[~np.isnan(numbers)]
    return float(np.floor(known.min())) if _too_fine(known) else 0.0


def _too_fine(known: np.ndarray) -> bool:
    """Whether float32 rounds known numbers by too much for their spread."""
    if not len(known) or constant(known):
        return False
    error = np.abs(known - known.astype(np.float32)).max()
    return bool(error > _COARSE * known.std())


def _refuse_coarse(name: str, numbers: np.ndarray) -> None:
    """Raise DataError for numbers (n,) that float32 does not tell apart though they are near 0,
    such as 1e-50.
    """
    known = numbers[~np.isnan(numbers)]
    if _too_fine(known):
        raise DataError(
            f"Column {name!r} has numbers that differ by too little, such as "
            f"{known[known != 0][0]:g}: multiply them by the same number in all files."
        )


def _rule(column: dict[str, Any]) -> ColumnEncoder:
    name = str(column["name"])
    if "words" in column:
        return OneHot(name, tuple(str(word) for word in column["words"]), bool(column["other"]))
    if "width" in column:
        return HashedText(name, int(column["width"]), str(column["hash"]))
    if "year" in column:
        year = _rule(dict(column["year"]))
        if not isinstance(year, ScaledNumber):
            raise ValueError(f"the year of column {name!r} is no scaled number")
        if (order := DateParts(name, column["order"]).order) == "any":
            raise ValueError(f"column {name!r} has dates in no order")
        return ScaledDate(name, order, year)
    if "order" in column:
        return DateParts(name, column["order"], bool(column["gaps"]), bool(column["indicator"]))
    if "indicator" in column:
        return RawNumber(name, bool(column["gaps"]), bool(column["indicator"]))
    numbers = {key: float(column[key]) for key in ("fill", "mean", "scale")}
    if not all(np.isfinite(value) for value in numbers.values()) or numbers["scale"] < 0:
        raise ValueError(f"column {column['name']!r} has {numbers}")
    return ScaledNumber(name, bool(column["log"]), gaps=bool(column["gaps"]), **numbers)


_Fitted: TypeAlias = ScaledNumber | ScaledDate | OneHot | HashedText


def _fit(
    name: str, values: np.ndarray, rows: np.ndarray, rare: int, kind: Kind | None, grammar: Grammar
) -> _Fitted | None:
    """The rule of a `typed` column, or None if it is constant."""
    if kind == "number" or (kind is None and values.dtype.kind != "O"):
        return _fit_number(name, numbers_of(name, values)[rows])
    values = as_words(name, values)
    known = Counter(values[values != MISSING].tolist())
    if kind == "date" or (kind is None and dated(known)):
        return _fit_date(name, values, rows)
    if kind == "text":
        return HashedText(name)
    if kind is None:
        refuse_mistakes(name, known, grammar)  # nearly all words would be rare
        if odd := unread(known, grammar):
            raise DataError(f"Column {name!r} has {odd}; or leave the column out.")
    words, counts = np.unique(values[rows], return_counts=True)
    frequent = tuple(str(word) for word in words[counts >= rare] if word != OTHER)
    others = len(frequent) < len(words)
    if len(frequent) + others > 1:
        return OneHot(name, frequent, others)
    sentences = len(known) > 1 and np.mean([len(word.split()) for word in known]) >= 3
    return HashedText(name) if sentences and kind is None else None


def _fit_date(name: str, values: np.ndarray, rows: np.ndarray) -> ScaledDate | None:
    try:
        rule = DateParts(name, gaps=True).fitted(values)
        years = rule.encode(values)[rows, 0]
    except DataError as error:
        raise DataError(f"{str(error).rstrip('.')}; or leave the column out.") from None
    year = _fit_number(rule.names[0], years)
    return None if year is None or rule.order == "any" else ScaledDate(name, rule.order, year)


def _fit_number(name: str, numbers: np.ndarray) -> ScaledNumber | None:
    known = numbers[~np.isnan(numbers)]
    gaps = len(known) < len(numbers)
    if not len(known):
        return None
    fill = float(np.median(known))
    if constant(known):
        return ScaledNumber(name, False, fill, 0.0, 0.0, True) if gaps else None
    skew = abs(_skewness(known))
    small = _log(known, True)
    log = bool(skew > _SKEW and not constant(small) and abs(_skewness(small)) < skew)
    filled = _log(np.where(np.isnan(numbers), fill, numbers), log)
    return ScaledNumber(name, log, fill, float(filled.mean()), float(deviations(filled)), gaps)


def _log(numbers: np.ndarray, wanted: bool) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if wanted else numbers


def _skewness(numbers: np.ndarray) -> float:
    """The third moment of the standardized numbers; 0 if they are equal."""
    centered = numbers - numbers.mean()
    spread = centered.std()
    return float(np.mean((centered / spread) ** 3)) if spread > 0 else 0.0
