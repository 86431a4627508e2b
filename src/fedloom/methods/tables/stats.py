"""Table 1 over owners: rows, missing values, means, s.d., quartiles, words and drift, from sums
alone, in one round.

Paper: none; drift between owners is the share η² of one-way analysis of variance (R. A. Fisher,
"Statistical Methods for Research Workers", 1925), and for words V of H. Cramér, "Mathematical
Methods of Statistics", 1946.

    round     owners: for each column of numbers its known values, the sums of x and of x²;
              for each category the rows c of each word, and c²/n; rows by class                         | sums alone
              owners: the sums of a column that had no room at an owner                                  | sums alone
              owners: for each column n (own mean - mean)²/s.d.², and rows in 16 cells of a stretch      | sums alone
              owners: for the two rows around each quartile rows in 8 parts of their cell, and with a
                      likely number, until the cells are short                                                                                                              | sums alone
    end       mean, s.d., quartiles; drift between owners with its p-value

Sums of numbers are exact, so that means and s.d. are those of all rows together, rounded once.
Quartiles are those of pandas to within a thousandth of the distance between the quartiles, also if
one number is far from all others: a cell is divided until it is as short as that, in three questions
for most columns. A number that many rows have is found itself.

Nobody sends a minimum, a maximum or a value. Counts below `min_cell` are shown as such, and so is a
second word where its count would tell the first; quartiles need four times as many rows. The server
learns the sums, exactly: secure sums hide each owner's. As a model, it predicts the classes'
    shares, or the mean.

Messages: sums up, several in one word where they are small; ends of stretches down.
"""  # noqa: E501

from collections.abc import Iterator, Sequence
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
from fedloom.methods.tables.cells import (
    CELLS,
    CUTS,
    QUESTIONS,
    Placed,
    between,
    cell_of,
    ends_of_cells,
    known_of,
    masked,
    neighbors,
    rows_below,
)
from fedloom.methods.tables.drift import UNIT, association, finite, spread
from fedloom.methods.tables.inference import left_out
from fedloom.methods.tables.long_sums import (
    BITS,
    BITS_SQUARE,
    LOWEST,
    LOWEST_SQUARE,
    digits,
    exact_sums,
    few_bits,
    opened,
    table_of,
    wider,
)
from fedloom.methods.tables.steps import offsets, refusal, tensors
from fedloom.trees.histograms import bundled, bundles, two_in_one, unbundled, untwined

QUARTILES = (0.25, 0.5, 0.75)
FARTHEST = 1.75
"""In s.d.: no quartile is farther than √3 from the mean."""


