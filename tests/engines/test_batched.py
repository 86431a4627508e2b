"""Parties together give the numbers of parties in turn, or are done in turn and the account says
so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom import methods, models
from fedloom.core import message
from fedloom.core.context import ClientContext, PublicSet, Rows
from fedloom.core.engine import Failure
from fedloom.core.errors import MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import floats, leaves
from fedloom.core.method import Method, MethodConfig
from fedloom.core.optim import SGD, Adam
from fedloom.core.party import Party
from fedloom.engines import BatchedEngine, Engine, LocalEngine
from fedloom.engines._vmap_context import run_vmapped
from fedloom.models import Norm
from tests.toy import CLASSES, FEATURES, contexts, rows

FEDAVG = methods.load(Path(__file__).parents[2] / "examples" / "fedavg.py")
FEDAL = methods.find("fedal")
N = 5


def net(i: int, *middle: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(50 + i)
        return nn.Sequential(
            nn.Linear(FEATURES, 8), *(m() for m in middle), nn.ReLU(), nn.Linear(8, CLASSES)
        )


def even(i: int) -> Rows:
    return rows(40, i)


def states(engine: Engine) -> dict[int, Any]:
    return {**engine.states()}


def run(
    make: Callable[..., Engine],
    method: Method,
    *,
    rounds: int = 3,
    network: Callable[[int], nn.Module] = net,
    data: Callable[[int], Rows] = even,
    faults: Faults | None = None,
    **params: Any,
) -> tuple[Engine, Federation, Party[Any] | None]:
    client_contexts = contexts(N, make=network, data=data)
    cfg = method.configure(params=params)
    server_side = ClientContext(id=0, parties=N, classes=CLASSES, network=partial(network, 0))
    server = method.server(cfg, server_side) if method.server else None
    engine = make(
        [method.client(cfg, client_context) for client_context in client_contexts], faults=faults
    )
    fed = Federation(engine)
    for t in range(rounds):
        fed.round = t
        for _ in method.round(fed, server, engine.ids, cfg, t):
            pass
    return engine, fed, server


def difference(a: Engine, b: Engine) -> float:
    """The largest between two engines' states; plain leaves must be equal."""
    most = 0.0
    for i, state in a.states().items():
        other = dict(leaves(b.states()[i]))
        for path, x in leaves(state):
            if isinstance(x, Tensor):
                most = max(
                    most,
                    float((x.double() - other[path].double()).abs().max()) if x.numel() else 0.0,
                )
            else:
                assert x == other[path]
    return most


@pytest.mark.parametrize("name", ["fedal", "fedmd-lf", "fedmd", "local"])
def test_fedal_together_is_fedal_in_turn(name: str) -> None:
    method = methods.find(name)
    loop, fed_a, server_a = run(LocalEngine, method, batch_size=8)
    together, fed_b, server_b = run(BatchedEngine, method, batch_size=8)
    assert together.account().remarks == ("5 of 5 parties together, in groups: 1",)
    assert difference(loop, together) < 1e-6
    assert [(e.kind, e.what, e.count, e.bytes) for e in fed_a.ledger] == [
        (e.kind, e.what, e.count, e.bytes) for e in fed_b.ledger
    ]
    notes, others = loop.notes(), together.notes()
    for i in notes:
        assert notes[i].keys() == others[i].keys()
        assert all(notes[i][k] == pytest.approx(others[i][k], abs=1e-6) for k in notes[i])
    if server_a and server_b:
        for k, p in server_a.params.items():
            assert torch.allclose(p, server_b.params[k], atol=1e-6)


