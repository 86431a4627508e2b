"""The ServerApp's side of the wire: one thread that uses Flower's grid, and a line to each SuperNode on top of it.

Flower's own `send_and_receive` looks for replies every three seconds; this one looks more often, and sends a message
again if its SuperNode was restarted, as Flower hands it out once only. A node does its work once all the same.
"""

from __future__ import annotations

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
"""Seconds between two looks for replies."""
ROLL: Final = 2.0
"""Seconds between two looks at who is there."""
GOODBYE: Final = 5.0
"""Seconds that the post may take to end."""
_log = logging.getLogger("fedloom.flower")


@dataclass(frozen=True)
class Presence:
    """A SuperNode that is there.

    Attributes:
        node: Flower's number for it.
        since: when it came; another value after a restart.
    """

    node: int
    since: str


@dataclass(eq=False)
class _PendingCall:
    """A call on its way.

    Attributes:
        to: the node's name.
        until: when nobody waits for the answer any more.
        sent: to which SuperNode it went.
        id: of the message that carries it.
    """

    to: str
    content: Any
    until: float
    answer: Future[bytes] = field(default_factory=Future)
    sent: Presence | None = None
    id: str = ""


class GridTransport:
    """Brings calls to SuperNodes and their answers back. Close it at the end.

    Args:
        grid: Flower's. Nobody else uses it meanwhile.

    Attributes:
        twice: names that more than one SuperNode was registered with: none of them counts as there.
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
        self._thread = threading.Thread(target=self._run, name="fedloom-post", daemon=True)
        self._thread.start()

    def there(self) -> dict[str, Presence]:
        """The SuperNodes that are there, by the names that they were registered with."""
        return dict(self._there)

    def watch(self, told: Callable[[], None]) -> None:
        """Tell when somebody has come or gone, from the post's own thread."""
        self._watchers.append(told)

    def send(self, to: str, content: Any, seconds: float) -> Future[bytes]:
        """The answer to a call, to come; `CallRefused` in its place if there is none. Cancel it to give up."""
        pending = _PendingCall(to, content, monotonic() + seconds)
        with self._lock:
            self._pending.append(pending)
        self._wake.set()
        return pending.answer

    def close(self) -> None:
        """Bring nothing any more."""
        self._closed = True
        self._wake.set()
        self._thread.join(GOODBYE)  # Flower tries for ever to reach a SuperLink that is gone

    def _run(self) -> None:
        problem = ""
        while not self._closed:
            with self._lock:
                self._pending = [pending for pending in self._pending if not pending.answer.done()]
                messages = list(self._pending)
            try:
                if monotonic() - self._looked >= ROLL:
                    self._call_the_roll()
                self._push(messages)
                self._pull(messages)
                problem = ""
            except Exception as error:  # the SuperLink is not there, or will not do it
                if str(error) != problem:
                    _log.warning("the SuperLink could not be used: %s", error)
                problem = str(error)
                for pending in messages:
                    _fail(pending, CallRefused(rpc_errors.UNREACHABLE, "the SuperLink could not be used"))
            self._wake.wait(LOOK)
            self._wake.clear()

    def _call_the_roll(self) -> None:
        """Find out who is there."""
        nodes = [node for node in self._grid.get_nodes() if node.name]
        names = Counter(node.name for node in nodes)
        self.twice = {name for name, count in names.items() if count > 1}
        found = {n.name: Presence(n.node_id, n.last_activated_at) for n in nodes if n.name not in self.twice}
        changed, self._there, self._looked = found.keys() != self._there.keys(), found, monotonic()
        for told in self._watchers if changed else ():
            told()

    def _push(self, messages: list[_PendingCall]) -> None:
        """Send what is new, and again what went to a SuperNode that was restarted since."""
        going = []
        for pending in messages:
            there = self._there.get(pending.to)
            if there is None:
                _fail(pending, CallRefused(rpc_errors.UNREACHABLE, f"no SuperNode called {pending.to} is there"))
            elif pending.sent != there:
                pending.sent = there
                ttl = max(pending.until - monotonic(), 1.0)
                going.append((pending, Message(pending.content, there.node, f"query.{ACTION}", ttl=ttl)))
        if not going:
            return
        ids = list(self._grid.push_messages([message for _, message in going])) or [None] * len(going)
        for (pending, _), id in zip(going, ids, strict=True):
            pending.id = id or ""
            if not id:
                _fail(pending, CallRefused(rpc_errors.TOO_LARGE, "the SuperLink did not take the message"))

    def _pull(self, messages: list[_PendingCall]) -> None:
        """Hand over the answers that are there."""
        waiting = {pending.id: pending for pending in messages if not pending.answer.done()}
        for message in self._grid.pull_messages(list(waiting)) if waiting else ():
            pending = waiting.get(message.metadata.reply_to_message_id)
            if pending is None:
                continue
            try:
                if message.has_error():  # its words would be those of an exception
                    _log.warning("%s: Flower's error %d", pending.to, message.error.code)
                    code = _MEANING.get(message.error.code, rpc_errors.FAILED)
                    raise CallRefused(code, "the SuperNode gave no answer; its own log may say why")
                (code, words), body = unpack(message.content, "code", "words")
                if code:
                    raise CallRefused(code if code in rpc_errors.CODES else rpc_errors.FAILED, printable(words))
                with suppress(InvalidStateError):
                    pending.answer.set_result(body)
            except CallRefused as refusal:
                _fail(pending, refusal)


