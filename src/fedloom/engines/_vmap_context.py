"""Run a page's method once for many parties.

Each tensor of a party's state is one slice of a stacked tensor, and `torch.func.vmap` turns every operation into one on
all slices. State is written back only after the method has returned, so a run that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedloom.core import message
from fedloom.core.context import Batches, ClientContext, PublicSet, Rows, Sample, epoch_plan, sample_plan
from fedloom.core.engine import bound
from fedloom.core.message import Tree
from fedloom.core.party import Party
from fedloom.engines._vmap_network import NotBatchable, PaddedBatches, Uneven, VmapNetwork


def run_vmapped(
    memory: Tensor,
    rows: Sequence[int],
    parties: Sequence[Party[Any]],
    method: str,
    shared: Mapping[str, Tree],
    each: Sequence[Mapping[str, Tree]],
) -> list[Tree]:
    """Run `method` once for all these parties; their replies.

    Args:
        memory: (G, nbytes) uint8, the states of their group.
        rows: the sorted rows of these parties in `memory`.
        parties: parties that differ only in weights, data, and the content of their tensors.
        shared: arguments for all parties.
        each: further arguments of each party.

    Raises:
        NotBatchable, or torch's own error if it has no batching rule. The state is unchanged.
    """
    network = parties[0].net
    first, n = rows[0], len(rows)  # a slice avoids a copy if the rows are consecutive
    where = slice(first, first + n) if rows[-1] - first == n - 1 else torch.tensor(rows, device=memory.device)
    block = memory[where]
    own = [p.own_state() for p in parties]
    own_in, each_in = _stack(own), _stack(each)
    versions = [x._version for x in own_in]
    contexts = [p.context for p in parties]
    rows_alone = not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.module.modules())
    me = torch.arange(len(parties), device=memory.device)
    trees: dict[str, Any] = {}
    changed = False

    def work(state: list[Tensor], own_: list[Tensor], each_: list[Tensor], me_: Tensor) -> list[Tensor]:
        nonlocal changed
        notes: dict[str, Tensor | float] = {}
        stacked = VmapNetwork(network, dict(zip(network.fields, state, strict=True)), notes)
        before = _refill(own[0], own_)
        party = object.__new__(type(parties[0]))
        vars(party).update(
            cfg=parties[0].cfg,
            context=VmapContext(contexts, me_, rows_alone=rows_alone),
            _network=stacked,
            _notes=notes,
            **before,
        )
        reply = bound(party, method)(**shared, **_refill(each[0], each_))
        in_place = [x._version for x in own_in] != versions
        changed_own = {k: v for k, v in party.own_state().items() if in_place or v is not before[k]}
        trees.update(reply=reply, own=changed_own, notes=notes)
        changed = stacked.changed
        return [me_, *_tensors(trees), *(stacked.fields.values() if changed else ())]

    state = [f.view(block) for f in network.fields]
    _, *out = vmap(work)(state, own_in, each_in, me)
    results = [x.clone() for x in out[: len(out) - (len(network.fields) if changed else 0)]]
    for f, x in zip(network.fields, out[len(results) :], strict=False):
        f.view(memory)[where] = x
    replies = []
    for i, party in enumerate(parties):
        party.net.forget()
        result = _refill(trees, [x[i] for x in results])
        for name, value in result["own"].items():
            setattr(party, name, value)
        party._notes.update(result["notes"])
        replies.append(result["reply"])
    return replies


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in message.leaves(tree) if isinstance(leaf, Tensor)]


def _stack(trees: Sequence[Any]) -> list[Tensor]:
    """The tensors of trees of one structure, stacked."""
    return [torch.stack(same) for same in zip(*map(_tensors, trees), strict=True)]


def _refill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with its tensors replaced."""
    left = iter(tensors)
    return message.map_tensors(lambda _: next(left), tree)


