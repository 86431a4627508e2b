"""The strictest engine: it rebuilds a party from its declared state for every call.

Messages and replies are encoded and decoded, as between machines. The engine is slow and checks a page's contract: if a
method's numbers differ from those of the local engine, the page hides state, shares memory, or changes a message in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedloom.core import message
from fedloom.core.engine import Account, Failure, Task, arguments, run
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.core.message import Tree
from fedloom.core.party import Party
from fedloom.engines.local import LocalEngine


class IsolatedEngine(LocalEngine):
    """Parties in this process, rebuilt for every call by their builders."""

    def __init__(
        self, builders: Sequence[Callable[[], Party[Any]]], *, seed: int = 0, faults: Faults | None = None
    ) -> None:
        super().__init__((build() for build in builders), seed=seed, faults=faults)
        self._builders = dict(zip(self.ids, builders, strict=True))

    def _run(self, task: Task) -> Tree | Failure:
        old, new = self._parties[task.party], self._builders[task.party]()
        new.load(_through_wire(old.state()))  # type: ignore[arg-type]
        new._notes.update(old._notes)
        self._parties[task.party] = new
        reply = run(new, task, _through_wire(arguments(task)))  # type: ignore[arg-type]
        if isinstance(reply, Failure):
            return reply
        try:
            return _through_wire(reply)
        except MessageError:
            return reply  # not a message: the federation reports it

    def account(self) -> Account:
        """One process."""
        return Account("isolated", device=next(iter(self._parties.values())).context.device)


def _through_wire(tree: Tree) -> Tree:
    return message.decode(message.encode(tree))
