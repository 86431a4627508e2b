"""One column of a table, from any door: a file, a frame, an array or a list.

Cells are held by PyArrow: it reads CSV and Parquet, takes columns of pandas and Polars without a
copy, keeps text exactly as written, and starts in a twentieth of a second. Polars would do the
same, and pandas takes ten times as long.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.grammar import BOOLEANS, NUMBER, PLAIN, Grammar, in_order, is_number, plain_name

Table: TypeAlias = Any
"""A mapping of column names to values, or a pandas, Polars or Arrow table."""
_WHOLE = 2.0**53


@dataclass(frozen=True, eq=False)
class OnDisk:
    """The text of a large file's column whose cells are numbers or gaps: only its numbers are in
    memory.
    """

    read: Callable[[], Any]
    """Reads the cells, as text without the spaces around it."""
    padded: str | None = None
    """See `RawColumn.padded`; None if it is not known."""
    missing_words: Mapping[str, int] | None = None
    """See `RawColumn.missing_words`; None if they are not known."""


@dataclass(frozen=True, eq=False)
class RawColumn:
    """A column's cells, and the two ways to read them: as text exactly as written, and as a typed
    feature.
    """

    name: str
    held: Any
    """The cells as a `pyarrow.ChunkedArray`, or `OnDisk`."""
    grammar: Grammar = PLAIN
    parsed: np.ndarray | None = None
    """(n,) float64, NaN for a gap, of cells that are all numbers or gaps, if it is known already.
    """

    @classmethod
    def of(cls, name: str, values: Any, grammar: Grammar = PLAIN) -> "RawColumn":
        """A column from a list, an array, a tensor, or a column of a frame.

        Raises:
            DataError: it has more than one value for a row.
        """
        if isinstance(values, RawColumn):
            return values
        import pyarrow as pa

        cells = _plain(name, _cells(name, values))
        if pa.types.is_floating(cells.type):
            return column_of_floats(name, numbers_in(cells), grammar)
        cells = _without(cells, grammar)
        found = _parsed(cells, grammar)
        return cls(name, cells if found is not None else _stripped(cells), grammar, found)

    def __len__(self) -> int:
        return len(self.cells if self.parsed is None else self.parsed)

    @property
    def cells(self) -> Any:
        """A `pyarrow.ChunkedArray` of n texts without the spaces around them, or numbers, booleans,
        times or lists.
        """
        return self.held.read() if isinstance(self.held, OnDisk) else self.held

    @cached_property
    def _type(self) -> Any:
        import pyarrow as pa

        return pa.large_string() if isinstance(self.held, OnDisk) else self.held.type

    @cached_property
    def several(self) -> bool:
        """Whether a cell may hold several values."""
        import pyarrow as pa

        return bool(pa.types.is_nested(self._type))

    @cached_property
    def is_text(self) -> bool:
        """Whether the door gave text, whose type its words decide."""
        import pyarrow as pa

        return bool(pa.types.is_large_string(self._type))

    @cached_property
    def is_time(self) -> bool:
        """Whether the door gave dates or times."""
        import pyarrow as pa

        return bool(pa.types.is_temporal(self._type) and not pa.types.is_duration(self._type))

    @cached_property
    def is_duration(self) -> bool:
        """Whether the door gave spans of time, which are numbers of seconds."""
        import pyarrow as pa

        return bool(pa.types.is_duration(self._type))

    @cached_property
    def is_inexact(self) -> bool:
        """Whether the door gave floats of 2**53 or more, which are numbers, but no names."""
        import pyarrow as pa

        return bool(pa.types.is_floating(self._type) and (np.abs(self.values) >= _WHOLE).any())

    @cached_property
    def merges(self) -> bool:
        """Whether different whole numbers are written in full that float64 does not tell apart."""
        import pyarrow as pa

        if pa.types.is_floating(self._type):
            return False
        whole = [word for word in self.counts if word.lstrip("+-").isdecimal()]
        return len({float(word) for word in whole}) < len({int(word) for word in whole})

    @property
    def text(self) -> list[str]:
        """n texts as written, "" for an empty cell. Numbers of a typed door have no more digits
        than they need, and no point if all are whole; text that ends in ".0" in every cell, as
        pandas writes such numbers, loses it.

        Raises:
            DataError: a cell holds several values, or whole numbers that float64 does not tell
                apart.
        """
        import pyarrow.compute as pc

        if self.is_text and self._ends_in_zero:
            return _objects(pc.replace_substring_regex(self.cells, r"^([+-]?[0-9]+)\.0$", r"\1"))
        return self._text

    @property
    def _text(self) -> list[str]:
        """As `text`, each cell by itself."""
        import pyarrow as pa

        cells = self.cells
        if pa.types.is_decimal(cells.type):
            return [
                "" if number is None else f"{number.normalize():f}" for number in cells.to_pylist()
            ]
        if self.is_duration or pa.types.is_floating(cells.type):
            return _number_texts(self.name, numbers_in(cells))
        if pa.types.is_boolean(cells.type):
            words = np.where(_array(cells), "True", "False").astype(object)
            words[self.missing] = ""
            return list(words)
        if self.is_time:
            cells = _times_as_text(cells)
        elif self.several:
            raise DataError(
                f"Column {self.name!r} holds several values in a row; give one, or leave the "
                "column out."
            )
        elif self.is_text:
            return _objects(cells)
        if pa.types.is_integer(cells.type):  # equal numbers share one text, for memory's sake
            texts = {None: ""} | {
                number: str(number) for number in cells.unique().to_pylist() if number is not None
            }
            return [texts[number] for number in cells.to_pylist()]
        return ["" if word is None else str(word) for word in cells.to_pylist()]

    @property
    def missing(self) -> np.ndarray:
        """(n,) whether each cell has no value."""
        return self._missing if self.parsed is None else np.isnan(self.parsed)

    @cached_property
    def _missing(self) -> np.ndarray:
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.is_text:  # an array of words would make PyArrow import pandas
            return _gone(self.cells, self.grammar)
        return _array(pc.is_null(self.cells, nan_is_null=pa.types.is_floating(self.cells.type)))

    @cached_property
    def missing_words(self) -> Mapping[str, int]:
        """The words that count as missing -> how often; empty cells are not counted."""
        import pyarrow.compute as pc

        if not self.is_text:
            return {}
        if isinstance(self.held, OnDisk) and self.held.missing_words is not None:
            return self.held.missing_words
        counts = pc.value_counts(self.cells.filter(_mask(self.missing))).to_pylist()
        return {entry["values"]: entry["counts"] for entry in counts if entry["values"]}

    @cached_property
    def words(self) -> np.ndarray:
        """(n,) objects: the text as written, or None for a missing value.

        Raises:
            DataError: a cell holds several values.
        """
        return self._with_none(self.text)

    @cached_property
    def written(self) -> np.ndarray:
        """As `words`, where what a cell is does not depend on others: "1.0" stays even if all end
        so.
        """
        return self._with_none(self._text)

    def _with_none(self, texts: list[str]) -> np.ndarray:
        words = np.empty(len(texts), dtype=object)
        words[:] = texts
        words[self.missing] = None
        return words

    def codes(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """(n,) int64 numbers of `words`, -1 for a gap, and the different words in order. Holds no
        word of a row.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if not (self.is_text or pa.types.is_integer(self._type)):
            words, missing = self.words, self.missing
            names = known_words(words)
            places = {name: place for place, name in enumerate(names)}
            rows = np.fromiter((places.get(word, 0) for word in words), np.int64, len(words))
        else:
            cells, missing = self.cells, self.missing
            if self.is_text and self._ends_in_zero:
                cells = pc.replace_substring_regex(cells, r"^([+-]?[0-9]+)\.0$", r"\1")
            rows, found = _encoded(cells)
            names = [*map(str, found), ""]  # the last is a gap
        known = np.unique(rows[~missing]).tolist()
        ordered = in_order(names[place] for place in known)
        number = {name: place for place, name in enumerate(ordered)}
        new = np.array([number.get(name, -1) for name in names] or [-1], np.int64)
        return np.where(missing, -1, new[rows]), tuple(ordered)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The known words -> rows, in the order of their first row."""
        found = dict(Counter(self.words.tolist()))
        found.pop(None, None)
        return found

    @property
    def is_number(self) -> bool:
        """Whether the known values are numbers, and not true and false only."""
        return self.values.dtype.kind == "f" and not self._is_flag

    @cached_property
    def padded(self) -> str:
        """Some number of text that begins with zeros, as codes do; "" if none does."""
        if isinstance(self.held, OnDisk) and self.held.padded is not None:
            return self.held.padded
        return _padded(self.cells)

    @cached_property
    def values(self) -> np.ndarray:
        """(n,) float64 with NaN for gaps, booleans, or objects that are text or None: the column as
        a feature.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.parsed is not None:
            return self.parsed
        if pa.types.is_boolean(self._type):
            return _with_gaps(_array(self.cells), self.missing)
        if not self.is_text:
            return self.words if self.is_time or self.several else numbers_in(self.cells)
        gone = self.missing
        if gone.all():
            return np.full(len(self), None, dtype=object)
        first = self.cells[int(np.argmin(gone))].as_py()
        if (
            first in BOOLEANS
            and _array(pc.match_substring_regex(self.cells, _one_of(BOOLEANS)))[~gone].all()
        ):
            true = pc.match_substring_regex(
                self.cells, _one_of(word for word, one in BOOLEANS.items() if one)
            )
            return _with_gaps(_array(true), gone)
        numbers = _known_numbers(self.cells, gone, self.grammar)
        return self.words if numbers is None else numbers

    @cached_property
    def _is_flag(self) -> bool:
        """Whether the known values are true and false."""
        import pyarrow as pa

        known = ~self.missing
        if not self.is_text or self.parsed is not None or not known.any():
            return bool(pa.types.is_boolean(self._type))
        return self.cells[int(np.argmax(known))].as_py() in BOOLEANS

    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) float64, NaN for a gap and for what is no number; and (n,) whether a cell is
        neither. True is 1.
        """
        values = self.values
        if values.dtype.kind != "O":
            return values.astype(np.float64), np.zeros(len(self), dtype=bool)
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.is_text:
            return np.full(len(self), np.nan), ~self.missing  # also of times
        points = _decimal_points(self.cells, self.grammar)
        fits = pc.match_substring_regex(points, f"^({NUMBER})$")
        found = numbers_in(
            pc.if_else(fits, points, pa.nulls(len(self), pa.large_string())).cast(pa.float64())
        )
        return found, np.isnan(found) & ~self.missing

    def in_grammar(self, grammar: Grammar) -> "RawColumn":
        """The column with its numbers written by another grammar's decimal sign.

        Raises:
            DataError: a word is a number there, but not here.
        """
        import pyarrow.compute as pc

        if grammar == self.grammar or not self.is_text:
            return self
        if self.is_number:
            points = pc.replace_substring(self.cells, self.grammar.decimal, grammar.decimal)
            return RawColumn.of(
                self.name, pc.if_else(_mask(self.missing), self.cells, points), grammar
            )
        odd = next(
            (w for w in self.counts if grammar.is_number(w) and not self.grammar.is_number(w)), None
        )
        if odd is not None:
            raise DataError(
                f"Column {self.name!r} has {odd[:40]!r}, which is no number with "
                f"{self.grammar.decimal!r} before the decimals: correct it, or data.decimal."
            )
        return RawColumn(self.name, self.cells, grammar)

    def empty(self, rows: int) -> "RawColumn":
        """A column of the same name and type with this many missing values."""
        import pyarrow as pa

        return RawColumn(self.name, pa.chunked_array([pa.nulls(rows, self._type)]), self.grammar)

    def only(self, rows: np.ndarray) -> "RawColumn":
        """The same rows, where all cells of text but those of some rows (r,) are missing."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self.is_text or len(rows) == len(self):
            return self
        used = np.zeros(len(self), dtype=bool)
        used[rows] = True
        cells = pc.if_else(_mask(used), self.cells, pa.scalar(None, pa.large_string()))
        return RawColumn(self.name, cells, self.grammar)

    def take(self, rows: np.ndarray) -> "RawColumn":
        """The cells of some rows (r,)."""
        numbers = None if self.parsed is None else self.parsed[rows]
        if isinstance(self.held, OnDisk) and numbers is not None and not np.isnan(numbers).all():
            return RawColumn(
                self.name, OnDisk(lambda: self.cells.take(rows)), self.grammar, numbers
            )
        return RawColumn(self.name, self.cells.take(rows), self.grammar)

    @cached_property
    def _ends_in_zero(self) -> bool:
        import pyarrow.compute as pc

        gone = self.missing
        if gone.all() or not self.cells[int(np.argmin(gone))].as_py().endswith(".0"):
            return False
        known = self.cells.filter(_mask(~gone))
        return bool(
            pc.all(pc.match_substring_regex(known, r"^[+-]?[0-9]+\.0$"), min_count=1).as_py()
        )


