"""The code and commands in the README and the docs work, and match the files."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fedloom
from fedloom.cli import main
from fedloom.experiment.reading import check
from tests.test_architecture import ALLOWED

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*.md")),
]


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    return [text for name, text in found if name == language]


def test_the_docs_show_the_example_as_it_is() -> None:
    assert (ROOT / "examples" / "fedavg.py").read_text() in blocks(ROOT / "docs" / "method.md", "python")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_in_the_docs_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for code in blocks(page, "python"):
        exec(compile(code, f"{page.name} block", "exec"), {"__name__": "__docs__"})


def test_the_example_learns_and_gives_the_same_bits_on_both_engines() -> None:
    settings = {"data": {"clients": 3}, "models": {"pool": ["mlp"]}, "rounds": 8, "evaluate": {"points": 1}}
    page = str(ROOT / "examples" / "fedavg.py")
    results = [fedloom.run(page, engine={"name": name}, **settings) for name in ("local", "isolated")]
    assert results[0].summary["state_sha256"] == results[1].summary["state_sha256"]
    assert results[0].accuracy > 0.4
    assert len({round(a, 12) for a in results[0].summary["accuracy"]["per_client"]}) == 1  # one global model
    size = (64 * 64 + 64 + 64 * 10 + 10) * 4
    assert results[0].summary["bytes"] == {"up": 3 * 8 * (size + 8), "down": 3 * 9 * size, "across": 0}


@pytest.mark.parametrize("text", blocks(ROOT / "docs" / "config.md", "toml"))
def test_config_in_the_docs_is_valid(text: str) -> None:
    values = tomllib.loads(text)
    top = {k: values.pop(k) for k in ("title", "compare") if k in values}
    assert len(check({**top, "run": values}).runs()) == 6


def test_commands_in_the_readme_are_understood(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each `fedloom …` line parses: its command, options and names exist. Nothing is run."""
    from fedloom.cli import runs

    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.csv").write_text("age,disease,hospital\n" + "".join(f"{i},{i % 2},{i % 3}\n" for i in range(90)))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done: list[str] = []
    monkeypatch.setattr(runs, "_work", lambda experiment, called, *_: done.append(called))

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
    assert done == ["PosixPath", "fedal", "compare", "compare", "fedal", "examples/fedprox.py"]


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_the_architecture_page_names_what_the_test_holds() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in ALLOWED:
        assert f"`{name}`" in text or f"`{name}/`" in text, name
