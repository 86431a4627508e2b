"""The cells of a reproduction's table, as text for the page and as rows for the CSV file."""

from collections.abc import Iterator, Sequence
from typing import Any

from fedloom.report import formatting as fmt
from fedloom_papers.results import TableResults, seeds

OURS, PAPER = "★", "☆"
"""Marks of the best number of a column."""
HEADER = (
    "row",
    "column",
    "value of column",
    "metric",
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
"""The header of `rows`."""


def rows(found: TableResults) -> Iterator[Sequence[Any]]:
    """One line per cell, under `HEADER`, in the unit of the table."""
    r = found.reproduction
    values = {column.name: column.value for column in r.columns}
    for (row, column), number in found.numbers.items():
        place, paper = found.places[row, column], number.paper or (None, None)
        chance = found.chance(column) if r.measured.drawn == r.measured else None
        yield (
            row,
            column,
            values[column],
            r.metric,
            r.unit,
            number.mean,
            number.deviation,
            len(number.by_seed),
            int(row in found.best(column)),
            *paper,
            int(row in found.best(column, paper=True)),
            number.difference,
            None if chance is None else chance * found.unit.factor,
            place.remark,
        )


def ours(found: TableResults, row: str, column: str) -> str:
    """Our number in a cell, such as `81.2 ± 0.7 ★`, or why there is none."""
    place, number = found.places[row, column], found.numbers[row, column]
    if number.mean is None:
        if place.cell.untestable:
            return "cannot be run here"
        return place.missing[0].problem.partition(":")[0] if place.missing else "not measured"
    mark = f"{fmt.NBSP}{OURS}" if row in found.best(column) else ""
    return found.unit.spread(number.mean, number.deviation) + mark


def theirs(found: TableResults, row: str, column: str) -> str:
    """The paper's number in a cell and the difference, such as `paper 78 ☆, +3.2`; and the number
    of finished seeds, if some are missing.
    """
    number = found.numbers[row, column]
    texts = []
    if number.paper is not None and not found.stands_in({column}):
        mark = f"{fmt.NBSP}{PAPER}" if row in found.best(column, paper=True) else ""
        texts.append(f"paper{fmt.NBSP}{as_printed(*number.paper)}{mark}")
    if number.difference is not None:
        texts.append(found.unit.difference(number.difference, number.mean))
    planned = len(found.places[row, column].attempts)
    if 0 < len(number.by_seed) < planned:
        texts.append(f"{len(number.by_seed)} of {planned} seeds")
    return ", ".join(texts)


def printed(found: TableResults, row: str, column: str) -> str:
    """The paper's number of a cell, `74.4 ± 0.7`, or a dash."""
    number = found.numbers.get((row, column))
    if number is None or number.paper is None:
        return fmt.NONE
    mark = f"{fmt.NBSP}{PAPER}" if row in found.best(column, paper=True) else ""
    return f"{as_printed(*number.paper)}{mark}"


def chance(found: TableResults, column: str) -> str:
    """The chance level of a column in the unit; empty if the metric has none."""
    metric = found.reproduction.measured
    level = found.chance(column) if metric.drawn == metric else None
    return "" if level is None else found.unit.number(found.unit.factor * level)


def title(found: TableResults) -> str:
    """The metric with its unit: `Accuracy (%)`."""
    unit = found.reproduction.unit
    return fmt.capital(found.reproduction.metric) + (f" ({unit})" if unit else "")


def caption(found: TableResults) -> str:
    """The caption of the table."""
    counts = seeds(found)
    over = (
        f", mean ± s.d. over {fmt.span(counts)} seeds"
        if counts and counts[-1] > 1
        else ", one seed"
    )
    unit = "percentage points" if found.reproduction.unit == "%" else "the same unit"
    lower = ", lower is better" if found.reproduction.better == "lower" else ""
    return (
        f"{title(found)}{over}{lower}; below: the paper's number on the same data, and ours "
        f"minus it in {unit}. {OURS} our best in a column, {PAPER} the paper's best"
    )


def as_printed(mean: float, deviation: float | None) -> str:
    """A published number with its original digits: `74.4 ± 0.7`."""
    texts = [
        f"{value:,.10g}".replace("-", fmt.MINUS) for value in (mean, deviation) if value is not None
    ]
    return f"{fmt.NBSP}±{fmt.NBSP}".join(texts)
