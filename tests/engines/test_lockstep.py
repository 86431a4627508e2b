"""Runs in lock-step give the numbers that each gives alone, and their parties really are batched
together.
"""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom import methods
from fedloom.core.context import ClientContext
from fedloom.core.errors import MethodError
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.core.method import Method
from fedloom.engines import Engine, LocalEngine
from fedloom.engines._vmap_context import run_vmapped
from fedloom.engines.batched import STRIDE
from fedloom.engines.lockstep import Lane, LockstepEngine, in_lockstep
from tests.toy import CLASSES, common, contexts, rows

FEDAVG = methods.load(Path(__file__).parents[2] / "examples" / "fedavg.py")
N = 3
Make = Callable[..., Engine]


class Run:
    """A small run: its own rows, public rows and settings."""

    def __init__(
        self, method: Method, seed: int, rounds: int = 3, done: int = 0, **params: Any
    ) -> None:
        self.method, self.seed, self.rounds, self.done = method, seed, rounds, done
        self.cfg = method.configure(params={"batch_size": 8, **params})
        self.states: dict[int, dict[str, Any]] = {}

    def go(self, make: Make) -> dict[str, Any]:
        """All rounds; every leaf of every party's state after them."""
        network = partial(common, width=8)
        client_contexts = contexts(
            N, seed=self.seed, make=network, data=lambda i: rows(24, 100 * self.seed + i)
        )
        server_side = ClientContext(
            id=0, seed=self.seed, parties=N, classes=CLASSES, network=network
        )
        server = self.method.server(self.cfg, server_side) if self.method.server else None
        engine = make(
            [self.method.client(self.cfg, client_context) for client_context in client_contexts],
            seed=self.seed,
        )
        if self.states:
            engine.load(self.states)
        shapes = {k: p.detach().to("meta") for k, p in network().named_parameters()}
        fed = Federation(engine, seed=self.seed, param_shapes=shapes)
        for t in range(self.done, self.rounds):
            fed.round = t
            for _ in self.method.round(fed, server, engine.ids, self.cfg, t):
                pass
        self.remarks = engine.account().remarks
        return {
            f"{i} {path}": leaf
            for i, state in engine.states().items()
            for path, leaf in leaves(state)
        }


def together(*runs: Run) -> list[Any]:
    def work(run: Run) -> Callable[[Lane[Any]], dict[str, Any]]:
        return lambda lane: run.go(partial(LockstepEngine, lane=lane))

    return in_lockstep([work(run) for run in runs])