class Growing:
    """Numbers that arrive in parts, in one array: parts of their own would leave holes
    in memory.
    """

    def __init__(self, rows: int) -> None:
        """Room for about this many; memory that is not used yet is not taken."""
        self._room, self._filled = np.empty(rows), 0

    def __len__(self) -> int:
        return self._filled

    def add(self, numbers: np.ndarray) -> None:
        """Append numbers (n,)."""
        end = self._filled + len(numbers)
        if end > len(self._room):
            room = np.empty(max(end, 2 * len(self._room)))
            room[: self._filled] = self._room[: self._filled]
            self._room = room
        self._room[self._filled : end] = numbers
        self._filled = end

    @property
    def numbers(self) -> np.ndarray:
        """(n,) float64, all that were added."""
        return self._room[: self._filled]


def column_of_floats(name: str, numbers: np.ndarray, grammar: Grammar) -> RawColumn:
    """A column of float64 (n,), NaN for a gap, in the same memory."""
    cells = _without(_shared(numbers), grammar)
    return RawColumn(name, cells, grammar, numbers if cells.null_count == 0 else numbers_in(cells))


def columns_of(table: Table, grammar: Grammar = PLAIN) -> dict[str, RawColumn]:
    """The columns of a frame or mapping, by name.

    Raises:
        DataError: this is no table, a name repeats, or a column has more than one value for a row.
    """
    if callable(getattr(table, "collect", None)):
        table = table.collect()  # of Polars, which reads now
    if not callable(getattr(table, "keys", None)) and not hasattr(table, "columns"):
        raise DataError(
            "Data must be a path, a mapping of columns, a pandas, Polars or Arrow table, or (X, "
            f"y), not a {type(table).__name__}."
        )
    names = getattr(table, "column_names", None)  # of Arrow, whose `columns` are not names
    keys = list(
        table.keys() if hasattr(table, "keys") else table.columns if names is None else names
    )
    words = ["" if key is None or key != key else plain_name(key) for key in keys]
    refuse_names(words, "The table")
    return {
        name: RawColumn.of(name, table[key], grammar) for name, key in zip(words, keys, strict=True)
    }


