"""Fills `result.json` and `partition.json` from a finished run."""

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
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan import weights
from fedloom.experiment.plan.build import pretrained_of
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.evaluate import CHANCE, state_sha256
from fedloom.experiment.run.evaluation import evaluation_of
from fedloom.experiment.run.mistakes import divergence
from fedloom.experiment.run.privacy import privacy_spent
from fedloom.experiment.run.record import Record
from fedloom.experiment.run.result import (
    EngineUsed,
    Learned,
    MeasuredLeak,
    PretrainedUsed,
    RunSummary,
    Traffic,
)
from fedloom.protect.leaks import Leak


def traffic(fed: Federation) -> dict[str, int]:
    """Bytes of tensor data `up` to the coordinator, `down` from it, and `across` between the
    others.
    """
    pairs = fed.ledger.pairs.items()
    up = sum(size for (_, to), (_, size) in pairs if to == fed.coordinator)
    down = sum(size for (by, _), (_, size) in pairs if by == fed.coordinator)
    return {"up": up, "down": down, "across": sum(size for _, (_, size) in pairs) - up - down}


def by_kind(ledger: Iterable[Entry], rounds: int) -> list[dict[str, Any]]:
    """Messages and bytes of tensor data by sender, receiver and kind: in total, and by round."""
    lines: dict[tuple[str, str, str], dict[str, Any]] = {}
    for entry in ledger:
        key = {"sender": entry.sender, "receiver": entry.receiver, "kind": entry.kind}
        new = {**key, "messages": 0, "bytes": 0, "by_round": [0] * rounds}
        line = lines.setdefault((entry.sender, entry.receiver, entry.kind), new)
        line["messages"] += entry.count
        line["bytes"] += entry.bytes
        line["by_round"][entry.round] += entry.bytes
    return list(lines.values())


def partition(plan: RunPlan) -> dict[str, Any]:
    """The content of `partition.json`: the data and network of each party."""
    data = plan.data
    return {
        "classes": list(data.classes),
        "architectures": list(plan.architectures),
        "chance": plan.chance,
        "own_chance": plan.own_chance(),
        "own_chances": own_chances(plan),
        "unseen": list(plan.unseen),
        "test": len(data.labels["test"][0]) if "test" in data.labels else 0,
        **data.describe(),
    }


def _task(plan: RunPlan) -> dict[str, Any]:
    """What a run predicts, where this is a number."""
    if plan.data.target is None:
        return {}
    return {"task": "number", "label": plan.data.label}


def own_chances(plan: RunPlan) -> dict[str, float | None]:
    """The chance level on own rows over unseen, and over training clients; empty without unseen
    ones.
    """
    groups = {"unseen": plan.unseen, "training": plan.training} if plan.unseen else {}
    return {name: plan.own_chance(clients) for name, clients in groups.items()}


def pretrained(plan: RunPlan) -> PretrainedUsed | None:
    """The pretrained model of the server, if it has one."""
    if not plan.pretrained or plan.data.dataset is None:
        return None
    own = pretrained_of(plan.run, plan.data.dataset.kind)
    model, norm, card = own.model, own.norm, None
    if own.file is not None:
        with contextlib.suppress(CheckpointError):  # the file was deleted during the run
            card = weights.read_card(Path(own.file))
    if card is not None:
        model, norm = card.model, card.norm
    elif norm is None and model in models.MODELS:
        norm = models.MODELS[model].norm
    return PretrainedUsed(digest=plan.pretrained, model=model, norm=norm, file=own.file)


def _entry(run: RunConfig) -> dict[str, Any]:
    """The run's table in `[compare]`, as it was given."""
    own = {
        "name": "" if run.name == run.model_copy(update={"name": ""}).label else run.name,
        "preset": "" if run.preset == RunConfig().preset else run.preset,
        "params": run.params,
    }
    return {"method": run.method, **{key: value for key, value in own.items() if value}}


