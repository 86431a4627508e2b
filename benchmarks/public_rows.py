"""Trust-weighted answers with public rows of other sizes and kinds, each method at the better of
its rates.

    python -m benchmarks.public_rows        # some minutes on one core
    python -m benchmarks.public_rows table

The bed is smaller than that of `fedloom run trust-digits`: eight clients with one kind of network,
α = 0.1, 120 iterations. Public rows are other digits like the clients'
(360 or 36 of them), or pictures of another kind: the same digits with their 64 pixels in one other
order (360). The rate of each method is the best of three on validation rows, with a seed that the
report lacks; FedDF's is that of its server, the better of two. Each run is a line of
benchmarks/archive/public_rows.jsonl.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks import archived
from benchmarks.archived import SEARCH_SEED, SEEDS, merged
from fedloom.core.context import PublicSet, Rows
from fedloom.experiment.plan.settings import horizontal

BED: dict[str, Any] = {
    "iterations": 120,
    "data": {
        "name": "digits",
        "clients": 8,
        "partition": "dirichlet",
        "options": {"alpha": 0.1},
        "public_rows": 360,
        "test_rows": 360,
    },
    "models": {"pool": ["mlp"]},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "equal": {},
    "control": {"params": {"average": "probabilities", "include_self": True}},
    "distance": {"params": {"trust": "distance"}},
    "trusted": {"preset": "trusted"},
    "entropy": {},
    "frequency": {"params": {"expertise": "frequency"}},
}
EXPERTISE = ["entropy", "frequency"]
"""Of FedMosaic: what its clients' votes count by."""
KINDS: dict[str, dict[str, Any]] = {
    "360, like the clients'": {},
    "36, like the clients'": {"data": {"public_rows": 36}},
    "360, of another kind": {},
}
OTHER = "360, of another kind"
RATES = {
    "local": ("lr", (0.0003, 0.001, 0.003)),
    "fedmd": ("lr", (0.0003, 0.001, 0.003)),
    "feddf": ("server_lr", (0.001, 0.0001)),
    "fedmosaic": ("lr", (0.0003, 0.001, 0.003)),
}
ROWS = {  # method -> its weights, and kinds of public rows
    "fedmd": (["equal", "control", "distance", "trusted"], [*KINDS]),
    "local": (["equal"], [*KINDS][:1]),
    "feddf": (["equal", "trusted"], [*KINDS][:1]),
    "fedmosaic": (EXPERTISE, [*KINDS][:1]),
}


def scrambled(rows: Rows) -> Rows:
    """The rows with the numbers of each in one other order."""
    order = torch.from_numpy(np.random.default_rng(0).permutation(rows.pool[0].numel()))
    pool = rows.pool.flatten(1)[:, order].reshape(rows.pool.shape)
    return replace(rows, pool=pool)


@contextmanager
def public(kind: str) -> Iterator[None]:
    """Within it, runs have public rows of this kind."""

    def other(rows: Rows, seed: int, digest: str) -> PublicSet:
        return PublicSet(scrambled(rows), seed, digest)

    with patch.object(horizontal, "PublicSet", other if kind == OTHER else PublicSet):
        yield


def values(
    method: str, weights: str, kind: str, rate: float, seeds: Any, *, validation: bool
) -> dict[int, float]:
    """Seed -> accuracy in per cent."""
    setting, _ = RATES[method]
    params = {} if method == "feddf" else {"tau": 5}
    run = merged(
        BED, KINDS[kind], {"method": method, "params": {**params, setting: rate}}, WEIGHTS[weights]
    )
    run = merged(run, {"data": {"validation": 0.25}} if validation else {})
    about = {
        "method": method,
        "weights": weights,
        "public": kind,
        "rate": rate,
        "validation": validation,
    }
    with public(kind):
        return archived.measured("public_rows", about, run, seeds)


def best_rate(method: str, weights: str) -> float:
    """The rate with the highest accuracy on validation rows."""
    first = next(iter(KINDS))
    scores = {
        rate: values(method, weights, first, rate, [SEARCH_SEED], validation=True)[SEARCH_SEED]
        for rate in RATES[method][1]
    }
    return max(scores, key=lambda rate: scores[rate])


def table() -> str:
    """The archived runs, in Markdown."""
    lines = [
        "| method | weights | public rows | rate | accuracy | minus equal weights | minus the "
        "control |",
        "|---|---|---|---|---|---|---|",
    ]
    for method in RATES:
        for kind in KINDS:
            about = {"method": method, "public": kind, "validation": False}
            known = {
                weights: archived.found("public_rows", {**about, "weights": weights})
                for weights in WEIGHTS
            }
            for weights, values in known.items():
                if len(values) == len(SEEDS):
                    wanted = {**about, "weights": weights}
                    line = next(
                        line
                        for line in archived.read("public_rows")
                        if wanted.items() <= line.items()
                    )
                    rivals = ("equal", "control")
                    minus = [
                        archived.difference(values, known[rival])
                        if len(known[rival]) == len(SEEDS)
                        and weights not in rivals[: 1 + rivals.index(rival)]
                        else "–"
                        for rival in rivals
                    ]
                    text = " | ".join([archived.mean(values), *minus])
                    shown = "–" if method == "local" else weights
                    lines.append(f"| {method} | {shown} | {kind} | {line['rate']:g} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Search the rates, then run; or print the table of what is archived."""
    if "table" in sys.argv:
        print(table(), end="")
        return
    for method, (all_weights, kinds) in ROWS.items():
        for weights in all_weights:
            rate = best_rate(method, weights)
            for kind in kinds:
                found = values(method, weights, kind, rate, SEEDS, validation=False)
                print(
                    f"{method} {weights}, rate {rate:g}, {kind}: "
                    f"{sum(found.values()) / len(found):.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
