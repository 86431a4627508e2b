"""What the thread for work does of a call: the party's tasks, and its state onto disk before the reply goes out."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any, Final

import torch

from fedloom.core import message
from fedloom.core.engine import Failure, ReplyRef, Task, arguments, reply_ref, run
from fedloom.core.errors import MessageError, MethodError
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note, Party
from fedloom.engines._shared_buffer import unspell
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.peer_fetcher import reply_key
from fedloom.remote.node.run import NodeRun, light
from fedloom.remote.node.store import StoredState
from fedloom.remote.rpc_errors import CallRefused

_LARGE: Final = message.Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
_log = logging.getLogger("fedloom.node")


def work(
    node_run: NodeRun,
    asked: Mapping[str, Any],
    rest: Sequence[memoryview],
    brought: Mapping[tuple[int, str], Tree],
    missing: Sequence[Sequence[Any]],
    begun: float,
    most: int,
) -> bytes:
    """All tasks of a call, one after the other; the reply, which is on disk by now.

    Args:
        sitting: whose party does them.
        asked: the call's head.
        rest: its further parts.
        brought: what peers had left for the tasks.
        missing: what of that can't be had, for the reply.
        begun: when the call came.
        most: bytes that may be left for peers.

    Raises:
        Refused: the call makes no sense, or comes too late; nothing has changed.
        OSError: the disk refuses; nothing has changed.
    """
    party, t = node_run.party, asked["round"]
    if t >= 0 and t > node_run.last.round:
        kept = [int(k) for k in asked["kept"][-2:]] if isinstance(asked["kept"], list) else []
        node_run.store.mark(t, kept)
    node_run.hold(asked["floor"], asked["call"])
    if monotonic() - begun > asked["deadline"]:
        raise CallRefused(rpc_errors.LATE, "the deadline had passed before its turn came")
    shared = payload.decoded(rest, 0)
    expect = unspell(asked["expect"])
    watch = _Watch(party)
    lines: list[Tree] = []
    replies: list[bytes] = []
    try:
        for task in asked["tasks"]:
            found = _task(node_run, task, asked, shared, rest, brought, watch)
            lines.append(line(node_run, found, asked["leave"], expect, asked["call"], replies, most))
        notes = _finite(party.take_notes())
        head: Tree = {"lines": lines, "notes": notes if node_run.notes else {}, "missing": missing}
        reply = payload.pack(head, *replies)
        entry = StoredState(node_run.start, asked["call"], max(t, node_run.last.round), reply, party.state())
        if t >= 0:
            if watch.changed():
                node_run.store.write(entry)
            node_run.last = light(entry)
    except BaseException:
        node_run.hold(asked["floor"], asked["call"])  # what is not on disk has not happened
        node_run.undo()
        raise
    return reply


def _task(
    node_run: NodeRun,
    task: Any,
    asked: Mapping[str, Any],
    shared: Any,
    rest: Sequence[memoryview],
    brought: Mapping[tuple[int, str], Tree],
    watch: _Watch,
) -> Tree | Failure:
    each = {**(payload.decoded(rest, task["each"]) or {})}
    for name, held in (task["reply_refs"] or {}).items():
        if isinstance(held, list) and reply_key(held) not in brought:
            return Failure(rpc_errors.UNREACHABLE)
        each[name] = _reply_refs(held, brought)
    order = Task(
        node_run.party.context.id,
        asked["method"],
        shared or {},
        each,
        task["fault"],
        task["seed"] % 2**63,
        asked["round"],
    )
    given = arguments(order, lambda sent: brought[sent.held])
    if order.method == "contribution" and given.get("on") != "test":  # of all arguments: a task's own go before shared
        raise CallRefused(rpc_errors.REFUSED, "a contribution is for the people that all are tested on")
    try:
        reply = run(node_run.party, order, given, watch.keep)
    except MethodError as error:
        _log.error("%s", error)
        raise CallRefused(rpc_errors.MALFORMED, "the method's page has no such call") from None
    if isinstance(reply, Failure) and reply.trace:
        _log.warning("call %d, %s: %s\n%s", asked["call"], asked["method"], reply.reason, reply.trace)
    return reply


def line(
    node_run: NodeRun,
    reply: Tree | Failure,
    leave: bool,
    expect: Template,
    call: int,
    replies: list[bytes],
    most: int,
) -> Tree:
    """What the answer says of one task; its bytes go to `replies`, or stay here for those who know the key."""
    if not isinstance(reply, Failure) and leave:
        left = reply_ref(None, reply, expect)
        if left.failure is not None:
            reply = left.failure
        elif node_run.left_bytes + left.size.wire > most:
            reply = Failure(rpc_errors.BUSY)  # until peers have taken what is there
        else:
            key = node_run.leave(call, message.encode(reply))
            return {"reply_ref": key, "what": left.what, "payload": left.size.payload, "wire": left.size.wire}
    if not isinstance(reply, Failure):
        try:
            replies.append(message.encode(reply))
            return {"reply": len(replies) - 1}
        except MessageError as error:
            reply = Failure("not a message", str(error))
    return {"failure": reply.reason, "injected": reply.injected}


class _Watch:
    """Tells whether a party's state changes from here on, without a look at its network's memory."""

    def __init__(self, party: Party[Any]) -> None:
        self._party = party
        self._before = self._own()
        self._touched = False

    def keep(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy of the network's memory, which is about to change."""
        self._touched = True
        return memory.clone()

    def changed(self) -> bool:
        """Whether it has."""
        return self._touched or self._own() != self._before

    def _own(self) -> bytes:
        return message.encode(self._party.own_state(), _LARGE)


def _reply_refs(held: Any, brought: Mapping[tuple[int, str], Tree]) -> Any:
    """Places of parcels as parcels, without those that can't be had."""
    if isinstance(held, dict):
        return {k: ReplyRef(reply_key(where)) for k, where in held.items() if reply_key(where) in brought}
    return ReplyRef(reply_key(held))


def _finite(notes: Mapping[str, Note]) -> dict[str, Note]:
    """Notes that can cross: a loss that is infinite says nothing, and must not undo the work that it is of."""
    return {
        name: note
        for name, note in notes.items()
        if all(isinstance(x, float) and math.isfinite(x) for x in (note if isinstance(note, list) else [note]))
    }
