"""Finished runs that were made one by one, gathered into a comparison."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedloom.core.errors import ConfigError, DataError
from fedloom.report import words
from fedloom.report.measures import GLOBAL
from fedloom.report.read import Run
from fedloom.report.schema import Comparison

WITHOUT_WAYS = (
    "what was measured in further ways is left out, as it is of unseen clients in some runs and of all in others: see "
    "each run's own report"
)


def gather(runs: Sequence[Run]) -> tuple[Comparison, list[Run], str]:
    """What the runs say together; the runs, named apart; and why they can't be paired, if so.

    Raises:
        DataError: there is no run, one is unfinished, or they are of both kinds: with other rows, and other columns.
    """
    if not runs:
        raise DataError("a comparison needs the folder of at least one run; none was given")
    for run in runs:
        if not run.finished:
            raise DataError(f"{run.folder} holds an unfinished run; finish it by --resume before it is compared")
    if len({bool(run.summary.scores) for run in runs}) > 1:
        raise DataError(
            "in some of these runs parties hold different columns, in others different rows: no number means the same "
            "in both; write a page for each kind"
        )
    runs = _named_apart(runs)
    mixed = len({bool(run.summary.unseen) for run in runs}) > 1
    if mixed:
        runs = [replace(run, summary=run.summary.model_copy(update={"ways": {}})) for run in runs]
    found, problem = _summarised(runs)
    return found, runs, problem + (f"; {WITHOUT_WAYS}" if mixed else "")


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs of one name and seed are called by their folders."""
    count = Counter((run.summary.name, run.summary.seed) for run in runs)
    top = os.path.commonpath([run.folder.resolve().parent for run in runs])

    def name(run: Run) -> str:
        twice = count[run.summary.name, run.summary.seed] > 1
        return os.path.relpath(run.folder.resolve(), top) if twice else run.summary.name

    return [replace(run, summary=run.summary.model_copy(update={"name": name(run)})) for run in runs]


def _summarised(runs: Sequence[Run]) -> tuple[Comparison, str]:
    from fedloom.experiment.compare import remarks, summarise
    from fedloom.experiment.run import Result

    results = [Result(run.summary.model_dump(), [], run.folder) for run in runs]
    names = words.together(list(dict.fromkeys(run.summary.name for run in runs)))
    title = f"{names} on {words.together(sorted({run.summary.dataset for run in runs}))}"
    try:
        _same_rows(runs)
        return Comparison(**summarise(title, results)), ""
    except ConfigError as error:
        problem = str(error)
    unseen = {(run.summary.seed, run.summary.unseen) for run in runs}
    alike = len(dict(unseen)) == len(unseen) and all(clients for _, clients in unseen)
    alone: list[dict[str, Any]] = [summarise("", [result]) for result in results]
    values = {
        "title": title,
        "reference": runs[0].summary.name,
        "methods": [one["methods"][0] for one in alone],
        "unseen": dict(unseen) if alike else {},
        "measure": GLOBAL,
        "differences": [],
        "further": {},
        "runs": [one["runs"][0] for one in alone],
        "remarks": remarks([result.summary for result in results]),
    }
    return Comparison(**values), problem


def _same_rows(runs: Sequence[Run]) -> None:
    """Refuse to pair runs of one seed whose clients hold other rows."""
    for seed in {run.summary.seed for run in runs}:
        held = {
            (run.partition.classes, run.partition.counts, run.partition.test, run.partition.server_sha256, _tested(run))
            for run in runs
            if run.summary.seed == seed
        }
        if len(held) > 1:
            raise ConfigError(f"runs of seed {seed} can't be compared: their clients hold different rows")


def _tested(run: Run) -> tuple[int, ...]:
    """The test rows (K,) of each class, where parties hold different columns."""
    return run.partition.parties.test_counts if run.partition.parties else ()
