"""What the files of a run or comparison folder hold, as far as a report needs it."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field, model_validator

from fedloom.report import measures
from fedloom.report.files import Read
from fedloom.report.schema_columns import Parties


class Spread(Read):
    """An accuracy: its mean and standard deviation over clients, and each client's; of those numbered, or of all."""

    mean: float
    std: float
    per_client: tuple[float, ...]
    clients: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _one_each(self) -> Spread:
        if self.clients is not None and len(self.clients) != len(self.per_client):
            raise ValueError(f"it must have as many values as clients, {len(self.clients)}")
        return self

    def over(self, number: int) -> np.ndarray:
        """(N,) the values by client, of so many; nan for those that it is not of."""
        each = np.full(number, np.nan)
        each[list(range(number) if self.clients is None else self.clients)] = self.per_client
        return each


class Bytes(Read):
    """Bytes of tensor data to the home party, from it, and between the others; means where over seeds."""

    up: float
    down: float
    across: float

    @property
    def sent(self) -> float:
        """What the clients sent, to whomever."""
        return self.up + self.across


class Engine(Read):
    """Where the parties were."""

    engine: str = "local"
    workers: int = 1
    device: str = "cpu"
    remarks: tuple[str, ...] = ()


Name = Annotated[str, Field(pattern=f"^({'|'.join(measures.SCORES)})$")]
"""Of a score of parties with different columns."""


class Alone(Read):
    """The accuracy of parties that answer alone: on the test, and on their unaligned rows, if anybody knows it."""

    test: Spread
    own: Spread | None


class Attack(Read):
    """The share of labels that an attack finds out: the mean, and by party."""

    mean: float
    per_party: dict[str, float]


class Pretrained(Read):
    """The pretrained model of a server."""

    digest: str
    model: str | None
    norm: str | None
    file: str | None


class Summary(Read):
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
    architectures: tuple[str, ...] = ()
    engine: Engine | None
    accuracy: Spread
    own_accuracy: Spread | None
    ways: dict[str, Spread] = Field(default_factory=dict)
    scores: dict[Name, float] = Field(default_factory=dict)
    alone: dict[str, Alone] = Field(default_factory=dict)
    attacks: dict[str, Attack] = Field(default_factory=dict)
    agreement: float | None
    chance: float | None
    own_chance: float | None = None
    own_chances: dict[str, float | None] = Field(default_factory=dict)
    unseen: tuple[int, ...] = ()
    pretrained: Pretrained | None = None
    bytes: Bytes
    messages: int
    seconds: dict[str, float]
    failures: int
    public_sha256: str | None
    test_sha256: str | None = None
    state_sha256: str | None
    apart: bool = False

    @model_validator(mode="after")
    def _known(self) -> Summary:
        every = [self.unseen, *(found.clients or () for found in self.measures.values())]
        if not all(0 <= client < self.clients for numbers in every for client in numbers):
            raise ValueError(f"it names other clients than its {self.clients}")
        unseen = [way for way in self.ways if not way.endswith(measures.TRAINING)]
        if self.unseen and not all(way + measures.TRAINING in self.ways for way in unseen):
            raise ValueError("it must have each way of unseen and of training clients")
        return self

    @property
    def measures(self) -> dict[str, Spread]:
        """Its accuracies, the main one first."""
        return measures.by_name(self.accuracy, self.own_accuracy, self.ways)

    @property
    def main(self) -> str:
        """The measure that tells most."""
        return next(iter(self.measures))

    def on(self, measure: str) -> str:
        """What an accuracy is on, in words."""
        return measures.on(measure, self.own_accuracy is not None, bool(self.unseen), self.tested)

    @property
    def tested(self) -> str:
        """What the accuracy of each client is on, in words."""
        return "each client's own test rows" if self.apart else "the global test set"

    def chance_of(self, measure: str) -> float | None:
        """That accuracy of always answering the most frequent class."""
        if measure == measures.GLOBAL or self.own_accuracy is None:
            return self.chance
        return self.own_chances.get(measures.whose(measure), self.own_chance)

    def frequent(self, measure: str) -> str:
        """Which answer that is."""
        return measures.frequent(measure, self.own_accuracy is not None)


