"""Data sets in the layout of the Hugging Face hub, from a folder or the hub.

CSV, and a Parquet file of columns and pictures, are read by PyArrow, and all else by `datasets`.
Importing it takes up to seconds, so functions import it. Code that comes with a data set is never
run.
"""

import contextlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.cache import key_of
from fedloom.data.columns import (
    Growing,
    RawColumn,
    column_of_floats,
    numbers_in,
    refuse_names,
    stacked,
)
from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.grammar import PLAIN, Decimal, Grammar, plain_name
from fedloom.data.images import decode_images
from fedloom.data.roles import ALLOW, class_names, refuse_unnamed
from fedloom.data.tables import RawTable, codes_of, read_csv, typed

_LABEL_NAMES = ("label", "labels", "target", "class", "y")
_SPLIT_NAMES = dict.fromkeys(("train", "training"), "train")
_SPLIT_NAMES |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
_SPLIT_NAMES |= dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
"""Words in file names that `datasets` recognizes as split names."""
_CONNECT = 3.0
"""Seconds to wait for the hub."""
BATCH = 1 << 16
"""Rows of a Parquet file that are read at once."""
_TEST_NAMES = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class Hints:
    """Information that the files of a data set do not contain."""

    test: str | None = None
    """The official test split; None for the first of test, validation, valid and val that exists.
    """
    label: str | None = None
    """The label column; None to find it by its type, then by its name."""
    groups: str | None = None
    """The column of the rows' natural owners, or None."""
    drop: tuple[str, ...] = ()
    """Columns to ignore."""
    size: int | None = None
    """Side in pixels to which each image's central square is scaled; None keeps images as they are.
    """


@dataclass(frozen=True, eq=False)
class Content:
    """The columns of files, before their roles are known."""

    columns: Mapping[str, RawColumn]
    """By name, without that of the images."""
    test: np.ndarray | None
    """Row numbers of the test split, if there is one."""
    named: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Columns of class numbers -> the names of their classes."""
    images: Iterator[bytes | Path] | None = None
    """The encoded images; None for a table."""


def read_files(
    path: Path, *, name: str, hints: Hints, config: str | None = None
) -> Dataset | RawTable:
    """Read a .parquet or .csv file, or a folder of them in the hub's layout; a table is not
    encoded.

    Raises:
        DataError: `datasets` is not installed but needed, or the files are invalid.
    """
    return _build(name, hints, read_content(path, name, test=hints.test, config=config))


def read_content(
    path: Path,
    name: str,
    *,
    test: str | None = None,
    config: str | None = None,
    grammar: Grammar = PLAIN,
    union: bool = False,
    decimals: Mapping[str, Decimal] = MappingProxyType({}),
) -> Content:
    """The columns of a .parquet or .csv file, or of a folder of them; `test` is the official test
    split. With `union`, what a file lacks is missing there; `decimals` has the decimal sign of
    files by name, in place of the grammar's.

    Raises:
        DataError: as `read_files`.
    """
    if config and (path / config).is_dir():
        path = path / config
    refuse_unknown_files(decimals, _table_files(path))
    if table_endings(path) == {".csv"} or (
        path.is_dir() and (union or (config is None and _has_plain_tables(path)))
    ):
        return _read_table_files(path, name, test, grammar, union, decimals)
    if (
        path.is_file()
        and test is None
        and (content := _read_parquet_file(path, name, grammar)) is not None
    ):
        return content
    options: dict[str, Any] = {"path": str(path)}
    if path.is_file():
        options = {"path": path.suffix[1:].lower(), "data_files": str(path)}
    try:
        splits = _load_dataset(**options)
    except DataError:
        raise
    except Exception as error:  # of several libraries
        raise DataError(
            f"{path} cannot be read as a data set; correct or replace it ({_reason(error)})."
        ) from error
    return _assemble(splits, name, test, grammar)


def table_endings(path: Path) -> set[str]:
    """The suffixes .csv and .parquet of the file, or of files in the folder."""
    return {file.suffix.lower() for file in _table_files(path)}


def _table_files(path: Path) -> list[Path]:
    """The file, or the folder's .csv and .parquet files, without hidden ones and those that
    programs keep beside.
    """
    files = [path] if path.is_file() else path.rglob("*")
    return sorted(
        file
        for file in files
        if file.suffix.lower() in (".csv", ".parquet")
        and not (
            file != path
            and any(
                part.startswith((".", "~$", "__MACOSX")) for part in file.relative_to(path).parts
            )
        )
    )


def _has_plain_tables(path: Path) -> bool:
    """Whether a folder has no page of the hub, and its files are CSV, or Parquet of numbers, words
    and dates alone.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if (path / "README.md").exists():
        return False
    try:
        schemas = [
            pq.read_schema(file) for file in _table_files(path) if file.suffix.lower() == ".parquet"
        ]
    except (OSError, pa.ArrowException):
        return True  # whose reader names the file
    plain = [
        b"huggingface" not in (s.metadata or {}) and not any(map(pa.types.is_nested, s.types))
        for s in schemas
    ]
    return all(plain)


