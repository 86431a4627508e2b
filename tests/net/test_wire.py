"""The wire, between sides that mean well: what breaks is mended, and work is done once."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest

from fedloom.core.errors import EngineError
from fedloom.remote import rpc_client as links
from fedloom.remote import rpc_errors
from fedloom.remote.frames import PIECE, WHOLE, digest
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.rpc_server import serve
from tests.net.wires import Echo, Pki, Proxy, linked, run, serving

MB = 1 << 20


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life in short order."""
    monkeypatch.setattr(links, "PULSE", 0.2)
    monkeypatch.setattr(links, "PATIENCE", 0.8)


def test_calls_of_every_length_come_over(pki: Pki) -> None:
    async def work() -> None:
        handler = Echo()
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            sizes = (0, 1, PIECE - 1, PIECE, PIECE + 1, WHOLE, WHOLE + 1, WHOLE + 3 * PIECE + 7)
            for n in sizes:
                body = os.urandom(n)
                assert await link.ask("echo", body, id=str(n), deadline=10) == body
                answer = bytes(n)  # of a small call
                handler.how = lambda *_: _given(answer)  # noqa: B023
                assert await link.ask("get", b"", id=f"get {n}", deadline=10) == answer
                handler.how = None
            assert handler.calls == [("hub", "echo"), ("hub", "get")] * len(sizes)
            assert handler.heard_of == {"hub"}

    run(work())


def test_an_upload_that_breaks_continues_where_it_broke(pki: Pki) -> None:
    async def work() -> None:
        handler, body = Echo(lambda _, data: _digest(data)), os.urandom(6 * MB)
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            line.cut["up"] = 4 * MB
            assert await link.ask("echo", body, id="1", deadline=20) == digest(body).encode()
            assert line.cuts == 1 and len(handler.calls) == 1
            assert line.carried["up"] < 8 * MB  # 10 if it had begun anew

    run(work())


def test_a_download_that_breaks_continues_where_it_broke(pki: Pki) -> None:
    async def work() -> None:
        answer = os.urandom(6 * MB)
        handler = Echo(lambda *_: _given(answer))
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            line.cut["down"] = 4 * MB
            assert await link.ask("get", b"", id="1", deadline=20) == answer
            assert line.cuts == 1 and len(handler.calls) == 1
            assert line.carried["down"] < 8 * MB

    run(work())


def test_an_answer_that_was_lost_with_its_line_is_kept(pki: Pki) -> None:
    """All of it had been written, and nothing of it had come over."""

    async def work() -> None:
        handler = Echo()
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            asking = asyncio.ensure_future(link.ask("echo", b"1", id="1", deadline=20))
            await _until(lambda: bool(handler.calls))
            line.stopped.set()
            await _until(lambda: all(call.kept for call in server.service._calls.values()))
            line.break_all()
            line.stopped.clear()
            assert await asking == b"1"
            assert len(handler.calls) == 1

    run(work())


def test_an_answer_that_was_made_anew_is_not_mixed_with_the_old_one(pki: Pki) -> None:
    """The node forgot the call while the line was down, and answers otherwise now."""

    async def work() -> None:
        answers = [os.urandom(6 * MB), os.urandom(6 * MB)]
        made = iter(answers)
        handler = Echo(lambda *_: _given(next(made)))
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            line.cut["down"] = 3 * MB
            asking = asyncio.ensure_future(link.ask("get", b"", id="1", deadline=20))
            while not line.cuts:
                await asyncio.sleep(0.001)
            server.service._calls.clear()
            assert await asking == answers[1]

    run(work())


def test_work_that_is_in_progress_is_not_begun_again(pki: Pki) -> None:
    """The line breaks while the node works; and a second stream asks for the same."""

    async def work() -> None:
        go = asyncio.Event()

        async def slowly(_: str, body: bytes) -> bytes:
            await go.wait()
            return body

        handler = Echo(slowly)
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            both = [
                asyncio.ensure_future(link.ask("echo", b"x" * MB, id="1", deadline=20))
                for _ in range(2)
            ]
            await _until(lambda: bool(handler.calls))
            line.break_all()
            await asyncio.sleep(0.2)
            go.set()
            assert await asyncio.gather(*both) == [b"x" * MB] * 2
            assert len(handler.calls) == 1

    run(work())


