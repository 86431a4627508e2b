"""All parties in this process: one after the other, as all other engines must match, or rebuilt for
every call.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from fedloom.core import message
from fedloom.core.engine import (
    Account,
    Engine,
    Failure,
    ReplyRef,
    Task,
    arguments,
    names,
    reply_problem,
    reply_ref,
    run_task,
)
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.core.fixed_point import encoded
from fedloom.core.message import Template, Tree
from fedloom.core.party import Note, Party
from fedloom.engines.joint import Joint


class LocalEngine(Engine):
    """Parties in this process. Tensors of a message are passed without a copy; tensors of a reply
    are copied.

    Parties whose page has `ROWS` answer as one: see `fedloom.engines.joint`.
    """

    NAME: ClassVar[str] = "local"
    JOINS: ClassVar[bool] = True
    """Whether parties may answer as one."""

    def __init__(
        self,
        parties: Iterable[Party[object]],
        *,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self._held = {party.context.id: party for party in parties}
        self._joint = Joint(self._held) if self.JOINS else None
        super().__init__(
            names((i, type(p)) for i, p in self._parties.items()), seed=seed, faults=faults
        )

    @property
    def _parties(self) -> dict[int, Party[object]]:
        """The parties, up to date."""
        if self._joint is not None:
            self._joint.part()
        return self._held

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        if self._joint is not None:
            if done := self._joint.run(tasks, sums=False):
                return [*done] * len(tasks)
            self._joint.part()
        return self._each(tasks)

    def _each(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [self._run(task) for task in tasks]

    def _total(self, tasks: Sequence[Task]) -> list[Tree]:
        return [] if self._joint is None else self._joint.run(tasks, sums=True)

    def _sum(
        self, tasks: Sequence[Task], expect: Template, weight: str | None, whole: bool
    ) -> tuple[np.ndarray | None, list[Failure | None]]:
        found = self._total(tasks)
        if not found or reply_problem(found[0], expect):
            return super()._sum(tasks, expect, weight, whole)
        total = encoded(found[0], weight, len(tasks))
        total[-1] = len(tasks)
        return total, [None] * len(tasks)

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        return [reply_ref(reply, reply, expect) for reply in self._call(tasks)]

    def _run(self, task: Task) -> Tree | Failure:
        return run_task(self._parties[task.party], task, arguments(task))

    def states(self) -> dict[int, dict[str, Tree]]:
        """Every party's state: views, not copies."""
        return {i: p.state() for i, p in self._parties.items()}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Load every party's state as `states()` returned it."""
        for i, state in states.items():
            self._parties[i].load(state)

    def notes(self) -> dict[int, dict[str, Note]]:
        """Return and clear the parties' notes."""
        return {i: p.take_notes() for i, p in self._parties.items()}

    def account(self) -> Account:
        """One process."""
        return Account(self.NAME, device=next(iter(self._parties.values())).context.device)


class ObservedEngine(LocalEngine):
    """The local engine, with a copy of what parties sent: the view of an attacker that reads all
    messages.

    Attributes:
        sent: the newest replies by method and party, each with its call's arguments. Of replies
            below `SMALL` bytes the newest `KEPT` are kept, of larger ones the newest. A single
            reply of a secure sum is not among them, as nobody sees it.
    """

    JOINS = False
    SMALL: ClassVar[int] = 1 << 16
    KEPT: ClassVar[int] = 64

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sent: dict[str, dict[int, deque[tuple[Mapping[str, Any], Tree]]]] = {}
        self._summing = False

    def _run(self, task: Task) -> Tree | Failure:
        reply = super()._run(task)
        if (
            task.round >= 0
            and not self._summing
            and reply is not None
            and not isinstance(reply, Failure)
        ):
            kept = self.sent.setdefault(task.method, {}).setdefault(
                task.party, deque(maxlen=self.KEPT)
            )
            if message.size(reply).payload >= self.SMALL:
                kept.clear()
            kept.append(({**task.shared, **task.each}, reply))
        return reply

    def _sum(self, *args: Any) -> Any:
        self._summing = True
        try:
            return super()._sum(*args)
        finally:
            self._summing = False


class IsolatedEngine(LocalEngine):
    """The strictest engine: parties in this process, rebuilt for every call by their builders.

    Messages and replies are encoded and decoded, as between machines. It is slow and checks a
    page's contract: if a method's numbers differ from the local engine's, the page hides state,
    shares memory, or changes a message in place.
    """

    NAME = "isolated"
    JOINS = False

    def __init__(
        self,
        builders: Sequence[Callable[[], Party[object]]],
        *,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__((build() for build in builders), seed=seed, faults=faults)
        self._builders = dict(zip(self.ids, builders, strict=True))

    def _run(self, task: Task) -> Tree | Failure:
        old, new = self._parties[task.party], self._builders[task.party]()
        new.load(_through_wire(old.state()))  # type: ignore[arg-type]
        new._notes.update(old._notes)
        self._parties[task.party] = new
        reply = run_task(new, task, _through_wire(arguments(task)))  # type: ignore[arg-type]
        if isinstance(reply, Failure):
            return reply
        try:
            return _through_wire(reply)
        except MessageError:
            return reply  # not a message: the federation reports it


def _through_wire(tree: Tree) -> Tree:
    return message.decode(message.encode(tree))
