"""Every command and file of the papers' pages is run, as `tests/test_docs_run.py` runs those of
fedloom's pages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from papers.tests.test_docs import DOCS, PAGES

from fedloom.experiment.pool import pool
from fedloom_papers import plan, spec
from tests import test_docs_run as pages
from tests.test_docs import ROOT
from tests.test_docs_run import blocks, run_page, small

__all__ = ["small"]

ARCHIVED = "small/augfl-section-3.jsonl"
MORE = {
    r"reproduce --all": "--plan",
    r"reproduce augfl": "-s data.name=digits -s data.clients=20 -s data.server_rows=60",
    r"reproduce (fedal|afind)-": "-s data.name=digits -s data.options.rows=20",
}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_run(
    page: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = pool.run_all
    monkeypatch.setattr(plan, "run_all", lambda jobs, **more: run_all(jobs[:1], **more))
    monkeypatch.setattr(plan, "fetch", lambda sets: None)
    monkeypatch.setattr("fedloom_papers.cli._costs", lambda plan: {})
    for pattern, more in MORE.items():
        monkeypatch.setitem(pages.MORE, pattern, more)
    theirs = tmp_path / "theirs" / ARCHIVED
    theirs.parent.mkdir(parents=True)
    theirs.write_text((DOCS / "reproduced" / "archive" / ARCHIVED).read_text())
    (tmp_path / "papers").symlink_to(ROOT / "papers")
    run_page(page, monkeypatch)


def test_files_are_valid() -> None:
    texts = [text for page in PAGES for language, text in blocks(page) if language == "toml"]
    assert texts and all(spec.parsed(text, "a page") for text in texts)