def check_alike(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    for path, x in a.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            assert torch.allclose(x, b[path], atol=1e-5), path
        else:
            assert torch.equal(x, b[path]) if isinstance(x, Tensor) else x == b[path], path


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """The method, the number of parties and the number of runs in each batch."""
    seen: list[tuple[str, int, int]] = []

    def counted(memory: Tensor, where: Any, parties: Any, method: str, *others: Any) -> Any:
        replies = run_vmapped(memory, where, parties, method, *others)
        seen.append((method, len(parties), len({p.context.seed for p in parties})))
        return replies

    monkeypatch.setattr("fedloom.engines.batched.run_vmapped", counted)
    yield seen


@pytest.mark.parametrize("name", ["fedavg", "fedal", "ditto", "gossip"])
def test_each_run_is_the_run_that_it_is_alone(
    name: str, batches: list[tuple[str, int, int]]
) -> None:
    method = methods.find(name)
    alone = [Run(method, seed).go(LocalEngine) for seed in (1, 2, 3)]
    runs = [Run(method, seed) for seed in (1, 2, 3)]
    for one, other in zip(alone, together(*runs), strict=True):
        check_alike(one, other)
    assert (
        batches
        and {count for _, count, _ in batches} == {3 * N}
        and {r for *_, r in batches} == {3}
    )
    assert runs[0].remarks[0] == "in lock-step, runs: 3"


@pytest.mark.parametrize("changed", [{"lr": 0.003}, {"lr": 0.02, "lam": 0.3}])
def test_runs_of_other_rates_and_weights_share_a_batch(
    changed: dict[str, Any], batches: list[tuple[str, int, int]]
) -> None:
    method = methods.find("ditto")
    alone = [Run(method, 1).go(LocalEngine), Run(method, 2, **changed).go(LocalEngine)]
    for one, other in zip(alone, together(Run(method, 1), Run(method, 2, **changed)), strict=True):
        check_alike(one, other)
    assert {(count, r) for method_, count, r in batches if method_ != "public_digest"} == {
        (2 * N, 2)
    }


def test_runs_whose_operations_differ_are_batched_each_for_itself(
    batches: list[tuple[str, int, int]],
) -> None:
    alone = [Run(FEDAVG, 1).go(LocalEngine), Run(FEDAVG, 2, batch_size=4).go(LocalEngine)]
    for one, other in zip(
        alone, together(Run(FEDAVG, 1), Run(FEDAVG, 2, batch_size=4)), strict=True
    ):
        check_alike(one, other)
    assert {r for *_, r in batches} == {1}


def test_a_run_that_resumes_earlier_catches_up(batches: list[tuple[str, int, int]]) -> None:
    """Run 2 is at round 2 of 4; it waits until run 1, which begins anew, is there too."""
    local = methods.find("local")
    whole = [Run(local, seed, rounds=4).go(LocalEngine) for seed in (1, 2)]
    half = Run(local, 2, rounds=2)
    engine: list[Engine] = []

    def kept(*args: Any, **kwargs: Any) -> Engine:
        engine.append(LocalEngine(*args, **kwargs))
        return engine[0]

    half.go(kept)
    resumed = Run(local, 2, rounds=4, done=2)
    resumed.states = engine[0].states()
    for one, other in zip(whole, together(Run(local, 1, rounds=4), resumed), strict=True):
        check_alike(one, other)
    assert [r for *_, r in batches] == [1] * 2 + [2] * 2


def test_a_run_that_fails_leaves_the_others_alone() -> None:
    alone = Run(FEDAVG, 1).go(LocalEngine)

    def fail(lane: Lane[Any]) -> dict[str, Any]:
        Run(FEDAVG, 7, rounds=1).go(partial(LockstepEngine, lane=lane))
        raise MethodError("the second round")

    first, second = in_lockstep(
        [lambda lane: Run(FEDAVG, 1).go(partial(LockstepEngine, lane=lane)), fail]
    )
    assert isinstance(first, dict) and isinstance(second, MethodError)
    check_alike(alone, first)


def test_a_mistake_of_the_page_reaches_every_run() -> None:
    def work(lane: Lane[Any]) -> None:
        cfg = FEDAVG.configure()
        client_contexts = contexts(N, make=common)
        LockstepEngine(
            [FEDAVG.client(cfg, client_context) for client_context in client_contexts], lane
        ).call([0, 1], "fly", {}, None, (0, 0))

    for outcome in in_lockstep([work, work]):
        assert isinstance(outcome, MethodError) and "has no method 'fly'" in str(outcome)


def test_an_interrupt_ends_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedloom.engines.batched.Batcher.call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        together(Run(FEDAVG, 1), Run(FEDAVG, 2))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("run ")]


def test_the_generator_of_a_run_is_its_own() -> None:
    def work(seed: int, lane: Lane[Any]) -> list[float]:
        torch.manual_seed(seed)
        engine = LockstepEngine(
            [
                FEDAVG.client(FEDAVG.configure(), client_context)
                for client_context in contexts(N, make=common)
            ],
            lane,
        )
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand(())))
            engine.call([0], "public_digest", {}, None, None)
        return drawn

    for seed, drawn in zip((5, 6), in_lockstep([partial(work, 5), partial(work, 6)]), strict=True):
        torch.manual_seed(seed)
        assert drawn == [float(torch.rand(())) for _ in range(3)]


def test_numbers_of_parties_keep_runs_apart() -> None:
    assert STRIDE > 10**9  # more than the ids of a run
