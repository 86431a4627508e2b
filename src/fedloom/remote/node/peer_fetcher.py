"""Fetches messages from peers, over connections of the node's own."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, Final, Protocol

from fedloom.core import message
from fedloom.core.errors import FedloomError, MessageError
from fedloom.core.message import Tree
from fedloom.remote import payload, rpc_errors
from fedloom.remote.connections import NodeAddress
from fedloom.remote.frames import digest
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.run import NodeRun
from fedloom.remote.rpc_errors import CallRefused

_TASK: Final = {"each": object, "reply_refs": object, "fault": object, "seed": int}
_REPLY_REF: Final = [int, str, str]
_MISSING: Final = object()
PATIENCE: Final = 10.0
"""Seconds for a connection to a peer to come up."""
MOST_TASKS: Final = 10_000
"""Limit of the tasks of one call."""
_log = logging.getLogger("fedloom.node")


class PeerClient(Protocol):
    """A connection to another party: see `fedloom.remote.rpc_client.RPCClient`."""

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """The answer to a call."""

    async def wait(self, seconds: float) -> bool:
        """Wait until the other end is reachable, and return whether it is."""

    async def close(self) -> None:
        """Close the connection."""


class PeerFetcher:
    """A node's connections to its peers.

    Args:
        config: the node's.
        connect: makes a connection; None if peers are not reachable.
        audit: records every fetched message.
    """

    def __init__(
        self, config: NodeConfig, connect: Callable[[NodeAddress], Awaitable[PeerClient]] | None, audit: AuditLog
    ) -> None:
        self._config, self._connect, self._audit = config, connect, audit
        self._clients: dict[str, tuple[NodeAddress, asyncio.Future[PeerClient]]] = {}
        self._closing: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        """Close all connections."""
        for _, client in self._clients.values():
            await _close(client)
        await asyncio.gather(*self._closing)

    async def fetch(
        self, node_run: NodeRun, tasks: Any, end: float
    ) -> tuple[dict[tuple[int, str], Tree], list[list[Any]]]:
        """The messages that peers left for these tasks, by (party, key); and (task, argument, name) of missing ones."""
        if isinstance(tasks, list) and len(tasks) > MOST_TASKS:
            raise CallRefused(rpc_errors.TOO_LARGE, f"a call may have at most {MOST_TASKS} tasks, not {len(tasks)}")
        message.check_like(tasks, [_TASK] * len(tasks) if isinstance(tasks, list) else [])
        wanted: dict[tuple[int, str], str] = {}
        for task in tasks:
            for refs in (task["reply_refs"] or {}).values():
                for ref in refs.values() if isinstance(refs, dict) else [refs]:
                    message.check_like(ref, _REPLY_REF)
                    wanted[reply_key(ref)] = ref[2]
        trees = await asyncio.gather(*(self._fetch(node_run, *key, what, end) for key, what in wanted.items()))
        fetched = {key: tree for key, tree in zip(wanted, trees, strict=True) if tree is not _MISSING}
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
        """The message that party `owner` left under a key, if it fits its description; otherwise `_MISSING`."""
        if owner == node_run.party.context.id:
            data = node_run.left.get(key, (0, b""))[1]
            return await asyncio.to_thread(message.decode, data) if data else _MISSING
        address = node_run.addresses.get(str(owner))
        if address is None or address.name not in self._config.peers or self._connect is None:
            _log.warning("run %s: party %d, to be fetched from, is not a peer of this node", node_run.run[:8], owner)
            return _MISSING
        body = payload.pack({"run": node_run.run, "key": key})
        try:
            peer = await self.peer(address)
            await peer.wait(min(PATIENCE, end - monotonic()))
            data = await peer.ask("fetch", body, id=secrets.token_hex(16), deadline=end - monotonic())
            tree, sha256 = await asyncio.to_thread(self._decode, data, what)
        except (CallRefused, FedloomError) as error:
            _log.warning("fetching from %s failed: %s", address.name, error)
            return _MISSING
        self._audit.write("fetched", address.name, run=node_run.run, bytes=len(data), hash=sha256)
        return tree

    def _decode(self, data: bytes, what: str) -> tuple[Tree, str]:
        """A peer's message and its hash; raises MessageError if it does not fit its description."""
        tree = message.decode(data, message.Limits(max_bytes=self._config.largest_mb << 20))
        message.check_finite(tree)
        if message.describe(tree) != what:
            raise MessageError("the message does not fit its description")
        return tree, digest(data)

    async def peer(self, address: NodeAddress) -> PeerClient:
        """The connection to a peer: one for each name, opened again if the peer has moved or connecting failed."""
        assert self._connect is not None
        at = self._config.peers[address.name]
        address = NodeAddress(address.name, at) if at else address
        before, client = self._clients.get(address.name, (None, None))
        if client is None or before != address or (client.done() and (client.cancelled() or client.exception())):
            if client is not None:
                closing = asyncio.ensure_future(_close(client))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            client = asyncio.ensure_future(self._connect(address))
            self._clients[address.name] = address, client
        return await asyncio.shield(client)


def reply_key(ref: Sequence[Any]) -> tuple[int, str]:
    """The party of a reply reference, and its key."""
    return ref[0], ref[1]


async def _close(client: asyncio.Future[PeerClient]) -> None:
    with suppress(Exception):
        await (await asyncio.shield(client)).close()
