"""Metrics: their values, their text in files, and their names for display."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fedloom.data.options import Task as TaskKind

ERRORS = ("loss", "error", "rmse", "mae")
COSTS = ("attack", "bytes", "rounds", "iterations", "seconds")
"""Lower is better of a metric whose name has a word of `ERRORS`, or starts with one of `COSTS`."""


@dataclass(frozen=True)
class Metric:
    """What was measured. Its text, `str(metric)`, is its name in `metrics.csv` and `result.json`;
    `parse` reads it.

    Attributes:
        name: `accuracy` or, of a number to predict, `rmse`; the name of a score, `attack`, or any
            other name.
        mode: the evaluation mode, such as `tuned`; of an attack, which one; "" for none.
        group: `training` for training clients alone, where others are unseen. "" for all clients
            or, in an evaluation mode where some are unseen, for these.
        own: whether on each client's own test rows.
    """

    name: str
    mode: str = ""
    group: Literal["", "training"] = ""
    own: bool = False

    def __str__(self) -> str:
        return " ".join(filter(None, ("own" if self.own else "", self.name, self.mode, self.group)))

    @property
    def training(self) -> "Metric":
        """The same metric over training clients."""
        return replace(self, group="training")

    @property
    def clients(self) -> str:
        """The clients of the metric, where some are unseen: `unseen`, `training`, or "" for all."""
        return self.group or ("unseen" if self.mode else "")

    @property
    def eval_mode(self) -> str:
        """The evaluation mode and the group as text, as in the `eval_modes` of `result.json`:
        `tuned training`.
        """
        return f"{self.mode} {self.group}".strip()

    @property
    def mean(self) -> str:
        """The name in `metrics.csv` of its mean over clients or parties."""
        return f"{self} mean"

    @property
    def std(self) -> str:
        """The name in `metrics.csv` of its standard deviation over clients."""
        return f"{self} std"

    @property
    def share(self) -> bool:
        """Whether its values are shares of rows, shown in percent."""
        return self.name == GLOBAL.name or getattr(SCORES.get(Metric(self.name)), "share", False)

    @property
    def noun(self) -> str:
        """Its name within a sentence: `accuracy`, or `RMSE`."""
        score = SCORES.get(Metric(self.name))
        return self.name if score is None or score.share else score.title

    @property
    def lower_is_better(self) -> bool:
        """Whether a lower value is better."""
        return self.name.startswith(COSTS) or any(word in self.name for word in ERRORS)


MAIN_MODE = "main mode"
"""The mode of the metric of a comparison in which each method has its own main evaluation mode."""
UNADAPTED = "unadapted"
"""The name of no evaluation mode."""
ATTACK = "attack"
"""The name of the metrics of attacks."""
GLOBAL, OWN = Metric("accuracy"), Metric("accuracy", own=True)
"""Accuracy on the global test set, and on each client's own test rows."""
RMSE, OWN_RMSE = Metric("rmse"), Metric("rmse", own=True)
"""The root mean squared error of a number to predict, in its unit, on the same rows."""
MAIN: dict[TaskKind, tuple[Metric, Metric]] = {"classes": (GLOBAL, OWN), "number": (RMSE, OWN_RMSE)}
"""The main metric of each task: on the global test set, and on each client's own test rows."""


def parse(text: str) -> Metric:
    """The metric of a text, so that `str(parse(text)) == text`. A text that names no known metric
    is a name itself.
    """
    rest = text.removeprefix("own ")
    for name in sorted((ATTACK, *(score.name for score in SCORES)), key=len, reverse=True):
        if rest == name or rest.startswith(f"{name} "):
            return _in_mode(Metric(name, own=rest != text), rest.removeprefix(name).strip())
    return Metric(text)


def prepared(eval_mode: str, own: Metric = OWN) -> Metric:
    """The main metric on own rows in an evaluation mode, as `result.json` names it: `tuned
    training`.
    """
    return _in_mode(own, eval_mode)


def _in_mode(metric: Metric, eval_mode: str) -> Metric:
    mode = f" {eval_mode}".removesuffix(" training").strip()
    return replace(metric, mode=mode, group="training" if mode != eval_mode else "")


