"""`fedloom track`, which sends runs to experiment trackers, and the option `--track` of other commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

out = Console(highlight=False)

Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track", metavar="NAME", help="Send measures to tensorboard, mlflow or wandb meanwhile. Repeatable."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(track)


def track(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, comparisons or sweeps, finished or not.")
    ],
    to: Annotated[list[str], typer.Option("--to", metavar="NAME", help="tensorboard, mlflow or wandb. Repeatable.")],
) -> None:
    """Send runs to an experiment tracker: what it does not have yet.

    [bold]fedloom track runs/mine --to tensorboard[/]  (then: tensorboard --logdir runs)

    [bold]MLFLOW_TRACKING_URI=sqlite:///mlflow.db fedloom track runs/mine --to mlflow[/]

    [bold]WANDB_MODE=offline fedloom track runs/mine --to wandb[/]  (then: wandb sync)

    The same command sends what has come since. RUN/tracked-NAME.json has what was sent; without it
    all is sent anew.

    While a run goes on: fedloom run … --track tensorboard.
    """
    from fedloom.report.track.send import send
    from fedloom.report.track.trackers import check

    for name in check(to):
        for folder in folders:
            count = send(folder, name)
            out.print(f"{name}  {folder}: {count or 'no'} new round{'' if count == 1 else 's'}", soft_wrap=True)
