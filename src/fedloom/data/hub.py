"""Data sets in the layout of the Hugging Face hub, from a folder or the hub, through `datasets`.

The import takes seconds, so it stays inside the functions. Code that comes with a data set is never
run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedloom.core.errors import DataError, did_you_mean
from fedloom.data.cache import key_of, remember
from fedloom.data.dataset import Dataset, image_dataset
from fedloom.data.images import decode_images
from fedloom.data.tables import Table

_LABEL_NAMES = ("label", "labels", "target", "class", "y")
_TEST_NAMES = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class Hints:
    """What the files of a data set don't say themselves."""

    test: str | None = None
    """The official test split; None: the first there is of test, validation, valid and val."""
    label: str | None = None
    """The column of the labels; None: it is found by its type, then by its name."""
    groups: str | None = None
    """The column of the rows' natural owners; None: there is none."""
    drop: tuple[str, ...] = ()
    """Columns that must not be learnt from."""
    size: int | None = None
    """Each image's middle square is scaled to this many pixels a side; None: left alone."""


def read_files(path: Path, *, name: str, hints: Hints, config: str | None = None) -> Dataset:
    """Read a .parquet or .csv file, or a folder of them in the hub's layout.

    Raises:
        DataError: `datasets` is missing, or the files can't be used.
    """
    data = read_raw_files(path, name=name, hints=hints, config=config)
    return data.encoded() if isinstance(data, Table) else data


def read_raw_files(path: Path, *, name: str, hints: Hints, config: str | None = None) -> Dataset | Table:
    """Like `read_files`, but a table stays as the files hold it."""
    if config and (path / config).is_dir():
        path = path / config
    with _quiet(_hugging_face()) as hugging_face:
        try:
            splits = _open_files(hugging_face, path)
        except Exception as error:  # many kinds, from several libraries
            raise DataError(f"{path} can't be read as a data set; mend or replace it ({_reason(error)}).") from error
        return _assemble(splits, name=name, hints=hints)


def _open_files(hugging_face: ModuleType, path: Path) -> Any:
    options: dict[str, Any] = {"path": str(path)}
    if path.is_file():
        options = {"path": path.suffix[1:], "data_files": str(path)}
    try:
        return hugging_face.load_dataset(**options)
    except Exception:
        if table_endings(path) != {".csv"}:
            raise
        # A CSV is read in pieces, and fails where a piece turns out to hold another type ("?" after
        # many numbers). This slower way looks at the whole before it settles the types.
        return hugging_face.load_dataset(**options, engine="python", chunksize=2**31)


def table_endings(path: Path) -> set[str]:
    """Which of .csv and .parquet the file, or some file in the folder, ends with."""
    files = [path] if path.is_file() else path.rglob("*")
    return {file.suffix for file in files} & {".csv", ".parquet"}


def read_hub(repository: str, *, name: str, hints: Hints, config: str | None, folder: Path | None) -> Dataset:
    """Read a data set of the hub, or what `datasets` kept of it; decoded only the first time.

    Args:
        repository: "owner/name".
        name: what the data set is called here.
        hints: what the files don't say.
        config: the hub's name of one of several versions of the data set.
        folder: where no local copy was found, or None if there is no data root; for the error
            message.

    Raises:
        DataError: `datasets` is missing, the hub can't be reached, or the data can't be used.
    """
    with _hub_splits(repository, name=name, config=config, folder=folder) as splits:
        prints = [[split, table._fingerprint] for split, table in splits.items()]
        key = key_of(name, prints, repr(hints))

        def build() -> Dataset:
            data = _assemble(splits, name=name, hints=hints)
            return data.encoded() if isinstance(data, Table) else data

        return remember(key, build)


def read_raw_hub(
    repository: str, *, name: str, hints: Hints, config: str | None, folder: Path | None
) -> Dataset | Table:
    """Like `read_hub`, but a table stays as the hub holds it, and nothing is kept."""
    with _hub_splits(repository, name=name, config=config, folder=folder) as splits:
        return _assemble(splits, name=name, hints=hints)


@contextmanager
def _hub_splits(repository: str, *, name: str, config: str | None, folder: Path | None) -> Iterator[Mapping[str, Any]]:
    """The splits of a data set of the hub."""
    with _quiet(_hugging_face()) as hugging_face:
        try:
            splits = hugging_face.load_dataset(repository, name=config)
        except OSError as error:  # ConnectionError, FileNotFoundError, DatasetNotFoundError
            raise DataError(
                f"Data set {name!r} is neither in {folder or 'a local folder (FEDLOOM_DATA is not set)'} "
                f"nor to be had from the Hugging Face hub as {repository!r} ({_reason(error)}): put its "
                f"Parquet or CSV files into {folder or '<FEDLOOM_DATA>/' + repository}, or run once "
                "with a network."
            ) from error
        except Exception as error:
            raise DataError(f"Data set {name!r} ({repository!r}) can't be read: {_reason(error)}.") from error
        yield splits


def _hugging_face() -> ModuleType:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Reading Parquet, CSV or the Hugging Face hub needs the package `datasets`, which is not "
            'installed; run: pip install "fedloom[hub]"'
        ) from error
    module: ModuleType = datasets
    return module


@contextmanager
def _quiet(hugging_face: ModuleType) -> Iterator[ModuleType]:
    """No progress bars of `datasets`; whoever embeds fedloom finds them as they were."""
    silent = hugging_face.are_progress_bars_disabled()
    hugging_face.disable_progress_bars()
    try:
        yield hugging_face
    finally:
        if not silent:
            hugging_face.enable_progress_bars()


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause, which is the one that helps."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"[.\s]+$", "", lines[0])


