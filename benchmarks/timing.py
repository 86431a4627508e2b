"""CPU seconds of two ways to do the same work, in turn, so that a busy machine
disturbs both alike.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the table in docs/speed.md: CPU seconds of ours and of the bar for some work, and
    their ratio.
    """

    work: str
    bar: str
    ours: float
    least: float
    ratio: float


ROWS: list[Row] = []
"""What this process has compared so far."""


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this process while `work` runs."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratio(
    ours: Callable[[], object], bar: Callable[[], object], pairs: int = 5
) -> tuple[float, float, float]:
    """Medians over `pairs` of: our CPU seconds, the bar's, and the ratio of a pair. One pair first,
    uncounted.
    """
    cpu(bar), cpu(ours)
    runs = [(cpu(ours), cpu(bar)) for _ in range(pairs)]
    each = [a / b for a, b in runs]
    return (
        statistics.median(a for a, _ in runs),
        statistics.median(b for _, b in runs),
        statistics.median(each),
    )


def compare(
    work: str,
    bar_name: str,
    ours: Callable[[], object],
    bar: Callable[[], object],
    pairs: int,
    parts: float = 1,
) -> None:
    """Print the `ratio` of some work and the seconds of one of its `parts`, and keep it for the
    page.
    """
    a, b, r = ratio(ours, bar, pairs)
    row = Row(work, bar_name, a / parts, b / parts, r)
    ROWS.append(row)
    print(
        f"{work}: ours {row.ours:.3g}, {bar_name} {row.least:.3g} CPU s, ratio {r:.2f}", flush=True
    )
