"""The coordinator's end of its connections with nodes. Nodes dial the coordinator, and need no open
port.

A node keeps a call `next` waiting, whose answer is the coordinator's next call to the node; it
sends the reply by a call `reply`. Calls are numbered, and `next` names the last one that the node's
process has received, so a call whose connection broke is delivered again, also to a node that was
started again meanwhile. By a call `peer` a node reaches another node of the run; the bytes of both
are sealed end to end (`sealed`).
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from fedloom.core.errors import EngineError, MessageError
from fedloom.core.message import Limits, Tree
from fedloom.remote import payload, rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import LARGE, LARGEST, LARGEST_PIECE, RECONNECT, SILENCE, printable
from fedloom.remote.loop import aside, clock
from fedloom.remote.rpc_errors import CallRefused, refused
from fedloom.remote.rpc_server import RPCServer, serve

_NEXT: Final = {"hub": str, "last": int, "session": str, "limit": int}
_BODY: Final = {"hub": str, "number": int}
_REPLY: Final = {"hub": str, "number": int, "code": str, "words": str}
_PEER: Final = {"peer": str, "run": str, "session": str}
_CALLS: Final[dict[str, dict[str, Any]]] = {
    "next": _NEXT,
    LARGE: _BODY,
    "reply": _REPLY,
    "peer": _PEER,
}
"""The heads of calls, by kind."""
TICK: Final = 0.25
"""Seconds between two checks of which nodes are still there."""
_HEAD: Final = Limits(max_bytes=1 << 13, max_depth=1, max_leaves=8)
"""Of the heads of a node's calls to the hub, which hold a few numbers and a sentence."""
_NOBODY: Final = "nobody"
_PAUSES: Final = 0.02, 0.5
"""Seconds until a call is made again that a busy node refused: the first pause and the longest."""
_log = logging.getLogger("fedloom.net")


