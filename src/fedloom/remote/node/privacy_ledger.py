"""The privacy budget of a node's own rows: the ε that private messages about each file have spent, on disk.

The record continues over runs, callers and methods, because all of them concern the same rows, and over restarts while
the folder is not replaced by an older one. A release is
recorded before it is made, so that one that is lost counts too. A reply that is repeated from the store is not released
again and costs nothing.

ε covers all releases of a file together, between data sets of which one has a row that counts as nothing in the
other; the number of rows is public. Messages without noise have no ε and are not in the record.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedloom.core.errors import PrivacyBudgetSpent
from fedloom.core.paths import write_atomically
from fedloom.protect.accountant import Releases, epsilon

FILE: Final = "privacy.json"


class SpentReleases(BaseModel):
    """Equal releases of a file: see `Releases`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sigma: float = Field(gt=0, allow_inf_nan=False)
    rate: float = Field(gt=0, le=1)
    count: int = Field(ge=1)


_RECORD: Final = TypeAdapter(dict[str, list[SpentReleases]])


class PrivacyLedger:
    """The private releases about each file, in the node's folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def spent(self, file: Path) -> list[Releases]:
        """The releases about a file so far.

        Raises:
            PrivacyBudgetSpent: the record cannot be read; nothing may be released.
        """
        return [Releases(one.sigma, one.count, one.rate) for one in self._read().get(_key(file), [])]

    def charge(self, file: Path, release: Releases, limit: float, delta: float) -> None:
        """Record further releases, on disk before they are made.

        Args:
            file: whose rows they are about.
            release: the new ones.
            limit: of ε of all releases about the file.
            delta: the δ of this ε.

        Raises:
            PrivacyBudgetSpent: they would exceed the limit, or the record cannot be read.
            OSError: the record cannot be written; nothing may be released.
        """
        record = self._read()
        before = {(one.sigma, one.rate): one.count for one in record.get(_key(file), [])}
        which = (release.sigma, release.rate)
        after = {**before, which: before.get(which, 0) + release.count}
        found = epsilon([Releases(sigma, count, rate) for (sigma, rate), count in after.items()], delta)
        if not found <= limit:
            raise PrivacyBudgetSpent(
                f"the privacy budget of these rows is ε = {limit:g} at δ = {delta:g}, and this call would make it "
                f"{found:.2f}: use more noise or fewer rounds, or ask the node's owner to raise epsilon"
            )
        lines = [{"sigma": sigma, "rate": rate, "count": count} for (sigma, rate), count in after.items()]
        content = {name: [one.model_dump() for one in each] for name, each in record.items()} | {_key(file): lines}
        write_atomically(self._path, json.dumps(content, indent=1).encode())

    def _read(self) -> dict[str, list[SpentReleases]]:
        if not self._path.exists():
            return {}
        try:
            return _RECORD.validate_json(self._path.read_bytes(), strict=True)
        except (OSError, ValidationError):
            raise PrivacyBudgetSpent(
                f"this node's record of its privacy budget cannot be read: its owner must restore {FILE}"
            ) from None


def lines(ledger: PrivacyLedger, files: dict[str, tuple[Path, float, float]]) -> Iterator[str]:
    """A line for each data file: the spent ε, its limit, and the releases.

    Args:
        ledger: the record.
        files: the path, the limit of ε, and δ, by the name of the data.
    """
    for name, (file, limit, delta) in files.items():
        spent = ledger.spent(file)
        count = sum(one.count for one in spent)
        of = "no limit" if math.isinf(limit) else f"of {limit:g}"
        yield f"{name}: ε = {epsilon(spent, delta):.3f} {of} at δ = {delta:g}, {count} releases"


def _key(file: Path) -> str:
    return str(file.resolve())
