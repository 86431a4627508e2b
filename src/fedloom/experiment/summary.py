"""Fills `result.json` and `partition.json` from a finished run."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom import models
from fedloom._version import __version__
from fedloom.core.errors import CheckpointError
from fedloom.core.federation import Federation
from fedloom.core.ledger import Entry
from fedloom.engines import Account
from fedloom.experiment import weights
from fedloom.experiment.build import pretrained_of
from fedloom.experiment.evaluate import CHANCE, groups, state_sha256
from fedloom.experiment.metrics import GLOBAL, OWN
from fedloom.experiment.plan import RunPlan
from fedloom.experiment.record import Record
from fedloom.experiment.result import EngineUsed, Final, PretrainedUsed, RunSummary, Traffic, joint_scores, over_clients


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


def partition(world: RunPlan) -> dict[str, Any]:
    """Who holds what, and which network."""
    held = world.data
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


def own_chances(world: RunPlan) -> dict[str, float | None]:
    """The chance level on own rows over the unseen clients, and over the others; empty where all take part."""
    groups = {"unseen": world.unseen, "training": world.training} if world.unseen else {}
    return {name: world.own_chance(clients) for name, clients in groups.items()}


def pretrained(world: RunPlan) -> PretrainedUsed | None:
    """The pretrained model of the server, if it has one."""
    if not world.pretrained or world.data.dataset is None:
        return None
    own = pretrained_of(world.run, world.data.dataset.kind)
    model, norm, card = own.model, own.norm, None
    if own.file is not None:
        with contextlib.suppress(CheckpointError):  # gone since it was read, which shall not cost the run
            card = weights.read_card(Path(own.file))
    if card is not None:
        model, norm = card.model, card.norm
    elif norm is None and model in models.MODELS:
        norm = models.MODELS[model].norm
    return PretrainedUsed(digest=world.pretrained, model=model, norm=norm, file=own.file)


def summarise(
    world: RunPlan, fed: Federation, record: Record, rounds: int, digests: Mapping[str, str], where: Account
) -> dict[str, Any]:
    """The content of `result.json`, see `RunSummary`.

    Args:
        digests: hash of each party's state by its name, the home's first.
    """
    run, cfg, labels = world.run, world.cfg, world.data.labels.get("test")
    ended = record.metrics[-1][2]
    final = {(row[4], row[3]): row[5] for row in record.metrics if (row[0], row[2]) == (rounds, ended)}
    names, vertical = [fed.engine.name(i) for i in fed.engine.ids], world.method.setting == "vertical"
    found = RunSummary(
        name=run.name or world.method.name,
        method=world.method.name,
        title=world.method.title,
        preset=run.preset,
        params=cfg.model_dump(mode="json"),
        seed=run.seed,
        rounds=rounds,
        iterations=rounds * cfg.iterations_per_round,
        dataset=world.data.name,
        clients=len(names),
        architectures=list(world.architectures),
        engine=EngineUsed(asked=run.engine.name, **{**asdict(where), "remarks": list(where.remarks)}),
        pretrained=pretrained(world),
        unseen=list(world.unseen),
        **(joint_scores(final, names, cfg.ways) if vertical else _accuracies(final, names, world)),
        agreement=final.get(("agreement", "")),
        chance=final.get((CHANCE, ""), world.chance),
        own_chance=world.own_chance(),
        own_chances=own_chances(world),
        bytes=Traffic(**traffic(fed)),
        bytes_by_kind=by_kind(fed.ledger, rounds),
        messages=sum(count for count, _ in fed.ledger.pairs.values()),
        seconds={"total": sum(record.seconds.values()), **record.seconds},
        failures=len(fed.failures),
        failure_reasons=dict(Counter(trouble.reason for trouble in fed.failures)),
        public_sha256=world.data.public_digest,
        test_sha256=None if labels is None else hashlib.sha256(labels[0].tobytes()).hexdigest(),
        state_sha256=state_sha256(digests.items()),
        apart=run.data.own,
        fedloom=__version__,
    )
    return found.content()


def _accuracies(final: Final, names: Sequence[str], world: RunPlan) -> dict[str, Any]:
    """What `RunSummary` has of clients that answer one by one."""
    measured = [groups(f"{OWN} {way}", way, world) for way in world.cfg.ways]
    ways = {
        metric.removeprefix(f"{OWN} "): over_clients(final, metric, names, clients)
        for those in zip(*(group.items() for group in measured), strict=True)
        for metric, clients in those
    }
    return {
        "accuracy": over_clients(final, GLOBAL, names),
        "own_accuracy": over_clients(final, OWN, names),
        "ways": {way: found for way, found in ways.items() if found is not None},
    }