@dataclass(eq=False)
class _Delivery:
    """A call to a node, until its reply or its deadline."""

    number: int
    kind: str
    body: bytes
    reply: asyncio.Future[bytes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class NodeConnection:
    """The connection of one node, as the engine uses it: see
    `fedloom.remote.connections.Connection`.

    Attributes:
        parsing: held while a call of this node is parsed: it has at most one thread, whatever it
            sends.
    """

    def __init__(self, hub: "Hub", name: str) -> None:
        self.name = name
        self.sent = self.received = 0
        self.session = _NOBODY
        self.life = 0.0
        self.broken: float | None = None
        self._hub = hub
        self._up = asyncio.Event()
        self._calls: dict[int, _Delivery] = {}
        self._last = -1
        self._more = asyncio.Event()
        self._poll = 0
        self.parsing = asyncio.Lock()

    @property
    def up(self) -> bool:
        """Whether the node is connected."""
        return self._up.is_set()

    @property
    def problem(self) -> str:
        """Why it is not."""
        return "" if self.up else f"it has not connected to {self._hub.listen}"

    async def wait(self, seconds: float) -> bool:
        """Wait until the node is connected, and return whether it is."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._up.wait(), seconds)
        return self.up

    async def ask(self, kind: str, body: bytes, *, id: str = "", deadline: float) -> bytes:
        """The reply to a call. The id is not used, as calls are numbered.

        Raises:
            CallRefused: with `UNREACHABLE` where the node is not connected any more, `LATE` after
                the deadline, or the node's error.
        """
        pause = _PAUSES[0]
        late = CallRefused(rpc_errors.LATE, f"{self.name} did not answer in time")
        try:
            async with asyncio.timeout(deadline):
                while True:
                    try:
                        return await self._ask(kind, body)
                    except CallRefused as refusal:
                        if refusal.code != rpc_errors.BUSY:
                            raise
                        late = refusal
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _PAUSES[1])
        except TimeoutError:
            raise late from None

    async def _ask(self, kind: str, body: bytes) -> bytes:
        if not self.up:
            raise CallRefused(rpc_errors.UNREACHABLE, f"{self.name} is unreachable")
        self._last += 1
        call = self._calls[self._last] = _Delivery(self._last, kind, body)
        self._more.set()
        try:
            return await call.reply
        finally:
            del self._calls[call.number]

    async def close(self) -> None:
        """Close the connection; the last one that closes ends the hub."""
        await self._hub.leave(self)

    # -- what the node asks ------------------------------------------------------------------------

    def heard(self, session: str) -> None:
        """Record a sign of life of the node's process that is connected; others are not counted."""
        if session != self.session:
            return
        self.life, self.broken = self._hub.clock(), None
        if not self.up:
            self._up.set()
            self._hub.changed(self.name, True)

    def lost(self) -> None:
        """Fail all calls, as the node is not connected any more."""
        self._up.clear()
        if self.broken is not None:  # otherwise its poll still waits, and a sign of life suffices
            self.session = _NOBODY
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(
                    CallRefused(rpc_errors.UNREACHABLE, f"{self.name} is unreachable")
                )
        self._hub.changed(self.name, False)

    async def next(self, request: dict[str, Any]) -> bytes:
        """The next call, once there is one; an empty answer to a poll that a later one replaces."""
        alive = self.broken is None and self._hub.clock() - self.life < self._hub.silence
        if self.up and alive and request["session"] != self.session:
            raise CallRefused(
                rpc_errors.TAKEN, f"another process is connected as {self.name}: stop one of them"
            )
        self.session = request["session"]
        self.heard(self.session)
        self._poll += 1
        self._more.set()  # an earlier poll ends
        mine, last = self._poll, request["last"] if request["hub"] == self._hub.token else -1
        while mine == self._poll:
            self._more.clear()
            for number, call in self._calls.items():
                if number <= last or call.reply.done():
                    continue
                if len(call.body) <= request["limit"]:
                    self.sent += len(call.body)
                    large = len(call.body) > LARGEST_PIECE
                    return self._told(number, call.kind, *([] if large else [call.body]))
                words = f"the call has {len(call.body)} bytes; the limit is {request['limit']}"
                call.reply.set_exception(CallRefused(rpc_errors.TOO_LARGE, words))
            await self._more.wait()
        return self._told(last, "")

    def _told(self, number: int, kind: str, *body: bytes) -> bytes:
        return payload.pack(
            {"hub": self._hub.token, "run": self._hub.run, "number": number, "kind": kind}, *body
        )

    def body(self, request: dict[str, Any]) -> bytes:
        """The body of a large call, which the node fetches apart so that small ones pass it; empty
        if it is over.
        """
        call = self._calls.get(request["number"]) if request["hub"] == self._hub.token else None
        return b"" if call is None else call.body

    def reply(self, request: dict[str, Any], rest: Sequence[bytes]) -> bytes:
        """Take the reply to a call; one that nobody waits for any more is dropped."""
        call = self._calls.get(request["number"]) if request["hub"] == self._hub.token else None
        if call is not None and not call.reply.done():
            if request["code"]:
                code = request["code"] if request["code"] in rpc_errors.CODES else rpc_errors.FAILED
                call.reply.set_exception(CallRefused(code, printable(request["words"])))
            else:
                call.reply.set_result(rest[0] if rest else b"")
            self.received += sum(map(len, rest))
        return payload.pack({})


class Hub:
    """Takes the connections of a run's nodes, until all of them are closed; made by `open_hub`.

    Args:
        names: of the nodes, as in their certificates.
        run: its id, for which nodes keep a slot while they hear it.
        listen: the address.
        changed: called with a node's name and whether it is connected, whenever that changes.
        silence: seconds without a sign of life until a node counts as unreachable.
        reconnect: seconds that a node whose connection broke may take to connect again.

    Attributes:
        token: identifies this process's hub to nodes.
        clock: the clock of silence: see `fedloom.remote.loop`.
        connections: by name.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: str,
        listen: str,
        changed: Callable[[str, bool], None],
        silence: float = SILENCE,
        reconnect: float = RECONNECT,
    ) -> None:
        self.token, self.run, self.listen, self.changed = secrets.token_hex(8), run, listen, changed
        self.connections = {name: NodeConnection(self, name) for name in names}
        self.server: RPCServer | None = None
        self.silence, self._reconnect = silence, reconnect
        self._open = set(names)
        self.clock = clock()
        self._watch = asyncio.ensure_future(self._watch_silence())

    def limit(self, caller: str) -> int:
        """The limit of a node's calls, in bytes; raises CallRefused for any other caller."""
        self._connection(caller)
        return LARGEST

    def heard(self, caller: str, session: str) -> str:
        """Record a heartbeat, and return the run's id."""
        self._connection(caller).heard(session)
        return self.run

    def broke(self, caller: str, session: str) -> None:
        """Record that a node's connection broke: it reconnects soon, or is gone."""
        connection = self.connections[caller]
        if session == connection.session:
            connection.broken = self.clock()

    async def answer(self, caller: str, kind: str, body: bytes) -> bytes:
        """Answer `next`, `reply` or `peer`; raises CallRefused."""
        try:
            return await self._answer(self._connection(caller), kind, body)
        except MessageError as error:
            raise CallRefused(rpc_errors.MALFORMED, "invalid message", str(error)) from None

    async def _answer(self, connection: NodeConnection, kind: str, body: bytes) -> bytes:
        if kind not in _CALLS:
            raise CallRefused(rpc_errors.MALFORMED, "unknown kind of call")
        async with connection.parsing:
            request, rest = await aside(len(body), lambda: _unpacked(body, _CALLS[kind]))
        if kind == "next":
            return await connection.next(request)
        if kind == LARGE:
            return connection.body(request)
        if kind == "reply":
            return connection.reply(request, rest)
        there = self.connections.get(request["peer"])
        if there is None or len(rest) != 1:
            raise refused(f"{printable(request['peer'])} is no node of this run")
        head: Tree = {**request, "peer": connection.name}
        return await there.ask("peer", payload.pack(head, rest[0]), deadline=600.0)

    async def leave(self, connection: NodeConnection) -> None:
        """Close a connection, and the server with the last one."""
        if connection.name in self._open:
            self._open.remove(connection.name)
            if not self._open:
                self._watch.cancel()
                if self.server is not None:
                    await self.server.stop(0)
                await asyncio.gather(self._watch, return_exceptions=True)

    def _connection(self, caller: str) -> NodeConnection:
        if caller not in self.connections:
            raise refused("you are not among this federation's nodes")
        return self.connections[caller]

    async def _watch_silence(self) -> None:
        """Find nodes that are gone. Time in which this process was too busy to listen hardly
        counts.
        """
        while True:
            await asyncio.sleep(TICK)
            now = self.clock()
            for connection in self.connections.values():
                broken = connection.broken is not None and now - connection.broken > self._reconnect
                if connection.up and (
                    broken or now - connection.life > max(self.silence, self._reconnect)
                ):
                    connection.lost()


def _unpacked(body: bytes, like: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """The head of a call, and copies of its further messages."""
    head, rest = payload.unpack(body, like, _HEAD)
    return head, [bytes(part) for part in rest]


async def open_hub(
    names: Sequence[str],
    run: str,
    changed: Callable[[str, bool], None],
    *,
    listen: str,
    credentials: Credentials | None,
    wait: float = 0.0,
    silence: float = SILENCE,
    reconnect: float = RECONNECT,
) -> list[NodeConnection]:
    """The connections of nodes, which need not be there yet; arguments as of `Hub`.

    Args:
        names, run, changed, listen, silence, reconnect: see `Hub`.
        credentials: the coordinator's certificate; None for the insecure mode.
        wait: seconds to wait for the address, such as for another run of this coordinator.

    Raises:
        EngineError: the address is not available.
    """
    hub = Hub(names, run, listen, changed, silence, reconnect)
    loop, logged = asyncio.get_running_loop(), False
    end = loop.time() + wait
    while True:
        try:
            hub.server = await serve(hub, listen, credentials)
            return [*hub.connections.values()]
        except EngineError as error:
            if loop.time() >= end:
                hub._watch.cancel()
                raise
            if not logged:
                _log.warning("%s; trying again for %g s", error, wait)
            logged = True
        await asyncio.sleep(0.5)