def _assemble(splits: Mapping[str, Any], *, name: str, hints: Hints) -> Dataset | Table:
    """Images or a raw table from the training and the test split of a `datasets.DatasetDict`."""
    import datasets

    train, test = _train_and_test(splits, name, hints.test)
    pool = train if test is None else datasets.concatenate_datasets([train, test])
    images = _of_type(pool, datasets.Image)
    if len(images) > 1:
        raise DataError(f"Data set {name!r} must have one column of images, but it has {images}.")
    label = _label_column(pool, name, hints.label, table=not images)
    y, classes = _labels(pool, name, label)
    groups = None
    if hints.groups is not None:
        groups = np.unique(_values(pool, hints.groups), return_inverse=True)[1].astype(np.int64)
    held_out = None if test is None else np.arange(len(train), len(pool), dtype=np.int64)
    if images:
        x = decode_images(_encoded(pool, images[0]), size=hints.size)
        return image_dataset(name, x, y, classes, test=held_out, groups=groups)
    left_out = {label, hints.groups, *hints.drop}
    kept = {column: _words(pool, column) for column in pool.column_names if column not in left_out}
    return Table(name, kept, y, classes, held_out, groups)


def _train_and_test(splits: Mapping[str, Any], name: str, wanted: str | None) -> tuple[Any, Any]:
    """The two splits that are used, the second perhaps None. Others ("extra", ...) are left alone."""
    if len(splits) == 1 and wanted is None:
        return next(iter(splits.values())), None
    if "train" not in splits or (wanted is not None and wanted not in splits):
        raise DataError(
            f"Data set {name!r} must have the splits 'train' and {wanted or 'test'!r}, but it has "
            f"{list(splits)}; name its files after them."
        )
    test = wanted or next((split for split in _TEST_NAMES if split in splits), None)
    return splits["train"], splits[test] if test else None


def _label_column(pool: Any, name: str, wanted: str | None, *, table: bool) -> str:
    """The column of the labels: the one hinted at, else by type, else by name, else a table's last."""
    import datasets

    columns: list[str] = pool.column_names
    if wanted is not None:
        if wanted not in columns:
            raise DataError(
                f"Data set {name!r} must have a label column {wanted!r}, but it has not.{did_you_mean(wanted, columns)}"
            )
        return wanted
    typed = _of_type(pool, datasets.ClassLabel)
    named = [column for column in columns if column.lower() in _LABEL_NAMES]
    found = typed or named or (columns[-1:] if table else [])
    if len(found) != 1:
        raise DataError(
            f"Data set {name!r} must have one column of labels, but {found or 'none'} of its columns "
            f"{columns} could be it; keep one: a column of type ClassLabel, else one called "
            f"{', '.join(_LABEL_NAMES)}{', else the last of a table' if table else ''}."
        )
    return found[0]


def _labels(pool: Any, name: str, column: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) int64 labels 0..K-1 and the K names, sorted unless the files number the classes themselves."""
    values = _values(pool, column)
    names = getattr(pool.features[column], "names", None)
    if values.dtype.kind == "O":
        fit = all(isinstance(value, str) for value in values)
    elif values.dtype.kind == "f":
        fit = bool(np.isfinite(values).all() and (values == np.floor(values)).all())
    else:
        fit = values.dtype.kind in "biu"
    if not fit:
        raise DataError(
            f"Labels must be complete, and text, whole numbers or truth values, but column {column!r} "
            f"of data set {name!r} ({values.dtype}) has gaps, decimals or other things; choose or make "
            "a column of classes."
        )
    if names is not None:
        return values.astype(np.int64), tuple(names)
    if values.dtype.kind == "O":
        values = np.array([value.strip() for value in values], dtype=object)
    elif values.dtype.kind == "f":
        values = values.astype(np.int64)
    known, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), tuple(str(value) for value in known)


def _of_type(pool: Any, kind: type) -> list[str]:
    return [column for column, feature in pool.features.items() if isinstance(feature, kind)]


def _values(pool: Any, column: str) -> np.ndarray:
    """(n,) values straight from Arrow: row by row takes thousands of times as long."""
    if column not in pool.column_names:
        raise DataError(
            f"The data must have a column {column!r}, but has not.{did_you_mean(column, pool.column_names)}"
        )
    table = pool.select_columns([column]).with_format("arrow")[:]
    values: np.ndarray = table.column(column).to_numpy()
    return values


def _words(pool: Any, column: str) -> np.ndarray:
    """Like `_values`, with the classes of a ClassLabel column as their names, None where there is none."""
    values = _values(pool, column)
    names = getattr(pool.features[column], "names", None)
    if names is None:
        return values
    codes = np.nan_to_num(values, nan=-1).astype(np.int64)
    words: np.ndarray = np.array([*names, None], dtype=object)[codes]
    return words


def _encoded(pool: Any, column: str) -> Iterator[bytes | Path]:
    """The images of a column as they lie in the files."""
    import datasets

    raw = pool.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    for batch in raw.iter(batch_size=256):
        for item in batch[column]:
            if item is None:
                raise DataError(f"Each row must have an image, but column {column!r} has gaps; drop those rows.")
            yield item["bytes"] if item["bytes"] is not None else Path(item["path"])
