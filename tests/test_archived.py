"""Archived measurements: the tables of the documentation are theirs, and a cheap cell of each
repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import archived, beds, public_rows

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.mark.parametrize(
    ("page", "made"), [("beds", beds.table), ("trust-weighted", public_rows.table)]
)
def test_a_table_is_that_of_its_archive(page: str, made: Callable[[], str]) -> None:
    assert made() in (RESULTS / f"{page}.md").read_text(encoding="utf-8")


def bed_alone() -> tuple[dict[str, Any], dict[int, float]]:
    """Training alone on the bed of FedAL."""
    about = {"headline": "fedal", "role": "alone", "validation": False}
    bed = beds.searched("fedal")
    assert bed
    rate = beds.chosen("fedal", bed, "alone")
    return about, beds.measured("fedal", bed, "alone", [0], validation=False, rate=rate)


def few_public_rows() -> tuple[dict[str, Any], dict[int, float]]:
    """Equal weights with 36 public rows."""
    kind = "36, like the clients'"
    about = {"method": "fedmd", "weights": "equal", "public": kind, "validation": False}
    return about, public_rows.values("fedmd", "equal", kind, 0.003, [0], validation=False)


@pytest.mark.parametrize(
    ("archive", "again"),
    [("beds", bed_alone), ("public_rows", few_public_rows)],
    ids=["beds", "public_rows"],
)
def test_a_cheap_cell_repeats(
    archive: str,
    again: Callable[[], tuple[dict[str, Any], dict[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches are read from the archive; the cell is run, since its line is not in the copy.
    Processors round differently, so accuracies are near.
    """
    about = again()[0]
    old = archived.found(archive, about)[0]
    lines = (
        (archived.FOLDER / f"{archive}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    )
    monkeypatch.setattr(archived, "FOLDER", tmp_path)
    (tmp_path / f"{archive}.jsonl").write_text(
        "".join(line for line in lines if '"validation": true' in line)
    )
    assert again()[1][0] == pytest.approx(old, abs=5.0)
    assert archived.found(archive, about)


def test_a_difference_is_paired_by_seed() -> None:
    assert (
        archived.difference({0: 3.0, 1: 5.0, 2: 4.0}, {0: 1.0, 1: 2.0, 2: 3.0})
        == "+2.0 (−0.5 to +4.5)"
    )
    assert archived.mean({0: 1.0, 1: 3.0}) == "2.0 ± 1.4"