def test_batchnorm_statistics_are_each_party_s_own() -> None:
    """A bias before a BatchNorm has a gradient of noise, which Adam blows up: outputs and buffers
    are compared.
    """
    norm = lambda i: net(i, partial(nn.BatchNorm1d, 8))
    loop, *_ = run(LocalEngine, FEDAL, network=norm, batch_size=8)
    together, *_ = run(BatchedEngine, FEDAL, network=norm, batch_size=8)
    for i, state in loop.states().items():
        other: Any = together.states()[i]["buffers"]
        for name, b in state["buffers"].items():
            assert torch.allclose(b.double(), other[name].double(), atol=2e-2), name
        counted = {k: int(v) for k, v in other.items() if k.endswith("tracked")}
        assert set(counted.values()) == {3 * (5 + 5)}
    answers = [e.call(e.ids, "predictions", {"on": "test"}, None, None) for e in (loop, together)]
    for a, b in zip(*answers, strict=True):
        assert torch.allclose(a["loss"], b["loss"], atol=1e-3)


@pytest.mark.parametrize("epochs", [1, 2])
def test_clients_with_fewer_rows_stand_still_when_they_are_done(epochs: int) -> None:
    uneven = lambda i: rows((40, 7, 90, 40, 23)[i], i)
    loop, *_ = run(LocalEngine, FEDAVG, data=uneven, batch_size=8, epochs=epochs)
    together, *_ = run(BatchedEngine, FEDAVG, data=uneven, batch_size=8, epochs=epochs)
    assert together.account().remarks == ("5 of 5 parties together, in groups: 1",)
    assert difference(loop, together) < 1e-6


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_how_many_at_once_does_not_matter(chunk: int) -> None:
    loop, *_ = run(LocalEngine, FEDAL, batch_size=8)
    pieces, *_ = run(partial(BatchedEngine, chunk_size=chunk), FEDAL, batch_size=8)
    assert difference(loop, pieces) < 1e-6


@pytest.mark.each_time("crash", "nan", "late")
@pytest.mark.parametrize("fault", [name for name, value in Faults() if isinstance(value, float)])
def test_faults_strike_the_same_parties(fault: str) -> None:
    faults = Faults(**{fault: 0.3})
    loop, fed_a, _ = run(LocalEngine, FEDAL, faults=faults, batch_size=8)
    together, fed_b, _ = run(BatchedEngine, FEDAL, faults=faults, batch_size=8)
    assert [(f.party, f.kind, f.reason) for f in fed_a.failures] == [
        (f.party, f.kind, f.reason) for f in fed_b.failures
    ]
    assert fed_a.failures
    assert difference(loop, together) < 1e-6


def test_a_nan_party_does_not_touch_the_others() -> None:
    engine, _, _ = run(BatchedEngine, FEDAL, rounds=1, batch_size=8)
    state: Any = engine.states()[2]
    engine.load(
        {
            2: {
                **state,
                "params": {k: torch.full_like(v, float("nan")) for k, v in state["params"].items()},
            }
        }
    )
    replies: list[Any] = engine.call(engine.ids, "predictions", {"on": "test"}, None, None)
    finite = [bool(torch.isfinite(r["loss"])) for r in replies]
    assert finite == [True, True, False, True, True]


# -- pages that need care --------------------------------------------------------------------------


class Config(MethodConfig):
    lr: float = 0.1
    momentum: float = 0.9
    adam: bool = False


