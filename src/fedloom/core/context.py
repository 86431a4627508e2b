"""A party's private resources: its rows, its network, its seed. They are never transmitted.

Row numbers are drawn from (seed, purpose, round, party), so methods that are compared on one seed
see the same batches on every engine.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.core.black_box import BlackBoxModel
from fedloom.core.errors import MethodError
from fedloom.core.local import OWN, LocalTraining
from fedloom.core.message import Tree
from fedloom.core.rng import hidden_stream, stream
from fedloom.core.task import Classes, Number, Task


@dataclass(frozen=True, eq=False)
class Rows:
    """A subset of a pool of rows that many parties share in memory.

    Attributes:
        pool: (M, ...) uint8 or float32 inputs as stored.
        labels: (M,) int64 classes or float32 standardized numbers; None if the rows have no labels
            here.
        index: (n,) int64, the numbers of these rows in the pool.
        shift, scale: a network's input is (pool - shift) / scale, float32; both broadcast over a
            row.
        present: (n,) bool, in a vertical setting: whether the party has its columns of each row;
            None if it has all. The inputs of a row that it lacks are blank.
    """

    pool: Tensor
    labels: Tensor | None
    index: Tensor
    shift: Tensor
    scale: Tensor
    present: Tensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def x(self, which: Tensor) -> Tensor:
        """Inputs (B, ...) float32 of rows `which` (B,), numbered within this subset."""
        raw = self.pool.index_select(0, self.index[which])
        if not raw.is_floating_point():
            raw = raw.float()  # pixels, in less time than a difference of two dtypes takes
        return raw.sub(self.shift).div_(self.scale)

    def y(self, which: Tensor) -> Tensor:
        """Labels (B,) of rows `which` (B,). Raises MethodError if the rows have no labels here."""
        if self.labels is None:
            raise MethodError(
                "these rows have no labels here; read labels only at the party that holds them"
            )
        return self.labels[self.index[which]]

    def inputs(self, plan: Tensor) -> Tensor:
        """Inputs (T, B, ...) of a plan (T, B) of row numbers, without labels."""
        x = self.x(plan.to(self.index.device).flatten())
        return x.view(*plan.shape, *x.shape[1:])

    def batches(self, plan: Tensor) -> "Batches":
        """The batches of a plan (T, B) of row numbers."""
        return Batches(self.inputs(plan), self.y(plan.to(self.index.device)))

    @cached_property
    def every(self) -> Tensor:
        """All inputs (n, ...), cached: for small sets that are read often."""
        return self.x(torch.arange(len(self)))


@dataclass(frozen=True, eq=False)
class Batches:
    """T batches of B rows: x (T, B, ...), y (T, B)."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.x, self.y, strict=True)


class Sample(NamedTuple):
    """A set of rows: x (n, ...), y (n,), and each row's weight in a mean, `weight` (n,) float32.

    The batched engine pads shorter samples with rows of weight 0.
    """

    x: Tensor
    y: Tensor
    weight: Tensor


Kept = TypeVar("Kept", Batches, Sample, Tensor)


def sample_plan(rng: np.random.Generator, rows: int, steps: int, size: int) -> Tensor:
    """`steps` independent batches (T, B); rows repeat within a batch only if `rows < size`."""
    draws = [rng.choice(rows, size, replace=rows < size, shuffle=False) for _ in range(steps)]
    return torch.from_numpy(np.array(draws, dtype=np.int64).reshape(steps, size))


