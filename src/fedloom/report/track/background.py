"""Upload to trackers in a separate process, so that a run never waits for them and its numbers do
not change.

The process stops at the end of its standard input, hence also when the run's process is killed.
"""

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
"""Maximum seconds to wait for the upload at the end of a run."""


@contextlib.contextmanager
def tracking(folder: Path, names: Sequence[str]) -> Iterator[None]:
    """Send everything that the runs in a folder save to trackers while the context is open.

    Raises:
        ConfigError: a tracker is unknown or not installed.
    """
    names = check(names)
    if not names:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "fedloom.report.track.background", str(folder), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        process_group=0,  # Ctrl-C must reach the run only
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
                "%s: upload incomplete; it continues in the background. To make sure, run: "
                "fedloom track %s --to %s",
                *(", ".join(names), folder, " --to ".join(names)),
            )


def main(folder: str, *names: str) -> None:
    """Follow a folder until the end of standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level="WARNING", format="%(levelname)-8s %(message)s")
    listener = threading.Thread(target=sys.stdin.read, daemon=True)
    listener.start()
    follow(Path(folder), names, lambda: not listener.is_alive())


if __name__ == "__main__":
    main(*sys.argv[1:])
