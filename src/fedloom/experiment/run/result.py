"""The schema of `result.json` and `comparison.json`, for writers and readers."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedloom.experiment.run import metrics
from fedloom.experiment.run.metrics import ATTACK, GLOBAL, OWN, SCORES, TRAINING

Final: TypeAlias = Mapping[tuple[str, str], float]
"""The last value of each (metric, party); the party is "" for the whole federation."""


class FileSchema(BaseModel):
    """The content of a file, or part of it. A reader ignores unknown keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def content(self) -> dict[str, Any]:
        """The values to write to the file: all that were set."""
        return self.model_dump(exclude_unset=True)


class Spread(FileSchema):
    """A metric: mean and standard deviation over clients, and each client's value; over `clients`, or all if None."""

    mean: float
    std: float
    per_client: list[float]
    clients: list[int] | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> "Spread":
        if self.clients is not None and len(self.clients) != len(self.per_client):
            raise ValueError(f"must have one value for each of {len(self.clients)} clients")
        return self

    def over(self, number: int) -> np.ndarray:
        """(N,) values of all clients; nan for those without one."""
        each = np.full(number, np.nan)
        each[list(range(number) if self.clients is None else self.clients)] = self.per_client
        return each


class Traffic(FileSchema):
    """Bytes of tensor data `up` to the coordinator, `down` from it, and `across` between the others; means over seeds
    in a comparison."""

    up: int | float
    down: int | float
    across: int | float

    @property
    def sent(self) -> float:
        """Bytes sent by the clients."""
        return self.up + self.across


class EngineUsed(FileSchema):
    """The engine of a run; `requested` is that of the config."""

    requested: str = ""
    engine: str = "local"
    workers: int = 1
    device: str = "cpu"
    remarks: list[str] = []


class PretrainedUsed(FileSchema):
    """The server's pretrained model: digest; name and norm, if known; file, if any."""

    digest: str
    model: str | None
    norm: str | None
    file: str | None


class SoloAccuracy(FileSchema):
    """The accuracy of parties that predict alone: on the test rows, and on their unaligned rows if labels are known."""

    test: Spread
    own: Spread | None


class AttackSuccess(FileSchema):
    """The share of labels that an attack infers: mean, and by party."""

    mean: float
    per_party: dict[str, float]


class MeasuredLeak(FileSchema):
    """The success of an attack on messages of a kind, over parties: see
    `fedloom.protect.leaks.Leak`."""

    message: str
    attack: str
    success: float
    chance: float
    gain: tuple[float, float] | None
    parties: int


class Learned(FileSchema):
    """A table of what the server has learned: see `fedloom.core.party.LearnedTable`."""

    title: str
    columns: list[str]
    rows: list[list[str | float | None]]


class PrivacySpent(FileSchema):
    """The differential privacy of the messages of one kind.

    `adjacency` is the difference between adjacent data sets; `epsilon` is over the clients that sent it. `simulated`
    noise comes from the run's seed and protects nobody.
    """

    message: str
    adjacency: str
    delta: float
    epsilon: Spread
    simulated: bool


ScoreName = Annotated[str, Field(pattern=f"^({'|'.join(SCORES)})$")]


