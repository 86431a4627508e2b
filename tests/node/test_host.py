"""A host against callers that mean ill: only refusals come out, and what it knows
stays as it was.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedloom.core import message
from fedloom.core.engine import Failure
from fedloom.core.errors import ConfigError
from fedloom.core.party import Party
from fedloom.remote import loop, payload, rpc_errors
from fedloom.remote.node import service as hosting
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.peer_fetcher import MOST_TASKS
from fedloom.remote.node.process import CoordinatorLink
from fedloom.remote.node.service import NodeService
from fedloom.remote.node.store import Store
from fedloom.remote.node.task_runner import line as left
from fedloom.remote.rpc_errors import CallRefused
from tests.node.hosts import RUN, RunRequest, config, doing, fetched, node, opening, which

KINDS = ("open", "restore", "do", "digest", "close", "peer", "", "_open", "answer", "\0")
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**62,
    -(2**63),
    0.5,
    -1e308,
    "",
    "x",
    "../../etc",
    "A" * 32,
    "0" * 32,
    [],
    {},
    [[]],
    [None],
    {"": 0},
    {"each": 0},
    [{"each": None}],
    ["x", 1],
    torch.zeros(3),
    torch.tensor(float("nan")),
)


@pytest.fixture
def ask(hosts: Callable[..., RunRequest]) -> RunRequest:
    made = hosts()
    made("open", opening())
    made("do", doing(0, made.host))
    return made


def known(ask: RunRequest) -> tuple[Any, ...]:
    """All that a host knows of its run, in memory and on disk."""
    node_run = ask.host._node_runs[RUN]
    folder = ask.config.state / f"run-{RUN}"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return message.digest(node_run.party.state()), node_run.last, node_run.start, files


@pytest.mark.parametrize("kind", ["do", "open", "nonsense"])
def test_a_refused_call_leaves_its_bytes_nowhere(kind: str, ask: RunRequest) -> None:
    """Neither in the frames of its refusal, of which there would be as many as a
    coordinator likes.
    """
    link, answered = object.__new__(CoordinatorLink), list[bytes]()
    link.name, link._service = "hub", ask.host
    link._client = SimpleNamespace(roles=())  # type: ignore[assignment]

    async def said(kind: str, body: bytes) -> bytes:
        answered.append(body)
        return b""

    link._ask = said
    gc.disable()
    try:
        body = payload.pack({"x": 1}, bytes(1 << 20))
        before = sys.getrefcount(body)
        for number in range(3):
            ask._loop.run_until_complete(
                link._answer({"hub": "h", "number": number, "kind": kind}, body)
            )
        assert len(answered) == 3 and sys.getrefcount(body) == before
    finally:
        gc.enable()


def test_any_bytes_of_any_kind_are_refused_and_change_nothing(ask: RunRequest) -> None:
    before = known(ask)
    chance = random.Random(0)
    good = [opening(), doing(1, ask.host), which(), which(round=0)]
    for n in range(400):
        body = (
            bytearray(chance.choice(good))
            if n % 2
            else bytearray(chance.randbytes(chance.randrange(60)))
        )
        for _ in range(chance.randrange(1, 4)):
            if body:
                body[chance.randrange(len(body))] = chance.randrange(256)
        if chance.random() < 0.3:
            del body[chance.randrange(len(body) + 1) :]
        kind = (
            chance.choice(["restore", "digest", "peer", "", "x"]) if n % 2 else chance.choice(KINDS)
        )
        try:
            ask(kind, bytes(body), chance.choice(["hub", "peer", "stranger", "second"]))
        except CallRefused as refusal:
            assert (
                refusal.code in rpc_errors.CODES
                and refusal.words.isprintable()
                and len(refusal.words) < 300
            )
        else:
            assert kind == "digest"  # a byte that did not matter
    assert known(ask) == before


FITTING: dict[str, Callable[[Any], bool]] = {
    "call": lambda value: type(value) is int and value >= 0,
    "round": lambda value: type(value) is int and value == 0,
    "tasks": lambda value: isinstance(value, list) and not value,
    "leave": lambda value: value is True,
    "deadline": lambda value: type(value) is float and value > 0,
}
"""What a field may be of `VALUES`; of the others none fits."""


@pytest.mark.parametrize(
    "field", ["run", "start", "call", "round", "method", "tasks", "leave", "deadline"]
)
def test_a_call_with_any_wrong_field_is_refused_and_changes_nothing(
    field: str, ask: RunRequest
) -> None:
    before = known(ask)
    fits = FITTING.get(field, lambda _: False)
    for value in VALUES:
        if not fits(value):
            ask.refused("do", doing(**{"call": 1, "host": ask.host, field: value}))
            assert known(ask) == before, value


def _refusal(ask: RunRequest, kind: str, body: bytes) -> CallRefused | None:
    try:
        ask(kind, body)
    except CallRefused as refusal:
        return refusal
    return None


@pytest.mark.parametrize("field", ["each", "reply_refs", "fault", "seed"])
def test_a_task_with_any_wrong_field_is_refused_or_fails_alone(field: str, ask: RunRequest) -> None:
    for value in VALUES:
        before = known(ask)
        task = {"each": None, "reply_refs": {}, "fault": None, "seed": 7, field: value}
        if _refusal(ask, "do", doing(99, ask.host, tasks=[task])) is not None:
            assert known(ask) == before, value
        else:  # it was worked on; and the number of the call is used up
            assert ask.host._node_runs[RUN].last.call == 99
            ask("restore", which(round=0))
            ask("do", doing(0, ask.host))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": "../../../../tmp/x"},
        {"run": RUN.upper()},
        {"run": RUN[:-1]},
        {"run": RUN + "\n"},
        {"run": ""},
        {"version": "0.0.0"},
        {"version": "\n" * 60_000},
        {"protocol": 1},
        {"party": -1},
        {"party": 3},
        {"party": 2**62},
        {"addresses": []},
        {"addresses": {"1": {}}},
        {"members": {"1": 3}},
        {"resume": 1},
        {"start": 1.0},
    ],
)
def test_an_opening_that_does_not_fit_is_refused(
    changes: dict[str, Any], hosts: Callable[..., RunRequest]
) -> None:
    ask = hosts()
    refusal = ask.refused("open", opening(**changes))
    assert refusal.code in (rpc_errors.MALFORMED, rpc_errors.MISMATCH, rpc_errors.FAILED)
    assert len(refusal.words) < 200
    assert not list(ask.config.state.glob("run-*")) and not ask.host._node_runs


def test_no_text_of_an_exception_comes_out(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("patient 7: SECRET")

    monkeypatch.setattr(hosting, "work", fail)
    refusal = ask.refused("do", doing(1, ask.host))
    assert (refusal.code, refusal.words, refusal.detail) == (
        rpc_errors.FAILED,
        "this node failed to answer; the reason is in its log",
        "",
    )
    assert refusal.__cause__ is None
    assert "SECRET" not in ask.host.audit.path.read_text()


@pytest.mark.parametrize(
    "method", ["_undo", "state", "load", "own_state", "take_notes", "net", "__init__", "nothing"]
)
def test_only_what_a_page_defines_can_be_called(method: str, ask: RunRequest) -> None:
    before = known(ask)
    refusal = ask.refused("do", doing(1, ask.host, method=method))
    assert refusal.code in (rpc_errors.REFUSED, rpc_errors.MALFORMED)
    assert known(ask) == before


@pytest.mark.parametrize("leave", [False, True])
@pytest.mark.parametrize("method", ["load_personal", "personalize", "proximal_loss", "snapshot"])
def test_helpers_of_a_page_are_not_called(
    method: str, leave: bool, hosts: Callable[..., RunRequest]
) -> None:
    ask = hosts(methods=["ditto"])
    ask(
        "open",
        opening(config(method="ditto", **{"models.pool": ["mlp"]}, params={"batch_size": 8})),
    )
    before = known(ask)
    assert callable(getattr(ask.host._node_runs[RUN].party, method))
    refusal = ask.refused("do", doing(1, ask.host, method=method, leave=leave))
    assert (refusal.code, "no such method in CALLS" in refusal.words) == (rpc_errors.REFUSED, True)
    assert known(ask) == before


@pytest.fixture
def holder(hosts: Callable[..., RunRequest]) -> RunRequest:
    """A host whose party holds columns."""
    ask = hosts(methods=["split"], data={"mine": {"dataset": "digits"}})
    columns = {"aligned": 24, "unaligned": 20}
    text = config(
        method="split",
        columns=columns,
        params={"batch_size": 8},
        data={"name": "mine", "clients": 3},
    )
    ask("open", opening(text, party=1))
    return ask


def test_rows_of_a_holder_are_not_called_for(holder: RunRequest) -> None:
    before = known(holder)
    for method in ("infer", "forward", "descend", "gradient", "state"):
        assert callable(getattr(holder.host._node_runs[RUN].party, method))
        body = doing(0, holder.host, method=method)
        assert "no such method in CALLS" in holder.refused("do", body).words
    assert known(holder) == before


def test_a_contribution_is_for_the_test_people_however_it_is_asked_for(holder: RunRequest) -> None:
    before, test, aligned = known(holder), {"on": "test"}, {"on": "aligned"}

    def asking(**changes: Any) -> bytes:
        return doing(
            0, holder.host, **{"method": "contribution", "round": -1, "shared": test, **changes}
        )

    for body in (
        asking(shared=aligned),
        asking(each=(aligned,)),
        asking(each=(test, aligned)),
        asking(shared={}),
    ):
        assert "for test rows only" in holder.refused("do", body).words
    assert "must have round -1" in holder.refused("do", asking(round=0)).words
    assert "reply" in payload.unpack(holder("do", asking()))[0]["lines"][0]
    assert known(holder) == before


def test_a_page_that_names_no_calls_is_not_worked_for(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = known(ask)
    monkeypatch.setattr(type(ask.host._node_runs[RUN].party), "CALLS", ())
    assert "list callable methods in CALLS" in ask.refused("do", doing(1, ask.host)).words
    assert known(ask) == before


def test_who_may_not_is_reported_nothing_of_what_there_is(ask: RunRequest) -> None:
    """Another coordinator, a peer that is in no run, and a stranger hear the same of a run and of
    none.
    """
    for caller in ("second", "peer", "stranger"):
        for kind in ("digest", "restore", "do", "peer", "close"):
            for run in (RUN, "f" * 32):
                bodies = {
                    "do": doing(1, ask.host, run=run),
                    "peer": payload.pack({"peer": "peer", "run": run, "session": ""}, b""),
                    "restore": which(run=run, round=0),
                    "close": which(run=run, finished=True),
                }
                said = []
                try:
                    ask(kind, bodies.get(kind, which(run=run)), caller)
                except CallRefused as refusal:
                    said.append((refusal.code, refusal.words))
                if kind == "close" and caller == "second":
                    assert not said
                else:
                    assert len(said) == 1
                if run == RUN:
                    heard = said
            assert said == heard
    assert RUN in ask.host._node_runs


@pytest.mark.parametrize("text", ["", "short", "g" * 32, "0" * 33])
def test_a_secret_that_is_none_stops_the_node(text: str, tmp_path: Path) -> None:
    config: NodeConfig = node(tmp_path)
    config.state.mkdir()
    (config.state / "secret").write_text(text)
    with pytest.raises(ConfigError, match="is not a secret"):
        NodeService(config)


def test_a_secret_is_the_same_for_ever(tmp_path: Path) -> None:
    first, again = NodeService(node(tmp_path)), NodeService(node(tmp_path))
    other = NodeService(node(tmp_path / "other"))
    assert first._secret == again._secret != other._secret
    assert NodeService(node(tmp_path, secret_noise=False))._secret is None


def test_a_note_that_is_not_finite_is_left_out_and_undoes_nothing(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    inf, nan = float("inf"), float("nan")
    noted = {
        "loss": inf,
        "gap": nan,
        "mixing": [0.5, nan],
        "norm": 1.5,
        "weights": [0.25, 0.75],
        "none": [],
    }
    monkeypatch.setattr(Party, "take_notes", lambda _: dict(noted))
    before = known(ask)
    head, replies = payload.unpack(ask("do", doing(1, ask.host, round=1)))
    assert head["notes"] == {"norm": 1.5, "weights": [0.25, 0.75], "none": []}
    assert (
        len(replies) == 1 and ask.host._node_runs[RUN].last.call == 1 and known(ask)[0] != before[0]
    )


def test_work_that_cannot_be_undone_does_not_stay_in_memory(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_run = ask.host._node_runs[RUN]
    before, body = message.digest(node_run.party.state()), doing(1, ask.host, round=1)

    def full(*_: object) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "write", full)
        broken.setattr(Store, "read", full)
        assert ask.refused("do", body).code == rpc_errors.FAILED
    assert message.digest(node_run.party.state()) != before
    assert node_run.over and RUN not in ask.host._node_runs
    assert payload.unpack(ask("digest", which()))[0]["sha256"] == before  # as it is on disk
    ask("do", body)
    assert ask.host._node_runs[RUN].last.call == 1


def test_a_rollback_that_fails_leaves_nothing_in_memory_either(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = message.digest(ask.host._node_runs[RUN].party.state())

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Store, "go_back", full)
        assert ask.refused("restore", which(round=0)).code == rpc_errors.FAILED
    assert payload.unpack(ask("digest", which()))[0]["sha256"] == before


def test_heavy_work_is_not_done_in_the_thread_of_the_network(
    hosts: Callable[..., RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: dict[str, set[threading.Thread]] = {}

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*given: Any) -> Any:
            where.setdefault(name, set()).add(threading.current_thread())
            return real(*given)

        monkeypatch.setattr(owner, name, watched)

    monkeypatch.setattr(loop, "SMALL", 0)  # every message counts as large
    watch(Store, "read")
    watch(hosting, "prune")
    watch(hosting, "digest")
    ask = hosts()
    where.clear()  # before it serves, a node may work in any thread
    ask("open", opening(members={"1": "peer"}))
    body = doing(0, ask.host)
    reply = ask("do", body)
    node_run = ask.host._node_runs[RUN]
    assert ask("do", body) == reply
    key = node_run.leave(0, b"left")
    assert fetched(ask, key) == b"left"
    assert payload.unpack(ask("open", opening(members={"1": "peer"})))[0]["resumed"]
    assert where.keys() == {"read", "prune", "digest"}
    assert threading.current_thread() not in set.union(*where.values())


def test_a_run_that_is_set_aside_is_over_and_can_be_opened_again(ask: RunRequest) -> None:
    old, other = ask.host._node_runs[RUN], "f" * 32
    old.heard -= 1000
    ask("open", opening(run=other), "second")
    assert old.over and [*ask.host._node_runs] == [other]

    async def late() -> None:
        with pytest.raises(CallRefused) as refusal:
            await ask.host._work(lambda: pytest.fail("it was begun"), old)
        assert refusal.value.code == rpc_errors.UNKNOWN

    ask._loop.run_until_complete(late())
    ask.host._node_runs[other].heard -= 1000
    assert payload.unpack(ask("open", opening()))[0]["resumed"]


def test_work_of_a_start_that_another_has_replaced_is_stale(ask: RunRequest) -> None:
    old = ask.host._node_runs[RUN]
    ask("open", opening(start=2))

    async def late() -> None:
        with pytest.raises(CallRefused) as refusal:
            await ask.host._work(lambda: pytest.fail("it was begun"), old)
        assert refusal.value.code == rpc_errors.STALE

    ask._loop.run_until_complete(late())
    ask.host._drop(old)
    assert ask.host._node_runs[RUN].start == 2 and not ask.host._node_runs[RUN].over


def test_an_older_start_does_not_work_on_what_a_newer_one_left_that_was_cut_short(
    ask: RunRequest, hosts: Callable[..., RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, body = payload.unpack(ask("digest", which()))[0], doing(1, ask.host, round=1)

    def killed(*_: object) -> None:
        raise OSError("the machine went down")

    with monkeypatch.context() as cut:
        cut.setattr(Store, "begin", killed)
        assert ask.refused("open", opening(start=2, resume=True)).code == rpc_errors.FAILED
    again = hosts()
    assert again.refused("do", body).code == rpc_errors.UNKNOWN
    assert again.refused("open", opening()).code == rpc_errors.STALE
    again("open", opening(start=2, resume=True))
    again("restore", which(start=2, round=1))
    assert payload.unpack(again("digest", which(start=2)))[0] == wanted


def test_a_party_that_was_never_called_continues_and_one_that_was_lost_does_not(
    hosts: Callable[..., RunRequest],
) -> None:
    ask = hosts()
    long = config(rounds=9)
    ask("open", opening(long))
    wanted = ask("digest", which())
    for start, round in ((2, 1), (3, 1), (4, 5), (5, 5), (6, 8)):
        ask("open", opening(long, start=start, resume=True))
        ask("restore", which(start=start, round=round))
        assert ask("digest", which(start=start)) == wanted
        if start == 4:  # the only one in which it has a part, which does not count in the end
            ask("do", doing(0, ask.host, start=start, round=round))
    shutil.rmtree(ask.config.state / f"run-{RUN}")
    for start in (7, 8):
        ask("open", opening(long, start=start, resume=True))
        assert ask.refused("restore", which(start=start, round=8)).code == rpc_errors.UNKNOWN


def test_a_run_is_closed_even_if_its_model_cannot_be_written(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    node_run = ask.host._node_runs[RUN]
    monkeypatch.setattr(Store, "write_model", full)
    assert ask.refused("close", which(finished=True)).code == rpc_errors.FAILED
    assert node_run.over and not ask.host._node_runs


def test_a_start_in_which_nothing_was_done_leaves_nothing_and_spoils_nothing(
    ask: RunRequest,
) -> None:
    ask("close", which(finished=True))
    model = ask.config.state / f"run-{RUN}" / "model.safetensors"
    learned = model.read_bytes()
    ask("open", opening(start=2, resume=True))
    ask("close", which(start=2, finished=True))
    assert model.read_bytes() == learned
    other = RUN[::-1]
    ask("open", opening(run=other))
    assert (ask.config.state / f"run-{other}").is_dir()
    ask("close", which(run=other, finished=False))
    assert not (ask.config.state / f"run-{other}").exists()


def test_what_is_dropped_for_newer_runs_is_reported(hosts: Callable[..., RunRequest]) -> None:
    idle = hosts(keep_runs=1)
    for n in range(2):
        old = idle.config.state / f"run-{n}"
        old.mkdir(parents=True)
        os.utime(old, (n, n))
    idle("open", opening())
    lines = [
        json.loads(line) for line in (idle.config.state / "audit.jsonl").read_text().splitlines()
    ]
    assert [line["run"] for line in lines if line["what"] == "dropped"] == ["0"]


def test_a_close_that_the_queue_refuses_can_be_asked_again(
    ask: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_run = ask.host._node_runs[RUN]
    with monkeypatch.context() as full:
        full.setattr(ask.host, "_queued", ask.config.queue)
        assert ask.refused("close", which(finished=True)).code == rpc_errors.BUSY
    assert ask.host._node_runs == {RUN: node_run} and not node_run.over
    ask("close", which(finished=True))
    assert (node_run.store.folder / "model.safetensors").exists() and not ask.host._node_runs


def test_a_caller_cannot_fill_the_disk_with_marks(hosts: Callable[..., RunRequest]) -> None:
    ask = hosts()
    ask("open", opening(config(rounds=9)))
    for t in range(6):
        ask("do", doing(t, ask.host, round=t, kept=[*range(t + 1)]))
    marks = {path.name for path in ask.host._node_runs[RUN].store.folder.glob("mark-*")}
    assert marks == {"mark-4", "mark-5"}
    ask("do", doing(6, ask.host, round=6, kept=[0, 1, 4, 5]))
    marks = {path.name for path in ask.host._node_runs[RUN].store.folder.glob("mark-*")}
    assert marks == {"mark-4", "mark-5", "mark-6"}


def test_what_is_left_for_peers_has_a_bound(ask: RunRequest) -> None:
    node_run, reply = ask.host._node_runs[RUN], {"x": torch.zeros(100)}

    def line(call: int) -> Any:
        return left(node_run, reply, True, object, call, [], 2 * ask.config.max_message_mb << 20)

    assert set(line(1)) == {"reply_ref", "what", "payload", "wire"}
    each = node_run.left_bytes
    assert each > 400
    node_run.left_bytes = (2 * ask.config.max_message_mb << 20) - each
    assert "reply_ref" in line(2)
    assert line(3) == {"failure": rpc_errors.BUSY, "injected": False} and len(node_run.left) == 2
    node_run.hold(2, 4)  # the first was taken
    assert node_run.left_bytes == each and "reply_ref" in line(4)
    node_run.hold(2, 4)  # the last was undone
    assert [call for call, _ in node_run.left.values()] == [2] and node_run.left_bytes == each
    failed = left(node_run, Failure("raised"), True, object, 5, [], 0)
    assert failed == {"failure": "raised", "injected": False}


def test_a_call_has_a_bound_of_tasks(ask: RunRequest) -> None:
    task = {"each": None, "reply_refs": {}, "fault": None, "seed": 7}
    before = known(ask)
    refusal = ask.refused("do", doing(1, ask.host, tasks=[task] * (MOST_TASKS + 1)))
    assert refusal.code == rpc_errors.TOO_LARGE and known(ask) == before


def test_work_beyond_its_deadline_is_interrupted_and_undone(
    hosts: Callable[..., RunRequest],
) -> None:
    """Training that would take days; the deadline is the coordinator's, or the node's own."""
    for changes, deadline in (({}, 0.5), ({"max_call_seconds": 0.5}, 1e6)):
        ask = hosts(**changes)
        ask("open", opening(config(**{"params.epochs": 10**6})))
        before = message.digest(ask.host._node_runs[RUN].party.state())
        refusal = ask.refused("do", doing(1, ask.host, deadline=deadline))
        assert refusal.code == rpc_errors.LATE
        assert message.digest(ask.host._node_runs[RUN].party.state()) == before
        assert payload.unpack(ask("digest", which()))[0] == {"sha256": before}  # and it goes on
        ask("close", which(finished=True))


def test_a_step_that_leaves_no_finite_weights_is_undone_and_refused(
    hosts: Callable[..., RunRequest],
) -> None:
    ask = hosts()
    ask("open", opening(config(**{"params.lr": 1e38})))
    before = message.digest(ask.host._node_runs[RUN].party.state())
    refusal = ask.refused("do", doing(1, ask.host))
    assert refusal.code == rpc_errors.REFUSED and "not finite; nothing was changed" in refusal.words
    assert message.digest(ask.host._node_runs[RUN].party.state()) == before


def test_closing_a_node_ends_the_work_in_progress(hosts: Callable[..., RunRequest]) -> None:
    ask = hosts()
    ask("open", opening(config(**{"params.epochs": 10**6})))

    async def close() -> None:
        asked = asyncio.ensure_future(ask.host.answer("hub", "do", doing(1, ask.host)))
        while ask.host._limit is None or ask.host._limit._thread is None:
            await asyncio.sleep(0.01)
        await ask.host.close()
        with pytest.raises(CallRefused):
            await asyncio.wait_for(asked, 120)

    ask._loop.run_until_complete(close())
