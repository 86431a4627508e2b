"""FedForest: a random forest from sums of integers, the same bits however rows are split over
owners.

Paper: L. Breiman, "Random Forests", Machine Learning 45, 2001; histograms summed over owners as in
Z. Tian et al., "FederBoost", arXiv 2011.02796.

    agree     as in `fedloom.methods.tables.fedboost`: the bins of all columns from sums of counts
    round     a lot of trees at once, one message for each level of the lot
              owners: how often each row is drawn for each tree, Poisson with mean 1
              for each level:
                server   draws `columns` columns for each open node
                owners   the drawn rows of each class (node, column, bin)                              | sums alone
                server   the best split of each node by Gini: sum_k L_k^2 / L + sum_k R_k^2 / R - sum_k N_k^2 / N
                owners   move their rows
              server: leaves N_k / N
    predict   the mean of the leaves' shares

Messages: as in `fedboost`. No tree depends on another, so a forest takes few rounds.

Differs:
    Each row is drawn Poisson(1) times for a tree in place of n draws with replacement: Breiman's
        draws need an order of all rows. The number comes from a hash of the row's bins and label,
        so that it does not depend on the owner; equal rows are drawn alike.
    Splits are between bins, not between values.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import EVERY_TASK, Federation, MessageError, Method, Party, Shape, Tree
from fedloom.methods.tables import own_models, steps
from fedloom.trees import forest
from fedloom.trees.bins import Bins, own_spread
from fedloom.trees.exact import MOST_COPIES, PARTS, copies
from fedloom.trees.growth import Growth
from fedloom.trees.histograms import bundled_by, class_histograms, sent
from fedloom.trees.losses import SquaredError, of_numbers
from fedloom.trees.model import Trees
from fedloom.trees.splits import Gini, Squares

FLOOR = 1e-3
"""The smallest probability of a class."""
OF_CLASSES = {"bits": 0, "exponent": 0}
"""Classes have no unit."""


class FedForestConfig(steps.TreesConfig):
    """A round is one lot of trees."""

    lot: int = Field(20, ge=1, le=1000)
    """Trees of a round."""
    depth: int = Field(12, ge=1, le=20)
    """The most splits above a leaf."""
    min_rows: int = Field(2, ge=1)
    """The least number of rows of a leaf, over all owners, each counted as often as it is drawn."""
    columns: int | None = Field(None, ge=1)
    """The columns that a node may split; None for the square root of their number."""
    mix: int = Field(0, ge=0)
    """Trees of a forest of the owner's own rows alone; it then predicts both by `own_weight`."""

    @property
    def iterations_per_round(self) -> int:
        """100 trees unless the run says otherwise."""
        return 2 * self.lot