class RunSummary(FileSchema):
    """The content of `result.json`. Standard deviations are population ones, over clients.

    A run in progress has no hashes. `client_scores` are for the horizontal setting: AUC,
    balanced accuracy, loss (in nats) and calibration error of each client, on the global test set and on `own` rows.
    `scores`, `alone` and `attacks` are for the vertical setting.
    """

    name: str
    method: str
    title: str
    preset: str
    params: dict[str, Any] = {}
    seed: int
    rounds: int
    iterations: int
    dataset: str
    clients: int
    architectures: list[str] = []
    engine: EngineUsed | None
    pretrained: PretrainedUsed | None = None
    unseen: list[int] = []
    accuracy: Spread
    own_accuracy: Spread | None
    eval_modes: dict[str, Spread]
    client_scores: dict[str, Spread] = {}
    scores: dict[ScoreName, float] = {}
    alone: dict[str, SoloAccuracy] = {}
    attacks: dict[str, AttackSuccess] = {}
    privacy: list[PrivacySpent] = []
    leaks: list[MeasuredLeak] = []
    learned: list[Learned] = []
    agreement: float | None
    chance: float | None
    own_chance: float | None = None
    own_chances: dict[str, float | None] = {}
    bytes: Traffic
    bytes_by_kind: list[dict[str, Any]] = []
    messages: int
    seconds: dict[str, float]
    failures: int
    failure_reasons: dict[str, int] = {}
    public_sha256: str | None
    test_sha256: str | None = None
    state_sha256: str | None
    warnings: list[str] = []
    private_rows: bool = False
    validation: float = 0.0
    fedloom: str = ""

    @model_validator(mode="after")
    def _check_clients(self) -> "RunSummary":
        lists = [self.unseen, *(found.clients or () for found in self.accuracies.values())]
        if not all(0 <= client < self.clients for clients in lists for client in clients):
            raise ValueError(f"client ids must be 0–{self.clients - 1}")
        unseen = [eval_mode for eval_mode in self.eval_modes if not eval_mode.endswith(TRAINING)]
        if self.unseen and not all(eval_mode + TRAINING in self.eval_modes for eval_mode in unseen):
            raise ValueError("must have each evaluation mode for unseen and for training clients")
        return self

    @property
    def accuracies(self) -> dict[str, Spread]:
        """Accuracies by name in `metrics.csv`, the main one first. With unseen clients, an evaluation mode is
        over these, and those with the suffix `TRAINING` over the others."""
        return metrics.by_name(self.accuracy, self.own_accuracy, self.eval_modes)

    @property
    def compared(self) -> dict[str, Spread]:
        """The metrics of a comparison: scores of the joint prediction, or accuracies of the clients."""
        if self.scores:
            return {name: Spread(mean=v, std=0.0, per_client=[v]) for name, v in self.scores.items()}
        return self.accuracies

    @property
    def main(self) -> str:
        """The main metric."""
        return next(iter(self.accuracies))

    @property
    def tested(self) -> str:
        """The test rows of the accuracy, as text."""
        rows = "validation" if self.validation else "test"
        return f"each client's own {rows} rows" if self.private_rows else f"the global {rows} set"

    def describe(self, metric: str) -> str:
        """The rows and evaluation mode of an accuracy, as text."""
        return metrics.described(metric, self.own_accuracy is not None, bool(self.unseen), self.tested)

    def chance_of(self, metric: str) -> float | None:
        """The chance level of an accuracy."""
        if metric == GLOBAL or self.own_accuracy is None:
            return self.chance
        return self.own_chances.get(metrics.group_of(metric), self.own_chance)

    def most_frequent(self, metric: str) -> str:
        """The prediction of `chance_of`, as text."""
        return metrics.most_frequent(metric, self.own_accuracy is not None)


def over_clients(
    final: Final, metric: str, names: Sequence[str], clients: Sequence[int] | None = None
) -> Spread | None:
    """A metric over those of these clients, or of all, that have it; None if none has."""
    wanted = range(len(names)) if clients is None else clients
    of = [i for i in wanted if (metric, names[i]) in final]
    if not of:
        return None
    each = [final[metric, names[i]] for i in of]
    known = {} if len(of) == len(names) else {"clients": of}
    return Spread(mean=float(np.mean(each)), std=float(np.std(each)), per_client=each, **known)


def joint_scores(final: Final, names: Sequence[str], eval_modes: Sequence[str]) -> dict[str, Any]:
    """The fields of `RunSummary` for the vertical setting: scores of the joint prediction, parties alone,
    and success of attacks."""
    accuracy = final["accuracy mean", ""]
    attacks: dict[str, dict[str, float]] = {}
    for (metric, party), value in final.items():
        if metric.startswith(ATTACK) and party:
            attacks.setdefault(metric.removeprefix(ATTACK), {})[party] = value
    return {
        "accuracy": Spread(mean=accuracy, std=0.0, per_client=[accuracy]),
        "own_accuracy": None,
        "eval_modes": {},
        "scores": {name: final[score.column, ""] for name, score in SCORES.items() if (score.column, "") in final},
        "alone": {
            eval_mode: {
                "test": over_clients(final, f"{GLOBAL} {eval_mode}", names),
                "own": over_clients(final, f"{OWN} {eval_mode}", names),
            }
            for eval_mode in eval_modes
        },
        "attacks": {
            name: {"mean": float(np.mean([*each.values()])), "per_party": each} for name, each in attacks.items()
        },
    }


