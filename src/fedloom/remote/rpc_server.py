"""RPC server: answers calls and heartbeats."""

import asyncio
import contextlib
import logging
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from fedloom.core.errors import EngineError
from fedloom.remote import rpc_errors
from fedloom.remote.credentials import Credentials, local
from fedloom.remote.frames import (
    CODE,
    MOST_TAKEN,
    MOST_WORDS,
    NAME,
    SERVER,
    SERVICE,
    STATUS,
    TAKEN,
    WHOLE,
    FrameError,
    framed,
    total_of,
    unframed,
    whole,
)
from fedloom.remote.rpc_errors import CallRefused

KEPT: Final = 120.0
"""Seconds that an answer waits for a caller that lost its connection, and a partial call for its
remaining pieces.
"""
OPENING: Final = 10.0
"""Seconds for the first frame of a call, and for the caller's confirmation of an answer."""
MOST_CALLS: Final = 256
"""Limit of one caller's calls, and of its streams."""
MOST_STREAMS: Final = 4096
MOST_KEPT: Final = 1 << 31
"""Limit of the answers kept for one caller, in bytes."""
MOST_CONNECTIONS: Final = 1 << 13
"""Limit of connections, of which a node has three; each takes some 60 kB."""
OWN_FILES: Final = 256
"""Files that connections leave for the rest of the process."""
MOST_LINES: Final = 20
LINES_EVERY: Final = 60.0
"""Lines in the log about refused calls of one caller in so many seconds."""
_NAMES: Final = 300
"""Limit of a call's id and kind together, in characters."""
_log = logging.getLogger("fedloom.net")
T = TypeVar("T")


def _is_failure(record: logging.LogRecord) -> bool:
    """Whether a log record of gRPC reports more than a cancelled call.

    gRPC logs a call that is cancelled before its first step as an unhandled exception, with a
    traceback. A server that stops cancels such calls, as do callers that leave.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_failure)


class Handler(Protocol):
    """Answers calls; `caller` is the name in the caller's certificate."""

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        """The answer to a call; raises CallRefused."""

    def heard(self, caller: str, session: str) -> str:
        """Record a sign of life of a caller's process, and return the answer to a heartbeat."""

    def broke(self, caller: str, session: str) -> None:
        """Record that the last stream of a caller's process was cancelled: its connection broke, or
        it ended.
        """

    def limit(self, caller: str) -> int:
        """The limit of this caller's calls, in bytes; raises CallRefused for an unknown caller."""


