"""Several methods and seeds on identical splits, and the differences between them, pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.errors import ConfigError
from fedloom.experiment.config import Experiment, RunConfig
from fedloom.experiment.record import write_json
from fedloom.experiment.run import Result, Status, execute

SAME = ("dataset", "clients", "public_sha256")


def folder_name(run: RunConfig) -> str:
    """A run's folder within a comparison: `fedal-seed0`."""
    return f"{run.name or run.method}-seed{run.seed}".replace("/", "_")


def execute_all(
    experiment: Experiment,
    folder: Path | None = None,
    *,
    resume: bool = False,
    progress: Callable[[Status], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Do every run of a comparison and write `comparison.json`; returns its content.

    With `resume`, finished runs are kept and an unfinished one goes on from its checkpoint.

    Raises:
        ConfigError: two runs would share a folder.
    """
    runs = experiment.runs()
    names = [folder_name(run) for run in runs]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise ConfigError(f"two runs are called {twice[0]!r}: give the entries in [compare] methods a name each")
    results = [
        execute(
            run,
            folder / name if folder else None,
            resume=resume,
            progress=progress,
            stop=stop,
        )
        for run, name in zip(runs, names, strict=True)
    ]
    found = summarise(experiment.title, results)
    if folder is not None:
        write_json(folder / "comparison.json", found)
    return found


def summarise(title: str, results: Sequence[Result]) -> dict[str, Any]:
    """What a comparison says: each method over its seeds, and each against the first, paired.

    Args:
        title: of the comparison.
        results: runs; those of one seed must have been made on the same data.

    Raises:
        ConfigError: the runs of one seed differ in data, public set or clients: they can't be paired.
    """
    summaries = [r.summary for r in results]
    for seed in {s["seed"] for s in summaries}:
        for key in SAME:
            values = {str(s[key]) for s in summaries if s["seed"] == seed}
            if len(values) > 1:
                raise ConfigError(f"runs of seed {seed} can't be compared: {key} is {' and '.join(sorted(values))}")
    names = list(dict.fromkeys(s["name"] for s in summaries))
    groups = {name: [s for s in summaries if s["name"] == name] for name in names}
    return {
        "title": title,
        "reference": names[0],
        "methods": [_method(name, group) for name, group in groups.items()],
        "differences": [_difference(groups[names[0]], groups[name]) for name in names[1:]],
        "runs": [
            {"name": s["name"], "seed": s["seed"], "folder": r.folder.name if r.folder else None}
            for s, r in zip(summaries, results, strict=True)
        ],
    }


def _method(name: str, group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method: the mean over seeds, the spread over seeds and the mean spread over clients."""
    means = [s["accuracy"]["mean"] for s in group]
    return {
        "name": name,
        "method": group[0]["method"],
        "preset": group[0]["preset"],
        "seeds": [s["seed"] for s in group],
        "accuracy": {
            "mean": float(np.mean(means)),
            "std_over_seeds": _deviation(means),
            "std_over_clients": float(np.mean([s["accuracy"]["std"] for s in group])),
        },
        "chance": float(np.mean([s["chance"] for s in group])),
        "bytes": {k: float(np.mean([s["bytes"][k] for s in group])) for k in ("up", "down", "across")},
        "seconds": float(np.mean([s["seconds"]["total"] for s in group])),
        "failures": sum(s["failures"] for s in group),
    }


def _difference(first: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """First minus other, on the seeds that both have: per seed, and per client within the seeds."""
    by_seed = {s["seed"]: s for s in other}
    pairs = [(a, by_seed[a["seed"]]) for a in first if a["seed"] in by_seed]
    per_seed = [a["accuracy"]["mean"] - b["accuracy"]["mean"] for a, b in pairs]
    per_client = [
        x - y for a, b in pairs for x, y in zip(a["accuracy"]["per_client"], b["accuracy"]["per_client"], strict=True)
    ]
    return {
        "first": first[0]["name"],
        "other": other[0]["name"],
        "mean": float(np.mean(per_seed)) if per_seed else None,
        "std_over_seeds": _deviation(per_seed),
        "std_over_clients": float(np.std(per_client)) if per_client else None,
        "clients_better": int(np.sum(np.array(per_client) > 0)),
        "clients": len(per_client),
        "per_seed": per_seed,
    }


def _deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values, which have none."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
