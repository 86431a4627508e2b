"""The schema of `result.json` and `comparison.json`, for writers and readers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from fedloom.data.options import Task as TaskKind
from fedloom.experiment.run import metrics
from fedloom.experiment.run.metrics import (
    ATTACK,
    GLOBAL,
    GLOBAL_ROWS,
    MAIN,
    MAIN_MODE,
    OF_NUMBERS,
    OWN,
    SCORES,
    UNADAPTED,
    Metric,
    parse,
    prepared,
)

T = TypeVar("T")
Final: TypeAlias = Mapping[tuple[str, str], float]
"""The last value of each (metric, party), as in `metrics.csv`; the party is "" for the whole
federation.
"""


class FileSchema(BaseModel):
    """The content of a file, or part of it. A reader ignores unknown keys."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    def content(self) -> dict[str, Any]:
        """The values to write to the file: all that were set."""
        return self.model_dump(exclude_unset=True)


class Spread(FileSchema):
    """A metric: mean and standard deviation over clients, and each client's value; over `clients`,
    or all if None.
    """

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


def _main_metrics(
    task: TaskKind, overall: T, own: T | None, eval_modes: Mapping[Metric, T]
) -> dict[Metric, T]:
    """The main metric of the task on all existing rows and modes, the most important first."""
    on_test, on_own = MAIN[task]
    owned = {} if own is None else {on_own: own}
    return {**eval_modes, **owned, on_test: overall} if eval_modes else {on_test: overall, **owned}


def _of_task(task: TaskKind, eval_modes: Mapping[Metric, T]) -> dict[Metric, T]:
    """The same evaluation modes with the main metric of the task: files have the modes only."""
    return {replace(mode, name=MAIN[task][1].name): value for mode, value in eval_modes.items()}


