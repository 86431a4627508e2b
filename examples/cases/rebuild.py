"""Rebuild the tables and the picture of a case's page: run its commands, and print its tables anew.

    python examples/cases/rebuild.py adult
    python examples/cases/rebuild.py adult --archived    # from examples/cases/archive; nothing is run
    python examples/cases/rebuild.py heart --again       # only the rows of AGAIN, which cost seconds

A table of docs/cases/NAME.md that is rebuilt follows a line `<!-- table.py runs/NAME OPTIONS -->`.
The commands that start with `fedloom run` on the page are run first, so the folders that they name
must not exist yet. What tables need of their runs is then written to
examples/cases/archive/NAME.json. With `--again` they are a few cheap rows in runs/NAME-again: they
tell whether a page repeats whose other rows cost too much to run each time.
"""  # noqa: E501

import json
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGES = HERE.parents[1] / "docs" / "cases"
ARCHIVE = HERE / "archive"
AGAIN = {  # page -> its file, and rows that cost seconds, the first of the file among them
    "activity": ("devices", ["phone alone", "split"]),
    "clinics": ("clinics", ["alone", "pooled"]),
    "credit": ("credit", ["first party alone"]),
    "drawers": ("drawers", ["alone", "FedMD"]),
    "heart": ("heart", ["alone", "gossip, own heads"]),
    "newcomers": ("newcomers", ["no training", "server's labels", "server's model"]),
    "speakers": ("speakers", ["alone", "pooled"]),
    "stations": ("stations", ["alone", "pooled"]),
}
ENVIRONMENT = ("fedloom", "commit", "python", "torch", "numpy", "processor", "started")
TABLE = re.compile(r"(<!-- table\.py (?P<options>.+?) -->\n+)(?P<table>(?:\|.*\n)+)")


def commands(page: str) -> list[list[str]]:
    """The words after `fedloom` of each command that runs the case."""
    return [shlex.split(line)[1:] for line in re.findall(r"^fedloom run .*?(?= *#|$)", page, re.M)]


def tables(page: str) -> list[tuple[str, str]]:
    """The options of table.py and the table, for each table that is rebuilt."""
    return [(found["options"], found["table"]) for found in TABLE.finditer(page)]


def rebuilt(page: str, made: Callable[[Sequence[str]], str]) -> str:
    """The page with each of these tables as `made` of its options, or as it is where
    that has none.
    """
    return TABLE.sub(
        lambda found: found[1] + (made(shlex.split(found["options"])) or found["table"]), page
    )


def printed(options: Sequence[str]) -> str:
    """The table that table.py prints; empty if there are neither runs nor an archive of them."""
    folder = Path(options[0])
    if not folder.exists() and not (ARCHIVE / f"{folder.name}.json").exists():
        return ""
    before, out = sys.argv, StringIO()
    try:
        sys.argv = ["table.py", *options]
        with redirect_stdout(out):
            runpy.run_path(str(HERE / "table.py"), run_name="__main__")
    finally:
        sys.argv = before
    return out.getvalue()


def rows(case: str, names: Sequence[str]) -> list[Any]:
    """The entries of a case's file that have these names, in the file's order."""
    entries = tomllib.loads((HERE / f"{case}.toml").read_text(encoding="utf-8"))["compare"][
        "methods"
    ]
    return [
        entry
        for entry in entries
        if (entry if isinstance(entry, str) else entry.get("name")) in names
    ]


def toml(value: Any) -> str:
    """A value as TOML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else json.dumps(value)


def again(page: str) -> list[str]:
    """The words after `fedloom` of the command that runs a page's cheap rows."""
    case, names = AGAIN[page]
    words = ["run", f"examples/cases/{case}.toml", "--out", f"runs/{case}-again"]
    return [
        *words,
        "--trust",
        "examples/cases/pooled.py",
        "-s",
        f"compare.methods={toml(rows(case, names))}",
    ]


def archive(folder: Path) -> None:
    """Write what tables need of a folder's runs, with the versions and processor of the first of
    them.
    """
    table = runpy.run_path(str(HERE / "table.py"))
    made = json.loads(next(iter(sorted(folder.rglob("environment.json")))).read_text())
    head = json.dumps({key: made[key] for key in ENVIRONMENT})[:-1]
    rows = ",\n".join(
        json.dumps(run, ensure_ascii=False, separators=(",", ":"))
        for run in table["records"](folder)
    )
    (ARCHIVE / f"{folder.name}.json").write_text(
        f'{head}, "runs": [\n{rows}\n]}}\n', encoding="utf-8"
    )


def main() -> None:
    """Run the case, and write its archive and its page; pictures are written where the
    options say.
    """
    path = PAGES / f"{sys.argv[1]}.md"
    page = path.read_text(encoding="utf-8")
    todo = (
        []
        if "--archived" in sys.argv
        else [again(path.stem)]
        if "--again" in sys.argv
        else commands(page)
    )
    for words in todo:
        subprocess.run([sys.executable, "-m", "fedloom", *words], check=True)
        archive(Path(words[words.index("--out") + 1]))
    path.write_text(rebuilt(page, printed), encoding="utf-8")


if __name__ == "__main__":
    main()
