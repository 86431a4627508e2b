"""FedBoost: gradient boosted trees from sums of integers, the same bits however rows are split over
owners.

Paper: Z. Tian, R. Zhang, X. Hou, L. Lyu, T. Zhang, J. Liu, K. Ren, "FederBoost: Private Federated
    Learning for GBDT",
arXiv 2011.02796, the horizontal case: histograms by secure sums. Y. Shi, G. Ke, Z. Chen, S. Zheng,
T.-Y. Liu, "Quantized Training of Gradient Boosting Decision Trees", NeurIPS 2022, for gradients as
integers.

    agree     owners: counts of each column's values in segments of keys, words with counts; rows by class
              server: the bins of all columns, the base score
    round     T trees at once: 1 for two classes or a number, K for more
              owners: p = softmax(scores), g = p - 1[y = k], h = p (1 - p), as integers in steps of
                      2^-bits; for a number g = score - y, h = 1
              for each level:
                owners   histograms (node, column, bin) of g, h and rows, of the asked nodes only      | sums alone
                server   the sibling is the parent less the child; the best split of each node by
                         G_L^2 / (H_L + l2) + G_R^2 / (H_R + l2) - G^2 / (H + l2), missing values to
                         either side
                owners   move their rows
              server: leaves -rate G / (H + l2); owners: scores += leaf

A node stays a leaf if no split gains, or if a child would have fewer than `min_rows` rows.

Messages: sums of integers up; bins, splits and trees down. Nothing that an owner sends is read
alone: each reply is added to the others' by `fed.total`. If an owner fails while trees grow, the
round adds no trees, as later sums would be of other rows than the first; an owner that missed trees
receives them when it is back.

Differs:
    Bins come from sums of counts, not from a merge of quantile sketches, whose result depends on
    the split. A row's statistics are rounded to nearest, not stochastically, with 10 bits behind
    the point. The paper hides each histogram with masks and adds differential privacy; here
        `fed.total` hides them in a run with secure sums, and there is no noise.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.message import digest
from fedloom.core.page import EVERY_TASK, ClientContext, Federation, Method, Party, Shape
from fedloom.methods.tables import own_models, steps
from fedloom.trees import boosting, losses
from fedloom.trees.bins import own_spread
from fedloom.trees.boosting import BoostingSettings, outputs
from fedloom.trees.exact import STEP
from fedloom.trees.growth import Growth
from fedloom.trees.histograms import gradient_histograms, sent
from fedloom.trees.losses import CrossEntropy, Loss, SquaredError
from fedloom.trees.model import Trees, joined


class FedBoostConfig(steps.TreesConfig):
    """A round is one tree, or one for each of more than two classes."""

    TRIAL = (("l2", 1.0),)
    depth: int = Field(6, ge=1, le=12)
    """The most splits above a leaf."""
    rate: float = Field(0.1, gt=0, le=1)
    """The share of a leaf's Newton step that is taken."""
    l2: float = Field(1.0, gt=0)
    """λ, added to the sum of h of a leaf."""
    min_rows: int | None = Field(None, ge=1)
    """The least number of rows of a leaf, over all owners; None for 20, or 5 below 2,000 rows."""
    own_trees: int = Field(0, ge=0)
    """Trees that an owner adds on its own rows before it predicts, from the scores of the joint
    model; nobody receives them.
    """
    mix: int = Field(0, ge=0)
    """Trees of a model of the owner's own rows alone; it then predicts the mean of both
    probabilities, by `own_weight`.
    """

    @property
    def iterations_per_round(self) -> int:
        """100 rounds unless the run says otherwise."""
        return 2

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """The calls of all trees, and rows by class before and after the bins are agreed."""
        return {**super().calls_in_round(context), "rows": 2}


