"""Steps of federated trees: the agreement on bins, the state of owners and server, and predictions,
as functions.

Everything that owners send is a sum of integers, added by `Federation.total`, so the model has the
same bits however rows are split over owners; see `fedloom.trees`. State and messages are trees of
tensors; the functions here convert.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from pydantic import BaseModel, Field, field_validator, model_validator
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fedloom.core.aggregate import MEAN
from fedloom.core.errors import MessageError
from fedloom.core.message import digest
from fedloom.core.page import (
    Aggregator,
    ClientContext,
    Federation,
    LearnedTable,
    MethodConfig,
    MethodError,
    Party,
    Shape,
    Tree,
)
from fedloom.trees import bins as binning
from fedloom.trees import histograms
from fedloom.trees.bins import Agreement, Bins, Question
from fedloom.trees.growth import Growth, Splits
from fedloom.trees.model import Trees, joined

FEW_ROWS = 2000
"""Rows of all owners below which leaves may be smaller."""
T = TypeVar("T")


class OwnModels(BaseModel):
    """Models of the owner's own rows, beside the joint model."""

    own: tuple[Literal["linear", "forest", "boosting"], ...] = ()
    """Models of an owner's own rows alone, whose mean it mixes with the joint model by
    `own_weight`. Nobody receives them.
    """
    own_weight: float | tuple[float, ...] = 0.5
    """With `own`, or `mix` above 0: the weight of an owner's own models in its predictions, from 0
    to 1, or one for each owner.
    """

    @field_validator("own_weight")
    @classmethod
    def _weights(cls, own: float | tuple[float, ...]) -> float | tuple[float, ...]:
        weights = own if isinstance(own, tuple) else (own,)
        if not weights or not all(0 <= w <= 1 for w in weights):
            raise ValueError("weights must be from 0 to 1, one for all owners or one for each")
        return own

    @classmethod
    def mixing(cls, kinds: Sequence[str] = (), weight: Any = None) -> dict[str, Any]:
        """See `MethodConfig.mixing`."""
        found = {"own": [*kinds], "own_weight": weight}
        return {name: value for name, value in found.items() if value not in ([], None)}

    @property
    def mixes(self) -> bool:
        """See `MethodConfig.mixes`."""
        return bool(getattr(self, "mix", 0))

    @property
    def predicts_alike(self) -> bool:
        """See `MethodConfig.predicts_alike`."""
        own = ("own", "mix", "owner_column", "own_trees")
        return getattr(self, "owners", "none") == "none" and not any(
            getattr(self, name, 0) for name in own
        )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.own and getattr(self, "mix", None):
            raise ValueError(
                "own and mix both name models of the owner's own rows: leave one of them out"
            )
        return self


class InContext(Protocol):
    """A party, of which only the context is read."""

    @property
    def context(self) -> ClientContext:
        """The party's context."""


class MixesOwn(InContext, Protocol):
    """A party that mixes the joint model with models of its own rows."""

    @property
    def cfg(self) -> OwnModels:
        """The settings."""


def own_kinds(party: MixesOwn) -> tuple[str, ...]:
    """The kinds of the party's own models, if it mixes them with the joint one."""
    return getattr(party.cfg, "own", ())


def own_weight(party: MixesOwn) -> float:
    """The weight of the party's own models in its predictions."""
    own, parties = party.cfg.own_weight, party.context.parties
    if not isinstance(own, tuple):
        return float(own)
    if len(own) != parties:
        raise MethodError(
            f"params.own_weight has {len(own)} weights for {parties} owners: give one for each, "
            "or one for all"
        )
    return float(own[party.context.id])


def refusal(aggregator: Aggregator) -> str:
    """Why owners that send sums of integers alone cannot be combined this way; "" if they can."""
    if aggregator == MEAN or aggregator.secure:
        return ""
    return "its sums of integers are exact: leave aggregate.rule and aggregate.noise out"


class TreesConfig(OwnModels, MethodConfig):
    """The bins of all columns, the levels of trees, and the owners' number as a column."""

    depth: int = Field(6, ge=1, le=20)
    """The most splits above a leaf."""
    bins: int = Field(64, ge=4, le=binning.MOST_BINS)
    """The most bins of a column: one for missing values, the others with equally many rows."""
    owner_column: bool = False
    """Whether the owner is a category like others, so that some trees treat owners differently. The
    coordinator then learns the owner of each count.
    """

    def local_steps_of(self, rows: int) -> None:
        """None: trees have no optimizer steps."""

    @property
    def rows_add_up(self) -> bool:
        """Unless the owner is a column."""
        return not self.owner_column

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return refusal(aggregator)

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Once for each size of segments, and for each level of the trees."""
        return {"segments": len(binning.SIZES), "histograms": self.depth}


class TreesParty(Protocol):
    """A party with agreed bins and the trees over them, as messages: `layout` is {} before the
    first.
    """

    layout: dict[str, Any]
    trees: dict[str, Tensor]

    @property
    def cfg(self) -> TreesConfig:
        """The settings."""

    @property
    def context(self) -> ClientContext:
        """The party's context."""