class StatsConfig(MethodConfig):
    """One round is all; further ones send nothing."""

    min_cell: int = Field(5, ge=1)
    """The smallest count that is shown."""

    def local_steps_of(self, rows: int) -> None:
        """None: the coordinator computes from sums; owners take no optimizer steps."""

    @property
    def sums_stand_alone(self) -> bool:
        """Sums are of rows alone."""
        return True

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`."""
        return refusal(aggregator)

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Cells become finer in steps."""
        return {"finer": QUESTIONS}


@final
class StatsClient(Party[StatsConfig]):
    """An owner of rows. `shares` (K,) are those of the classes, or (1,) the mean of a standardized
    number.
    """

    ROLE = "client"
    STATE = ("shares",)
    EXPORT = ("shares",)
    CALLS = ("moments", "wide", "cells", "finer", "learn")
    MEANS = ("moments", "wide", "cells", "finer")
    TELLS = (("by class", MEANS),)

    def setup(self) -> None:
        """Equal shares of classes."""
        self.shares = torch.ones(max(self.context.classes, 1), dtype=torch.float64)

    def moments(self, *, t: int) -> dict[str, Tensor]:
        """Sums over own rows: see `expected`."""
        numbers, words, parties = numbers_of(self), words_of(self), self.context.parties
        known = [int((~np.isnan(values)).sum()) for values in numbers]
        sums = [exact_sums(known_of(values)) for values in numbers]
        room, room_square = few_bits(parties)
        fits = [abs(s) < 2**room and q < 2**room_square for s, q in sums]
        few = [each if fit else (0, 0) for each, fit in zip(sums, fits, strict=True)]
        rows = [np.bincount(values[values >= 0], minlength=size) for values, size in words]
        shares = [c * c / max(int(c.sum()), 1) for c in rows]
        counts = [known, [n > 0 for n in known], [not fit for fit in fits]]
        counts += [*rows, [c.sum() > 0 for c in rows], [len(self.context.rows)]]
        return tensors(
            counts=two_in_one(np.concatenate([np.array(c, np.int64) for c in counts])),
            sums=table_of([s for s, _ in few], room, parties),
            squares=table_of([q for _, q in few], room_square, parties),
            shares=np.rint(np.concatenate([np.empty(0), *shares]) / UNIT).astype(np.int64),
        )

    def wide(self, *, column: Tensor) -> dict[str, Tensor]:
        """The sums and squares of some columns (q,), with room for all float32 numbers."""
        numbers = numbers_of(self)
        sums = [exact_sums(known_of(numbers[f])) for f in column.tolist()]
        parties = self.context.parties
        return tensors(
            sums=table_of([s for s, _ in sums], BITS, parties),
            squares=table_of([q for _, q in sums], BITS_SQUARE, parties),
        )

    def cells(self, *, column: Tensor, mean: Tensor, sd: Tensor, most: int) -> dict[str, Tensor]:
        """Of each column (q,) the `UNIT`s of n (own mean - mean)²/s.d.²; and the rows (q, 16) below
        the stretch around the mean, and in all of its cells but the last one.
        """
        numbers, found, between = numbers_of(self), [], []
        for f, m, s in zip(column.tolist(), mean.tolist(), sd.tolist(), strict=True):
            values = known_of(numbers[f])
            apart = float((values - m).sum()) / s
            between.append(int(apart * apart / max(len(values), 1) / UNIT))
            found.append(
                rows_below(values, ends_of_cells(m - FARTHEST * s, m + FARTHEST * s, CELLS)[:-1])
            )
        return tensors(
            between=np.array(between, np.int64),
            rows=bundled(np.diff(found, prepend=0).ravel(), most),
        )

    def finer(self, *, column: Tensor, ends: Tensor, most: int) -> dict[str, Tensor]:
        """The rows (q, e - 1) of each column (q,) between successive ends (q, e)."""
        numbers = numbers_of(self)
        asked = zip(column.tolist(), ends.cpu().numpy(), strict=True)
        found = [rows_below(known_of(numbers[f]), cuts) for f, cuts in asked]
        return tensors(rows=bundled(np.diff(found).ravel(), most))

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

    def of(self, sums: Any) -> dict[str, Any]:
        """What the summed `moments` say, by name: known values, owners that have any, owners whose
        sums had no room, sums and squares of numbers; rows, c²/n, and owners with any, of the
        words; all rows.
        """
        p, v, listed = sizes(self)
        counts = untwined(sums["counts"].numpy(), 3 * p + v + listed + 1)
        parts = np.split(counts, np.cumsum([p, p, p, v, listed]))
        named = dict(
            zip(("known", "owners", "wide", "words", "having", "rows"), parts, strict=True)
        )
        return {**tensors(**named), **{name: sums[name] for name in ("sums", "squares", "shares")}}

    def findings(self) -> Sequence[LearnedTable]:
        """The numbers, and the words and classes."""
        if not self.found:
            return ()
        least, whole = self.cfg.min_cell, int(self.found["rows"])
        known, quarters, spreads = (
            x.tolist() for x in (self.found["known"], self.found["quartiles"], self.spreads())
        )
        numbers: list[tuple[str | float | None, ...]] = []
        about = zip(number_columns(self), offsets(self), known, quarters, spreads, strict=True)
        for name, offset, n, quartile, (mean, sd, *drift) in about:
            hidden = [offset + cut for cut in quartile] if n >= 4 * least else [None] * 3
            cells = [offset + mean, sd, *hidden, *drift] if n >= least else [None] * 7
            numbers.append((name, *masked([n, whole - n], least), *map(finite, cells)))
        words: list[tuple[str | float | None, ...]] = []
        for (name, listed), (counts, *drift) in zip(
            categories(self), self.associations(), strict=True
        ):
            of_words = sum(counts)
            *each, lacking = masked([*counts, whole - of_words], least)
            for word, rows, cell in zip(listed, counts, each, strict=True):
                if word == "?" and not rows:  # missing words are counted below
                    continue
                # a share of words tells their number, and so how many are missing
                share = (
                    None
                    if isinstance(cell, str) or isinstance(lacking, str)
                    else rows / max(of_words, 1)
                )
                words.append((name, word, cell, share, *map(finite, drift)))
            if name != CLASS:
                words.append((name, "missing", lacking, None, None, None))
        ends = ("Drift", "p-value")
        head = ("Column", "Rows", "Missing", "Mean", "S.d.", "25%", "Median", "75%", *ends)
        tables = [
            LearnedTable("Numbers", head, tuple(numbers)),
            LearnedTable("Words", ("Column", "Word", "Rows", "Share", *ends), tuple(words)),
            LearnedTable("Rows", ("", "Value"), tuple(left_out(self.context.left_out))),
        ]
        return [table for table in tables if table.rows]

    def spreads(self) -> np.ndarray:
        """Mean, s.d., drift and its p-value of each column of numbers, (p, 4), NaN without."""
        found, parties = self.found, self.context.parties
        total = opened(found["sums"].numpy(), LOWEST, BITS, parties)
        squares = opened(found["squares"].numpy(), LOWEST_SQUARE, BITS_SQUARE, parties)
        between = found["between"].tolist() if "between" in found else [0] * len(total)
        rows = zip(
            found["known"].tolist(), found["owners"].tolist(), total, squares, between, strict=True
        )
        return np.array([spread(*one) for one in rows], float).reshape(-1, 4)

    def constant(self) -> Tensor:
        """The shares (K,) of classes, to each of which a row is added, or the mean (1,) of a
        standardized number.
        """
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
        shares, found, start = (self.found["shares"].numpy() * UNIT).tolist(), [], 0
        for (_, listed), owners in zip(categories(self), having, strict=True):
            cut = slice(start, start + len(listed))
            found.append((counts[cut], *association(counts[cut], shares[cut], owners)))
            start += len(listed)
        return found


CLASS, TARGET = "class", "number to predict"
"""The names of the label in the tables."""


def number_columns(party: Party[object]) -> list[str]:
    """The names (p,) of the columns of numbers, with the number to predict."""
    names = [
        name
        for name, words in zip(party.context.columns, party.context.words, strict=True)
        if not words
    ]
    return [*names, *([TARGET] if party.context.target else [])]


def categories(party: Party[object]) -> list[tuple[str, Sequence[str]]]:
    """The names and words of the categories, and of the classes."""
    c = party.context
    found = [(name, words) for name, words in zip(c.columns, c.words, strict=True) if words]
    classes = c.class_names or [str(k) for k in range(c.classes)]
    return [*found, *([] if c.target else [(CLASS, classes)])]


def numbers_of(party: Party[object]) -> list[np.ndarray]:
    """The party's numbers, p columns (n,) float32 or float64, NaN where missing: see
    `number_columns`.
    """
    rows, target = party.context.rows, party.context.target
    every = torch.arange(len(rows), device=party.context.device)
    x = rows.x(every).flatten(1).cpu().numpy()  # not kept: tables may be large
    found = [x[:, f] for f, words in enumerate(party.context.words) if not words]
    return [*found, target.in_unit(rows.y(every).cpu().numpy())] if target is not None else found


def words_of(party: Party[object]) -> list[tuple[np.ndarray, int]]:
    """The words (n,) of each of the party's categories, -1 where missing, with their count: see
    `categories`.
    """
    rows, listed = party.context.rows, list(enumerate(party.context.words))
    every = torch.arange(len(rows), device=party.context.device)
    x, y = rows.x(every).flatten(1).cpu().numpy(), rows.y(every).cpu().numpy()
    found = [
        (np.where(np.isnan(x[:, f]), -1, x[:, f]).astype(np.int64), len(words))
        for f, words in listed
        if words
    ]
    return found if party.context.target is not None else [*found, (y, party.context.classes)]


def sizes(party: Party[object]) -> tuple[int, int, int]:
    """The columns of numbers, the words and classes, and the categories."""
    listed = categories(party)
    return len(number_columns(party)), sum(len(words) for _, words in listed), len(listed)


def expected(party: Party[object]) -> dict[str, Shape]:
    """The template of `moments`: counts, two in one word; digits of the sums and squares of
    numbers; c²/n of words.
    """
    p, v, listed = sizes(party)
    counts = Shape("int64", -(-(3 * p + v + listed + 1) // 2))
    return {
        "counts": counts,
        **of_sums(party, p, *few_bits(party.context.parties)),
        "shares": Shape("int64", v),
    }


def of_sums(party: Party[object], columns: int, bits: int, bits_square: int) -> dict[str, Shape]:
    """The template of sums and squares with this many bits."""
    room = {"sums": bits, "squares": bits_square}
    return {
        name: Shape("int64", columns, digits(size, party.context.parties)[0])
        for name, size in room.items()
    }


# -- the round -------------------------------------------------------------------------------------


def widen(fed: Federation, server: StatsServer, clients: Sequence[int]) -> bool:
    """Give all sums room for float32 numbers, and ask for those that had none; False if an owner's
    are missing.
    """
    column, parties = server.found["wide"].nonzero()[:, 0], server.context.parties
    values: Any = of_sums(server, 0, BITS, BITS_SQUARE)
    values = {name: np.zeros(shape.dims, np.int64) for name, shape in values.items()}
    if len(column):
        expect = of_sums(server, len(column), BITS, BITS_SQUARE)
        found = fed.total(
            clients, "wide", shared={"column": column}, expect=expect, min_replies=len(clients)
        )
        if found is None:
            return False
        values = {name: x.numpy() for name, x in found.value.items()}
    room, at = {"sums": BITS, "squares": BITS_SQUARE}, column.numpy()
    wide = {
        name: wider(server.found[name].numpy(), size, parties, at, values[name])
        for name, size in room.items()
    }
    server.found = {**server.found, **tensors(**wide)}
    return True


def quartiles(
    fed: Federation, server: StatsServer, clients: Sequence[int]
) -> dict[str, Tensor] | None:
    """The quartiles (p, 3) of the numbers, and `between` (p,): see `cells`. None if an owner's sums
    are missing.

    A quartile lies between two rows of its column, whose ranks n tells. Each of the (up to) six
    rows of a column is looked for alone, in a cell that one question after the other divides.
    """
    # Columns with one number or none have no cells: that number is all quartiles. Exact sums have
    # the unit 2^LOWEST; a smaller s.d. could be 0, by which owners cannot divide.
    (mean, sd), n = server.spreads().T[:2], server.found["known"].numpy()
    out = np.repeat(np.where(n > 0, mean, 0)[:, None], 3, axis=1)
    apart = np.zeros(len(n), np.int64)
    column, sd = np.flatnonzero(n > 1), np.maximum(sd, 2.0**LOWEST)  # which sums do not tell from 0
    if not len(column):
        return tensors(quartiles=out, between=apart)

    def asked(counts: int, most: int, shared: Any, **more: Shape) -> dict[str, Any]:
        """How to ask all owners for so many counts, whose sums are at most `most`: the fewer bits
        these have, the more of them share a word.
        """
        expect = {**more, "rows": Shape("int64", bundles(counts, most))}
        return {"shared": {**shared, "most": most}, "expect": expect, "min_replies": len(clients)}

    # The first question: rows (q, 16) of each of q columns, below the stretch around the mean, and
    # in all cells of the stretch but the last one.
    most = int(n.max())
    moments = tensors(column=column, mean=mean[column], sd=sd[column])
    each = asked(len(column) * CELLS, most, moments, between=Shape("int64", len(column)))
    found = fed.total(clients, "cells", **each)
    if found is None:
        return None
    # the sum over owners of n (own mean - mean)²/s.d.², in whole units of 2^-36: see `drift.UNIT`
    apart[column] = found.value["between"].numpy()
    rows = unbundled(found.value["rows"].numpy(), len(column) * CELLS, most).reshape(-1, CELLS)

    # `around`: (column, share) -> the ranks of the two rows around a quartile, and its place
    # between them. `placed`: (column, rank) -> what is known of a row, first the cell of the
    # stretch.
    target, placed = server.context.target, dict[tuple[int, int], Placed]()
    around = {
        (f, share): neighbors(share, int(n[f])) for f in column.tolist() for share in QUARTILES
    }
    for f, counts in zip(column.tolist(), rows, strict=True):
        # the 17 ends of 16 equal cells
        cells = ends_of_cells(mean[f] - FARTHEST * sd[f], mean[f] + FARTHEST * sd[f], CELLS)
        below = np.append(counts.cumsum(), n[f])  # (17,); what is beyond counts for the last cell
        # what was subtracted from the target when it was read; the last column is the target
        shift = target.shift if target and f == len(n) - 1 else 0.0
        for rank in (rank for share in QUARTILES for rank in around[f, share][:2]):
            # the cell's low and high end, the rows below it, and the rows in it, in this order
            found_in = cell_of(rank, cells, below)
            crowded = 2 * found_in[-1] > n[f]  # then parts by the size of numbers divide it sooner
            placed[f, rank] = Placed(f, rank, *found_in, crowded, shift=shift)

    def open_() -> set[tuple[int, int]]:
        """The rows whose places are not known well enough: by the least distance that the first
        and the last quartile may have, so that what is known is never too coarse.
        """
        ends = {f: [around[f, share][0] for share in QUARTILES] for f in column.tolist()}
        span = {
            f: placed[f, last].low - placed[f, first].high for f, (first, _, last) in ends.items()
        }
        return {key for key, row in placed.items() if not row.known(span[key[0]])}

    # Divide the cells of these rows, each cell once though several rows may be in it; sorted, so
    # that a question does not depend on a set's order. No part has more rows than its cell.
    for _ in range(QUESTIONS):
        if not (left := open_()):
            break
        cuts = {placed[key].cell: placed[key].cuts() for key in sorted(left)}
        most = max(placed[key].inside for key in left)
        where = tensors(column=np.array([f for f, *_ in cuts]), ends=np.stack([*cuts.values()]))
        # a cell has CUTS ends, without its last one, hence counts between successive ends
        size = len(cuts) * (CUTS - 1)
        found = fed.total(clients, "finer", **asked(size, most, where))
        if found is None:
            return None
        counted = unbundled(found.value["rows"].numpy(), size, most).reshape(-1, CUTS - 1)
        by_cell = dict(zip(cuts, counted, strict=True))
        for key in left:
            cell = placed[key].cell
            placed[key] = placed[key].after(cuts[cell], by_cell[cell])

    # Each quartile from its two rows; NaN where one is still in a long cell.
    unknown = open_()
    for (f, share), (first, second, part) in around.items():
        if not {(f, first), (f, second)} & unknown:
            out[f, QUARTILES.index(share)] = between(placed[f, first], placed[f, second], part)
        else:
            out[f, QUARTILES.index(share)] = np.nan
    return tensors(quartiles=out, between=apart)


def round(
    fed: Federation, server: StatsServer, clients: Sequence[int], cfg: StatsConfig, t: int
) -> Iterator[str]:
    """All sums, in the first round."""
    if server.found:
        return
    sums = fed.total(
        clients, "moments", shared={"t": t}, expect=expected(server), min_replies=len(clients)
    )
    if sums is None:
        return
    server.found = server.of(sums.value)
    if not widen(fed, server, clients):
        server.found = {}
        return
    found = quartiles(fed, server, clients)
    server.found = {**server.found, **found} if found is not None else {}
    if found is None:
        return
    fed.call(clients, "learn", shared={"shares": server.constant()}, expect=None)
    yield "round"


METHODS = (
    Method(
        name="stats",
        title="Table 1 over owners: means, quartiles, words and drift from sums; predicts the "
        "classes' shares",
        paper="H. Cramér: Mathematical Methods of Statistics, 1946",
        family="tables",
        config=StatsConfig,
        tasks=EVERY_TASK,
        no_local="it trains nothing",
        round=round,
        client=StatsClient,
        server=StatsServer,
        needs=("raw rows",),
        every_row=True,
    ),
)
