"""The side of the wire that answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NoReturn, Protocol

import grpc
import grpc.aio

from fedloom.core.errors import EngineError
from fedloom.remote import rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import (
    CODE,
    MOST_WORDS,
    NAME,
    SERVER,
    SERVICE,
    STATUS,
    TAKEN,
    FrameError,
    framed,
    total_of,
    unframed,
)
from fedloom.remote.rpc_errors import CallRefused

KEPT: Final = 120.0
"""Seconds that an answer waits for a caller who lost the connection, and an unfinished call for its rest."""
OPENING: Final = 10.0
"""Seconds that the first frame of a call may take, and the last sign that an answer has come over."""
MOST_CALLS: Final = 256
"""Calls of one caller that are held at once, and streams."""
MOST_STREAMS: Final = 1024
MOST_KEPT: Final = 1 << 31
"""Bytes of answers that wait for one caller."""
_NAMES: Final = 300
"""Characters of a call's id and kind together."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_log = logging.getLogger("fedloom.net")


class Handler(Protocol):
    """Who answers calls."""

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        """The answer to a call of this certificate's name; raises Refused."""

    def heard(self, caller: str, run: str) -> None:
        """A sign of life, of a run; "" for one of no run in particular."""

    def most(self, caller: str) -> int:
        """The most bytes that a call of this caller may have; raises Refused for one who may not call at all."""


@dataclass
class _Call:
    """A call as far as it has come: its bytes, then its work, then its answer.

    Attributes:
        body: what has come of it; empty once the work has begun.
        arrived: how many bytes have come.
        sum: their CRC-32.
        work: gives the answer and its CRC-32.
    """

    kind: str
    total: int
    announced: int
    body: bytearray = field(default_factory=bytearray)
    arrived: int = 0
    sum: int = 0
    work: asyncio.Task[tuple[bytes, int]] | None = None
    touched: float = field(default_factory=monotonic)

    def add(self, at: int, piece: bytes | memoryview) -> None:
        """Take what is new of a piece that begins at a place no later than where the bytes end so far."""
        self.touched = monotonic()
        new = memoryview(piece)[max(self.arrived - at, 0) :]
        if new and self.work is None:
            self.body += new
            self.sum = zlib.crc32(new, self.sum)
            self.arrived += len(new)

    @property
    def unfinished(self) -> bool:
        """Whether there is no answer yet."""
        return self.work is None or not self.work.done()

    @property
    def kept(self) -> int:
        """Bytes of the answer."""
        return 0 if self.work is None or self.unfinished else len(self.work.result()[0])


