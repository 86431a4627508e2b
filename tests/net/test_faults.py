"""Processes that die, freeze and are cut off, each a real one: the run goes on, and what comes back
is as it was.
"""

from __future__ import annotations

import csv
import json
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fedloom.api import Status, execute
from fedloom.core.engine import Failure
from fedloom.methods import registry
from fedloom.remote.engine import NetEngine
from tests.engines.test_every_method import run_of as run_of_every_method
from tests.net.processes import PATIENCE, Machines, coordinator, run_of, started, until

LARGE = {"large": torch.zeros(12_500_000)}
"""50 MB."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[], NetEngine]:
    """Gives the engine of the run under way."""
    made: list[NetEngine] = []
    begin = NetEngine.__init__

    def begun(engine: NetEngine, *args: Any, **more: Any) -> None:
        begin(engine, *args, **more)
        made.append(engine)

    monkeypatch.setattr(NetEngine, "__init__", begun)
    return lambda: made[-1]


def after(steps: dict[int, Callable[[], None]]) -> Callable[[Status], None]:
    """Does something after rounds."""

    def progress(status: Status) -> None:
        steps.get(status.round, lambda: None)()

    return progress


def failures(folder: Path) -> list[tuple[int, str, str]]:
    """(round, party, reason) of the failures of a run."""
    with (folder / "failures.csv").open() as file:
        return [(int(row["round"]), row["party"], row["reason"]) for row in csv.DictReader(file)]


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Do something in a thread; its end can be waited for."""
    pool = ThreadPoolExecutor(1)
    done = pool.submit(work)
    pool.shutdown(wait=False)
    return lambda: done.result(60)


