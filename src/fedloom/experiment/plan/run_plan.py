"""The plan of a run: a config made concrete, ready for an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fedloom.core.aggregate import Aggregator
from fedloom.core.context import ClientContext
from fedloom.core.engine import names
from fedloom.core.graphs import Graph
from fedloom.core.method import Method, MethodConfig
from fedloom.core.party import Party
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.assignment import DataAssignment, chance
from fedloom.experiment.plan.private import PrivateData
from fedloom.protect.noise import Draws


class Planner(Protocol):
    """Checks the configs and builds the plans of horizontal, or vertical, runs."""

    own_data: tuple[str, str]
    """The config section of private data, and how to set it, for error messages."""

    def check(self, run: RunConfig, method: Method, *, server: bool) -> None:
        """Refuse settings that do not apply. `server`: whether the server has rows.

        Raises:
            ConfigError: a setting does not apply.
        """

    def clients(self, run: RunConfig, nodes: int | None) -> int | None:
        """The number of clients if the config does not set it; None for the default. `nodes`: their
        number, if any.
        """

    def build(
        self,
        run: RunConfig,
        method: Method,
        cfg: Any,
        rounds: int,
        files: PrivateData,
        at: int | None = None,
    ) -> "RunPlan":
        """The plan of a run.

        Args:
            run: the config.
            method, cfg, rounds: as `resolve` gives them.
            files: private data on this machine, or local names of data sets.
            at: the number of this node's party; None at the coordinator.

        Raises:
            ConfigError, DataError, ModelError: the run cannot be built.
        """

    def server_name(self, plan: "RunPlan") -> str:
        """The coordinator's name in the ledger."""

    def min_nodes(self, plan: "RunPlan", nodes: int) -> int:
        """The minimum number of nodes in a round, given their number."""


@dataclass(frozen=True, eq=False)
class RunPlan:
    """A run, ready for an engine. Clients are numbered from 0.

    Attributes:
        run: the config.
        method: the method that the config names.
        cfg: the method's config: its preset with `params`.
        rounds: number of rounds.
        planner: of horizontal or vertical runs.
        data: the data of each party.
        architectures: the network of each client, by name.
        graph: the neighbours of each client; None if all are connected.
        server_context, contexts: the client context of the server (or active party), and of each
            client.
        colocated: clients in the server's process; messages between them and the server are not
            counted.
        unseen: ids of the unseen clients.
        pretrained: digest of the server's pretrained model; "" without one.
        known_as: the id under which nodes store the rows aligned for this run; "" without such
            rows.
    """

    run: RunConfig
    method: Method
    cfg: Any
    rounds: int
    planner: Planner
    data: DataAssignment
    architectures: tuple[str, ...]
    graph: Graph | None
    server_context: ClientContext
    contexts: list[ClientContext]
    colocated: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    pretrained: str = ""
    known_as: str = ""

    @cached_property
    def server(self) -> Party[MethodConfig] | None:
        """The server or active party; None for methods without one."""
        return self.method.server(self.cfg, self.server_context) if self.method.server else None

    @cached_property
    def clients(self) -> list[partial[Party[MethodConfig]]]:
        """For each client, a function that builds it."""
        return [
            partial(self.method.party_at(context), self.cfg, context) for context in self.contexts
        ]

    @property
    def aggregator(self) -> Aggregator:
        """How the run takes means at its server, with the server's noise."""
        server = self.server_context

        def draws(key: Sequence[int]) -> Draws:
            return Draws(None if server.secret is not None else server.stream("dp-fedavg", *key))

        return self.run.aggregate.aggregator(draws)

    @cached_property
    def param_shapes(self) -> Mapping[str, Tensor]:
        """Meta tensors of the common network's parameters, by name; empty where networks differ."""
        common = (
            self.contexts[0].build().named_parameters()
            if "one network" in self.method.needs
            else ()
        )
        return {k: p.detach().to("meta") for k, p in common if p.requires_grad}

    @cached_property
    def training(self) -> tuple[int, ...]:
        """Numbers of the training clients, ascending."""
        return tuple(sorted({*range(len(self.contexts))} - {*self.unseen}))

    @property
    def names(self) -> dict[int, str]:
        """Each client's name in the ledger, without building it."""
        return names((i, make.func) for i, make in enumerate(self.clients))  # type: ignore[misc]  # classes

    @property
    def chance(self) -> float | None:
        """The chance level on the common test set; None without one."""
        if "test" not in self.data.labels:
            return None
        return chance(self.data.labels["test"][0])

    def own_chance(self, clients: Sequence[int] | None = None) -> float | None:
        """The mean chance level on own test rows, over these clients or all; None without such
        rows.
        """
        each = self.data.own_chances
        return (
            None if each is None else float(np.mean(each if clients is None else each[[*clients]]))
        )