class Page(Party[Config]):
    STATE = ("params", "buffers", "opt", "anchor", "seen")

    def setup(self) -> None:
        cfg = self.cfg
        self.network(
            self.context.build(), Adam(cfg.lr) if cfg.adam else SGD(cfg.lr, cfg.momentum, 0.01)
        )
        self.anchor = {k: p.clone() for k, p in self.params.items()}
        self.seen = torch.zeros(3, dtype=torch.float64)

    def towards(self, *, t: int, pull: float) -> Tensor:
        """The loss reads the party's own state: each must be drawn to its own anchor."""

        def loss(x: Tensor, y: Tensor) -> Tensor:
            far = sum((p - self.anchor[k]).square().sum() for k, p in self.params.items())
            self.note("far", far)
            return F.cross_entropy(self.model(x), y) + pull * far

        return self.train(loss, self.batches(t, steps=3, size=8))

    def count(self) -> None:
        self.seen.add_(1)  # in place
        self.anchor = {k: 0.5 * p for k, p in self.params.items()}

    def walk(self, *, t: int) -> Tensor:
        total = torch.zeros(())
        for x, y in self.epochs(t, size=8):
            total = total + self.minimize(lambda a, b: F.cross_entropy(self.model(a), b), x, y)
        return total

    def peek(self) -> float:
        return float(self.seen.sum())

    def chance(self) -> Tensor:
        return torch.rand(4)

    def own_number(self) -> int:
        return self.context.id

    def how_many(self) -> int:
        return len(self.data)

    def weigh(self) -> dict[str, Any]:
        return {"rows": self.row_count, "mean": self.data.x(torch.arange(4)).mean()}

    def answer_back(self, *, text: str, n: int, x: Tensor) -> list[Any]:
        return [text, n, x + self.seen[0], {"params": self.params}]

    def break_(self, *, x: Tensor) -> None:
        self.params = {k: torch.zeros_like(p) for k, p in self.params.items()}
        self.params = {"wrong": x}


def both(data: Callable[[int], Rows] = even, **params: Any) -> tuple[Engine, Engine]:
    cfg = Config(**params)
    return tuple(
        make([Page(cfg, s) for s in contexts(N, make=net, data=data)])
        for make in (LocalEngine, BatchedEngine)
    )  # type: ignore[return-value]


def same(
    a: Engine, b: Engine, method: str, each: dict[int, Any] | None = None, **shared: Any
) -> list[Any]:
    """Both engines' replies, held to be equal; the second's."""
    found = [e.call(e.ids, method, shared, each, (0, 0)) for e in (a, b)]
    for x, y in zip(*found, strict=True):
        assert isinstance(x, Failure) == isinstance(y, Failure)
        if isinstance(x, Failure):
            assert x.reason == y.reason
            continue
        for (path, u), (_, v) in zip(leaves(x), leaves(y), strict=True):
            assert type(u) is type(v), path
            assert torch.allclose(u, v, atol=1e-6) if isinstance(u, Tensor) else u == v, path
    assert difference(a, b) < 1e-6
    return found[1]


@pytest.mark.parametrize(
    "params", [{}, {"momentum": 0.0}, {"adam": True, "lr": 0.01}], ids=["momentum", "sgd", "adam"]
)
def test_a_loss_reads_the_party_s_own_state(params: dict[str, Any]) -> None:
    a, b = both(**params)
    for t in range(3):
        same(a, b, "towards", t=t, pull=0.1)
        same(a, b, "count")
    assert a.notes().keys() == b.notes().keys()
    assert b.account().remarks == ("5 of 5 parties together, in groups: 1",)


def test_each_party_gets_its_own_message_and_plain_values_stay_plain() -> None:
    a, b = both()
    each = {i: {"x": torch.full((2,), float(i), dtype=torch.float64)} for i in range(N)}
    replies = same(a, b, "answer_back", each, text="hi", n=3)
    assert [r[2][0].item() for r in replies] == [0, 1, 2, 3, 4]
    replies[0][3]["params"]["0.weight"].zero_()
    assert difference(a, b) < 1e-6  # a reply is a value
    each[4] = {"x": torch.zeros(3, dtype=torch.float64)}  # of another shape
    same(a, b, "answer_back", each, text="hi", n=3)
    assert len(b.account().remarks) == 1


def test_a_page_that_walks_over_uneven_batches_is_done_in_groups_of_equal_rows() -> None:
    a, b = both(data=lambda i: rows((40, 24, 40, 24, 17)[i], i))
    for t in range(3):
        same(a, b, "walk", t=t)
        same(a, b, "how_many")
    same(a, b, "weigh")


