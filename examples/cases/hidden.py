"""AUC where each hospital lacks four of the thirteen columns, drawn at random, beside AUC with all columns.

python examples/cases/hidden.py heart.csv 8    # the file of docs/cases/heart.md, and the number of seeds; some minutes
"""

import sys
from typing import Any

import numpy as np
import pandas

import fedloom

METHODS: dict[str, dict[str, Any]] = {
    "fedforest": {"rounds": 5},
    "fedboost": {"rounds": 100, "params": {"depth": 3, "min_rows": 5, "bins": 32}},
    "fedavg-ft": {"rounds": 30, "models": "mlp", "params": {"batch_size": 32, "clients_per_round": "none"}},
}


def hidden(table: pandas.DataFrame, seed: int) -> pandas.DataFrame:
    """The table without four columns at each hospital."""
    rng, out = np.random.default_rng([7, seed]), table.copy()
    columns = [name for name in table if name not in ("hospital", "disease")]
    for site in sorted(table["hospital"].unique()):
        out.loc[out["hospital"] == site, list(rng.choice(columns, 4, replace=False))] = np.nan
    return out


def main(path: str, seeds: int) -> None:
    """Print AUC over all test rows, and the mean of hospitals: with all columns, then with hidden ones."""
    table = pandas.read_csv(path)
    known: dict[str, Any] = {"label": "disease", "group": "hospital", "missing_columns": "allow", "public_rows": 0}
    for seed in range(seeds):
        for method, settings in METHODS.items():
            found = [fedloom.run(method, data=x, seed=seed, **known, **settings) for x in (table, hidden(table, seed))]
            scores = [result.summary["client_scores"] for result in found]
            print(seed, method, *(f"{s[name]['mean']:.4f}" for s in scores for name in ("auc", "own auc")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
