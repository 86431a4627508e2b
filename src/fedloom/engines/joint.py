"""Parties of one process that answer as one party with the rows of all: for pages whose replies are
sums over rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from fedloom.core import message
from fedloom.core.context import ClientContext, Rows
from fedloom.core.engine import Failure, Task, run_task
from fedloom.core.errors import MethodError
from fedloom.core.message import Tree
from fedloom.core.party import Party


class Joint:
    """Runs a call of several parties once, at a party that has their rows and state, if their page
    has `ROWS`.

    The parties themselves are behind until `part`.

    Args:
        parties: by id.
    """

    def __init__(self, parties: Mapping[int, Party[object]]) -> None:
        self._parties = parties
        self._ids: tuple[int, ...] = ()
        # of these parties, as what is computed of its rows is kept by it
        self._context: ClientContext | None = None
        self._one: Party[object] | None = None

    def run(self, tasks: Sequence[Task], *, sums: bool) -> list[Tree]:
        """The sum of the replies of a method in `MEANS`, or else the reply None, as the only entry;
        [] if the parties do not answer as one, and have not run.

        Args:
            sums: whether a sum is asked for. Single replies of a method in `MEANS` cannot be had.

        Raises:
            MethodError: a method outside of `MEANS` answers.
        """
        if not _alike(tasks) or sums != (tasks[0].method in self._parties[tasks[0].party].MEANS):
            return []
        one = self._of(tuple(task.party for task in tasks))
        reply = None if one is None else run_task(one, tasks[0], dict(tasks[0].shared))
        # each party may fail or not: they run one by one
        if one is None or isinstance(reply, Failure):
            return []
        if not sums and reply is not None:
            raise MethodError(
                f"{type(one).__name__} has ROWS: its {tasks[0].method!r}, not in MEANS, must "
                "answer None"
            )
        return [reply]

    def part(self) -> None:
        """Bring the parties up to date. From then on they run one by one, until the next `run`."""
        if self._one is None:
            return
        one, self._one = self._one, None
        parties = [self._parties[i] for i in self._ids]
        sizes = [len(party.context.rows) for party in parties]
        state = one.own_state()
        split = {name: torch.split(_tensor(state[name]), sizes, dim=-1) for name in one.ROWS}
        for k, party in enumerate(parties):
            party.load(
                {name: split[name][k].clone() if name in split else x for name, x in state.items()}
            )

    def _of(self, ids: tuple[int, ...]) -> Party[object] | None:
        """The party with the rows and state of these; None if they cannot answer as one."""
        if ids != self._ids:
            self.part()
            self._ids, self._context = ids, None
        if self._one is None:
            parties = [self._parties[i] for i in ids]
            if not _can_join(parties):
                return None
            if self._context is None:
                self._context = replace(
                    parties[0].context, data=_rows([party.context.rows for party in parties])
                )
            self._one = type(parties[0])(parties[0].cfg, self._context)
            states = [party.own_state() for party in parties]
            joined = {
                name: torch.cat([_tensor(s[name]) for s in states], dim=-1)
                for name in parties[0].ROWS
            }
            self._one.load({**states[0], **joined})
        return self._one


def _alike(tasks: Sequence[Task]) -> bool:
    """Whether several parties get one call of the protocol with the same arguments,
    and no fault.
    """
    first = tasks[0] if len(tasks) > 1 else None
    return first is not None and all(
        task.method == first.method
        and task.shared is first.shared
        and not task.each
        and task.fault is None
        and task.round >= 0
        for task in tasks
    )


def _can_join(parties: Sequence[Party[object]]) -> bool:
    """Whether these parties have one page with `ROWS`, and are equal but for their rows."""
    first, *others = parties
    if (
        not first.ROWS
        or not getattr(first.cfg, "rows_add_up", True)
        or any(p.cfg != first.cfg for p in others)
    ):
        return False
    states = [{name: x for name, x in p.own_state().items() if name not in p.ROWS} for p in parties]
    heads = [[_tensor(getattr(p, name)).shape[:-1] for name in p.ROWS] for p in parties]
    return all(_equal(states[0], state) for state in states[1:]) and all(
        head == heads[0] for head in heads
    )


def _tensor(x: Tree) -> torch.Tensor:
    assert isinstance(x, torch.Tensor)
    return x


def _equal(a: Tree, b: Tree) -> bool:
    """Whether two trees are equal."""
    one, other = dict(message.leaves(a)), dict(message.leaves(b))
    return one.keys() == other.keys() and all(_same(x, other[path]) for path, x in one.items())


def _same(x: object, y: object) -> bool:
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return x.dtype == y.dtype and torch.equal(x, y)
    return type(x) is type(y) and x == y


def _rows(each: Sequence[Rows]) -> Rows:
    """All rows as one pool."""
    every = [torch.arange(len(rows), device=rows.index.device) for rows in each]
    x = torch.cat([rows.x(which) for rows, which in zip(each, every, strict=True)])
    labels = None
    if all(rows.labels is not None for rows in each):
        labels = torch.cat([rows.y(which) for rows, which in zip(each, every, strict=True)])
    zero, one = torch.zeros(1, device=x.device), torch.ones(1, device=x.device)
    found = Rows(x, labels, torch.arange(len(x), device=x.device), zero, one)
    vars(found)["every"] = x  # the pool itself, so that it is in memory once
    return found
