"""A run that a node takes part in: its party, what it keeps of it, and what peers may fetch."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from fedloom.core.errors import CheckpointError
from fedloom.core.party import Party
from fedloom.experiment.node_party import NodeParty
from fedloom.remote import rpc_errors
from fedloom.remote.connections import NodeAddress
from fedloom.remote.node.store import Store, StoredState
from fedloom.remote.rpc_errors import CallRefused

_KEY: Final = 256
"""Bytes that a parcel counts for beyond its own, however small it is."""


@dataclass
class NodeRun:
    """A run that this node takes part in.

    Attributes:
        members: the other parties by number.
        last: the newest call and the reply to it.
        left: what peers may fetch, by a key that only those know who were told.
        left_bytes: of all of it.
        heard: when the coordinator gave its last sign of life.
        over: whether it was given up, as for a newer start: what was asked for before is not begun any more.
    """

    run: str
    caller: str
    start: int
    members: Mapping[str, NodeAddress]
    place: NodeParty
    store: Store
    last: StoredState
    notes: bool
    left: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    left_bytes: int = 0
    heard: float = field(default_factory=monotonic)
    over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def party(self) -> Party[Any]:
        """The node's own."""
        return self.place.party

    def leave(self, call: int, data: bytes) -> str:
        """Keep for peers what a call made; the key to it."""
        key = secrets.token_hex(16)
        self.left[key] = (call, data)
        self.left_bytes += len(data) + _KEY
        return key

    def hold(self, first: int, end: int) -> None:
        """Keep of what was left for peers only that of calls from the first to before the end."""
        self.left = {key: left for key, left in self.left.items() if first <= left[0] < end}
        self.left_bytes = sum(len(data) + _KEY for _, data in self.left.values())

    def undo(self) -> None:
        """Go back to what is on disk; if that fails, the sitting is over, and the next call tries it anew."""
        try:
            before = self.store.read()
            if before is None:
                raise CheckpointError(f"{self.store.folder} has no state any more")
            self.party.load(before.state)  # type: ignore[arg-type]
        except BaseException:
            self.over = True
            raise

    def gone(self) -> CallRefused:
        """Why it is over, for those who still ask it: a newer start, or else the run is only to be opened again."""
        facts = self.store.facts()
        if facts is not None and facts["start"] > self.start:
            return CallRefused(rpc_errors.STALE, "a newer start of this run has taken over")
        return CallRefused(rpc_errors.UNKNOWN, "this run was set aside here: open it first")


def light(entry: StoredState) -> StoredState:
    """The same without the state, which the party has."""
    return StoredState(entry.start, entry.call, entry.round, entry.reply)
