"""The work of a call: run the party's tasks, and write its state to disk before the
reply is sent.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from fedloom.core import message
from fedloom.core.engine import (
    NOT_FINITE,
    NOT_READY,
    RAISED,
    Failure,
    ReplyRef,
    Task,
    arguments,
    reply_ref,
    run_task,
)
from fedloom.core.errors import MessageError, MethodError, PrivacyBudgetSpent
from fedloom.core.evaluation import worst_score
from fedloom.core.message import Template, Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Note, Party, answers_nothing
from fedloom.core.templates import unspell
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.looks import OWN, blurred, look, split_of
from fedloom.remote.node.peer_fetcher import reply_key
from fedloom.remote.node.run import NodeRun, light
from fedloom.remote.node.store import StoredState
from fedloom.remote.node.time_limit import TimeExpired, TimeLimit
from fedloom.remote.rpc_errors import CallRefused, refused

_LARGE: Final = message.Limits(max_bytes=1 << 44, max_leaves=10_000_000, max_depth=32)
LARGEST: Final = 1e4
"""Largest number in the arguments of a party whose messages have a guarantee: a larger one could
overflow, or not, as a row has it.
"""
_log = logging.getLogger("fedloom.node")


def work(
    node_run: NodeRun,
    request: Mapping[str, Any],
    rest: Sequence[memoryview],
    fetched: Mapping[tuple[int, str], Tree],
    missing: Sequence[Sequence[Any]],
    limit: TimeLimit,
    most: int,
) -> bytes:
    """Run the tasks of a call in order, write state and reply to disk, and return the reply.

    Args:
        node_run: the run whose party runs them.
        request: the call's head.
        rest: its further parts.
        fetched: messages that peers left for the tasks.
        missing: messages that could not be fetched, for the reply.
        limit: of the time for the tasks.
        most: limit of the replies left for peers, in bytes.

    Raises:
        CallRefused: the call is invalid, its time is over, or it would leave weights that are not
            finite; nothing has changed.
        OSError: writing failed; nothing has changed.
    """
    party, t = node_run.party, request["round"]
    if t >= 0 and t > node_run.last.round:
        kept = [int(k) for k in request["kept"][-2:]] if isinstance(request["kept"], list) else []
        node_run.store.mark(t, kept)
    node_run.hold(request["floor"], request["call"])
    shared = payload.decoded(rest, 0)
    expect = unspell(request["expect"])
    watch = _Watch(party)
    lines: list[Tree] = []
    replies: list[bytes] = []
    try:
        with limit:
            for task in request["tasks"]:
                result = _task(node_run, task, request, shared, rest, fetched, watch)
                if request["method"] != "score" and not isinstance(result, Failure):
                    result = node_run.outgoing(result)
                if node_run.summed and not _is_finite(party, watch):
                    node_run.undo()
                    result = Failure(
                        "not finite", "the call would leave weights that are not finite"
                    )
                if request["mask"] is not None:
                    result = _masked(node_run, result, request, shared)
                elif (
                    node_run.summed and t >= 0 and isinstance(result, Failure) and _of_rows(result)
                ):
                    result = _unsaid(party, request["method"], result)
                lines.append(
                    line(node_run, result, request["leave"], expect, request["call"], replies, most)
                )
        if not _is_finite(party, watch):
            raise MessageError("the weights are not finite")
        notes = _finite(party.take_notes())
        if node_run.covered or node_run.summed:  # others depend on rows
            notes = {name: note for name, note in notes.items() if name in node_run.covered}
        head: Tree = {"lines": lines, "notes": notes if node_run.notes else {}, "missing": missing}
        reply = payload.pack(head, *replies)
        entry = StoredState(
            node_run.start, request["call"], max(t, node_run.last.round), reply, party.state()
        )
        if request["leave"]:
            node_run.store.keep_left(request["call"], node_run.left_by(request["call"]))
        if t >= 0:
            if watch.changed():
                node_run.store.write(entry)
            node_run.last = light(entry)
    except BaseException as error:
        # drop replies of this call, which is not on disk
        node_run.hold(request["floor"], request["call"])
        node_run.undo()
        if node_run.covered and not isinstance(error, CallRefused | PrivacyBudgetSpent):
            _log.error("call %d failed", request["call"], exc_info=error)
            raise CallRefused(
                rpc_errors.FAILED, "this node failed to answer; the reason is in its log"
            ) from None
        if isinstance(error, TimeExpired):
            raise CallRefused(
                rpc_errors.LATE, "the call took longer than its deadline, or than this node allows"
            ) from None
        if isinstance(error, PrivacyBudgetSpent):
            raise refused(str(error)) from None
        if isinstance(error, MessageError):
            raise refused(
                "the call would leave weights that are not finite; nothing was changed"
            ) from None
        raise
    return reply


def _is_finite(party: Party[MethodConfig], watch: "_Watch") -> bool:
    """Whether the weights are finite, if they have changed."""
    if party._network is None or not watch.changed():
        return True
    try:
        message.check_finite(party.net.state()["params"])
    except MessageError:
        return False
    return True


def _of_rows(failure: Failure) -> bool:
    """Whether a failure may depend on rows, and not on the arguments and the order of
    calls alone.
    """
    return failure.reason not in (NOT_FINITE, NOT_READY)


def _unsaid(party: Party[MethodConfig], method: str, failure: Failure) -> Tree | Failure:
    """None in place of a failure, where the party's method answers nothing: that it failed would be
    an answer.
    """
    if not answers_nothing(type(party), method):
        return failure
    _log.error("%s changed nothing: %s\n%s", method, failure.reason, failure.trace)
    return None


def _masked(
    node_run: NodeRun, reply: Tree | Failure, request: Mapping[str, Any], shared: Tree
) -> Tree | Failure:
    """A reply as part of a secure sum, whose parties have no arguments of their own."""
    if any(task["each"] is not None or task["reply_refs"] for task in request["tasks"]):
        raise refused("a call whose reply is part of a sum has the same arguments for all nodes")
    assert node_run.sums is not None
    try:
        return node_run.sums.masked(reply, request, shared)
    except MessageError as error:
        raise CallRefused(
            rpc_errors.MALFORMED, "the steps of this secure sum do not allow a vector", str(error)
        ) from None


def _task(
    node_run: NodeRun,
    task: Any,
    request: Mapping[str, Any],
    shared: Any,
    rest: Sequence[memoryview],
    fetched: Mapping[tuple[int, str], Tree],
    watch: "_Watch",
) -> Tree | Failure:
    # a fault could undo a mask, or noise
    if task["fault"] is not None and node_run.place.counts is not None:
        raise refused(
            "faults are for tests on public data sets, not for this node's own rows or columns"
        )
    each = {**(payload.decoded(rest, task["each"]) or {})}
    _check_senders(
        request["method"] in node_run.party.TO_PEERS, each, shared or {}, task["reply_refs"] or {}
    )
    for name, refs in (task["reply_refs"] or {}).items():
        if isinstance(refs, dict):  # messages that could not be fetched are left out
            each[name] = {
                k: ReplyRef(key) for k, ref in refs.items() if (key := reply_key(ref)) in fetched
            }
        elif (key := reply_key(refs)) in fetched:
            each[name] = ReplyRef(key)
        else:
            return Failure(rpc_errors.UNREACHABLE)
    seed, method = task["seed"] % 2**63, request["method"]
    order = Task(
        node_run.party.context.id, method, shared or {}, each, task["fault"], seed, request["round"]
    )
    given = arguments(order, lambda sent: fetched[sent.held])
    if (
        method == "contribution" and given.get("on") != "test"
    ):  # checked after merging: a task's arguments win over shared
        raise refused("contributions are for test rows only: call contribution with on = 'test'")
    if request["round"] >= 0:
        _take_turn(node_run, request, given)
    if node_run.covered and not _bounded(given):
        raise refused(
            "arguments for a party with differential privacy must be numbers of at most "
            f"{LARGEST:g}"
        )
    scored = node_run.scored if method == "score" else None
    if scored is not None:
        if given.get("broadcast") and not scored.broadcasts:
            raise refused("this method sends clients no model: call score without broadcast")
        assert scored.data.rows is not None
        split = split_of(node_run.party, OWN)
        look(scored.budget, scored.cohort, scored.data.rows, scored.data.looks, split)
    if node_run.limits is not None:
        node_run.limits.check(method, given)
    try:
        reply = run_task(node_run.party, order, given, watch.keep)
    except MethodError as error:
        _log.error("%s", error)
        raise CallRefused(rpc_errors.MALFORMED, "the method's page has no such method") from None
    if isinstance(reply, Failure) and reply.trace:
        _log.warning(
            "call %d, %s: %s\n%s", request["call"], request["method"], reply.reason, reply.trace
        )
    if isinstance(reply, Failure) and node_run.covered:
        return Failure(RAISED)
    if scored is not None and isinstance(reply, Failure) and given.get("on") == OWN:
        reply = worst_score(node_run.party, on=OWN)  # a failure would be an exact answer about rows
    elif scored is not None and isinstance(reply, dict):
        node_run.write_scores(given)
    if scored is not None and scored.secret is not None and isinstance(reply, dict):
        return blurred(reply, scored.secret, given, node_run.party.state())
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
    """The line of one task in the answer; its bytes go to `replies`, or stay here for peers that
    know the key.
    """
    if not isinstance(reply, Failure) and leave:
        left = reply_ref(None, reply, expect)
        if left.failure is not None:
            reply = left.failure
        elif node_run.left_bytes + left.size.wire > most:
            reply = Failure(rpc_errors.BUSY)  # until peers have fetched the others
        else:
            key = node_run.leave(call, message.encode(reply))
            return {
                "reply_ref": key,
                "what": left.what,
                "payload": left.size.payload,
                "wire": left.size.wire,
            }
    if not isinstance(reply, Failure):
        try:
            replies.append(message.encode(reply))
            return {"reply": len(replies) - 1}
        except MessageError as error:
            reply = Failure("not a message", str(error))
    return {"failure": reply.reason, "injected": reply.injected}


class _Watch:
    """Detects whether a party's state changes, without reading its network's memory."""

    def __init__(self, party: Party[MethodConfig]) -> None:
        self._party = party
        self._before = self._own()
        self._touched = False

    def keep(self, memory: torch.Tensor) -> torch.Tensor:
        """A copy of the network's memory, before it changes."""
        self._touched = True
        return memory.clone()

    def changed(self) -> bool:
        """Whether the state has changed."""
        return self._touched or self._own() != self._before

    def _own(self) -> bytes:
        return message.encode(self._party.own_state(), _LARGE)


