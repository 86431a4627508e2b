"""What a node writes down: of each answer who, when, how much and its hash; never what
was in it.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import CheckpointError
from fedloom.remote import rpc_errors
from fedloom.remote.frames import digest
from fedloom.remote.node import audit, logs
from fedloom.remote.node.audit import AuditLog
from tests.node.hosts import RUN, RunRequest, doing, opening, which


def test_each_call_is_one_line_without_contents(hosts: Callable[..., RunRequest]) -> None:
    ask = hosts()
    ask("open", opening())
    body = doing(0, ask.host)
    reply = ask("do", body)
    assert ask("do", body) == reply
    ask("digest", which())
    ask.refused("do", b"\0garbage: patient 7")
    ask("close", which(finished=True))
    lines = ask.audited()
    assert [line["what"] for line in lines] == [
        "opened",
        "answered",
        "answered again",
        "sent the state's hash",
        "closed",
    ]
    assert lines[1] | {"time": "", "before": ""} == {
        "time": "",
        "before": "",
        "what": "answered",
        "caller": "hub",
        "run": RUN,
        "call": 0,
        "round": 0,
        "method": "update",
        "bytes_in": len(body),
        "bytes_out": len(reply),
        "hash_in": digest(body),
        "hash_out": digest(reply),
    }
    own = {("what", "answered"), ("time", lines[1]["time"]), ("before", lines[1]["before"])}
    assert lines[1].items() - lines[2].items() <= own
    (refused,) = ask.audited("refused")
    assert (refused["what"], refused["code"]) == ("refused", rpc_errors.MALFORMED)
    assert all(len(json.dumps(line)) < 500 for line in [*lines, refused])
    assert not any(
        "patient" in path.read_text() for path in (ask.host.audit.path, ask.host.audit.refusals)
    )


def test_nothing_is_answered_that_cannot_be_written_down(
    hosts: Callable[..., RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = hosts()
    ask("open", opening())
    body = doing(0, ask.host)

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device: /srv/state/audit.jsonl")

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "_append", full)
        for kind, sent in (("do", body), ("do", body), ("digest", which()), ("open", opening())):
            refusal = ask.refused(kind, sent)
            assert (refusal.code, refusal.words) == (
                rpc_errors.FAILED,
                "this node cannot write its state at present",
            )
    ask("do", body)  # the work was done once, and this answer is written down
    assert ask.audited()[-1]["what"] == "answered again"


def calls(*files: Path) -> list[int]:
    assert all(file.stat().st_size < 1200 for file in files)
    return [json.loads(line)["call"] for file in files for line in file.read_text().splitlines()]


def test_a_full_file_is_kept_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "LARGEST", 1000)
    written = AuditLog(tmp_path / "audit.jsonl")
    for n in range(100):
        written.write("answered", "hub", call=n)
    full = sorted(tmp_path.glob("audit-*Z.jsonl"))
    assert len(full) > 5 and len(list(tmp_path.iterdir())) == len(full) + 1
    assert calls(*full, written.path) == list(range(100))


def test_a_full_file_takes_no_other_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2026, 11, 21, 18, 39, tzinfo=tz)

    monkeypatch.setattr(audit, "LARGEST", 1000)
    monkeypatch.setattr(audit, "datetime", Stopped)
    written = AuditLog(tmp_path / "audit.jsonl")
    for n in range(100):
        written.write("answered", "hub", call=n)
    assert (tmp_path / "audit-20261121T183900.000000Z.jsonl").exists()
    assert sorted(calls(*tmp_path.iterdir())) == list(range(100))


def test_refusals_push_nothing_out_that_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "LARGEST", 1000)
    written = AuditLog(tmp_path / "audit.jsonl")
    written.write("handed over", "peer", call=-1)
    for n in range(100):
        written.refuse("stranger", call=n)
    assert {path.name for path in tmp_path.iterdir()} == {
        "audit.jsonl",
        "refused.jsonl",
        "refused.1.jsonl",
    }
    assert calls(written.path) == [-1]
    newest = calls(tmp_path / "refused.1.jsonl", written.refusals)
    assert newest == list(range(newest[0], 100)) and len(newest) > 6


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    written = AuditLog(tmp_path / "audit.jsonl")
    threads = [
        threading.Thread(
            target=lambda: [written.write("answered", "hub", text="x" * 500) for _ in range(50)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([json.loads(line) for line in written.path.read_text().splitlines()]) == 200


def test_a_caller_cannot_write_a_line_of_its_own(tmp_path: Path) -> None:
    written = AuditLog(tmp_path / "audit.jsonl")
    written.refuse('hub\n{"what": "answered"}\u2028', words='"}\n')
    (line,) = written.refusals.read_bytes().splitlines()
    assert json.loads(line)["what"] == "refused"


def test_the_state_folder_and_what_is_secret_are_the_owners_alone(
    hosts: Callable[..., RunRequest], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "state").mkdir(mode=0o755)
        ask = hosts()
        ask("open", opening())
    finally:
        os.umask(before)
    mode = {
        path.name: path.stat().st_mode & 0o777
        for path in [tmp_path / "state", *(tmp_path / "state").iterdir()]
    }
    assert (mode["state"], mode["secret"], mode["audit.jsonl"]) == (0o700, 0o600, 0o600)


# -- the log ---------------------------------------------------------------------------------------


@pytest.fixture
def logged() -> Iterator[Callable[[str], io.StringIO]]:
    root = logging.getLogger("fedloom")
    before = root.handlers, root.propagate, root.level

    def begin(how: str) -> io.StringIO:
        out = io.StringIO()
        logs.begin(how, out)
        return out

    yield begin
    root.handlers, root.propagate = before[:2]
    root.setLevel(before[2])


def _say(text: Any) -> None:
    log = logging.getLogger("fedloom.node")
    log.debug("not said")
    log.warning("refused a call of %s", text)
    try:
        raise RuntimeError("inside")
    except RuntimeError:
        log.exception("it failed")


def test_a_log_for_machines_is_json(logged: Callable[[str], io.StringIO]) -> None:
    out = logged("json")
    _say('hub\n{"level": "info"}\x1b[2J\ud800')
    first, second = (json.loads(line) for line in out.getvalue().splitlines())
    assert (first["level"], first["logger"]) == ("warning", "fedloom.node") and "trace" not in first
    assert first["message"].startswith("refused a call of hub\n") and first["time"].endswith(
        "+00:00"
    )
    assert second["message"] == "it failed" and "RuntimeError: inside" in second["trace"]


def test_a_log_for_people_has_no_line_that_a_caller_made(
    logged: Callable[[str], io.StringIO],
) -> None:
    out = logged("text")
    _say("hub\r\n2026-01-01 00:00:00,000 INFO fedloom.node: all is well\x1b[2J")
    lines = out.getvalue().splitlines()
    assert "refused a call of hub" in lines[0] and lines[1].startswith("    2026-01-01")
    assert "\x1b" not in out.getvalue() and "    RuntimeError: inside" in out.getvalue()
    assert sum(not line.startswith(" ") for line in lines) == 2


# -- the chain -------------------------------------------------------------------------------------


def chained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A log of 60 lines in several files."""
    monkeypatch.setattr(audit, "LARGEST", 3000)
    for start in (0, 30):  # the node restarts
        written = AuditLog(folder / "audit.jsonl")
        for n in range(30):
            written.write("answered", "hub", call=start + n)
    return [*sorted(folder.glob("audit-*Z.jsonl")), folder / "audit.jsonl"]


