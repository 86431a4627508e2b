"""Reports: one self-contained HTML page per run or comparison."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fedloom._version import __version__
from fedloom.core.errors import DataError
from fedloom.report.page import render
from fedloom.support.paths import write_atomically

PACKAGE = Path(__file__).parents[1]
SHOWN, CODE = {".csv", ".json", ".toml"}, {".py", ".html", ".js", ".css"}
"""Endings of the files that a page shows, and of those that write it."""


def current(folder: Path) -> Path | None:
    """The `report.html` of a folder if this version wrote it after all that it shows, else None."""
    page = folder / "report.html"
    if (
        not page.is_file()
        or f'content="fedloom {__version__}"' not in page.read_text(encoding="utf-8")[:1000]
    ):
        return None
    files = chain(
        (file for file in folder.rglob("*") if file.suffix in SHOWN),
        (file for file in PACKAGE.rglob("*") if file.suffix in CODE),
    )
    return (
        page if page.stat().st_mtime_ns > max(file.stat().st_mtime_ns for file in files) else None
    )


def write(folder: Path) -> Path:
    """Write `report.html` into a run's or a comparison's folder, and return its path.

    The report of an unfinished run shows its last evaluation.

    Raises:
        DataError: the folder holds neither, or a file is missing or damaged.
    """
    from fedloom.report import comparison_page, read, run_page

    if (folder / "comparison.json").is_file():
        found, runs = read.read_comparison(folder)
        page = comparison_page.page(folder, found, runs)
    elif (folder / "result.json").is_file() or (folder / "metrics.csv").is_file():
        page = run_page.page(read.read_run(folder))
    else:
        raise DataError(
            f"{folder} has no result.json, metrics.csv or comparison.json. Name the folder of a "
            "run or comparison with at least one checkpoint."
        )
    return _saved(render(page), folder / "report.html")


def write_paper(folder: Path) -> list[Path]:
    """Write a comparison's LaTeX table, BibTeX entries and PDF figure into its folder `paper`;
    returns their paths.

    Raises:
        DataError: the folder holds no comparison, or a file is missing or damaged.
    """
    from fedloom.report import paper, read

    if not (folder / "comparison.json").is_file():
        raise DataError(
            f"{folder} has no comparison.json. Name the folder of a comparison: fedloom compare "
            "writes it."
        )
    found, runs = read.read_comparison(folder)
    return paper.write(folder / "paper", found, runs)


def write_many(folders: Sequence[Path], out: Path) -> Path:
    """Write one page to the file `out` that compares finished runs, and return its path.

    Runs on different data are shown side by side, without paired differences.

    Raises:
        DataError: no folder is given, a run is unfinished, a file is missing or damaged, or
            horizontal and vertical runs are mixed.
    """
    from fedloom.report import comparison_page, gather, read

    found, runs, problem = gather.gather([read.read_run(folder) for folder in folders])
    page = comparison_page.page(out.parent, found, runs, problem)
    return _saved(render(page), out)


def _saved(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # a link in a folder of somebody else's is replaced, not followed
    write_atomically(path, text.encode())
    return path
