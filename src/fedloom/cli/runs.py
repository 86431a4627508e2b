"""The commands `fedloom run` and `fedloom compare`.

Both make an `Experiment` of their options and files, and `_execute_and_show` executes it: one run,
or, if `experiment.compare` is set, all runs of a comparison. A single run is shown as a comparison
of one method, so that both have the same table. Functions import what needs PyTorch themselves, so
that --help is fast.
"""

import json
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedloom.cli.listing import complete_engine, completing
from fedloom.cli.options import (
    PRIVATE,
    AsJson,
    Device,
    PlanOnly,
    Quiet,
    Seed,
    Settings,
    Track,
    Trust,
    err,
    out,
    plain_table,
    print_plain,
    written,
)
from fedloom.core.errors import ConfigError, DataError, Interrupted

if TYPE_CHECKING:
    from fedloom.experiment.config.run import Experiment

Out = Annotated[
    Path | None, typer.Option("--out", help="The folder to write to. Default: a new one in runs/.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume an interrupted run, with bit-identical results.")
]
Rounds = Annotated[int | None, typer.Option(help="Passes of the method's outer loop.")]
Iterations = Annotated[
    int | None,
    typer.Option(
        help="Local steps of a client (epochs, where a method counts those), in place of rounds."
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="local, auto, batched (GPU, small MLPs), ray (a cluster), net or isolated.",
        autocompletion=complete_engine,
    ),
]
Federation = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.toml",
        help="Run on the nodes of this federation: see fedloom certs and fedloom node.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes that run parties; results do not depend on it."),
]


def run(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG.toml|NAME]",
            help="A file, an experiment, or a method: see fedloom list.",
            autocompletion=completing("methods", "experiments"),
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.py",
            help="Another method, or your own page.",
            autocompletion=completing("methods"),
        ),
    ] = None,
    settings: Settings = None,
    seed: Seed = None,
    rounds: Rounds = None,
    iterations: Iterations = None,
    folder: Out = None,
    resume: Resume = False,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    federation: Federation = None,
    track: Track = None,
    trust: Trust = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run a method or a comparison.

    [bold]fedloom run quickstart[/]

    [bold]fedloom run fedal --rounds 40 --seed 1[/]

    [bold]fedloom run fedal -s data.name=mnist -s params.tau=10[/]

    [bold]fedloom run fedal --workers 4[/]  (or --engine auto, or --engine auto --device cuda)

    [bold]fedloom run fedal --federation fed/federation.toml[/]  (on nodes beside their own data:
    fedloom certs)

    [bold]fedloom run my.toml --out runs/mine[/]  (after a Ctrl-C: fedloom run --resume --out
    runs/mine)

    [bold]fedloom run --method mine.py[/]  (your own page: fedloom copy)
    """
    _refuse_missing_file(settings or (), federation is not None or engine == "net")
    from fedloom.experiment.plan.reading import read

    if config is None and method is None:
        config = _resumed(folder if resume else None)
    length = _length(rounds, iterations)
    flags = {
        "seed": seed,
        **length,
        "method": method,
        "engine": _engine(engine, workers, device, federation),
    }
    experiment = read(config or str(method), settings or (), flags, trust or ())
    _execute_and_show(
        experiment, config or str(method), folder, resume, track or (), as_json, quiet
    )


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Names or your own files; the first is compared with the others.",
            autocompletion=completing("methods"),
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="Settings for all methods; the file's method is ignored.",
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            help="A number of seeds, such as 5, or the seeds, such as 0,1,2 or 0-4: a run of each "
            "method for each."
        ),
    ] = "1",
    settings: Settings = None,
    rounds: Rounds = None,
    iterations: Iterations = None,
    folder: Out = None,
    resume: Resume = False,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    federation: Federation = None,
    track: Track = None,
    trust: Trust = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="First choose each method's learning rate on validation rows, all alike."
        ),
    ] = False,
    latex: Annotated[
        bool,
        typer.Option("--latex", help="Also write a LaTeX table, BibTeX entries and a PDF figure."),
    ] = False,
    plan_only: PlanOnly = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Run several methods and seeds on identical splits, and report paired differences.

    All methods train for the same number of --iterations. What still differs stands in the
    headline.

    [bold]fedloom compare fedal fedmd local --seeds 5 --iterations 300[/]
    """
    _refuse_missing_file(settings or (), federation is not None or engine == "net")
    from fedloom.experiment.plan.reading import experiments, read, seeds_of

    shipped = experiments()
    if (name := next((n for n in names if n.endswith(".toml") or n in shipped), None)) is not None:
        raise ConfigError(
            f"{name} is an experiment, not a method: use fedloom run {name}, "
            f"or fedloom compare METHOD... --config {name}"
        )
    compared = {"methods": names, "seeds": seeds_of(seeds)}
    flags = {
        "name": "",
        **_length(rounds, iterations),
        "engine": _engine(engine, workers, device, federation),
        "compare": compared,
    }
    experiment = read(base or names[0], settings or (), flags, trust or ())
    if plan_only:
        _show_plan(experiment, tune)
        return
    _execute_and_show(
        experiment, "compare", folder, resume, track or (), as_json, quiet, tune, latex
    )


