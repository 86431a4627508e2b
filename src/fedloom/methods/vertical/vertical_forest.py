"""Vertical trees: parties send the bins of their aligned rows once, and the active party grows a
forest, or boosts.

Paper: L. Breiman, "Random Forests", Machine Learning 45, 2001. Bins that cross in place of values
are the vertical case of Z. Tian et al., "FederBoost", arXiv 2011.02796. M. Saar-Tsechansky, F.
Provost, "Handling Missing Values when Applying Classification Models", JMLR 8, 2007, for a model of
each set of columns ("reduced models").

    parties   bins of each column from its own rows, aligned or not; the bins (N_a, F_m) of the aligned rows   | once
    active    a round is one lot of trees for each set S of parties that may be there at prediction, over the columns of
              S: rows drawn with replacement, `columns` of them drawn for each node, the best split
              by Gini, or for a number by squared error; with `vertical-boosting` trees as fedboost
              adds them instead
    predict   parties send the bins of the new rows; a row is predicted by the forest of the parties that have it

Messages: bins, uint8, from parties to the active party. Nothing that depends on labels goes to a
party. The active party learns each aligned person's place in each column of the others, without
values and names of columns.

A row that a party lacks has bin 0, a missing value, in the party's columns. The forest of S is
grown from the rows that some party of S has. A party that does not answer is asked again in the
next round, whose trees then use its columns.

`round` has the parties' bins kept (`keep_bins`) and a lot of trees grown for each S (`grow`); for a
prediction an engine collects `contribution` of the parties, and gives them to `decide`. A row whose
bins at a party are all 0 counts as one that the party lacks. Where bins of several parties are side
by side, the columns are in the order of the parties' numbers.

Differs: splits are between bins, not between values. FederBoost boosts, as `vertical-boosting`
does; with few aligned rows forests are better (docs/vertical-trees.md).

`active-forest` is the forest of the active party's own columns alone.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import comb
from typing import Any, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.message import check_like
from fedloom.core.page import (
    EVERY_TASK,
    Federation,
    LearnedTable,
    MessageError,
    Method,
    MethodConfig,
    MethodError,
    Party,
    Shape,
)
from fedloom.methods.tables.fedboost import outputs_of
from fedloom.methods.tables.steps import trees_of, trees_tree
from fedloom.methods.vertical import steps
from fedloom.trees import boosting, forest, losses
from fedloom.trees.bins import Bins, own_edges, own_spread
from fedloom.trees.boosting import BoostingSettings, outputs
from fedloom.trees.exact import PARTS
from fedloom.trees.histograms import cells_of
from fedloom.trees.model import Trees, joined
from fedloom.trees.splits import Squares

BEYOND = 2**32
"""A key that no value has."""
FLOOR = 1e-3
"""The smallest probability of a class."""
MOST_COLUMNS = 2**14
"""Limit of the columns of a party."""
TREES = {
    "root": Shape("int32", None),
    "feature": Shape("int16", None),
    "left": Shape("uint8", None, None),
    "child": Shape("int32", None),
    "value": Shape("int64", None, None),
}
"""The form of a forest in a folder."""
LARGEST = 2**40
"""Limit of the values of leaves in a folder."""
MOST_SETS = 255
"""Limit of the sets of parties with forests of their own."""


class VerticalTreesConfig(MethodConfig):
    """A round is one lot of trees."""

    bins: int = Field(32, ge=4, le=255)
    """The most bins of a column, with that of missing values. Fewer tell less of a person."""
    absent: int | None = Field(None, ge=0)
    """How many parties may be absent at a prediction: each set with at most so many fewer has a
    forest. None for any number. Other sets are predicted by the forest of all parties, for which
    the absent columns are missing values.
    """
    incomplete: Literal["use"] = "use"
    """Rows that a party lacks are used."""

    @property
    def iterations_per_round(self) -> int:
        """Five rounds unless the run says otherwise."""
        return 40


class VerticalForestConfig(VerticalTreesConfig):
    """A round is one lot of trees."""

    lot: int = Field(60, ge=1, le=1000)
    """Trees of a round."""
    depth: int = Field(12, ge=1, le=20)
    """The most splits above a leaf."""
    min_rows: int = Field(3, ge=1)
    """The least number of rows of a leaf, each counted as often as it is drawn."""
    columns: int | None = Field(None, ge=1)
    """The columns that a node may split; None for the square root of their number."""


class VerticalBoostingConfig(VerticalTreesConfig):
    """A round is a lot of trees, one after the other; for more than two classes each is one tree a
    class.
    """

    lot: int = Field(20, ge=1, le=1000)
    """Trees of a round."""
    depth: int = Field(3, ge=1, le=12)
    """The most splits above a leaf."""
    min_rows: int = Field(5, ge=1)
    """The least number of rows of a leaf."""
    rate: float = Field(0.1, gt=0, le=1)
    """The share of a leaf's Newton step that is taken."""
    l2: float = Field(1.0, gt=0)
    """λ, added to the sum of h of a leaf."""


