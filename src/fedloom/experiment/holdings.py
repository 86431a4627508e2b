"""Who holds what in a run, and what only the experiment knows of it: the labels to measure with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedloom.data.columns import Parties
from fedloom.data.dataset import Dataset
from fedloom.data.imbalance import describe_parties
from fedloom.data.split import Split
from fedloom.data.stats import describe


class Holdings(Protocol):
    """What a run is about, whichever way the table is cut."""

    @property
    def name(self) -> str:
        """Of the data set."""

    @property
    def classes(self) -> tuple[str, ...]:
        """K names."""

    @property
    def labels(self) -> Mapping[str, list[np.ndarray]]:
        """For each row set that parties are tested on, the true labels (n,) of each party's rows."""

    @property
    def own_chances(self) -> np.ndarray | None:
        """(N,) each client's accuracy if it always answers the most frequent class of its own test rows; None where
        some client has none."""

    @property
    def public_digest(self) -> str:
        """Of the rows that all hold."""

    @property
    def digest(self) -> str:
        """Tells one content of the data from another."""

    def describe(self) -> dict[str, Any]:
        """The content of `partition.json` as far as it is about data."""


@dataclass(frozen=True)
class ByRows:
    """Each client holds other rows."""

    dataset: Dataset
    split: Split
    public_digest: str

    @property
    def name(self) -> str:
        """Of the data set."""
        return self.dataset.name

    @property
    def classes(self) -> tuple[str, ...]:
        """K names."""
        return self.dataset.classes

    @cached_property
    def labels(self) -> Mapping[str, list[np.ndarray]]:
        """One test set for all, and each client's own, if it has one."""
        y, shares = self.dataset.y, self.split
        found = {"test": [y[shares.test]] * len(shares.shards), "own": [y[rows] for rows in shares.own_test]}
        return {on: labels for on, labels in found.items() if all(len(part) for part in labels)}

    @property
    def own_chances(self) -> np.ndarray | None:
        """See `Holdings`."""
        own = self.labels.get("own")
        return None if own is None else np.array([np.bincount(y).max() / len(y) for y in own])

    @cached_property
    def digest(self) -> str:
        """All labels, the public rows, and up to 1,000 others."""
        x, y = self.dataset.x, self.dataset.y
        return _digest(f"{x.dtype.str}{x.shape}{self.public_digest}", y, _some(x))

    def describe(self) -> dict[str, Any]:
        """Who holds how many rows of which class."""
        counts, server = describe(self.dataset.y, self.split.shards, self.classes).counts, self.split.server
        return {
            "counts": counts.tolist(),
            "public": len(self.split.public),
            "public_sha256": self.public_digest,
            "server": len(server),
            "server_sha256": _digest("", server.astype("<i8")) if len(server) else None,
        }


@dataclass(frozen=True)
class ByColumns:
    """Each party holds other columns; the first has the labels."""

    parties: Parties

    @property
    def name(self) -> str:
        """Of the data set."""
        return self.parties.name

    @property
    def classes(self) -> tuple[str, ...]:
        """K names."""
        return self.parties.classes

    @property
    def public_digest(self) -> str:
        """Nobody holds what another one does: the digest of nothing."""
        return _digest("")

    @property
    def own_chances(self) -> np.ndarray | None:
        """None: only one party is tested."""
        return None

    @cached_property
    def labels(self) -> Mapping[str, list[np.ndarray]]:
        """The people that all are tested on; and each party's unaligned rows, where a simulation knows their labels."""
        views = self.parties.views
        found = {"test": [self.parties.test_labels] * len(views)}
        truths = [view.truth for view in views if view.truth is not None and len(view.truth)]
        return {**found, "own": truths} if len(truths) == len(views) else found

    @cached_property
    def digest(self) -> str:
        """All labels, who is aligned, and up to 1,000 rows of each party."""
        parties = self.parties
        rows = [part for v in parties.views for part in (v.aligned, v.unaligned, v.test, v.shift, v.scale, _some(v.x))]
        shapes = [v.x.shape for v in parties.views]
        return _digest(f"{shapes}", parties.labels, parties.test_labels, *rows)

    def describe(self) -> dict[str, Any]:
        """What each party holds, and how even it is."""
        return {"parties": describe_parties(self.parties), "public": 0, "public_sha256": self.public_digest}


def _some(x: np.ndarray) -> np.ndarray:
    return x[:: max(1, len(x) // 1000)]


def _digest(text: str, *arrays: np.ndarray) -> str:
    content = (text.encode(), *(np.ascontiguousarray(a).tobytes() for a in arrays))
    return hashlib.sha256(b"".join(content)).hexdigest()
