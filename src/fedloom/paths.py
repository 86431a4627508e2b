"""What a user names: an import path `package.module:name`, and a folder to write to."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.errors import ConfigError, FedloomError


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


def refuse_file(folder: Path) -> None:
    """Raise ConfigError if the folder to write to, or what it should lie in, is a file."""
    for one in (folder, *folder.parents):
        if one.exists() and not one.is_dir():
            raise ConfigError(f"{one} is a file; --out takes a folder")
