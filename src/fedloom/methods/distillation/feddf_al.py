"""FedDF-AL: FedAL among all clients, and weights averaged among clients of one architecture.

Paper: P. Han, X. Shi and J. Huang, "FedAL: Black-Box Federated Knowledge Distillation Enabled by
Adversarial Learning", Fig. 10, which sets it beside FedDF (T. Lin et al., NeurIPS 2020). It has no
algorithm box. A round here:

    local stage        CE + r_loc, from the group's model       `fedal`, lines 3-7
    transfer stage     KL, adversary and r_glo on P             `fedal`, lines 8-18
    average            each group's models, weighted by rows    `feddf`

r_loc holds a client near the group's model, because the local stage begins with it. Messages down:
that model with its statistics (see `feddf`), then for each public batch the mean answer and the
gradient. Messages up: logits for each public batch, then the model with its statistics, and a row
    count. So no client is a black box, unlike in FedAL.

Differs:
    The paper leaves the order open. Averaging before the transfer stage would make the clients of a
        group answer alike, so that no discriminator could tell them apart.
    The discriminator distinguishes N clients, not groups.
    The server does not distil on P, as FedDF's does: a group learns from the others only by its
        clients' transfer stage, and the server needs no public rows.
    During a round every client is evaluated with its own network, and after the average with its
        group's model, even if it was not sampled; that is not counted as a message.
    A client that did not receive its group's model skips the round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from fedloom.core.page import Adam, Federation, Party, Tree
from fedloom.methods.distillation import fedal, feddf, trust
from fedloom.methods.distillation.fedal import FedALConfig
from fedloom.methods.distillation.steps import public_batch


@final
class FedDFALClient(Party[FedALConfig]):
    """A client of FedAL that has the architecture of its group, and sends its weights."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "reference", "group")
    CALLS = ("local_train", "introduce", "predict", "distil", "begin", "give")
    MEANS = ("predict", "give")
    TELLS = (("introduces", ("introduce",)),)
    introduce = trust.introduce

    def setup(self) -> None:
        """The network that its group begins with, FedAL's `reference`, and the group's number."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.reference: dict[str, Any] = {"t": -1, "logits": torch.empty(0)}
        # as state, so that an engine can batch clients of several groups
        self.group = self.context.group

    def begin(self, *, weights: dict[str, Tensor], statistics: dict[str, Tensor]) -> None:
        """Load the group's model."""
        feddf.set_model(self.net, weights, statistics)

    def local_train(self, *, t: int) -> None:
        """The local stage."""
        fedal.local_stage(self, t)

    def predict(self, *, t: int, i: int) -> Tree:
        """Logits (B, K) on the public batch, encoded."""
        if self.cfg.looks_back and self.reference["t"] != t:
            self.reference = fedal.transfer_reference(self, t)
        return self.cfg.encode(self.forward(public_batch(self, t, i)))

    def distil(
        self,
        *,
        t: int,
        i: int,
        n: int,
        mean: Tree,
        gradient: Tree = None,
        share: Tensor | None = None,
    ) -> None:
        """One step of the transfer stage; for the arguments see `FedALClient.distil`."""
        fedal.transfer_step(self, t, i, n, mean, gradient, share, self.reference)

    def give(self) -> dict[str, Tree]:
        """The own model, and the number of own rows."""
        return {**feddf.model_of(self.net), "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the group's model, if it is broadcast."""
        if broadcast:
            feddf.set_model(self.net, **broadcast[str(self.group)])  # type: ignore[arg-type]


@final
class FedDFALServer(trust.TrustingServer[FedALConfig]):
    """The server of FedAL, with the model of each group by the group's number."""

    ROLE = "server"
    STATE = ("params", "opt", "models", "underway")

    def setup(self) -> None:
        """The discriminator; the `models` that groups begin with; `underway`: whether clients train
        newer ones.
        """
        fedal.build_discriminator(self)
        trust.init(self)
        self.models = feddf.first_models(self.context)
        self.underway = False

    def broadcast(self) -> dict[str, Tree]:
        """The groups' models; none during a round, while the clients' models differ from them."""
        return {} if self.underway else dict(self.models)

    def begin(self) -> None:
        """Mark the groups' models as outdated."""
        self.underway = True

    def end(self) -> None:
        """Mark the groups' models as the newest."""
        self.underway = False


def round(
    fed: Federation, server: FedDFALServer, clients: Sequence[int], cfg: FedALConfig, t: int
) -> Iterator[str]:
    """One round."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    models = feddf.of_each(server.models, server.context.groups, chosen)
    begun = fed.call(chosen, "begin", each=models, expect=None)
    server.begin()
    ready = [n for n in chosen if n in begun]
    yield from fedal.round(fed, server, ready, cfg, t)  # local, transfer
    means = fed.means(feddf.members(server, ready), "give", **feddf.models_of(server))
    feddf.replace_models(server, means)
    server.end()
    yield "average"


METHODS = (
    replace(
        fedal.FEDAL,
        name="feddf-al",
        title="FedAL, with weights averaged among clients of one architecture",
        extra_stages=1,  # the average
        round=round,
        client=FedDFALClient,
        server=FedDFALServer,
        black_box=None,
        fixed={"tau": 15},  # of section VI-A
        needs=("public rows", "architecture groups"),
    ),
)
