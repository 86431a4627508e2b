"""From a config to a run: its parties, its rounds, and the server's own model. Where they stand is in `ground`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from torch import Tensor

from fedloom.core.engine import names
from fedloom.core.errors import ConfigError
from fedloom.core.graphs import Graph
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.experiment.config import RunConfig
from fedloom.experiment.ground import Ground, ground, parties_of
from fedloom.experiment.holdings import Holdings
from fedloom.experiment.networks import COMMON, check_statistics, check_widths, remark_refits
from fedloom.experiment.own import Files
from fedloom.experiment.pretrained import Pretrained, PretrainedConfig, prepare
from fedloom.experiment.stock import data_of

__all__ = ["World", "build", "data_of", "parties_of", "pretrained_of"]


@dataclass(frozen=True)
class World:
    """Everything that a run needs, built once from its config.

    Attributes:
        rounds: how many.
        held: who holds what.
        architectures: each client's network by name.
        graph: the neighbours of each client; None where everybody is everybody's.
        server: the party in whose place the rounds run, or None.
        clients: for each client a function that makes it, always the same.
        form: names and shapes of the parameters of the network that all have; empty where each has its own.
        house: those of the clients that live with the server.
        unseen: those of the clients that are never in a round.
        pretrained: tells the server's pretrained model from another; empty where there is none.
        known_as: the run's id at nodes, where they know it already; else empty.
    """

    run: RunConfig
    method: Method
    cfg: Any
    rounds: int
    held: Holdings
    architectures: tuple[str, ...]
    graph: Graph | None
    server: Party[Any] | None
    clients: list[partial[Party[Any]]]
    form: Mapping[str, Tensor] = field(default_factory=dict)
    house: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    pretrained: str = ""
    known_as: str = ""

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The other clients, rising."""
        return tuple(sorted({*range(len(self.clients))} - {*self.unseen}))

    @property
    def names(self) -> dict[int, str]:
        """What the ledger calls each client; none is made for it."""
        return names((i, make.func) for i, make in enumerate(self.clients))  # type: ignore[misc]  # classes

    @property
    def chance(self) -> float | None:
        """The accuracy of always answering the most frequent class of the test set, if there is one that all have."""
        if "test" not in self.held.labels:
            return None
        counts = np.bincount(self.held.labels["test"][0], minlength=len(self.held.classes))
        return float(counts.max() / counts.sum())

    def own_chance(self, clients: Sequence[int] | None = None) -> float | None:
        """The same on each client's own test rows, mean over these clients, or over all; None without such rows."""
        each = self.held.own_chances
        return None if each is None else float(np.mean(each if clients is None else each[[*clients]]))


def build(run: RunConfig, files: Files | None = None, *, secret: int | None = None) -> World:
    """The world of a run. Equal data, seed and models give equal splits and initial weights to all methods.

    Args:
        run: its config.
        files: what the coordinator of a run whose parties are at nodes has of its data; None for other runs.
        secret: of those that live here, see `Site`.

    Raises:
        ConfigError, DataError, ModelError, CheckpointError: what can't be built, before any work.
    """
    method, cfg, rounds = run.resolve()
    unseen = run.data.unseen_clients(run.seed)
    run.churn.check(run.data.clients, rounds, unseen)
    if run.data.own and files is None:
        raise ConfigError("data.form: parties with rows of their own are at nodes of their own: add --engine net")
    if run.columns.own and files is None:
        raise ConfigError("columns.own: parties with columns of their own are at nodes of their own: add --engine net")
    files = files or Files()
    found = ground(run, method, cfg, files, secret=secret)
    own = _pretrained(run, found)
    remark_refits(run, method, cfg, rounds, found.sites)
    check_widths(method, cfg, found.architectures, found.sites)
    check_statistics(cfg, [found.sites[i] for i in unseen])
    if own is not None:
        found = _taught(found, own)
    common = found.sites[0].build().named_parameters() if "one network" in method.needs else ()
    return World(
        run=run,
        method=method,
        cfg=cfg,
        rounds=rounds,
        held=found.held,
        architectures=found.architectures,
        graph=found.graph,
        server=method.server(cfg, found.home) if method.server else None,
        clients=[found.client(n) for n in range(len(found.sites))],
        form={k: p.detach().to("meta") for k, p in common if p.requires_grad},
        house=found.house,
        unseen=unseen,
        pretrained="" if own is None else own.digest,
        known_as="" if files.matched is None else files.matched.run,
    )


def _pretrained(run: RunConfig, found: Ground) -> Pretrained | None:
    """The server's model, if there is one."""
    if found.taught is None:
        return None
    known, rows = found.taught
    return prepare(pretrained_of(run, known.kind), known, rows, run.engine.device)


def _taught(found: Ground, own: Pretrained) -> Ground:
    """The same places with a pretrained model at the home; clients know its architecture, if they are sent it."""
    home = replace(found.home, pretrained=own.teacher, encoder=own.encoder)
    told = "pretrained encoder" in found.method.needs
    return replace(
        found, home=home, sites=[replace(site, encoder=own.encoder) for site in found.sites] if told else found.sites
    )


def pretrained_of(run: RunConfig, kind: str) -> PretrainedConfig:
    """The section `[pretrained]` with the name of its network, where that is the clients' on this kind of data."""
    pool = {*(run.models.pool or ())}
    return run.pretrained.like(pool.pop() if len(pool) == 1 else COMMON[kind][0], run.models.norm)