def test_the_chain_goes_through_all_files_and_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = chained(tmp_path, monkeypatch)
    assert len(files) > 3
    found = audit.verify(tmp_path)
    assert (found.lines, found.unchained, found.torn) == (60, 0, 0)
    AuditLog(tmp_path / "audit.jsonl").write("answered", "hub", call=60)
    assert audit.verify(tmp_path, noted=found.newest).lines == 61


@pytest.mark.parametrize("what", ["changed", "removed", "inserted", "swapped", "file removed"])
def test_an_edit_of_any_line_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = chained(tmp_path, monkeypatch)[1]
    lines = file.read_bytes().splitlines(keepends=True)
    edits = {
        "changed": [lines[0].replace(b"answered", b"refused "), *lines[1:]],
        "removed": lines[1:],
        "inserted": [lines[0], *lines],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "file removed": [],
    }
    file.write_bytes(b"".join(edits[what]))
    if what == "file removed":
        file.unlink()
    with pytest.raises(CheckpointError, match="changed, removed or inserted"):
        audit.verify(tmp_path)


def test_lines_cut_from_the_end_are_found_by_a_hash_that_was_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, noted = chained(tmp_path, monkeypatch)[-1], audit.verify(tmp_path).newest
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert audit.verify(tmp_path).lines == 59
    with pytest.raises(CheckpointError, match="lines at the end were removed"):
        audit.verify(tmp_path, noted)