def test_uneven_rows_are_grouped_at_once_so_that_a_resumed_run_has_the_same_bits() -> None:
    uneven = lambda i: rows((40, 24, 40, 24, 17)[i], i)
    (_, whole), (_, resumed) = both(data=uneven), both(data=uneven)
    whole.call(whole.ids, "walk", {"t": 0}, None, (0, 0))
    resumed.load(
        {
            i: {k: message.map_tensors(Tensor.clone, v) for k, v in state.items()}
            for i, state in whole.states().items()
        }
    )
    replies = [
        engine.call(engine.ids, "walk", {"t": 1}, None, (1, 0)) for engine in (whole, resumed)
    ]
    assert all(map(torch.equal, *replies))
    assert difference(whole, resumed) == 0


@pytest.mark.parametrize(
    ("method", "why"), [("peek", "item"), ("chance", "random"), ("own_number", "context.id")]
)
def test_what_cannot_be_batched_is_done_in_turn_and_said(method: str, why: str) -> None:
    a, b = both()
    same(a, b, method)
    assert len(b.account().remarks) == 2
    assert b.account().remarks[1].startswith(f"{method} in turn: ")
    assert why in b.account().remarks[1]


def test_chance_is_the_party_s_own_on_every_engine() -> None:
    a, b = both()
    replies = same(a, b, "chance")
    assert len({tuple(r.tolist()) for r in replies}) == N
    assert torch.equal(same(a, b, "chance")[0], replies[0])  # the same call gives the same


def test_a_call_that_fails_changes_nothing() -> None:
    a, b = both()
    before = {k: v.clone() for k, v in states(b)[1]["params"].items()}
    replies = same(a, b, "break_", x=torch.zeros(1))
    assert all(isinstance(r, Failure) for r in replies)
    assert all(torch.equal(v, before[k]) for k, v in states(b)[1]["params"].items())
    assert len(b.account().remarks) == 1  # the page is wrong, not unfit for a batch


def test_a_message_that_is_not_finite_is_refused_by_its_party_alone() -> None:
    a, b = both()
    each = {
        i: {"x": torch.full((1,), float("nan") if i == 3 else 1.0, dtype=torch.float64)}
        for i in range(N)
    }
    replies = same(a, b, "answer_back", each, text="", n=0)
    assert [isinstance(r, Failure) for r in replies] == [False, False, False, True, False]


def test_an_unknown_method_is_the_page_s_mistake() -> None:
    _, b = both()
    with pytest.raises(MethodError, match="no method 'nonsense'"):
        b.call(b.ids, "nonsense", {}, None, (0, 0))


# -- steps of some parameters, gradients, scratch copies -------------------------------------------


