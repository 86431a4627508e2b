"""A method page for tests: it writes down each round, and waits in one for as long as a file says
so.
"""

from __future__ import annotations

from pathlib import Path

PAGE = """
import os, signal, time
from dataclasses import replace
from pathlib import Path
from fedloom.methods import find

LOCAL, HERE = find("local"), Path(__file__).parent

def round(fed, server, clients, cfg, t):
    with (HERE / "rounds").open("a") as file:
        file.write(f"{fed.seed} {t}\\n")
    while (HERE / f"hold-{fed.seed}-{t}").exists():
        time.sleep(0.01)
    yield from LOCAL.round(fed, server, clients, cfg, t)

def bad_round(fed, server, clients, cfg, t):
    if fed.seed == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if fed.seed == 2:
        raise MemoryError
    raise RuntimeError("row 17 is 0.25")
    yield

METHODS = (replace(LOCAL, name="counted", round=round), replace(LOCAL, name="bad", round=bad_round))
"""


def write(folder: Path) -> Path:
    """The page in a folder."""
    page = folder / "mine.py"
    page.write_text(PAGE)
    return page


def rounds(page: Path) -> list[str]:
    """Seed and round of each that was begun, in order."""
    file = page.with_name("rounds")
    return file.read_text().splitlines() if file.exists() else []


def hold(page: Path, seed: int, t: int) -> Path:
    """Let the run of a seed wait in round t until the file is removed."""
    file = page.with_name(f"hold-{seed}-{t}")
    file.touch()
    return file
