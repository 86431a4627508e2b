"""The keys of archived runs outlive new names of settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedloom_papers.archive import Archive
from fedloom_papers.keys import archive_key, archived_names
from fedloom_papers.shipped import shipped
from fedloom_papers.spec import read

ARCHIVE = Archive(Path(__file__).parents[1] / "docs" / "reproduced" / "archive")


def test_a_setting_has_the_name_that_it_had() -> None:
    settings = {"seed": 0, "params": {"lr": 0.1}, "aggregate": {"rule": "median", "noise": 1.0}}
    kept = {
        name: dict(value) if isinstance(value, dict) else value for name, value in settings.items()
    }
    named = archived_names(settings)
    assert named == {
        "seed": 0,
        "params": {"lr": 0.1, "robust": "median"},
        "aggregate": {"noise": 1.0},
    }
    assert settings == kept
    assert archived_names({"aggregate": {"secure": True}}) == {"params": {"secure": True}}


@pytest.mark.parametrize("name", shipped())
def test_the_archive_has_the_planned_runs(name: str) -> None:
    """Where this fails, a setting of the table was renamed: add it to
    `fedloom_papers.keys.ARCHIVED`.
    """
    known = ARCHIVE.read("small", name)
    runs = [run for cell in read(name).cells("small") for run in cell.runs[:1]]
    assert runs and not [run for run in runs if archive_key(run) not in known]
