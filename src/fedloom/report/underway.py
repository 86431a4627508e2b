"""A run that is not finished: what can be said of it so far."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.report.files import checked, damaged, parsed
from fedloom.report.measures import GLOBAL, OWN
from fedloom.report.schema import Flow, Measure, Partition, Summary


def so_far(
    folder: Path,
    config: str,
    metrics: Sequence[Measure],
    ledger: Sequence[Flow],
    failures: int,
    partition: Partition,
) -> Summary:
    """What `result.json` would hold of a run under way, at its last evaluation.

    Raises:
        DataError: there was none yet, or the config is damaged.
    """
    seen = [m for m in metrics if m.measure == "accuracy mean"]
    if not seen:
        raise DataError(f"{folder / 'metrics.csv'} holds no accuracy yet; go on with the run by --resume")
    try:
        asked = tomllib.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise damaged(folder / "config.toml", f"is not valid TOML: {error}") from None
    last = seen[-1]
    then = {(m.measure, m.party): m.value for m in metrics if (m.round, m.stage) == (last.round, last.stage)}

    names = [party for what, party in then if what == GLOBAL and party]

    def over_clients(what: str) -> dict[str, Any] | None:
        found = {party: value for (measure, party), value in then.items() if measure == what and party}
        if not found:
            return None
        each, clients = [*found.values()], [number for number, name in enumerate(names) if name in found]
        spread = {"mean": float(np.mean(each)), "std": float(np.std(each)), "per_client": each}
        return {**spread, "clients": clients} if len(clients) < len(names) else spread

    prepared = dict.fromkeys(what for what, party in then if party and what.startswith(f"{OWN} "))
    found: dict[str, Any] = {
        "accuracy": over_clients(GLOBAL),
        "own_accuracy": over_clients(OWN),
        "ways": {what.removeprefix(f"{OWN} "): over_clients(what) for what in prepared},
    }
    if partition.parties is not None:
        from fedloom.experiment.summary import jointly  # it takes a second to import

        ways = dict.fromkeys(what for what, party in then if party and what.startswith(f"{GLOBAL} "))
        found = jointly(
            then, partition.parties.ids(party for _, party in then), [way.removeprefix(f"{GLOBAL} ") for way in ways]
        )
    method, data = str(asked.get("method", "")), asked.get("data", {})
    dataset, clients = data.get("name"), data.get("clients")
    if partition.parties is not None:  # whose data may come from files of their own
        dataset, clients = parsed(folder / "partition.json")["parties"].get("name", dataset), partition.number
    values = {
        "name": asked.get("name") or method,
        "method": method,
        "title": "",
        "preset": asked.get("preset"),
        "seed": asked.get("seed"),
        "rounds": last.round,
        "iterations": last.iteration,
        "dataset": dataset,
        "clients": clients,
        "engine": None,
        **found,
        "agreement": then.get(("agreement", "")),
        "chance": partition.chance,
        "own_chance": partition.own_chance,
        "own_chances": partition.own_chances,
        "unseen": partition.unseen,
        "bytes": {way: then.get((f"bytes {way}", "")) for way in ("up", "down", "across")},
        "messages": sum(flow.count for flow in ledger),
        "seconds": {},
        "failures": failures,
        "public_sha256": None,
        "state_sha256": None,
        "apart": partition.apart > 0,
    }
    return checked(Summary, values, folder / "metrics.csv")