def _check_senders(
    answers: bool, each: Mapping[str, Any], shared: Mapping[str, Any], refs: Mapping[str, Any]
) -> None:
    """Check that what should come from peers does: the coordinator could ask in a peer's name, or
    answer.

    Args:
        answers: whether the call's replies are for peers, so that `asked` is a peer's question.
        each, shared, refs: the arguments.
    """
    name = "asked" if answers else "inbox"
    if name in shared or each.get(name, {}) != {}:  # an empty inbox has no sender
        raise refused("messages of peers must come from them, not from the coordinator")
    asked = refs.get("asked")
    if answers and (
        isinstance(asked, dict)
        or ((asked is None) != ("by" not in each))
        or (asked and int(each["by"]) != asked[0])
    ):
        raise refused("a question must come from the peer that it is answered for")
    if any(key != str(ref[0]) for key, ref in (refs.get("inbox") or {}).items()):
        raise refused("a message must come from the peer that it is said to be from")


def _take_turn(node_run: NodeRun, request: Mapping[str, Any], given: Mapping[str, Tree]) -> None:
    """Record a call, which must have its turn in the round."""
    party, method = node_run.party, request["method"]
    if method not in party.TO_PEERS and len(request["tasks"]) > 1:
        raise refused(f"a call of {method} is one task: only answers to peers are several")
    most = party.cfg.calls_in_round(party.context).get(method, 1)
    peers, sha256 = method in party.TO_PEERS, message.digest(dict(given))
    asker = int(given["by"]) if peers and "asked" in given else -1  # type: ignore[arg-type]
    node_run.calls.take(request["call"], request["round"], method, asker, sha256, most, again=peers)


def _bounded(given: Mapping[str, Tree]) -> bool:
    """Whether all numbers of these arguments are at most `LARGEST`; NaN is not."""
    tensors: list[torch.Tensor] = []
    message.map_tensors(lambda x: tensors.append(x) or x, dict(given))  # type: ignore[func-returns-value]
    return all(bool((x.abs() <= LARGEST).all()) for x in tensors if x.is_floating_point())


def _finite(notes: Mapping[str, Note]) -> dict[str, Note]:
    """The finite notes: messages cannot carry others, and an infinite note must not
    fail the call.
    """
    return {
        name: note
        for name, note in notes.items()
        if all(
            isinstance(x, float) and math.isfinite(x)
            for x in (note if isinstance(note, list) else [note])
        )
    }