class RPCService:
    """Takes calls, keeps what is unfinished, and lets the handler answer each once."""

    def __init__(self, handler: Handler, credentials: Credentials | None) -> None:
        self._handler = handler
        self._credentials = credentials
        self._calls: dict[tuple[str, str], _Call] = {}
        self._streams: Counter[str] = Counter()

    async def pulse(self, run: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """A sign of life of a caller."""
        caller = await self._caller(context)
        try:
            self._sweep()
            self._handler.heard(caller, run[:64].decode("ascii", "replace"))
        except Exception:  # whose text gRPC would send
            _log.exception("a sign of life of %s could not be taken", caller)
            await _refuse(context, CallRefused(rpc_errors.FAILED, "the node could not answer; its log says why"))
        return b""

    async def ask(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """A call, or the rest of one."""
        caller = await self._caller(context)
        self._streams[caller] += 1
        try:
            if self._streams[caller] > MOST_CALLS:
                raise CallRefused(rpc_errors.BUSY, "too many calls at once")
            await self._serve(caller, frames, context)
        except CallRefused as refusal:
            detail = f" ({refusal.detail})" if refusal.detail else ""
            _log.warning("refused a call of %s: %s%s", caller, refusal.words, detail)
            await _refuse(context, refusal)
        except (FrameError, TimeoutError) as error:
            _log.info("a call of %s broke off: %s", caller, error or "nothing came for too long")
            await _refuse(
                context, CallRefused(rpc_errors.MALFORMED, "a call must be what it announces, without long pauses")
            )
        except Exception:
            if context.cancelled():
                return
            _log.exception("a call of %s could not be answered", caller)
            await _refuse(context, CallRefused(rpc_errors.FAILED, "the node could not answer; its log says why"))
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    def close(self) -> None:
        """Give up all calls."""
        for call in self._calls.values():
            if call.work is not None:
                call.work.cancel()
        self._calls.clear()

    # -- one stream ------------------------------------------------------------------------------------------------

    async def _serve(
        self, caller: str, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        most = self._handler.most(caller)
        head, first = unframed(
            await _next(frames, OPENING), kind=str, id=str, bytes=int, sum=int, got=int, of=int, again=bool
        )
        key = (caller, head["id"])
        call = self._find(key, head, most)
        at = 0
        if head["again"]:
            at = call.arrived
            await _write(context, framed({"have": at}))
        await self._take(call, at, first, frames)
        answer, total = await asyncio.shield(self._work(key, call))
        start = head["got"] if head["of"] == total and 0 <= head["got"] <= len(answer) else 0
        await _write(context, framed({"bytes": len(answer), "sum": total, "from": start}, answer, start), call)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPENING):
                if await anext(frames, None) == TAKEN and self._calls.get(key) is call:
                    del self._calls[key]

    async def _take(self, call: _Call, at: int, piece: bytes | memoryview, frames: AsyncIterator[bytes]) -> None:
        """The bytes of a call, of which any stream may bring what is missing."""
        while True:
            if at + len(piece) > call.total:
                raise FrameError("more bytes came than it announced")
            call.add(at, piece)
            at += len(piece)
            if at == call.total:
                return
            piece = await _next(frames, KEPT)
            if not piece:
                raise FrameError("an empty piece came")

    async def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        if self._credentials is None:
            name = str(dict(context.invocation_metadata() or ()).get(NAME, ""))
        else:
            name = self._credentials.caller(context.auth_context()) or ""
        if not name:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "your certificate is not accepted here")
        return name

    # -- calls -----------------------------------------------------------------------------------------------------

    def _find(self, key: tuple[str, str], head: dict[str, Any], most: int) -> _Call:
        """The call of this id as far as it has come, or a new one."""
        self._sweep()
        call = self._calls.get(key)
        if call is None:
            self._check(key, head, most)
            call = self._calls[key] = _Call(head["kind"], head["bytes"], head["sum"])
        if (call.kind, call.total, call.announced) != (head["kind"], head["bytes"], head["sum"]):
            raise CallRefused(rpc_errors.MALFORMED, "another call has this id")
        call.touched = monotonic()
        return call

    def _check(self, key: tuple[str, str], head: dict[str, Any], most: int) -> None:
        """Whether there is room for a new call: memory grows with what arrives, and no caller may have all of it."""
        if not 0 <= head["bytes"] <= most:
            raise CallRefused(rpc_errors.TOO_LARGE, f"a call may have {most} bytes here")
        if len(head["kind"]) + len(head["id"]) > _NAMES:
            raise CallRefused(rpc_errors.MALFORMED, "a call's id must be short")
        mine = [call for (who, _), call in self._calls.items() if who == key[0]]
        coming = sum(call.total for call in mine if call.unfinished)
        if len(mine) >= MOST_CALLS or coming + head["bytes"] > 2 * most or sum(c.kept for c in mine) > MOST_KEPT:
            raise CallRefused(rpc_errors.BUSY, "too many calls at once")

    def _work(self, key: tuple[str, str], call: _Call) -> asyncio.Task[tuple[bytes, int]]:
        """The work of a call, begun once."""
        if call.work is None:
            if call.sum != call.announced:
                self._calls.pop(key, None)
                raise CallRefused(rpc_errors.MALFORMED, "the bytes of a call must be those that it announced")
            body, call.body = bytes(call.body), bytearray()
            call.work = asyncio.ensure_future(self._answer(key[0], call.kind, body))
            call.work.add_done_callback(lambda work: self._done(key, call, work))
        return call.work

    async def _answer(self, caller: str, kind: str, body: bytes) -> tuple[bytes, int]:
        try:
            answer = await self._handler.answer(caller, kind, body)
            return answer, await total_of(answer)
        except CallRefused:
            raise
        except Exception:
            _log.exception("a call of %s could not be answered", caller)
            raise CallRefused(rpc_errors.FAILED, "the node could not answer; its log says why") from None

    def _done(self, key: tuple[str, str], call: _Call, work: asyncio.Task[tuple[bytes, int]]) -> None:
        call.touched = monotonic()
        if (work.cancelled() or work.exception() is not None) and self._calls.get(key) is call:
            del self._calls[key]  # a refusal is not kept: asked again, the answer may be another

    def _sweep(self) -> None:
        """Let go of what nobody has come back for."""
        now = monotonic()
        for key, call in list(self._calls.items()):
            if now - call.touched > KEPT and (call.work is None or call.work.done()):
                del self._calls[key]


async def _next(frames: AsyncIterator[bytes], seconds: float) -> bytes:
    async with asyncio.timeout(seconds):
        frame = await anext(frames, None)
    if frame is None:
        raise FrameError("it ended before it was whole")
    return frame


async def _write(
    context: grpc.aio.ServicerContext[Any, Any], frames: Iterator[bytes], call: _Call | None = None
) -> None:
    for frame in frames:
        async with asyncio.timeout(KEPT):
            await context.write(frame)
        if call is not None:
            call.touched = monotonic()


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: CallRefused) -> NoReturn:
    metadata = ((CODE, refusal.code.replace(" ", "-")),)
    await context.abort(STATUS[refusal.code], refusal.words[:MOST_WORDS], metadata)
    raise AssertionError  # abort raises


