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
from fedloom.core.errors import FedloomError
from fedloom.support.paths import refuse_file

if TYPE_CHECKING:
    from fedloom.sweep.config import Sweep
    from fedloom.sweep.run import SweepResults

BEST = 10
"""Number of settings shown in the terminal; the page shows all."""


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
    """Search for the settings of a run: a grid, several grids one after the other, random draws, or
    Optuna's TPE.

    [bold]fedloom sweep my.toml --plan[/]

    [bold]fedloom sweep my.toml[/]  (a run, and a table \\[sweep] with the settings to vary:
    docs/sweep.md)

    [bold]fedloom sweep my.toml --seeds 0-2 -s sweep.search=tpe -s sweep.trials=40[/]

    Settings are compared on validation rows, a quarter of the training rows, so that none is chosen
    by test rows; with confirm = \\[10, 11] in \\[sweep] the best one is then trained on all
    training rows and tested.

    Each run has a folder in OUT/runs. The page is OUT/index.html, with Markdown and CSV beside it;
    OUT/best.toml is the config of the best setting, for fedloom run.

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
    from fedloom.sweep.page import write
    from fedloom.sweep.run import run_sweep

    with (
        tracking(folder, track or ()),
        stop_on_signal("the rounds in progress, each saved first") as stop,
        PoolProgress(out) as many,
    ):
        found = run_sweep(
            searched, folder, workers=workers, progress=many.show, stop=stop, execute=execute
        )
    page = write(found, folder)
    _show(found, page)
    exit_after(found.ended.values())


def _show_plan(sweep: "Sweep", folder: Path, workers: int | None) -> None:
    """Print the varied settings and the number of runs."""
    from fedloom.experiment.pool.pool import usual_workers
    from fedloom.experiment.run.lockstep import MOST, advice
    from fedloom.sweep.config import Range, value_text
    from fedloom.sweep.run import planned, run_sweep
    from fedloom.sweep.search import proposals

    config = sweep.config
    table = plain_table("setting", "values")
    for number, over in enumerate(config.over):
        for key, values in over.items():
            if isinstance(values, Range):
                kind = "integers " * values.int + "on a logarithmic scale" * values.log
                text = f"{value_text(values.low)} to {value_text(values.high)} {kind}".strip()
            else:
                text = ", ".join(map(value_text, values))
            table.add_row(escape(key), escape(text), style="dim" if number % 2 else None)
    out.print(table)
    trials = " + ".join(str(config.trials_of(over)) for over in config.over)
    confirm = (
        f", then the best and the file's own on {len(config.confirm)} more"
        if config.confirm
        else ""
    )
    out.print(
        f"{config.search}: {trials} settings and the file's own, on {len(config.seeds)} "
        f"seed{'s' * (len(config.seeds) > 1)}{confirm}: {planned(sweep)} runs at most, in {folder}",
        soft_wrap=True,
    )
    share = (
        f" ({config.validation:.0%} of the training rows)"
        if config.validation
        else " on the test rows"
    )
    better = "lower" if config.less else "higher"
    out.print(f"ranked by {escape(config.ranked_by)}{share}: {better} is better", soft_wrap=True)
    # stopped before it starts: counts the finished runs of this sweep, whatever else the folder
    # holds
    finished = run_sweep(sweep, folder, stop=lambda: True) if (folder / "runs").is_dir() else None
    if finished is not None and not finished.stopped:
        return
    done = 0 if finished is None else sum(one.state == "kept" for one in finished.ended.values())
    try:
        first = [
            sweep.run(setting, seed)
            for setting in next(proposals(config, 0))[:MOST]
            for seed in config.seeds
        ]
    except FedloomError:  # the run will report the error
        return
    left = planned(sweep) - done
    parallel = min(workers or usual_workers([sweep.own()]), left)
    if text := advice(first, parallel):
        out.print(text, soft_wrap=True)
    out.print(f"{done} finished; left at most: {left} runs, {parallel} at a time", soft_wrap=True)


def _show(found: "SweepResults", page: Path) -> None:
    from fedloom.sweep.config import value_text
    from fedloom.sweep.page import lead, warning, worth

    config = found.sweep.config
    table = plain_table("", *map(escape, config.keys), numbers=(escape(config.metric),))
    for trial in found.ranked[:BEST]:
        settings = [
            value_text(trial.setting[key]) if key in trial.setting else "" for key in config.keys
        ]
        table.add_row(trial.name, *map(escape, settings), worth(found, trial))
    if found.ranked:
        if all(trial.folders != found.own.folders for trial in found.ranked[:BEST]):
            table.add_row(found.own.name, *[""] * len(config.keys), worth(found, found.own))
        out.print(table)
    out.print(escape(lead(found)), soft_wrap=True)
    out.print(escape(warning(found)), soft_wrap=True)
    written("page", page)
