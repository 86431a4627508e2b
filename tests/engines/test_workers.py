"""Worker processes give the bits of the loop, and carry any message."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedloom import methods
from fedloom.core import message, templates
from fedloom.core.context import ClientContext
from fedloom.core.errors import MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.optim import SGD, Adam
from fedloom.core.party import Party
from fedloom.engines import Engine, LocalEngine, WorkersEngine, _shared_buffer
from fedloom.engines._worker_pool import Queue
from tests.toy import CLASSES, contexts, network

Make = Callable[..., Engine]
ALL = Faults(dropout=0.1, crash=0.1, nan=0.1, inf=0.1, shape=0.1, type=0.1, late=0.1)


def workers(n: int = 2, **options: Any) -> Make:
    return partial(WorkersEngine, workers=n, **options)


def outcome(fed: Federation) -> dict[str, Any]:
    """All that a run leaves behind; states as bytes."""
    states = {str(i): state for i, state in fed.engine.states().items()}
    failures = [(f.round, f.party, f.kind, f.reason) for f in fed.failures]
    return {
        "states": message.encode(states),
        "order": {i: tuple(state) for i, state in fed.engine.states().items()},
        "notes": repr(fed.engine.notes()),
        "failures": failures,
        "ledger": fed.ledger.state(),
    }


# -- the same bits ---------------------------------------------------------------------------------


def fedal(
    make: Make,
    client_contexts: Sequence[ClientContext],
    rounds: int = 3,
    faults: Faults | None = None,
) -> dict[str, Any]:
    method = methods.find("fedal")
    cfg = method.configure(params={"batch_size": 8, "tau": 3})
    server = (
        method.server(cfg, ClientContext(id=0, parties=len(client_contexts), classes=CLASSES))
        if method.server
        else None
    )
    with make(
        [method.client(cfg, client_context) for client_context in client_contexts], faults=faults
    ) as engine:
        fed = Federation(engine)
        for t in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
        looks = engine.call(engine.ids, "predictions", {"on": "test"}, None, None)
        return {
            **outcome(fed),
            "server": message.encode(server.state()) if server else None,
            "looks": message.encode(looks),  # type: ignore[arg-type]
        }


@pytest.mark.parametrize("n", [1, 2, 3])
def test_fedal_gives_the_loops_bits(n: int) -> None:
    """Five clients of 20 to 60 rows, each with another network; own state beside it; notes; a
    remembered pass.
    """
    assert fedal(workers(n), contexts(5)) == fedal(LocalEngine, contexts(5))


def test_batch_norm_gives_the_loops_bits() -> None:
    make = partial(network, norm=True)
    assert fedal(workers(2), contexts(4, make=make)) == fedal(LocalEngine, contexts(4, make=make))


@pytest.mark.parametrize("n", [1, 3])
def test_faults_give_the_loops_bits(n: int) -> None:
    expected = fedal(LocalEngine, contexts(5), rounds=5, faults=ALL)
    assert len({reason for *_, reason in expected["failures"]}) >= 6
    assert fedal(workers(n), contexts(5), rounds=5, faults=ALL) == expected


class Gossip(Party[None]):
    """Weights, BatchNorm statistics, a count and a diary: everything that a party can keep."""

    STATE = ("params", "buffers", "opt", "answered", "diary")

    def setup(self) -> None:
        torch.manual_seed(self.context.id)
        self.network(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), Adam(0.01))
        self.answered = 0
        self.diary: dict[str, Any] = {"last": torch.zeros(2), "words": ["born"]}

    def question(self, *, boost: float) -> dict[str, Any]:
        return {"from": self.context.id, "weights": self.params}

    def answer(self, *, asked: dict[str, Any], by: Tensor, boost: float) -> dict[str, Any]:
        """It answers each asker otherwise, and remembers in what order they came."""
        assert asked["from"] == by
        self.answered += 1
        self.diary["words"] = [*self.diary["words"], f"{self.answered} for {by}"]
        x = self.model(torch.randn(6, 3))
        self.minimize(lambda: x.square().mean() * boost)
        return {"weights": asked["weights"], "mine": self.params, "count": self.answered}

    def share(self, *, boost: float) -> dict[str, Any]:
        return {"mine": self.params, "count": self.answered}

    def take(self, *, inbox: dict[str, Any], boost: float) -> None:
        if inbox:
            mean: Any = message.weighted_mean(
                [x["mine"] for x in inbox.values()], [1.0] * len(inbox)
            )
            self.params = mean
        self.diary["last"].add_(boost)  # in place: an engine must see that, too
        self.note("inbox", len(inbox))
        if self.context.id == 0:
            self.note("odd", float("nan"))


LINKS = {0: [1, 2, 3, 4], 1: [0], 2: [0, 1], 3: [], 4: [0, 1, 2, 3]}


def gossip(make: Make, *, ask: bool, faults: Faults | None = None) -> dict[str, Any]:
    parties = [Gossip(None, ClientContext(id=i)) for i in range(5)]
    weights = {k: floats(*v.shape) for k, v in parties[0].params.items()}
    answer = {"mine": weights, "count": int}
    with make(parties, faults=faults) as engine:
        fed = Federation(engine, coordinator="coordinator")
        for t in range(3):
            fed.round = t
            if ask:
                words = {
                    "ask": "question",
                    "answer": "answer",
                    "expect": {**answer, "weights": weights},
                }
            else:
                words = {"answer": "share", "expect": answer}
            fed.exchange(LINKS, take="take", shared={"boost": 0.5 + t}, **words)  # type: ignore[arg-type]
        return outcome(fed)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("ask", [False, True])
def test_gossip_gives_the_loops_bits(n: int, ask: bool) -> None:
    expected = gossip(LocalEngine, ask=ask)
    assert gossip(workers(n), ask=ask) == expected
    assert not expected["failures"]


@pytest.mark.parametrize("ask", [False, True])
def test_gossip_with_faults_gives_the_loops_bits(ask: bool) -> None:
    expected = gossip(LocalEngine, ask=ask, faults=ALL)
    assert len({reason for *_, reason in expected["failures"]}) >= 4
    assert gossip(workers(2), ask=ask, faults=ALL) == expected


def test_a_run_continues_from_a_checkpoint_and_a_load_is_the_only_past() -> None:
    def rounds(fed: Federation, some: range) -> None:
        for t in some:
            fed.round = t
            for _ in method.round(fed, server, fed.engine.ids, cfg, t):
                pass

    method = methods.find("fedmd-lf")
    cfg = method.configure(params={"batch_size": 8, "tau": 2})
    make = lambda: WorkersEngine(
        [method.client(cfg, client_context) for client_context in contexts(4)], workers=2
    )
    assert method.server is not None
    # it does not learn
    server = method.server(cfg, ClientContext(id=0, parties=4, classes=CLASSES))
    with make() as engine:
        fed = Federation(engine)
        rounds(fed, range(2))
        saved = message.encode({str(i): s for i, s in engine.states().items()})
        rounds(fed, range(2, 4))
        straight = outcome(fed)["states"]
        states: Any = message.decode(saved)
        engine.load({int(i): s for i, s in states.items()})
        rounds(fed, range(2, 4))
        assert outcome(fed)["states"] == straight
    with make() as engine:
        engine.load({int(i): s for i, s in states.items()})
        rounds(Federation(engine), range(2, 4))
        assert outcome(Federation(engine))["states"] == straight


CONSTANT = torch.linspace(-1, 1, 12).view(4, 3)


class Absent(Party[None]):
    """Answers, and learns from its answer later."""

    STATE = ("params", "opt", "steps")

    def setup(self) -> None:
        torch.manual_seed(self.context.id)
        self.network(nn.Linear(3, 2), SGD(0.5))
        self.steps = 0

    def look(self) -> Tensor:
        return self.forward(CONSTANT)

    def learn(self) -> None:
        self.steps += 1
        self.descend(CONSTANT, self.forward(CONSTANT))


def test_a_remembered_pass_does_not_outlive_the_weights_that_made_it() -> None:
    def step(engine: Engine) -> bytes:
        engine.call([0], "look", {}, None, (0, 0))
        engine.call([0], "learn", {}, None, (0, 1))
        return message.encode(engine.states()[0])

    with WorkersEngine([Absent(None, ClientContext(id=0))], workers=1) as engine:
        before: Any = message.decode(message.encode(engine.states()[0]))
        once = step(engine)
        engine.call([0], "look", {}, None, (0, 0))
        engine.load({0: before})
        engine.call([0], "learn", {}, None, (0, 1))
        assert message.encode(engine.states()[0]) == once


# -- messages --------------------------------------------------------------------------------------


class Echo(Party[None]):
    STATE = ("kept",)

    def setup(self) -> None:
        self.kept = torch.zeros(1)

    def echo(self, *, x: Any, own: Any = None) -> Any:
        return {"x": x, "own": own}

    def keep(self, *, x: Tensor) -> None:
        self.kept = x

    def show(self) -> Tensor:
        return self.kept

    def sum(self, *, inbox: dict[str, Tensor]) -> None:
        self.kept = torch.stack(list(inbox.values())).sum(0)

    def nothing(self) -> Any:
        return object()

    def slow(self) -> None:
        time.sleep(60)

    def stop(self) -> None:
        raise SystemExit(3)

    def shape(self) -> Tensor:
        return torch.zeros(2, 3)


def echoes(n: int = 3, make: Make | None = None) -> Engine:
    return (make or workers(2))([Echo(None, ClientContext(id=i)) for i in range(n)])


def test_messages_of_many_megabytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Larger than a socket buffer and what a shared buffer keeps; each, shared, own state, and from
    peer to peer.
    """
    monkeypatch.setattr(_shared_buffer, "KEPT", 1 << 20)
    big = {i: {"own": torch.arange(500_000) + i} for i in range(3)}
    with echoes() as engine:
        shared = {"x": torch.arange(1_000_000, dtype=torch.float32)}
        for _ in range(2):
            for i, reply in enumerate(engine.call(engine.ids, "echo", shared, big, (0, 0))):
                assert isinstance(reply, dict)
                assert torch.equal(reply["x"], shared["x"]) and torch.equal(
                    reply["own"], big[i]["own"]
                )
        fed = Federation(engine)
        fed.call(
            engine.ids, "keep", each={i: {"x": torch.full((500_000,), float(i))} for i in range(3)}
        )
        fed.exchange({0: [1, 2], 1: [0, 2], 2: [0, 1]}, answer="show", take="sum")
        assert [float(s["kept"][-1]) for s in engine.states().values()] == [3, 2, 1]  # type: ignore[index, arg-type]


