"""Everything that an engine needs to do a run: what `fedloom.experiment.build` makes of a config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedloom.core.context import ClientContext
from fedloom.core.engine import Engine, names
from fedloom.core.graphs import Graph
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.experiment.assignment import DataAssignment
from fedloom.experiment.config import RunConfig
from fedloom.experiment.private import PrivateData
from fedloom.experiment.result import Final

Metric = tuple[str, float, str]
"""A measure, its value, and the party that it is of; "" where it is of the whole federation."""


class Setting(Protocol):
    """How parties share data, and so how their run is built, evaluated and summarised: by rows or by columns."""

    exportable: bool
    """Whether parties can be exported for use after training: a client of a horizontal run has a whole model anyway."""
    own_data: tuple[str, str]
    """The part of a config that is for data of the parties' own, and how to say so, for an error."""

    def check(self, run: RunConfig, method: Method, *, server: bool) -> None:
        """Refuse settings of the config that mean nothing here.

        Args:
            run: its config.
            method: of the run.
            server: whether its server has rows.

        Raises:
            ConfigError: with what to change.
        """

    def clients(self, run: RunConfig, nodes: int | None) -> int | None:
        """The number of clients if the config names none, given the number of nodes; None for the default."""

    def build(
        self, run: RunConfig, method: Method, cfg: Any, rounds: int, files: PrivateData, at: int | None = None
    ) -> RunPlan:
        """The plan of a run.

        Args:
            run: the run.
            method, cfg, rounds: what its config names.
            files: private data on this machine, or other names of data sets here.
            at: the party to build, at a node; None at the coordinator, or where all parties are here.

        Raises:
            ConfigError, DataError, ModelError: the run can't be built.
        """

    def server_name(self, plan: RunPlan) -> str:
        """The name in the ledger of the party that runs the rounds."""

    def min_nodes(self, plan: RunPlan, nodes: int) -> int:
        """How many of the nodes a round needs."""

    def main_measure(self, plan: RunPlan) -> str:
        """The accuracy that counts, as `metrics.csv` calls it."""

    def party_measures(self, plan: RunPlan) -> set[str]:
        """What `metrics.csv` calls the accuracy of one party."""

    def evaluate(self, plan: RunPlan, engine: Engine) -> Iterator[Metric]:
        """All measures of the models as they are now.

        Raises:
            PartiesMissing: no party can be evaluated; or one can't, where all are needed.
            MethodError: a party that is not at a node fails.
        """

    def summarise(self, final: Final, parties: Sequence[str], plan: RunPlan) -> dict[str, Any]:
        """The fields of `RunSummary` that depend on the setting, from the last values and the parties' names."""


@dataclass(frozen=True, eq=False)
class RunPlan:
    """A run, ready for an engine.

    Attributes:
        run, method, cfg, rounds: what is done, and how many rounds of it.
        setting: how its parties share data.
        data: which party holds which data.
        architectures: each client's network by name.
        graph: the neighbours of each client; None if all are connected.
        server_site, sites: private resources of the party that runs the rounds, and of each client.
        house: those of the clients that run beside the server.
        unseen: those of the clients that are never in a round.
        pretrained: identifies the server's pretrained model; empty if there is none.
        known_as: the run's id at nodes if they have matched rows for it; else empty.
    """

    run: RunConfig
    method: Method
    cfg: Any
    rounds: int
    setting: Setting
    data: DataAssignment
    architectures: tuple[str, ...]
    graph: Graph | None
    server_site: ClientContext
    contexts: list[ClientContext]
    colocated: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    pretrained: str = ""
    known_as: str = ""

    @cached_property
    def server(self) -> Party[Any] | None:
        """The party that runs the rounds, or None."""
        return self.method.server(self.cfg, self.server_site) if self.method.server else None

    @cached_property
    def clients(self) -> list[partial[Party[Any]]]:
        """For each client a function that makes it, always the same."""
        return [partial(self.method.party_at(context), self.cfg, context) for context in self.contexts]

    @cached_property
    def param_shapes(self) -> Mapping[str, Tensor]:
        """Names and shapes of the parameters of the network that all have; empty where each has its own."""
        common = self.contexts[0].build().named_parameters() if "one network" in self.method.needs else ()
        return {k: p.detach().to("meta") for k, p in common if p.requires_grad}

    @cached_property
    def training(self) -> tuple[int, ...]:
        """The clients that take part in rounds, rising."""
        return tuple(sorted({*range(len(self.contexts))} - {*self.unseen}))

    @property
    def names(self) -> dict[int, str]:
        """What the ledger calls each client; none is made for it."""
        return names((i, make.func) for i, make in enumerate(self.clients))  # type: ignore[misc]  # classes

    @property
    def chance(self) -> float | None:
        """The accuracy of always answering the most frequent class of the test set, if there is one that all have."""
        if "test" not in self.data.labels:
            return None
        counts = np.bincount(self.data.labels["test"][0], minlength=len(self.data.classes))
        return float(counts.max() / counts.sum())

    def own_chance(self, clients: Sequence[int] | None = None) -> float | None:
        """The same on each client's own test rows, mean over these clients, or over all; None without such rows."""
        each = self.data.own_chances
        return None if each is None else float(np.mean(each if clients is None else each[[*clients]]))
