"""The accuracies of a run by what they were measured on, under their names in `metrics.csv`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedloom.report import words

GLOBAL, OWN = "accuracy", "own accuracy"
"""On the global test set, and on each client's own test rows."""

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """What the answers of parties with different columns are judged by.

    Attributes:
        measure: what `metrics.csv` calls it.
        title: what people call it.
        share: whether it is a share, told in percent.
        lower: whether less is better.
    """

    measure: str
    title: str
    share: bool = True
    lower: bool = False

    def text(self, value: float) -> str:
        """`86.7 %`, or `0.962`."""
        return words.percent(value) if self.share else words.number(value)

    def spread(self, mean: float, deviation: float | None) -> str:
        """The same with a standard deviation, if there is one."""
        if self.share:
            return words.spread(mean, deviation)
        return self.text(mean) + ("" if deviation is None else f"{words.NBSP}±{words.NBSP}{deviation:.3f}")

    def deviation(self, value: float | None) -> str:
        """A standard deviation: in percentage points, or as it is."""
        return words.NONE if value is None else f"{100 * value:.1f}" if self.share else f"{value:.3f}"

    def difference(self, value: float) -> str:
        """`+2.7` points, or `+0.012`."""
        return words.points(value) if self.share else words.number(value, "+.3f")


SCORES = {
    "accuracy": Score("accuracy mean", "Accuracy"),
    "balanced accuracy": Score("balanced accuracy", "Balanced accuracy"),
    "auc": Score("auc", "AUC", share=False),
    "log loss": Score("loss mean", "Log-loss", share=False, lower=True),
    "seen accuracy": Score("seen accuracy", "Seen classes"),
    "rare recall": Score("rare recall", "Rare classes"),
}
"""By their names in `result.json`."""


def by_name(accuracy: T, own: T | None, ways: Mapping[str, T]) -> dict[str, T]:
    """What there is, the main one first: on own rows in the first way, if the method has ways."""
    prepared = {f"{OWN} {way}": found for way, found in ways.items()}
    on_own = {} if own is None else {OWN: own}
    return {**prepared, **on_own, GLOBAL: accuracy} if ways else {GLOBAL: accuracy, **on_own}


def on(measure: str, own_rows: bool = True) -> str:
    """What a measure is on: `on own class mix, tuned`.

    Args:
        measure: its name.
        own_rows: whether clients have test rows of their own; ways are on the global test set where they have not.
    """
    way = measure.removeprefix(OWN).strip() if measure != GLOBAL else ""
    rows = "on own class mix" if measure != GLOBAL and own_rows else "on the global test set"
    return f"{rows}, {way}" if way else rows