def refuse_names(names: Sequence[str], where: str) -> None:
    """Raise DataError if a column has no name, or two have one."""
    if "" in names:
        raise DataError(
            f"{where}: column {names.index('') + 1} of {len(names)} has no name; name it, or "
            "leave it out (pandas writes such a column without index=False)."
        )
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        raise DataError(
            f"{where}: column names must be unique, but {twice!r} repeats; rename all but one."
        )


def joined(columns: Sequence[RawColumn]) -> RawColumn:
    """One column of the cells of several, in order. Cells of different types become text."""
    import pyarrow as pa

    if len(columns) == 1:
        return columns[0]
    if any(isinstance(column.held, OnDisk) for column in columns) and all(
        c.is_text for c in columns
    ):
        return _joined_on_disk(columns)
    if len({column.cells.type for column in columns}) > 1:
        number = all(
            pa.types.is_integer(c.cells.type) or pa.types.is_floating(c.cells.type) for c in columns
        )
        columns = [
            RawColumn(c.name, c.cells.cast(pa.float64()), c.grammar)
            if number
            else RawColumn.of(c.name, _in_grammar(c), c.grammar)
            for c in columns
        ]
    return RawColumn(
        columns[0].name,
        pa.chunked_array(
            [chunk for c in columns for chunk in c.cells.chunks], columns[0].cells.type
        ),
        columns[0].grammar,
    )


