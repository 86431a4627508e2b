"""Each attack that docs/results/leaks.md lists has the tests that are named there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> dict[str, list[tuple[str, str]]]:
    """The file and the function of each test, by attack."""
    page = (
        (ROOT / "docs" / "results" / "leaks.md")
        .read_text(encoding="utf-8")
        .partition("## Tests by attack")[2]
    )
    found: dict[str, list[tuple[str, str]]] = {}
    for attack, cells in re.findall(
        r"^\| ([TA][\d–A]+) \|.*?\| (`tests.*) \|$", page, re.MULTILINE
    ):
        for file, names in re.findall(r"`(tests/[\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", cells):
            found.setdefault(attack, []).extend(
                (file, name) for name in re.findall(r"`(\w+)`", names)
            )
    return found


def test_each_listed_attack_has_its_tests() -> None:
    attacks = listed()
    assert [*attacks] == [*(f"T{n}" for n in range(1, 28)), "A1–A3"]
    for file, name in (one for tests in attacks.values() for one in tests):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{file} has no {name}"