@dataclass
class _Call:
    """A call in progress: its bytes, then its work, then its answer.

    Attributes:
        body: the received bytes; empty once the work has begun.
        arrived: number of received bytes.
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
        """Append the new bytes of a piece that begins at or before the end of the
        received bytes.
        """
        self.touched = monotonic()
        new = memoryview(piece)[max(self.arrived - at, 0) :]
        if new and self.work is None:
            self.body += new
            self.sum = zlib.crc32(new, self.sum)
            self.arrived += len(new)

    @property
    def unfinished(self) -> bool:
        """Whether the answer is still missing."""
        return self.work is None or not self.work.done()

    @property
    def kept(self) -> int:
        """Size of the answer, in bytes."""
        return 0 if self.work is None or self.unfinished else len(self.work.result()[0])


class RPCService:
    """Receives calls, keeps partial ones, and has the handler answer each once."""

    def __init__(self, handler: Handler, credentials: Credentials | None) -> None:
        self._handler = handler
        self._credentials = credentials
        self._calls: dict[tuple[str, str], _Call] = {}
        self._streams: Counter[str] = Counter()
        self._sessions: Counter[tuple[str, str]] = Counter()
        self._refusals: dict[str, tuple[float, int]] = {}
        self._swept = monotonic()

    async def pulse(self, session: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Answer a heartbeat."""
        caller = await self._caller(context)
        try:
            self._sweep()
            text = session[: MOST_TAKEN + 64].decode("ascii", "replace")
            heard, _, taken = text.partition(" ")
            self._confirmed(caller, taken)
            return self._handler.heard(caller, heard[:64]).encode()
        except CallRefused as refusal:
            await _refuse(context, refusal)
        except Exception:  # gRPC would send its text
            _log.exception("heartbeat of %s failed", caller)
            await _refuse(context, _failed())

    async def ask(
        self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Answer a call, or the remaining pieces of one."""
        await self._answered(context, lambda caller: self._serve(caller, frames, context))

    async def tell(self, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """The answer to a small call, or its first piece, which the caller confirms later."""
        return (
            await self._answered(context, lambda caller: self._told(caller, frame, context)) or b""
        )

    async def _answered(
        self, context: grpc.aio.ServicerContext[Any, Any], serve: Callable[[str], Awaitable[T]]
    ) -> T | None:
        """What serving a caller gives; refusals become statuses."""
        caller = await self._caller(context)
        self._streams[caller] += 1
        try:
            if self._streams[caller] > MOST_CALLS:
                raise CallRefused(rpc_errors.BUSY, "too many calls at once")
            return await serve(caller)
        except CallRefused as refusal:
            self._log_refusal(caller, refusal)
            await _refuse(context, refusal)
        except (FrameError, TimeoutError) as error:
            _log.info("a call of %s was interrupted: %s", caller, error or "timeout")
            words = "the call does not match its announced size, or paused for too long"
            await _refuse(context, CallRefused(rpc_errors.MALFORMED, words))
        except Exception:
            if context.cancelled():
                return None
            _log.exception("a call of %s failed", caller)
            await _refuse(context, _failed())
        finally:
            self._streams[caller] -= 1
            if not self._streams[caller]:
                del self._streams[caller]

    def _log_refusal(self, caller: str, refusal: CallRefused) -> None:
        """Log a refused call; of one caller `MOST_LINES` in `LINES_EVERY` seconds."""
        since, count = self._refusals.get(caller, (monotonic(), 0))
        if monotonic() - since > LINES_EVERY or len(self._refusals) > MOST_STREAMS:
            self._refusals.clear()
            since, count = monotonic(), 0
        self._refusals[caller] = since, count + 1
        if count < MOST_LINES:
            detail = f" ({refusal.detail})" if refusal.detail else ""
            _log.warning("refused a call of %s: %s%s", caller, refusal.words, detail)
        elif count == MOST_LINES:
            _log.warning("more calls of %s are refused, which are not logged for a minute", caller)

    def close(self) -> None:
        """Cancel all calls."""
        for call in self._calls.values():
            if call.work is not None:
                call.work.cancel()
        self._calls.clear()

    # -- one stream --------------------------------------------------------------------------------

    async def _serve(
        self, caller: str, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        most = self._handler.limit(caller)
        head, first = unframed(
            await _next(frames, OPENING),
            kind=str,
            id=str,
            bytes=int,
            sum=int,
            got=int,
            of=int,
            again=bool,
        )
        with self._session(caller, head["id"].partition("/")[0]):
            key = (caller, head["id"])
            call = self._find(key, head, most)
            at = 0
            if head["again"]:
                at = call.arrived
                await _write(context, framed({"have": at}))
            await self._take(call, at, first, frames)
            del first
            answer, total = await asyncio.shield(self._work(key, call))
            start = head["got"] if head["of"] == total and 0 <= head["got"] <= len(answer) else 0
            await self._caller(context)  # its certificate may have been revoked meanwhile
            await _write(
                context,
                framed({"bytes": len(answer), "sum": total, "from": start}, answer, start),
                call,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OPENING):
                    if await anext(frames, None) == TAKEN and self._calls.get(key) is call:
                        del self._calls[key]

    async def _told(
        self, caller: str, frame: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> bytes:
        most = self._handler.limit(caller)
        head, body = unframed(frame, kind=str, id=str, bytes=int, sum=int, taken=str)
        with self._session(caller, head["id"].partition("/")[0]):
            self._confirmed(caller, head["taken"])
            key = (caller, head["id"])
            call = self._find(key, head, most)
            if len(body) != call.total:
                raise FrameError("a call of one message must have the bytes that it announces")
            call.add(0, body)
            answer, total = await asyncio.shield(self._work(key, call))
            await self._caller(context)  # its certificate may have been revoked meanwhile
            call.touched = monotonic()
            return whole(
                {"bytes": len(answer), "sum": total, "from": 0}, memoryview(answer)[:WHOLE]
            )

    def _confirmed(self, caller: str, ids: str) -> None:
        """Drop answers that the caller has."""
        for id in ids.split():
            call = self._calls.get((caller, id))
            if call is not None and not call.unfinished:
                del self._calls[caller, id]

    @contextlib.contextmanager
    def _session(self, caller: str, session: str) -> Iterator[None]:
        """Tell the handler of a process's stream, and when its last one is cancelled."""
        self._handler.heard(caller, session)
        self._sessions[caller, session] += 1
        try:
            yield
        except asyncio.CancelledError:
            if self._sessions[caller, session] == 1:
                self._handler.broke(caller, session)
            raise
        finally:
            self._sessions[caller, session] -= 1
            if not self._sessions[caller, session]:
                del self._sessions[caller, session]

    async def _take(
        self, call: _Call, at: int, piece: bytes | memoryview, frames: AsyncIterator[bytes]
    ) -> None:
        """Receive the bytes of a call; any stream may bring the missing ones."""
        while True:
            if at + len(piece) > call.total:
                raise FrameError("more bytes than announced")
            call.add(at, piece)
            at += len(piece)
            if at == call.total:
                return
            piece = await _next(frames, KEPT)
            if not piece:
                raise FrameError("empty piece")

    async def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        if self._credentials is None:
            name = str(dict(context.invocation_metadata() or ()).get(NAME, ""))
        else:
            name = self._credentials.caller(context.auth_context()) or ""
        if not name:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "your certificate is not accepted")
        return name

    # -- calls -------------------------------------------------------------------------------------

    def _find(self, key: tuple[str, str], head: dict[str, Any], most: int) -> _Call:
        """The call of this id in progress, or a new one."""
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
        """Refuse a new call that would take more than its caller's share of memory."""
        if not 0 <= head["bytes"] <= most:
            raise CallRefused(
                rpc_errors.TOO_LARGE, f"the call has {head['bytes']} bytes; the limit is {most}"
            )
        if len(head["kind"]) + len(head["id"]) > _NAMES:
            raise CallRefused(
                rpc_errors.MALFORMED, f"a call's kind and id may have {_NAMES} characters"
            )
        mine = [call for (who, _), call in self._calls.items() if who == key[0]]
        coming = sum(call.total for call in mine if call.unfinished)
        if (
            len(mine) >= MOST_CALLS
            or coming + head["bytes"] > 2 * most
            or sum(c.kept for c in mine) > MOST_KEPT
        ):
            raise CallRefused(rpc_errors.BUSY, "too many calls at once")

    def _work(self, key: tuple[str, str], call: _Call) -> asyncio.Task[tuple[bytes, int]]:
        """The work of a call, which starts once."""
        if call.work is None:
            if call.sum != call.announced:
                self._calls.pop(key, None)
                call.body.clear()
                raise CallRefused(
                    rpc_errors.MALFORMED, "the call's bytes do not have the announced CRC-32"
                )
            body, call.body = bytes(call.body), bytearray()
            call.work = asyncio.ensure_future(self._answer(key[0], call.kind, body))
            call.work.add_done_callback(lambda work: self._done(key, call, work))
        return call.work

    async def _answer(self, caller: str, kind: str, body: bytes) -> tuple[bytes, int]:
        try:
            answer = await self._handler.answer(caller, kind, body)
            return answer, await total_of(answer)
        except CallRefused as refusal:
            error = refusal.bare()
        except Exception:
            _log.exception("a call of %s failed", caller)
            error = _failed()
        # the refusal has this frame, and this call the refusal: they live until somebody collects
        # cycles
        del body
        raise error

    def _done(
        self, key: tuple[str, str], call: _Call, work: asyncio.Task[tuple[bytes, int]]
    ) -> None:
        call.touched = monotonic()
        if (work.cancelled() or work.exception() is not None) and self._calls.get(key) is call:
            del self._calls[key]  # a refusal is not kept: a repeated call may succeed

    def _sweep(self) -> None:
        """Drop calls that were abandoned for `KEPT` seconds; looks at them a hundred times in so
        many seconds.
        """
        now = monotonic()
        if now - self._swept < KEPT / 100:
            return
        self._swept = now
        for key, call in list(self._calls.items()):
            if now - call.touched > KEPT and (call.work is None or call.work.done()):
                del self._calls[key]


