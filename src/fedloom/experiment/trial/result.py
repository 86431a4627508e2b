"""The settings and the result of a trial."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from fedloom.core.errors import ConfigError
from fedloom.experiment.trial.decide import Decision

MetricName: TypeAlias = Literal["auc", "accuracy", "balanced accuracy"]
METRICS: tuple[MetricName, ...] = ("auc", "accuracy", "balanced accuracy")
DECISIONS: tuple[Decision, ...] = ("join", "alone", "undecided")
SHOWN = 5
"""Owners in the short form of a result."""
FORMAT = "fedloom-trial/1"


@dataclass(frozen=True)
class TrialConfig:
    """The settings of a trial.

    Attributes:
        splits: number of splits, at most, of every owner's rows; None for 10, or as many as fit into the time, up to
            30.
        seconds: time after which no further split begins; None for no limit. With a limit, candidates are left out, the
            last ones first, if five splits would not fit. Without one, equal seeds give equal results.
        methods: methods to try; () for a short list of the feasible ones.
        networks: names of networks; () for `linear` and `mlp` on tables, `cnn-small` on images.
        rates: learning rates of SGD.
        forest: whether a random forest is a candidate for training alone and on pooled rows.
        points: numbers of rounds to choose from.
        metric: the score; None for AUC with two classes, otherwise balanced accuracy.
        worth: the smallest gain that is worth federating for.
        test: the share of test rows, and of validation rows among the training rows.
        seed: of splits, initial weights and batches.
    """

    splits: int | None = None
    seconds: float | None = None
    methods: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.01, 0.05)
    forest: bool = True
    points: tuple[int, ...] = (5, 15, 30)
    metric: MetricName | None = None
    worth: float = 0.01
    test: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for valid, text in (
            (self.splits is None or self.splits >= 1, f"splits must be at least 1, not {self.splits}"),
            (self.seconds is None or self.seconds > 0, f"budget must be above 0 seconds, not {self.seconds}"),
            (self.metric in (None, *METRICS), f"metric must be one of {', '.join(METRICS)}, not {self.metric!r}"),
            (0 <= self.worth < 1, f"worth must be at least 0 and below 1, not {self.worth}"),
            (0 < self.test <= 0.5, f"test must be above 0 and at most 0.5, not {self.test}"),
            (len(self.rates) > 0 and min(self.rates) > 0, f"rates must be above 0, not {self.rates}"),
            (len(self.points) > 0 and min(self.points) > 0, f"points must be above 0, not {self.points}"),
        ):
            if not valid:
                raise ConfigError(text)


@dataclass(frozen=True)
class OwnerCard:
    """The answer for one owner.

    Attributes:
        decision: "join", "alone" or "undecided".
        by: "own" if the owner's own rows decided, "all" if all owners together; "" if undecided.
        method: the method that was chosen most often, with its evaluation mode.
        rows: labeled rows.
        gain, low, high: mean difference federated minus alone, and its 95 % interval; None if it is not known.
        alone, federated, pooled: mean scores on test rows.
        p_join, p_alone: p-values, adjusted for the number of owners.
        more_splits, more_rows: what would probably decide, see `decide.OwnerVerdict`; rows in all.
        sent, received: bytes of tensor data in a run of the method.
    """

    decision: Decision
    by: str
    method: str
    rows: int
    gain: float | None
    low: float | None
    high: float | None
    alone: float | None
    federated: float | None
    pooled: float | None
    p_join: float
    p_alone: float
    more_splits: int | None
    more_rows: int | None
    sent: int
    received: int


@dataclass(frozen=True, repr=False)
class TrialResult:
    """The result of a trial.

    Attributes:
        owners: each owner's card.
        overall: mean gain over owners, with its interval; and the mean scores. Owners count by how precisely their rows
            tell the score: by n_k n_l / n of their two largest classes.
        metric, worth, seed, splits: as used.
        chosen: how often each method was chosen for federating; `chosen_alone` for training alone.
        tried: the candidates of federating.
        not_tried: feasible methods that were left out.
        infeasible: methods that cannot be tried, with the reason.
        revealed: the messages of the method that was chosen most often, by sender, receiver, kind and content.
        notes: notes on the decisions that no setting made.
        per_split: for each split and owner, the scores (alone, federated, pooled).
        seconds: the time that the trial took.
    """

    owners: Mapping[str, OwnerCard]
    overall: Mapping[str, float | None]
    metric: str
    worth: float
    seed: int
    splits: int
    chosen: Mapping[str, int]
    chosen_alone: Mapping[str, int]
    tried: Sequence[str]
    not_tried: Sequence[str]
    infeasible: Mapping[str, str]
    revealed: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    per_split: Sequence[Mapping[str, Sequence[float | None]]]
    seconds: float

    def content(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {"format": FORMAT, **asdict(self)}

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{sum(card.decision == kind for card in self.owners.values())} {kind}" for kind in DECISIONS
        )
        lines = str(self).splitlines()
        more = [f"… and {len(lines) - SHOWN} owners more"] if len(lines) > SHOWN else []
        head = f"trial of {len(lines)} owners, {self.splits} splits, seed {self.seed}: {counts}"
        return "\n  ".join([head, *lines[:SHOWN], *more])

    def __str__(self) -> str:
        return "\n".join(f"{name}: {sentence(card, self.metric)}" for name, card in self.owners.items())


def signed(value: float) -> str:
    """A difference of scores with its sign, such as "−0.012"."""
    return f"{value:+.3f}".replace("-", "−")


def sentence(card: OwnerCard, metric: str) -> str:
    """The card in one line, such as "join with fedavg-ft: AUC +0.034 (95 % +0.010 to +0.058)"."""
    name = "AUC" if metric == "auc" else metric
    known = "" if card.gain is None else f"{name} {signed(card.gain)}"
    interval = "" if card.low is None or card.high is None else f" (95 % {signed(card.low)} to {signed(card.high)})"
    if card.decision == "join":
        return f"join with {card.method}: {known}{interval}"
    if card.decision == "alone":
        others = "; all owners together do not gain" if card.by == "all" else ""
        return f"stay alone: {known}{interval} with {card.method}{others}"
    need = "no realistic number of rows would decide"
    if card.more_splits is not None:
        need = f"about {card.more_splits} splits would decide"
    elif card.more_rows is not None:
        need = f"about {card.more_rows:,} rows would decide; there are {card.rows:,}"
    return f"undecided: {known}{interval}; {need}" if known else f"undecided: too few rows of each class; {need}"
