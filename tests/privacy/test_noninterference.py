"""Two files that differ in one row look the same from outside, whatever the coordinator sends and
with the noise fixed.

What may differ is the numbers that the noise hides.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError, MessageError, NotReady
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import Tree, map_tensors
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.run.engine import start
from fedloom.methods import registry
from fedloom.methods.tables.steps import arrays, layout_of, tensors, trees_tree
from fedloom.protect import noise
from fedloom.remote import payload
from fedloom.remote.node import service, task_runner
from fedloom.remote.rpc_errors import CallRefused
from fedloom.trees import random as random_trees
from tests.engines.test_every_method import run_of
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.node.hosts import RunRequest, doing, node, opening

QUESTIONS = 500
Rng = np.random.Generator
DP = {"sigma": 4.0, "clip": 1.0}


def pair_of(tmp_path: Path, **given: Any) -> list[RunRequest]:
    """Two nodes with this run: the files differ in one training row, which is far from the others
    in the second.
    """
    public = rows(tmp_path / "public.csv", 50, 9, labels=False)
    made = []
    for name, cells in (("a", "0.1,9.0,x,one"), ("b", "40.0,-70.0,y,two")):
        path = rows(tmp_path / f"{name}.csv", 80, 3)
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:8], cells, *lines[9:], ""]))
        data = {
            "wards": {
                "rows": path,
                "public": public,
                "epsilon": float("inf"),
                "test": 0.3,
                **ALLOWED,
            }
        }
        cfg = node(tmp_path / name, methods=[given["method"]], data=data)
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "secret").write_text("07" * 16)
        made.append(RunRequest(cfg))
        text = for_nodes(
            build(run(rounds=QUESTIONS, **given), PrivateData(public=public))
        ).model_dump_json()
        made[-1]("open", opening(text))
    return made


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[RunRequest]]:
    """Two nodes with DP-SGD."""
    params = {"batch_size": 100, "epochs": 1, "dp": DP}
    made = pair_of(tmp_path, method="fedavg-dp", models={"pool": ["mlp"]}, params=params)
    yield made
    for one in made:
        one.close()


def crafted(rng: Rng, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights that nobody trained: huge, tiny, subnormal, dead, with a threshold on a column, or
    not finite.
    """
    kind = rng.choice(
        ["size", "dead", "bin", "mixed", "honest", "not finite"], p=[0.3, 0.2, 0.2, 0.15, 0.1, 0.05]
    )
    size = 10.0 ** rng.uniform(-44, 38.4) if kind != "honest" else 0.3
    drawn = {
        k: torch.from_numpy(rng.standard_normal(tuple(v.shape))) * size for k, v in like.items()
    }
    for x in drawn.values():
        if kind == "dead" and x.dim() == 1:
            x.copy_(-x.abs() * 10.0 ** rng.uniform(0, 4))
        if kind == "bin":
            x.zero_()
            if x.dim() == 2:
                x[:, rng.integers(x.shape[1])] = 10.0 ** rng.uniform(0, 38.4)
            else:
                x.fill_(-(10.0 ** rng.uniform(0, 38.4)))
        if kind == "mixed":
            x.mul_(10.0 ** rng.uniform(-40, 40) / max(size, 1e-40))
        if kind == "not finite" and rng.random() < 0.5:
            x.view(-1)[0] = float(rng.choice([np.nan, np.inf]))
    largest = torch.finfo(torch.float32).max
    return {k: x.clamp(-largest, largest).float() for k, x in drawn.items()}


def seen(ask: RunRequest, body: bytes) -> Any:
    """What the coordinator gets, without the numbers of the weights."""
    try:
        answer = ask("do", body)
    except CallRefused as refusal:
        return "refused", refusal.code, refusal.words
    head, rest = payload.unpack(answer)
    parts: list[Tree] = [payload.decoded(rest, n) for n in range(len(rest))]
    shapes = map_tensors(lambda x: (x.shape, bool(x.isfinite().all())) if x.dim() else x, parts)  # type: ignore[arg-type, return-value]
    return len(answer), head, repr(shapes)


