"""The application: its commands, and the entry point, which prints errors without a traceback.

Commands import what they need when they run, so that `--help` is quick.
"""

import contextlib
import io
import os
import re
import sys
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from fedloom._version import __version__
from fedloom.cli import catalog, check, data, deploy, pretrain, remote, reports, runs, stats, sweep, trial
from fedloom.cli.listing import NO_PAPERS, listing
from fedloom.cli.options import err
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.core.extensions import commands
from fedloom.core.renamed import renamed

app = typer.Typer(
    help="Federated learning beyond weight averaging: hidden models, peers, columns, private pretrained models.",
    epilog="Begin with: fedloom run quickstart",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Options before the command."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


for command in (
    *(runs.run, runs.compare, trial.trial, reports.watch, reports.report, catalog.list_, data.data, stats.stats),
    *(data.align, deploy.export, deploy.embed, deploy.predict, pretrain.pretrain, catalog.copy, check.check),
    *(remote.certs, remote.node, sweep.sweep, reports.track),
):
    app.command(command.__name__.rstrip("_"))(command)
ADDED = commands()
for name, added in ADDED.items():
    app.command(name)(added)
app.add_typer(remote.audit, name="audit")

if "reproduce" not in ADDED:

    @app.command("reproduce", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def reproduce() -> None:
        """Say which package has this command."""
        raise ConfigError(NO_PAPERS)


def main() -> NoReturn:
    """The entry point. Errors of fedloom are printed without a traceback."""
    import logging

    from rich.logging import RichHandler

    from fedloom.remote.node.logs import TextFormatter

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # such as cp1252, which lacks signs of tables and of mathematics
    if err.is_terminal:
        handler = RichHandler(console=err, show_time=False, show_path=False)
        logging.basicConfig(level="WARNING", format="%(message)s", handlers=[handler])
    else:  # one line per message: a file has no width
        plain = logging.StreamHandler()
        plain.setFormatter(TextFormatter("%(levelname)-8s %(message)s"))
        logging.basicConfig(level="WARNING", handlers=[plain])
    logging.getLogger("fedloom.pretraining").setLevel("INFO")  # pretraining may take long
    sys.path.insert(0, "")  # for the user's networks in the working folder: models.pool=['mine:network']
    if os.environ.get("_FEDLOOM_COMPLETE") == "complete_bash":
        _complete_in_bash()
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
        option = getattr(error, "option_name", "")
        if sentence := renamed(option) or _as_setting(option):
            err.print(f"[bold red]error[/]  {escape(sentence)}", soft_wrap=True)
        else:
            show()
        code = getattr(error, "exit_code", 1)
    sys.exit(code or 0)


def _complete_in_bash() -> NoReturn:
    """Complete a word for Bash, which takes `data.name=wi` for three words and inserts only what follows the "="."""
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
    typer.echo(re.sub(r"^.*?=(?=.)", "", shown, flags=re.M) if whole[-1] != words[at] else shown, nl=False)
    sys.exit()


def _as_setting(option: str) -> str:
    """The error on an unknown option that is the name of a setting."""
    name = option.removeprefix("--").replace("-", "_")
    known = listing()
    keys = [key for key in known["settings"] if key.rpartition(".")[2] == name]
    keys += [f"params.{name}"] * any(
        row["name"] == f"params.{name}" for rows in known["params"].values() for row in rows
    )
    return f"no option {option}: write {' or '.join(f'-s {key}=VALUE' for key in keys)}" if name and keys else ""
