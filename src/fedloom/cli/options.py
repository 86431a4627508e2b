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
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table

from fedloom.cli.listing import complete_setting
from fedloom.core.errors import ConfigError

PRIVATE = 0o077
"""The umask of processes that take part in a federation: only the owner can read their files."""

WIDE = 1_000
"""A width, in characters, that no word has."""

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters other than tab and line feed, and marks that reverse the direction of text: in
the name of a column, file or party they could command a terminal, or show another text than is
there.
"""


class SafeConsole(Console):
    """A console that prints control characters of any text, such as names in a file from elsewhere,
    as �.
    """

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The segments of what is printed; those of rich's own cursor movements are kept."""
        for segment in super().render(renderable, options):
            if segment.control or not _CONTROLS.search(segment.text):
                yield segment
            else:
                yield segment._replace(
                    text=_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", segment.text)
                )


out = SafeConsole(highlight=False)
err = SafeConsole(stderr=True, highlight=False)


def print_plain(text: str) -> None:
    """Print a text without style, such as JSON, in which control characters are escaped as JSON has
    it.
    """
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
    int | None,
    typer.Option(
        min=1, help="Runs in parallel; results do not depend on it. Default: one per core or GPU."
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="NAME", help="Send metrics to tensorboard, mlflow or wandb. Repeatable."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", help="Print the result in one line and nothing else.")
]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Print the planned runs, and exit.")]
Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
IdColumn = Annotated[str | None, typer.Option("--id", metavar="NAME", help="The id column.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Run this code, which a file or folder from elsewhere names. Repeatable.",
    ),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", metavar="text|json", help="Format of log lines.")
]


def standard_input(name: str, ending: str) -> str:
    """The path of a file with standard input's content for "-", which this process removes at its
    end; any other name as it is.

    Raises:
        ConfigError: standard input is empty, or was read already.
    """
    if name != "-":
        return name
    content = sys.stdin.buffer.read()
    if not content:
        raise ConfigError(
            "standard input is empty: pipe a file into the command, which reads it once, for one -"
        )
    path = Path(tempfile.mkdtemp()) / f"stdin{ending}"
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    path.write_bytes(content)
    return str(path)


class PlainTable(Table):
    """A table that, in a terminal too narrow for the longest words of all columns, has a line for
    each cell.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or each row as its first cell and, below it, the headings and texts of the
        others.
        """
        least = Measurement.get(console, options.update(width=WIDE), self).minimum
        if least <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        for first, *others in zip(*(column.cells for column in self.columns), strict=True):
            yield f"[bold]{first}[/]"
            for column, text in zip(self.columns[1:], others, strict=True):
                if text:
                    yield Padding(f"{column.header}: {text}", (0, 0, 0, 2))


def plain_table(*words: str, numbers: tuple[str, ...] = ()) -> PlainTable:
    """A table without lines: columns of words, the first never wrapped, then columns of numbers."""
    table = PlainTable(*words, box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def written(what: str, path: Path) -> None:
    """Print the path of a file that was written, never wrapped."""
    out.print(f"{what}  {path}", soft_wrap=True)