def open_from_hub(
    repository: str, *, name: str, hints: Hints, config: str | None, folder: Path | None
) -> tuple[str, Callable[[], Dataset | RawTable]]:
    """A data set of the hub, or of the cache of `datasets`: its cache key, and a function that
    decodes it.

    Args:
        repository: "owner/name".
        name: the name of the data set in fedloom.
        hints: see `Hints`.
        config: the hub's configuration name, if there are several.
        folder: the folder without a local copy, or None without a data root; for errors.

    Raises:
        DataError: `datasets` is not installed, the hub is unreachable, or the data is invalid.
    """
    try:
        splits = _load_dataset(repository, hub=True, name=config)
    except DataError:
        raise
    except OSError as error:  # ConnectionError, FileNotFoundError, DatasetNotFoundError
        raise DataError(
            f"Data set {name!r} is neither in "
            f"{folder or 'a local folder (FEDLOOM_DATA is not set)'} nor available from the "
            f"Hugging Face hub as {repository!r} ({_reason(error)}); put its Parquet or CSV "
            f"files into {folder or '<FEDLOOM_DATA>/' + repository}, or run once with a network."
        ) from error
    except Exception as error:
        raise DataError(
            f"Data set {name!r} ({repository!r}) cannot be read: {_reason(error)}."
        ) from error
    prints = [[split, table._fingerprint] for split, table in splits.items()]
    return key_of(name, prints, repr(hints)), lambda: _build(
        name, hints, _assemble(splits, name, hints.test)
    )


def _load_dataset(*args: Any, hub: bool = False, **options: Any) -> Mapping[str, Any]:
    """The splits from `datasets`, without progress bars."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Reading Parquet or the Hugging Face hub needs the package `datasets`, which is not "
            "installed; "
            'run: pip install -e ".[hub]"'
        ) from error
    silent = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with _offline() if hub and not _hub_answers() else contextlib.nullcontext():
            splits: Mapping[str, Any] = datasets.load_dataset(*args, **options)
        return splits
    finally:
        if not silent:
            datasets.enable_progress_bars()


def _hub_answers() -> bool:
    """Whether the hub can be reached, without the half minute of retries of `datasets`; assumed
    behind a proxy.
    """
    import socket
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if urllib.request.getproxies().keys() & {"https", "http", "all"}:
        return True
    url = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((url.hostname or "", url.port or 443), _CONNECT).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` use its cache only."""
    import datasets
    from huggingface_hub import constants

    places: tuple[Any, ...] = (datasets.config, constants)
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"[.\s]+$", "", lines[0])