@final
class BinsParty(Party[VerticalTreesConfig]):
    """A party's columns. `edges` (F, bins - 2) int64 are the keys at which its bins begin, from the
    second bin on.
    """

    STATE = ("edges",)
    EXPORT = ("edges",)
    ROLE = "party"
    CALLS = ("bins",)
    TELLS = ()

    def setup(self) -> None:
        """Bins with equally many of the rows that the party has."""
        rows = self.data
        x = rows.every if rows.present is None else rows.every[rows.present]
        found = own_edges(x.flatten(1).cpu().numpy(), self.cfg.bins)
        edges = torch.full((len(found), self.cfg.bins - 2), BEYOND)
        for f, keys in enumerate(found):
            edges[f, : len(keys)] = torch.from_numpy(keys)
        self.edges = edges

    def bins(self) -> Tensor:
        """The bins (N_a, F) uint8 of the aligned rows, 0 for rows that the party lacks."""
        found = self.infer(steps.aligned_rows(self))
        present = self.data.present
        return found if present is None else found * present[: self.context.aligned, None]

    def contribution(self, *, on: str) -> Tensor:
        """The bins (n, F) for a joint evaluation."""
        return self.bins() if on == "aligned" else self.infer(self.context.tests[on].every)

    def infer(self, x: Tensor) -> Tensor:
        """The bins (n, F) uint8, from 1 on, of rows x (n, ...)."""
        layout = Bins(tuple(self.edges.cpu().numpy()), np.zeros(len(self.edges), bool))
        return torch.from_numpy(layout.of(x.flatten(1).cpu().numpy())).to(x.device)


