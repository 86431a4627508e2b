"""Run a page's method once for many parties.

Each tensor of a party's state is one slice of a stacked tensor, and `torch.func.vmap` turns every
operation into one on all slices. State is written back only after the method has returned, so a run
that fails changes nothing.

`BatchedEngine` calls `run_vmapped` with the n parties of one batch. What differs between them goes
in stacked, with an axis of n in front, which vmap hides from the method:

    the network's state       views of the group's memory (G, nbytes): `VmapNetwork`
    other state, arguments    stacked copies of the parties' own trees
    numbers of the settings   (n,) each, chosen by the party's place `me`: `_differing`, `_at`
    rows, plans of batches    gathered by `me` when the method reads them: `VmapContext`

What comes out is stacked likewise, and is taken apart into replies, state and notes. Whatever
else a method reads must be equal for all; if it is not, NotBatchable is raised, and the engine runs
the method for each party in turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NoReturn

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from fedloom.core import message
from fedloom.core.aggregate import Aggregator
from fedloom.core.context import (
    Batches,
    ClientContext,
    PublicSet,
    Rows,
    Sample,
    epoch_plan,
    sample_plan,
)
from fedloom.core.engine import bound
from fedloom.core.message import Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.core.task import Classes, Number, Task
from fedloom.engines._vmap_network import NotBatchable, PaddedBatches, Uneven, VmapNetwork


def run_vmapped(
    memory: Tensor,
    rows: Sequence[int],
    parties: Sequence[Party[object]],
    method: str,
    shared: Mapping[str, Tree],
    each: Sequence[Mapping[str, Tree]],
    same: "SameContent | None" = None,
) -> list[Tree]:
    """Run `method` once for parties that differ only in weights, data, and the values of numbers;
    their replies.

    Args:
        memory: (G, nbytes) uint8, the networks' states of the group that the parties belong to.
        rows: the parties' places in `memory`, ascending.
        parties: in the order of `rows`.
        method: of the page.
        shared: arguments that all parties get.
        each: further arguments of each party, trees of one structure.
        same: remembers which tensors are equal, from one call to the next.

    Raises NotBatchable, or torch's own error if it has no batching rule; the state is then
    unchanged.
    """
    network = parties[0].net
    first, n = rows[0], len(rows)  # a slice avoids a copy if the rows are consecutive
    where = (
        slice(first, first + n)
        if rows[-1] - first == n - 1
        else torch.tensor(rows, device=memory.device)
    )
    block = memory[where]

    # The stacked inputs. Versions tell later whether the method wrote into the own state in place.
    own = [p.own_state() for p in parties]
    own_stacked, each_stacked = _stack(own), _stack(each)
    versions = [x._version for x in own_stacked]
    me = torch.arange(len(parties), device=memory.device)

    # What the stand-in for a party needs. BatchNorm lets rows of padding change the other rows.
    contexts = [p.context for p in parties]
    rows_alone = not any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.module.modules()
    )
    same = same or SameContent()
    numbers = _differing([p.cfg for p in parties], me.device)
    rates = _differing([p.net.optimizer for p in parties], me.device)

    # vmap returns tensors alone: `work` leaves the structure of its results here instead.
    trees: dict[str, Any] = {}
    changed = False

    def work(
        state: list[Tensor], own_one: list[Tensor], each_one: list[Tensor], me_one: Tensor
    ) -> list[Tensor]:
        """Call the method as if for one party: vmap calls this once, with tensors that stand for
        one slice each.
        """
        nonlocal changed

        # `notes` takes the diagnostics that the method records by `self.note`. Settings and rates
        # in which runs differ are tensors () in place of numbers. The type Party[object] does
        # not tell that its cfg is a MethodConfig, hence isinstance; float32 is the type of weights.
        notes: dict[str, Tensor | float] = {}
        cfg, optimizer = parties[0].cfg, network.optimizer
        if numbers and isinstance(cfg, MethodConfig):
            cfg = cfg.model_copy(update={k: _at(x, me_one).float() for k, x in numbers.items()})
        if rates:
            optimizer = replace(optimizer, **{k: _at(x, me_one) for k, x in rates.items()})  # type: ignore[type-var]

        # a party of the same class, not set up again, as its state is given
        stacked = VmapNetwork(
            network, dict(zip(network.fields, state, strict=True)), notes, optimizer
        )
        before = _refill(own[0], own_one)
        party = object.__new__(type(parties[0]))
        vars(party).update(
            cfg=cfg,
            context=VmapContext(contexts, me_one, same, rows_alone=rows_alone),
            _network=stacked,
            _notes=notes,
            **before,
        )
        # `bound` also finds evaluations, which are no methods of a page, and refuses private names
        reply = bound(party, method)(**shared, **_refill(each[0], each_one))

        # Own state that was assigned anew; all of it if any was changed in place. State that is not
        # among the results stays the party's as it is.
        in_place = [x._version for x in own_stacked] != versions
        changed_own = {k: v for k, v in party.own_state().items() if in_place or v is not before[k]}
        trees.update(reply=reply, own=changed_own, notes=notes)
        changed = stacked.changed
        # `me` first, so that there is a tensor to return of a method without a reply, too
        return [me_one, *_tensors(trees), *(stacked.fields.values() if changed else ())]

    state = [f.view(block) for f in network.fields]
    _, *out = vmap(work)(state, own_stacked, each_stacked, me)

    # Copy the results before memory is written: they may be views of it, such as sent weights.
    results = [x.clone() for x in out[: len(out) - (len(network.fields) if changed else 0)]]
    # The fields follow the results; there are none if weights are unchanged, hence no `strict`.
    for f, x in zip(network.fields, out[len(results) :], strict=False):
        f.view(memory)[where] = x

    # Give each party its slices.
    replies = []
    for i, party in enumerate(parties):
        party.net.forget()  # a cached pass is of weights that may have changed
        result = _refill(trees, [x[i] for x in results])
        for name, value in result["own"].items():
            setattr(party, name, value)
        party._notes.update(result["notes"])
        replies.append(result["reply"])
    return replies


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for _, leaf in message.leaves(tree) if isinstance(leaf, Tensor)]


def _stack(trees: Sequence[Any]) -> list[Tensor]:
    """The tensors of n trees of one structure in tree order, each stacked to (n, …)."""
    return [torch.stack(same) for same in zip(*map(_tensors, trees), strict=True)]


def _refill(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """The tree with its tensors replaced, in tree order."""
    left = iter(tensors)
    return message.map_tensors(lambda _: next(left), tree)


def _differing(objects: Sequence[Any], device: torch.device) -> dict[str, Tensor]:
    """The numbers (n,) float64 in which configs or optimizers of several runs differ, by name. Only
    floats may differ: the engine groups parties by all else.
    """
    first = objects[0]
    if all(o is first for o in objects):
        return {}
    names = (
        type(first).model_fields
        if isinstance(first, BaseModel)
        else [f.name for f in fields(first)]
    )
    values = {name: [getattr(o, name) for o in objects] for name in names}
    return {
        name: torch.tensor(each, dtype=torch.float64, device=device)
        for name, each in values.items()
        if isinstance(each[0], float) and any(v != each[0] for v in each)
    }


def _task(tasks: Sequence[Task], me: Tensor) -> Task:
    """The task of all parties, with each one's own weights of classes."""
    weights = [task.weights for task in tasks if isinstance(task, Classes)]
    if all(w is None for w in weights):
        return tasks[0]
    ones = torch.ones(tasks[0].width, device=me.device)
    return Classes(
        tasks[0].width, _at(torch.stack([ones if w is None else w for w in weights]), me)
    )


