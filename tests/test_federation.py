"""Calls, exchanges, samples; what is counted; what happens when a reply is no use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedloom.core import message
from fedloom.core.context import ClientContext
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.ledger import COLUMNS, Ledger
from fedloom.core.message import floats
from fedloom.core.party import Party
from fedloom.engines import IsolatedEngine, LocalEngine

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

    def count(self, *, inbox: dict[str, Tensor]) -> None:
        self.seen = self.seen + len(inbox)

    def none(self, *, inbox: dict[str, Tensor]) -> None:
        pass


def federation(n: int = 3, faults: Faults | None = None, isolated: bool = False) -> Federation:
    builders = [partial(Worker, None, ClientContext(id=i)) for i in range(n)]
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
    (failure,) = fed.failures
    assert (failure.party, failure.kind, failure.reason) == ("worker-1", "work", reason)
    assert "4711" not in failure.reason


@pytest.mark.parametrize("isolated", [False, True])
def test_a_page_may_refuse_what_no_template_can_tell(isolated: bool) -> None:
    fed, looked = federation(4, isolated=isolated), []

    def check(i: int, reply: Tensor) -> None:
        looked.append((i, reply.tolist()))
        if i == 2:
            raise MessageError("reply 4711 adds up to 3")

    modes = {i: {"mode": "shape" if i == 1 else "fine"} for i in range(4)}
    good = fed.call(
        range(4), "work", shared={"x": torch.ones(2)}, each=modes, expect=floats(2), check=check
    )
    # what does not fit is not shown to the page
    assert list(good) == [0, 3] and [i for i, _ in looked] == [0, 2, 3]
    assert [(t.party, t.reason) for t in fed.failures] == [
        ("worker-1", "wrong shape"),
        ("worker-2", "refused"),
    ]
    assert "4711" in fed.failures[1].trace
    assert sum(e.count for e in fed.ledger if e.receiver == "server") == 2
    assert fed.call([2], "work", shared={"x": torch.ones(2)}, check=check, min_replies=1) == {}


def test_a_mistake_in_a_check_stops_the_run() -> None:
    def check(_: int, reply: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        federation().call([0], "work", shared={"x": torch.ones(2)}, check=check)


def test_one_template_or_one_for_each() -> None:
    fed = federation()
    with pytest.raises(MethodError, match="expect and expects"):
        fed.call([0], "work", shared={"x": torch.ones(2)}, expect=floats(2), expects={0: floats(2)})
    assert not list(fed.ledger)


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
    assert fed.call([0, 1, 2], "work", shared={"x": torch.ones(2)}, each=modes, min_replies=2) == {}
    assert fed.failures[-1].reason == "fewer than 2 replies"
    assert fed.call([], "work", min_replies=1) == {}


def test_a_mistake_in_the_page_stops_the_run() -> None:
    fed = federation()
    with pytest.raises(MethodError, match="every party failed in 'work'") as error:
        fed.call([0, 1, 2], "work", shared={"y": 1})
    assert "unexpected keyword argument 'y'" in str(error.value)
    with pytest.raises(MethodError, match="no method 'wrok'"):
        fed.call([0], "wrok")
    with pytest.raises(MethodError, match="no method '_own'"):
        fed.call([0], "_own")
    with pytest.raises(MethodError, match="unknown party 7"):
        fed.call([7], "work")
    for core in ("state", "load", "predictions", "_own"):
        with pytest.raises(
            MethodError, match=r"no message may call .*, a method of every Party|no method '_own'"
        ):
            fed.call([0], core)


def test_a_party_refuses_what_is_not_finite() -> None:
    """A server that diverged, or means ill, can't poison its clients with NaN."""
    fed = federation()
    each = {
        0: {"x": torch.ones(2)},
        1: {"x": torch.tensor([1.0, float("inf")])},
        2: {"x": torch.ones(2)},
    }
    assert list(fed.call([0, 1, 2], "work", each=each)) == [0, 2]
    assert fed.failures[0].reason == "refused what it was sent: not finite"
    seen: Any = fed.engine.states()[1]["seen"]
    assert torch.equal(seen, torch.zeros(2))


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
    assert (down.round, down.kind, down.what, down.count, down.bytes) == (
        4,
        "work",
        "x float32[2]",
        2,
        16,
    )
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


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda: torch.zeros(3), "wrong shape"),
        (lambda: torch.zeros(2, dtype=torch.float64), "wrong shape"),
        (lambda: torch.tensor([0.0, float("inf")]), "not finite"),
    ],
    ids=["shape", "dtype", "inf"],
)
def test_a_malformed_question_is_dropped_and_counted_at_the_asking_peer(
    bad: Any, reason: str, isolated: bool
) -> None:
    fed = federation(isolated=isolated)
    fed.engine.load({i: {"seen": torch.full((2,), float(i))} for i in range(3)})
    fed.engine.load({1: {"seen": bad()}})
    links = {0: [2], 1: [0, 2], 2: [0]}
    words: dict[str, Any] = {
        "ask": "ask",
        "answer": "reply",
        "take": "count",
        "question": {"w": floats(2)},
        "expect": floats(2),
    }
    fed.exchange(links, **words)
    assert {(f.party, f.kind, f.reason) for f in fed.failures} == {("worker-1", "ask", reason)}
    assert len(fed.failures) == 2  # one for each message that was not sent
    counted = {(e.kind, e.sender, e.receiver): e.count for e in fed.ledger if e.kind != "count"}
    assert counted == {("ask", "worker", "worker"): 2, ("reply", "worker", "worker"): 2}
    states: dict[int, Any] = {i: s["seen"] for i, s in fed.engine.states().items()}
    assert states[0].tolist() == [0 + 1, 0 + 1] and states[2].tolist() == [2 + 1, 2 + 1]
    assert torch.equal(states[1], bad())  # it took nothing, and nobody's state was touched by it


