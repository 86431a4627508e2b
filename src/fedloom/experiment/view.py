"""A run at one moment, as its `live.json` has it, and whether that run still lives."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.core.errors import DataError

FILE = "live.json"
QUIET = 60.0
"""Seconds without news after which a run on another machine shows no sign of life. A round may take longer."""
CLOCK = 60.0
"""Seconds by which the machine's clock may have been set since a process began."""


class _Shown(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Member(_Shown):
    """A party.

    Attributes:
        up: whether it can be reached.
        accuracy: its own at the last evaluation, if it has one.
        sent, received: bytes of tensor data.
    """

    name: str
    up: bool = True
    accuracy: float | None = None
    sent: int = 0
    received: int = 0


class RecentFailure(_Shown):
    """A call without a usable reply. Rounds are counted from 1."""

    round: int
    party: str
    kind: str
    reason: str


class Process(_Shown):
    """Who runs it: a hash of the machine's name, the process's number, and when the machine had it begin."""

    host: str
    id: int = Field(gt=0, lt=1 << 31)
    born: float


class View(_Shown):
    """A run at one moment.

    Attributes:
        state: of these words; who is killed has no time to change it, see `signs`.
        words: why it failed, or what it was stopped at.
        round: rounds done, of `rounds`.
        started, updated, ends: Unix times; of this piece of a run that was resumed. `ends` is a guess.
        pace: seconds a round.
        measure: the accuracy that counts for the method.
        accuracy: its mean over the parties at the last evaluation.
        chance: the same of always answering the most frequent class.
        points: (round, accuracy), at most some 200, evenly spaced ones and the last.
        parties: the home first, if it is a party; at most a thousand, those that are down in any case.
        up, of: how many parties can be reached, of how many.
        bytes: of tensor data: `up` to the home, `down` from it, and `across` between the others.
        failures: calls without a usable reply; `mishaps` are the last of them.
        engine: engine, workers and device, in a few words.
    """

    state: Literal["running", "stopped", "finished", "failed"] = "running"
    words: str = ""
    name: str
    method: str
    dataset: str
    seed: int
    round: int
    rounds: int
    started: float
    updated: float
    pace: float | None = None
    ends: float | None = None
    measure: str
    accuracy: float | None = None
    chance: float | None = None
    points: list[tuple[int, float]] = []
    parties: list[Member] = []
    up: int = 0
    of: int = 0
    bytes: dict[str, int] = {}
    failures: int = 0
    mishaps: list[RecentFailure] = []
    engine: str = ""
    process: Process


def read(folder: Path) -> View:
    """What a run's folder shows.

    Raises:
        DataError: it shows nothing, or not what a run writes.
    """
    path = folder / FILE
    try:
        return View.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {FILE}, which a run writes from its start on; name the folder of a run or comparison"
        ) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    except ValidationError as error:
        raise DataError(f"{path} is not as a run writes it: {error.errors()[0]['msg']}; repeat the run") from None


def signs(view: View, now: float) -> tuple[bool, float | None]:
    """Whether a run that should be under way is known to be gone, as its process is; and the seconds for which it has
    shown no sign of life, or None if it does."""
    if view.state != "running":
        return False, None
    quiet, there = max(0.0, now - view.updated), alive(view.process)
    if there is None:
        return False, quiet if quiet > max(QUIET, 3 * (view.pace or 0.0)) else None
    return not there, None if there else quiet


def alive(process: Process) -> bool | None:
    """Whether a run's process is still there; None if it is one of another machine."""
    if process.host != _host():
        return None
    born = _born(process.id)
    return born is not None and abs(born - process.born) < CLOCK


def own_process() -> Process:
    """This one."""
    return Process(host=_host(), id=os.getpid(), born=_born(os.getpid()) or 0.0)


def _host() -> str:
    """Tells this machine, and a container on it that numbers processes of its own, from others without naming it."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:16]


def _born(process: int) -> float | None:
    """When a process of this machine began, as a Unix time, which tells it from a later one of the same number; None if
    there is none."""
    try:
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else found.create_time()
    except psutil.NoSuchProcess:
        return None
