"""Parties of one architecture batched: a page's method runs once for a group of them, under
`torch.func.vmap`.

It is faster for many small parties on a GPU, and for small networks without convolutions on a CPU,
where the overhead of an operation exceeds its work. The numbers equal the local engine's up to the
order of sums. Methods that cannot be batched run in turn; the account names them, with the reason.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.engine import Account, Failure, Task, arguments, disturbed, run_task
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.core.message import Tree
from fedloom.core.network import INFERENCE_ROWS, Network
from fedloom.core.party import Party
from fedloom.engines._vmap_context import SameContent, run_vmapped
from fedloom.engines._vmap_network import NotBatchable, Uneven
from fedloom.engines.local import LocalEngine

CPU_BUDGET = 1 << 27
"""Bytes that a batch of parties may take on a CPU; larger batches do not fit its caches and are
slower.
"""
FEW = 8
"""Minimum number of parties for which batching is faster on a CPU."""
MANY = 16
"""The same on the slowest processor that was measured: see docs/results/speed.md."""
SMALL = 1 << 15
"""Maximum number of parameters of a network that is faster batched on a CPU. Measured speed-up in
lock-step: 1.4 at 17,000, 0.8 at 51,000.
"""
IN_TURN = (
    f"a CPU is faster batched from {MANY} parties on, without convolutions, and with at most "
    f"{SMALL} parameters"
)
STRIDE = 1 << 32
"""The distance between the numbers of parties of consecutive runs."""
GPU_SHARE = 0.5
"""The share of a GPU's free memory that a batch of parties may take."""


@dataclass
class _Group:
    """Parties that can be batched: of one class and config, with networks that differ only in
    weights.
    """

    parties: list[int]
    memory: Tensor  # (G, nbytes) uint8: row g is the state of the g-th party
    each_bytes: int  # the estimated bytes that one of them takes in a call
    looped: set[Any] = field(default_factory=set)  # calls that cannot be batched
    apart: set[Any] = field(default_factory=set)  # calls that can be batched within one run only
    # methods that need parties with equally many rows
    uneven: set[str] = field(default_factory=set)


