"""Rebuild the pages of the papers' results, in papers/docs/reproduced, from the archive there:
nothing is run.

python papers/rebuild.py
"""

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from fedloom_papers.plan import plan, reproductions, run_plan
from fedloom_papers.spec import SCALES, Scale

DOCS = Path(__file__).parent / "docs" / "reproduced"
KEPT = ("table.md", "claims.md", "claims.json", "*.svg")
"""The files of a folder of pages that the documentation has; the others are HTML, CSV and each
table's own outcome.
"""


def rebuild(
    target: Path, scale: Scale, names: Iterable[str], archive: Path = DOCS / "archive"
) -> None:
    """Write the pages of tables and figures at a scale to a folder."""
    with tempfile.TemporaryDirectory() as made:
        # A copy of the archive: pages add the runs that they share with another table to their own
        # file.
        shutil.copytree(archive, Path(made) / "archive")
        found = plan(reproductions([*names]), Path(made), scale, archive=Path(made) / "archive")
        run_plan(found, execute_runs=False)
        for pattern in KEPT:
            for file in sorted(found.pages.rglob(pattern)):
                at = target / file.relative_to(found.pages)
                at.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, at)


def main() -> None:
    """Rebuild all pages of both scales."""
    for scale in SCALES:
        target = DOCS if scale == "small" else DOCS / scale
        rebuild(
            target, scale, sorted(file.stem for file in (DOCS / "archive" / scale).glob("*.jsonl"))
        )


if __name__ == "__main__":
    main()