def _joined_on_disk(columns: Sequence[RawColumn]) -> RawColumn:
    """One column of the texts of several files, without them if all are numbers or gaps."""
    import pyarrow as pa

    def read() -> Any:
        return pa.chunked_array(
            [chunk for c in columns for chunk in c.cells.chunks], pa.large_string()
        )

    first = columns[0]
    if not all(c.is_number or c.missing.all() for c in columns):
        return RawColumn(first.name, read(), first.grammar)
    parsed = np.concatenate(
        [np.full(len(c), np.nan) if c.values.dtype.kind == "O" else c.values for c in columns]
    )
    words = sum((Counter(c.missing_words) for c in columns), Counter[str]())
    padded = next((found for c in columns if (found := c.padded)), "")
    return RawColumn(first.name, OnDisk(read, padded, words), first.grammar, parsed)


def _in_grammar(column: RawColumn) -> list[str]:
    """The text of each cell, a number of a typed door with the decimal sign of the grammar."""
    import pyarrow as pa

    comma = column.grammar.decimal == "," and (
        pa.types.is_floating(column.cells.type) or pa.types.is_decimal(column.cells.type)
    )
    return [word.replace(".", ",") for word in column.text] if comma else column.text


def stacked(tables: Sequence[Mapping[str, RawColumn]]) -> dict[str, RawColumn]:
    """One table of the rows of several, in order. What a table lacks is missing there."""
    first = {name: column for table in reversed(tables) for name, column in table.items()}
    names = dict.fromkeys(name for table in tables for name in table)
    sizes = [len(next(iter(table.values()))) for table in tables]
    return {
        name: joined(
            [
                table[name] if name in table else first[name].empty(n)
                for table, n in zip(tables, sizes, strict=True)
            ]
        )
        for name in names
    }


