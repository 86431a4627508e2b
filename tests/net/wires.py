"""Both sides of the wire for tests: a federation's certificates, handlers, a line that breaks,
frames by hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fedloom.remote import frames
from fedloom.remote.certs import CertificateAuthority
from fedloom.remote.credentials import Credentials
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_server import RPCServer, serve

LIMIT = 8 << 20


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 120))


class Pki:
    """A CA in a folder, and credentials by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = CertificateAuthority.create(folder)

    def of(self, name: str, *, revoked: bool = False) -> Credentials:
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        if not certificate.exists():
            self.issue(name)
        return Credentials(
            self.folder / "ca.pem",
            certificate,
            key,
            self.folder / "revoked.pem" if revoked else None,
        )

    def issue(self, name: str) -> None:
        issued = self.authority.issue(name, 1)
        for suffix, data in zip((".pem", ".key"), issued, strict=True):
            path = self.folder / f"{name}{suffix}"
            path.touch(mode=0o600)
            path.write_bytes(data)


class Echo:
    """Answers with what it is asked, or as `how` says; remembers who asked."""

    def __init__(
        self, how: Callable[[str, bytes], Awaitable[bytes]] | None = None, most: int = LIMIT
    ) -> None:
        self.how = how
        self.most = most
        self.calls: list[tuple[str, str]] = []
        self.heard_of: set[str] = set()

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        self.calls.append((caller, kind))
        return body if self.how is None else await self.how(kind, body)

    def heard(self, caller: str, session: str) -> str:
        self.heard_of.add(caller)
        return ""

    def broke(self, caller: str, session: str) -> None:
        pass

    def limit(self, caller: str) -> int:
        return self.most


@asynccontextmanager
async def serving(handler: Any, credentials: Credentials | None) -> AsyncIterator[RPCServer]:
    server = await serve(handler, "127.0.0.1:0", credentials)
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked(
    port: int, credentials: Credentials | None, name: str = "node", *, up: bool = True, **also: Any
) -> AsyncIterator[RPCClient]:
    link = RPCClient(ServerAddress(name, f"127.0.0.1:{port}"), credentials, **also)
    try:
        assert not up or await link.wait(10), link.problem
        yield link
    finally:
        await link.close()


class Proxy:
    """A line to a port that breaks once a connection has carried so many bytes in a direction."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.carried = {"up": 0, "down": 0}
        self.cut: dict[str, int] = {}
        self.cuts = 0
        self.stopped = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.break_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, back]
        pair = (writer, back)
        self._tasks += [
            asyncio.ensure_future(self._carry("up", reader, back, pair)),
            asyncio.ensure_future(self._carry("down", there, writer, pair)),
        ]

    async def _carry(
        self,
        eval_mode: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pair: tuple[Any, Any],
    ) -> None:
        carried = 0
        with suppress(OSError):
            while piece := await reader.read(1 << 14):
                while self.stopped.is_set():
                    await asyncio.sleep(0.01)
                carried += len(piece)
                self.carried[eval_mode] += len(piece)
                if carried > self.cut.get(eval_mode, 1 << 60):
                    self.cut.pop(eval_mode)
                    self.cuts += 1
                    await asyncio.sleep(0.5)  # what an end has not read yet is lost with the line
                    for end in pair:
                        end.transport.abort()
                    return
                writer.write(piece)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def hostile(
    script: Callable[[Any, Any], Awaitable[None]],
) -> AsyncIterator[tuple[int, list[int]]]:
    """A server that gives signs of life and answers calls as a script does; its port, and how often
    it was called.
    """
    count = [0]

    async def ask(frames_in: Any, context: Any) -> None:
        count[0] += 1
        await script(frames_in, context)

    async def tell(frame: bytes, context: Any) -> bytes:
        """The script's first frame, of a call of one message."""
        written = FirstFrame(context)
        with suppress(StopWriting):
            await ask(_frames(frame), written)
        return written.frame

    async def pulse(_: bytes, context: Any) -> bytes:
        return b""

    server = grpc.aio.server(
        options=(("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0))
    )
    rpcs = {
        "Ask": grpc.stream_stream_rpc_method_handler(ask),
        "Tell": grpc.unary_unary_rpc_method_handler(tell),
        "Pulse": grpc.unary_unary_rpc_method_handler(pulse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(frames.SERVICE, rpcs),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield port, count
    finally:
        await server.stop(0)


class FirstFrame:
    """The context of a call of one message: keeps the first frame that a script writes, and ends
    the script at the second.
    """

    def __init__(self, context: Any) -> None:
        self.frame, self.abort = b"", context.abort

    async def write(self, frame: bytes) -> None:
        if self.frame:
            raise StopWriting
        self.frame = frame


class StopWriting(Exception):
    """A call of one message has room for one frame."""


async def _frames(*sent: bytes) -> AsyncIterator[bytes]:
    for frame in sent:
        yield frame


class ByHand:
    """Streams of frames that no link would send, in the insecure mode."""

    def __init__(self, port: int, name: str = "mallory") -> None:
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=(("grpc.max_send_message_length", -1),)
        )
        self._name = name

    def call(self) -> Any:
        return self._channel.stream_stream(frames.ASK)(metadata=((frames.NAME, self._name),))

    async def told(self, frame: bytes) -> bytes:
        """The answer to a call of one message; raises AioRpcError."""
        tell = self._channel.unary_unary(frames.TELL)
        answer: bytes = await tell(frame, metadata=((frames.NAME, self._name),))
        return answer

    async def status(self, *sent: bytes, end: bool = True) -> tuple[grpc.StatusCode, str]:
        """What the server says in the end of these frames, and perhaps of the end of the stream."""
        call = self.call()
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for frame in sent:
                await call.write(frame)
            if end:
                await call.done_writing()
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code(), await call.details()

    async def close(self) -> None:
        await self._channel.close()


def head(id: str = "1", kind: str = "echo", **values: Any) -> dict[str, Any]:
    return {
        "kind": kind,
        "id": id,
        "bytes": 0,
        "sum": 0,
        "got": 0,
        "of": 0,
        "again": False,
        **values,
    }


def first(data: bytes = b"", **values: Any) -> bytes:
    """A first frame."""
    return next(frames.framed(head(**values), data))
