"""Raw tables, and CSV files read as columns of text.

`read_csv` is how every CSV file comes in. It reads blocks of rows by PyArrow, refuses what PyArrow
would accept in silence (a second header, quotes behind spaces, a quote that is never closed), and
gives each cell as it is written: what a cell means is decided later, by `RawColumn`. Of a file
beyond `LARGE` the columns of numbers are held as numbers alone, and their text is read from the
file once more in the rare case that it is needed. Functions import PyArrow themselves, so that a
command that reads no table starts without it.
"""

import codecs
import csv
import io
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.columns import (
    Growing,
    OnDisk,
    RawColumn,
    known_words,
    numbers_or_gaps,
    refuse_names,
)
from fedloom.data.grammar import MOST_NUMBERS, PLAIN, Grammar, in_order, plain_name

MISSING = "?"
"""The category of missing text."""
MOST_COLUMNS = 100_000
LARGE = 1 << 26
"""Bytes of a CSV file beyond which the text of its numbers is not held, but read again where it is
needed.
"""
BLOCK = 1 << 20
"""Bytes of a CSV file that are read at once, unless its header is long."""
SHOWN = 5
"""Number of rows that an error names."""
_MOSTLY = 0.9  # of a column's words; if so many are numbers, the others are probably errors
_LARGEST = 1e30  # so that squares fit into float64 and scaled values into float32
_SEPARATORS = "\t;|,"  # of signs that are equally often, the first: a comma may be part of a name
_READ = Grammar(missing_words=())
"""Of words whose gaps are None already."""


@dataclass(frozen=True, eq=False)
class RawTable:
    """A table as in its file: not encoded, imputed or scaled."""

    name: str
    columns: Mapping[str, np.ndarray]
    """Name -> (n,) numbers, booleans, or objects that are text or None; without the labels."""
    y: np.ndarray
    """(n,) int64 labels, 0..K-1, or float64 numbers to predict."""
    classes: tuple[str, ...]
    """K names; () for numbers to predict."""
    test: np.ndarray | None
    """(t,) int64 row numbers of the official test split, or None if there is none."""
    groups: np.ndarray | None = None
    """(n,) int64 natural owner of each row, or None."""
    owners: tuple[str, ...] = ()
    """Names of the owners, if they are known."""
    label: str = ""
    """The name of the label, if it is known."""

    @property
    def task(self) -> Literal["classes", "number"]:
        """What the labels are."""
        return "classes" if self.classes else "number"

    @property
    def strata(self) -> tuple[np.ndarray, tuple[str, ...]]:
        """See `strata_of`."""
        return strata_of(self.y, self.classes)


