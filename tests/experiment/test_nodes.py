"""Runs whose parties keep their state to themselves: the same numbers, checkpoints without them,
evaluations without those that are away.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core import message
from fedloom.core.context import ClientContext
from fedloom.core.engine import UNREACHABLE
from fedloom.core.errors import EngineError, MethodError
from fedloom.core.federation import Federation
from fedloom.core.party import Party
from fedloom.engines import LocalEngine
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import build_party
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.report import write
from tests.experiment.nodes import Nodes

ROWS: dict[str, Any] = {
    "rounds": 4,
    "params": {"tau": 2, "batch_size": 8},
    "data": {"clients": 3, "public_rows": 60, "own_test_rows": 20, "test_rows": 60},
    "models": {"pool": ["mlp", "linear"]},
}
COLUMNS: dict[str, Any] = {
    "method": "proto-evfl",
    "rounds": 4,
    "params": {"steps": 2, "batch_size": 8, "embedding_dim": 16},
    "data": {"name": "breast_cancer", "clients": 3},
    "columns": {"aligned": 24, "unaligned": 20, "blocks_per_party": 1},
}
"""Party 0 is colocated with the active party."""


def run(values: dict[str, Any], **changes: Any) -> Any:
    return check({"run": {**values, **changes}}).run


@pytest.fixture
def at_nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Nodes]]:
    """Let runs have their parties at nodes from now on; the engines that there were."""

    def begin(
        away: Callable[[int, int, str], bool] = lambda *_: False, kept: Any = None
    ) -> list[Nodes]:
        engines: list[Nodes] = []
        disk: dict[int, dict[int, bytes]] = {} if kept is None else kept

        def start(run_plan: RunPlan) -> Nodes:
            engines.append(Nodes(run_plan, partial(build_party), disk, away))
            return engines[-1]

        monkeypatch.setitem(runs.execute.__kwdefaults__, "backend", lambda *_, **__: Backend(start))
        return engines

    return begin


@pytest.mark.parametrize(
    "values", [ROWS, {**ROWS, "method": "fedmd"}, COLUMNS], ids=["fedal", "fedmd", "columns"]
)
def test_numbers_are_those_of_one_machine(values: dict[str, Any], at_nodes: Any) -> None:
    whole = execute(run(values)).summary
    at_nodes()
    apart = execute(run(values)).summary
    for key in ("state_sha256", "accuracy", "bytes", "messages", "failures"):
        assert apart[key] == whole[key]


@pytest.mark.parametrize("values", [ROWS, COLUMNS], ids=["rows", "columns"])
def test_a_run_continues_where_its_nodes_can_go_back_to(
    values: dict[str, Any], at_nodes: Any, tmp_path: Path
) -> None:
    kept: dict[str, Any] = {}
    whole = execute(run(values)).summary
    first = at_nodes(kept=kept)
    with pytest.raises(Stopped):
        execute(run(values), tmp_path, stop=lambda: True)
    assert first[0].calls[-1] == "saved 1"
    saved = max((tmp_path / "checkpoints").iterdir())
    _, states, _ = checkpoint.load(saved, runs_mark(run(values)))
    assert set(states) == ({"active", "party-0"} if values is COLUMNS else {"server"})
    second = at_nodes(kept=kept)
    resumed = execute(run(values), tmp_path, resume=True).summary
    assert [c for c in second[0].calls if c.startswith("restore")] == ["restore 1"]
    assert second[0].calls[second[0].calls.index("restore 1") + 1] == "saved 1"
    assert (
        resumed["state_sha256"] == whole["state_sha256"]
        and resumed["accuracy"] == whole["accuracy"]
    )


def runs_mark(config: Any) -> str:
    from fedloom.experiment.run.session import fingerprint

    return fingerprint(build(config))


def test_who_resumes_a_run_without_a_checkpoint_sends_nodes_back_to_its_beginning(
    at_nodes: Any, tmp_path: Path
) -> None:
    engines = at_nodes()
    execute(run(ROWS), tmp_path, resume=True)
    assert [c for c in engines[0].calls if c.startswith("restore")] == ["restore 0"]


def metrics(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.reader(file))


class Clock:
    """Counts evaluations, two looks each (on the global test set and on own rows) or one of
    columns.
    """

    def __init__(self, first: int, method: str, looks: int) -> None:
        self._first, self.method, self._looks, self._count = first, method, looks, 0

    def evaluation(self, party: int, method: str) -> int:
        """The number of the evaluation that this call belongs to, from 0; -1 if to none."""
        if method != self.method:
            return -1
        self._count += party == self._first
        return (self._count - 1) // self._looks


def test_who_is_away_is_left_out_of_an_evaluation(at_nodes: Any, tmp_path: Path) -> None:
    clock = Clock(0, "predictions", 2)
    at_nodes(lambda party, round, method: clock.evaluation(party, method) == 1 and party == 1)
    execute(run(ROWS, method="local"), tmp_path)
    rows = [r for r in metrics(tmp_path) if r[4] == "accuracy"]
    there = {n: {r[3] for r in rows if r[0] == n} for n in ("0", "1", "2")}
    everybody = {"client-0", "client-1", "client-2"}
    assert there == {"0": everybody, "1": everybody - {"client-1"}, "2": everybody}
    (mean,) = [float(r[5]) for r in metrics(tmp_path) if r[:1] == ["1"] and r[4] == "accuracy mean"]
    assert mean == pytest.approx(sum(float(r[5]) for r in rows if r[0] == "1") / 2)


def test_a_result_tells_of_whom_its_means_are(at_nodes: Any, tmp_path: Path) -> None:
    clock = Clock(0, "predictions", 2)
    at_nodes(lambda party, round, method: clock.evaluation(party, method) == 4 and party == 1)
    found = execute(run(ROWS, method="local"), tmp_path).summary
    assert found["accuracy"]["clients"] == [0, 2] and len(found["accuracy"]["per_client"]) == 2
    assert write(tmp_path).is_file()


@pytest.mark.parametrize("values", [{**ROWS, "method": "local"}, COLUMNS], ids=["rows", "columns"])
def test_an_evaluation_that_lacks_too_many_is_left_out(
    values: dict[str, Any], at_nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns = values is COLUMNS
    # one that fails ends after one look
    clock = Clock(1, "contribution", 1) if columns else Clock(0, "predictions", 1)
    failing = 1 if columns else 2

    def away(party: int, round: int, method: str) -> bool:
        return clock.evaluation(party, method) == failing and (party == 1 or not columns)

    at_nodes(away)
    with caplog.at_level(logging.WARNING, "fedloom"):
        execute(run(values), tmp_path)
    assert "not evaluated: cannot evaluate" in caplog.text
    seen = {r[0] for r in metrics(tmp_path) if r[4] == "accuracy mean"}
    assert seen == {"0", "2", "3", "4"}
    assert {r[0] for r in metrics(tmp_path) if r[4] == "bytes up"} == seen


def test_the_last_evaluation_must_exist_and_resume_makes_up_for_it(
    at_nodes: Any, tmp_path: Path
) -> None:
    kept: dict[str, Any] = {}
    whole, gone = execute(run(COLUMNS)).summary, [True]
    clock = Clock(1, "contribution", 1)

    def away(party: int, round: int, method: str) -> bool:
        return clock.evaluation(party, method) == 4 and party == 2 and gone[0]

    at_nodes(away, kept)
    with pytest.raises(EngineError, match=r"annot evaluate party-2.*--resume"):
        execute(run(COLUMNS), tmp_path)
    gone[0] = False
    at_nodes(away, kept)
    assert (
        execute(run(COLUMNS), tmp_path, resume=True).summary["state_sha256"]
        == whole["state_sha256"]
    )


class Peer(Party[None]):
    STATE = ("value",)

    def setup(self) -> None:
        self.value = torch.ones(3)

    def share(self) -> torch.Tensor:
        return self.value

    def add(self, *, inbox: dict[str, torch.Tensor]) -> None:
        self.value = torch.stack([self.value, *inbox.values()]).sum(0)


def test_an_answer_that_could_not_be_handed_over_is_a_failure() -> None:
    class Lossy(LocalEngine):
        def _undelivered(self) -> set[tuple[int, int]]:
            return {(1, 0)}

    fed = Federation(Lossy([Peer(None, ClientContext(id=i)) for i in range(3)]))
    fed.exchange({0: [1, 2], 1: [0]}, answer="share", take="add")
    assert set(fed.ledger.pairs) == {("peer-2", "peer-0"), ("peer-0", "peer-1")}
    assert [(f.party, f.kind, f.reason) for f in fed.failures] == [("peer-1", "share", UNREACHABLE)]


def test_a_hash_of_digests_is_that_of_the_states() -> None:
    engine = LocalEngine([Peer(None, ClientContext(id=i)) for i in range(2)])
    names = [(engine.name(i), found) for i, found in engine.digests().items()]
    assert dict(names) == {engine.name(i): message.digest(s) for i, s in engine.states().items()}
    before = state_sha256(names)
    assert state_sha256(names[::-1]) != before
    assert message.digest({"a": torch.ones(2)}) != message.digest({"a": torch.ones(2, 1)})
    assert message.digest({"a": torch.ones(2)}) != message.digest({"b": torch.ones(2)})
    assert message.digest({"a": torch.ones(2)}) != message.digest(
        {"a": torch.ones(2, dtype=torch.float64)}
    )
    assert engine.presence() == {0: True, 1: True} and engine.saved(3) is None
    with pytest.raises(MethodError, match=r"use load\(\)"):
        engine.restore(3)
