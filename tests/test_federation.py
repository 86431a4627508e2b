"""Calls, exchanges, samples; what is counted; what happens when a reply is no use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedloom import message
from fedloom.engines import IsolatedEngine, LocalEngine
from fedloom.errors import MethodError
from fedloom.faults import Faults
from fedloom.federation import Federation
from fedloom.ledger import COLUMNS, Ledger
from fedloom.message import floats
from fedloom.party import Party
from fedloom.site import Site

BAD: Mapping[str, Any] = {
    "nan": lambda: torch.tensor([1.0, float("nan")]),
    "shape": lambda: torch.zeros(3),
    "dtype": lambda: torch.zeros(2, dtype=torch.float64),
    "tree": lambda: {"x": torch.zeros(2)},
    "object": object,
}


class Worker(Party[None]):
    STATE = ("seen",)

    def setup(self) -> None:
        self.seen = torch.zeros(2)

    def work(self, *, x: Tensor, mode: str = "fine") -> Any:
        self.seen = self.seen + x
        if mode == "raise":
            raise ValueError("patient 4711 is missing")
        return BAD[mode]() if mode in BAD else self.seen

    def own(self) -> Tensor:
        return self.seen

    def take(self, *, inbox: dict[str, Tensor]) -> None:
        self.seen = self.seen + sum(inbox.values(), torch.zeros(2))

    def ask(self) -> dict[str, Tensor]:
        return {"w": self.seen}

    def reply(self, *, asked: dict[str, Tensor], by: int) -> Tensor:
        return asked["w"] * 10 + by


def federation(n: int = 3, faults: Faults | None = None, isolated: bool = False) -> Federation:
    builders = [partial(Worker, None, Site(id=i)) for i in range(n)]
    if isolated:
        return Federation(IsolatedEngine(builders, faults=faults))
    return Federation(LocalEngine([b() for b in builders], faults=faults))


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("raise", "raised"),
        ("nan", "not finite"),
        ("shape", "wrong shape"),
        ("dtype", "wrong shape"),
        ("tree", "wrong shape"),
        ("object", "not a message"),
    ],
)
def test_a_bad_reply_is_dropped_and_counted(mode: str, reason: str, isolated: bool) -> None:
    fed = federation(isolated=isolated)
    modes = {0: {"mode": "fine"}, 1: {"mode": mode}, 2: {"mode": "fine"}}
    good = fed.call([0, 1, 2], "work", shared={"x": torch.ones(2)}, each=modes, expect=floats(2))
    assert list(good) == [0, 2]
    (trouble,) = fed.failures
    assert (trouble.party, trouble.kind, trouble.reason) == ("worker-1", "work", reason)
    assert "4711" not in trouble.reason


def test_exception_text_reaches_nobody_but_the_log() -> None:
    fed = federation()
    modes = {0: {"mode": "raise"}, 1: {"mode": "fine"}}
    fed.call([0, 1], "work", shared={"x": torch.ones(2)}, each=modes)
    assert "4711" in fed.failures[0].trace
    assert all("4711" not in str(row) for row in fed.ledger.state()["entries"])


def test_a_failed_call_leaves_state_as_it_was_and_a_bad_reply_does_not() -> None:
    fed = federation()
    modes = {0: {"mode": "raise"}, 1: {"mode": "nan"}, 2: {"mode": "fine"}}
    fed.call([0, 1, 2], "work", shared={"x": torch.ones(2)}, each=modes)
    seen = [s["seen"].tolist() for s in fed.engine.states().values()]
    assert seen == [[0, 0], [1, 1], [1, 1]]


def test_a_step_says_how_many_replies_it_needs() -> None:
    fed = federation()
    modes = {0: {"mode": "fine"}, 1: {"mode": "nan"}, 2: {"mode": "nan"}}
    assert fed.call([0, 1, 2], "work", shared={"x": torch.ones(2)}, each=modes, need=2) == {}
    assert fed.failures[-1].reason == "fewer than 2 replies"
    assert fed.call([], "work", need=1) == {}


def test_a_mistake_in_the_page_stops_the_run() -> None:
    fed = federation()
    with pytest.raises(MethodError, match="every party failed in 'work'") as error:
        fed.call([0, 1, 2], "work", shared={"y": 1})
    assert "unexpected keyword argument 'y'" in str(error.value)
    with pytest.raises(MethodError, match="no method 'wrok'"):
        fed.call([0], "wrok")
    with pytest.raises(MethodError, match="no method '_own'"):
        fed.call([0], "_own")
    with pytest.raises(MethodError, match="no party 7"):
        fed.call([7], "work")
    for core in ("state", "load", "answers", "_own"):
        with pytest.raises(MethodError, match=r"no message may call it|no method '_own'"):
            fed.call([0], core)


def test_a_party_refuses_what_is_not_finite() -> None:
    """A server that diverged, or means ill, can't poison its clients with NaN."""
    fed = federation()
    each = {0: {"x": torch.ones(2)}, 1: {"x": torch.tensor([1.0, float("inf")])}, 2: {"x": torch.ones(2)}}
    assert list(fed.call([0, 1, 2], "work", each=each)) == [0, 2]
    assert fed.failures[0].reason == "refused what it was sent: not finite"
    assert torch.equal(fed.engine.states()[1]["seen"], torch.zeros(2))


