"""The few numbers that a run comes to: the content of `result.json` and `partition.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from fedloom._version import __version__
from fedloom.data.stats import describe
from fedloom.engines import Account
from fedloom.experiment.evaluate import state_sha256
from fedloom.experiment.record import Record
from fedloom.experiment.world import World
from fedloom.federation import Federation
from fedloom.message import Tree


def traffic(fed: Federation) -> dict[str, int]:
    """Bytes of tensor data `up` to the home party, `down` from it, and `across` between the others."""
    pairs = fed.ledger.pairs.items()
    up = sum(size for (_, to), (_, size) in pairs if to == fed.home)
    down = sum(size for (by, _), (_, size) in pairs if by == fed.home)
    return {"up": up, "down": down, "across": sum(size for _, (_, size) in pairs) - up - down}


def partition(world: World) -> dict[str, Any]:
    """Who holds how many rows of which class, and which network."""
    stats = describe(world.dataset.y, world.split.shards, world.dataset.classes)
    return {
        "classes": list(world.dataset.classes),
        "counts": stats.counts.tolist(),
        "architectures": list(world.architectures),
        "chance": world.chance,
        "own_chance": own_chance(world),
        "test": len(world.split.test),
        "public": len(world.split.public),
        "public_sha256": world.public_digest,
    }


def own_chance(world: World) -> float | None:
    """The accuracy of a client that always answers the most frequent class of its own test rows, mean over clients;
    None where a client has none."""
    labels = [world.dataset.y[rows] for rows in world.split.own_test]
    if not all(len(y) for y in labels):
        return None
    return float(np.mean([np.bincount(y).max() / len(y) for y in labels]))


def summarise(
    world: World, fed: Federation, record: Record, rounds: int, states: Mapping[str, dict[str, Tree]], where: Account
) -> dict[str, Any]:
    """The content of `result.json`. Standard deviations over clients are those of the whole population."""
    run, cfg = world.run, world.cfg
    # The last stage of the last round overwrites the earlier ones.
    final = {(row[4], row[3]): row[5] for row in record.metrics if row[0] == rounds}
    names = [fed.engine.name(i) for i in fed.engine.ids]
    return {
        "name": run.name or world.method.name,
        "method": world.method.name,
        "title": world.method.title,
        "preset": run.preset,
        "params": cfg.model_dump(mode="json"),
        "seed": run.seed,
        "rounds": rounds,
        "iterations": rounds * cfg.iterations_per_round,
        "dataset": world.dataset.name,
        "clients": len(names),
        "engine": {"asked": run.engine.name, **asdict(where), "remarks": list(where.remarks)},
        "accuracy": _over_clients(final, "accuracy", names),
        "own_accuracy": _over_clients(final, "own accuracy", names),
        "ways": {way: _over_clients(final, f"own accuracy {way}", names) for way in cfg.ways},
        "agreement": final.get(("agreement", "")),
        "chance": world.chance,
        "own_chance": own_chance(world),
        "bytes": traffic(fed),
        "messages": sum(count for count, _ in fed.ledger.pairs.values()),
        "seconds": {"total": sum(record.seconds.values()), **record.seconds},
        "failures": len(fed.failures),
        "failure_reasons": dict(Counter(trouble.reason for trouble in fed.failures)),
        "public_sha256": world.public_digest,
        "state_sha256": state_sha256(states.items()),
        "fedloom": __version__,
    }


def _over_clients(final: Mapping[tuple[str, str], float], what: str, names: list[str]) -> dict[str, Any] | None:
    if (what, names[0]) not in final:
        return None
    each = [final[what, name] for name in names]
    return {"mean": float(np.mean(each)), "std": float(np.std(each)), "per_client": each}
