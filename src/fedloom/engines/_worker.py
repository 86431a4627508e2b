"""The main loop of a worker process: it reads a task, runs it at the party, and sends the reply.

A worker is forked with every party in it. Networks are in shared memory, so it can run any party at
any time. The rest of a party's state arrives with a task if another worker ran the party last, and
returns with every reply.
"""

import json
import socket
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.core import message
from fedloom.core.engine import Failure, ReplyRef, Task, arguments, reply_ref, run_task
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.party import Party
from fedloom.core.templates import unspell
from fedloom.engines._shared_buffer import LIMITS, SharedBuffer, receive, send


@dataclass(frozen=True)
class Shared:
    """Objects that parent and workers share, created before the first fork. The buffers are the
    parent's for all workers, then one written by each worker, then the parent's for each worker.
    """

    parties: Mapping[int, Party[object]]
    buffers: Sequence[SharedBuffer]
    workers: int


def serve(shared: Shared, number: int, parent: socket.socket) -> None:
    """Run tasks until the parent closes the socket."""
    torch.set_num_threads(1)
    try:  # torch refuses in a fork of a process that trained beside a GPU
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        send(parent, {"refused": str(error)})
        return
    worker = _Worker(shared, number)
    while (frame := receive(parent)) is not None:
        order, _ = frame
        try:
            facts, parts = worker.do(order)
        except BaseException:  # not an error of the party: report it, and let a new process try
            send(parent, {"last words": traceback.format_exc()})
            raise
        send(parent, facts, *parts)


class _Worker:
    """A worker's parties and buffers, and the shared arguments of the current batch."""

    def __init__(self, shared: Shared, number: int) -> None:
        self._parties, self._buffers = shared.parties, shared.buffers
        self._outbox = shared.buffers[number + 1]
        self._era = -1
        self._head: tuple[Any, dict[str, Any]] = (None, {})

    def do(self, order: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[bytes, ...]]:
        """Run one task; the facts and the bytes of the reply: the answer, then the party's own
        state.
        """
        party = self._parties[order["party"]]
        if order["moved"]:  # another worker ran the party last
            if party._network is not None:
                party._network.forget()
            vars(party).update(self._read(*order["own"]) or {})
        facts: dict[str, Any] = {}
        answer = self._answer(party, order, facts)
        own = message.encode(party.own_state(), LIMITS) if party.own_state() else b""
        facts["notes"] = party.take_notes()
        facts["answer"] = len(answer)
        return facts, (answer, own)

    def _answer(
        self, party: Party[object], order: Mapping[str, Any], facts: dict[str, Any]
    ) -> bytes:
        """The encoded reply; empty after a failure, or if the reply stays in the outbox."""
        head = self._common(order)
        each = self._read(*order["each"]) or {}
        if order["refs"][-1]:
            refs = json.loads(self._bytes(*order["refs"]))
            each |= {name: _refs(held) for name, held in refs.items()}
        task = Task(
            party.context.id,
            head["method"],
            head["shared"],
            each,
            order["fault"],
            order["seed"],
            order["round"],
        )
        try:
            reply = run_task(party, task, arguments(task, lambda ref: self._read(*ref.held)))
        except MethodError as error:
            facts["wrong"] = str(error)
            return b""
        if order["leave"]:
            left = reply_ref(None, reply, head["expect"])
            if left.failure is None:
                data = message.encode(reply, LIMITS)  # type: ignore[arg-type]
                facts["ref"] = [left.what, *left.size, *self._outbox.write(data)]
                return b""
            reply = left.failure
        if not isinstance(reply, Failure):
            try:
                return message.encode(reply, LIMITS)
            except MessageError:
                reply = Failure("not a message")
        facts["failure"] = [reply.reason, reply.trace, reply.injected]
        return b""

    def _common(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """The shared arguments of a batch, decoded once."""
        key = (order["era"], *order["head"])
        if order["era"] != self._era:
            self._era, self._outbox.end = order["era"], 0
        if self._head[0] != key:
            head = self._read(0, *order["head"])
            self._head = (key, head | {"expect": unspell(head["expect"])})
        return self._head[1]

    def _read(self, buffer: int, start: int, length: int) -> Any:
        return message.decode(self._bytes(buffer, start, length), LIMITS) if length else None

    def _bytes(self, buffer: int, start: int, length: int) -> bytes:
        return self._buffers[buffer].read(start, length)


def _refs(held: Any) -> Any:
    """Positions in shared buffers, one or by name, as references."""
    return (
        {name: ReplyRef(place) for name, place in held.items()}
        if isinstance(held, dict)
        else ReplyRef(held)
    )