def strata_of(
    y: np.ndarray, classes: Sequence[str], parts: int = 10
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes of labels y (n,) and their K names. Numbers to predict are divided into at
    most `parts` of
    about equal size, in ascending order: by these they are partitioned, held out and shown.
    """
    if classes:
        return y, tuple(classes)
    edges = np.unique(np.quantile(y, np.arange(1, parts) / parts, method="higher"))
    edges = edges[edges > y.min()]
    ends = next(
        names
        for digits in (6, 9, 12, 17)
        if len({*(names := [f"{edge:.{digits}g}" for edge in edges])}) == len(names)
    )
    names = (
        [
            f"below {ends[0]}",
            *(f"{a} to {b}" for a, b in itertools.pairwise(ends)),
            f"from {ends[-1]}",
        ]
        if ends
        else ["all"]
    )
    return np.searchsorted(edges, y, side="right").astype(np.int64), tuple(names)


def read_csv(
    path: Path, *, needed: Sequence[str] = (), grammar: Grammar = PLAIN
) -> dict[str, RawColumn]:
    """Columns of text by name, from a UTF-8 file with a header, whose separator is a comma,
    semicolon, tab or bar.

    Raises:
        DataError: the file is unreadable, has no rows, a row's length differs from the header's, a
            column name is empty or repeated, or a needed column is missing.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow

    if not path.is_file():
        raise DataError(
            f"there is no file {path}: give its path from {Path.cwd()}, or the whole path"
        )

    # the header: `raw_names` as written, by which PyArrow knows the columns, and `names` for us, in
    # one Unicode form, without spaces around and invisible signs
    raw_names, separator = _header(path)
    names = [plain_name(name) for name in raw_names]
    if not names:
        raise DataError(f"{path} is empty; it must have a header, and rows below it.")
    if re.fullmatch("sep=.?", names[0]) and not any(names[1:]):
        raise DataError(
            f"{path} begins with {separator.join(names)!r}, a line for Excel alone; delete that "
            "line."
        )
    refuse_names(names, str(path))
    if len(names) > MOST_COLUMNS:
        raise DataError(
            f"{path} has {len(names):,} columns, but a table may have {MOST_COLUMNS:,}; leave "
            "some out."
        )
    for name in needed:
        if name not in names:
            raise DataError(
                f"{path} must have a column {name!r}, but has {names}.{did_you_mean(name, names)}"
            )
    options: dict[str, Any] = {
        # a block must hold the whole header; a letter has at most 4 bytes
        "read_options": arrow.ReadOptions(block_size=max(BLOCK, 4 * sum(map(len, raw_names)))),
        "parse_options": arrow.ParseOptions(delimiter=separator, newlines_in_values=True),
    }

    def as_texts(*only: str) -> dict[str, Any]:
        """PyArrow's options for cells as they are written, of all columns or some."""
        # large: offsets of 64 bits, as the text of a column may be longer than 2 GiB
        types = dict.fromkeys(raw_names, pa.large_string())
        told = arrow.ConvertOptions(
            column_types=types, strings_can_be_null=False, include_columns=only or None
        )
        return {**options, "convert_options": told}

    # the rows, block by block
    parts, rows, last_cell = list[_Part](), 0, ""
    try:
        hold_texts, before = path.stat().st_size <= LARGE, _stamp(path)
        with arrow.open_csv(path, **as_texts()) as batches:
            for batch in batches:
                # looked for in the header and the first rows alone, as this reads cells one by one
                if not rows and (odd := _spaced_quotes(raw_names, batch)):
                    raise DataError(
                        f"{path} has {odd[:40]!r}: a cell with spaces before its quotes. Delete "
                        f"the spaces behind the signs {separator!r}, or the quotes."
                    )
                if not parts:
                    # the rows of the file, if all blocks have as many as the first: too much room
                    # takes no memory until it is used, so a tenth more is for longer blocks
                    room = (
                        int(
                            1.1
                            * batch.num_rows
                            * path.stat().st_size
                            / options["read_options"].block_size
                        )
                        + 1
                    )
                    parts = [_Part(name, grammar, 0 if hold_texts else room) for name in names]
                if (row := _second_header(batch, raw_names)) >= 0:
                    at = f"row {rows + row + 1}, counted from 1 below the first"
                    raise DataError(f"{path} has its header again in {at}; delete it.")
                for part, cells in zip(parts, batch.columns, strict=True):
                    part.add(cells, hold_texts)
                if batch.num_rows:
                    last_cell = batch.column(len(names) - 1)[-1].as_py()
                    rows += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        # Python's own reader finds the line, which PyArrow does not say
        raise DataError(
            _problem(path, separator, len(names)) or f"{path} cannot be read as CSV ({error})."
        ) from None
    if rows and _unclosed(path, last_cell):
        raise DataError(
            _problem(path, separator, len(names))
            or f"{path} ends within quotes; correct its last line."
        )
    if not rows:
        raise DataError(f"{path} must have rows below its header, but has none.")

    def read_again(raw_name: str) -> Any:
        """The text of a column's cells, from the file as it was read before."""
        try:
            found = arrow.read_csv(path, **as_texts(raw_name)).column(0)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read again ({error}); start again.") from None
        if _stamp(path) != before:
            raise DataError(f"{path} has changed while it was read; start again.")
        return found

    return {
        part.name: part.column(partial(read_again, raw_name))
        for part, raw_name in zip(parts, raw_names, strict=True)
    }


def _stamp(path: Path) -> tuple[int, int]:
    """The size of a file, and when it was changed."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


class _Part:
    """A column of a CSV file, as far as it is read: its texts; or of a large file its numbers, as
    long as all cells are numbers or gaps; None if the texts before are needed after all.

    A column of a large file begins as numbers. At its first word it becomes texts if no numbers are
    held yet; else the texts of these are gone, and the column is read again in the end.
    """

    def __init__(self, name: str, grammar: Grammar, room: int) -> None:
        self.name, self.grammar = name, grammar
        self.texts = list[Any]()  # chunks of Arrow
        self.numbers: Growing | None = Growing(room)
        self.padded, self.missing_words = "", Counter[str]()

    def add(self, cells: Any, hold: bool) -> None:
        """Take further cells; `hold` keeps the texts of numbers."""
        import pyarrow as pa

        cells = pa.chunked_array([cells])
        found = (
            None
            if hold or self.texts or self.numbers is None
            else numbers_or_gaps(cells, self.grammar)
        )
        if found is not None and self.numbers is not None:
            numbers, words, padded = found
            self.numbers.add(numbers)
            self.missing_words.update(words)
            self.padded = self.padded or padded
        elif self.numbers:  # some are held, whose texts are not
            self.numbers = None
        elif self.numbers is not None:  # none is held; if it is None, the file is read again anyway
            self.texts += cells.chunks

    def column(self, read_again: Callable[[], Any]) -> RawColumn:
        """The column of all cells; `read_again` reads their texts."""
        import pyarrow as pa

        if self.texts:
            return RawColumn.of(self.name, pa.chunked_array(self.texts), self.grammar)
        # a column of gaps alone is text, as in a small file
        if self.numbers is None or np.isnan(self.numbers.numbers).all():
            return RawColumn.of(self.name, read_again(), self.grammar)
        held = OnDisk(
            lambda: RawColumn.of(self.name, read_again(), self.grammar).cells,
            self.padded,
            self.missing_words,
        )
        return RawColumn(self.name, held, self.grammar, self.numbers.numbers)


def _header(path: Path) -> tuple[list[str], str]:
    """The names in a file's first row, and the sign that separates them most often outside of
    quotes.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            # the first row is several lines if a name within quotes holds a line break
            first = ""
            for line in file:
                first += line
                if first.strip() and first.count('"') % 2 == 0:
                    break
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, error)) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read as a CSV file ({error}).") from error
    outside = "".join(first.split('"')[::2])  # every second piece is within quotes
    separator = max(_SEPARATORS, key=outside.count)
    return next(csv.reader(io.StringIO(first.lstrip("\r\n")), delimiter=separator), []), separator


