"""Rebuild the tables and the picture of a case's page: run its commands, and print its tables anew.

    python examples/cases/rebuild.py adult

A table of docs/cases/NAME.md that is rebuilt follows a line `<!-- table.py runs/NAME OPTIONS -->`. The commands that
start with `fedloom run` on the page are run first, so the folders that they name must not exist yet.
"""

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGES = HERE.parents[1] / "docs" / "cases"
TABLE = re.compile(r"(<!-- table\.py (?P<options>.+?) -->\n+)(?P<table>(?:\|.*\n)+)")


def commands(page: str) -> list[list[str]]:
    """The words after `fedloom` of each command that runs the case."""
    return [shlex.split(line)[1:] for line in re.findall(r"^fedloom run .*?(?= *#|$)", page, re.M)]


def tables(page: str) -> list[tuple[str, str]]:
    """The options of table.py and the table, for each table that is rebuilt."""
    return [(found["options"], found["table"]) for found in TABLE.finditer(page)]


def rebuilt(page: str, made: Callable[[Sequence[str]], str]) -> str:
    """The page with each of these tables as `made` of its options."""
    return TABLE.sub(lambda found: found[1] + made(shlex.split(found["options"])), page)


def printed(options: Sequence[str]) -> str:
    """The table that table.py prints."""
    before, out = sys.argv, StringIO()
    try:
        sys.argv = ["table.py", *options]
        with redirect_stdout(out):
            runpy.run_path(str(HERE / "table.py"), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def main() -> None:
    """Run the case, and write its page; pictures are written where the options say."""
    path = PAGES / f"{sys.argv[1]}.md"
    page = path.read_text(encoding="utf-8")
    for words in commands(page):
        subprocess.run([sys.executable, "-m", "fedloom", *words], check=True)
    path.write_text(rebuilt(page, printed), encoding="utf-8")


if __name__ == "__main__":
    main()
