"""FedAvg: a server averages what its clients have learnt; with fine-tuning before use, or from a pretrained model.

Papers: H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017; lines are those of its Algorithm 1. G. Cheng, K. Chadha, J. Duchi, "Federated Asymptotics: a Model to Compare
Federated Learning Algorithms", AISTATS 2023, for FedAvg-FT: one epoch of local training before a model is used.
J. Nguyen, J. Wang, K. Malik, M. Sanjabi, M. Rabbat, "Where to Begin? On the Impact of Pre-Training and Initialization
in Federated Learning", ICLR 2023, for FedLP, as the AugFL paper calls a warm start: round 0 hands out the server's
pretrained model. So it does not stay at the server; the ledger counts its weights like any others.

Differs:
    Whoever takes no part in a round is evaluated with the server's weights all the same; fetching them for that is
        not counted as a message. So a round costs 2k models, k the number of participants.
    BatchNorm's statistics stay at the client: see `fedloom.methods.learner`. Those of a pretrained model are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from fedloom.core.errors import ModelError
from fedloom.core.federation import Federation
from fedloom.core.message import Shape, Template, Tree, weighted_mean
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.learner import Learner, LearnerConfig, shared_names, weights_like


class Config(LearnerConfig):
    """The local training is `LearnerConfig`'s."""

    personal_head: bool = False
    """Whether a client keeps its last layer to itself (then it is FedPer with alternating updates)."""
    clients_per_round: int | None = Field(10, ge=1)
    """Participants of a round; None for all."""
    warm_start: bool = False
    """Whether all begin with the weights of the server's pretrained model, which must be the network of models.pool."""


class Client(Learner[Config]):
    """A client, which has no model of its own but perhaps a head."""

    CALLS = ("update",)

    def update(self, *, t: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """ClientUpdate: train from the server's weights on own rows."""
        self.adopt(weights)
        self.local_update(t)
        return {"weights": self.shared(), "rows": self.row_count}


class Server(Party[Config]):
    """The server and its global weights."""

    STATE = ("weights",)

    def setup(self) -> None:
        """Line 1: the weights that all begin with."""
        network = self.site.build()
        names = shared_names(weights_of(network), self.cfg)
        params = dict(network.named_parameters())
        if self.cfg.warm_start:
            params = like(params, dict(self.site.teacher().named_parameters()))
        self.weights = {k: params[k].detach() for k in names}

    def handout(self) -> dict[str, Tree]:
        """Today's global weights."""
        return dict(self.weights)

    def average(self, replies: Mapping[int, Any]) -> None:
        """Line 8: the mean, weighted by rows."""
        rows = [int(r["rows"]) for r in replies.values()]
        self.weights = weighted_mean([r["weights"] for r in replies.values()], rows)  # type: ignore[assignment]


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """What a network learns, by name."""
    return {k: p.detach() for k, p in module.named_parameters() if p.requires_grad}


def like(form: Mapping[str, Tensor], pretrained: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The pretrained weights.

    Raises:
        ModelError: they are not of the network whose weights are `form`.
    """
    wrong = [k for k in {**form, **pretrained} if k not in form or k not in pretrained]
    wrong += [k for k in form if k not in wrong and form[k].shape != pretrained[k].shape]
    if wrong:
        raise ModelError(
            f"a warm start needs a pretrained model like the clients' network, but they differ in {wrong[0]!r}: name "
            "the network of models.pool in pretrained.model, with its norm, to be trained on the server's rows"
        )
    return pretrained


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Algorithm 1, lines 3-8, for one t."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)  # lines 4, 5
    template: Template = {"weights": weights_like(fed, cfg), "rows": Shape("int64")}
    shared = {"t": t, "weights": server.weights}
    replies = fed.call(chosen, "update", shared=shared, expect=template, need=1)  # lines 6, 7
    if replies:
        server.average(replies)
    yield "round"


FEDAVG = Method(
    name="fedavg",
    title="A server averages weights",
    paper="H. B. McMahan et al.: Communication-Efficient Learning of Deep Networks from Decentralized Data, 2017",
    family="averaging",
    config=Config,
    round=round,
    client=Client,
    server=Server,
    fixed={"finetune_epochs": 0},
    needs=("one network",),
)

METHODS = (
    FEDAVG,
    replace(FEDAVG, name="fedavg-ft", title="FedAvg, and each client fine-tunes before use", fixed={}),
    replace(
        FEDAVG,
        name="fedlp",
        title="FedAvg that begins with the server's pretrained model, and so gives it away",
        paper="J. Nguyen et al.: Where to Begin? On the Impact of Pre-Training and Initialization in FL, ICLR 2023",
        fixed={"finetune_epochs": 0, "warm_start": True},
        needs=("one network", "pretrained server model"),
    ),
)