def _not_utf8(path: Path, error: UnicodeDecodeError) -> str:
    with path.open("rb") as file:
        start = file.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return f"{path} is not text in UTF-8 but in UTF-16. Save it as CSV in UTF-8."
    byte = error.object[error.start : error.start + 1]
    shown = f"0x{byte.hex()}, in Windows-1252 {byte.decode('cp1252', errors='replace')!r}"
    return f"{path} is not text in UTF-8: it has the byte {shown}. Save it as CSV in UTF-8."


def _spaced_quotes(names: Sequence[str], found: Any) -> str:
    """A cell of the header or the first rows that has spaces before its quotes, which are then a
    part of it; "" if none has.
    """
    first = itertools.chain(names, *(cells.slice(0, 20).to_pylist() for cells in found.columns))
    return next((cell for cell in first if re.fullmatch(r'\s+".*"\s*', cell, re.S)), "")


def _second_header(found: Any, names: Sequence[str]) -> int:
    """The row of texts whose cells are the columns' names, as in files that were put together; -1
    if none is.
    """
    import pyarrow.compute as pc

    row = pc.index(found.column(0), names[0]).as_py()
    return (
        row
        if row >= 0
        and all(found.column(place)[row].as_py() == name for place, name in enumerate(names))
        else -1
    )


def _unclosed(path: Path, last: str) -> bool:
    """Whether the last cell begins with a quote that nothing ends, which PyArrow accepts."""
    # the file's last bytes, if the cell was begun by a quote and never ended
    begun = b'"' + last.replace('"', '""').encode()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - len(begun) - 1))
        end = file.read()
    return end.endswith(begun) and end != begun + b'"'  # "" is an empty cell


def _problem(path: Path, separator: str, width: int) -> str:
    """What is wrong with a CSV file that cannot be read, with the line."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.reader(file, strict=True, delimiter=separator)
            for row in lines:
                if row and len(row) != width:
                    return (
                        f"{path}, line {lines.line_num}: expected {width} values, as in the "
                        f"header, but found {len(row)}; correct that line."
                    )
    except UnicodeDecodeError as error:
        return _not_utf8(path, error)
    except csv.Error as error:
        return (
            f"{path}, line {lines.line_num}, cannot be read as a CSV file ({error}); correct "
            "that line."
        )
    return ""


def class_numbers(labels: RawColumn, what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 classes, -1 for a missing label, and the classes' names, sorted as numbers if all
    are, else as text.

    Raises:
        DataError: fewer than two classes.
    """
    codes, names = codes_of(labels.words)
    numbers = labels.values if labels.values.dtype.kind == "f" else np.empty(0)
    if (numbers != np.floor(numbers))[~np.isnan(numbers)].any():
        raise DataError(
            f"{what} must have classes, but has numbers with decimals: a number to predict is "
            "for tables: divide the numbers into classes first."
        )
    if len(names) < 2:
        raise DataError(f"{what} must have at least 2 classes, but its labels are {list(names)}.")
    return codes, names


