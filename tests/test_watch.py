"""`fedloom watch`: what it shows in a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.cli import main
from fedloom.core.errors import DataError
from fedloom.experiment.run.view import FILE, PartyStatus, Process, RecentFailure, View, own_process
from fedloom.report import watch as watching
from fedloom.report.watch import screen
from fedloom.report.watch.snapshot import newest, take

NOW = 1_800_000_000.0
ELSEWHERE = Process(host="another", id=1, started_at="1")
EVIL = "<img src=x onerror=\"document.title='owned'\">"


def view(round: int = 12, **changes: Any) -> View:
    """A run of five parties of which one is down."""
    points = [(r, 0.1 + 0.05 * r) for r in range(0, round + 1)]
    parties = [
        PartyStatus(name=f"client-{i}", up=i != 3, accuracy=0.5 + i / 100, sent=1000 * i)
        for i in range(5)
    ]
    values: dict[str, Any] = {
        "name": "mine",
        "method": "fedal",
        "dataset": "digits",
        "seed": 7,
        "round": round,
        "rounds": 16,
        "started": NOW - 60,
        "updated": NOW,
        "pace": 4.2,
        "ends": NOW + 4.2 * (16 - round),
        "metric": "accuracy",
        "accuracy": points[-1][1] if points else None,
        "chance": 0.125,
        "points": points,
        "parties": parties,
        "up": 4,
        "of": 5,
        "bytes": {"up": 3_840_000, "down": 7_680_000, "across": 0},
        "failures": 17,
        "recent_failures": [
            RecentFailure(round=9, party="client-3", kind="logits", reason="unreachable")
        ],
        "engine": "local, 1 worker, cpu",
        "process": own_process(),
    }
    return View(**{**values, **changes})


def put(folder: Path, shown: View) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / ".draft"
    draft.write_text(shown.model_dump_json())
    os.replace(draft, folder / FILE)
    return folder


def printed(thing: object, width: int = 80) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(thing)
    return file.getvalue()


def drawn(folder: Path, height: int | None = None, now: float = NOW) -> str:
    out = Console(file=io.StringIO(), width=80)
    return printed(screen.draw(take(folder, now), out, height))


# --- what there is to see


def test_a_run(tmp_path: Path) -> None:
    text = drawn(put(tmp_path, view()))
    for words in (
        "mine",
        "fedal on digits, seed 7",
        "running",
        "round 12/16",
        "4.2 s a round, 17 s to go",
    ):
        assert words in text
    assert "accuracy 70.0%" in text and "most frequent class: 12.5%" in text
    assert "4 of 5 up" in text
    assert re.search(r"client-3 +○ down +53\.0% +3\.00 kB +0 B", text)
    assert re.search(r"client-4 +● up +54\.0% +4\.00 kB", text)
    assert "3.84 MB up, 7.68 MB down" in text
    assert (
        "failed calls: 17; most recent:" in text
        and "round 9, client-3, logits: unreachable" in text
    )
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changes", "now", "words"),
    [
        (
            {"round": 0, "points": [], "accuracy": None, "pace": None, "ends": None},
            NOW,
            "first round in progress",
        ),
        ({"state": "finished", "round": 16}, NOW, "60 s in all"),
        ({"state": "stopped"}, NOW, "stopped after round 12; repeat the command with --resume"),
        (
            {"state": "stopped", "reason": "while nodes were waited for"},
            NOW,
            "stopped after round 12 while nodes were waited for; repeat the command with "
            "--resume to continue",
        ),
        ({"state": "failed", "reason": "disk full"}, NOW, "failed after round 12: disk full"),
        ({"process": ELSEWHERE}, NOW + 100, "no update for 100 s"),
        (
            {"process": own_process().model_copy(update={"started_at": 1.0})},
            NOW + 3,
            "process has ended",
        ),
        ({"pace": 0.01}, NOW, "100 rounds a second"),
        ({"pace": 3600.0, "ends": NOW + 4 * 3600}, NOW, "60 min 0 s a round, 4 h 0 min to go"),
    ],
)
def test_states_of_a_run(changes: dict[str, Any], now: float, words: str, tmp_path: Path) -> None:
    folder = put(tmp_path, view(**changes))
    assert words in " ".join(drawn(folder, now=now).split())
    ended = {"finished": True, "stopped": True, "failed": True}.get(
        changes.get("state", ""), "has ended" in words
    )
    assert take(folder, now).over is ended


def test_a_small_terminal_shows_those_who_are_down(tmp_path: Path) -> None:
    parties = [PartyStatus(name=f"client-{i}", up=i != 77) for i in range(100)]
    folder = put(tmp_path, view(parties=parties, up=99, of=100))
    text = drawn(folder, height=24)
    assert len(text.splitlines()) <= 24
    assert "client-77" in text and "more" in text and "client-50" not in text
    assert "client-50" in drawn(folder)


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    name = "a\x1b[2Jb\n[red]c[/red]"
    failure = RecentFailure(round=1, party=name, kind=name, reason=name)
    changes: dict[str, Any] = {"name": name, "dataset": name, "engine": name, "metric": name}
    shown: dict[str, Any] = {"parties": [PartyStatus(name=name)], "recent_failures": [failure]}
    folder = put(tmp_path, view(state="failed", reason=name, **changes, **shown))
    text = drawn(folder) + screen.line(take(folder, NOW))
    assert "\x1b" not in text and "[red]c[/red]" in text


def test_a_curve() -> None:
    assert screen.braille_curve([(0, 1.0), (4, 1.0)], 2, 1, (0.0, 1.0), 4) == ["⠉⠉"]
    assert screen.braille_curve([(0, 0.0), (4, 0.0)], 2, 1, (0.0, 1.0), 4) == ["⣀⣀"]
    # half of the rounds
    assert screen.braille_curve([(0, 0.0), (4, 0.0)], 4, 1, (0.0, 1.0), 8) == ["⣀⣀⡀⠀"]
    # no gap in a leap
    assert screen.braille_curve([(0, 0.0), (1, 1.0)], 1, 2, (0.0, 1.0), 1) == ["⢸", "⣸"]
    assert screen.braille_curve([(3, 1.0)], 3, 1, (0.0, 1.0), 9) == ["⠉⠁⠀"]


def test_a_comparison(tmp_path: Path) -> None:
    put(
        tmp_path / "fedal-seed0",
        view(16, name="fedal", state="finished", started=NOW - 90, updated=NOW - 50),
    )
    put(tmp_path / "local-seed0", view(3, name="local", started=NOW - 40))
    sight = take(tmp_path, NOW)
    assert [(run.name, run.state, run.round) for run in sight.runs] == [
        ("fedal", "finished", 16),
        ("local", "running", 3),
    ]
    assert (sight.run.name, sight.over) == ("local", False)
    text = drawn(tmp_path)
    assert re.search(r"fedal seed 7 +finished +16/16 +90\.0%", text) and "round 3/16" in text


def test_when_a_comparison_is_over(tmp_path: Path) -> None:
    """Between two runs it is not, though all that began are finished."""
    put(tmp_path / "a", view(16, state="finished", updated=time.time()))
    assert not take(tmp_path, time.time()).over
    (tmp_path / "comparison.json").write_text("{}")
    assert take(tmp_path, time.time()).over
    old = time.time() - 1000  # of a comparison that is resumed
    os.utime(tmp_path / "comparison.json", (old, old))
    assert not take(tmp_path, time.time()).over
    gone = own_process().model_copy(update={"started_at": 1.0})
    put(tmp_path / "a", view(16, state="finished", updated=NOW, process=gone))
    assert take(tmp_path, NOW + 1).over
    put(tmp_path / "a", view(16, state="finished", updated=NOW, process=ELSEWHERE))
    assert not take(tmp_path, NOW + 1).over and take(tmp_path, NOW + 100).over
    put(tmp_path / "b", view(2, state="stopped", updated=NOW + 1))
    assert take(tmp_path, NOW + 1).over


def test_the_newest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Start one with fedloom run"):
        newest(tmp_path)
    for age, folder in ((30, "old"), (20, "both/one"), (5, "both/two"), (10, "single")):
        file = put(tmp_path / folder, view()) / FILE
        os.utime(file, (NOW - age, NOW - age))
    assert newest(tmp_path) == tmp_path / "both"


# --- the command


@pytest.fixture
def fedloom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """The command, called in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["fedloom", "watch", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        done = capsys.readouterr()
        assert (stop.value.code or 0) == code, done
        return done.out, done.err

    return call


def test_once_and_json(fedloom: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    put(tmp_path / "runs" / "a", view(updated=time.time()))
    assert "round 12/16" in fedloom("--once")[0]
    assert "round 12/16" in fedloom("runs/a", "--once")[0]
    shown = json.loads(fedloom("runs/a", "--json")[0])
    assert (shown["folder"], shown["state"], shown["over"]) == ("a", "running", False)
    assert (
        shown["run"]["points"][-1] == [12, pytest.approx(0.7)]
        and shown["run"]["parties"][3]["up"] is False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run to watch in runs/"),
        (["nowhere"], "nowhere has no live.json"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], words: str, fedloom: Callable[..., tuple[str, str]]
) -> None:
    assert words in fedloom(*arguments, code=2)[1]


def test_help_teaches(fedloom: Callable[..., tuple[str, str]]) -> None:
    shown = fedloom("--help")[0]
    assert "fedloom watch runs/mine" in shown and "--once" in shown


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("failed", 1), ("stopped", 1)])
def test_it_ends_with_the_run(
    state: str,
    code: int,
    fedloom: Callable[..., tuple[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(tmp_path, view(12))
    coming = [view(12), view(13), view(14, state=state)]
    monkeypatch.setattr(watching, "sleep", lambda _: put(tmp_path, coming.pop(0)))
    text = fedloom(str(tmp_path), code=code)[0]
    assert not coming
    lines = [line for line in text.splitlines() if line.startswith("mine  round")]
    assert [re.sub(r"  accuracy.*", "", line) for line in lines] == [
        "mine  round 12/16",
        "mine  round 13/16",
    ]
    assert "accuracy 70.0%  4/5 up  11.5 MB sent  17 failures" in lines[0]
    assert "round 14/16" in text and state in text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),
        ({"state": "finished"}, 0),
        ({"state": "failed"}, 1),
        ({"state": "stopped"}, 1),
        ({"process": ELSEWHERE, "updated": NOW}, 0),  # perhaps it goes on
        ({"process": own_process().model_copy(update={"started_at": 1.0})}, 1),
    ],
)
@pytest.mark.parametrize("how", ["--once", "--json"])
def test_the_status_of_a_single_look(
    changes: dict[str, Any],
    code: int,
    how: str,
    fedloom: Callable[..., tuple[str, str]],
    tmp_path: Path,
) -> None:
    put(tmp_path, view(**{"updated": time.time(), **changes}))
    assert "mine" in fedloom(str(tmp_path), how, code=code)[0]


