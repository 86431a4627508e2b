"""Names of what is measured: in `metrics.csv`, in `result.json` and for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

GLOBAL, OWN = "accuracy", "own accuracy"
"""Accuracy on the global test set, and on each client's own test rows."""
TRAINING = " training"
"""Suffix of a metric over the clients that train, where others are unseen."""
ATTACK = "attack "
"""Prefix of the metrics of attacks."""

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A score of the one prediction that parties with different columns give together.

    Attributes:
        column: its name in `metrics.csv`.
        title: its name for people.
        share: whether it is a share, written in percent.
        lower: whether less is better.
    """

    column: str
    title: str
    share: bool = True
    lower: bool = False


SCORES = {
    "accuracy": Score("accuracy mean", "Accuracy"),
    "balanced accuracy": Score("balanced accuracy", "Balanced accuracy"),
    "auc": Score("auc", "AUC", share=False),
    "log loss": Score("loss mean", "Log-loss", share=False, lower=True),
    "seen accuracy": Score("seen accuracy", "Seen classes"),
    "rare recall": Score("rare recall", "Rare classes"),
}
"""By their names in `result.json`. The last two are on the test rows of classes that are frequent, or rare, among the
aligned rows; they exist where a config names such classes."""


def by_name(accuracy: T, own: T | None, eval_modes: Mapping[str, T]) -> dict[str, T]:
    """All accuracies that exist, the main one first: on own rows in the first way, if the method has ways."""
    prepared = {f"{OWN} {eval_mode}": found for eval_mode, found in eval_modes.items()}
    on_own = {} if own is None else {OWN: own}
    return {**prepared, **on_own, GLOBAL: accuracy} if eval_modes else {GLOBAL: accuracy, **on_own}


def described(metric: str, own_rows: bool = True, unseen: bool = False, tested: str = "the global test set") -> str:
    """The rows and the way of an accuracy: `on own class mix, tuned`.

    Args:
        metric: its name.
        own_rows: whether clients have test rows of their own; without, ways are measured on the global test set.
        unseen: whether there are unseen clients.
        tested: the rows of an accuracy that is not on a client's own class mix.
    """
    rows = "on own class mix" if metric != GLOBAL and own_rows else f"on {tested}"
    return f"{rows}, {in_way(metric, unseen)}" if group_of(metric) else rows


def most_frequent(metric: str, own_rows: bool) -> str:
    """The answer whose accuracy is the chance level of a metric."""
    return "one's own most frequent class" if metric != GLOBAL and own_rows else "the most frequent class"


def group_of(metric: str) -> str:
    """The clients that a metric is over, where some are unseen: `unseen`, `training`, or "" for all."""
    if metric in (GLOBAL, OWN):
        return ""
    return "training" if metric.endswith(TRAINING) else "unseen"


def in_way(metric: str, unseen: bool) -> str:
    """The way of a metric and, where some clients are unseen, its clients: `tuned`, or `tuned, unseen clients`."""
    eval_mode = metric.removeprefix(OWN).strip()
    return f"{eval_mode.removesuffix(TRAINING)}, {group_of(metric)} clients" if unseen and eval_mode else eval_mode


def shown(metrics: Iterable[str], unseen: bool) -> list[str]:
    """The metrics of a table or a row of tiles, the main one first. Where some clients are unseen and the main metric
    is over these, the training clients have one of their own, in the same way."""
    main, *others = metrics
    if not unseen or group_of(main) != "unseen":
        return [main, *others]
    return [main, *(m for m in others if m != OWN and (group_of(m) != "training" or m == main + TRAINING))]
