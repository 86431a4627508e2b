"""The few numbers that a run comes to: the content of `result.json` and `partition.json`."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedloom import models
from fedloom._version import __version__
from fedloom.core.errors import CheckpointError
from fedloom.core.federation import Federation
from fedloom.core.ledger import Entry
from fedloom.engines import Account
from fedloom.experiment import weights
from fedloom.experiment.evaluate import CHANCE, OWN, groups, state_sha256
from fedloom.experiment.record import Record
from fedloom.experiment.world import World, pretrained_of

SCORES = {
    "accuracy": "accuracy mean",
    "balanced accuracy": "balanced accuracy",
    "auc": "auc",
    "log loss": "loss mean",
    "seen accuracy": "seen accuracy",
    "rare recall": "rare recall",
}
"""What one answer of all parties together is judged by, and what `metrics.csv` calls it. The last two, on the test
people of the classes that are rare among the aligned and of all others, are there where a config names such classes."""
ATTACK = "attack "
"""How the names of the measures of attacks begin."""


def traffic(fed: Federation) -> dict[str, int]:
    """Bytes of tensor data `up` to the home party, `down` from it, and `across` between the others."""
    pairs = fed.ledger.pairs.items()
    up = sum(size for (_, to), (_, size) in pairs if to == fed.home)
    down = sum(size for (by, _), (_, size) in pairs if by == fed.home)
    return {"up": up, "down": down, "across": sum(size for _, (_, size) in pairs) - up - down}


def by_kind(ledger: Iterable[Entry], rounds: int) -> list[dict[str, Any]]:
    """Messages and bytes of tensor data of each kind and direction: in all, and in each of so many rounds."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in ledger:
        key = {"sender": entry.sender, "receiver": entry.receiver, "kind": entry.kind}
        new = {**key, "messages": 0, "bytes": 0, "by_round": [0] * rounds}
        line = found.setdefault((entry.sender, entry.receiver, entry.kind), new)
        line["messages"] += entry.count
        line["bytes"] += entry.bytes
        line["by_round"][entry.round] += entry.bytes
    return list(found.values())


def partition(world: World) -> dict[str, Any]:
    """Who holds what, and which network."""
    held = world.held
    return {
        "classes": list(held.classes),
        "architectures": list(world.architectures),
        "chance": world.chance,
        "own_chance": world.own_chance(),
        "own_chances": own_chances(world),
        "unseen": list(world.unseen),
        "test": len(held.labels["test"][0]) if "test" in held.labels else 0,
        **held.describe(),
    }


def own_chances(world: World) -> dict[str, float | None]:
    """The chance level on own rows over the unseen clients, and over the others; empty where all take part."""
    groups = {"unseen": world.unseen, "training": world.training} if world.unseen else {}
    return {name: world.own_chance(clients) for name, clients in groups.items()}


def pretrained(world: World) -> dict[str, Any] | None:
    """Which pretrained model the server has, if any: its `digest`, its `model` and `norm` by name as far as they are
    known, and the `file` that it is from, or None."""
    if not world.pretrained or world.held.known is None:
        return None
    own = pretrained_of(world.run, world.held.known.kind)
    model, norm, card = own.model, own.norm, None
    if own.file is not None:
        with contextlib.suppress(CheckpointError):  # gone since it was read, which shall not cost the run
            card = weights.read_card(Path(own.file))
    if card is not None:
        model, norm = card.model, card.norm
    elif norm is None and model in models.MODELS:
        norm = models.MODELS[model].norm
    return {"digest": world.pretrained, "model": model, "norm": norm, "file": own.file}


