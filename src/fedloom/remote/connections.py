"""Connections with nodes, as the engine uses them, and timeouts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fedloom.core.errors import Interrupted


class Connection(Protocol):
    """A connection with a node: see `fedloom.remote.hub.NodeConnection`.

    Attributes:
        sent, received: bytes of calls and answers.
    """

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
        connect: makes the connections with nodes in the engine's own loop, from their names and the
            run's id; its last argument is called with a node's name and whether it is reachable,
            whenever that changes.
        peers: whether nodes reach each other.
    """

    name: str
    connect: Callable[
        [Sequence[str], str, Callable[[str, bool], None]], Awaitable[Sequence[Connection]]
    ]
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
        names: in the order of the parties.
        transport: how to reach them.
        timeouts: how long to wait for them.
        own: the coordinator's name at the nodes.
        secret_draw: see `fedloom.remote.federation`.
        max_rows: the largest number of rows that each node may claim, by name.
    """

    names: Sequence[str]
    transport: Transport
    timeouts: Timeouts
    own: str
    secret_draw: bool = True
    max_rows: Mapping[str, int] = field(default_factory=dict)
