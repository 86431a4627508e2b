"""Every registered method on every engine, against the loop.

Where the arithmetic is the same, so are the bits. Batching changes the order of sums: weights then
agree to 1e-5 after three rounds, and what a client answers to 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from benchmarks.gpu import small_run
from torch import Tensor

from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.core.method import Method
from fedloom.engines import Engine
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep
from fedloom.experiment.config.run import EngineConfig, RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import state_sha256
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry

ROUNDS = 3
WORLD: dict[str, Any] = {
    "rounds": ROUNDS,
    "data": {
        "name": "digits",
        "clients": 4,
        "public_rows": 60,
        "test_rows": 50,
        "own_test_rows": 20,
    },
    "faults": {"dropout": 0.05, "crash": 0.05, "nan": 0.05},
}
COLUMNS: dict[str, Any] = {"seed": 9, "columns": {"aligned": 24, "unaligned": 20}}
"""Where parties hold other columns of the same people. On this seed faults hit every method and
stop none.
"""
POOL = ["mlp", "linear", "cnn-small"]
ONE_NETWORK = ["mlp"]
SERVER: dict[str, Any] = {"pretrained": {"model": "mlp", "epochs": 2}}
"""A pretrained model, for methods that may have one: it is the clients' network."""
FEW_ROWS = 0.85
"""The part of the rows left out where a round is passes over the own rows."""
SMALL = {
    "tau": 2,
    "batch_size": 8,
    "epochs": 1,
    "neighbours": 2,
    "stage1_rounds": 1,
    "steps": 2,
    "embedding_dim": 40,
    "projection_dim": 40,
    "pretrain_rounds": 1,
    "pretrain_steps": 1,
    "server_steps": 5,
    "local_rounds": 2,
    "aggregator_steps": 3,
    "lot": 4,
}
"""Settings by name, for the methods that have them as whole numbers."""
ENGINES: dict[str, dict[str, Any]] = {
    "two workers": {"workers": 2},
    "three workers": {"workers": 3},
    "isolated": {"name": "isolated"},
    "batched": {"name": "batched"},
    "chunks": {"name": "batched", "chunk_size": 2},
    "auto": {"name": "auto"},
    "ray": {"name": "ray", "workers": 2},
    "lockstep": {"name": "batched"},
}
LINEAR: dict[str, Any] = {
    "exchange": {},
    "fedglm": {"l2": 1.0},
    "fedcox": {"l2": 1.0, "time": "mean area", "event": "benign", "times": 20},
    "stats": {},
}
EXACT = {"two workers", "three workers", "isolated", "ray"}
THOROUGH = ("fedal", "fedmd-lf", "local", "fedavg", "gossip", "afind-plus", "proto-evfl", "split")
"""Methods that differ most in what they ask of an engine: these meet every engine."""
ON_RAY = ("fedavg", "proto-evfl")
"""A start of Ray takes ten CPU seconds: one method with weights, one with columns; test_ray.py has
FedAL and peers.
"""
LEFT_OUT = {("ray", "none"), ("lockstep", "batch")}
"""Adam blows up the noise before a BatchNorm (see below), in larger batches the more."""
EVERYTHING = [
    (engine, norm)
    for engine in ENGINES
    for norm in ("none", "batch")
    if (engine, norm) not in LEFT_OUT
]
ELSE = [("two workers", "batch"), ("isolated", "batch"), ("batched", "none"), ("lockstep", "none")]
"""What the others meet. Ray's workers do what the two workers do, and each start of them takes
seconds.
"""
AT_NIGHT = ("two workers", "lockstep")
"""Engines that the others meet at night."""
CASES = [
    pytest.param(
        engine,
        method,
        norm,
        marks=pytest.mark.slow
        if engine == "ray" or (engine in AT_NIGHT and method not in THOROUGH)
        else (),
    )
    for method in registry()
    for engine, norm in (EVERYTHING if method in THOROUGH else ELSE)
    if engine != "ray" or method in ON_RAY
]


def small(method: Method) -> dict[str, Any]:
    """The small settings that this method has."""
    whole = {k for k, f in method.config.model_fields.items() if f.annotation in (int, int | None)}
    return {k: v for k, v in SMALL.items() if k in whole and k not in method.fixed}


def tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """All leaves of a party's state by path, copied."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in leaves(dict(state))}


def run_of(name: str, norm: str) -> RunConfig:
    """A small run of a method."""
    method = registry()[name]
    if norm == "batch" and method.configure().promises:
        norm = "group"  # the bound of a row needs a network in which rows do not affect each other
    values = {
        **WORLD,
        "method": name,
        "params": small(method),
        "models": {"pool": POOL, "norm": norm},
    }
    if "secure sums" in method.needs:
        values["aggregate"] = {"secure": True}
    if "one network" in method.needs:
        values["models"]["pool"], values["data"] = (
            ONE_NETWORK,
            {**WORLD["data"], "test_fraction": FEW_ROWS},
        )
    if method.family == "tables":  # a round is many calls, all of which must succeed
        few: dict[str, float] = {"depth": 3, "bins": 8, **({"mix": 2} if method.fixed else {})}
        few = LINEAR.get(name, few)
        values |= {"faults": {"dropout": 0.01}, "params": {**small(method), **few}}
        if name == "fedcox":  # which needs two classes
            values["data"] = {
                **WORLD["data"],
                "name": "breast_cancer",
                "public_rows": 0,
                "partition": "iid",
            }
    if "pretrained server model" in method.needs or method.family == "meta":
        values |= {
            "pretrained": {**SERVER["pretrained"], "norm": norm},
            "data": {**values["data"], "server_rows": 200},
        }
    if method.setting == "vertical":
        centered = {"centered": norm == "batch"} if "centered" in method.config.model_fields else {}
        values |= {**COLUMNS, "params": {**small(method), **centered}}
        if method.any_contributor:
            values["columns"] = {**COLUMNS["columns"], "missing": 0.3}
        if "aggregate" in method.config.model_fields:  # what is averaged must be alike
            values["models"]["pool"] = ONE_NETWORK
    return check({"run": values}).run


def ran(name: str, norm: str, engine: str) -> dict[str, Any]:
    """What a run comes to: all that a report or a resume would need."""
    torch.set_num_threads(1)
    run = run_of(name, norm)
    if engine == "lockstep":
        return beside_another_run(run)
    run_plan = build(run.model_copy(update={"engine": EngineConfig(**ENGINES.get(engine, {}))}))
    return measured(run_plan, start(run_plan))


def beside_another_run(run: RunConfig) -> dict[str, Any]:
    """The run in lock-step with one of another seed and, if the method has one, learning rate."""
    params = {
        k: 0.7 * run.resolve()[1].lr
        for k in ("lr",)
        if isinstance(getattr(run.resolve()[1], k, None), float)
    }
    other = run.model_copy(update={"seed": run.seed + 1, "params": {**run.params, **params}})

    def work(run_plan: RunPlan) -> Callable[[Lane[Any]], dict[str, Any]]:
        own: dict[str, Any] = {"seed": run_plan.run.seed, "faults": run_plan.run.faults}
        return lambda lane: measured(
            run_plan, LockstepEngine((make() for make in run_plan.clients), lane, **own)
        )

    first, second = in_lockstep([work(build(one)) for one in (run, other)])
    if isinstance(second, BaseException):
        raise second
    if isinstance(first, BaseException):
        raise first
    return first


def measured(run_plan: RunPlan, engine: Engine) -> dict[str, Any]:
    """Some rounds of a run, and what they come to."""
    run = run_plan.run
    with engine as there:
        graph = None if run_plan.graph is None else dict(enumerate(run_plan.graph))
        fed = Federation(
            there,
            seed=run.seed,
            graph=graph,
            param_shapes=run_plan.param_shapes,
            colocated=run_plan.colocated,
        )
        for t in range(ROUNDS):
            fed.round = t
            for _ in run_plan.method.round(fed, run_plan.server, there.ids, run_plan.cfg, t):
                pass
        answers = answered(run_plan, there)
        return {
            "sha": state_sha256((str(i), s) for i, s in there.digests().items()),
            "states": {i: tensors(s) for i, s in there.states().items()},
            "server": tensors(run_plan.server.state()) if run_plan.server else {},
            "ledger": fed.ledger.state(),
            "failures": [(f.round, f.party, f.kind, f.reason) for f in fed.failures],
            "notes": there.notes(),
            "answers": answers,
            "account": there.account(),
        }


def answered(run_plan: RunPlan, there: Engine) -> list[dict[str, Tensor]]:
    """What an evaluation sees: all parties' answers in each mode, or the active party's decision
    from all of them.
    """
    active: Any = run_plan.server
    broadcast = active.broadcast() if active else {}
    looks: list[tuple[str, dict[str, Any]]]
    if run_plan.method.setting == "vertical":
        looks = [("predictions_alone", {"on": "own"}) for _ in run_plan.cfg.eval_modes]
    else:
        looks = [
            ("predictions", {"on": "own", "eval_mode": eval_mode, "broadcast": broadcast})
            for eval_mode in run_plan.cfg.eval_modes
        ]
        looks = [("predictions", {"on": "test", "broadcast": broadcast}), *looks]
    found: list[Any] = [
        reply for what, how in looks for reply in there.call(there.ids, what, how, None, None)
    ]
    if active and run_plan.method.setting == "vertical":
        parts = dict(
            zip(
                there.ids,
                there.call(there.ids, "contribution", {"on": "test"}, None, None),
                strict=True,
            )
        )
        logits = active.decide(parts)
        found.append({"predicted": logits.argmax(-1), "loss": logits.logsumexp(-1).mean()})
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for all tests here, so that each need not start its own."""
    ray = pytest.importorskip("ray")
    ray.init(
        "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    yield
    ray.shutdown()


@cache
def loop_of(method: str, norm: str) -> dict[str, Any]:
    return ran(method, norm, "loop")


@pytest.mark.parametrize(("engine", "method", "norm"), CASES, ids=lambda value: value)
def test_the_engine_gives_the_loop_s_numbers(
    method: str, norm: str, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "ray":
        request.getfixturevalue("cluster")
    loop, other = loop_of(method, norm), ran(method, norm, engine)
    assert loop["failures"] == other["failures"]
    assert loop["ledger"] == other["ledger"]
    assert {i: set(n) for i, n in loop["notes"].items()} == {
        i: set(n) for i, n in other["notes"].items()
    }
    if engine in EXACT:
        assert loop["sha"] == other["sha"]
        assert loop["notes"] == other["notes"]
        alike(loop["server"], other["server"], exact=True)
        for a, b in zip(loop["answers"], other["answers"], strict=True):
            assert torch.equal(a["predicted"], b["predicted"])
        return
    for a, b in zip(loop["answers"], other["answers"], strict=True):
        if "loss" in a:  # one that answers alone from prototypes gives none
            assert torch.allclose(a["loss"], b["loss"], atol=1e-3)
    if norm == "none":  # a bias before a BatchNorm has a gradient of noise, which Adam blows up
        alike(loop["server"], other["server"])
        for i, state in loop["states"].items():
            alike(state, other["states"][i])


def alike(a: dict[str, Any], b: dict[str, Any], *, exact: bool = False) -> None:
    """The leaves of two states are the same, numbers with a point up to 1e-5 unless exactly."""
    assert a.keys() == b.keys()
    for path, x in a.items():
        if not isinstance(x, Tensor):
            assert x == b[path], path
        elif x.is_floating_point() and not exact:
            assert torch.allclose(x, b[path], atol=1e-5), path
        else:
            assert torch.equal(x, b[path]), path


@pytest.mark.parametrize("method", list(registry()))
def test_the_loop_s_run_is_one_worth_comparing(method: str) -> None:
    """Passes were made, something failed as ordered, and messages were sent."""
    loop = loop_of(method, "batch")
    if not registry()[method].fixed.get("federated", True):  # the server alone works, if anybody
        assert not loop["ledger"]["entries"]
        return
    if registry()[method].family == "tables":
        learned = {
            "stats": "shares",
            "fedglm": "beta",
            "fedcox": "beta",
            "exchange": "models[0].linear.bias",
        }
        name = learned.get(method, "trees.root")
        assert loop["ledger"]["entries"] and all(
            len(state[name]) for state in loop["states"].values()
        )
        return
    if "no network" in registry()[method].needs:
        base, each = (10, 10) if method == "vertical-boosting" else (0, 1)  # trees, one a class
        assert loop["server"]["forests.0.root"].numel() == base + 3 * SMALL["lot"] * each
        assert bool(loop["ledger"]["entries"]) == (method != "active-forest")
        return
    if registry()[method].configure().promises:  # whose networks have no BatchNorm to count passes
        assert loop["ledger"]["entries"] and loop["failures"]
        return
    learns = [0] if method == "active-only" else list(loop["states"])
    passes = [
        v for i in learns for k, v in loop["states"][i].items() if k.endswith("num_batches_tracked")
    ]
    assert passes and all(count > 0 for count in passes)
    assert loop["failures"] and (loop["ledger"]["entries"] or method == "active-only")


def test_weights_that_were_decoded_give_the_bits_of_live_ones() -> None:
    """A decoded weight of a convolution with one input channel has other strides, by which torch
    picks a kernel.
    """
    values = {
        "method": "augfl",
        "rounds": 1,
        "models": {"pool": ["cnn-small"]},
        "data": {**WORLD["data"], "server_rows": 100},
    }
    run = check({"run": values | {"pretrained": {"model": "mlp", "epochs": 1}}}).run
    shas = [
        execute(run.model_copy(update={"engine": EngineConfig(name=name)})).summary["state_sha256"]
        for name in ("local", "isolated")
    ]
    assert shas[0] == shas[1]


@pytest.mark.parametrize("method", sorted(registry()))
def test_the_gpu_benchmark_has_a_run_of_every_method(method: str) -> None:
    assert small_run(method, {"name": "local"}).rounds == 2
