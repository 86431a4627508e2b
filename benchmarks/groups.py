"""Who finds planted groups of peers and keeps them, from messages alone, and what it gains.

    python -m benchmarks.groups [SIZE …] [--seeds 3] [--out groups.jsonl]

Three groups of `SIZE` peers (2, 5, 8 and 10), three or four classes of digits each, 24 rows a peer,
an MLP, 50 rounds.
Of each method it writes a line of JSON: the share of peers whose neighbours with a share in their
model are exactly their group, the mean share of mates that are found (recall) and of neighbours
that are mates (precision) after rounds 10 and 50, and accuracy on own test rows, after fine-tuning,
by seed.
"""

import argparse
import csv
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.compare import execute_all

GROUPS, ROWS, ROUNDS = 3, 24, 50
TIMES = (10, ROUNDS)
METHODS: list[dict[str, Any]] = [
    {"method": "alone"},
    {
        "name": "oracle",
        "method": "gossip",
        "params": {"neighbours": "none"},
        "topology": {"kind": "groups", "groups": GROUPS},
    },
    {"name": "gossip", "method": "gossip", "params": {"neighbours": 4}},
    {"name": "eq13", "method": "afind-plus", "params": {"mode": "cheap"}},
    {"name": "calibrated", "method": "afind-plus", "preset": "cheap"},
    {"name": "anchored", "method": "afind-plus", "preset": "anchored"},
    {"name": "cobo", "method": "cobo"},
    {"name": "cobo cosine", "method": "cobo", "preset": "cosine"},
    {"name": "dpfl", "method": "dpfl"},
]


def experiment(size: int, seeds: int, entry: dict[str, Any]) -> Any:
    """One method on all seeds."""
    return check(
        {
            "run": {
                "rounds": ROUNDS,
                "params": {"batch_size": 32, "epochs": 1, "lr": 0.05},
                "data": {
                    "name": "digits",
                    "clients": GROUPS * size,
                    "partition": "groups",
                    "options": {"number": GROUPS, "rows": ROWS},
                    "public_rows": 0,
                    "own_test_rows": 100,
                },
                "models": {"pool": ["mlp"]},
                "evaluate": {"points": 5},
                "engine": {"name": "batched"},
            },
            "compare": {"methods": [entry], "seeds": list(range(seeds))},
        }
    )


def choices(folder: Path, peers: int) -> dict[int, list[set[int]]]:
    """Round -> the neighbours with a share in each peer's model."""
    found: dict[int, list[set[int]]] = {}
    with open(folder / "mixing.csv") as file:
        for row in csv.DictReader(file):
            sets = found.setdefault(int(row["round"]), [set() for _ in range(peers)])
            me = int(row["party"].removeprefix("peer-"))
            for part in row["weights"].split():
                j, share = part.split(":")
                if float(share) > 0 and int(j) != me:
                    sets[me].add(int(j))
    return found


def judged(found: list[set[int]], size: int) -> tuple[float, float, float]:
    """The shares of peers with exactly their group, of mates that are found, and of neighbours that
    are mates.
    """
    mates = [
        {j for j in range(len(found)) if j // size == i // size} - {i} for i in range(len(found))
    ]
    exact = np.mean([a == b for a, b in zip(found, mates, strict=True)])
    recall = np.mean([len(a & b) / len(b) for a, b in zip(found, mates, strict=True)])
    precision = np.mean(
        [len(a & b) / len(a) if a else 1.0 for a, b in zip(found, mates, strict=True)]
    )
    return float(exact), float(recall), float(precision)


def main() -> None:
    """Run all sizes and methods."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sizes", nargs="*", type=int, default=[2, 5, 8, 10])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("groups.jsonl"))
    options = parser.parse_args()
    for size in options.sizes:
        for entry in METHODS:
            clock = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                execute_all(experiment(size, options.seeds, entry), Path(folder))
                runs = sorted(path.parent for path in Path(folder).glob("*/mixing.csv"))
                history = [choices(run, GROUPS * size) for run in runs]
                results = [json.loads((run / "result.json").read_text()) for run in runs]
            line = {
                "size": size,
                "method": entry.get("name", entry["method"]),
                "accuracy": [result["eval_modes"]["tuned"]["mean"] for result in results],
                "exact, recall, precision": {
                    t: np.mean([judged(found[t], size) for found in history], 0).round(3).tolist()
                    for t in TIMES
                },
                "seconds": round(time.process_time() - clock, 1),
            }
            with open(options.out, "a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
