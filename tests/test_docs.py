"""The code and commands in the README and the docs work, and match the files."""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.core import TyperGroup
from typer.main import get_command

import fedloom
from fedloom.cli import main
from fedloom.cli.app import app
from fedloom.cli.listing import listing
from fedloom.methods import registry
from tests.test_architecture import ALLOWED

ROOT = Path(__file__).parents[1]
HERE = "https://github.com/fedloom/fedloom/blob/main/"
"""The repository, to whose files the two sites link."""
GENERATED = {
    ROOT / "docs" / "reference" / name for name in ("methods.md", "commands.md", "settings.md")
}
"""Pages that building the site writes."""
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "skills" / "fedloom" / "SKILL.md",
    *sorted({*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!_]*/*.md")} - GENERATED),
]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """The arguments of every `fedloom ...` line in a fenced block, indented ones and continued
    lines too.
    """
    fenced = re.findall(r"^ *(```|~~~).*?\n(.*?)^ *\1", page.read_text(), re.M | re.S)
    lines = "\n".join(re.sub(r"\\\n\s*", " ", text) for _, text in fenced)
    return re.findall(r"^\s*(?:\$ )?(?:\.venv/bin/|python -m )?fedloom (.*)$", lines, re.M)


names = functools.cache(listing)


def mistake(line: str) -> str:
    """What is wrong with the arguments of a `fedloom ...` line; "" if nothing is.
    Nothing is run.
    """
    known, group = names(), get_command(app)
    assert isinstance(group, TyperGroup)
    words = shlex.split(line, comments=True)
    words = words[: -1 if words[-1:] == ["&"] else None]
    parent = group.context_class(group, info_name="fedloom")
    try:
        name, command, words = group.resolve_command(parent, words)
        while isinstance(command, TyperGroup):
            name, command, words = command.resolve_command(parent, words)
        assert name is not None and command is not None
        given = command.make_context(name, [*words], parent=parent).params
    except Exception as error:
        if not hasattr(error, "format_message"):  # of click, or of Typer's copy of it
            raise
        return str(error.format_message())
    keys = [
        k.partition("=")[0]
        for p in command.params
        if "--set" in p.opts
        for k in given[p.name or ""] or ()
    ]
    params = {row["name"] for rows in known["params"].values() for row in rows}
    for key in keys:
        tables = {key, key.rpartition(".")[0]} & {*known["settings"], *params} - {"params"}
        if not (tables or key.startswith("sweep.") or key in ("compare.seeds", "compare.methods")):
            return f"no setting {key}"
    if name in ("run", "compare", "copy"):
        named = {row["name"] for kind in ("methods", "experiments") for row in known[kind]}
        first = command.params[0].name or ""
        for what in given[first] if isinstance(given[first], tuple | list) else [given[first]]:
            if what and what not in named and not re.search(r"[./]", str(what)):
                return f"no method or experiment {what}"
    missing = [
        word
        for word in words
        if word.startswith(("examples/", "docs/", "papers/")) and not (ROOT / word).exists()
    ]
    return f"no file {missing[0]}" if missing else ""


def test_the_docs_show_the_example_as_it_is() -> None:
    assert (ROOT / "examples" / "fedavg.py").read_text() in blocks(
        ROOT / "docs" / "method.md", "python"
    )


def test_the_example_learns_and_gives_the_same_bits_on_both_engines() -> None:
    settings: dict[str, Any] = {
        "data": {"clients": 3},
        "models": {"pool": ["mlp"]},
        "rounds": 8,
        "evaluate": {"points": 1},
    }
    page = str(ROOT / "examples" / "fedavg.py")
    results = [
        fedloom.run(page, engine={"name": name}, **settings) for name in ("local", "isolated")
    ]
    assert results[0].summary["state_sha256"] == results[1].summary["state_sha256"]
    assert results[0].accuracy > 0.4
    # one global model
    assert len({round(a, 12) for a in results[0].summary["accuracy"]["per_client"]}) == 1
    size = (64 * 64 + 64 + 64 * 10 + 10) * 4
    assert results[0].summary["bytes"] == {
        "up": 3 * 8 * (size + 8),
        "down": 3 * 9 * size,
        "across": 0,
    }


def test_commands_in_the_readme_are_understood(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each `fedloom …` line parses: its command, options and names exist. Nothing is run."""
    from fedloom.cli import runs

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.csv").write_text(
        "age,disease,hospital\n" + "".join(f"{i},{i % 2},{i % 3}\n" for i in range(90))
    )
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done: list[str] = []
    monkeypatch.setattr(
        runs, "_execute_and_show", lambda experiment, called, *_: done.append(called)
    )

    def planned(what: Any, *_: Any, **__: Any) -> NoReturn:
        done.append(type(what).__name__)
        raise SystemExit

    monkeypatch.setattr("fedloom.experiment.trial.trial", planned)
    shown = "\n".join(blocks(ROOT / "README.md", ""))
    lines = re.findall(r"^fedloom (.*?)(?:\s+#.*)?$", shown, re.M)
    assert len(lines) >= 6
    for line in lines:
        monkeypatch.setattr(sys, "argv", ["fedloom", *shlex.split(line)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert not stop.value.code, line
    assert done == [
        "PosixPath",
        "fedal",
        "compare",
        "compare",
        "compare",
        "fedmd",
        "fedal",
        "examples/fedprox.py",
        "compare",
    ]


def test_every_command_in_the_docs_is_understood() -> None:
    found = [(page, line) for page in PAGES for line in commands(page)]
    assert len(found) > 90
    wrong = [
        f"{page.relative_to(ROOT)}: fedloom {line}: {why}"
        for page, line in found
        if (why := mistake(line))
    ]
    assert not wrong, "\n".join(wrong)


def printed(page: Path, program: str) -> list[str]:
    """What follows the program's name in each command of a page, within a line or fenced."""
    fenced = re.findall(r"^ *(```|~~~).*?\n(.*?)^ *\1", page.read_text(), re.M | re.S)
    lines = [line.strip() for _, text in fenced for line in text.splitlines()]
    plain = re.sub(r"^ *(```|~~~).*?^ *\1", "", page.read_text(), flags=re.M | re.S)
    found = [*lines, *re.findall(r"`([^`\n]+)`", plain)]
    return [line.removeprefix(program).strip() for line in found if line.startswith(f"{program} ")]


RESULTS = [page for page in PAGES if page.parent.name in ("results", "cases")]


def test_every_command_of_the_results_is_understood_within_lines_too() -> None:
    """A command's name alone, such as `fedloom trial`, is none."""
    found = [(page, line) for page in RESULTS for line in printed(page, "fedloom") if " " in line]
    assert len(found) > 40
    wrong = [
        f"{page.name}: fedloom {line}: {why}" for page, line in found if (why := mistake(line))
    ]
    assert not wrong, "\n".join(wrong)


def wrong_script(line: str) -> str:
    """What is wrong with the arguments of a `python …` command; "" if nothing is.
    Nothing is run.
    """
    words = shlex.split(line, comments=True)
    module = words[1] if words[0] == "-m" else ""
    if module == "pytest":
        return ""
    given = words[2:] if module else words[1:]
    file = ROOT / f"{module.replace('.', '/')}.py" if module else ROOT / words[0]
    if not file.exists():
        return f"no file {file.relative_to(ROOT)}"
    source = file.read_text(encoding="utf-8")
    unknown = [word for word in given if word.startswith("--") and f'"{word}"' not in source]
    takes = "argv" in source or "argparse" in source
    return (
        f"no option {unknown[0]}"
        if unknown
        else ""
        if takes or not given
        else f"it takes no {given[0]}"
    )


def test_every_script_of_the_results_exists_and_has_the_options() -> None:
    found = [(page, line) for page in RESULTS for line in printed(page, "python")]
    assert len(found) > 50
    wrong = [
        f"{page.name}: python {line}: {why}" for page, line in found if (why := wrong_script(line))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line", ["-m benchmarks.none", "-m benchmarks.augfl 3", "examples/cases/table.py a --odd"]
)
def test_a_wrong_script_in_the_docs_is_found(line: str) -> None:
    assert wrong_script(line)


@pytest.mark.parametrize(
    "line",
    (
        *(
            "rum fedal",
            "run fedall",
            "run fedal --round 3",
            "run fedal --rounds many",
            "run examples/none.toml",
        ),
        *(
            "run fedal -s data.client=3",
            "run fedal -s params.tua=3",
            "compare fedal fedmb",
            "export",
            "audit dump log",
        ),
    ),
)
def test_a_wrong_command_in_the_docs_is_found(line: str) -> None:
    assert mistake(line)


def test_the_threat_model_names_every_method_and_tests_that_exist() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text()
    messages = text[
        text.index("## Messages by method") : text.index("## What else the coordinator learns")
    ]
    assert not [name for name in registry() if f"`{name}`" not in messages]
    files = re.findall(r"`(?:tests/[a-z]+/)?((?:tests/)?test_[a-z_]+\.py)`", text)
    there = {p.name for p in (ROOT / "tests").rglob("test_*.py")}
    assert len(files) > 40 and not [name for name in files if Path(name).name not in there]
    defined = "".join(p.read_text() for p in (ROOT / "tests" / "methods").glob("test_*.py"))
    named = re.findall(r"`(test_[a-z_]+)`", text)
    assert named and all(f"def {name}(" in defined for name in named)


def broken_links(page: Path) -> list[str]:
    """Links of a page to files of the repository that do not exist."""
    targets = re.findall(r"\]\(([^)#]+)|<(https:[^>]+)>", page.read_text())
    files = {
        one: ROOT / one.removeprefix(HERE) if one.startswith(HERE) else page.parent / one
        for one in map("".join, targets)
    }
    return [
        one
        for one, file in files.items()
        if (one.startswith(HERE) or not one.startswith("http"))
        and file.resolve() not in GENERATED
        and not one.startswith("_partitions/")  # pictures that building the site draws
        and not file.exists()
    ]


def adversaries() -> list[list[str]]:
    """The cells of each row of the table of adversaries in the threat model."""
    text = (ROOT / "docs" / "threat-model.md").read_text()
    lines = text[text.index("| messages | O |") : text.index("### Before you sign")].splitlines()
    return [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in lines[2:]
        if line.startswith("|")
    ]


def test_every_method_is_in_one_row_of_the_table_of_adversaries_and_its_tests_exist() -> None:
    rows = adversaries()
    assert {len(row) for row in rows} == {8}
    places = Counter(
        name for row in rows for name in re.findall(r"`([a-z-]+)`", row[0]) if name in registry()
    )
    assert places == dict.fromkeys(registry(), 1)
    tests = [name for row in rows for name in re.findall(r"`(tests/[\w/]+\.py)`", row[-1])]
    assert tests and not [name for name in tests if not (ROOT / name).exists()]


FORBIDDEN = (
    r"against everybody",
    r"(callers|methods|runs)[ ,]+and restarts",
    r"over restarts(?! while)",
    r"whatever the coordinator asks",
    r"learns (the )?(sums?|mean) only",
    r"No row can be read through scores",
    r"an \(ε, δ\) for φ",
    r"is the same if the node is asked again",
    r"nothing else of the single messages",
    r"no row leaves|no rows? (ever )?leaves?|[Rr]ows(, labels)?( and [\w' ]+)? never leave",
    r"send no row\b",
    r"Every message is counted|counts every message",
    r"that were asked differently have no sum",
    r"a coordinator cannot choose who",
)
"""Promises that fell: docs/security-advisories.md."""


def test_no_page_or_docstring_repeats_a_promise_that_fell() -> None:
    files = [
        *PAGES,
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "src").rglob("*.toml"),
        *(ROOT / "examples").rglob("*.toml"),
    ]
    texts = {path: " ".join(path.read_text(encoding="utf-8").split()) for path in files}
    found = [
        (path.name, words)
        for path, text in texts.items()
        for words in FORBIDDEN
        if re.search(words, text)
    ]
    assert not found


def test_links_lead_somewhere() -> None:
    assert not {page.name: found for page in PAGES if (found := broken_links(page))}


def test_each_walk_of_the_architecture_names_and_counts_its_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    walks = re.findall(
        r"^\*\*[^*]+\*\*[^:]*?, (\d+) files: (.+?)\n\n", text, re.DOTALL | re.MULTILINE
    )
    assert len(walks) == 5
    for number, walk in walks:
        files = dict.fromkeys(
            name for name in re.findall(r"`([\w/]+\.py)`", walk) if not name.startswith("tests/")
        )
        assert len(files) == int(number)
        assert not [file for file in files if not [*(ROOT / "src" / "fedloom").rglob(file)]]


def test_the_architecture_page_names_what_the_test_holds() -> None:
    text, picture = ((ROOT / "docs" / f"architecture.{end}").read_text() for end in ("md", "svg"))
    for name in ALLOWED:
        assert f"`{name}`" in text or f"`{name}/`" in text, name
        assert f">{name}<" in picture, name


def test_the_typed_keywords_are_the_settings() -> None:
    from fedloom.api import OF_DATA, RunSettings
    from fedloom.experiment.config.run import RunConfig

    own = {"data", "models", "pretrained", "label", "group", "test"}  # arguments of run and compare
    assert {*RunSettings.__annotations__} == ({*RunConfig.model_fields} | OF_DATA) - own


def test_labels_of_links_are_words_not_names_of_pages() -> None:
    for page in PAGES:
        if page.is_relative_to(ROOT / "docs"):
            assert not (found := re.findall(r"\[[\w./-]+\.md[^\]]*\]\(", page.read_text())), (
                page,
                found,
            )


def test_the_sidebar_is_short_and_pages_are_within_the_limit_of_words() -> None:
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (ROOT / "docs" / "index.md").read_text(), re.S)
    entries = [
        line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")
    ]
    assert len(entries) <= 20
    results = {"cases", "results"}
    records = {"speed.md", "security-advisories.md"}
    counted = [p for p in PAGES if p.parent.name not in results and p.name not in records]
    assert (
        sum(any(map(str.isalnum, word)) for page in counted for word in page.read_text().split())
        < MOST_WORDS
    )


MOST_WORDS = 44_600
"""Words of all pages but those of results and the advisories, which are records. The bars and rules
of tables are no words.
"""
