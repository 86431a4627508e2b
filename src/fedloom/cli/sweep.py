"""`fedloom sweep`, which searches for settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedloom.cli.options import (
    ParallelRuns,
    PlanOnly,
    Settings,
    Track,
    Trust,
    out,
    plain_table,
    written,
)
from fedloom.support.paths import refuse_file

if TYPE_CHECKING:
    from fedloom.sweep.config import Sweep
    from fedloom.sweep.run import SweepResults

SHOWN = 10
"""Number of settings shown in the terminal; trials.csv has all."""


def sweep(
    file: Annotated[
        str, typer.Argument(metavar="FILE.toml", help="A run's file with a table \\[sweep].")
    ],
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds of each setting, such as 0,1,2 or 0-4. Default: the file's."),
    ] = None,
    settings: Settings = None,
    workers: ParallelRuns = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder to write to, and to resume in. Default: sweeps/ and the file's name.",
        ),
    ] = None,
    track: Track = None,
    trust: Trust = None,
    plan_only: PlanOnly = False,
) -> None:
    """Search for the settings of a run with Optuna: a grid, random draws, or TPE.

    [bold]fedloom sweep my.toml --plan[/]

    [bold]fedloom sweep my.toml[/]  (a run, and a table \\[sweep] with the settings to vary:
    docs/sweep.md)

    [bold]fedloom sweep my.toml --seeds 0-2 -s sweep.search=tpe -s sweep.trials=40[/]

    Settings are compared on validation rows, a quarter of the training rows, so that none is chosen
    by test rows.

    Each run has a folder in OUT/runs. OUT/best.toml is the config of the best setting, for fedloom
    run; OUT/trials.csv has all trials, and OUT/study.log is Optuna's study, for optuna-dashboard.

    After a Ctrl-C, a kill or a failure, repeat the command: finished runs are not repeated.

    The command exits with status 1 if a run failed or is in progress in another process, and with
    130 if it was stopped.
    """
    from fedloom.cli.progress import PoolProgress, exit_after, stop_on_signal
    from fedloom.experiment.plan.reading import seeds_of
    from fedloom.report.track.trackers import check
    from fedloom.sweep.config import read

    check(track or ())
    searched = read(file, settings or (), None if seeds is None else seeds_of(seeds), trust or ())
    folder = folder or Path("sweeps") / searched.name
    refuse_file(folder)
    _show_plan(searched, folder, workers)
    if plan_only:
        return
    from fedloom.api import execute
    from fedloom.report.track.background import tracking
    from fedloom.sweep.run import run_sweep

    with (
        tracking(folder, track or ()),
        stop_on_signal("the rounds in progress, each saved first") as stop,
        PoolProgress(out) as many,
    ):
        found = run_sweep(
            searched, folder, workers=workers, progress=many.show, stop=stop, execute=execute
        )
    found.write(folder)
    _show(found, folder)
    exit_after(found.ended.values())


def _show_plan(sweep: "Sweep", folder: Path, workers: int | None) -> None:
    """Print the varied settings and the number of runs."""
    from fedloom.experiment.pool.pool import usual_workers
    from fedloom.experiment.run.lockstep import MOST, advice
    from fedloom.sweep.config import Range, value_text
    from fedloom.sweep.run import planned

    config = sweep.config
    table = plain_table("setting", "values")
    for key, values in config.over.items():
        if isinstance(values, Range):
            kind = "integers " * values.int + "on a logarithmic scale" * values.log
            text = f"{value_text(values.low)} to {value_text(values.high)} {kind}".strip()
        else:
            text = ", ".join(map(value_text, values))
        table.add_row(escape(key), escape(text))
    out.print(table)
    most, parallel = planned(sweep), min(workers or usual_workers([sweep.own()]), planned(sweep))
    rows = (
        f"validation rows ({config.validation:.0%} of the training rows)"
        if config.validation
        else "the test rows"
    )
    seeds = f"{len(config.seeds)} seed{'s' * (len(config.seeds) > 1)}"
    better = "lower" if config.less else "higher"
    lines = [
        f"{config.search}: {config.number} settings and the file's own, on {seeds}: {most} runs at "
        f"most, {parallel} at a time, in {folder}",
        f"ranked by {escape(config.metric)} on {rows}: {better} is better",
        advice(
            [sweep.run(one, seed) for one in sweep.samples()[:MOST] for seed in config.seeds],
            parallel,
        ),
    ]
    for line in filter(None, lines):
        out.print(line, soft_wrap=True)


def _show(found: "SweepResults", folder: Path) -> None:
    """Print the best settings, what the values are worth, and the files."""
    from fedloom.sweep.config import value_text
    from fedloom.sweep.run import BEST, OWN

    config, ranked = found.sweep.config, found.ranked
    table = plain_table("", *map(escape, config.over), numbers=(escape(config.metric),))
    own = [trial for trial in ranked[SHOWN:] if trial.number == OWN]
    for trial in [*ranked[:SHOWN], *own]:
        name = "the file's own" if trial.number == OWN else f"trial {trial.number}"
        setting = [value_text(trial.setting.get(key, "")) for key in config.over]
        table.add_row(name, *map(escape, setting), found.worth(trial))
    if ranked:
        out.print(table)
        rows = "validation rows" if config.validation else "test rows"
        out.print(
            f"Values are means over {len(config.seeds)} seed{'s' * (len(config.seeds) > 1)}, on "
            f"{rows}. The first is optimistic, as it was chosen by them: run {BEST} with other "
            "seeds to report a value.",
            soft_wrap=True,
        )
        written("best", folder / BEST)
    if found.failed:
        out.print(f"{len(found.failed)} runs failed. Repeat the command to try them again.")
    written("trials", folder / "trials.csv")
