"""Worker processes on this machine, one thread each: the numbers of the loop, sooner.

Which worker runs a party, and how many there are, changes no number: chance is seeded per call and party, and a party's
tasks are done in order. A call raises `Lost` when a worker process died in it; by then another has taken its place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from fedloom.core import message
from fedloom.core.engine import Account, Engine, Failure, Lost, Parcel, Task, names, run
from fedloom.core.errors import ConfigError, MessageError, MethodError
from fedloom.core.faults import Faults
from fedloom.core.message import Size, Template, Tree
from fedloom.core.party import Note, Party
from fedloom.engines._shared_buffer import LIMITS, SharedBuffer, spell
from fedloom.engines._worker import Shared
from fedloom.engines._worker_pool import WorkerPool, WorkerSlot
from fedloom.engines.memory import Arena

_Heads: TypeAlias = dict[tuple[int, str], tuple[int, int]]
"""Where in the parent's buffer lies what tasks share: by the identity of the arguments, and the method."""


class WorkersEngine(Engine):
    """Parties in processes of their own. Close it, or use it in a `with`: no process outlives it.

    On a machine with a GPU make it before this process trains anything.

    Args:
        parties: all of them. With a budget each is put away before the next is taken, so let them be made one by one.
        workers: how many processes; no more are started than there are parties.
        memory: bytes of the parties' state that stay in memory, the rest lies on disk; None for all.

    Raises:
        ConfigError: a party lives on another device than the CPU; this system can't fork; or the disk has no room.
    """

    durable = False

    def __init__(
        self,
        parties: Iterable[Party[Any]],
        *,
        workers: int,
        seed: int = 0,
        faults: Faults | None = None,
        memory: int | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"engine.workers must be at least 1, not {workers}")
        self._arena = Arena(memory)
        self._parties: dict[int, Party[Any]] = {}
        self._spilled: set[int] = set()
        for party in parties:
            self._house(party)
        super().__init__(names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults)
        self._own: dict[int, bytes] = {}  # what parties remember beside their networks, unless it is as at first
        self._notes: dict[int, dict[str, Note]] = {i: {} for i in self._parties}
        self._era = 0
        count = max(1, min(workers, len(self._parties)))
        self._buffers = [SharedBuffer() for _ in range(1 + 2 * count)]
        self._pool = WorkerPool(Shared(self._parties, self._arena, self._buffers, count))

    def _house(self, party: Party[Any]) -> None:
        i = party.site.id
        if party.site.device != "cpu":
            raise ConfigError(
                f"workers are processes on the CPU, but party {i} is to live on {party.site.device!r}: take the engine "
                "batched with one worker, or the device cpu"
            )
        before = self._arena.spilled
        self._arena.house(party)
        if self._arena.spilled > before:
            self._spilled.add(i)
        for rows in party.site.tests.values():
            _ = rows.every  # made here, it is one for all workers
        self._parties[i] = party

    # -- what every engine offers ------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        replies = self._do(tasks, leave=False, expect=None)
        self._era += 1  # parcels have been taken: workers overwrite their buffers, and so do we
        for buffer in self._buffers:
            buffer.trim()
        return replies

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[Parcel]:
        left = self._do(tasks, leave=True, expect=expect)
        return [Parcel(None, failure=reply) if isinstance(reply, Failure) else reply for reply in left]

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views of shared memory, not copies."""
        return {i: self._arena.state(p) | _tree(self._own.get(i)) for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        for i, state in states.items():
            party = self._parties[i]
            with self._arena.awake(party):
                party.load(state)
                if i not in self._spilled:
                    self._own[i] = message.encode(party.own_state(), LIMITS)
            self._pool.last.pop(i, None)

    def notes(self) -> dict[int, dict[str, Note]]:
        """What the parties noted since the last call."""
        taken, self._notes = self._notes, {i: {} for i in self._parties}
        return taken

    def account(self) -> Account:
        """The workers; how many parties lie on disk."""
        n = len(self._spilled)
        remarks = (f"the state of {n} of {len(self.ids)} parties lies on disk between calls",) if n else ()
        return Account("local", workers=len(self._pool.slots), remarks=remarks)

    def close(self) -> None:
        """End all workers, whatever they are doing."""
        self._pool.close()
        for buffer in self._buffers:
            buffer.close()

    # -- tasks and replies --------------------------------------------------------------------------

    def _do(self, tasks: Sequence[Task], *, leave: bool, expect: Template) -> list[Any]:
        heads: _Heads = {}
        try:
            results = self._pool.do(tasks, partial(self._order, heads, leave, expect), self._take)
        except Lost:
            self._notes = {i: {} for i in self._parties}
            raise
        for result in results:
            if isinstance(result, MethodError):
                raise result
        return results

    def _order(
        self, heads: _Heads, leave: bool, expect: Template, slot: WorkerSlot, task: Task, moved: bool
    ) -> dict[str, Any] | Failure:
        """The order for a worker, short, with all that may be long in shared buffers; or why it cannot be sent."""
        parcels = {name: held for name, value in task.each.items() if (held := _held(value))}
        plain = {name: value for name, value in task.each.items() if name not in parcels}
        try:
            key = (id(task.shared), task.method)
            if key not in heads:
                head = {"method": task.method, "shared": dict(task.shared), "expect": spell(expect)}
                heads[key] = self._buffers[0].write(message.encode(head, LIMITS))
            each = message.encode(plain, LIMITS) if plain else b""
        except MessageError as error:
            return self._refusal(task, {**task.shared, **plain}, error)
        moved |= task.party in self._spilled
        own = self._belongings(task.party) if moved else b""
        places = slot.put(each, own, json.dumps(parcels).encode() if parcels else b"")
        return {
            "party": task.party,
            "fault": task.fault,
            "seed": task.seed,
            "head": heads[key],
            "each": places[0],
            "own": places[1],
            "parcels": places[2],
            "moved": moved,
            "leave": leave,
            "era": self._era,
        }

    def _refusal(self, task: Task, put: Mapping[str, Tree], error: MessageError) -> Failure:
        """A party refuses what is not finite, as it does in the loop; what else can't be sent is a mistake."""
        try:
            message.check_finite(put)
        except MessageError:
            refused = run(self._parties[task.party], task, put)
            assert isinstance(refused, Failure)
            return refused
        raise error

    def _take(self, slot: WorkerSlot, task: Task, facts: dict[str, Any], body: memoryview) -> Any:
        """What a reply comes to; notes and what the party remembers are kept."""
        self._notes[task.party].update(facts["notes"])
        cut = facts["answer"]
        if len(body) > cut:
            self._remember(task.party, bytes(body[cut:]))
        if "wrong" in facts:
            return MethodError(facts["wrong"])
        if "failure" in facts:
            return Failure(*facts["failure"])
        if "parcel" in facts:
            what, payload, wire, start, length = facts["parcel"]
            buffer = self._buffers[slot.outbox]
            buffer.reach = max(buffer.reach, start + length)
            return Parcel((slot.outbox, start, length), what, Size(payload, wire))
        return message.decode(body[:cut], LIMITS)

    # -- what parties remember beside their networks ----------------------------------------------------

    def _belongings(self, i: int) -> bytes:
        """It, encoded; nothing if it is as at first."""
        if i not in self._spilled:
            return self._own.get(i, b"")
        with self._arena.awake(self._parties[i]):
            return message.encode(self._parties[i].own_state(), LIMITS)

    def _remember(self, i: int, own: bytes) -> None:
        """Keep the newest."""
        if i not in self._spilled:
            self._own[i] = own
            return
        with self._arena.awake(self._parties[i]):
            vars(self._parties[i]).update(_tree(own))


def _held(value: Any) -> Any:
    """Where a parcel lies, or each of a dict of parcels; None for any other value."""
    if isinstance(value, Parcel):
        return value.held
    if isinstance(value, dict) and any(isinstance(v, Parcel) for v in value.values()):
        return {name: sent.held for name, sent in value.items()}
    return None


def _tree(own: bytes | None) -> dict[str, Any]:
    tree = message.decode(own, LIMITS) if own else {}
    assert isinstance(tree, dict)
    return tree
