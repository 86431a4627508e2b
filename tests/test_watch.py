"""`fedloom watch`: what it shows in a terminal, what its page answers, and the page in a real
browser.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom.cli import main
from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.run.view import FILE, PartyStatus, Process, RecentFailure, View, own_process
from fedloom.report import watch as watching
from fedloom.report.page import Page, render
from fedloom.report.watch import page, screen
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
        (["nowhere", "--page"], "nowhere has no live.json"),
        (["--page", "--once"], "--page cannot be combined"),
        (["--port", "70000"], "65535"),
    ],
)
def test_mistakes_get_a_sentence(
    arguments: list[str], words: str, fedloom: Callable[..., tuple[str, str]]
) -> None:
    assert words in fedloom(*arguments, code=2)[1]


def test_help_teaches(fedloom: Callable[..., tuple[str, str]]) -> None:
    shown = fedloom("--help")[0]
    assert "fedloom watch --page" in shown and "--once" in shown and "8470" in shown


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
    assert watching.watch(tmp_path, False, False, False, 0, out) == 0
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


# --- the page


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of the page of a folder."""
    found = page.server(folder, 0)
    thread = threading.Thread(target=lambda: found.serve_forever(poll_interval=0.01))
    thread.start()
    try:
        yield found.server_port
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def ask(
    port: int, path: str = "/", method: str = "GET", hosts: Sequence[str] = ("127.0.0.1",)
) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_the_page_and_what_it_shows(tmp_path: Path) -> None:
    put(tmp_path, view())
    with served(tmp_path) as port:
        status, headers, body = ask(port)
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
        assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
        for kind in ("script", "style"):
            inside = body.split(f"<{kind}>".encode())[1].split(f"</{kind}>".encode())[0]
            assert (
                rules[f"{kind}-src"]
                == f"'sha256-{base64.b64encode(hashlib.sha256(inside).digest()).decode()}'"
            )
        status, headers, body = ask(port, "/live.json")
        assert status == 200 and json.loads(body)["run"]["round"] == 12
        assert headers["Content-Type"] == "application/json; charset=utf-8"
        assert (
            headers["Cache-Control"] == "no-store"
            and headers["X-Content-Type-Options"] == "nosniff"
        )
        assert (
            headers["Cross-Origin-Resource-Policy"] == "same-origin"
            and "Python" not in headers["Server"]
        )
        assert headers["Access-Control-Allow-Origin"] is None
        put(tmp_path, view(13))
        assert json.loads(ask(port, "/live.json")[2])["run"]["round"] == 13
        (tmp_path / FILE).unlink()
        status, _, body = ask(port, "/live.json")
        assert status == 503 and "has no live.json" in json.loads(body)["error"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:8470", "127.0.0.1:9000", "[::1]:1"]
)
def test_it_answers_by_the_names_of_this_machine(host: str, tmp_path: Path) -> None:
    put(tmp_path, view())
    with served(tmp_path) as port:
        assert ask(port, "/live.json", hosts=[host])[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        [""],
        ["evil.example"],
        ["127.0.0.1.evil.example"],
        ["localhost.evil.example:80"],
        ["evil.example:127.0.0.1"],
        ["127.0.0.1@evil.example"],
        ["127.0.0.1:80:80"],
        ["192.168.0.1"],
        ["127.0.0.1", "evil.example"],
    ],
)
def test_it_answers_by_no_other_name(hosts: list[str], tmp_path: Path) -> None:
    """A site whose name is made to lead to this machine would read it otherwise."""
    put(tmp_path, view())
    with served(tmp_path) as port:
        for path in ("/", "/live.json"):
            status, _, body = ask(port, path, hosts=hosts)
            assert status == 403 and b"digits" not in body and b"script" not in body


@pytest.mark.parametrize(
    "path",
    [
        "/config.toml",
        "/./live.json",
        "/../live.json",
        "/live.json/",
        "/LIVE.JSON",
        "/%6cive.json",
        "/?",
    ],
)
def test_it_serves_no_other_file(path: str, tmp_path: Path) -> None:
    put(tmp_path, view())
    (tmp_path / "config.toml").write_text("secret")
    with served(tmp_path) as port:
        status, _, body = ask(port, path)
        assert status == 404 and b"secret" not in body and b"digits" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_it_only_answers_get(method: str, tmp_path: Path) -> None:
    put(tmp_path, view())
    with served(tmp_path) as port:
        status, headers, _ = ask(port, "/live.json", method)
        assert status == 405 and headers["Allow"] == "GET"


