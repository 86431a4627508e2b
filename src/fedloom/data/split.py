"""The split of a data set into clients' training rows, public rows, test rows, and the server's own
rows.

`split` draws one part after the other from the rows that the parts before have left. Each draw has
a stream of random numbers of its own (`stream(seed, "data....")`), so that another number of
clients changes their shards, but no test row. All parts are row numbers of the data set; nothing is
copied.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedloom.core.errors import DataError
from fedloom.core.rng import stream
from fedloom.data.dataset import Dataset
from fedloom.data.partitions import PartitionFunction, check_options, find_partition


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of a data set, int64 and ascending. Shards, public, test and server rows are
    disjoint.
    """

    shards: tuple[np.ndarray, ...]
    """Training rows of each client."""
    public: np.ndarray
    """Public rows, which all parties hold without labels; may be empty."""
    test: np.ndarray
    """Global test rows."""
    own_test: tuple[np.ndarray, ...]
    """For each client, test rows in the class mix of its shard; a row may serve several clients."""
    server: np.ndarray
    """Labeled training rows that only the server holds; may be empty."""
    held_out: int = 0
    """The number of rows that nobody trains on: of these, `test` may have a sample only."""


def split(
    dataset: Dataset,
    *,
    clients: int,
    seed: int,
    partition: str | PartitionFunction = "dirichlet",
    options: Mapping[str, Any] | None = None,
    server: int = 0,
    public: int = 0,
    test_fraction: float = 0.25,
    test_rows: int | None = None,
    own_test_rows: int | None = 0,
    validation: float = 0.0,
) -> Split:
    """Draw the server's rows, then test rows, then public rows, and partition the rest.

    Test rows, public rows, partition and each client's own test rows have separate random streams,
    so that neither the number of clients nor the partition changes the test set or the public set.
    Of rows with owners, the same share of each owner's rows is tested.

    Example:
        >>> from fedloom import load
        >>> rows = split(load("digits"), clients=3, seed=0, partition="iid")
        >>> [len(shard) for shard in rows.shards]
        [449, 449, 448]

    Args:
        dataset: the rows.
        clients: number of clients, at least 1.
        seed: of the run.
        partition: a name in `PARTITIONS`, or a function (labels (n,), clients, generator) -> row
            numbers of each.
        options: of the named partition.
        server: number of training rows that only the server holds, drawn uniformly. They are the
            same for all seeds, so that one pretrained model fits all; without an official test
            split, test rows are drawn from the rest.
        public: number of public rows, drawn uniformly from the training rows.
        test_fraction: the share of each class that is held out if the data set has no official test
            split. 0 holds none out: test rows are then all rows.
        test_rows: maximum number of test rows, a random sample; None keeps all.
        own_test_rows: maximum number of test rows of each client, from the test split before it is
            cut to `test_rows`: in the partition "natural" those of its owner, else rows in its own
            class mix, without repetition. None: all of its owner, else 100.
        validation: see `hold_out`.

    Raises:
        DataError: the data has too few rows, or none for the test.
    """
    if not hasattr(dataset, "train"):
        raise DataError(
            f"split takes a data set that load returned, not a {type(dataset).__name__}"
        )
    # `labels` (n,) and their names: classes, or up to ten ranges of a number to predict
    rows, (labels, names) = len(dataset.train), dataset.strata
    check_settings(
        (clients >= 1, "clients", "at least 1", clients),
        (
            0 <= server < max(1, rows),
            "server",
            f"at least 0, and below the {rows} training rows",
            server,
        ),
        (public >= 0, "public", "at least 0", public),
        (
            dataset.test is not None or 0 <= test_fraction < 1,
            "test_fraction",
            "at least 0, and below 1",
            test_fraction,
        ),
        (test_rows is None or test_rows >= 1, "test_rows", "at least 1", test_rows),
        (own_test_rows is None or own_test_rows >= 0, "own_test_rows", "at least 0", own_test_rows),
    )
    # the server's rows, of seed 0 in every run: one pretrained model then fits all seeds
    at_server = np.sort(stream(0, "data.server").choice(dataset.train, server, replace=False))
    pool = np.setdiff1d(np.arange(len(dataset.y)), at_server, assume_unique=True)

    # test rows; `hold_out` takes and gives places in the pool, which is ascending
    official = None if dataset.test is None else np.searchsorted(pool, dataset.test)
    owners = None if dataset.groups is None else dataset.groups[pool]
    held = hold_out(
        labels[pool],
        official,
        seed=seed,
        fraction=test_fraction,
        limit=test_rows,
        groups=owners,
        # a share of the training rows, which are then tested on in place of the test rows
        validation=validation,
    )
    # `every` row to test on; of these `kept` has at most `test_rows`
    test, kept = pool[held.every], pool[held.kept]
    if not len(kept):
        raise DataError(
            f"{len(pool)} rows leave none for the test at test_fraction = {test_fraction:g}; use "
            "more rows, or a larger test_fraction."
        )
    # `apart`: nobody trains on test rows, nor on validation rows; without any held out it is empty
    pool = np.setdiff1d(pool, pool[held.apart], assume_unique=True)

    # public rows, of which at least one must be left for the clients
    if public >= len(pool):
        raise DataError(
            f"public_rows must be below {len(pool)}, the number of training rows, not {public}."
        )
    at_all = np.sort(stream(seed, "data.public").choice(pool, public, replace=False))
    pool = np.setdiff1d(pool, at_all, assume_unique=True)

    # what is left goes to the clients; a partition knows places in the pool alone
    shards = tuple(
        pool[part] for part in _partition(dataset, pool, clients, seed, partition, options or {})
    )

    # each client's own test rows, from all test rows, of which `held.kept` may be a sample
    by_class = [test[labels[test] == label] for label in range(len(names))]
    own_test = []
    for client, shard in enumerate(shards):
        rng = stream(seed, "data.own-test", client)
        own = (
            np.arange(0)
            if dataset.groups is None
            # in the partition "natural" all rows of a shard have the owner of the first
            else test[dataset.groups[test] == dataset.groups[shard[0]]]
        )
        if partition == "natural" and len(own):
            own_test.append(
                np.sort(own if own_test_rows is None else rng.permutation(own)[:own_test_rows])
            )
        else:
            own_test.append(
                _own_rows(
                    by_class, labels[shard], 100 if own_test_rows is None else own_test_rows, rng
                )
            )
    # last `held_out`, the number of rows that nobody trains on
    return Split(shards, at_all, kept, tuple(own_test), at_server, len(held.apart))


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Row numbers that are held out of training, int64."""

    apart: np.ndarray
    """All rows that nobody trains on."""
    every: np.ndarray
    """The rows to test on."""
    kept: np.ndarray
    """At most `limit` of these, ascending."""


def hold_out(
    labels: np.ndarray,
    official: np.ndarray | None,
    *,
    seed: int,
    fraction: float,
    limit: int | None,
    groups: np.ndarray | None = None,
    validation: float = 0.0,
) -> HeldOut:
    """The rows to test on: test rows, or validation rows in their place.

    Args:
        labels: (n,) int64.
        official: row numbers of the official test split; None draws a share of each class, or of
            each owner's rows.
        seed: of the run.
        fraction: that share, below 1; 0 holds no row out, and tests on all of them.
        limit: maximum number of kept rows, a random sample; None keeps all.
        groups: (n,) int64 owner of each row, or None.
        validation: share of each class, or of each owner's rows, to hold out of the remaining rows
            and to test on. The test rows stay the same for all shares and are then used for
            nothing. 0 tests on test rows.
    """
    # the test rows, which stay the same for all shares of validation rows
    if official is not None:
        test = official
    elif not fraction:
        test = np.arange(0)
    elif groups is None:
        test = _stratified(labels, fraction, stream(seed, "data.test"))
    else:
        test = _by_owner(labels, groups, fraction, stream(seed, "data.test"))
    apart = test

    # validation rows take their place, and test rows are then used for nothing
    if validation:
        rest, rng = np.setdiff1d(np.arange(len(labels)), test), stream(seed, "data.validation")
        chosen = (
            _stratified(labels[rest], validation, rng)
            if groups is None
            else _by_owner(labels[rest], groups[rest], validation, rng)
        )
        test = rest[chosen]
        apart = np.concatenate([apart, test])
    elif official is None and not fraction:
        test = np.arange(len(labels))  # all rows, though all are trained on
    if limit is None or limit >= len(test):
        return HeldOut(apart, test, np.sort(test))
    return HeldOut(
        apart, test, np.sort(stream(seed, "data.test-rows").choice(test, limit, replace=False))
    )


def public_hash(dataset: Dataset, split: Split) -> str:
    """`rows_hash` of the public rows, by which parties verify that theirs are identical."""
    return rows_hash(dataset.x[split.public])


def rows_hash(x: np.ndarray) -> str:
    """SHA-256 of rows (n, ...) in their order: type, shape and bytes."""
    x = np.ascontiguousarray(x)
    digest = hashlib.sha256(f"{x.dtype.str} {x.shape} ".encode())
    digest.update(x.tobytes())
    return digest.hexdigest()


def check_settings(*checks: tuple[bool, str, str, object]) -> None:
    """Raise one DataError for all invalid settings.

    Args:
        checks: for each setting whether it is valid, its name, the allowed values, and its value.
    """
    problems = [
        f"{name} must be {allowed}, not {value}."
        for valid, name, allowed, value in checks
        if not valid
    ]
    if problems:
        raise DataError("\n".join(problems))


def _stratified(labels: np.ndarray, fraction: float, rng: np.random.Generator) -> np.ndarray:
    """The same fraction of each class, rounded, with at least one row for testing and one for
    training.
    """
    parts = []
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        count = max(1, int(fraction * len(rows) + 0.5))
        parts.append(rows[: min(count, len(rows) - 1)])
    return np.concatenate(parts)


def _by_owner(
    labels: np.ndarray, groups: np.ndarray, fraction: float, rng: np.random.Generator
) -> np.ndarray:
    """The same fraction of each owner's rows, rounded, in its class mix: they are ordered by class,
    and taken at equal distances. An owner of two rows or more has at least one for testing and one
    for training.
    """
    parts = []
    for owner in np.unique(groups):
        rows = rng.permutation(np.flatnonzero(groups == owner))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        count = min(max(1, int(fraction * len(rows) + 0.5)), len(rows) - 1)
        parts.append(
            rows[((np.arange(count) + rng.random()) * len(rows) / max(count, 1)).astype(np.int64)]
        )
    return np.concatenate(parts)


def _partition(
    dataset: Dataset,
    pool: np.ndarray,
    clients: int,
    seed: int,
    partition: str | PartitionFunction,
    options: Mapping[str, Any],
) -> list[np.ndarray]:
    """The parts as positions in the pool, validated because a partition may be user code."""
    rng, labels = stream(seed, "data.partition"), dataset.strata[0][pool]
    if isinstance(partition, str):
        extra: dict[str, Any] = dict(check_options(partition, options))
        if find_partition(partition).needs_groups:
            extra["groups"] = None if dataset.groups is None else dataset.groups[pool]
        parts = find_partition(partition).function(labels, clients, rng, **extra)
    else:
        parts = partition(labels, clients, rng, **options)
    rows = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    valid = len(np.unique(rows)) == len(rows) and bool(((rows >= 0) & (rows < len(pool))).all())
    if len(parts) != clients or not all(len(part) for part in parts) or not valid:
        raise DataError(
            f"A partition must return disjoint rows in 0..{len(pool) - 1} for {clients} clients, "
            f"but {partition!r} returned {len(parts)} parts of "
            f"{[len(part) for part in parts][:20]} rows, {len(rows) - len(np.unique(rows))} of "
            "them twice."
        )
    return parts


def _own_rows(
    by_class: list[np.ndarray], labels: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """At most `count` different test rows, with the class proportions of a client's labels."""
    exact = count * np.bincount(labels, minlength=len(by_class)) / len(labels)
    wanted: np.ndarray = np.floor(exact).astype(np.int64)  # (K,)
    # what rounding down has left goes to the classes with the largest remainders
    by_remainder = np.argsort(wanted - exact, kind="stable")
    wanted[by_remainder[: count - int(wanted.sum())]] += 1
    chosen = [rng.permutation(rows)[:number] for rows, number in zip(by_class, wanted, strict=True)]
    return np.sort(np.concatenate(chosen))