def _cells(name: str, values: Any) -> Any:
    """Arrow's array of a column; objects of types that Arrow does not mix become text."""
    import pyarrow as pa

    values = array_of(values) if hasattr(values, "detach") else values
    shape = tuple(getattr(values, "shape", (len(values),) if hasattr(values, "__len__") else ()))
    if len(shape) != 1 or isinstance(values, str | bytes):
        raise DataError(f"Column {name!r} must have one value for each row, not the shape {shape}.")
    if isinstance(values, Mapping | Set):  # df.to_dict() is one of mappings
        raise DataError(
            f"Column {name!r} must have its values in the order of the rows, not in a "
            f"{type(values).__name__}."
        )
    if getattr(getattr(values, "dtype", None), "kind", "") == "c":
        raise DataError(
            f"Column {name!r} has complex numbers; give their real and imaginary parts as two "
            "columns."
        )
    try:
        if isinstance(values, pa.ChunkedArray):
            return values
        if hasattr(values, "__arrow_c_stream__") and not hasattr(values, "iloc"):
            return pa.chunked_array(values)
        array = pa.array(values, from_pandas=True)
        held = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
        if isinstance(held, pa.BaseExtensionType) and held.extension_name.startswith("pandas."):
            raise TypeError("periods and intervals are their text")
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    # Polars below 2 says so of types that it does not stream, such as categories in 1.20
    except OSError:
        raise DataError(
            f"Column {name!r} holds values of the type "
            f"{getattr(values, 'dtype', type(values).__name__)}, which the frame's library does "
            "not hand over: convert the column to text or numbers, or update that library."
        ) from None
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        texts = [_text(value) for value in values]
        try:
            return _chunks(texts)
        except UnicodeEncodeError:
            odd = next(
                text
                for text in texts
                if text and any("\ud800" <= sign <= "\udfff" for sign in text)
            )
            raise DataError(
                f"Column {name!r} has {odd[:40]!a}, which is no Unicode text; correct it."
            ) from None


