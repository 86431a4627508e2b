"""What every engine offers, and the one place where a party's method is run."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from fedloom import message
from fedloom.errors import MessageError, MethodError
from fedloom.faults import Crash, Faults, spoil
from fedloom.message import Size, Template, Tree
from fedloom.party import Party

CallId: TypeAlias = tuple[int, int] | None
"""(round, number of the call in the round): the same in a run that resumes or repeats. None for a look from
outside the protocol, such as evaluation, which no ordered fault disturbs."""


@dataclass(frozen=True)
class Failure:
    """A call that gave no usable reply.

    Attributes:
        reason: one of a fixed set of words; all that others learn.
        trace: the party's own traceback. It stays with the engine and the run's own log.
        injected: whether the fault was ordered.
    """

    reason: str
    trace: str = ""
    injected: bool = False


@dataclass(frozen=True)
class Delivery:
    """One message between two peers, as the coordinator gets to know of it: never the payload."""

    sender: int
    receiver: int
    kind: str
    what: str
    size: Size
    failure: Failure | None = None


class Engine(Protocol):
    """Holds parties and runs their methods."""

    ids: tuple[int, ...]

    def name(self, party: int) -> str:
        """The party's name in the ledger, such as `client-3`."""
        ...

    def call(
        self, parties: Sequence[int], method: str, messages: Sequence[dict[str, Tree]], call: CallId
    ) -> list[Tree | Failure]:
        """Run `method` at each party with its message; one reply or failure each, in order."""
        ...

    def exchange(
        self,
        links: Mapping[int, Sequence[int]],
        ask: str | None,
        answer: str,
        take: str,
        shared: dict[str, Tree],
        expect: Template,
        call: CallId,
    ) -> list[Delivery]:
        """Peer i asks each j in `links[i]`, takes their answers; payloads stay between the two."""
        ...

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state."""
        ...

    def load(self, states: Mapping[int, dict[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        ...

    def notes(self) -> dict[int, dict[str, float]]:
        """What the parties noted since the last call."""
        ...


def run(party: Party[Any], method: str, message_: dict[str, Tree], fault: str | None) -> Tree | Failure:
    """Run one method of one party; its reply, or why there is none. A failing call changes nothing."""
    if fault == "dropout":
        return Failure("dropped out", injected=True)
    work = getattr(party, method, None)
    if work is None or method.startswith("_"):
        raise MethodError(f"{type(party).__name__} has no method {method!r} that a message could call")
    try:
        message.check_finite(message_)
    except MessageError as error:
        return Failure("refused what it was sent: not finite", str(error))
    try:
        with party.transaction():
            if fault == "crash":
                raise Crash(f"injected at {method}")
            reply = message.map_tensors(_own_copy, work(**message_))
    except Exception as error:  # whatever a party's code raises is that party's failure
        if isinstance(error, MessageError):
            return Failure("not a message", traceback.format_exc())
        return Failure("raised", traceback.format_exc(), injected=isinstance(error, Crash))
    if fault == "late":
        return Failure("late", injected=True)
    return reply if fault is None else spoil(reply, fault)  # type: ignore[return-value]


def fault_of(faults: Faults | None, seed: int, call: CallId, party: int) -> str | None:
    """The fault that the policy orders for this call."""
    return None if faults is None or call is None else faults.draw(seed, *call, party)


def verdict(reply: object, expect: Template) -> Failure | None:
    """Why a reply can't be used, or None. Its words name no value and no text of the party."""
    if isinstance(reply, Failure):
        return reply
    reason = "not a message"
    try:
        message.check(reply)  # type: ignore[arg-type]
        reason = "wrong shape"
        message.check_like(reply, expect)  # type: ignore[arg-type]
        reason = "not finite"
        message.check_finite(reply)  # type: ignore[arg-type]
    except MessageError as error:
        return Failure(reason, str(error))
    return None


def _own_copy(x: torch.Tensor) -> torch.Tensor:
    """A message is a value: later changes at the sender must not reach the receiver."""
    return x.detach().clone()
