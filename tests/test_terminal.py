"""No name in a file from elsewhere commands the terminal that prints it."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

import fedloom as fedloom_package
from fedloom.cli.options import SafeConsole, out, plain_table, print_plain
from fedloom.report.terminal import show_comparison
from fedloom.support.log_lines import TextFormatter
from tests.command import Done

ESCAPES = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "a\rb", "left\u202eright", "a\x08b"
CONTROLS = {*"\x1b\x07\x08\r\x9b\u202e"}


def table(text: str) -> Table:
    made = Table("name", box=None)
    made.add_row(text)
    return made


@pytest.mark.parametrize("text", ESCAPES)
@pytest.mark.parametrize("form", [str, Text, table])
def test_no_console_prints_a_control_character(form: Callable[[str], object], text: str) -> None:
    written = io.StringIO()
    console = SafeConsole(file=written, force_terminal=False)
    console.print(form(text), soft_wrap=True, markup=False)
    assert not CONTROLS & {*written.getvalue()} and written.getvalue().strip()


def test_styles_and_cursor_movements_of_the_console_itself_are_kept() -> None:
    written = io.StringIO()
    console = SafeConsole(file=written, force_terminal=True, color_system="standard", _environ={})
    console.print("[bold]name[/]\tgr\u00fc\u00dfe\u00a0\u4e2d")
    console.show_cursor(False)
    assert (
        "\x1b[1mname\x1b[0m" in written.getvalue()
        and "gr\u00fc\u00dfe\u00a0\u4e2d" in written.getvalue()
    )
    assert written.getvalue().endswith("\x1b[?25l")


@pytest.mark.parametrize("text", ESCAPES)
def test_json_is_the_same_without_control_characters(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_plain(json.dumps({"name": text}, ensure_ascii=False))
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"name": text} and not CONTROLS & {*shown}


def test_a_warning_in_a_file_has_none() -> None:
    record = logging.LogRecord("fedloom", 30, "", 0, "%s", ("x\x1b[2Jy\nz",), None)
    assert (
        TextFormatter("%(levelname)-8s %(message)s").format(record)
        == "WARNING  x\N{REPLACEMENT CHARACTER}[2Jy\n    z"
    )


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminals_lose_no_word_of_a_table(width: int) -> None:
    rows = [
        (
            "switzerland",
            "Undecided, leaning to join: AUC +0.052 (95 % −0.187 to +0.292)",
            "12,345",
            "0.613",
        ),
        ("va", "Stay alone", "7", ""),
    ]
    made = plain_table("owner", "decision", numbers=("rows", "federated"))
    for row in rows:
        made.add_row(*row)
    written = io.StringIO()
    SafeConsole(file=written, width=width).print(made)
    shown = written.getvalue()
    assert "…" not in shown and max(map(len, shown.splitlines())) <= width
    for word in " ".join(
        [
            "owner decision rows federated" if width == 80 else "decision federated",
            *map(" ".join, rows),
        ]
    ).split():
        assert word in shown
    lines = [line.strip() for line in shown.splitlines()]
    assert ("rows: 12,345" in lines) == (width == 40)


@pytest.mark.parametrize("width", [40, 80])
def test_narrow_terminals_lose_no_word_of_the_help(
    width: int, fedloom: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    import typer

    from fedloom.cli.app import app

    monkeypatch.setattr(out, "_width", width)
    monkeypatch.setenv("COLUMNS", str(width))  # of Typer's own console
    group: Any = typer.main.get_command(app)
    names = [name for name, one in group.commands.items() if not one.hidden]
    shown = fedloom("--help").stdout
    for word in (
        *names,
        "Experiments",
        "Your own data",
        "Methods and models",
        "Between organizations",
    ):
        assert word in shown
    for name in names:
        command = group.commands[name]
        shown = fedloom(name, "--help").stdout
        assert not re.search(r"\w…|…\w", shown.replace("params.…", "")), shown
        for param in (one for one in command.params if not getattr(one, "hidden", False)):
            for option in param.opts if param.param_type_name == "option" else ():
                assert re.search(rf"{option}\b", shown), (name, option)
            for word in (param.help or "").replace("\\[", "[").split() if width < 80 else ():
                assert word in shown, (name, word)


@pytest.fixture(scope="module")
def compared() -> dict[str, Any]:
    """Four vertical methods with long names, all scores, and two seeds."""
    methods = ["vertical-forest", "active-forest", "split", "active-only"]
    settings: dict[str, Any] = {"data": "breast_cancer", "clients": 2, "rounds": 1, "seeds": 2}
    return fedloom_package.compare(methods, **settings)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminals_lose_no_column_of_a_comparison(
    compared: dict[str, Any], width: int
) -> None:
    written = io.StringIO()
    show_comparison(compared, SafeConsole(file=written, width=width))
    shown = written.getvalue()
    tables = [line for line in shown.splitlines() if "─" not in line and "  " in line.strip()]
    assert "…" not in shown and max(map(len, tables)) <= width
    for heading in (
        "Accuracy",
        "balanced",
        "AUC",
        "Log-loss",
        "calib.",
        "Sent up",
        "Sent down",
        "Time",
    ):
        assert heading in shown
    for name, scores in ((m["name"], m["scores"]) for m in compared["methods"]):
        assert shown.count(f" {name} ") >= 2 and f"{scores['log loss']['mean']:.3f}" in shown
    for difference in compared["further"]["log loss"]:
        assert f"{difference['mean']:+.3f}".replace("-", "−") in shown


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A table whose columns and words command a terminal."""
    lines = [f"age,press{ESCAPES[1]}ure,ward{ESCAPES[2]},label"]
    lines += [
        f"{20 + n},{n % 7},w{ESCAPES[0] if n % 2 else ''},{'ill' if n % 3 else 'well'}{ESCAPES[2]}"
        for n in range(60)
    ]
    path = tmp_path / "hostile.csv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ("data", "{}", "--label", "label"),
        ("data", "{}", "--label", "label", "--json"),
        ("data", "{}", "--label", "label", "--at-nodes"),
        ("data", "{}", "--label", "nothing"),
        ("data", "{}", "--label", "label", "--clients", "2"),
        ("run", "fedavg", "-s", "data.name={}", "-s", "data.label=nothing"),
        ("run", "fedavg", "-s", "params.x\x1b[2J=1"),
        ("run", "fed\x1b[2Javg"),
        ("list", "x\x1b[2J"),
        ("report", "run\x1b[2J"),
        ("audit", "verify", "no\x9bwhere"),
        ("node", "no\x1b[2Jwhere.toml"),
        ("certs", "na\x1b[2Jme"),
    ],
)
def test_each_command_prints_no_control_character(
    words: tuple[str, ...],
    hostile: Path,
    fedloom: Callable[..., Done],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [word.replace("{}", str(hostile)) for word in words]
    code = 0 if words[0] == "data" and "nothing" not in words else 2
    done = fedloom(*given, code=code)
    shown = done.stdout + done.stderr
    assert shown and not CONTROLS & {*shown}, shown