def epoch_plan(rng: np.random.Generator, rows: int, epochs: int, size: int) -> Tensor:
    """`epochs` shuffled epochs as full batches (T, B); the last batch of an epoch is filled with
    its first rows.
    """
    steps = -(-rows // size)
    passes = [np.resize(rng.permutation(rows), steps * size) for _ in range(epochs)]
    return torch.from_numpy(np.concatenate(passes).reshape(-1, size))


@lru_cache(maxsize=8)
def aligned_plan(seed: int, number: int, rows: int, size: int) -> Tensor:
    """Epoch `number` over the aligned rows as full batches (T, B), the same rows in each batch at
    every party.
    """
    return epoch_plan(stream(seed, "aligned batches", number), rows, 1, size)


class BatchCache:
    """The most recently gathered batches of this process. A peer that answers several others
    rereads the same batch.

    Args:
        most: capacity in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._held: dict[Any, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: object, key: Any, make: Callable[[], Kept]) -> Kept:
        """The cached value for this owner and key, or else the value of `make`. It must not be
        changed in place.
        """
        key = (id(owner), key)
        cached_for, value = self._held.pop(key, (None, None))
        if value is not None:
            self._bytes -= _nbytes(value)
        if value is None or cached_for is None or cached_for() is not owner:  # ids are reused
            value = make()
        self._held[key] = (weakref.ref(owner), value)
        self._bytes += _nbytes(value)
        while self._bytes > self._most:
            _, oldest = self._held.pop(next(iter(self._held)))
            self._bytes -= _nbytes(oldest)
        result: Kept = value
        return result


def _nbytes(kept: Batches | Sample | Tensor) -> int:
    return (kept if isinstance(kept, Tensor) else kept.x).nbytes


BATCH_CACHE = BatchCache(8 << 20)


class PublicSet:
    """Unlabeled rows that every party holds in the same order.

    The parties of a process share one object, so each batch is gathered once.

    Attributes:
        digest: SHA-256 of the content in order; parties with different digests are refused.
    """

    def __init__(self, rows: Rows, seed: int, digest: str) -> None:
        self.rows, self.seed, self.digest = rows, seed, digest
        self._last: tuple[tuple[int, int, int], tuple[Tensor, ...]] | None = None

    def batches(self, t: int, steps: int, size: int) -> tuple[Tensor, ...]:
        """Round t's public batches (B, ...), the same at every party: g(seed, t, i) in Algorithm 1
        of FedAL.
        """
        key = (t, steps, size)
        if self._last is None or self._last[0] != key:
            self._last = (key, self.rows.inputs(self.plan(t, steps, size)).unbind())
        return self._last[1]

    def plan(self, t: int, steps: int, size: int) -> Tensor:
        """The row numbers (T, B) of round t's public batches."""
        return sample_plan(stream(self.seed, "public batches", t), len(self.rows), steps, size)


@dataclass(frozen=True, eq=False)
class ClientContext:
    """The private resources of one party.

    Example:
        >>> from functools import partial
        >>> x, y = torch.randn(20, 3), torch.arange(20) % 2
        >>> rows = Rows(x, y, torch.arange(20), torch.zeros(1), torch.ones(1))
        >>> net = partial(nn.Linear, 3, 2)
        >>> context = ClientContext(id=0, classes=2, data=rows, aligned=10, network=net, pretrained=net)
        >>> context.batches(0, steps=4, size=8).x.shape, context.epochs(0, epochs=1, size=8).x.shape
        (torch.Size([4, 8, 3]), torch.Size([3, 8, 3]))
        >>> context.sample_batch(0, size=5)[1].shape, context.row_count, context.shown_classes
        (torch.Size([5]), tensor(20), tensor([True, True]))
        >>> len(context.support.y), len(context.query.y), context.half("query").shape
        (10, 10, torch.Size([10]))
        >>> context.unlabeled(0, steps=2, size=4).shape, context.aligned_batch(0, 0, size=4).shape
        (torch.Size([2, 4, 3]), torch.Size([4, 3]))
        >>> context.build().weight.requires_grad, context.teacher().weight.requires_grad  # trained, and frozen
        (True, False)
        >>> first, again = (context.stream("dropout", 0).integers(100) for _ in range(2))  # by purpose, not by order
        >>> bool(first == again), len(context.rows), context.noise({"x": x}, "noise").normal() != 0
        (True, 20, True)
        >>> context.task
        Classes(width=2, weights=None)

    Attributes:
        id: its number, unique in the federation.
        seed: the run's seed, from which all random streams derive.
        parties: the number of parties in the same role.
        classes: K; for a number to predict the width of a network's outputs.
        target: the scale of a number to predict; None for classes.
        neighbours: sorted ids of the peers that it may exchange messages with, present or not.
        data: its own rows, if any.
        aligned: in a vertical setting, the number of its first rows that are aligned.
        public: the public set, if the method needs one.
        network: builds its network, the same at each call.
        black_box: its model with `fit` and `predict_proba`, if it has one instead of a network.
        group: with architecture groups, the number of its group.
        groups: with architecture groups, at the server: the group of each client.
        group_networks: with architecture groups, at the server: builds each group's initial
            network.
        pretrained: at the server only: loads its pretrained model.
        encoder: builds the pretrained model's architecture with other weights: at the server, and
            at clients of a method that sends them its weights.
        columns: names of the columns of raw rows; empty if the method needs none.
        words: for each of these columns, the words of a category, whose values are 0, 1, …; () for
            numbers.
        offset: what was subtracted from each of these columns, so that float32 tells its numbers
            apart; () for 0.
        class_names: the words of the K classes, if the method reads raw rows; () for a number.
        label: the name of the label, if it is known.
        owners: the names of the parties, for tables; () if they are not known.
        left_out: rows that no method reads, by the reason: of its own rows at a node, of all rows
            at the server of a simulation.
        tests: test rows by name. Methods do not read them.
        device: the device of its tensors.
        secret: a secret key for `noise`, if the party has one.
        aggregator: how the run takes means: for peers, which take their own.
        local: how the run trains networks of its parties.
        privacy_budget: charges private releases to the budget of its rows, if they have one: see
            `fedloom.protect.noise.charge`.
        min_class_rows: the fewest rows of a class whose mean may leave the party; a smaller class
            is sent as absent.
    """  # noqa: E501

    id: int
    seed: int = 0
    parties: int = 1
    classes: int = 0
    target: Number | None = None
    neighbours: Sequence[int] = ()
    data: Rows | None = None
    aligned: int = 0
    public: PublicSet | None = None
    network: Callable[[], nn.Module] | None = None
    black_box: BlackBoxModel | None = None
    group: int = 0
    groups: Sequence[int] = ()
    group_networks: Sequence[Callable[[], nn.Module]] = ()
    pretrained: Callable[[], nn.Module] | None = None
    encoder: Callable[[], nn.Module] | None = None
    columns: Sequence[str] = ()
    words: Sequence[Sequence[str]] = ()
    offset: Sequence[float] = ()
    class_names: Sequence[str] = ()
    label: str = ""
    owners: Sequence[str] = ()
    left_out: Mapping[str, int] = field(default_factory=dict)
    tests: Mapping[str, Rows] = field(default_factory=dict)
    device: str = "cpu"
    secret: int | None = None
    aggregator: Aggregator = MEAN
    local: LocalTraining = OWN
    privacy_budget: Callable[..., None] | None = None
    min_class_rows: int = 1

    @cached_property
    def task(self) -> Task:
        """What the federation predicts, with the weights of classes in this party's loss."""
        if self.target is not None:
            return self.target
        if self.local.class_weights is None or self.data is None or self.data.labels is None:
            return Classes(self.classes)
        labels = self.data.y(torch.arange(self.aligned or len(self.data), device=self.device))
        return Classes(self.classes, self.local.weights(labels, self.classes))

    @property
    def rows(self) -> Rows:
        """Its own rows. Raises MethodError if it has none."""
        if self.data is None:
            raise MethodError(f"party {self.id} has no rows of its own; do not read its data")
        return self.data

    @property
    def row_count(self) -> Tensor:
        """The number of own rows, () int64."""
        return torch.tensor(len(self.rows), device=self.device)

    @property
    def shown_classes(self) -> Tensor:
        """(K,) bool: the classes with so many own rows, 1 or `min_class_rows`, that their mean may
        leave the party.
        """
        y = self.rows.y(torch.arange(len(self.rows), device=self.device))
        return torch.bincount(y, minlength=self.classes) >= max(1, self.min_class_rows)

    def stream(self, purpose: str, *keys: int) -> np.random.Generator:
        """A generator for this party and purpose."""
        return stream(self.seed, purpose, self.id, *keys)

    def noise(self, on: Tree, purpose: str, *keys: int) -> np.random.Generator:
        """A generator for noise that hides `on` (tensors and the noise scale). Anybody who knows
        the run's seed could subtract noise from `stream`. With a `secret`, the noise depends on the
        secret, the purpose and `on` only, so repeating a request in another round or run yields the
        same noise.
        """
        if self.secret is None:
            return self.stream(purpose, *keys)
        return hidden_stream(self.secret, purpose, message.digest(on).encode())

    def batches(self, t: int, *, steps: int, size: int) -> Batches:
        """Round t's `steps` independent batches of `size` own rows."""
        rows, rng = self.rows, partial(self.stream, "batches", t)
        return BATCH_CACHE.get(
            self,
            ("batches", t, steps, size),
            lambda: rows.batches(sample_plan(rng(), len(rows), steps, size)),
        )

    def epochs(self, t: int, *, epochs: int, size: int) -> Batches:
        """Round t's shuffled epochs over the own rows, in full batches of `size`."""
        rows, rng = self.rows, partial(self.stream, "batches", t)
        return BATCH_CACHE.get(
            self,
            ("epochs", t, epochs, size),
            lambda: rows.batches(epoch_plan(rng(), len(rows), epochs, size)),
        )

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """One batch of round t: x (b, ...), y (b,) of b = `size` distinct own rows, or of all if
        there are fewer.
        """
        batch = self.batches(t, steps=1, size=min(size, len(self.rows)))
        return batch.x[0], batch.y[0]

    @property
    def support(self) -> Sample:
        """A random half of the own rows, for adaptation; the larger half if their number is odd."""
        return BATCH_CACHE.get(self, "support", lambda: self._sample("support"))

    @property
    def query(self) -> Sample:
        """The other half, for judging the adapted model."""
        return BATCH_CACHE.get(self, "query", lambda: self._sample("query"))

    def half(self, which: Literal["support", "query"]) -> Tensor:
        """The row numbers (n,) of a half. Raises MethodError if the party has fewer
        than two rows.
        """

        def draw() -> Tensor:
            count = len(self.rows)
            if count < 2:
                raise MethodError(
                    f"party {self.id} has {count} row; a support and a query half need at least 2"
                )
            order, first = self.stream("halves").permutation(count), -(-count // 2)
            return torch.from_numpy(np.sort(order[:first] if which == "support" else order[first:]))

        return BATCH_CACHE.get(self, ("half", which), draw)

    def _sample(self, which: Literal["support", "query"]) -> Sample:
        numbers = self.half(which).to(self.device)
        x = self.rows.x(numbers)
        return Sample(x, self.rows.y(numbers), x.new_full((len(numbers),), 1 / len(numbers)))

    def aligned_batch(self, number: int, step: int, *, size: int) -> Tensor:
        """Inputs (B, ...) of a step of epoch `number` over the aligned rows; cached. Without rows
        that it lacks.
        """

        def gather() -> Tensor:
            rows = aligned_plan(self.seed, number, self.aligned, size)[step].to(self.device)
            return self.rows.x(rows if self.rows.present is None else rows[self.rows.present[rows]])

        return BATCH_CACHE.get(self, ("aligned", number, step, size), gather)

    def unlabeled(self, t: int, *, steps: int, size: int, aligned: bool = True) -> Tensor:
        """Round t's independent batches of own inputs (T, B, ...), of the unaligned rows only if
        not `aligned`. Raises MethodError if there are no such rows.
        """
        first = 0 if aligned else self.aligned
        if first == len(self.rows):
            raise MethodError(
                f"party {self.id} has no unaligned rows: raise columns.unaligned, or set "
                "params.local_rows=all"
            )
        return self.rows.inputs(
            sample_plan(self.stream("batches", t), len(self.rows) - first, steps, size) + first
        )

    def build(self) -> nn.Module:
        """Build the party's network. Raises MethodError if it has none."""
        if self.network is None:
            raise MethodError(f"party {self.id} has no network: name one in [models]")
        return self.network()

    def teacher(self) -> nn.Module:
        """Load the pretrained model, frozen, in evaluation mode. Raises MethodError if the party
        has none.
        """
        if self.pretrained is None:
            raise MethodError(f"party {self.id} has no pretrained model: name one in [pretrained]")
        return self.pretrained().to(self.device).eval().requires_grad_(False)