class Traffic(FileSchema):
    """Bytes of tensor data `up` to the coordinator, `down` from it, and `across` between the
    others; means over seeds in a comparison.
    """

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
    """The accuracy of parties that predict alone: on the test rows, and on their unaligned rows if
    labels are known.
    """

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

    `adjacency` is the difference between adjacent data sets; `epsilon` is over the clients that
    sent it. `simulated` noise comes from the run's seed and protects nobody.
    """

    message: str
    adjacency: str
    delta: float
    epsilon: Spread
    simulated: bool


def _read(value: object, known: Callable[[str], Metric]) -> object:
    return known(value) if isinstance(value, str) else value


def _score(name: str) -> Metric:
    if (metric := parse(name)) not in SCORES:
        raise ValueError(f"must be one of {', '.join(map(str, SCORES))}")
    return metric


def _eval_mode(metric: Metric) -> str:
    return metric.eval_mode


MetricText = Annotated[Metric, BeforeValidator(partial(_read, known=parse)), PlainSerializer(str)]
"""A metric; in files, its text."""
ScoreName = Annotated[Metric, BeforeValidator(partial(_read, known=_score)), PlainSerializer(str)]
"""A score of the joint prediction; in files, its name."""
EvalMode = Annotated[
    Metric, BeforeValidator(partial(_read, known=prepared)), PlainSerializer(_eval_mode)
]
"""The accuracy on own rows in an evaluation mode; in files, the mode, with the suffix `training`
for training clients where others are unseen.
"""


class RunSummary(FileSchema):
    """The content of `result.json`. Standard deviations are population ones, over clients.

    `entry` is its table in `[compare]`; `local_steps` the mean number of local optimizer steps of a
    training client, None where it is unknown; `training_rows` the number of own rows of all clients
    that train; `natural` says whether clients are the owners of their rows; `diverged` says why no
    model of the run is usable, "" if one is. A run in progress has no hashes. `client_scores` are
    for the horizontal setting: AUC, balanced accuracy, loss (in nats) and calibration error of
    each client, on the global test set and on `own` rows. `scores`, `alone` and `attacks` are for
    the vertical setting. Where the label is a number (`task`), `rmse` and `own_rmse` take the place
    of accuracies, in the unit of the column `label`, also in `eval_modes` and chance levels;
    `client_scores` are MAE and R².
    """

    name: str
    method: str
    title: str
    paper: str = ""
    preset: str
    entry: dict[str, Any] = {}
    params: dict[str, Any] = {}
    local: dict[str, Any] = {}
    seed: int
    rounds: int
    iterations: int
    local_steps: float | None = None
    training_rows: int | None = None
    dataset: str
    clients: int
    architectures: list[str] = []
    engine: EngineUsed | None
    pretrained: PretrainedUsed | None = None
    unseen: list[int] = []
    task: TaskKind = "classes"
    label: str = ""
    accuracy: Spread | None = None
    own_accuracy: Spread | None = None
    rmse: Spread | None = None
    own_rmse: Spread | None = None
    eval_modes: dict[EvalMode, Spread]
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
    diverged: str = ""
    private_rows: bool = False
    natural: bool = False
    validation: float = 0.0
    fitted: bool = False
    fedloom: str = ""

    @field_validator("eval_modes", mode="after")
    @classmethod
    def _name_modes(cls, modes: dict[Metric, Spread], info: ValidationInfo) -> dict[Metric, Spread]:
        return _of_task(info.data.get("task", "classes"), modes)

    @model_validator(mode="after")
    def _check_clients(self) -> "RunSummary":
        if self.accuracy is None and self.rmse is None:
            raise ValueError("must have accuracy or rmse")
        lists = [self.unseen, *(found.clients or () for found in self.accuracies.values())]
        if not all(0 <= client < self.clients for clients in lists for client in clients):
            raise ValueError(f"client ids must be 0–{self.clients - 1}")
        if self.unseen and not all(
            metric.training in self.eval_modes for metric in self.eval_modes
        ):
            raise ValueError("must have each evaluation mode for unseen and for training clients")
        return self

    @property
    def overall(self) -> Spread:
        """The main metric of the task on the global test set."""
        found = self.accuracy or self.rmse
        assert found is not None
        return found

    @property
    def own(self) -> Spread | None:
        """The main metric of the task on own test rows, if clients have such."""
        return self.own_accuracy or self.own_rmse

    @property
    def on_test(self) -> Metric:
        """What `overall` measures."""
        return MAIN[self.task][0]

    @property
    def on_own(self) -> Metric:
        """What `own` measures."""
        return MAIN[self.task][1]

    @property
    def accuracies(self) -> dict[Metric, Spread]:
        """The main metric of the task on all existing rows and modes, the most important first.
        With unseen clients, an evaluation mode is over these, and the metrics of the group
        `training` over the others.
        """
        return _main_metrics(self.task, self.overall, self.own, self.eval_modes)

    @property
    def compared(self) -> dict[Metric, Spread]:
        """The metrics of a comparison: scores of the joint prediction, or accuracies of the
        clients.
        """
        if self.scores:
            return {
                name: Spread(mean=v, std=0.0, per_client=[v]) for name, v in self.scores.items()
            }
        return self.accuracies

    @property
    def main(self) -> Metric:
        """The main metric."""
        return next(iter(self.accuracies))

    @property
    def used(self) -> Metric:
        """The main metric on own rows, if there are such, in the first evaluation mode."""
        return next(iter(self.eval_modes), self.on_test if self.own is None else self.on_own)

    def called(self, metric: Metric) -> Metric:
        """The run's own metric for one of a comparison."""
        if metric.mode != MAIN_MODE:
            return metric
        return next((own for own in self.eval_modes if own.group == metric.group), self.used)

    def of(self, metric: Metric) -> Spread | None:
        """The values of a metric of a comparison. With unseen clients, `MAIN_MODE` is over these
        or, in its group `training`, over the others, also of methods without evaluation modes.
        """
        found = self.compared.get(self.called(metric))
        if found is None or metric.mode != MAIN_MODE or not self.unseen or self.eval_modes:
            return found
        each = found.over(self.clients)
        of = [i for i in range(self.clients) if (i in self.unseen) != bool(metric.group)]
        of = [i for i in of if np.isfinite(each[i])]
        return Spread(
            mean=float(each[of].mean()),
            std=float(each[of].std()),
            per_client=each[of].tolist(),
            clients=of,
        )

    @property
    def tested(self) -> str:
        """The test rows of the accuracy, as text."""
        if self.fitted:
            return "the rows that were fitted"
        rows = "validation" if self.validation else "test"
        return f"each client's own {rows} rows" if self.private_rows else f"the global {rows} set"

    @property
    def mine(self) -> str:
        """What own test rows are, as text."""
        return metrics.own_rows_of(self.natural or self.task == "number")

    def describe(self, metric: Metric) -> str:
        """The rows and evaluation mode of an accuracy, as text."""
        return metrics.described(
            metric, self.own is not None, bool(self.unseen), self.tested, self.natural
        )

    def chance_of(self, metric: Metric) -> float | None:
        """The chance level of an accuracy."""
        if not metric.own or self.own is None:
            return self.chance
        return self.own_chances.get(metric.clients, self.own_chance)

    def most_frequent(self, metric: Metric) -> str:
        """The prediction of `chance_of`, as text."""
        return metrics.most_frequent(metric, self.own is not None)


