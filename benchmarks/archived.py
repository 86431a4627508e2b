"""Runs of an experiment whose numbers are kept: a run that the archive has is not repeated."""

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.compare import execute_all

SEARCH_SEED, SEEDS = 9_999, range(10)
"""The seed of searches on validation rows, and those of what is reported."""
FOLDER = Path(__file__).parent / "archive"


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings, of which later ones win."""
    out: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            out[key] = merged(out.get(key, {}), value) if isinstance(value, dict) else value
    return out


def value(result: Mapping[str, Any], measure: str) -> float:
    """Accuracy, or accuracy in an evaluation mode, in per cent."""
    found = result["accuracy"] if measure == "accuracy" else result["eval_modes"][measure]
    return round(100 * float(found["mean"]), 3)


def read(archive: str) -> list[dict[str, Any]]:
    """The lines of an archive."""
    file = FOLDER / f"{archive}.jsonl"
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )


def found(archive: str, about: Mapping[str, Any]) -> dict[int, float]:
    """Seed -> the archived value of these runs."""
    return {line["seed"]: line["value"] for line in read(archive) if about.items() <= line.items()}


def measured(
    archive: str,
    about: Mapping[str, Any],
    run: Mapping[str, Any],
    seeds: Sequence[int],
    measure: str = "accuracy",
) -> dict[int, float]:
    """Seed -> the measure of these settings, from the archive or run now and added to it.

    `about` says which runs they are; `run` has the settings, with `method` and maybe `preset`.
    """
    run = merged(run, {"evaluate": {"points": 1}, "engine": {"name": "auto"}})
    digest = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:8]
    # what `auto` did with these networks before it measured each machine
    run["engine"] = {"name": "batched"}
    key = {**about, "settings": digest}
    known = {line["seed"]: line["value"] for line in read(archive) if key.items() <= line.items()}
    missing = [seed for seed in seeds if seed not in known]
    if missing:
        method = {"name": "x"} | {
            name: run.pop(name) for name in ("method", "preset") if name in run
        }
        experiment = check(
            {"title": archive, "run": run, "compare": {"methods": [method], "seeds": missing}}
        )
        with tempfile.TemporaryDirectory() as folder:
            execute_all(experiment, Path(folder))
            results = [
                json.loads(path.read_text()) for path in sorted(Path(folder).glob("*/result.json"))
            ]
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / f"{archive}.jsonl").open("a", encoding="utf-8") as file:
            for result in sorted(results, key=lambda one: one["seed"]):
                known[result["seed"]] = value(result, measure)
                line = {**key, "seed": result["seed"], "value": known[result["seed"]]}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return {seed: known[seed] for seed in seeds}


def mean(values: Mapping[int, float]) -> str:
    """`89.7 ± 3.4` of values by seed."""
    numbers = [*values.values()]
    return f"{np.mean(numbers):.1f} ± {np.std(numbers, ddof=1):.1f}"


def difference(a: Mapping[int, float], b: Mapping[int, float]) -> str:
    """`+1.0 (−0.5 to +2.6)`: the mean of a - b, paired by seed, and its 95 % t interval."""
    gaps = np.array([a[seed] - b[seed] for seed in a])
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * float(gaps.std(ddof=1)) / len(gaps) ** 0.5
    center = float(gaps.mean())
    middle, low, high = (
        f"{x:+.1f}".replace("-", "−") for x in (center, center - half, center + half)
    )
    return f"{middle} ({low} to {high})"
