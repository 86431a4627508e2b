"""`make bench`: the benchmarks. CPU seconds are those of one thread, beside plain PyTorch. With
--page those that give ratios all run, and rebuild the table of docs/speed.md.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import (
    afind,
    augfl,
    batched,
    fedal,
    fedavg,
    fewest,
    first_round,
    growth,
    lockstep,
    machine,
    net,
    net_rounds,
    overhead,
    vertical,
    workers,
)
from benchmarks.timing import ROWS, Row

BENCHMARKS: dict[str, Callable[[], object]] = {
    "fedavg": lambda: fedavg.main(9),
    "fedal": lambda: fedal.main(9),
    "afind": lambda: afind.main(5),
    "vertical": lambda: vertical.main(5),
    "augfl": lambda: augfl.main(5),
    "fewest": lambda: fewest.main(5),
    "first_round": lambda: first_round.main(3),
    "batched": lambda: batched.main(5),
    "lockstep": lambda: lockstep.main(5),
    "workers": lambda: workers.main(9),
    "growth": lambda: growth.main(),
    "overhead": lambda: overhead.main((10, 100, 1_000)),
    "net": lambda: net.main(9),
    "net_rounds": lambda: net_rounds.main(),
}
RATIOS: dict[str, Callable[[int], object]] = {
    "fedavg": fedavg.main,
    "fedal": fedal.main,
    "afind": afind.against_plain,
    "vertical": vertical.main,
    "augfl": augfl.against_box,
    "fewest": fewest.main,
}
PAGE = Path(__file__).parents[1] / "docs" / "speed.md"
START, END = "<!-- by python -m benchmarks --page -->\n", "<!-- end -->\n"


def table(rows: Sequence[Row], pairs: int, measured: str) -> str:
    """The rows as Markdown, the bar's groups together."""
    lines = [
        f"{measured}; one thread, medians of {pairs} pairs.\n",
        "| work | compared with | CPU s, ours | CPU s, theirs | ratio |\n|---|---|---|---|---|",
        *(
            f"| {r.work} | {r.bar} | {r.ours:.3g} | {r.least:.3g} | **{r.ratio:.2f}** |"
            for r in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def rebuilt(page: str, content: str) -> str:
    """The page with this content between its marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{content}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all if none is given"
    )
    parser.add_argument("--page", action="store_true", help="rebuild the table of docs/speed.md")
    parser.add_argument(
        "--pairs", type=int, default=5, help="with --page: pairs of runs (default 5)"
    )
    asked = parser.parse_args()
    if asked.page and asked.names:
        parser.error("--page rebuilds the whole table: leave the names out")
    known = RATIOS if asked.page else BENCHMARKS
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"no benchmark {', '.join(unknown)}; choose from {', '.join(known)}")
    measured = machine()
    for name in asked.names or known:
        RATIOS[name](asked.pairs) if asked.page else BENCHMARKS[name]()
    if asked.page:
        PAGE.write_text(rebuilt(PAGE.read_text(), table(ROWS, asked.pairs, measured)))
