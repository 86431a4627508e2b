"""FedExtra: boosted trees with random splits, from one sum a round; with `dp`, differential privacy
of rows.

Paper: P. Geurts, D. Ernst, L. Wehenkel, "Extremely Randomized Trees", Machine Learning 63, 2006,
for splits at random. S. Maddock, G. Cormode, T. Wang, C. Maple, S. Jha, "Federated Boosted Decision
Trees with Differential Privacy", CCS 2022, arXiv 2210.02910, of whose variants this is one with
random splits.

    agree     the bins of all columns from sums of counts; with `dp` nothing is counted: bins of declared ranges
    round     T trees at once: 1 for two classes or a number, K for more
              server   draws complete trees without data
              owners   g = p - 1[y = k], h = p (1 - p) of their rows, for a number g = score - y, h = 1, as integers;
                       the sums of both in each leaf, with `dp` Gaussian noise on them, rounded to
                       integers | sums alone
              server   leaves -rate G / (max(H, 0) + l2); owners: scores += leaf

With `dp`: a row is in one leaf of each of the T trees, so it moves the sums of a round by at most Δ
    = `sensitivity` in
L2 norm, if no two trees share a leaf, which is not checked (for more than two classes 1.054 Δ if
they do): with |g| <= 1 and h <= 1/4 by sqrt(1 + 1/16) for two classes, and for a number, whose
residuals are clipped to `CLIP` s.d., by sqrt(CLIP^2 + 1). Each round is one release of all rows
with noise of standard deviation σ Δ. The noise hides whether a row is there, so the number of rows
is not used.

Whose noise. In a run without secure sums each owner's reply alone has noise σ Δ. With
`aggregate.secure = true` the replies are masked, and each owner adds a share, so that the sum has σ
Δ even without the noise of one owner, who knows its own, and of those that a secure sum can lose. ε
of the run counts the sum's noise, and is true if as many owners take part as `data.clients` says,
which a node cannot check. The budget of a node counts what the node itself adds, as it cannot know
what others do.

Differs:
    The paper's other variants choose splits by noisy histograms; all columns are then paid for at
    each level. Geurts et al. draw `columns` splits and take the best; here one is drawn, so that a
    tree is one sum. The base score is 0, and with `dp` bins are equally wide, as counts would be
    releases of their own. Clipped residuals are the derivatives of Huber's loss, not of the squared
    error.
"""  # noqa: E501

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, final

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from torch import Tensor

from fedloom.core.errors import MessageError, MethodError, did_you_mean
from fedloom.core.fixed_point import threshold
from fedloom.core.page import EVERY_TASK, ClientContext, Federation, Guarantee, Method, Party, Shape
from fedloom.methods.tables import own_models, steps
from fedloom.methods.tables.fedboost import outputs_of
from fedloom.protect.accountant import ABSENT, Releases, epsilon
from fedloom.protect.noise import charge, draws, or_nothing
from fedloom.trees import random as random_trees
from fedloom.trees.bins import MOST_BINS, Bins, keys
from fedloom.trees.boosting import outputs
from fedloom.trees.exact import MOST_BITS, STEP, gradients, residuals
from fedloom.trees.losses import coarse
from fedloom.trees.model import Trees

CLIP = 2.0
"""With `dp` the largest residual of a standardized number."""
FARTHEST = 1024.0
"""The same without `dp`, so that sums are exact."""
FINER = 20
"""Bits behind the point of residuals, without `dp`, of numbers for which those of others are too
coarse.
"""
NOISE = "leaf noise"
"""The note of the noise multiplier of a round's sums."""


