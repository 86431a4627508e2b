"""What the engine `auto` measured on this machine, kept so that equal runs batch the same parties.

A measurement is made once per machine, and is kept in the cache for it. Each run keeps those that
it used in `batching.json`, from which a resumed run takes them, also on another machine.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fedloom.core.errors import CheckpointError
from fedloom.core.party import Party
from fedloom.core.paths import cache_folder, locked, write_atomically
from fedloom.engines import probe
from fedloom.experiment.run.record import processor


class Measurements:
    """Says how many times as fast parties train batched, as `BatchedEngine` asks.

    Args:
        folder: the run's folder; None for a run without one.
        resume: whether measurements of the folder hold.

    Raises:
        CheckpointError: the folder's file of measurements is damaged.
    """

    def __init__(self, folder: Path | None, *, resume: bool) -> None:
        self._file = folder and folder / "batching.json"
        self._used = _read(self._file) if resume and self._file and self._file.exists() else {}

    def __call__(self, party: Party[Any], count: int) -> float:
        """The speed-up of `count` parties like this one; above 1 if they are faster batched."""
        key = _key(party, count)
        if key not in self._used:
            self._used[key] = _on_this_machine(key, party, count)
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self._file, json.dumps(self._used, indent=1).encode())
        return self._used[key]


def _read(file: Path) -> dict[str, float]:
    with suppress(OSError, ValueError):
        values = json.loads(file.read_bytes())
        if isinstance(values, dict) and all(isinstance(value, float) for value in values.values()):
            return values
    raise CheckpointError(
        f"{file} is damaged: remove it to measure anew, which may change a run's last digits"
    )


def _key(party: Party[Any], count: int) -> str:
    """What a speed-up depends on, beside the machine: network, optimizer, shape of a row, number of
    parties.
    """
    shape = tuple(party.data.pool.shape[1:])
    network = [
        (name, type(m).__qualname__, m.extra_repr()) for name, m in party.net.module.named_modules()
    ]
    text = json.dumps([network, repr(party.net.optimizer), shape])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{probe.size(count)}"


def _on_this_machine(key: str, party: Party[Any], count: int) -> float:
    """The speed-up from the cache; measured if it is not there. Processes that ask at once wait for
    one another.
    """
    machine = hashlib.sha256(f"{processor()} {torch.__version__}".encode()).hexdigest()[:16]
    file = cache_folder("batching") / f"{machine}-{key}.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_suffix(".lock"), wait=True):
            with suppress(OSError, ValueError):
                if isinstance(kept := json.loads(file.read_bytes()), float):
                    return kept
            found = probe.speedup(party, count)
            write_atomically(file, json.dumps(found).encode())
            return found
    except OSError:  # the cache cannot be written: another run of this config may choose otherwise
        return probe.speedup(party, count)
