"""Whether the size of a message tells of rows: `python -m benchmarks.sizes [METHODS…]`.

Two runs of each method whose clients have other rows, equally many. It prints each kind of message
that a client sends and whose bytes differ.
"""

import csv
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from fedloom.api import execute
from fedloom.core.errors import FedloomError
from fedloom.experiment.plan.reading import check
from fedloom.methods import registry


def sizes(name: str, seed: int) -> dict[tuple[str, str], set[float]]:
    """The bytes on the wire of a client's messages, by kind and receiver."""
    method, found = registry()[name], defaultdict[tuple[str, str], set[float]](set)
    least = method.configure().min_rounds
    run: dict[str, Any] = {
        "method": name,
        "rounds": max(3, least),
        "seed": seed,
        "evaluate": {"points": 1},
    }
    if method.setting == "vertical" or method.family == "tables":
        run["data"] = {"name": "breast_cancer", "clients": 3}
    else:
        run |= {"data": {"name": "digits", "clients": 3}, "models": {"pool": ["mlp"]}}
    if method.setting != "vertical":
        run["data"]["partition"] = "iid"
    if name == "fedcox":
        run["params"] = {"time": "mean radius", "event": "benign"}
    with tempfile.TemporaryDirectory() as folder:
        execute(check({"run": run}).run, Path(folder) / "run")
        with (Path(folder) / "run" / "ledger.csv").open() as file:
            for row in csv.DictReader(file):
                if row["sender"] != "server":
                    found[row["kind"], row["receiver"]].add(
                        int(row["wire_bytes"]) / int(row["count"])
                    )
    return found


def main(*names: str) -> None:
    """Print a line for each kind of message whose size differs, or for a method that
    did not run.
    """
    torch.set_num_threads(1)
    for name in names or registry():
        try:
            one, other = sizes(name, 0), sizes(name, 1)
        except FedloomError as error:
            print(f"{name}: {error}", flush=True)
            continue
        for kind in sorted({*one, *other}):
            if one.get(kind) != other.get(kind):
                print(f"{name}: {' to the '.join(kind)} has other bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