def test_a_message_is_a_value() -> None:
    """What was sent does not change when the sender's state does later."""
    fed = federation(1)
    first = fed.call([0], "own")[0]
    fed.engine.states()[0]["seen"].add_(5)
    assert torch.equal(first, torch.zeros(2))


def test_the_ledger_adds_up_and_measures_the_wire_exactly() -> None:
    fed = federation(2)
    fed.round = 4
    put = {"x": torch.ones(2)}
    replies = fed.call([0, 1], "work", shared=put)
    entries = {(e.sender, e.receiver): e for e in fed.ledger}
    down, up = entries["server", "worker"], entries["worker", "server"]
    assert (down.round, down.kind, down.what, down.count, down.bytes) == (4, "work", "x float32[2]", 2, 16)
    assert down.wire_bytes == 2 * len(message.encode(put))
    assert up.wire_bytes == sum(len(message.encode(r)) for r in replies.values())
    assert fed.ledger.sent("worker-1") == fed.ledger.received("worker-1") == 8
    assert fed.ledger.sent("worker") == 16


def test_the_ledger_survives_a_checkpoint() -> None:
    fed = federation(2)
    fed.call([0, 1], "work", shared={"x": torch.ones(2)})
    copy = Ledger()
    copy.load(fed.ledger.state())
    assert copy.state() == fed.ledger.state()
    assert len(copy.state()["entries"][0]) == len(COLUMNS)


@pytest.mark.parametrize("isolated", [False, True])
def test_an_exchange_with_a_question(isolated: bool) -> None:
    """Peer i asks with its own value; j answers from it; nobody sees what others take this time."""
    fed = federation(isolated=isolated)
    for i in range(3):
        fed.call([i], "work", shared={"x": torch.full((2,), float(i))})
    before = fed.ledger.received("server")
    fed.exchange({0: [1, 2], 2: [0]}, ask="ask", answer="reply", take="take", expect=floats(2))
    seen = [s["seen"].tolist() for s in fed.engine.states().values()]
    assert seen == [[0, 0], [1, 1], [2 + 20 + 2, 2 + 20 + 2]]
    assert fed.ledger.received("server") == before
    kinds = {(e.sender, e.receiver, e.kind, e.count) for e in fed.ledger if e.sender == e.receiver}
    assert kinds == {("worker", "worker", "ask", 3), ("worker", "worker", "reply", 3)}


def test_a_silent_neighbour_is_left_out_of_the_inbox() -> None:
    fed = federation(4, faults=Faults(dropout=0.4))
    for t in range(10):
        fed.round = t
        fed.exchange({i: [j for j in range(4) if j != i] for i in range(4)}, answer="own", take="take")
    assert {t.reason for t in fed.failures} == {"dropped out"}
    assert all(torch.isfinite(s["seen"]).all() for s in fed.engine.states().values())


def test_participants_are_drawn_per_round_and_are_the_same_for_all() -> None:
    a, b = federation(), federation()
    drawn = [a.sample(range(20), 5, t) for t in range(10)]
    assert drawn == [b.sample(range(20), 5, t) for t in range(10)]
    assert len(set(drawn)) > 5
    assert all(len(set(d)) == 5 and list(d) == sorted(d) for d in drawn)
    assert a.sample(range(4), None, 0) == (0, 1, 2, 3) == a.sample(range(4), 9, 0)


def test_fault_probabilities_are_checked() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Faults(nan=1.5)
    with pytest.raises(ValidationError, match=r"at most 1 together, but come to 1\.2"):
        Faults(nan=0.6, late=0.6)


def test_ordered_faults_are_repeatable_and_as_frequent_as_asked() -> None:
    policy = Faults(dropout=0.2, late=0.1)
    draws = [policy.draw(0, t, c, p) for t in range(50) for c in range(4) for p in range(10)]
    assert draws == [policy.draw(0, t, c, p) for t in range(50) for c in range(4) for p in range(10)]
    assert abs(draws.count("dropout") / 2000 - 0.2) < 0.03
    assert abs(draws.count("late") / 2000 - 0.1) < 0.03
    assert Faults().draw(0, 0, 0, 0) is None


def test_an_evaluation_is_not_disturbed_by_ordered_faults() -> None:
    fed = federation(3, faults=Faults(dropout=1.0))
    assert all(isinstance(r, Tensor) for r in fed.engine.call([0, 1, 2], "own", {}, None, None))
    assert fed.call([0, 1, 2], "own") == {}