class TreesOwner(TreesParty, Protocol):
    """An owner of rows; `node` (T, n) is the node of each row in each of the trees that grow."""

    node: Tensor


class TreesServer(TreesParty, Protocol):
    """The server: `known` (parties,) are the trees that each owner has, -1 before its first
    message; `gains` (F,) those of all splits by column; `spread` () that of the number to predict,
    see `Agreement.spread`.
    """

    known: Tensor
    gains: Tensor
    spread: Tensor


# -- trees of tensors and arrays -------------------------------------------------------------------


def tensors(**arrays: np.ndarray) -> dict[str, Tensor]:
    """The arrays, copied, as tensors."""
    return {name: torch.from_numpy(np.array(x, order="C")) for name, x in arrays.items()}


def arrays(tree: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """The tensors of a flat tree as arrays."""
    return {name: x.cpu().numpy() for name, x in tree.items()}


def layout_tree(layout: Bins) -> dict[str, Tree]:
    """The bins as a message, with their SHA-256, by which owners know whether they have changed."""
    lengths = np.array([len(edges) for edges in layout.edges], np.int64)
    edges = np.concatenate([np.empty(0, np.int64), *layout.edges])
    found = tensors(edges=edges, lengths=lengths, category=layout.category)
    return {**found, "sha256": digest(found)}


def layout_of(tree: Mapping[str, Any]) -> Bins:
    """The bins of a message."""
    found = arrays({name: x for name, x in tree.items() if name != "sha256"})
    return Bins(
        tuple(np.split(found["edges"], np.cumsum(found["lengths"])[:-1])), found["category"]
    )


def trees_tree(trees: Trees) -> dict[str, Tensor]:
    """Trees as a message, copied."""
    return tensors(**vars(trees))


def as_tree(trees: Trees) -> dict[str, Tensor]:
    """Trees, which nothing else changes, as a message."""
    return {name: torch.from_numpy(x) for name, x in vars(trees).items()}


def trees_of(tree: Mapping[str, Tensor]) -> Trees:
    """The trees of a message."""
    return Trees(**arrays(tree))


def no_trees(values: int) -> dict[str, Tensor]:
    """No trees, whose leaves would have this many values."""
    return trees_tree(
        Trees(
            root=np.empty(0, np.int32),
            feature=np.empty(0, np.int16),
            left=np.empty((0, 1), np.uint8),
            child=np.empty(0, np.int32),
            value=np.empty((0, values), np.int64),
        )
    )


def extended(model: Mapping[str, Tensor], news: Trees) -> dict[str, Tensor]:
    """The model with more trees."""
    return as_tree(joined([trees_of(model), news])) if len(model["root"]) else trees_tree(news)


def exponents(x: np.ndarray) -> np.ndarray:
    """How many numbers of x (n,) have each exponent, (256,) int64: those of place e > 1 are below
    2^(e - 127) and not below half of it; those of place 1 are smaller, and those of place 0 are 0.
    """
    place = np.where(x == 0, 0, np.where(np.isinf(x), 255, (np.frexp(x)[1] + 127).clip(1, 255)))
    return np.bincount(place, minlength=256).astype(np.int64)


def largest_exponent(counts: np.ndarray) -> int:
    """The e with |x| < 2^e for all numbers, from the summed `exponents` (256,)."""
    return int(np.flatnonzero(counts)[-1]) - 127 if counts.any() else 0


# -- an owner --------------------------------------------------------------------------------------

_KEPT: WeakKeyDictionary[Any, dict[str, tuple[str, Any]]] = WeakKeyDictionary()
"""What an owner computes from its rows alone, by its context and a name, so that it is computed
once in a process.
"""


def kept(owner: Any, name: str, key: str, make: Callable[[], T]) -> T:
    """The remembered value of this owner, name and key, or that of `make`."""
    own = _KEPT.setdefault(owner, {})
    if name not in own or own[name][0] != key:
        own[name] = (key, make())
    found: T = own[name][1]
    return found


@dataclass(frozen=True)
class Binned:
    """An owner's rows: the layout, bins (n, F) uint8, cells (n, F) and labels (n,)."""

    layout: Bins
    bins: np.ndarray
    cells: np.ndarray
    y: np.ndarray


def columns(party: TreesParty, x: Tensor) -> np.ndarray:
    """The columns (n, F) float32 of rows x (n, ...), with the party's number as the last one if the
    config says so.
    """
    values: np.ndarray = x.flatten(1).float().cpu().numpy()
    if not party.cfg.owner_column:
        return values
    return np.concatenate([values, np.full((len(values), 1), party.context.id, np.float32)], axis=1)


def own_columns(party: TreesParty) -> np.ndarray:
    """The columns (n, F) of the party's own rows."""
    return columns(party, party.context.rows.every)


def own_labels(party: TreesParty) -> np.ndarray:
    """The labels (n,) of the party's own rows."""

    def make() -> np.ndarray:
        rows = party.context.rows
        labels: np.ndarray = (
            rows.y(torch.arange(len(rows), device=party.context.device)).cpu().numpy()
        )
        return labels

    return kept(party.context, "labels", "", make)


def row_kinds(party: TreesParty) -> int:
    """The length of `own_rows`."""
    return 256 if party.context.target is not None else party.context.classes


def own_rows(party: TreesParty) -> np.ndarray:
    """The party's own rows (K,) by class, or (256,) by exponent of the number to predict."""
    y = own_labels(party)
    counts: np.ndarray = (
        exponents(y)
        if party.context.target is not None
        else np.bincount(y, minlength=row_kinds(party))
    )
    return counts


def binned(party: TreesParty) -> Binned:
    """The party's own rows by the agreed bins in its `layout`."""

    def make() -> Binned:
        layout = layout_of(party.layout)
        bins = layout.of(own_columns(party))
        return Binned(layout, bins, histograms.cells_of(bins, layout), own_labels(party))

    return kept(party.context, "binned", party.layout["sha256"], make)


def segments(
    party: TreesParty, *, column: Tensor, start: Tensor, size: int, parts: int
) -> dict[str, Tensor]:
    """The party's rows (p, parts) in segments of keys: see `fedloom.trees.bins`. A number to
    predict is the last column.

    Raises:
        MessageError: the bins are agreed, or these are no segments of the agreement.
    """
    if party.layout or binning.SIZES.get(size) != parts:
        raise MessageError(
            "segments are counted before the bins are agreed, in the sizes of the agreement"
        )

    def make() -> list[np.ndarray]:
        own = [*own_columns(party).T, *([own_labels(party)] if party.context.target else [])]
        return [np.sort(binning.keys(values[~np.isnan(values)])) for values in own]

    asked = Question(column.cpu().numpy(), start.cpu().numpy(), size, parts)
    return tensors(rows=binning.count(kept(party.context, "keys", "", make), asked))


def take_layout(party: TreesParty, layout: Mapping[str, Any] | None) -> None:
    """Take the agreed bins, once in a run: with other bins in each round a coordinator would find
    each row's values.

    Raises:
        MessageError: there are others already, or they do not fit the party's columns.
    """
    if not layout or layout["sha256"] == party.layout.get("sha256"):
        return
    new = layout_of(layout)
    category = [*map(bool, party.context.words), *[True] * party.cfg.owner_column]
    if problem := new.problem(category, party.cfg.bins) or (
        party.layout and "a run has one set of bins"
    ):
        raise MessageError(f"{problem}; keep those that were agreed")
    party.layout = layout_tree(new)


def offsets(party: Party[object]) -> list[float]:
    """What was subtracted from each of the party's columns of numbers when they were read, 0 of a
    number to predict.
    """
    c = party.context
    every = zip(c.offset or (0.0,) * len(c.words), c.words, strict=True)
    return [*(offset for offset, words in every if not words), *([0.0] if c.target else [])]


def words_of(party: TreesParty, *, sizes: Tensor) -> dict[str, Tensor]:
    """The party's rows with each word, (sum of sizes,): one category after the other. `sizes` (F,)
    has the number of words of a category, and 0 for numbers.
    """
    found = [np.empty(0, np.int64)]
    for values, size in zip(own_columns(party).T, sizes.tolist(), strict=True):
        if size:
            known = values[~np.isnan(values)].astype(np.int64)
            found.append(np.bincount(known[known < size], minlength=size))
    return tensors(rows=np.concatenate(found))


def move(party: TreesOwner, splits: Mapping[str, Tensor]) -> None:
    """Move the party's rows to the children of the nodes that were split, in a new
    `node` (T, n).
    """
    if len(splits["node"]):
        node = party.node.clone()
        splits_of(splits).move(node.numpy(), binned(party).bins)
        party.node = node


def catch_up(party: TreesParty, first: int, trees: Mapping[str, Tensor]) -> Trees:
    """Add the trees from number `first` on, of which the party may have some, to its `trees`; those
    that it lacked.

    Raises:
        MessageError: they cannot predict. It is found without rows, as work that failed by rows
            would tell of them.
    """
    if not 0 <= first <= len(party.trees["root"]) and len(trees["root"]):
        raise MessageError("new trees follow those that are here")
    news = checked(party, trees).after(len(party.trees["root"]) - first)
    if len(news):
        party.trees = extended(party.trees, news)
    return news


def checked(party: TreesParty, trees: Mapping[str, Tensor]) -> Trees:
    """The trees of a message.

    Raises:
        MessageError: they cannot predict over the party's bins.
    """
    news = trees_of(trees)
    if len(news):
        values, layout = party.trees["value"].shape[1], layout_of(party.layout)
        problem = news.problem(len(layout.edges), int(layout.widths.max()))
        if problem or news.value.shape[1] != values:
            raise MessageError(f"new trees have {values} values a leaf: {problem}")
    return news


def roots(trees: int, rows: int) -> Tensor:
    """The node (T, n) int32 of each row in new trees, whose roots are 0, 1, …"""
    return torch.arange(trees, dtype=torch.int32)[:, None].repeat(1, rows)


def bins_of(party: TreesParty, x: Tensor) -> np.ndarray:
    """The bins (n, F) of rows x (n, F)."""
    return layout_of(party.layout).of(columns(party, x))


_SCORES: MutableMapping[Tensor, tuple[int, str, np.ndarray]] = WeakTensorKeyDictionary()


def scores(party: TreesParty, x: Tensor, outputs: int) -> np.ndarray:
    """The sums (outputs, n) int64 over the party's `trees` for rows x (n, F).

    They are remembered as long as the tensor `x` lives, because test rows stay the same while trees
    are added.
    """
    model = trees_of(party.trees)
    owner = party.context.id if party.cfg.owner_column else None

    def key(trees: Trees) -> str:
        return digest([party.layout["sha256"], owner, trees_tree(trees)])

    done, known, total = _SCORES[x] if x in _SCORES else (0, "", np.empty(0))
    if done > len(model) or known != key(model.before(done)):
        done, total = 0, np.zeros((outputs, len(x)), np.int64)
    found: np.ndarray = total + model.after(done).scores(bins_of(party, x), outputs)
    _SCORES[x] = (len(model), key(model), found)
    return found


# -- the server ------------------------------------------------------------------------------------


def init_server(server: TreesServer) -> None:
    """Neither bins nor trees, and no owner has any."""
    server.layout, server.trees = {}, no_trees(1)
    server.known = torch.full((server.context.parties,), -1)
    columns = len(server.context.columns) + server.cfg.owner_column
    server.gains = torch.zeros(columns, dtype=torch.float64)
    server.spread = torch.tensor(torch.inf, dtype=torch.float64)


def importance(server: TreesServer) -> list[LearnedTable]:
    """The share of each column in all gains of splits, the largest first."""
    names = [*server.context.columns, *["owner"] * server.cfg.owner_column]
    shares = (server.gains / server.gains.sum().clamp(min=1e-300)).tolist()
    rows = sorted(zip(names, shares, strict=True), key=lambda row: -row[1])
    return [
        LearnedTable(
            "Importance: the share of the gains of all splits", ("Column", "Share"), tuple(rows)
        )
    ]


def agree(fed: Federation, server: TreesServer, clients: Sequence[int]) -> Bins | None:
    """The bins of all columns, and in `server` the spread of a number to predict, from sums of
    counts of all owners; None if an owner's count is missing.
    """
    sizes = [*map(len, server.context.words), *[server.context.parties] * server.cfg.owner_column]
    numbers = [f for f, size in enumerate(sizes) if not size]
    numbers += [len(sizes)] * (server.context.target is not None)
    agreement = Agreement(numbers, server.cfg.bins)
    while (asked := agreement.question) is not None:
        found = fed.total(
            clients,
            "segments",
            shared={
                **tensors(column=asked.column, start=asked.start),
                "size": asked.size,
                "parts": asked.parts,
            },
            expect={"rows": Shape("int64", len(asked.start), asked.parts)},
            min_replies=len(clients),
        )
        if found is None:
            return None
        agreement.answer(found.value["rows"].numpy())
    if server.context.target is not None:
        server.spread = torch.tensor(agreement.spread(len(sizes)), dtype=torch.float64)
    by_word = [np.empty(0, np.int64)] * len(sizes)
    if any(sizes):
        shape = {"rows": Shape("int64", sum(sizes))}
        asked_words = tensors(sizes=np.array(sizes, np.int64))
        found = fed.total(
            clients, "words_of", shared=asked_words, expect=shape, min_replies=len(clients)
        )
        if found is None:
            return None
        by_word = np.split(found.value["rows"].numpy(), np.cumsum(sizes)[:-1])
    edges = [
        binning.frequent(rows, server.cfg.bins) if size else agreement.edges(f)
        for f, (rows, size) in enumerate(zip(by_word, sizes, strict=True))
    ]
    return Bins(tuple(edges), np.array(sizes, bool))


def grow(
    fed: Federation,
    owners: tuple[int, ...],
    trees: Growth,
    statistics: int,
    shared: dict[str, Tree],
    counts: bool = False,
    wide: bool = False,
) -> bool:
    """Grow trees level by level, from the owners' sums of this many statistics; False if an owner
    was lost, as the owners of a tree must stay the same.

    The message of a level has the last splits, and the nodes whose histograms are asked, with their
    columns if they are drawn, and the bits of their numbers of rows if the statistics are `counts`.
    Others are sent as in `histograms.sent`.
    """
    while len(trees.asked):
        asked = {"asked": trees.asked.astype(np.int32), "tree": trees.tree.astype(np.int32)}
        if trees.draws:
            asked["columns"] = trees.columns.astype(np.int16)
        if counts:
            asked["bits"] = trees.bits
        sizes = trees.sizes
        cells = int(sizes.sum())
        room = np.repeat(trees.bits, sizes) if counts else np.empty(0, np.uint8)
        if counts:
            words = histograms.bundles_by(statistics, room)
        else:
            words = histograms.words_sent(statistics, cells, wide)
        found = fed.total(
            owners,
            "histograms",
            shared={**shared, "splits": splits_tree(trees.splits), **tensors(**asked)},
            expect={"sums": Shape("int64", words)},
            min_replies=len(owners),
        )
        if found is None:
            return False
        sums = found.value["sums"].numpy()
        if counts:
            trees.answer(histograms.unbundled_by(sums, statistics, room))
        else:
            trees.answer(histograms.received(sums, statistics, cells, wide))
    return True


def splits_tree(splits: Splits) -> dict[str, Tensor]:
    """Splits as a message."""
    return tensors(
        node=splits.node.astype(np.int32),
        tree=splits.tree.astype(np.int32),
        column=splits.column.astype(np.int16),
        left=np.packbits(splits.left, axis=1),
        child=splits.child.astype(np.int32),
    )


def splits_of(tree: Mapping[str, Tensor]) -> Splits:
    """The splits of a message."""
    s = arrays(tree)
    return Splits(
        s["node"], s["tree"], s["column"], np.unpackbits(s["left"], axis=1).view(bool), s["child"]
    )


def news(server: TreesServer, known: int) -> dict[str, Any]:
    """What a client lacks that has this many trees, -1 before its first message: the bins, and
    further trees.
    """
    lacked = trees_tree(trees_of(server.trees).after(max(known, 0)))
    return {"layout": server.layout if known < 0 else None, "first": max(known, 0), "trees": lacked}


def begin(fed: Federation, server: TreesServer, clients: Sequence[int]) -> tuple[int, ...]:
    """Send each client the bins and trees that it lacks; the clients that have all."""
    now = len(server.trees["root"])
    if lacking := {
        i: known for i, known in enumerate(server.known.tolist()) if known < now and i in clients
    }:
        messages = {known: news(server, known) for known in set(lacking.values())}
        if len(messages) == 1:
            taken = fed.call(lacking, "begin", shared=next(iter(messages.values())), expect=None)
        else:
            taken = fed.call(
                lacking, "begin", each={i: messages[k] for i, k in lacking.items()}, expect=None
            )
        server.known = server.known.index_fill(0, torch.tensor(list(taken), dtype=torch.long), now)
    return tuple(i for i in clients if int(server.known[i]) == now)


def learn(server: TreesServer, trees: Trees, gains: np.ndarray, learned: Iterable[int]) -> None:
    """Add trees, and the gains (F,) of their splits by column, to the server's; these clients have
    taken the trees.
    """
    server.trees = extended(server.trees, trees)
    server.gains = server.gains + torch.from_numpy(gains)
    known = server.known.clone()
    known[list(learned)] = len(server.trees["root"])
    server.known = known