class RPCServer:
    """Answers calls at an address until it is stopped; `serve` makes it.

    Attributes:
        port: where it listens; 0 for a Unix socket.
    """

    def __init__(self, server: grpc.aio.Server, port: int, service: RPCService) -> None:
        self._server = server
        self.service = service
        self.port = port

    async def stop(self, grace: float = 1.0) -> None:
        """Take no more calls, and give those under way so many seconds."""
        await self._server.stop(grace)
        self.service.close()


async def serve(handler: Handler, listen: str, credentials: Credentials | None, *also: str) -> RPCServer:
    """Answer calls.

    Args:
        handler: who answers.
        listen: host:port, port 0 for any; or unix:path.
        credentials: the own certificate; None for the insecure mode, in which callers say themselves who they are: at
            loopback addresses only.
        also: further addresses.

    Raises:
        EngineError: the address can't be had.
    """
    service = RPCService(handler, credentials)
    server = grpc.aio.server(options=SERVER, maximum_concurrent_rpcs=MOST_STREAMS)
    rpcs = {
        "Ask": grpc.stream_stream_rpc_method_handler(service.ask),
        "Pulse": grpc.unary_unary_rpc_method_handler(service.pulse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rpcs),))
    ports = []
    for address in (listen, *also):
        if credentials is None and not local(address):
            raise EngineError(f"without certificates nobody may listen at {address}: take a loopback address")
        try:
            if credentials is None:
                ports.append(server.add_insecure_port(address))
            else:
                ports.append(server.add_secure_port(address, credentials.server()))
        except RuntimeError:
            raise EngineError(f"nobody can listen at {address}: is another process there already?") from None
    await server.start()
    return RPCServer(server, ports[0], service)


def local(address: str) -> bool:
    """Whether no other machine can reach it."""
    return address.startswith(("unix:", *(f"{host}:" for host in _LOOPBACK), "[::1]:"))
