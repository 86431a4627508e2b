"""What a node has let out about each cohort of people: one record for all runs, callers and
methods, on disk.

A number in it grows with each change. A second file elsewhere, the anchor, has the highest number
and is written before
the record: one that is older than the anchor was restored from a copy, and allows nothing until the
owner accepts that. The new record is on disk as a draft before the anchor is written: a node that
is killed in between continues with it.
The owner makes the anchor: a node that made it by itself would count as new where both files are
    lost.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedloom.core.errors import ConfigError, PrivacyBudgetSpent
from fedloom.protect.accountant import Releases
from fedloom.support.paths import write_atomically

FILE: Final = "budget.json"
NEXT: Final = "budget.next.json"
"""The draft of the next record, until the anchor has its number."""
OLDER: Final = ("privacy.json", "looks.json")
"""The records of earlier versions of fedloom."""


class SpentReleases(BaseModel):
    """Equal releases: see `Releases`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sigma: float = Field(gt=0, allow_inf_nan=False)
    rate: float = Field(gt=0, le=1)
    count: int = Field(ge=1)
    excess: float = Field(0.0, ge=0, allow_inf_nan=False)


class Spent(BaseModel):
    """What was let out about a cohort.

    Attributes:
        files: its files: device and inode, and SHA-256.
        releases: with differential privacy.
        looks: scores.
        ids: ids that coordinators have matched.
        answers: rows of a coordinator that were answered.
        introduced: the hash of the only settings of a trust introduction; "" for none yet.
        splits: hashes of the sets of test rows that were scored.
    """

    model_config = ConfigDict(extra="forbid")

    files: list[str] = []
    releases: list[SpentReleases] = []
    looks: int = Field(0, ge=0)
    ids: int = Field(0, ge=0)
    answers: int = Field(0, ge=0)
    introduced: str = ""
    splits: list[str] = []

    def all_releases(self) -> list[Releases]:
        """The releases for the accountant."""
        return [Releases(one.sigma, one.count, one.rate, one.excess) for one in self.releases]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")

    number: int = Field(ge=0)
    cohorts: dict[str, Spent]
    anchored: bool = False  # whether an anchor has its number


class Budget:
    """The record in a node's folder.

    Args:
        folder: of the node's state.
        anchor: a file elsewhere with the highest number; None for none.
    """

    def __init__(self, folder: Path, anchor: Path | None = None) -> None:
        self._folder, self._path, self._anchor = folder, folder / FILE, anchor
        self._hashes: dict[tuple[str, int, int, int], str] = {}

    def spent(self, cohort: str) -> Spent:
        """What was let out about a cohort.

        Raises:
            PrivacyBudgetSpent: the record cannot be read, or is not the newest one; nothing may be
                let out.
        """
        return self._read().cohorts.get(cohort, Spent())

    def spend(
        self, cohort: str, file: Path, change: Callable[[Spent], None], *, trial: bool = False
    ) -> None:
        """Change a cohort's record, on disk before anything is let out.

        Args:
            cohort: its name.
            file: its rows.
            change: changes the record, or raises if the limit does not allow that.
            trial: whether to find out alone if it would raise; the record stays as it is.

        Raises:
            PrivacyBudgetSpent: as `spent`, or the file belongs to another cohort, too.
            OSError: the record cannot be written; nothing may be let out.
        """
        record = self._read()
        spent = record.cohorts.setdefault(cohort, Spent())
        known = self._identities(file)
        for other, one in record.cohorts.items():
            if other != cohort and {*known} & {*one.files}:
                raise PrivacyBudgetSpent(
                    f"the file of {cohort!a} is that of {other!a}, too: its owner must give both "
                    "the same people"
                )
        change(spent)
        if trial:
            return
        spent.files = [*dict.fromkeys([*spent.files, *known])]
        self._write(record)

    def accept_restored(self, charge: Callable[[dict[str, Spent]], None]) -> int:
        """Make an older record the newest, after `charge` has added what may have been let out
        since.

        Returns:
            The missing changes.
        """
        record = self._load()
        newest = record.number if self._anchor_is_missing() else self._newest()
        charge(record.cohorts)
        missing, record.number = max(newest - record.number, 0), max(newest, record.number)
        self._write(record)
        return missing

    def begin_anchor(self) -> None:
        """Make the anchor's file, with the number of this record.

        Raises:
            ConfigError: there is one, or was one, or none is set.
        """
        if self._anchor is None or self._anchor.exists():
            raise ConfigError(
                "set anchor in node.toml, to a file that does not exist yet, for --new-anchor"
            )
        record = self._load()
        if record.anchored:
            raise ConfigError(
                "this node's record had an anchor: restore that file, or count all limits by "
                "--accept-restored"
            )
        self._write(record)

    def problem(self) -> str:
        """Why nothing can be charged at present; "" if something can."""
        try:
            self._read()
        except PrivacyBudgetSpent as problem:
            return str(problem)
        return ""

    def _read(self) -> _Record:
        if not self._path.exists() and any((self._folder / name).exists() for name in OLDER):
            raise PrivacyBudgetSpent(_accept("this node's budgets are those of an earlier version"))
        record = self._load()
        if self._anchor_is_missing():
            raise PrivacyBudgetSpent(
                "this node's anchor is missing: its owner must restore that file, or run fedloom "
                "node --accept-restored"
                if record.anchored
                else "this node's anchor has not been made: its owner must run fedloom node "
                "NODE.toml --new-anchor, once, unless a record of its budgets was lost"
            )
        if record.number < (newest := self._newest()):
            record = self._load(NEXT)
            if record.number != newest:
                raise PrivacyBudgetSpent(
                    _accept("this node's record of its budgets is older than its anchor")
                )
        return record

    def _load(self, name: str = FILE) -> _Record:
        path = self._folder / name
        if not path.exists():
            return _Record(number=0, cohorts={})
        try:
            return _Record.model_validate_json(path.read_bytes(), strict=True)
        except (OSError, ValidationError):
            raise PrivacyBudgetSpent(
                "this node's record of its privacy budget cannot be read: its owner must restore "
                f"{name}"
            ) from None

    def _anchor_is_missing(self) -> bool:
        return self._anchor is not None and not self._anchor.exists()

    def _newest(self) -> int:
        if self._anchor is None or not self._anchor.exists():
            return 0
        try:
            return int(self._anchor.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise PrivacyBudgetSpent(
                "this node's anchor cannot be read: its owner must restore it"
            ) from None

    def _write(self, record: _Record) -> None:
        record.number, record.anchored = record.number + 1, self._anchor is not None
        text = record.model_dump_json(indent=1).encode()
        if self._anchor is not None:
            write_atomically(self._folder / NEXT, text)
            write_atomically(self._anchor, str(record.number).encode())
        write_atomically(self._path, text)
        (self._folder / NEXT).unlink(missing_ok=True)

    def _identities(self, file: Path) -> list[str]:
        """Device and inode, and the SHA-256 of a file; for a folder its place alone."""
        about = file.stat()
        place = f"{about.st_dev}:{about.st_ino}"
        if not file.is_file():
            return [place]
        key = place, about.st_size, about.st_mtime_ns, 0
        if key not in self._hashes:
            with file.open("rb") as opened:
                self._hashes[key] = hashlib.file_digest(opened, "sha256").hexdigest()
        return [place, self._hashes[key]]


def _accept(problem: str) -> str:
    return (
        f"{problem}: its owner must restore the newest {FILE}, or run fedloom node "
        "--accept-restored"
    )