def test_no_argument_makes_a_reply_depend_on_a_row(
    pair: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, found = np.random.default_rng(0), list[str]()
    with torch.no_grad():
        party: Any = next(iter(pair[0].host._node_runs.values())).party
        like = {k: v.clone() for k, v in party.params.items()}
    answered = 0
    for call in range(QUESTIONS):
        shared = {"t": call, "weights": crafted(rng, like)}
        outcomes = []
        for ask in pair:
            draws = np.random.default_rng(call)
            monkeypatch.setattr(
                noise, "_uniform", lambda count, draws=draws: 1 - draws.random(count)
            )
            outcomes.append(seen(ask, doing(call, ask.host, round=call, shared=shared)))
        answered += outcomes[0][0] != "refused"
        if outcomes[0] != outcomes[1]:
            found.append(f"{call}: {outcomes[0]!s:.80} / {outcomes[1]!s:.80}")
    assert answered > QUESTIONS / 4  # many questions are within the bounds of arguments
    assert not found, f"{len(found)} of {QUESTIONS}: {found[:3]}"


def test_arguments_beyond_a_bound_are_refused_before_the_work(pair: list[RunRequest]) -> None:
    ask, wide = pair[0], torch.tensor([1e4, -1.01e4])
    (node_run,) = ask.host._node_runs.values()
    party: Any = node_run.party
    for call, x in enumerate((wide, torch.tensor([float("inf")]), torch.tensor([float("nan")]))):
        weights = {
            k: v.flatten().index_fill(0, torch.tensor([0]), float(x[-1])).view_as(v)
            for k, v in party.params.items()
        }
        refusal = ask.refused(
            "do", doing(call, ask.host, round=call, shared={"t": call, "weights": weights})
        )
        assert "must be numbers of at most 10000" in refusal.words
    assert not ask.host.budget.spent("wards").releases


@pytest.mark.parametrize(
    "error", [RuntimeError("row 7"), MessageError("row 7"), NotReady(), MemoryError("row 7")]
)
def test_a_failure_has_no_reason(
    error: Exception, pair: list[RunRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a page fail by a row after all, as by memory, its kind of failure tells
    nothing else.
    """
    ask = pair[0]
    (node_run,) = ask.host._node_runs.values()

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(type(node_run.party), "update", fail)
    code, head, _ = seen(ask, doing(0, ask.host, round=0))
    assert (
        code != "refused"
        and head["lines"] == [{"failure": "raised", "injected": False}]
        and head["notes"] == {}
    )


def odd_trees(rng: Rng, layout: Any) -> dict[str, Any]:
    """Trees that nobody drew: too narrow for some bins, with circles, leaves without a value, or
    huge values.
    """
    made = arrays(trees_tree(random_trees.drawn(layout, 1, 4, rng)))
    made["value"] = rng.integers(-(2**62), 2**62, made["value"].shape) >> rng.integers(0, 62)
    kind = rng.choice(["honest", "narrow", "circle", "short", "column", "wide"])
    inner = np.flatnonzero(made["feature"] >= 0)
    if kind == "narrow":
        made["left"] = made["left"][:, :1]
    if kind == "circle" and len(inner):
        made["child"][rng.choice(inner)] = rng.integers(-2, len(made["feature"]) + 2)
    if kind == "short":
        made["value"] = made["value"][: rng.integers(1, len(made["value"]) + 1)]
    if kind == "column" and len(inner):
        made["feature"][rng.choice(inner)] = rng.integers(-2, 6)
    if kind == "wide":
        made["value"] = np.repeat(made["value"], 2, axis=1)
    return tensors(**made)


def test_no_tree_makes_a_reply_depend_on_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees are sent for nothing: `begin` has no noise and is not charged."""
    grid = {"a": (-3.0, 3.0), "b": (-90.0, 90.0)}
    pair = pair_of(
        tmp_path,
        method="fedextra",
        models={},
        params={"bins": 24, "dp": {"sigma": 4.0, "grid": grid}},
    )
    rng, found, answered = np.random.default_rng(0), list[str](), 0
    party: Any = next(iter(pair[0].host._node_runs.values())).party
    layout = layout_of(party.layout)
    for call in range(120):
        method, outcomes = ("begin", "sums")[call % 2], []
        shared: dict[str, Any] = {"trees": odd_trees(rng, layout)}
        shared |= (
            {"t": call} if method == "sums" else {"layout": None, "first": len(party.trees["root"])}
        )
        for ask in pair:
            draws = np.random.default_rng(call)
            monkeypatch.setattr(
                noise, "_uniform", lambda count, draws=draws: 1 - draws.random(count)
            )
            outcomes.append(
                seen(ask, doing(call, ask.host, round=call, method=method, shared=shared))
            )
        answered += "failure" not in repr(outcomes[0])
        if outcomes[0] != outcomes[1]:
            found.append(f"{call}: {outcomes[0]!s:.80} / {outcomes[1]!s:.80}")
    for ask in pair:
        ask.close()
    assert answered > 30
    assert not found, f"{len(found)} of 120: {found[:3]}"


WAYS: dict[str, dict[str, Any]] = {
    "weights": {"dp": DP},
    "weights of peers": {"dp": {"unit": "rows", **DP}},
    "φ": {"dp": {"target": "phi", "sigma": 2.0}, "threshold": "anchored"},
    "mean embedding": {"trust": "kernel", "trust_epsilon": 2.0},
    "leaves": {"dp": {"sigma": 4.0, "grid": {str(k): (-3.0, 3.0) for k in range(64)}}},
}
"""Settings by which a method may promise an ε."""


def promising() -> Iterator[tuple[str, str]]:
    """Each method of the registry, with each way in which it promises an ε."""
    for name, method in registry().items():
        for way, params in WAYS.items():
            with contextlib.suppress(ConfigError):
                if method.configure(params=params).promises:
                    yield name, way


NOISY = [*promising()]


def test_every_guarantee_is_in_the_test_of_widths() -> None:
    assert {way for _, way in NOISY} == {*WAYS}
    assert {"fedlp-dp", "fedsgd-dp", "gossip", "fedal", "feddf", "afind-plus", "fedextra"} <= {
        name for name, _ in NOISY
    }


@pytest.mark.parametrize(("name", "way"), NOISY)
def test_numbers_with_a_guarantee_have_one_width(name: str, way: str) -> None:
    """Those of a message are in tensors; a number as text would show its digits by the length of
    the message.
    """
    small = run_of(name, "none")
    data = small.data.model_copy(update={"clients": 3})
    kind = small.model_copy(
        update={"rounds": 1, "data": data, "faults": Faults(), "params": small.params | WAYS[way]}
    )
    plan, plain = build(kind), r" (int|float|bool|str|\d+ leaves)(;|$)"
    with start(plan) as engine:
        graph = None if plan.graph is None else dict(enumerate(plan.graph))
        fed = Federation(engine, seed=0, graph=graph, param_shapes=plan.param_shapes)
        for _ in plan.method.round(fed, plan.server, engine.ids, plan.cfg, 0):
            pass
    sent = [entry for entry in fed.ledger if entry.sender != fed.coordinator]
    assert re.search(plain, "rows int; w float32[3]") and not re.search(
        plain, "rows int64[]; w float32[3]"
    )
    assert sent or name in ("local", "alone")
    assert not [entry.what for entry in sent if re.search(plain, entry.what)]


def test_replies_with_a_guarantee_leave_at_multiples_of_the_owner_s_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the work takes, and whether it fails; a stub for the clock."""
    path = rows(tmp_path / "own.csv", 80, 3)
    public = rows(tmp_path / "public.csv", 50, 9, labels=False)
    data = {
        "wards": {
            "rows": path,
            "public": public,
            "reply_every": 2.0,
            "epsilon": float("inf"),
            **ALLOWED,
        }
    }
    ask = RunRequest(node(tmp_path, methods=["fedavg-dp"], data=data))
    now, left = 100.0, list[float]()
    kind = run(
        method="fedavg-dp",
        models={"pool": ["linear"]},
        params={"batch_size": 100, "epochs": 1, "dp": DP},
    )
    ask("open", opening(for_nodes(build(kind, PrivateData(public=public))).model_dump_json()))

    (node_run,) = ask.host._node_runs.values()

    def sleep(seconds: float) -> None:
        """A call that waits behind this one waits for the worker, and another one of this run for
        its lock.
        """
        assert threading.current_thread().name.startswith("fedloom-work") and node_run.lock.locked()
        left.append(now + seconds - 100.0)

    ask.host._clock, ask.host._sleep = lambda: now, sleep
    honest = task_runner.work

    def work(*given: Any) -> bytes:
        nonlocal now
        now = 100.0 + took
        return honest(*given)

    monkeypatch.setattr(service, "work", work)
    for call, took in enumerate((0.1, 1.9, 2.1)):  # noqa: B007 - `work` reads it
        now = 100.0
        ask("do", doing(call, ask.host, round=call))
    now, took = 100.0, 3.7
    ask.refused("do", doing(3, ask.host, round=0))  # out of turn: found after the work began
    ask.close()
    assert left == pytest.approx([2.0, 2.0, 4.0, 4.0])
