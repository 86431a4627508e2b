"""CPU seconds and memory of trees, linear models and statistics: `python -m benchmarks.owners`.

One thing grows at a time: owners, with ten rows each; rows, of ten owners; columns, with 2,000 rows
of ten owners. Each line is a process of its own. Rows are normal, and the label is a logistic
function of the first three columns. Seconds are of two rounds in one process after the parties are
built, with all messages; memory is the peak above what the process had before its first row.

`python -m benchmarks.owners --beside` compares with libraries that have all rows in one table, on
the same rows: whole fits and the whole table of statistics, each in a process of its own on one
thread, in turn, medians of three; libraries that are not installed are left out. And the seconds of
`fedloom trial` on a file of 10,000 rows.
"""

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.growth import forget_peak, resident
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine
from fedloom.methods import registry

METHODS: dict[str, dict[str, Any]] = {
    "fedglm": {},
    "fedboost": {"bins": 32, "depth": 4},
    "stats": {},
}
SIZES = {
    "owners": [(n, 10 * n, 10) for n in (10, 100, 1_000, 10_000)],
    "rows": [(10, n, 10) for n in (1_000, 10_000, 100_000, 1_000_000)],
    "columns": [(10, 2_000, n) for n in (10, 40, 160, 640)],
}
"""Owners, rows and columns of each line."""
ROUNDS = 2
FITS: dict[str, tuple[dict[str, Any], int, tuple[int, int, int]]] = {
    "fedboost": ({"bins": 64, "depth": 5}, 101, (10, 20_000, 20)),
    "fedglm": ({}, 20, (10, 100_000, 20)),
    "stats": ({}, 1, (10, 100_000, 20)),
}
"""Settings, rounds and size of a whole fit. FedBoost's first round agrees on bins, and FedGLM stops
by itself.
"""
RIVALS = {
    "fedboost": ("scikit-learn", "lightgbm", "xgboost"),
    "fedglm": ("scikit-learn", "statsmodels"),
    "stats": ("pandas",),
}
REPEATS = 3