def test_shared_buffers_are_used_again() -> None:
    with echoes() as engine:
        fed = Federation(engine)

        def size() -> int:
            for i in engine.ids:
                fed.call(
                    [i],
                    "echo",
                    each={i: {"x": torch.zeros(10_000)}},
                    shared={"own": torch.zeros(10_000)},
                )
            fed.call(engine.ids, "keep", shared={"x": torch.zeros(10_000)})
            fed.exchange({0: [1, 2], 1: [0, 2], 2: [0, 1]}, answer="show", take="sum")
            buffers: Any = engine._buffers  # type: ignore[attr-defined]
            return sum(os.fstat(box._file.fileno()).st_size for box in buffers)

        first = size()
        assert max(size() for _ in range(8)) <= 3 * first


def test_a_frame_arrives_whole_or_not_at_all() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        big = os.urandom(3_000_000)
        thread = threading.Thread(
            target=_shared_buffer.send,
            args=(theirs, {"text": "\ud800", "n": float("inf")}, b"", big),
        )
        thread.start()
        frame = _shared_buffer.receive(ours)
        thread.join()
        assert (
            frame is not None
            and frame[0] == {"text": "\ud800", "n": float("inf")}
            and frame[1] == big
        )
        _shared_buffer.send(theirs, {}, b"abc")
        head = ours.recv(16)
        theirs.send(head[:-1])
        theirs.close()
        assert _shared_buffer.receive(ours) is None