class SeedSpread(FileSchema):
    """A metric of one method over the seeds of a comparison."""

    mean: float
    std_over_seeds: float | None
    std_over_clients: float


class SoloOverSeeds(FileSchema):
    """`SoloAccuracy` over seeds."""

    test: SeedSpread
    own: SeedSpread | None


class NetworkGain(FileSchema):
    """The mean of the main metric over the clients of one network or black box in all seeds, and its `gain` over the
    same clients of the baseline."""

    clients: int
    mean: float
    gain: float | None = None


class MethodSummary(FileSchema):
    """A method in `comparison.json`."""

    name: str
    method: str
    preset: str
    seeds: list[int]
    accuracy: SeedSpread
    own_accuracy: SeedSpread | None
    scores: dict[ScoreName, SeedSpread] = {}
    alone: dict[str, SoloOverSeeds] = {}
    eval_modes: dict[str, SeedSpread]
    networks: dict[str, NetworkGain] = {}
    chance: float
    own_chance: float | None
    own_chances: dict[str, float] = {}
    bytes: Traffic
    seconds: float
    failures: int

    @property
    def accuracies(self) -> dict[str, SeedSpread]:
        """Accuracies by name, the main one first."""
        return metrics.by_name(self.accuracy, self.own_accuracy, self.eval_modes)


class PairedDifference(FileSchema):
    """The first method minus the other, on common seeds. `clients_better`: where the first is better. `interval`: the
    95 % interval of the mean over seeds (Student's t); None for one seed."""

    first: str
    other: str
    mean: float | None
    std_over_seeds: float | None
    std_over_clients: float | None
    clients_better: int
    clients: int
    per_seed: list[float]
    interval: list[float] | None = None


class ComparedRun(FileSchema):
    """The folder of one method and seed."""

    name: str
    seed: int
    folder: str | None


class Comparison(FileSchema):
    """The content of `comparison.json`.

    `differences` are those of the main `metric`, `further` those of the other common metrics. Gains of networks are
    over the method `gains_over`. `unseen` lists the unseen clients by seed.
    """

    title: str
    reference: str
    methods: list[MethodSummary] = Field(min_length=1)
    gains_over: str = ""
    unseen: dict[str, list[int]] = {}
    metric: str
    differences: list[PairedDifference]
    further: dict[str, list[PairedDifference]]
    lower_is_better: list[str] = []
    remarks: list[str] = []
    runs: list[ComparedRun]

    @property
    def joint(self) -> bool:
        """Whether the setting is vertical, with a joint prediction."""
        return any(m.scores for m in self.methods)

    @property
    def personal(self) -> bool:
        """Whether a method has evaluation modes."""
        return any(m.eval_modes for m in self.methods)

    @property
    def several_seeds(self) -> bool:
        """Whether a method has more than one seed."""
        return any(len(m.seeds) > 1 for m in self.methods)

    @property
    def networks(self) -> list[tuple[str, int, list[tuple[float | None, float | None]]]]:
        """For each network or black box, if several: name, clients in all seeds, and by method the mean of the
        main metric and the gain over `gains_over`, None if missing."""
        found = []
        for name in sorted({name for m in self.methods for name in m.networks}):
            each = [(m.networks.get(name), self.gains_over not in ("", m.name)) for m in self.methods]
            values = [(one.mean if one else None, one.gain if one and other else None) for one, other in each]
            found.append((name, max(one.clients for one, _ in each if one), values))
        return found

    def describe(self, metric: str) -> str:
        """The rows and evaluation mode of an accuracy, as text."""
        unseen = any(eval_mode.endswith(TRAINING) for m in self.methods for eval_mode in m.eval_modes)
        return metrics.described(metric, any(m.own_accuracy for m in self.methods), unseen)

    def chance_of(self, metric: str) -> float | None:
        """The chance level of an accuracy, mean over methods."""
        own, group = metric != GLOBAL and any(m.own_accuracy for m in self.methods), metrics.group_of(metric)
        found = [m.own_chances.get(group, m.own_chance) if own else m.chance for m in self.methods]
        known = [chance for chance in found if chance is not None]
        return sum(known) / len(known) if known else None

    def most_frequent(self, metric: str) -> str:
        """The prediction of `chance_of`, as text."""
        return metrics.most_frequent(metric, any(m.own_accuracy for m in self.methods))
