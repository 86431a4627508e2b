"""Help of commands: paragraphs that fill the line, and a form for narrow terminals that cuts no
word off.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.padding import Padding
from typer.core import TyperCommand, TyperGroup

from fedloom.cli.options import out

# Typer 0.26 and newer have their own copy of click, so nothing of click is used when this runs
if TYPE_CHECKING:
    from click import Context, HelpFormatter

NARROW = 80
"""Characters below which Typer's boxes cut words off."""


def paragraphs(function: Callable[..., object]) -> str:
    """A function's docstring with each paragraph in one line, which the terminal wraps."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.getdoc(function).split("\n\n"))  # type: ignore[union-attr]


class OneCommand(TyperCommand):
    """One command, with help that fits narrow terminals."""

    def format_help(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Print the help."""
        if out.width < NARROW:
            _print_narrow(self, ctx)
        else:
            super().format_help(ctx, formatter)


class Commands(TyperGroup):
    """A group of commands, with help that fits narrow terminals."""

    def format_help(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Print the help."""
        if out.width < NARROW:
            _print_narrow(self, ctx)
        else:
            super().format_help(ctx, formatter)


def _print_narrow(command: TyperCommand | TyperGroup, context: "Context") -> None:
    """Print each argument, option and command in a line, and its text below it."""
    out.print(command.get_usage(context), markup=False)
    out.print(f"\n{command.help or ''}")
    for heading, entries in _sections(command, context):
        out.print(f"\n[bold]{heading}[/]")
        for name, text in entries:
            out.print(name, markup=False)
            out.print(Padding(text, (0, 0, 0, 4)))
    if command.epilog:
        out.print(f"\n{command.epilog}")


def _sections(
    command: TyperCommand | TyperGroup, context: "Context"
) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The headings of the help, each with names and texts, as markup."""
    records: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for param in command.get_params(context):
        if record := param.get_help_record(context):
            records["Arguments" if param.param_type_name == "argument" else "Options"].append(
                record
            )
    yield from ((heading, entries) for heading, entries in records.items() if entries)
    if not isinstance(command, TyperGroup):
        return
    panels: dict[str, list[tuple[str, str]]] = {}
    for name, one in command.commands.items():
        if not one.hidden:
            panel = getattr(one, "rich_help_panel", None)
            panels.setdefault(panel if isinstance(panel, str) else "Commands", []).append(
                (name, escape(one.get_short_help_str(limit=1_000)))
            )
    yield from panels.items()
