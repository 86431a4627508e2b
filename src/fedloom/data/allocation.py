"""Allocation of rows to clients: functions shared by the partitions."""

import numpy as np

from fedloom.core.errors import DataError


def check_rows(labels: np.ndarray, clients: int, each: int) -> None:
    """Raise DataError unless there is at least one client and every client can have `each` rows."""
    if clients < 1:
        raise DataError(f"clients must be at least 1, not {clients}.")
    if len(labels) < clients * each:
        raise DataError(
            f"{clients} clients need at least {each} row{'s' * (each > 1)} each, "
            f"{clients * each} in all, but there are {len(labels)}; use fewer clients, fewer "
            "rows for each, or more data."
        )


def check_classes(present: int, wanted: int) -> None:
    """Raise DataError if the data has fewer classes than each client must hold."""
    if present < wanted:
        raise DataError(
            f"Each client must hold {wanted} classes, but the data has {present}; use fewer."
        )


def shuffled_by_class(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """For each class that occurs, the numbers of its rows in random order."""
    return [rng.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def deal(queues: list[np.ndarray], counts: np.ndarray) -> list[np.ndarray]:
    """Allocate the rows of each class from the front of its queue; counts is (N, K)."""
    ends = np.cumsum(counts, axis=0)
    return [
        np.sort(
            np.concatenate(
                [
                    queue[end - count : end]
                    for queue, end, count in zip(queues, last, row, strict=True)
                ]
            )
        )
        for last, row in zip(ends, counts, strict=True)
    ]


def proportional(
    total: int, shares: np.ndarray, rng: np.random.Generator, open_to: np.ndarray | None = None
) -> np.ndarray:
    """(N,) integers nearest to total * shares / sum(shares) that sum to total.

    With a tiny alpha all shares may underflow to 0. In that limit one client has all, so a random
    one gets all.
    """
    weight = shares.sum()
    if weight < 1e-200:
        able = np.arange(len(shares)) if open_to is None else np.flatnonzero(open_to)
        shares = np.eye(len(shares))[rng.choice(able)]
        weight = 1.0
    exact: np.ndarray = total * (shares / weight)
    counts: np.ndarray = np.floor(exact).astype(np.int64)
    by_remainder = np.lexsort((rng.random(len(shares)), counts - exact))
    counts[by_remainder[: total - int(counts.sum())]] += 1
    return counts


def fixed_counts(
    mixes: np.ndarray, sizes: list[int], rows: int, rng: np.random.Generator
) -> np.ndarray:
    """(N, K) rows of each class for each client, `rows` in all for each, within the sizes of the
    classes.
    """
    left = np.array(sizes)
    counts = np.zeros(mixes.shape, dtype=np.int64)
    for mix, count in zip(mixes, counts, strict=True):
        while missing := rows - int(count.sum()):
            # Each pass places a row or exhausts a class, so the loop terminates.
            weights = np.where(left > 0, mix, 0.0)
            if weights.sum() < 1e-200:
                weights = (left > 0).astype(float)
            drawn = np.minimum(rng.multinomial(missing, weights / weights.sum()), left)
            count += drawn
            left -= drawn
    return counts


def fill_up(parts: list[np.ndarray], min_rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Move random rows from the largest client to those with fewer than `min_rows`."""
    sizes = np.array([len(part) for part in parts])
    for client in np.flatnonzero(sizes < min_rows):
        while sizes[client] < min_rows:
            giver = int(np.argmax(sizes))
            place = int(rng.integers(sizes[giver]))
            parts[client] = np.sort(np.append(parts[client], parts[giver][place]))
            parts[giver] = np.delete(parts[giver], place)
            sizes[client] += 1
            sizes[giver] -= 1
    return parts
