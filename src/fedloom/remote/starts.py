"""How nodes recognize a run and the newest start of it."""

import hashlib
import secrets
from pathlib import Path
from time import time_ns
from typing import Any, Final

from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.node_party import config_sha256
from fedloom.support.paths import write_atomically

START: Final = ".start"
"""In a run's folder: the number of its newest start."""


def check_node_count(parties: int, nodes: int, colocated: int) -> None:
    """Refuse a number of nodes that differs from the number of parties not colocated with the
    coordinator.

    Raises:
        ConfigError: the numbers differ; the message names the setting to change.
    """
    if parties != nodes:
        raise ConfigError(
            f"the run has {parties} parties at nodes, but the federation has {nodes} nodes: "
            f"set data.clients to {nodes + colocated}, or list {parties} nodes"
        )


def run_id(run: RunConfig, cfg: Any, own: str, folder: Path | None) -> str:
    """The run's id at nodes: the same if it is resumed in its folder; without a folder, a new one
    each time.
    """
    place = str(folder.absolute()) if folder is not None else secrets.token_hex(16)
    return hashlib.sha256(f"{own}\n{place}\n{config_sha256(run, cfg)}".encode()).hexdigest()[:32]


def next_start(folder: Path | None) -> int:
    """A number for this start of a run: the time in nanoseconds, but above the previous start's in
    any case.
    """
    before = folder / START if folder is not None else None
    return max(
        time_ns(), int(before.read_text()) + 1 if before is not None and before.exists() else 0
    )


def keep_start(folder: Path, start: int) -> None:
    """Save the number of a start, once nodes take part in it: an earlier failure
    leaves no folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / START, str(start).encode())