@final
class VerticalForestActive(Party[VerticalTreesConfig]):
    """The active party. `sent` has the bins (N_a, F_m) of each party that has answered, by its
    number; `widths` (M,) their columns F_m, 0 for others; `forests` the trees of each set of
    parties; `gains` (M, W) the gains of splits by column, in the forest of all parties.
    """

    STATE = ("sent", "widths", "forests", "gains")
    EXPORT = ("widths", "forests")
    ROLE = "active"

    def setup(self) -> None:
        """No bins and no trees."""
        parties = self.context.parties
        sets = sum(comb(parties, size) for size in sizes(parties, self.cfg.absent))
        if sets > MOST_SETS:
            raise MethodError(
                f"{parties} parties have {sets} sets, and at most {MOST_SETS} may have forests: "
                "set params.absent=1"
            )
        self.sent: dict[str, Tensor] = {}
        self.widths = torch.zeros(parties, dtype=torch.int64)
        self.forests: dict[str, Any] = {}
        self.gains = torch.zeros(parties, 0, dtype=torch.float64)

    def keep_bins(self, replies: Mapping[int, Tensor]) -> None:
        """Keep the bins (N_a, F_m) of these parties."""
        self.sent = {**self.sent, **{str(m): bins for m, bins in replies.items()}}
        widths = self.widths.clone()
        for m, bins in replies.items():
            widths[m] = bins.shape[1]
        self.widths = widths
        # as many gains for each party as the widest one has columns
        self.gains = torch.nn.functional.pad(
            self.gains, (0, int(widths.max()) - self.gains.shape[1])
        )

    def grow(self, t: int) -> None:
        """Round t's lot of trees of each set of the parties that have answered."""
        # sorted, as a forest has its columns in the order of the parties' numbers
        heard, y = sorted(map(int, self.sent)), steps.labels(self).cpu().numpy()
        forests = dict(self.forests)
        for parties in (
            s for size in sizes(len(heard), self.cfg.absent) for s in combinations(heard, size)
        ):
            bins = np.concatenate([self.sent[str(m)].cpu().numpy() for m in parties], axis=1)
            known = bins.any(1)  # (N_a,) the rows that one of these parties has
            if not known.any():
                continue
            old = trees_of(forests[name(parties)]) if name(parties) in forests else None
            if isinstance(self.cfg, VerticalBoostingConfig):
                forests[name(parties)], gains = boosted(self, self.cfg, bins[known], y[known], old)
            else:
                rng = self.stream("forest", t, sum(1 << m for m in parties))
                forests[name(parties)], gains = planted(self, bins[known], y[known], old, rng)
            if len(parties) == len(heard):  # importance is that in the forest of all
                self._count(parties, gains)
        self.forests = forests

    def _count(self, parties: Sequence[int], gains: np.ndarray) -> None:
        """Add the gains of splits by these parties' columns."""
        every, ends = self.gains.clone(), np.cumsum([int(self.widths[m]) for m in parties])
        for m, part in zip(parties, np.split(gains, ends[:-1]), strict=True):
            every[m, : len(part)] += torch.from_numpy(part)
        self.gains = every

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, K) from the bins (n, F_m) of the parties that answer: logarithms of
        probabilities, or standardized numbers (n, 1); 0 before there are trees. Bins 0, or of
        another number of columns than were trained with, are read as absence.
        """
        first = next(iter(contributions.values()))
        n, K, number = len(first), self.context.classes, self.context.target is not None
        widths = self.widths.tolist()  # 0 of a party whose bins never came

        # The usable bins by party, in the range that trees know, as a party may send anything.
        parts = {
            m: x.clamp(0, self.cfg.bins - 1).to(torch.uint8).cpu().numpy()
            for m, x in contributions.items()
            if widths[m] and x.shape == (n, widths[m])
        }

        # Which of the parties that were heard in training has which row: `here` (n, heard). Nobody
        # was heard before the first round; then there is one column, and no forest.
        heard = [m for m, width in enumerate(widths) if width]
        p = np.zeros((n, 1)) if number else np.full((n, K), 1 / K)
        here = np.stack(
            [parts[m].any(1) if m in parts else np.zeros(n, bool) for m in heard] or [np.zeros(n)],
            axis=1,
        )

        # Rows that the same parties have are predicted together, by the forest of these parties; by
        # that of all, with bins 0 for those that lack the row, if these have none of their own.
        for pattern in np.unique(here, axis=0):
            rows = (here == pattern).all(1)
            there = [m for m, has in zip(heard, pattern, strict=False) if has]
            used = there if name(there) in self.forests else heard
            if name(used) not in self.forests:
                continue  # before any trees: equal shares, or the mean, 0
            blank = {
                m: np.zeros((int(rows.sum()), widths[m]), np.uint8) for m in used if m not in parts
            }
            bins = np.concatenate(
                [parts[m][rows] if m in parts else blank[m] for m in used], axis=1
            )

            # Scores are sums over trees in steps of 1 / PARTS. Boosted ones are the model, while a
            # forest's are divided by its number of trees.
            trees = trees_of(self.forests[name(used)])
            if isinstance(self.cfg, VerticalBoostingConfig):
                found = outputs_of(trees.scores(bins, outputs(K)), number)
                p[rows] = (found if number else found.softmax(-1)).numpy()
                continue
            scores = trees.scores(bins, 1 if number else K)
            p[rows] = scores.T / (PARTS * len(trees)) if number else forest.shares(scores)

        # No probability is 0, whose logarithm would be infinite, and they still add up to 1.
        if number:
            return torch.from_numpy(p).float().to(first.device)
        return torch.from_numpy(np.log(FLOOR + (1 - K * FLOOR) * p)).float().to(first.device)

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Nothing: no message to a party depends on labels."""
        return {}

    def restore(self, state: Any) -> None:
        """Take the widths and forests of a folder.

        Raises:
            MessageError: they do not fit each other.
        """
        check_like(state, {"widths": self.widths, "forests": dict})
        number, parties = self.context.target is not None, self.context.parties
        one = number or isinstance(self.cfg, VerticalBoostingConfig)
        K = 1 if one else self.context.classes
        widths = state["widths"].tolist()
        if not all(0 <= width <= MOST_COLUMNS for width in widths):
            raise MessageError(f"widths must be from 0 to {MOST_COLUMNS}, not {widths}")
        sets = {
            name(s): s for size in range(1, parties + 1) for s in combinations(range(parties), size)
        }
        for key, tree in state["forests"].items():
            if key not in sets:
                raise MessageError(
                    f"a forest must be of parties from 0 to {parties - 1}, not of {key[:40]!r}"
                )
            check_like(tree, TREES)
            trees = trees_of(tree)
            problem = trees.problem(sum(widths[m] for m in sets[key]), self.cfg.bins)
            least = -LARGEST if one else 0
            if (
                problem
                or trees.value.shape[1] != K
                or ((trees.value < least) | (trees.value > LARGEST)).any()
            ):
                problem = problem or f"leaves must have {K} values from {least} to {LARGEST}"
                raise MessageError(f"the forest of {key}: {problem}")
        self.widths, self.forests = state["widths"], state["forests"]

    def findings(self) -> list[LearnedTable]:
        """The share of each party, and of its columns, in the gains of all splits."""
        shares = self.gains / self.gains.sum().clamp(min=1e-300)
        by_party = [
            (f"party {m}", int(self.widths[m]), float(shares[m].sum())) for m in range(len(shares))
        ]
        order = shares.flatten().argsort(descending=True, stable=True)[:10].tolist()
        width = max(shares.shape[1], 1)
        top = [
            (f"party {i // width}", i % width, float(shares.flatten()[i]))
            for i in order
            if shares.flatten()[i] > 0
        ]
        return [
            LearnedTable(
                "Importance: the share of the gains of all splits",
                ("Party", "Columns", "Share"),
                tuple(by_party),
            ),
            LearnedTable(
                "The most important columns", ("Party", "Number of its column", "Share"), tuple(top)
            ),
        ]


