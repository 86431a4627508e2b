"""Table 1 over owners: rows, missing values, means, s.d., quartiles, words and drift, from sums alone, in one round.

Paper: none; drift between owners is the share η² of one-way analysis of variance (R. A. Fisher, "Statistical Methods
for Research Workers", 1925), and for words V of H. Cramér, "Mathematical Methods of Statistics", 1946.

    round     owners: for each column of numbers its known values, the sums of x and of x², and S²/n of its own sum S;
              for each category the rows c of each word, and c²/n; rows by class                         | sums alone
              twice, for each quartile of each column: owners' rows in 32 cells of a stretch             | sums alone
    end       mean, s.d., quartiles; drift between owners with its p-value

Sums of numbers are exact, so that means and s.d. are those of all rows together, rounded once. Quartiles are within a
thousandth of a s.d. of a value that has a quarter of the rows below it.

Nobody sends a minimum, a maximum or a value. Counts below `min_cell` are shown as such, and so is a second word where
its count would tell the first; quartiles need four times as many rows. The server learns the sums, exactly: secure sums
hide each owner's. As a model, it predicts the classes' shares, or the mean.

Messages: sums up; ends of stretches down.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import ceil, floor, isfinite, log10, sqrt
from typing import Any, final

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import (
    EVERY_TASK,
    Aggregator,
    ClientContext,
    Federation,
    LearnedTable,
    Method,
    MethodConfig,
    Party,
    Shape,
)
from fedloom.methods.tables.long_sums import (
    LONG,
    LONG_SQUARE,
    LOWEST,
    LOWEST_SQUARE,
    divided,
    opened,
    parts,
    totals_of,
)
from fedloom.methods.tables.steps import refusal, tensors
from fedloom.trees.histograms import two_in_one, untwined

QUARTILES = (0.25, 0.5, 0.75)
CELLS = 32
"""Cells of a stretch."""
FARTHEST = 1.75
"""In s.d.: no quartile is farther than √3 from the mean."""


class StatsConfig(MethodConfig):
    """One round is all; further ones send nothing."""

    min_cell: int = Field(5, ge=1)
    """The smallest count that is shown."""

    def local_steps_of(self, rows: int) -> None:
        """None: the coordinator computes from sums; owners take no optimizer steps."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return refusal(aggregator)

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Two stretches for each quartile."""
        return {"cells": 2}


@final
class StatsClient(Party[StatsConfig]):
    """An owner of rows. `shares` (K,) are those of the classes, or (1,) the mean of a standardized number."""

    ROLE = "client"
    STATE = ("shares",)
    EXPORT = ("shares",)
    CALLS = ("moments", "cells", "learn")
    MEANS = ("moments", "cells")

    def setup(self) -> None:
        """Equal shares of classes."""
        self.shares = torch.ones(max(self.context.classes, 1), dtype=torch.float64)

    def moments(self, *, t: int) -> dict[str, Tensor]:
        """Sums over own rows: see `expected`."""
        x, words = rows_of(self)
        known = ~np.isnan(x)
        clean = np.where(known, x, 0)
        n, own = known.sum(0), totals_of(clean, LOWEST, LONG)
        rows = [np.bincount(values[values >= 0], minlength=size) for values, size in words]
        counts = np.concatenate([np.empty(0), *rows]).astype(np.int64)
        totals = np.concatenate([np.empty(0), *(np.full(len(c), max(int(c.sum()), 1)) for c in rows)])
        return tensors(
            known=n,
            owners=(n > 0).astype(np.int64),
            sums=own,
            squares=totals_of(clean * clean, LOWEST_SQUARE, LONG_SQUARE),
            between=np.array([divided(s, max(k, 1)) for s, k in zip(own, n.tolist(), strict=True)], np.int64).reshape(
                -1, LONG_SQUARE
            ),
            words=counts,
            shares=parts(counts * counts / totals, LOWEST, LONG),
            having=np.array([c.sum() > 0 for c in rows], np.int64),
            rows=np.array(len(x)),
        )

    def cells(self, *, column: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
        """The rows of each column (q,) below, in each of 32 equal cells of, and above the stretch from low to high,
        (q, 34), two in one word."""
        x, _ = rows_of(self)
        found = []
        for f, a, b in zip(column.tolist(), low.tolist(), high.tolist(), strict=True):
            values = x[~np.isnan(x[:, f]), f]
            place = np.clip(np.floor((values - a) / (b - a) * CELLS), -1, CELLS).astype(np.int64) + 1
            found.append(np.bincount(place, minlength=CELLS + 2))
        return tensors(rows=two_in_one(np.concatenate(found)))

    def learn(self, *, shares: Tensor) -> None:
        """Take the shares (K,) of classes, or the mean (1,) of a number."""
        self.shares = shares

    def infer(self, x: Tensor) -> Tensor:
        """The logarithms (n, K) of the classes' shares, or the mean (n, 1)."""
        outputs: Tensor = (self.shares if self.context.target else self.shares.log()).float()
        expanded: Tensor = outputs.expand(len(x), -1)
        return expanded


