"""The Ray actor of a worker: it holds some parties, runs their tasks, and passes answers to other
workers.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import ray
import torch

from fedloom._version import __version__
from fedloom.core import message
from fedloom.core.context import PublicSet, Rows
from fedloom.core.engine import Failure, ReplyRef, Task, arguments, names, reply_ref, run_task
from fedloom.core.errors import MessageError
from fedloom.core.message import Tree
from fedloom.core.party import Note, Party
from fedloom.core.templates import unspell
from fedloom.engines._party_bundle import (
    Packed,
    PartyBundle,
    RowPool,
    opened,
    packed,
    place,
    unpack,
)
from fedloom.engines.repeatable import add_in_one_order

Key: TypeAlias = tuple[int, int]
"""The key of an answer: the number of its worker, and its own."""


class Shard:
    """Some of the parties, in one process of one thread. Ray turns this class into an actor."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._parties: dict[int, Party[object]] = {}
        self._device = "cpu"
        self._common: dict[int, Rows] = {}
        self._publics: dict[int, PublicSet] = {}
        self._left: dict[Key, Tree] = {}

    def about(self) -> dict[str, str]:
        """The node and address of this process, and its versions."""
        node = ray.get_runtime_context().get_node_id()
        return {"node": node, "address": ray.util.get_node_ip_address(), **versions()}

    def build(self, common: Sequence[RowPool], bundle: PartyBundle, device: str) -> dict[int, str]:
        """Build parties with the rows that all parties hold, and keep them. Returns their names."""
        for name, module in bundle.modules.items():
            sys.modules.setdefault(name, module)
        self._device = device
        add_in_one_order(device)
        self._common = self._common or unpack(common, device)
        rows = {**self._common, **unpack(bundle.pools, device)}
        built = {}
        for spec in bundle.specs:
            party = spec.kind(spec.cfg, place(spec, rows, self._publics, device))
            built[party.context.id] = party
        self._parties.update(built)
        return names((i, type(p)) for i, p in built.items())

    def do(
        self,
        head: Packed,
        tasks: Sequence[Task],
        each: Sequence[Packed],
        keys: Sequence[Key],
        bundles: Sequence[Any],
    ) -> tuple[list[Any], dict[int, dict[str, Note]]]:
        """Run tasks in order. For each a packed reply, a reference, a failure, or None for a reply
        that is not a message; and the parties' notes.

        Args:
            head: the shared arguments, and the template of a valid answer.
            each: the plain arguments, which `tasks` lack.
            keys: keys under which to leave the answers; if empty, answers are sent and earlier ones
                dropped.
            bundles: references to answers of other workers, fetched from their nodes.
        """
        common = self._unpack(head)
        fetched = {
            key: self._unpack(data)
            for bundle in ray.get(list(bundles))
            for key, data in bundle.items()
        }
        expect = unspell(common["expect"])
        replies: list[Any] = []
        notes: dict[int, dict[str, Note]] = {}
        for n, (task, own) in enumerate(zip(tasks, each, strict=True)):
            party = self._parties[task.party]
            whole = replace(task, shared=common["shared"], each=self._unpack(own) | task.each)
            resolved = arguments(
                whole,
                lambda ref: self._left[ref.held] if ref.held in self._left else fetched[ref.held],
            )
            reply = run_task(party, whole, resolved)
            replies.append(self._keep(keys[n], reply, expect) if keys else _pack_reply(reply))
            notes.setdefault(task.party, {}).update(party.take_notes())
        if not keys:
            self._left.clear()
        return replies, notes

    def hand(self, wanted: Mapping[int, Sequence[Key]]) -> dict[int, Any]:
        """For each other worker a reference to the answers that it needs, which stay on this node
        until fetched.
        """
        data = {key: packed(self._left[key]) for keys in wanted.values() for key in keys}
        return {
            receiver: ray.put({key: data[key] for key in keys}) for receiver, keys in wanted.items()
        }

    def states(self, parties: Iterable[int]) -> dict[int, Packed]:
        """The states of these parties."""
        return {i: packed(self._parties[i].state()) for i in parties}

    def load(self, states: Mapping[int, Packed]) -> None:
        """Load states that `states` returned."""
        for i, state in states.items():
            self._parties[i].load(self._unpack(state))

    def _keep(self, key: Key, reply: Any, expect: Any) -> ReplyRef:
        left = reply_ref(key, reply, expect)
        if left.failure is None:
            self._left[key] = reply
        return left

    def _unpack(self, data: Packed) -> Any:
        tree = opened(data)
        return (
            tree
            if self._device == "cpu"
            else message.map_tensors(lambda x: x.to(self._device), tree)
        )


def versions() -> dict[str, str]:
    """Versions that must be equal on all nodes, so that results do not depend on the placement of
    parties.
    """
    return {"fedloom": __version__, "torch": torch.__version__.partition("+")[0]}


def _pack_reply(reply: Any) -> Packed | Failure | None:
    if isinstance(reply, Failure):
        return reply
    try:
        return packed(reply)
    except MessageError:
        return None