def same(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Two summaries, but for where and how long."""
    for key in here.keys() - {"engine", "seconds"}:
        assert there[key] == here[key], key


def same_metrics(there: Sequence[Sequence[Any]], here: Sequence[Sequence[Any]]) -> None:
    """The metrics of a run at nodes and of a local one."""
    assert [*there] == [*here]


@pytest.mark.each_time("split", "proto-evfl", "vertical-forest")
@pytest.mark.parametrize(
    "method", [name for name, method in registry().items() if method.setting == "vertical"]
)
def test_parties_with_columns_give_the_same_numbers_in_processes(
    method: str, field: Machines
) -> None:
    run = run_of_every_method(method, "none")
    same(execute(field.over(run)).summary, execute(run).summary)


def test_a_killed_node_is_missed_and_comes_back_as_it_was(
    field: Machines, tmp_path: Path, engine: Callable[[], NetEngine]
) -> None:
    victim = field.nodes[1]
    seen: dict[str, Any] = {}

    def first() -> None:
        seen["first"] = victim.stored_sha256("mark-0")

    def arm() -> None:
        base = len(victim.audit(method="update"))

        def strike() -> None:
            until(lambda: len(victim.audit(method="update")) > base, "work")
            victim.kill()

        seen["struck"] = in_background(strike)

    def without() -> None:
        seen["struck"]()
        assert not engine().presence()[1]
        seen["killed"], seen["entry"] = victim.stored_sha256(), victim.stored()

    def restart() -> None:
        assert victim.stored().call == seen["entry"].call
        victim.start()
        victim.ready()
        until(lambda: engine().presence()[1], "the node")

    def with_it() -> None:
        seen["before"] = victim.stored_sha256("mark-5")
        seen["later"] = victim.stored_sha256()

    steps = {1: first, 2: arm, 3: without, 5: restart, 6: with_it}
    for line in field.nodes:
        line.line.delay = 0.02  # so that a kill hits the round that it is meant for
    run = run_of("gossip", rounds=8)
    result = execute(field.over(run), tmp_path / "run", progress=after(steps))

    missed = failures(tmp_path / "run")
    assert {reason for _, _, reason in missed} == {"unreachable"}
    assert {party for _, party, _ in missed} == {"peer-1"}
    assert {t for t, _, _ in missed} == {2, 3, 4}
    assert victim.process is not None
    assert f"continues after call {seen['entry'].call}" in victim.process.text
    assert seen["before"] == seen["killed"] != seen["first"]
    assert len({seen["first"], seen["killed"], seen["later"]}) == 3
    assert result.summary["rounds"] == 8


def test_what_was_worked_out_before_a_kill_is_not_worked_out_again(
    field: Machines, tmp_path: Path, engine: Callable[[], NetEngine]
) -> None:
    """A node works and writes, its reply does not arrive, it is killed: the repeated call gets the
    reply there was.
    """
    victim = field.nodes[0]
    seen: dict[str, Any] = {}

    def arm() -> None:
        base = len(victim.audit("answered"))
        victim.line.part(1)  # replies of this node do not arrive

        def strike() -> None:
            until(lambda: len(victim.audit("answered")) > base, "an answer")
            seen["entry"] = victim.stored()
            victim.kill()
            victim.start()
            victim.ready()
            field.loop.run(victim.line.cut())
            victim.line.heal()

        seen["struck"] = in_background(strike)

    run = run_of("fedavg-adam", rounds=4)
    here = execute(run)
    there = execute(field.over(run, reconnect=60.0), tmp_path / "run", progress=after({2: arm}))
    seen["struck"]()
    same(there.summary, here.summary)
    calls = [
        a["call"]
        for a in victim.audit("answered", run=victim.runs()[-1].name[4:])
        if a["round"] >= 0
    ]
    assert len(calls) == len(set(calls)) == 4  # one call a round
    assert seen["entry"].round == 2 and seen["entry"].call in calls


@pytest.mark.slow
def test_a_killed_coordinator_resumes_to_the_same_numbers(field: Machines, tmp_path: Path) -> None:
    run = run_of("fedal", rounds=6, clients=3)
    here = execute(run)
    config, out = tmp_path / "run.toml", tmp_path / "out"
    node, chance = field.nodes[0], Random(5)
    for one in field.nodes:
        one.line.delay = 0.02
    checkpoints = lambda: sorted((out / "checkpoints").glob("round-*.ckpt"))

    base = len(node.audit())
    with coordinator(field.over(run), config, out) as first:
        until(lambda: any(a["round"] == 0 for a in node.audit()[base:]), "work in the first round")
        first.kill()
    assert not checkpoints()

    with coordinator(field.over(run), config, out, "--resume") as second:
        until(checkpoints, "a checkpoint")
        base, more = len(node.audit()), chance.randrange(1, 15)
        until(lambda: len(node.audit()) > base + more, "further work")
        second.kill()
    assert checkpoints() and not (out / "result.json").exists()

    field.straight()
    with coordinator(field.over(run), config, out, "--resume") as third:
        assert third.ends() == 0, third.text
    same(json.loads((out / "result.json").read_text()), json.loads(json.dumps(here.summary)))


def test_a_node_frozen_in_a_large_transfer_is_noticed(field: Machines) -> None:
    frozen = field.nodes[1]
    run = run_of("gossip")
    with started(field.over(run)) as engine, ThreadPoolExecutor(1) as pool:
        frozen.line.rate = 10e6
        base = frozen.line.passed[0]
        call = pool.submit(
            engine.call, [0, 1, 2], "update", {"t": 0}, {0: {}, 1: LARGE, 2: {}}, (0, 0)
        )
        until(lambda: frozen.line.passed[0] > base + 15e6, "15 MB")
        frozen.freeze()
        replies = call.result(PATIENCE)
        assert replies[1] == Failure("unreachable")
        assert replies[0] is None and replies[2] is None
        assert engine.presence() == {0: True, 1: False, 2: True}
        # at once
        assert engine.call([1], "update", {"t": 0}, None, (0, 1)) == [Failure("unreachable")]
        frozen.thaw()
        until(lambda: engine.presence()[1], "the node")
        frozen.line.straight()
        assert engine.call([1], "update", {"t": 0}, None, (0, 2)) == [None]


def test_a_peer_that_freezes_is_done_without(
    field: Machines, tmp_path: Path, engine: Callable[[], NetEngine]
) -> None:
    """It has said what it has to give, and freezes before anybody has fetched it."""
    frozen = field.nodes[2]
    seen: dict[str, Any] = {}

    def arm() -> None:
        base = len(frozen.audit("answered", method="give"))

        def strike() -> None:
            until(lambda: len(frozen.audit("answered", method="give")) > base, "the peer's word")
            frozen.freeze()

        for node in field.nodes:
            node.line.delay = 0.25
        seen["struck"] = in_background(strike)

    def thaw() -> None:
        seen["struck"]()
        field.straight()
        until(lambda: engine().presence()[2], "the peer")
        seen["fetched"] = len(field.nodes[0].audit("fetched"))

    run = run_of("gossip", rounds=5)
    execute(field.over(run), tmp_path / "run", progress=after({2: arm, 3: thaw}))
    missed = failures(tmp_path / "run")
    assert {(t, party, reason) for t, party, reason in missed} == {(2, "peer-2", "unreachable")}
    assert len(missed) == 3  # two that could not fetch, and its own take
    for node in field.nodes[:2]:  # they took what they had, and later from all again
        assert [a["round"] for a in node.audit("answered", method="mix")[-5:]] == [0, 1, 2, 3, 4]
    assert len(field.nodes[0].audit("fetched")) == seen["fetched"] + 4


def test_a_node_cut_off_is_noticed_and_taken_back(field: Machines) -> None:
    away = field.nodes[0]
    run = run_of("gossip")
    with started(field.over(run)) as engine, ThreadPoolExecutor(1) as pool:
        away.line.rate = 10e6
        base = away.line.passed[0]
        call = pool.submit(engine.call, [0], "update", {"t": 0, **LARGE}, None, (0, 0))
        until(lambda: away.line.passed[0] > base + 5e6, "5 MB")
        away.line.part()
        assert call.result(PATIENCE) == [Failure("unreachable")]
        field.straight()
        until(lambda: engine.presence()[0], "the node")
        assert engine.call([0], "update", {"t": 0}, None, (0, 1)) == [None]


def test_a_broken_transfer_continues_where_it_was(field: Machines) -> None:
    node = field.nodes[0]
    run = run_of("gossip")
    with started(field.over(run)) as engine, ThreadPoolExecutor(1) as pool:
        node.line.rate = 10e6
        base = node.line.passed[0]
        call = pool.submit(engine.call, [0], "update", {"t": 0, **LARGE}, None, (0, 0))
        for part in (15e6, 30e6, 40e6):
            until(lambda: node.line.passed[0] > base + part, f"{part} bytes")  # noqa: B023  # called at once
            node.line.part()
            field.loop.run(node.line.cut())
            node.line.heal()
        (reply,) = call.result()
        # it arrived; the method takes no such thing
        assert isinstance(reply, Failure) and reply.reason == "raised"
        assert node.line.passed[0] - base < 60e6


def test_two_coordinators_of_different_runs(field: Machines, tmp_path: Path) -> None:
    """The second is told that the nodes are busy; it does not disturb the first."""
    run, other = run_of("fedavg-adam", rounds=3), run_of("gossip", rounds=2)
    told: list[str] = []

    def meanwhile() -> None:
        with coordinator(
            field.over(other, "spare"), tmp_path / "other.toml", tmp_path / "other"
        ) as second:
            told.append(second.says("another run is under way"))

    there = execute(field.over(run), progress=after({1: meanwhile}))
    assert "waiting for node-" in told[0]
    same(there.summary, execute(run).summary)


def test_two_coordinators_of_the_same_run(field: Machines, tmp_path: Path) -> None:
    """The one that was started later takes over, and the other one ends with an error
    that says so.
    """
    run = run_of("fedavg-adam", rounds=40)
    out = tmp_path / "run"
    for node in field.nodes:
        node.line.delay = 0.1
    with coordinator(field.over(run), tmp_path / "run.toml", out) as older:
        until(lambda: any(out.glob("checkpoints/round-*.ckpt")) or not older.alive, "a checkpoint")
        older.send(signal.SIGSTOP)
        field.straight()
        older.send(signal.SIGCONT)
        there = execute(field.over(run, "spare"), out, resume=True)
        assert older.ends() != 0
    assert "A newer coordinator took over" in older.text and "Traceback" not in older.text
    same(there.summary, execute(run).summary)
