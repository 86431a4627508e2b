"""Names of metrics: in `metrics.csv`, in `result.json`, and for display."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

GLOBAL, OWN = "accuracy", "own accuracy"
"""Accuracy on the global test set, and on each client's own test rows."""
TRAINING = " training"
"""Suffix of a metric over training clients, where others are unseen."""
ATTACK = "attack "
"""Prefix of the metrics of attacks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A score of the joint prediction in the vertical setting.

    Attributes:
        column: its name in `metrics.csv`.
        title: its display name.
        share: whether it is shown in percent.
        lower: whether lower is better.
    """

    column: str
    title: str
    share: bool = True
    lower: bool = False

    @property
    def largest(self) -> float:
        """The largest possible difference between two values."""
        return 1.0 if self.share or self.column in ("auc", "calibration error") else math.inf


SCORES = {
    "accuracy": Score("accuracy mean", "Accuracy"),
    "balanced accuracy": Score("balanced accuracy", "Balanced accuracy"),
    "auc": Score("auc", "AUC", share=False),
    "log loss": Score("loss mean", "Log-loss", share=False, lower=True),
    "calibration error": Score("calibration error", "Calibration error", share=False, lower=True),
    "seen accuracy": Score("seen accuracy", "Seen classes"),
    "rare recall": Score("rare recall", "Rare classes"),
}
"""By name in `result.json`. The last two are over classes that are frequent, or rare, among the aligned rows; they
exist if `columns.rare_classes` is set."""


def by_name(accuracy: T, own: T | None, eval_modes: Mapping[str, T]) -> dict[str, T]:
    """All existing accuracies by metric, the main one first."""
    prepared = {f"{OWN} {eval_mode}": found for eval_mode, found in eval_modes.items()}
    on_own = {} if own is None else {OWN: own}
    return {**prepared, **on_own, GLOBAL: accuracy} if eval_modes else {GLOBAL: accuracy, **on_own}


def described(metric: str, own_rows: bool = True, unseen: bool = False, tested: str = "the global test set") -> str:
    """The rows and evaluation mode of an accuracy, as text: `on own class mix, tuned`.

    Args:
        metric: its name.
        own_rows: whether clients have own test rows; without, evaluation modes use the global test set.
        unseen: whether there are unseen clients.
        tested: the rows of an accuracy that is not on a client's own class mix.
    """
    rows = "on own class mix" if metric != GLOBAL and own_rows else f"on {tested}"
    return f"{rows}, {in_way(metric, unseen)}" if group_of(metric) else rows


def most_frequent(metric: str, own_rows: bool) -> str:
    """The prediction whose accuracy is the chance level of a metric, as text."""
    return "one's own most frequent class" if metric != GLOBAL and own_rows else "the most frequent class"


def group_of(metric: str) -> str:
    """The clients of a metric, where some are unseen: `unseen`, `training`, or "" for all."""
    if metric in (GLOBAL, OWN):
        return ""
    return "training" if metric.endswith(TRAINING) else "unseen"


def in_way(metric: str, unseen: bool) -> str:
    """The evaluation mode of a metric and, if some are unseen, its clients: `tuned`, or `tuned, unseen clients`."""
    eval_mode = metric.removeprefix(OWN).strip()
    group = "training" if group_of(metric) == "training" else "unseen"
    return f"{eval_mode.removesuffix(TRAINING)}, {group} clients" if unseen and eval_mode else eval_mode


def shown_metrics(metrics: Iterable[str], unseen: bool) -> list[str]:
    """The metrics to show, the main one first. If it is over unseen clients, the same one over training clients is
    included."""
    main, *others = metrics
    if not unseen or group_of(main) != "unseen":
        return [main, *others]
    return [main, *(m for m in others if m != OWN and (group_of(m) != "training" or m == main + TRAINING))]