class LeafNoise(BaseModel):
    """The noise on sums of leaves, and what it needs: ranges that no row decides about."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    sigma: float = Field(gt=0)
    """Noise multiplier σ of a round: the noise has standard deviation σ times the sensitivity."""
    grid: Mapping[str, tuple[float, float]]
    """For each column of numbers that trees may use its lowest and highest value, from knowledge
    and not from rows. Values beyond count as these. Columns of numbers without a range are not
    used.
    """
    delta: float = Field(1e-5, gt=1e-10, lt=1)
    """δ at which ε is reported."""

    @field_validator("grid")
    @classmethod
    def _ranges(cls, grid: Mapping[str, tuple[float, float]]) -> Mapping[str, tuple[float, float]]:
        for name, (low, high) in grid.items():
            if not -1e30 < low < high < 1e30:
                raise ValueError(
                    f"the range of {name} must be two numbers, the lower first, not {low:g}, "
                    f"{high:g}"
                )
        return grid


class FedExtraConfig(steps.TreesConfig):
    """A round is one tree, or one for each of more than two classes."""

    TRIAL = (("l2", 1.0),)
    dp: LeafNoise | None = None
    """Differential privacy of rows; None for no noise."""
    bins: int = Field(32, ge=4, le=MOST_BINS)
    """The most bins of a column: one for missing values, the others with equally many rows; with
    `dp` equally wide.
    """
    depth: int = Field(6, ge=1, le=12)
    """Splits above a leaf."""
    rate: float = Field(0.3, gt=0, le=1)
    """The share of a leaf's Newton step that is taken."""
    l2: float = Field(20.0, gt=0)
    """λ, added to the sum of h of a leaf."""

    @property
    def iterations_per_round(self) -> int:
        """100 rounds unless the run says otherwise."""
        return 2

    @property
    def sums_stand_alone(self) -> bool:
        """Scores follow from the trees of `begin`, which enters no sum."""
        return True

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Trees that an owner lacks come before a round's sums, and its own after them."""
        return {**super().calls_in_round(context), "begin": 2}

    @model_validator(mode="after")
    def _owners(self) -> Self:
        if self.dp is not None and self.owner_column:
            raise ValueError("dp has no owner_column: leave one of the two out")
        return self

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """That of the sums of leaves."""
        if self.dp is None:
            return ()
        spent = lambda sigmas: epsilon([Releases(sigma) for sigma in sigmas], self.dp.delta)
        planned = lambda party, rounds: [self.dp.sigma] * rounds
        return (Guarantee("sums of leaves", ABSENT, self.dp.delta, NOISE, spent, planned=planned),)

    def charges(self, party: Party[Self], rounds: Sequence[int]) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`: once a round."""
        return [] if self.dp is None else [(own_sigma(party), 1, 1.0) for _ in rounds]

    def least_in_sum(self, context: ClientContext) -> int:
        """See `MethodConfig.least_in_sum`: as many as the shares of noise
        are made for.
        """
        return threshold(context.parties) if self.dp else 0


@final
class FedExtraClient(Party[FedExtraConfig]):
    """An owner of rows. `scores` (T, n) are those of its own rows."""

    ROLE = "client"
    STATE = ("layout", "trees", "scores")
    EXPORT = ("layout", "trees")
    CALLS = ("segments", "words_of", "begin", "sums")
    MEANS = ("segments", "words_of", "sums")
    TELLS = (("by class", MEANS),)

    def setup(self) -> None:
        """No trees, and no bins but declared ones."""
        self.layout = declared(self.cfg, self.context)
        self.trees = steps.no_trees(1)
        self.scores = torch.zeros(
            outputs(self.context.classes), len(self.context.rows), dtype=torch.int64
        )

    def segments(
        self, *, column: Tensor, start: Tensor, size: int, parts: int
    ) -> dict[str, Tensor]:
        """See `steps.segments`."""
        _refuse_counts(self.cfg)
        return steps.segments(self, column=column, start=start, size=size, parts=parts)

    def words_of(self, *, sizes: Tensor) -> dict[str, Tensor]:
        """See `steps.words_of`."""
        _refuse_counts(self.cfg)
        return steps.words_of(self, sizes=sizes)

    def begin(self, *, layout: Any, first: int, trees: Any) -> None:
        """Take the bins, unless they are declared, and the trees that this owner lacks."""
        if self.cfg.dp is None:
            steps.take_layout(self, layout)
        news = steps.catch_up(self, first, trees)
        self.scores = self.scores + torch.from_numpy(
            news.scores(steps.binned(self).bins, len(self.scores))
        )

    def sums(self, *, t: int, trees: Any, bits: int = MOST_BITS) -> dict[str, Tensor]:
        """The sums (2, m) of g and h in each node of T new trees, in steps of 2^-bits; with noise,
        and steps of 2^-`MOST_BITS`, if `dp` is set.

        Raises:
            MessageError: the trees cannot predict, or are not T.
        """
        layout, new, T = steps.layout_of(self.layout), steps.trees_of(trees), len(self.scores)
        problem = new.problem(len(layout.edges), int(layout.widths.max()))
        if problem or len(new) != T:  # in more trees a row would count more
            raise MessageError(f"a round needs {T} trees, not {len(new)}: {problem}")
        dp, m, number = self.cfg.dp, len(new.feature), self.context.target is not None

        def summed() -> Tensor:
            own = steps.binned(self)
            leaf = new.leaves(own.bins)
            scores = self.scores.numpy()
            if number and dp is None:
                derivatives = residuals(scores, own.y, bits, FARTHEST)
            elif number:
                derivatives = residuals(scores, own.y, MOST_BITS, CLIP)
            else:
                derivatives = gradients(scores, own.y, MOST_BITS)
            return torch.from_numpy(np.stack([by_node(leaf, part, m) for part in derivatives]))

        if dp is None:
            return {"sums": summed()}
        delta, sigma = sensitivity(T, number), own_sigma(self)
        charge(self, sigma)
        nothing = torch.zeros(2, m, dtype=torch.int64)
        noise = draws(self, NOISE, t).blur(nothing.double(), sigma * delta, delta).round().long()
        self.note(NOISE, dp.sigma)
        return {"sums": or_nothing(self, summed, nothing) + noise}

    def lots(self) -> list[tuple[Trees, float]]:
        """The trees with which it predicts, all with one weight."""
        return [(steps.trees_of(self.trees), 1.0)]

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K), or standardized numbers (n, 1), of rows x (n, F); 0 before
        the first tree.
        """
        if not len(self.trees["root"]):
            return torch.zeros(len(x), self.context.classes)
        return own_models.mixed(
            self,
            outputs_of(steps.scores(self, x, len(self.scores)), self.context.target is not None),
            x,
        )


@final
class FedExtraServer(Party[FedExtraConfig]):
    """The server, which sees noisy sums."""

    ROLE = "server"
    STATE = ("layout", "trees", "known", "gains", "spread")
    layout: dict[str, Any]
    trees: dict[str, Tensor]
    known: Tensor
    gains: Tensor
    spread: Tensor

    def setup(self) -> None:
        """No trees, and no bins but declared ones."""
        steps.init_server(self)
        self.layout = declared(self.cfg, self.context)


def declared(cfg: FedExtraConfig, context: ClientContext) -> dict[str, Any]:
    """With `dp` the bins of declared ranges, of which a column without one has none; else {}.

    Raises:
        MethodError: a range is of no column of numbers, or there is no range.
    """
    if cfg.dp is None:
        return {}
    numbers = [
        name for name, words in zip(context.columns, context.words, strict=True) if not words
    ]
    for name in cfg.dp.grid:
        if name not in numbers:
            hint = did_you_mean(name, numbers)
            raise MethodError(
                f"params.dp.grid: {name!r} is no column of numbers: leave it out.{hint}"
            )
    if numbers and not cfg.dp.grid:
        raise MethodError(
            f"params.dp.grid: private trees need declared ranges of columns, such as {{ "
            f"{numbers[0]!r} = [lowest, highest] }}: set it for some of {', '.join(numbers[:20])}"
        )
    edges = []
    for name, words in zip(context.columns, context.words, strict=True):
        if words:
            edges.append(np.arange(min(len(words), cfg.bins - 2)))
        elif name in cfg.dp.grid:
            edges.append(keys(np.linspace(*cfg.dp.grid[name], cfg.bins)[1:-1]))
        else:
            edges.append(np.empty(0, np.int64))
    return steps.layout_tree(Bins(tuple(edges), np.array([bool(words) for words in context.words])))


def sensitivity(trees: int, number: bool = False) -> float:
    """Δ, the largest distance in L2 norm that one row moves the sums of a round by, in steps of
    2^-MOST_BITS.

    |g| <= 1 for two classes, and the sum of g_k^2 over more is at most 2; each h <= 1/4. Of a number |g| <= `CLIP`
    and h = 1. Rounding moves each of the 2 T
    numbers by at most one step.
    """  # noqa: E501
    if number:
        # both are whole steps: rounding passes neither
        return float(2**MOST_BITS * math.sqrt(CLIP**2 + 1))
    return float(
        2**MOST_BITS * math.sqrt((1 if trees == 1 else 2) + trees / 16) + math.sqrt(2 * trees)
    )


def share(context: ClientContext) -> float:
    """An owner's noise as a part of σ Δ: 1, or in a secure sum 1 / sqrt(m - 1), where m is the
    least number of owners whose replies make a sum.
    """
    return 1 / math.sqrt(threshold(context.parties) - 1) if context.aggregator.secure else 1.0


def own_sigma(party: Party[FedExtraConfig]) -> float:
    """The noise multiplier of an owner's own noise."""
    assert party.cfg.dp is not None
    return party.cfg.dp.sigma * share(party.context)


def by_node(leaf: np.ndarray, values: np.ndarray, nodes: int) -> np.ndarray:
    """The sums (nodes,) int64 over T trees of the values (T, n) of the rows in each leaf (T, n)."""
    # exact below 2^53
    return np.bincount(leaf.ravel(), values.ravel(), minlength=nodes).astype(np.int64)


def _refuse_counts(cfg: FedExtraConfig) -> None:
    """Refuse to count rows where they are to be private."""
    if cfg.dp is not None:
        raise MessageError("with params.dp nothing is counted")


def round(
    fed: Federation, server: FedExtraServer, clients: Sequence[int], cfg: FedExtraConfig, t: int
) -> Iterator[str]:
    """The trees of one round."""
    if not server.layout:  # agree
        agreed = steps.agree(fed, server, clients)
        if agreed is None:
            return
        server.layout = steps.layout_tree(agreed)
    T, layout = outputs(server.context.classes), steps.layout_of(server.layout)
    owners = steps.begin(fed, server, clients)
    if not owners:
        return
    new = random_trees.drawn(layout, T, cfg.depth, server.stream("random trees", t))
    bits = FINER if coarse(-MOST_BITS, float(server.spread)) else MOST_BITS
    found = fed.total(
        owners,
        "sums",
        shared={"t": t, "trees": steps.trees_tree(new), "bits": bits},
        expect={"sums": Shape("int64", 2, len(new.feature))},
        min_replies=max(1, cfg.least_in_sum(server.context) if fed.aggregator.secure else 1),
    )
    if found is None:
        return
    G, H = found.value["sums"].numpy().astype(np.float64) / 2.0**bits
    value = np.where(
        new.feature < 0, np.rint(-cfg.rate * G / (np.maximum(H, 0) + cfg.l2) / STEP), 0
    )
    news = replace(new, value=value.astype(np.int64)[:, None])
    steps.learn(server, news, np.zeros(len(server.gains)), ())
    steps.begin(fed, server, clients)
    yield "round"


METHODS = (
    Method(
        name="fedextra",
        title="Boosted trees with random splits, one sum a round; with dp, differential privacy of "
        "rows",
        paper="P. Geurts et al.: Extremely Randomized Trees, 2006; S. Maddock et al.: Federated "
        "Boosted Decision Trees with Differential Privacy, CCS 2022",
        family="tables",
        tasks=EVERY_TASK,
        no_local="trees have no optimizer and count each row once",
        config=FedExtraConfig,
        round=round,
        client=FedExtraClient,
        server=FedExtraServer,
        needs=("raw rows",),
    ),
)
