"""Encodes raw columns as one matrix of numbers, by one rule per column that is fitted once and saved as JSON.

The rules are those of scikit-learn's OneHotEncoder(min_frequency) and SimpleImputer(add_indicator), with a logarithm
for heavy tails. They are implemented in NumPy, because rules must load from JSON without pickle, and because
importing scikit-learn takes seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.dataset import Dataset, table_dataset
from fedloom.data.tables import MISSING, RawTable, is_number, texts

OTHER = "other"
_SKEW = 3.0  # beyond this a column has a heavy tail; an exponential one has 2
_LARGEST = 1e30  # so that squares fit into float64 and scaled values into float32
_MOSTLY = 0.9  # of a column's words; if so many are numbers, the others are probably errors
_FARTHEST = 1e4  # standard deviations; none of n rows that were fitted is farther out than sqrt(n)
_MOST_CATEGORIES = 1000
SHOWN = 5
"""Number of rows that an error names."""


@dataclass(frozen=True)
class RawNumber:
    """A column of numbers without scaling and without missing values."""

    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """Name of the encoded column."""
        return (self.name,)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n, 1) float32 from (n,) raw values."""
        if values.dtype.kind not in "biuf":
            values = np.array([word if is_number(word) else "nan" for word in texts(self.name, values)], np.float64)
        with np.errstate(over="ignore"):
            numbers: np.ndarray = values.astype(np.float32)
        refuse_rows(self.name, "a finite number", ~np.isfinite(numbers))
        return numbers[:, None]


@dataclass(frozen=True)
class ScaledNumber:
    """A column of numbers: the value, or its logarithm, standardised; then 1 if it was missing."""

    name: str
    log: bool
    """Whether sign(v) log(1 + |v|) replaces v."""
    fill: float
    """The median, which replaces a missing number."""
    mean: float
    scale: float
    """The s.d.; 0 if all fitted numbers are equal: then only the indicator is encoded."""
    gaps: bool
    """Whether some fitted rows lack a number: then there is an indicator column."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return (self.name,) * (self.scale > 0) + (f"{self.name} missing",) * self.gaps

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n, 0..2) float32 from (n,) raw values."""
        numbers = _numbers(self.name, values)
        missing = np.isnan(numbers)
        filled = _log(np.where(missing, self.fill, numbers), self.log)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scaled = (filled - self.mean) / self.scale
        parts = [np.clip(scaled, -_FARTHEST, _FARTHEST)] if self.scale > 0 else []
        return np.stack([*parts, *([missing] if self.gaps else [])], axis=1).astype(np.float32)


@dataclass(frozen=True)
class OneHot:
    """A column of words, one-hot encoded."""

    name: str
    words: tuple[str, ...]
    other: bool = False
    """Whether rare and unknown words share a column; otherwise an unknown word is 0 in all columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(f"{self.name}={word}" for word in (*self.words, *([OTHER] if self.other else [])))

    def unknown(self, values: np.ndarray) -> np.ndarray:
        """(n,) bool, whether each of (n,) raw values is not among the words."""
        return ~np.isin(texts(self.name, values), self.words)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n, len(names)) float32 from (n,) raw values."""
        places = {word: place for place, word in enumerate(self.words)}
        codes = np.array([places.get(word, len(self.words)) for word in texts(self.name, values)], dtype=np.int64)
        hot: np.ndarray = np.eye(len(self.words) + 1, dtype=np.float32)[codes]
        return hot if self.other else hot[:, :-1]


ColumnEncoder: TypeAlias = RawNumber | ScaledNumber | OneHot


