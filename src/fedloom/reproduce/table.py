"""The table of a reproduction in Markdown and as tidy rows; and what its cells say on the page too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedloom.report import formatting as fmt
from fedloom.reproduce.claims import RULE, ClaimResult
from fedloom.reproduce.measure import as_printed, drawn
from fedloom.reproduce.provenance import facts, warnings
from fedloom.reproduce.results import TableResults, missing, seeds, untestable
from fedloom.reproduce.spec import SYSTEMS

FILE = "table.md"
OURS, PAPER = "★", "☆"
"""Behind the best number of a column."""
DIFFERENCE = f"Difference (95{fmt.NBSP}% interval)"
HEADER = (
    "row",
    "column",
    "measure",
    "unit",
    "mean",
    "sd",
    "seeds",
    "best",
    "paper",
    "paper sd",
    "paper best",
    "difference",
    "chance",
    "remark",
)
"""Of `rows`."""


def rows(found: TableResults) -> Iterator[Sequence[Any]]:
    """A line for each cell, under `HEADER`, in the unit of the table."""
    r = found.reproduction
    for (row, column), number in found.numbers.items():
        place, paper = found.places[row, column], number.paper or (None, None)
        chance = found.chance(column) if drawn(r.measure) == r.measure else None
        yield (
            row,
            column,
            r.measure,
            r.unit,
            number.mean,
            number.deviation,
            len(number.by_seed),
            int(row in found.best(column)),
            *paper,
            int(row in found.best(column, paper=True)),
            number.difference,
            None if chance is None else chance * found.unit.factor,
            place.cell.untestable or "; ".join(dict.fromkeys(one.problem for one in place.missing)),
        )


def ours(found: TableResults, row: str, column: str) -> str:
    """Our number in a cell: `81.2 ± 0.7 ★`, or what there is instead."""
    place, number = found.places[row, column], found.numbers[row, column]
    if number.mean is None:
        if place.cell.untestable:
            return "can't be run here"
        return place.missing[0].problem.partition(":")[0] if place.missing else "not measured"
    mark = f"{fmt.NBSP}{OURS}" if row in found.best(column) else ""
    return found.unit.spread(number.mean, number.deviation) + mark


def theirs(found: TableResults, row: str, column: str) -> str:
    """The paper's number in a cell and the difference: `paper 78 ☆, +3.2`; and how many seeds, if some are missing."""
    number = found.numbers[row, column]
    texts = []
    if number.paper is not None:
        mark = f"{fmt.NBSP}{PAPER}" if row in found.best(column, paper=True) else ""
        texts.append(f"paper{fmt.NBSP}{as_printed(*number.paper)}{mark}")
    if number.difference is not None:
        texts.append(found.unit.difference(number.difference, number.mean))
    planned = len(found.places[row, column].attempts)
    if 0 < len(number.by_seed) < planned:
        texts.append(f"{len(number.by_seed)} of {planned} seeds")
    return ", ".join(texts)


def chance(found: TableResults, column: str) -> str:
    """The chance level of a column in the unit; empty where the measure has none."""
    measure = found.reproduction.measure
    level = found.chance(column) if drawn(measure) == measure else None
    return "" if level is None else found.unit.number(found.unit.factor * level)


def shown(found: TableResults) -> str:
    """`Accuracy (%)`."""
    unit = found.reproduction.unit
    return fmt.capital(found.reproduction.measure) + (f" ({unit})" if unit else "")


def corner(found: TableResults) -> str:
    """Over the names of the rows: what the columns are."""
    return f"By {found.reproduction.across}" if found.reproduction.across else "Row"


def caption(found: TableResults) -> str:
    """What a cell of the table says."""
    counts = seeds(found)
    over = f", mean ± s.d. over {fmt.span(counts)} seeds" if counts and counts[-1] > 1 else ", of one seed"
    apart = "percentage points" if found.reproduction.unit == "%" else "the same unit"
    less = ", less is better" if found.reproduction.better == "less" else ""
    return (
        f"{shown(found)}{over}{less}; below, the paper's number, and ours minus it in {apart}. "
        f"{OURS} best of ours in a column, {PAPER} best of the paper's"
    )


def markdown(found: TableResults, claims: Sequence[ClaimResult]) -> str:
    """The table, the claims, and how the numbers were made."""
    r = found.reproduction
    parts = [f"# {plain(r.title)}", f"{plain(r.place)} of {plain(SYSTEMS[r.system])}, {found.scale} scale."]
    parts += [f"**{plain(warning)}**" for warning in warnings(found)]
    parts += [plain(text) for text in (r.about, r.scale(found.scale).about) if text]
    lines = [[row, *(_cell(found, row, column) for column in found.columns)] for row in found.rows]
    chances = [chance(found, column) for column in found.columns]
    if any(chances):
        lines.append(["chance", *(text or fmt.NONE for text in chances)])
    parts += [f"{plain(caption(found))}.", grid([corner(found), *found.columns], lines, numbers=True)]
    parts += ["\n".join(f"- {plain(line)}" for line in (*untestable(found), *missing(found)))]
    if claims:
        lines = [[c.text, c.compared, c.verdict, c.found, str(len(c.seeds) or fmt.NONE)] for c in claims]
        heads = ["Claim", "Compared", "Verdict", DIFFERENCE, "Seeds"]
        parts += ["## Claims", RULE, grid(heads, lines)]
    parts += ["## How it was made", "\n".join(f"- {name}: {plain(text)}" for name, text in facts(found))]
    parts += [f"    {found.asked.command(found.name, found.scale)}"]
    return "\n\n".join(part for part in parts if part) + "\n"


def grid(
    heads: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    numbers: bool = False,
    links: Mapping[str, str] | None = None,
) -> str:
    """A table in Markdown; in one of numbers all columns but the first are aligned to the right. A text may be one of
    the `links`."""
    rule = ["---", *("--:" if numbers else "---" for _ in heads[1:])]
    to = links or {}
    texts = [[f"[{plain(t)}]({to[t]})" if t in to else plain(t) for t in line] for line in (heads, *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (texts[0], rule, *texts[1:]))


def _cell(found: TableResults, row: str, column: str) -> str:
    if (row, column) not in found.places:
        return fmt.NONE
    own, below = ours(found, row, column), theirs(found, row, column)
    return f"{own}\n{below}" if below else own


def plain(text: str) -> str:
    """A text in which Markdown sees no marks."""
    for mark in "\\`*_|<>[]#$~":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("\n", "<br>")
