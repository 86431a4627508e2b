"""AUC of private trees against ε on Adult: `python -m benchmarks.private_trees`.

A quarter of the rows is held out; seeds 0 to 2. Ranges of columns are declared from what is known
of them; `fnlwgt` and `education`, which says what `education.num` says, are left out. With ε = inf
the noise is nearly none.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from fedloom.core.federation import Federation
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.protect.accountant import noise_for

GRID = {
    "age": (17, 90),
    "education.num": (1, 16),
    "capital.gain": (0, 100_000),
    "capital.loss": (0, 5_000),
    "hours.per.week": (1, 100),
}
DELTA, EPSILONS, SEEDS = 1e-5, (math.inf, 8.0, 2.0, 0.5), range(3)
SETTINGS: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "100 trees of depth 6, one owner": (100, 1, False, {}),
    "the same, four owners in secure sums": (100, 4, True, {}),
    "the same, four owners, plain sums": (100, 4, False, {}),
    "30 trees of depth 5, rate 0.5, four owners in secure sums": (
        30,
        4,
        True,
        {"depth": 5, "rate": 0.5},
    ),
}
"""Rounds, owners, secure sums, and settings."""


def area(
    seed: int, epsilon: float, rounds: int, owners: int, secure: bool, params: dict[str, Any]
) -> float:
    """The AUC in percent of a run on the test rows."""
    dp = {"sigma": noise_for(epsilon, DELTA, count=rounds) or 1e-9, "grid": GRID, "delta": DELTA}
    data = {
        "name": "adult",
        "clients": owners,
        "partition": "iid",
        "public_rows": 0,
        "test_fraction": 0.25,
    }
    values = {"method": "fedextra", "seed": seed, "data": data, "params": {**params, "dp": dp}}
    plan = build(check({"run": {**values, "aggregate": {"secure": secure}}}).run)
    with start(plan) as engine:
        fed = Federation(engine, seed=seed, aggregator=plan.contexts[0].aggregator)
        for t in range(rounds):
            fed.round = t
            for _ in plan.method.round(fed, plan.server, list(engine.ids), plan.cfg, t):
                pass
        tests = plan.contexts[0].tests["test"]
        logits = engine._parties[0].infer(tests.every)  # type: ignore[attr-defined]
    y = tests.labels[tests.index].numpy()
    return 100 * float(roc_auc_score(y, logits.softmax(-1)[:, 1].numpy()))


def main() -> None:
    """Print the table."""
    heads = ["no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}" for epsilon in EPSILONS]
    print(
        "\n".join([f"| AUC | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]), flush=True
    )
    for name, setting in SETTINGS.items():
        cells = []
        for epsilon in EPSILONS:
            found = [area(seed, epsilon, *setting) for seed in SEEDS]
            cells.append(f"{np.mean(found):.2f} ± {np.std(found, ddof=1):.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
