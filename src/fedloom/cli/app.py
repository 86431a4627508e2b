"""The command line: `fedloom run`, `compare`, `watch`, `report`, `list`, `data`, `align`, `export`, `embed`,
`predict`, `pretrain`, `copy`.

Commands import what they need when they run, so that `--help` is quick.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedloom._version import __version__
from fedloom.cli import remote, reproduce, sweep, track
from fedloom.cli.track import Track
from fedloom.core.errors import ConfigError, FedloomError, Interrupted

if TYPE_CHECKING:
    from fedloom.experiment.config import Experiment

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

app = typer.Typer(
    help="Federated learning beyond weight averaging: hidden models, peers, columns, private pretrained models.",
    epilog="Begin with: fedloom run quickstart",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Change one setting, such as data.options.alpha=0.5. Repeatable.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="The folder to write to. Default: a new one in runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run, with bit-identical results.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all random draws.")]
Rounds = Annotated[int | None, typer.Option(help="Passes of the method's outer loop.")]
Engine = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="local, auto, batched (GPU, small MLPs), ray (a cluster), net or isolated."),
]
Federation = Annotated[
    Path | None,
    typer.Option(metavar="FILE.toml", help="Run on the nodes of this federation: see fedloom certs and fedloom node."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Number of processes that run parties; results do not depend on it.")
]
Device = Annotated[str | None, typer.Option(help="A torch device, such as cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Options before the command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def run(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG.toml|NAME]", help="A file, an experiment, or a method: see fedloom list."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="NAME|FILE.py", help="Another method, or your own page.")
    ] = None,
    settings: Overrides = None,
    seed: Seed = None,
    rounds: Rounds = None,
    folder: Out = None,
    resume: Resume = False,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    federation: Federation = None,
    track: Track = None,
) -> None:
    """Run a method or a comparison.

    [bold]fedloom run quickstart[/]

    [bold]fedloom run fedal --rounds 40 --seed 1[/]

    [bold]fedloom run fedal -s data.name=mnist -s params.tau=10[/]

    [bold]fedloom run fedal --workers 4[/]  (or --engine auto, or --engine auto --device cuda)

    [bold]fedloom run fedal --federation fed/federation.toml[/]  (on nodes beside their own data: fedloom certs)

    [bold]fedloom run my.toml --out runs/mine[/]  (and --resume after a Ctrl-C)

    [bold]fedloom run --method mine.py[/]  (your own page: fedloom copy)
    """
    from fedloom.experiment.reading import read

    if config is None and method is None:
        raise ConfigError("nothing to run: name a method, an experiment or a TOML file, such as: fedloom run fedal")
    flags = {"seed": seed, "rounds": rounds, "method": method, "engine": _engine(engine, workers, device, federation)}
    experiment = read(config or str(method), settings or (), flags)
    _work(experiment, config or str(method), folder, resume, track or ())


@app.command()
def compare(
    names: Annotated[list[str], typer.Argument(metavar="METHOD...", help="The first is compared with the others.")],
    base: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE.toml", help="Settings for all methods; the file's method is ignored."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds, with one run of each method for each, such as 0,1,2 or 0-4.")
    ] = "0",
    settings: Overrides = None,
    rounds: Rounds = None,
    folder: Out = None,
    resume: Resume = False,
    engine: Engine = None,
    workers: Workers = None,
    device: Device = None,
    federation: Federation = None,
    track: Track = None,
) -> None:
    """Run several methods and seeds on identical splits, and report paired differences.

    [bold]fedloom compare fedal fedmd local --seeds 0-2 -s iterations=300[/]
    """
    from fedloom.experiment.reading import read, seeds_of

    compared = {"methods": names, "seeds": seeds_of(seeds)}
    flags = {"name": "", "rounds": rounds, "engine": _engine(engine, workers, device, federation), "compare": compared}
    _work(read(base or names[0], settings or (), flags), "compare", folder, resume, track or ())


@app.command()
def watch(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="The folder of a run or comparison. Default: the newest in runs/."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the current status and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the current status as JSON and exit.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Serve a live page on this machine until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for a free port.")] = 8470,
) -> None:
    """Watch a running run: rounds, accuracy, parties, bytes and failures; in the terminal or as a live page.

    [bold]fedloom run fedal --out runs/mine[/]  (in one terminal)

    [bold]fedloom watch runs/mine[/]  (in another; Ctrl-C stops watching, not the run)

    [bold]fedloom watch --page[/]  (then open http://127.0.0.1:8470/ in a browser)

    [bold]fedloom watch runs/mine --once --json[/]  (for scripts)

    The page is served on this machine only. To open it from another: ssh -L 8470:127.0.0.1:8470 MACHINE.

    The command exits with the run: with status 0 if it finished, 1 if it failed, was stopped or was killed. With --once
    or --json it exits immediately, with the same status, and 0 if the run is still running.
    """
    from fedloom.report import watch as watching

    raise typer.Exit(watching.watch(folder, once, as_json, page, port, out))


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Run folders, or one comparison folder.")],
    page: Annotated[Path, typer.Option("--out", help="The page to write, for several folders.")] = Path("report.html"),
) -> None:
    """Write the HTML report of a run or a comparison, or one page that compares several runs."""
    from fedloom import report as reports

    written = reports.write(folders[0]) if len(folders) == 1 else reports.write_many(folders, page)
    out.print(f"report  {written}", soft_wrap=True)


@app.command("list")
def list_(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="methods, models, datasets, partitions, experiments, reproductions, or the name of a method.",
        ),
    ] = "methods",
    as_json: AsJson = False,
) -> None:
    """List methods, models, datasets, partitions, experiments or reproductions; or a method's settings.

    [bold]fedloom list fedal[/]  (all settings -s params.… of FedAL)
    """
    from fedloom.cli import catalogue

    rows = catalogue.rows(kind)
    if as_json:
        typer.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    columns = [column for column in rows[0] if column not in catalogue.LONG]
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    out.print(table)


@app.command()
def data(
    name: Annotated[str, typer.Argument(metavar="NAME|PATH", help="A data set: see fedloom list datasets.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 10,
    partition: Annotated[str, typer.Option(help="Partition: see fedloom list partitions.")] = "dirichlet",
    settings: Overrides = None,
    seed: Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="File for a figure (PNG, SVG or PDF).")] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a partition assigns rows to clients: a table, and a figure with --plot.

    [bold]fedloom data digits --clients 10 -s data.options.alpha=0.1 --plot who.png[/]
    """
    _check_picture(plot)
    from fedloom.data.stats import describe, plot_counts
    from fedloom.experiment.build import data_of
    from fedloom.experiment.reading import read
    from fedloom.report.formatting import clients_named

    flags = {"seed": seed, "data": {"name": name, "clients": clients, "partition": partition}}
    run = read("local", settings or (), flags).run
    dataset, split = data_of(run)
    stats, unseen = describe(dataset.y, split.shards, dataset.classes), run.data.unseen_clients(run.seed)
    if as_json:
        shown = {"dataset": dataset.name, "classes": stats.classes, "counts": stats.counts.tolist()}
        shown |= {"server": len(split.server), "unseen": unseen}
        typer.echo(json.dumps(shown, ensure_ascii=False))
    else:
        server = f"{len(split.server):,} at the server, " if len(split.server) else ""
        out.print(
            f"[bold]{dataset.name}[/]: {len(dataset.y):,} rows of shape {dataset.input_shape}, {len(dataset.classes)} "
            f"classes; {server}{len(split.public):,} public, {len(split.test):,} for the test"
        )
        table = Table(*stats.HEADER, box=None, header_style="bold", pad_edge=False)
        for row in stats.rows():
            table.add_row(*row)
        out.print(table)
        if unseen:
            out.print(f"held out from training: {clients_named(unseen)}")
        out.print(f"distance between two clients' class mixes (total variation): {stats.pairwise:.2f}")
    if plot is not None:
        plot_counts(stats, plot)
        out.print(f"figure  {plot}", soft_wrap=True)


@app.command()
def align(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE.csv...", help="One for each party; the active one first.")
    ],
    columns: Annotated[
        list[str], typer.Option("--id", metavar="NAME", help="The id column: once for all files, or once for each.")
    ],
    folder: Annotated[Path, typer.Option("--out", help="The folder to write to.")],
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="openmined: private set intersection. plain: compares ids, not private.")
    ] = "openmined",
    force: Annotated[bool, typer.Option("--force", help="Replace existing results.")] = False,
) -> None:
    """Find the people that are in all parties' CSV files, and write each file's rows in one common order.

    [bold]fedloom align clinic.csv lab.csv --id patient --out aligned[/]

    [bold]fedloom align clinic.csv lab.csv --id patient --id subject_no --out aligned[/]

    For each file: aligned/clinic.aligned.csv, whose row i is the same person in all files, and
    aligned/clinic.unaligned.csv, the other rows. aligned/alignment.json has the counts, and the information that each
    side learnt.
    """
    from rich.progress import Progress

    from fedloom.experiment.aligning import align_files

    with Progress(console=out, disable=not out.is_terminal, transient=True) as bars:
        task = bars.add_task("")

        def show(done: int, steps: int, what: str) -> None:
            bars.update(task, completed=done, total=steps, description=escape(what))
            if not out.is_terminal and 10 * done // steps > 10 * (done - 1) // steps:  # ten lines at most in a log
                out.print(f"{done}/{steps}  {escape(what)}", soft_wrap=True)

        found = align_files(files, columns, folder, backend, show, force)
    table = Table("party", box=None, header_style="bold", pad_edge=False)
    for heading in ("rows", "aligned", "unaligned"):
        table.add_column(heading, justify="right")
    for party in found["parties"]:
        table.add_row(escape(party["name"]), *(f"{party[key]:,}" for key in ("rows", "aligned", "unaligned")))
    out.print(table)
    if not found["parties"][0]["aligned"]:
        out.print("[bold]No id is in every file.[/] Check that the id columns have the same kind of id.")
    out.print(f"what each side learnt ({found['backend']}):")
    for sentence in found["learnt"]:
        out.print(f"- {escape(sentence)}", soft_wrap=True)
    out.print(f"written  {folder}", soft_wrap=True)


