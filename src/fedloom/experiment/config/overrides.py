"""Settings of the command line, `dotted.key=value`."""

import tomllib
from typing import Any

from fedloom.core.errors import ConfigError

ALTERNATIVE = {"rounds": "iterations", "iterations": "rounds"}
"""Settings of which one replaces the other."""


def override(values: dict[str, Any], text: str) -> None:
    """Apply `a.b.c=value` in place. Raises ConfigError."""
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override has the form dotted.key=value, not {text!r}")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        if raw.startswith(("[", "{")):
            raise ConfigError(
                f"{key}: {raw} is not valid TOML; quote it in a shell, as in -s '{key}=[\"mlp\"]'"
            ) from None
        value = raw  # a bare word
    *path, last = key.split(".")
    table = values
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {text!r}: {part!r} is a value, not a table")
    table[last] = value
    values.pop(ALTERNATIVE.get(key, ""), None)
