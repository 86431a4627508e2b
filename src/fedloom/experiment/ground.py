"""What stands at each party's place before any party is made: rows, network, neighbours. A run builds on all of it, a
node beside its own data on one place."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from fedloom import models
from fedloom.core import graphs
from fedloom.core.context import Rows, Site
from fedloom.core.errors import ConfigError
from fedloom.core.graphs import Graph
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.core.rng import stream
from fedloom.data.dataset import DatasetLike
from fedloom.data.vertical import PartyView, VerticalDataset
from fedloom.experiment.config import RunConfig
from fedloom.experiment.holdings import ByColumns, ByOwnColumns, Holdings
from fedloom.experiment.networks import EXTRACTORS, architectures_of, boxed, grouped, networks
from fedloom.experiment.own import Files
from fedloom.experiment.stock import apart, own_columns, shared


@dataclass(frozen=True)
class Ground:
    """The places of a run's parties.

    Attributes:
        held: who holds what.
        architectures: each client's network by name.
        graph: the neighbours of each client; None where everybody is everybody's.
        home: the place of the party in whose place the rounds run.
        sites: each client's.
        house: those of the clients that live with the home.
        taught: the data set as far as it is here, and the numbers (n,) of its rows that the server has.
    """

    method: Method
    cfg: Any
    held: Holdings
    architectures: tuple[str, ...]
    graph: Graph | None
    home: Site
    sites: list[Site]
    house: tuple[int, ...] = ()
    taught: tuple[DatasetLike, np.ndarray] | None = None

    def client(self, n: int) -> partial[Party[Any]]:
        """What makes client n, always the same."""
        return partial(self.method.party_at(self.sites[n]), self.cfg, self.sites[n])


def ground(
    run: RunConfig, method: Method, cfg: Any, files: Files, *, at: int | None = None, secret: int | None = None
) -> Ground:
    """The places of a run of this method.

    Args:
        run: the run.
        method, cfg: what it resolves to.
        files: what lies here of its data.
        at: which party is here, and has a place to work at; None for the home, and where all are here.
        secret: of those that are here, see `Site`.

    Raises:
        ConfigError, DataError, ModelError: there is no such run.
    """
    found = (_by_columns if method.setting == "vertical" else _by_rows)(run, method, cfg, files, at)
    if secret is None:
        return found
    hidden = [replace(site, secret=secret) for site in found.sites]
    return replace(found, home=replace(found.home, secret=secret), sites=hidden)


def _by_rows(run: RunConfig, method: Method, cfg: Any, files: Files, at: int | None) -> Ground:
    graph = run.topology.graph(run.data.clients, run.seed)
    stock = apart(run, files, at) if run.data.own else shared(run, files)
    known, clients = stock.taught[0], run.data.clients
    if "public rows" in method.needs and run.data.own and files.public is None:
        file, example = (
            "federation.toml" if at is None else "node.toml",
            f'[data.{run.data.name}] public = "public.csv"',
        )
        raise ConfigError(f"{method.name} learns from rows that everybody holds: name the file in {file}, {example}")
    if "public rows" in method.needs and not len(stock.public.rows):
        raise ConfigError(f"data.public: {method.name} learns from rows that everybody holds; give it some")
    architectures = architectures_of(run, method, known.kind)
    makers = networks(run, method, known, architectures)
    home = Site(
        id=0,
        seed=run.seed,
        parties=clients,
        classes=len(known.classes),
        data=stock.home,
        network=makers[0],
        device=run.engine.device,
    )
    sites = [
        replace(
            home,
            id=n,
            neighbours=graphs.Others(clients, n) if graph is None else graph[n],
            data=stock.data(n),
            public=stock.public,
            network=makers[1][n],
            tests=stock.tests(n),
        )
        for n in range(clients)
    ]
    home, sites = boxed(run, method, known, architectures, home, sites)
    if "architecture groups" in method.needs:
        home, sites = grouped(home, sites, makers[1], architectures)
    if "public rows at the server" in method.needs:
        home = replace(home, public=stock.public)
    return Ground(method, cfg, stock.held, architectures, graph, home, sites, taught=stock.taught)


def _by_columns(run: RunConfig, method: Method, cfg: Any, files: Files, at: int | None) -> Ground:
    """The places of parties that hold different columns. Only the home's rows have labels."""
    if run.data.own:
        raise ConfigError(f"data.form: {method.name} shares columns: leave it away, and set columns.own=true")
    held: ByColumns | ByOwnColumns
    if run.columns.own:
        if "pooled rows" in method.needs:
            raise ConfigError(f"columns.own: {method.name} needs all rows in one place; leave it away")
        held, kind = own_columns(run, files, at or 0), "table"
        number, aligned, labels = held.number, held.aligned, None if held.truth is None else held.truth[0]
        views: dict[int, PartyView] = {at or 0: held.view}
    else:
        parties = parties_of(run, files, pooled="pooled rows" in method.needs)
        held, kind = ByColumns(parties), parties.kind
        number, aligned, labels = len(parties.views), len(parties.labels), parties.labels
        views = dict(enumerate(parties.views))
    pool = run.models.pool or EXTRACTORS[kind]
    draws = stream(run.seed, "architectures").integers(len(pool), size=number)
    architectures = tuple(pool[i] for i in draws)
    home = Site(
        id=0, seed=run.seed, parties=number, classes=len(held.classes), aligned=aligned, device=run.engine.device
    )
    sites = [
        _columns_at(run, cfg, replace(home, id=m), views[m], architectures[m]) if m in views else replace(home, id=m)
        for m in range(number)
    ]
    if labels is not None:
        first = views[0]
        known = np.full(len(first.x), -1)  # an unaligned row has none
        known[first.aligned] = labels
        home = replace(home, data=_rows_of(run, first, first.aligned, known))
    return Ground(method, cfg, held, architectures, None, home, sites, house=(0,))


