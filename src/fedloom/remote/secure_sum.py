"""The coordinator's part in a secure sum with nodes: it relays keys and shares, and learns the sum
alone.

See `fedloom.protect.masks` for the protocol. A node that is lost at a step is left out of the later
ones.
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
        sessions: with the nodes.
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
    lost: dict[str, Failure] = {}
    by_name, name = {session.name: session for session in sessions}, secrets.token_hex(16)

    async def each(
        names: Sequence[str], step: Callable[[NodeSession], Awaitable[T]]
    ) -> dict[str, T]:
        """The results of a step, of the nodes that took it."""
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

    async def keys(session: NodeSession) -> tuple[list[str], list[bytes]]:
        unwanted, parts = await session.sum_step(name, "keys", call, [*by_name])
        if len(parts) != 5:
            raise MessageError("keys have five parts")
        return unwanted, parts

    answered = await each([*by_name], keys)
    refusals = Counter(one for unwanted, _ in answered.values() for one in {*unwanted})
    past = max(pasts := [parts[4] for _, parts in answered.values()], key=pasts.count, default=b"")
    shown = {
        one: parts[:4]
        for one, (_, parts) in answered.items()
        if 2 * refusals[one] <= len(answered) and parts[4] == past
    }
    # a lost node stays out for a while; a few liars keep nobody out
    for one in answered.keys() - shown.keys():
        lost[one] = Failure(
            rpc_errors.REFUSED,
            f"{one}: most other nodes do not add with it now, or were asked otherwise before",
        )
    listed = [part for parts in shown.values() for part in parts]

    def arrived_of(results: Mapping[str, TaskResults]) -> dict[str, np.ndarray]:
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

    async def masked_of_all(session: NodeSession) -> TaskResults:
        return await run_masked(session, {"sum": name, "weight": weight or ""})

    async def list_all(session: NodeSession) -> None:
        await session.sum_step(name, "list", call, [*shown], listed)

    if whole:
        if len(shown) == len(sessions):
            await each([*shown], list_all)
        results = {} if lost else await each([*shown], masked_of_all)
        vectors = arrived_of(results)
        total = None if lost else np.add.reduce([*vectors.values()], dtype=np.uint64)
        return total, {one: result.notes for one, result in results.items()}, lost

    async def shares(session: NodeSession) -> dict[str, bytes]:
        names, boxes = await session.sum_step(name, "shares", call, [*shown], listed)
        if {*names} != shown.keys() - {session.name} or len(names) != len(boxes):
            raise MessageError("a node must seal one share for each other node")
        return dict(zip(names, boxes, strict=True))

    sealed = await each([*shown], shares)

    async def masked(session: NodeSession) -> TaskResults:
        others = [other for other in sealed if other != session.name]
        await session.sum_step(
            name, "deliver", call, others, [sealed[other][session.name] for other in others]
        )
        return await masked_of_all(session)

    results = await each([*sealed], masked)
    notes = {one: result.notes for one, result in results.items()}
    vectors = arrived_of(results)
    arrived = sorted(vectors)

    async def agree(session: NodeSession) -> bytes:
        _, parts = await session.sum_step(name, "agree", call, arrived)
        if len(parts) != 1:
            raise MessageError("a node must send one signature")
        return parts[0]

    async def opened(session: NodeSession) -> dict[str, bytes]:
        names, parts = await session.sum_step(
            name, "open", call, [*signatures], [*signatures.values()]
        )
        if len(names) != len(parts):
            raise MessageError("a node must open one share for each name")
        return dict(zip(names, parts, strict=True))

    before = {*lost}
    signatures = await each(arrived, agree)
    shares_opened = await each([*signatures], opened)
    keys_by_name = {one: Keys(*parts[:3]) for one, parts in shown.items()}
    try:
        total = await asyncio.to_thread(
            unmasked, keys_by_name, [*sealed], vectors, shares_opened, f"{context}/{name}".encode(),
            asked([*shown], past.decode(errors="replace")),
            colluders,
        )  # fmt: skip
    except MessageError as error:
        _log.warning("no secure sum: %s", error)
        total = None
    for one in {*lost} - before:  # lost after its vector arrived: it is part of the sum
        del lost[one]
    return total, notes, lost


def _fits(reply: object, like: Template) -> bool:
    try:
        check_like(reply, like)
    except MessageError:
        return False
    return isinstance(reply, Tensor)