def shared_metrics(summaries: Sequence[RunSummary]) -> list[Metric]:
    """The metrics that all runs have, the main one first: what a comparison, its tables and the
    tuning of rates compare methods by.

    If a method has evaluation modes, or the clients are natural owners, this is the accuracy on own
    rows of each method in its main mode: `MAIN_MODE`, or the mode itself if all have one.
    Otherwise it is the accuracy on the global test set or, in the vertical setting, of the joint
    prediction.
    """
    found = [
        metric for metric in summaries[0].compared if all(metric in s.compared for s in summaries)
    ]
    on_test, on_own = summaries[0].on_test, summaries[0].on_own
    # evaluation modes are on other rows
    if on_own not in found and any(on_own in s.compared for s in summaries):
        return [on_test]
    main, used = on_test if on_test in found else found[0], {s.used for s in summaries}
    if any((s.eval_modes or s.natural) and not s.scores for s in summaries):
        main = used.pop() if len(used) == 1 else replace(on_own, mode=MAIN_MODE)
    return [main, *(metric for metric in found if metric != main)]


def over_clients(
    final: Final, metric: Metric, names: Sequence[str], clients: Sequence[int] | None = None
) -> Spread | None:
    """A metric over those of these clients, or of all, that have it; None if none has."""
    wanted = range(len(names)) if clients is None else clients
    of = [i for i in wanted if (str(metric), names[i]) in final]
    if not of:
        return None
    each = [final[str(metric), names[i]] for i in of]
    known = {} if len(of) == len(names) else {"clients": of}
    return Spread(mean=float(np.mean(each)), std=float(np.std(each)), per_client=each, **known)


def over_groups(
    final: Final,
    names: Sequence[str],
    eval_modes: Iterable[str],
    unseen: Sequence[int],
    task: TaskKind = "classes",
) -> dict[str, Any]:
    """The main metrics of `RunSummary` for the horizontal setting, without and in each evaluation
    mode.
    """
    on_test, own = MAIN[task]
    modes = [replace(own, mode=eval_mode) for eval_mode in eval_modes]
    clients: dict[Metric, Sequence[int] | None] = dict.fromkeys(modes)
    if unseen:
        training = [i for i in range(len(names)) if i not in unseen]
        clients = {
            **dict.fromkeys(modes, unseen),
            **dict.fromkeys((mode.training for mode in modes), training),
        }
    found = {metric: over_clients(final, metric, names, of) for metric, of in clients.items()}
    return {
        on_test.name: over_clients(final, on_test, names),
        f"own_{own.name}": over_clients(final, own, names),
        "eval_modes": {metric: spread for metric, spread in found.items() if spread is not None},
    }


