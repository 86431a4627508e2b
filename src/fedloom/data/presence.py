"""Which rows of a vertical federation each party has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.data.tables import read_csv
from fedloom.data.vertical import PartyView, VerticalDataset

YES, NO = ("1", "yes", "true"), ("0", "no", "false")
"""Cells of a file of presence, in any case."""


@dataclass(frozen=True)
class RowPresence:
    """The rule by which each party has or lacks each aligned and each test row.

    Attributes:
        seed: of the draws.
        missing: for each party, the probability that it lacks an aligned row, drawn for each row
            alone.
        missing_test: the same for test rows.
        listed: key of a row -> for each party, whether it has the row, instead of draws; all
            parties have the rows without an entry.
    """

    seed: int = 0
    missing: Sequence[float] = ()
    missing_test: Sequence[float] = ()
    listed: Mapping[str, Sequence[bool]] | None = None

    def of(
        self, party: int, aligned: Sequence[object], test: Sequence[object]
    ) -> tuple[np.ndarray, np.ndarray]:
        """(N_a,) and (T,) bool, whether the party has each of the rows with these keys."""
        if self.listed is not None:
            found = [
                [self.listed[str(key)][party] if str(key) in self.listed else True for key in keys]
                for keys in (aligned, test)
            ]
            return np.array(found[0], dtype=bool), np.array(found[1], dtype=bool)
        draws = (
            stream(self.seed, f"columns.missing {part}", party) for part in ("aligned", "test")
        )
        first, second = (
            draw.random(len(keys)) for draw, keys in zip(draws, (aligned, test), strict=True)
        )
        return first >= self.missing[party], second >= self.missing_test[party]


def had(
    presence: RowPresence | None,
    party: int,
    aligned: Sequence[object],
    unaligned: int,
    test: Sequence[object],
) -> np.ndarray | None:
    """(n,) bool, whether the party has the aligned and test rows with these keys, and its own
    `unaligned` ones between them, which it has; None if it has all.
    """
    if presence is None:
        return None
    first, last = presence.of(party, aligned, test)
    return np.concatenate([first, np.ones(unaligned, dtype=bool), last])


def read_presence(file: Path, key: str, parties: int) -> dict[str, tuple[bool, ...]]:
    """The rows of a CSV file of presence, by the content of its column `key`.

    Every other column is of a party, in their order; its cells are 1 (yes, true) or 0 (no, false).

    Raises:
        DataError: the file lacks the key, names a row twice, has other than `parties` columns, or a
            cell is neither.
    """
    table = {name: column.text for name, column in read_csv(file, needed=[key]).items()}
    keys = table.pop(key)
    if len(table) != parties:
        raise DataError(
            f"{file} must have {key!r} and a column for each of {parties} parties, not "
            f"{list(table)}."
        )
    if len(set(keys)) < len(keys):
        raise DataError(f"{file} names a row twice in its column {key!r}; each row may occur once.")
    cells = [word.strip().lower() for column in table.values() for word in column]
    odd = next((word for word in cells if word not in YES + NO), None)
    if odd is not None:
        raise DataError(f"{file} has the cell {odd!r}; write 1 if the party has the row, 0 if not.")
    had = np.array([word in YES for word in cells], dtype=bool).reshape(parties, len(keys)).T
    return {name: tuple(row.tolist()) for name, row in zip(keys, had, strict=True)}


def complete_rows(data: VerticalDataset, needed: Sequence[int] = ()) -> VerticalDataset:
    """The data whose aligned rows are those that all needed parties have; () for all parties.

    Another aligned row becomes an unaligned one at each party that has it.

    Raises:
        DataError: no row is complete.
    """
    whole = np.ones(len(data.labels), dtype=bool)
    for m in needed or range(len(data.views)):
        whole &= data.views[m].has(data.views[m].aligned)
    if whole.all():
        return data
    if not whole.any():
        raise DataError(
            f"None of {len(whole)} aligned rows is complete: lower columns.missing, or use a "
            "method that learns from incomplete rows (laser-vfl, or split with "
            "params.incomplete=zeros)."
        )
    views = tuple(_without(view, data.labels, whole) for view in data.views)
    return replace(data, views=views, labels=data.labels[whole])


def _without(view: PartyView, labels: np.ndarray, whole: np.ndarray) -> PartyView:
    """A party's view after its incomplete rows have become unaligned."""
    moved = ~whole & view.has(view.aligned)
    unaligned = np.concatenate([view.unaligned, view.aligned[moved]])
    # a number to predict has no classes
    known = view.truth is not None and labels.dtype == view.truth.dtype
    truth = np.concatenate([view.truth, labels[moved]]) if known else None
    return replace(view, aligned=view.aligned[whole], unaligned=unaligned, truth=truth)
