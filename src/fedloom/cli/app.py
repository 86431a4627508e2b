"""The application: its commands, and the entry point, which prints errors without a traceback.

Commands import what they need when they run, so that `--help` is quick.
"""

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from fedloom._version import __version__
from fedloom.cli import (
    catalog,
    check,
    data,
    deploy,
    pretrain,
    remote,
    reports,
    runs,
    stats,
    sweep,
    trial,
)
from fedloom.cli.help import Commands, OneCommand, paragraphs
from fedloom.cli.listing import NO_PAPERS, listing
from fedloom.cli.options import err
from fedloom.core.errors import ConfigError, FedloomError, did_you_mean
from fedloom.support.extensions import commands

app = typer.Typer(
    cls=Commands,
    help="Federated learning beyond weight averaging: hidden models, peers, columns, private "
    "pretrained models.",
    epilog="Begin with: fedloom run quickstart",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """Options before the command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Experiments": (
        runs.run,
        runs.compare,
        sweep.sweep,
        reports.watch,
        reports.report,
        reports.track,
    ),
    "Your own data": (
        data.data,
        stats.stats,
        trial.trial,
        data.align,
        deploy.export,
        deploy.predict,
        deploy.embed,
    ),
    "Methods and models": (catalog.list_, catalog.copy, check.check, pretrain.pretrain),
    "Between organizations": (remote.certs, remote.node),
}
"""The commands by their group in the help."""
for panel, group in PANELS.items():
    for command in group:
        name = command.__name__.rstrip("_")
        app.command(name, cls=OneCommand, help=paragraphs(command), rich_help_panel=panel)(command)
ADDED = commands()
for name, added in ADDED.items():
    app.command(name, cls=OneCommand, help=paragraphs(added), rich_help_panel="Experiments")(added)
app.add_typer(remote.audit, name="audit", rich_help_panel="Between organizations")


@app.command("help", hidden=True)
def help_(context: typer.Context, command: Annotated[str | None, typer.Argument()] = None) -> None:
    """Show the help, or that of a command."""
    assert context.parent is not None
    group = context.parent.command
    assert isinstance(group, TyperGroup)
    found = group if command is None else group.get_command(context.parent, command)
    if found is None:
        raise ConfigError(
            f"there is no command {command!r}.{did_you_mean(str(command), group.commands)}"
        )
    parent = (
        context.parent
        if command is None
        else found.context_class(found, info_name=command, parent=context.parent)
    )
    typer.echo(found.get_help(parent))


@app.command("version", hidden=True)
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if "reproduce" not in ADDED:

    @app.command(
        "reproduce",
        hidden=True,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def reproduce() -> None:
        """Say which package has this command."""
        raise ConfigError(NO_PAPERS)


def main() -> NoReturn:
    """The entry point. Errors of fedloom are printed without a traceback."""
    import logging

    from rich.logging import RichHandler

    from fedloom.support.log_lines import TextFormatter

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # such as cp1252, which lacks signs of tables and of mathematics
            stream.reconfigure(errors="replace")
    if err.is_terminal:
        handler = RichHandler(console=err, show_time=False, show_path=False)
        logging.basicConfig(level="WARNING", format="%(message)s", handlers=[handler])
    else:  # one line per message: a file has no width
        plain = logging.StreamHandler()
        plain.setFormatter(TextFormatter("%(levelname)-8s %(message)s"))
        logging.basicConfig(level="WARNING", handlers=[plain])
    logging.getLogger("fedloom.pretraining").setLevel("INFO")  # pretraining may take long
    # for the user's networks in the working folder: models.pool=['mine:network']
    sys.path.insert(0, "")
    if os.environ.get("_FEDLOOM_COMPLETE") == "complete_bash":
        _complete_in_bash()
    try:
        code = app(standalone_mode=False)
    except FedloomError as error:
        for line in str(error).splitlines():
            err.print(f"[bold red]error[/]  {escape(line)}", soft_wrap=True)
        code = 2
    except typer.Abort:
        err.print(
            "[bold red]error[/]  the question was not answered: run the command at a terminal"
        )
        code = 2
    except KeyboardInterrupt:
        err.print("stopped")
        code = 130
    except OSError as error:
        if error.strerror is None:
            raise
        at = f": {error.filename}" if error.filename else ""
        mend = MENDS.get(error.errno or 0, "name another file or folder")
        err.print(f"[bold red]error[/]  {escape(f'{error.strerror}{at}; {mend}')}", soft_wrap=True)
        code = 2
    except Exception as error:
        show = getattr(error, "show", None)  # of click: an invalid option, a missing argument
        if show is None:
            raise
        option = getattr(error, "option_name", "")
        if sentence := _as_setting(option) or _as_comparison(error) or _as_command(error):
            err.print(f"[bold red]error[/]  {escape(sentence)}", soft_wrap=True)
        else:
            show()
        code = getattr(error, "exit_code", 1)
    sys.exit(code or 0)


def _complete_in_bash() -> NoReturn:
    """Complete a word for Bash, which takes `data.name=wi` for three words and inserts only what
    follows the "=".
    """
    words, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    whole: list[str] = []
    for word in words[: at + 1]:
        if whole and (word == "=" or whole[-1].endswith("=")):
            whole[-1] += word
        else:
            whole.append(word)
    os.environ |= {"COMP_WORDS": "\n".join(whole), "COMP_CWORD": str(len(whole) - 1)}
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.suppress(SystemExit):
        app()
    shown = found.getvalue()
    typer.echo(
        re.sub(r"^.*?=(?=.)", "", shown, flags=re.M) if whole[-1] != words[at] else shown, nl=False
    )
    sys.exit()


def _as_comparison(error: Exception) -> str:
    """The error on several methods of fedloom run."""
    context, text = getattr(error, "ctx", None), getattr(error, "message", "")
    if context is None or context.info_name != "run" or "unexpected extra argument" not in text:
        return ""
    return (
        "fedloom run takes one method: to compare several, use fedloom compare, such as: fedloom "
        "compare fedal fedmd"
    )


def _as_command(error: Exception) -> str:
    """The error on an unknown command, which may be the name of a method or an experiment."""
    found = re.match(r"No such command '([^']+)'", getattr(error, "message", ""))
    if found is None:
        return ""
    name, known = found[1], listing()
    if any(row["name"] == name for kind in ("methods", "experiments") for row in known[kind]):
        return f"there is no command {name!r}: write fedloom run {name}"
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return f"there is no command {name!r}.{did_you_mean(name, group.commands)}"


MENDS = {
    errno.ENOSPC: "free some space and repeat the command, a run with --resume",
    errno.EDQUOT: "free some space and repeat the command, a run with --resume",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS),
        "name a file or folder that you may read and write",
    ),
}
"""Errors of the operating system -> how to mend them."""
RARE = ("pretrained", "topology", "faults", "churn", "columns")
"""Sections whose settings are named only if no other has one of that name."""
WORDS = {
    **dict.fromkeys(("data", "dataset"), "-s data.name=NAME, or the path of a file"),
    **dict.fromkeys(("gpu", "cuda"), "--device cuda"),
    **dict.fromkeys(("model", "models", "net", "network"), "-s models.pool=NAME"),
    **dict.fromkeys(("num_clients", "n_clients", "parties"), "-s data.clients=NUMBER"),
    **dict.fromkeys(("num_rounds", "global_rounds"), "--rounds NUMBER"),
    **dict.fromkeys(("learning_rate",), "-s params.lr=RATE"),
    **dict.fromkeys(("jobs", "n_jobs", "num_workers"), "--workers NUMBER"),
    **dict.fromkeys(("output", "output_dir"), "--out FOLDER"),
    **dict.fromkeys(("config",), "the file itself: fedloom run FILE.toml"),
}
"""Options of other programs -> what to write."""


def _as_setting(option: str) -> str:
    """The error on an unknown option that is the name of a setting."""
    name = option.removeprefix("--").replace("-", "_")
    known = listing()
    if name in WORDS:
        return f"no option {option}: write {WORDS[name]}"
    keys = [key for key in known["settings"] if key.rpartition(".")[2] == name]
    keys += [f"params.{name}"] * any(
        row["name"] == f"params.{name}" for rows in known["params"].values() for row in rows
    )
    keys = [key for key in keys if key.partition(".")[0] not in RARE] or keys
    if name == "alpha":
        keys = ["data.options.alpha", *keys]
    return (
        f"no option {option}: write {' or '.join(f'-s {key}=VALUE' for key in keys)}"
        if name and keys
        else ""
    )
