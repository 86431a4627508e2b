"""Several methods and seeds on identical splits, and the differences between them, pair by pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.experiment.config import Experiment, RunConfig
from fedloom.experiment.record import write_json
from fedloom.experiment.run import Result, Status, execute

GLOBAL, OWN = "accuracy", "own accuracy"
"""What `metrics.csv` calls the accuracy on the global test set, and on each client's own test rows."""
LOWER = ("log loss",)
"""Measures of which less is better."""
SAME = ("dataset", "clients", "public_sha256", "test_sha256")


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
    execute: Callable[..., Result] = execute,
) -> dict[str, Any]:
    """Do every run of a comparison and write `comparison.json`; returns its content.

    With `resume`, finished runs are kept and an unfinished one goes on from its checkpoint. `execute` does one run.

    Raises:
        ConfigError: two runs would share a folder; or some methods share rows, others columns.
    """
    runs = experiment.runs()
    methods = [run.resolve()[0] for run in runs]
    _of_one_kind({method.name: method.setting == "vertical" for method in methods})
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

    `differences` are of the main `measure`, `further` those of all other measures that every run has. The main one is
    the accuracy on the global test set, or on own rows in the first way in which all runs were evaluated. Where parties
    hold different columns, the further ones are the other scores; of `lower_is_better` less is better.

    Args:
        title: of the comparison.
        results: runs; those of one seed must have been made on the same data.

    Raises:
        ConfigError: the runs of one seed differ in data, public set or clients: they can't be paired. Or some share
            rows, others columns; or some have unseen clients, others none.
    """
    summaries = [r.summary for r in results]
    _of_one_kind({s["name"]: bool(s.get("scores")) for s in summaries})
    for seed in {s["seed"] for s in summaries}:
        for key in SAME:
            values = {str(s[key]) for s in summaries if s["seed"] == seed and s.get(key) is not None}
            if len(values) > 1:
                raise ConfigError(f"runs of seed {seed} can't be compared: {key} is {' and '.join(sorted(values))}")
        _same_unseen(seed, [unseen(s) for s in summaries if s["seed"] == seed])
    if len({bool(unseen(s)) for s in summaries}) > 1:
        raise ConfigError("runs can't be compared: some have unseen clients, others none")
    names = list(dict.fromkeys(s["name"] for s in summaries))
    groups = {name: [s for s in summaries if s["name"] == name] for name in names}
    main, *others = _shared(summaries)
    against = next((name for name, group in groups.items() if group[0]["method"] == "local"), names[0])

    def differences(measure: str) -> list[dict[str, Any]]:
        return [_difference(groups[names[0]], groups[name], measure) for name in names[1:]]

    return {
        "title": title,
        "reference": names[0],
        "methods": [_method(name, group, main, groups[against]) for name, group in groups.items()],
        "gains_over": against,
        "unseen": {str(s["seed"]): list(unseen(s)) for s in summaries if unseen(s)},
        "measure": main,
        "differences": differences(main),
        "further": {measure: differences(measure) for measure in others},
        "lower_is_better": [measure for measure in LOWER if measure in others],
        "remarks": remarks(summaries),
        "runs": [
            {"name": s["name"], "seed": s["seed"], "folder": r.folder.name if r.folder else None}
            for s, r in zip(summaries, results, strict=True)
        ],
    }


def _of_one_kind(columns: Mapping[str, bool]) -> None:
    """Refuse methods that share rows beside methods that share columns, by name whether each does the latter."""
    first = {kind: next((name for name, own in columns.items() if own is kind), None) for kind in (True, False)}
    if all(first.values()):
        raise ConfigError(
            f"{first[True]} can't be compared with {first[False]}: its parties hold different columns and give one "
            "answer together, those of the other hold different rows and answer one by one; compare methods of one kind"
        )


def remarks(summaries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader should know of runs that can be paired: those of one method and seed whose servers have other
    pretrained models."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    for s in summaries:
        own = s.get("pretrained") or {}
        told = f"{own['model'] or 'one'} ({own['digest'][:12]})" if own else "none"
        found.setdefault((s["method"], s["seed"]), {})[own.get("digest", "")] = told
    return [
        f"runs of {method} with seed {seed} have different pretrained models at the server: {', '.join(each.values())}"
        for (method, seed), each in found.items()
        if len(each) > 1
    ]


def unseen(summary: dict[str, Any]) -> tuple[int, ...]:
    """The clients that took part in no round of a run."""
    return tuple(summary.get("unseen", ()))


def _same_unseen(seed: int, found: Sequence[tuple[int, ...]]) -> None:
    """Refuse to pair runs of one seed in which other clients were left out."""
    if len(set(found)) > 1:
        those = " and ".join(", ".join(map(str, clients)) or "none" for clients in sorted(set(found)))
        raise ConfigError(f"runs of seed {seed} can't be compared: the unseen clients are {those}")


def measured(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a run measured, by its name in `metrics.csv`: "accuracy" on the global test set, "own accuracy" on each
    client's own test rows, and "own accuracy tuned" on these in the way `tuned`; where there are unseen clients, over
    these, and "own accuracy tuned training" over the others. Where parties hold different columns, the scores of their
    one answer."""
    if summary.get("scores"):
        return {name: {"mean": v, "std": 0.0, "per_client": [v]} for name, v in summary["scores"].items()}
    ways = {f"{OWN} {way}": found for way, found in summary["ways"].items()}
    found = {**ways, GLOBAL: summary["accuracy"], OWN: summary["own_accuracy"]}
    return {measure: value for measure, value in found.items() if value is not None}


