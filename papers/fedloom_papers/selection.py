"""The selection on the command line: changed settings, parts of tables, number of seeds."""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from fedloom.report import formatting as fmt
from fedloom_papers.shipped import shipped
from fedloom_papers.spec import Scale

PLACES = ("engine.", "data.root=")
"""Settings that affect where runs are executed, and not their results."""


@dataclass(frozen=True)
class Selection:
    """The selection on the command line.

    Attributes:
        changes: settings that override all others, in the format of `-s`.
        only: names of rows, columns or cells; empty for all.
        seeds: number of seeds; None for that of the file.
    """

    changes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seeds: int | None = None

    @property
    def moved(self) -> tuple[str, ...]:
        """The changes that affect results."""
        return tuple(change for change in self.changes if not change.startswith(PLACES))

    def command(self, name: str, scale: Scale) -> str:
        """The command that repeats a table or figure."""
        typed = [
            "fedloom",
            "reproduce",
            name if name in shipped() else f"{name}.toml",
            "--scale",
            scale,
        ]
        typed += [word for pattern in self.only for word in ("--only", pattern)]
        typed += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        return shlex.join([*typed, *(word for change in self.changes for word in ("-s", change))])

    def folder(self, scale: Scale, usual: int) -> str:
        """The folder of the pages: the scale's, or a separate one if settings, cells or seeds
        differ from the files.

        Args:
            usual: the largest number of seeds of the files.
        """
        fewer = self.seeds if self.seeds is not None and self.seeds < usual else None
        if not (self.moved or self.only or fewer):
            return scale
        key = json.dumps([sorted(self.moved), sorted(self.only), fewer])
        return f"{scale}-{hashlib.sha256(key.encode()).hexdigest()[:8]}"

    def warnings(self, usual: int) -> Iterator[str]:
        """How the results differ from those of a file with `usual` seeds."""
        if self.moved:
            yield f"Settings differ from the file: {', '.join(self.moved)}."
        if self.only:
            yield f"Only {fmt.together(self.only)} was selected."
        if self.seeds is not None and self.seeds < usual:
            yield f"{fmt.capital(fmt.times(self.seeds, 'seed'))} instead of the file's {usual}."


EVERYTHING = Selection()
"""Whole files, unchanged."""


def dotted_settings(change: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Nested settings as `dotted.key=value`."""
    for key, value in change.items():
        if isinstance(value, Mapping) and value:
            yield from dotted_settings(value, f"{under}{key}.")
        else:
            yield f"{under}{key}={_literal(value)}"


def _literal(value: Any) -> str:
    """A value in the format of `-s`: TOML on one line, or a bare word."""
    words = ("true", "false", "inf", "nan")
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w+-]*", value) and value not in words:
        return value
    text = tomli_w.dumps({"v": [[value]]})  # inside a list, tables are written inline
    text = re.sub(r"(?<=\[)\n *|,\n *(?=\])", "", text)
    return re.sub(r"\n *", " ", text.removeprefix("v = [[").removesuffix("]]\n"))