def _training(plan: RunPlan, rounds: int) -> dict[str, Any]:
    """The training rows of all clients, and the mean local steps of one, where the rows are on this
    machine.
    """
    held = [plan.contexts[i].data for i in plan.training]
    rows = [len(own) for own in held if own is not None]
    if len(rows) < len(held) or plan.method.setting == "vertical":
        return {}
    steps = [plan.cfg.local_steps_of(count) for count in rows]
    known = [one for one in steps if one is not None]
    if len(known) < len(steps):
        return {"training_rows": sum(rows)}
    share = plan.cfg.participants(len(rows)) / len(rows)
    return {"training_rows": sum(rows), "local_steps": rounds * share * sum(known) / len(known)}


def fitted(plan: RunPlan) -> bool:
    """Whether no row was held out, so that scores are those of the rows that were fitted. A node
    may hold some out all the same.
    """
    divided, data = plan.data.split, plan.run.data
    if plan.method.setting == "vertical" or data.test_fraction != 0 or data.validation:
        return False
    return divided is None or not divided.held_out


def summarize(
    plan: RunPlan,
    fed: Federation,
    record: Record,
    rounds: int,
    digests: Mapping[str, str],
    where: Account,
    warnings: Sequence[str] = (),
    leaks: Sequence[Leak] = (),
) -> dict[str, Any]:
    """The content of `result.json`, see `RunSummary`.

    Args:
        digests: of each party's state by name, the server's first.
        warnings: on the whole run, see `fedloom.experiment.run.mistakes`.
        leaks: what messages told, if that was measured.
    """
    run, cfg, labels = plan.run, plan.cfg, plan.data.labels.get("test")
    ended = record.metrics[-1][2]
    final = {
        (row[4], row[3]): row[5] for row in record.metrics if (row[0], row[2]) == (rounds, ended)
    }
    names = [fed.engine.name(i) for i in fed.engine.ids]
    summary = RunSummary(
        name=run.name or plan.method.name,
        method=plan.method.name,
        title=plan.method.title,
        paper=plan.method.paper,
        preset=run.preset,
        entry=_entry(run),
        params=cfg.model_dump(mode="json"),
        local=run.local.model_dump(mode="json", exclude_defaults=True),
        seed=run.seed,
        rounds=rounds,
        iterations=rounds * cfg.iterations_per_round,
        **_training(plan, rounds),
        dataset=plan.data.name,
        clients=len(names),
        architectures=list(plan.architectures),
        engine=EngineUsed(
            requested=run.engine.name, **{**asdict(where), "remarks": list(where.remarks)}
        ),
        pretrained=pretrained(plan),
        unseen=list(plan.unseen),
        **_task(plan),
        **evaluation_of(plan).summarize(final, names, plan),
        privacy=privacy_spent(plan, record, names),
        **({"leaks": [MeasuredLeak(**asdict(one)) for one in leaks]} if run.evaluate.leaks else {}),
        learned=[
            Learned(**asdict(table))
            for table in (plan.server.findings() if plan.server is not None else ())
        ],
        agreement=final.get(("agreement", "")),
        chance=final.get((CHANCE, ""), plan.chance),
        own_chance=plan.own_chance(),
        own_chances=own_chances(plan),
        bytes=Traffic(**traffic(fed)),
        bytes_by_kind=by_kind(fed.ledger, rounds),
        messages=sum(count for count, _ in fed.ledger.pairs.values()),
        seconds={"total": sum(record.seconds.values()), **record.seconds},
        failures=len(fed.failures),
        failure_reasons=dict(Counter(failure.reason for failure in fed.failures)),
        # these use none
        public_sha256=None if "raw rows" in plan.method.needs else plan.data.public_digest,
        test_sha256=None if labels is None else hashlib.sha256(labels[0].tobytes()).hexdigest(),
        state_sha256=state_sha256(digests.items()),
        warnings=list(warnings),
        diverged=divergence(plan, fed, final, names),
        private_rows=run.data.own,
        natural=run.data.own or run.data.partition == "natural",
        validation=run.data.validation,
        fitted=fitted(plan),
        fedloom=__version__,
    )
    return summary.content()
