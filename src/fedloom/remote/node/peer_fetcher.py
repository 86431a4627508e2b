"""What a node fetches from its peers: what they left for its tasks, over connections of its own."""

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
from fedloom.remote.node.audit import AuditLog
from fedloom.remote.node.config import NodeConfig
from fedloom.remote.node.run import NodeRun
from fedloom.remote.rpc import digest
from fedloom.remote.rpc_errors import CallRefused

_TASK: Final = {"each": object, "reply_refs": object, "fault": object, "seed": int}
_PARCEL: Final = [int, str, str]
_NOTHING: Final = object()
PATIENCE: Final = 10.0
"""Seconds that a peer's connection may take to come up."""
MOST_TASKS: Final = 10_000
"""Of one call."""
_log = logging.getLogger("fedloom.node")


class PeerClient(Protocol):
    """A connection to another party: see `fedloom.remote.rpc.Link`."""

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """The answer to a call."""

    async def wait(self, seconds: float) -> bool:
        """Whether the other end is there, or comes so soon."""

    async def close(self) -> None:
        """Let go of it."""


class PeerFetcher:
    """A node's connections to its peers.

    Args:
        config: the node's.
        connect: makes them; None where there are none.
        audit: where it is written what came.
    """

    def __init__(
        self, config: NodeConfig, connect: Callable[[NodeAddress], Awaitable[PeerClient]] | None, audit: AuditLog
    ) -> None:
        self._config, self._connect, self._audit = config, connect, audit
        self._known: dict[str, tuple[NodeAddress, asyncio.Future[PeerClient]]] = {}
        self._parting: set[asyncio.Future[None]] = set()

    async def close(self) -> None:
        """Let go of all."""
        for _, coming in self._known.values():
            await _part(coming)
        await asyncio.gather(*self._parting)

    async def bring(
        self, node_run: NodeRun, tasks: Any, end: float
    ) -> tuple[dict[tuple[int, str], Tree], list[list[Any]]]:
        """What peers left for these tasks, by (party, key); and (task, argument, name) of what can't be had."""
        if isinstance(tasks, list) and len(tasks) > MOST_TASKS:
            raise CallRefused(rpc_errors.TOO_LARGE, f"a call may have up to {MOST_TASKS} tasks")
        message.check_like(tasks, [_TASK] * len(tasks) if isinstance(tasks, list) else [])
        wanted: dict[tuple[int, str], str] = {}
        for task in tasks:
            for held in (task["reply_refs"] or {}).values():
                for where in held.values() if isinstance(held, dict) else [held]:
                    message.check_like(where, _PARCEL)
                    wanted[reply_key(where)] = where[2]
        found = await asyncio.gather(*(self._get(node_run, *where, what, end) for where, what in wanted.items()))
        brought = {where: tree for where, tree in zip(wanted, found, strict=True) if tree is not _NOTHING}
        missing = [
            [n, name, k]
            for n, task in enumerate(tasks)
            for name, held in (task["reply_refs"] or {}).items()
            if isinstance(held, dict)
            for k, where in held.items()
            if reply_key(where) not in brought
        ]
        return brought, missing

    async def _get(self, node_run: NodeRun, owner: int, key: str, what: str, end: float) -> Any:
        """What party `owner` left under a key, if it is what it was said to be; `_NOTHING` if it can't be had."""
        if owner == node_run.party.context.id:
            data = node_run.left.get(key, (0, b""))[1]
            return await asyncio.to_thread(message.decode, data) if data else _NOTHING
        member = node_run.members.get(str(owner))
        if member is None or member.name not in self._config.peers or self._connect is None:
            _log.warning("run %s asks to fetch from party %d, which is no peer of this node", node_run.run[:8], owner)
            return _NOTHING
        body = payload.pack({"run": node_run.run, "key": key})
        try:
            peer = await self.peer(member)
            await peer.wait(min(PATIENCE, end - monotonic()))
            data = await peer.ask("fetch", body, id=secrets.token_hex(16), deadline=end - monotonic())
            tree, sha256 = await asyncio.to_thread(self._looked_at, data, what)
        except (CallRefused, FedloomError) as error:
            _log.warning("nothing that can be used came from %s: %s", member.name, error)
            return _NOTHING
        self._audit.write("fetched", member.name, run=node_run.run, bytes=len(data), hash=sha256)
        return tree

    def _looked_at(self, data: bytes, what: str) -> tuple[Tree, str]:
        """What a peer sent, and its hash.

        Raises:
            MessageError: it is not what it was said to be.
        """
        tree = message.decode(data, message.Limits(max_bytes=self._config.largest_mb << 20))
        message.check_finite(tree)
        if message.describe(tree) != what:
            raise MessageError("it is not what it was said to be")
        return tree, digest(data)

    async def peer(self, member: NodeAddress) -> PeerClient:
        """The connection to a peer: one for each name, made anew if the peer has moved or could not be had."""
        assert self._connect is not None
        at = self._config.peers[member.name]
        member = NodeAddress(member.name, at) if at else member
        before, coming = self._known.get(member.name, (None, None))
        if coming is None or before != member or (coming.done() and (coming.cancelled() or coming.exception())):
            if coming is not None:
                parting = asyncio.ensure_future(_part(coming))
                self._parting.add(parting)
                parting.add_done_callback(self._parting.discard)
            coming = asyncio.ensure_future(self._connect(member))
            self._known[member.name] = member, coming
        return await asyncio.shield(coming)


def reply_key(held: Sequence[Any]) -> tuple[int, str]:
    """Whose parcel it is, and its key."""
    return held[0], held[1]


async def _part(coming: asyncio.Future[PeerClient]) -> None:
    """Let go of a connection, if it is ever made."""
    with suppress(Exception):
        await (await asyncio.shield(coming)).close()