async def _next(frames: AsyncIterator[bytes], seconds: float) -> bytes:
    async with asyncio.timeout(seconds):
        frame = await anext(frames, None)
    if frame is None:
        raise FrameError("the call ended too early")
    return frame


async def _write(
    context: grpc.aio.ServicerContext[Any, Any], frames: Iterator[bytes], call: _Call | None = None
) -> None:
    for frame in frames:
        async with asyncio.timeout(KEPT):
            await context.write(frame)
        if call is not None:
            call.touched = monotonic()


def _failed() -> CallRefused:
    return CallRefused(
        rpc_errors.FAILED, "the coordinator failed to answer; the reason is in its log"
    )


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], refusal: CallRefused) -> NoReturn:
    metadata = ((CODE, refusal.code.replace(" ", "-")),)
    await context.abort(STATUS[refusal.code], refusal.words[:MOST_WORDS], metadata)
    raise AssertionError  # abort raises


class RPCServer:
    """Answers calls at an address until it is stopped; made by `serve`.

    Attributes:
        port: the listening port; 0 for a Unix socket.
    """

    def __init__(self, server: grpc.aio.Server, port: int, service: RPCService) -> None:
        self._server = server
        self.service = service
        self.port = port

    async def stop(self, grace: float = 1.0) -> None:
        """Accept no more calls, and give those in progress `grace` seconds to finish."""
        await self._server.stop(grace)
        self.service.close()