def contexts(owners: int, rows: int, columns: int) -> list[ClientContext]:
    """Owners of equally many consecutive rows of one pool."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    y = rng.random(rows) < 1 / (1 + np.exp(-x[:, :3].sum(1)))
    pool, labels = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    common: dict[str, Any] = {
        "parties": owners,
        "classes": 2,
        "columns": [f"x{c}" for c in range(columns)],
    }
    common["words"] = ((),) * columns
    parts = torch.arange(rows).split(rows // owners)
    zero, one = torch.zeros(1), torch.ones(1)
    return [
        ClientContext(id=n, data=Rows(pool, labels, part, zero, one), **common)
        for n, part in enumerate(parts)
    ]


def measure(
    name: str,
    owners: int,
    rows: int,
    columns: int,
    params: dict[str, Any] | None = None,
    rounds: int = ROUNDS,
) -> dict[str, float]:
    """One line: CPU seconds and bytes."""
    torch.set_num_threads(1)
    method = registry()[name]
    cfg = method.configure(params=METHODS[name] if params is None else params)
    gc.collect()
    forget_peak()
    base = resident("VmRSS")
    places = contexts(owners, rows, columns)
    assert method.server is not None and method.client is not None
    server = method.server(
        cfg,
        ClientContext(
            id=0, parties=owners, classes=2, columns=places[0].columns, words=places[0].words
        ),
    )
    with LocalEngine([method.client(cfg, place) for place in places]) as engine:
        fed = Federation(engine)
        start = time.process_time()
        for t in range(rounds):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
        return {"seconds": time.process_time() - start, "memory": resident("VmHWM") - base}


def work_of(name: str, library: str) -> Callable[[Any, Any, Any], object]:
    """The same work by a library on rows x (n, d), labels y (n,) and owners (n,)."""
    if library == "scikit-learn" and name == "fedboost":
        from sklearn.ensemble import HistGradientBoostingClassifier as Boosting

        common = {
            "max_iter": 100,
            "learning_rate": 0.1,
            "l2_regularization": 1,
            "early_stopping": False,
        }
        return lambda x, y, _: Boosting(max_leaf_nodes=31, **common).fit(x, y)
    if library == "lightgbm":
        import lightgbm

        return lambda x, y, _: lightgbm.LGBMClassifier(
            n_estimators=100, reg_lambda=1, n_jobs=1, verbose=-1
        ).fit(x, y)
    if library == "xgboost":
        import xgboost

        same: dict[str, Any] = {
            "n_estimators": 100,
            "learning_rate": 0.1,
            "max_depth": 5,
            "tree_method": "hist",
        }
        return lambda x, y, _: xgboost.XGBClassifier(n_jobs=1, **same).fit(x, y)
    if library == "scikit-learn":
        from sklearn.linear_model import LogisticRegression

        return lambda x, y, _: LogisticRegression(C=1e12, solver="newton-cholesky").fit(x, y)
    if library == "statsmodels":
        import statsmodels.api as sm

        return lambda x, y, _: sm.Logit(y, sm.add_constant(x)).fit(disp=0).summary()
    import pandas as pd

    def table(x: Any, y: Any, owner: Any) -> object:
        frame = pd.DataFrame(x)
        groups = frame.groupby(owner)
        return frame.describe(), pd.Series(y).value_counts(), groups.agg(["mean", "var", "count"])

    return table


def rival(name: str, library: str, owners: int, rows: int, columns: int) -> dict[str, float]:
    """CPU seconds and bytes of a library, after a first use on a few rows."""
    work, few = work_of(name, library), contexts(10, 200, columns)
    work(*pooled(few))
    del few
    gc.collect()
    forget_peak()
    base = resident("VmRSS")
    x, y, owner = pooled(contexts(owners, rows, columns))
    start = time.process_time()
    work(x, y, owner)
    return {"seconds": time.process_time() - start, "memory": resident("VmHWM") - base}


def pooled(places: list[ClientContext]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All rows, labels, and the owner of each row."""
    assert places[0].data is not None and places[0].data.labels is not None
    pool, labels = places[0].data.pool.numpy(), places[0].data.labels.numpy()
    return (
        pool.astype(np.float64),
        labels,
        np.repeat(np.arange(len(places)), len(pool) // len(places)),
    )


def alone(*words: str) -> dict[str, float]:
    """A line in a process of its own, on one thread."""
    command = [sys.executable, "-m", "benchmarks.owners", *words]
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def beside() -> None:
    """Print the comparison."""
    print(
        "| work, 10 owners | by | CPU s | times fedloom's | peak memory, MB "
        "|\n|---|---|---|---|---|"
    )
    for name, (_, _, (_, rows, columns)) in FITS.items():
        known = {"scikit-learn": "sklearn"}
        libraries = [one for one in RIVALS[name] if find_spec(known.get(one, one))]
        found: dict[str, list[dict[str, float]]] = {one: [] for one in ("fedloom", *libraries)}
        for _ in range(REPEATS):
            for one, results in found.items():
                results.append(
                    alone("--fit", name) if one == "fedloom" else alone("--rival", name, one)
                )
        ours = statistics.median(one["seconds"] for one in found["fedloom"])
        for one, results in found.items():
            seconds = statistics.median(each["seconds"] for each in results)
            memory = statistics.median(each["memory"] for each in results) / 1e6
            ratio = f"{seconds / ours:.2f}"
            print(
                f"| {name}, {rows:,} × {columns} | {one} | {seconds:.2f} | {ratio} | "
                f"{memory:.0f} |",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as home:
        x, y, owner = pooled(contexts(10, 10_000, 20))
        head = ",".join([*(f"x{c}" for c in range(20)), "label", "owner"])
        rows_of = np.column_stack([x.round(4), y, owner])
        np.savetxt(
            Path(home) / "rows.csv", rows_of, delimiter=",", fmt="%g", header=head, comments=""
        )
        words = ["trial", "rows.csv", "--label", "label", "--group", "owner", "--out", "trial"]
        start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "fedloom", *words]
        subprocess.run(command, check=True, cwd=home, stdout=subprocess.DEVNULL)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
        print(f"\nfedloom {' '.join(words)}: 10,000 rows × 20, 10 owners: {cpu:.0f} CPU s, "
              f"{time.monotonic() - start:.0f} s")  # fmt: skip


def main(names: list[str]) -> None:
    """Print a table of each method."""
    for name in names or METHODS:
        print(
            f"\n{name}\n\n| owners | rows | columns | CPU s | µs a row and column | peak memory, "
            "MB |"
        )
        print("|---|---|---|---|---|---|")
        for size in dict.fromkeys(line for lines in SIZES.values() for line in lines):
            row = alone("--one", name, *map(str, size))
            owners, rows, columns = size
            each = 1e6 * row["seconds"] / rows / columns
            cells = (f"{row['seconds']:.2f}", f"{each:.2f}", f"{row['memory'] / 1e6:.0f}")
            print(f"| {owners:,} | {rows:,} | {columns} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    elif sys.argv[1:2] == ["--fit"]:
        settings, count, size = FITS[sys.argv[2]]
        print(json.dumps(measure(sys.argv[2], *size, settings, count)))
    elif sys.argv[1:2] == ["--rival"]:
        print(json.dumps(rival(sys.argv[2], sys.argv[3], *FITS[sys.argv[2]][2])))
    elif sys.argv[1:2] == ["--beside"]:
        beside()
    else:
        main(sys.argv[1:])