def _read_table_files(
    path: Path,
    name: str,
    test: str | None,
    grammar: Grammar,
    union: bool,
    decimals: Mapping[str, Decimal],
) -> Content:
    """A CSV file, or the files of a folder, with split names in file names as on the hub."""
    splits: dict[str, list[Path]] = defaultdict(list)
    for file in _table_files(path):
        words = re.split(
            r"[-._ 0-9/]+",
            "" if path.is_file() else file.relative_to(path).with_suffix("").as_posix(),
        )
        splits[next((_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES), "")].append(
            file
        )
    if len(splits) > 1:
        splits.pop("", None)
    parts = [part or [] for part in _train_and_test(splits, name, test)]
    tables = [
        [_with_keys(read_in(file, grammar, decimals), path, file) for file in part]
        for part in parts
    ]
    every = [table for part in tables for table in part]
    names = list(every[0])
    odd = [
        file for file, table in zip(chain(*parts), every, strict=True) if set(table) != set(names)
    ]
    if odd and not union:
        raise DataError(
            f"All files must have the columns of {parts[0][0]}, {names}, but {odd[0]} has "
            f"others. {ALLOW}."
        )
    columns = stacked(every)
    sizes = [sum(len(next(iter(table.values()))) for table in part) for part in tables]
    held_out = np.arange(sizes[0], sum(sizes), dtype=np.int64) if sizes[1] else None
    return Content(columns, held_out)


def read_table(
    file: Path, *, needed: Sequence[str] = (), grammar: Grammar = PLAIN
) -> dict[str, RawColumn]:
    """The columns of one CSV or Parquet file.

    Raises:
        DataError: as `read_csv`; or the file has pictures, or columns that only `datasets` knows.
    """
    if file.suffix.lower() != ".parquet" or not file.is_file():
        return read_csv(file, needed=needed, grammar=grammar)
    columns = _read_table(file, grammar)
    for name in needed:
        if name not in columns:
            raise DataError(
                f"{file} must have a column {name!r}, but has "
                f"{[*columns]}.{did_you_mean(name, columns)}"
            )
    return columns


def read_in(file: Path, grammar: Grammar, decimals: Mapping[str, Decimal]) -> dict[str, RawColumn]:
    """The columns of one CSV or Parquet file in this grammar, also if `decimals` gives the file
    another sign.
    """
    own = replace(grammar, decimal=decimals.get(file.name, grammar.decimal))
    return {
        name: column.in_grammar(grammar) for name, column in read_table(file, grammar=own).items()
    }


def refuse_unknown_files(decimals: Mapping[str, Decimal], files: Iterable[Path]) -> None:
    """Raise DataError if decimal signs are given for a file that is none of these."""
    known = sorted({file.name for file in files})
    for name in decimals:
        if name not in known:
            raise DataError(
                f"data.decimal names the file {name!r}, but there are only "
                f"{known[:12]}.{did_you_mean(name, known)}"
            )


def _with_keys(table: dict[str, RawColumn], path: Path, file: Path) -> dict[str, RawColumn]:
    """A file's columns, and those of its folders: `site=n/part.parquet` has n in the
    column site.
    """
    keys = (
        [part.partition("=") for part in file.relative_to(path).parts[:-1] if "=" in part]
        if path.is_dir()
        else []
    )
    first = next(iter(table.values()))
    named = {plain_name(unquote(key)): [unquote(word)] * len(first) for key, _, word in keys}
    return table | {
        key: RawColumn.of(key, words, first.grammar)
        for key, words in named.items()
        if key not in table
    }


def _read_table(file: Path, grammar: Grammar) -> dict[str, RawColumn]:
    """The columns of a CSV or Parquet file that has no pictures."""
    if file.suffix.lower() == ".csv":
        return read_csv(file, grammar=grammar)
    content = _read_parquet_file(file, file.stem, grammar)
    if content is None or content.images is not None or content.named:
        raise DataError(
            f"{file} must hold columns of numbers, words and dates only, if files have different "
            "columns."
        )
    return dict(content.columns)


