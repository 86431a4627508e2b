"""Parties of one architecture batched: a page's method runs once for a group of them, under `torch.func.vmap`.

It is faster for many small parties on a GPU, and for small networks without convolutions on a CPU, where the overhead
of an operation exceeds its work. The numbers equal those of the local engine up to the order of sums. Methods that
cannot be batched run in turn; the account names them, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.engine import Account, Failure, Task, arguments, disturbed, run
from fedloom.core.errors import MessageError
from fedloom.core.faults import Faults
from fedloom.core.message import Tree
from fedloom.core.network import INFERENCE_ROWS, Network
from fedloom.core.party import Party
from fedloom.engines._vmap_context import run_vmapped
from fedloom.engines._vmap_network import NotBatchable, Uneven
from fedloom.engines.local import LocalEngine

CPU_BUDGET = 1 << 27
"""Bytes that a batch of parties may take on a CPU; larger batches do not fit its caches and are slower."""
FEW = 8
"""The least number of parties that are faster batched on a CPU."""
GPU_SHARE = 0.5
"""The share of a GPU's free memory that a batch of parties may take."""


@dataclass
class _Group:
    """Parties that can be batched: of one class and config, with networks that differ only in weights.

    Attributes:
        parties: their ids; row g of `memory` is the state of the g-th.
        memory: (G, nbytes) uint8.
        each_bytes: the estimated bytes that one of them takes in a call.
        looped: calls that cannot be batched.
        uneven: methods that can be batched only for parties with equally many rows.
    """

    parties: list[int]
    memory: Tensor
    each_bytes: int
    looped: set[Any] = field(default_factory=set)
    uneven: set[str] = field(default_factory=set)


class BatchedEngine(LocalEngine):
    """Parties in this process, batched where possible.

    Args:
        parties: all parties.
        chunk_size: the largest number of parties in a batch; None for as many as fit into memory.
        everything: whether to batch parties that are faster in turn: on a CPU, few parties, and networks with
            convolutions.
    """

    def __init__(
        self,
        parties: Iterable[Party[Any]],
        *,
        chunk_size: int | None = None,
        everything: bool = True,
        seed: int = 0,
        faults: Faults | None = None,
    ) -> None:
        super().__init__(parties, seed=seed, faults=faults)
        self._chunk_size = chunk_size
        self._remarks: dict[str, None] = {}  # an ordered set
        self._group: dict[int, tuple[_Group, int]] = {}  # a party's group, and its row there
        for alike in _alike(self._parties.values()):
            self._unite(alike, everything)

    def _unite(self, parties: list[Party[Any]], everything: bool) -> None:
        first = parties[0]
        if first._network is None or len(parties) < 2:
            return
        if first.context.device == "cpu" and not everything:
            slow = convolutional(first.net.module)
            if slow or len(parties) < FEW:
                why = "convolutions are slower batched on a CPU" if slow else f"fewer than {FEW} are no faster batched"
                self._remarks[f"{len(parties)} parties in turn: {why}"] = None
                return
        parties = sorted(parties, key=_rows)  # parties with equally many rows become neighbours
        memory = torch.empty(len(parties), first.net.memory.numel(), dtype=torch.uint8, device=first.net.memory.device)
        for row, party in zip(memory, parties, strict=True):
            party.net.move(row)
        group = _Group([p.context.id for p in parties], memory, _footprint(first))
        self._group.update({i: (group, row) for row, i in enumerate(group.parties)})

    # -- the engine --------------------------------------------------------------------------------

    def _call(self, tasks: Sequence[Task]) -> list[Tree | Failure]:
        replies: dict[int, Tree | Failure] = {}
        opened = [arguments(task) for task in tasks]
        for wave in _waves(tasks):
            for batch in self._batches(wave, tasks, opened):
                replies.update(self._run_batch(batch, tasks, opened) if len(batch) > 1 else {})
            for n in wave:
                if n not in replies:
                    replies[n] = run(self._parties[tasks[n].party], tasks[n], opened[n])
        return [replies[n] for n in range(len(tasks))]

    def account(self) -> Account:
        """One process; the numbers of batched parties and groups, and the calls in turn. "local" without groups."""
        groups = {id(g) for g, _ in self._group.values()}
        together = f"{len(self._group)} of {len(self.ids)} parties together, in groups: {len(groups)}"
        remarks = (*([together] if groups else []), *self._remarks)
        device = next(iter(self._parties.values())).context.device
        return Account("batched" if groups else "local", device=device, remarks=remarks)

    # -- grouping ----------------------------------------------------------------------------------

    def _batches(
        self, wave: Sequence[int], tasks: Sequence[Task], opened: Sequence[Mapping[str, Tree]]
    ) -> Iterator[list[int]]:
        """Batches of a wave's tasks, by number, in the order of their group's rows."""
        alike: dict[Any, list[int]] = {}
        for n in wave:
            task = tasks[n]
            group, _ = self._group.get(task.party, (None, 0))
            if group is None or task.fault in ("dropout", "crash") or _kind(task) in group.looped:
                continue
            party = self._parties[task.party]
            own = {k: opened[n][k] for k in task.each}
            key = (
                id(group),
                task.method,
                tuple(task.shared),
                _signature(own),
                _signature(party.own_state()),
                _rows(party) if task.method in group.uneven else 0,
            )
            alike.setdefault(key, []).append(n)
        for numbers in alike.values():
            numbers.sort(key=lambda n: self._group[tasks[n].party][1])
            size = self._size(self._group[tasks[numbers[0]].party][0])
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

    def _run_batch(
        self, batch: list[int], tasks: Sequence[Task], opened: Sequence[Mapping[str, Tree]]
    ) -> dict[int, Tree | Failure]:
        """The replies of one batch; {} if its tasks must run in turn."""
        group, _ = self._group[tasks[batch[0]].party]
        method = tasks[batch[0]].method
        try:
            for n in batch:
                message.check_finite({k: opened[n][k] for k in tasks[n].each})
            message.check_finite(dict(tasks[batch[0]].shared))
        except MessageError:
            return {}  # in turn, each party refuses its own arguments
        try:
            replies = run_vmapped(
                group.memory,
                [self._group[tasks[n].party][1] for n in batch],
                [self._parties[tasks[n].party] for n in batch],
                method,
                tasks[batch[0]].shared,
                [{k: opened[n][k] for k in tasks[n].each} for n in batch],
            )
        except Uneven as error:
            if len({_rows(self._parties[tasks[n].party]) for n in batch}) == 1:
                return self._in_turn(group, batch, tasks, opened, error)
            group.uneven.add(method)
            return {}
        except torch.cuda.OutOfMemoryError:
            group.each_bytes *= 2
            torch.cuda.empty_cache()
            return {}
        except Exception as error:
            return self._in_turn(group, batch, tasks, opened, error)
        return {n: disturbed(reply, tasks[n].fault) for n, reply in zip(batch, replies, strict=True)}

    def _in_turn(
        self,
        group: _Group,
        batch: list[int],
        tasks: Sequence[Task],
        opened: Sequence[Mapping[str, Tree]],
        error: Exception,
    ) -> dict[int, Tree | Failure]:
        """Run a batch that failed in turn. If that succeeds, such calls are not batched again."""
        replies = {n: run(self._parties[tasks[n].party], tasks[n], opened[n]) for n in batch}
        if not any(isinstance(reply, Failure) and reply.trace for reply in replies.values()):
            why = str(error) if isinstance(error, NotBatchable) else f"{type(error).__name__}: {error}"
            group.looped.add(_kind(tasks[batch[0]]))
            self._remarks[f"{tasks[batch[0]].method} in turn: {' '.join(why.split())[:200]}"] = None
        return replies