def _columns_at(run: RunConfig, cfg: Any, site: Site, view: PartyView, architecture: str) -> Site:
    """The place of a party that holds these columns."""
    own = {"own": _rows_of(run, view, view.unaligned)} if len(view.unaligned) and not run.columns.own else {}
    return replace(
        site,
        data=_rows_of(run, view, np.concatenate([view.aligned, view.unaligned])),
        network=partial(
            models.build,
            architecture,
            view.input_shape,
            cfg.learnt,
            norm=run.models.norm,
            seed=int(stream(run.seed, "initial weights", site.id).integers(2**31)),
        ),
        tests={"test": _rows_of(run, view, view.test), **own},
    )


def _rows_of(run: RunConfig, view: PartyView, which: np.ndarray, labels: np.ndarray | None = None) -> Rows:
    """Some rows (n,) of a party's columns."""
    level = (-1, *[1] * (view.x.ndim - 2))
    arrays = (view.x, which, view.shift.reshape(level), view.scale.reshape(level))
    pool, index, shift, scale = (torch.from_numpy(a).to(run.engine.device) for a in arrays)
    return Rows(pool, None if labels is None else torch.from_numpy(labels).to(pool.device), index, shift, scale)


def parties_of(run: RunConfig, files: Files | None = None, *, pooled: bool = False) -> VerticalDataset:
    """What each party of a vertical federation holds.

    Args:
        run: the run.
        files: see `data_of`.
        pooled: whether every row of every party counts as aligned and labelled.

    Raises:
        DataError, ConfigError: it can't be had or shared out as asked.
    """
    data, files = run.data, files or Files()
    return run.columns.parties(
        files.set or data.name,
        parties=data.clients,
        seed=run.seed,
        root=files.root or data.root,
        test_fraction=data.test_fraction,
        test_rows=data.test_rows,
        pooled=pooled,
    )
