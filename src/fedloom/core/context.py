"""What stands at one party's place: its rows, its network, its seed. None of it ever crosses.

Every index below is drawn from (seed, purpose, round, party), so that methods compared on one seed see the same
batches, whatever else they do and wherever they run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.black_box import BlackBoxModel
from fedloom.core.errors import MethodError
from fedloom.core.message import Tree
from fedloom.core.rng import hidden_stream, stream


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a pool that many parties share in memory.

    Attributes:
        pool: (M, ...) uint8 or float32 inputs as stored.
        labels: (M,) int64; None where these rows have none.
        index: (n,) int64, the rows that are ours.
        shift, scale: what a network sees is (pool - shift) / scale, float32; they broadcast over a row.
    """

    pool: Tensor
    labels: Tensor | None
    index: Tensor
    shift: Tensor
    scale: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def x(self, which: Tensor) -> Tensor:
        """Inputs (B, ...) float32 of rows `which` (B,), numbers into ours."""
        raw = self.pool.index_select(0, self.index[which])
        return raw.sub(self.shift).div_(self.scale)  # pixels become floats on the way

    def y(self, which: Tensor) -> Tensor:
        """Labels (B,) of rows `which` (B,).

        Raises:
            MethodError: there are none.
        """
        if self.labels is None:
            raise MethodError("these rows have no labels here: another party may hold them")
        return self.labels[self.index[which]]

    def inputs(self, plan: Tensor) -> Tensor:
        """Inputs (T, B, ...) of a plan (T, B) of numbers into ours, without labels."""
        x = self.x(plan.to(self.index.device).flatten())
        return x.view(*plan.shape, *x.shape[1:])

    def batches(self, plan: Tensor) -> Batches:
        """The batches of a plan (T, B) of numbers into ours."""
        which = plan.to(self.index.device).flatten()
        x, y = self.x(which), self.y(which)
        return Batches(x.view(*plan.shape, *x.shape[1:]), y.view(plan.shape))

    @cached_property
    def every(self) -> Tensor:
        """All our inputs (n, ...), kept: for small sets that are read again and again."""
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

    @property
    def nbytes(self) -> int:
        """What the inputs take."""
        return self.x.nbytes


@dataclass(frozen=True, eq=False)
class Sample:
    """All of some rows: x (n, ...), y (n,), and each row's share in a mean, `weight` (n,) float32.

    Where an engine works on several parties at once, the shorter samples are filled up with rows of weight 0.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.x, self.y, self.weight))

    @property
    def nbytes(self) -> int:
        """What the inputs take."""
        return self.x.nbytes


Kept = TypeVar("Kept", Batches, Sample, Tensor)


def sample_plan(rng: np.random.Generator, rows: int, steps: int, size: int) -> Tensor:
    """`steps` independent batches (T, B): no row twice in a batch, unless `rows < size`."""
    few = rows < size
    draws = [rng.choice(rows, size, replace=few, shuffle=False) for _ in range(steps)]
    return torch.from_numpy(np.array(draws, dtype=np.int64).reshape(steps, size))


def epoch_plan(rng: np.random.Generator, rows: int, epochs: int, size: int) -> Tensor:
    """`epochs` shuffled passes as full batches (T, B); each pass is topped up from its own start."""
    steps = -(-rows // size)
    passes = [np.resize(rng.permutation(rows), steps * size) for _ in range(epochs)]
    return torch.from_numpy(np.concatenate(passes).reshape(-1, size))


@lru_cache(maxsize=8)
def aligned_plan(seed: int, number: int, rows: int, size: int) -> Tensor:
    """Pass `number` over the aligned rows as full batches (T, B): the same people, batch by batch, at every party."""
    return epoch_plan(stream(seed, "aligned batches", number), rows, 1, size)


class BatchCache:
    """The batches that were gathered last in this process: a peer that answers many askers reads the same again.

    Args:
        most: bytes that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most, self._bytes = most, 0
        self._held: dict[Any, tuple[weakref.ref[Any], Any]] = {}

    def get(self, owner: object, key: Any, make: Callable[[], Kept]) -> Kept:
        """What `make` gives for this key of this owner, made once. Nobody may change it in place."""
        key = (id(owner), key)
        of, found = self._held.pop(key, (None, None))
        if found is not None:
            self._bytes -= found.nbytes
        if found is None or of is None or of() is not owner:  # another may have had that id before
            found = make()
        self._held[key] = (weakref.ref(owner), found)
        self._bytes += found.nbytes
        while self._bytes > self._most:
            _, oldest = self._held.pop(next(iter(self._held)))
            self._bytes -= oldest.nbytes
        kept: Kept = found
        return kept