def test_a_line_that_a_crash_cut_off_stays_in_the_chain(tmp_path: Path) -> None:
    written = AuditLog(tmp_path / "audit.jsonl")
    written.write("answered", "hub", call=0)
    with written.path.open("ab") as file:
        file.write(b'{"time": "2026-11-')
    again = AuditLog(tmp_path / "audit.jsonl")
    again.write("answered", "hub", call=1)
    again.write("answered", "hub", call=2)
    found = audit.verify(tmp_path)
    assert (found.lines, found.torn) == (3, 1)


def test_lines_of_an_earlier_version_are_reported_apart(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").write_text('{"what": "opened"}\n{"what": "answered"}\n')
    AuditLog(tmp_path / "audit.jsonl").write("answered", "hub", call=1)
    found = audit.verify(tmp_path)
    assert (found.lines, found.unchained) == (1, 2)
    with pytest.raises(CheckpointError, match=r"no audit\.jsonl"):
        audit.verify(tmp_path / "nowhere")


def refusals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Refusals in two files, of which older ones were dropped; and one answered call."""
    monkeypatch.setattr(audit, "LARGEST", 3000)
    written = AuditLog(folder / "audit.jsonl")
    written.write("answered", "hub", call=0)
    for n in range(60):
        written.refuse("hub", call=n)
    return [folder / "refused.1.jsonl", folder / "refused.jsonl"]


def test_refused_calls_have_a_chain_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = refusals(tmp_path, monkeypatch)
    kept = sum(len(file.read_text().splitlines()) for file in files)
    found = audit.verify(tmp_path)
    assert (found.lines, found.refusals) == (1, kept) and 10 < kept < 60
    last = files[1].read_bytes().splitlines()[-1]
    assert audit.verify(tmp_path, noted=hashlib.sha256(last).hexdigest()) == found


def test_an_edit_of_the_newest_refusal_is_found_by_its_noted_hash(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit.jsonl")
    log.write("opened", "hub")
    log.refuse("hub", words="the run has 4000 rounds")
    found = audit.verify(tmp_path)
    noted = (found.newest, found.newest_refusal)
    assert audit.verify(tmp_path, noted) == found
    log.refusals.write_bytes(log.refusals.read_bytes().replace(b"4000", b"400"))
    audit.verify(tmp_path)  # nothing follows that line
    with pytest.raises(CheckpointError, match="no line has the hash"):
        audit.verify(tmp_path, noted)


@pytest.mark.parametrize("what", ["changed", "removed", "file removed"])
def test_an_edit_of_a_refusal_is_found(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = refusals(tmp_path, monkeypatch)
    lines = old.read_bytes().splitlines(keepends=True)
    lines[3:4] = [lines[3].replace(b"hub", b"bub")] if what == "changed" else []
    old.write_bytes(b"".join(lines))
    if what == "file removed":
        old.unlink()
    with pytest.raises(CheckpointError, match="changed, removed or inserted"):
        audit.verify(tmp_path)