Force = Annotated[bool, typer.Option("--force", help="Replace existing files.")]
Trust = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Your own network or method page, whose code may be executed. Repeatable."),
]


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a vertical run.")],
    folder: Annotated[Path | None, typer.Option("--out", help="The folder to write to. Default: RUN/export.")] = None,
    force: Force = False,
) -> None:
    """Export each party's trained model to a folder of its own, for use on new rows.

    [bold]fedloom run proto-evfl -s data.name=breast_cancer --out runs/mine[/]

    [bold]fedloom export runs/mine --out parties[/]  (parties/party-0, party-1, …, and active)

    A folder holds nothing of another party: no row, no label, no weight. Then: fedloom embed, fedloom predict.
    """
    from fedloom.cli import deploy

    deploy.export(run, folder, force, out)


@app.command()
def embed(
    folder: Annotated[Path, typer.Argument(metavar="PARTY_FOLDER", help="A party's folder, from fedloom export.")],
    rows: Annotated[
        Path,
        typer.Argument(metavar="ROWS.csv", help="New rows with the party's own columns; or a list of images, or .npy."),
    ],
    target: Annotated[Path, typer.Option("--out", help="The file to write.")],
    id_: Annotated[str | None, typer.Option("--id", metavar="NAME", help="The id column.")] = None,
    force: Force = False,
    trust: Trust = None,
) -> None:
    """Embed new rows at one party, for the active party to predict from.

    [bold]fedloom embed parties/party-1 lab.csv --id patient --out e1.safetensors[/]

    Columns may be in any order, and others are ignored.

    With --id the file has a digest of the order of the people, so that mismatched rows are refused; it has no id.

    Images: a CSV file that lists files, in the column path or one for each view; or uint8 (n, C, H, W) in a .npy.
    """
    from fedloom.cli import deploy

    deploy.embed(folder, rows, id_, target, force, trust or (), out)


