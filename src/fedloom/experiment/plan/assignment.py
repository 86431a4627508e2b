"""The assignment of data to parties, with the labels for evaluation, which no method sees."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedloom.core.context import Rows
from fedloom.core.errors import ConfigError
from fedloom.core.scores import chance_error
from fedloom.core.task import Classes, Number, Task
from fedloom.data.dataset import Dataset, DatasetLike
from fedloom.data.split import Split
from fedloom.data.vertical import PartyView, VerticalDataset


@dataclass(frozen=True, eq=False)
class DataAssignment:
    """Which party holds which rows or columns.

    Attributes:
        name: of the data set.
        classes: K names; () for a number to predict.
        target: the scale of a number to predict; None for classes.
        label: the name of the label, if it is known.
        digest: of the content of the data.
        common: digest of what must be equal at the coordinator and all nodes.
        public_digest: of the public rows.
        schema: given a party's number, the schema of its rows: kind, shape, classes and columns.
        describe: returns the data part of `partition.json`.
        labels: for each set of test rows, the labels (n,) of each party's rows.
        own_chances: (N,) chance level of each client on its own test rows; None unless all have
            such rows here.
        dataset: horizontal: the data set, or its schema where the rows are private.
        split: horizontal: the rows of each party, if partitioned here.
        server_rows: (n,) indices of the server's rows.
        left_out: horizontal: the rows that no training client has, or at a node those of its own
            that it does not train on, by the reason.
        owners: horizontal: names of the clients, where each is an owner of rows here.
        parties: vertical: the columns of each party, if all are on this machine.
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
    target: Number | None = None
    label: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    owners: tuple[str, ...] = ()

    @property
    def task(self) -> Task:
        """What is predicted."""
        return self.target or Classes(len(self.classes))


def target_of(dataset: DatasetLike, variance: bool = False) -> Number | None:
    """The scale of a data set's number to predict; None for classes.

    Raises:
        ConfigError: `variance` is set for classes.
    """
    if dataset.classes and variance:
        raise ConfigError(
            "models.variance is for a number to predict, and this label has classes: leave it out"
        )
    return None if dataset.classes else Number(*dataset.target, variance)


def task_of(dataset: DatasetLike, variance: bool = False) -> Task:
    """What a data set's label is: classes, or a number with its scale. Raises ConfigError: see
    `target_of`.
    """
    return target_of(dataset, variance) or Classes(len(dataset.classes))


def training_labels(dataset: Dataset) -> np.ndarray:
    """(n,) int64 classes, or float32 standardized numbers."""
    target = target_of(dataset)
    return dataset.y if target is None else target.standardized(dataset.y)


def schema(
    kind: str, shape: Sequence[int], classes: Sequence[str], columns: Sequence[str] = ()
) -> dict[str, Any]:
    """See `DataAssignment.schema`."""
    return {"kind": kind, "shape": list(shape), "classes": list(classes), "columns": list(columns)}


def chance(y: np.ndarray) -> float:
    """The chance level on test rows with these labels (n,), n >= 1: the accuracy of the most
    frequent class, or the root mean squared error of the best constant, in the number's unit.
    """
    return chance_error(y) if y.dtype.kind == "f" else float(np.bincount(y).max() / len(y))


def sample(x: np.ndarray) -> np.ndarray:
    """About 1,000 evenly spaced rows, or all if fewer."""
    return x[:: max(1, len(x) // 1000)]


def digest(text: str, *arrays: np.ndarray) -> str:
    """SHA-256 of a text and arrays."""
    content = (text.encode(), *(np.ascontiguousarray(a).tobytes() for a in arrays))
    return hashlib.sha256(b"".join(content)).hexdigest()


def rows_of(
    x: np.ndarray,
    known: DatasetLike | PartyView,
    which: np.ndarray,
    device: str,
    labels: np.ndarray | None = None,
) -> Rows:
    """The rows `which` (n,) of x (N, ...) with labels (N,), standardized like the data set, on this
    device.
    """
    shape = (-1, *[1] * (x.ndim - 2))  # channels or columns first, then broadcast
    arrays = (x, which, known.shift.reshape(shape), known.scale.reshape(shape))
    pool, index, shift, scale = (torch.from_numpy(a).to(device) for a in arrays)
    return Rows(
        pool, None if labels is None else torch.from_numpy(labels).to(device), index, shift, scale
    )
