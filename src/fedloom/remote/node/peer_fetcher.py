"""Fetches messages from peers through the coordinator, sealed end to end."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any, Final

from fedloom.core import message
from fedloom.core.errors import FedloomError, MessageError
from fedloom.core.message import Tree
from fedloom.remote import payload, rpc_errors
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import digest
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.run import NodeRun
from fedloom.remote.rpc_errors import CallRefused
from fedloom.remote.sealed import SealedChannel

_TASK: Final = {"each": object, "reply_refs": object, "fault": object, "seed": int}
_REPLY_REF: Final = [int, str, str]
_MISSING: Final = object()
PEER: Final = {"peer": str, "run": str, "session": str}
"""The head of a call between peers: the other node's name."""
MOST_BEGUN: Final = 256
"""Limit of the handshakes of peers at the same time."""
MOST_TASKS: Final = 10_000
"""Limit of the tasks of one call."""
_log = logging.getLogger("fedloom.node")


class PeerFetcher:
    """A node's exchanges with its peers, whose bytes the coordinator carries.

    Args:
        config: the node's.
        credentials: its certificate; None for the insecure mode.
        audit: records every fetched message.

    Attributes:
        reach: the answer of a peer, through a coordinator: see `fedloom.remote.node.process`; None
            if there is no way.
    """

    def __init__(
        self, config: NodeConfig, credentials: Credentials | None, audit: AuditLog
    ) -> None:
        self._config, self._credentials, self._audit = config, credentials, audit
        self.reach: Callable[[str, str, bytes, float], Awaitable[bytes]] | None = None
        self._begun: dict[str, tuple[str, SealedChannel]] = {}

    async def fetch(
        self, node_run: NodeRun, tasks: Any, end: float
    ) -> tuple[dict[tuple[int, str], Tree], list[list[Any]]]:
        """The messages that peers left for these tasks, by (party, key); and (task, argument, name)
        of missing ones.
        """
        if isinstance(tasks, list) and len(tasks) > MOST_TASKS:
            raise CallRefused(
                rpc_errors.TOO_LARGE,
                f"a call may have at most {MOST_TASKS} tasks, not {len(tasks)}",
            )
        message.check_like(tasks, [_TASK] * len(tasks) if isinstance(tasks, list) else [])
        wanted: dict[tuple[int, str], str] = {}
        for task in tasks:
            for refs in (task["reply_refs"] or {}).values():
                for ref in refs.values() if isinstance(refs, dict) else [refs]:
                    message.check_like(ref, _REPLY_REF)
                    wanted[reply_key(ref)] = ref[2]
        trees = await asyncio.gather(
            *(self._fetch(node_run, *key, what, end) for key, what in wanted.items())
        )
        fetched = {
            key: tree for key, tree in zip(wanted, trees, strict=True) if tree is not _MISSING
        }
        missing = [
            [n, name, k]
            for n, task in enumerate(tasks)
            for name, refs in (task["reply_refs"] or {}).items()
            if isinstance(refs, dict)
            for k, ref in refs.items()
            if reply_key(ref) not in fetched
        ]
        return fetched, missing

    async def _fetch(self, node_run: NodeRun, owner: int, key: str, what: str, end: float) -> Any:
        """The message that party `owner` left under a key, if it fits its description; otherwise
        `_MISSING`.
        """
        name = node_run.members.get(str(owner), "")
        if name not in self._config.peers or self.reach is None:
            _log.warning(
                "run %s: party %d, to be fetched from, is not a peer of this node",
                node_run.run[:8],
                owner,
            )
            return _MISSING
        try:
            data = await self._request(node_run, name, payload.pack({"key": key}), end)
            tree, sha256 = await asyncio.to_thread(self._decode, data, what)
        except (CallRefused, FedloomError) as error:
            _log.warning("fetching from %s failed: %s", name, error)
            return _MISSING
        self._audit.write("fetched", name, run=node_run.run, bytes=len(data), hash=sha256)
        return tree

    def _decode(self, data: bytes, what: str) -> tuple[Tree, str]:
        """A peer's message and its hash; raises MessageError if it does not fit its description."""
        tree = message.decode(data, message.Limits(max_bytes=self._config.max_message_mb << 20))
        message.check_finite(tree)
        if message.describe(tree) != what:
            raise MessageError("the message does not fit its description")
        return tree, digest(data)

    async def _request(self, node_run: NodeRun, name: str, body: bytes, end: float) -> bytes:
        """A peer's answer to a request, over a connection that is sealed from the coordinator."""
        assert self.reach is not None
        sealed = SealedChannel(self._credentials, name, server=False)
        head, part = {"peer": name, "run": node_run.run, "session": ""}, sealed.shake()
        for last in (False, True):
            sent = payload.pack({**head}, part)
            answer = await self.reach(
                node_run.caller, node_run.run, sent, max(end - monotonic(), 0.001)
            )
            told, rest = await asyncio.to_thread(payload.unpack, answer, {"session": str})
            if len(rest) != 1:
                raise MessageError("a peer's answer must have one part")
            if not last:
                head["session"] = told["session"]
                part = sealed.shake(rest[0]) + sealed.seal(body)
        return await asyncio.to_thread(sealed.open, rest[0])

    # -- the other end -----------------------------------------------------------------------------

    def greet(self, name: str, received: memoryview) -> bytes:
        """Begin a connection that a peer requests."""
        while len(self._begun) >= MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        sealed, session = SealedChannel(self._credentials, name, server=True), secrets.token_hex(16)
        answer = sealed.shake(received)
        self._begun[session] = name, sealed
        return payload.pack({"session": session}, answer)

    def finish(self, name: str, session: str, received: memoryview) -> tuple[SealedChannel, bytes]:
        """End the handshake, after which the peer's name is proved, and return its request."""
        begun, sealed = self._begun.pop(session, ("", None))
        if sealed is None or begun != name:
            raise CallRefused(
                rpc_errors.UNKNOWN, "this exchange was not begun here: begin it again"
            )
        sealed.shake(received)
        return sealed, sealed.open()


def reply_key(ref: Sequence[Any]) -> tuple[int, str]:
    """The party of a reply reference, and its key."""
    return ref[0], ref[1]