def test_an_id_is_one_callers_own_and_one_content(pki: Pki) -> None:
    async def work() -> None:
        go = asyncio.Event()

        async def slowly(_: str, body: bytes) -> bytes:
            await go.wait()
            return body

        handler = Echo(slowly)
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as hub,
            linked(server.port, pki.of("other")) as other,
        ):
            mine = asyncio.ensure_future(hub.ask("echo", b"mine", id="1", deadline=9))
            yours = asyncio.ensure_future(other.ask("echo", b"yours", id="1", deadline=9))
            await _until(lambda: len(handler.calls) == 2)
            with pytest.raises(CallRefused, match="another call has this id") as refusal:
                await hub.ask("echo", b"nine", id="1", deadline=9)
            assert refusal.value.code == rpc_errors.MALFORMED
            go.set()
            assert (await mine, await yours) == (b"mine", b"yours")

    run(work())


def test_a_caller_who_gave_up_finds_the_answer(pki: Pki) -> None:
    """By its deadline, or cancelled: the work goes on and is done once."""

    async def work() -> None:
        go = asyncio.Event()

        async def slowly(_: str, body: bytes) -> bytes:
            await go.wait()
            return body

        handler = Echo(slowly)
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            with pytest.raises(CallRefused) as refusal:
                await link.ask("echo", b"1", id="1", deadline=0.3)
            assert refusal.value.code == rpc_errors.LATE
            cancelled = asyncio.ensure_future(link.ask("echo", b"1", id="1", deadline=9))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            await asyncio.gather(cancelled, return_exceptions=True)
            go.set()
            assert await link.ask("echo", b"1", id="1", deadline=9) == b"1"
            assert len(handler.calls) == 1

    run(work())


def test_a_busy_node_is_asked_again_until_the_deadline(pki: Pki) -> None:
    async def work() -> None:
        async def busy(kind: str, body: bytes) -> bytes:
            if kind == "never" or len(handler.calls) < 3:
                raise CallRefused(rpc_errors.BUSY, "not now")
            return body

        handler = Echo(busy)
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            assert await link.ask("soon", b"1", id="1", deadline=9) == b"1"
            assert len(handler.calls) == 3
            with pytest.raises(CallRefused, match="not now") as refusal:
                await link.ask("never", b"1", id="2", deadline=0.5)
            assert refusal.value.code == rpc_errors.BUSY

    run(work())


@pytest.mark.parametrize("code", [code for code in rpc_errors.CODES if code != rpc_errors.BUSY])
def test_a_refusal_crosses_with_its_code_and_words_and_without_its_detail(
    code: str, pki: Pki
) -> None:
    async def work() -> None:
        async def refuse(kind: str, body: bytes) -> bytes:
            raise CallRefused(code, "drei Wörter – nicht mehr", "secret")

        handler = Echo(refuse)
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            with pytest.raises(CallRefused) as refusal:
                await link.ask("echo", b"", id="1", deadline=9)
            assert (refusal.value.code, refusal.value.words, refusal.value.detail) == (
                code,
                "drei Wörter – nicht mehr",
                "",
            )
            with pytest.raises(CallRefused):
                await link.ask("echo", b"", id="1", deadline=9)
            assert len(handler.calls) == 2  # a refusal is not kept

    run(work())


def test_no_text_of_an_exception_crosses_with_a_sign_of_life(pki: Pki) -> None:
    class Broken(Echo):
        def heard(self, caller: str, run: str) -> None:
            raise ValueError("patient 7")

    async def work() -> str:
        async with serving(Broken(), pki.of("node")) as server:
            link = RPCClient(ServerAddress("node", f"127.0.0.1:{server.port}"), pki.of("hub"))
            try:
                assert not await link.wait(3)
                return link.problem
            finally:
                await link.close()

    problem = run(work())
    assert (
        "the reason is in its log" in problem
        and "patient" not in problem
        and "ValueError" not in problem
    )


