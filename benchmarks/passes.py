"""What is counted in a small run of every method, over what `fedloom.experiment.estimate.cost` says
before.

Operations of matrix products and convolutions, counted by torch as they are done, with the
evaluations; and, with `--seconds`, CPU seconds of somewhat longer runs. A ratio above 1 means more
was done than said.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.estimate.cost import cost
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry

SMALL: dict[str, Any] = {
    "clients": 6,
    "public_rows": 100,
    "test_fraction": 0.5,
    "test_rows": 60,
    "own_test_rows": 20,
}
LONGER: tuple[dict[str, Any], ...] = (
    {"method": "fedal", "iterations": 60},
    {
        "method": "fedal",
        "iterations": 20,
        "data": {"name": "mnist", "test_rows": 1000},
        "models": {"pool": ["cnn-small"]},
    },
    {
        "method": "local",
        "iterations": 40,
        "data": {"name": "fashion_mnist", "test_rows": 1000},
        "models": {"pool": ["lenet5"]},
    },
    {"method": "fccl-plus", "iterations": 20, "params": {"tau": 5}},
    {
        "method": "feddf",
        "rounds": 2,
        "data": {"name": "mnist", "test_rows": 1000},
        "models": {"pool": ["cnn-small", "mlp"]},
    },
    {"method": "fedavg", "rounds": 10},
    {
        "method": "gossip",
        "rounds": 2,
        "data": {"name": "mnist", "test_rows": 1000, "options": {"rows": 300}},
    },
    {"method": "afind-plus", "rounds": 5, "data": {"options": {"rows": 50}}},
    {"method": "pens", "rounds": 3, "data": {"clients": 8}},
    {"method": "augfl", "rounds": 20, "models": {"pool": ["mlp"]}},
    {"method": "per-fedavg", "rounds": 10},
    {"method": "proto-evfl", "rounds": 4},
    {"method": "split", "rounds": 5, "data": {"name": "mnist", "test_rows": 500}},
    {"method": "ss-vfl", "rounds": 7, "data": {"name": "breast_cancer"}},
)


def small(name: str) -> RunConfig:
    """A run of a second or so."""
    method = registry()[name]
    values: dict[str, Any] = {
        "method": name,
        "rounds": 3,
        "data": {**SMALL},
        "models": {"pool": ["cnn-small"]},
    }
    values |= {
        "evaluate": {"points": 1},
        "pretrained": {"epochs": 2}
        if {"pretrained server model", "pretrained encoder"} & {*method.needs}
        else {},
    }
    if "pretrain" in method.config.model_fields:
        values["params"] = {"pretrain": 1}
    if method.setting == "vertical":
        values |= {"columns": {"aligned": 100, "unaligned": 60}}
        values["data"]["clients"] = 4
        values["models"]["pool"] = ["lenet5"]
    return check({"run": values}).run


def counted(run: RunConfig) -> float:
    """The operations that a run comes to; a pretrained model is there before."""
    if run.pretrained.given:
        execute(run.model_copy(update={"rounds": 1, "iterations": None}))
    with FlopCounterMode(display=False) as found:
        execute(run)
    return float(found.get_total_flops())


def main(names: Sequence[str] = ()) -> None:
    """Every method, or those of the names."""
    torch.set_num_threads(1)
    print(
        "Operations counted over said, of small runs\n\n| method | counted, 1e6 | ratio "
        "|\n|---|---|---|"
    )
    ratios = []
    for name in names or registry():
        run = small(name)
        done, said = counted(run), cost(run).flops
        ratios.append(done / said)
        print(f"| {name} | {done / 1e6:,.1f} | {done / said:.2f} |", flush=True)
    print(f"\nfrom {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")


def seconds() -> None:
    """CPU seconds of longer runs over what was said; MNIST and its like need FEDLOOM_DATA."""
    torch.set_num_threads(1)
    print("\n| method | data | said, s | took, CPU s | ratio |\n|---|---|---|---|---|")
    ratios = []
    for values in LONGER:
        run = check({"run": {"evaluate": {"points": 2}, **values}}).run
        if run.data.name.endswith("mnist") and "FEDLOOM_DATA" not in os.environ:
            continue
        if run.pretrained.given:
            execute(run.model_copy(update={"rounds": 1, "iterations": None}))
        said = cost(run).seconds
        start = time.process_time()
        execute(run)
        took = time.process_time() - start
        ratios.append(took / said)
        print(
            f"| {run.method} | {run.data.name} | {said:.2f} | {took:.2f} | {took / said:.2f} |",
            flush=True,
        )
    factors = [max(r, 1 / r) for r in ratios]
    print(
        f"\noff by a factor of {statistics.geometric_mean(factors):.2f} on average, "
        f"{max(factors):.2f} at worst"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="methods; all if none is named")
    parser.add_argument("--seconds", action="store_true", help="time longer runs too")
    wants = parser.parse_args()
    main(wants.names)
    if wants.seconds:
        seconds()