def _read_parquet_file(path: Path, name: str, grammar: Grammar = PLAIN) -> Content | None:
    """A Parquet file; None if only `datasets` knows a column's type."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # the schema, and what `datasets` has written beside it: column -> its type there
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as a data set; correct or replace it ({_reason(error)})."
        ) from error
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        told = about.get("info", {}).get("features", {}).items()
        features: dict[str, Any] = {
            plain_name(column): kind for column, kind in told if isinstance(kind, dict)
        }
    except (ValueError, RecursionError, AttributeError) as error:  # a file may hold any text there
        raise DataError(
            f"{path}: its metadata 'huggingface' cannot be read; write the file without them."
        ) from error
    # names in one Unicode form, without spaces around and invisible signs; none empty or repeated
    names = [plain_name(column) for column in schema.names]
    refuse_names(names, str(path))

    # The cells: floats go into one growing array each, as they come (parts would leave holes in
    # memory), as float64 with NaN for gaps; others stay chunks of Arrow.
    floats = [pa.types.is_floating(kind) for kind in schema.types]
    # a file may name more rows than it has: no more than 1 GiB is reserved for a column at first
    room = min(max(file.metadata.num_rows, 0), 1 << 27)
    numbers = [Growing(room if is_float else 0) for is_float in floats]
    chunks: list[list[Any]] = [[] for _ in floats]
    try:
        for batch in file.iter_batches(BATCH):
            for place, cells in enumerate(batch.columns):
                if floats[place]:
                    numbers[place].add(numbers_in(pa.chunked_array([cells])))
                else:
                    chunks[place].append(cells)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as a data set; correct or replace it ({_reason(error)})."
        ) from error

    # what the columns are: pictures (also without the metadata of `datasets`), class numbers with
    # the names of their classes, or cells whose type Arrow knows
    images, named = [], {}
    for column, kind in zip(names, schema.types, strict=True):
        feature = features.get(column, {}).get("_type", "Value")
        if pa.types.is_struct(kind) and {inner.name for inner in kind} == {
            "bytes",
            "path",
        }:
            images.append(column)
        elif feature == "ClassLabel" and isinstance(features[column].get("names"), list):
            named[column] = [str(word) for word in features[column]["names"]]
        elif feature not in ("Value", "Sequence", "List", "ClassLabel"):
            return None
    _refuse_several(images, name)
    cells_of = [
        pa.chunked_array(found, kind) for found, kind in zip(chunks, schema.types, strict=True)
    ]
    # `grammar` has the words for gaps and the decimal sign, for cells that are text
    columns = {
        column: column_of_floats(column, own.numbers, grammar)
        if is_float
        else RawColumn.of(column, cells, grammar)
        for column, own, is_float, cells in zip(names, numbers, floats, cells_of, strict=True)
        if column not in images
    }
    # the bytes of each picture's file, or its path
    encoded = _pictures(cells_of[names.index(images[0])].to_pylist(), images[0]) if images else None
    # a file by itself has no test split: None
    return Content(columns, None, named, encoded)


def _refuse_several(images: Sequence[str], name: str) -> None:
    if len(images) > 1:
        raise DataError(f"Data set {name!r} must have one column of images, but has {images}.")


def _pictures(items: Iterable[Mapping[str, Any] | None], column: str) -> Iterator[bytes | Path]:
    """The encoded images of a column's cells."""
    for item in items:
        if item is None:
            raise DataError(
                f"Each row must have an image, but column {column!r} has gaps; drop those rows."
            )
        yield item["bytes"] if item["bytes"] is not None else Path(item["path"])