class BatchedEngine(LocalEngine):
    """Parties in this process, batched where possible.

    Args:
        parties: all parties.
        chunk_size: the largest number of parties in a batch; None for as many as fit into memory.
        everything: whether to batch parties that are faster in turn: on a CPU, fewer than `MANY`,
            and those whose networks are not `gainful`.
    """

    def __init__(
        self,
        parties: Iterable[Party[object]],
        *,
        chunk_size: int | None = None,
        everything: bool = True,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(parties, seed=seed, faults=faults)
        self._batcher = Batcher(self._parties, chunk_size=chunk_size, everything=everything)

    def _each(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        return self._batcher.call(tasks)

    def account(self) -> Account:
        """One process; the numbers of batched parties and groups, and the calls in turn. "local"
        without groups.
        """
        device = next(iter(self._parties.values())).context.device
        remarks = self._batcher.remarks(self._parties)
        return Account(
            "batched" if self._batcher.groups else "local", device=device, remarks=remarks
        )


class Batcher:
    """Runs the tasks of parties, batched where possible.

    Args:
        parties: by the key that tasks use: their id in a run, or `run * STRIDE + id` in several
            runs.
        chunk_size, everything: as of `BatchedEngine`.

    Attributes:
        groups: for each party that can be batched, its group and its row there.
    """

    def __init__(
        self,
        parties: Mapping[int, Party[object]],
        *,
        chunk_size: int | None,
        everything: bool,
    ) -> None:
        self._parties, self._chunk_size, self._everything = dict(parties), chunk_size, everything
        self._remarks: dict[str, None] = {}  # an ordered set
        self._same = SameContent()
        self.groups: dict[int, tuple[_Group, int]] = {}
        for alike in _alike(self._parties):
            self._unite(alike)

    def _unite(self, numbers: list[int]) -> None:
        first = self._parties[numbers[0]]
        if first._network is None or len(numbers) < 2:
            return
        picky = first.context.device == "cpu" and not self._everything
        if picky and not (len(numbers) >= MANY and gainful(first.net.module)):
            self._remarks[f"{len(numbers)} parties in turn: {IN_TURN}"] = None
            return
        # parties with equally many rows become neighbours
        numbers = sorted(numbers, key=lambda n: _rows(self._parties[n]))
        memory = torch.empty(
            len(numbers),
            first.net.memory.numel(),
            dtype=torch.uint8,
            device=first.net.memory.device,
        )
        for row, n in zip(memory, numbers, strict=True):
            self._parties[n].net.move(row)
        group = _Group(numbers, memory, _footprint(first))
        self.groups.update({n: (group, row) for row, n in enumerate(numbers)})

    def remarks(self, parties: Collection[int]) -> tuple[str, ...]:
        """How these parties run, for an account."""
        groups = [self.groups[n][0] for n in parties if n in self.groups]
        together = (
            f"{len(groups)} of {len(parties)} parties together, in groups: "
            f"{len({*map(id, groups)})}"
        )
        return (*([together] if groups else []), *self._remarks)

    def call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        """Run all tasks; their replies, in order."""
        calls = _Calls(tasks)
        replies: dict[int, Tree | Failure] = {}
        for wave in _waves(tasks):
            for batch in self._batches(wave, calls):
                replies.update(self._run_batch(batch, calls))
            for n in wave:
                if n not in replies:
                    replies[n] = run_task(self._parties[tasks[n].party], tasks[n], calls.opened[n])
        return [replies[n] for n in range(len(tasks))]

    # -- grouping ----------------------------------------------------------------------------------

    def _batches(self, wave: Sequence[int], calls: "_Calls") -> Iterator[list[int]]:
        """Batches of a wave's tasks, by number, in the order of their group's rows."""
        alike: dict[Any, list[int]] = {}
        for n in wave:
            task = calls.tasks[n]
            group, _ = self.groups.get(task.party, (None, 0))
            kind = _kind(task)
            if group is None or task.fault in ("dropout", "crash") or kind in group.looped:
                continue
            party = self._parties[task.party]
            key = (
                id(group),
                task.method,
                calls.shared[id(task.shared)],
                _signature(calls.own(n)),
                _signature(party.own_state()),
                _rows(party) if task.method in group.uneven else 0,
                task.party // STRIDE if kind in group.apart else 0,
            )
            alike.setdefault(key, []).append(n)
        for numbers in alike.values():
            numbers.sort(key=lambda n: self.groups[calls.tasks[n].party][1])
            size = self._size(self.groups[calls.tasks[numbers[0]].party][0])
            pieces = -(-len(numbers) // size)
            step = -(-len(numbers) // pieces)
            yield from (numbers[i : i + step] for i in range(0, len(numbers), step))

    def _size(self, group: _Group) -> int:
        """The largest number of parties in a batch of this group."""
        if group.memory.device.type == "cuda":
            budget = int(GPU_SHARE * torch.cuda.mem_get_info(group.memory.device)[0])
        else:
            budget = CPU_BUDGET
        return max(1, min(self._chunk_size or len(group.parties), budget // group.each_bytes))

    # -- running -----------------------------------------------------------------------------------

    def _run_batch(self, batch: list[int], calls: "_Calls") -> dict[int, Tree | Failure]:
        """The replies of one batch; without those whose tasks must run in turn."""
        group = self.groups[calls.tasks[batch[0]].party][0]
        # in turn, the others refuse their own arguments
        batch = [n for n in batch if calls.finite(n)]
        if len(batch) < (2 if self._everything or group.memory.device.type != "cpu" else FEW):
            return {}
        tasks = [calls.tasks[n] for n in batch]
        method = tasks[0].method
        parties = [self._parties[task.party] for task in tasks]
        one_call = len({id(task.shared) for task in tasks}) == 1
        for party, task in zip(parties, tasks, strict=True):
            party.at_round(task.round)
        try:
            replies = run_vmapped(
                group.memory,
                [self.groups[task.party][1] for task in tasks],
                parties,
                method,
                tasks[0].shared if one_call else {},
                [calls.own(n) if one_call else calls.opened[n] for n in batch],
                self._same,
            )
        except torch.cuda.OutOfMemoryError:
            group.each_bytes *= 2
            torch.cuda.empty_cache()
            return {}
        except Exception as error:
            uneven = isinstance(error, Uneven) and len({_rows(party) for party in parties}) > 1
            parts: dict[int, list[int]] = {}
            for n, party in zip(batch, parties, strict=True):
                parts.setdefault(
                    _rows(party) if uneven else calls.tasks[n].party // STRIDE, []
                ).append(n)
            if len(parts) == 1:
                return self._in_turn(group, batch, calls, error)
            if uneven:
                group.uneven.add(method)
            else:
                group.apart.add(_kind(tasks[0]))
            # at once as in later calls, so that a resumed run, which learns it in a later round,
            # has the same bits
            return {
                n: reply
                for part in parts.values()
                for n, reply in self._run_batch(part, calls).items()
            }
        return {
            n: disturbed(reply, calls.tasks[n].fault)
            for n, reply in zip(batch, replies, strict=True)
        }

    def _in_turn(
        self, group: _Group, batch: list[int], calls: "_Calls", error: Exception
    ) -> dict[int, Tree | Failure]:
        """Run a batch that failed in turn. If that succeeds, such calls are not batched again."""
        tasks = [calls.tasks[n] for n in batch]
        replies = {
            n: run_task(self._parties[task.party], task, calls.opened[n])
            for n, task in zip(batch, tasks, strict=True)
        }
        if not any(isinstance(reply, Failure) and reply.trace for reply in replies.values()):
            why = (
                str(error)
                if isinstance(error, NotBatchable)
                else f"{type(error).__name__}: {error}"
            )
            group.looped.add(_kind(tasks[0]))
            self._remarks[f"{tasks[0].method} in turn: {' '.join(why.split())[:200]}"] = None
        return replies


class _Calls:
    """The tasks of one call of one or several runs, with their arguments.

    Attributes:
        opened: for each task all its arguments.
        shared: by the identity of shared arguments, a key that is equal if they differ only in
            their tensors.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self.opened = [arguments(task) for task in tasks]
        every = {id(task.shared): task.shared for task in tasks}
        self.shared = {
            i: _signature(dict(shared)) if len(every) > 1 else tuple(shared)
            for i, shared in every.items()
        }
        self._finite = {i: _finite(shared) for i, shared in every.items()}

    def own(self, n: int) -> dict[str, Tree]:
        """The arguments of this task alone."""
        return {k: self.opened[n][k] for k in self.tasks[n].each}

    def finite(self, n: int) -> bool:
        """Whether all arguments of this task are finite."""
        return self._finite[id(self.tasks[n].shared)] and _finite(self.own(n))


def _finite(arguments: Mapping[str, Tree]) -> bool:
    try:
        message.check_finite(dict(arguments))
    except MessageError:
        return False
    return True


def _waves(tasks: Sequence[Task]) -> list[list[int]]:
    """Numbers of tasks in waves without a repeated party, whose second task depends on
    its first.
    """
    waves: list[list[int]] = []
    seen: dict[int, int] = {}
    for n, task in enumerate(tasks):
        wave = seen[task.party] = seen.get(task.party, -1) + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(n)
    return waves


def gainful(module: nn.Module) -> bool:
    """Whether a network is faster batched on a CPU: it is small, and has no convolution."""
    convolutional = any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())
    return not convolutional and sum(p.numel() for p in module.parameters()) <= SMALL


def _kind(task: Task) -> tuple[str, ...]:
    """A method, and its string arguments."""
    return (task.method, *(v for v in task.shared.values() if isinstance(v, str)))


def _signature(tree: Any) -> Any:
    """A key that is equal for trees that differ only in the content of their tensors."""
    if isinstance(tree, dict):
        return tuple((k, _signature(v)) for k, v in tree.items())
    if isinstance(tree, list | tuple):
        return (list, *map(_signature, tree))
    if isinstance(tree, Tensor):
        return tree.dtype, tree.shape, tree.device
    plain = tree is None or isinstance(tree, bool | int | float | str)
    return (type(tree), tree) if plain else id(tree)


def _alike(parties: Mapping[int, Party[object]]) -> list[list[int]]:
    """The numbers of the parties in groups that can be batched."""
    configs = {id(p.cfg): _numberless(p.cfg) for p in parties.values()}
    groups: dict[Any, list[int]] = {}
    for n, p in parties.items():
        key = (type(p), configs[id(p.cfg)], p.context.device, p._network and _likeness(p._network))
        groups.setdefault(key, []).append(n)
    return list(groups.values())


def _numberless(cfg: Any) -> Any:
    """A key that is equal for configs that differ only in the values of numbers other than 0."""
    if not isinstance(cfg, BaseModel):
        return id(cfg)
    return type(cfg), *((k, v == 0 if isinstance(v, float) else repr(v)) for k, v in cfg)


def _rateless(optimizer: Any) -> Any:
    """The optimizer with 0 in place of its learning rate, if it has one."""
    has_rate = is_dataclass(optimizer) and isinstance(getattr(optimizer, "lr", None), float)
    return replace(optimizer, lr=0.0) if has_rate else optimizer


def _likeness(network: Network) -> Any:
    """A key that is equal for networks that differ only in the values of their learned state."""
    modules = tuple((name, type(m), _settings(m)) for name, m in network.module.named_modules())
    frozen = tuple(
        (name, p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, p in network.module.named_parameters()
        if not p.requires_grad
    )
    return network.fields, _rateless(network.optimizer), modules, frozen


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """A module's own attributes: plain ones by value, others by identity."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple(
        (k, repr(v) if isinstance(v, plain) else id(v))
        for k, v in sorted(vars(module).items())
        if not k.startswith("_") and k != "training"
    )


def _rows(party: Party[object]) -> int:
    return 0 if party.context.data is None else len(party.context.data)


def _footprint(party: Party[object]) -> int:
    """An estimate of the bytes that a party takes in a call: state, its copy, gradients, and
    outputs of layers.
    """
    sizes: list[int] = []
    rows = party.context.data or (party.context.public and party.context.public.rows)
    if rows:
        leaves = [m for m in party.net.module.modules() if not list(m.children())]
        hooks = [
            m.register_forward_hook(lambda _, __, out: sizes.append(getattr(out, "nbytes", 0)))
            for m in leaves
        ]
        try:
            party.net.infer(rows.x(torch.zeros(1, dtype=torch.int64, device=rows.index.device)))
        finally:
            for hook in hooks:
                hook.remove()
    return 4 * party.net.memory.numel() + 2 * INFERENCE_ROWS * sum(sizes)