@app.command()
def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The active party's folder, or one party's.")],
    rows: Annotated[
        Path | None, typer.Argument(metavar="ROWS.csv", help="A party's new rows; at active, a file with the ids.")
    ] = None,
    embeddings: Annotated[
        list[str] | None,
        typer.Option("--embeddings", "-e", metavar="N=FILE", help="A party's embeddings, from fedloom embed."),
    ] = None,
    id_: Annotated[str | None, typer.Option("--id", metavar="NAME", help="The id column.")] = None,
    target: Annotated[
        Path | None, typer.Option("--out", help="A CSV file to write. Default: print the first rows.")
    ] = None,
    force: Force = False,
    trust: Trust = None,
) -> None:
    """Predict new rows: jointly at the active party, or at one party alone.

    [bold]fedloom predict parties/active -e 0=e0.safetensors -e 1=e1.safetensors --out predictions.csv[/]

    [bold]fedloom predict parties/active clinic.csv --id patient -e 0=e0.safetensors -e 1=e1.safetensors[/]

    [bold]fedloom predict parties/party-1 lab.csv --id patient[/]  (alone, from its prototypes: proto-evfl)

    The CSV file has the id or the row's number, the predicted class, and a probability for each class.
    """
    from fedloom.cli import deploy

    deploy.predict(folder, rows, embeddings or (), id_, target, force, trust or (), out)


