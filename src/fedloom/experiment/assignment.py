"""The assignment of data to parties, with the labels that only the experiment sees, to evaluate with."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedloom.core.context import Rows
from fedloom.data.dataset import DatasetLike
from fedloom.data.split import Split
from fedloom.data.vertical import PartyView, VerticalDataset


@dataclass(frozen=True, eq=False)
class DataAssignment:
    """Which party holds which rows or columns.

    Attributes:
        name: of the data set.
        classes: K names.
        digest: identifies the content of the data.
        common: identifies what all parties, at the coordinator and at nodes, must have in common.
        public_digest: identifies the public rows.
        schema: what a party's rows look like, by its number, in plain values: kind, shape, classes and columns.
        describe: returns the data part of `partition.json`.
        labels: for each row set that parties are tested on, the true labels (n,) of each party's rows.
        own_chances: (N,) each client's accuracy if it always answers the most frequent class of its own test rows; None
            where some client has none, or only one party is tested.
        dataset: in a horizontal setting, the data set, or what is known of it without its rows.
        split: which party holds which of its rows, if it is partitioned here.
        server_rows: (n,) numbers of the rows that the server has.
        parties: which party holds which columns, if all are on this machine.
    """

    name: str
    classes: tuple[str, ...]
    digest: str
    common: str
    public_digest: str
    schema: Callable[[int], dict[str, Any]]
    describe: Callable[[], dict[str, Any]]
    labels: Mapping[str, list[np.ndarray]] = field(default_factory=dict)
    own_chances: np.ndarray | None = None
    dataset: DatasetLike | None = None
    split: Split | None = None
    server_rows: np.ndarray = field(default_factory=lambda: np.arange(0))
    parties: VerticalDataset | None = None


def schema(kind: str, shape: Sequence[int], classes: Sequence[str], columns: Sequence[str] = ()) -> dict[str, Any]:
    """See `DataAssignment.schema`."""
    return {"kind": kind, "shape": list(shape), "classes": list(classes), "columns": list(columns)}


def sample(x: np.ndarray) -> np.ndarray:
    """Up to some 1,000 evenly spaced rows."""
    return x[:: max(1, len(x) // 1000)]


def digest(text: str, *arrays: np.ndarray) -> str:
    """SHA-256 of a text and arrays."""
    content = (text.encode(), *(np.ascontiguousarray(a).tobytes() for a in arrays))
    return hashlib.sha256(b"".join(content)).hexdigest()


def rows_of(
    x: np.ndarray, known: DatasetLike | PartyView, which: np.ndarray, device: str, labels: np.ndarray | None = None
) -> Rows:
    """Rows number `which` (n,) of x (N, ...) with the labels (N,), scaled as the data set is, on this device."""
    shape = (-1, *[1] * (x.ndim - 2))  # channels or columns first, then broadcast
    arrays = (x, which, known.shift.reshape(shape), known.scale.reshape(shape))
    pool, index, shift, scale = (torch.from_numpy(a).to(device) for a in arrays)
    return Rows(pool, None if labels is None else torch.from_numpy(labels).to(device), index, shift, scale)