BATCH_CACHE = BatchCache(8 << 20)


class PublicSet:
    """Unlabelled rows that every party holds, in one order.

    One object serves all parties of a process, so a batch is gathered once for all of them.
    """

    def __init__(self, rows: Rows, seed: int, digest: str) -> None:
        self.rows = rows
        self.seed = seed
        self.digest = digest
        """sha256 of the content in order; a party with another digest is refused."""
        self._last: tuple[tuple[int, int, int], tuple[Tensor, ...]] | None = None

    def batches(self, t: int, steps: int, size: int) -> tuple[Tensor, ...]:
        """The public batches (B, ...) of round t, the same for every party: Algorithm 1's g(seed, t, i)."""
        key = (t, steps, size)
        if self._last is None or self._last[0] != key:
            self._last = (key, self.rows.inputs(self.plan(t, steps, size)).unbind())
        return self._last[1]

    def plan(self, t: int, steps: int, size: int) -> Tensor:
        """The numbers (T, B) of the rows in the public batches of round t."""
        return sample_plan(stream(self.seed, "public batches", t), len(self.rows), steps, size)


@dataclass(frozen=True, eq=False)
class ClientContext:
    """The equipment of one party.

    Attributes:
        id: its number, unique in the federation.
        seed: the federation's seed; every stream of random numbers derives from it.
        parties: how many parties of its kind there are.
        classes: K.
        neighbours: the ids that it may speak to, rising, whether they are there in a round or not.
        data: its own rows, if it has any.
        aligned: of parties that hold different columns: so many of its first rows are people whom all hold, in one
            order.
        public: the public set, if the method needs one.
        network: makes its network, the same at each call.
        black_box: of a client without a network: its object with `fit` and `predict_proba`.
        group: of a method that averages weights among clients of one architecture: the number of the client's group.
        groups: at the server of such a method: that number of each client.
        group_networks: there too: makes the network that a group begins with, by the group's number.
        pretrained: at a server that has a pretrained model: reads it. Nobody else is given it.
        encoder: makes the architecture of the server's pretrained model with other weights: at the server, and at
            clients of a method that hands it out.
        tests: row sets for evaluation, by name. No method reads them.
        device: where its tensors live.
        secret: what nobody else knows, if there is such: see `noise`.
    """

    id: int
    seed: int = 0
    parties: int = 1
    classes: int = 0
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
    tests: Mapping[str, Rows] = field(default_factory=dict)
    device: str = "cpu"
    secret: int | None = None

    @property
    def rows(self) -> Rows:
        """Its own rows, or an error."""
        if self.data is None:
            raise MethodError(f"party {self.id} holds no data of its own")
        return self.data

    @property
    def row_count(self) -> Tensor:
        """How many own rows, () int64."""
        return torch.tensor(len(self.rows), device=self.device)

    def stream(self, purpose: str, *keys: int) -> np.random.Generator:
        """Random numbers of this party for this purpose."""
        return stream(self.seed, purpose, self.id, *keys)

    def noise(self, on: Tree, purpose: str, *keys: int) -> np.random.Generator:
        """Random numbers that hide `on`: tensors, and with how much. Whoever knows the run's seed knows those of
        `stream`, and could take them away again. If there is a `secret`, these depend on it, the purpose and `on`, and
        on nothing that another may choose: asked again in another round or run, they are the same."""
        if self.secret is None:
            return self.stream(purpose, *keys)
        return hidden_stream(self.secret, purpose, message.digest(on).encode())

    def batches(self, t: int, *, steps: int, size: int) -> Batches:
        """Round t's `steps` independent batches of `size` own rows."""

        def gather() -> Batches:
            return self.rows.batches(sample_plan(self.stream("batches", t), len(self.rows), steps, size))

        return BATCH_CACHE.get(self, ("batches", t, steps, size), gather)

    def epochs(self, t: int, *, epochs: int, size: int) -> Batches:
        """Round t's shuffled passes over the own rows, in full batches of `size`."""

        def gather() -> Batches:
            return self.rows.batches(epoch_plan(self.stream("batches", t), len(self.rows), epochs, size))

        return BATCH_CACHE.get(self, ("epochs", t, epochs, size), gather)

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """One batch of round t: x (b, ...), y (b,) of b = `size` different own rows, or of all if there are fewer."""
        batch = self.batches(t, steps=1, size=min(size, len(self.rows)))
        return batch.x[0], batch.y[0]

    @property
    def support(self) -> Sample:
        """One half of the own rows, drawn by chance: what a model is adapted on. The larger one, if they are odd."""
        return BATCH_CACHE.get(self, "support", lambda: self._sample(self.half("support")))

    @property
    def query(self) -> Sample:
        """The other half: what an adapted model is judged by."""
        return BATCH_CACHE.get(self, "query", lambda: self._sample(self.half("query")))

    def half(self, which: Literal["support", "query"]) -> Tensor:
        """Numbers (n,) into the own rows.

        Raises:
            MethodError: there is but one row.
        """
        return BATCH_CACHE.get(self, ("half", which), lambda: self._halved(which))

    def _halved(self, which: Literal["support", "query"]) -> Tensor:
        count = len(self.rows)
        if count < 2:
            raise MethodError(f"party {self.id} has {count} row, too few for a support and a query half: give it more")
        order, first = self.stream("halves").permutation(count), -(-count // 2)
        return torch.from_numpy(np.sort(order[:first] if which == "support" else order[first:]))

    def _sample(self, which: Tensor) -> Sample:
        which = which.to(self.device)
        x = self.rows.x(which)
        return Sample(x, self.rows.y(which), x.new_full((len(which),), 1 / len(which)))

    def aligned_batch(self, number: int, step: int, *, size: int) -> Tensor:
        """Inputs (B, ...) of a step of pass `number` over the aligned rows: the same object if asked again soon."""

        def gather() -> Tensor:
            return self.rows.x(aligned_plan(self.seed, number, self.aligned, size)[step].to(self.device))

        return BATCH_CACHE.get(self, ("aligned", number, step, size), gather)

    def unlabelled(self, t: int, *, steps: int, size: int, aligned: bool = True) -> Tensor:
        """Round t's independent batches of own inputs (T, B, ...), of the unaligned rows alone if not `aligned`.

        Raises:
            MethodError: there are none.
        """
        first = 0 if aligned else self.aligned
        if first == len(self.rows):
            raise MethodError(
                f"party {self.id} has no unaligned rows: give it some (columns.unaligned), or set params.local_rows=all"
            )
        return self.rows.inputs(sample_plan(self.stream("batches", t), len(self.rows) - first, steps, size) + first)

    def build(self) -> nn.Module:
        """The party's network, newly made.

        Raises:
            MethodError: it was given none.
        """
        if self.network is None:
            raise MethodError(f"party {self.id} was given no network: name some in [models]")
        return self.network()

    def teacher(self) -> nn.Module:
        """The pretrained model, newly read: frozen, and in evaluation mode.

        Raises:
            MethodError: there is none here.
        """
        if self.pretrained is None:
            raise MethodError(f"party {self.id} has no pretrained model: name one in [pretrained]")
        return self.pretrained().to(self.device).eval().requires_grad_(False)
