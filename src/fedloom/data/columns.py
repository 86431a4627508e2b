"""One column of a table, from any door: a file, a frame, an array or a list.

Cells are held by PyArrow: it reads CSV and Parquet, takes columns of pandas and Polars without a copy, keeps text
exactly as written, and starts in a twentieth of a second. Polars would do the same, and pandas takes ten times as long.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.grammar import BOOLEANS, NUMBER, PLAIN, Grammar

Table: TypeAlias = Any
"""A mapping of column names to values, or a pandas, Polars or Arrow table."""
_WHOLE = 2.0**53


@dataclass(frozen=True, eq=False)
class RawColumn:
    """A column's cells, and the two ways to read them: as text exactly as written, and as a typed feature."""

    name: str
    cells: Any
    """A `pyarrow.ChunkedArray` of n texts without the spaces around them, or of numbers, booleans, times or lists."""
    grammar: Grammar = PLAIN

    @classmethod
    def of(cls, name: str, values: Any, grammar: Grammar = PLAIN) -> "RawColumn":
        """A column from a list, an array, a tensor, or a column of a frame.

        Raises:
            DataError: it has more than one value for a row.
        """
        if isinstance(values, RawColumn):
            return values
        return cls(name, _stripped(_cells(name, values)), grammar)

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def several(self) -> bool:
        """Whether a cell may hold several values."""
        import pyarrow as pa

        return bool(pa.types.is_nested(self.cells.type))

    @cached_property
    def is_text(self) -> bool:
        """Whether the door gave text, whose type its words decide."""
        import pyarrow as pa

        return bool(pa.types.is_large_string(self.cells.type))

    @cached_property
    def is_time(self) -> bool:
        """Whether the door gave dates or times."""
        import pyarrow as pa

        return bool(pa.types.is_temporal(self.cells.type) and not pa.types.is_duration(self.cells.type))

    @cached_property
    def is_duration(self) -> bool:
        """Whether the door gave spans of time, which are numbers of seconds."""
        import pyarrow as pa

        return bool(pa.types.is_duration(self.cells.type))

    @cached_property
    def text(self) -> list[str]:
        """n texts as written, "" for an empty cell. Numbers of a typed door have no more digits than they need, and no
        point if all are whole; text that ends in ".0" in every cell, as pandas writes such numbers, loses it.

        Raises:
            DataError: a cell holds several values.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        cells = self.cells
        if self.is_duration or pa.types.is_floating(cells.type) or pa.types.is_decimal(cells.type):
            return _number_texts(_numbers(cells))
        if pa.types.is_boolean(cells.type):
            cells = pc.if_else(cells, "True", "False")
        elif self.is_time:
            cells = _times_as_text(cells)
        elif self.several:
            raise DataError(f"Column {self.name!r} holds several values in a row; give one, or leave the column out.")
        elif self.is_text and self._ends_in_zero:
            cells = pc.replace_substring_regex(cells, r"^([+-]?[0-9]+)\.0$", r"\1")
        return ["" if word is None else str(word) for word in cells.to_pylist()]

    @cached_property
    def missing(self) -> np.ndarray:
        """(n,) whether each cell has no value."""
        import pyarrow as pa
        import pyarrow.compute as pc

        gone = pc.is_null(self.cells, nan_is_null=pa.types.is_floating(self.cells.type))
        if self.is_text:
            gone = pc.or_(gone, self._missing_text)
        return _array(gone)

    @cached_property
    def missing_words(self) -> Mapping[str, int]:
        """The words that count as missing -> how often; empty cells are not counted."""
        import pyarrow.compute as pc

        if not self.is_text:
            return {}
        counts = pc.value_counts(self.cells.filter(self._missing_text)).to_pylist()
        return {entry["values"]: entry["counts"] for entry in counts if entry["values"]}

    @cached_property
    def words(self) -> np.ndarray:
        """(n,) objects: the text as written, or None for a missing value.

        Raises:
            DataError: a cell holds several values.
        """
        words = np.array([*self.text, None], dtype=object)[:-1]  # the None keeps NumPy from making fixed-size text
        words[self.missing] = None
        return words

    @cached_property
    def values(self) -> np.ndarray:
        """(n,) float64 with NaN for gaps, booleans, or objects that are text or None: the column as a feature."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if pa.types.is_boolean(self.cells.type):
            return _with_gaps(_array(self.cells), self.missing)
        if not self.is_text:
            return self.words if self.is_time or self.several else _numbers(self.cells)
        gone = self._missing_text
        known = self.cells.filter(pc.invert(gone))
        if not len(known):
            return np.full(len(self), None, dtype=object)
        if pc.all(pc.match_substring_regex(known, _one_of(BOOLEANS))).as_py():
            true = pc.match_substring_regex(self.cells, _one_of(word for word, one in BOOLEANS.items() if one))
            return _with_gaps(_array(true), _array(gone))
        plain = self._decimal_points
        if not pc.all(pc.match_substring_regex(plain.filter(pc.invert(gone)), f"^({NUMBER})$")).as_py():
            return self.words
        return _numbers(pc.if_else(gone, pa.nulls(len(self), pa.large_string()), plain).cast(pa.float64()))

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) float64, NaN for a gap and for what is no number; and (n,) whether a cell is neither. True is 1."""
        values = self.values
        if values.dtype.kind != "O":
            return values.astype(np.float64), np.zeros(len(self), dtype=bool)
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.is_text:
            return np.full(len(self), np.nan), ~self.missing
        fits = pc.match_substring_regex(self._decimal_points, f"^({NUMBER})$")
        found = _numbers(
            pc.if_else(fits, self._decimal_points, pa.nulls(len(self), pa.large_string())).cast(pa.float64())
        )
        return found, np.isnan(found) & ~self.missing

    def empty(self, rows: int) -> "RawColumn":
        """A column of the same name and type with this many missing values."""
        import pyarrow as pa

        return RawColumn(self.name, pa.chunked_array([pa.nulls(rows, self.cells.type)]), self.grammar)

    def take(self, rows: np.ndarray) -> "RawColumn":
        """The cells of some rows (r,)."""
        return RawColumn(self.name, self.cells.take(rows), self.grammar)

    @cached_property
    def _missing_text(self) -> Any:
        """Whether each cell is empty or a missing word. An array of words would make PyArrow import pandas."""
        import pyarrow.compute as pc

        empty = pc.is_null(self.cells)
        return pc.or_kleene(empty, pc.match_substring_regex(self.cells, _one_of(("", *self.grammar.missing_words))))

    @cached_property
    def _ends_in_zero(self) -> bool:
        import pyarrow.compute as pc

        known = self.cells.filter(pc.invert(self._missing_text))
        return bool(pc.all(pc.match_substring_regex(known, r"^[+-]?[0-9]+\.0$"), min_count=1).as_py())

    @cached_property
    def _decimal_points(self) -> Any:
        """The text with a decimal point; where the sign is a comma, a point makes no number."""
        import pyarrow.compute as pc

        if self.grammar.decimal == ".":
            return self.cells
        return pc.replace_substring(pc.replace_substring(self.cells, ".", "_"), ",", ".")


def columns_of(table: Table, grammar: Grammar = PLAIN) -> dict[str, RawColumn]:
    """The columns of a frame or mapping, by name.

    Raises:
        DataError: this is no table, a name repeats, or a column has more than one value for a row.
    """
    if not hasattr(table, "keys") and not hasattr(table, "columns"):
        raise DataError(
            "Data must be a path, a mapping of columns, a pandas, Polars or Arrow table, or (X, y), not a "
            f"{type(table).__name__}."
        )
    names = getattr(table, "column_names", None)  # of Arrow, whose `columns` are not names
    keys = list(table.keys() if hasattr(table, "keys") else table.columns if names is None else names)
    words = [str(key) for key in keys]
    if repeated := sorted({name for name in words if words.count(name) > 1} if len(set(words)) < len(words) else ()):
        raise DataError(f"Column names must be unique, but {repeated[0]!r} repeats; rename all but one.")
    return {name: RawColumn.of(name, table[key], grammar) for name, key in zip(words, keys, strict=True)}


def joined(columns: Sequence[RawColumn]) -> RawColumn:
    """One column of the cells of several, in order. Cells of different types become text."""
    import pyarrow as pa

    if len({column.cells.type for column in columns}) > 1:
        number = all(pa.types.is_integer(c.cells.type) or pa.types.is_floating(c.cells.type) for c in columns)
        columns = [
            RawColumn(c.name, c.cells.cast(pa.float64()), c.grammar)
            if number
            else RawColumn.of(c.name, c.text, c.grammar)
            for c in columns
        ]
    return RawColumn(columns[0].name, pa.chunked_array([chunk for c in columns for chunk in c.cells.chunks],
                                                     columns[0].cells.type), columns[0].grammar)  # fmt: skip


def stacked(tables: Sequence[Mapping[str, RawColumn]]) -> dict[str, RawColumn]:
    """One table of the rows of several, in order. What a table lacks is missing there."""
    first = {name: column for table in reversed(tables) for name, column in table.items()}
    names = dict.fromkeys(name for table in tables for name in table)
    sizes = [len(next(iter(table.values()))) for table in tables]
    return {
        name: joined(
            [table[name] if name in table else first[name].empty(n) for table, n in zip(tables, sizes, strict=True)]
        )
        for name in names
    }


def _cells(name: str, values: Any) -> Any:
    """Arrow's array of a column; objects of types that Arrow does not mix become text."""
    import pyarrow as pa

    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    shape = tuple(getattr(values, "shape", (len(values),) if hasattr(values, "__len__") else ()))
    if len(shape) != 1 or isinstance(values, str | bytes):
        raise DataError(f"Column {name!r} must have one value for each row, not the shape {shape}.")
    try:
        if isinstance(values, pa.ChunkedArray):
            return values
        if hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc"):
            return pa.chunked_array(values)
        array = pa.array(values, from_pandas=True)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        texts = [_text(value) for value in values]
        try:
            return pa.chunked_array([pa.array(texts, pa.large_string())])
        except UnicodeEncodeError:
            odd = next(text for text in texts if text and any("\ud800" <= sign <= "\udfff" for sign in text))
            raise DataError(f"Column {name!r} has {odd[:40]!a}, which is no Unicode text; correct it.") from None


