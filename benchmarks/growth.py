"""FedAvg with 10 to 10,000 small clients: what a client costs must not depend on how many there
are.

Each client is an MLP of 64-64-10 and 20 of scikit-learn's digits, in batches of 10. Each number of
clients has a process of its own, with one thread. Memory is the process's peak above what it was
before it made the first client.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedloom import methods, models
from fedloom.core.context import ClientContext, Rows
from fedloom.core.federation import Federation
from fedloom.engines import LocalEngine

CLIENTS = (10, 100, 1_000, 10_000)
ROWS, BATCH = 20, 10
WORK = 5_000
"""Rounds of a client that are timed; at least two rounds of all."""
HEAD = """\
| clients | build, CPU ms/client | round, CPU ms/client | peak memory, kB/client |
|---|---|---|---|"""


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels (1797, 64) from 0 to 16, and labels."""
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def contexts(clients: int) -> list[ClientContext]:
    """A client's rows are drawn by its number, so that one client is the same among any others."""
    pool, labels = digits()
    zero, scale = torch.zeros(1), torch.full((1,), 16.0)
    return [
        ClientContext(
            id=n,
            parties=clients,
            classes=10,
            data=Rows(
                pool,
                labels,
                torch.from_numpy(np.random.default_rng(n).choice(len(labels), ROWS)),
                zero,
                scale,
            ),
            network=partial(models.build, "mlp", (64,), 10, seed=n),
        )
        for n in range(clients)
    ]


class Job:
    """A federation, and how to do one of its rounds."""

    def __init__(self, clients: int) -> None:
        self.method = methods.load(Path(__file__).parents[1] / "examples" / "fedavg.py")
        self.cfg = self.method.configure(params={"batch_size": BATCH})
        places = contexts(clients)
        assert self.method.server is not None
        self.server = self.method.server(self.cfg, places[0])
        self.engine = LocalEngine(self.method.client(self.cfg, place) for place in places)
        self.fed = Federation(self.engine)

    def round(self, t: int) -> None:
        """Round t."""
        self.fed.round = t
        for _ in self.method.round(self.fed, self.server, self.engine.ids, self.cfg, t):
            pass


def resident(what: str) -> int:
    """Bytes of this process in memory: now (`VmRSS`), or at most since `forget_peak` (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024


def forget_peak() -> None:
    """Let `VmHWM` begin from now."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(clients: int) -> dict[str, float]:
    """One row of the table."""
    torch.set_num_threads(1)
    warm = Job(2)
    warm.round(0)
    gc.collect()
    gc.freeze()  # what was there before the first client costs none of them a sweep
    forget_peak()
    base, start = resident("VmRSS"), time.process_time()
    job = Job(clients)
    built = time.process_time() - start
    rounds = []
    for t in range(1 + max(2, WORK // clients)):
        start = time.process_time()
        job.round(t)
        rounds.append(time.process_time() - start)
    return {
        "build": built / clients,
        "round": statistics.median(rounds[1:]) / clients,
        "memory": (resident("VmHWM") - base) / clients,
    }


def main(numbers: Sequence[int] = CLIENTS) -> None:
    """Print the table."""
    print(HEAD)
    for clients in numbers:
        command = [sys.executable, "-m", "benchmarks.growth", "--one", str(clients)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        row = json.loads(done.stdout)
        print(
            f"| {clients:,} | {1e3 * row['build']:.2f} | {1e3 * row['round']:.2f} "
            f"| {row['memory'] / 1e3:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument(
        "--clients", type=int, nargs="*", default=CLIENTS, help="numbers of clients"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(asked.one)))
    else:
        main(asked.clients)