@app.command()
def pretrain(
    config: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.toml|NAME]", help="The config with the data and the model.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="A network: see fedloom list models, or package.module:factory.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the server's rows.  [default: 20]")] = None,
    target: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("server.safetensors"),
    settings: Overrides = None,
    device: Device = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads. More are faster, and change the last digits.")] = 1,
    force: Force = False,
) -> None:
    """Train a model on the server's own rows, for methods with a pretrained server model.

    [bold]fedloom pretrain --model resnet8 -s data.name=digits -s data.server=500[/]

    [bold]fedloom pretrain my.toml --model resnet8x4 --epochs 240 --out server.safetensors --device cuda[/]

    The data.server rows are drawn before all others and are the same for every seed; no client and no test has them.
    The file stores their hash, and a run whose server has other rows refuses it.

    After a Ctrl-C the same command resumes after the last epoch, with the same final weights.

    Then: [bold]fedloom run my.toml -s pretrained.file=server.safetensors[/]

    Without a file, a run whose pretrained.model names a network trains it once and keeps it in ~/.cache/fedloom/models.
    """
    from fedloom.cli import pretrain

    pretrain.pretrain(config, model, epochs, target, settings or (), device, threads, force, out)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(metavar="METHOD", help="The method to copy.")],
    file: Annotated[Path, typer.Argument(metavar="FILE.py", help="The file to write.")],
) -> None:
    """Copy a method's page as the start of your own; run it with fedloom run --method FILE.py."""
    from fedloom import methods

    source = methods.source_of(name)
    if file.suffix != ".py":
        raise ConfigError(f"FILE must end in .py, not {file}")
    if file.exists():
        raise ConfigError(f"{file} already exists; choose another name")
    file.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    first = methods.load(file).name
    which = str(file) if first == name else f"{file}:{name}"
    out.print(f"copied  {file}\nrun it  fedloom run --method {which}", soft_wrap=True)


remote.register(app)
reproduce.register(app)
sweep.register(app)
track.register(app)


