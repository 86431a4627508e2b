"""Which of the people that several parties really have are aligned, tested, or left to one party."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.data.draws import first_rows, line_up
from fedloom.data.split import hold_out


@dataclass(frozen=True, eq=False)
class VerticalSplit:
    """Row numbers of each party's own list."""

    aligned: list[np.ndarray]
    """The same people at the same place."""
    unaligned: list[np.ndarray]
    test: list[np.ndarray]
    """The same people at the same place."""
    labels: np.ndarray
    test_labels: np.ndarray
    truth: list[np.ndarray | None]
    """Classes of each party's unaligned rows, where all of them are known."""


def split_parties(
    common: Sequence[np.ndarray],
    known: Sequence[np.ndarray],
    *,
    seed: int,
    official: np.ndarray | None = None,
    aligned: int | None,
    test_fraction: float,
    test_rows: int | None,
    balanced: bool,
) -> VerticalSplit:
    """Test rows and aligned rows from the people that all parties have and whose class is known.

    Whoever else a party has is unaligned: people that some party lacks, and people without a label, whom several
    parties may have. If fewer people are to be aligned than could be, the others are dealt in turn, each to one party
    as unaligned, and the other parties don't use their rows.

    Args:
        common: for each party, (P,) its row numbers of the people that all have, in one order.
        known: for each party, (n,) int64 class of each of its rows, or -1; the first party's are the labels.
        seed: of the run.
        official: (P,) whether a common person is a test row; None: a share of each class is drawn.
        aligned: how many; None: all that can be.
        test_fraction: that share.
        test_rows: at most so many test rows, at random; None keeps all.
        balanced: whether the aligned rows are drawn evenly over the classes, as far as they have rows.

    Raises:
        DataError: the numbers can't be met.
    """
    if (aligned is not None and aligned < 1) or (test_rows is not None and test_rows < 1):
        raise DataError(f"aligned and test_rows must be at least 1, but they are {aligned} and {test_rows}.")
    if official is None and not 0 < test_fraction < 1:
        raise DataError(f"test_fraction must be between 0 and 1, but it is {test_fraction}.")
    y = known[0][common[0]]
    people = np.flatnonzero(y >= 0)
    tests = None if official is None else np.flatnonzero(official[people])
    if len(people) < 2 or (tests is not None and not 0 < len(tests) < len(people)):
        raise DataError(
            "All parties must have people in common, with labels, some to train and some to test on, but they have "
            f"{len(y)} people in common, {len(people)} of them with a label"
            f"{'' if tests is None else f' and {len(tests)} of these for the test'}."
        )
    whole, kept = hold_out(y[people], tests, seed=seed, fraction=test_fraction, limit=test_rows)
    pool = np.setdiff1d(people, people[whole])
    order = line_up(y[pool], balanced=balanced, seed=seed)
    count = len(pool) if aligned is None else aligned
    chosen, left = pool[first_rows(order, y[pool], count)], pool[order[count:]]
    unaligned, truth = [], []
    for party, (rows, classes) in enumerate(zip(common, known, strict=True)):
        others = np.setdiff1d(np.arange(len(classes)), rows[people])
        own = np.concatenate([others, rows[left[party :: len(common)]]])
        unaligned.append(own)
        truth.append(classes[own] if (classes[own] >= 0).all() else None)
    test = people[kept]
    return VerticalSplit(
        [rows[chosen] for rows in common], unaligned, [rows[test] for rows in common], y[chosen], y[test], truth
    )