def summarise(
    world: World, fed: Federation, record: Record, rounds: int, digests: Mapping[str, str], where: Account
) -> dict[str, Any]:
    """The content of `result.json`. Standard deviations over clients are those of the whole population.

    Args:
        digests: what each party's state comes to, by its name, the home's first.
    """
    run, cfg = world.run, world.cfg
    ended = record.metrics[-1][2]
    final = {(row[4], row[3]): row[5] for row in record.metrics if (row[0], row[2]) == (rounds, ended)}
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
        "dataset": world.held.name,
        "clients": len(names),
        "architectures": list(world.architectures),
        "engine": {"asked": run.engine.name, **asdict(where), "remarks": list(where.remarks)},
        "pretrained": pretrained(world),
        "unseen": list(world.unseen),
        **(jointly(final, names, cfg.ways) if world.method.setting == "vertical" else _each(final, names, world)),
        "agreement": final.get(("agreement", "")),
        "chance": final.get((CHANCE, ""), world.chance),
        "own_chance": world.own_chance(),
        "own_chances": own_chances(world),
        "bytes": traffic(fed),
        "bytes_by_kind": by_kind(fed.ledger, rounds),
        "messages": sum(count for count, _ in fed.ledger.pairs.values()),
        "seconds": {"total": sum(record.seconds.values()), **record.seconds},
        "failures": len(fed.failures),
        "failure_reasons": dict(Counter(trouble.reason for trouble in fed.failures)),
        "public_sha256": world.held.public_digest,
        "test_sha256": _tested(world),
        "state_sha256": state_sha256(digests.items()),
        "apart": run.data.own,
        "fedloom": __version__,
    }


def _tested(world: World) -> str | None:
    """The hash of the labels of the global test set, if there is one."""
    labels = world.held.labels.get("test")
    return None if labels is None else hashlib.sha256(labels[0].tobytes()).hexdigest()


Final: TypeAlias = Mapping[tuple[str, str], float]
"""The last value of each (measure, party), the party "" where it is of the whole federation."""


def _each(final: Final, names: Sequence[str], world: World) -> dict[str, Any]:
    """Where every client answers by itself. What is not over all `clients` tells their numbers."""
    measured = [groups(f"{OWN} {way}", way, world) for way in world.cfg.ways]
    ways = {
        what.removeprefix(f"{OWN} "): _over_clients(final, what, names, clients)
        for those in zip(*(group.items() for group in measured), strict=True)
        for what, clients in those
    }
    return {
        "accuracy": _over_clients(final, "accuracy", names),
        "own_accuracy": _over_clients(final, OWN, names),
        "ways": ways,
    }


def jointly(final: Final, names: Sequence[str], ways: Sequence[str]) -> dict[str, Any]:
    """Where parties hold different columns: one answer, the active party's; and each party's own in further ways.

    `alone` has them on the test people (`test`) and on a party's unaligned rows (`own`; None where nobody knows their
    classes). What parties could find out about labels is in `attacks`.
    """
    accuracy = final["accuracy mean", ""]
    return {
        "accuracy": {"mean": accuracy, "std": 0.0, "per_client": [accuracy]},
        "own_accuracy": None,
        "ways": {},
        "scores": {name: final[measure, ""] for name, measure in SCORES.items() if (measure, "") in final},
        "alone": {
            way: {
                "test": _over_clients(final, f"accuracy {way}", names),
                "own": _over_clients(final, f"own accuracy {way}", names),
            }
            for way in ways
        },
        "attacks": _attacks(final),
    }


def _attacks(final: Final) -> dict[str, Any]:
    """The share of labels that each attack finds out: the mean, and by party."""
    found: dict[str, dict[str, float]] = {}
    for (measure, party), value in final.items():
        if measure.startswith(ATTACK) and party:
            found.setdefault(measure.removeprefix(ATTACK), {})[party] = value
    return {name: {"mean": float(np.mean([*each.values()])), "per_party": each} for name, each in found.items()}


def _over_clients(
    final: Final, what: str, names: Sequence[str], clients: Sequence[int] | None = None
) -> dict[str, Any] | None:
    """A measure of these clients, or of all; of those that it is known of."""
    wanted = range(len(names)) if clients is None else clients
    of = [i for i in wanted if (what, names[i]) in final]
    if not of:
        return None
    each = [final[what, names[i]] for i in of]
    found = {"mean": float(np.mean(each)), "std": float(np.std(each)), "per_client": each}
    return found if len(of) == len(names) else {**found, "clients": of}