def test_it_listens_to_this_machine_alone(tmp_path: Path) -> None:
    found = page.server(tmp_path, 0)
    try:
        assert found.server_address[0] == "127.0.0.1"
    finally:
        found.server_close()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="another with --port"),
    ):
        page.server(tmp_path, taken.getsockname()[1])


def test_the_address_is_reported_and_ctrl_c_ends_the_page(tmp_path: Path) -> None:
    put(tmp_path / "r", view())
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom", "watch", "r", "--page", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        told = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
        assert told and ask(int(told[1]))[0] == 200
        process.send_signal(signal.SIGINT)
        assert (
            "The page is closed" in process.communicate(timeout=60)[0] and process.returncode == 0
        )
    finally:
        process.kill()
        process.wait()


def test_the_page_needs_nothing_else_and_writes_only_text() -> None:
    text = (Path(page.__file__).parent / "page.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\son\w+=|\sstyle=",
        text,
    )
    assert "src=" not in text and "@import" not in text and "url(" not in text


def test_the_page_has_the_colors_and_letters_of_the_reports() -> None:
    shared = (Path(page.__file__).parents[1] / "shared.css").read_text()
    assert "prefers-color-scheme: dark" in shared and shared in page._page()[0].decode()
    assert shared.strip() in render(Page(title="T", subtitle="", lead="", sections=()))


# --- the page in a browser

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
in_a_browser = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
]
FLAGS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def seen(folder: Path, profile: Path, budget: int = 6000) -> str:
    """The page after so many milliseconds of the browser's time, as the document that it has
    become.
    """
    assert BROWSER is not None
    with served(folder) as port:
        command = [
            BROWSER,
            *FLAGS,
            f"--user-data-dir={profile}",
            f"--virtual-time-budget={budget}",
            "--dump-dom",
        ]
        done = subprocess.run(
            [*command, f"http://127.0.0.1:{port}/"], capture_output=True, text=True, timeout=120
        )
    return done.stdout


def text_of(dom: str, id: str) -> str:
    found = re.search(
        rf'id="{id}"[^>]*>(.*?)</(?:p|span|dd|h1|h2|tbody|figcaption|div|footer)>', dom, re.S
    )
    assert found, id
    return re.sub(r"<[^>]+>", " ", found[1]).replace("&nbsp;", " ")


def coming(monkeypatch: pytest.MonkeyPatch, folder: Path, *views: View | None) -> None:
    """Let the folder show another view each time that the page asks; None for no view at all."""
    left = list(views)

    def next_look(asked: Path, now: float) -> Any:
        following = left.pop(0) if len(left) > 1 else left[0]
        if following is None:
            (folder / FILE).unlink(missing_ok=True)
        else:
            put(
                folder,
                following.model_copy(update={"updated": time.time(), "ends": time.time() + 17}),
            )
        return take(asked, time.time())

    monkeypatch.setattr(page, "take", next_look)


