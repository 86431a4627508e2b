"""Single-threaded worker processes on this machine, with the same results as the local engine.

Results do not depend on the number of workers or on the worker that runs a party: random draws are
seeded per call and party, and a party's tasks run in order. A call raises `Lost` when a worker died
in it, after replacing the worker.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

from fedloom.core import message
from fedloom.core.engine import (
    Account,
    Engine,
    Failure,
    Lost,
    ReplyRef,
    Task,
    map_references,
    names,
    references,
    refusal,
)
from fedloom.core.errors import ConfigError, MessageError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.message import Size, Template, Tree
from fedloom.core.party import Party
from fedloom.core.templates import spell
from fedloom.engines._shared_buffer import LIMITS, SharedBuffer
from fedloom.engines._worker import Shared
from fedloom.engines._worker_pool import WorkerPool, WorkerSlot
from fedloom.engines.memory import SharedMemory

_Heads: TypeAlias = dict[tuple[int, str], tuple[int, int]]
"""Positions of shared arguments in the parent's buffer, by the arguments' identity and the method.
"""


class WorkersEngine(Engine):
    """Parties in worker processes. Close it, or use it in a `with`: no process outlives it.

    On a machine with a GPU, create it before this process trains anything.

    Args:
        parties: all parties.
        workers: the number of processes, at most one per party.

    Raises:
        ConfigError: a party is not on the CPU, or this system cannot fork.
    """

    durable = False

    def __init__(
        self,
        parties: Iterable[Party[object]],
        *,
        workers: int,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"engine.workers must be at least 1, not {workers}")
        self._parties: dict[int, Party[object]] = {}
        shared = SharedMemory()
        for party in parties:
            self._place(party, shared)
        super().__init__(
            names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults
        )
        self._own: dict[int, bytes] = {}  # state outside the networks, if it has changed
        self._era = 0
        count = max(1, min(workers, len(self._parties)))
        self._buffers = [SharedBuffer() for _ in range(1 + 2 * count)]
        self._pool = WorkerPool(Shared(self._parties, self._buffers, count))

    def _place(self, party: Party[object], shared: SharedMemory) -> None:
        i = party.context.id
        if party.context.device != "cpu":
            raise ConfigError(
                f"worker processes run on the CPU, but party {i} is on {party.context.device!r}; "
                "use the engine batched with one worker, or the device cpu"
            )
        if party._network is not None:
            shared.adopt(party._network)
        for rows in party.context.tests.values():
            _ = rows.every  # cached before the fork, to be shared by all workers
        self._parties[i] = party

    # -- the engine --------------------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        replies = self._do(tasks, leave=False, expect=None)
        self._era += 1  # all references have been used: workers and parent overwrite their buffers
        for buffer in self._buffers:
            buffer.trim()
        return replies

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        left = self._do(tasks, leave=True, expect=expect)
        return [
            ReplyRef(None, failure=reply) if isinstance(reply, Failure) else reply for reply in left
        ]

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views of shared memory, not copies."""
        return {i: p.state() | _tree(self._own.get(i)) for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Load every party's state as `states()` returned it."""
        for i, state in states.items():
            party = self._parties[i]
            party.load(state)
            self._own[i] = message.encode(party.own_state(), LIMITS)
            self._pool.last.pop(i, None)

    def account(self) -> Account:
        """The number of workers."""
        return Account("local", workers=len(self._pool.slots))

    def close(self) -> None:
        """Kill all workers."""
        self._pool.close()
        for buffer in self._buffers:
            buffer.close()

    # -- tasks and replies -------------------------------------------------------------------------

    def _do(self, tasks: Sequence[Task], *, leave: bool, expect: Template) -> list[Any]:
        heads: _Heads = {}
        try:
            results = self._pool.do(tasks, partial(self._order, heads, leave, expect), self._take)
        except Lost:
            self.notes()
            raise
        for result in results:
            if isinstance(result, MethodError):
                raise result
        return results

    def _order(
        self,
        heads: _Heads,
        leave: bool,
        expect: Template,
        slot: WorkerSlot,
        task: Task,
        moved: bool,
    ) -> dict[str, Any] | Failure:
        """The order for a worker, with large arguments in shared buffers; or a failure if it cannot
        be sent.
        """
        plain = {name: value for name, value in task.each.items() if not references(value)}
        refs = {
            name: map_references(attrgetter("held"), v)
            for name, v in task.each.items()
            if name not in plain
        }
        try:
            key = (id(task.shared), task.method)
            if key not in heads:
                head = {"method": task.method, "shared": dict(task.shared), "expect": spell(expect)}
                heads[key] = self._buffers[0].write(message.encode(head, LIMITS))
            each = message.encode(plain, LIMITS) if plain else b""
        except MessageError as error:
            return refusal(task, {**task.shared, **plain}, error)
        own = self._own.get(task.party, b"") if moved else b""
        positions = slot.put(each, own, json.dumps(refs).encode() if refs else b"")
        return {
            "party": task.party,
            "fault": task.fault,
            "seed": task.seed,
            "round": task.round,
            "head": heads[key],
            "each": positions[0],
            "own": positions[1],
            "refs": positions[2],
            "moved": moved,
            "leave": leave,
            "era": self._era,
        }

    def _take(self, slot: WorkerSlot, task: Task, facts: dict[str, Any], body: memoryview) -> Any:
        """The result of a reply; keeps the party's notes and its state outside the network."""
        self._notes[task.party].update(facts["notes"])
        cut = facts["answer"]
        if len(body) > cut:
            self._own[task.party] = bytes(body[cut:])
        if "wrong" in facts:
            return MethodError(facts["wrong"])
        if "failure" in facts:
            return Failure(*facts["failure"])
        if "ref" in facts:
            what, payload, wire, start, length = facts["ref"]
            buffer = self._buffers[slot.outbox]
            buffer.reach = max(buffer.reach, start + length)
            return ReplyRef((slot.outbox, start, length), what, Size(payload, wire))
        return message.decode(body[:cut], LIMITS)


def _tree(own: bytes | None) -> Any:
    return message.decode(own, LIMITS) if own else {}
