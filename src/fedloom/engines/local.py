"""All parties in this process, one after the other: the reference that all other engines must match."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedloom.core.engine import Account, Engine, Failure, ReplyRef, Task, arguments, names, reply_ref, run
from fedloom.core.faults import Faults
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note, Party
from fedloom.engines.memory import Arena


class LocalEngine(Engine):
    """Parties in this process. Tensors of a message are passed without a copy; those of a reply are copied.

    Args:
        parties: all parties. With `memory`, pass a generator: each party is stored before the next is built.
        memory: bytes of state kept in memory, the rest on disk between calls; None for all.

    Raises:
        ConfigError: the disk has no room for the remaining state.
    """

    def __init__(
        self,
        parties: Iterable[Party[Any]],
        *,
        seed: int = 0,
        faults: Faults | None = None,
        memory: int | None = None,
    ) -> None:
        self._arena = None if memory is None else Arena(memory)
        self._parties: dict[int, Party[Any]] = {}
        for party in parties:
            self._parties[party.context.id] = party
            if self._arena is not None:
                self._arena.adopt(party)
        super().__init__(names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults)

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [self._run(task) for task in tasks]

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        return [reply_ref(reply, reply, expect) for reply in self._call(tasks)]

    def _run(self, task: Task) -> Tree | Failure:
        party = self._parties[task.party]
        with self._swapped_in(party):
            return run(party, task, arguments(task))

    def _swapped_in(self, party: Party[Any]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._arena is None else self._arena.swapped_in(party)

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views, not copies."""
        if self._arena is None:
            return {i: p.state() for i, p in self._parties.items()}
        return {i: self._arena.state(p) for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Load every party's state as `states()` returned it."""
        for i, state in states.items():
            with self._swapped_in(self._parties[i]):
                self._parties[i].load(state)

    def notes(self) -> dict[int, dict[str, Note]]:
        """Return and clear the parties' notes."""
        return {i: p.take_notes() for i, p in self._parties.items()}

    def account(self) -> Account:
        """One process; the number of parties on disk."""
        spilled = 0 if self._arena is None else self._arena.spilled
        remarks = (f"the state of {spilled} of {len(self.ids)} parties is on disk between calls",) if spilled else ()
        return Account("local", device=next(iter(self._parties.values())).context.device, remarks=remarks)
