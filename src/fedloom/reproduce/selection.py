"""What a command asked of tables and figures beyond their files: other settings, a part of them, other seeds."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w

from fedloom.report import formatting as fmt
from fedloom.reproduce.spec import Scale, shipped

PLACES = ("engine.", "data.root=")
"""Settings that say where and how runs are done: with them a table is still the file's."""


@dataclass(frozen=True)
class Selection:
    """What was asked for.

    Attributes:
        changes: settings over all others, as `-s` takes them.
        only: names of rows, columns or cells; empty for all.
        seeds: how many; None for as many as the file has.
    """

    changes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    seeds: int | None = None

    @property
    def moved(self) -> tuple[str, ...]:
        """The changes that make another experiment of it."""
        return tuple(change for change in self.changes if not change.startswith(PLACES))

    def command(self, name: str, scale: Scale) -> str:
        """What to type to repeat a table or figure."""
        typed = ["fedloom", "reproduce", name if name in shipped() else f"{name}.toml", "--scale", scale]
        typed += [word for pattern in self.only for word in ("--only", pattern)]
        typed += ["--seeds", str(self.seeds)] if self.seeds is not None else []
        return shlex.join([*typed, *(word for change in self.changes for word in ("-s", change))])

    def folder(self, scale: Scale, usual: int) -> str:
        """The folder of the pages: that of the scale, or one of its own where they are not the file's whole tables.

        Args:
            usual: the most seeds that a file has.
        """
        fewer = self.seeds if self.seeds is not None and self.seeds < usual else None
        if not (self.moved or self.only or fewer):
            return scale
        what = json.dumps([sorted(self.moved), sorted(self.only), fewer])
        return f"{scale}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"

    def warnings(self, usual: int) -> Iterator[str]:
        """What a reader must know of it, where a file has `usual` seeds."""
        if self.moved:
            yield f"Settings were changed: {', '.join(self.moved)}; this is not the file's scale."
        if self.only:
            yield f"Only {fmt.together(self.only)} was asked for."
        if self.seeds is not None and self.seeds < usual:
            yield f"{fmt.capital(fmt.times(self.seeds, 'seed'))} instead of the file's {usual}."


EVERYTHING = Selection()
"""Nothing beyond the file."""


def flat(change: Mapping[str, Any], under: str = "") -> Iterator[str]:
    """Nested settings as `dotted.key=value`, each."""
    for key, value in change.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{under}{key}.")
        else:
            yield f"{under}{key}={_typed(value)}"


def _typed(value: Any) -> str:
    """A value as `-s` takes it: TOML on one line, or a bare word."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_][\w+-]*", value)
        and value not in ("true", "false", "inf", "nan")
    ):
        return value
    text = tomli_w.dumps({"v": [[value]]})  # within lists a table too is written in one line
    text = re.sub(r"(?<=\[)\n *|,\n *(?=\])", "", text)
    return re.sub(r"\n *", " ", text.removeprefix("v = [[").removesuffix("]]\n"))