def _waves(tasks: Sequence[Task]) -> list[list[int]]:
    """Numbers of tasks in waves without a repeated party, whose second task depends on its first."""
    waves: list[list[int]] = []
    seen: dict[int, int] = {}
    for n, task in enumerate(tasks):
        wave = seen[task.party] = seen.get(task.party, -1) + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(n)
    return waves


def convolutional(module: nn.Module) -> bool:
    """Whether a network has a convolution, which is slower batched on a CPU."""
    return any(isinstance(m, nn.modules.conv._ConvNd) for m in module.modules())


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


def _alike(parties: Iterable[Party[Any]]) -> list[list[Party[Any]]]:
    """The parties in groups that can be batched."""
    groups: dict[Any, list[Party[Any]]] = {}
    for p in parties:
        key = (type(p), id(p.cfg), p.context.device, p._network and _likeness(p._network))
        groups.setdefault(key, []).append(p)
    return list(groups.values())


def _likeness(network: Network) -> Any:
    """A key that is equal for networks that differ only in the values of their learned state."""
    modules = tuple((name, type(m), _settings(m)) for name, m in network.module.named_modules())
    frozen = tuple(
        (name, p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        for name, p in network.module.named_parameters()
        if not p.requires_grad
    )
    return network.fields, network.optimiser, modules, frozen


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """A module's own attributes: plain ones by value, others by identity."""
    plain = (bool, int, float, str, tuple, type(None))
    return tuple(
        (k, repr(v) if isinstance(v, plain) else id(v))
        for k, v in sorted(vars(module).items())
        if not k.startswith("_") and k != "training"
    )


def _rows(party: Party[Any]) -> int:
    return 0 if party.context.data is None else len(party.context.data)


def _footprint(party: Party[Any]) -> int:
    """An estimate of the bytes that a party takes in a call: state, its copy, gradients, and outputs of layers."""
    sizes: list[int] = []
    rows = party.context.data or (party.context.public and party.context.public.rows)
    if rows:
        leaves = [m for m in party.net.module.modules() if not list(m.children())]
        hooks = [m.register_forward_hook(lambda _, __, out: sizes.append(_nbytes(out))) for m in leaves]
        try:
            party.net.infer(rows.x(torch.zeros(1, dtype=torch.int64, device=rows.index.device)))
        finally:
            for hook in hooks:
                hook.remove()
    return 4 * party.net.memory.numel() + 2 * INFERENCE_ROWS * sum(sizes)


def _nbytes(out: Any) -> int:
    return out.nbytes if isinstance(out, Tensor) else 0
