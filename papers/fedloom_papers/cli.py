"""`fedloom reproduce`, which repeats the tables and figures of papers."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import track

from fedloom.cli.listing import completing
from fedloom.cli.options import ParallelRuns, PlanOnly, Settings, out, plain_table, written
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.support.paths import refuse_file

if TYPE_CHECKING:
    from fedloom_papers.estimate.cost import Cost
    from fedloom_papers.plan import Plan, PlanOutcome


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="Tables and figures: see fedloom list reproductions. Or a paper, such as fedal; "
            "or a TOML file.",
            autocompletion=completing("reproductions"),
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All tables and figures of all papers.")
    ] = False,
    scale: Annotated[
        str, typer.Option(metavar="small|paper", help="Minutes on a laptop, or as published.")
    ] = "small",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, from 0. Deciding a claim takes 3.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="A row, a column or 'row @ column', with * and ?. Repeatable."
        ),
    ] = None,
    settings: Settings = None,
    workers: ParallelRuns = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Run on a Ray cluster: host:port or auto; local starts one here.",
        ),
    ] = None,
    gpus: Annotated[
        float,
        typer.Option(
            "--gpus-per-run",
            min=0,
            help="With --ray: the share of a GPU for each run, such as 0.25; implies cuda.",
        ),
    ] = 0.0,
    folder: Annotated[
        Path, typer.Option("--out", help="The folder to write to, and to resume in.")
    ] = Path("reproduced"),
    archive: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the archive of finished runs.  \\[default: OUT/archive]",
            show_default=False,
        ),
    ] = None,
    merge: Annotated[
        list[Path] | None,
        typer.Option(metavar="FOLDER", help="Add another machine's archive first. Repeatable."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Spend a time such as 10h or 45m on the runs that decide most claims; 0 only "
            "writes the pages.",
        ),
    ] = None,
    plan_only: PlanOnly = False,
) -> None:
    """Repeat a published table or figure: run its cells and compare the results with the paper's.

    [bold]fedloom reproduce fedal-table-6[/]  (minutes: a small scale, which tests claims, not
    digits)

    [bold]fedloom reproduce fedal --plan[/]  (the runs of one paper, and their cost)

    [bold]fedloom reproduce --all[/]

    [bold]fedloom reproduce fedal-table-6 --scale paper -s engine.device=cuda[/]  (as published: see
    --plan first)

    [bold]fedloom reproduce fedal-table-6 --only FedAL --only 'Local @ *' --seeds 1[/]

    [bold]fedloom reproduce fedal-table-6 --scale paper --ray auto --gpus-per-run 0.25 --out
    /shared/reproduced[/]

    Each run has a folder in OUT/runs, and tables that need the same run share it. The page is
    OUT/SCALE/NAME/index.html, with Markdown and CSV beside it; with --only, -s or fewer seeds it
    has a folder of its own beside OUT/SCALE.

    [bold]fedloom reproduce --all --budget 10h[/]  (the runs that decide most claims first; repeat
    it to continue)

    [bold]fedloom reproduce --all --budget 0 --archive archive --merge theirs[/]  (pages from
    archived numbers)

    After a Ctrl-C, a kill or a failure, repeat the command: finished runs are not repeated.

    The command exits with status 1 if a run failed or is in progress in another process, and with
    130 if it was stopped.
    """
    from fedloom.cli.progress import PoolProgress, exit_after, stop_on_signal

    if budget is not None and (ray is not None or seeds is not None):
        raise ConfigError("--budget cannot be combined with --ray or --seeds. Remove one.")

    def replan() -> "Plan":
        return _plan(
            names or (), every, scale, seeds, only or (), settings or (), folder, ray, gpus, archive
        )

    refuse_file(folder)
    _merge(archive or folder / "archive", merge or ())
    plan = replan()
    if budget is not None and not plan_only:
        _show(_spend(replan, budget, workers))
        return
    costs = show_plan(plan, workers)
    if plan_only:
        for name, reason in plan.problems.items():
            out.print(
                f"[bold red]cannot be run[/]  {escape(name)}: {escape(reason)}", soft_wrap=True
            )
        raise typer.Exit(2 if plan.problems else 0)
    from fedloom.api import execute
    from fedloom_papers.plan import run_plan

    with (
        stop_on_signal("the rounds in progress, each saved first") as stop,
        PoolProgress(out) as many,
    ):
        done = run_plan(
            plan,
            workers=workers,
            ray=ray,
            gpus=gpus,
            costs=costs,
            progress=many.show,
            stop=stop,
            execute=execute,
        )
    _show(done)
    exit_after(done.ended)


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
    archive: Path | None,
) -> "Plan":
    from fedloom.experiment.config.overrides import override
    from fedloom_papers.plan import plan, reproductions
    from fedloom_papers.spec import SCALES

    if not names and not every:
        raise ConfigError(
            "no table or figure given. List them with fedloom list reproductions, or use --all."
        )
    chosen = next((one for one in SCALES if one == scale), None)
    if chosen is None:
        raise ConfigError(f"--scale must be small or paper, not {scale!r}")
    if gpus and ray is None:
        raise ConfigError(
            "--gpus-per-run needs --ray. To use a GPU of this machine: -s engine.device=cuda"
        )
    change: dict[str, Any] = {}
    for text in settings:
        override(change, text)
    if "seed" in change:
        raise ConfigError(
            "seed cannot be set, as each cell has several seeds. Set their number with --seeds."
        )
    found = reproductions(names, every)
    device = "cuda" if gpus else None
    return plan(
        found, folder, chosen, seeds=seeds, only=only, change=change, device=device, archive=archive
    )


def _merge(archive: Path, others: Sequence[Path]) -> None:
    """Add other archives, and report the number of added runs and different results."""
    from fedloom_papers.archive import Archive

    for other in others:
        added, differing = Archive(archive).merge(other)
        out.print(f"{added} runs added from {other}", soft_wrap=True)
        for text in differing:
            out.print(f"[yellow]different result, ours is kept[/]  {escape(text)}", soft_wrap=True)


def _spend(replan: "Callable[[], Plan]", budget: str, workers: int | None) -> "PlanOutcome":
    """Spend the budget on the most informative runs, and write all pages."""
    from fedloom.api import execute
    from fedloom.cli.progress import PoolProgress, stop_on_signal
    from fedloom.experiment.config.duration import seconds_of
    from fedloom_papers.budget import spend
    from fedloom_papers.estimate.cost import cost
    from fedloom_papers.plan import run_plan

    seconds = seconds_of(budget)
    with (
        stop_on_signal("the rounds in progress, each saved first") as stop,
        PoolProgress(out) as many,
    ):
        spend(
            replan,
            seconds,
            lambda run: cost(run.model_copy(update={"seed": 0})).seconds,
            workers=workers,
            progress=many.show,
            stop=stop,
            execute=execute,
            tell=lambda batch: out.print(f"next  {escape(batch.claim)}", soft_wrap=True),
        )
    return run_plan(replan(), execute_runs=False)


def show_plan(plan: "Plan", workers: int | None) -> list[float]:
    """Print the runs of a plan and their cost.

    Returns:
        The estimated seconds of each run; empty if unknown.
    """
    from fedloom.experiment.pool.fetch import absent
    from fedloom.experiment.pool.pool import usual_workers
    from fedloom_papers.estimate.cost import describe
    from fedloom_papers.plan import unlisted

    if not plan.planned:
        return []
    runs, finished = plan.runs, plan.finished
    table = plain_table("name", "place", numbers=("cells", "runs", "done"))
    for one in plan.planned:
        able, number = sum(bool(cell.runs) for cell in one.cells), len(one.cells)
        cells = f"{able} of {number}" if able < number else str(able)
        done = str(len(finished & one.runs.keys()))
        table.add_row(
            escape(one.name), escape(one.reproduction.place), cells, str(len(one.runs)), done
        )
    out.print(table)
    for one in plan.planned:
        for why, count in Counter(cell.untestable for cell in one.cells if cell.untestable).items():
            which = f"{count} cell{'s' * (count != 1)} of {one.name} cannot be run at this scale"
            out.print(f"{which}: {escape(why)}", soft_wrap=True)
    left = {key: run for key, run in runs.items() if key not in finished}
    shared = sum(len(one.runs) for one in plan.planned) - len(runs)
    more = f" ({shared} more are shared)" if shared else ""
    out.print(
        f"{len(runs)} runs{more}, {len(finished)} finished, {len(left)} to do, in {plan.out}",
        soft_wrap=True,
    )
    costs = _costs(plan)
    if todo := [cost for key, cost in costs.items() if key in left]:
        out.print(
            describe(todo, min(workers or usual_workers(left.values()), len(todo))), soft_wrap=True
        )
    if lacking := absent(left):
        out.print(
            f"missing data: {', '.join(sorted({name for name, _ in lacking}))}. It will be "
            "downloaded from the Hugging Face hub first (extra hub). Alternatively, put it into "
            "FEDLOOM_DATA.",
            soft_wrap=True,
        )
    if lists := unlisted(left):
        out.print(
            f"missing manifest: {', '.join(lists)}. Create it (see docs/vertical.md).",
            soft_wrap=True,
        )
    return [cost.seconds for cost in costs.values()]


def _costs(plan: "Plan") -> "dict[str, Cost]":
    """The cost of each run by digest, estimated for one seed; empty if a run is invalid, as its
    start reports.
    """
    from fedloom.experiment.pool.pool import digest
    from fedloom_papers.estimate.cost import cost, unmeasured

    alike = {key: run.model_copy(update={"seed": 0}) for key, run in plan.runs.items()}
    try:
        runs = {digest(run): run for run in alike.values()}
        if number := unmeasured(runs.values()):
            out.print(
                f"timing a few small rounds of {number} kind{'s' * (number != 1)} of run (cached "
                "afterwards)"
            )
        shown = track(
            runs.items(),
            "timing",
            console=out,
            transient=True,
            disable=not (number and out.is_terminal),
        )
        known = {key: cost(run) for key, run in shown}
        return {key: known[digest(run)] for key, run in alike.items()}
    except FedloomError:
        return {}


def _show(done: "PlanOutcome") -> None:
    table = plain_table("", "claim")
    for outcome in done.outcomes:
        table.add_row("", f"[bold]{escape(outcome.name)}[/] {escape(outcome.title)}")
        for claim in outcome.claims:
            table.add_row(escape(claim.said), escape(claim.text))
    out.print(table)
    written("page", done.page)
