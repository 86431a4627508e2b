"""The glossary names what exists, and the words that it replaced stand nowhere."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "fedloom"
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NAMES = {
    *("Site", "site", "handout", "parcel", "parcels", "Parcel", "Trouble", "Seat", "seat", "Desk", "desk", "berth"),
    *("Box", "Boxed", "crew", "Crew", "nursery", "freight", "crate", "depot", "hatch", "bury", "heed", "sitting"),
    *("Learner", "Adapter", "Chooser", "Distiller", "Holder", "Holdings", "Ground", "Stock", "World", "Place"),
}
"""Names of the old dialect. No identifier of the code has one."""
WORDS = re.compile(
    r"\b(seats?|desk|berths?|freight|nursery|parcels?|handouts?|mishaps?|sittings?|comes? to nothing|who is there)\b",
    re.IGNORECASE,
)
"""Words of the old dialect. No message, docstring, comment or page has one."""


def test_the_public_names_of_the_glossary_exist() -> None:
    defined = {
        node.name
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = {name for name in re.findall(r"`([A-Z]\w+)`", GLOSSARY) if not name.isupper()}
    assert len(named) >= 6 and named <= defined, named - defined


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda f: str(f.relative_to(SOURCE)))
def test_no_file_speaks_the_old_dialect(file: Path) -> None:
    text = file.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            assert token.string not in NAMES, f"line {token.start[0]}: {token.string}"
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            found = WORDS.search(token.string)
            assert found is None, f"line {token.start[0]}: {found[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda f: f.name)
def test_no_page_speaks_the_old_dialect(page: Path) -> None:
    found = WORDS.search(page.read_text())
    assert found is None, found[0]