def _show_plan(experiment: "Experiment", tune: bool) -> None:
    """Print the runs of a comparison, method by method."""
    from fedloom.experiment.run.tuning import trials

    assert experiment.compare is not None
    seeds = len(experiment.compare.seeds)
    firsts = experiment.runs()[::seeds]
    tried = trials(experiment) if tune else [{}] * len(firsts)
    table = plain_table("method", "model", numbers=("rounds", "runs"))
    for run, extra in zip(firsts, tried, strict=True):
        rounds = run.resolve()[2]
        pool = ", ".join(run.models.names) or "the default"
        table.add_row(escape(run.label), escape(pool), str(rounds), str(seeds + len(extra)))
    out.print(table)
    count = seeds * len(firsts) + sum(map(len, tried))
    out.print(
        f"{count} runs of {experiment.run.data.clients} clients on {experiment.run.data.name}. "
        "Without --plan, the time that is left is shown from the first round on.",
        markup=False,
        soft_wrap=True,
    )


def _length(rounds: int | None, iterations: int | None) -> dict[str, int | None]:
    """The flags on a run's length, of which one replaces the other in a file."""
    if rounds is not None and iterations is not None:
        raise ConfigError("give --rounds or --iterations, not both")
    return {"rounds": rounds, "iterations": iterations}


def _refuse_missing_file(settings: Sequence[str], at_nodes: bool) -> None:
    """Refuse a file of data that does not exist, before PyTorch is imported, if no other setting is
    named.
    """
    key, _, name = settings[0].partition("=") if len(settings) == 1 else ("", "", "")
    if key == "data.name" and not at_nodes:
        from fedloom.data.sources import check_name

        try:
            check_name(name.strip("\"'"))
        except DataError as error:
            raise ConfigError(f"data.name: {error}") from None


def _resumed(folder: Path | None) -> str:
    """The config of the run to resume, if the command names its folder only."""
    if folder is None:
        raise ConfigError(
            "nothing to run: name a method, an experiment or a TOML file, such as: fedloom run "
            "fedal"
        )
    config = folder / "config.toml"
    if config.is_file():
        return str(config)
    if any(folder.glob("*/config.toml")):
        raise ConfigError(
            f"{folder} holds several runs: repeat the command that started them, with --resume"
        )
    raise ConfigError(f"{folder} has no config.toml, so there is no run to resume")


def _engine(
    name: str | None, workers: int | None, device: str | None, federation: Path | None
) -> dict[str, Any] | None:
    """The values of [engine] that flags set."""
    place = None if federation is None else str(federation)
    given = {
        "name": name or (place and "net"),
        "workers": workers,
        "device": device,
        "federation": place,
    }
    return {k: v for k, v in given.items() if v is not None} or None


