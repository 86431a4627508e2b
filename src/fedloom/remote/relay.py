"""A relay for nodes that can't take connections: it joins a caller's stream with a node's, and passes bytes on.

A node keeps a `Listen` stream to the relay, which tells it the number of each connection that comes for it; it fetches
that one with `Accept`. A caller asks for a node with `Dial`. What passes is the TLS connection between these two, which
the relay has no key for: it learns names, times and sizes. `tunnel` has the two other ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from pydantic import Field

from fedloom.core.errors import EngineError
from fedloom.remote.config_file import FileSection, RelativePath, read_config
from fedloom.remote.credentials import Credentials, endpoint

log = logging.getLogger("fedloom.relay")

PIECE: Final = 1 << 16
"""Bytes of a connection that are passed on at once."""
PAIRING: Final = 10.0
"""Seconds that a caller waits for the node to fetch its connection."""
BEAT: Final = 2.0
"""Seconds between two empty messages on a Listen stream, by which a node knows that the relay still works."""
LISTEN: Final = "/fedloom.Relay/Listen"
ACCEPT: Final = "/fedloom.Relay/Accept"
DIAL: Final = "/fedloom.Relay/Dial"
TARGET: Final = "fedloom-target"
"""Metadata of Dial: the name of the node."""
NUMBER: Final = "fedloom-number"
"""Metadata of Accept: the number of the connection."""
AWAY: Final = "is not connected"
"""What a caller is told of a node that does not listen, after its name."""
_NO_MORE: Final = "this certificate does not count here"
WIRE: Final = (
    ("grpc.max_receive_message_length", PIECE),
    ("grpc.http2.bdp_probe", 0),  # it would let a connection whose reader is slow hold many megabytes
    ("grpc.http2.lookahead_bytes", 1 << 21),
    ("grpc.keepalive_time_ms", 10_000),  # on a slow line the answer waits behind what was sent before
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""How connections with a relay are set up, at both ends."""
_OPTIONS: Final = (
    *WIRE,
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 8),
    ("grpc.max_connection_idle_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


class RelayConfig(FileSection):
    """`relay.toml`."""

    listen: str
    """host:port to take calls at."""
    ca: RelativePath = Path("ca.pem")
    certificate: RelativePath = Path("certificate.pem")
    key: RelativePath = Path("key.pem")
    revoked: RelativePath | None = None
    nodes: tuple[str, ...]
    """Who may be reached through the relay, by the names in their certificates."""
    callers: tuple[str, ...]
    """Who may reach them: the coordinator, and nodes that fetch from each other."""
    most_open: int = Field(64, ge=1)
    """Connections of one caller, and to one node, at the same time."""

    @property
    def credentials(self) -> Credentials:
        """The relay's certificate."""
        return Credentials(self.ca, self.certificate, self.key, self.revoked)


def read(path: Path) -> RelayConfig:
    """A relay's config; paths in it are relative to its folder.

    Raises:
        ConfigError: all that is wrong with it, a line each.
    """
    config = read_config(path, RelayConfig, "fedloom certs --relay makes one")
    endpoint(config.listen)
    return config


@dataclass(eq=False)
class _Listener:
    """A node's Listen stream."""

    context: Any
    news: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    """Numbers of connections that wait, or nothing: a sign of life. None when it is over."""

    async def next(self) -> bytes | None:
        """What the node is told next."""
        try:
            async with asyncio.timeout(BEAT):
                return await self.news.get()
        except TimeoutError:
            return b""


@dataclass(eq=False)
class _Connection:
    """Of a caller to a node."""

    caller: str
    node: str
    dialled: Any
    accepted: asyncio.Future[Any]
    over: asyncio.Event = field(default_factory=asyncio.Event)
    begun: float = field(default_factory=monotonic)
    to_node: int = 0
    to_caller: int = 0


class Relay:
    """The relay's server, in the loop that `start` is awaited in.

    Attributes:
        port: where it listens, once started.
    """

    def __init__(self, config: RelayConfig) -> None:
        self.port = 0
        self._config = config
        self._credentials = config.credentials
        self._listeners: dict[str, _Listener] = {}
        self._open: dict[int, _Connection] = {}
        self._numbers = itertools.count(1)
        self._stopping = False
        self._server: Any = None

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of those that listen now."""
        return tuple(sorted(self._listeners))

    @property
    def open(self) -> int:
        """How many connections are open, or wait for their node."""
        return len(self._open)

    async def start(self) -> None:
        """Begin to take calls.

        Raises:
            EngineError: the port is taken.
        """
        self._server = grpc.aio.server(options=_OPTIONS)
        handlers = {
            "Listen": grpc.unary_stream_rpc_method_handler(self._listen),
            "Accept": grpc.stream_stream_rpc_method_handler(self._accept),
            "Dial": grpc.stream_stream_rpc_method_handler(self._dial),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fedloom.Relay", handlers),))
        try:
            self.port = self._server.add_secure_port(self._config.listen, self._credentials.server())
        except RuntimeError:
            raise EngineError(f"{self._config.listen} can't be listened at; is another process there?") from None
        await self._server.start()

    async def stop(self) -> None:
        """End every connection, and stop."""
        self._stopping = True
        for listener in self._listeners.values():
            listener.news.put_nowait(None)
        for connection in self._open.values():
            connection.over.set()
        await self._server.stop(1.0)

    async def _listen(self, _: bytes, context: Any) -> None:
        """A node waits for connections, for as long as it lives."""
        name = await self._who(context, self._config.nodes)
        mine = _Listener(context)
        mine.news.put_nowait(b"")  # tells it that callers can reach it
        if name in self._listeners:
            self._listeners[name].news.put_nowait(None)
        self._listeners[name] = mine
        log.info("%s listens", name)
        try:
            while (news := await mine.next()) is not None:
                if self._credentials.caller(context.auth_context()) != name:
                    await self._let_go(name, context)
                await context.write(news)
            if not self._stopping:
                await _refuse(context, grpc.StatusCode.ABORTED, f"another process with the name {name} listens now")
        finally:
            if self._listeners.get(name) is mine:
                del self._listeners[name]
                log.info("%s has gone", name)

    async def _let_go(self, name: str, context: Any) -> NoReturn:
        """End all connections of a node that counts no more."""
        log.warning("let go of %s: its certificate is revoked or has ended", name)
        for connection in self._open.values():
            if connection.node == name:
                connection.over.set()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, _NO_MORE)
        raise AssertionError("abort returns never")

    async def _dial(self, _: AsyncIterator[bytes], context: Any) -> None:
        """A caller's end: wait until the node has fetched the connection, then pass the caller's bytes to it."""
        caller = await self._who(context, self._config.callers)
        node = _metadata(context, TARGET)
        listener = self._listeners.get(node)
        if node not in self._config.nodes:
            await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"{node!r} is not reached through this relay")
        if listener is None or self._credentials.caller(listener.context.auth_context()) != node:
            await _refuse(context, grpc.StatusCode.UNAVAILABLE, f"{node} {AWAY}")
        count = Counter(c.caller for c in self._open.values()), Counter(c.node for c in self._open.values())
        if count[0][caller] >= self._config.most_open or count[1][node] >= self._config.most_open:
            words = f"too many connections of {caller} or to {node} are open"
            await _refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, words)
        number = next(self._numbers)
        connection = _Connection(caller, node, context, asyncio.get_running_loop().create_future())
        self._open[number] = connection
        try:
            listener.news.put_nowait(b"%d" % number)
            try:
                accepted = await asyncio.wait_for(connection.accepted, PAIRING)
            except TimeoutError:
                await _refuse(context, grpc.StatusCode.UNAVAILABLE, f"{node} did not fetch its connection")
            await self._pass(connection, context, accepted)
        finally:
            del self._open[number]
            connection.over.set()
            told = connection.to_node, connection.to_caller, monotonic() - connection.begun
            log.info("%s to %s: %d bytes there, %d back, %.1f s", caller, node, *told)

    async def _accept(self, _: AsyncIterator[bytes], context: Any) -> None:
        """A node's end of a connection: pass the node's bytes to the caller."""
        node = await self._who(context, self._config.nodes)
        number = _metadata(context, NUMBER)
        connection = self._open.get(int(number)) if number.isdecimal() else None
        if connection is None or connection.node != node or connection.accepted.done():
            await _refuse(context, grpc.StatusCode.NOT_FOUND, f"nobody waits for {node} with the number {number!r}")
        connection.accepted.set_result(context)
        await self._pass(connection, context, connection.dialled)

    async def _pass(self, connection: _Connection, source: Any, target: Any) -> None:
        """Pass on what one end sends until either end closes. A piece is read when the one before is on its way."""
        passing = asyncio.create_task(self._pieces(connection, source, target))
        over = asyncio.create_task(connection.over.wait())
        try:
            await asyncio.wait([passing, over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            connection.over.set()
            for task in (passing, over):
                task.cancel()
            await asyncio.gather(passing, over, return_exceptions=True)

    async def _pieces(self, connection: _Connection, source: Any, target: Any) -> None:
        while (piece := await source.read()) is not grpc.aio.EOF:
            self._count(connection, piece, to_node=source is connection.dialled)
            await target.write(piece)

    def _count(self, connection: _Connection, piece: bytes, *, to_node: bool) -> None:
        """All that is ever done with what passes."""
        if to_node:
            connection.to_node += len(piece)
        else:
            connection.to_caller += len(piece)

    async def _who(self, context: Any, allowed: tuple[str, ...]) -> str:
        """The caller's name, if it may ask for this."""
        name = self._credentials.caller(context.auth_context())
        if name is None:
            await _refuse(context, grpc.StatusCode.UNAUTHENTICATED, _NO_MORE)
        if name not in allowed:
            await _refuse(context, grpc.StatusCode.PERMISSION_DENIED, f"{name} may not do this here")
        return name


async def _refuse(context: Any, code: grpc.StatusCode, why: str) -> NoReturn:
    log.warning("refused: %s", why)
    await context.abort(code, why)
    raise AssertionError("abort returns never")


def _metadata(context: Any, key: str) -> str:
    """A value that came with a call; empty if there is none."""
    return next((str(value) for name, value in context.invocation_metadata() or () if name == key), "")
