"""`fedloom watch`: a run in progress, in the terminal."""

from pathlib import Path
from time import sleep, time

from rich.console import Console
from rich.live import Live

from fedloom.report.watch.screen import draw, line
from fedloom.report.watch.snapshot import Snapshot, newest, take

EVERY = 0.5
"""Seconds between two updates."""


def watch(folder: Path | None, once: bool, as_json: bool, out: Console) -> int:
    """Show a run or comparison until it ends, and return the exit status: 0 if it is finished or
    still running.

    Args:
        folder: its folder; None for the newest in runs/.
        once, as_json: show the current state, as text or JSON, and return.
        out: the terminal.

    Raises:
        DataError: there is no run to show.
    """
    folder = newest(Path("runs")) if folder is None else folder
    if as_json:
        out.file.write((snapshot := take(folder, time())).model_dump_json() + "\n")
        return _status(snapshot)
    if once:
        out.print(draw(snapshot := take(folder, time()), out, None))
        return _status(snapshot)
    try:
        snapshot = _follow(folder, out)
    except KeyboardInterrupt:
        out.print("Stopped watching. The run continues.")
        return 0
    return _status(snapshot)


def _status(snapshot: Snapshot) -> int:
    return 0 if snapshot.state in ("finished", "running", "quiet") else 1


def _follow(folder: Path, out: Console) -> Snapshot:
    """Show a run until it ends: in place in a terminal, one line per observed round in a log."""
    snapshot = take(folder, time())
    if not out.is_terminal:
        seen = None
        while not snapshot.over:
            if seen != (seen := (snapshot.run.name, snapshot.run.seed, snapshot.run.round)):
                out.print(line(snapshot), markup=False, soft_wrap=True)
            sleep(EVERY)
            snapshot = take(folder, time())
        out.print(draw(snapshot, out, None))
        return snapshot
    with Live(console=out, auto_refresh=False) as screen:
        while True:
            screen.update(
                draw(snapshot, out, None if snapshot.over else out.height - 1), refresh=True
            )
            if snapshot.over:
                return snapshot
            sleep(EVERY)
            snapshot = take(folder, time())
