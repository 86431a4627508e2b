"""The wire against a side that means ill: nobody's memory, time or secrets are at its disposal."""

from __future__ import annotations

import asyncio
import gc
import socket
import tracemalloc
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.core.errors import MessageError
from fedloom.remote import frames, rpc_errors, rpc_server
from fedloom.remote import rpc_client as links
from fedloom.remote.frames import LARGEST_PIECE, PIECE, FrameError, framed, unframed, whole
from fedloom.remote.rpc_errors import CallRefused
from tests.net.wires import LIMIT, ByHand, Echo, first, hostile, linked, run, serving

Status = grpc.StatusCode
MB = 1 << 20


# -- a node and a hostile caller -------------------------------------------------------------------


def against(test: Callable[[Echo, Any, ByHand], Awaitable[None]], how: Any = None) -> None:
    async def work() -> None:
        handler = Echo(how)
        async with serving(handler, None) as server:
            hand = ByHand(server.port)
            try:
                await test(handler, server, hand)
            finally:
                await hand.close()

    run(work())


@pytest.mark.parametrize(
    ("sent", "code", "words"),
    [
        ([first(bytes=LIMIT + 1)], Status.OUT_OF_RANGE, f"the limit is {LIMIT}"),
        ([first(bytes=-1)], Status.OUT_OF_RANGE, f"the limit is {LIMIT}"),
        ([first(bytes=2**60)], Status.OUT_OF_RANGE, f"the limit is {LIMIT}"),
        (
            [first(b"1234", bytes=3, sum=zlib.crc32(b"123"))],
            Status.INVALID_ARGUMENT,
            "its announced size",
        ),
        ([first(b"12", bytes=3, sum=1), b"34"], Status.INVALID_ARGUMENT, "its announced size"),
        ([first(b"12", bytes=3, sum=1)], Status.INVALID_ARGUMENT, "its announced size"),
        ([first(b"12", bytes=3, sum=1), b""], Status.INVALID_ARGUMENT, "its announced size"),
        ([first(b"123", bytes=3, sum=1)], Status.INVALID_ARGUMENT, "announced CRC-32"),
        ([first(bytes=2 * LARGEST_PIECE), bytes(LARGEST_PIECE + 1)], Status.RESOURCE_EXHAUSTED, ""),
        ([bytes(LARGEST_PIECE + 1)], Status.RESOURCE_EXHAUSTED, ""),
        ([first(id="x" * 400)], Status.INVALID_ARGUMENT, "characters"),
        ([first(kind="x" * 400)], Status.INVALID_ARGUMENT, "characters"),
        ([], Status.INVALID_ARGUMENT, "its announced size"),
        ([b""], Status.INVALID_ARGUMENT, "its announced size"),
        ([b"\xff" * 100], Status.INVALID_ARGUMENT, "its announced size"),
        ([next(framed({"kind": "echo"}))], Status.INVALID_ARGUMENT, "its announced size"),
        ([first(bytes=True)], Status.INVALID_ARGUMENT, "its announced size"),
    ],
)
def test_a_call_that_is_not_what_it_says_reaches_nobody(
    sent: list[bytes], code: grpc.StatusCode, words: str
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        found, said = await hand.status(*sent)
        assert found is code and words in said
        assert not handler.calls
        # the caller may hear of the end before the node is through
        await _until(lambda: not server.service._streams)
        assert sum(len(call.body) for call in server.service._calls.values()) <= 2

    against(test)


def told(data: bytes = b"", **values: Any) -> bytes:
    """A call of one message."""
    about: dict[str, Any] = {
        "kind": "echo",
        "id": "1",
        "bytes": len(data),
        "sum": zlib.crc32(data),
        "taken": "",
    }
    return whole({**about, **values}, data)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (told(b"12", bytes=3), Status.INVALID_ARGUMENT),
        (told(b"1234", bytes=3), Status.INVALID_ARGUMENT),
        (told(b"123", sum=1), Status.INVALID_ARGUMENT),
        (told(bytes=LIMIT + 1), Status.OUT_OF_RANGE),
        (told(id="x" * 400), Status.INVALID_ARGUMENT),
        (told(taken=1), Status.INVALID_ARGUMENT),
        (first(b"123"), Status.INVALID_ARGUMENT),
        (bytes(LARGEST_PIECE + 1), Status.RESOURCE_EXHAUSTED),
        (b"", Status.INVALID_ARGUMENT),
    ],
)
def test_a_call_of_one_message_is_what_it_says_or_reaches_nobody(
    sent: bytes, code: grpc.StatusCode
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await hand.told(sent)
        assert refusal.value.code() is code
        assert not handler.calls

    against(test)


def test_an_answer_is_kept_until_its_own_caller_confirms_it() -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        other = ByHand(server.port, "other")
        assert (await hand.told(told(b"one"))).endswith(b"one")
        assert (await hand.told(told(b"one"))).endswith(b"one") and len(handler.calls) == 1
        await other.told(told(id="2", taken="1 3"))
        assert ("mallory", "1") in server.service._calls
        await hand.told(told(id="2", taken="1 3"))
        assert ("mallory", "1") not in server.service._calls
        await hand.told(told(b"one"))
        assert len(handler.calls) == 4
        await other.close()

    against(test)


def test_a_call_of_wrong_bytes_is_forgotten_and_may_be_made_again() -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        assert (await hand.status(first(b"123", bytes=3, sum=1)))[0] is Status.INVALID_ARGUMENT
        assert not server.service._calls
        assert (await hand.status(first(b"123", bytes=3, sum=zlib.crc32(b"123"))))[0] is Status.OK
        assert len(handler.calls) == 1

    against(test)


def test_what_is_announced_takes_no_memory_and_what_never_ends_is_swept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        waiting = [hand.call() for _ in range(2)]
        for n, call in enumerate(waiting):
            await call.write(first(b"12", id=str(n), bytes=LIMIT, sum=1))
        await _until(lambda: len(server.service._calls) == 2)
        assert [bytes(call.body) for call in server.service._calls.values()] == [b"12", b"12"]
        # So much may be on its way of one caller; another one has room.
        assert (await hand.status(first(id="3", bytes=1)))[0] is Status.RESOURCE_EXHAUSTED
        async with linked(server.port, None, own="hub") as hub:
            assert await hub.ask("echo", bytes(LIMIT), id="1", deadline=9) == bytes(LIMIT)
            monkeypatch.setattr(rpc_server, "KEPT", 0.05)
            await waiting[0].write(b"3")
            await _until(lambda: waiting[0].done())
            assert await waiting[0].code() is Status.INVALID_ARGUMENT
            await hub.ask("echo", b"", id="2", deadline=9)
        await asyncio.sleep(0.1)
        await hand.status(first())
        await _until(lambda: {id for _, id in server.service._calls} <= {"1"})
        for call in waiting:
            call.cancel()

    against(test)


def test_calls_that_nobody_fetches_the_answer_of_have_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        monkeypatch.setattr(rpc_server, "MOST_CALLS", 8)
        for n in range(8):
            call = hand.call()
            await call.write(first(id=str(n)))
            assert await call.read() is not grpc.aio.EOF
            call.cancel()
        await _until(lambda: not server.service._streams)
        code, words = await hand.status(first(id="9"))
        assert code is Status.RESOURCE_EXHAUSTED and words == "too many calls at once"
        async with linked(server.port, None, own="hub") as hub:
            assert await hub.ask("echo", b"1", id="1", deadline=9) == b"1"
        # the answer was kept
        assert (await hand.status(first(id="0"), frames.TAKEN))[0] is Status.OK
        assert len(handler.calls) == 9
        assert (await hand.status(first(id="9")))[0] is Status.OK

    against(test)


@pytest.mark.parametrize("wrong", ["message", "failure", "bytes"])
def test_refused_calls_leave_nothing_in_memory(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal keeps the frames that it went through, and they the call's bytes, until somebody
    collects cycles.
    """
    # pytest keeps what is logged
    monkeypatch.setattr(rpc_server._log, "exception", lambda *_: None)

    async def refuse(_: str, body: bytes) -> bytes:
        view = memoryview(body)
        if wrong == "failure":
            raise RuntimeError
        try:
            raise MessageError(f"{len(view)} bytes are no message")
        except MessageError as error:
            raise CallRefused(rpc_errors.MALFORMED, "invalid message", str(error)) from None

    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        size, kept = 2 * MB, list[int]()
        data = bytes(size)
        for n in range(8):
            call, sum = hand.call(), zlib.crc32(data) + (wrong == "bytes")
            await call.write(first(data[:PIECE], id=str(n), bytes=size, sum=sum))
            for at in range(PIECE, size, PIECE):
                await call.write(data[at : at + PIECE])
            assert await call.code() in (Status.INVALID_ARGUMENT, Status.INTERNAL)
            await _until(lambda: not server.service._streams and not server.service._calls)
            kept.append(tracemalloc.get_traced_memory()[0])
        assert kept[-1] - kept[1] < size

    gc.disable()
    tracemalloc.start()
    try:
        against(test, refuse)
    finally:
        tracemalloc.stop()
        gc.enable()


def test_a_caller_who_is_refused_again_and_again_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        for _ in range(rpc_server.MOST_LINES + 20):
            assert (await hand.status(first(bytes=-1)))[0] is Status.OUT_OF_RANGE

    against(test)
    told = [record.getMessage() for record in caplog.records]
    assert sum("refused a call of mallory" in line for line in told) == rpc_server.MOST_LINES
    assert sum("mallory" in line for line in told) == rpc_server.MOST_LINES + 1


def test_connections_have_a_number_and_those_within_it_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anybody may dial, without a certificate; the files that a process may open are for its own,
    too.
    """
    monkeypatch.setattr(rpc_server, "most_connections", lambda: 8)

    async def work() -> None:
        async with serving(Echo(), None) as server, linked(server.port, None, own="hub") as hub:
            assert await hub.ask("echo", b"0", id="0", deadline=9) == b"0"
            strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(30)]
            await _until(lambda: sum(map(_is_open, strangers)) < 8)
            assert await hub.ask("echo", b"1", id="1", deadline=9) == b"1"
            for one in strangers:
                one.close()

    run(work())
    monkeypatch.undo()
    assert 64 <= rpc_server.most_connections() <= rpc_server.MOST_CONNECTIONS


def _is_open(one: socket.socket) -> bool:
    """Whether the server has not closed this connection; its first bytes are read."""
    one.setblocking(False)
    try:
        while one.recv(1000):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def test_answers_that_nobody_fetches_have_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    async def large(_: str, body: bytes) -> bytes:
        return bytes(1000)

    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        monkeypatch.setattr(rpc_server, "MOST_KEPT", 1500)
        for n in range(2):
            call = hand.call()
            await call.write(first(id=str(n)))
            assert await call.read() is not grpc.aio.EOF
            call.cancel()
        assert (await hand.status(first(id="3")))[0] is Status.RESOURCE_EXHAUSTED

    against(test, large)


def test_streams_of_one_caller_have_a_number_and_must_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        monkeypatch.setattr(rpc_server, "MOST_CALLS", 4)
        monkeypatch.setattr(rpc_server, "OPENING", 0.3)
        idle = [hand.call() for _ in range(4)]
        await asyncio.gather(*(call.wait_for_connection() for call in idle))
        await _until(lambda: server.service._streams["mallory"] == 4)
        assert (await hand.status(first(id="9")))[0] is Status.RESOURCE_EXHAUSTED
        # nothing came for too long
        assert [await call.code() for call in idle] == [Status.INVALID_ARGUMENT] * 4
        await _until(lambda: not server.service._streams)
        assert (await hand.status(first(id="9")))[0] is Status.OK

    against(test)


def test_a_caller_who_takes_its_answer_and_stays_does_not_keep_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(handler: Echo, server: Any, hand: ByHand) -> None:
        monkeypatch.setattr(rpc_server, "OPENING", 0.3)
        call = hand.call()
        await call.write(first())
        while await call.read() is not grpc.aio.EOF:
            pass
        assert await call.code() is Status.OK
        await _until(lambda: not server.service._streams)

    against(test)


def test_a_stranger_is_refused_before_anything_is_read() -> None:
    class Policy(Echo):
        def limit(self, caller: str) -> int:
            if caller != "hub":
                raise CallRefused(
                    rpc_errors.REFUSED, "you are not among this node's callers or peers"
                )
            return LIMIT

    async def work() -> None:
        handler = Policy()
        async with serving(handler, None) as server:
            hand = ByHand(server.port)
            call = hand.call()
            assert await call.code() is Status.PERMISSION_DENIED
            assert await call.details() == "you are not among this node's callers or peers"
            await hand.close()

    run(work())


def test_words_of_any_length_cross_cut() -> None:
    async def long(_: str, body: bytes) -> bytes:
        raise CallRefused(rpc_errors.MISMATCH, "\n\x1b[31m" + "ä" * 100_000)

    async def work() -> None:
        async with (
            serving(Echo(long), None) as server,
            linked(server.port, None, own="hub") as link,
        ):
            with pytest.raises(CallRefused) as refusal:
                await link.ask("echo", b"", id="1", deadline=9)
            assert refusal.value.code == rpc_errors.MISMATCH
            assert refusal.value.words.isprintable() and refusal.value.words.endswith("ä")
            assert len(refusal.value.words) <= frames.MOST_WORDS

    run(work())


def test_words_that_come_in_place_of_a_sign_of_life_cannot_move_a_terminal_s_cursor() -> None:
    async def pulse(_: bytes, context: Any) -> None:
        await context.abort(Status.UNAVAILABLE, "\x1b[2Jno\nroom " + "ä" * 500)

    async def work() -> str:
        server = grpc.aio.server()
        rpcs = {"Pulse": grpc.unary_unary_rpc_method_handler(pulse)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(frames.SERVICE, rpcs),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with linked(port, None, own="hub", up=False) as link:
            await _until(lambda: bool(link.problem))
            problem = link.problem
        await server.stop(0)
        return problem

    problem = run(work())
    assert problem.startswith("[2Jnoroom ää") and len(problem) <= frames.MOST_WORDS


# -- a caller and a hostile node -------------------------------------------------------------------


def asked(
    script: Callable[[Any, Any], Awaitable[None]], body: bytes = b"", **limits: Any
) -> tuple[CallRefused, int]:
    """What becomes of a call that such a node answers, and how often it was made."""

    async def work() -> tuple[CallRefused, int]:
        async with (
            hostile(script) as (port, count),
            linked(port, None, own="hub", **limits) as link,
        ):
            with pytest.raises(CallRefused) as refusal:
                await link.ask("do", body, id="1", deadline=20)
            assert not [task for task in asyncio.all_tasks() if "_attempt" in repr(task)]
            return refusal.value, count[0]

    refusal: tuple[CallRefused, int] = run(work())
    return refusal


def answer(data: bytes, **values: Any) -> bytes:
    """The first frame of an answer."""
    return next(framed({"bytes": len(data), "sum": zlib.crc32(data), "from": 0, **values}, data))


def test_an_answer_that_is_announced_too_large_is_not_taken() -> None:
    async def script(frames_in: Any, context: Any) -> None:
        await context.write(answer(b"x", bytes=2**60))
        while True:
            await context.write(bytes(PIECE))

    tracemalloc.start()
    try:
        refusal, count = asked(script)
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()
    assert (refusal.code, count) == (rpc_errors.TOO_LARGE, 1)


def test_an_answer_without_end_takes_no_memory() -> None:
    async def script(frames_in: Any, context: Any) -> None:
        await context.write(answer(b"x", bytes=PIECE))
        while True:
            await context.write(bytes(PIECE))

    tracemalloc.start()
    try:
        refusal, count = asked(script)
        assert tracemalloc.get_traced_memory()[1] < 16 * MB
    finally:
        tracemalloc.stop()
    assert (refusal.code, count) == (rpc_errors.MALFORMED, links.STRIKES)


async def _wrong_sum(frames_in: Any, context: Any) -> None:
    await context.write(answer(b"abc", sum=7))


async def _negative(frames_in: Any, context: Any) -> None:
    await context.write(answer(b"abc", sum=7, **{"from": -1}))


async def _not_where_it_broke(frames_in: Any, context: Any) -> None:
    await context.write(answer(b"abc", **{"from": 2}))


async def _garbage(frames_in: Any, context: Any) -> None:
    await context.write(b"\xff" * 300)


async def _nothing(frames_in: Any, context: Any) -> None:
    pass


async def _empty_pieces(frames_in: Any, context: Any) -> None:
    await context.write(answer(b"abc", bytes=10))
    while True:
        await context.write(b"")


async def _too_short(frames_in: Any, context: Any) -> None:
    await context.write(answer(b"abc", bytes=10))


async def _long_frame(frames_in: Any, context: Any) -> None:
    await context.write(answer(bytes(4), bytes=4 * MB))
    await context.write(bytes(2 * MB))


async def _status_without_code(frames_in: Any, context: Any) -> None:
    await context.abort(Status.INTERNAL, "boo")


async def _invented_code(frames_in: Any, context: Any) -> None:
    await context.abort(Status.INTERNAL, "boo", ((frames.CODE, "invented"),))


@pytest.mark.parametrize(
    "script",
    [
        _wrong_sum,
        _negative,
        _not_where_it_broke,
        _garbage,
        _nothing,
        _empty_pieces,
        _too_short,
        _long_frame,
        _status_without_code,
        _invented_code,
    ],
)
def test_answers_that_cannot_be_read_are_asked_for_a_few_times_only(script: Any) -> None:
    refusal, count = asked(script)
    assert (refusal.code, count) == (rpc_errors.MALFORMED, links.STRIKES)
    assert "boo" not in refusal.words


@pytest.mark.parametrize("have", [-1, 10**6, 2**62])
def test_a_node_that_has_more_than_there_is_gets_nothing(have: int) -> None:
    async def script(frames_in: Any, context: Any) -> None:
        frame = await anext(frames_in)
        try:
            unframed(frame, again=bool, got=int, of=int, kind=str, id=str, bytes=int, sum=int)
        except FrameError:  # the call of one message
            return
        await context.write(next(framed({"have": have})))
        with suppress(StopAsyncIteration):
            assert not await anext(frames_in)

    refusal, count = asked(script, b"12345")
    assert (refusal.code, count) == (rpc_errors.MALFORMED, links.STRIKES)


def test_a_node_that_only_says_that_it_is_busy_holds_nobody_beyond_the_deadline() -> None:
    async def work() -> None:
        async def script(frames_in: Any, context: Any) -> None:
            await context.abort(
                Status.RESOURCE_EXHAUSTED, "later", ((frames.CODE, rpc_errors.BUSY),)
            )

        async with hostile(script) as (port, count), linked(port, None, own="hub") as link:
            with pytest.raises(CallRefused, match="later"):
                await link.ask("do", b"", id="1", deadline=1)
            assert count[0] < 12  # with pauses in between

    run(work())


# -- frames ----------------------------------------------------------------------------------------

_TYPES = {"bytes": int, "sum": int}


@given(
    st.binary(max_size=200)
    | st.binary(max_size=60).map(lambda tail: next(framed({"bytes": 1, "sum": 2})) + tail)
)
def test_a_first_frame_is_read_or_garbled(frame: bytes) -> None:
    with suppress(FrameError):
        head, _ = unframed(frame, **_TYPES)
        assert {name: type(value) for name, value in head.items()} == _TYPES


@settings(max_examples=20)
@given(st.integers(0, 3 * PIECE), st.integers(0, 3 * PIECE))
def test_frames_hold_all_from_a_place_on(size: int, start: int) -> None:
    data = bytes(size)
    made = list(framed({"bytes": size, "sum": 0}, data, start))
    head, rest = unframed(made[0], **_TYPES)
    assert head["bytes"] == size
    assert len(rest) + sum(map(len, made[1:])) == max(size - start, 0)
    assert all(0 < len(piece) <= PIECE for piece in made[1:]) and len(rest) <= PIECE


async def _until(there: Callable[[], object]) -> None:
    while not there():
        await asyncio.sleep(0.01)