def joint_scores(
    final: Final, names: Sequence[str], eval_modes: Sequence[str], task: TaskKind = "classes"
) -> dict[str, Any]:
    """The fields of `RunSummary` for the vertical setting: scores of the joint prediction, parties
    alone, and success of attacks.
    """
    main = MAIN[task][0]
    reached = final[main.mean, ""]
    attacks: dict[str, dict[str, float]] = {}
    for (text, party), value in final.items():
        if party and (metric := parse(text)).name == ATTACK:
            attacks.setdefault(metric.mode, {})[party] = value
    return {
        main.name: Spread(mean=reached, std=0.0, per_client=[reached]),
        f"own_{main.name}": None,
        "eval_modes": {},
        "scores": {
            name: final[score.column, ""]
            for name, score in SCORES.items()
            if (score.column, "") in final and (task == "classes" or name.name in OF_NUMBERS)
        },
        "alone": {
            eval_mode: {
                "test": over_clients(final, replace(GLOBAL, mode=eval_mode), names),
                "own": over_clients(final, replace(OWN, mode=eval_mode), names),
            }
            for eval_mode in eval_modes
        },
        "attacks": {
            name: {"mean": float(np.mean([*each.values()])), "per_party": each}
            for name, each in attacks.items()
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
    """The mean of the main metric over the clients of one network or black box in all seeds, and
    its `gain` over the same clients of the baseline.
    """

    clients: int
    mean: float
    gain: float | None = None


class MethodSummary(FileSchema):
    """A method in `comparison.json`. Where each method has its own main evaluation mode, `mode` is
    this one, and `main` its value of the comparison's metric.
    """

    name: str
    method: str
    paper: str = ""
    preset: str
    seeds: list[int]
    task: TaskKind = "classes"
    accuracy: SeedSpread | None = None
    own_accuracy: SeedSpread | None = None
    rmse: SeedSpread | None = None
    own_rmse: SeedSpread | None = None
    scores: dict[ScoreName, SeedSpread] = {}
    alone: dict[str, SoloOverSeeds] = {}
    eval_modes: dict[EvalMode, SeedSpread]
    mode: str = ""
    main: SeedSpread | None = None
    networks: dict[str, NetworkGain] = {}
    chance: float
    own_chance: float | None
    own_chances: dict[str, float] = {}
    bytes: Traffic
    seconds: float
    failures: int
    private_rows: bool = False

    @field_validator("eval_modes", mode="after")
    @classmethod
    def _name_modes(
        cls, modes: dict[Metric, SeedSpread], info: ValidationInfo
    ) -> dict[Metric, SeedSpread]:
        return _of_task(info.data.get("task", "classes"), modes)

    @property
    def overall(self) -> SeedSpread:
        """The main metric of the task on the global test set."""
        found = self.accuracy or self.rmse
        assert found is not None
        return found

    @property
    def own(self) -> SeedSpread | None:
        """The main metric of the task on own test rows, if clients have such."""
        return self.own_accuracy or self.own_rmse

    @property
    def accuracies(self) -> dict[Metric, SeedSpread]:
        """As `RunSummary.accuracies`."""
        return _main_metrics(self.task, self.overall, self.own, self.eval_modes)

    def of(self, metric: Metric) -> SeedSpread | None:
        """The value of a metric of the comparison."""
        if metric.mode == MAIN_MODE:
            return None if metric.group else self.main
        return (self.scores or self.accuracies).get(metric)


class PairedDifference(FileSchema):
    """The first method minus the other, on common seeds. `clients_better`: where the first is
    better, of `clients` clients in all seeds; `clients_level`: where both are equal. `interval`:
    the 95 % interval of the mean over seeds (Student's t); None for one seed.
    """

    first: str
    other: str
    mean: float | None
    std_over_seeds: float | None
    std_over_clients: float | None
    clients_better: int
    clients: int
    clients_level: int = 0
    per_seed: list[float]
    interval: list[float] | None = None


class ComparedRun(FileSchema):
    """The folder of one method and seed."""

    name: str
    seed: int
    folder: str | None


class LeftOutRun(ComparedRun):
    """A run that diverged or failed, which is part of no mean and no difference, and the reason."""

    diverged: bool
    reason: str


class Comparison(FileSchema):
    """The content of `comparison.json`.

    `tested` are the rows of an accuracy that is not on own rows, `natural` says whether own rows
    are those of natural owners. `differences` are those of the main `metric`, `further` those of
    the other common metrics. Gains of networks are over the method `gains_over`. `unequal` says
    what makes the comparison unfair. `unseen` lists the unseen clients by seed. `runs` were
    compared; those `left_out` diverged or failed.
    """

    title: str
    reference: str
    methods: list[MethodSummary] = Field(min_length=1)
    gains_over: str = ""
    tested: str = GLOBAL_ROWS
    natural: bool = False
    unseen: dict[str, list[int]] = {}
    metric: MetricText
    differences: list[PairedDifference]
    further: dict[MetricText, list[PairedDifference]]
    lower_is_better: list[MetricText] = []
    unequal: list[str] = []
    remarks: list[str] = []
    runs: list[ComparedRun]
    left_out: list[LeftOutRun] = []

    @property
    def task(self) -> TaskKind:
        """What all methods predict."""
        return self.methods[0].task

    @property
    def on_test(self) -> Metric:
        """The main metric of the task on the global test set."""
        return MAIN[self.task][0]

    @property
    def on_own(self) -> Metric:
        """The main metric of the task on own test rows."""
        return MAIN[self.task][1]

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
    def without_result(self) -> dict[str, str]:
        """The methods of which all runs are left out: "diverged" or "failed" by name."""
        known = {m.name for m in self.methods}
        diverged = {one.name for one in self.left_out if one.diverged}
        names = dict.fromkeys(one.name for one in self.left_out if one.name not in known)
        return {name: "diverged" if name in diverged else "failed" for name in names}

    @property
    def networks(self) -> list[tuple[str, int, list[tuple[float | None, float | None]]]]:
        """For each network or black box, if several: name, clients in all seeds, and by method the
        mean of the main metric and the gain over `gains_over`, None if missing.
        """
        found = []
        for name in sorted({name for m in self.methods for name in m.networks}):
            each = [
                (m.networks.get(name), self.gains_over not in ("", m.name)) for m in self.methods
            ]
            values = [
                (one.mean if one else None, one.gain if one and other else None)
                for one, other in each
            ]
            found.append((name, max(one.clients for one, _ in each if one), values))
        return found

    def describe(self, metric: Metric) -> str:
        """The rows and evaluation mode of an accuracy, as text."""
        unseen = any(mode.group for m in self.methods for mode in m.eval_modes)
        own = any(m.own for m in self.methods)
        return metrics.described(metric, own, unseen, self.tested, self.natural)

    @property
    def mine(self) -> str:
        """What own test rows are, as text."""
        return metrics.own_rows_of(self.natural or self.task == "number")

    @property
    def by_mode(self) -> dict[str, list[str]]:
        """The names of the methods by main evaluation mode, if the metric has each in its own."""
        found: dict[str, list[str]] = {}
        for m in self.methods if self.metric.mode == MAIN_MODE else ():
            found.setdefault(m.mode or UNADAPTED, []).append(m.name)
        return found

    @property
    def measured(self) -> str:
        """The main metric, its rows and its mode, as text: `accuracy on own class mix, tuned`."""
        rows = "on the test rows" if self.joint else self.describe(self.metric)
        return f"{self.metric.noun} {rows}"

    @property
    def measured_in(self) -> str:
        """`measured`, and the main mode of each method where these differ."""
        modes = "; ".join(f"{', '.join(names)}: {mode}" for mode, names in self.by_mode.items())
        return f"{self.measured} ({modes})" if modes else self.measured

    def values(self, metric: Metric) -> dict[str, SeedSpread]:
        """The value of a metric by the name of each method that has it."""
        return {m.name: one for m in self.methods if (one := m.of(metric)) is not None}

    @property
    def below(self) -> dict[str, dict[int, float]]:
        """The reference minus each method in the main metric, by seed."""
        seeds = {m.name: m.seeds for m in self.methods}
        found = {self.reference: dict.fromkeys(seeds[self.reference], 0.0)}
        for d in self.differences:
            common = [seed for seed in seeds[self.reference] if seed in seeds[d.other]]
            found[d.other] = dict(zip(common, d.per_seed, strict=True))
        return found

    @property
    def ranking(self) -> list[MethodSummary]:
        """The methods with the main metric, the best first: by their means or, if some lack a seed,
        by their differences on the seeds that all have.
        """
        sign = 1 if self.metric.lower_is_better else -1
        values = {name: one.mean for name, one in self.values(self.metric).items()}
        having, below = [m for m in self.methods if m.name in values], self.below
        common = set.intersection(*({*below.get(m.name, ())} for m in having)) if having else set()
        if common and any({*m.seeds} != common for m in having):
            values = {m.name: -sum(below[m.name][seed] for seed in common) for m in having}
        return sorted(having, key=lambda m: values[m.name] * sign)

    @property
    def for_everybody(self) -> list[PairedDifference]:
        """The differences on rows of everybody, where own rows lead."""
        return self.further.get(self.on_test, []) if self.metric.own else []

    def chance_of(self, metric: Metric) -> float | None:
        """The chance level of an accuracy, mean over methods."""
        own = metric.own and any(m.own for m in self.methods)
        found = [
            m.own_chances.get(metric.clients, m.own_chance) if own else m.chance
            for m in self.methods
        ]
        known = [chance for chance in found if chance is not None]
        return sum(known) / len(known) if known else None

    def most_frequent(self, metric: Metric) -> str:
        """The prediction of `chance_of`, as text."""
        return metrics.most_frequent(metric, any(m.own for m in self.methods))
