"""The loop: all parties in this process, one after the other. It defines what the others must give."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedloom.engines.base import Account, Engine, Failure, Parcel, Task, arguments, names, parcel, run
from fedloom.faults import Faults
from fedloom.message import Template, Tree
from fedloom.party import Party


class LocalEngine(Engine):
    """Parties in this process. A message's tensors are handed over uncopied; a reply's are copied."""

    def __init__(self, parties: Iterable[Party[Any]], *, seed: int = 0, faults: Faults | None = None) -> None:
        self._parties = {p.site.id: p for p in parties}
        super().__init__(names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults)

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [run(self._parties[task.party], task, arguments(task, _held)) for task in tasks]

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[Parcel]:
        return [parcel(reply, reply, expect) for reply in self._call(tasks)]

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views, not copies."""
        return {i: p.state() for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Give every party the state that `states()` gave."""
        for i, state in states.items():
            self._parties[i].load(state)

    def notes(self) -> dict[int, dict[str, float]]:
        """What the parties noted since the last call."""
        return {i: p.take_notes() for i, p in self._parties.items()}

    def account(self) -> Account:
        """One process."""
        return Account("local", device=next(iter(self._parties.values())).site.device)


def _held(sent: Parcel) -> Any:
    return sent.held
