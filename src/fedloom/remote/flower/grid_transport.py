"""The ServerApp's transport: one thread that uses Flower's grid, and a connection to each SuperNode
on top of it.

Flower's own `send_and_receive` polls for replies every three seconds; this transport polls more
often, and sends a message again if its SuperNode was restarted, as Flower delivers it once only. A
node still does its work once.
"""

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from flwr.app import Message

from fedloom.remote import payload, rpc_errors
from fedloom.remote.flower.records import ACTION, pack, unpack
from fedloom.remote.frames import printable
from fedloom.remote.rpc_errors import CallRefused

LOOK: Final = 0.2
"""Seconds between two polls for replies."""
ROLL: Final = 2.0
"""Seconds between two polls of the available SuperNodes."""
GOODBYE: Final = 5.0
"""Seconds for the thread to end."""
_log = logging.getLogger("fedloom.flower")


@dataclass(frozen=True)
class Presence:
    """An available SuperNode.

    Attributes:
        node: Flower's number for it.
        since: when it connected; another value after a restart.
    """

    node: int
    since: str


@dataclass(eq=False)
class _PendingCall:
    """A call without an answer yet.

    Attributes:
        to: the node's name.
        until: its deadline.
        sent: the SuperNode that it was sent to.
        id: of its message.
    """

    to: str
    content: Any
    until: float
    answer: Future[bytes] = field(default_factory=Future)
    sent: Presence | None = None
    id: str = ""


class GridTransport:
    """Sends calls to SuperNodes and receives their answers. Close it at the end.

    Args:
        grid: Flower's, for exclusive use.

    Attributes:
        twice: names with several SuperNodes, none of which is used.
    """

    def __init__(self, grid: Any) -> None:
        self.twice: set[str] = set()
        self._grid = grid
        self._there: dict[str, Presence] = {}
        self._watchers: list[Callable[[], None]] = []
        self._pending: list[_PendingCall] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False
        self._looked = -ROLL
        self._thread = threading.Thread(target=self._run, name="fedloom-transport", daemon=True)
        self._thread.start()

    def there(self) -> dict[str, Presence]:
        """The available SuperNodes, by the names that they are registered with."""
        return dict(self._there)

    def watch(self, changed: Callable[[], None]) -> None:
        """Call `changed` from the transport's thread whenever the available SuperNodes change."""
        self._watchers.append(changed)

    def send(self, to: str, content: Any, seconds: float) -> Future[bytes]:
        """The answer to a call, to come; `CallRefused` in its place if there is none. Cancel it to
        give up.
        """
        pending = _PendingCall(to, content, monotonic() + seconds)
        with self._lock:
            self._pending.append(pending)
        self._wake.set()
        return pending.answer

    def close(self) -> None:
        """Stop the thread."""
        self._closed = True
        self._wake.set()
        self._thread.join(GOODBYE)  # Flower retries without end if the SuperLink is gone

    def _run(self) -> None:
        problem = ""
        while not self._closed:
            with self._lock:
                self._pending = [pending for pending in self._pending if not pending.answer.done()]
                messages = list(self._pending)
            try:
                if monotonic() - self._looked >= ROLL:
                    self._find_nodes()
                self._push(messages)
                self._pull(messages)
                problem = ""
            except Exception as error:  # the SuperLink is unreachable or refuses
                if str(error) != problem:
                    _log.warning("the SuperLink failed: %s", error)
                problem = str(error)
                for pending in messages:
                    _fail(pending, CallRefused(rpc_errors.UNREACHABLE, "the SuperLink failed"))
            self._wake.wait(LOOK)
            self._wake.clear()

    def _find_nodes(self) -> None:
        """Update the available SuperNodes."""
        nodes = [node for node in self._grid.get_nodes() if node.name]
        names = Counter(node.name for node in nodes)
        self.twice = {name for name, count in names.items() if count > 1}
        found = {
            n.name: Presence(n.node_id, n.last_activated_at)
            for n in nodes
            if n.name not in self.twice
        }
        changed, self._there, self._looked = found.keys() != self._there.keys(), found, monotonic()
        for watcher in self._watchers if changed else ():
            watcher()

    def _push(self, messages: list[_PendingCall]) -> None:
        """Send new calls, and again the calls of SuperNodes that restarted since."""
        going = []
        for pending in messages:
            there = self._there.get(pending.to)
            if there is None:
                _fail(
                    pending,
                    CallRefused(
                        rpc_errors.UNREACHABLE, f"no SuperNode named {pending.to} is available"
                    ),
                )
            elif pending.sent != there:
                pending.sent = there
                ttl = max(pending.until - monotonic(), 1.0)
                going.append(
                    (pending, Message(pending.content, there.node, f"query.{ACTION}", ttl=ttl))
                )
        if not going:
            return
        ids = list(self._grid.push_messages([message for _, message in going])) or [None] * len(
            going
        )
        for (pending, _), id in zip(going, ids, strict=True):
            pending.id = id or ""
            if not id:
                _fail(
                    pending, CallRefused(rpc_errors.TOO_LARGE, "the SuperLink rejected the message")
                )

    def _pull(self, messages: list[_PendingCall]) -> None:
        """Receive the available answers."""
        pending_by_id = {pending.id: pending for pending in messages if not pending.answer.done()}
        for message in self._grid.pull_messages(list(pending_by_id)) if pending_by_id else ():
            pending = pending_by_id.get(message.metadata.reply_to_message_id)
            if pending is None:
                continue
            try:
                if message.has_error():  # its words would be an exception's
                    _log.warning("%s: Flower's error %d", pending.to, message.error.code)
                    code = _MEANING.get(message.error.code, rpc_errors.FAILED)
                    raise CallRefused(code, "the SuperNode did not answer; see its log")
                (code, words), body = unpack(message.content, "code", "words")
                if code:
                    raise CallRefused(
                        code if code in rpc_errors.CODES else rpc_errors.FAILED, printable(words)
                    )
                with suppress(InvalidStateError):
                    pending.answer.set_result(body)
            except CallRefused as refusal:
                _fail(pending, refusal)


