"""The store: what is read is what was written, whole; and every round that the coordinator has
saved is a way back.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.remote.node import process
from fedloom.remote.node.store import UNPLACED, Store, StoredState, lock_folder, prune
from tests.node.hosts import node

FACTS = {"caller": "hub", "start": 1, "party": 0, "addresses": {}, "config": "{}"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "run")
    made.write(entry(-1, -1))
    made.begin(FACTS)
    return made


def entry(call: int, round: int, start: int = 1, reply: bytes = b"") -> StoredState:
    return StoredState(
        start, call, round, reply, {"x": torch.tensor([float(call), float(round)]), "n": call}
    )


def same(a: StoredState | None, b: StoredState | None) -> bool:
    if a is None or b is None:
        return a is b
    plain = (a.start, a.call, a.round, a.reply) == (b.start, b.call, b.round, b.reply)
    return plain and message.digest(a.state) == message.digest(b.state)


def test_what_was_written_is_read(store: Store) -> None:
    assert same(store.read(), entry(-1, -1)) and store.read("end") is None
    store.write(entry(3, 1, reply=b"answer"))
    assert same(store.read(), entry(3, 1, reply=b"answer"))
    facts = store.facts()
    assert facts is not None and facts.items() >= FACTS.items()


@settings(max_examples=60)
@given(st.data())
def test_a_file_that_was_altered_anywhere_is_noticed(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.write(entry(3, 1, reply=b"answer"))
        path = Path(folder) / "state"
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        how = data.draw(st.sampled_from(["cut", "flip", "longer", "empty"]))
        torn = {
            "cut": whole[:at],
            "flip": whole[:at]
            + bytes([whole[at] ^ data.draw(st.integers(1, 255))])
            + whole[at + 1 :],
            "longer": whole + b"\0",
            "empty": b"",
        }[how]
        path.write_bytes(torn)
        with pytest.raises(CheckpointError, match="is damaged"):
            store.read()


def test_a_foreign_file_with_a_good_sum_is_no_state(store: Store) -> None:
    for body in (
        b"",
        b"\1\0\0\0\0\0\0\0x",
        *(
            len(m).to_bytes(8, "little") + m
            for m in (message.encode([1]), message.encode({"start": 1}))
        ),
    ):
        (store.folder / "state").write_bytes(body + hashlib.blake2b(body).digest())
        with pytest.raises(CheckpointError, match="is not a node's state"):
            store.read()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"version": "0.0.0"}', '{"caller": "hub"}', "\0\xff"]
)
def test_a_run_of_another_version_or_none_is_not_taken_up(text: str, store: Store) -> None:
    (store.folder / "run.json").write_text(text, encoding="latin-1")
    assert store.facts() is None
    store.mark(0, [])
    store.set_aside(marks=True)  # nor does anything lead back to it
    assert store.read() is None and store.before(0) is None


def test_a_disk_that_refuses_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store.write(entry(1, 0))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(entry(2, 0))
    with pytest.raises(OSError, match="No space"):
        store.begin({**FACTS, "start": 2})
    monkeypatch.setattr(os, "fsync", real)
    facts = store.facts()
    assert same(store.read(), entry(1, 0)) and facts is not None and facts["start"] == 1


def test_a_file_system_without_links_has_marks_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", none)
    store.mark(0, [])
    store.write(entry(1, 0))
    assert same(store.before(0), entry(-1, -1))


@pytest.mark.parametrize("links", [True, False])
def test_a_mark_lasts_until_another_takes_its_place(
    links: bool, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill at any step of it leaves the old one: here each step refuses, one after the other."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    store.mark(0, [])
    store.write(entry(1, 0))
    for step in ("replace",) if links else ("fsync", "replace"):
        with monkeypatch.context() as broken:
            broken.setattr(os, step, refuse)
            with pytest.raises(OSError, match="Input/output"):
                store.mark(0, [])
        assert same(store.before(0), entry(-1, -1))
    for _ in range(2):  # the second time both are one file
        store.mark(0, [])
        assert same(store.before(0), entry(1, 0))
        assert {path.name for path in store.folder.iterdir()} - {".mark-0.draft"} == {
            "run.json",
            "state",
            "mark-0",
        }


def test_a_rollback_that_is_cut_short_can_be_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    store.mark(3, [])
    store.write(entry(1, 3))
    for step in ("_link", "_unlink"):
        with monkeypatch.context() as cut:
            cut.setattr(store, step, killed)
            with pytest.raises(KeyboardInterrupt):
                store.go_back(3, entry(-1, -1))
        assert same(store.before(3), entry(-1, -1)) and same(store.read(), entry(-1, -1))


def test_a_mark_is_not_changed_by_what_is_written_later(store: Store) -> None:
    store.mark(0, [])
    store.write(entry(1, 0))
    store.mark(1, [0])
    store.write(entry(2, 1))
    assert same(store.before(0), entry(-1, -1)) and same(store.before(1), entry(1, 0))


def test_files_that_are_not_ours_are_let_be(store: Store) -> None:
    for name in ("mark-old", "mark-", "notes.txt"):
        (store.folder / name).write_text("mine")
    store.mark(0, [])
    store.set_aside(marks=False)
    assert (
        (store.folder / "notes.txt").exists() and store.read() is None and store.before(0) is None
    )


def test_a_torn_state_does_not_prevent_a_new_start(store: Store) -> None:
    store.mark(0, [])
    store.write(entry(1, 0))
    (store.folder / "state").write_bytes(b"torn")
    store.set_aside(marks=True)
    assert store.read() is None and store.read("end") is None
    assert same(store.before(0), entry(-1, -1))


def test_two_processes_do_not_work_on_one_folder(tmp_path: Path) -> None:
    config, over = node(tmp_path), threading.Event()

    def waited() -> bool:
        with lock_folder(config.state, wait=True):
            return over.is_set()

    with ThreadPoolExecutor(1) as pool:
        with lock_folder(config.state):
            other = pool.submit(waited)
            with pytest.raises(ConfigError, match="another process uses"):
                asyncio.run(asyncio.wait_for(process.run_node(config), 90))
            assert not (config.state / "secret").exists()
            over.set()
        assert other.result(90)


def test_the_newest_runs_are_kept_and_those_in_use(tmp_path: Path) -> None:
    for n in range(6):
        (tmp_path / f"run-{n}").mkdir()
        os.utime(tmp_path / f"run-{n}", (n, n))
    (tmp_path / "run-file").write_text("no folder")
    (tmp_path / "audit.jsonl").write_text("")
    prune(tmp_path, 2, {"0"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "audit.jsonl",
        "run-0",
        "run-4",
        "run-5",
        "run-file",
    ]


def test_the_runs_of_one_coordinator_do_not_drive_out_those_of_another(tmp_path: Path) -> None:
    for n, caller in enumerate(["hub", "hub", "second", "hub", "second", "second", "second"]):
        store = Store(tmp_path / f"run-{n}")
        store.folder.mkdir()
        store.begin({**FACTS, "caller": caller})
        os.utime(store.folder, (n, n))
    prune(tmp_path, 2, {"6"})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run-1",
        "run-3",
        "run-4",
        "run-5",
        "run-6",
    ]


def test_runs_that_have_not_changed_for_days_are_deleted(tmp_path: Path) -> None:
    for n, days in enumerate([0, 3, 5, 9]):
        (tmp_path / f"run-{n}").mkdir()
        os.utime(tmp_path / f"run-{n}", (changed := time.time() - 86_400 * days, changed))
    assert prune(tmp_path, 9, {"3"}, 4) == [("None", "2")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-0", "run-1", "run-3"]


class Coordinators(RuleBasedStateMachine):
    """Starts of a coordinator, one after the other, against the store of a node: rounds,
    checkpoints, crashes.

    The model is a list: the state before each round of the rounds that count. A coordinator keeps
    its last two checkpoints, and may begin again from either; then all that was later has not
    happened.
    """

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.store = Store(self.folder / "run")
        self.start, self.call, self.round = 1, -1, 0
        self.before: list[int] = []
        self.saved: list[int] = [0]
        self.now = -1
        self.store.write(self._entry())
        self.store.begin({**FACTS, "start": 1})

    def _entry(self) -> StoredState:
        return StoredState(self.start, self.call, self.round - 1, b"", {"n": self.now})

    @rule(calls=st.integers(1, 2))
    def a_round(self, calls: int) -> None:
        self.store.mark(self.round, self.saved)
        assert len(list(self.store.folder.glob("mark-*"))) <= len({self.round, *self.saved})
        self.before = [*self.before[: self.round], self.now]
        self.round += 1
        for _ in range(calls):
            self.call += 1
            self.now = self.start * 1000 + self.call
            self.store.write(self._entry())

    @rule()
    def a_round_without_it(self) -> None:
        self.before = [*self.before[: self.round], self.now]
        self.round += 1

    @rule()
    def a_checkpoint(self) -> None:
        if self.saved[-1] != self.round:
            self.saved = [*self.saved[-1:], self.round]

    @precondition(lambda self: self.saved)
    @rule(older=st.booleans())
    def a_crash(self, older: bool) -> None:
        back = self.saved[0] if older else self.saved[-1]
        self.start, self.call = self.start + 1, -1
        self.store.set_aside(marks=True)
        self.store.write(StoredState(self.start, UNPLACED, -1, b"", {"n": -1}))
        self.store.begin({**FACTS, "start": self.start})
        expected = [*self.before, self.now][back]
        found = self.store.before(back)
        if found is None:
            assert back == 0 and expected == -1  # nothing had happened: as it is at first
            found = self.store.read()
        assert found is not None and found.state == {"n": expected}
        self.round, self.now = back, expected
        self.saved = [n for n in self.saved if n <= back]
        self.store.go_back(back, self._entry())

    @invariant()
    def the_state_is_what_was_last_written(self) -> None:
        found = self.store.read()
        assert found is not None and found.state == {"n": self.now}

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TestCoordinators = Coordinators.TestCase
TestCoordinators.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
