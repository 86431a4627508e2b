"""Consoles, options and plain tables, which all commands share."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedloom.cli.listing import complete_setting

PRIVATE = 0o077
"""The umask of processes that take part in a federation: only the owner can read their files."""

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

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
    """The path of a temporary file with standard input's content for "-"; any other name as it is."""
    if name != "-":
        return name
    path = Path(tempfile.mkdtemp()) / f"stdin{ending}"
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