def _text(value: Any) -> str | None:
    """One object as text; None for a missing one."""
    missing = value is None or (not isinstance(value, str | bytes) and np.ndim(value) == 0 and value != value)
    return None if missing else str(value)


def _stripped(cells: Any) -> Any:
    """Cells of any type, text without the spaces around it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = cells.type
    if pa.types.is_dictionary(kind):
        cells = cells.cast(kind.value_type)
    if pa.types.is_null(kind):
        return cells.cast(pa.large_string())
    if any(found(cells.type) for found in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
                                           pa.types.is_binary, pa.types.is_large_binary)):  # fmt: skip
        return pc.utf8_trim_whitespace(cells.cast(pa.large_string()))
    return cells


def _numbers(cells: Any) -> np.ndarray:
    """(n,) float64 of numbers or spans of time (in seconds), NaN for gaps."""
    import pyarrow as pa

    if pa.types.is_duration(cells.type):
        units = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
        return _array(cells.cast(pa.int64()).cast(pa.float64(), safe=False)) / units[cells.type.unit]
    return _array(cells.cast(pa.float64(), safe=False))


def _array(cells: Any) -> np.ndarray:
    """(n,) booleans or float64 of Arrow's cells, False or NaN for a gap. PyArrow's own way imports pandas."""
    import pyarrow as pa

    bits = pa.types.is_boolean(cells.type)
    parts = [np.empty(0, bool if bits else np.float64)]
    for chunk in cells.chunks:
        valid, data = chunk.buffers()
        place = slice(chunk.offset, chunk.offset + len(chunk))
        if chunk.null_count == len(chunk):
            values = np.full(len(chunk), False if bits else np.nan)
        else:
            values = _bits(data)[place] if bits else np.frombuffer(data, np.float64)[place]
        if 0 < chunk.null_count < len(chunk):
            known = _bits(valid)[place]
            values = values & known if bits else np.where(known, values, np.nan)
        parts.append(values)
    return np.concatenate(parts)


def _bits(buffer: Any) -> np.ndarray:
    """The bits of Arrow's buffer as booleans."""
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little").astype(bool)


