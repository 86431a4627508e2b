"""The commands `fedloom watch`, `report` and `track`."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.options import out, written


def watch(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]", help="The folder of a run or comparison. Default: the newest in runs/."
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print the current status and exit.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the current status as JSON and exit.")
    ] = False,
) -> None:
    """Watch a running run in the terminal: rounds, accuracy, parties, bytes and failures.

    [bold]fedloom run fedal --out runs/mine[/]  (in one terminal)

    [bold]fedloom watch runs/mine[/]  (in another; Ctrl-C stops watching, not the run)

    [bold]fedloom watch runs/mine --once --json[/]  (for scripts)

    The command exits with the run: with status 0 if it finished, 1 if it failed, was stopped or was
    killed. With --once or --json it exits immediately, with the same status, and 0 if the run is
    still running.
    """
    from fedloom.report import watch as watching

    raise typer.Exit(watching.watch(folder, once, as_json, out))


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or one comparison folder.")
    ],
    page: Annotated[
        Path, typer.Option("--out", help="The page to write, for several folders.")
    ] = Path("report.html"),
    latex: Annotated[
        bool,
        typer.Option(
            "--latex",
            help="Write a comparison's LaTeX table, BibTeX entries and PDF figure instead.",
        ),
    ] = False,
) -> None:
    """Write the HTML report of a run or a comparison, or one page that compares several runs.

    The report of one folder is written anew only if a file of the folder, or fedloom itself, has
    changed since.
    """
    from fedloom import report as reports

    if latex:
        for folder in folders:
            for path in reports.write_paper(folder):
                written("written", path)
    elif len(folders) > 1:
        written("report", reports.write_many(folders, page))
    else:
        written("report", reports.current(folders[0]) or reports.write(folders[0]))


def track(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, comparisons or sweeps, finished or not."
        ),
    ],
    to: Annotated[
        list[str],
        typer.Option("--to", metavar="NAME", help="tensorboard, mlflow or wandb. Repeatable."),
    ],
) -> None:
    """Send the new rounds of runs to an experiment tracker.

    [bold]fedloom track runs/mine --to tensorboard[/]  (then: tensorboard --logdir runs)

    [bold]MLFLOW_TRACKING_URI=sqlite:///mlflow.db fedloom track runs/mine --to mlflow[/]

    [bold]WANDB_MODE=offline fedloom track runs/mine --to wandb[/]  (then: wandb sync)

    RUN/tracked-NAME.json records what was sent, so that the same command later sends only new
    rounds. Delete it to send everything again.

    To send metrics during a run: fedloom run … --track tensorboard.
    """
    from fedloom.report.track.send import send
    from fedloom.report.track.trackers import check

    for name in check(to):
        for folder in folders:
            count = send(folder, name)
            out.print(
                f"{name}  {folder}: {count or 'no'} new round{'' if count == 1 else 's'}",
                soft_wrap=True,
            )