class Tools(Page):
    """Uses all that a party offers to work with its network."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def head(self) -> list[str]:
        return list(self.params)[-2:]

    def step_of_some(self, *, t: int) -> Tensor:
        body = [k for k in self.params if k not in self.head()]
        first = self.train(self.loss, self.epochs(t, size=8), only=self.head())
        return first + self.train(self.loss, self.epochs(t + 1, size=8), only=body)

    def step_of_entries(self, *, t: int) -> Tensor:
        masks = {k: (p > 0).float() for k, p in self.anchor.items()}
        return self.train(self.loss, self.epochs(t, size=8), only=masks)

    def slope(self, *, t: int) -> dict[str, Tensor]:
        value, gradients = self.gradient(self.loss, *self.sample_batch(t, size=8), of=self.head())
        return {
            "value": value,
            **gradients,
            "all": self.gradient(self.loss, *self.sample_batch(t, size=8))[1]["0.weight"],
        }

    def proximal(self, *, t: int) -> Tensor:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            far = sum(
                ((p - self.anchor[k]).square().sum() for k, p in self.live.items()), torch.zeros(())
            )
            return self.loss(x, y) + 0.3 * far

        whole = self.train(loss, self.epochs(t, size=8))
        return whole + self.train(loss, self.epochs(t, size=8), only=self.head())

    def try_out(self, *, t: int) -> dict[str, Any]:
        with self.scratch():
            self.train(self.loss, self.epochs(t, size=8))
            outer = self.params["0.weight"].clone()
            with self.scratch():
                self.params = {k: torch.zeros_like(p) for k, p in self.params.items()}
                inner = self.infer(self.sample_batch(t, size=4)[0])
            again = self.params["0.weight"].clone()
        return {"outer": outer, "inner": inner, "again": again, "own": self.params["0.weight"]}

    def try_and_go_on(self, *, t: int) -> Tensor:
        with self.scratch():
            self.train(self.loss, self.epochs(t, size=8))
        return self.train(self.loss, self.epochs(t, size=8))

    def pick(self, *, t: int, size: int) -> list[Tensor]:
        return list(self.sample_batch(t, size=size))

    def vector(self) -> None:
        self.note("mixing", torch.stack([p.mean() for p in self.params.values()]))

    def prepare(self, *, eval_mode: str, broadcast: Any) -> None:
        if broadcast:
            self.params = {**self.params, **broadcast}
        if eval_mode == "tuned":
            self.train(self.loss, self.epochs(9, size=8))


def tools(
    data: Callable[[int], Rows] = even, network: Callable[[int], nn.Module] = net, **params: Any
) -> tuple[Engine, Engine]:
    cfg = Config(**params)
    return tuple(
        make([Tools(cfg, s) for s in contexts(N, make=network, data=data)])
        for make in (LocalEngine, BatchedEngine)
    )  # type: ignore[return-value]


def wholly_together(engine: Engine) -> bool:
    return engine.account().remarks == ("5 of 5 parties together, in groups: 1",)


@pytest.mark.parametrize(
    "params", [{}, {"momentum": 0.0}, {"adam": True, "lr": 0.01}], ids=["momentum", "sgd", "adam"]
)
@pytest.mark.parametrize(
    "method", ["step_of_some", "step_of_entries", "slope", "proximal", "try_out", "try_and_go_on"]
)
def test_what_a_party_does_with_its_network_is_done_together(
    method: str, params: dict[str, Any]
) -> None:
    a, b = tools(**params)
    for t in range(2):
        before = {i: s["params"]["0.weight"].clone() for i, s in states(b).items()}
        replies = same(a, b, method, t=t)
        moved = [not torch.equal(before[i], s["params"]["0.weight"]) for i, s in states(b).items()]
        assert moved == [method not in ("slope", "try_out")] * N
        if method == "try_out":
            for reply in replies:
                assert torch.equal(reply["outer"], reply["again"]) and not torch.equal(
                    reply["outer"], reply["own"]
                )
                assert torch.allclose(reply["inner"], torch.zeros(4, CLASSES))
    assert wholly_together(b)


@pytest.mark.parametrize(
    "method", ["step_of_some", "step_of_entries", "proximal", "try_out", "try_and_go_on"]
)
def test_so_it_is_with_uneven_data(method: str) -> None:
    a, b = tools(data=lambda i: rows((40, 7, 90, 40, 23)[i], i))
    for t in range(2):
        same(a, b, method, t=t)
    assert wholly_together(b)


@pytest.mark.parametrize("method", ["step_of_some", "slope", "try_out", "try_and_go_on"])
def test_so_it_is_with_statistics(method: str) -> None:
    """A plain step, as batching changes the order of sums, which a bias before a
    BatchNorm feels.
    """
    a, b = tools(network=lambda i: net(i, partial(nn.BatchNorm1d, 8)), momentum=0.0, lr=0.01)
    for t in range(2):
        same(a, b, method, t=t)
    counts = {int(s["buffers"]["1.num_batches_tracked"]) for s in states(b).values()}
    assert counts == {{"step_of_some": 20, "slope": 4, "try_out": 0, "try_and_go_on": 10}[method]}
    assert wholly_together(b)


@pytest.mark.parametrize("size", [5, 24, 99])
def test_some_rows_of_those_who_have_few(size: int) -> None:
    """Who has fewer gives all: those with equally many are done together."""
    a, b = tools(data=lambda i: rows((40, 24, 40, 24, 17)[i], i))
    for t in range(2):
        replies = same(a, b, "pick", t=t, size=size)
        assert [len(y) for _, y in replies] == [min(size, n) for n in (40, 24, 40, 24, 17)]
        same(a, b, "slope", t=t)
    assert wholly_together(b)


def test_a_chunk_of_unequal_rows_does_not_condemn_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first batch of a call finds out; the second was made before that, and is not to be
    blamed. Both are split by rows at once, as in later calls.
    """
    together: list[int] = []

    def counted(memory: Tensor, rows: list[int], *others: Any) -> list[Any]:
        replies = run_vmapped(memory, rows, *others)
        together.append(len(rows))
        return replies

    monkeypatch.setattr("fedloom.engines.batched.run_vmapped", counted)
    client_contexts = contexts(6, make=net, data=lambda i: rows((40, 30, 30, 20, 20, 10)[i], i))
    cfg = Config()
    engine = BatchedEngine(
        [Tools(cfg, client_context) for client_context in client_contexts], chunk_size=3
    )
    for _ in range(2):
        engine.call(engine.ids, "pick", {"t": 0, "size": 99}, None, (0, 0))
    assert engine.account().remarks == ("6 of 6 parties together, in groups: 1",)
    assert together == [2, 2] * 2  # in each call: those with 20 rows, and those with 30


