"""`fedloom watch`: a run under way, in the terminal or as a live page."""

from __future__ import annotations

from pathlib import Path
from time import sleep, time

from rich.console import Console
from rich.live import Live

from fedloom.core.errors import ConfigError
from fedloom.report.watch.screen import draw, line
from fedloom.report.watch.sight import Sight, look, newest

EVERY = 0.5
"""Seconds between two looks."""


def watch(folder: Path | None, once: bool, as_json: bool, page: bool, port: int, out: Console) -> int:
    """Show a run or comparison until it ends, and return the exit status: 0 if it is finished, or still going on.

    Args:
        folder: its folder; None for the newest in runs/.
        once, as_json: show it as it is now, and stop.
        page: serve a live page instead, until Ctrl-C.
        port: of the page; 0 for a free one.
        out: the terminal.

    Raises:
        ConfigError: options that do not go together, or a port that is taken.
        DataError: there is no run to see.
    """
    if page and (once or as_json):
        raise ConfigError("--page shows a run until Ctrl-C; take either it, or --once and --json")
    folder = newest(Path("runs")) if folder is None else folder
    if as_json:
        out.file.write((sight := look(folder, time())).model_dump_json() + "\n")
        return _status(sight)
    if once:
        out.print(draw(sight := look(folder, time()), out, None))
        return _status(sight)
    try:
        if page:
            from fedloom.report.watch.page import serve

            look(folder, time())  # what is wrong with it is told here
            serve(folder, port, lambda address: out.print(f"page  {address}  (Ctrl-C ends it, not the run)"))
            return 0
        sight = _follow(folder, out)
    except KeyboardInterrupt:
        out.print("watching no more; the run goes on" if not page else "the page is closed")
        return 0
    return _status(sight)


def _status(sight: Sight) -> int:
    return 0 if sight.state in ("finished", "running", "quiet") else 1


def _follow(folder: Path, out: Console) -> Sight:
    """Show it until it ends: in place in a terminal, a line for each round that is seen in a log."""
    sight = look(folder, time())
    if not out.is_terminal:
        seen = None
        while not sight.over:
            if seen != (seen := (sight.run.name, sight.run.seed, sight.run.round)):
                out.print(line(sight), markup=False, soft_wrap=True)
            sleep(EVERY)
            sight = look(folder, time())
        out.print(draw(sight, out, None))
        return sight
    with Live(console=out, auto_refresh=False) as screen:
        while True:
            screen.update(draw(sight, out, None if sight.over else out.height - 1), refresh=True)
            if sight.over:
                return sight
            sleep(EVERY)
            sight = look(folder, time())
