"""Addresses of nodes, connections to them, and timeouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fedloom.core.errors import EngineError, Interrupted
from fedloom.remote.credentials import Credentials
from fedloom.remote.frames import LARGEST
from fedloom.remote.rpc_client import RPCClient, ServerAddress
from fedloom.remote.rpc_server import local
from fedloom.remote.tunnel import Tunnel, reach


@dataclass(frozen=True)
class NodeAddress:
    """The address of a node.

    Attributes:
        name: in its certificate.
        at: host:port; "" for a node behind a relay.
        relay: host:port of the relay; "" for none.
        relay_name: the name in the relay's certificate.
    """

    name: str
    at: str = ""
    relay: str = ""
    relay_name: str = "relay"

    def to_message(self) -> dict[str, str]:
        """The address as a table of a message."""
        return {"name": self.name, "at": self.at, "relay": self.relay, "relay_name": self.relay_name}


class Connection(Protocol):
    """A connection to a node, as the engine uses it: see `fedloom.remote.rpc_client.RPCClient`.

    Attributes:
        where: the other end's address, for messages.
        sent, received: bytes of calls and answers.
        run: the run that heartbeats are for.
    """

    where: str
    run: str
    sent: int
    received: int

    @property
    def problem(self) -> str:
        """Why the other end is unreachable, for the local log."""

    @property
    def up(self) -> bool:
        """Whether the other end is reachable."""

    async def wait(self, seconds: float) -> bool:
        """Wait until the other end is reachable, and return whether it is."""

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """The answer to a call; raises CallRefused."""

    async def close(self) -> None:
        """Close the connection."""


@dataclass(frozen=True)
class Transport:
    """How nodes are reached.

    Attributes:
        name: of the engine in a run's record.
        connect: makes a connection in the engine's own loop; its second argument is called with the node's name and
            whether it is reachable, whenever that changes.
        peers: whether nodes reach each other.
    """

    name: str
    connect: Callable[[NodeAddress, Callable[[str, bool], None]], Awaitable[Connection]]
    peers: bool = True


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for nodes.

    Attributes:
        start: seconds to wait for all nodes at the start, and later for as many as a round needs.
        call: deadline of one call, in seconds.
        fewest: number of nodes that a round needs.
        stop: called while waiting; True ends the wait.
    """

    start: float = 60.0
    call: float = 3600.0
    fewest: int = 1
    stop: Callable[[], bool] = lambda: False

    def check_stop(self) -> None:
        """Raise `Interrupted` if `stop` returns True."""
        if self.stop():
            raise Interrupted("stopped while waiting for nodes")


@dataclass(frozen=True)
class NodeSet:
    """The nodes of a run's federation.

    Attributes:
        addresses: in the order of the parties.
        wire: how to reach them.
        waiting: how long to wait for them.
        own: the coordinator's name at the nodes.
        secret_draw: see `fedloom.remote.federation`.
    """

    addresses: Sequence[NodeAddress]
    wire: Transport
    waiting: Timeouts
    own: str
    secret_draw: bool = True


class NodeClient(RPCClient):
    """A connection to a node, direct or through a relay; made by `connect`."""

    where: str
    tunnel: Tunnel | None = None
    _problem = ""

    @property
    def problem(self) -> str:
        """Why the other end is unreachable; a problem of the relay comes first."""
        return (self.tunnel.problem if self.tunnel is not None else "") or self._problem

    @problem.setter
    def problem(self, words: str) -> None:
        self._problem = words

    async def close(self) -> None:
        """Close all connections."""
        await super().close()
        if self.tunnel is not None:
            await self.tunnel.close()


async def connect(
    node: NodeAddress,
    changed: Callable[[str, bool], None] = lambda *_: None,
    *,
    credentials: Credentials | None,
    own: str = "",
    largest: int = LARGEST,
) -> NodeClient:
    """A connection to a node, which need not be reachable yet.

    Args:
        node: its address.
        changed: called with the node's name and whether it is reachable, whenever that changes.
        credentials: the local certificate; None for the insecure mode.
        own: the local name in the insecure mode.
        largest: limit of an answer, in bytes.

    Raises:
        EngineError: the insecure mode would leave this machine.
    """
    tunnel = None
    if credentials is None and (node.relay or not local(node.at)):
        raise EngineError(f"without certificates {node.name} must be at a loopback address, not {node.at!r}")
    if node.relay and credentials is not None:
        tunnel = await reach(node.relay, node.relay_name, node.name, credentials)
    address = ServerAddress(node.name, tunnel.address if tunnel else node.at)
    client = NodeClient(address, credentials, own=own, largest=largest, changed=lambda up: changed(node.name, up))
    client.tunnel = tunnel
    client.where = f"{node.relay} (relay)" if tunnel else node.at
    return client
