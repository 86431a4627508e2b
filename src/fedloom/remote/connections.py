"""The nodes of a federation: who they are, how they are reached, how long they are waited for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from fedloom.core.errors import EngineError, Interrupted
from fedloom.remote.credentials import Credentials
from fedloom.remote.rpc import LARGEST, RPCClient, ServerAddress, local
from fedloom.remote.tunnel import Tunnel, reach


@dataclass(frozen=True)
class NodeAddress:
    """A node, and how to reach it.

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
        """As a message has it."""
        return {"name": self.name, "at": self.at, "relay": self.relay, "relay_name": self.relay_name}


class Connection(Protocol):
    """A connection to a node, as the engine uses it: see `fedloom.remote.rpc.Link`.

    Attributes:
        where: the other end is, in words.
        trouble: why it is not there, for the own log.
        sent, received: bytes that crossed.
        run: what signs of life are of.
    """

    where: str
    run: str
    sent: int
    received: int

    @property
    def problem(self) -> str:
        """Why the other end is not there."""

    @property
    def up(self) -> bool:
        """Whether the other end is there."""

    async def wait(self, seconds: float) -> bool:
        """Wait until it is; whether it is."""

    async def ask(self, kind: str, body: bytes, *, id: str, deadline: float) -> bytes:
        """The answer to a call; raises Refused."""

    async def close(self) -> None:
        """Let go of it."""


@dataclass(frozen=True)
class Transport:
    """How nodes are reached.

    Attributes:
        name: of the engine in a run's record.
        connect: makes a connection, in the engine's own loop, which then tells when the member comes or goes.
        peers: whether nodes reach each other.
    """

    name: str
    connect: Callable[[NodeAddress, Callable[[str, bool], None]], Awaitable[Connection]]
    peers: bool = True


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for nodes.

    Attributes:
        start: seconds until all nodes must be there at the beginning, and as many as a round needs later.
        call: seconds that the work of one call may take.
        fewest: nodes that a round needs.
        stop: asked meanwhile; when it says so, the wait is over.
    """

    start: float = 60.0
    call: float = 3600.0
    fewest: int = 1
    stop: Callable[[], bool] = lambda: False

    def check_stop(self) -> None:
        """Give up waiting if we are told to stop.

        Raises:
            Interrupted: we are.
        """
        if self.stop():
            raise Interrupted("stopped while nodes were waited for")


class NodeClient(RPCClient):
    """A link to a member, straight or through a relay; made by `connect`."""

    where: str
    tunnel: Tunnel | None = None
    _problem = ""

    @property
    def problem(self) -> str:
        """Why the other end is not there: what the way through the relay met says more than a silent local address."""
        return (self.tunnel.problem if self.tunnel is not None else "") or self._problem

    @problem.setter
    def problem(self, words: str) -> None:
        self._problem = words

    async def close(self) -> None:
        """Let go of all connections."""
        await super().close()
        if self.tunnel is not None:
            await self.tunnel.close()


async def connect(
    member: NodeAddress,
    changed: Callable[[str, bool], None] = lambda *_: None,
    *,
    credentials: Credentials | None,
    own: str = "",
    largest: int = LARGEST,
) -> NodeClient:
    """A link to a member. It comes up when the other end is there.

    Args:
        member: the other end.
        changed: told when it comes or goes.
        credentials: the own certificate; None for the insecure mode.
        own: the own name in the insecure mode.
        largest: bytes of an answer that are taken.

    Raises:
        EngineError: the insecure mode would leave this machine.
    """
    tunnel = None
    if credentials is None and (member.relay or not local(member.at)):
        raise EngineError(f"without certificates {member.name} must be at a loopback address, not {member.at!r}")
    if member.relay and credentials is not None:
        tunnel = await reach(member.relay, member.relay_name, member.name, credentials)
    address = ServerAddress(member.name, tunnel.address if tunnel else member.at)
    line = NodeClient(address, credentials, own=own, largest=largest, changed=lambda up: changed(member.name, up))
    line.tunnel = tunnel
    line.where = f"{member.relay} (relay)" if tunnel else member.at
    return line