def _number_texts(numbers: np.ndarray) -> list[str]:
    known = numbers[~np.isnan(numbers)]
    if np.array_equal(known, np.floor(known)) and (np.abs(known) < _WHOLE).all():
        return ["" if number != number else str(int(number)) for number in numbers.tolist()]
    return ["" if number != number else repr(number) for number in numbers.tolist()]


def _with_gaps(values: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Booleans (n,), or float64 with NaN if there are gaps."""
    return np.where(gaps, np.nan, values) if gaps.any() else values


def _times_as_text(cells: Any) -> Any:
    """Dates as 2022-01-31 if all are, else as 2022-01-31 10:00:00, in UTC if they have a zone."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_timestamp(cells.type):
        return cells.cast(pa.large_string())
    zone = "" if cells.type.tz is None else "+00:00"
    cells = cells.cast(pa.timestamp(cells.type.unit))
    days = cells.cast(pa.date32(), safe=False)
    if not zone and pc.all(pc.equal(days.cast(cells.type), cells)).as_py() is not False:
        return days.cast(pa.large_string())
    text = pc.replace_substring_regex(cells.cast(pa.large_string()), r"\.0+$", "")
    return pc.binary_join_element_wise(text, pa.scalar(zone, pa.large_string()), pa.scalar("", pa.large_string()))


def _one_of(words: Iterable[str]) -> str:
    """A pattern of RE2 that fits these words only."""
    return "^(" + "|".join(rf"\Q{word}\E" for word in words) + ")$"


def known_words(words: Iterable[str | None]) -> list[str]:
    """The words without gaps, each once, in the order of their first row."""
    return list(dict.fromkeys(word for word in words if word is not None))