def array_of(values: Any) -> np.ndarray:
    """An array of a tensor, a list or an array; a masked one stays masked."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values if str(values.layout) == "torch.strided" else values.to_dense()
        return np.asarray(
            (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()
        )
    return values if isinstance(values, np.ma.MaskedArray) else np.asarray(values)


def _chunks(texts: Sequence[str | None]) -> Any:
    import pyarrow as pa

    return pa.chunked_array([pa.array(texts, pa.large_string())])


def _text(value: Any) -> str | None:
    """One object as text; None for a missing one."""
    value = value.item() if hasattr(value, "detach") and value.ndim == 0 else value
    missing = value is None or (
        not isinstance(value, str | bytes) and np.ndim(value) == 0 and value != value
    )
    return None if missing else str(value)


def _plain(name: str, cells: Any) -> Any:
    """Cells of any type without its encoding: text in one type, words in place of their numbers.

    Raises:
        DataError: bytes that are no text in UTF-8, or a type that holds no words, numbers, dates or
            lists.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_type = pa.types
    try:
        if isinstance(cells.type, pa.BaseExtensionType):
            if cells.type.extension_name.startswith("pandas."):
                raise pa.ArrowNotImplementedError("a period or an interval of pandas")
            stored = pa.chunked_array(
                [chunk.storage for chunk in cells.chunks], cells.type.storage_type
            )
            plain = not is_type.is_fixed_size_binary(stored.type)
            cells = stored if plain else _chunks([_text(value) for value in cells.to_pylist()])
        if is_type.is_dictionary(cells.type):
            kind = cells.type.value_type
            if is_type.is_string_view(kind):  # of Polars; Arrow does not take views by number
                kind = pa.large_string()
            cells = pa.chunked_array(
                [c.dictionary.cast(kind).take(c.indices) for c in cells.chunks], kind
            )
        if is_type.is_run_end_encoded(cells.type):
            cells = pc.run_end_decode(cells)
        if is_type.is_fixed_size_binary(cells.type):
            cells = cells.cast(pa.binary())
        texts = (
            is_type.is_null,
            is_type.is_string,
            is_type.is_large_string,
            is_type.is_string_view,
        )
        if any(found(cells.type) for found in texts):
            return cells.cast(pa.large_string())
        if is_type.is_binary_view(cells.type):
            cells = cells.cast(pa.large_binary())
        if is_type.is_binary(cells.type) or is_type.is_large_binary(cells.type):
            words = cells.cast(pa.large_string())
            control = pc.any(pc.match_substring_regex(words, "[\\x00-\\x08]"))
            if control.as_py():  # a hash or a UUID, which is UTF-8 by chance
                raise pa.ArrowNotImplementedError("no text")
            return words
        if is_type.is_interval(cells.type) or is_type.is_union(cells.type):
            raise pa.ArrowNotImplementedError("no single value")
    except (pa.ArrowException, UnicodeDecodeError):
        raise DataError(
            f"Column {name!r} holds values of the type {cells.type}, which are no words, numbers "
            "or dates; convert them to text, or leave the column out."
        ) from None
    return cells


