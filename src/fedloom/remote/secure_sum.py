"""The coordinator's part in a secure sum with nodes: it relays keys and shares, and learns the sum
alone.

See `fedloom.protect.masks` for the protocol, `fedloom.remote.node.masking` for a node's states.
`NetEngine` calls `secure_sum` for each call whose replies are added. A step asks the nodes that are
left at the same time; a node that refuses it, or answers wrongly, is lost and left out of the later
ones. The names are those of the code, each of nodes that are among those before:

    sessions   --keys-->           answered     gave their public keys
    answered   --most want them--> shown        are on the list L that every node is shown
    shown      --shares-->         sealed       sealed a share of their secrets for each other one
    sealed     --deliver, mask-->  arrived      sent a masked vector: they are in the sum
    arrived    --agree-->          signatures   signed the set of those who arrived
    signatures --open-->           opened       opened their shares, by which the masks come off

    shown      --list, mask-->     arrived      `whole`: of all nodes or none, whose masks cancel

A lost node costs its own vector at most, as long as `threshold(n)` of the n nodes in L stay.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from fedloom.core.engine import Failure
from fedloom.core.errors import MessageError
from fedloom.core.message import Shape, Template, check_like
from fedloom.protect.masks import Keys, unmasked
from fedloom.remote import rpc_errors
from fedloom.remote.node_session import NodeSession, TaskResults
from fedloom.remote.rpc_errors import CallRefused

_log = logging.getLogger("fedloom.net")
T = TypeVar("T")
Masked = Callable[[NodeSession, Mapping[str, Any]], Awaitable[TaskResults]]
"""Runs a node's task with a mask: (session, mask) to the result."""