class Partition(Read):
    """`partition.json`: (N, K) rows of each class at each client, or what parties hold, or how many clients have rows
    that nobody else knows; and their networks."""

    classes: tuple[str, ...] = Field(min_length=1)
    counts: tuple[tuple[int, ...], ...] = ()
    parties: Parties | None = None
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
    def _held(self) -> Partition:
        if bool(self.counts) + bool(self.parties) + bool(self.apart) != 1:
            raise ValueError("it must have either the counts of clients, or parties, or how many have rows apart")
        return self

    @property
    def number(self) -> int:
        """Of clients or parties."""
        return self.apart or len(self.parties.parties if self.parties else self.counts)

    @property
    def widths(self) -> set[int]:
        """How many classes the counts tell apart."""
        if self.parties is None:
            return {len(row) for row in self.counts}
        unaligned = [p.unaligned_counts for p in self.parties.parties if p.unaligned_counts is not None]
        return {len(row) for row in (self.parties.aligned_counts, self.parties.test_counts, *unaligned)}


class Flow(Read):
    """A line of `ledger.csv`: messages of one kind and content between two roles in one round."""

    round: int
    sender: str
    receiver: str
    kind: str
    what: str
    count: int
    bytes: int
    wire_bytes: int


class Trouble(Read):
    """A line of `failures.csv`: a call that gave no usable reply."""

    round: int
    party: str
    kind: str
    reason: str


class Measure(Read):
    """A line of `metrics.csv`."""

    round: int
    iteration: int
    stage: str
    party: str
    measure: str
    value: float


class Mixing(Read):
    """A line of `mixing.csv`: the weights with which a client mixed models, by their owners' numbers."""

    round: int
    party: str
    weights: str = Field(pattern=r"^([0-9]+:\S+( [0-9]+:\S+)*)?$")


class Accuracy(Read):
    """A method's accuracy over the seeds of a comparison."""

    mean: float
    std_over_seeds: float | None
    std_over_clients: float


class AloneFound(Read):
    """The accuracy of parties that answer alone over seeds: see `Alone`."""

    test: Accuracy
    own: Accuracy | None


class NetworkFound(Read):
    """The mean accuracy over the clients of one network or black box, in all seeds; and what it is more than the same
    clients have in the method compared with."""

    clients: int
    mean: float
    gain: float | None = None


class MethodFound(Read):
    """A method in `comparison.json`."""

    name: str
    method: str
    preset: str
    seeds: tuple[int, ...]
    accuracy: Accuracy
    own_accuracy: Accuracy | None
    ways: dict[str, Accuracy]
    scores: dict[Name, Accuracy] = Field(default_factory=dict)
    alone: dict[str, AloneFound] = Field(default_factory=dict)
    networks: dict[str, NetworkFound] = Field(default_factory=dict)
    chance: float
    own_chance: float | None
    own_chances: dict[str, float] = Field(default_factory=dict)
    bytes: Bytes
    seconds: float
    failures: int

    @property
    def measures(self) -> dict[str, Accuracy]:
        """Its accuracies, the main one first."""
        return measures.by_name(self.accuracy, self.own_accuracy, self.ways)


class Difference(Read):
    """A paired difference in `comparison.json`: the first method minus the other."""

    first: str
    other: str
    mean: float | None
    std_over_seeds: float | None
    std_over_clients: float | None
    clients_better: int
    clients: int
    per_seed: tuple[float, ...]


class RunFound(Read):
    """Where the run of one method and seed is."""

    name: str
    seed: int
    folder: str | None


class Comparison(Read):
    """`comparison.json`: differences of the main measure, and further ones of the others that all runs have; and the
    unseen clients by seed, where there are any. What kinds of clients gain is over the method `gains_over`."""

    title: str
    reference: str
    methods: tuple[MethodFound, ...] = Field(min_length=1)
    unseen: dict[int, tuple[int, ...]] = Field(default_factory=dict)
    measure: str
    differences: tuple[Difference, ...]
    further: dict[str, tuple[Difference, ...]]
    runs: tuple[RunFound, ...]
    gains_over: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def columns(self) -> bool:
        """Whether parties hold different columns."""
        return any(m.scores for m in self.methods)

    @property
    def personal(self) -> bool:
        """Whether a method's parties are evaluated in further ways."""
        return any(m.ways for m in self.methods)

    def on(self, measure: str) -> str:
        """What an accuracy is on, in words."""
        unseen = any(way.endswith(measures.TRAINING) for m in self.methods for way in m.ways)
        return measures.on(measure, any(m.own_accuracy for m in self.methods), unseen)

    def chance_of(self, measure: str) -> float | None:
        """That accuracy of always answering the most frequent class, mean over methods."""
        own = measure != measures.GLOBAL and any(m.own_accuracy for m in self.methods)
        whose = measures.whose(measure)
        found = [m.own_chances.get(whose, m.own_chance) if own else m.chance for m in self.methods]
        known = [chance for chance in found if chance is not None]
        return sum(known) / len(known) if known else None

    def frequent(self, measure: str) -> str:
        """Which answer that is."""
        return measures.frequent(measure, any(m.own_accuracy for m in self.methods))
