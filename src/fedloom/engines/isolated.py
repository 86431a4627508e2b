"""The strictest engine: every call is made at a party rebuilt from nothing but its declared state.

Messages and replies go through their encoding, as between machines. It is slow, and it is the proof that a page
keeps its contract: a method gives the same numbers here as in the loop, or it hides state, shares memory, or
changes a message in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedloom.core import message
from fedloom.core.engine import Account, Engine, Failure, ReplyRef, Task, arguments, names, reply_ref, run
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note, Party


class IsolatedEngine(Engine):
    """Parties in this process, rebuilt for every call by their builders."""

    def __init__(
        self, builders: Sequence[Callable[[], Party[Any]]], *, seed: int = 0, faults: Faults | None = None
    ) -> None:
        self._parties = {p.site.id: p for p in (build() for build in builders)}
        self._builders = dict(zip(self._parties, builders, strict=True))
        super().__init__(names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults)

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [self._run(task) for task in tasks]

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        return [reply_ref(reply, reply, expect) for reply in self._call(tasks)]

    def _run(self, task: Task) -> Tree | Failure:
        old, new = self._parties[task.party], self._builders[task.party]()
        new.load(_through_wire(old.state()))  # type: ignore[arg-type]
        new._notes.update(old._notes)
        self._parties[task.party] = new
        put = _through_wire(arguments(task, lambda sent: sent.held))
        reply = run(new, task, put)  # type: ignore[arg-type]
        if isinstance(reply, Failure):
            return reply
        try:
            return _through_wire(reply)
        except MessageError:
            return reply  # not a message: the federation will say so

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views, not copies."""
        return {i: p.state() for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        for i, state in states.items():
            self._parties[i].load(state)

    def notes(self) -> dict[int, dict[str, Note]]:
        """The parties' notes since the last call."""
        return {i: p.take_notes() for i, p in self._parties.items()}

    def account(self) -> Account:
        """One process."""
        return Account("isolated", device=next(iter(self._parties.values())).site.device)


def _through_wire(tree: Tree) -> Tree:
    return message.decode(message.encode(tree))
