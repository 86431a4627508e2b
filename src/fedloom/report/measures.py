"""The accuracies of a run by what they were measured on, under their names in `metrics.csv`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedloom.report import words

GLOBAL, OWN = "accuracy", "own accuracy"
"""On the global test set, and on each client's own test rows."""
TRAINING = " training"
"""How a measure over the clients that train ends, where others are unseen."""

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


def on(measure: str, own_rows: bool = True, unseen: bool = False, tested: str = "the global test set") -> str:
    """What a measure is on: `on own class mix, tuned`.

    Args:
        measure: its name.
        own_rows: whether clients have test rows of their own; ways are on the global test set where they have not.
        unseen: whether there are unseen clients.
        tested: what the accuracy is on that is on no client's own class mix.
    """
    rows = "on own class mix" if measure != GLOBAL and own_rows else f"on {tested}"
    return f"{rows}, {in_way(measure, unseen)}" if whose(measure) else rows


def frequent(measure: str, own_rows: bool) -> str:
    """The answer whose accuracy is the chance level of a measure; arguments as those of `on`."""
    return "one's own most frequent class" if measure != GLOBAL and own_rows else "the most frequent class"


def whose(measure: str) -> str:
    """Of which clients a measure is, where some are unseen: `unseen`, `training`, or "" for all, as those without a
    way are."""
    if measure in (GLOBAL, OWN):
        return ""
    return "training" if measure.endswith(TRAINING) else "unseen"


def after(way: str) -> str:
    """A way behind an accuracy: `tuned`, `after 1 step`."""
    return f"after {way}" if way[:1].isdigit() else way


def in_way(measure: str, unseen: bool) -> str:
    """The way of a measure and, where some are unseen, its clients: `tuned`, or `tuned, unseen clients`."""
    way = measure.removeprefix(OWN).strip()
    return f"{way.removesuffix(TRAINING)}, {whose(measure)} clients" if unseen and way else way


def shown(found: Iterable[str], unseen: bool) -> list[str]:
    """The measures that stand beside each other, the main one first. Where some clients are unseen and the main one is
    over these, training clients have one of their own, for the same way; a table of all has the others."""
    main, *others = found
    if not unseen or whose(main) != "unseen":
        return [main, *others]
    return [main, *(m for m in others if m != OWN and (whose(m) != "training" or m == main + TRAINING))]
