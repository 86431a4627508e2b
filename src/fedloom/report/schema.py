"""The tables of a run's folder and its `partition.json`, as far as a report needs them."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field, model_validator

from fedloom.experiment.result import FileSchema


class PartyData(FileSchema):
    """What one party of a vertical federation holds: columns of a table by name, or a picture's shape; rows; and how
    uneven its classes are."""

    name: str
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] | None
    aligned: int
    unaligned: int
    unaligned_counts: tuple[int, ...] | None
    gamma: float | None
    classes_held: int | None
    mid: float | None
    cosine: float | None


class AllParties(FileSchema):
    """How uneven the unaligned rows of all parties are together."""

    weighted_cosine: float | None


class VerticalPartition(FileSchema):
    """What the parties of a vertical federation hold; the rows (K,) of each class among those that all have."""

    aligned_counts: tuple[int, ...]
    test_counts: tuple[int, ...]
    parties: tuple[PartyData, ...] = Field(min_length=1)
    all: AllParties

    def ids(self, seen: Iterable[str]) -> tuple[str, ...]:
        """The parties' names in the tables of a run, given those names that occur there: by role and number."""
        role = next((name.rpartition("-")[0] for name in seen if "-" in name), "party")
        return tuple(f"{role}-{m}" for m in range(len(self.parties)))


class PartitionFile(FileSchema):
    """`partition.json`: (N, K) rows of each class at each client, or what vertical parties hold, or how many clients
    have rows that only they know; and their networks."""

    classes: tuple[str, ...] = Field(min_length=1)
    counts: tuple[tuple[int, ...], ...] = ()
    parties: VerticalPartition | None = None
    apart: int = 0
    architectures: tuple[str, ...]
    chance: float | None = None
    own_chance: float | None = None
    own_chances: dict[str, float | None] = Field(default_factory=dict)
    unseen: tuple[int, ...] = ()
    test: int
    public: int
    server: int = 0
    server_sha256: str | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> PartitionFile:
        if bool(self.counts) + bool(self.parties) + bool(self.apart) != 1:
            raise ValueError("it must have either the counts of clients, or parties, or how many have rows apart")
        return self

    @property
    def number(self) -> int:
        """Of clients or parties."""
        return self.apart or len(self.parties.parties if self.parties else self.counts)

    @property
    def widths(self) -> set[int]:
        """The numbers of classes in the counts."""
        if self.parties is None:
            return {len(row) for row in self.counts}
        unaligned = [p.unaligned_counts for p in self.parties.parties if p.unaligned_counts is not None]
        return {len(row) for row in (self.parties.aligned_counts, self.parties.test_counts, *unaligned)}


class LedgerRow(FileSchema):
    """A row of `ledger.csv`: messages of one kind and content between two roles in one round."""

    round: int
    sender: str
    receiver: str
    kind: str
    what: str
    count: int
    bytes: int
    wire_bytes: int


class FailureRow(FileSchema):
    """A row of `failures.csv`: a call that gave no usable reply."""

    round: int
    party: str
    kind: str
    reason: str


class MetricRow(FileSchema):
    """A row of `metrics.csv`."""

    round: int
    iteration: int
    stage: str
    party: str
    measure: str
    value: float


class MixingRow(FileSchema):
    """A row of `mixing.csv`: the weights with which a client mixed models, by their owners' numbers."""

    round: int
    party: str
    weights: str = Field(pattern=r"^([0-9]+:\S+( [0-9]+:\S+)*)?$")