def planted(
    active: VerticalForestActive,
    bins: np.ndarray,
    y: np.ndarray,
    old: Trees | None,
    rng: np.random.Generator,
) -> tuple[Any, np.ndarray]:
    """The old trees and a lot of a forest from rows bins (n, F) and y (n,); and the gains (F,) of
    its splits.
    """
    cfg, n = active.cfg, len(y)
    assert isinstance(cfg, VerticalForestConfig)
    drawn = np.stack([np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(cfg.lot)])
    layout = layout_of(cfg.bins, bins.shape[1])
    how = (layout, cfg.lot, cfg.columns, cfg.depth, cfg.min_rows, rng)
    if active.context.target is None:
        trees = forest.growth(*how)
        news = forest.grow(trees, layout, bins, y, drawn, active.context.classes)
    else:
        trees = forest.growth(*how, Squares())
        news = forest.grow_of_numbers(trees, layout, bins, y, drawn, own_spread(y, cfg.bins))
    return trees_tree(joined([*([old] if old else []), news])), trees.gains


def boosted(
    active: VerticalForestActive,
    cfg: VerticalBoostingConfig,
    bins: np.ndarray,
    y: np.ndarray,
    old: Trees | None,
) -> tuple[Any, np.ndarray]:
    """The old trees and a lot of boosted ones from rows bins (n, F) and y (n,); and the gains (F,)
    of their splits.
    """
    n, K, number = len(y), active.context.classes, active.context.target is not None
    before = old or boosting.base(None if number else np.bincount(y, minlength=K))
    if number:
        exponent = int(np.frexp(np.abs(y).max())[1])
        loss: losses.Loss = losses.of_numbers(n, exponent, own_spread(y, cfg.bins))
    else:
        loss = losses.of_classes(n)
    layout = layout_of(cfg.bins, bins.shape[1])
    how = BoostingSettings(cfg.depth, cfg.min_rows, cfg.rate, cfg.l2)
    scores = before.scores(bins, outputs(K))
    news, gains = boosting.grow(layout, bins, cells_of(bins, layout), y, scores, loss, cfg.lot, how)
    return trees_tree(joined([before, *news])), gains


