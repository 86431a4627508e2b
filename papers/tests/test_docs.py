"""The pages of the papers' results name commands and files that exist, and verdicts of the archive."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from fedloom_papers.verdicts import VERDICTS
from tests.test_docs import ROOT, broken_links, commands, mistake

DOCS = ROOT / "papers" / "docs"
PAGES = [ROOT / "papers" / "README.md", *sorted({*DOCS.glob("*.md"), *DOCS.glob("*/*.md")})]


def test_every_command_is_understood() -> None:
    found = [(page, line) for page in PAGES for line in commands(page)]
    assert len(found) > 10
    wrong = [f"{page.name}: fedloom {line}: {why}" for page, line in found if (why := mistake(line))]
    assert not wrong, "\n".join(wrong)


def test_links_lead_somewhere() -> None:
    assert not {page.name: found for page in PAGES if (found := broken_links(page))}


PAPERS = {"fedal": "FedAL", "afind": "AFIND+", "evfl": "Proto-EVFL", "augfl": "AugFL"}
RESULT = re.compile(
    r"^\| [^|]+ \| \[([^\]]+)\]\(reproduced/((?:paper/)?)([\w-]+)/table\.md\) \| ([^|]+) \| ([^|]+) \| ([\w ]+) \|$",
    re.M,
)
"""A row of a table of results: place, scale, page, printed effect, our interval, verdict."""


def claims_of(folder: str) -> dict[str, list[dict[str, Any]]]:
    """The archived claims by table or figure."""
    text = (DOCS / "reproduced" / folder / "claims.json").read_text(encoding="utf-8")
    return {one["name"]: [claim | {"place": one["place"]} for claim in one["claims"]] for one in json.loads(text)}


def test_every_result_is_that_of_an_archived_claim() -> None:
    rows = RESULT.findall((DOCS / "index.md").read_text(encoding="utf-8"))
    assert len(rows) > 70
    for place, scale, page, printed, here, verdict in rows:
        shown = {
            (
                claim["place"],
                "—" if claim["printed"] is None else f"{claim['printed']:+.1f}".replace("-", "−"),
                claim["found"].replace("\xa0", " ").replace(" points", "").split(", printed")[0].split(":")[0],
                claim["verdict"],
            )
            for claim in claims_of(scale)[page]
        }
        assert (place, printed, here, verdict) in shown, (page, printed, here, verdict)


def test_verdicts_are_counted_as_in_the_archive() -> None:
    text, counted = (DOCS / "index.md").read_text(encoding="utf-8"), Counter[tuple[str, str]]()
    for page, claims in claims_of("").items():
        counted.update((page.split("-")[0], claim["verdict"]) for claim in claims if not claim["same_runs_as"])
    for system, paper in PAPERS.items():
        row = " | ".join(str(counted[system, verdict]) for verdict in VERDICTS)
        assert f"| {paper} | {row} |" in text
    informing = sum(n for (_, verdict), n in counted.items() if verdict in VERDICTS[:3])
    assert f"{informing} of {counted.total()} claims inform" in text