def test_an_evaluation_is_prepared_together_and_leaves_no_trace() -> None:
    a, b = tools()
    before = {i: {k: v.clone() for k, v in s["params"].items()} for i, s in b.states().items()}
    broadcast = {"2.bias": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    losses = []
    for words in (
        {"eval_mode": ""},
        {"eval_mode": "tuned"},
        {"eval_mode": "", "broadcast": broadcast},
        {"eval_mode": "tuned", "broadcast": broadcast},
    ):
        replies = same(a, b, "predictions", on="test", **words)
        losses.append(torch.stack([r["loss"] for r in replies]))
    assert len({tuple(row.tolist()) for row in losses}) == 4
    for i, s in states(b).items():
        assert all(torch.equal(v, before[i][k]) for k, v in s["params"].items())
    assert wholly_together(b)


def test_vectors_are_noted_by_each() -> None:
    a, b = tools()
    same(a, b, "vector")
    one, two = a.notes(), b.notes()
    for i in one:
        assert len(two[i]["mixing"]) == 4  # type: ignore[arg-type]
        assert two[i]["mixing"] == pytest.approx(one[i]["mixing"], abs=1e-6)
    assert len({tuple(n["mixing"]) for n in two.values()}) == N  # type: ignore[arg-type]
    assert wholly_together(b)


# -- several tasks for one party -------------------------------------------------------------------


class Asked(Party[None]):
    """Its answers depend on what was asked before, and by whom."""

    STATE = ("params", "opt", "served", "taken")

    def setup(self) -> None:
        self.network(self.context.build(), SGD(0.1))
        self.served = torch.zeros((), dtype=torch.float64)
        self.taken = torch.zeros(CLASSES)

    def ask(self) -> dict[str, Tensor]:
        return {"bias": self.params["2.bias"]}

    def answer(self, *, asked: dict[str, Tensor], by: Tensor) -> Tensor:
        assert by.shape == () and not by.is_floating_point()
        self.served = 2 * self.served + by + 1  # the order of those who ask shows in it
        self.params = {**self.params, "2.bias": 0.5 * self.params["2.bias"] + asked["bias"]}
        return self.params["2.bias"] + by

    def take(self, *, inbox: dict[str, Tensor]) -> None:
        self.taken = torch.stack([*inbox.values(), torch.zeros(CLASSES)]).sum(0)


def test_the_questions_of_several_are_answered_in_order_and_each_wave_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, batched = (
        make([Asked(None, s) for s in contexts(N, make=net)])
        for make in (LocalEngine, BatchedEngine)
    )
    waves: list[tuple[str, int]] = []

    def counted(
        memory: Tensor, rows: list[int], parties: Any, method: str, *others: Any
    ) -> list[Any]:
        waves.append((method, len(rows)))
        return run_vmapped(memory, rows, parties, method, *others)

    monkeypatch.setattr("fedloom.engines.batched.run_vmapped", counted)
    links = {0: [1, 2, 3], 1: [0, 2, 4], 3: [1, 2], 4: [0, 1, 2, 3]}
    logs = [
        e.exchange(
            links, "ask", "answer", "take", {}, {"bias": floats(CLASSES)}, floats(CLASSES), (0, 0)
        )
        for e in (loop, batched)
    ]
    assert logs[0] == logs[1]
    assert difference(loop, batched) < 1e-6
    served = [float(s["served"]) for s in batched.states().values()]  # type: ignore[arg-type]
    order = [[i for i in links if j in links[i]] for j in range(N)]
    expected = []
    for askers in order:
        expected.append(0.0)
        for i in askers:
            expected[-1] = 2 * expected[-1] + i + 1
    assert served == expected
    # 1 and 2 are asked three and four times, 0 and 3 twice, 4 once: the last wave has one party,
    # done by itself
    assert [w for w in waves if w[0] != "take"] == [
        ("ask", 4),
        ("answer", 5),
        ("answer", 4),
        ("answer", 2),
    ]
    assert wholly_together(batched)


# -- who is alike ----------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Two of these differ in a number that no parameter shows."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Frozen(nn.Module):
    """Two of these differ in weights that they do not learn."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, CLASSES)
        self.body.weight.data.fill_(0.1 * i)
        self.body.bias.data.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.b.weight = self.a.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())


def seeded(i: int, make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(i)
        return make()


@pytest.mark.parametrize(
    ("network", "groups"),
    [
        (lambda i: seeded(i, lambda: Scaled(float(i))), ()),
        (lambda i: seeded(i, lambda: Frozen(i)), ()),
        (lambda i: seeded(i, lambda: Frozen(0)), ("5 of 5 parties together, in groups: 1",)),
        (lambda i: seeded(i, Tied), ("5 of 5 parties together, in groups: 1",)),
        (
            lambda i: nn.Linear(FEATURES, CLASSES, bias=i < 2),
            ("5 of 5 parties together, in groups: 2",),
        ),
    ],
    ids=["settings", "frozen", "frozen-equal", "tied", "shapes"],
)
def test_only_networks_that_differ_in_weights_alone_are_together(
    network: Callable[[int], nn.Module], groups: tuple[str, ...]
) -> None:
    loop, *_ = run(LocalEngine, FEDAL, network=network, batch_size=8)
    together, *_ = run(BatchedEngine, FEDAL, network=network, batch_size=8)
    assert together.account().remarks == groups
    assert difference(loop, together) < 1e-6


def test_auto_leaves_convolutions_and_few_parties_in_turn_on_a_cpu() -> None:
    conv = lambda i: seeded(i, lambda: nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES)))  # fmt: skip  # noqa: E501
    picky = partial(BatchedEngine, everything=False)
    loop, *_ = run(LocalEngine, FEDAL, network=conv, batch_size=8)
    auto, *_ = run(picky, FEDAL, network=conv, batch_size=8)
    assert auto.account().engine == "local" and "without convolutions" in auto.account().remarks[0]
    assert difference(loop, auto) == 0
    few, *_ = run(picky, FEDAL, batch_size=8)
    assert few.account().engine == "local" and "from 16 parties on" in few.account().remarks[0]
    asked, *_ = run(BatchedEngine, FEDAL, network=conv, batch_size=8)
    assert asked.account().engine == "batched"
    assert difference(loop, asked) < 1e-6


def test_auto_runs_a_call_to_few_of_many_parties_in_turn_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes: list[int] = []

    def counted(memory: Tensor, rows: list[int], *others: Any) -> list[Any]:
        sizes.append(len(rows))
        return run_vmapped(memory, rows, *others)

    monkeypatch.setattr("fedloom.engines.batched.run_vmapped", counted)
    for everything, expected in ((False, [16]), (True, [16, 7])):
        sizes.clear()
        engine = BatchedEngine(
            [Asked(None, s) for s in contexts(16, make=net)], everything=everything
        )
        for ids in (range(16), range(7)):
            Federation(engine).call(ids, "ask")
        assert sizes == expected


def test_dropout_is_done_in_turn_with_the_same_draws() -> None:
    drop = lambda i: net(i, partial(nn.Dropout, 0.3))
    loop, *_ = run(LocalEngine, FEDAL, network=drop, batch_size=8)
    together, *_ = run(BatchedEngine, FEDAL, network=drop, batch_size=8)
    assert any("local_train in turn" in r for r in together.account().remarks)
    assert difference(loop, together) < 1e-6


def test_a_run_continues_from_another_engine_s_state() -> None:
    whole, *_ = run(LocalEngine, FEDAL, rounds=2, batch_size=8)
    client_contexts = contexts(N, make=net, data=even)
    cfg = FEDAL.configure(params={"batch_size": 8})
    fresh = BatchedEngine([FEDAL.client(cfg, client_context) for client_context in client_contexts])
    fresh.load(whole.states())
    assert difference(whole, fresh) == 0
    for engine in (whole, fresh):
        engine.call(engine.ids, "local_train", {"t": 2}, None, (2, 0))
    assert difference(whole, fresh) < 1e-6


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("method", [FEDAL, FEDAVG], ids=["fedal", "fedavg"])
def test_everything_is_made_on_the_parties_device(
    method: Method, norm: Norm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors on `meta` have no data, and don't mix with the CPU's: a stand-in for a GPU where
    there is none.
    """
    monkeypatch.setattr(message, "check", lambda *_: None)
    x = torch.zeros(200, 1, 8, 8, dtype=torch.uint8, device="meta")
    y, half = torch.zeros(200, dtype=torch.int64, device="meta"), torch.ones((), device="meta")
    part = lambda a, b: Rows(x, y, torch.arange(a, b, device="meta"), half, half)
    public = PublicSet(part(160, 200), 0, "")
    build = partial(models.build, "cnn-small", (1, 8, 8), CLASSES, norm=norm)
    cfg = method.configure(params={"batch_size": 8})
    parties = [
        method.client(
            cfg,
            ClientContext(
                id=i,
                parties=3,
                classes=CLASSES,
                data=part(40 * i, 40 + 31 * i),
                public=public,
                network=build,
                tests={"test": part(0, 50)},
                device="meta",
            ),
        )
        for i in range(3)
    ]
    memory = torch.zeros(3, parties[0].net.memory.numel(), dtype=torch.uint8, device="meta")

    def call(name: str, each: dict[str, Any], **shared: Any) -> Any:
        return run_vmapped(memory, [0, 2], [parties[0], parties[2]], name, shared, [each] * 2)[1]

    if method is FEDAVG:
        assert call("update", {}, t=0)["rows"].device.type == "meta"
        return
    call("local_train", {}, t=0)
    answer = call("predict", {}, t=0, i=0)
    assert answer.shape == (8, CLASSES) and answer.device.type == "meta"
    call("distil", {"gradient": answer}, t=0, i=0, n=2, mean=answer)
    assert call("predictions", {}, on="test")["predicted"].shape == (50,)