@pytest.mark.parametrize(
    "template",
    [
        None,
        object,
        int,
        [float, {"a": floats(2, None), "b": [str, bool]}],
        {},
        {"items": int},
        torch.zeros(2, 3),
    ],
)
def test_a_template_survives_its_spelling(template: Any) -> None:
    spelled = message.decode(message.encode(templates.spell(template)))
    expected = floats(2, 3) if isinstance(template, Tensor) else template
    assert templates.unspell(spelled) == expected


@pytest.mark.parametrize("make", [LocalEngine, workers(2)])
def test_what_is_no_message_and_what_is_not_finite_get_the_same_verdict(make: Make) -> None:
    with echoes(make=make) as engine:
        fed = Federation(engine)
        fed.call([0], "nothing")
        fed.call([0, 1], "echo", each={0: {"x": 1.0}, 1: {"x": float("inf")}})
        fed.call([0, 1], "echo", each={0: {"x": 1.0}, 1: {"x": torch.tensor(float("nan"))}})
        fed.exchange({1: [0]}, answer="shape", take="sum", expect=floats(2, 2))
        fed.exchange({1: [0]}, answer="nothing", take="sum")
        refused = "refused what it was sent: not finite"
        expected = [
            "not a message",
            refused,
            refused,
            "wrong shape",
            "raised",
            "not a message",
            "raised",
        ]
        assert [f.reason for f in fed.failures] == expected
        with pytest.raises(MethodError, match="no method 'wrok'"):
            fed.call([0, 1], "wrok")
        assert list(fed.call([0, 1], "echo", shared={"x": 1})) == [0, 1]


def test_a_queue_gives_each_task_once_and_keeps_a_partys_order() -> None:
    parties = [0, 1, 2, 0, 3, 4, 0, 5, 1]
    queue = Queue(parties, {0: 1, 5: 1, 3: 0}, 2)
    assert queue.take(1) == 0  # of the party that it had last
    assert queue.take(1, ahead=True) is None  # which is at work
    assert queue.take(1) == 3
    assert queue.take(1) == 6
    rest = [queue.take(0) for _ in range(6)]  # its own, then those of the other
    assert sorted(rest) == [1, 2, 4, 5, 7, 8] and rest.index(1) < rest.index(8)
    assert queue.take(0) is queue.take(1) is None and queue.left == 0
