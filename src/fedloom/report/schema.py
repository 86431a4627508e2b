"""What the files of a run or comparison folder hold, as far as a report needs it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Spread(_Read):
    """An accuracy: its mean and standard deviation over clients, and each client's."""

    mean: float
    std: float
    per_client: tuple[float, ...]


class Bytes(_Read):
    """Bytes of tensor data to the home party, from it, and between the others; means where over seeds."""

    up: float
    down: float
    across: float

    @property
    def sent(self) -> float:
        """What the clients sent, to whomever."""
        return self.up + self.across


class Engine(_Read):
    """Where the parties were."""

    engine: str = "local"
    workers: int = 1
    device: str = "cpu"
    remarks: tuple[str, ...] = ()


class Summary(_Read):
    """`result.json`, as far as a report needs it. A run under way has no hashes."""

    name: str
    method: str
    title: str
    preset: str
    seed: int
    rounds: int
    iterations: int
    dataset: str
    clients: int
    engine: Engine | None
    accuracy: Spread
    own_accuracy: Spread | None
    agreement: float | None
    chance: float | None
    bytes: Bytes
    messages: int
    seconds: dict[str, float]
    failures: int
    public_sha256: str | None
    state_sha256: str | None


class Partition(_Read):
    """`partition.json`: (N, K) rows of each class at each client, and their networks."""

    classes: tuple[str, ...] = Field(min_length=1)
    counts: tuple[tuple[int, ...], ...] = Field(min_length=1)
    architectures: tuple[str, ...]
    chance: float | None = None
    test: int
    public: int


class Flow(_Read):
    """A line of `ledger.csv`: messages of one kind and content between two roles in one round."""

    sender: str
    receiver: str
    kind: str
    what: str
    count: int
    bytes: int
    wire_bytes: int


class Trouble(_Read):
    """A line of `failures.csv`: a call that gave no usable reply."""

    round: int
    party: str
    kind: str
    reason: str


class Measure(_Read):
    """A line of `metrics.csv`."""

    round: int
    iteration: int
    stage: str
    party: str
    measure: str
    value: float


class Accuracy(_Read):
    """A method's accuracy over the seeds of a comparison."""

    mean: float
    std_over_seeds: float | None
    std_over_clients: float


class MethodFound(_Read):
    """A method in `comparison.json`."""

    name: str
    method: str
    preset: str
    seeds: tuple[int, ...]
    accuracy: Accuracy
    chance: float
    bytes: Bytes
    seconds: float
    failures: int


class Difference(_Read):
    """A paired difference in `comparison.json`: the first method minus the other."""

    first: str
    other: str
    mean: float | None
    std_over_seeds: float | None
    std_over_clients: float | None
    clients_better: int
    clients: int
    per_seed: tuple[float, ...]


class RunFound(_Read):
    """Where the run of one method and seed is."""

    name: str
    seed: int
    folder: str | None


class Comparison(_Read):
    """`comparison.json`."""

    title: str
    reference: str
    methods: tuple[MethodFound, ...] = Field(min_length=1)
    differences: tuple[Difference, ...]
    runs: tuple[RunFound, ...]
