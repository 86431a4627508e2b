"""The accuracies of a run by what they were measured on, under their names in `metrics.csv`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

GLOBAL, OWN = "accuracy", "own accuracy"
"""On the global test set, and on each client's own test rows."""

T = TypeVar("T")


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
