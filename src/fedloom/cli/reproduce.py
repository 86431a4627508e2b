"""`fedloom reproduce`, which repeats the tables and figures of papers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from fedloom.core.errors import ConfigError, FedloomError
from fedloom.core.paths import refuse_file

if TYPE_CHECKING:
    from fedloom.reproduce.cost import Cost
    from fedloom.reproduce.plan import Plan, Planned, PlanOutcome

out = Console(highlight=False)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(reproduce)


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="See fedloom list reproductions. A paper, such as fedal, is all of it; or a .toml.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All tables and figures of all papers.")] = False,
    scale: Annotated[str, typer.Option(metavar="small|paper", help="Minutes on a laptop; or as published.")] = "small",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many, from 0. A claim needs 3 to be decided.")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="A row, a column or 'row @ column', with * and ?. Repeatable."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change one setting of all runs. Repeatable."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Runs at the same time.  [default: one a core; on a GPU one]")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Do each run on a Ray cluster: host:port or auto; local starts one here."),
    ] = None,
    gpus: Annotated[
        float, typer.Option(min=0, help="With --ray: what each run takes of a GPU, such as 0.25; it is on cuda then.")
    ] = 0.0,
    folder: Annotated[Path, typer.Option("--out", help="The folder to write to, and to go on in.")] = Path(
        "reproduced"
    ),
    plan_only: Annotated[bool, typer.Option("--plan", help="Show what would be run and what it costs, and stop.")] = (
        False
    ),
) -> None:
    """Repeat a published table or figure: run its cells, and set the numbers beside the paper's.

    [bold]fedloom reproduce fedal-table-6[/]  (minutes: a small scale, where claims are tested and not digits)

    [bold]fedloom reproduce fedal --plan[/]  (what all of one paper would run)

    [bold]fedloom reproduce --all[/]

    [bold]fedloom reproduce fedal-table-6 --scale paper -s engine.device=cuda[/]  (as published: see --plan first)

    [bold]fedloom reproduce fedal-table-6 --only FedAL --only 'Local @ *' --seeds 1[/]

    [bold]fedloom reproduce fedal-table-6 --scale paper --ray 10.0.0.1:6379 --gpus 0.25 --out /shared/reproduced[/]

    Each run has a folder in OUT/runs, and tables that need the same run share it. The page is
    OUT/SCALE/NAME/index.html, with the same as Markdown and CSV beside it; with --only, -s or fewer seeds it is in a
    folder of its own beside OUT/SCALE.

    After a Ctrl-C, a kill or a failure the same command does what is left, and nothing twice.

    The command ends with status 1 if a run failed or was left to another process, and with 130 if it was stopped.
    """
    from fedloom.cli.progress import PoolProgress, closing, stop_on_signal

    plan = _plan(names or (), every, scale, seeds, only or (), settings or (), folder, ray, gpus)
    costs = show_plan(plan, workers)
    if plan_only:
        for name, reason in plan.problems.items():
            out.print(f"[bold red]cannot be run[/]  {escape(name)}: {escape(reason)}", soft_wrap=True)
        raise typer.Exit(2 if plan.problems else 0)
    from fedloom.api import execute
    from fedloom.reproduce.plan import run_plan

    with stop_on_signal("the rounds in progress, each saved first") as stop, PoolProgress(out) as many:
        done = run_plan(
            plan, workers=workers, ray=ray, gpus=gpus, costs=costs, progress=many.show, stop=stop, execute=execute
        )
    _show(done)
    words, status = closing(done.ended)
    if words:
        out.print(words)
    if status:
        raise typer.Exit(status)


def _plan(
    names: Sequence[str],
    every: bool,
    scale: str,
    seeds: int | None,
    only: Sequence[str],
    settings: Sequence[str],
    folder: Path,
    ray: str | None,
    gpus: float,
) -> Plan:
    """The plan of the command line."""
    from fedloom.experiment.reading import override
    from fedloom.reproduce.plan import plan, reproductions
    from fedloom.reproduce.spec import SCALES

    if not names and not every:
        raise ConfigError("no table or figure given. List them with fedloom list reproductions, or use --all.")
    chosen = next((one for one in SCALES if one == scale), None)
    if chosen is None:
        raise ConfigError(f"--scale must be small or paper, not {scale!r}")
    if gpus and ray is None:
        raise ConfigError("--gpus needs --ray. To use a GPU of this machine: -s engine.device=cuda")
    refuse_file(folder)
    change: dict[str, Any] = {}
    for text in settings:
        override(change, text)
    if "seed" in change:
        raise ConfigError("seed cannot be set, as each cell has several seeds. Set their number with --seeds.")
    found = reproductions(names, every)
    return plan(found, folder, chosen, seeds=seeds, only=only, change=change, device="cuda" if gpus else None)


def show_plan(plan: Plan, workers: int | None) -> list[float]:
    """Print the runs of a plan and their cost.

    Returns:
        The estimated seconds of each run; empty if unknown.
    """
    from fedloom.experiment.pool import usual_workers
    from fedloom.reproduce.cost import describe
    from fedloom.reproduce.plan import absent, unlisted

    if not plan.planned:
        return []
    runs, finished = plan.runs, plan.finished
    table = Table("name", "place", box=None, header_style="bold", pad_edge=False)
    for heading in ("cells", "runs", "done"):
        table.add_column(heading, justify="right")
    table.columns[0].no_wrap = True
    for one in plan.planned:
        table.add_row(escape(one.name), escape(one.reproduction.place), *_counts(one, finished))
    out.print(table)
    for one in plan.planned:
        for why, count in Counter(cell.untestable for cell in one.cells if cell.untestable).items():
            which = f"{count} cell{'s' * (count != 1)} of {one.name} cannot be run at this scale"
            out.print(f"{which}: {escape(why)}", soft_wrap=True)
    left = {key: run for key, run in runs.items() if key not in finished}
    shared = sum(len(one.runs) for one in plan.planned) - len(runs)
    more = f" ({shared} more are shared)" if shared else ""
    out.print(f"{len(runs)} runs{more}, {len(finished)} finished, {len(left)} to do, in {plan.out}", soft_wrap=True)
    costs = _costs(plan)
    hands = workers or usual_workers(left.values())
    if todo := [cost for key, cost in costs.items() if key in left]:
        out.print(describe(todo, min(hands, len(todo))), soft_wrap=True)
    if lacking := absent(left):
        out.print(
            f"missing data: {', '.join(sorted({name for name, _ in lacking}))}. It will be downloaded from the Hugging "
            "Face hub first (extra hub). Alternatively, put it into FEDLOOM_DATA.",
            soft_wrap=True,
        )
    if lists := unlisted(left):
        out.print(f"missing manifest: {', '.join(lists)}. Create it (see docs/vertical.md).", soft_wrap=True)
    return [cost.seconds for cost in costs.values()]


def _counts(one: Planned, finished: set[str]) -> tuple[str, str, str]:
    """Numbers of cells that can be run, of runs, and of finished runs."""
    able = sum(bool(cell.runs) for cell in one.cells)
    cells = str(able) if able == len(one.cells) else f"{able} of {len(one.cells)}"
    return cells, str(len(one.runs)), str(len(finished & one.runs.keys()))


def _costs(plan: Plan) -> dict[str, Cost]:
    """The cost of each run by digest, estimated for one seed; empty if a run is invalid, as its start reports."""
    from fedloom.experiment.pool import digest
    from fedloom.reproduce.cost import cost, unmeasured

    alike = {key: run.model_copy(update={"seed": 0}) for key, run in plan.runs.items()}
    try:
        runs = {digest(run): run for run in alike.values()}
        if number := unmeasured(runs.values()):
            out.print(f"timing a few small rounds of {number} kind{'s' * (number != 1)} of run (cached afterwards)")
        shown = track(runs.items(), "timing", console=out, transient=True, disable=not (number and out.is_terminal))
        known = {key: cost(run) for key, run in shown}
        return {key: known[digest(run)] for key, run in alike.items()}
    except FedloomError:
        return {}


def _show(done: PlanOutcome) -> None:
    """Print the verdict of each claim and the page."""
    table = Table("", "claim", box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for outcome in done.outcomes:
        table.add_row("", f"[bold]{escape(outcome.name)}[/] {escape(outcome.title)}")
        for claim in outcome.claims:
            table.add_row(claim.verdict, escape(claim.text))
    out.print(table)
    out.print(f"page  {done.page}", soft_wrap=True)
