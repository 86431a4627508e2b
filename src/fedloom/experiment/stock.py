"""The rows of a run, as far as they are on this machine: a data set that is shared out, or a party's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedloom.core.context import PublicSet, Rows
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.dataset import Dataset, DatasetInfo, DatasetLike
from fedloom.data.flower import partition_at
from fedloom.data.party_files import PartyFile
from fedloom.data.schema import DataSchema, read_public, read_rows
from fedloom.data.sources import load
from fedloom.data.split import Split, hold_out, public_hash, rows_hash, split
from fedloom.experiment.config import RunConfig
from fedloom.experiment.holdings import ByOwnColumns, ByRows, Holdings
from fedloom.experiment.own import Apart, Files


@dataclass(frozen=True)
class Stock:
    """What there is here of a run's rows.

    Attributes:
        held: who holds what.
        taught: the data set as far as it is here, and the numbers (n,) of its rows that the server has.
        home: the server's rows, if it has some.
        public: the rows that all hold, perhaps none.
        data: a client's training rows, by its number; None where they are elsewhere.
        tests: its test rows by their names.
    """

    held: Holdings
    taught: tuple[DatasetLike, np.ndarray]
    home: Rows | None
    public: PublicSet
    data: Callable[[int], Rows | None]
    tests: Callable[[int], Mapping[str, Rows]]


def shared(run: RunConfig, files: Files) -> Stock:
    """All rows of a data set that is shared out, in one pool."""
    dataset, shares = data_of(run, files)
    digest, rows = public_hash(dataset, shares), pool_of(dataset, run.engine.device)
    test = rows(shares.test)
    return Stock(
        held=ByRows(dataset, shares, digest),
        taught=(dataset, shares.server),
        home=rows(shares.server) if len(shares.server) else None,
        public=PublicSet(rows(shares.public), run.seed, digest),
        data=lambda n: rows(shares.shards[n]),
        tests=lambda n: {"test": test, "own": rows(shares.own_test[n])},
    )


def apart(run: RunConfig, files: Files, at: int | None) -> Stock:
    """The own rows of the party that is here, number `at`, or of the server; and what all hold.

    Columns of a table are scaled by the rows that all hold; without, each party's by its own training rows.

    Raises:
        ConfigError: a file is missing that the run needs here.
        DataError: the rows are not of the run's form, or too few.
    """
    assert run.data.form is not None
    form, name = run.data.form.form(), run.data.name
    public = _public(run, files, form)
    own = None if files.rows is None or (at is None and not run.data.server) else read_rows(files.rows, form, name)
    if own is None and (at is not None or run.data.server):
        whose = "the server" if at is None else f"party {at}"
        raise ConfigError(f"data.{name}: name the file with the rows of {whose} here, as rows")
    train, test = (np.arange(0), np.arange(0)) if own is None else _held_out(run, own, at)
    seen = own.x[train] if own is not None else None
    shift, scale = form.scaling(public if len(public) else seen)
    if own is not None:
        own = replace(own, shift=shift, scale=scale)
    known = DatasetInfo(name, form.kind, form.input_shape, form.classes, form.columns, shift, scale)
    rows = None if own is None else pool_of(own, run.engine.device)
    mine = None if rows is None else rows(train)
    tests = {"own": rows(test)} if rows is not None and at is not None else {}
    digest = rows_hash(public)
    served = (rows_hash(own.x), len(own.y)) if own is not None and at is None else ("", 0)
    held = Apart(known, run.data.clients, digest, len(public), served)
    return Stock(
        held=held,
        taught=(known if own is None else own, train),
        home=mine if at is None else None,
        public=PublicSet(_unlabelled(public, known, run.engine.device), run.seed, digest),
        data=lambda n: mine if n == at else None,
        tests=lambda n: tests if n == at else {},
    )


def _public(run: RunConfig, files: Files, form: DataSchema) -> np.ndarray:
    """The rows (n, ...) that all hold, or the first `data.public` of them."""
    if files.public is None or run.data.public == 0:
        return np.empty((0, *form.input_shape), np.uint8 if form.kind == "image" else np.float32)
    found = read_public(files.public, form)
    if run.data.public is not None and run.data.public > len(found):
        raise DataError(f"{files.public} must hold {run.data.public} rows (data.public), but has {len(found)}.")
    return found[: run.data.public]


def _held_out(run: RunConfig, own: Dataset, at: int | None) -> tuple[np.ndarray, np.ndarray]:
    """A party's rows to train on and to be tested on. The server trains on all of its."""
    if at is None:
        return np.arange(len(own.y)), np.arange(0)
    data = run.data
    every, test = hold_out(own.y, own.test, seed=run.seed, fraction=data.test_fraction, limit=data.test_rows)
    train = np.setdiff1d(np.arange(len(own.y)), every)
    if not len(train) or not len(test):
        raise DataError(f"{len(own.y)} rows are too few to train on some and be tested on others; add more.")
    return train, test