def _shared(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """The measures that all runs have, the main one first: in the first way, if they have one in common."""
    found = [what for what in measured(summaries[0]) if all(what in measured(s) for s in summaries)]
    if OWN not in found and any(OWN in measured(s) for s in summaries):  # their ways are on other rows
        return [GLOBAL]
    return found


def _method(name: str, group: Sequence[dict[str, Any]], main: str, against: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One method over its seeds; what each kind of client gains, over another method's runs."""
    found = {measure: _over_seeds([measured(s)[measure] for s in group]) for measure in _shared(group)}
    own_chances = [s["own_chance"] for s in group]
    return {
        "name": name,
        "method": group[0]["method"],
        "preset": group[0]["preset"],
        "seeds": [s["seed"] for s in group],
        "accuracy": found[GLOBAL],
        "own_accuracy": found.get(OWN),
        "scores": found if group[0].get("scores") else {},
        "alone": _alone(group),
        "ways": {way: found[f"{OWN} {way}"] for way in group[0]["ways"] if f"{OWN} {way}" in found},
        "networks": networks(group, main, against),
        "chance": float(np.mean([s["chance"] for s in group])),
        "own_chance": None if None in own_chances else float(np.mean(own_chances)),
        "own_chances": _own_chances(group),
        "bytes": {k: float(np.mean([s["bytes"][k] for s in group])) for k in ("up", "down", "across")},
        "seconds": float(np.mean([s["seconds"]["total"] for s in group])),
        "failures": sum(s["failures"] for s in group),
    }


def networks(
    group: Sequence[dict[str, Any]], measure: str, against: Sequence[dict[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    """A measure by the name of the clients' networks or black boxes: the mean over those `clients`, all seeds together,
    and the `gain`, the mean of what each has more than the same client of the same seed has in the runs `against`; None
    where none has the same model there. Empty unless there are several, and each client has a value of its own."""
    values, before = _by_model(group, measure), _by_model(against, measure)
    found = {}
    for name, each in sorted(values.items()):
        gains = [value - before[name][who] for who, value in each.items() if who in before.get(name, {})]
        mean, gain = float(np.mean([*each.values()])), float(np.mean(gains)) if gains else None
        found[name] = {"clients": len(each), "mean": mean, "gain": gain}
    return found if len(found) > 1 else {}


def _by_model(group: Sequence[dict[str, Any]], measure: str) -> dict[str, dict[tuple[int, int], float]]:
    """A measure by the name of a client's model, its seed and its number. A measure over all clients is here one over
    those that train."""
    each: dict[str, dict[tuple[int, int], float]] = {}
    for s in group:
        found, names = measured(s)[measure], s.get("architectures") or ()
        if s.get("scores") or not names:
            return {}
        all_of_them = found.get("clients") is None
        of = range(len(names)) if all_of_them else found["clients"]
        for i, value in zip(of, found["per_client"], strict=True):
            if not (all_of_them and i in unseen(s)):
                each.setdefault(names[i], {})[s["seed"], i] = value
    return each


def _own_chances(group: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The chance level over unseen clients, and over the others; empty unless every seed has both."""
    found = [s.get("own_chances") or {} for s in group]
    every = {who: [one.get(who) for one in found] for who in found[0]}
    return {who: float(np.mean([v for v in each if v is not None])) for who, each in every.items() if None not in each}


def _alone(group: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The accuracy of parties that answer alone, in each way: on the test, and on their unaligned rows if known."""
    found: dict[str, dict[str, Any]] = {}
    for way in group[0].get("alone", {}):
        for on in ("test", "own"):
            each = [s["alone"][way][on] for s in group]
            found.setdefault(way, {})[on] = None if None in each else _over_seeds(each)
    return found


def _over_seeds(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A measure of one method in each seed: the mean over seeds, the spread over seeds, and that over clients."""
    means = [one["mean"] for one in found]
    return {
        "mean": float(np.mean(means)),
        "std_over_seeds": _deviation(means),
        "std_over_clients": float(np.mean([one["std"] for one in found])),
    }


def _difference(first: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], measure: str) -> dict[str, Any]:
    """First minus other, on the seeds that both have: per seed, and per client within the seeds, of those clients that
    the measure is of. A client is better where it has more, or less if that is better."""
    by_seed = {s["seed"]: measured(s)[measure] for s in other}
    pairs = [(measured(s)[measure], by_seed[s["seed"]]) for s in first if s["seed"] in by_seed]
    per_seed = [a["mean"] - b["mean"] for a, b in pairs]
    per_client = [x - y for a, b in pairs for x, y in zip(a["per_client"], b["per_client"], strict=True)]
    return {
        "first": first[0]["name"],
        "other": other[0]["name"],
        "mean": float(np.mean(per_seed)) if per_seed else None,
        "std_over_seeds": _deviation(per_seed),
        "std_over_clients": float(np.std(per_client)) if per_client else None,
        "clients_better": int(np.sum(np.array(per_client) * (-1 if measure in LOWER else 1) > 0)),
        "clients": len(per_client),
        "per_seed": per_seed,
    }


def _deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None for fewer than two values, which have none."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None
