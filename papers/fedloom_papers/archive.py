"""Archive the numbers of finished runs as small JSON lines, from which pages are rebuilt and which
can be merged.

ARCHIVE/SCALE/NAME.jsonl    one line per run of the table or figure NAME: cell, seed, metrics and provenance
"""  # noqa: E501

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.core.errors import DataError
from fedloom.experiment.config.run import RunConfig
from fedloom.report.metrics import RunMetric, value_of
from fedloom.report.read import Run
from fedloom.support.paths import write_atomically
from fedloom_papers.keys import archive_key
from fedloom_papers.spec import Reproduction, Scale

ENVIRONMENT = (
    "fedloom",
    "commit",
    "python",
    "torch",
    "numpy",
    "platform",
    "processor",
    "cores",
    "cuda",
    "started",
)
"""Keys of a run's environment that are archived."""


class ArchivedRun(BaseModel):
    """A finished run.

    Attributes:
        digest: of its settings and files: see `archive_key`.
        config: the same with seed 0; equal for all seeds of a cell.
        cell: the first cell that used it, for readers.
        test_sha256: fingerprint of the test rows.
        bytes: tensor data sent up, down and across.
        metrics: raw values by name.
        chances: accuracy of always predicting the most frequent class, by accuracy.
        environment: versions, commit, machine and time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern="^[0-9a-f]{16}$")
    config: str = Field(pattern="^[0-9a-f]{16}$")
    cell: str
    seed: int
    dataset: str
    test_sha256: str | None
    state_sha256: str | None
    seconds: float = Field(ge=0, allow_inf_nan=False)
    bytes: dict[str, float]
    metrics: dict[str, float]
    chances: dict[str, float]
    environment: dict[str, str | int | None]

    @property
    def line(self) -> str:
        """Strict JSON: infinite numbers are strings."""
        values = self.model_dump()
        values["metrics"] = {
            name: value if math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        return json.dumps(values, ensure_ascii=False, allow_nan=False, sort_keys=True)


def record_of(
    run: Run, config: RunConfig, key: str, cell: str, reproduction: Reproduction
) -> ArchivedRun:
    """The record of a finished run, with all metrics that the table and its claims need.

    Args:
        key: the run's digest.
        cell: the cell that uses it.
    """
    s = run.summary
    needed = _needed(reproduction) | {*map(RunMetric, (*s.accuracies, *s.scores))}
    # a row that has none is complete without
    needed |= {*map(RunMetric.parse, reproduction.diagnoses)}
    known = {str(metric): value_of(run, metric) for metric in sorted(needed, key=str)}
    chances = {str(metric): s.chance_of(metric) for metric in s.accuracies}
    return ArchivedRun(
        digest=key,
        config=archive_key(config.model_copy(update={"seed": 0})),
        cell=cell,
        seed=s.seed,
        dataset=s.dataset,
        test_sha256=s.test_sha256,
        state_sha256=s.state_sha256,
        seconds=s.seconds.get("total", 0.0),
        bytes={
            direction: float(getattr(s.bytes, direction)) for direction in ("up", "down", "across")
        },
        metrics={name: value for name, value in known.items() if value is not None},
        chances={name: chance for name, chance in chances.items() if chance is not None},
        environment={name: run.environment.get(name) for name in ENVIRONMENT},
    )


def _needed(reproduction: Reproduction) -> set[RunMetric]:
    """The metrics that a table and its claims need."""
    texts = {reproduction.metric, *(claim.metric for claim in reproduction.claims if claim.metric)}
    texts |= {metric for one in reproduction.multiverse for metric in one.metrics.values()}
    named = {RunMetric.parse(text) for text in texts}
    return named | {metric.drawn for metric in named}


class Archive:
    """The archive in a folder.

    Args:
        folder: it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, scale: Scale, name: str) -> dict[str, ArchivedRun]:
        """The records of a table or figure by digest.

        Raises:
            DataError: a line is damaged.
        """
        return _read(self.folder / scale / f"{name}.jsonl")

    def usable(self, scale: Scale, name: str, reproduction: Reproduction) -> dict[str, ArchivedRun]:
        """The records of a table or figure by digest, and those of others that have all metrics
        that it needs.

        Raises:
            DataError: a line is damaged.
        """
        needed, found = {*map(str, _needed(reproduction))}, dict[str, ArchivedRun]()
        for path in sorted((self.folder / scale).glob("*.jsonl")):
            found |= {key: one for key, one in _read(path).items() if one.metrics.keys() >= needed}
        return found | self.read(scale, name)

    def add(self, scale: Scale, name: str, records: Iterable[ArchivedRun]) -> int:
        """Add the records of runs that are not archived yet; returns their number."""
        known = self.read(scale, name)
        new = {one.digest: one for one in records if one.digest not in known}
        if new:
            path = self.folder / scale / f"{name}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = sorted((known | new).values(), key=lambda one: (one.cell, one.seed, one.digest))
            write_atomically(path, "".join(f"{one.line}\n" for one in lines).encode())
        return len(new)

    def merge(self, other: Path) -> tuple[int, list[str]]:
        """Add the records of another archive.

        Returns:
            The number of added records, and the cells whose numbers differ from ours; ours are
            kept.

        Raises:
            DataError: the folder holds no archive, or a line is damaged.
        """
        files = sorted(other.glob("*/*.jsonl"))
        if not files:
            raise DataError(f"{other} holds no archive. Name a folder with SCALE/NAME.jsonl.")
        added, differing = 0, []
        for path, theirs in [(path, _read(path)) for path in files]:
            scale: Any = path.parent.name
            if scale not in ("small", "paper"):
                raise DataError(
                    f"{path}: unknown scale {scale!r}. Valid scales are small and paper."
                )
            ours = self.read(scale, path.stem)
            same = [(ours[key], one) for key, one in theirs.items() if key in ours]
            differing += [
                f"{path.stem}: {a.cell}, seed {a.seed}" for a, b in same if a.metrics != b.metrics
            ]
            added += self.add(scale, path.stem, theirs.values())
        return added, differing


def _read(path: Path) -> dict[str, ArchivedRun]:
    try:
        file = path.stat()
    except FileNotFoundError:
        return {}
    return _records(path, file.st_mtime_ns, file.st_size)


@lru_cache(maxsize=128)
def _records(path: Path, changed: int, size: int) -> dict[str, ArchivedRun]:
    """The records of a file, which is read again when it has changed."""
    found: dict[str, ArchivedRun] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {type(error).__name__}") from None
    for number, line in enumerate(lines, 1):
        try:
            record = ArchivedRun.model_validate_json(line)
        except ValidationError:
            raise DataError(
                f"{path}, line {number} is not a record of a run of this version. "
                "Restore the file, or delete it to run its cells again."
            ) from None
        found[record.digest] = record
    return found