@final
class StatsServer(Party[StatsConfig]):
    """The server, which sees sums over owners: `found` are those of the columns, by name."""

    ROLE = "server"
    STATE = ("found",)

    def setup(self) -> None:
        """Nothing is known."""
        self.found: dict[str, Any] = {}

    def findings(self) -> Sequence[LearnedTable]:
        """The numbers, and the words and classes."""
        if not self.found:
            return ()
        least, whole = self.cfg.min_cell, int(self.found["rows"])
        known, quarters, spreads = (x.tolist() for x in (self.found["known"], self.found["quartiles"], self.spreads()))
        numbers: list[tuple[str | float | None, ...]] = []
        for name, n, quartile, (mean, sd, *drift) in zip(number_columns(self), known, quarters, spreads, strict=True):
            hidden = quartile if n >= 4 * least else [None] * 3
            cells = [mean, sd, *hidden, *drift] if n >= least else [None] * 7
            numbers.append((name, shown(n, least), shown(whole - n, least), *map(finite, cells)))
        words: list[tuple[str | float | None, ...]] = []
        for (name, listed), (counts, *drift) in zip(categories(self), self.associations(), strict=True):
            of_words = sum(counts)
            for word, rows, cell in zip(listed, counts, masked(counts, least), strict=True):
                if word == "?" and not rows:  # missing words are counted below
                    continue
                share = None if isinstance(cell, str) else rows / max(of_words, 1)
                words.append((name, word, cell, share, *map(finite, drift)))
            if name != CLASS:
                words.append((name, "missing", shown(whole - of_words, least), None, None, None))
        ends = ("Drift", "p-value")
        head = ("Column", "Rows", "Missing", "Mean", "S.d.", "25%", "Median", "75%", *ends)
        tables = [
            LearnedTable("Numbers", head, tuple(numbers)),
            LearnedTable("Words", ("Column", "Word", "Rows", "Share", *ends), tuple(words)),
        ]
        return [table for table in tables if table.rows]

    def spreads(self) -> np.ndarray:
        """Mean, s.d., drift and its p-value of each column of numbers, (p, 4), NaN without."""
        s = {name: self.found[name].numpy() for name in ("known", "owners", "sums", "squares", "between")}
        total, squares = opened(s["sums"], LOWEST), opened(s["squares"], LOWEST_SQUARE)
        between = opened(s["between"], LOWEST_SQUARE)
        rows = zip(s["known"].tolist(), s["owners"].tolist(), total, squares, between, strict=True)
        return np.array([spread(*one) for one in rows], float).reshape(-1, 4)

    def constant(self) -> Tensor:
        """The shares (K,) of classes, to each of which a row is added, or the mean (1,) of a standardized number."""
        target = self.context.target
        if target is not None:
            mean: Tensor = torch.from_numpy(target.standardized(self.spreads()[-1:, 0])).double()
            return mean
        rows: Tensor = self.found["words"][-self.context.classes :].double() + 1
        shares: Tensor = rows / rows.sum()
        return shares

    def associations(self) -> list[tuple[list[int], float, float]]:
        """The rows of each word, drift and its p-value of each category, and of the classes."""
        counts, having = self.found["words"].tolist(), self.found["having"].tolist()
        shares, found, start = opened(self.found["shares"].numpy(), LOWEST), [], 0
        for (_, listed), owners in zip(categories(self), having, strict=True):
            cut = slice(start, start + len(listed))
            found.append((counts[cut], *association(counts[cut], shares[cut], owners)))
            start += len(listed)
        return found


