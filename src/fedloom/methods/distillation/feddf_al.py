"""FedDF-AL: FedAL among all clients, and weights averaged among clients of one architecture.

Paper: P. Han, X. Shi and J. Huang, "FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial
Learning", Fig. 10, which sets it beside FedDF (T. Lin et al., NeurIPS 2020). It has no algorithm box. A round here:

    local stage        CE + r_loc, from the group's model       `fedal`, lines 3-7
    transfer stage     KL, adversary and r_glo on P             `fedal`, lines 8-18
    average            each group's models, weighted by rows    `feddf`

r_loc holds a client near the group's model, since this is what the local stage begins with. Down cross that model with
its statistics (see `feddf`), then for each public batch the mean answer and the gradient; up logits for each public
batch, then the model with its statistics, and a row count. So no client is a black box, unlike in FedAL.

Differs:
    The paper leaves the order open. Averaging before the transfer stage would make the clients of a group answer alike,
        so that no discriminator could tell them apart.
    The discriminator tells N clients apart, not groups.
    The server distils nothing on P, as FedDF's does: what a group learns from the others is what its clients learn from
        their answers in the transfer stage, and the server needs no public rows.
    While a round is under way everybody is evaluated with the network that it has, and after the average with its
        group's model, even who took no part; that is not counted as a message.
    A client that did not get its group's model sits the round out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor

from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.methods.distillation import fedal
from fedloom.methods.distillation.feddf import averaged, first_models, model_of, of_each, replies_like, wear


class Config(fedal.Config):
    """FedAL's, with the τ that its section VI-A gives FedDF-AL."""

    tau: int = Field(15, ge=1)
    """Steps of each stage (τ)."""


class Client(fedal.Client):
    """A client of FedAL that has the architecture of its group, and shows its weights."""

    STATE = (*fedal.Client.STATE, "group")
    CALLS = (*fedal.Client.CALLS, "begin", "give")

    def setup(self) -> None:
        """The network that its group begins with, and the group's number."""
        super().setup()
        self.group = self.site.group  # as state, so that an engine can do clients of several groups at once

    def begin(self, *, weights: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
        """Take the group's model."""
        wear(self, weights, statistics)

    def give(self) -> dict[str, Tree]:
        """The own model, and how many rows made it."""
        return {**model_of(self), "rows": self.row_count}

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """Before an evaluation: take the group's model, if there is one today."""
        if handout:
            wear(self, **handout[str(self.group)])  # type: ignore[arg-type]


class Server(fedal.Server):
    """The server of FedAL, with the model of each group by the group's number."""

    STATE = (*fedal.Server.STATE, "models", "underway")

    def setup(self) -> None:
        """The discriminator, and what each group begins with; `underway` is whether clients are ahead of that."""
        super().setup()
        self.models = first_models(self.site)
        self.underway = False

    def handout(self) -> dict[str, Tree]:
        """Today's models; none while the clients are changing theirs."""
        return {} if self.underway else dict(self.models)

    def set_out(self) -> None:
        """The clients begin to change their models."""
        self.underway = True

    def average(self, replies: Mapping[int, Any]) -> None:
        """The models that the next round begins with."""
        self.models, refused = averaged(self.models, self.site.groups, replies)
        self.note("means left out", refused)
        self.underway = False


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One round."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    models = of_each(server.models, server.site.groups, chosen)
    begun = fed.call(chosen, "begin", each=models, expect=None)
    server.set_out()
    there = [n for n in chosen if n in begun]
    yield from fedal.round(fed, server, there, cfg, t)  # local, transfer
    server.average(fed.call(there, "give", expects=replies_like(models)))
    yield "average"


METHODS = (
    Method(
        name="feddf-al",
        title="FedAL, and weights averaged among clients of one architecture",
        paper="P. Han, X. Shi, J. Huang: FedAL: Black-Box Federated Knowledge Distillation Enabled by Adversarial "
        "Learning",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        presets=fedal.FEDAL.presets,
        needs=("public rows", "architecture groups"),
        min_clients=2,
    ),
)