@final
class FedForestClient(Party[FedForestConfig]):
    """An owner of rows. `node` and `drawn` (T, n) belong to the trees that grow: each row's node,
    and how often it is drawn.
    """

    ROLE = "client"
    STATE = ("layout", "trees", "node", "drawn")
    EXPORT = ("layout", "trees")
    CALLS = ("segments", "words_of", "rows", "begin", "histograms", "learn")
    MEANS = ("segments", "words_of", "rows", "histograms")
    ROWS = ("node", "drawn")
    TELLS = (("by class", MEANS),)
    segments = steps.segments
    words_of = steps.words_of

    def setup(self) -> None:
        """Neither bins nor trees."""
        self.layout: dict[str, Any] = {}
        self.trees = steps.no_trees(self.context.classes)
        self.node = torch.zeros(0, len(self.context.rows), dtype=torch.int32)
        self.drawn = torch.zeros(0, len(self.context.rows), dtype=torch.int64)

    def rows(self, *, t: int) -> dict[str, Tensor]:
        """The number of own rows (256,) by exponent of the number to predict, as asked
        in round t.
        """
        return steps.tensors(rows=steps.own_rows(self))

    def begin(self, *, layout: Any, first: int, trees: Any) -> None:
        """Take the bins and the trees that this owner lacks."""
        steps.take_layout(self, layout)
        steps.catch_up(self, first, trees)

    def histograms(
        self,
        *,
        numbers: Tensor,
        unit: Any,
        splits: Any,
        asked: Tensor,
        tree: Tensor,
        columns: Tensor,
        bits: Any = None,
    ) -> Any:
        """The drawn rows of each class by bin in the asked nodes and columns, in words with the
        `bits` (m,) of each node; or the sums of the number to predict and the drawn rows, in words
        as in `sent`.

        Raises:
            MessageError: a round has another number of trees.
        """
        if len(numbers) != self.cfg.lot:
            raise MessageError(f"a round has {self.cfg.lot} trees, not {len(numbers)}")
        own = steps.binned(self)
        y = forest.whole(own.y, **unit) if self.context.target else own.y
        if not len(splits["node"]):
            drawn = [copies(own.bins, y, number, self.context.seed) for number in numbers.tolist()]
            self.drawn = torch.from_numpy(np.stack(drawn))
            self.node = steps.roots(len(drawn), len(own.y))
        steps.move(self, splits)
        found = sums_of(
            self,
            y,
            self.drawn.numpy(),
            self.node.numpy(),
            asked.numpy(),
            tree.numpy(),
            columns.numpy(),
        )
        if bits is None:
            return {"sums": torch.from_numpy(sent(found, SquaredError(**unit).wide))}
        cells = own.layout.widths[columns.numpy()].sum(1)
        return {"sums": torch.from_numpy(bundled_by(found, np.repeat(bits.numpy(), cells)))}

    def learn(self, *, trees: Any) -> None:
        """Add the grown trees to the model."""
        self.trees = steps.extended(self.trees, steps.checked(self, trees))

    def lots(self) -> list[tuple[Trees, float]]:
        """The trees with which it predicts, with the weight of each lot."""
        weight = steps.own_weight(self) if self.cfg.mix else 0.0
        own = [(own_forest(self), weight)] if self.cfg.mix else []
        return [(steps.trees_of(self.trees), 1 - weight), *own]

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K) of rows x (n, ...), logarithms of probabilities, or standardized numbers
        (n, 1); 0 before the bins are agreed.
        """
        K = self.context.classes
        if not len(self.trees["root"]):
            return torch.zeros(len(x), K)
        if self.context.target:
            found = steps.scores(self, x, 1)[0] / (PARTS * len(self.trees["root"]))
            if self.cfg.mix:
                own = own_forest(self).scores(steps.bins_of(self, x), 1)[0]
                weight = steps.own_weight(self)
                found = (1 - weight) * found + weight * own / (PARTS * self.cfg.mix)
            return own_models.mixed(self, torch.from_numpy(found[:, None]).float(), x)
        p = forest.shares(steps.scores(self, x, K))
        if self.cfg.mix:
            own = steps.own_weight(self)
            p = (1 - own) * p + own * forest.shares(
                own_forest(self).scores(steps.bins_of(self, x), K)
            )
        return own_models.mixed(
            self, torch.from_numpy(np.log(FLOOR + (1 - K * FLOOR) * p)).float(), x
        )


@final
class FedForestServer(Party[FedForestConfig]):
    """The server, which sees sums over owners."""

    ROLE = "server"
    STATE = ("layout", "trees", "known", "gains", "spread")
    layout: dict[str, Any]
    trees: dict[str, Tensor]
    known: Tensor
    gains: Tensor
    spread: Tensor
    setup = steps.init_server
    findings = steps.importance


def sums_of(
    party: FedForestClient,
    y: np.ndarray,
    drawn: np.ndarray,
    node: np.ndarray,
    asked: np.ndarray,
    tree: np.ndarray,
    columns: np.ndarray,
) -> np.ndarray:
    """The drawn rows (K, N) of each class, or (2, N) the sums of numbers y (n,) and the drawn rows:
    see `class_histograms`.
    """
    own = steps.binned(party)
    where = (node, asked, tree, columns, steps.binned(party).layout.widths)
    if not party.context.target:
        return class_histograms(own.bins, y, drawn, *where, party.context.classes)
    return forest.number_histograms(own.bins, y, drawn, *where)


def growth(cfg: FedForestConfig, layout: Bins, rng: np.random.Generator, number: bool) -> Growth:
    """New trees over these bins."""
    gain = Squares() if number else Gini()
    return forest.growth(layout, cfg.lot, cfg.columns, cfg.depth, cfg.min_rows, rng, gain)


def grown(trees: Growth, scale: dict[str, int], number: bool) -> Trees:
    """The trees with their leaves N_k / N, or the mean of numbers, in steps of 2^-20."""
    return forest.grown_of_numbers(trees, **scale) if number else forest.grown(trees)


def scale_of(rows: np.ndarray, spread: float) -> dict[str, int]:
    """The bits behind the point and the unit of numbers with this `Agreement.spread`, for all
    owners' `rows` (256,) by exponent, each of which is drawn at most `MOST_COPIES` times.
    """
    loss = of_numbers(int(rows.sum()), steps.largest_exponent(rows), spread, MOST_COPIES)
    return {"bits": loss.bits, "exponent": loss.exponent}


def grown_from_rows(
    party: FedForestClient, cfg: FedForestConfig, layout: Bins, t: int, rng: np.random.Generator
) -> Trees:
    """Lot number t of trees from the party's own rows alone."""
    own, number = steps.binned(party), party.context.target is not None
    scale = OF_CLASSES
    if number:
        scale = scale_of(steps.own_rows(party), own_spread(own.y, cfg.bins))
    y = forest.whole(own.y, **scale) if number else own.y
    numbers = range(t * cfg.lot, (t + 1) * cfg.lot)
    drawn = np.stack([copies(own.bins, y, tree, party.context.seed) for tree in numbers])
    node, trees = steps.roots(*drawn.shape).numpy(), growth(cfg, layout, rng, number)
    while len(trees.asked):
        trees.splits.move(node, own.bins)
        trees.answer(sums_of(party, y, drawn, node, trees.asked, trees.tree, trees.columns))
    return grown(trees, scale, number)


