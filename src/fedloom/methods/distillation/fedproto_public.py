"""FedProto on public data: distillation towards the mean features of the others.

Papers: Y. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022, as P. Han,
X. Shi and J. Huang adapt it to unlabelled public rows to compare with FedAL (section VI-A). The method of the first
paper itself is `fedproto`.

It is FedMD with features in the place of logits. All clients hold the same public rows P; client n's features g_n(x)
of a row, the input of its last layer, are pulled towards the mean of the others':

    local:     CE(y, f_n)
    transfer:  λ MSE(g_n, mean of the others' g)

What crosses: features (B, d) of a public batch up, their mean down. So a client must show its features: it is no black
box. All features must have one width, or a run does not begin; the server has a network like client 0's and refuses a
reply of another width. With `adaptor` any networks will do: it puts a linear layer between each one's features and a
new last layer.

Differs:
    The paper names neither the loss nor its weight: mean squared error with λ = 1 is our reading.
    The server sends the mean of all; each client takes itself out of it, as in FedAL.
    Features are believed up to ±`LARGEST`. Who lies within that moves the others' means, and makes their Adam's steps
        short for a while, but can't stop them for good.
    The last layer takes no part in a transfer step: its weights and Adam's means of its gradients stay, as with
        torch's Adam where there is no gradient. But Adam's count of steps, which corrects the bias of these means,
        is one for the whole network here.
    A network without a parameter before its last layer shows its features and learns from own rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.distiller import Distiller, DistillerConfig, without
from fedloom.methods.features import HEAD, Features, linear

LARGEST = 1e4
"""The largest absolute value of a feature that is believed: far beyond those of networks that train, and so small that
no gradient's square, which Adam keeps a mean of, comes near float32's end."""


class Config(DistillerConfig):
    """The training is that of FedAL's section VI-A, with FedMD's τ."""

    ld: float = Field(1.0, ge=0)
    """λ: weight of the distance from the others' features."""
    FEATURE_DIM: ClassVar[str] = "adaptor"
    adaptor: int | None = Field(None, ge=1)
    """Width d of all features, by a linear layer behind each network's own; None for these as they are."""


class Adapted(Features):
    """A network that answers with its features; if a width is given, through a linear layer to this width.

    The last layer then is a new one, as its inputs are.
    """

    def __init__(self, network: nn.Module, width: int | None) -> None:
        super().__init__(network)
        self.adaptor: nn.Module = nn.Identity()
        if width is not None:
            head: nn.Linear = self.network.head
            self.adaptor = nn.Linear(head.in_features, width, dtype=head.weight.dtype)
            self.network.head = nn.Linear(width, head.out_features, bias=head.bias is not None, dtype=head.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d)."""
        out: Tensor = self.adaptor(super().forward(x))
        return out


class Client(Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    CALLS = ("local_train", "embed", "align")

    def setup(self) -> None:
        """Its first weights."""
        network = self.site.build()
        with self.seeded("adaptor"):
            self.start(Adapted(network, self.cfg.adaptor))

    def local_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy () on x (B, ...), y (B,)."""
        return F.cross_entropy(linear(self.model(x), self.live), y)

    def embed(self, *, t: int, i: int) -> Tensor:
        """Features (B, d) of the public batch."""
        return self.forward(self.public_batches(t)[i])

    def align(self, *, t: int, i: int, n: int, mean: Tensor) -> None:
        """One step of all but the last layer towards the others' features.

        Args:
            t, i: which public batch.
            n: how many clients the mean is over.
            mean: (B, d) their mean features.
        """
        x = self.public_batches(t)[i]
        own = self.forward(x)
        target = without(believed(own), mean, n)
        if moving := [k for k in self.params if not k.startswith(f"{HEAD}.")]:
            self.minimise(self.distance, x, target, only=moving)
        if i == self.cfg.tau - 1:
            self.note("feature distance", F.mse_loss(own, target))

    def distance(self, x: Tensor, target: Tensor) -> Tensor:
        """The transfer loss () on x (B, ...), target (B, d) a constant."""
        return self.cfg.ld * F.mse_loss(self.model(x), target)

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K) of the own last layer, constants."""
        return linear(super().infer(x), self.params)


class Server(Party[Config]):
    """The server. It remembers nothing but what features have to look like."""

    STATE = ("width",)

    def setup(self) -> None:
        """`width` is d."""
        self.width = self.cfg.adaptor or Features(self.site.build()).width

    def average(self, features: Mapping[int, Tensor]) -> Tensor:
        """The mean (B, d) over clients."""
        return torch.stack([believed(f) for f in features.values()]).mean(0)


def believed(features: Tensor) -> Tensor:
    """Features (B, d) as the mean holds them."""
    return features.clamp(-LARGEST, LARGEST)


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """A local stage of τ steps, and a transfer stage of τ exchanges."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    if not cfg.ld:
        return
    for i in range(cfg.tau):
        batch = {"t": t, "i": i}
        features = fed.call(chosen, "embed", shared=batch, expect=floats(cfg.batch_size, server.width), need=2)
        if not features:
            continue  # nobody to learn from
        shared = {**batch, "n": len(features), "mean": server.average(features)}
        fed.call(features, "align", shared=shared)
    yield "transfer"


METHODS = (
    Method(
        name="fedproto-public",
        title="Distillation towards the mean features of the others on public data",
        paper="Y. Tan et al.: FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022; "
        "as P. Han, X. Shi, J. Huang adapt it in: FedAL: Black-Box Federated Knowledge Distillation Enabled by "
        "Adversarial Learning",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        needs=("public rows", "same feature dim"),
        min_clients=2,
    ),
)