@final
class FedBoostClient(Party[FedBoostConfig]):
    """An owner of rows. `scores` (T, n) are those of its own rows; `node` and `words` (T, n) belong
    to the trees that
    grow: each row's node and its derivatives.
    """

    ROLE = "client"
    STATE = ("layout", "trees", "scores", "node", "words")
    EXPORT = ("layout", "trees")
    CALLS = ("segments", "words_of", "rows", "begin", "histograms", "learn")
    MEANS = ("segments", "words_of", "rows", "histograms")
    ROWS = ("scores", "node", "words")
    TELLS = (("by class", MEANS),)
    segments = steps.segments
    words_of = steps.words_of

    def setup(self) -> None:
        """Neither bins nor trees."""
        T, n = outputs(self.context.classes), len(self.context.rows)
        self.layout: dict[str, Any] = {}
        self.trees = steps.no_trees(1)
        self.scores = self.words = torch.zeros(T, n, dtype=torch.int64)
        self.node = torch.zeros(T, n, dtype=torch.int32)

    def rows(self, *, t: int) -> dict[str, Tensor]:
        """The number of own rows (K,) by class, or (256,) by exponent of the number to predict, as
        asked in round t: a node adds up one answer with one set of others only.
        """
        return steps.tensors(rows=steps.own_rows(self))

    def begin(self, *, layout: Any, first: int, trees: Any) -> None:
        """Take the bins and the trees that this owner lacks."""
        steps.take_layout(self, layout)
        news = steps.catch_up(self, first, trees)
        self.scores = self.scores + torch.from_numpy(
            news.scores(steps.binned(self).bins, len(self.scores))
        )

    def histograms(
        self, *, t: int, bits: int, exponent: int, splits: Any, asked: Tensor, tree: Tensor
    ) -> dict[str, Tensor]:
        """The sums of g, h and rows by bin in the asked nodes of round t's trees, in words as in
        `sent`.
        """
        own = steps.binned(self)
        loss = SquaredError(bits, exponent) if self.context.target else CrossEntropy(bits)
        if not len(splits["node"]):
            self.words = torch.from_numpy(loss.words(self.scores.numpy(), own.y))
            self.node = steps.roots(*self.words.shape)
        steps.move(self, splits)
        found = gradient_histograms(
            own.cells,
            self.words.numpy(),
            self.node.numpy(),
            asked.numpy(),
            tree.numpy(),
            own.layout.cells,
            loss.opened,
        )
        return {"sums": torch.from_numpy(sent(found.reshape(loss.statistics, -1), loss.wide))}

    def learn(self, *, splits: Any, trees: Any, places: Tensor) -> None:
        """Add the grown trees to the model, and their leaves to the scores."""
        steps.move(self, splits)
        # (nodes,) of each node as the owner numbers it
        leaves = trees["value"].numpy()[places.numpy(), 0]
        # for any places
        self.scores = self.scores + torch.from_numpy(leaves.take(self.node.numpy(), mode="clip"))
        self.trees = steps.extended(self.trees, steps.checked(self, trees))

    def lots(self) -> list[tuple[Trees, float]]:
        """The trees with which it predicts, with the weight of each lot."""
        joint, cfg = steps.trees_of(self.trees), self.cfg
        if cfg.own_trees:
            joint = joined([joint, own_trees(self, cfg.own_trees, start=self.scores)])
        weight = steps.own_weight(self) if cfg.mix else 0.0
        own = [(own_trees(self, cfg.mix), weight)] if cfg.mix else []
        return [(joint, 1 - weight), *own]

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K), or standardized numbers (n, 1), of rows x (n, F); 0 before the bins are
        agreed.
        """
        if not self.layout:
            return torch.zeros(len(x), self.context.classes)
        scores = steps.scores(self, x, len(self.scores))
        if self.cfg.own_trees:
            scores = scores + own_trees(self, self.cfg.own_trees, start=self.scores).scores(
                steps.bins_of(self, x), len(scores)
            )
        outputs = outputs_of(scores, self.context.target is not None)
        if not self.cfg.mix:
            return own_models.mixed(self, outputs, x)
        own_scores = own_trees(self, self.cfg.mix).scores(steps.bins_of(self, x), len(scores))
        own = outputs_of(own_scores, self.context.target is not None)
        weight = steps.own_weight(self)
        if self.context.target:
            return (1 - weight) * outputs + weight * own
        return torch.log((1 - weight) * outputs.softmax(-1) + weight * own.softmax(-1))


@final
class FedBoostServer(Party[FedBoostConfig]):
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


def outputs_of(scores: np.ndarray, number: bool) -> Tensor:
    """Logits (n, K), or numbers (n, 1), from scores (T, n)."""
    s = torch.from_numpy(scores * STEP).float()
    return torch.stack([torch.zeros_like(s[0]), s[0]], 1) if len(s) == 1 and not number else s.T


def loss_of(rows: np.ndarray, spread: float | None) -> Loss:
    """The loss, for all owners' `rows` by class, or by exponent of a number with this
    `Agreement.spread`.
    """
    n = int(rows.sum())
    if spread is None:
        return losses.of_classes(n)
    return losses.of_numbers(n, steps.largest_exponent(rows), spread)


def fewest(cfg: FedBoostConfig, rows: int) -> int:
    """The least number of rows of a leaf, of this many rows of all owners."""
    return cfg.min_rows or (20 if rows >= steps.FEW_ROWS else 5)


def own_trees(party: FedBoostClient, rounds: int, start: Tensor | None = None) -> Trees:
    """Trees of the party's own rows alone, from the scores `start` (T, n), or from nothing."""
    own, cfg, number = steps.binned(party), party.cfg, party.context.target is not None
    n = len(own.y)

    def make() -> Trees:
        rows = steps.own_rows(party)
        first = [] if start is not None else [boosting.base(None if number else rows)]
        scores = start.numpy() if start is not None else np.repeat(first[0].value, n, axis=1)
        how = BoostingSettings(cfg.depth, fewest(cfg, n), cfg.rate, cfg.l2)
        spread = own_spread(own.y, cfg.bins) if number else None
        where, loss = (own.layout, own.bins, own.cells, own.y), loss_of(rows, spread)
        return joined([*first, *boosting.grow(*where, scores, loss, rounds, how)[0]])

    return steps.kept(party.context, f"own {rounds}", "" if start is None else digest(start), make)


