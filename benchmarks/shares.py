"""Accuracy against ε of noise in the sum, and its cost: `python -m benchmarks.shares [SEEDS]`.

Five clients with rows of scikit-learn's breast cancer data or digits (`iid`), a linear model, one
step of gradient descent a round over all rows. No rate and no clipping norm was searched. Beside it
the same training without clipping and noise, and DP-SGD with each client's own noise, at the same ε
of each row.
"""

import sys
from time import process_time
from typing import Any

import numpy as np

from fedloom.api import execute
from fedloom.experiment.plan.reading import check
from fedloom.methods.averaging.fedsgd_dp import norm
from fedloom.protect.accountant import Releases, epsilon, noise_for
from fedloom.protect.skellam import excess

ROUNDS, CLIENTS, DELTA = 50, 5, 1e-5
DATA = {"breast_cancer": 2 * (30 + 1), "digits": 10 * (64 + 1)}
"""Data sets, and the numbers of a linear model."""


def sigma_of(eps: float, d: int) -> float:
    """The noise multiplier of ROUNDS sums of d numbers of this ε."""
    low, high = 0.1, 1e4
    for _ in range(60):
        middle = (low * high) ** 0.5
        enough = epsilon([Releases(middle, ROUNDS, 1.0, excess(middle, norm(d), d))], DELTA) <= eps
        low, high = (low, middle) if enough else (middle, high)
    return high


def accuracy(data: str, seed: int, sigma: float | None, who: str) -> float:
    """Of the global test rows, in per cent."""
    dp = {} if sigma is None else {"dp": {"sigma": sigma, "clip": 1.0}}
    method = "fedavg" if sigma is None else "fedsgd-dp" if who == "shares" else "fedavg-dp"
    params: dict[str, Any] = {
        "epochs": 1,
        "batch_size": 2000,
        "momentum": 0,
        "lr": 1.0,
        "personal_head": False,
        **dp,
    }
    run = {
        "method": method,
        "rounds": ROUNDS,
        "seed": seed,
        "models": {"pool": ["linear"]},
        "evaluate": {"points": 1},
    }
    rows = {"name": data, "clients": CLIENTS, "partition": "iid", "public_rows": 0}
    run |= {
        "params": params if method == "fedsgd-dp" else {**params, "clients_per_round": None},
        "data": rows,
        "aggregate": {"secure": True},
    }
    return 100 * float(execute(check({"run": run}).run).summary["accuracy"]["mean"])


def main(seeds: int = 3) -> None:
    """Print a row for each data set and ε."""
    print(
        "| data | ε | σ | noise in the sum | each client's own noise | CPU s a run "
        "|\n|---|---|---|---|---|---|"
    )
    for data, d in DATA.items():
        for eps in (None, 8.0, 4.0, 2.0, 1.0):
            sigma = None if eps is None else sigma_of(eps, d)
            own = None if eps is None else noise_for(eps, DELTA, ROUNDS)
            begun = process_time()
            shared = [
                accuracy(data, seed, sigma, "own" if sigma is None else "shares")
                for seed in range(seeds)
            ]
            seconds = (process_time() - begun) / seeds
            alone = [accuracy(data, seed, own, "own") for seed in range(seeds)] if eps else []
            cells = [f"{np.mean(x):.1f} ± {np.std(x):.1f}" if x else "–" for x in (shared, alone)]
            shown = "none" if eps is None else f"{eps:g}"
            print(
                f"| {data} | {shown} | {sigma or 0:.2f} | {cells[0]} | {cells[1]} | "
                f"{seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(int((sys.argv[1:2] or ["3"])[0]))
