"""Steering: a coordinator teaches nodes apart before it asks all of them the same question (T9).

By what it teaches outside of sums, or by a sum that it begins and never opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core import engine, message
from fedloom.core.engine import Task
from fedloom.core.message import Shape, map_tensors
from fedloom.core.party import Party
from fedloom.core.templates import spell
from fedloom.engines import local
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry
from fedloom.protect.masks import question
from fedloom.remote.node.schedule import CallRecord
from fedloom.remote.node_session import TaskResults
from fedloom.remote.secure_sum import secure_sum
from tests.engines.test_every_method import run_of
from tests.node.hosts import config, opening
from tests.privacy.test_sums import Session, keepers

D = 500
EXPECT = {"w": Shape("float32", D), "rows": Shape("int64")}
X = torch.from_numpy(np.random.default_rng(0).standard_normal((6, D))).float()


def total(
    folder: Path, teach: Callable[[CallRecord, int], None], *, chained: bool, whole: bool
) -> np.ndarray | None:
    """What a coordinator gets that teaches six nodes, asks them alike, and lists all, whatever they
    say of their past. Without `chained`, masks do not depend on it.
    """
    sessions: Any = []
    for k, keeper in enumerate(keepers(folder, 6)):
        record = CallRecord(folder / f"n{k}" / "run")
        teach(record, k)
        keeper._past = record.past if chained else lambda round, call: ""
        sessions.append(Session(keeper))
    step = Session.sum_step

    async def liar(self: Session, name: str, what: str, *rest: Any, **more: Any) -> Any:
        names, parts = await step(self, name, what, *rest, **more)
        if what == "keys":  # the coordinator writes one past into all answers
            parts[4] = sessions[0].keeper._past(1, -1).encode()
        return names, parts

    async def run_masked(session: Any, mask: Any) -> TaskResults:
        request = {"round": 1, "call": 9, "method": "update", "expect": spell(EXPECT), "mask": mask}
        reply = {"w": X[int(session.name[1:])], "rows": torch.tensor(1)}
        return TaskResults([session.keeper.masked(reply, request, {"t": 1})])

    def asked(names: Any, past: str) -> bytes:
        return question(1, "update", "rows", spell(EXPECT), names, {"t": 1}, past)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "sum_step", liar)
        work = secure_sum(
            sessions, run_masked, "run/1", "rows", D + 1, asked, (1, "update"), 0, whole
        )
        return asyncio.run(work)[0]


def by_distil(record: CallRecord, k: int) -> None:
    record.take(1, 0, "distil", -1, "mean" if k % 2 else "another mean", 1, again=False)


def by_dropped_sum(record: CallRecord, k: int) -> None:
    record.take(1, 0, "update", -1, "weights" if k % 2 else "crafted weights", 1, again=False)


def alike(record: CallRecord, k: int) -> None:
    record.take(1, 0, "update", -1, "weights", 1, again=False)


@pytest.mark.parametrize("whole", [False, True])
def test_nodes_that_were_steered_apart_have_no_sum(whole: bool, tmp_path: Path) -> None:
    def likeness(teach: Any, name: str, chained: bool = True) -> float:
        found = total(tmp_path / f"{name}{chained}", teach, chained=chained, whole=whole)
        if found is None:
            return 0.0
        return abs(
            float(np.corrcoef(found.view(np.int64)[:D].astype(float), X.sum(0).numpy())[0, 1])
        )

    assert likeness(alike, "alike") > 0.999
    for teach in (by_distil, by_dropped_sum):
        assert likeness(teach, teach.__name__) < 0.15
        # so the past is what stops it
        assert likeness(teach, teach.__name__, chained=False) > 0.999


def steered(page: str, **params: Any) -> int:
    """The replies to sums of two rounds that depend on what a dropped sum of the same call had
    asked before.
    """
    run, apart = run_of(page, "none"), 0
    values = {**run.params, **params}
    run = run.model_copy(
        update={
            "rounds": 2,
            "faults": run.faults.model_copy(update={"dropout": 0.0, "crash": 0.0, "nan": 0.0}),
            "params": values,
        }
    )
    honest: Any = engine.run_task

    def twice(party: Party[Any], task: Task, arguments: Any, *rest: Any) -> Any:
        nonlocal apart
        if task.method not in party.MEANS:
            return honest(party, task, arguments, *rest)
        before = map_tensors(torch.Tensor.clone, dict(party.state()))
        crafted = map_tensors(lambda x: x * -3 + 1 if x.is_floating_point() else x, dict(arguments))
        honest(party, task, crafted)  # a sum that is dropped; the party may refuse it
        after_it = honest(party, task, arguments)
        party.load(before)  # type: ignore[arg-type]
        reply = honest(party, task, arguments, *rest)
        apart += not same(reply, after_it)
        return reply

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "run_task", twice)
        execute(run)
    return apart


def same(a: Any, b: Any) -> bool:
    """Whether two replies have the same bits."""
    return message.digest(a) == message.digest(b)


ALONE = [
    name
    for name, one in registry().items()
    if one.client.MEANS and one.configure("recommended").sums_stand_alone
]


@pytest.mark.parametrize("name", ALONE)
def test_sums_that_stand_alone_do_not_depend_on_dropped_ones(name: str) -> None:
    """Of every page that says so: nodes with another past in these sums are added all the same,
    after a round.
    """
    assert steered(name) == 0


def test_what_a_personal_head_learns_from_a_dropped_sum_is_found() -> None:
    assert not registry()["fedavg"].configure(params={"personal_head": True}).sums_stand_alone
    assert steered("fedavg", personal_head=True) > 0
    assert steered("fedproto") > 0 and "fedproto" not in ALONE


@pytest.mark.parametrize("head", [True, False])
def test_a_node_knows_which_sums_it_learns_from(head: bool, hosts: Callable[..., Any]) -> None:
    ask = hosts(methods=["fedavg"])
    ask(
        "open",
        opening(
            config(method="fedavg", **{"models.pool": ["mlp"]}, params={"personal_head": head})
        ),
    )
    calls = next(iter(ask.host._node_runs.values())).calls
    before = calls.past(1)
    calls.take(0, 0, "update", -1, "crafted weights", 1, again=False)
    assert (calls.past(1) == before) == (not head)
