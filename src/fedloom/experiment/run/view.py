"""The schema of `live.json`, and whether its run is still alive."""

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
SILENCE = 60.0
"""Seconds without an update after which a run on another machine counts as silent, unless its
rounds are slow.
"""
CLOCK_TOLERANCE = 60.0
"""Tolerance in seconds for changes of the machine's clock since a process started."""


class _LiveSchema(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class PartyStatus(_LiveSchema):
    """A party.

    Attributes:
        up: whether it can be reached.
        accuracy: at the last evaluation, if any.
        sent, received: bytes of tensor data.
    """

    name: str
    up: bool = True
    accuracy: float | None = None
    sent: int = 0
    received: int = 0


class RecentFailure(_LiveSchema):
    """A call without a usable reply. Rounds are counted from 1."""

    round: int
    party: str
    kind: str
    reason: str


class Process(_LiveSchema):
    """The process of a run: a hash of the machine's name, its id, and its start as a Unix time."""

    host: str
    id: int = Field(gt=0, lt=1 << 31)
    started_at: float


class View(_LiveSchema):
    """The progress of a run.

    Attributes:
        state: a killed run stays "running", see `liveness`.
        reason: why it failed or stopped.
        round: completed rounds, of `rounds`.
        started, updated, ends: Unix times, since the last resume; `ends` is an estimate.
        pace: seconds per round.
        metric: the main metric.
        accuracy: its mean over the parties at the last evaluation.
        chance: its chance level.
        points: (round, accuracy), at most about 200, evenly spaced, with the last.
        parties: the server first; at most 1,000, preferring unreachable ones.
        up, of: number of reachable parties, and of all.
        bytes: of tensor data: `up` to the coordinator, `down` from it, and `across` between the
            others.
        failures: calls without a usable reply; `recent_failures` are the last of them.
        engine: engine, workers and device, as text.
    """

    state: Literal["running", "stopped", "finished", "failed"] = "running"
    reason: str = ""
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
    metric: str
    accuracy: float | None = None
    chance: float | None = None
    points: list[tuple[int, float]] = []
    parties: list[PartyStatus] = []
    up: int = 0
    of: int = 0
    bytes: dict[str, int] = {}
    failures: int = 0
    recent_failures: list[RecentFailure] = []
    engine: str = ""
    process: Process


def read(folder: Path) -> View:
    """Read the `live.json` of a run folder.

    Raises:
        DataError: it is missing, unreadable or invalid.
    """
    path = folder / FILE
    try:
        return View.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"{folder} has no {FILE}: name the folder of a run or comparison") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise DataError(f"{path} is invalid: {error.errors()[0]['msg']}; repeat the run") from None


def liveness(view: View, now: float) -> tuple[bool, float | None]:
    """Whether the process of a running run is gone; and the seconds since its last update, or None
    if it is alive.
    """
    if view.state != "running":
        return False, None
    quiet, running = max(0.0, now - view.updated), alive(view.process)
    if running is None:
        return False, quiet if quiet > max(SILENCE, 3 * (view.pace or 0.0)) else None
    return not running, None if running else quiet


def alive(process: Process) -> bool | None:
    """Whether a run's process still exists; None if it is on another machine."""
    if process.host != _host():
        return None
    started_at = _start_time(process.id)
    return started_at is not None and abs(started_at - process.started_at) < CLOCK_TOLERANCE


def own_process() -> Process:
    """The current process."""
    return Process(host=_host(), id=os.getpid(), started_at=_start_time(os.getpid()) or 0.0)


def _host() -> str:
    """A hash that identifies this machine, or container with its own process ids."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:16]


def _start_time(process: int) -> float | None:
    """Start of a process as a Unix time, as ids are reused; None if it does not exist."""
    try:
        found = psutil.Process(process)
        return None if found.status() == psutil.STATUS_ZOMBIE else found.create_time()
    except psutil.NoSuchProcess:
        return None