def own_columns(run: RunConfig, files: Files, party: int) -> ByOwnColumns:
    """The columns of the party that is here, of the people that were matched.

    Raises:
        ConfigError: nothing was matched, or no file is named here.
        DataError: the file can't be used.
    """
    found, label, name = files.matched, run.columns.label or "", run.data.name
    if files.rows is None:
        raise ConfigError(f"data.{name}: name the file with the columns of party {party} here, as rows")
    if found is None:
        raise ConfigError("columns.own: whose rows are the same person's is found out by the net engine: --engine net")
    id = files.id or str(run.columns.id)
    held = PartyFile.passive(files.rows, id, label) if party else PartyFile.active(files.rows, id, label)
    everybody = np.concatenate([found.aligned, found.unaligned, found.test])
    if len(everybody) and int(everybody.max()) >= len(held.ids):
        raise DataError(f"{files.rows} has fewer rows than were matched: begin the run anew.")
    return ByOwnColumns(
        name=name,
        number=run.data.clients,
        count=found.classes,
        aligned=len(found.aligned),
        test=len(found.test),
        mark=found.mark,
        view=held.view(found.aligned, found.unaligned, found.test, None),
        names=held.classes,
        truth=None if party else (held.labels[found.aligned], held.labels[found.test]),
        others=found.others,
    )


def pool_of(dataset: Dataset, device: str) -> Callable[[np.ndarray], Rows]:
    """A function that gives some rows (n,) of the data set, all from one pool on this device."""
    every = _unlabelled(dataset.x, dataset, device)
    labels = torch.from_numpy(dataset.y).to(device)
    return lambda which: replace(every, labels=labels, index=torch.from_numpy(which).to(device))


def _unlabelled(x: np.ndarray, known: DatasetLike, device: str) -> Rows:
    """All of some rows (n, ...)."""
    shape = (-1, *[1] * (x.ndim - 2))  # channels or columns first, then broadcast
    arrays = (x, np.arange(len(x)), known.shift.reshape(shape), known.scale.reshape(shape))
    pool, index, shift, scale = (torch.from_numpy(a).to(device) for a in arrays)
    return Rows(pool, None, index, shift, scale)


def data_of(run: RunConfig, files: Files | None = None) -> tuple[Dataset, Split]:
    """The data set of a run, and who holds which of its rows.

    Args:
        run: the run.
        files: what the data set is called here; None for what the run says.

    Raises:
        DataError: it can't be had or shared out as asked.
    """
    data, files = run.data, files or Files()
    root = files.root or data.root
    dataset = load(files.set or data.name, root=Path(root) if root else None)
    server = data.server_rows(len(dataset.train))
    training = len(dataset.train) - server
    training = int(training * (1 - data.test_fraction)) if dataset.test is None else training
    shares = split(
        dataset,
        clients=data.clients,
        seed=run.seed,
        partition=partition_at(data.partition) if ":" in data.partition else data.partition,
        options=data.options,
        server=server,
        public=min(1000, max(0, training) // 5) if data.public is None else data.public,
        test_fraction=data.test_fraction,
        test_rows=data.test_rows,
        own_test_rows=data.own_test_rows,
    )
    # Columns are scaled by the server's rows, the same for all seeds; without, by what everybody holds, or all rows.
    known = next(rows for rows in (shares.server, shares.public, np.concatenate(shares.shards)) if len(rows))
    return dataset.standardised(known), shares