_MEANING: Final = {3: rpc_errors.LATE, 4: rpc_errors.UNREACHABLE, 5: rpc_errors.UNREACHABLE}
"""What Flower's codes come to: a message that ran out, a reply that was lost, a node that is gone."""


class GridClient:
    """A connection to one node, as `fedloom.remote.engine` uses it. Made and used in one asyncio loop.

    Args:
        post: brings the calls.
        name: of the node, as its SuperNode was registered.
        changed: told when it comes or goes.
    """

    where = "Flower"

    def __init__(self, post: GridTransport, name: str, changed: Callable[[bool], None] = lambda _: None) -> None:
        self.sent = self.received = 0
        self.run = ""
        self._post, self._name, self._changed = post, name, changed
        self._loop = asyncio.get_running_loop()
        self._was = self.up
        post.watch(self._look)

    @property
    def up(self) -> bool:
        """Whether its SuperNode is there, as far as the SuperLink knows."""
        return self._name in self._post.there()

    @property
    def problem(self) -> str:
        """Why it is not there."""
        if self._name in self._post.twice:
            return "several SuperNodes have this name: unregister all but one"
        others = ", ".join(sorted(self._post.there())) or "none"
        return f"no SuperNode of this name is there; there are: {others}"

    async def wait(self, seconds: float) -> bool:
        """Wait until the node is there; whether it is."""
        end = monotonic() + seconds
        while not self.up and monotonic() < end:
            await asyncio.sleep(LOOK)
        return self.up

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """Make a call; its answer. The id is not needed: what a node has done it knows by the call's number.

        Raises:
            CallRefused: with `UNREACHABLE` if the node is not there, `LATE` after the deadline, or what the node says.
        """
        if kind == "close":  # between two calls nothing of a node is in memory
            return payload.pack({})
        coming = self._post.send(self._name, pack({"kind": kind, "to": self._name}, body), deadline)
        self.sent += len(body)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(coming), deadline)
        except TimeoutError:
            raise CallRefused(rpc_errors.LATE, f"{self._name} did not answer in time") from None
        self.received += len(answer)
        return answer

    async def close(self) -> None:
        """Nothing is held but by the post."""

    def _look(self) -> None:
        if self.up != self._was:
            self._was = self.up
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed, self._was)


def _fail(pending: _PendingCall, refusal: CallRefused) -> None:
    with suppress(InvalidStateError):  # nobody waits any more
        pending.answer.set_exception(refusal)