class SameContent:
    """Whether two tensors have the same content, remembered: runs read the same data set into
    several pools.
    """

    def __init__(self) -> None:
        # it keeps the tensors of its keys
        self._known: dict[tuple[int, int], tuple[bool, Tensor, Tensor]] = {}

    def __call__(self, a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None or a is b:
            return a is b
        key = (id(a), id(b))
        if key not in self._known:
            alike = a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
            self._known[key] = alike and bool(torch.equal(a, b)), a, b
        return self._known[key][0]

    def pool(self, rows: Sequence[Rows]) -> bool:
        """Whether all these rows are of one pool, with the same labels and scaling."""
        first = rows[0]
        return all(
            self(r.pool, first.pool)
            and self(r.labels, first.labels)
            and self(r.shift, first.shift)
            and self(r.scale, first.scale)
            for r in rows
        )


class VmapContext:
    """Replaces `ClientContext` inside `vmap`: the contexts of a group, of which `me` (), batched,
    is the party's. `rows_alone` tells that the network's output for a row does not depend on other
    rows.
    """

    seed: int
    parties: int
    classes: int
    device: str
    aggregator: Aggregator
    task: Task
    target: Number | None

    def __init__(
        self, contexts: Sequence[ClientContext], me: Tensor, same: SameContent, *, rows_alone: bool
    ) -> None:
        self._contexts, self._me, self._same, self._rows_alone = contexts, me, same, rows_alone
        for name in ("seed", "parties", "classes", "device", "aggregator"):
            if len({getattr(s, name) for s in contexts}) == 1:
                setattr(self, name, getattr(contexts[0], name))
        # no loss depends on the scale of a number
        if len({(s.classes, s.target is None) for s in contexts}) == 1:
            self.task, self.target = _task([s.task for s in contexts], me), contexts[0].target

    def batches(self, t: int, *, steps: int, size: int) -> Batches | PaddedBatches:
        """See `ClientContext.batches`."""
        return self._gather(
            [sample_plan(s.stream("batches", t), len(s.rows), steps, size) for s in self._contexts]
        )

    def epochs(self, t: int, *, epochs: int, size: int) -> Batches | PaddedBatches:
        """See `ClientContext.epochs`."""
        return self._gather(
            [epoch_plan(s.stream("batches", t), len(s.rows), epochs, size) for s in self._contexts]
        )

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """See `ClientContext.sample_batch`."""
        sizes = {min(size, len(s.rows)) for s in self._contexts}
        if len(sizes) > 1:
            raise Uneven("it samples a batch, and the parties have different numbers of rows")
        batch = self._gather(
            [sample_plan(s.stream("batches", t), len(s.rows), 1, *sizes) for s in self._contexts]
        )
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
            raise Uneven(
                f"it reads the {which} half, and the parties have different numbers of rows"
            )
        batch = self._gather([torch.cat([p, p[:1].expand(most - len(p))])[None] for p in plans])
        weights = [torch.full((len(p),), 1 / len(p)) for p in plans]
        weight = torch.stack([F.pad(w, (0, most - len(w))) for w in weights]).to(self.device)
        return Sample(batch.x[0], batch.y[0], _at(weight, self._me))

    def _gather(self, plans: Sequence[Tensor]) -> Batches | PaddedBatches:
        rows = [s.rows for s in self._contexts]
        steps = [len(p) for p in plans]
        most = max(steps)
        even = [
            torch.cat([p, p[:1].expand(most - len(p), -1)]) if len(p) < most else p for p in plans
        ]
        first = rows[0]
        if self._same.pool(rows):
            device = first.index.device
            where = _at(
                torch.stack([r.index[p.to(device)] for r, p in zip(rows, even, strict=True)]),
                self._me,
            )  # (T, B)
            batches = Rows(
                first.pool, first.labels, where.flatten(), first.shift, first.scale
            ).batches(torch.arange(where.numel(), device=device).view(where.shape))
            x, y = batches.x, batches.y
        else:
            gathered = [r.batches(p) for r, p in zip(rows, even, strict=True)]
            x, y = (
                _at(torch.stack(parts), self._me)
                for parts in ([b.x for b in gathered], [b.y for b in gathered])
            )
        if min(steps) == most:
            return Batches(x, y)
        # (n, T)
        takes = torch.tensor([[i < n for i in range(most)] for n in steps], device=x.device)
        return PaddedBatches(x, y, _at(takes, self._me), [i < min(steps) for i in range(most)])

    @property
    def rows(self) -> Rows:
        """The own rows, if all parties have equally many."""
        return _one([s.rows for s in self._contexts], self._me, self._same, "rows")

    @property
    def row_count(self) -> Tensor:
        """The number of own rows, () int64."""
        return _at(
            torch.tensor([len(s.rows) for s in self._contexts], device=self.device), self._me
        )

    @property
    def shown_classes(self) -> Tensor:
        """See `ClientContext.shown_classes`."""
        return _at(torch.stack([s.shown_classes for s in self._contexts]), self._me)

    @property
    def public(self) -> "PublicSet | StackedPublicSet | None":
        """The public set that all parties share, or the one of the party's run."""
        sets = [s.public for s in self._contexts]
        if all(public is sets[0] for public in sets):
            return sets[0]
        return StackedPublicSet([s for s in sets if s is not None], self._me, self._same)

    @property
    def tests(self) -> Mapping[str, Rows]:
        """The test rows by name, if the parties share them or have equally many."""
        every = {on: [s.tests[on] for s in self._contexts] for on in self._contexts[0].tests}
        return _Tests(every, self._me, self._same)

    def __getattr__(self, name: str) -> NoReturn:
        raise NotBatchable(f"it reads self.context.{name}, which differs between parties")


class _Tests(dict[str, Any]):
    """Test rows by name, selected for the party when they are read."""

    def __init__(self, every: Mapping[str, Sequence[Rows]], me: Tensor, same: SameContent) -> None:
        super().__init__(every)
        self._me, self._same = me, same

    def __getitem__(self, on: str) -> Rows:
        return _one(super().__getitem__(on), self._me, self._same, f"test rows {on!r}")


class StackedPublicSet:
    """The public sets of several runs, of which the party sees its own run's. See `PublicSet`."""

    def __init__(self, sets: Sequence[PublicSet], me: Tensor, same: SameContent) -> None:
        self._sets, self._same = {id(s): s for s in sets}, same
        order = {key: n for n, key in enumerate(self._sets)}
        self._mine = _at(torch.tensor([order[id(s)] for s in sets], device=me.device), me)

    def batches(self, t: int, steps: int, size: int) -> "_PublicBatches":
        """See `PublicSet.batches`."""
        return _PublicBatches([s.batches(t, steps, size) for s in self._sets.values()], self._mine)

    def plan(self, t: int, steps: int, size: int) -> Tensor:
        """See `PublicSet.plan`."""
        plans = [s.plan(t, steps, size) for s in self._sets.values()]
        return _at(torch.stack(plans).to(self._mine.device), self._mine)

    @property
    def rows(self) -> Rows:
        """The rows, if the sets have equally many."""
        return _one([s.rows for s in self._sets.values()], self._mine, self._same, "public rows")

    def __getattr__(self, name: str) -> NoReturn:
        raise NotBatchable(f"it reads self.public_set.{name}, which differs between runs")


class _PublicBatches(Sequence[Tensor]):
    """The public batches (B, ...) of the party's run, selected when they are read."""

    def __init__(self, by_set: Sequence[Sequence[Tensor]], mine: Tensor) -> None:
        self._by_set, self._mine = by_set, mine

    def __len__(self) -> int:
        return len(self._by_set[0])

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return tuple(self[k] for k in range(len(self))[i])
        return _at(torch.stack([batches[i] for batches in self._by_set]), self._mine)


def _at(values: Tensor, me: Tensor) -> Tensor:
    """`values[me]`, for which PyTorch before 2.13 reads the number `me` (), as vmap
    does not allow.
    """
    return values.index_select(0, me.view(1))[0]


def _one(every: Sequence[Rows], me: Tensor, same: SameContent, noun: str) -> Rows:
    """The rows of party `me` ()."""
    first = every[0]
    if all(r is first for r in every):
        return first
    if len({len(r) for r in every}) > 1:
        raise Uneven(f"it reads the parties' {noun}, of which they have different numbers")
    if any(r.present is not None for r in every):
        raise Uneven(f"it reads the parties' {noun}, of which they lack different ones")
    distinct = {id(r): r for r in every}
    order = {key: n for n, key in enumerate(distinct)}
    mine = _at(torch.tensor([order[id(r)] for r in every], device=me.device), me)

    def pick(tensors: list[Tensor]) -> Tensor:
        return _at(torch.stack(tensors), mine)

    rows = list(distinct.values())
    if same.pool(rows):
        return replace(first, index=pick([r.index for r in rows]))
    labels = (
        None
        if first.labels is None
        else pick([r.y(torch.arange(len(r), device=r.index.device)) for r in rows])
    )
    pool, index = pick([r.pool[r.index] for r in rows]), torch.arange(len(first), device=me.device)
    return Rows(pool, labels, index, pick([r.shift for r in rows]), pick([r.scale for r in rows]))