def round(
    fed: Federation, server: FedBoostServer, clients: Sequence[int], cfg: FedBoostConfig, t: int
) -> Iterator[str]:
    """The trees of one round."""
    T, number = outputs(server.context.classes), server.context.target is not None
    by_class, asked = {"rows": Shape("int64", steps.row_kinds(server))}, {"t": t}
    if not server.layout:  # agree
        layout = steps.agree(fed, server, clients)
        counted = (
            None if layout is None else fed.total(clients, "rows", shared=asked, expect=by_class)
        )
        if layout is None or counted is None:
            return
        first = boosting.base(None if number else counted.value["rows"].numpy())
        server.layout, server.trees = steps.layout_tree(layout), steps.trees_tree(first)
    layout = steps.layout_of(server.layout)
    began = fed.total(steps.begin(fed, server, clients), "rows", shared=asked, expect=by_class)
    if began is None:
        return
    counts = began.value["rows"].numpy()
    loss = loss_of(counts, float(server.spread) if number else None)
    least = fewest(cfg, int(counts.sum()))
    trees = Growth(T, layout, loss.criterion(cfg.l2), depth=cfg.depth, min_rows=least)
    scale = {"bits": loss.bits, "exponent": loss.exponent}
    if not steps.grow(fed, began.ids, trees, loss.statistics, {**asked, **scale}, wide=loss.wide):
        return
    news = trees.grown(lambda s: loss.leaf(s, cfg.rate, cfg.l2))
    message = {
        "splits": steps.splits_tree(trees.splits),
        "trees": steps.trees_tree(news),
        **steps.tensors(places=trees.places),
    }
    learned = fed.call(began.ids, "learn", shared=message, expect=None)
    steps.learn(server, news, trees.gains / loss.unit, learned)
    yield "round"


def at_once(
    fed: Federation,
    server: FedBoostServer,
    client: FedBoostClient,
    cfg: FedBoostConfig,
    rounds: int,
) -> None:
    """See `Method.at_once`: the same trees without messages, which take half of the time."""
    layout = steps.agree(fed, server, (0,))
    assert layout is not None
    client.layout = steps.layout_tree(layout)
    client.trees = steps.trees_tree(own_trees(client, rounds))


FEDBOOST = Method(
    name="fedboost",
    title="Boosted trees from sums of integers, as on pooled rows",
    paper="Z. Tian et al.: FederBoost: Private Federated Learning for GBDT, 2020",
    family="tables",
    config=FedBoostConfig,
    tasks=EVERY_TASK,
    no_local="trees have no optimizer and count each row once",
    round=round,
    client=FedBoostClient,
    server=FedBoostServer,
    needs=("raw rows",),
    pooled=True,
    at_once=at_once,
    trial_rank=3,
)

METHODS = (
    FEDBOOST,
    replace(
        FEDBOOST,
        name="fedboost-mix",
        title="FedBoost; each owner predicts the mean with boosted trees of its own rows",
        fixed={"mix": 100},
        trial_rank=0,
    ),
)
