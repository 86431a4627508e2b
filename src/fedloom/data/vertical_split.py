"""Which rows of a vertical federation are aligned, tested, or known to one party only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.data.allocation import proportional
from fedloom.data.split import check_settings, hold_out


@dataclass(frozen=True, eq=False)
class VerticalSplit:
    """Row numbers of each party, into its own list."""

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
    """Draw test rows and aligned rows from the people whom all parties have and whose class is known.

    All other rows of a party are unaligned: people that some party lacks, and people without a label, whom several
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
    check_settings(
        (aligned is None or aligned >= 1, "aligned", "at least 1", aligned),
        (test_rows is None or test_rows >= 1, "test_rows", "at least 1", test_rows),
        (official is not None or 0 < test_fraction < 1, "test_fraction", "between 0 and 1", test_fraction),
    )
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
    order = alignment_order(y[pool], balanced=balanced, seed=seed)
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


def alignment_order(labels: np.ndarray, *, balanced: bool, seed: int) -> np.ndarray:
    """(n,) all row numbers in the order in which they are aligned, so that 200 rows are the first of 600.

    Args:
        labels: (n,) int64.
        balanced: the classes alternate while they have rows; otherwise the order is random.
        seed: of the run.
    """
    rng = stream(seed, "columns.people")
    order = rng.permutation(len(labels))
    return order[np.lexsort((rng.random(len(order)), _turns(labels[order])))] if balanced else order


def first_rows(
    order: np.ndarray, labels: np.ndarray, count: int, *, rare: Sequence[int] = (), rare_rows: int = 0
) -> np.ndarray:
    """(count,) the first of an order, but at most `rare_rows` of each rare class, replaced by others.

    Raises:
        DataError: there are too few rows.
    """
    lined = labels[order]
    able = order[~np.isin(lined, rare) | (_turns(lined) < rare_rows)]
    if count > len(able):
        raise DataError(f"aligned is {count}, but only {len(able)} rows can be aligned; use fewer.")
    return able[:count]


def mixes(labels: np.ndarray, classes: int, *, ratios: Sequence[float], majority: int, seed: int) -> np.ndarray:
    """(M, K) the class mix of each party's unaligned rows; each sums to 1.

    A ratio of 1 gives the mix of all rows. Else a party draws `majority` classes by chance, and each other class
    gets one ratio-th of their rows; of two classes the majority is class 0, without a draw.
    """
    rows = np.ones((len(ratios), classes))
    for party, (mix, ratio) in enumerate(zip(rows, ratios, strict=True)):
        if ratio == 1:
            mix[:] = np.bincount(labels, minlength=classes)
            continue
        drawn = stream(seed, "columns.majority", party).choice(classes, majority, replace=False)
        mix[[0] if (classes, majority) == (2, 1) else drawn] = ratio
    shares: np.ndarray = rows / rows.sum(axis=1, keepdims=True)
    return shares


def deal_unaligned(
    order: np.ndarray,
    labels: np.ndarray,
    taken: np.ndarray,
    shares: np.ndarray,
    *,
    rows: int | None,
    seed: int,
    classes: Sequence[str],
) -> list[np.ndarray]:
    """Different rows for each party, in the mix it should have, in random order.

    They come from the end of each class's queue, party by party. So neither more aligned rows nor more parties
    move them, as long as their number stays.

    Args:
        order: (n,) from `alignment_order`.
        labels: (n,) int64.
        taken: rows that are aligned.
        shares: (M, K) from `mixes`.
        rows: how many each party gets; None: as many as all can have.
        seed: of the run.
        classes: K names, for the error message.

    Raises:
        DataError: a class has too few rows.
    """
    free = order[~np.isin(order, taken)][::-1]
    queues = [free[labels[free] == label] for label in range(shares.shape[1])]
    left = np.array([len(queue) for queue in queues])
    wanted = _most(shares, left, seed) if rows is None else _counts(shares, rows, seed)
    if rows is None and len(free) and not wanted.any():
        scarce = classes[int(np.argmin(np.where(shares.sum(axis=0) > 0, left, len(free) + 1)))]
        raise DataError(
            f"Beside test and aligned rows there are too few of class {scarce!r} to give each of {len(shares)} parties "
            "an unaligned row in the mix it should have; align fewer, or ask for 0 unaligned rows."
        )
    lacking = np.flatnonzero(wanted.sum(axis=0) > left)
    if len(lacking):
        most = int(_most(shares, left, seed)[0].sum())
        worst = lacking[np.argmax((wanted.sum(axis=0) - left)[lacking])]
        raise DataError(
            f"{rows} unaligned rows for each of {len(shares)} parties need {wanted.sum(axis=0)[worst]} of class "
            f"{classes[worst]!r}, but beside test and aligned rows there are {left[worst]}; at most {most} rows for "
            "each can be had with these ratios."
        )
    ends = np.cumsum(wanted, axis=0)
    hands = [
        np.concatenate([queue[end - count : end] for queue, end, count in zip(queues, last, row, strict=True)])
        for last, row in zip(ends, wanted, strict=True)
    ]
    return [stream(seed, "columns.order", party).permutation(hand) for party, hand in enumerate(hands)]


def _turns(labels: np.ndarray) -> np.ndarray:
    """(n,) how many rows of the same class come before each."""
    turns = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        turns[places] = np.arange(len(places))
    return turns


def _counts(shares: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """(M, K) whole numbers of rows, `rows` for each party."""
    return np.stack(
        [proportional(rows, share, stream(seed, "columns.counts", party)) for party, share in enumerate(shares)]
    )


def _most(shares: np.ndarray, left: np.ndarray, seed: int) -> np.ndarray:
    """The most rows that all parties can have, equally many each, as `_counts`."""
    total = shares.sum(axis=0)
    rows = int((left[total > 0] / total[total > 0]).min() + 1e-9)
    while rows and (_counts(shares, rows, seed).sum(axis=0) > left).any():
        rows -= 1  # rounding may ask for a row too many
    return _counts(shares, rows, seed)
