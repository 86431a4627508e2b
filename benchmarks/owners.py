"""CPU seconds and memory of trees, linear models and statistics: `python -m benchmarks.owners`.

One thing grows at a time: owners, with ten rows each; rows, of ten owners; columns, with 2,000 rows of ten owners. Each
line is a process of its own. Rows are normal, and the label is a logistic function of the first three columns. Seconds
are of two rounds in one process after the parties are built, with all messages; memory is the peak above what the
process had before its first row.
"""

import gc
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from benchmarks.growth import forget_peak, resident
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine
from fedloom.methods import registry

METHODS: dict[str, dict[str, Any]] = {"fedglm": {}, "fedboost": {"bins": 32, "depth": 4}, "stats": {}}
SIZES = {
    "owners": [(n, 10 * n, 10) for n in (10, 100, 1_000, 10_000)],
    "rows": [(10, n, 10) for n in (1_000, 10_000, 100_000, 1_000_000)],
    "columns": [(10, 2_000, n) for n in (10, 40, 160, 640)],
}
"""Owners, rows and columns of each line."""
ROUNDS = 2


def contexts(owners: int, rows: int, columns: int) -> list[ClientContext]:
    """Owners of equally many consecutive rows of one pool."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((rows, columns), dtype=np.float32)
    y = rng.random(rows) < 1 / (1 + np.exp(-x[:, :3].sum(1)))
    pool, labels = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))
    common: dict[str, Any] = {"parties": owners, "classes": 2, "columns": [f"x{c}" for c in range(columns)]}
    common["words"] = ((),) * columns
    parts = torch.arange(rows).split(rows // owners)
    zero, one = torch.zeros(1), torch.ones(1)
    return [ClientContext(id=n, data=Rows(pool, labels, part, zero, one), **common) for n, part in enumerate(parts)]


def measure(name: str, owners: int, rows: int, columns: int) -> dict[str, float]:
    """One line: CPU seconds and bytes."""
    torch.set_num_threads(1)
    method = registry()[name]
    cfg = method.configure(params=METHODS[name])
    gc.collect()
    forget_peak()
    base = resident("VmRSS")
    places = contexts(owners, rows, columns)
    assert method.server is not None and method.client is not None
    server = method.server(cfg, ClientContext(id=0, parties=owners, classes=2, columns=places[0].columns,
                                              words=places[0].words))  # fmt: skip
    with LocalEngine([method.client(cfg, place) for place in places]) as engine:
        fed = Federation(engine)
        start = time.process_time()
        for t in range(ROUNDS):
            fed.round = t
            for _ in method.round(fed, server, engine.ids, cfg, t):
                pass
        return {"seconds": time.process_time() - start, "memory": resident("VmHWM") - base}


def main(names: list[str]) -> None:
    """Print a table of each method."""
    for name in names or METHODS:
        print(f"\n{name}\n\n| owners | rows | columns | CPU s | µs a row and column | peak memory, MB |")
        print("|---|---|---|---|---|---|")
        for size in dict.fromkeys(line for lines in SIZES.values() for line in lines):
            command = [sys.executable, "-m", "benchmarks.owners", "--one", name, *map(str, size)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
            row = json.loads(done.stdout)
            owners, rows, columns = size
            each = 1e6 * row["seconds"] / rows / columns
            cells = (f"{row['seconds']:.2f}", f"{each:.2f}", f"{row['memory'] / 1e6:.0f}")
            print(f"| {owners:,} | {rows:,} | {columns} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main(sys.argv[1:])
