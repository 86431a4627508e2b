"""Finished runs that were made one by one, gathered into a comparison."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.compare import compare, remarks
from fedloom.experiment.metrics import GLOBAL
from fedloom.experiment.result import Comparison
from fedloom.report import formatting as fmt
from fedloom.report.read import Run

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
        runs = [replace(run, summary=run.summary.model_copy(update={"eval_modes": {}})) for run in runs]
    found, problem = _compared(runs)
    return found, runs, problem + (f"; {WITHOUT_WAYS}" if mixed else "")


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Runs of one name and seed are called by their folders."""
    count = Counter((run.summary.name, run.summary.seed) for run in runs)
    top = os.path.commonpath([run.folder.resolve().parent for run in runs])

    def name(run: Run) -> str:
        twice = count[run.summary.name, run.summary.seed] > 1
        return os.path.relpath(run.folder.resolve(), top) if twice else run.summary.name

    return [replace(run, summary=run.summary.model_copy(update={"name": name(run)})) for run in runs]


def _compared(runs: Sequence[Run]) -> tuple[Comparison, str]:
    summaries = [run.summary for run in runs]
    names = fmt.together(list(dict.fromkeys(s.name for s in summaries)))
    title = f"{names} on {fmt.together(sorted({s.dataset for s in summaries}))}"
    try:
        _check_rows(runs)
        return compare(title, summaries, [run.folder for run in runs]), ""
    except ConfigError as error:
        problem = str(error)
    unseen = {(s.seed, tuple(s.unseen)) for s in summaries}
    alike = len(dict(unseen)) == len(unseen) and all(clients for _, clients in unseen)
    alone = [compare("", [run.summary], [run.folder]) for run in runs]
    found = Comparison(
        title=title,
        reference=summaries[0].name,
        methods=[one.methods[0] for one in alone],
        unseen={str(seed): list(clients) for seed, clients in unseen} if alike else {},
        measure=GLOBAL,
        differences=[],
        further={},
        runs=[one.runs[0] for one in alone],
        remarks=remarks(summaries),
    )
    return found, problem


def _check_rows(runs: Sequence[Run]) -> None:
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
