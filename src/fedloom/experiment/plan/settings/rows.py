"""Rows of a data set as clients hold them: read, divided and standardized, with checks of a file's
owners.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedloom.core.errors import DataError, warn_once
from fedloom.data.dataset import Dataset
from fedloom.data.encoder import undo
from fedloom.data.flower import partition_at
from fedloom.data.sources import load
from fedloom.data.split import Split, split
from fedloom.experiment.config.data import DataConfig

if TYPE_CHECKING:
    from fedloom.experiment.config.run import RunConfig
    from fedloom.experiment.plan.private import PrivateData

BY_OWNER = "each owner's own training rows"
FEWEST = 4
"""Minimum number of rows of an owner that is a client."""


def data_of(
    run: "RunConfig", files: "PrivateData | None" = None, *, raw: bool = False
) -> tuple[Dataset, Split]:
    """The data set of a run and its partition.

    Args:
        run: the config.
        files: the data set's location on this machine, if not the run's.
        raw: whether its columns are those that were read: not encoded, scaled or filled.

    Raises:
        DataError: the data set cannot be read or partitioned.
    """
    data = run.data
    if files is not None:
        data = data.model_copy(
            update={"root": files.root or data.root, "name": files.set or data.name}
        )
    return divided(data, run.seed, raw=raw)


def divided(data: DataConfig, seed: int, *, raw: bool = False) -> tuple[Dataset, Split]:
    """The data set of a section `[data]` and its partition; `raw` as in `data_of`.

    Raises:
        DataError: as `data_of`.
    """
    dataset = load(data.name, root=Path(data.root) if data.root else None, options=data.columns)
    _check_owners(data, dataset)
    for note in dataset.notes:
        warn_once(f"{dataset.name}: {note}")
    server = data.rows_at_server(len(dataset.train))
    held = dataset.test is not None or data.test_share or data.validation
    training = len(dataset.train) - server
    training = int(training * (1 - data.test_share)) if dataset.test is None else training
    training = int(training * (1 - data.validation))
    shares = split(
        dataset,
        clients=data.clients,
        seed=seed,
        partition=partition_at(data.partition) if ":" in data.partition else data.partition,
        options=data.options,
        server=server,
        public=min(1000, max(0, training) // 5) if data.public_rows is None else data.public_rows,
        test_fraction=data.test_share,
        test_rows=data.test_rows,
        # own test rows would be rows that were fitted
        own_test_rows=data.own_test_rows if held or data.own_test_rows is not None else 0,
        validation=data.validation,
    )
    if data.group and len(shares.public):
        warn_once(
            f"{dataset.name}: {len(shares.public)} rows of the owners are public rows "
            "(data.public_rows)."
        )
    _warn_of_single_classes(data, dataset, shares)
    if not dataset.classes:
        dataset = _with_target(data, dataset, shares)
    if raw:
        return undo(dataset), shares
    if basis(dataset, shares) == BY_OWNER:
        return dataset.standardized_by_owner(np.concatenate(shares.shards)), shares
    known = next(
        rows for rows in (shares.server, shares.public, np.concatenate(shares.shards)) if len(rows)
    )
    return dataset.standardized(known), shares


def left_out(data: DataConfig, seed: int, dataset: Dataset, shares: Split) -> dict[str, int]:
    """The rows that no training client has, by the reason."""
    unseen = sum(len(shares.shards[i]) for i in data.unseen_clients(seed))
    known = {
        "test": shares.held_out,
        "public": len(shares.public),
        "server": len(shares.server),
        "unseen": unseen,
    }
    rest = len(dataset.y) - sum(known.values()) - sum(map(len, shares.shards)) + unseen
    return {reason: rows for reason, rows in {**known, "partition": rest}.items() if rows}


def _with_target(data: DataConfig, dataset: Dataset, shares: Split) -> Dataset:
    """The data set with the scale of its number to predict: the agreed one, or that of the server's
    or all training rows.
    """
    if data.label_scale is not None:
        return replace(dataset, target=data.label_scale)
    return dataset.with_target(
        shares.server if len(shares.server) else np.concatenate(shares.shards)
    )


def basis(dataset: Dataset, shares: Split) -> str:
    """The rows that columns are standardized by, and missing numbers are filled by, as a phrase; ""
    for images.

    The server's rows are equal for all seeds; rows without owners are those of one file.
    """
    if dataset.kind == "image" or dataset.ready:
        return ""
    if len(shares.server):
        return "the server's rows"
    if len(shares.public):
        return "the public rows"
    return BY_OWNER if dataset.owners else "all training rows, which no client could do alone"


def unbounded(run: "RunConfig", cfg: Any, public: bool) -> str:
    """What to set so that one row cannot move the scale of others, if a guarantee of the run needs
    it; else "".
    """
    form = run.data.row_schema
    if form is None or form.kind == "image" or form.scale is not None or not cfg.promises:
        return ""
    if public and run.data.public_rows != 0:
        return ""
    return (
        "differential privacy needs columns that no single row scales: set the agreed "
        "data.row_schema.scale = { age = [mean, s.d.] }, or name a file of public rows"
    )


def owner_names(dataset: Dataset, shares: Split) -> tuple[str, ...]:
    """The names of the clients, where each is an owner; () without names."""
    if not dataset.owners or dataset.groups is None:
        return ()
    return tuple(dataset.owners[dataset.groups[part[0]]] for part in shares.shards)


def number_of_owners(data: DataConfig) -> int:
    """The number of owners of a file's rows that can be clients.

    Raises:
        DataError: the file cannot be read.
    """
    dataset = load(data.name, root=Path(data.root) if data.root else None, options=data.columns)
    assert dataset.groups is not None
    sizes = np.bincount(dataset.groups[dataset.train], minlength=len(dataset.owners))
    if dataset.test is None and data.test_share:
        sizes = np.minimum(sizes - 1, (sizes * (1 - data.test_share)).astype(np.int64))
    if data.validation:
        sizes = np.minimum(sizes - 1, (sizes * (1 - data.validation)).astype(np.int64))
    return int((sizes >= max(1, data.options.get("min_rows", 1))).sum())


def _check_owners(data: DataConfig, dataset: Dataset) -> None:
    """Raise DataError for owners that are too small, or too few for the unseen ones; warn of those
    with one class.
    """
    if not dataset.owners or dataset.groups is None or data.partition != "natural":
        return
    sizes = np.bincount(dataset.groups, minlength=len(dataset.owners))
    small = [
        f"{dataset.owners[owner]} ({sizes[owner]})" for owner in np.flatnonzero(sizes < FEWEST)
    ]
    small = [] if dataset.test is None and not data.test_share else small
    if small and data.options.get("min_rows", 1) < FEWEST:
        raise DataError(
            f"Each owner needs at least {FEWEST} rows, for training and for testing, but there "
            f"are smaller ones: {', '.join(small[:8])}. Leave them out with "
            f"data.options.min_rows = {FEWEST}."
        )
    if isinstance(data.unseen, tuple) and data.clients != len(dataset.owners):
        raise DataError(
            f"data.unseen names owners, so that all {len(dataset.owners)} owners must be "
            f"clients, not {data.clients}; leave data.clients and data.options out."
        )
    if not dataset.classes:
        return
    single = [
        dataset.owners[k]
        for k in range(len(sizes))
        if len(np.unique(dataset.y[dataset.groups == k])) == 1
    ]
    if single:
        warn_once(f"{dataset.name}: owners with rows of one class only: {', '.join(single[:8])}.")


def _warn_of_single_classes(data: DataConfig, dataset: Dataset, shares: Split) -> None:
    """Warn if the default partition leaves most clients with one class."""
    single = sum(len(np.unique(dataset.strata[0][part])) == 1 for part in shares.shards)
    if data.partition == "dirichlet" and not data.options and 2 * single > len(shares.shards):
        warn_once(
            f"{dataset.name}: {single} of {len(shares.shards)} clients have rows of one class, "
            "by the default partition; compare with data.options.alpha = 1 or data.partition = "
            "iid."
        )
