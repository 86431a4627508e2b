"""Import paths such as `package.module:name`, folders for caches and output, file locks, and atomic
writes.
"""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

from fedloom.core.errors import ConfigError, FedloomError


def callable_at(path: str, error: type[FedloomError]) -> Callable[..., Any]:
    """The function or class at an import path. Raises `error` if there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise error(f"{path!r} must have the form package.module:name")
    try:
        value = getattr(importlib.import_module(module_name), name, None)
    except Exception as cause:  # any error in the user's module
        raise error(
            f"{path!r}: cannot import {module_name} ({type(cause).__name__}: {cause}); "
            "install it or put its folder on PYTHONPATH"
        ) from cause
    if callable(value):
        return value  # type: ignore[no-any-return]
    kind = "missing" if value is None else f"of type {type(value).__name__}"
    raise error(f"{path!r}: {name} must be a function or class, but is {kind}")


def cache_folder(kind: str) -> Path:
    """The folder for cached files of this kind: `$XDG_CACHE_HOME/fedloom/KIND`, by default in
    `~/.cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedloom" / kind


def refuse_file(folder: Path) -> None:
    """Raise ConfigError if the output folder or one of its parents is a file."""
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; --out takes a folder")


def lock(file: IO[Any] | int, *, wait: bool = False) -> bool:
    """Lock a file that is open for writing; with `wait`, once another process releases it. False if
    another process has the lock; True where the disk or system does not support locks. The kernel
    releases the lock when the file is closed, also after a kill.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """A context that holds a lock file; yields whether this process has the lock, see `lock`."""
    with path.open("a") as file:
        yield lock(file, wait=wait)


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace the content of `path` by `data`, in one or more parts. Readers and crashes see the
    old content or the new one, never a part. Concurrent writers wait for each other.
    """
    draft = path.with_name(f".{path.name}.draft")
    with _locked_draft(draft) as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())
        os.replace(draft, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_text(path: Path, text: str) -> None:
    """As `write_atomically`, for a text that a crash of the machine may lose."""
    draft = path.with_name(f".{path.name}.draft")
    with _opened(draft) as file:
        file.truncate(0)
        file.write(text.encode())
    os.replace(draft, path)


def _opened(draft: Path) -> BinaryIO:
    """The draft itself, for appending: in a folder of somebody else's it may be a link to another
    file.
    """
    if draft.is_symlink():
        draft.unlink()
    flags = (
        os.O_WRONLY
        | os.O_APPEND
        | os.O_CREAT
        | getattr(os, "O_NOFOLLOW", 0)
        | getattr(os, "O_BINARY", 0)
    )
    return os.fdopen(os.open(draft, flags, 0o666), "ab")


@contextlib.contextmanager
def _locked_draft(draft: Path) -> Iterator[BinaryIO]:
    """The draft, locked and empty. A draft that a killed process left is reused."""
    while True:
        with _opened(draft) as file:
            lock(file, wait=True)
            if _same_file(draft, file):  # else the writer before has moved it into place
                file.truncate(0)
                yield file
                return


def _same_file(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
