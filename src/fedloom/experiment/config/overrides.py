"""Settings that override others: of the command line, `dotted.key=value`, and of tables."""

import tomllib
from collections.abc import Mapping
from typing import Any

from fedloom.core.errors import ConfigError
from fedloom.support import toml

ALTERNATIVE = {"rounds": "iterations", "iterations": "rounds"}
"""Settings of which one replaces the other."""


def override(values: dict[str, Any], text: str) -> None:
    """Apply `a.b.c=value` in place. Raises ConfigError."""
    key, equals, raw = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override has the form dotted.key=value, not {text!r}")
    try:
        value = toml.loads(f"v = {raw}")["v"]
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


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge settings recursively. `rounds` and `iterations` replace each other; a new partition
    drops old options.
    """
    found = dict(under)
    for key, value in over.items():
        below = found.get(key)
        found[key] = (
            merged(below, value)
            if isinstance(below, Mapping) and isinstance(value, Mapping)
            else value
        )
    for one, other in (("rounds", "iterations"), ("iterations", "rounds")):
        if one in over and other not in over:
            found.pop(other, None)
    if "partition" in over and "options" in under:
        found["options"] = over.get("options", {})
    return found