async def secure_sum(
    sessions: Sequence[NodeSession],
    run_masked: Masked,
    context: str,
    weight: str | None,
    d: int,
    asked: Callable[[Sequence[str], str], bytes],
    call: tuple[int, str],
    colluders: int = 0,
    whole: bool = False,
) -> tuple[np.ndarray | None, dict[str, Any], dict[str, Failure]]:
    """Take all steps of a sum.

    Args:
        sessions: with the nodes; all of them are asked to take part.
        run_masked: runs the task whose reply is masked.
        context: of the run and its start, as nodes know it.
        weight: the name of the weight in a reply.
        d: the number of integers of a reply.
        asked: the `question` of the sum, from the names in its list and the past of most nodes.
        call: the round and the method.
        colluders: see `threshold`.
        whole: whether there is no sum unless all nodes are in it; there are then no shares.

    Returns:
        The sum (d,) uint64, or None if too few nodes stayed; each node's notes; and the nodes whose
        reply is not part of the sum, with reasons.
    """
    lost: dict[str, Failure] = {}  # by the node's name, with the first reason
    by_name, name = {session.name: session for session in sessions}, secrets.token_hex(16)

    async def each(
        names: Sequence[str], step: Callable[[NodeSession], Awaitable[T]]
    ) -> dict[str, T]:
        """The results of a step, of the nodes that took it; the others are lost. Any other error,
        such as that too few nodes are left for the run, is raised.
        """
        answers = await asyncio.gather(
            *(step(by_name[one]) for one in names), return_exceptions=True
        )
        found: dict[str, T] = {}
        for one, answer in zip(names, answers, strict=True):
            if isinstance(answer, CallRefused):
                lost.setdefault(one, Failure(answer.code, f"{one}: {answer.words}"))
            elif isinstance(answer, MessageError):
                lost.setdefault(one, Failure("not a message", f"{one}: {answer}"))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[one] = answer
        return found

    # -- the keys --

    async def give_keys(session: NodeSession) -> tuple[list[str], list[bytes]]:
        """The nodes that this one does not add with now, and its parts: for masks, for sealing, the
        signature of both, its certificate, the hash of what it was asked before.
        """
        unwanted, parts = await session.sum_step(name, "keys", call, [*by_name])
        if len(parts) != 5:
            raise MessageError("keys have five parts")
        return unwanted, parts

    answered = await each([*by_name], give_keys)

    # -- the list of those that most add with, and that have the past of most --
    #
    # A node with another past, such as one that missed a call, masks otherwise: see `question`.
    refusals = Counter(one for unwanted, _ in answered.values() for one in {*unwanted})
    past = max(pasts := [parts[4] for _, parts in answered.values()], key=pasts.count, default=b"")
    shown = {  # the first four parts by name, in the order of `sessions`
        one: parts[:4]
        for one, (_, parts) in answered.items()
        if 2 * refusals[one] <= len(answered) and parts[4] == past
    }
    # half of the nodes or fewer keep nobody out, so that a few liars cannot
    for one in answered.keys() - shown.keys():
        lost[one] = Failure(
            rpc_errors.REFUSED,
            f"{one}: most other nodes do not add with it now, or were asked otherwise before",
        )
    listed = [part for parts in shown.values() for part in parts]  # four of each, as nodes want it

    # -- what both kinds of sums need --

    def vectors_of(results: Mapping[str, TaskResults]) -> dict[str, np.ndarray]:
        """The masked vectors (d,) uint64, which travel as int64; nodes with others are lost."""
        vectors: dict[str, np.ndarray] = {}
        for one, result in results.items():
            reply = result.results[0]
            if isinstance(reply, Failure):
                lost[one] = reply
            elif not _fits(reply, Shape("int64", d)):
                lost[one] = Failure("wrong shape")
            else:
                vectors[one] = reply.numpy().view(np.uint64)
        return vectors

    async def send_masked(session: NodeSession) -> TaskResults:
        return await run_masked(session, {"sum": name, "weight": weight or ""})

    async def list_all(session: NodeSession) -> None:
        await session.sum_step(name, "list", call, [*shown], listed)

    # -- a sum of all nodes or none: one node that is lost at any step ends it --

    if whole:
        if len(shown) == len(sessions):
            await each([*shown], list_all)
        results = {} if lost else await each([*shown], send_masked)
        vectors = vectors_of(results)
        total = None if lost else np.add.reduce([*vectors.values()], dtype=np.uint64)
        return total, {one: result.notes for one, result in results.items()}, lost

    # -- the shares: sealed[owner][other] is what `owner` sealed for `other` --

    async def give_shares(session: NodeSession) -> dict[str, bytes]:
        names, boxes = await session.sum_step(name, "shares", call, [*shown], listed)
        if {*names} != shown.keys() - {session.name} or len(names) != len(boxes):
            raise MessageError("a node must seal one share for each other node")
        return dict(zip(names, boxes, strict=True))

    sealed = await each([*shown], give_shares)

    # -- the vectors, masked among those that gave shares --

    async def deliver_and_mask(session: NodeSession) -> TaskResults:
        others = [other for other in sealed if other != session.name]
        await session.sum_step(
            name, "deliver", call, others, [sealed[other][session.name] for other in others]
        )
        return await send_masked(session)

    results = await each([*sealed], deliver_and_mask)
    notes = {one: result.notes for one, result in results.items()}
    vectors = vectors_of(results)
    arrived = sorted(vectors)  # one order for all nodes, whichever answered first

    # -- the set of those who arrived, signed; then the shares, opened against the signatures --

    async def sign_set(session: NodeSession) -> bytes:
        _, parts = await session.sum_step(name, "agree", call, arrived)
        if len(parts) != 1:
            raise MessageError("a node must send one signature")
        return parts[0]

    async def open_shares(session: NodeSession) -> dict[str, bytes]:
        names, parts = await session.sum_step(
            name, "open", call, [*signatures], [*signatures.values()]
        )
        if len(names) != len(parts):
            raise MessageError("a node must open one share for each name")
        return dict(zip(names, parts, strict=True))

    lost_before = {*lost}
    signatures = await each(arrived, sign_set)
    opened = await each([*signatures], open_shares)

    # -- the masks come off, in a thread, as it takes long for long vectors --

    keys_by_name = {one: Keys(*parts[:3]) for one, parts in shown.items()}
    try:
        total = await asyncio.to_thread(
            unmasked, keys_by_name, [*sealed], vectors, opened, f"{context}/{name}".encode(),
            asked([*shown], past.decode(errors="replace")),
            colluders,
        )  # fmt: skip
    except MessageError as error:
        _log.warning("no secure sum: %s", error)
        total = None
    for one in {*lost} - lost_before:  # lost after its vector arrived: it is part of the sum
        del lost[one]
    return total, notes, lost


def _fits(reply: object, like: Template) -> bool:
    try:
        check_like(reply, like)
    except MessageError:
        return False
    return isinstance(reply, Tensor)
