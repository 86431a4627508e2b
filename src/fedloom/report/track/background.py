"""Trackers in a process of their own beside a run: the run never waits for them, and they change no number.

The process ends when its standard input does, so when the run's process ends, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedloom.report.track.send import follow
from fedloom.report.track.trackers import check

WAIT = 60.0
"""Seconds that the end of a run waits at most until all is sent."""


@contextlib.contextmanager
def tracking(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Within it, what the runs of a folder save is sent to trackers.

    Raises:
        ConfigError: a tracker is unknown, or not installed.
    """
    names = check(names)
    if not names:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom.report.track.background", str(folder), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        process_group=0,  # a Ctrl-C is for the run
    )
    assert process.stdin
    try:
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            logging.getLogger("fedloom").warning(
                "%s: not all is sent yet; it continues in the background. To make sure: fedloom track %s --to %s",
                *(", ".join(names), folder, " --to ".join(names)),
            )


def main(folder: str, *names: str) -> None:
    """Follow a folder until the standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="WARNING", format="%(levelname)-8s %(message)s")
    listener = threading.Thread(target=sys.stdin.read, daemon=True)
    listener.start()
    follow(Path(folder), names, lambda: not listener.is_alive())


if __name__ == "__main__":
    main(*sys.argv[1:])
