"""Encoders of text and of dates: one rule per column, the same for all owners, with the arithmetic
of `standalone`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.columns import RawColumn, known_words
from fedloom.data.grammar import Order, date_order
from fedloom.data.standalone import (
    DATE_PARTS,
    LENGTHS,
    VERSION,
    date_numbers,
    moment_of,
    plain_text,
)
from fedloom.data.tables import MISSING, as_words, refuse_rows

WIDTH = 32
"""Columns of a text."""
_BATCH = 1 << 18  # signs of text that are hashed at once


@dataclass(frozen=True)
class HashedText:
    """A column of text: the n-grams of its characters are added and subtracted in `width` columns,
    by a hash.
    """

    name: str
    width: int = WIDTH
    hash: str = VERSION

    def __post_init__(self) -> None:
        if self.hash != VERSION or not 0 < self.width <= 1 << 16:
            raise ValueError(
                f"column {self.name!r} is hashed by {self.hash!r}, but this version has {VERSION!r}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        return tuple(f"{self.name}#{number}" for number in range(self.width))

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, width) float32 from (n,) raw values: each row has length 1, or 0 for a
        missing text.
        """
        words = as_words(self.name, values)
        return hashed_texts([None if word == MISSING else word for word in words], self.width)


@dataclass(frozen=True)
class DateParts:
    """A column of dates or times: years since 2000, and month, day, day of the week and hour as
    points of circles.
    """

    name: str
    order: Order | Literal["any"] = "any"
    """The form of the dates; "any": each file has its own, which its words show."""
    gaps: bool = False
    """Whether a date may be missing: it is encoded as NaN."""
    indicator: bool = False
    """Whether a further column says which dates are missing."""

    def __post_init__(self) -> None:
        if self.order not in ("iso", "day", "month", "any"):
            raise ValueError(f"column {self.name!r} has dates in the order {self.order!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the encoded columns."""
        parts = tuple(f"{self.name} {part}" for part in DATE_PARTS)
        return (*parts, f"{self.name} missing") if self.indicator else parts

    def fitted(self, values: np.ndarray | RawColumn) -> "DateParts":
        """The rule with the order of these dates.

        Raises:
            DataError: as `date_order`.
        """
        words = known_words(
            None if word == MISSING else word for word in as_words(self.name, values)
        )
        return DateParts(self.name, date_order(words, self.name), self.gaps, self.indicator)

    def encode(self, values: np.ndarray | RawColumn) -> np.ndarray:
        """(n, 9) float64 from (n,) raw values, or (n, 10) with an indicator.

        Raises:
            DataError: a value is no date, or is missing though `gaps` is False.
        """
        if self.order == "any":
            return self.fitted(values).encode(values)
        numbers, missing = self._numbers(values)
        what = "a date" if self.order == "iso" else f"a date, the {self.order} first,"
        refuse_rows(
            self.name,
            f"{what}, or nothing," if self.gaps else what,
            np.isnan(numbers[:, 0]) & ~missing,
        )
        if not self.gaps:
            refuse_rows(self.name, what, missing)
        return numbers

    def encode_any(self, values: RawColumn) -> np.ndarray:
        """As `encode`, of any n values: what is no date is missing."""
        try:
            rule = self.fitted(values) if self.order == "any" else self
        except DataError:
            rule = DateParts(self.name, "iso", self.gaps, self.indicator)
        return rule._numbers(values)[0]

    def _numbers(self, values: np.ndarray | RawColumn) -> tuple[np.ndarray, np.ndarray]:
        """(n, 9 or 10) float64, NaN for no date; and (n,) whether each value is missing."""
        words = as_words(self.name, values)
        found = {word: self._parts(word) for word in known_words(words)}
        numbers = np.array([found[word] for word in words]).reshape(-1, len(DATE_PARTS))
        marks = [np.isnan(numbers[:, :1])] if self.indicator else []
        return np.concatenate([numbers, *marks], axis=1), words == MISSING

    def _parts(self, word: str) -> list[float]:
        try:
            at = moment_of(word, self.order)
        except ValueError:  # no such day
            at = None
        return [np.nan] * len(DATE_PARTS) if at is None else date_numbers(at)


def hashed_texts(texts: Sequence[str | None], width: int) -> np.ndarray:
    """(n, width) float32: `hashed_text` of each of n texts, 0 for None."""
    out = np.zeros((len(texts), width), np.float32)
    places: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        if text is not None:
            places.setdefault(text, []).append(row)
    for part in _batches(list(places)):
        sums = _summed([plain_text(text) for text in part], width)
        vectors = (sums / np.maximum(np.sqrt((sums * sums).sum(1, keepdims=True)), 1)).astype(
            np.float32
        )
        for text, vector in zip(part, vectors, strict=True):
            out[places[text]] = vector
    return out


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """The texts in lists of at most `_BATCH` signs, or of one text."""
    batch, size = list[str](), 0
    for text in texts:
        if batch and size + len(text) > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def _summed(texts: Sequence[str], width: int) -> np.ndarray:
    """(n, width) float64: the sums of n plain texts' n-grams before they are divided by their
    length.
    """
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    row = np.repeat(np.arange(len(texts)), [len(text) for text in texts])
    sums = np.zeros(len(texts) * width)
    for n in LENGTHS:
        last = max(0, len(codes) - n + 1)
        h = np.full(last, 0x811C9DC5, np.uint32)
        for k in range(n):
            h = (h ^ codes[k : k + last]) * np.uint32(0x01000193)
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x85EBCA6B)
        h = (h ^ h >> np.uint32(13)) * np.uint32(0xC2B2AE35)
        h ^= h >> np.uint32(16)
        h = h[inside := row[:last] == row[len(row) - last :]]
        place = row[:last][inside] * width + (h >> np.uint32(1)) % np.uint32(width)
        sums += np.bincount(place, 1.0 - 2.0 * (h & np.uint32(1)), len(sums))
    return sums.reshape(-1, width)
