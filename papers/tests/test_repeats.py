"""Archived numbers repeat: one cheap cell of each paper that needs no download is run again; and a
page is that of its archive.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from papers.rebuild import DOCS, rebuild

from fedloom.experiment.run.execute import execute
from fedloom.report.read import read_run
from fedloom_papers.archive import Archive, record_of
from fedloom_papers.keys import archive_key
from fedloom_papers.spec import read

CHEAP = {
    "fedal-section-5": "FedAL @ 4 clients, 3 rounds",
    "afind-table-4": "Local @ CIFAR-10, c = 5",
    "augfl-section-3": "FedAvg @ digits",
}
"""Cells on scikit-learn's digits. Proto-EVFL has none: all its data are downloads."""


@pytest.mark.parametrize("name", CHEAP)
def test_a_cheap_cell_repeats(name: str, tmp_path: Path) -> None:
    """Bytes and test rows are equal; accuracies are near, as processors round differently."""
    about = read(name)
    (cell,) = about.cells("small", seeds=1, only=[CHEAP[name]])
    (run,) = cell.runs
    old = Archive(DOCS / "archive").read("small", name)[archive_key(run)]
    execute(run, tmp_path / "run")
    new = record_of(read_run(tmp_path / "run"), run, archive_key(run), cell.name, about)
    assert (new.bytes, new.test_sha256, new.dataset) == (old.bytes, old.test_sha256, old.dataset)
    for metric, value in old.metrics.items():
        if "accuracy" in metric and "discriminator" not in metric:
            assert new.metrics[metric] == pytest.approx(value, abs=0.05), metric


def test_a_page_is_that_of_its_archive(tmp_path: Path) -> None:
    name = "augfl-section-3"
    rebuild(tmp_path, "small", [name])
    assert (tmp_path / name / "table.md").read_text() == (DOCS / name / "table.md").read_text()