def _without(cells: Any, grammar: Grammar) -> Any:
    """Cells of any type, where numbers that are missing words, such as -999, are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not (pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)):
        return cells
    for word in filter(is_number, grammar.missing_words):
        found = pc.equal(cells.cast(pa.float64(), safe=False), float(word))
        cells = pc.if_else(pc.fill_null(found, False), pa.scalar(None, cells.type), cells)
    return cells


def _parsed(cells: Any, grammar: Grammar) -> np.ndarray | None:
    """(n,) float64 of text that is all finite numbers of the usual grammar; None for
    other cells.
    """
    import pyarrow as pa

    if not pa.types.is_large_string(cells.type) or cells.null_count or not len(cells):
        return None
    if grammar.decimal != "." or any(map(is_number, grammar.missing_words)):
        return None
    try:
        # takes what `NUMBER` does, and inf and nan; no spaces
        numbers = _array(cells.cast(pa.float64()))
    except pa.ArrowInvalid:
        return None
    return numbers if np.isfinite(numbers).all() else None


def numbers_or_gaps(
    cells: Any, grammar: Grammar
) -> tuple[np.ndarray, Mapping[str, int], str] | None:
    """Of texts (n,) that are numbers or gaps alone: (n,) float64 with NaN for a gap, the missing
    words -> how often, and `RawColumn.padded`; None of others.
    """
    numbers = _parsed(cells, grammar)
    if numbers is None:
        cells = _stripped(cells)
        gone = _gone(cells, grammar)
        numbers = (
            np.full(len(cells), np.nan) if gone.all() else _known_numbers(cells, gone, grammar)
        )
    if numbers is None:
        return None
    column = RawColumn("", cells, grammar, numbers)
    return numbers, column.missing_words, column.padded


def _gone(cells: Any, grammar: Grammar) -> np.ndarray:
    """(n,) whether each text is empty or a missing word. An array of words would make PyArrow
    import pandas.
    """
    import pyarrow.compute as pc

    words = ("", *grammar.missing_words)
    short = _lengths(cells) <= max(len(word.encode()) for word in words)
    found = _array(pc.match_substring_regex(cells.filter(_mask(short)), _one_of(words)))
    gone = _array(pc.is_null(cells)) if cells.null_count else np.zeros(len(cells), dtype=bool)
    gone[short] |= found
    return gone


def _known_numbers(cells: Any, gone: np.ndarray, grammar: Grammar) -> np.ndarray | None:
    """(n,) float64 of texts, NaN where they are `gone` (n,); None if another one is no number."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        known = pc.if_else(
            _mask(gone), pa.nulls(len(cells), pa.large_string()), _decimal_points(cells, grammar)
        )
        numbers = numbers_in(known.cast(pa.float64()))
    except pa.ArrowInvalid:
        return None
    # 1e400 is a number that is refused later, inf is a word
    odd = np.flatnonzero(~np.isfinite(numbers) & ~gone)
    return numbers if all(grammar.is_number(cells[int(row)].as_py()) for row in odd) else None


def _decimal_points(cells: Any, grammar: Grammar) -> Any:
    """Texts with a decimal point; where the sign is a comma, a point makes no number."""
    import pyarrow.compute as pc

    return (
        cells
        if grammar.decimal == "."
        else pc.replace_substring(pc.replace_substring(cells, ".", "_"), ",", ".")
    )


def _padded(cells: Any) -> str:
    """See `RawColumn.padded`."""
    import pyarrow.compute as pc

    found = _array(pc.match_substring_regex(cells, r"^0[0-9]"))
    return cells[int(np.argmax(found))].as_py() if found.any() else ""


def _shared(numbers: np.ndarray) -> Any:
    """Arrow's cells of float64 (n,), in the same memory."""
    import pyarrow as pa

    return pa.chunked_array(
        [pa.Array.from_buffers(pa.float64(), len(numbers), [None, pa.py_buffer(numbers)])]
    )