def own_forest(party: FedForestClient) -> Trees:
    """A forest of the party's own rows alone, over the agreed bins."""
    own, cfg = steps.binned(party), party.cfg.model_copy(update={"lot": party.cfg.mix})

    def make() -> Trees:
        return grown_from_rows(party, cfg, own.layout, 0, party.context.stream("own columns"))

    return steps.kept(party.context, "own forest", "", make)


def round(
    fed: Federation, server: FedForestServer, clients: Sequence[int], cfg: FedForestConfig, t: int
) -> Iterator[str]:
    """One lot of trees."""
    if not server.layout:  # agree
        layout = steps.agree(fed, server, clients)
        if layout is None:
            return
        server.layout = steps.layout_tree(layout)
    owners = steps.begin(fed, server, clients)
    scale = OF_CLASSES
    number = server.context.target is not None
    if number:
        counted = fed.total(
            owners,
            "rows",
            shared={"t": t},
            expect={"rows": Shape("int64", steps.row_kinds(server))},
        )
        if counted is None:
            return
        owners = counted.ids
        scale = scale_of(counted.value["rows"].numpy(), float(server.spread))
    trees = growth(cfg, steps.layout_of(server.layout), server.context.stream("columns", t), number)
    shared: dict[str, Tree] = {
        "numbers": torch.arange(t * cfg.lot, (t + 1) * cfg.lot),
        "unit": {**scale},
    }
    statistics = 2 if number else server.context.classes
    wide = number and SquaredError(**scale).wide
    if not steps.grow(fed, owners, trees, statistics, shared, counts=not number, wide=wide):
        return
    news = grown(trees, scale, number)
    learned = fed.call(owners, "learn", shared={"trees": steps.trees_tree(news)}, expect=None)
    steps.learn(server, news, trees.gains, learned)
    yield "round"


def at_once(
    fed: Federation,
    server: FedForestServer,
    client: FedForestClient,
    cfg: FedForestConfig,
    rounds: int,
) -> None:
    """See `Method.at_once`: the same trees without messages, which take half of the time."""
    layout = steps.agree(fed, server, (0,))
    assert layout is not None
    client.layout = steps.layout_tree(layout)
    for t in range(rounds):
        trees = grown_from_rows(client, cfg, layout, t, server.context.stream("columns", t))
        client.trees = steps.extended(client.trees, trees)


FEDFOREST = Method(
    name="fedforest",
    title="A random forest from sums of integers, as on pooled rows",
    paper="L. Breiman: Random Forests, 2001; Z. Tian et al.: FederBoost: Private Federated "
    "Learning for GBDT, 2020",
    family="tables",
    config=FedForestConfig,
    tasks=EVERY_TASK,
    no_local="trees have no optimizer and count each row once",
    round=round,
    client=FedForestClient,
    server=FedForestServer,
    needs=("raw rows",),
    pooled=True,
    at_once=at_once,
    trial_rank=1,
)

METHODS = (
    FEDFOREST,
    replace(
        FEDFOREST,
        name="fedforest-mix",
        title="FedForest; each owner predicts the mean with a forest of its own rows",
        fixed={"mix": 100},
        trial_rank=0,
    ),
)
