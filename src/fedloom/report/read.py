"""Read the folder of a run or comparison.

A finished run has a `result.json`, its summary. Of one that goes on, or has ended early, `_so_far`
makes a summary from the other files, so that its page looks the same:

    metrics.csv      (round, iteration, stage, party, metric, value); party "" is the federation
    partition.json   clients or parties, and what is known before training
    ledger.csv, failures.csv, config.toml
"""

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.options import Task as TaskKind
from fedloom.experiment.run.metrics import MAIN, SCORES, Metric, parse
from fedloom.experiment.run.result import Comparison, RunSummary, joint_scores, over_groups
from fedloom.report.files import checked, csv_rows, damaged, model, parsed, text
from fedloom.report.schema import FailureRow, LedgerRow, MetricRow, MixingRow, PartitionFile
from fedloom.support import toml

START = "start"
"""The stage of metrics before the first round."""


@dataclass(frozen=True)
class Run:
    """The content of a run's folder.

    Attributes:
        finished: whether the run has a result; if not, `summary` is that of the last evaluation.
        names: ids of the N clients or parties in the tables.
        measured: (iterations, values) by (metric, party, stage), in order of rounds.
        mixing: mixing weights (N, N) by round, one row per client; empty if the method records
            none.
    """

    folder: Path
    finished: bool
    summary: RunSummary
    names: tuple[str, ...]
    measured: dict[tuple[str, str, str], tuple[list[int], list[float]]]
    partition: PartitionFile
    ledger: tuple[LedgerRow, ...]
    failures: tuple[FailureRow, ...]
    config: str
    environment: dict[str, Any]
    mixing: dict[int, np.ndarray]

    @property
    def personal(self) -> bool:
        """Whether the main metric is each client's accuracy on its own rows."""
        return bool(self.summary.eval_modes or self.mixing)

    @property
    def display_names(self) -> tuple[str, ...]:
        """Display names of the N clients or parties: those of their nodes, if they have any."""
        held, owners = self.partition.parties, self.partition.owners
        names = self.names if held is None else tuple(party.name for party in held.parties)
        if len(owners) != len(names):
            return names
        return tuple(owner or name for owner, name in zip(owners, names, strict=True))

    @property
    def last(self) -> str:
        """The last stage of a round."""
        return (self.stages or [START])[-1]

    @property
    def stages(self) -> list[str]:
        """The stages after which the accuracy was measured, in order."""
        return [
            stage
            for what, party, stage in self.measured
            if (what, party) == (self.summary.on_test.mean, "") and stage != START
        ]

    def curve(self, metric: str, stage: str, party: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Iterations (n,) and values (n,) of a metric at the start and after a stage
        of each round.
        """
        parts = [self.measured.get((metric, party, s), ([], [])) for s in (START, stage)]
        x, y = ([value for part in parts for value in part[axis]] for axis in (0, 1))
        return np.array(x, dtype=float), np.array(y, dtype=float)


def read_run(folder: Path) -> Run:
    """Read the folder of a run, finished or not.

    Raises:
        DataError: a file is missing or damaged, or contradicts another.
    """
    metrics = csv_rows(folder / "metrics.csv", MetricRow)
    partition = model(folder / "partition.json", PartitionFile)
    ledger = csv_rows(folder / "ledger.csv", LedgerRow)
    failures = csv_rows(folder / "failures.csv", FailureRow)
    config = text(folder / "config.toml")
    finished = (folder / "result.json").is_file()
    if finished:
        summary = model(folder / "result.json", RunSummary)
    else:
        summary = _so_far(folder, config, metrics, ledger, len(failures), partition)
    measured: dict[tuple[str, str, str], tuple[list[int], list[float]]] = {}
    for m in metrics:
        x, y = measured.setdefault((m.metric, m.party, m.stage), ([], []))
        x.append(m.iteration)
        y.append(m.value)
    _check_complete(
        folder / "metrics.csv",
        measured,
        [SCORES[name].column for name in summary.scores],
        summary.on_test,
    )
    held = partition.parties
    seen = dict.fromkeys(m.party for m in metrics if held or m.metric == str(summary.on_test))
    names = held.ids(seen) if held else tuple(seen)
    # some were absent or do not report their accuracy
    if summary.overall.clients is not None and names:
        names = tuple(f"{names[0].rpartition('-')[0]}-{i}" for i in range(summary.clients))
    numbers = [summary.clients, len(names), partition.number, len(partition.architectures)]
    numbers += (
        [] if held or summary.overall.clients is not None else [len(summary.overall.per_client)]
    )
    widths = partition.widths | {len(partition.classes)}
    if len(set(numbers)) > 1 or len(widths) > 1 or bool(summary.scores) != bool(held):
        raise DataError(
            f"{folder}: the files disagree; they list {numbers} clients and {sorted(widths)} "
            "classes. They belong to different runs. Repeat the run in an empty folder."
        )
    return Run(
        folder=folder,
        finished=finished,
        summary=summary,
        names=names,
        measured=measured,
        partition=partition,
        ledger=ledger,
        failures=failures,
        config=config,
        environment=parsed(folder / "environment.json"),
        mixing=_mixing(folder / "mixing.csv", names),
    )


def read_comparison(folder: Path) -> tuple[Comparison, list[Run]]:
    """Read a comparison and those of its runs whose folders exist.

    Raises:
        DataError: a file is missing or damaged, or a folder does not hold the run that the
            comparison lists.
    """
    found = model(folder / "comparison.json", Comparison)
    existing = [run for run in found.runs if run.folder and (folder / run.folder).is_dir()]
    runs = [read_run(folder / str(run.folder)) for run in existing]
    clients: dict[int, int] = {}
    for listed, run in zip(existing, runs, strict=True):
        s = run.summary
        if (listed.name, listed.seed) != (s.name, s.seed) or clients.setdefault(
            s.seed, s.clients
        ) != s.clients:
            raise DataError(
                f"comparison.json lists {listed.name} with seed {listed.seed} in {run.folder}, "
                f"but the folder holds {s.name} with seed {s.seed} and {s.clients} clients. "
                "Repeat the comparison with --resume."
            )
    return found, runs


def _so_far(
    folder: Path,
    config: str,
    metrics: Sequence[MetricRow],
    ledger: Sequence[LedgerRow],
    failures: int,
    partition: PartitionFile,
) -> RunSummary:
    """The summary of an unfinished run at its last evaluation, in place of `result.json`.

    Raises:
        DataError: the run has no evaluation yet, or its config is damaged.
    """
    # what is predicted shows in the names of metrics; the config may leave it to the data
    task = task_of({row.metric for row in metrics})
    main = MAIN[task][0]
    evaluations = [row for row in metrics if row.metric == main.mean]
    if not evaluations:
        raise DataError(
            f"{folder / 'metrics.csv'} has no accuracy yet. Continue the run with --resume."
        )
    try:
        settings = toml.loads(config)
    except tomllib.TOMLDecodeError as error:
        raise damaged(folder / "config.toml", f"is not valid TOML: {error}") from None

    # The last evaluation: (metric, party) -> value. A round may be evaluated after several stages,
    # so the stage counts, too.
    last = evaluations[-1]
    final = {
        (row.metric, row.party): row.value
        for row in metrics
        if (row.round, row.stage) == (last.round, last.stage)
    }
    # the evaluation modes of the method, each once, in order: parties have accuracies in them
    accuracies = [parse(metric) for metric, party in final if party]
    modes = dict.fromkeys(one.mode for one in accuracies if one.mode and one.name == main.name)
    data, held = settings.get("data", {}), partition.parties  # None in the horizontal setting
    found: dict[str, Any]
    if held is None:
        # Clients that were absent have no row, but clients are numbered from 0: the first one's
        # name "client-3" gives all names.
        names = [party for metric, party in final if metric == str(main) and party]
        names = (
            [f"{names[0].rpartition('-')[0]}-{i}" for i in range(partition.number)] if names else []
        )
        found = over_groups(final, names, modes, partition.unseen, task)
        dataset, clients = data.get("name"), data.get("clients")
    else:
        # one prediction of all parties; `partition.json` names data that the config does not
        found = joint_scores(final, held.ids(party for _, party in final), [*modes], task)
        dataset = parsed(folder / "partition.json")["parties"].get("name", data.get("name"))
        clients = partition.number

    # The fields of `RunSummary`. Those that a run has only at its end are None or empty.
    values = {
        "name": settings.get("name") or str(settings.get("method", "")),
        "method": str(settings.get("method", "")),
        "title": "",
        "task": task,
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
        "bytes": {
            direction: final.get((f"bytes {direction}", ""))
            for direction in ("up", "down", "across")
        },
        "messages": sum(row.count for row in ledger),
        "seconds": {},
        "failures": failures,
        "public_sha256": None,
        "state_sha256": None,
        "private_rows": partition.private_clients > 0,
    }
    return checked(RunSummary, values, folder / "metrics.csv")


def task_of(measured: Collection[str]) -> TaskKind:
    """What a run predicts, from the names of its metrics."""
    return "number" if MAIN["number"][0].mean in measured else "classes"


def _mixing(path: Path, names: Sequence[str]) -> dict[int, np.ndarray]:
    """Mixing weights (N, N) by round; those that are not finite become 0."""
    found: dict[int, np.ndarray] = {}
    numbers = {name: i for i, name in enumerate(names)}
    for line in csv_rows(path, MixingRow) if path.is_file() else ():
        matrix = found.setdefault(line.round, np.zeros((len(names), len(names))))
        try:
            for owner, weight in (pair.split(":") for pair in line.weights.split()):
                matrix[numbers[line.party], int(owner)] = float(weight)
        except (KeyError, IndexError, ValueError):
            raise damaged(
                path, f"has unknown clients or weights at {line.party}, round {line.round}"
            ) from None
    return {round: np.nan_to_num(found[round], posinf=0.0, neginf=0.0) for round in sorted(found)}


def _check_complete(
    path: Path,
    measured: Mapping[tuple[str, str, str], tuple[list[int], list[float]]],
    scores: Sequence[str],
    main: Metric,
) -> None:
    """Raise DataError if an evaluation lacks a metric of the whole federation or one
    of the scores.
    """
    every = (main.mean, main.std, "loss mean", "bytes up", "bytes down", "bytes across", *scores)
    for stage in {stage for metric, _, stage in measured if metric in every} | {START}:
        found = [measured.get((metric, "", stage), ([], []))[0] for metric in every]
        if not found[0] or any(iterations != found[0] for iterations in found):
            raise damaged(
                path,
                f"is incomplete: the metrics of stage {stage!r} have different numbers of rows",
            )
