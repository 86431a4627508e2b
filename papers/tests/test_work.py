"""A plan that is done: runs, pages, and what is left where one fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from papers.tests.tiny import TINY

from fedloom.core.errors import ConfigError
from fedloom.experiment.config.overrides import merged
from fedloom.experiment.pool.pool import Standing
from fedloom_papers.plan import Plan, plan, run_plan
from fedloom_papers.spec import parsed, read

PAGE = """
from dataclasses import replace
from fedloom.methods import find

def round(fed, server, clients, cfg, t):
    raise RuntimeError
    yield "round"

METHODS = (replace(find("local"), name="bad", round=round),)
"""


@pytest.mark.slow
def test_a_table_with_a_failing_row_has_a_page_and_is_done_when_the_row_is_mended(
    tmp_path: Path,
) -> None:
    page, out = tmp_path / "mine.py", tmp_path / "out"
    page.write_text(PAGE)
    text = TINY.replace(
        '"Local"\nrun = { method = "local" }', f'"Local"\nrun = {{ method = "{page}" }}'
    )
    tables = {"one": parsed(text, "one"), "two": parsed(TINY, "two")}

    def planned(*names: str) -> Plan:
        return plan({name: tables[name] for name in names}, out, "small", only=["* @ α = 5"])

    done = run_plan(planned("one", "two"), workers=2)
    assert [one.state for one in done.ended].count("finished") == 4
    assert {one.job.title for one in done.ended if one.state == "failed"} == {
        f"one: Local @ α = 5, seed {seed}" for seed in (0, 1)
    }
    pages = planned("one").pages
    assert (
        done.page == pages / "index.html" and done.page.is_file() and not (out / "small").exists()
    )
    one, two = done.outcomes
    assert (one.name, one.runs, two.runs) == ("one", 2, 4)
    assert one.claims[0].gate == "runs" != two.claims[0].gate
    shown = (pages / "one" / "index.html").read_text()
    assert "RuntimeError: see run.log" in shown

    page.write_text(
        PAGE.replace("raise RuntimeError", "fed.call(clients, 'local_train', shared={'t': t})")
    )
    seen: list[Standing] = []
    assert len(planned("one", "two").finished) == 4
    again = run_plan(planned("one"), workers=1, progress=seen.append)
    assert [one.state for one in again.ended].count("kept") == 2 and {
        one.state for one in again.ended
    } == {
        "kept",
        "finished",
    }
    assert (
        again.outcomes[0].runs == 4 == seen[-1].done and again.page == pages / "one" / "index.html"
    )
    index = json.loads((pages / "claims.json").read_text())
    assert [(one["name"], one["runs"]) for one in index] == [("one", 4), ("two", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "column", "rows", "settings"),
    [
        ("fedal-table-6", "α = 5", ["FedAL", "FedMD"], {"data": {"options": {"rows": 20}}}),
        ("afind-table-2", "CIFAR-10, c = 5", ["FedAvg-FT", "+ i + ii + iii"], {}),
        (
            "evfl-table-8",
            "zero 3",
            ["FedHSSL", "Proto-EVFL"],
            {"columns": {"aligned": 50, "unaligned": 100}},
        ),
        (
            "augfl-table-2",
            "EMNIST",
            ["Per-FedAvg", "AugFL with PM"],
            {"data": {"clients": 20, "server_rows": 100}},
        ),
    ],
)
def test_published_tables_are_run(
    name: str, column: str, rows: list[str], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Two cells of each paper for real, if only for three rounds of digits: from its own file to
    its page.
    """
    few = merged({"rounds": 3, "data": {"name": "digits"}, "models": {"pool": ["mlp"]}}, settings)
    only = [f"{row} @ {column}" for row in rows]
    made = plan({name: read(name)}, tmp_path, "small", seeds=1, only=only, change=few)
    able = [cell for one in made.planned for cell in one.cells if cell.runs]
    assert len(able) == len(made.runs) == 2, made.problems
    done = run_plan(made, workers=1)
    assert {one.state for one in done.ended} == {"finished"}
    (found,) = done.outcomes
    assert found.runs == len(made.runs) and found.cells["all"] == len(able)
    assert not found.cells["none"] and not found.cells["some"]
    page = (made.pages / name / "index.html").read_text()
    assert all(f"{cell.published[0]:g}" in page for cell in able if cell.published)


@pytest.mark.slow
def test_a_page_that_is_edited_meanwhile_moves_no_run_into_another_folder(tmp_path: Path) -> None:
    """The runs of before keep their folders on the pages; what was not done yet is not done under a
    wrong name.
    """
    page, out = tmp_path / "mine.py", tmp_path / "out"
    good = PAGE.replace("raise RuntimeError", "fed.call(clients, 'local_train', shared={'t': t})")
    page.write_text(good)
    text = TINY.replace(
        '"Local"\nrun = { method = "local" }', f'"Local"\nrun = {{ method = "{page}" }}'
    )

    def planned(seeds: int) -> Plan:
        return plan({"one": parsed(text, "one")}, out, "small", seeds=seeds, only=["Local @ α = 5"])

    first, more = planned(1), planned(2)
    assert {one.state for one in run_plan(first, workers=1).ended} == {"finished"}
    page.write_text(good + "# changed\n")
    done = run_plan(more, workers=1)
    assert [one.state for one in done.ended] == ["kept", "failed"] and done.outcomes[0].runs == 1
    assert "changed since it was planned" in (done.page.parent / "index.html").read_text()
    assert [run.name for run in (out / "runs").iterdir()] == [*first.runs]
    assert [one.state for one in run_plan(planned(2), workers=1).ended] == ["finished"] * 2


def test_what_cannot_be_run_is_reported_before_any_work(tmp_path: Path) -> None:
    wrong = parsed(TINY.replace('"linear"', '"liner"'), "wrong")
    with pytest.raises(ConfigError, match="wrong: FedAL @ α = 5"):
        run_plan(plan({"good": parsed(TINY, "good"), "wrong": wrong}, tmp_path, "small"))
    assert not [*tmp_path.iterdir()]
