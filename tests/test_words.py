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
FILES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "papers" / "fedloom_papers").rglob("*.py")])
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").glob("*.md"),
        ROOT / "papers" / "docs" / "index.md",
    ]
)
NAMES = {
    *(
        "Site",
        "site",
        "handout",
        "parcel",
        "parcels",
        "Parcel",
        "Trouble",
        "Seat",
        "seat",
        "Desk",
        "desk",
        "berth",
    ),
    *(
        "Box",
        "Boxed",
        "crew",
        "Crew",
        "nursery",
        "freight",
        "crate",
        "depot",
        "hatch",
        "bury",
        "heed",
        "sitting",
    ),
    *(
        "Learner",
        "Adapter",
        "Chooser",
        "Distiller",
        "Holder",
        "Holdings",
        "Ground",
        "Stock",
        "World",
        "Place",
    ),
}
"""Names of the old dialect. No identifier of the code has one."""
WORDS = re.compile(
    r"\b(seats?|desk|berths?|freight|nursery|parcels?|handouts?|mishaps?|sittings?|comes? to "
    r"nothing|who is there)\b",
    re.IGNORECASE,
)
"""Words of the old dialect. No message, docstring, comment or page has one."""
BRITISH = re.compile(
    r"colour|favour|behaviour|honour|(?:label|model|level|signal|travel)l(?:ed|ing)|(?<![a-z])grey|centr(?:ed|ing)(?![a-z])"
    r"|catalogue|defence|licence|judgement|artefact|learnt|fulfil(?!l)|analyse"
    r"|(?:optim|minim|maxim|standard|normal|organ|personal|regular|central|recogn|general|initial|critic|summar|serial"
    r"|visual|synchron|sanit|random|quant|vector|penal|parameter|special)is(?:e|ing|ation)",
    re.IGNORECASE,
)
"""British spellings: identifiers, messages and prose have American ones. `neighbour` stays, as four
settings have that name; `centre` is the name of a module, which hashes of states contain.
"""


def test_the_public_names_of_the_glossary_exist() -> None:
    defined = {
        node.name
        for file in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    named = {name for name in re.findall(r"`([A-Z]\w+)`", GLOSSARY) if not name.isupper()}
    assert len(named) >= 6 and named <= defined, named - defined


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_file_has_the_banned_words(file: Path) -> None:
    text = file.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            assert token.string not in NAMES, f"line {token.start[0]}: {token.string}"
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            found = WORDS.search(token.string)
            assert found is None, f"line {token.start[0]}: {found[0]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda f: f.name)
def test_no_page_has_the_banned_words(page: Path) -> None:
    found = WORDS.search(page.read_text())
    assert found is None, found[0]


@pytest.mark.parametrize("file", [*PAGES, *FILES], ids=lambda f: f.name)
def test_spelling_is_american(file: Path) -> None:
    assert not set(BRITISH.findall(file.read_text()))
