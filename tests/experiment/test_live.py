"""What a run shows of itself while it goes on, and how it ends."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import DataError, EngineError, Interrupted, MethodError
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run import live
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import Status, Stopped, execute
from fedloom.experiment.run.live import thinned
from fedloom.experiment.run.session import Session
from fedloom.experiment.run.view import FILE, SILENCE, View, _start_time, liveness, read

SMALL: dict[str, Any] = {
    "method": "fedal",
    "rounds": 5,
    "params": {"tau": 1, "batch_size": 8},
    "data": {"clients": 3, "public_rows": 60},
    "models": {"pool": ["linear"]},
}


def small(**changes: Any) -> Any:
    return check({"run": {**SMALL, **changes}}).run


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is shown, however quick."""
    monkeypatch.setattr(live, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(live, "MAX_SHARE", float("inf"))


def test_the_end_of_a_run(tmp_path: Path) -> None:
    summary = execute(small(), tmp_path).summary
    view = read(tmp_path)
    assert (view.state, view.reason, view.round, view.rounds) == ("finished", "", 5, 5)
    assert (view.name, view.method, view.dataset, view.seed) == ("fedal", "fedal", "digits", 0)
    assert (
        view.accuracy == summary["accuracy"]["mean"] == view.points[-1][1]
        and view.chance == summary["chance"]
    )
    assert [round for round, _ in view.points] == [0, 1, 2, 3, 4, 5]
    assert [m.name for m in view.parties] == ["server", "client-0", "client-1", "client-2"]
    assert [m.accuracy for m in view.parties] == [None, *summary["accuracy"]["per_client"]]
    assert view.bytes == summary["bytes"] and view.bytes["up"] > 0
    assert (
        sum(m.sent for m in view.parties)
        == sum(m.received for m in view.parties)
        == sum(view.bytes.values())
    )
    assert view.parties[0].received == view.bytes["up"]
    assert (view.up, view.of, view.failures, view.recent_failures) == (4, 4, 0, [])
    assert view.started <= view.updated and view.ends is None
    assert not list(tmp_path.glob(".live*"))


@pytest.mark.usefixtures("unhurried")
def test_after_each_round(tmp_path: Path) -> None:
    seen: list[View] = []
    execute(small(), tmp_path, progress=lambda _: seen.append(read(tmp_path)))
    assert [view.round for view in seen] == [1, 2, 3, 4, 5]
    assert {view.state for view in seen} == {"running"}
    assert [len(view.points) for view in seen] == [2, 3, 4, 5, 6]
    assert all(view.pace is not None and view.ends is not None and view.pace > 0 for view in seen)
    assert seen[0].ends > seen[0].updated and all(
        liveness(view, time.time()) == (False, None) for view in seen
    )


def test_quick_rounds_are_not_all_written_and_the_last_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MIN_INTERVAL", 1e9)
    seen: list[int] = []
    execute(small(), tmp_path, progress=lambda _: seen.append(read(tmp_path).round))
    assert seen == [0] * 5
    assert (read(tmp_path).round, read(tmp_path).state) == (5, "finished")


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(small(rounds=1))
    assert not list(tmp_path.rglob("*"))


def test_a_stop_and_a_resumed_run(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        execute(small(), tmp_path, stop=lambda: True)
    stopped = read(tmp_path)
    assert (stopped.state, stopped.round, stopped.reason) == ("stopped", 1, "")
    execute(small(), tmp_path, resume=True)
    ended = read(tmp_path)
    assert (ended.state, ended.round) == ("finished", 5) and ended.points[:2] == stopped.points
    assert ended.bytes["up"] > stopped.bytes["up"]


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (MethodError("a rule was broken\nTraceback: secret"), "failed", "a rule was broken"),
        (ZeroDivisionError("secret"), "failed", "ZeroDivisionError"),
        (KeyboardInterrupt(), "stopped", ""),
        (Interrupted("stopped while nodes were waited for"), "stopped", "while waiting for nodes"),
        (
            EngineError("a round was stopped while nodes were waited for"),
            "failed",
            "a round was stopped while nodes were waited for",
        ),
    ],
)
def test_how_a_run_was_cut_short(
    error: BaseException, state: str, words: str, tmp_path: Path
) -> None:
    """A mistake's own words may be anybody's: only those of fedloom are told, without a trace."""

    def fail(status: Status) -> None:
        if status.round == 2:
            raise error

    with pytest.raises(type(error)):
        execute(small(), tmp_path, progress=fail)
    view = read(tmp_path)
    assert (view.state, view.reason, view.round) == (state, words, 2)
    assert "secret" not in (tmp_path / FILE).read_text()


def test_the_net_s_own_words_for_a_stop() -> None:
    from fedloom.remote.connections import Timeouts

    with pytest.raises(EngineError) as caught:
        Timeouts(stop=lambda: True).check_stop()
    assert live._ending(caught.value) == ("stopped", live.WAITING)


def test_failures_have_reasons_and_no_trace(tmp_path: Path) -> None:
    summary = execute(small(rounds=8, faults={"crash": 0.5}), tmp_path).summary
    view = read(tmp_path)
    assert view.failures == summary["failures"] > live.RECENT_FAILURES == len(view.recent_failures)
    assert (
        "raised" in {m.reason for m in view.recent_failures} and view.recent_failures[-1].round == 8
    )
    assert "Traceback" in (tmp_path / "tracebacks.log").read_text()
    assert "Traceback" not in (tmp_path / FILE).read_text()


