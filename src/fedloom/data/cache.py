"""A cache of decoded data sets on disk, under `$XDG_CACHE_HOME/fedloom/data` or
`~/.cache/fedloom/data`.

Removing entries is always safe.
"""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.dataset import Dataset
from fedloom.support.paths import cache_folder

# Part of every key: increment it when decoding changes.
_VERSION = 5


def from_cache(key: str, build: Callable[[], Dataset]) -> Dataset:
    """The data set cached under a key, or else a newly built one, which is then cached.

    A damaged entry is rebuilt, and a read-only cache folder is not an error.
    """
    entry = cache_folder("data") / key
    data = _fetch(entry)
    if data is None:
        data = build()
        _store(entry, data)
    return data


def key_of(*parts: object) -> str:
    """A key from text and numbers that determine the content of a data set."""
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def files_key(path: Path, *parts: object) -> str:
    """A key for a file, or all files under a folder: names, sizes and modification times."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    stats = [(file, file.stat()) for file in files]
    listing = [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
    return key_of(str(path.resolve()), listing, *parts)


def _fetch(entry: Path) -> Dataset | None:
    try:
        words = json.loads((entry / "words.json").read_text(encoding="utf-8"))
        # Copy on write: processes share unchanged pages, and PyTorch accepts the array as writable.
        x = np.asarray(np.load(entry / "x.npy", mmap_mode="c", allow_pickle=False))
        small = {
            name: np.load(entry / f"{name}.npy", allow_pickle=False) for name in words["arrays"]
        }
        texts: Any = {
            key: tuple(v) if isinstance(v, list) else v
            for key, v in words.items()
            if key != "arrays"
        }
        arrays: Any = {"x": x, **small}
        return Dataset(**arrays, **texts)
    except (OSError, EOFError, ValueError, KeyError, TypeError, DataError):
        return None


def _store(entry: Path, data: Dataset) -> None:
    arrays = {name: value for name, value in vars(data).items() if isinstance(value, np.ndarray)}
    texts = {
        name: value
        for name, value in vars(data).items()
        if name not in arrays and value is not None
    }
    words = {**texts, "arrays": sorted(arrays.keys() - {"x"})}
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=entry.parent))
    except OSError:
        return
    try:
        for name, value in arrays.items():
            np.save(draft / f"{name}.npy", value, allow_pickle=False)
        (draft / "words.json").write_text(json.dumps(words), encoding="utf-8")
        shutil.rmtree(entry, ignore_errors=True)
        draft.rename(entry)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
