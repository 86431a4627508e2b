"""FedAvg: a server averages its clients' weights; with fine-tuning before use.

Papers: H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017; lines are those of its Algorithm 1. G. Cheng, K. Chadha, J. Duchi, "Federated
Asymptotics: a Model to Compare Federated Learning Algorithms", AISTATS 2023, for FedAvg-FT: one
epoch of local training before a model is used.

Differs:
    Clients that skip a round are evaluated with the server's weights too; downloading them for that
        is not counted as a message. So a round costs 2k models for k participants.
    BatchNorm statistics stay at the client: see `fedloom.methods.steps`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from pydantic import Field
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Federation,
    Method,
    Party,
    Shape,
    Template,
    Tree,
)
from fedloom.methods import steps


class FedAvgConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    personal_head: bool = False
    """Whether the last layer is private to each client (FedPer with alternating updates)."""
    clients_per_round: int | None = Field(10, ge=1)
    """Number of participants in a round; None for all clients."""

    @property
    def sums_stand_alone(self) -> bool:
        """A client keeps nothing but its personal head, if it has one."""
        return not self.personal_head


@final
class FedAvgClient(Party[FedAvgConfig]):
    """A client. Between rounds it keeps only its personal head, if it has one."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("update",)
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network."""
        steps.init_network(self)

    def update(self, *, t: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """ClientUpdate: train on own rows, starting from the server's weights."""
        steps.set_weights(self, weights)
        steps.local_sgd(self, t=t)
        return {"weights": steps.shared_weights(self), "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the server's weights; adapt or fine-tune, depending on the
        mode.
        """
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


@final
class FedAvgServer(Party[FedAvgConfig]):
    """The server and its global weights."""

    ROLE = "server"
    STATE = ("weights",)
    broadcast = steps.broadcast

    def setup(self) -> None:
        """Line 1: the initial weights."""
        network = self.context.build()
        names = steps.shared_names(steps.trainable_weights(network), self.cfg.personal_head)
        params = dict(network.named_parameters())
        self.weights = {k: params[k].detach() for k in names}


def round(
    fed: Federation, server: FedAvgServer, clients: Sequence[int], cfg: FedAvgConfig, t: int
) -> Iterator[str]:
    """Algorithm 1, lines 3-8, for one t."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)  # lines 4, 5
    sent = {"weights": server.weights}
    template: Template = {**steps.weights_template(fed, cfg.personal_head), "rows": Shape("int64")}
    mean = fed.mean(
        chosen, "update", shared={"t": t, **sent}, expect=template, weight="rows", around=sent
    )
    if mean is not None:  # lines 6, 7
        server.weights = mean.value["weights"]  # line 8
    yield "round"


FEDAVG = Method(
    name="fedavg",
    title="A server averages weights",
    paper="H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from "
    "Decentralized Data, 2017",
    family="averaging",
    config=FedAvgConfig,
    round=round,
    client=FedAvgClient,
    server=FedAvgServer,
    fixed={"finetune_epochs": 0},
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
    linear=True,
)

METHODS = (
    FEDAVG,
    replace(
        FEDAVG,
        name="fedavg-ft",
        title="FedAvg; each client fine-tunes before use",
        fixed={},
        trial_rank=1,
        trial_variants={"own heads": {"personal_head": True}},
    ),
)
