"""The settings and the result of a trial."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from fedloom.core.errors import ConfigError
from fedloom.core.scores import calibration_error
from fedloom.experiment.cards import html_card, latex_table
from fedloom.experiment.trial.contributions import CLASS_SCORES, NUMBER_SCORES
from fedloom.experiment.trial.decide import Decision, OwnerVerdict
from fedloom.experiment.trial.evidence import Evidence
from fedloom.experiment.trial.partners import Partners
from fedloom.experiment.trial.words import (
    head,
    next_step,
    probability,
    score_name,
    sentence,
    shown_gain,
)
from fedloom.models.black_boxes import BLACK_BOXES, check_installed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MetricName: TypeAlias = Literal[
    "auc", "accuracy", "balanced accuracy", "log loss", "brier", "rmse", "mae", "r2"
]
METRICS: tuple[MetricName, ...] = (
    "auc",
    "accuracy",
    "balanced accuracy",
    "log loss",
    "brier",
    "rmse",
    "mae",
    "r2",
)
DECISIONS: tuple[Decision, ...] = ("join", "alone", "same", "undecided", "too few")
SHOWN = 5
"""Owners in the short form of a result."""
FORMAT = "fedloom-trial/2"


@dataclass(frozen=True)
class TrialConfig:
    """The settings of a trial.

    Attributes:
        repeats: number of repeats of the folds, at most: a trial ends after two if every owner is
            decided. None for 3.
        seconds: time after which no further repeat begins; None for no limit. With a limit,
            candidates are left out, the last ones first, if two repeats would not fit. Without one,
            equal seeds give equal results.
        methods: methods to try; () for a short list of the feasible ones.
        networks: names of networks; () for `linear` and `mlp` on tables, `cnn-small` on images.
        rates: learning rates of SGD.
        alone: black boxes that train alone, beside the networks; their mean is a candidate, too.
            None for `logistic` (for a number `ridge`), `forest` and `boosting` on tables, `forest`
            on images.
        points: numbers of rounds to choose from.
        metric: the score; None for AUC with two classes, balanced accuracy with more, RMSE of
            numbers.
        worth: the smallest gain that is worth federating for, above 0.
        seed: of folds, initial weights and batches.
    """

    repeats: int | None = None
    seconds: float | None = None
    methods: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    rates: tuple[float, ...] = (0.01, 0.05)
    alone: tuple[str, ...] | None = None
    points: tuple[int, ...] = (5, 15, 30)
    metric: MetricName | None = None
    worth: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        for field, names in (
            ("methods", self.methods),
            ("networks", self.networks),
            ("alone", self.alone),
        ):
            if isinstance(names, str):
                raise ConfigError(f"{field} must be a list, such as [{names!r}], not {names!r}")
        unknown = next((name for name in self.alone or () if name not in BLACK_BOXES), "")
        for valid, text in (
            (
                self.repeats is None or self.repeats >= 1,
                f"repeats must be at least 1, not {self.repeats}",
            ),
            (
                self.seconds is None or self.seconds > 0,
                f"budget must be above 0 seconds, not {self.seconds}",
            ),
            (
                self.metric in (None, *METRICS),
                f"metric must be one of {', '.join(METRICS)}, not {self.metric!r}",
            ),
            (0 < self.worth < 1, f"worth must be above 0 and below 1, not {self.worth}"),
            (not unknown, f"alone must name some of {', '.join(BLACK_BOXES)}, not {unknown!r}"),
            (
                len(self.rates) > 0 and min(self.rates) > 0,
                f"rates must be above 0, not {self.rates}",
            ),
            (
                len(self.points) > 0 and min(self.points) > 0,
                f"points must be above 0, not {self.points}",
            ),
        ):
            if not valid:
                raise ConfigError(text)
        for name in self.alone or ():
            check_installed(name)


def metric_named(text: str | None) -> Any:
    """The score that a text names in any writing, such as "AUC", "log-loss" or "balanced_accuracy";
    else the text.
    """
    if not isinstance(text, str):
        return text
    name = text.lower().replace("_", " ").replace("-", " ").replace("²", "2").removeprefix("neg ")
    others = {"roc auc": "auc", "brier score": "brier", "logloss": "log loss"}
    name = others.get(name, name)
    return name if name in METRICS else text


def metric_for(config: TrialConfig, classes: int) -> MetricName:
    """The score of a trial of so many classes; 0 for a number to predict.

    Raises:
        ConfigError: the one that is set is of another kind of label.
    """
    able = CLASS_SCORES if classes else NUMBER_SCORES
    if config.metric is not None and config.metric not in able:
        label = f"a label with {classes} classes" if classes else "a number to predict"
        raise ConfigError(
            f"metric must be one of {', '.join(able)} for {label}, not {config.metric!r}"
        )
    return config.metric or (
        "rmse" if not classes else "auc" if classes == 2 else "balanced accuracy"
    )


@dataclass(frozen=True)
class OwnerCard:
    """The answer for one owner.

    Example:
        >>> card = told.owners["a"]
        >>> card.decision in ("join", "alone", "same", "undecided", "too few"), card.rows
        (True, 60)

    Attributes:
        decision: "join", "alone", "same", "undecided" or "too few".
        by: "own" if the owner's own rows decided, "all" if all owners together, "weight" if the
            recipe is training alone, as its own weight is 1; "" if nothing is decided.
        method: the recipe for federating, with its evaluation mode.
        rows: labeled rows; `fewest`, those, or units, of the rarest class.
        gain, low, high: federated minus alone by the owner's own rows, for RMSE and MAE the share
            by which the error falls, and the 95 % interval; None if it is not known.
        alone, federated, pooled: scores of rows by models that did not see them; losses are
            negated.
        p_gain, p_worth, p_same: P(gain > 0), P(gain > worth), P(|gain| < worth), given the rows of
            all owners.
        leaning: for an undecided owner, the decision that is probable; "" if none is.
        more_rows: for an undecided owner, rows in all that would probably decide; None if no
            realistic number would.
        own_weight: the weight of the owner's own model in the recipe, if owners have weights of
            their own; else None.
        partners: the partners by models that were trained alone; None if there are too many owners.
        sent, received: bytes of tensor data in a run of the method.
        calibration: the expected calibration errors alone and federated (0 is perfect), of rows by
            models that did not see them; None of a number to predict.
        condition: what "join" holds under, such as "if rows are independent"; "" if nothing is
            open.
    """

    decision: Decision
    by: str
    method: str
    rows: int
    fewest: int
    gain: float | None
    low: float | None
    high: float | None
    alone: float | None
    federated: float | None
    pooled: float | None
    p_gain: float | None
    p_worth: float | None
    p_same: float | None
    leaning: str
    more_rows: int | None
    own_weight: float | None
    partners: Partners | None
    sent: int
    received: int
    calibration: tuple[float, float] | None = None
    condition: str = ""


def calibrations(
    y: np.ndarray, alone: np.ndarray, federated: np.ndarray
) -> tuple[float, float] | None:
    """The mean calibration errors over C repeats of probabilities (C, n, K) of classes; None of
    numbers (C, n).
    """
    if alone.ndim < 3 or not len(y):
        return None
    one, other = (
        float(np.mean([calibration_error(y, p) for p in side])) for side in (alone, federated)
    )
    return one, other


def card_of(one: Evidence, verdict: OwnerVerdict, metric: str, **more: Any) -> OwnerCard:
    """The card of this evidence and verdict. The interval of a gain in AUC ends at -1 and 1."""
    numbers = {
        "gain": one.gain,
        "low": verdict.low,
        "high": verdict.high,
        "alone": one.alone,
        "federated": one.federated,
        "p_gain": verdict.p_gain,
        "p_worth": verdict.p_worth,
        "p_same": verdict.p_same,
    }
    known: dict[str, Any] = {
        name: float(x) if math.isfinite(x) else None for name, x in numbers.items()
    }
    if metric == "auc" and known["low"] is not None and known["high"] is not None:
        known |= {"low": max(known["low"], -1.0), "high": min(known["high"], 1.0)}
    told = {name: getattr(verdict, name) for name in ("decision", "by", "leaning", "more_rows")}
    if more.get("own_weight") == 1.0 and verdict.decision != "too few":
        told = {"decision": "alone", "by": "weight", "leaning": "", "more_rows": None}
    return OwnerCard(**{"rows": one.rows, "fewest": one.fewest, **told, **known, **more})


@dataclass(frozen=True, repr=False)
class TrialResult:
    """The result of a trial. It prints a line for each owner, and is a card in a notebook.

    Example:
        >>> [*told.owners], told.metric, told.folds
        (['a', 'b'], 'auc', 4)

    Attributes:
        owners: each owner's card.
        overall: mean gain and scores over owners. Owners count by how precisely their rows tell the
            score: by n_k n_l / n of their two largest classes.
        metric, worth, seed: as used.
        repeats, folds: number of repeats, and of folds or windows of time in each.
        by_columns: whether partners have other columns of the same people; then there is a card for
            groups of people,
            and for each partner, in place of owners: see `fedloom.experiment.trial.columns`.
        in_time: whether folds are windows of time, predicted by models of earlier rows.
        recipe: the settings of a run that trains the recipe for federating; `fedloom run` takes
            them as a file.
        alone: the recipe for training alone.
        chosen: how often each was chosen for federating, in folds of all repeats; `chosen_alone`
            for training alone.
        tried: the candidates of federating.
        not_tried: feasible methods that were left out.
        infeasible: methods that cannot be tried, with the reason.
        revealed: the messages of the recipe, by sender, receiver, kind and content.
        notes: notes on the decisions that no setting made.
        seconds: the time that the trial took.
    """

    owners: Mapping[str, OwnerCard]
    overall: Mapping[str, float | None]
    metric: str
    worth: float
    seed: int
    repeats: int
    folds: int
    in_time: bool
    recipe: Mapping[str, Any]
    alone: str
    chosen: Mapping[str, int]
    chosen_alone: Mapping[str, int]
    tried: Sequence[str]
    not_tried: Sequence[str]
    infeasible: Mapping[str, str]
    revealed: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    seconds: float
    by_columns: bool = False

    def content(self) -> dict[str, Any]:
        """Everything as JSON values.

        Example:
            >>> told.content()["repeats"]
            1
        """
        return {"format": FORMAT, **asdict(self)}

    def __repr__(self) -> str:
        counts = ", ".join(
            f"{count} {kind}"
            for kind in DECISIONS
            if (count := sum(card.decision == kind for card in self.owners.values()))
        )
        lines = str(self).splitlines()
        more = [f"… and {len(lines) - SHOWN} owners more"] if len(lines) > SHOWN else []
        of = "columns" if self.by_columns else f"{len(lines)} owners"
        head = f"trial of {of}, {self.split}, seed {self.seed}: {counts}"
        return "\n  ".join([head, *lines[:SHOWN], *more])

    def __str__(self) -> str:
        return "\n".join(
            f"{name}: {sentence(card, self.metric)}" for name, card in self.owners.items()
        )

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each owner: decision, method, rows, gain with its
        interval, and scores.

        Example:
            >>> told.to_frame()["owner"].tolist()
            ['a', 'b']
        """
        import pandas

        return pandas.DataFrame(
            [{"owner": name, **asdict(card)} for name, card in self.owners.items()]
        )

    def to_latex(self) -> str:
        """The decisions as a LaTeX table (package booktabs).

        Example:
            >>> "Decision" in told.to_latex()
            True
        """
        rows = [[name, head(c), c.rows, c.gain, c.low, c.high] for name, c in self.owners.items()]
        return latex_table(
            ["Owner", "Decision", "Rows", f"Gain ({score_name(self.metric)})", "Low", "High"], rows
        )

    def plot(self) -> "Figure":
        """Each owner's gain with its 95 % interval, and the gains that are not worth it, as a
        matplotlib Figure.

        Example:
            >>> told.plot().get_axes()[0].get_xlabel()
            'gain (AUC)'
        """
        from fedloom.experiment.pictures import BLUE, axes

        known = {name: card for name, card in self.owners.items() if card.gain is not None}
        figure, drawn = axes(len(known))
        side = "Joint" if self.by_columns else "Federated"
        for row, card in enumerate(known.values()):
            assert card.gain is not None
            ends = (
                None
                if card.low is None or card.high is None
                else [[card.gain - card.low], [card.high - card.gain]]
            )
            drawn.errorbar(card.gain, row, xerr=ends, marker="o", color=BLUE, capsize=4)
        drawn.axvspan(-self.worth, self.worth, color="gray", alpha=0.2, linewidth=0)
        drawn.axvline(0, color="gray", linewidth=0.8)
        drawn.set_yticks(range(len(known)), [*known])
        drawn.invert_yaxis()
        drawn.set(
            xlabel=f"gain ({score_name(self.metric)})",
            title=f"{side} minus alone, with 95 % intervals",
        )
        return figure

    def _repr_html_(self) -> str:
        rows = [
            [
                name,
                head(c),
                f"{c.rows:,}",
                *(
                    "–" if v is None else shown_gain(v, self.metric)
                    for v in (c.gain, c.low, c.high)
                ),
                "–" if c.p_gain is None else probability(c.p_gain),
                next_step(c, by_columns=self.by_columns),
            ]
            for name, c in self.owners.items()
        ]
        columns = [
            "owner",
            "decision",
            "rows",
            f"gain ({score_name(self.metric)})",
            "low",
            "high",
            "P(gain)",
            "next",
        ]
        return html_card(repr(self).splitlines()[0], [], columns, rows)

    @property
    def split(self) -> str:
        """How rows were divided, such as "3 repeats of 4 folds".

        Example:
            >>> told.split
            '1 repeat of 4 folds'
        """
        if self.in_time:
            return f"{self.folds} windows of time"
        return f"{self.repeats} repeat{'s' * (self.repeats > 1)} of {self.folds} folds"