def _stripped(cells: Any) -> Any:
    """Cells of any type, text without the spaces around it."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.utf8_trim_whitespace(cells) if pa.types.is_large_string(cells.type) else cells


def numbers_in(cells: Any) -> np.ndarray:
    """(n,) float64 of numbers or spans of time (in seconds), NaN for gaps."""
    import pyarrow as pa

    if pa.types.is_duration(cells.type):
        units = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
        return (
            _array(cells.cast(pa.int64()).cast(pa.float64(), safe=False)) / units[cells.type.unit]
        )
    return _array(
        cells if pa.types.is_float64(cells.type) else cells.cast(pa.float64(), safe=False)
    )


def _array(cells: Any) -> np.ndarray:
    """(n,) booleans or float64 of Arrow's cells, False or NaN for a gap. PyArrow's own way imports
    pandas.
    """
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


def _mask(flags: np.ndarray) -> Any:
    """Arrow's booleans of (n,) flags. PyArrow's own way imports pandas."""
    import pyarrow as pa

    bits = pa.py_buffer(np.packbits(flags, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, bits])


def _objects(cells: Any) -> list[str]:
    """n texts, "" for a gap; equal ones are one object."""
    places, words = _encoded(cells)
    return list(np.array([*words, ""], dtype=object)[places])


def _encoded(cells: Any) -> tuple[np.ndarray, list[Any]]:
    """(n,) int32 places of cells among the different ones, whose number is that of a gap; and these
    in order of their first row.
    """
    import pyarrow as pa

    chunk = pa.chunked_array([cells.combine_chunks()]).chunk(0).dictionary_encode()
    places = np.frombuffer(chunk.indices.buffers()[1] or b"", np.int32)[: len(chunk)]
    if chunk.null_count:
        places = np.where(
            _bits(chunk.indices.buffers()[0])[: len(chunk)], places, np.int32(len(chunk.dictionary))
        )
    return places, chunk.dictionary.to_pylist()


def _lengths(cells: Any) -> np.ndarray:
    """(n,) bytes of each text."""
    parts = [np.empty(0, np.int64)]
    for chunk in cells.chunks:
        ends = np.frombuffer(chunk.buffers()[1], np.int64)[
            chunk.offset : chunk.offset + len(chunk) + 1
        ]
        parts.append(np.diff(ends))
    return np.concatenate(parts)


def _bits(buffer: Any) -> np.ndarray:
    """The bits of Arrow's buffer as booleans."""
    return np.unpackbits(np.frombuffer(buffer, np.uint8), bitorder="little").astype(bool)


def _number_texts(name: str, numbers: np.ndarray) -> list[str]:
    known = numbers[~np.isnan(numbers)]
    if (large := known[(np.abs(known) >= _WHOLE) & np.isfinite(known)]).size:
        raise DataError(
            f"Column {name!r} holds floats such as {large[0]:.0f}, which do not tell whole "
            "numbers of 2**53 or more apart: read the column as text or whole numbers."
        )
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
        return pc.replace_substring_regex(cells.cast(pa.large_string()), r"\.0+$", "")
    zone = "" if cells.type.tz is None else "+00:00"
    cells = cells.cast(pa.timestamp(cells.type.unit))
    days = cells.cast(pa.date32(), safe=False)
    if not zone and pc.all(pc.equal(days.cast(cells.type), cells)).as_py() is not False:
        return days.cast(pa.large_string())
    text = pc.replace_substring_regex(cells.cast(pa.large_string()), r"\.0+$", "")
    return pc.binary_join_element_wise(
        text, pa.scalar(zone, pa.large_string()), pa.scalar("", pa.large_string())
    )


def _one_of(words: Iterable[str]) -> str:
    """A pattern of RE2 that fits these words only."""
    return "^(" + "|".join(rf"\Q{word}\E" for word in words) + ")$"


def known_words(words: Iterable[str | None]) -> list[str]:
    """The words without gaps, each once, in the order of their first row."""
    found = dict.fromkeys(words)
    found.pop(None, None)
    return list(found)  # type: ignore[arg-type]
