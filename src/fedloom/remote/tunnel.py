"""The two ends of connections through a relay: `reach` where calls are made, `expose` at the node that they are for.

Each gives a local address in place of the remote one. What goes through is an ordinary gRPC connection with TLS of its
own, from end to end. Every connection has a connection to the relay to itself, so that none waits behind another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from fedloom.core.errors import EngineError
from fedloom.remote.credentials import Credentials, endpoint
from fedloom.remote.frames import printable
from fedloom.remote.relay import ACCEPT, AWAY, BEAT, DIAL, LISTEN, NUMBER, PIECE, TARGET, WIRE

log = logging.getLogger("fedloom.tunnel")

CONNECTING: Final = 4.0
"""Seconds that a connection to the relay may take."""
CLOSING: Final = 10.0
"""Seconds that the other end has to close, once this one has."""
MOST_OPEN: Final = 256
"""Connections that a node carries at once; a relay that announces more is ignored."""
SILENCE: Final = 3 * BEAT
"""Seconds without a sign of life until the relay counts as gone."""
_PAUSES: Final = 0.2, 1.0
"""Seconds between two tries to reach the relay: at first, and at most."""
_LONG_PAUSE: Final = 5.0
"""Seconds after another process of the same name has taken over, so that two do not chase each other, and after the
relay has not taken the certificate, which won't change soon."""
_OPTIONS: Final = (
    *WIRE,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)


async def reach(relay_address: str, relay_name: str, target: str, credentials: Credentials) -> Tunnel:
    """Open a local address that leads to the node `target`. It need not be there yet, nor need the relay."""
    tunnel = Tunnel(_Route(relay_address, relay_name, credentials, "federation.toml"), target)
    await tunnel._open()
    return tunnel


async def expose(relay_address: str, relay_name: str, credentials: Credentials, local_target: str) -> RelayedServer:
    """Let callers reach the server at `local_target` (`host:port` or `unix:/path`) by the name in the certificate.

    The relay need not be there yet: it is tried until it is.
    """
    return RelayedServer(_Route(relay_address, relay_name, credentials, "node.toml"), local_target)


class Tunnel:
    """A caller's end; `reach` makes it.

    Attributes:
        address: what gRPC connects to: `unix:/…`, or `127.0.0.1:port` where there are no Unix sockets. The node's name
            must be asked for by `grpc.ssl_target_name_override`, as with any address.
        trouble: why the last connection did not come to the node, in words; "" once something has come from there.
    """

    def __init__(self, route: _Route, target: str) -> None:
        self.address = self.problem = ""
        self._route, self._target = route, target
        self._folder = self._said = ""
        self._server: asyncio.Server | None = None
        self._carried: set[asyncio.Task[None]] = set()

    async def _open(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="fedloom-")  # only the owner can enter it
        path = str(Path(self._folder) / "s")
        if hasattr(asyncio, "start_unix_server") and len(path.encode()) < 100:
            self._server = await asyncio.start_unix_server(self._take, path)
            self.address = f"unix:{path}"
        else:
            self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
            self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._carry(reader, writer))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        task.add_done_callback(lambda _: writer.transport.abort())  # it may be cancelled before it has begun

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with _closing(writer), self._route.channel() as channel:
                call = channel.stream_stream(DIAL)(metadata=((TARGET, self._target),))
                await _carry(call, reader, writer, self._through)
        except (EngineError, grpc.aio.AioRpcError) as error:
            why = _why(error)
            self.problem = self._meaning(why)
            level = logging.INFO if why == self._said else logging.WARNING
            log.log(level, "no way to %s through the relay at %s: %s", self._target, self._route.address, why)
            self._said = why

    def _through(self) -> None:
        self.problem = ""

    def _meaning(self, why: str) -> str:
        """What a person is to look at."""
        if why == f"{self._target} {AWAY}":
            return "it is not connected to the relay; is fedloom node running there, and its certificate not revoked?"
        return "the relay does not answer" if "does not answer" in why else why

    async def close(self) -> None:
        """End its connections, and remove the address."""
        if self._server is not None:
            self._server.close()
        await _end(self._carried)
        shutil.rmtree(self._folder, ignore_errors=True)


