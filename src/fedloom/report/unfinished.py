"""The summary of a run in progress, from its tables."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.core.errors import DataError
from fedloom.experiment.run.metrics import GLOBAL, OWN
from fedloom.experiment.run.result import RunSummary, joint_scores, over_clients
from fedloom.report.files import checked, damaged, parsed
from fedloom.report.schema import LedgerRow, MetricRow, PartitionFile


def summary_so_far(
    folder: Path,
    config: str,
    metrics: Sequence[MetricRow],
    ledger: Sequence[LedgerRow],
    failures: int,
    partition: PartitionFile,
) -> RunSummary:
    """The summary at the last evaluation, in place of `result.json`.

    Raises:
        DataError: the run has no evaluation yet, or its config is damaged.
    """
    evaluations = [m for m in metrics if m.metric == "accuracy mean"]
    if not evaluations:
        raise DataError(f"{folder / 'metrics.csv'} has no accuracy yet. Continue the run with --resume.")
    try:
        settings = tomllib.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise damaged(folder / "config.toml", f"is not valid TOML: {error}") from None
    last = evaluations[-1]
    final = {(m.metric, m.party): m.value for m in metrics if (m.round, m.stage) == (last.round, last.stage)}

    def eval_modes(prefix: str) -> list[str]:
        found = dict.fromkeys(metric for metric, party in final if party and metric.startswith(f"{prefix} "))
        return [metric.removeprefix(f"{prefix} ") for metric in found]

    method, data = str(settings.get("method", "")), settings.get("data", {})
    dataset, clients = data.get("name"), data.get("clients")
    found: dict[str, Any]
    if partition.parties is None:
        names = [party for metric, party in final if metric == GLOBAL and party]
        found = {
            "accuracy": over_clients(final, GLOBAL, names),
            "own_accuracy": over_clients(final, OWN, names),
            "eval_modes": {
                eval_mode: over_clients(final, f"{OWN} {eval_mode}", names) for eval_mode in eval_modes(OWN)
            },
        }
    else:
        found = joint_scores(final, partition.parties.ids(party for _, party in final), eval_modes(GLOBAL))
        dataset, clients = parsed(folder / "partition.json")["parties"].get("name", dataset), partition.number
    values = {
        "name": settings.get("name") or method,
        "method": method,
        "title": "",
        "preset": settings.get("preset"),
        "seed": settings.get("seed"),
        "rounds": last.round,
        "iterations": last.iteration,
        "dataset": dataset,
        "clients": clients,
        "engine": None,
        **found,
        "agreement": final.get(("agreement", "")),
        **partition.model_dump(include={"chance", "own_chance", "own_chances", "unseen"}),
        "bytes": {eval_mode: final.get((f"bytes {eval_mode}", "")) for eval_mode in ("up", "down", "across")},
        "messages": sum(row.count for row in ledger),
        "seconds": {},
        "failures": failures,
        "public_sha256": None,
        "state_sha256": None,
        "private_rows": partition.private_clients > 0,
    }
    return checked(RunSummary, values, folder / "metrics.csv")