def test_without_a_template_any_question_that_is_a_message_is_put() -> None:
    fed = federation()
    fed.engine.load({1: {"seen": torch.ones(3)}})
    fed.exchange({1: [0]}, ask="ask", answer="reply", take="count")
    assert not fed.failures
    assert fed.engine.states()[1]["seen"].tolist() == [2, 2, 2]


def test_an_answer_given_in_groups_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where taking changes nothing that is asked for or answered from."""
    found = []
    for at_once in (None, 1, 3):
        fed = federation(4)
        fed.engine.load({i: {"seen": torch.full((2,), float(i))} for i in range(4)})
        calls: list[Any] = []
        exchange = fed.engine.exchange
        counted = lambda links, *rest, e=exchange, c=calls: c.append(dict(links)) or e(links, *rest)
        monkeypatch.setattr(fed.engine, "exchange", counted)
        links = {0: [1, 2], 1: [2], 2: [3, 0], 3: [0]}
        fed.exchange(links, ask="ask", answer="reply", take="none", at_once=at_once)
        assert [i for group in calls for i in group] == [0, 1, 2, 3]
        assert all(
            at_once is None or len(g) == 1 or sum(map(len, g.values())) <= at_once for g in calls
        )
        ledger = fed.ledger.state()
        found.append((ledger["entries"], sorted(ledger["pairs"]), len(calls)))
    assert [n for *_, n in found] == [1, 4, 2]
    assert all((entries, pairs) == found[0][:2] for entries, pairs, _ in found)


def test_peers_exchange_messages_with_their_neighbours_alone() -> None:
    ring = {i: [(i - 1) % 5, (i + 1) % 5] for i in range(5)}
    engine = federation(5).engine
    fed, free = Federation(engine, seed=3, graph=ring), Federation(engine, seed=3)
    assert fed.neighbours(0, [0, 1, 2, 4]) == (1, 4) and fed.neighbours(0, [2, 4]) == (4,)
    assert free.neighbours(2, [0, 1, 2, 4]) == (0, 1, 4)
    assert fed.sample_peers([0, 1, 3], None, 0) == {0: [1], 1: [0], 3: []}
    drawn = [free.sample_peers(range(5), 2, t) for t in range(20)]
    assert drawn == [Federation(engine, seed=3).sample_peers(range(5), 2, t) for t in range(20)]
    assert all(
        i not in near and near == sorted(set(near)) and len(near) == 2
        for d in drawn
        for i, near in d.items()
    )
    assert {j for d in drawn for j in d[0]} == {1, 2, 3, 4}
    assert drawn != [Federation(engine, seed=4).sample_peers(range(5), 2, t) for t in range(20)]
    for wrong, why in (
        ({0: [2]}, "peer 2 is not a neighbour of peer 0"),
        ({1: [1]}, "cannot exchange messages with itself"),
    ):
        with pytest.raises(MethodError, match=why):
            fed.exchange(wrong, answer="own", take="take")
    assert not fed.ledger.state()["entries"]


def test_a_silent_neighbour_is_left_out_of_the_inbox() -> None:
    fed = federation(4, faults=Faults(dropout=0.4))
    for t in range(10):
        fed.round = t
        fed.exchange(
            {i: [j for j in range(4) if j != i] for i in range(4)}, answer="own", take="take"
        )
    assert {t.reason for t in fed.failures} == {"dropped out"}
    states: list[Any] = [*fed.engine.states().values()]
    assert all(torch.isfinite(s["seen"]).all() for s in states)


def test_participants_are_drawn_per_round_and_are_the_same_for_all() -> None:
    a, b = federation(), federation()
    drawn = [a.sample(range(20), 5, t) for t in range(10)]
    assert drawn == [b.sample(range(20), 5, t) for t in range(10)]
    assert len(set(drawn)) > 5
    assert all(len(set(d)) == 5 and list(d) == sorted(d) for d in drawn)
    assert a.sample(range(4), None, 0) == (0, 1, 2, 3) == a.sample(range(4), 9, 0)


# -- whom a peer asks ------------------------------------------------------------------------------

RING = {i: sorted({(i - 1) % 5, (i + 1) % 5}) for i in range(5)}


def on_a_ring(**settings: Any) -> Federation:
    fed = federation(5, **settings)
    return Federation(fed.engine, graph=RING)


def test_neighbours_are_those_of_the_graph_who_are_present() -> None:
    ring, full = on_a_ring(), federation(5)
    assert [ring.neighbours(i, range(5)) for i in (0, 3)] == [(1, 4), (2, 4)]
    assert ring.neighbours(0, [4, 3, 2, 1]) == (4, 1)  # in the order given
    assert (
        ring.neighbours(0, [2, 4]),
        ring.neighbours(0, [2, 3]),
        ring.neighbours(9, range(5)),
    ) == ((4,), (), ())
    assert full.neighbours(3, [4, 3, 0]) == (4, 0)


def test_links_lie_in_the_graph_and_are_the_same_for_every_method() -> None:
    ring, full = on_a_ring(), federation(5)
    assert ring.sample_peers(range(5), None, 0) == ring.sample_peers(range(5), 2, 7) == RING
    assert ring.sample_peers([0, 1, 3], None, 0) == {0: [1], 1: [0], 3: []}
    ones = [ring.sample_peers(range(5), 1, t) for t in range(20)]
    assert all(len(near) == 1 and near[0] in RING[i] for links in ones for i, near in links.items())
    assert {links[0][0] for links in ones} == {1, 4}
    again = federation(5)
    again.call([0], "own")  # whatever else it does
    drawn = [full.sample_peers((3, 0, 1, 4), 2, t) for t in range(20)]
    assert drawn == [again.sample_peers((3, 0, 1, 4), 2, t) for t in range(20)]
    assert all(list(links) == [3, 0, 1, 4] for links in drawn)
    assert all(
        near == sorted(set(near) - {i}) and len(near) == 2
        for links in drawn
        for i, near in links.items()
    )
    assert {tuple(links[0]) for links in drawn} == {(1, 3), (1, 4), (3, 4)}
    whole = Federation(full.engine, graph={i: [j for j in range(5) if j != i] for i in range(5)})
    assert whole.sample_peers(range(5), 2, 3) == full.sample_peers(
        range(5), 2, 3
    )  # however the complete graph is given
    assert Federation(full.engine, seed=1).sample_peers(range(5), 2, 3) != full.sample_peers(
        range(5), 2, 3
    )


@pytest.mark.parametrize(
    ("links", "text"),
    [
        (
            {0: [1], 2: [0]},
            r"peer 0 is not a neighbour of peer 2; choose from fed\.neighbours\(2, clients\)",
        ),
        ({0: [1], 1: [2, 1]}, "peer 1 cannot exchange messages with itself"),
        ({7: [0]}, "peer 0 is not a neighbour of peer 7"),
    ],
)
def test_a_link_that_must_not_be_is_refused_before_anything_is_sent(
    links: dict[int, list[int]], text: str
) -> None:
    fed = on_a_ring()
    with pytest.raises(MethodError, match=text):
        fed.exchange(links, answer="own", take="take", shared={"x": 1})
    assert not list(fed.ledger) and not fed.failures
    with pytest.raises(MethodError, match="peer 1 cannot exchange messages with itself"):
        federation().exchange({1: [1]}, answer="own", take="take")


class Listener(Party[None]):
    """Takes into one thing what others give of another."""

    STATE = ("value", "heard")

    def setup(self) -> None:
        self.value, self.heard = torch.tensor([float(self.context.id)]), torch.zeros(0)

    def ask(self) -> Tensor:
        return self.value

    def give(self, *, asked: Tensor, by: int) -> Tensor:
        return self.value * 10 + asked + by

    def own(self) -> Tensor:
        return self.value

    def take(self, *, inbox: dict[str, Tensor]) -> None:
        self.heard = torch.cat([self.heard, *inbox.values()])


@pytest.mark.parametrize("asking", [{"ask": "ask", "answer": "give"}, {"answer": "own"}])
@pytest.mark.parametrize("isolated", [False, True])
def test_answers_held_in_groups_are_the_same_answers(
    asking: dict[str, str], isolated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = {0: [1, 2, 3], 1: [0], 2: [], 3: [0, 1], 4: [3]}
    seen = []
    for at_once, groups in [
        (None, [[0, 1, 2, 3, 4]]),
        (100, [[0, 1, 2, 3, 4]]),
        (4, [[0, 1, 2], [3, 4]]),
        (1, [[0], [1, 2], [3], [4]]),  # whoever has more links than that is alone
    ]:
        builders = [partial(Listener, None, ClientContext(id=i)) for i in range(5)]
        engine = IsolatedEngine(builders) if isolated else LocalEngine([b() for b in builders])
        fed = Federation(engine)
        calls: list[Any] = []
        inner = engine.exchange
        monkeypatch.setattr(
            engine,
            "exchange",
            lambda *a, f=inner, to=calls: (to.append((list(a[0]), a[-1])), f(*a))[1],
        )
        fed.round = 2
        fed.exchange(links, **asking, take="take", expect=floats(1), at_once=at_once)  # type: ignore[arg-type]
        assert [group for group, _ in calls] == groups
        assert [number for _, number in calls] == [(2, n) for n in range(len(groups))]
        seen.append([s["heard"].tolist() for s in engine.states().values()])
        assert sum(e.count for e in fed.ledger if e.kind == asking["answer"]) == 7
    assert seen[0][3] == ([0 + 3 + 3, 10 + 3 + 3] if "ask" in asking else [0, 1])
    assert all(heard == seen[0] for heard in seen)


@pytest.mark.parametrize("isolated", [False, True])
def test_what_is_reported_between_colocated_parties_is_not_counted(isolated: bool) -> None:
    """Its replies are used and its failures counted all the same."""
    builders = [partial(Worker, None, ClientContext(id=i)) for i in range(3)]
    engine = IsolatedEngine(builders) if isolated else LocalEngine([b() for b in builders])
    fed, x = Federation(engine, colocated=(0,)), torch.ones(2)
    assert set(fed.call([0, 1, 2], "work", shared={"x": x})) == {0, 1, 2}
    one = {i: {"mode": "nan" if i == 0 else "fine"} for i in (0, 1)}
    assert set(fed.call([0, 1], "work", shared={"x": x}, each=one)) == {1}
    assert [f.party for f in fed.failures] == ["worker-0"]
    others = ("worker-1", "worker-2")
    assert fed.ledger.pairs.keys() == {("server", i) for i in others} | {
        (i, "server") for i in others
    }
    assert fed.ledger.pairs["server", "worker-1"] == [2, 16] and fed.ledger.sent("worker-0") == 0
    nobody = Federation(engine, colocated=(0, 1, 2))
    nobody.call([0, 1, 2], "work", shared={"x": x})
    assert not list(nobody.ledger) and not nobody.ledger.pairs


def test_fault_probabilities_are_checked() -> None:
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        Faults(nan=1.5)
    with pytest.raises(ValidationError, match=r"must sum to at most 1, not 1\.2"):
        Faults(nan=0.6, late=0.6)


def test_ordered_faults_are_repeatable_and_as_frequent_as_asked() -> None:
    policy = Faults(dropout=0.2, late=0.1)
    draws = [policy.draw(0, t, c, p) for t in range(50) for c in range(4) for p in range(10)]
    assert draws == [
        policy.draw(0, t, c, p) for t in range(50) for c in range(4) for p in range(10)
    ]
    assert abs(draws.count("dropout") / 2000 - 0.2) < 0.03
    assert abs(draws.count("late") / 2000 - 0.1) < 0.03
    assert Faults().draw(0, 0, 0, 0) is None


def test_an_evaluation_is_not_disturbed_by_ordered_faults() -> None:
    fed = federation(3, faults=Faults(dropout=1.0))
    assert all(isinstance(r, Tensor) for r in fed.engine.call([0, 1, 2], "own", {}, None, None))
    assert fed.call([0, 1, 2], "own") == {}
