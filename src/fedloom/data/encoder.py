"""How one party turns its raw columns into numbers, from what it sees in its own rows alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.tables import MISSING, is_number, texts

OTHER = "other"
_SKEW = 3.0  # beyond this a column has a heavy tail; an exponential one has 2
_LARGEST = 1e30  # so that squares and float32 can hold what comes of it
_MOSTLY = 0.9  # of a column's words; where so many are numbers, the others are taken for mistakes
_FARTHEST = 1e4  # standard deviations; none of n rows that were fitted is farther out than sqrt(n)


@dataclass(frozen=True)
class Number:
    """A column of numbers: (log of) the value less its mean, by its s.d.; then 1 where it was missing."""

    name: str
    log: bool
    """Whether sign(v) log(1 + |v|) stands for v."""
    fill: float
    """The median, which stands for a missing number."""
    mean: float
    scale: float
    """The s.d.; 0 if all rows that have a number have the same: then only the gaps are told."""
    gaps: bool
    """Whether some of the rows that were fitted lack a number."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns are called."""
        return (self.name,) * (self.scale > 0) + (f"{self.name} missing",) * self.gaps

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n, 0..2) float64 from (n,) raw values."""
        numbers = _numbers(self.name, values)
        missing = np.isnan(numbers)
        filled = _log(np.where(missing, self.fill, numbers), self.log)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            scaled = (filled - self.mean) / self.scale
        parts = [np.clip(scaled, -_FARTHEST, _FARTHEST)] if self.scale > 0 else []
        return np.stack([*parts, *([missing.astype(np.float64)] if self.gaps else [])], axis=1)


@dataclass(frozen=True)
class Words:
    """A column of words: 0 and 1 for each of them."""

    name: str
    words: tuple[str, ...]
    """The frequent ones, sorted."""
    other: bool
    """Whether some of the rows that were fitted had a rare one. If not, a new word is 0 in all columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the columns are called."""
        return tuple(f"{self.name}={word}" for word in (*self.words, *([OTHER] if self.other else [])))

    def encode(self, values: np.ndarray) -> np.ndarray:
        """(n, len(names)) float64 from (n,) raw values."""
        places = {word: place for place, word in enumerate(self.words)}
        codes = np.array([places.get(word, len(self.words)) for word in texts(self.name, values)], dtype=np.int64)
        hot: np.ndarray = np.eye(len(self.words) + 1)[codes]
        return hot if self.other else hot[:, :-1]


@dataclass(frozen=True)
class TableEncoder:
    """Raw columns to one matrix, by rules that were fitted once.

    Numbers: a missing one becomes the median, and a column "<name> missing" says so if a fitted row lacked one. Where
    the skewness is beyond 3, above or below, and a logarithm brings it nearer to 0, sign(v) log(1 + |v|) stands for
    v. Then mean 0 and s.d. 1. Words: stripped; a missing one is the word "?"; those that fewer than `rare` fitted
    rows have fall together as "other", and so does a word that was never seen. Columns that are constant are left
    out.
    """

    columns: tuple[Number | Words, ...]
    dropped: tuple[str, ...]
    """Names of raw columns that were constant."""

    @classmethod
    def fit(cls, columns: Mapping[str, np.ndarray], rows: np.ndarray, *, rare: int = 10) -> TableEncoder:
        """Learn the rules from some rows.

        Whether a column holds numbers or words is read off all its rows, as from the schema of a file: text is taken
        for numbers if there are gaps in it ("?", "" or None) and all else are numbers.

        Args:
            columns: name -> (n,) numbers, truth values, or objects that are text or None.
            rows: (r,) numbers of the rows that may be looked at; r >= 1.
            rare: a word is rare if fewer of them have it.

        Raises:
            DataError: no rows, a column that is neither numbers nor text, numbers among which a few words stand, or
                nothing but constant columns.
        """
        if len(rows) == 0:
            raise DataError("A table's encoder needs at least one row to be fitted on, but there is none.")
        fitted = [_fit(name, values, rows, rare) for name, values in columns.items()]
        kept = tuple(rule for rule in fitted if not isinstance(rule, str))
        dropped = tuple(rule for rule in fitted if isinstance(rule, str))
        if not kept:
            raise DataError(
                f"A party needs a column that varies over its rows, but all of {list(dropped)} are constant."
            )
        return cls(kept, dropped)

    @property
    def names(self) -> tuple[str, ...]:
        """F names of what comes out."""
        return tuple(name for rule in self.columns for name in rule.names)

    def transform(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """(n, F) float32, C-contiguous and finite. Columns that have no rule are passed over.

        Raises:
            DataError: a column is missing, is of another type than it was, or has another length.
        """
        parts = []
        for rule in self.columns:
            if rule.name not in columns:
                raise DataError(f"Column {rule.name!r} is missing.{did_you_mean(rule.name, columns)}")
            parts.append(rule.encode(columns[rule.name]))
        if len({len(part) for part in parts}) > 1:
            lengths = {rule.name: len(part) for rule, part in zip(self.columns, parts, strict=True)}
            raise DataError(f"All columns must have the same number of rows, but they have {lengths}.")
        return np.ascontiguousarray(np.concatenate(parts, axis=1), dtype=np.float32)

    def to_dict(self) -> dict[str, Any]:
        """The rules as JSON can hold them."""
        columns = [
            {**asdict(rule), "words": list(rule.words)} if isinstance(rule, Words) else asdict(rule)
            for rule in self.columns
        ]
        return {"columns": columns, "dropped": list(self.dropped)}

    @classmethod
    def from_dict(cls, rules: Mapping[str, Any]) -> TableEncoder:
        """The encoder that `to_dict` wrote down.

        Raises:
            DataError: the rules are incomplete or of other types.
        """
        try:
            columns = tuple(_rule(dict(column)) for column in rules["columns"])
            return cls(columns, tuple(str(name) for name in rules["dropped"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"The rules of a table's encoder are damaged; save the party again ({error!r}).") from error


def typed(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) numbers as they are, or as float64 with NaN where they are text with gaps; else stripped words.

    Raises:
        DataError: something is neither a number nor text.
    """
    if values.dtype.kind in "biuf":
        return values
    words = texts(name, values)
    known = words[words != MISSING]
    numbers = 0 < len(known) < len(words) and all(is_number(word) for word in np.unique(known))
    return _numbers(name, words) if numbers else words