def most_connections() -> int:
    """The limit of connections, for which the process may open as many files as its system allows:
    anybody can dial, and without a limit would take the files that a checkpoint needs.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OWN_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        MOST_CONNECTIONS
        if soft == resource.RLIM_INFINITY
        else max(64, min(MOST_CONNECTIONS, soft - OWN_FILES))
    )


async def serve(handler: Handler, listen: str, credentials: Credentials | None) -> RPCServer:
    """Start a server.

    Args:
        handler: answers the calls.
        listen: host:port, port 0 for any; or unix:path.
        credentials: the local certificate; None for the insecure mode, in which callers state their
            own names, at loopback addresses only.

    Raises:
        EngineError: the address is not available.
    """
    service = RPCService(handler, credentials)
    options = (*SERVER, ("grpc.max_allowed_incoming_connections", most_connections()))
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MOST_STREAMS)
    rpcs = {
        "Ask": grpc.stream_stream_rpc_method_handler(service.ask),
        "Tell": grpc.unary_unary_rpc_method_handler(service.tell),
        "Pulse": grpc.unary_unary_rpc_method_handler(service.pulse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rpcs),))
    if credentials is None and not local(listen):
        raise EngineError(
            f"insecure mode cannot listen at {listen}: use a loopback address such as 127.0.0.1"
        )
    try:
        if credentials is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, credentials.server())
    except RuntimeError:
        raise EngineError(
            f"cannot listen at {listen}: check the address, and stop any process on its port"
        ) from None
    await server.start()
    return RPCServer(server, port, service)
