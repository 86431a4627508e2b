"""The commands `fedloom list` and `fedloom copy`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.listing import LISTS, ROOT, complete_list, completing, listing, params, rows_of
from fedloom.cli.options import AsJson, out, plain_table, print_plain
from fedloom.core.errors import ConfigError, MethodError, did_you_mean

HIDDEN = ("paper", "source", "public_set")
"""Columns that only --json prints."""


def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="methods, models, datasets, partitions, experiments, reproductions, a method, or "
            "your own FILE.py.",
            autocompletion=complete_list,
        ),
    ] = "methods",
    as_json: AsJson = False,
) -> None:
    """List methods, models, datasets, partitions, experiments or reproductions; or a method's
    settings.

    [bold]fedloom list fedal[/]  (all settings -s params.… of FedAL)

    [bold]fedloom list mine.py[/]  (those of your own page)
    """
    if kind.partition(":")[0].endswith(".py"):
        from fedloom.methods import load

        rows = params(load(kind))
    else:
        known = listing()
        if kind not in LISTS and kind not in known["params"]:
            raise ConfigError(
                f"unknown list {kind!r}.{did_you_mean(kind, [*LISTS, *known['params']])}"
            )
        rows = rows_of(kind) if kind in LISTS else known["params"][kind]
    if as_json:
        print_plain(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    if not rows:
        out.print(f"{kind} has no settings")
        return
    columns = [column for column in rows[0] if column not in HIDDEN]
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    out.print(table)


def _cell(value: str | bool | list[str] | None) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return ("yes" if value else "") if isinstance(value, bool) else value or ""


def copy(
    name: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="The method to copy.", autocompletion=completing("methods")
        ),
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="The file to write.")],
) -> None:
    """Copy a method's page as the start of your own; run it with fedloom run --method FILE.py."""
    pages = listing()["pages"]
    if name not in pages:
        raise MethodError(f"unknown method {name!r}.{did_you_mean(name, pages)}")
    if file.suffix != ".py":
        raise ConfigError(f"FILE must end in .py, not {file}")
    if file.exists():
        raise ConfigError(f"{file} already exists; choose another name")
    source, first = pages[name]
    text = (ROOT / source).read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    which = str(file) if first == name else f"{file}:{name}"
    out.print(
        f"copied  {file} ({text.count(chr(10))} lines)\nrun it  fedloom run --method {which}",
        soft_wrap=True,
    )