CLASS, TARGET = "class", "number to predict"
"""The names of the label in the tables."""


def number_columns(party: Party[Any]) -> list[str]:
    """The names (p,) of the columns of numbers, with the number to predict."""
    names = [name for name, words in zip(party.context.columns, party.context.words, strict=True) if not words]
    return [*names, *([TARGET] if party.context.target else [])]


def categories(party: Party[Any]) -> list[tuple[str, Sequence[str]]]:
    """The names and words of the categories, and of the classes."""
    c = party.context
    found = [(name, words) for name, words in zip(c.columns, c.words, strict=True) if words]
    return [*found, *([] if c.target else [(CLASS, [str(k) for k in range(c.classes)])])]


def rows_of(party: Party[Any]) -> tuple[np.ndarray, list[tuple[np.ndarray, int]]]:
    """The party's numbers (n, p) float64, and the words (n,) of each category, -1 where missing, with their count: see
    `number_columns` and `categories`."""
    rows, listed, target = party.context.rows, party.context.words, party.context.target
    x = rows.every.flatten(1).double().cpu().numpy()
    y = rows.y(torch.arange(len(rows), device=party.context.device)).cpu().numpy()
    is_number = np.array([not words for words in listed], bool)
    words = [
        (np.where(np.isnan(x[:, f]), -1, x[:, f]).astype(np.int64), len(listed[f]))
        for f in np.flatnonzero(~is_number).tolist()
    ]
    if target is not None:
        return np.c_[x[:, is_number], target.in_unit(y)], words
    return x[:, is_number], [*words, (y, party.context.classes)]


def expected(party: Party[Any]) -> dict[str, Shape]:
    """The template of `moments`: known values, owners that have any, sums, squares and S²/n of numbers; rows, c²/n, and
    owners with any, of the words; all rows."""
    p, listed = len(number_columns(party)), categories(party)
    v = sum(len(words) for _, words in listed)
    shapes = {"known": (p,), "owners": (p,), "sums": (p, LONG), "squares": (p, LONG_SQUARE)}
    shapes |= {"between": (p, LONG_SQUARE), "words": (v,), "shares": (v, LONG), "having": (len(listed),), "rows": ()}
    return {name: Shape("int64", *shape) for name, shape in shapes.items()}


# -- what sums tell ------------------------------------------------------------------------------------------------


def spread(n: int, owners: int, total: Fraction, squares: Fraction, between: Fraction) -> tuple[float, ...]:
    """Mean, s.d. (of n - 1), η² between owners and the p-value of its F test."""
    if not n:
        return (np.nan,) * 4
    apart = squares - total * total / n
    mean, sd = float(total / n), sqrt(max(apart, Fraction(0)) / (n - 1)) if n > 1 else np.nan
    if owners < 2 or n <= owners or apart <= 0:
        return mean, sd, np.nan, np.nan
    from scipy.stats import f

    share = min(max(float((between - total * total / n) / apart), 0.0), 1.0)
    statistic = share / max(1 - share, 1e-300) * (n - owners) / (owners - 1)
    return mean, sd, share, float(f.sf(statistic, owners - 1, n - owners))


def association(counts: Sequence[int], shares: Sequence[Fraction], owners: int) -> tuple[float, float]:
    """Cramér's V of words and owners, and the p-value of the chi-squared test."""
    n, filled = sum(counts), sum(c > 0 for c in counts)
    if owners < 2 or filled < 2:
        return np.nan, np.nan
    from scipy.stats import chi2

    statistic = max(n * (float(sum(s / c for s, c in zip(shares, counts, strict=True) if c)) - 1), 0.0)
    freedom = min(owners, filled) - 1
    return sqrt(min(statistic / n / freedom, 1)), float(chi2.sf(statistic, (owners - 1) * (filled - 1)))


