from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import ConfigError, DataError
from fedloom.data.dataset import image_dataset
from fedloom.data.flower import from_flwr, partition_at
from fedloom.data.split import split

pytest.importorskip("datasets")
LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 0])


class ByColumn:
    """The face of a flwr-datasets partitioner: one part for each value of a column."""

    def __init__(self, partition_by: str) -> None:
        self.partition_by = partition_by
        self.given: Any = None

    def is_dataset_assigned(self) -> bool:
        return self.given is not None

    @property
    def dataset(self) -> Any:
        return self.given

    @dataset.setter
    def dataset(self, value: Any) -> None:
        assert self.given is None
        self.given = value

    @property
    def num_partitions(self) -> int:
        return max(self.dataset[self.partition_by]) + 1

    def load_partition(self, partition_id: int) -> Any:
        values = np.array(self.dataset[self.partition_by])
        return self.dataset.select(np.flatnonzero(values == partition_id)[::-1])


def test_rows_of_each_part_are_numbers_into_the_labels() -> None:
    parts = from_flwr(ByColumn("label"), LABELS)
    assert [part.tolist() for part in parts] == [[0, 3, 6, 7], [1, 4], [2, 5]]
    assert all(part.dtype == np.int64 for part in parts)


def test_owners_can_be_gone_by() -> None:
    parts = from_flwr(ByColumn("group"), LABELS, groups=np.array([0, 0, 0, 0, 1, 1, 1, 1]))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_it_serves_as_a_partition_of_a_split() -> None:
    x = np.zeros((8, 1, 2, 2), dtype=np.uint8)
    data = image_dataset("p", x, LABELS, ("a", "b", "c"), test=np.array([0]))
    found = split(
        data,
        clients=3,
        seed=0,
        partition=lambda labels, clients, rng: from_flwr(ByColumn("label"), labels),
    )
    assert [shard.tolist() for shard in found.shards] == [[3, 6, 7], [1, 4], [2, 5]]


def test_a_used_partitioner_is_refused() -> None:
    partitioner = ByColumn("label")
    from_flwr(partitioner, LABELS)
    with pytest.raises(DataError, match="create a new one"):
        from_flwr(partitioner, LABELS)


def test_a_client_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match=r"ByColumn gave none to clients \[1\]"):
        from_flwr(ByColumn("label"), np.array([0, 2, 2]))


def test_what_a_partitioner_raises_is_passed_on_in_our_words() -> None:
    with pytest.raises(DataError, match="ByColumn failed to partition 8 rows"):
        from_flwr(ByColumn("no such column"), LABELS)


def halves(
    labels: np.ndarray, clients: int, rng: np.random.Generator, *, flip: bool = False
) -> list[np.ndarray]:
    parts = np.array_split(np.arange(len(labels)), clients)
    return parts[::-1] if flip else parts


class Striped(ByColumn):
    """Made as flwr-datasets makes its own: the number of parts comes first."""

    def __init__(self, num_partitions: int, partition_by: str, offset: int = 0) -> None:
        super().__init__(partition_by)
        self.parts, self.offset = num_partitions, offset

    @property
    def num_partitions(self) -> int:
        return self.parts

    def load_partition(self, partition_id: int) -> Any:
        rows = (np.arange(len(self.dataset)) + self.offset) % self.parts
        return self.dataset.select(np.flatnonzero(rows == partition_id))


def test_partitions_are_found_by_their_path() -> None:
    rng = np.random.default_rng(0)
    flipped = partition_at(f"{__name__}:halves")(LABELS, 2, rng, flip=True)
    assert [part.tolist() for part in flipped] == [[4, 5, 6, 7], [0, 1, 2, 3]]
    striped = partition_at(f"{__name__}:Striped")(LABELS, 3, rng, offset=1)
    assert [part.tolist() for part in striped] == [[2, 5], [0, 3, 6], [1, 4, 7]]
    with pytest.raises(DataError, match=r"Striped does not accept the options \{'ofset': 1\}"):
        partition_at(f"{__name__}:Striped")(LABELS, 3, rng, ofset=1)
    with pytest.raises(DataError, match="cannot import nothing_here"):
        partition_at("nothing_here:halves")


def test_a_run_takes_a_partition_by_its_path() -> None:
    import fedloom

    settings = {
        "name": "wine",
        "clients": 3,
        "partition": f"{__name__}:Striped",
        "options": {"offset": 1},
    }
    result = fedloom.run("local", rounds=1, data=settings)
    assert len(result.summary["accuracy"]["per_client"]) == 3
    with pytest.raises(
        ConfigError, match=r"data\.partition: .*stripes must be a function or class"
    ):
        fedloom.run("local", rounds=1, data={**settings, "partition": f"{__name__}:stripes"})


def test_a_partitioner_of_flwr_datasets() -> None:
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    labels = np.tile(np.arange(4), 100)
    theirs = partitioners.DirichletPartitioner(
        num_partitions=5, partition_by="label", alpha=0.5, min_partition_size=1, seed=3
    )
    parts = from_flwr(theirs, labels)
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    assert len(parts) == 5