@dataclass(frozen=True)
class Score:
    """A score of the joint prediction in the vertical setting.

    Attributes:
        column: its name in `metrics.csv`.
        title: its display name.
        share: whether it is shown in percent.
    """

    column: str
    title: str
    share: bool = True

    @property
    def largest(self) -> float:
        """The largest possible difference between two values."""
        return 1.0 if self.share or self.column in ("auc", "calibration error") else math.inf

    @property
    def lower(self) -> bool:
        """Whether lower is better."""
        return Metric(self.column).lower_is_better


SCORES = {
    GLOBAL: Score(GLOBAL.mean, "Accuracy"),
    Metric("balanced accuracy"): Score("balanced accuracy", "Balanced accuracy"),
    Metric("auc"): Score("auc", "AUC", share=False),
    Metric("log loss"): Score("loss mean", "Log-loss", share=False),
    Metric("calibration error"): Score("calibration error", "Calibration error", share=False),
    RMSE: Score(RMSE.mean, "RMSE", share=False),
    Metric("mae"): Score("mae", "MAE", share=False),
    Metric("r2"): Score("r2", "R²", share=False),
    Metric("seen accuracy"): Score("seen accuracy", "Seen classes"),
    Metric("rare recall"): Score("rare recall", "Rare classes"),
}
"""`rmse`, `mae` and `r2` are of numbers. The last two are over classes that are frequent, or rare,
among the aligned rows; they exist if `columns.rare_classes` is set.
"""


def in_words(metric: Metric, value: float) -> str:
    """A value with its unit: a share in percent, or a number with four digits."""
    return f"{value:.1%}" if metric.share else four_digits(value)


def four_digits(value: float) -> str:
    """A number with four digits or, from 10,000, all digits before the point:
    `0.9617`, `257,206`.
    """
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:,.4g}"


GLOBAL_ROWS = "the global test set"
"""The test rows that all clients share, as text."""


def own_rows_of(owned: bool) -> str:
    """What a client's own test rows are: its owner's, or rows of all in its own class mix."""
    return "own test rows" if owned else "own class mix"


OF_NUMBERS = (RMSE.name, "mae", "r2")
"""The names of the scores of a number."""


def described(
    metric: Metric,
    own_rows: bool = True,
    unseen: bool = False,
    tested: str = GLOBAL_ROWS,
    natural: bool = False,
) -> str:
    """The rows and evaluation mode of an accuracy, as text: `on own class mix, tuned`; of a number,
    `on own test rows`.

    Args:
        metric: the accuracy.
        own_rows: whether clients have own test rows; without, evaluation modes use the global test
            set.
        unseen: whether there are unseen clients.
        tested: the rows of an accuracy that is not on a client's own class mix.
        natural: whether clients are the owners of their test rows.
    """
    mine = own_rows_of(natural or metric.name in OF_NUMBERS)
    rows = f"on {mine}" if metric.own and own_rows else f"on {tested}"
    return f"{rows}, {in_mode(metric, unseen)}" if metric.clients else rows


def most_frequent(metric: Metric, own_rows: bool) -> str:
    """The prediction whose accuracy, or error, is the chance level of a metric, as text."""
    if metric.name == RMSE.name:
        return "one's own mean" if metric.own and own_rows else "the mean"
    return "one's own most frequent class" if metric.own and own_rows else "the most frequent class"


def in_mode(metric: Metric, unseen: bool) -> str:
    """The evaluation mode of a metric and, if some are unseen, its clients: `tuned`, or `tuned,
    unseen clients`.
    """
    if metric.mode == MAIN_MODE:
        whose = f", {metric.clients} clients" if unseen else ""
        return f"each in its main mode{whose}"
    return (
        f"{metric.mode}, {metric.clients} clients" if unseen and metric.mode else metric.eval_mode
    )


def shown_metrics(metrics: Iterable[Metric], unseen: bool) -> list[Metric]:
    """The metrics to show, the main one first. If it is over unseen clients, the same one over
    training clients is included.
    """
    main, *others = metrics
    if not unseen or main.clients != "unseen":
        return [main, *others]
    return [
        main,
        *(m for m in others if m != OWN and (m.clients != "training" or m == main.training)),
    ]