@dataclass(frozen=True)
class TableEncoder:
    """Raw columns to one matrix, by one rule per column."""

    columns: tuple[ColumnEncoder, ...]
    dropped: tuple[str, ...] = ()
    """Names of constant raw columns."""

    @classmethod
    def plain(cls, columns: Mapping[str, np.ndarray]) -> TableEncoder:
        """Numbers unchanged, and text one-hot encoded in the order of the words.

        Args:
            columns: name -> (n,) numbers, booleans, or objects that are text or None. Missing text is the word "?".

        Raises:
            DataError: no columns, more than 1000 different words in a column, or another type.
        """
        if not columns:
            raise DataError("A table needs at least one column besides the label.")
        rules: list[ColumnEncoder] = []
        for name, values in columns.items():
            values = typed(name, values)
            words = np.unique(values).tolist() if values.dtype.kind == "O" else []
            if len(words) > _MOST_CATEGORIES:
                raise DataError(
                    f"A text column may have at most {_MOST_CATEGORIES} different words, but {name!r} has {len(words)} "
                    f"in {len(values)} rows; drop it or group the words first."
                )
            rules.append(OneHot(name, tuple(words)) if len(words) else RawNumber(name))
        return cls(tuple(rules))

    @classmethod
    def fit(cls, columns: Mapping[str, np.ndarray], rows: np.ndarray, *, rare: int = 10) -> TableEncoder:
        """Fit the rules on some rows.

        Numbers: missing values become the median, and a column "<name> missing" marks them if a fitted row lacks one.
        If the absolute skewness exceeds 3 and a logarithm reduces it, sign(v) log(1 + |v|) replaces v. Then mean 0 and
        s.d. 1. Words: stripped; a missing value is the word "?"; words of fewer than `rare` fitted rows, and unknown
        words, share the column "other". Constant columns are dropped.

        The type of a column depends on all its rows: text counts as numbers if it has gaps ("?", "" or None) and all
        other values are numbers.

        Args:
            columns: name -> (n,) numbers, truth values, or objects that are text or None.
            rows: (r,) numbers of the rows to fit on, r >= 1.
            rare: minimum number of fitted rows for a word to have its own column.

        Raises:
            DataError: no rows, a column that is neither numbers nor text, a column of numbers with a few words, or
                only constant columns.
        """
        if len(rows) == 0:
            raise DataError("A table's encoder needs at least one row to fit on.")
        fitted = [_fit(name, values, rows, rare) for name, values in columns.items()]
        kept = tuple(rule for rule in fitted if not isinstance(rule, str))
        dropped = tuple(rule for rule in fitted if isinstance(rule, str))
        if not kept:
            raise DataError(f"A party needs a column that is not constant, but all of {list(dropped)} are.")
        return cls(kept, dropped)

    @property
    def names(self) -> tuple[str, ...]:
        """F names of the encoded columns."""
        return tuple(name for rule in self.columns for name in rule.names)

    def transform(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """(n, F) float32, C-contiguous and finite. Columns without a rule are ignored.

        Raises:
            DataError: a column is missing, or has another type or length.
        """
        parts = []
        for rule in self.columns:
            if rule.name not in columns:
                raise DataError(f"Column {rule.name!r} is missing.{did_you_mean(rule.name, columns)}")
            parts.append(rule.encode(np.asarray(columns[rule.name])))
        if len({len(part) for part in parts}) > 1:
            lengths = {rule.name: len(part) for rule, part in zip(self.columns, parts, strict=True)}
            raise DataError(f"All columns must have the same number of rows, but have {lengths}.")
        return np.ascontiguousarray(np.concatenate(parts, axis=1))

    def to_dict(self) -> dict[str, Any]:
        """The rules as plain JSON values."""
        columns = [
            asdict(rule) | ({"words": list(rule.words)} if isinstance(rule, OneHot) else {}) for rule in self.columns
        ]
        return {"columns": columns, "dropped": list(self.dropped)}

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any]) -> TableEncoder:
        """The encoder from the output of `to_dict`.

        Raises:
            DataError: the rules are incomplete or invalid.
        """
        try:
            columns = tuple(_rule(dict(column)) for column in rules["columns"])
            return cls(columns, tuple(str(name) for name in rules["dropped"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"The rules of a table's encoder are invalid; save the party again ({error!r}).") from error


def encode_table(table: RawTable) -> Dataset:
    """A table encoded by `TableEncoder.plain`.

    Raises:
        DataError: a number is missing, or as `TableEncoder.plain`.
    """
    encoder = TableEncoder.plain(table.columns)
    x = encoder.transform(table.columns)
    return table_dataset(table.name, x, table.y, table.classes, encoder.names, test=table.test, groups=table.groups)


def refuse_rows(column: str, what: str, wrong: np.ndarray) -> None:
    """Raise DataError if rows of a column are `wrong` (n,); the message has row numbers and no values."""
    rows = np.flatnonzero(wrong)
    if len(rows):
        named = ", ".join(str(row + 1) for row in rows[:SHOWN]) + (", …" if len(rows) > SHOWN else "")
        raise DataError(
            f"Column {column!r} must hold {what} in each row, but {len(rows)} of {len(wrong)} don't (row {named}, "
            "counted from 1 below the header); correct or drop those rows."
        )


def typed(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) numbers unchanged, numbers in text with gaps as float64 with NaN, or else stripped words.

    Raises:
        DataError: a value is neither a number nor text.
    """
    if values.dtype.kind in "biuf":
        return values
    words = texts(name, values)
    known = words[words != MISSING]
    numbers = 0 < len(known) < len(words) and all(is_number(word) for word in np.unique(known))
    return _numbers(name, words) if numbers else words


def _rule(column: dict[str, Any]) -> ScaledNumber | OneHot:
    if "words" in column:
        return OneHot(str(column["name"]), tuple(str(word) for word in column["words"]), bool(column["other"]))
    numbers = {key: float(column[key]) for key in ("fill", "mean", "scale")}
    if not all(np.isfinite(value) for value in numbers.values()) or numbers["scale"] < 0:
        raise ValueError(f"column {column['name']!r} has {numbers}")
    return ScaledNumber(str(column["name"]), bool(column["log"]), gaps=bool(column["gaps"]), **numbers)


def _fit(name: str, values: np.ndarray, rows: np.ndarray, rare: int) -> ScaledNumber | OneHot | str:
    """The rule of a column, or its name if it is constant."""
    values = typed(name, values)
    if values.dtype.kind != "O":
        return _fit_number(name, _numbers(name, values)[rows])
    _refuse_mistakes(name, values)
    words, counts = np.unique(values[rows], return_counts=True)
    frequent = tuple(str(word) for word in words[counts >= rare] if word != OTHER)
    rest = len(frequent) < len(words)
    return name if len(frequent) + rest < 2 else OneHot(name, frequent, rest)


def _refuse_mistakes(name: str, words: np.ndarray) -> None:
    """Raise DataError for numbers with a few words among them: as a text column, nearly all words would be rare."""
    known = words[words != MISSING]
    odd = [word for word in known if not is_number(word)]
    if odd and len(known) - len(odd) >= _MOSTLY * len(known):
        raise DataError(
            f"Column {name!r} has numbers, but {len(odd)} of its {len(known)} values are not, such as {odd[0][:40]!r}; "
            "correct them, or leave them empty (if the numbers are codes, prefix each with a letter)."
        )


def _fit_number(name: str, numbers: np.ndarray) -> ScaledNumber | str:
    known = numbers[~np.isnan(numbers)]
    gaps = len(known) < len(numbers)
    if not len(known):
        return name
    fill = float(np.median(known))
    if known.min() == known.max():
        return ScaledNumber(name, False, fill, 0.0, 0.0, True) if gaps else name
    skew = abs(_skewness(known))
    log = bool(skew > _SKEW and abs(_skewness(_log(known, True))) < skew)
    filled = _log(np.where(np.isnan(numbers), fill, numbers), log)
    scale = float(filled.std())
    if not scale > 0:  # numbers that differ by less than float64 resolves
        return name
    return ScaledNumber(name, log, fill, float(filled.mean()), scale, gaps)


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) float64, with NaN for missing values."""
    if values.dtype.kind in "biuf":
        numbers: np.ndarray = values.astype(np.float64)
    else:
        words = texts(name, values)
        bad = [word for word in np.unique(words) if word != MISSING and not is_number(word)]
        if bad:
            raise DataError(f"Column {name!r} must have numbers, but has {bad[0]!r}; correct or drop those rows.")
        numbers = np.array(["nan" if word == MISSING else word for word in words], dtype=np.float64)
    outside = int((np.abs(numbers) > _LARGEST).sum())
    if outside:
        raise DataError(
            f"Numbers must be within ±{_LARGEST:.0e}, but column {name!r} has {outside} outside; correct them."
        )
    return numbers


def _log(numbers: np.ndarray, wanted: bool) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if wanted else numbers


def _skewness(numbers: np.ndarray) -> float:
    """The third moment of the standardised numbers; 0 if they are equal."""
    centred = numbers - numbers.mean()
    spread = centred.std()
    return float(np.mean((centred / spread) ** 3)) if spread > 0 else 0.0
