"""A Ray cluster: single-threaded workers on many machines, each with some of the parties.

Parties, rows and models stay on their workers; only encoded messages are sent. Answers in an
exchange go from worker to worker, and this process gets only their descriptions for the ledger.
"""

import contextlib
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedloom.core.engine import (
    Account,
    Engine,
    Failure,
    Lost,
    ReplyRef,
    Task,
    map_references,
    references,
    refusal,
)
from fedloom.core.errors import ConfigError, EngineError, MessageError
from fedloom.core.faults import Faults
from fedloom.core.message import Template, Tree
from fedloom.core.party import Party
from fedloom.core.templates import spell
from fedloom.engines._party_bundle import Packed, PartyBundler, WorkerLost, opened, packed

if TYPE_CHECKING:
    from fedloom.engines._ray_cluster import RayCluster

_TRIES = 5
"""Attempts to rebuild parties while workers die building them."""
_DIED = (
    "workers died while building their parties, probably for lack of memory; add nodes and raise "
    "engine.workers, or lower data.clients"
)


class RayEngine(Engine):
    """Parties on a Ray cluster. Close it, or use it in a `with`: no worker outlives it.

    A call raises `Lost` when a worker or its node died, after its parties have been rebuilt on
    other workers.

    Args:
        builders: `partial(party class, config, context)` for each party, with tensors on the CPU.
        ids: the ids of the parties, in the same order.
        workers: the number of processes, at most one per party.
        address: the address of the cluster's head, `host:port` or `auto`; None starts a cluster on
            this machine. A cluster that this process has already joined takes precedence.
        cpus: CPUs of each worker.
        gpus: GPUs of each worker, such as 0.25; its parties' tensors are on the GPU unless this is
            0.

    Raises:
        EngineError: Ray is not installed; the cluster does not exist, is too small, or has other
            versions; or a party cannot be sent.
    """

    durable = False

    def __init__(
        self,
        builders: Sequence[Callable[[], Party[object]]],
        *,
        ids: Sequence[int],
        workers: int,
        address: str | None = None,
        gpus: float = 0.0,
        cpus: float = 1.0,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        if workers < 1:
            raise ConfigError(f"engine.workers must be at least 1, not {workers}")
        workers = max(1, min(workers, len(ids)))
        self._bundler = PartyBundler(dict(zip(ids, builders, strict=True)))
        self._device = "cuda" if gpus else "cpu"
        self._where: dict[int, int] = {}  # the worker of each party
        self._left = 0
        self._losses = 0
        self._ray = _ray()
        self._cluster: RayCluster = self._ray.RayCluster(address, workers, cpus, gpus)
        try:
            self._cluster.start(workers)
            self._common = self._ray.ray.put(self._bundler.common())
            party_names = self._place(ids, list(self._cluster.workers))
        except BaseException as error:
            self._cluster.close()
            if isinstance(error, WorkerLost):
                raise EngineError(_DIED) from None
            raise
        super().__init__({i: party_names[i] for i in ids}, seed=seed, faults=faults)

    # -- the engine --------------------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return [_reply(r) for r in self._do(tasks, None)]

    def _leave(self, tasks: Sequence[Task], expect: Template) -> list[ReplyRef]:
        left = self._do(tasks, expect, leave=True)
        return [ReplyRef(None, failure=r) if isinstance(r, Failure) else r for r in left]

    def states(self) -> dict[int, dict[str, Tree]]:
        """Copies of every party's state."""
        orders = {
            w: ([i for i in self.ids if self._where[i] == w],) for w in set(self._where.values())
        }
        encoded = ChainMap(*self._ask("states", orders).values())
        return {i: opened(encoded[i]) for i in self.ids}

    def load(self, states: Mapping[int, Mapping[str, Tree]]) -> None:
        """Load every party's state as `states()` returned it."""
        orders: dict[int, dict[int, Packed]] = defaultdict(dict)
        for i, state in states.items():
            orders[self._where[i]][i] = packed(dict(state))
        self._ask("load", {w: (order,) for w, order in orders.items()})

    def account(self) -> Account:
        """The numbers of workers, nodes, and lost workers."""
        nodes = len(set(self._cluster.nodes.values()))
        remarks = [f"{nodes} node{'s' * (nodes > 1)}"]
        if self._losses:
            remarks.append(f"workers lost and their parties rebuilt: {self._losses}")
        return Account("ray", len(self._cluster.workers), self._device, tuple(remarks))

    def close(self) -> None:
        """End all workers, and the cluster if it was started for them."""
        self._cluster.close()

    # -- tasks and replies -------------------------------------------------------------------------

    def _do(self, tasks: Sequence[Task], expect: Template, *, leave: bool = False) -> list[Any]:
        """The result of each task; one order goes to each worker that has tasks."""
        head = None
        results: dict[int, Any] = {}
        orders: dict[int, list[_Order]] = defaultdict(list)
        for n, task in enumerate(tasks):
            plain = {name: value for name, value in task.each.items() if not references(value)}
            bare = {
                name: map_references(lambda ref: ReplyRef(ref.held), value)
                for name, value in task.each.items()
                if name not in plain
            }
            try:
                if head is None:
                    head = self._ray.ray.put(
                        packed({"shared": dict(task.shared), "expect": spell(expect)})
                    )
                order = _Order(n, replace(task, shared={}, each=bare), packed(plain))
            except MessageError as error:
                results[n] = refusal(task, {**task.shared, **plain}, error)
            else:
                orders[self._where[task.party]].append(order)
        bundles = self._references_needed(orders)
        calls = {}
        for w, sent_orders in orders.items():
            numbers, bare_tasks, plains = zip(*sent_orders, strict=True)
            keys = [(w, self._left + n) for n in numbers] if leave else []
            calls[w] = (head, bare_tasks, plains, keys, bundles[w])
        self._left += len(tasks)
        for w, (replies, notes) in self._ask("do", calls).items():
            results.update(zip((order.number for order in orders[w]), replies, strict=True))
            for i, new in notes.items():
                self._notes[i].update(new)
        return [results[n] for n in range(len(tasks))]

    def _references_needed(self, orders: "Mapping[int, Sequence[_Order]]") -> dict[int, list[Any]]:
        """For each worker, references to the answers of other workers that its tasks need."""
        wanted: dict[int, dict[int, dict[Any, None]]] = defaultdict(lambda: defaultdict(dict))
        for w, sent_orders in orders.items():
            for ref in (
                p
                for order in sent_orders
                for value in order.task.each.values()
                for p in references(value)
            ):
                if ref.held[0] != w:
                    wanted[ref.held[0]][w][ref.held] = None
        calls = {
            w: ({to: list(keys) for to, keys in receivers.items()},)
            for w, receivers in wanted.items()
        }
        bundles: dict[int, list[Any]] = defaultdict(list)
        for sent_bundles in self._ask("hand", calls).values():
            for to, bundle in sent_bundles.items():
                bundles[to].append(bundle)
        return bundles

    # -- placement, and recovery when a worker is lost ---------------------------------------------

    def _ask(self, method: str, orders: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        try:
            return self._cluster.ask(method, orders)
        except WorkerLost:
            raise Lost(self._mend()) from None

    def _mend(self) -> str:
        """Rebuild the parties of lost workers; returns a description of the loss."""
        self.notes()
        cause = "a reply held by a worker was lost"
        for _ in range(_TRIES):
            self._losses += len(self._cluster.missing())
            orphans = [i for i in self.ids if self._where[i] not in self._cluster.workers]
            if not orphans:
                return cause
            dead = len({self._where[i] for i in orphans})
            # of an attempt that failed
            idle = sorted(self._cluster.workers.keys() - set(self._where.values()))
            patience = self._ray.PATIENCE if self._cluster.workers else self._ray.START
            added = [*idle, *self._cluster.add_workers(dead - len(idle), patience)]
            if not self._cluster.workers:
                raise EngineError(
                    "all workers are lost, and the cluster has no room for new ones; add nodes "
                    "with `ray start --address=…`, then run again with --resume"
                )
            others = "new workers" if added else "the remaining workers"
            cause = (
                f"{dead} of the cluster's workers died; {others} rebuilt their parties: "
                f"{len(orphans)}"
            )
            with contextlib.suppress(WorkerLost):
                self._place(orphans, added or list(self._cluster.workers))
        raise EngineError(_DIED)

    def _place(self, parties: Sequence[int], workers: Sequence[int]) -> dict[int, str]:
        """Build parties on workers, in contiguous pieces of about equally many rows; the parties'
        names.
        """
        pieces = contiguous_pieces([self._bundler.rows(i) for i in parties], len(workers))
        assigned = {
            w: [parties[n] for n in piece]
            for w, piece in zip(workers, pieces, strict=True)
            if piece
        }
        with self._bundler.by_value():
            answers = self._cluster.ask(
                "build",
                {
                    w: (self._common, self._bundler.bundle(piece), self._device)
                    for w, piece in assigned.items()
                },
            )
        every: dict[int, str] = {}
        for w, names in answers.items():
            every.update(names)
            self._where.update(dict.fromkeys(assigned[w], w))
        return every


def contiguous_pieces(weights: Sequence[int], workers: int) -> list[range]:
    """Contiguous pieces of about equal weight; none is empty unless there are fewer parties than
    workers.
    """
    pieces, end, left = [], 0, sum(weights)
    for remaining in range(workers, 0, -1):
        start, weight, fair = end, 0, left / remaining
        last = len(weights) - remaining + 1  # one is left for each of the others
        while end < last and (remaining == 1 or end == start or weight + weights[end] / 2 <= fair):
            weight += weights[end]
            end += 1
        pieces.append(range(start, end))
        left -= weight
    return pieces


class _Order(NamedTuple):
    """One task to send: its number in the call, the task with its references only, its other
    arguments.
    """

    number: int
    task: Task
    plain: Packed


def _ray() -> ModuleType:
    """The module that imports Ray, an extra."""
    try:
        from fedloom.engines import _ray_cluster
    except ImportError as error:
        raise EngineError(
            f"the ray engine needs an extra ({error}); run: pip install -e '.[ray]'"
        ) from None
    return _ray_cluster


def _reply(sent: Any) -> Any:
    if sent is None:
        return object()  # not a message, as the federation will report
    return opened(sent) if isinstance(sent, np.ndarray) else sent
