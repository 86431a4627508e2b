"""The grid transport, on a grid that the test simulates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own")

from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedloom.remote import payload, rpc_errors
from fedloom.remote.flower import grid_transport as posts
from fedloom.remote.flower.grid_transport import GridClient, GridTransport
from fedloom.remote.flower.records import pack, unpack
from fedloom.remote.frames import MOST_WORDS
from fedloom.remote.rpc_errors import CallRefused


class Grid:
    """A SuperLink with some SuperNodes."""

    def __init__(self, *names: str) -> None:
        self.nodes = [
            SimpleNamespace(name=name, node_id=n, last_activated_at="1")
            for n, name in enumerate(names)
        ]
        self.pushed: list[Message] = []
        self.replies: dict[str, Message] = {}
        self.problem: Exception | None = None

    def get_nodes(self) -> list[Any]:
        if self.problem:
            raise self.problem
        return self.nodes

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        for message in messages:
            self.pushed.append(message)
            message.metadata.__dict__["_message_id"] = f"m{len(self.pushed)}"
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, ids: Sequence[str]) -> list[Message]:
        return [self.replies.pop(id) for id in ids if id in self.replies]

    def reply(self, content: Any, to: int = -1) -> None:
        message = self.pushed[to]
        message.metadata.__dict__["_src_node_id"] = 1
        self.replies[message.metadata.message_id] = Message(content, reply_to=message)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # Flower sets them in its own processes
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(posts, "LOOK", 0.01)
    monkeypatch.setattr(posts, "ROLL", 0.02)


@pytest.fixture
def grid(quick: None) -> Grid:
    return Grid("alpha", "beta")


@pytest.fixture
def post(grid: Grid) -> Iterator[GridTransport]:
    made = GridTransport(grid)
    until(lambda: len(made.there()) == 2)
    yield made
    made.close()


def until(true: Callable[[], bool]) -> None:
    end = monotonic() + 90
    while not true():
        assert monotonic() < end
        sleep(0.01)


def test_bytes_go_out_and_come_back_as_they_are(grid: Grid, post: GridTransport) -> None:
    coming = post.send("beta", pack({"kind": "do", "to": "beta"}, b"\x00asked"), 10)
    until(lambda: bool(grid.pushed))
    assert grid.pushed[0].metadata.dst_node_id == 1
    assert unpack(grid.pushed[0].content, "kind", "to") == (["do", "beta"], b"\x00asked")
    grid.reply(pack({"code": "", "words": ""}, b"answer\xff"))
    assert coming.result(10) == b"answer\xff"


def test_a_refusal_comes_back_with_its_words(grid: Grid, post: GridTransport) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: bool(grid.pushed))
    grid.reply(pack({"code": rpc_errors.STALE, "words": "a later call has been made"}))
    with pytest.raises(CallRefused, match="a later call has been made") as caught:
        coming.result(10)
    assert caught.value.code == rpc_errors.STALE


def test_words_of_a_node_cannot_move_a_terminal_s_cursor(grid: Grid, post: GridTransport) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: bool(grid.pushed))
    grid.reply(pack({"code": rpc_errors.MISMATCH, "words": "\x1b[2Jother\nrows" + "." * 5000}))
    with pytest.raises(CallRefused) as caught:
        coming.result(10)
    assert (
        caught.value.words.startswith("[2Jotherrows...") and len(caught.value.words) <= MOST_WORDS
    )


@pytest.mark.parametrize(
    ("code", "meaning"), [(2, rpc_errors.FAILED), (3, rpc_errors.LATE), (5, rpc_errors.UNREACHABLE)]
)
def test_of_an_error_of_flower_nothing_but_the_code_counts(
    grid: Grid, post: GridTransport, code: int, meaning: str
) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: bool(grid.pushed))
    grid.reply(Error(code, "ValueError: private"))
    with pytest.raises(CallRefused) as caught:
        coming.result(10)
    assert caught.value.code == meaning and "private" not in caught.value.words


@pytest.mark.parametrize("content", [RecordDict(), pack({"code": "no code of ours", "words": ""})])
def test_an_answer_that_is_none_is_refused(
    grid: Grid, post: GridTransport, content: RecordDict
) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: bool(grid.pushed))
    grid.reply(content)
    with pytest.raises(CallRefused) as caught:
        coming.result(10)
    assert caught.value.code in (rpc_errors.MALFORMED, rpc_errors.FAILED)


def test_a_call_goes_again_to_a_node_that_was_restarted(grid: Grid, post: GridTransport) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}, b"x"), 10)
    until(lambda: len(grid.pushed) == 1)
    grid.nodes[0] = SimpleNamespace(name="alpha", node_id=0, last_activated_at="2")
    until(lambda: len(grid.pushed) == 2)
    # nobody waits for this one any more
    grid.reply(pack({"code": "", "words": ""}, b"first"), to=0)
    grid.reply(pack({"code": "", "words": ""}, b"second"), to=1)
    assert coming.result(10) == b"second"
    assert len(grid.pushed) == 2


def test_a_node_that_goes_fails_its_calls_and_no_others(grid: Grid, post: GridTransport) -> None:
    changes: list[None] = []
    post.watch(lambda: changes.append(None))
    gone = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    other = post.send("beta", pack({"kind": "do", "to": "beta"}), 10)
    until(lambda: len(grid.pushed) == 2)
    grid.nodes = grid.nodes[1:]
    with pytest.raises(CallRefused) as caught:
        gone.result(10)
    assert caught.value.code == rpc_errors.UNREACHABLE and changes
    sent = next(n for n, message in enumerate(grid.pushed) if message.metadata.dst_node_id == 1)
    grid.reply(pack({"code": "", "words": ""}, b"here"), to=sent)
    assert other.result(10) == b"here"


def test_a_name_of_two_nodes_is_nobodys(grid: Grid, post: GridTransport) -> None:
    grid.nodes = [*grid.nodes, SimpleNamespace(name="beta", node_id=7, last_activated_at="1")]
    until(lambda: post.there().keys() == {"alpha"})
    assert post.twice == {"beta"}


def test_a_superlink_in_trouble_fails_calls_until_it_is_back(
    grid: Grid, post: GridTransport
) -> None:
    grid.problem = OSError("no route")
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    with pytest.raises(CallRefused) as caught:
        while True:
            coming.result(10)
            coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    assert caught.value.code == rpc_errors.UNREACHABLE
    grid.problem, before = None, len(grid.pushed)
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: len(grid.pushed) > before)
    grid.reply(pack({"code": "", "words": ""}, b"back"))
    assert coming.result(10) == b"back"


def test_a_line_gives_up_after_the_deadline_and_the_post_forgets(
    grid: Grid, post: GridTransport
) -> None:
    async def ask() -> None:
        line = GridClient(post, "alpha")
        assert await line.wait(10)
        with pytest.raises(CallRefused) as caught:
            await line.ask("do", b"x", id="1", deadline=0.1)
        assert caught.value.code == rpc_errors.LATE

    asyncio.run(ask())
    until(lambda: not post._pending)
    assert len(grid.pushed) == 1


def test_a_line_says_who_is_connected_instead(grid: Grid, post: GridTransport) -> None:
    async def look() -> str:
        line = GridClient(post, "gamma")
        assert not await line.wait(0.05)
        return line.problem

    assert asyncio.run(look()) == "no SuperNode of this name; available: alpha, beta"


def test_to_close_costs_no_message(grid: Grid, post: GridTransport) -> None:
    async def close() -> bytes:
        return await GridClient(post, "alpha").ask("close", b"x", id="1", deadline=1)

    assert payload.unpack(asyncio.run(close()))[0] == {}
    assert not grid.pushed


def test_who_gives_up_is_not_sent_an_answer(grid: Grid, post: GridTransport) -> None:
    coming = post.send("alpha", pack({"kind": "do", "to": "alpha"}), 10)
    until(lambda: bool(grid.pushed))
    assert coming.cancel()
    grid.reply(pack({"code": "", "words": ""}, b"late"))
    until(lambda: not post._pending)
    with pytest.raises(CancelledError):
        coming.result(0)
