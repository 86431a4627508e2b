"""From a config to parties: the data, who holds which rows, and which network each client draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from fedloom import models
from fedloom.data import Dataset, Split, load, public_hash, split
from fedloom.experiment.config import RunConfig
from fedloom.method import Method
from fedloom.party import Party
from fedloom.rng import stream
from fedloom.site import PublicSet, Rows, Site

TESTS = ("test", "own")
"""The global test set, and the client's own with its own class mix."""


@dataclass(frozen=True)
class World:
    """Everything that a run needs, built once from its config.

    Attributes:
        rounds: how many.
        architectures: each client's network by name.
        server: the party in whose place the rounds run, or None.
        clients: for each client a function that makes it, always the same.
    """

    run: RunConfig
    method: Method
    cfg: Any
    rounds: int
    dataset: Dataset
    split: Split
    public_digest: str
    architectures: tuple[str, ...]
    server: Party[Any] | None
    clients: list[Callable[[], Party[Any]]]

    @property
    def chance(self) -> float:
        """The accuracy of always answering the most frequent class of the test set."""
        counts = np.bincount(self.dataset.y[self.split.test], minlength=len(self.dataset.classes))
        return float(counts.max() / counts.sum())


def build(run: RunConfig) -> World:
    """The world of a run. Equal data, seed and models give equal splits and initial weights to all methods.

    Raises:
        ConfigError, DataError, ModelError: what can't be built, before any work.
    """
    method, cfg, rounds = run.resolve()
    dataset, shares = _data(run)
    digest = public_hash(dataset, shares)
    pool, labels = torch.from_numpy(dataset.x), torch.from_numpy(dataset.y)
    shape = (-1, *[1] * (dataset.x.ndim - 2))  # channels or columns first, then broadcast
    shift = torch.from_numpy(dataset.shift).float().view(shape)
    scale = torch.from_numpy(dataset.scale).float().view(shape)
    device = run.engine.device

    def rows(which: np.ndarray) -> Rows:
        return Rows(*(x.to(device) for x in (pool, labels, torch.from_numpy(which), shift, scale)))

    public = PublicSet(rows(shares.public), run.seed, digest)
    test = rows(shares.test)
    architectures = _architectures(run)
    classes = len(dataset.classes)

    def site(n: int) -> Site:
        network = partial(
            models.build,
            architectures[n],
            dataset.input_shape,
            classes,
            norm=run.models.norm,
            seed=int(stream(run.seed, "initial weights", n).integers(2**31)),
        )
        return Site(
            id=n,
            seed=run.seed,
            parties=run.data.clients,
            classes=classes,
            data=rows(shares.shards[n]),
            public=public,
            network=network,
            tests={"test": test, "own": rows(shares.own_test[n])},
            device=device,
        )

    sites = [site(n) for n in range(run.data.clients)]
    home = Site(id=0, seed=run.seed, parties=run.data.clients, classes=classes, device=device)
    return World(
        run=run,
        method=method,
        cfg=cfg,
        rounds=rounds,
        dataset=dataset,
        split=shares,
        public_digest=digest,
        architectures=architectures,
        server=method.server(cfg, home) if method.server else None,
        clients=[partial(method.client, cfg, s) for s in sites],
    )


def _architectures(run: RunConfig) -> tuple[str, ...]:
    """Each client's draw from the pool, as section VI-A of FedAL has it."""
    draws = stream(run.seed, "architectures").integers(len(run.models.pool), size=run.data.clients)
    return tuple(run.models.pool[i] for i in draws)


def _data(run: RunConfig) -> tuple[Dataset, Split]:
    data = run.data
    dataset = _load(data.name, data.root)
    shares = split(
        dataset,
        clients=data.clients,
        seed=run.seed,
        partition=data.partition,
        options=data.options,
        public=data.public,
        test_fraction=data.test_fraction,
        test_rows=data.test_rows,
        own_test_rows=data.own_test_rows,
    )
    # Columns are scaled by what everybody holds; without a public set, by all training rows.
    known = shares.public if len(shares.public) else np.concatenate(shares.shards)
    return dataset.standardised(known), shares


@lru_cache(maxsize=2)
def _load(name: str, root: str | None) -> Dataset:
    """A comparison reads its data once."""
    return load(name, root=root)