def test_in_a_terminal_it_is_drawn_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, view(12))
    coming = [view(13), view(16, state="finished")]
    monkeypatch.setattr(watching, "sleep", lambda _: put(tmp_path, coming.pop(0)))
    file = io.StringIO()
    out = Console(file=file, force_terminal=True, width=80, height=30)
    assert watching.watch(tmp_path, False, False, out) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert (
        all(f"round {n}/16" in text for n in (12, 13, 16))
        and "finished" in text.rpartition("round 16/16")[0]
    )


def test_who_stops_watching_stops_no_run(
    fedloom: Callable[..., tuple[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watching, "sleep", interrupt)
    put(tmp_path, view())
    assert "The run continues" in fedloom(str(tmp_path))[0]


def test_a_run_that_was_killed(fedloom: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    settings = [
        "-s",
        "models.pool=['linear']",
        "-s",
        "data.clients=2",
        "--rounds",
        "100000",
        "--out",
        "r",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "run", "local", *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 120
        while (
            not (tmp_path / "r" / FILE).exists() or take(tmp_path / "r", time.time()).run.round == 0
        ):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        assert json.loads(fedloom("r", "--json")[0])["state"] == "running"
        process.send_signal(signal.SIGKILL)
        assert "no update" in fedloom("r", code=1)[0]
    finally:
        process.kill()
        process.wait()