def test_parties_with_columns(tmp_path: Path) -> None:
    """They have one accuracy together; alone only where the method says how."""
    run = {"method": "proto-evfl", "rounds": 2, "data": {"name": "breast_cancer"}}
    result = execute(check({"run": run}).run, tmp_path)
    view = read(tmp_path)
    assert (
        view.accuracy == result.summary["scores"]["accuracy"] and view.parties[0].name == "active"
    )
    (eval_mode,) = result.summary["alone"]
    alone = result.summary["alone"][eval_mode]["test"]["per_client"]
    assert [m.accuracy for m in view.parties if m.accuracy is not None] == alone


def test_a_run_continues_where_it_cannot_be_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f".{FILE}.draft").mkdir()
    with caplog.at_level(logging.WARNING, "fedloom"):
        execute(small(), tmp_path)
    assert (tmp_path / "result.json").exists() and not (tmp_path / FILE).exists()
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "cannot write live.json, so fedloom watch shows no progress"
    ]


def test_who_comes_and_goes_is_shown_between_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine tells it from a thread of its own, while the run's thread is at work."""
    plan = build(small())
    with start(plan) as engine:
        there = dict.fromkeys(engine.ids, True)
        monkeypatch.setattr(engine, "presence", lambda: dict(there))
        session = Session(plan, engine, tmp_path)
        session.live.touch()  # before there is anything to show
        assert not (tmp_path / FILE).exists()
        session.begin(False)
        with session.live.reporting(0):
            assert read(tmp_path).up == 4
            there[1] = False
            threads = [threading.Thread(target=session.live.touch) for _ in range(20)]
            for thread in threads:
                thread.start()
            view = until(lambda: read(tmp_path), lambda view: view.up == 3)
            assert [m.name for m in view.parties if not m.up] == ["client-1"] and (
                view.of,
                view.round,
            ) == (4, 0)
            there[1] = True
            session.live.touch()
            until(lambda: read(tmp_path), lambda view: view.up == 4)
        for thread in threads:
            thread.join()
        before = (tmp_path / FILE).read_bytes()
        there[1] = False
        session.live.touch()
        time.sleep(2 * live.DELAY)
        assert (tmp_path / FILE).read_bytes() == before


def test_of_many_parties_those_that_are_down_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PARTIES", 2)
    plan = build(small())
    with start(plan) as engine:
        monkeypatch.setattr(engine, "presence", lambda: {0: True, 1: True, 2: False})
        session = Session(plan, engine, tmp_path)
        session.begin(False)
        session.live.show(0)
    view = read(tmp_path)
    assert [m.name for m in view.parties] == ["server", "client-2"] and (view.up, view.of) == (3, 4)


@pytest.mark.parametrize("count", [0, 1, 199, 200, 201, 399, 400, 401, 12_345])
def test_a_long_curve_is_thinned(count: int) -> None:
    points = [(i, i / 7) for i in range(count)]
    kept = thinned(points)
    assert len(kept) <= live.POINTS + 1 and set(kept) <= set(points) and kept == sorted(kept)
    assert kept[:1] == points[:1] and kept[-1:] == points[-1:]
    assert len(kept) == count or len(kept) > live.POINTS / 2


def test_signs_of_life(tmp_path: Path) -> None:
    execute(small(rounds=1), tmp_path)
    ended = read(tmp_path)
    now = ended.updated
    assert liveness(ended, now + 1e6) == (False, None)  # who has ended need not live
    own = ended.model_copy(update={"state": "running"})
    assert liveness(own, now + 1e6) == (False, None)  # a round may take long
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    theirs = own.process.model_copy(update={"id": child.pid, "started_at": _start_time(child.pid)})
    of_child = own.model_copy(update={"process": theirs})
    assert liveness(of_child, now + 5) == (False, None)
    child.kill()
    until(
        lambda: liveness(of_child, now + 5), lambda found: found == (True, 5.0)
    )  # gone, though nobody asked for its end
    child.communicate()
    assert liveness(of_child, now + 5) == (True, 5.0)
    reused = own.model_copy(update={"process": own.process.model_copy(update={"started_at": 1.0})})
    assert liveness(reused, now + 5) == (True, 5.0)
    elsewhere = own.model_copy(
        update={"process": own.process.model_copy(update={"host": "another"})}
    )
    assert liveness(elsewhere, now + SILENCE - 1) == (False, None)
    assert liveness(elsewhere, now + SILENCE + 1) == (False, SILENCE + 1)
    slow = elsewhere.model_copy(update={"pace": SILENCE})
    assert liveness(slow, now + 2 * SILENCE) == (False, None)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"state": "running"}', '{"state": 3}'])
def test_a_damaged_file_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(DataError, match="is invalid"):
        read(tmp_path)


def test_a_wrong_folder_and_a_process_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no live\.json"):
        read(tmp_path)
    execute(small(rounds=1), tmp_path / "run")
    text = json.loads((tmp_path / "run" / FILE).read_text())
    for number in (0, -1, 1 << 40):
        text["process"]["id"] = number
        (tmp_path / "run" / FILE).write_text(json.dumps(text))
        with pytest.raises(DataError):
            read(tmp_path / "run")


def until(look: Callable[[], Any], good: Callable[[Any], bool]) -> Any:
    """What is seen once it is good."""
    end = time.monotonic() + 60
    while not good(found := look()):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found
