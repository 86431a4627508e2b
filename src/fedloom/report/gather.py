"""Gather separate finished runs into a comparison."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.run.compare import compare, remarks
from fedloom.experiment.run.fairness import unequal
from fedloom.experiment.run.result import Comparison, shared_metrics
from fedloom.report import formatting as fmt
from fedloom.report.read import Run

WITHOUT_MODES = (
    "further evaluation modes are omitted because only some runs have unseen clients; see the "
    "reports of the runs"
)


def gather(runs: Sequence[Run]) -> tuple[Comparison, list[Run], str]:
    """The comparison; the runs, with distinct names; and the reason why they cannot be paired, if
    any.

    Raises:
        DataError: no run is given, one is unfinished, or horizontal and vertical runs are mixed.
    """
    if not runs:
        raise DataError("no folder given. Name the folder of at least one run.")
    for run in runs:
        if not run.finished:
            raise DataError(
                f"{run.folder} holds an unfinished run. Finish it with --resume, then compare."
            )
    if len({bool(run.summary.scores) for run in runs}) > 1:
        raise DataError(
            "cannot compare horizontal runs (parties hold different rows) with vertical runs "
            "(different columns). Write one page for each."
        )
    runs = _named_apart(runs)
    mixed = len({bool(run.summary.unseen) for run in runs}) > 1
    if mixed:
        runs = [
            replace(run, summary=run.summary.model_copy(update={"eval_modes": {}})) for run in runs
        ]
    comparison, problem = _compared(runs)
    return comparison, runs, problem + (f"; {WITHOUT_MODES}" if mixed else "")


def _named_apart(runs: Sequence[Run]) -> list[Run]:
    """Rename runs of one name and seed by their folders."""
    count = Counter((run.summary.name, run.summary.seed) for run in runs)
    top = os.path.commonpath([run.folder.resolve().parent for run in runs])

    def name(run: Run) -> str:
        twice = count[run.summary.name, run.summary.seed] > 1
        return os.path.relpath(run.folder.resolve(), top) if twice else run.summary.name

    return [
        replace(run, summary=run.summary.model_copy(update={"name": name(run)})) for run in runs
    ]


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
    main = shared_metrics(summaries)[0]
    alone = [compare("", [run.summary], [run.folder], main=main) for run in runs]
    found = Comparison(
        title=title,
        reference=summaries[0].name,
        methods=[one.methods[0] for one in alone],
        unseen={str(seed): list(clients) for seed, clients in unseen} if alike else {},
        metric=main,
        tested=alone[0].tested,
        natural=all(one.natural for one in alone),
        differences=[],
        further={},
        runs=[one.runs[0] for one in alone],
        unequal=unequal(summaries),
        remarks=remarks(summaries),
    )
    return found, problem


def _check_rows(runs: Sequence[Run]) -> None:
    """Raise ConfigError if clients hold different rows in runs of one seed."""
    for seed in {run.summary.seed for run in runs}:
        held = {
            (
                p.classes,
                p.counts,
                p.test,
                p.server_sha256,
                p.parties.test_counts if p.parties else (),
            )
            for p in (run.partition for run in runs if run.summary.seed == seed)
        }
        if len(held) > 1:
            raise ConfigError(f"clients hold different rows in the runs of seed {seed}")