def test_no_text_of_an_exception_crosses(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async def fail(kind: str, body: bytes) -> bytes:
            raise RuntimeError("patient 7: SECRET")

        async with (
            serving(Echo(fail), pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub")) as link,
        ):
            with pytest.raises(CallRefused) as refusal:
                await link.ask("echo", b"", id="1", deadline=9)
            assert refusal.value.code == rpc_errors.FAILED
            assert (
                refusal.value.words == "the coordinator failed to answer; the reason is in its log"
            )
            assert "SECRET" not in repr(refusal.value.__context__)

    run(work())
    assert "patient 7: SECRET" in caplog.text


def test_nothing_is_left_after_many_calls(pki: Pki) -> None:
    async def work() -> None:
        handler = Echo()
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):

            async def many(n: int) -> None:
                for k in range(n):
                    assert await link.ask("echo", b"x", id=f"{n}/{k}", deadline=9) == b"x"
                await _until(
                    lambda: (
                        not server.service._calls
                        and not server.service._streams
                        and not link._loose
                    )
                )
                gc.collect()

            await many(20)
            tasks = len(asyncio.all_tasks())
            await many(400)  # more than may wait at once
            # more while a heartbeat is answered
            await _until(lambda: len(asyncio.all_tasks()) <= tasks)

    run(work())


def test_a_node_that_goes_is_missed_and_taken_back(pki: Pki, fast: None) -> None:
    async def work() -> None:
        seen: list[bool] = []

        async def forever(_: str, body: bytes) -> bytes:
            await asyncio.sleep(60)
            return body

        handler = Echo(forever)
        async with (
            serving(handler, pki.of("node")) as server,
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub"), changed=seen.append) as link,
        ):
            asking = asyncio.ensure_future(link.ask("echo", b"1", id="1", deadline=30))
            await _until(lambda: bool(handler.calls))
            line.stopped.set()  # frozen, with its connections open
            with pytest.raises(CallRefused) as refusal:
                await asking
            assert refusal.value.code == rpc_errors.UNREACHABLE
            with pytest.raises(CallRefused, match="is unreachable"):
                await link.ask("echo", b"1", id="2", deadline=30)
            line.stopped.clear()
            assert await link.wait(10)
            handler.how = None
            assert await link.ask("echo", b"1", id="3", deadline=10) == b"1"
            assert seen == [True, False, True]

    run(work())


# -- who is there ----------------------------------------------------------------------------------


def test_a_certificate_of_another_federation_or_name_opens_nothing(
    pki: Pki, tmp_path: Path, fast: None
) -> None:
    async def work() -> None:
        foreign, handler = Pki(tmp_path), Echo()
        async with serving(handler, pki.of("node")) as server:
            for credentials, name in ((foreign.of("hub"), "node"), (pki.of("hub"), "other")):
                async with linked(server.port, credentials, name, up=False) as link:
                    assert not await link.wait(1)
                    assert link.problem
        assert not handler.calls and not handler.heard_of

    run(work())


def test_a_caller_without_a_certificate_is_not_heard(pki: Pki) -> None:
    import grpc

    async def work() -> None:
        handler = Echo()
        async with serving(handler, pki.of("node")) as server:
            bare = grpc.ssl_channel_credentials((pki.folder / "ca.pem").read_bytes())
            options = (("grpc.ssl_target_name_override", "node"),)
            async with grpc.aio.secure_channel(
                f"127.0.0.1:{server.port}", bare, options=options
            ) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await channel.unary_unary("/fedloom.Node/Pulse")(b"", timeout=60)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not handler.heard_of

    run(work())


def test_a_caller_that_is_revoked_is_reported_at_its_next_call(tmp_path: Path) -> None:
    async def work() -> None:
        pki, handler = Pki(tmp_path), Echo()
        async with (
            serving(handler, pki.of("node", revoked=True)) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            assert await link.ask("echo", b"", id="1", deadline=9) == b""
            pki.authority.revoke("hub")
            with pytest.raises(
                CallRefused, match="node does not accept this certificate"
            ) as refusal:
                await link.ask("echo", b"", id="2", deadline=9)
            assert refusal.value.code == rpc_errors.REFUSED
        assert len(handler.calls) == 1

    run(work())


def test_a_node_that_is_revoked_is_not_talked_to(tmp_path: Path, fast: None) -> None:
    async def work() -> None:
        pki, handler = Pki(tmp_path), Echo()
        async with (
            serving(handler, pki.of("node")) as server,
            linked(server.port, pki.of("hub", revoked=True)) as link,
        ):
            assert await link.ask("echo", b"1", id="1", deadline=9) == b"1"
            pki.authority.revoke("node")
            await _until(lambda: not link.up)
            with pytest.raises(CallRefused) as refusal:
                await link.ask("echo", b"1", id="2", deadline=9)
            assert refusal.value.code == rpc_errors.UNREACHABLE
            await _until(lambda: "revoked" in link.problem)
            async with linked(server.port, pki.of("hub", revoked=True), up=False) as another:
                assert not await another.wait(1)
        assert len(handler.calls) == 1

    run(work())


def test_nothing_that_goes_wrong_ends_the_signs_of_life(
    pki: Pki, fast: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        dial, tries = RPCClient._dial, 0

        async def broken(link: RPCClient) -> object:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise ValueError("embedded null byte")
            return await dial(link)

        monkeypatch.setattr(RPCClient, "_dial", broken)
        async with (
            serving(Echo(), pki.of("node")) as server,
            linked(server.port, pki.of("hub")) as link,
        ):
            assert await link.ask("echo", b"1", id="1", deadline=9) == b"1"

    run(work())
    assert caplog.text.count("heartbeat of node failed") == 1


def test_a_node_with_a_renewed_certificate_is_taken_back(tmp_path: Path, fast: None) -> None:
    async def work() -> None:
        pki, handler = Pki(tmp_path), Echo()
        server = await serve(handler, "127.0.0.1:0", pki.of("node"))
        async with (
            Proxy(server.port) as line,
            linked(line.port, pki.of("hub", revoked=True)) as link,
        ):
            await server.stop(0)
            pki.issue("node")
            server = await serve(handler, "127.0.0.1:0", pki.of("node"))
            line.target = server.port
            await _until(lambda: not link.up)
            assert await link.wait(10)
            assert await link.ask("echo", b"1", id="1", deadline=9) == b"1"
        await server.stop(0)

    run(work())


def test_the_insecure_mode_believes_names_and_stays_on_this_machine() -> None:
    async def work() -> None:
        handler = Echo()
        async with serving(handler, None) as server:
            async with linked(server.port, None, own="hub") as link:
                assert await link.ask("echo", b"1", id="1", deadline=9) == b"1"
            async with linked(server.port, None, up=False) as nameless:
                assert not await nameless.wait(1)
        assert handler.calls == [("hub", "echo")]
        for address in ("0.0.0.0:0", "[::]:0", "127.0.0.1.example.org:0"):
            with pytest.raises(EngineError, match="insecure mode cannot listen"):
                await serve(handler, address, None)

    run(work())


def test_an_address_that_is_taken_is_reported(pki: Pki) -> None:
    async def work() -> None:
        async with serving(Echo(), pki.of("node")) as server:
            with pytest.raises(EngineError, match="cannot listen at"):
                await serve(Echo(), f"127.0.0.1:{server.port}", pki.of("node"))

    run(work())


async def _until(there: object) -> None:
    while not there():  # type: ignore[operator]
        await asyncio.sleep(0.01)


async def _digest(data: bytes) -> bytes:
    return digest(data).encode()


async def _given(answer: bytes) -> bytes:
    return answer


def test_calls_in_progress_on_a_link_that_is_closed_end_as_unreachable() -> None:
    async def work() -> None:
        asked, never = asyncio.Event(), asyncio.Event()

        async def hang(kind: str, body: bytes) -> bytes:
            asked.set()
            await never.wait()
            return body

        async with (
            serving(Echo(hang), None) as server,
            linked(server.port, None, own="hub") as link,
        ):
            calls = [asyncio.ensure_future(link.ask("echo", b"x", id="1", deadline=30))]
            await asked.wait()
            calls.append(asyncio.ensure_future(link.ask("echo", b"x", id="2", deadline=30)))
            for _ in range(4):  # at whatever place the close finds them
                calls.append(
                    asyncio.ensure_future(link.ask("echo", b"x", id=f"{len(calls)}", deadline=30))
                )
                await asyncio.sleep(0)
            await link.close()
            for found in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(found, CallRefused) and found.code == rpc_errors.UNREACHABLE
            assert not link.up

    run(work())
