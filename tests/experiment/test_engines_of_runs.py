"""Runs on engines: what is picked, what is recorded, and a machine that is lost in the middle."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.engine import Account, Failure, ReplyRef, Task, names
from fedloom.core.errors import ConfigError, EngineError
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note
from fedloom.engines import Engine, LocalEngine, Lost
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import Stopped, execute
from fedloom.methods import registry

SMALL: dict[str, Any] = {
    "rounds": 6,
    "params": {"tau": 2, "batch_size": 8},
    "data": {"clients": 4, "public_rows": 100, "own_test_rows": 30},
    "models": {"pool": ["mlp"], "norm": "none"},
    "faults": {"nan": 0.1, "dropout": 0.1},
}


def small(**changes: Any) -> Any:
    return check({"run": {**SMALL, **changes}}).run


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """A run in the loop that nobody disturbed."""
    return execute(small()).summary


class Fragile(Engine):
    """A loop whose parties are lost at the calls of these numbers, and stand as they were made."""

    durable = False

    def __init__(self, run_plan: RunPlan, losses: set[int]) -> None:
        self._make = lambda: LocalEngine(
            [make() for make in run_plan.clients], seed=0, faults=run_plan.run.faults
        )
        self._inner = self._make()
        super().__init__(
            names((i, type(p)) for i, p in self._inner._parties.items()), faults=run_plan.run.faults
        )
        self._losses, self._calls = losses, 0

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        self._calls += 1
        if self._calls in self._losses:
            self._inner._call(tasks[:2])
            self._inner = self._make()
            raise Lost("a node was lost")
        return self._inner._call(tasks)

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        return self._inner._leave(tasks, expect)

    def states(self) -> dict[int, dict[str, Tree]]:
        return self._inner.states()

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        self._inner.load(states)

    def notes(self) -> dict[int, dict[str, Note]]:
        return self._inner.notes()

    def account(self) -> Account:
        return Account("fragile")


def fragile(losses: set[int]) -> Any:
    """A backend whose engine loses its parties at the calls of these numbers."""
    return lambda *_, **__: Backend(lambda run_plan: Fragile(run_plan, losses))


@pytest.mark.each_time("losses0", "losses3")
@pytest.mark.parametrize("losses", [{1}, {2, 3}, {5}, {9, 10, 24}, {30, 31}])
def test_a_lost_machine_costs_a_round_and_changes_nothing(
    losses: set[int], whole: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(runs.execute.__kwdefaults__, "backend", fragile(losses))
    done = execute(small(), tmp_path / "run")
    for key in ("state_sha256", "accuracy", "bytes", "messages", "failures", "failure_reasons"):
        assert done.summary[key] == whole[key], key
    monkeypatch.undo()
    undisturbed = execute(small())
    assert [r for r in done.metrics if "seconds" not in r[4]] == undisturbed.metrics


def test_a_round_that_always_loses_its_machines_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(runs.execute.__kwdefaults__, "backend", fragile(set(range(20, 1000))))
    with pytest.raises(EngineError, match="lost its machines 5 times"):
        execute(small(), tmp_path / "run")
    assert execute_again(tmp_path / "run", monkeypatch)


def execute_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the run can be ended after its machines failed it."""
    monkeypatch.undo()
    return (
        execute(small(), folder, resume=True).summary["state_sha256"]
        == execute(small()).summary["state_sha256"]
    )


@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "auto"}, {"name": "batched"}])
def test_a_run_records_where_it_was_and_gives_the_loop_s_numbers(
    engine: dict[str, Any], whole: dict[str, Any], tmp_path: Path
) -> None:
    seen: list[str] = []
    done = execute(
        small(engine=engine), tmp_path / "run", progress=lambda status: seen.append(status.where)
    ).summary
    where = done["engine"]
    # four clients are too few for auto
    name = {"batched": "batched"}.get(engine.get("name", ""), "local")
    assert (where["engine"], where["workers"], where["device"]) == (
        name,
        engine.get("workers", 1),
        "cpu",
    )
    assert where["requested"] == engine.get("name", "local")
    assert ("picked by auto" in where["remarks"]) == (where["requested"] == "auto")
    line = f"{name}, {where['workers']} worker{'s' * (where['workers'] > 1)}, cpu"
    assert set(seen) == {line}
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["engine"] == line
    assert done["failures"] == whole["failures"] and done["bytes"] == whole["bytes"]
    if name == "local":
        assert done["state_sha256"] == whole["state_sha256"]
    assert done["accuracy"]["mean"] == pytest.approx(whole["accuracy"]["mean"], abs=0.01)


@pytest.mark.parametrize(
    ("clients", "network", "together"),
    [(16, "linear", True), (15, "linear", False), (16, "mlp-large", False), (16, "lenet5", False)],
)
def test_auto_batches_many_parties_with_small_networks_without_convolutions(
    clients: int, network: str, together: bool
) -> None:
    change = {
        "rounds": 1,
        "models": {"pool": [network]},
        "data": {**SMALL["data"], "clients": clients},
    }
    done, same = (
        execute(small(**change, engine={"name": name})).summary
        for name in ("auto", "batched" if together else "local")
    )
    assert (done["engine"]["engine"] == "batched") == together
    assert done["state_sha256"] == same["state_sha256"]
    assert any("in turn: a CPU is faster" in r for r in done["engine"]["remarks"]) != together


def test_another_engine_continues_where_one_stopped(whole: dict[str, Any], tmp_path: Path) -> None:
    eval_modes: list[dict[str, Any]] = [{"workers": 2}, {"name": "isolated"}, {}]
    for engine in eval_modes[:-1]:
        with pytest.raises(Stopped):
            execute(small(engine=engine), tmp_path / "run", resume=True, stop=lambda: True)
    done = execute(small(engine=eval_modes[-1]), tmp_path / "run", resume=True).summary
    assert done["state_sha256"] == whole["state_sha256"]


@pytest.mark.parametrize(
    "name", [name for name, method in registry().items() if method.without_network]
)
def test_parties_without_a_network_stay_on_the_cpu(name: str) -> None:
    """Their sums are NumPy's. With a network the rows would go to this device, which this test need
    not have.
    """
    values: dict[str, Any] = {"method": name, "rounds": 2, "data": {"clients": 4}}
    values |= (
        {"columns": {"aligned": 24, "unaligned": 20}}
        if registry()[name].setting == "vertical"
        else {}
    )
    if name == "fedcox":
        values |= {
            "data": {"name": "breast_cancer", "clients": 4},
            "params": {"time": "mean area", "event": "benign"},
        }
    run = RunConfig(**values, engine={"device": "cuda"})
    plan = build(run)
    assert {context.device for context in (plan.server_context, *plan.contexts)} == {"cpu"}
    assert plan.run == run  # the folder has the config that was given


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"name": "batched", "workers": 2}, "takes one worker"),
        ({"name": "isolated", "workers": 2}, "takes one worker"),
        ({"device": "meta", "workers": 2}, "workers run on the CPU, not on 'meta'"),
        ({"name": "isolated", "device": "meta"}, "on the CPU only"),
        ({"name": "ray", "device": "meta"}, "set gpus_per_worker"),
        ({"gpus_per_worker": 0.5}, "belongs to the engine ray"),
    ],
)
def test_settings_that_contradict_each_other_are_reported(
    engine: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        small(engine=engine)
