"""What a run writes down, and the files of its folder.

config.toml       the resolved config: `fedloom run config.toml` repeats the run
environment.json  versions and machine
partition.json    who holds how many rows of which class, and which network
metrics.csv       one row per round, stage, party and measure
mixing.csv        whose models each party mixed, by weight, at the rounds that were evaluated; if the parties note it
ledger.csv        one row per round, direction and kind of message
failures.csv      one row per call that gave no usable reply
trouble.log       the parties' own tracebacks; nobody else is shown them
checkpoints/      the last two
live.json         how far it is, while it goes on: see `view`
result.json       the summary
report.html       the same for people
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.core import ledger as ledgers
from fedloom.core.federation import CallFailure, Federation
from fedloom.experiment.checkpoint import write_atomically

METRICS = ("round", "iteration", "stage", "party", "measure", "value")
FAILURES = ("round", "party", "kind", "reason")
MIXING = ("round", "party", "weights")


@dataclass
class Record:
    """The metrics, times and failures of a run so far.

    Attributes:
        metrics: rows under METRICS; `party` is empty for a measure of the whole federation.
        seconds: wall seconds by phase, over all the pieces of a run that was resumed.
        mixing: rows under MIXING; weights are written as `0:0.25 4:0.5`, by the number of the model's owner.
    """

    metrics: list[list[Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    mixing: list[list[Any]] = field(default_factory=list)

    def measure(self, round: int, iteration: int, stage: str, measure: str, value: float, party: str = "") -> None:
        """Add one row."""
        self.metrics.append([round, iteration, stage, party, measure, float(value)])

    def mix(self, round: int, party: str, weights: Sequence[float]) -> None:
        """Add the weights (m,) with which a party mixed everybody's models; those of 0 are left out."""
        taken = " ".join(f"{owner}:{weight:.6g}" for owner, weight in enumerate(weights) if weight != 0)
        self.mixing.append([round, party, taken])

    def spend(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def state(self, fed: Federation) -> dict[str, Any]:
        """Everything, for a checkpoint."""
        failures = [[t.round, t.party, t.kind, t.reason, t.trace] for t in fed.failures]
        return {
            "metrics": self.metrics,
            "seconds": self.seconds,
            "mixing": self.mixing,
            "ledger": fed.ledger.state(),
            "failures": failures,
        }

    def load(self, state: dict[str, Any], fed: Federation) -> None:
        """Begin from what `state()` gave."""
        self.metrics, self.seconds, self.mixing = state["metrics"], state["seconds"], state["mixing"]
        fed.ledger.load(state["ledger"])
        fed.failures[:] = [CallFailure(*row) for row in state["failures"]]

    def write(self, folder: Path, fed: Federation) -> None:
        """Write the tables, each whole."""
        write_csv(folder / "metrics.csv", METRICS, self.metrics)
        if self.mixing:
            write_csv(folder / "mixing.csv", MIXING, self.mixing)
        write_csv(folder / "ledger.csv", ledgers.COLUMNS, fed.ledger.state()["entries"])
        rows = [[t.round, t.party, t.kind, t.reason] for t in fed.failures]
        write_csv(folder / "failures.csv", FAILURES, rows)
        traces = [f"round {t.round}, {t.party}, {t.kind}: {t.reason}\n{t.trace}\n" for t in fed.failures if t.trace]
        if traces:
            write_atomically(folder / "trouble.log", "\n".join(traces).encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """One table, atomically. Floats keep every digit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def write_json(path: Path, value: Any) -> None:
    """One JSON file, atomically."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def environment() -> dict[str, Any]:
    """What the numbers may depend on: versions and machine, no names of users or folders."""
    import numpy
    import torch

    return {
        "fedloom": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(a).name if os.path.isabs(a) else a for a in sys.argv),
    }