def sizes(parties: int, absent: int | None) -> range:
    """The sizes of the sets of parties with forests, the largest first."""
    least = 1 if absent is None else max(1, parties - absent)
    return range(parties, least - 1, -1)


def name(parties: Sequence[int]) -> str:
    """The name of a set of parties."""
    return "-".join(map(str, parties))


def layout_of(bins: int, columns: int) -> Bins:
    """As many bins for each column."""
    return Bins((np.arange(bins - 2),) * columns, np.zeros(columns, bool))


def round(
    fed: Federation,
    active: VerticalForestActive,
    parties: Sequence[int],
    cfg: VerticalForestConfig,
    t: int,
) -> Iterator[str]:
    """Ask for bins that the active party lacks, and grow a lot of trees."""

    def check(_: int, bins: Tensor) -> None:
        if not 1 <= bins.shape[1] <= MOST_COLUMNS or bool((bins >= cfg.bins).any()):
            raise MessageError(f"bins must be below {cfg.bins}, in 1 to {MOST_COLUMNS} columns")

    if lacking := [m for m in parties if str(m) not in active.sent]:
        active.keep_bins(
            fed.call(
                lacking, "bins", expect=Shape("uint8", active.context.aligned, None), check=check
            )
        )
    active.grow(t)
    yield "round"


def round_alone(
    fed: Federation,
    active: VerticalForestActive,
    parties: Sequence[int],
    cfg: VerticalForestConfig,
    t: int,
) -> Iterator[str]:
    """A lot of trees over the active party's own columns."""
    yield from round(fed, active, [m for m in parties if m == 0], cfg, t)


VERTICAL_FOREST = Method(
    name="vertical-forest",
    title="A random forest over the bins of all parties' columns, sent once",
    paper="L. Breiman: Random Forests, 2001; Z. Tian et al.: FederBoost: Private Federated "
    "Learning for GBDT, 2020",
    family="vertical",
    tasks=EVERY_TASK,
    no_local="trees have no optimizer and count each row once",
    config=VerticalForestConfig,
    round=round,
    client=BinsParty,
    server=VerticalForestActive,
    setting="vertical",
    needs=("no network",),
    any_contributor=True,
)

METHODS = (
    replace(VERTICAL_FOREST, trial_rank=1),
    replace(
        VERTICAL_FOREST,
        name="vertical-boosting",
        title="Boosted trees over the bins of all parties' columns, sent once",
        paper="Z. Tian et al.: FederBoost: Private Federated Learning for GBDT, 2020",
        config=VerticalBoostingConfig,
    ),
    replace(
        VERTICAL_FOREST,
        name="active-forest",
        title="The active party's forest on its own columns alone",
        round=round_alone,
        contributors=(0,),
        any_contributor=False,
    ),
)
