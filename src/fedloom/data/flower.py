"""Partitions from user code, and an adapter for the partitioners of `flwr-datasets`."""

import inspect
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.partitions import PartitionFunction
from fedloom.support.paths import callable_at


def partition_at(path: str) -> PartitionFunction:
    """The partition at `package.module:name`, called with (labels (n,), clients, rng, **options).

    It is a function of that form, or a partitioner class such as
    `flwr_datasets.partitioner:ShardPartitioner`, which is constructed with the options, and with
    `num_partitions`, `seed` and `partition_by="label"` if it has them.

    Raises:
        DataError: the path does not lead to a callable.
    """
    kind = callable_at(path, DataError)
    if not hasattr(kind, "load_partition"):
        return kind

    def partition(
        labels: np.ndarray, clients: int, rng: np.random.Generator, **options: Any
    ) -> list[np.ndarray]:
        standard = {
            "num_partitions": clients,
            "seed": int(rng.integers(2**31)),
            "partition_by": "label",
        }
        accepted = inspect.signature(kind).parameters
        try:
            partitioner = kind(**{k: v for k, v in standard.items() if k in accepted} | options)
        except (TypeError, ValueError) as error:
            raise DataError(f"{path} does not accept the options {options}: {error}") from None
        return from_flwr(partitioner, labels)

    return partition


def from_flwr(
    partitioner: Any, labels: np.ndarray, *, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """The partition of these labels by a `flwr_datasets.partitioner.Partitioner`: sorted row
    numbers of each client.

    Only its public API is used: it partitions a table with the columns "label", "group" and "row",
    so `partition_by` must be "label" or "group". For `fedloom.data.split`:

        split(data, clients=10, seed=0, partition=lambda labels, clients, rng: from_flwr(
            DirichletPartitioner(num_partitions=clients, partition_by="label", alpha=0.5), labels))

    Args:
        partitioner: a new one without data. Its draws use its own seed.
        labels: (n,) int64.
        groups: (n,) int64 owner of each row, if it partitions by owner.

    Raises:
        DataError: `datasets` is not installed, the partitioner already has data or fails, or a
            client gets no rows.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "Partitioners of flwr-datasets need the package `datasets`, which is not installed; "
            'run: pip install -e ".[partitions]"'
        ) from error
    if partitioner.is_dataset_assigned():
        raise DataError("This partitioner already has a data set; create a new one.")
    columns = {"label": labels, "row": np.arange(len(labels))}
    if groups is not None:
        columns["group"] = groups
    try:
        partitioner.dataset = datasets.Dataset.from_dict(columns)
        parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
        rows = [np.sort(np.array(part["row"], dtype=np.int64)) for part in parts]
    except Exception as error:  # of foreign code
        raise DataError(
            f"{type(partitioner).__name__} failed to partition {len(labels)} rows: {error}"
        ) from error
    empty = [client for client, part in enumerate(rows) if not len(part)]
    if empty:
        raise DataError(
            f"Each client must have rows, but {type(partitioner).__name__} gave none to clients "
            f"{empty}; use fewer clients or other options."
        )
    return rows
