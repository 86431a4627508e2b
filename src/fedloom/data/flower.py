"""Partitioners of Flower's `flwr-datasets` beside our own."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedloom.errors import DataError


def from_flwr(partitioner: Any, labels: np.ndarray, *, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """What a `flwr_datasets.partitioner.Partitioner` makes of these labels, as sorted row numbers of each
    client.

    Through its public face only: it is given a table with the columns "label", "group" and "row", and what
    comes back in "row" is read. So `partition_by` must be "label" or "group". For `fedloom.data.split`:

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
        raise DataError("A partitioner can be given data once, but this one has data already; make a new one.")
    columns = {"label": labels, "row": np.arange(len(labels))}
    if groups is not None:
        columns["group"] = groups
    try:
        partitioner.dataset = datasets.Dataset.from_dict(columns)
        parts = [partitioner.load_partition(i) for i in range(partitioner.num_partitions)]
        rows = [np.sort(np.array(part["row"], dtype=np.int64)) for part in parts]
    except Exception as error:  # whatever a partitioner of somebody else's raises
        raise DataError(f"{type(partitioner).__name__} can't share out {len(labels)} rows: {error}") from error
    empty = [client for client, part in enumerate(rows) if not len(part)]
    if empty:
        raise DataError(
            f"Each client must have rows, but {type(partitioner).__name__} left clients {empty} without; use "
            "fewer clients or other options."
        )
    return rows
