"""Vertical forests beside split learning, and the leak of bins: `python -m
benchmarks.vertical_trees adult credit`.

Two parties hold half of a table's columns each, 200 people are aligned and labeled, 2,000 are
tested, as in examples/cases. Seeds 0 to 4 draw the people and the columns anew. It prints the
tables of docs/vertical-trees.md: methods; people whom the second party lacks; and accuracy and leak
by the number of bins.

`python -m benchmarks.vertical_trees --absent adult` prints the AUC and CPU seconds of the forest
with 3, 5 and 8 parties that hold a share of the columns each, all there in training, of whom each
lacks no or 30 % of the people in use; with forests of 100 trees for each set of parties, for those
with one absent, and for all parties alone.

`python -m benchmarks.vertical_trees --partners` prints CPU seconds and bytes of the forest with 2
to 16 parties that hold 64 columns of numbers, a sixteenth of which tell the label, and with 200 and
2,000 aligned people.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.api import execute
from fedloom.core.statistics import confidence_interval
from fedloom.experiment.plan.reading import check

SEEDS = range(5)
ALONE = "active-forest"
METHODS = (
    ALONE,
    "vertical-forest",
    "vertical-boosting",
    "split",
    "laser-vfl",
    "proto-student",
    "active-only",
)
LACKED = ("vertical-forest", "laser-vfl", "split")
"""Methods that are compared where parties lack people; split learning uses zeros for them."""
BINS = (32, 8, 4)


def measured(
    data: str, method: str, seed: int, columns: dict[str, Any], clients: int = 2, **run: Any
) -> dict[str, float]:
    """Accuracy and AUC in percent, and kB of messages, of a run; and what the columns tell by their
    bins.
    """
    values = {
        "method": method,
        "seed": seed,
        "data": {"name": data, "clients": clients, "test_rows": 2000},
        "columns": {"aligned": 200, "unaligned": 1000, **columns},
        "evaluate": {"points": 1, "leaks": method == "vertical-forest" and clients == 2},
        **run,
    }
    if method not in (ALONE, "vertical-forest", "vertical-boosting"):
        values = {"rounds": 10, **values}
    found = execute(check({"run": values}).run).summary
    told = [one["success"] for one in found.get("leaks") or () if one["attack"] == "reconstruction"]
    numbers = {
        "accuracy": found["accuracy"]["mean"],
        "AUC": found["scores"]["auc"],
        "told": told[0] if told else 0.0,
    }
    return {
        **{name: 100 * value for name, value in numbers.items()},
        "kB": sum(found["bytes"].values()) / 1000,
    }


def spread(values: Sequence[float]) -> str:
    """The mean and standard deviation over seeds."""
    return f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"


def difference(values: Sequence[float], others: Sequence[float]) -> str:
    """The mean of paired differences, with their 95 % interval."""
    differences = np.subtract(values, others)
    low, high = confidence_interval(list(differences)) or (np.nan, np.nan)
    return f"{np.mean(differences):+.1f} ({low:+.1f} to {high:+.1f})"


def runs(data: str, method: str, columns: dict[str, Any], **run: Any) -> dict[str, list[float]]:
    """The numbers of a method over the seeds."""
    each = [measured(data, method, seed, columns, **run) for seed in SEEDS]
    return {name: [one[name] for one in each] for name in each[0]}


def partners() -> None:
    """Print a row for each number of parties and of aligned people."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5_000, 64)).round(4)
    y = (x[:, ::16].sum(1) + rng.normal(size=len(x)) > 0).astype(int)
    with tempfile.TemporaryDirectory() as home:
        file = Path(home) / "rows.csv"
        head = ",".join([*(f"x{c}" for c in range(64)), "label"])
        np.savetxt(file, np.c_[x, y], delimiter=",", fmt="%g", header=head, comments="")
        print("| parties | aligned | CPU s | AUC | kB |\n|---|---|---|---|---|", flush=True)
        for aligned, parties in product((200, 2_000), (2, 4, 8, 16)):
            data = {"name": str(file), "label": "label", "clients": parties, "test_rows": 2_000}
            values = {
                "method": "vertical-forest",
                "data": data,
                "columns": {"aligned": aligned, "unaligned": 0},
                "evaluate": {"points": 1},
            }
            run, start = check({"run": values}).run, time.process_time()
            found = execute(run).summary
            cells = (f"{time.process_time() - start:.1f}", f"{100 * found['scores']['auc']:.1f}")
            kilobytes = sum(found["bytes"].values()) / 1000
            print(
                f"| {parties} | {aligned:,} |",
                " | ".join(cells),
                f"| {kilobytes:,.1f} |",
                flush=True,
            )


def absent(data: str) -> None:
    """Print a row for each number of parties, and which sets have forests."""
    print(
        "| parties | `absent` | forests | CPU s | AUC, all there | AUC, 30 % lacked "
        "|\n|---|---|---|---|---|---|",
        flush=True,
    )
    for parties, most in product((3, 5, 8), (None, 1, 0)):
        start, scores = time.process_time(), list[str]()
        for lacked in (0.0, 0.3):
            columns = {"unaligned": 0, "missing_test": [0.0, *[lacked] * (parties - 1)]}
            found = runs(
                data,
                "vertical-forest",
                columns,
                clients=parties,
                params={"absent": most, "lot": 20},
            )
            scores.append(spread(found["AUC"]))
        seconds = (time.process_time() - start) / (2 * len(SEEDS))
        sets = 2**parties - 1 if most is None else 1 + most * parties
        print(
            f"| {parties} | {'any' if most is None else most} | {sets} | {seconds:.1f} |",
            " | ".join(scores),
            "|",
            flush=True,
        )


def main(*names: str) -> None:
    """Print the tables."""
    if names == ("--partners",):
        return partners()
    if names[0] == "--absent":
        return absent(*names[1:])
    for data in names:
        print(
            f"\n{data}\n\n| method | accuracy | AUC | AUC minus `{ALONE}` | kB "
            "|\n|---|---|---|---|---|",
            flush=True,
        )
        alone: dict[str, list[float]] = {}
        for method in METHODS:
            found = runs(data, method, {})
            alone = alone or found
            less = "–" if method == ALONE else difference(found["AUC"], alone["AUC"])
            scores = f"{spread(found['accuracy'])} | {spread(found['AUC'])}"
            print(f"| `{method}` | {scores} | {less} | {np.mean(found['kB']):,.1f} |", flush=True)
        print(
            "\n| missing in training, in use | "
            + " | ".join(f"`{m}`" for m in LACKED)
            + " |\n|---|---|---|---|"
        )
        for train, test in ((0.0, 0.5), (0.5, 0.0), (0.5, 0.5)):
            columns = {"missing": [0.0, train], "missing_test": [0.0, test]}
            found = [
                runs(
                    data,
                    m,
                    columns,
                    **({"params": {"incomplete": "zeros"}} if m == "split" else {}),
                )
                for m in LACKED
            ]
            print(
                f"| {train}, {test} | " + " | ".join(spread(one["AUC"]) for one in found) + " |",
                flush=True,
            )
        print("\n| bins | accuracy | AUC | variance told |\n|---|---|---|---|", flush=True)
        for bins in BINS:
            found = runs(data, "vertical-forest", {}, params={"bins": bins})
            print(
                f"| {bins} | {' | '.join(spread(found[k]) for k in ('accuracy', 'AUC', 'told'))} |",
                flush=True,
            )


if __name__ == "__main__":
    main(*(sys.argv[1:] or ("adult", "credit")))