class RelayedServer:
    """A node's end; `expose` makes it.

    Attributes:
        up: whether callers can reach the node now.
    """

    def __init__(self, route: _Route, local_target: str) -> None:
        self.up = False
        self._route, self._local = route, endpoint(local_target)
        self._carried: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """End its connections; callers can't reach the node any more."""
        await _end({self._task, *self._carried})
        self.up = False

    async def _keep(self) -> None:
        """Listen, again and again, until closed. What stands in the way is said once."""
        pause, said = _PAUSES[0], ""
        while True:
            try:
                async with self._route.channel() as channel:
                    async for number in _news(channel):
                        if not self.up:
                            log.info("to be reached through the relay at %s", self._route.address)
                        self.up, pause, said = True, _PAUSES[0], ""
                        if number:
                            self._fetch(number)
                why = "it has stopped"
            except TimeoutError:
                why = "it is silent"
            except Exception as error:  # whatever it is, the node must become reachable again
                why = _why(error)
                code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
                if code is grpc.StatusCode.UNAUTHENTICATED:
                    why = "it closed the connection; is this node's certificate revoked?"
                if code in (grpc.StatusCode.ABORTED, grpc.StatusCode.UNAUTHENTICATED):
                    pause = _LONG_PAUSE
            if why != said:
                more = " any more" * self.up
                log.warning("not to be reached through the relay at %s%s: %s", self._route.address, more, why)
            self.up, said = False, why
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, _PAUSES[1])

    def _fetch(self, number: str) -> None:
        if len(self._carried) < MOST_OPEN:
            task = asyncio.create_task(self._carry(number))
            self._carried.add(task)
            task.add_done_callback(self._carried.discard)

    async def _carry(self, number: str) -> None:
        """One connection, from the relay to the local server."""
        try:
            if isinstance(self._local, str):
                reader, writer = await asyncio.open_unix_connection(self._local)
            else:
                reader, writer = await asyncio.open_connection(*self._local)
        except OSError as error:
            log.warning("the node's own server does not answer: %s", error)
            return
        try:
            async with _closing(writer), self._route.channel() as channel:
                await _carry(channel.stream_stream(ACCEPT)(metadata=((NUMBER, number),)), reader, writer)
        except (EngineError, grpc.aio.AioRpcError) as error:
            log.info("a connection through the relay ended: %s", _why(error))


class _Route:
    """The way to a relay."""

    def __init__(self, address: str, name: str, credentials: Credentials, listed: str) -> None:
        endpoint(address)
        self.address, self._name, self._credentials, self._listed = address, name, credentials, listed

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        """A connection of its own, once it stands, to a relay that has the right name and is not revoked.

        Raises:
            EngineError: there is none; or, in the middle of what is done within, the relay was revoked.
        """
        only = None
        if self._credentials.revoked is not None:
            only = await self._credentials.check_server(self.address, self._name, CONNECTING, self._listed)
        named = ("grpc.ssl_target_name_override", self._name)
        secure = self._credentials.channel(only)
        async with grpc.aio.secure_channel(self.address, secure, (*_OPTIONS, named)) as channel:
            try:
                async with asyncio.timeout(CONNECTING):
                    await channel.channel_ready()
            except TimeoutError:
                raise EngineError(f"{self._name} does not answer at {self.address}, or can't be believed") from None
            try:
                async with asyncio.timeout(None) as within:
                    watch = asyncio.create_task(self._watch(only, within))
                    try:
                        yield channel
                    finally:
                        watch.cancel()
            except TimeoutError:
                if not within.expired():
                    raise
                raise EngineError(f"the certificate of {self._name} does not count any more") from None

    async def _watch(self, only: bytes | None, within: asyncio.Timeout) -> None:
        """End what is done within as soon as the relay's certificate does not count any more."""
        while only is None or self._credentials.caller({"x509_pem_cert": [only]}) is not None:
            await asyncio.sleep(BEAT)
        within.reschedule(asyncio.get_running_loop().time())


async def _news(channel: Any) -> AsyncIterator[str]:
    """Numbers of connections, or nothing: a sign of life."""
    stream = channel.unary_stream(LISTEN)(b"")
    while True:
        async with asyncio.timeout(SILENCE):
            number = await stream.read()
        if number is grpc.aio.EOF:
            return
        yield number.decode()


async def _carry(
    call: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: Callable[[], None] = lambda: None
) -> None:
    """Carry a local connection over a stream, both ways, until either end has closed; `heard` when something comes."""
    sending = asyncio.create_task(_send(call, reader))
    try:
        while (piece := await call.read()) is not grpc.aio.EOF:
            heard()
            writer.write(piece)
            await writer.drain()
    except OSError:  # the local end has gone
        pass
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INTERNAL:  # that is how it looks if the other end goes while this sends
            raise
    finally:
        call.cancel()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _send(call: Any, reader: asyncio.StreamReader) -> None:
    """Until the local end closes. Then the other one has a while to take what is under way."""
    with contextlib.suppress(OSError):
        while piece := await reader.read(PIECE):
            await call.write(piece)
    await call.done_writing()
    await asyncio.sleep(CLOSING)
    call.cancel()


def _why(error: Exception) -> str:
    """In words for the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return printable(error.details() or "") or error.code().name
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


@contextlib.asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close it at the end: after a while for what is under way, or at once if something went wrong."""
    try:
        yield
        writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(CLOSING):
                await writer.wait_closed()
    finally:
        writer.transport.abort()


async def _end(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel them, and wait until they have gone."""
    for task in tuple(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