def _assemble(
    splits: Mapping[str, Any], name: str, official: str | None, grammar: Grammar = PLAIN
) -> Content:
    """The training and the test split of a `datasets.DatasetDict`."""
    import datasets

    train, test = _train_and_test(splits, name, official)
    pool = train if test is None else datasets.concatenate_datasets([train, test])
    images = [
        column
        # without the hub's own metadata an image is two fields
        for column, feature in pool.features.items()
        if isinstance(feature, datasets.Image)
        or (isinstance(feature, dict) and feature.keys() == {"bytes", "path"})
    ]
    _refuse_several(images, name)
    named = {
        c: feature.names
        for c, feature in pool.features.items()
        if isinstance(feature, datasets.ClassLabel)
    }
    held_out = None if test is None else np.arange(len(train), len(pool), dtype=np.int64)

    table = pool.select_columns([c for c in pool.column_names if c not in images]).with_format(
        "arrow"
    )[:]
    columns = {
        column: RawColumn.of(column, table.column(column), grammar) for column in table.column_names
    }
    return Content(columns, held_out, named, _encoded(pool, images[0]) if images else None)


def _build(name: str, hints: Hints, content: Content) -> Dataset | RawTable:
    """Images or a raw table of known columns."""
    columns, named = content.columns, content.named
    for column in (hints.label, hints.groups):
        if column is not None and column not in columns:
            hint = did_you_mean(column, columns)
            raise DataError(
                f"Data set {name!r} must have a column {column!r}, but has {[*columns]}.{hint}"
            )
    label = hints.label or _label_column(
        [*columns], list(named), name, table=content.images is None
    )
    y, classes = _labels(columns[label], named.get(label), name)
    groups = None if hints.groups is None else codes_of(columns[hints.groups].words)[0]
    if content.images is not None:
        x = decode_images(content.images, size=hints.size)
        return image_dataset(name, x, y, classes, test=content.test, groups=groups)
    kept = {
        column: found
        for column, found in columns.items()
        if column not in {label, hints.groups, *hints.drop}
    }
    for column in kept.keys() & named.keys():  # class numbers become their names
        kept[column] = class_names(kept[column], named[column])
    return RawTable(
        name,
        {column: typed(column, found) for column, found in kept.items()},
        y,
        classes,
        content.test,
        groups,
    )


def _train_and_test(splits: Mapping[str, Any], name: str, wanted: str | None) -> tuple[Any, Any]:
    """The training split, and the test split or None. Others are ignored."""
    if len(splits) == 1 and wanted is None:
        return next(iter(splits.values())), None
    if "train" not in splits or (wanted is not None and wanted not in splits):
        raise DataError(
            f"Data set {name!r} must have the splits 'train' and {wanted or 'test'!r}, but has "
            f"{list(splits)}; name its files after them."
        )
    test = wanted or next((split for split in _TEST_NAMES if split in splits), None)
    return splits["train"], splits[test] if test else None


def _label_column(columns: Sequence[str], typed: list[str], name: str, *, table: bool) -> str:
    """The label column: by type, else by name, else a table's last."""
    named = [column for column in columns if column.lower() in _LABEL_NAMES]
    candidates = typed or named or ([*columns[-1:]] if table else [])
    if len(candidates) != 1:
        raise DataError(
            f"Data set {name!r} must have one label column, but {candidates or 'none'} of its "
            f"columns {[*columns]} could be it; keep one: a column of type ClassLabel, else one "
            f"called {', '.join(_LABEL_NAMES)}{', else the last of a table' if table else ''}."
        )
    return candidates[0]


def _labels(
    column: RawColumn, names: Sequence[str] | None, name: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 labels 0..K-1 and the K names, sorted unless the files number the classes
    themselves.
    """
    where = f"column {column.name!r} of data set {name!r}"
    values = column.values
    if column.missing.any() or (values.dtype.kind == "f" and (values != np.floor(values)).any()):
        raise DataError(
            f"Labels must be text, whole numbers or booleans without gaps, but {where} has "
            "missing values or decimals; choose another column."
        )
    if names is None:
        return codes_of(column.words)
    codes = values.astype(np.int64)
    refuse_unnamed(codes, names, where.capitalize())
    return codes, tuple(names)


def _encoded(pool: Any, column: str) -> Iterator[bytes | Path]:
    """The encoded images of a column."""
    import datasets

    encoded = pool.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    yield from _pictures(
        chain.from_iterable(batch[column] for batch in encoded.iter(batch_size=256)), column
    )
