"""Lines that are slow, lossy, late or spied upon, and a relay that dies: the numbers are those of one machine."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.api import execute
from fedloom.core import message
from fedloom.experiment.config import EngineConfig
from fedloom.remote import payload
from tests.net.calls import Caller, Transport
from tests.net.nodes import federation, loop
from tests.net.processes import Machines, machines, run_of, until
from tests.net.proxy import TO_CALLER, proxy
from tests.net.test_faults import after, in_background, same


def ledger(folder: Path) -> list[dict[str, str]]:
    """What a run says that crossed."""
    with (folder / "ledger.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "line",
    [{"delay": 0.05}, {"rate": 200e3}, {"budget": 60e3}, {"delay": 0.01, "rate": 500e3, "budget": 100e3}],
    ids=["late", "slow", "lossy", "all at once"],
)
@pytest.mark.parametrize("method", ["gossip", "fedal"])
def test_a_bad_line_changes_no_number(method: str, line: dict[str, float], field: Machines, tmp_path: Path) -> None:
    """Peers use these lines, too. Nothing is lost, and nothing counted twice."""
    run = run_of(method, rounds=2)
    here = execute(run, tmp_path / "here")
    for node in field.nodes:
        vars(node.line).update(line)
    there = execute(field.over(run), tmp_path / "there")
    same(there.summary, here.summary)
    assert there.metrics == here.metrics
    assert ledger(tmp_path / "there") == ledger(tmp_path / "here")
    for node in field.nodes:
        calls = [(a["call"], a["method"]) for a in node.audit(run=node.runs()[-1].name.removeprefix("run-"))]
        assert len(calls) == len(set(calls))


def test_a_slow_line_is_not_taken_for_a_dead_one(field: Machines) -> None:
    """A large call takes far longer than a dead node would be given, and small calls pass it."""
    node = field.nodes[0]
    wire = Transport(field.loop, field.member(0), field.credentials())
    caller = Caller(wire.ask, run_of("gossip"))
    caller.open()
    node.line.rate = 300e3
    base = node.line.passed[0]
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(caller.do, 1, large=torch.zeros(900_000))
        until(lambda: node.line.passed[0] > base + 500e3, "a part of the large call")
        small = 0
        while not large.done():
            caller.sha256()
            small += not large.done()
        large.result()
    assert small > 3
    assert wire.came_or_went == [True]
    node.line.straight()
    caller.close()
    wire.close()


def test_small_calls_pass_a_large_answer(field: Machines) -> None:
    """A peer fetches over a line that it shares with the coordinator."""
    node = field.nodes[0]
    ours, peers = (
        Transport(field.loop, field.member(0), field.credentials(name)) for name in ("coordinator", "node-1")
    )
    caller = Caller(ours.ask, run_of("gossip", models={"pool": ["mlp-large"]}), addresses={"1": field.member(1)})
    caller.open()
    key = payload.unpack(caller.do(1, "give", leave=True))[0]["lines"][0]["reply_ref"]
    node.line.rate = 100e3
    with ThreadPoolExecutor(1) as pool:
        fetched = pool.submit(peers.ask, "fetch", payload.pack({"run": caller.run, "key": key}), "one")
        base, passed = node.line.passed[TO_CALLER], 0
        until(lambda: node.line.passed[TO_CALLER] > base + 5e4, "a part of the answer")
        while not fetched.done():
            caller.sha256()
            passed += not fetched.done()
        assert len(fetched.result()) > 2e5
    assert passed > 0
    assert ours.came_or_went == peers.came_or_went == [True]
    node.line.straight()
    caller.close()
    for wire in (ours, peers):
        wire.close()


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Two nodes behind a relay."""
    with machines(tmp_path_factory.mktemp("hidden"), 2, behind_relay=True) as made:
        yield made


def weights_sent(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Pieces of all that peers give each other in a run of gossip."""
    found: list[bytes] = []
    encode = message.encode

    def listen(tree: Any, *more: Any) -> bytes:
        data = encode(tree, *more)
        if isinstance(tree, dict) and "weights" in tree:
            found.extend(x.numpy().tobytes()[:48] for x in tree["weights"].values() if x.numel() >= 12 and x.any())
        return data

    with monkeypatch.context() as patch:
        patch.setattr(message, "encode", listen)
        execute(run.model_copy(update={"engine": EngineConfig(name="isolated")}))
    return found


def test_a_relay_sees_nothing_and_may_die(hidden: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers behind it exchange models. It is killed in the middle and started again: the numbers are the same."""
    monkeypatch.setattr("fedloom.remote.rpc_client.SILENCE", 60.0)
    run = run_of("gossip", rounds=5, clients=2)
    here = execute(run)

    def strike() -> None:
        assert hidden.relay is not None
        hidden.relay.kill()
        hidden.start_relay()

    struck: list[Any] = []
    steps = {2: lambda: struck.append(in_background(strike)), 3: lambda: struck[0]()}
    there = execute(hidden.over(run), progress=after(steps))
    same(there.summary, here.summary)

    pieces = weights_sent(run, monkeypatch)
    assert len(pieces) >= 20
    tapped = (hidden.folder / "tapped").read_bytes()
    assert len(tapped) > 100_000  # all of it went through there
    config = run.data.name.encode()
    assert not [piece for piece in [*pieces, b"weights", b"gossip", config] if piece in tapped]


def test_what_would_be_seen_on_a_line_without_a_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pieces are found where nothing is sealed: so the search in the relay's hands finds what is there."""
    run = run_of("gossip", rounds=2, clients=2)
    seen = bytearray()
    with federation(tmp_path, 2) as (path, nodes), loop() as own, proxy(own, nodes[0].port) as line:
        line.tap = lambda _, data: seen.extend(data)
        path.write_text(path.read_text().replace(f":{nodes[0].port}", f":{line.port}"))
        execute(run.model_copy(update={"engine": EngineConfig(name="net", federation=str(path))}))
    pieces = weights_sent(run, monkeypatch)
    found = [piece for piece in pieces if piece in bytes(seen)]
    assert len(found) >= len(pieces) // 4  # those of the one node
    assert b"weights" in seen and b"gossip" in seen
