"""`fedloom sweep`, which searches for settings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedloom.cli.track import Track
from fedloom.core.errors import FedloomError
from fedloom.core.paths import refuse_file

if TYPE_CHECKING:
    from fedloom.reproduce.sweep.config import Sweep
    from fedloom.reproduce.sweep.run import SweepResults

out = Console(highlight=False)
BEST = 10
"""Number of settings shown in the terminal; the page shows all."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(sweep)


def sweep(
    file: Annotated[str, typer.Argument(metavar="FILE.toml", help="A run's file with a table [sweep].")],
    seeds: Annotated[
        str | None, typer.Option(help="Each setting is run with each, such as 0,1,2 or 0-4; in place of the file's.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="Change one setting, such as sweep.trials=50. Repeatable."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time; they change nothing.  [default: one a core]")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="The folder to write to, and to go on in.  [default: sweeps/ and the file's name]"),
    ] = None,
    track: Track = None,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would be run and what it costs, and stop.")] = False,
) -> None:
    """Search for the settings of a run: a grid, several grids one after the other, random draws, or Optuna's TPE.

    [bold]fedloom sweep my.toml --plan[/]

    [bold]fedloom sweep my.toml[/]  (a run, and a table \\[sweep] that says what is varied: docs/sweep.md)

    [bold]fedloom sweep my.toml --seeds 0-2 -s sweep.search=tpe -s sweep.trials=40[/]

    Each run has a folder in OUT/runs. OUT/index.html is the page, with the same as Markdown and CSV beside it, and
    OUT/best.toml the best setting, for fedloom run.

    After a Ctrl-C, a kill or a failure the same command does what is left, and nothing twice.

    The command ends with status 1 if a run failed or was left to another process, and with 130 if it was stopped.
    """
    from fedloom.cli.progress import PoolProgress, closing, stop_on_signal
    from fedloom.experiment.reading import seeds_of
    from fedloom.report.track.trackers import check
    from fedloom.reproduce.sweep.config import read

    check(track or ())
    asked = read(file, settings or (), None if seeds is None else seeds_of(seeds))
    folder = folder or Path("sweeps") / asked.name
    refuse_file(folder)
    _show_plan(asked, folder, workers)
    if plan:
        return
    from fedloom.api import execute
    from fedloom.report.track.background import tracking
    from fedloom.reproduce.sweep.page import write
    from fedloom.reproduce.sweep.run import run_sweep

    with (
        tracking(folder, track or ()),
        stop_on_signal("the rounds in progress, each saved first") as stop,
        PoolProgress(out) as many,
    ):
        found = run_sweep(asked, folder, workers=workers, progress=many.show, stop=stop, execute=execute)
    page = write(found, folder)
    _show(found, page)
    words, status = closing(found.ended.values())
    if words:
        out.print(words)
    if status:
        raise typer.Exit(status)


def _show_plan(sweep: Sweep, folder: Path, workers: int | None) -> None:
    """Print the varied settings, the number of runs and their estimated time."""
    from fedloom.experiment.pool import usual_workers
    from fedloom.reproduce.cost import cost, describe
    from fedloom.reproduce.sweep.config import Range, shown
    from fedloom.reproduce.sweep.run import planned, run_sweep

    config = sweep.config
    table = Table("setting", "values", box=None, header_style="bold", pad_edge=False)
    for number, over in enumerate(config.over):
        for key, values in over.items():
            if isinstance(values, Range):
                kind = "integers " * values.int + "on a logarithmic scale" * values.log
                text = f"{shown(values.low)} to {shown(values.high)} {kind}".strip()
            else:
                text = ", ".join(map(shown, values))
            table.add_row(escape(key), escape(text), style="dim" if number % 2 else None)
    out.print(table)
    trials = " + ".join(str(config.trials_of(over)) for over in config.over)
    confirm = f", then the best and the file's own on {len(config.confirm)} more" if config.confirm else ""
    out.print(
        f"{config.search}: {trials} settings and the file's own, on {len(config.seeds)} "
        f"seed{'s' * (len(config.seeds) > 1)}{confirm}: {planned(sweep)} runs at most, in {folder}",
        soft_wrap=True,
    )
    out.print(f"judged by {escape(config.measure)}: {'less' if config.less else 'more'} is better")
    # stopped before it begins: what is finished of this sweep, whatever else the folder holds
    there = run_sweep(sweep, folder, stop=lambda: True) if (folder / "runs").is_dir() else None
    if there is not None and not there.stopped:
        return
    done = 0 if there is None else sum(one.state == "kept" for one in there.ended.values())
    try:
        each = cost(sweep.own())
    except FedloomError:  # the run will report the error
        return
    left = planned(sweep) - done
    hands = min(workers or usual_workers([sweep.own()]), left)
    out.print(f"{done} finished; left at most: {describe([each] * left, hands)}", soft_wrap=True)


def _show(found: SweepResults, page: Path) -> None:
    """Print the best settings and warnings."""
    from fedloom.reproduce.sweep.config import shown
    from fedloom.reproduce.sweep.page import lead, warning, worth

    config = found.sweep.config
    table = Table("", *map(escape, config.keys), box=None, header_style="bold", pad_edge=False)
    table.add_column(escape(config.measure), justify="right")
    for trial in found.ranked[:BEST]:
        settings = [shown(trial.setting[key]) if key in trial.setting else "" for key in config.keys]
        table.add_row(trial.name, *map(escape, settings), worth(found, trial))
    if found.ranked:
        if all(trial.folders != found.own.folders for trial in found.ranked[:BEST]):
            table.add_row(found.own.name, *[""] * len(config.keys), worth(found, found.own))
        out.print(table)
    out.print(escape(lead(found)), soft_wrap=True)
    out.print(escape(warning(found)), soft_wrap=True)
    out.print(f"page  {page}", soft_wrap=True)