def _execute_and_show(
    experiment: "Experiment",
    called: str,
    folder: Path | None,
    resume: bool,
    trackers: Sequence[str],
    as_json: bool = False,
    quiet: bool = False,
    tune: bool = False,
    latex: bool = False,
) -> None:
    """Execute the runs with a progress display, then print the results and the report's path.

    Args:
        experiment: one run, or a comparison.
        called: what a new folder in runs/ is named after: a method, a config file or "compare".
        folder: to write to; None for a new one.
        resume: continue what is in the folder.
        trackers: that follow the runs.
        as_json: print everything as JSON.
        quiet: print the verdict alone.
        tune: choose each method's learning rate first.
        latex: write the tables of a paper, too.
    """
    from fedloom.api import execute
    from fedloom.cli.progress import RunProgress, stop_on_signal
    from fedloom.experiment.run.compare import execute_all, summarize
    from fedloom.experiment.run.execute import Stopped
    from fedloom.experiment.run.lockstep import advice
    from fedloom.report import write_paper
    from fedloom.report.terminal import line, show_comparison, show_learned
    from fedloom.report.track.background import tracking

    if experiment.run.engine.name == "net":
        os.umask(PRIVATE)  # the folder has the server's models
    folder = _folder(experiment, called, folder, resume)
    silent = as_json or quiet

    # Execute. A tracker follows the folder, and a signal ends the run after its round. `advice`
    # is to train runs in lock-step, if that would be faster than one after the other.
    if not silent and experiment.compare is not None and (text := advice(experiment.runs())):
        out.print(text, soft_wrap=True)
    if tune and not silent:
        out.print("the learning rates first, on validation rows")
    try:
        with (
            tracking(folder, trackers),
            stop_on_signal() as stop,
            RunProgress(experiment, out, silent) as progress,
        ):
            if experiment.compare is None:
                result = execute(
                    experiment.run, folder, resume=resume, progress=progress.show, stop=stop
                )
                found = summarize(experiment.title, [result])
            else:
                run_all = partial(
                    execute_all, experiment, folder, resume=resume, execute=execute, tune=tune
                )
                found = run_all(progress=progress.show, stop=stop)
    except (Stopped, Interrupted) as stopped:
        # before the first run has its config there is nothing to resume
        begun = (
            f"with --out {folder} --resume resumes it"
            if any(folder.glob("**/config.toml"))
            else "starts it again"
        )
        err.print(f"{stopped}; the same command {begun}", soft_wrap=True)
        raise typer.Exit(130) from None  # as of a process that Ctrl-C ended
    papers = write_paper(folder) if latex else []

    # For programs: JSON, or one line. The report is written all the same.
    if silent:
        _report(found, folder, experiment.compare is not None)
        content = result.summary if experiment.compare is None else found
        shown = {"folder": str(folder), "verdict": line(found), **content}
        print_plain(json.dumps(shown, ensure_ascii=False) if as_json else shown["verdict"])
        _exit_if_left_out(found)
        return

    # for people
    unseen = experiment.run.data.unseen  # names of owners, or the share of clients
    # owners that take part in no round, if the config names them; a share of clients has no names
    show_comparison(found, out, unseen if isinstance(unseen, tuple) else ())
    if experiment.compare is None:
        show_learned(result.summary.get("learned", ()), out)
    if any(run.resolve()[2] == 0 for run in experiment.runs()):
        out.print("No round was run: the models are untrained.")
    # a single run's main metric; "clients" is there only if some of them have no value
    main = (
        "rmse"
        if experiment.compare is None and result.summary.get("task") == "number"
        else "accuracy"
    )
    if experiment.compare is None and "clients" in result.summary[main]:
        counted, clients = len(result.summary[main]["clients"]), result.summary["clients"]
        out.print(
            f"{main} of {counted} of {clients} clients: the others were absent, or report none"
        )
    # of a single run in its folder, of a comparison in those of its runs
    logs = [*folder.glob("tracebacks.log"), *sorted(folder.glob("*/tracebacks.log"))]
    if logs:
        out.print(f"call failures  {', '.join(map(str, logs))}", soft_wrap=True)
    written("report", _report(found, folder, experiment.compare is not None))
    for path in papers:
        written("paper", path)
    _exit_if_left_out(found)


def _exit_if_left_out(found: dict[str, Any]) -> None:
    """Exit with status 1 if a run diverged or failed: the comparison lacks it."""
    if found.get("left_out"):
        raise typer.Exit(1)


def _report(found: dict[str, Any], folder: Path, several: bool) -> Path:
    """Write the report, and first those of `several` runs, to which it links."""
    from rich.progress import track

    from fedloom.report import write

    runs = found["runs"] if several else ()
    for run in track(
        runs, "a report of each run", console=out, disable=not out.is_terminal, transient=True
    ):
        write(folder / run["folder"])
    return write(folder)


def _folder(experiment: "Experiment", called: str, folder: Path | None, resume: bool) -> Path:
    """The folder to write to: the one given, the one to resume, or a new one in runs/."""
    from fedloom.experiment.run.execute import settle

    if folder is not None:
        settle(folder, resume=resume, several=experiment.compare is not None)
        return folder
    name = experiment.run.name or Path(called.partition(".py:")[0]).stem
    taken = {
        int(match[1] or 1): path
        for path in Path("runs").glob(f"{name}*")
        if (match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name))
    }
    last = max(taken, default=0)
    if not resume:
        return Path("runs") / (name if not last else f"{name}-{last + 1}")
    if not last:
        raise ConfigError(f"no run of {name!r} in runs/ to resume; name its folder with --out")
    return taken[last]