def finite(x: float | None) -> float | None:
    """The number, None for what is not finite."""
    return x if x is not None and isfinite(x) else None


# -- small cells ---------------------------------------------------------------------------------------------------


def shown(count: int, least: int) -> float | str:
    """The count, or that it is small."""
    return f"< {least}" if 0 < count < least else float(count)


def masked(counts: Sequence[int], least: int) -> list[float | str]:
    """The counts, the small ones hidden; if there is one, so is the next larger one, as the rest would tell it."""
    found, small = [shown(c, least) for c in counts], [i for i, c in enumerate(counts) if 0 < c < least]
    if len(small) == 1 and (others := [i for i, c in enumerate(counts) if c >= least]):
        found[min(others, key=lambda i: counts[i])] = "hidden"
    return found


# -- the round -----------------------------------------------------------------------------------------------------


def quartiles(fed: Federation, server: StatsServer, clients: Sequence[int]) -> np.ndarray | None:
    """The quartiles (p, 3) of the numbers; None if an owner's counts are missing."""
    (mean, sd), n = server.spreads().T[:2], server.found["known"].numpy()
    out = np.repeat(np.where(n > 0, mean, 0)[:, None], 3, axis=1)
    column = np.flatnonzero((n > 1) & (sd > 0))
    if not len(column):
        return out
    reach = FARTHEST * sd[column]
    low, high, places = mean[column] - reach, mean[column] + reach, [range(3)] * len(column)
    for _ in range(2):
        size = len(column) * (CELLS + 2)
        found = fed.total(
            clients,
            "cells",
            shared=tensors(column=column, low=low, high=high),
            expect={"rows": Shape("int64", -(-size // 2))},
            min_replies=len(clients),
        )
        if found is None:
            return None
        rows = np.cumsum(untwined(found.value["rows"].numpy(), size).reshape(-1, CELLS + 2), axis=1)
        ends = []
        for f, a, b, below, which in zip(column, low, high, rows, places, strict=True):
            for q in which:
                cell = int(np.clip(np.searchsorted(below, QUARTILES[q] * n[f]) - 1, 0, CELLS - 1))
                width = (b - a) / CELLS
                ends.append((f, a + cell * width, a + (cell + 1) * width, range(q, q + 1)))
        column, low, high = (np.array([end[k] for end in ends]) for k in range(3))
        places = [end[3] for end in ends]
    for f, a, b, (q,) in zip(column, low, high, places, strict=True):
        out[f, q] = roundest(a, b)
    return out


def roundest(low: float, high: float) -> float:
    """The number in [low, high) with the fewest decimals, so that the quartile of whole numbers is one."""
    if not low < high:
        return low
    size = floor(log10(high - low))
    for digits in range(-size - 20, 20 - size):
        step = Fraction(10) ** -digits
        found = ceil(Fraction(low) / step) * step
        if found < high:
            return float(found)
    return low


def round(fed: Federation, server: StatsServer, clients: Sequence[int], cfg: StatsConfig, t: int) -> Iterator[str]:
    """All sums, in the first round."""
    if server.found:
        return
    sums = fed.total(clients, "moments", shared={"t": t}, expect=expected(server), min_replies=len(clients))
    if sums is None:
        return
    server.found = sums.value
    found = quartiles(fed, server, clients)
    server.found = {**server.found, **tensors(quartiles=found)} if found is not None else {}
    if found is None:
        return
    fed.call(clients, "learn", shared={"shares": server.constant()}, expect=None)
    yield "round"


METHODS = (
    Method(
        name="stats",
        title="Table 1 over owners: means, quartiles, words and drift from sums; predicts the classes' shares",
        paper="H. Cramér: Mathematical Methods of Statistics, 1946",
        family="tables",
        config=StatsConfig,
        tasks=EVERY_TASK,
        no_local="it trains nothing",
        round=round,
        client=StatsClient,
        server=StatsServer,
        needs=("raw rows",),
    ),
)
