"""What a user names: an import path `package.module:name`, and a folder to write to; and locks of files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # no Unix
    fcntl = None  # type: ignore[assignment]

from fedloom.core.errors import ConfigError, FedloomError


def callable_at(path: str, error: type[FedloomError]) -> Callable[..., Any]:
    """The function or class of that path. Raises `error` if there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise error(f"{path!r} must read package.module:name")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except Exception as cause:  # whatever the user's module does when imported
        raise error(
            f"{path!r}: {module_name} can't be imported ({type(cause).__name__}: {cause}); "
            "install it or put its folder on PYTHONPATH"
        ) from cause
    if callable(found):
        return found  # type: ignore[no-any-return]
    kind = "nothing" if found is None else f"of type {type(found).__name__}"
    raise error(f"{path!r}: {name} must be a function or class, but is {kind}")


def cache_folder(kind: str) -> Path:
    """Where the user's computer keeps what can be made again: `$XDG_CACHE_HOME/fedloom/KIND`, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedloom" / kind


def refuse_file(folder: Path) -> None:
    """Raise ConfigError if the folder to write to, or what it should lie in, is a file."""
    for one in (folder, *folder.parents):
        if one.exists() and not one.is_dir():
            raise ConfigError(f"{one} is a file; --out takes a folder")


def lock(file: IO[Any] | int, *, wait: bool = False) -> bool:
    """Whether we got the lock of an open file; the kernel lets go of it when the file is closed, also after a kill.

    Args:
        file: open for writing.
        wait: until another process lets go.

    Returns:
        False if another process has it. On a disk or a system that knows no locks everybody gets it.
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
