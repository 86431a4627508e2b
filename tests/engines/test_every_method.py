"""Every registered method on every engine, against the loop.

Where the arithmetic is the same, so are the bits. Batching changes the order of sums: weights then agree to 1e-5
after three rounds, and what a client answers to 1e-3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.experiment.config import EngineConfig
from fedloom.experiment.engine import start
from fedloom.experiment.evaluate import state_sha256
from fedloom.experiment.reading import check
from fedloom.experiment.world import build
from fedloom.federation import Federation
from fedloom.message import leaves
from fedloom.methods import registry

ROUNDS = 3
WORLD: dict[str, Any] = {
    "rounds": ROUNDS,
    "data": {"name": "digits", "clients": 4, "public": 60, "test_rows": 50, "own_test_rows": 20},
    "models": {"pool": ["mlp", "linear", "cnn-small"]},
    "faults": {"dropout": 0.05, "crash": 0.05, "nan": 0.05},
}
SMALL = {"tau": 2, "batch_size": 8}
ENGINES: dict[str, dict[str, Any]] = {
    "two workers": {"workers": 2},
    "three workers": {"workers": 3},
    "memory": {"memory_mb": 0},
    "isolated": {"name": "isolated"},
    "batched": {"name": "batched"},
    "chunks": {"name": "batched", "chunk_size": 2},
    "auto": {"name": "auto"},
    "ray": {"name": "ray", "workers": 2},
}
EXACT = {"two workers", "three workers", "memory", "isolated", "ray"}


def ran(method: str, norm: str, engine: str) -> dict[str, Any]:
    """What a run comes to: all that a report or a resume would need."""
    torch.set_num_threads(1)
    known = registry()[method].config.model_fields
    run = check(
        {
            "run": {
                **WORLD,
                "method": method,
                "params": {k: v for k, v in SMALL.items() if k in known and k not in registry()[method].fixed},
                "models": {**WORLD["models"], "norm": norm},
            }
        }
    ).run
    world = build(run.model_copy(update={"engine": EngineConfig(**ENGINES.get(engine, {}))}))
    with start(world) as there:
        fed = Federation(there, seed=run.seed)
        for t in range(ROUNDS):
            fed.round = t
            for _ in world.method.round(fed, world.server, there.ids, world.cfg, t):
                pass
        states = {i: dict(leaves(dict(s))) for i, s in there.states().items()}
        states = {i: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for i, s in states.items()}
        server = {} if world.server is None else {k: v.clone() for k, v in world.server.params.items()}
        return {
            "sha": state_sha256((str(i), s) for i, s in there.states().items()),
            "states": states,
            "server": server,
            "ledger": fed.ledger.state(),
            "failures": [(f.round, f.party, f.kind, f.reason) for f in fed.failures],
            "notes": there.notes(),
            "answers": there.call(there.ids, "answers", {"on": "test"}, None, None),
            "account": there.account(),
        }


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One Ray for all tests here, so that each need not start its own."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@cache
def loop_of(method: str, norm: str) -> dict[str, Any]:
    return ran(method, norm, "loop")


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("method", list(registry()))
@pytest.mark.parametrize("engine", list(ENGINES))
def test_the_engine_gives_the_loop_s_numbers(
    method: str, norm: str, engine: str, request: pytest.FixtureRequest
) -> None:
    if engine == "ray":
        request.getfixturevalue("cluster")
    loop, other = loop_of(method, norm), ran(method, norm, engine)
    assert loop["failures"] == other["failures"]
    assert loop["ledger"] == other["ledger"]
    assert {i: set(n) for i, n in loop["notes"].items()} == {i: set(n) for i, n in other["notes"].items()}
    if engine in EXACT:
        assert loop["sha"] == other["sha"]
        assert loop["notes"] == other["notes"]
        assert all(torch.equal(v, other["server"][k]) for k, v in loop["server"].items())
        for a, b in zip(loop["answers"], other["answers"], strict=True):
            assert torch.equal(a["predicted"], b["predicted"])
        return
    for a, b in zip(loop["answers"], other["answers"], strict=True):
        assert torch.allclose(a["loss"], b["loss"], atol=1e-3)
    if norm == "none":  # a bias before a BatchNorm has a gradient of noise, which Adam blows up
        for i, state in loop["states"].items():
            for k, v in state.items():
                if isinstance(v, Tensor) and v.is_floating_point():
                    assert torch.allclose(v, other["states"][i][k], atol=1e-5), (i, k)
                elif isinstance(v, Tensor):
                    assert torch.equal(v, other["states"][i][k]), (i, k)
                else:
                    assert v == other["states"][i][k], (i, k)
