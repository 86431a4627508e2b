"""Who holds what in a run, and what only the experiment knows of it: the labels to measure with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedloom.data.dataset import Dataset, DatasetLike
from fedloom.data.encoder import TableEncoder
from fedloom.data.imbalance import describe_parties
from fedloom.data.split import Split
from fedloom.data.stats import describe
from fedloom.data.vertical import PartyView, VerticalDataset


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
    def known(self) -> DatasetLike | None:
        """The data set as far as it is known; None where it is cut into columns."""

    @property
    def public_digest(self) -> str:
        """Of the rows that all hold."""

    @property
    def digest(self) -> str:
        """Tells one content of the data from another."""

    @property
    def common(self) -> str:
        """The same of what each party, wherever it is, must have alike."""

    def schema(self, party: int) -> dict[str, Any]:
        """What a party's rows look like, in plain values: kind, shape, names of classes and columns."""

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

    @property
    def known(self) -> DatasetLike:
        """All of it."""
        return self.dataset

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

    @property
    def common(self) -> str:
        """The same: all can load it."""
        return self.digest

    def schema(self, party: int) -> dict[str, Any]:
        """The same for all."""
        return schema(self.dataset.kind, self.dataset.input_shape, self.classes, self.dataset.columns)

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

    parties: VerticalDataset

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

    @property
    def known(self) -> None:
        """It is cut into columns."""

    @property
    def common(self) -> str:
        """The same: all can load it."""
        return self.digest

    def schema(self, party: int) -> dict[str, Any]:
        """Each party's own."""
        return schema(self.parties.kind, self.parties.views[party].input_shape, self.classes)

    def describe(self) -> dict[str, Any]:
        """What each party holds, and how even it is."""
        return {"parties": describe_parties(self.parties), "public": 0, "public_sha256": self.public_digest}


@dataclass(frozen=True, eq=False)
class ByOwnColumns:
    """Each party holds other columns, and nobody else knows what they are; who the people are was found by matching.

    Attributes:
        number: of parties.
        count: of classes.
        aligned, test: how many people all train on, and are tested on.
        mark: of the matching.
        view: of the party that is here.
        names: of the classes, where the labels are.
        truth: classes of the aligned and of the test people, where the labels are.
        others: where the labels are, how many unaligned rows each further party has.
    """

    name: str
    number: int
    count: int
    aligned: int
    test: int
    mark: str
    view: PartyView
    names: tuple[str, ...] = ()
    truth: tuple[np.ndarray, np.ndarray] | None = None
    others: tuple[int, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """K names; elsewhere than where the labels are, numbers."""
        return self.names or tuple(map(str, range(self.count)))

    @property
    def public_digest(self) -> str:
        """Nobody holds what another one does: the digest of nothing."""
        return _digest("")

    @property
    def own_chances(self) -> np.ndarray | None:
        """None: only one party is tested."""
        return None

    @property
    def known(self) -> None:
        """Each party knows its own columns."""

    @property
    def labels(self) -> Mapping[str, list[np.ndarray]]:
        """The people that all are tested on, where their labels are."""
        return {} if self.truth is None else {"test": [self.truth[1]] * self.number}

    @property
    def common(self) -> str:
        """Which matching it is."""
        return hashlib.sha256(f"{self.mark}\n{self.count} {self.aligned} {self.test}".encode()).hexdigest()

    @property
    def digest(self) -> str:
        """The same, all labels, and up to 1,000 rows of the party that is here."""
        view = self.view
        rows = (view.aligned, view.unaligned, view.test, _some(view.x))
        return _digest(self.common, *(self.truth or ()), *rows)

    def schema(self, party: int) -> dict[str, Any]:
        """What all know: nothing of anybody's columns."""
        return {"kind": "table", "classes": self.count, "aligned": self.aligned, "test": self.test}

    def describe(self) -> dict[str, Any]:
        """The columns of the party that is here, and how many rows the others have."""
        assert self.truth is not None
        view, encoder = self.view, TableEncoder.from_dict(self.view.recipe)
        unknown = {"unaligned_counts": None, "gamma": None, "classes_held": None, "mid": None, "cosine": None}
        rows = {"aligned": self.aligned, "test": self.test, **unknown}
        mine = {"name": view.name, "input_shape": list(view.input_shape), "columns": list(encoder.names)}
        parties = [{**mine, "dropped": list(encoder.dropped), "unaligned": len(view.unaligned), **rows}]
        for m, unaligned in enumerate(self.others, 1):
            theirs: dict[str, Any] = {"name": f"party-{m}", "input_shape": [], "columns": None, "dropped": None}
            parties.append({**theirs, "unaligned": unaligned, **rows})
        aligned, test = (np.bincount(y, minlength=self.count).tolist() for y in self.truth)
        found = {
            "name": self.name,
            "kind": "table",
            "classes": list(self.classes),
            "aligned_counts": aligned,
            "test_counts": test,
            "parties": parties,
            "all": {"gamma": None, "classes_held": None, "mid": None, "weighted_cosine": None},
        }
        return {"parties": found, "public": 0, "public_sha256": self.public_digest}


def schema(kind: str, shape: Sequence[int], classes: Sequence[str], columns: Sequence[str] = ()) -> dict[str, Any]:
    """See `Holdings.schema`."""
    return {"kind": kind, "shape": list(shape), "classes": list(classes), "columns": list(columns)}


def _some(x: np.ndarray) -> np.ndarray:
    return x[:: max(1, len(x) // 1000)]


def _digest(text: str, *arrays: np.ndarray) -> str:
    content = (text.encode(), *(np.ascontiguousarray(a).tobytes() for a in arrays))
    return hashlib.sha256(b"".join(content)).hexdigest()
