"""The strictest engine: every call is made at a party rebuilt from nothing but its declared state.

Messages and replies go through their encoding, as between machines. It is slow, and it is the proof that a page
keeps its contract: a method gives the same numbers here as in the loop, or it hides state, shares memory, or
changes a message in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedloom import message
from fedloom.engines.base import CallId, Failure
from fedloom.engines.local import LocalEngine
from fedloom.errors import MessageError
from fedloom.faults import Faults
from fedloom.message import Tree
from fedloom.party import Party


class IsolatedEngine(LocalEngine):
    """Like `LocalEngine`, given a builder for each party."""

    def __init__(
        self, builders: Sequence[Callable[[], Party[Any]]], *, seed: int = 0, faults: Faults | None = None
    ) -> None:
        super().__init__([build() for build in builders], seed=seed, faults=faults)
        self._builders = dict(zip(self.ids, builders, strict=True))

    def _run(self, party: int, method: str, put: dict[str, Tree], call: CallId) -> Tree | Failure:
        old = self._party(party)
        new = self._builders[party]()
        new.load(_through_wire(old.state()))  # type: ignore[arg-type]
        new._notes.update(old._notes)
        self._parties[party] = new
        reply = super()._run(party, method, _through_wire(put), call)  # type: ignore[arg-type]
        if isinstance(reply, Failure):
            return reply
        try:
            return _through_wire(reply)
        except MessageError:
            return reply  # not a message: the federation will say so


def _through_wire(tree: Tree) -> Tree:
    return message.decode(message.encode(tree))