def codes_of(words: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 numbers of the words (n,), -1 for None, and the different words in order."""
    names = in_order(known_words(words))
    places: dict[str | None, int] = {name: place for place, name in enumerate(names)}
    places[None] = -1
    return np.fromiter(map(places.__getitem__, words), np.int64, len(words)), tuple(names)


def different(values: np.ndarray) -> Collection[Any]:
    """The values (n,) without repetitions, unsorted if they are objects; np.unique would sort them,
    which is slow.
    """
    return np.unique(values) if values.dtype.kind != "O" else set(values.tolist())


def typed(name: str, values: np.ndarray | RawColumn) -> np.ndarray:
    """(n,) numbers or booleans, or else words as objects, `MISSING` for a gap.

    Raises:
        DataError: a cell holds several values.
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values
    found = RawColumn.of(name, values).values
    return filled(found) if found.dtype.kind == "O" else found


def filled(words: np.ndarray) -> np.ndarray:
    """(n,) objects with `MISSING` for None."""
    found: np.ndarray = np.where(np.equal(words, np.array(None, dtype=object)), MISSING, words)
    return found


def numbers_of(name: str, values: np.ndarray | RawColumn) -> np.ndarray:
    """(n,) float64 with NaN for missing values.

    Raises:
        DataError: a word is no number, or a number is very large.
    """
    numbers, wrong = as_numbers(name, values)
    if wrong.any():
        bad = min(
            word for word, odd in zip(RawColumn.of(name, values).text, wrong, strict=True) if odd
        )
        raise DataError(
            f"Column {name!r} must have numbers, but has {bad!r}; correct or drop those rows."
        )
    outside = int((np.abs(numbers) > _LARGEST).sum())
    if outside:
        raise DataError(
            f"Numbers must be within ±{_LARGEST:.0e}, but column {name!r} has {outside} outside; "
            "correct them."
        )
    return numbers


def as_numbers(name: str, values: np.ndarray | RawColumn) -> tuple[np.ndarray, np.ndarray]:
    """As `RawColumn.numbers`, also of numbers that are read already."""
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return values.astype(np.float64), np.zeros(len(values), dtype=bool)
    return RawColumn.of(name, values).numbers()


def as_words(name: str, values: np.ndarray | RawColumn) -> np.ndarray:
    """(n,) objects: the words of a column, or those that are read already; `MISSING` for a gap."""
    return filled(RawColumn.of(name, values, _READ).words)


def refuse_mistakes(name: str, words: Mapping[str, int], grammar: Grammar = PLAIN) -> None:
    """Raise DataError if a column's known words -> rows are numbers but for some."""
    if odd := mistakes(words, grammar):
        raise DataError(
            f"Column {name!r} has numbers, but {sum(odd.values())} of its {sum(words.values())} "
            f"values are not, such as {next(iter(odd))[:40]!r}; correct them, or leave them "
            "empty, or list the word in data.missing_words; if the numbers are codes, set "
            f"data.encode.{name} = 'category', or prefix each with a letter."
        )


def mistakes(words: Mapping[str, int], grammar: Grammar = PLAIN) -> dict[str, int]:
    """The words -> rows that are no numbers, if the others are too many, or too different, to be
    codes; else none.
    """
    odd = {word: rows for word, rows in words.items() if not grammar.is_number(word)}
    total, numbers = sum(words.values()), sum(words.values()) - sum(odd.values())
    mostly = numbers >= _MOSTLY * total or (
        2 * numbers > total and len(words) - len(odd) > MOST_NUMBERS
    )
    return odd if mostly else {}


def refuse_rows(column: str, what: str, wrong: np.ndarray, where: str = "") -> None:
    """Raise DataError if rows of a column are `wrong` (n,); the message has row numbers and no
    values.
    """
    rows = np.flatnonzero(wrong)
    if len(rows):
        named = ", ".join(str(row + 1) for row in rows[:SHOWN]) + (
            ", …" if len(rows) > SHOWN else ""
        )
        raise DataError(
            f"{where}Column {column!r} must hold {what} in each row, but {len(rows)} of "
            f"{len(wrong)} don't (row {named}, counted from 1 below the header); correct or drop "
            "those rows."
        )