class VmapContext:
    """Replaces `ClientContext` inside `vmap`: the contexts of a group.

    Args:
        contexts: the parties' contexts, in the order of the stacked state.
        me: () int64, batched: the index of the party.
        rows_alone: whether the network's output for a row does not depend on other rows.
    """

    def __init__(self, contexts: Sequence[ClientContext], me: Tensor, *, rows_alone: bool) -> None:
        first = contexts[0]
        self._contexts, self._me, self._rows_alone = contexts, me, rows_alone
        self.seed, self.parties, self.classes, self.device = first.seed, first.parties, first.classes, first.device

    def batches(self, t: int, *, steps: int, size: int) -> Batches | PaddedBatches:
        """See `ClientContext.batches`."""
        return self._gather([sample_plan(s.stream("batches", t), len(s.rows), steps, size) for s in self._contexts])

    def epochs(self, t: int, *, epochs: int, size: int) -> Batches | PaddedBatches:
        """See `ClientContext.epochs`."""
        return self._gather([epoch_plan(s.stream("batches", t), len(s.rows), epochs, size) for s in self._contexts])

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """See `ClientContext.sample_batch`."""
        sizes = {min(size, len(s.rows)) for s in self._contexts}
        if len(sizes) > 1:
            raise Uneven("it samples a batch, and the parties have different numbers of rows")
        batch = self._gather([sample_plan(s.stream("batches", t), len(s.rows), 1, *sizes) for s in self._contexts])
        return batch.x[0], batch.y[0]

    @property
    def support(self) -> Sample:
        """See `ClientContext.support`."""
        return self._half("support")

    @property
    def query(self) -> Sample:
        """See `ClientContext.query`."""
        return self._half("query")

    def _half(self, which: Literal["support", "query"]) -> Sample:
        """Each party's half, padded to the longest with rows of weight 0."""
        plans = [s.half(which) for s in self._contexts]
        most = max(map(len, plans))
        if not self._rows_alone and any(len(p) < most for p in plans):
            raise Uneven(f"it reads the {which} half, and the parties have different numbers of rows")
        batch = self._gather([torch.cat([p, p[:1].expand(most - len(p))])[None] for p in plans])
        weights = [torch.full((len(p),), 1 / len(p)) for p in plans]
        weight = torch.stack([F.pad(w, (0, most - len(w))) for w in weights]).to(self.device)
        return Sample(batch.x[0], batch.y[0], weight[self._me])

    def _gather(self, plans: Sequence[Tensor]) -> Batches | PaddedBatches:
        rows = [s.rows for s in self._contexts]
        steps = [len(p) for p in plans]
        most = max(steps)
        even = [torch.cat([p, p[:1].expand(most - len(p), -1)]) if len(p) < most else p for p in plans]
        first = rows[0]
        if all(r.pool is first.pool and r.shift is first.shift and r.scale is first.scale for r in rows):
            device = first.index.device
            where = torch.stack([r.index[p.to(device)] for r, p in zip(rows, even, strict=True)])[self._me]  # (T, B)
            batches = Rows(first.pool, first.labels, where.flatten(), first.shift, first.scale).batches(
                torch.arange(where.numel(), device=device).view(where.shape)
            )
            x, y = batches.x, batches.y
        else:
            gathered = [r.batches(p) for r, p in zip(rows, even, strict=True)]
            x, y = torch.stack([b.x for b in gathered])[self._me], torch.stack([b.y for b in gathered])[self._me]
        if min(steps) == most:
            return Batches(x, y)
        takes = torch.tensor([[i < n for i in range(most)] for n in steps], device=x.device)  # (n, T)
        return PaddedBatches(x, y, takes[self._me], [i < min(steps) for i in range(most)])

    @property
    def rows(self) -> Rows:
        """The own rows, if all parties have equally many."""
        return _one([s.rows for s in self._contexts], self._me, "rows")

    @property
    def row_count(self) -> Tensor:
        """The number of own rows, () int64."""
        return torch.tensor([len(s.rows) for s in self._contexts], device=self.device)[self._me]

    @property
    def public(self) -> PublicSet | None:
        """The public set that all parties share."""
        first = self._contexts[0].public
        if any(s.public is not first for s in self._contexts):
            raise NotBatchable("the parties' public sets differ")
        return first

    @property
    def tests(self) -> Mapping[str, Rows]:
        """The test rows by name, if the parties share them or have equally many."""
        return _Tests({on: [s.tests[on] for s in self._contexts] for on in self._contexts[0].tests}, self._me)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotBatchable(f"it reads self.context.{name}, which differs between parties")


class _Tests(dict[str, Any]):
    """Test rows by name, selected for the party when they are read."""

    def __init__(self, every: Mapping[str, Sequence[Rows]], me: Tensor) -> None:
        super().__init__(every)
        self._me = me

    def __getitem__(self, on: str) -> Rows:
        return _one(super().__getitem__(on), self._me, f"test rows {on!r}")


def _one(every: Sequence[Rows], me: Tensor, noun: str) -> Rows:
    """The rows of party `me` ()."""
    first = every[0]
    if all(r is first for r in every):
        return first
    if len({len(r) for r in every}) > 1:
        raise Uneven(f"it reads the parties' {noun}, of which they have different numbers")
    if any(r.pool is not first.pool for r in every):
        raise NotBatchable(f"it reads the parties' {noun}, which are in different pools")
    return replace(first, index=torch.stack([r.index for r in every])[me])