_MEANING: Final = {3: rpc_errors.LATE, 4: rpc_errors.UNREACHABLE, 5: rpc_errors.UNREACHABLE}
"""Flower's error codes: message expired, reply lost, node gone."""


class GridClient:
    """A connection to one node, as `fedloom.remote.engine` uses it. Made and used in one asyncio
    loop.

    Args:
        transport: it sends the calls.
        name: of the node, as its SuperNode is registered.
        changed: called with whether it is available, whenever that changes.
    """

    def __init__(
        self, transport: GridTransport, name: str, changed: Callable[[bool], None] = lambda _: None
    ) -> None:
        self.sent = self.received = 0
        self._transport, self._name, self._changed = transport, name, changed
        self._loop = asyncio.get_running_loop()
        self._was = self.up
        transport.watch(self._look)

    @property
    def up(self) -> bool:
        """Whether its SuperNode is available, as far as the SuperLink knows."""
        return self._name in self._transport.there()

    @property
    def problem(self) -> str:
        """Why it is not available."""
        if self._name in self._transport.twice:
            return "several SuperNodes have this name: unregister all but one"
        others = ", ".join(sorted(self._transport.there())) or "none"
        return f"no SuperNode of this name; available: {others}"

    async def wait(self, seconds: float) -> bool:
        """Wait until the node is available, and return whether it is."""
        end = monotonic() + seconds
        while not self.up and monotonic() < end:
            await asyncio.sleep(LOOK)
        return self.up

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """Make a call and return its answer. The id is not used, as nodes know a repeated call by
        its number.

        Raises:
            CallRefused: with `UNREACHABLE` for an unavailable node, `LATE` after the deadline, or
                the node's error.
        """
        if kind == "close":  # a node holds nothing in memory between two calls
            return payload.pack({})
        coming = self._transport.send(
            self._name, pack({"kind": kind, "to": self._name}, body), deadline
        )
        self.sent += len(body)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(coming), deadline)
        except TimeoutError:
            raise CallRefused(rpc_errors.LATE, f"{self._name} did not answer in time") from None
        self.received += len(answer)
        return answer

    async def close(self) -> None:
        """Nothing to close: the transport holds all connections."""

    def _look(self) -> None:
        if self.up != self._was:
            self._was = self.up
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed, self._was)


def _fail(pending: _PendingCall, refusal: CallRefused) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        pending.answer.set_exception(refusal)