def main() -> NoReturn:
    """The entry point. Errors of fedloom are printed without a traceback."""
    import logging

    from rich.logging import RichHandler

    if err.is_terminal:
        logging.basicConfig(
            level="WARNING",
            format="%(message)s",
            handlers=[RichHandler(console=err, show_time=False, show_path=False)],
        )
    else:  # one line per message: a file has no width
        logging.basicConfig(level="WARNING", format="%(levelname)-8s %(message)s")
    logging.getLogger("fedloom.pretraining").setLevel("INFO")  # pretraining may take long
    sys.path.insert(0, "")  # for the user's networks in the working folder: models.pool=['mine:network']
    try:
        code = app(standalone_mode=False)
    except FedloomError as error:
        for line in str(error).splitlines():
            err.print(f"[bold red]error[/]  {escape(line)}", soft_wrap=True)
        code = 2
    except KeyboardInterrupt:
        err.print("stopped")
        code = 130
    except OSError as error:
        if error.strerror is None:
            raise
        at = f": {error.filename}" if error.filename else ""
        err.print(f"[bold red]error[/]  {escape(f'{error.strerror}{at}')}", soft_wrap=True)
        code = 1
    except Exception as error:
        show = getattr(error, "show", None)  # of click: an invalid option, a missing argument
        if show is None:
            raise
        show()
        code = getattr(error, "exit_code", 1)
    sys.exit(code or 0)


def _engine(
    name: str | None, workers: int | None, device: str | None, federation: Path | None
) -> dict[str, Any] | None:
    """The values of [engine] that flags set."""
    place = None if federation is None else str(federation)
    given = {"name": name or (place and "net"), "workers": workers, "device": device, "federation": place}
    return {k: v for k, v in given.items() if v is not None} or None


def _work(experiment: Experiment, called: str, folder: Path | None, resume: bool, trackers: Sequence[str]) -> None:
    """Execute the runs with a progress display, then print the table and the report's path."""
    from rich.progress import track

    from fedloom import report as reports
    from fedloom.api import execute
    from fedloom.cli.progress import RunProgress, stop_on_signal
    from fedloom.experiment.compare import execute_all, summarise
    from fedloom.experiment.run import Stopped
    from fedloom.report.terminal import show_comparison
    from fedloom.report.track.background import tracking

    folder = _folder(experiment, called, folder, resume)
    try:
        with tracking(folder, trackers), stop_on_signal() as stop, RunProgress(experiment, out) as progress:
            if experiment.compare is None:
                result = execute(experiment.run, folder, resume=resume, progress=progress.show, stop=stop)
                found = summarise(experiment.title, [result])
            else:
                found = execute_all(
                    experiment, folder, resume=resume, progress=progress.show, stop=stop, execute=execute
                )
    except (Stopped, Interrupted) as stopped:
        begun = f"with --out {folder} --resume resumes it" if any(folder.glob("**/config.toml")) else "starts it again"
        err.print(f"{stopped}; the same command {begun}", soft_wrap=True)
        raise typer.Exit(130) from None
    show_comparison(found, out)
    if experiment.compare is None and "clients" in result.summary["accuracy"]:
        counted, clients = len(result.summary["accuracy"]["clients"]), result.summary["clients"]
        out.print(f"accuracy of {counted} of {clients} clients: the others were absent at the end, or report none")
    logs = [*folder.glob("trouble.log"), *sorted(folder.glob("*/trouble.log"))]
    if logs:
        out.print(f"call failures  {', '.join(map(str, logs))}", soft_wrap=True)
    if experiment.compare is not None:  # before the page that links to them
        every = found["runs"]
        for one in track(every, "a report of each run", console=out, disable=not out.is_terminal, transient=True):
            reports.write(folder / one["folder"])
    out.print(f"report  {reports.write(folder)}", soft_wrap=True)


def _folder(experiment: Experiment, called: str, folder: Path | None, resume: bool) -> Path:
    """The folder to write to: the one given, the one to resume, or a new one in runs/."""
    from fedloom.experiment.run import settle

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


def _check_picture(plot: Path | None) -> None:
    """Check the file name of a figure before any work."""
    if plot is not None and plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot must end in .png, .svg or .pdf, not {plot}")
    if plot is not None and not plot.parent.is_dir():
        raise ConfigError(f"--plot: the folder {plot.parent} does not exist")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)
