"""The command `fedloom check`."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import Settings, out, plain_table
from fedloom.core.errors import MethodError


def check(
    page: Annotated[str, typer.Argument(metavar="FILE.py[:NAME]", help="Your own method page.")],
    settings: Settings = None,
) -> None:
    """Check a method page: common mistakes in its source, and small runs on three engines that must
    agree.

    [bold]fedloom check mine.py[/]

    [bold]fedloom check mine.py -s data.name=wine -s 'models.pool=["linear"]'[/]

    The command exits with status 1 if it finds a problem.
    """
    from rich.markup import escape

    if ".py" not in page and Path(page).exists():
        raise MethodError(
            f"{page} is no method page: name a file that ends in .py, such as mine.py"
        )
    if not Path(f"{page.partition('.py')[0]}.py").is_file():  # before PyTorch is imported
        raise MethodError(f"{page} does not exist: name the file of a method page, such as mine.py")
    from fedloom.experiment.run.page_check import problems

    table, wrong = plain_table("Check", "Result"), 0
    for what, text in problems(page, settings or []):
        wrong += bool(text)
        table.add_row(what, f"[red]{escape(text)}[/]" if text else "[green]ok[/]")
    out.print(table)
    raise typer.Exit(1 if wrong else 0)
