"""The tables of a run, and the files of its folder.

config.toml       the resolved config: `fedloom run config.toml` repeats the run
environment.json  versions and machine
objects.json      the arrays, modules and methods of the script that started the run, if any: shapes and fingerprints
partition.json    the rows of each class and the network of each party
metrics.csv       one row per round, stage, party and metric
mixing.csv        mixing weights of each party at evaluated rounds, where the method notes them
ledger.csv        one row per round, direction and kind of message
failures.csv      one row per call without a usable reply; `why` is what a node said
tracebacks.log       tracebacks of parties, which no other file contains
checkpoints/      the last two
live.json         progress: see `view`
result.json       the summary
report.html       the summary as a page
"""  # noqa: E501

import csv
import io
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedloom._version import __version__
from fedloom.core import ledger as ledgers
from fedloom.core.errors import ConfigError
from fedloom.core.federation import CallFailure, Federation
from fedloom.support.paths import write_atomically

METRICS = ("round", "iteration", "stage", "party", "metric", "value")
FAILURES = ("round", "party", "kind", "reason", "why")
MIXING = ("round", "party", "weights")


@dataclass
class Record:
    """The metrics, times and mixing weights of a run so far.

    Attributes:
        metrics: rows under METRICS; `party` is "" for a metric of the whole federation.
        seconds: wall seconds by phase, including those before a resume.
        mixing: rows under MIXING; weights are written as `0:0.25 4:0.5`, by party number.
    """

    metrics: list[list[Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    mixing: list[list[Any]] = field(default_factory=list)

    def add_metric(
        self, round: int, iteration: int, stage: str, metric: str, value: float, party: str = ""
    ) -> None:
        """Add one row."""
        self.metrics.append([round, iteration, stage, party, metric, float(value)])

    def mix(self, round: int, party: str, weights: Sequence[float]) -> None:
        """Add a party's mixing weights (m,); zeros are omitted."""
        nonzero = " ".join(
            f"{owner}:{weight:.6g}" for owner, weight in enumerate(weights) if weight != 0
        )
        self.mixing.append([round, party, nonzero])

    def spend(self, phase: str, seconds: float) -> None:
        """Add to the time of a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def state(self, fed: Federation) -> dict[str, Any]:
        """The record, ledger and failures as JSON values, for a checkpoint."""
        failures = [[t.round, t.party, t.kind, t.reason, t.trace] for t in fed.failures]
        return {
            "metrics": self.metrics,
            "seconds": self.seconds,
            "mixing": self.mixing,
            "ledger": fed.ledger.state(),
            "failures": failures,
            "usable": sorted(fed.usable & {(t.party, t.kind) for t in fed.failures}),
        }

    def load(self, state: dict[str, Any], fed: Federation) -> None:
        """Restore the values of `state()`."""
        self.metrics = state["metrics"]
        self.seconds = state["seconds"]
        self.mixing = state["mixing"]
        fed.ledger.load(state["ledger"])
        fed.usable = set(map(tuple, state.get("usable", ())))
        fed.failures[:] = [CallFailure(*row) for row in state["failures"]]

    def write(self, folder: Path, fed: Federation) -> None:
        """Write all tables, each atomically."""
        write_csv(folder / "metrics.csv", METRICS, self.metrics)
        if self.mixing:
            write_csv(folder / "mixing.csv", MIXING, self.mixing)
        write_csv(folder / "ledger.csv", ledgers.COLUMNS, fed.ledger.state()["entries"])
        # a node's sentence, but no traceback
        whys = [t.trace if "\n" not in t.trace.strip() else "" for t in fed.failures]
        rows = [
            [t.round, t.party, t.kind, t.reason, why.strip()]
            for t, why in zip(fed.failures, whys, strict=True)
        ]
        write_csv(folder / "failures.csv", FAILURES, rows)
        traces = [
            f"round {t.round}, {t.party}, {t.kind}: {t.reason}\n{t.trace}\n"
            for t in fed.failures
            if t.trace
        ]
        if traces:
            write_atomically(folder / "tracebacks.log", "\n".join(traces).encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table atomically. Floats keep every digit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomically(path, text.getvalue().encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


@lru_cache
def _commit() -> str | None:
    """The commit of fedloom's source, with `+` if files were changed; None without a Git
    repository.
    """
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The processor's name if known, otherwise its architecture."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return platform.machine()


def environment() -> dict[str, Any]:
    """Versions and machine, without names of users or folders."""
    import numpy
    import torch

    return {
        "fedloom": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(a).name if os.path.isabs(a) else a for a in sys.argv),
    }


def refuse_extension(folder: Path, rounds: int) -> None:
    """Refuse more or fewer rounds for a finished run: its evaluations are spread over its rounds.

    Raises:
        ConfigError: the folder holds a finished run of another number of rounds.
    """
    file = folder / "result.json"
    done = json.loads(file.read_text(encoding="utf-8")).get("rounds") if file.is_file() else rounds
    if done != rounds:
        raise ConfigError(
            f"{folder} holds a finished run of {done} rounds, which cannot be changed to "
            f"{rounds}: start a run of {rounds} rounds in another folder (--out)"
        )