def _rule(column: dict[str, Any]) -> Number | Words:
    if "words" in column:
        return Words(str(column["name"]), tuple(str(word) for word in column["words"]), bool(column["other"]))
    numbers = {key: float(column[key]) for key in ("fill", "mean", "scale")}
    if not all(np.isfinite(value) for value in numbers.values()) or numbers["scale"] < 0:
        raise ValueError(f"column {column['name']!r} has {numbers}")
    return Number(str(column["name"]), bool(column["log"]), gaps=bool(column["gaps"]), **numbers)


def _fit(name: str, values: np.ndarray, rows: np.ndarray, rare: int) -> Number | Words | str:
    """The rule of one column, or its name if it is constant."""
    values = typed(name, values)
    if values.dtype.kind != "O":
        return _fit_number(name, _numbers(name, values)[rows])
    _refuse_mistakes(name, values)
    words, counts = np.unique(values[rows], return_counts=True)
    frequent = tuple(str(word) for word in words[counts >= rare] if word != OTHER)
    rest = len(frequent) < len(words)
    return name if len(frequent) + rest < 2 else Words(name, frequent, rest)


def _refuse_mistakes(name: str, words: np.ndarray) -> None:
    """Numbers with some words between them: as words, nearly all would be rare, and the numbers would be lost."""
    known = words[words != MISSING]
    odd = [word for word in known if not is_number(word)]
    if odd and len(known) - len(odd) >= _MOSTLY * len(known):
        raise DataError(
            f"Column {name!r} holds numbers, but {len(odd)} of its {len(known)} values are none, such as "
            f"{odd[0][:40]!r}; correct them, or leave them empty (if the numbers are codes, put a letter before each)."
        )


def _fit_number(name: str, numbers: np.ndarray) -> Number | str:
    there = numbers[~np.isnan(numbers)]
    gaps = len(there) < len(numbers)
    if not len(there):
        return name
    fill, flat = float(np.median(there)), bool(there.min() == there.max())
    if flat:
        return Number(name, False, fill, 0.0, 0.0, True) if gaps else name
    skew = abs(_skewness(there))
    log = bool(skew > _SKEW and abs(_skewness(_log(there, True))) < skew)
    filled = _log(np.where(np.isnan(numbers), fill, numbers), log)
    scale = float(filled.std())
    if not scale > 0:  # numbers that differ by less than a float64 can tell
        return name
    return Number(name, log, fill, float(filled.mean()), scale, gaps)


def _numbers(name: str, values: np.ndarray) -> np.ndarray:
    """(n,) float64, with NaN for what is missing."""
    if values.dtype.kind in "biuf":
        numbers: np.ndarray = values.astype(np.float64)
    else:
        words = texts(name, values)
        bad = [word for word in np.unique(words) if word != MISSING and not is_number(word)]
        if bad:
            raise DataError(f"Column {name!r} must hold numbers, but it holds {bad[0]!r}; mend or drop those rows.")
        numbers = np.array(["nan" if word == MISSING else word for word in words], dtype=np.float64)
    outside = int((np.abs(numbers) > _LARGEST).sum())
    if outside:
        raise DataError(
            f"Numbers must lie within ±{_LARGEST:.0e}, but column {name!r} has {outside} beyond; mend them."
        )
    return numbers


def _log(numbers: np.ndarray, wanted: bool) -> np.ndarray:
    return np.sign(numbers) * np.log1p(np.abs(numbers)) if wanted else numbers


def _skewness(numbers: np.ndarray) -> float:
    """The third moment of the standardised numbers; 0 if they don't differ."""
    centred = numbers - numbers.mean()
    spread = centred.std()
    return float(np.mean((centred / spread) ** 3)) if spread > 0 else 0.0
