"""What the coordinator makes of what a node says, however strange: a failure of that node's call,
and nothing else.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedloom.core import message
from fedloom.core.engine import Failure, Task
from fedloom.core.errors import EngineError, MessageError
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import Timeouts, Transport
from fedloom.remote.engine import NetEngine
from fedloom.remote.node_session import MOST_NOTES, NodeSession, RunContext
from fedloom.remote.rpc_errors import CallRefused

LINE = {"failure": "raised", "injected": False}
GOOD: dict[str, Any] = {"lines": [LINE], "notes": {}, "missing": []}


class Node:
    """A connection whose other end says what a test lets it say."""

    problem, up, sent, received = "", True, 0, 0

    def __init__(self, *answers: bytes | CallRefused) -> None:
        self.answers, self.asked = list(answers), list[str]()

    async def wait(self, seconds: float) -> bool:
        return True

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        self.asked.append(kind)
        answer = self.answers.pop(0)
        if isinstance(answer, CallRefused):
            raise answer
        return answer

    async def close(self) -> None:
        pass


def session(node: Node) -> NodeSession:
    addresses = {1: "a", 2: "b"}
    return NodeSession(
        1, addresses[1], node, RunContext("0" * 32, 1, "{}", False, Timeouts(), addresses)
    )


def told(node: Node) -> list[Any]:
    task = Task(1, "update", {"t": 0}, round=0)
    return asyncio.run(
        session(node).run_tasks([task], message.encode({"t": 0}), False, None)
    ).results


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"rubbish",
        payload.pack({**GOOD, "lines": []}),
        payload.pack({**GOOD, "lines": [[]]}),
        payload.pack({**GOOD, "lines": [{"reply": 3}]}),
        payload.pack({**GOOD, "lines": [{"reply": None, "x": 1}], "missing": [[7, "inbox", "3"]]}),
        payload.pack({**GOOD, "missing": [[0, "inbox", "3"]]}),
        payload.pack({**GOOD, "missing": [1]}),
        payload.pack({**GOOD, "missing": 1}),
        payload.pack({**GOOD, "lines": [{"reply_ref": "k", "what": "", "payload": 9, "wire": 1}]}),
        payload.pack({**GOOD, "lines": [{"failure": 1, "injected": False}]}),
    ],
)
def test_nothing_that_a_node_says_ends_a_run(answer: bytes) -> None:
    (result,) = told(Node(answer))
    assert isinstance(result, Failure) and result.reason == "not a message"


def test_a_reason_is_one_of_those_known_and_notes_are_numbers() -> None:
    strange = {
        **GOOD,
        "lines": [{"failure": "patient 7 died", "injected": False}],
        "notes": {"a": 1.0, "b": "x", "c": [2.0]},
    }
    node = Node(payload.pack(strange))
    found = asyncio.run(
        session(node).run_tasks([Task(1, "update", {}, round=0)], message.encode({}), False, None)
    )
    assert found.results[0].reason == "raised" and "see the log of a" in found.results[0].trace
    assert found.notes == {"a": 1.0, "c": [2.0]}


def test_more_notes_than_a_page_makes_are_not_taken() -> None:
    many = payload.pack({**GOOD, "notes": {f"{n}": 1.0 for n in range(1000)}})
    found = asyncio.run(
        session(Node(many)).run_tasks(
            [Task(1, "update", {}, round=0)], message.encode({}), False, None
        )
    )
    assert list(found.notes) == [f"{n}" for n in range(MOST_NOTES)]


def test_one_node_alone_cannot_make_the_coordinator_stop() -> None:
    addresses = {1: "a", 2: "b", 3: "c"}
    common = RunContext("0" * 32, 1, "{}", False, Timeouts(fewest=2), addresses)
    stale, good = CallRefused(rpc_errors.STALE, "a newer start has taken over"), payload.pack(GOOD)

    async def say(party: int, answer: bytes | CallRefused) -> Any:
        task = Task(party, "update", {}, round=0)
        node = NodeSession(party, addresses[party], Node(answer), common)
        return (await node.run_tasks([task], message.encode({}), False, None)).results[0].reason

    async def says() -> None:
        assert [await say(1, stale), await say(1, stale)] == [rpc_errors.STALE] * 2
        # the first takes it back
        assert [await say(1, good), await say(2, stale)] == ["raised", rpc_errors.STALE]
        with pytest.raises(EngineError, match="A newer coordinator took over"):
            await say(3, stale)

    asyncio.run(says())


def test_a_node_that_lost_its_state_is_opened_anew_and_that_is_remembered() -> None:
    opened = payload.pack({"resumed": False, "call": -1, "evaluates": True, "facts": {}})
    node = Node(
        payload.pack(GOOD),
        CallRefused(rpc_errors.UNKNOWN, "no such run"),
        opened,
        payload.pack(GOOD),
    )
    there, task = session(node), Task(1, "update", {}, round=0)

    async def twice() -> None:
        for _ in range(2):
            await there.run_tasks([task], message.encode({}), False, None)

    asyncio.run(twice())
    assert node.asked == ["do", "do", "open", "do"] and there.lost


def test_a_party_made_anew_is_none_to_hash() -> None:
    node = Node(CallRefused(rpc_errors.UNKNOWN, "no such run"))
    with pytest.raises(CallRefused):
        asyncio.run(session(node).ask("digest", b""))
    assert node.asked == ["digest"]


def test_a_long_text_crosses_in_pieces() -> None:
    text = "é" * 200_000
    body = payload.pack({"config": payload.cut(text)})
    assert payload.joined(payload.unpack(body)[0]["config"]) == text
    assert payload.joined("whole") == "whole"
    for wrong in ([1], 7, ["x"] * (payload.MOST_PIECES + 1)):
        with pytest.raises(MessageError):
            payload.joined(wrong)


def test_what_all_must_answer_is_asked_again_of_one_who_was_away() -> None:
    opened = payload.pack({"resumed": False, "call": -1, "evaluates": True, "facts": {}})
    away = CallRefused(rpc_errors.UNREACHABLE, "a gives no sign of life")
    node = Node(opened, away, payload.pack({"sha256": "12"}), payload.pack({}))

    async def connect(names: Any, run: str, changed: Any) -> Any:
        return [node]

    transport = Transport("test", connect)
    common: dict[str, Any] = {
        "config": "{}",
        "differences": lambda *_: [],
        "run": "0" * 32,
        "transport": transport,
        "timeouts": Timeouts(start=9),
    }
    with NetEngine({1: "a"}, [], {1: "client-1"}, **common) as engine:
        assert engine.digests() == {1: "12"}
    assert node.asked == ["open", "digest", "digest", "close"]
