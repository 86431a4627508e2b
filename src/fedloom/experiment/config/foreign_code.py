"""Config files from elsewhere: the code that they name runs only if the user trusts it by name."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fedloom.core.errors import ConfigError
from fedloom.models.external import LIBRARIES

_CODE: Final = re.compile(r"[^\n]*\.py(:\w+)?|[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The path of a method page, or `package.module:name`."""


def refuse_foreign_code(values: Any, file: Path, trust: Collection[str] | None) -> None:
    """Refuse a config file outside the working folder that names code. A file in the working folder
    is the user's own.

    Args:
        values: the file's.
        file: its path.
        trust: names of code that the user trusts, as in the file; None for a command that cannot be
            told.

    Raises:
        ConfigError: the file names other code.
    """
    if file.resolve().is_relative_to(Path.cwd().resolve()):
        return
    if named := sorted({*named_code(values)} - {*(trust or ())}):
        flags = " ".join(f"--trust {name}" for name in named)
        consent = "" if trust is None else f"add {flags} (in Python: trust={named}), or "
        raise ConfigError(
            f"{file} names code that would run here: {', '.join(named)}. The file is outside the "
            f"working folder: read file and code, then {consent}copy the file into the working "
            "folder"
        )


def named_code(values: Any) -> Iterator[str]:
    """Every text in a config that is the name of code. Networks of other libraries that fedloom
    loads without running code of their own (`hf:NAME`) do not count.
    """
    if isinstance(values, str):
        if _CODE.fullmatch(values) and values.partition(":")[0] not in LIBRARIES:
            yield values
    elif isinstance(values, Mapping):
        for key, inner in values.items():
            if key != "title":
                yield from named_code(inner)
    elif isinstance(values, list):
        for inner in values:
            yield from named_code(inner)