@in_a_browser
def test_a_run_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page follows the run: nothing is reloaded."""
    folder = tmp_path / "run"
    coming(monkeypatch, folder, view(0, points=[], accuracy=None), view(12), view(13))
    dom = seen(folder, tmp_path / "profile")
    assert "<title>13/16 mine</title>" in dom
    assert text_of(dom, "name") == "mine" and text_of(dom, "state") == "running"
    assert text_of(dom, "about") == "fedal on digits · seed 7 · local, 1 worker, cpu"
    assert text_of(dom, "rounds") == "Round 13 of 16 (81 %)"
    assert re.match(r"4\.2 s a round, 1[67] s to go, until about ", text_of(dom, "left"))
    assert 'aria-valuenow="13"' in dom and "width: 81.25%" in dom
    assert text_of(dom, "accuracy") == "75.0 %" and text_of(dom, "up") == "4 of 5"
    assert text_of(dom, "who") == "down: client-3"
    assert text_of(dom, "bytes") == "11.5 MB" and text_of(dom, "failures") == "17"
    assert text_of(dom, "ways") == "3.84 MB up, 7.68 MB down"
    parties = " ".join(text_of(dom, "parties").split())
    assert "client-2 ● up 52.0 % 2.00 kB 0 B client-3 ○ down 53.0 % 3.00 kB 0 B" in parties
    assert "9 client-3 logits unreachable" in " ".join(text_of(dom, "recent_failures").split())
    curve = re.search(r'class="curve" d="M([^"]+)"', dom)
    assert curve and curve[1].count("L") == 13
    heights = [float(place.split()[1]) for place in curve[1].split("L")]
    assert heights == sorted(heights, reverse=True) and 'aria-label="Accuracy by round: 75.0' in dom
    assert re.search(r'id="lost"[^>]* hidden', dom) and re.search(r'id="news"[^>]* hidden', dom)


@in_a_browser
@pytest.mark.parametrize(
    ("changes", "state", "words"),
    [
        ({"state": "finished", "round": 16, "started": NOW}, "finished", ""),
        (
            {"state": "stopped", "reason": "while nodes were waited for"},
            "stopped",
            "topped after round 12 while nodes were waited for; repeat the command with --resume "
            "to continue",
        ),
        ({"state": "failed", "reason": "disk full"}, "failed", "Failed after round 12: disk full"),
        (
            {"process": Process(host=own_process().host, id=1, started_at=1.0)},
            "no update",
            "process has ended",
        ),
    ],
)
def test_the_end_of_a_run_in_a_browser(
    changes: dict[str, Any], state: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    coming(monkeypatch, folder, view(11), view(**changes))
    dom = seen(folder, tmp_path / "profile")
    assert text_of(dom, "state") == state and words in text_of(dom, "news")
    assert bool(re.search(r'id="news"[^>]* hidden', dom)) is not bool(words)


@in_a_browser
def test_a_page_that_lost_its_run_or_its_server_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    coming(monkeypatch, folder, view(12), None)
    dom = seen(folder, tmp_path / "profile")
    assert text_of(dom, "state") == "unreadable" and "has no live.json" in text_of(dom, "lost")
    assert "The values below are from" in text_of(dom, "lost") and text_of(
        dom, "rounds"
    ).startswith("Round 12 of 16")

    coming(monkeypatch, folder, view(12))
    answer, asked = page._Handler._live, []

    def dying(handler: Any) -> None:
        asked.append(handler)
        if len(asked) > 1:
            handler.connection.shutdown(socket.SHUT_RDWR)
        else:
            answer(handler)

    monkeypatch.setattr(page._Handler, "_live", dying)
    dom = seen(folder, tmp_path / "profile")
    assert text_of(dom, "state") == "no connection" and "no reply from fedloom watch" in text_of(
        dom, "lost"
    )
    assert text_of(dom, "rounds").startswith("Round 12 of 16")


@in_a_browser
def test_a_comparison_in_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "compared"
    put(folder / "a", view(16, name="fedal", state="finished", started=NOW - 90))
    put(folder / "b", view(3, name="local"))
    dom = seen(folder, tmp_path / "profile", 2000)
    assert text_of(dom, "name") == "local"
    assert (
        " ".join(text_of(dom, "runs").split())
        == "fedal, seed 7 finished 16/16 90.0 % local, seed 7 running 3/16 25.0 %"
    )


@in_a_browser
def test_names_are_text_in_a_browser(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    failure = RecentFailure(round=1, party=EVIL, kind=EVIL, reason=EVIL)
    evil: dict[str, Any] = {
        "name": EVIL,
        "method": EVIL,
        "dataset": EVIL,
        "engine": EVIL,
        "metric": EVIL,
        "reason": EVIL,
    }
    put(
        folder,
        view(
            state="failed",
            parties=[PartyStatus(name=EVIL, up=False)],
            recent_failures=[failure],
            **evil,
        ),
    )
    dom = seen(folder, tmp_path / "profile", 2000)
    assert "<img" not in dom and "<title>owned" not in dom
    assert dom.count("&lt;img src=x") >= 9
