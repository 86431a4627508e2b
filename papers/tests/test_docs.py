"""The pages of the papers' results name commands and files that exist, and say no more than the
runs can.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fedloom_papers.verdicts import UNTESTED, VERDICTS
from tests.test_docs import ROOT, broken_links, commands, mistake

DOCS = ROOT / "papers" / "docs"
PAGES = [ROOT / "papers" / "README.md", *sorted({*DOCS.glob("*.md"), *DOCS.glob("*/*.md")})]


def test_every_command_is_understood() -> None:
    found = [(page, line) for page in PAGES for line in commands(page)]
    assert len(found) > 10
    wrong = [
        f"{page.name}: fedloom {line}: {why}" for page, line in found if (why := mistake(line))
    ]
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere() -> None:
    assert not {page.name: found for page in PAGES if (found := broken_links(page))}


OLD = ("refuted", "direction only", "uninformative", "undecided")
"""Words of verdicts that said more than the runs could show."""


def claims_of(folder: str) -> list[dict[str, Any]]:
    """The archived claims of all tables and figures."""
    text = (DOCS / "reproduced" / folder / "claims.json").read_text(encoding="utf-8")
    return [
        claim | {"name": one["name"], "system": one["system"]}
        for one in json.loads(text)
        for claim in one["claims"]
    ]


@pytest.mark.parametrize("folder", ["", "paper"])
def test_only_claims_on_the_papers_own_data_are_judged(folder: str) -> None:
    for claim in claims_of(folder):
        assert claim["verdict"] in VERDICTS
        judged = claim["verdict"] in VERDICTS[:3]
        assert not (judged and claim["stand_in"]), claim["text"]
        if claim["verdict"] in ("seen", "not seen") and not claim["stand_in"]:
            # the printed size had no room: the side alone is judged, and both facts stand
            assert "could not have appeared" in claim["found"] and claim["printed"] is not None
        assert not claim["stand_in"] or (
            claim["printed"] is None and not re.search(r"printed [+−\d]", claim["found"])
        ), claim["text"]
        assert not claim["stand_in"] or claim["bed"], claim["text"]
        assert (claim["verdict"] == UNTESTED) == bool(claim["gate"] and claim["found"]), claim[
            "text"
        ]


@pytest.mark.parametrize("folder", ["", "paper"])
def test_a_claim_on_other_data_asks_for_no_size_that_the_paper_prints(folder: str) -> None:
    for claim in claims_of(folder):
        if claim["stand_in"]:
            assert claim["rule"] == "within" or "; margin" not in claim["compared"], claim["text"]
            assert not re.search(
                r"\d points? (above|on average)|by (about|at least|\d)", claim["text"]
            ), claim["text"]


SIDES = {"reproduced": "the claimed", "smaller than printed": "the claimed", "seen": "the claimed"}
"""The side that a verdict says was found; the others by `not`, or none."""


@pytest.mark.parametrize("folder", ["", "paper"])
def test_the_same_comparison_of_the_same_runs_has_one_verdict(folder: str) -> None:
    """Whether the data are the paper's for one claim and stand in for another: the printed size is
    of the paper, the side is of the runs.
    """
    found: dict[Any, tuple[str, str]] = {}
    compared = 0
    for claim in claims_of(folder):
        if claim["seeds"]:
            about = claim["compared"].partition("; margin")[0]
            key = json.dumps([about, *(claim[name] for name in ("system", "seeds", "rule"))])
            side = SIDES.get(claim["verdict"], claim["verdict"].partition(" ")[0])
            compared += key in found
            assert found.setdefault(key, (side, claim["name"]))[0] == side, (claim["text"], key)
    assert compared or folder


def test_pages_do_not_use_the_old_words_nor_count_verdicts() -> None:
    counts = re.compile(rf"\b\d+ (of \d+ claims|{'|'.join(VERDICTS)})\b")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert not [word for word in OLD if word in text], page
        assert not counts.search(text), (page, counts.search(text))


def test_the_overview_has_at_most_twelve_questions_each_with_its_bed() -> None:
    chosen = [claim for claim in claims_of("") if claim["headline"]]
    assert 4 <= len(chosen) <= 12 and {claim["system"] for claim in chosen} == {
        "fedal",
        "afind",
        "evfl",
        "augfl",
    }
    text = (DOCS / "reproduced" / "claims.md").read_text(encoding="utf-8")
    assert all(f"| {claim['bed']} |" in text for claim in chosen)


@pytest.mark.parametrize("system", ["fedal", "afind", "evfl", "augfl"])
def test_a_papers_page_says_first_what_was_run_and_asks_each_question_once(system: str) -> None:
    text = (DOCS / "reproduced" / system / "table.md").read_text(encoding="utf-8")
    first = next(
        line
        for line in text.split("\n")
        if line and not line.startswith(("#", ">")) and " scale · " not in line
    )
    for word in (
        "Run here: ",
        "with multilayer perceptrons",
        "rounds" if system != "fedal" else "iterations",
        "of the paper's",
    ):
        assert word in first
    mine = [claim for claim in claims_of("") if claim["system"] == system and not claim["fact"]]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.split("\n") if "](../" in line]
    asked = [row for row in rows if row]
    assert {claim["question"] for claim in mine} <= {row.replace("\\", "") for row in asked}
