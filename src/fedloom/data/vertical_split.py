"""The split of a vertical federation's rows into aligned, unaligned and test rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.data.allocation import proportional
from fedloom.data.split import check_settings, hold_out


@dataclass(frozen=True, eq=False)
class VerticalSplit:
    """For each party, numbers of its own rows; aligned and test rows are of the same people in the
    same order.
    """

    aligned: list[np.ndarray]
    unaligned: list[np.ndarray]
    test: list[np.ndarray]
    labels: np.ndarray
    test_labels: np.ndarray
    truth: list[np.ndarray | None]
    """Classes of each party's unaligned rows, or None unless all are known."""


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
    validation: float = 0.0,
) -> VerticalSplit:
    """Draw test rows and aligned rows from the people with a label that all parties have.

    All other rows of a party are unaligned: people that some party lacks, and people without a
    label, whom several parties may have. Common people beyond `aligned` are assigned in turn, each
    to one party as unaligned.

    Args:
        common: for each party, (P,) its row numbers of the common people, in one order; -1 for
            people that it lacks.
        known: for each party, (n,) int64 class of each of its rows, or -1; the first party's are
            the labels.
        seed: of the run.
        official: (P,) whether a common person is a test row; None draws a share of each class.
        aligned: number of aligned rows; None for all common people.
        test_fraction: the share of each class that is tested.
        test_rows: maximum number of test rows, a random sample; None keeps all.
        balanced: whether the aligned rows are drawn evenly over the classes, as far as they have
            rows.
        validation: see `fedloom.data.split.hold_out`.

    Raises:
        DataError: a setting is invalid, or there are too few people.
    """
    check_settings(
        (aligned is None or aligned >= 1, "aligned", "at least 1", aligned),
        (test_rows is None or test_rows >= 1, "test_rows", "at least 1", test_rows),
        (
            official is not None or 0 < test_fraction < 1,
            "test_fraction",
            "between 0 and 1",
            test_fraction,
        ),
    )
    # `people` (Q,) are places among the P common ones, of those with a label; `tests` and `held`
    # are places among these
    y = known[0][common[0]]
    people = np.flatnonzero(y >= 0)
    tests = None if official is None else np.flatnonzero(official[people])
    if len(people) < 2 or (tests is not None and not 0 < len(tests) < len(people)):
        raise DataError(
            "All parties need common people with labels for training and for testing, but they "
            f"have {len(y)} people in common, {len(people)} of them with a label"
            f"{'' if tests is None else f' and {len(tests)} of these for the test'}."
        )
    held = hold_out(
        y[people], tests, seed=seed, fraction=test_fraction, limit=test_rows, validation=validation
    )

    # the aligned people, in an order whose first 200 are those of a run with 200; others are left
    pool = np.setdiff1d(people, people[held.apart])
    order = alignment_order(y[pool], balanced=balanced, seed=seed)
    count = len(pool) if aligned is None else aligned
    chosen, left = pool[first_rows(order, y[pool], count)], pool[order[count:]]

    # each party's unaligned rows: of all others in its file, and of every M-th of those left
    unaligned, truth = [], []
    for party, (rows, classes) in enumerate(zip(common, known, strict=True)):
        others = np.setdiff1d(np.arange(len(classes)), rows[people])
        dealt = rows[left[party :: len(common)]]
        own = np.concatenate([others, dealt[dealt >= 0]])  # without people that it lacks
        unaligned.append(own)
        truth.append(classes[own] if (classes[own] >= 0).all() else None)
    test = people[held.kept]
    return VerticalSplit(
        [rows[chosen] for rows in common],
        unaligned,
        [rows[test] for rows in common],
        y[chosen],
        y[test],
        truth,
    )


def alignment_order(labels: np.ndarray, *, balanced: bool, seed: int) -> np.ndarray:
    """(n,) all row numbers in the order of alignment, so that 200 aligned rows are the first of
    600.

    Args:
        labels: (n,) int64.
        balanced: classes alternate as long as they have rows; otherwise the order is random.
        seed: of the run.
    """
    rng = stream(seed, "columns.people")
    order = rng.permutation(len(labels))
    return order[np.lexsort((rng.random(len(order)), _turns(labels[order])))] if balanced else order


def first_rows(
    order: np.ndarray,
    labels: np.ndarray,
    count: int,
    *,
    rare: Sequence[int] = (),
    rare_rows: int = 0,
) -> np.ndarray:
    """(count,) the first rows of an order, with at most `rare_rows` of each rare class.

    Raises:
        DataError: too few rows.
    """
    ordered = labels[order]
    available = order[~np.isin(ordered, rare) | (_turns(ordered) < rare_rows)]
    if count > len(available):
        raise DataError(
            f"aligned must be at most {len(available)}, the number of rows that can be aligned, "
            f"not {count}."
        )
    return available[:count]


def mixes(
    labels: np.ndarray, classes: int, *, ratios: Sequence[float], majority: int, seed: int
) -> np.ndarray:
    """(M, K) the class mix of each party's unaligned rows; each sums to 1.

    A ratio of 1 gives the mix of all rows. Otherwise a party draws `majority` random classes, and
    each other class gets 1/ratio of their rows; of two classes the majority is class 0, without a
    draw.
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
    """Disjoint rows for each party in its class mix, in random order.

    They come from the end of each class's queue, party by party, so that for a fixed `rows` neither
    more aligned rows nor more parties change them.

    Args:
        order: (n,) from `alignment_order`.
        labels: (n,) int64.
        taken: aligned rows.
        shares: (M, K) from `mixes`.
        rows: number of rows of each party; None for the largest possible.
        seed: of the run.
        classes: K names, for errors.

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
            f"Class {scarce!r} has too few rows besides test and aligned rows for unaligned rows "
            f"of {len(shares)} parties in their class mixes; lower aligned, or set unaligned = 0."
        )
    lacking = np.flatnonzero(wanted.sum(axis=0) > left)
    if len(lacking):
        most = int(_most(shares, left, seed)[0].sum())
        worst = lacking[np.argmax((wanted.sum(axis=0) - left)[lacking])]
        raise DataError(
            f"{rows} unaligned rows for each of {len(shares)} parties need "
            f"{wanted.sum(axis=0)[worst]} of class {classes[worst]!r}, but besides test and "
            f"aligned rows there are {left[worst]}; with these ratios unaligned must be at most "
            f"{most}."
        )
    ends = np.cumsum(wanted, axis=0)
    parts: list[np.ndarray] = []
    for party, (last, row) in enumerate(zip(ends, wanted, strict=True)):
        own = [
            queue[end - count : end] for queue, end, count in zip(queues, last, row, strict=True)
        ]
        parts.append(stream(seed, "columns.order", party).permutation(np.concatenate(own)))
    return parts


def _turns(labels: np.ndarray) -> np.ndarray:
    """(n,) the number of earlier rows of the same class."""
    turns = np.empty(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        turns[places] = np.arange(len(places))
    return turns


def _counts(shares: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """(M, K) numbers of rows that sum to `rows` for each party."""
    return np.stack(
        [
            proportional(rows, share, stream(seed, "columns.counts", party))
            for party, share in enumerate(shares)
        ]
    )


def _most(shares: np.ndarray, left: np.ndarray, seed: int) -> np.ndarray:
    """The largest equal number of rows that all parties can have, as `_counts`."""
    total = shares.sum(axis=0)
    rows = int((left[total > 0] / total[total > 0]).min() + 1e-9)
    while rows and (_counts(shares, rows, seed).sum(axis=0) > left).any():
        rows -= 1  # rounding may need one row too many
    return _counts(shares, rows, seed)
