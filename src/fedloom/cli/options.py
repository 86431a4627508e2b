"""Consoles, options and plain tables, which all commands share."""

import atexit
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

from fedloom.cli.listing import complete_setting

PRIVATE = 0o077
"""The umask of processes that take part in a federation: only the owner can read their files."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than tab and line feed, and marks that reverse the direction of text: in the name of a
column, file or party they could command a terminal, or show another text than is there."""


class SafeConsole(Console):
    """A console that prints control characters of any text, such as names in a file from elsewhere, as �."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The segments of what is printed; those of rich's own cursor movements are kept."""
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROLS.search(segment.text):
                yield segment
            else:
                yield segment._replace(text=_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", segment.text))


out = SafeConsole(highlight=False)
err = SafeConsole(stderr=True, highlight=False)


def print_plain(text: str) -> None:
    """Print a text without style, such as JSON, in which control characters are escaped as JSON has it."""
    typer.echo(_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Override a setting, such as data.options.alpha=0.5. Repeatable.",
        autocompletion=complete_setting,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of all random draws.")]
Device = Annotated[str | None, typer.Option(help="A torch device, such as cpu or cuda.")]
ParallelRuns = Annotated[
    int | None, typer.Option(min=1, help="Runs in parallel; results do not depend on it. Default: one per core or GPU.")
]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", metavar="NAME", help="Send metrics to tensorboard, mlflow or wandb. Repeatable."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the result in one line and nothing else.")]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Print the planned runs and their cost, and exit.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
IdColumn = Annotated[str | None, typer.Option("--id", metavar="NAME", help="The id column.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Run this code, which a file or folder from elsewhere names. Repeatable."),
]
LogFormat = Annotated[str, typer.Option("--log-format", metavar="text|json", help="Format of log lines.")]


def standard_input(name: str, ending: str) -> str:
    """The path of a file with standard input's content for "-", which this process removes at its end; any other name
    as it is."""
    if name != "-":
        return name
    path = Path(tempfile.mkdtemp()) / f"stdin{ending}"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    path.write_bytes(sys.stdin.buffer.read())
    return str(path)


def plain_table(*words: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without lines: columns of words, the first never wrapped, then columns of numbers."""
    table = Table(*words, box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def written(what: str, path: Path) -> None:
    """Print the path of a file that was written, never wrapped."""
    out.print(f"{what}  {path}", soft_wrap=True)
