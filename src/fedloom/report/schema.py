"""Schemas of the tables in a run's folder and of `partition.json`."""

from collections.abc import Iterable

from pydantic import Field, model_validator

from fedloom.experiment.run.result import FileSchema


class PartyData(FileSchema):
    """The data of a party in vertical learning: column names or image shape, numbers of rows, and
    class imbalance.
    """

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
    """Class imbalance of the unaligned rows of all parties."""

    weighted_cosine: float | None


class VerticalPartition(FileSchema):
    """The data of all parties in vertical learning, with aligned and test rows (K,) by class."""

    aligned_counts: tuple[int, ...]
    test_counts: tuple[int, ...]
    parties: tuple[PartyData, ...] = Field(min_length=1)
    all: AllParties

    def ids(self, seen: Iterable[str]) -> tuple[str, ...]:
        """The parties' ids, role and number, given the ids `seen` in the tables."""
        role = next((name.rpartition("-")[0] for name in seen if "-" in name), "party")
        return tuple(f"{role}-{m}" for m in range(len(self.parties)))


class PartitionFile(FileSchema):
    """`partition.json`: rows (N, K) by client and class, the data of vertical parties, or the
    number of clients with private rows; the networks; the clients' owners: of a file's rows, or the
    organizations whose nodes ran them, "" for others; the rows that columns were standardized by;
    and sentences on how a file was read.
    """

    classes: tuple[str, ...]
    """Names of the classes, or of the parts of a number's range; () for a number whose rows are
    with their owners.
    """
    counts: tuple[tuple[int, ...], ...] = ()
    parties: VerticalPartition | None = None
    private_clients: int = 0
    architectures: tuple[str, ...]
    chance: float | None = None
    own_chance: float | None = None
    own_chances: dict[str, float | None] = Field(default_factory=dict)
    unseen: tuple[int, ...] = ()
    owners: tuple[str, ...] = ()
    test: int
    public: int
    server: int = 0
    server_sha256: str | None = None
    standardized_by: str = ""
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_kind(self) -> "PartitionFile":
        if bool(self.counts) + bool(self.parties) + bool(self.private_clients) != 1:
            raise ValueError("exactly one of counts, parties and private_clients must be set")
        if not self.classes and not self.private_clients:
            raise ValueError("classes must not be empty")
        return self

    @property
    def number(self) -> int:
        """Number of clients or parties."""
        return self.private_clients or len(self.parties.parties if self.parties else self.counts)

    @property
    def widths(self) -> set[int]:
        """The numbers of classes that the counts have."""
        if self.parties is None:
            return {len(row) for row in self.counts}
        unaligned = [
            p.unaligned_counts for p in self.parties.parties if p.unaligned_counts is not None
        ]
        return {
            len(row) for row in (self.parties.aligned_counts, self.parties.test_counts, *unaligned)
        }


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
    """A row of `failures.csv`: a failed call."""

    round: int
    party: str
    kind: str
    reason: str
    why: str = ""


class MetricRow(FileSchema):
    """A row of `metrics.csv`."""

    round: int
    iteration: int
    stage: str
    party: str
    metric: str
    value: float


class MixingRow(FileSchema):
    """A row of `mixing.csv`: a client's mixing weights, by the numbers of the models' owners."""

    round: int
    party: str
    weights: str = Field(pattern=r"^([0-9]+:\S+( [0-9]+:\S+)*)?$")
