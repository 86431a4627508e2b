"""Lines that are slow, lossy, late or spied upon: the numbers are those of one machine."""

from __future__ import annotations

import csv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.api import execute
from fedloom.core import message
from fedloom.experiment.config.run import EngineConfig
from fedloom.remote.hub import Hub
from tests.net.calls import Caller, Transport
from tests.net.nodes import federation
from tests.net.processes import Machines, run_of, until
from tests.net.test_faults import same, same_metrics


def ledger(folder: Path) -> list[dict[str, str]]:
    """What a run says that crossed."""
    with (folder / "ledger.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.each_time("gossip-lossy", "fedal-all at once")
@pytest.mark.parametrize(
    "line",
    [
        {"delay": 0.05},
        {"rate": 200e3},
        {"budget": 60e3},
        {"delay": 0.01, "rate": 500e3, "budget": 100e3},
    ],
    ids=["late", "slow", "lossy", "all at once"],
)
@pytest.mark.parametrize("method", ["gossip", "fedal"])
def test_a_bad_line_changes_no_number(
    method: str, line: dict[str, float], field: Machines, tmp_path: Path
) -> None:
    """Peers use these lines, too. Nothing is lost, and nothing counted twice."""
    run = run_of(method, rounds=2)
    here = execute(run, tmp_path / "here")
    for node in field.nodes:
        vars(node.line).update(line)
    there = execute(field.over(run), tmp_path / "there")
    same(there.summary, here.summary)
    same_metrics(there.metrics, here.metrics)
    assert ledger(tmp_path / "there") == ledger(tmp_path / "here")
    for node in field.nodes:
        calls = [
            (a["call"], a["method"])
            for a in node.audit(run=node.runs()[-1].name.removeprefix("run-"))
        ]
        assert len(calls) == len(set(calls))


def test_a_slow_line_is_not_taken_for_a_dead_one(field: Machines) -> None:
    """A large call takes far longer than a dead node would be given, and small calls pass it."""
    node = field.nodes[0]
    wire = Transport(field)
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


def weights_sent(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Pieces of all that peers give each other in a run of gossip."""
    found: list[bytes] = []
    encode = message.encode

    def listen(tree: Any, *more: Any) -> bytes:
        data = encode(tree, *more)
        if isinstance(tree, dict) and "weights" in tree:
            found.extend(
                x.numpy().tobytes()[:48]
                for x in tree["weights"].values()
                if x.numel() >= 12 and x.any()
            )
        return data

    with monkeypatch.context() as patch:
        patch.setattr(message, "encode", listen)
        execute(run.model_copy(update={"engine": EngineConfig(name="isolated")}))
    return found


@pytest.mark.parametrize("sealed", [True, False])
def test_the_coordinator_cannot_read_what_peers_give_each_other(
    sealed: bool, field: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that passes through its hub is searched; without certificates, the same search
    finds the weights.
    """
    run, passed = run_of("gossip", rounds=5), bytearray()
    handle = Hub.answer

    async def tapped(hub: Hub, caller: str, kind: str, body: bytes) -> bytes:
        answer = await handle(hub, caller, kind, body)
        passed.extend(body + answer)
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(Hub, "answer", tapped)
        if sealed:
            there = execute(field.over(run))
        else:
            with federation(tmp_path, 3) as (path, _):
                there = execute(
                    run.model_copy(
                        update={"engine": EngineConfig(name="net", federation=str(path))}
                    )
                )
    same(there.summary, execute(run).summary)
    pieces = weights_sent(run, monkeypatch)
    assert len(pieces) >= 20 and len(passed) > 100_000
    assert bool([piece for piece in pieces if piece in passed]) is not sealed
