"""Partitions from user code, and adapters for the partitioners of Flower's `flwr-datasets`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.paths import callable_at
from fedloom.data.partitions import PartitionFunction


def partition_at(path: str) -> PartitionFunction:
    """The partition at `package.module:name`, called with (labels (n,), clients, rng, **options).

    It is a function of that form, or a partitioner class such as `flwr_datasets.partitioner:ShardPartitioner`:
    that is made with the options, and with `num_partitions`, `seed` and `partition_by="label"` where it takes them.

    Raises:
        DataError: there is no callable of that name.
    """
    found = callable_at(path, DataError)
    return partial(_made_by, found) if hasattr(found, "load_partition") else found


def _made_by(
    kind: Callable[..., Any], labels: np.ndarray, clients: int, rng: np.random.Generator, **options: Any
) -> list[np.ndarray]:
    """What a new partitioner of this class makes of the labels."""
    given = {"num_partitions": clients, "seed": int(rng.integers(2**31)), "partition_by": "label"}
    takes = inspect.signature(kind).parameters
    try:
        partitioner = kind(**{k: v for k, v in given.items() if k in takes} | options)
    except (TypeError, ValueError) as error:
        raise DataError(f"{getattr(kind, '__name__', kind)} can't be made with {options}: {error}") from None
    return from_flwr(partitioner, labels)


def from_flwr(partitioner: Any, labels: np.ndarray, *, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """What a `flwr_datasets.partitioner.Partitioner` makes of these labels, as sorted row numbers of each
    client.

    Only its public API is used: it is given a table with the columns "label", "group" and "row", and returns rows
    of it. So `partition_by` must be "label" or "group". For `fedloom.data.split`:

        split(data, clients=10, seed=0, partition=lambda labels, clients, rng: from_flwr(
            DirichletPartitioner(num_partitions=clients, partition_by="label", alpha=0.5), labels))

    Args:
        partitioner: a new one, which has been given no data yet. Its draws come from its own seed.
        labels: (n,) int64.
        groups: (n,) int64 owner of each row, if it goes by owners.

    Raises:
        DataError: `datasets` is missing, the partitioner is used up or fails, or it leaves a client without
            rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Partitioners of flwr-datasets need the package `datasets`, which is not installed; "
            'run: pip install "fedloom[partitions]"'
        ) from error
    if partitioner.is_dataset_assigned():
        raise DataError("This partitioner has data already; make a new one.")
    columns = {"label": labels, "row": np.arange(len(labels))}
    if groups is not None:
        columns["group"] = groups
    try:
        partitioner.dataset = datasets.Dataset.from_dict(columns)
        parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
        rows = [np.sort(np.array(part["row"], dtype=np.int64)) for part in parts]
    except Exception as error:  # whatever a partitioner of somebody else's raises
        raise DataError(f"{type(partitioner).__name__} can't partition {len(labels)} rows: {error}") from error
    empty = [client for client, part in enumerate(rows) if not len(part)]
    if empty:
        raise DataError(
            f"Each client must have rows, but {type(partitioner).__name__} left clients {empty} without; use "
            "fewer clients or other options."
        )
    return rows
