"""FedProto on public data: distillation towards the mean features of the others.

Papers: Y. Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022, as P. Han, X. Shi and J. Huang adapt it to unlabeled public rows to compare with FedAL
(section VI-A). The method of the first paper itself is `fedproto`.

It is FedMD with features instead of logits. All clients hold the same public rows P; client n's
features g_n(x) of a row, the input of its last layer, are pulled towards the mean of the others':

    local:     CE(y, f_n)
    transfer:  λ MSE(g_n, mean of the others' g)

Messages: features (B, d) of a public batch up, their mean down. A client sends its features, so it
cannot be a black box. All features must have one width, or the run is refused; the server has a
network like client 0's and refuses a reply of another width. With `feature_dim` the widths may
differ: it puts a linear layer between each network's features and a new last layer.

Differs:
    The paper names neither the loss nor its weight: mean squared error with λ = 1 is our reading.
    The server sends the mean of all clients; each client removes its own features from it, as in
    FedAL. Features are clipped to ±`LARGEST`. A client that sends false features within these
        bounds moves the others' means and shortens their Adam steps for a while, but cannot stop
        their training.
    A transfer step leaves the last layer alone: its weights and Adam's moments stay, as with
        torch's Adam where there is no gradient. But Adam's step count, which corrects the bias of
        the moments, is one for the whole network.
    A network without a parameter before its last layer sends its features and learns from own rows
    only.
"""

from collections.abc import Iterator, Sequence
from typing import ClassVar, final

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import EVERY_LOCAL, Adam, ClientContext, Federation, Method, Party, floats
from fedloom.methods.distillation.steps import TrainingConfig, mean_of_others, public_batch
from fedloom.methods.features import HEAD, Features, linear

LARGEST = 2.0**13
"""Features are clipped to ± this, as in a secure sum: far above the features of a network that
trains, and so small that the square of a gradient, of which Adam keeps a mean, cannot overflow
float32.
"""


class FedProtoPublicConfig(TrainingConfig):
    """The training is that of FedAL's section VI-A, with FedMD's τ."""

    lam: float = Field(1.0, ge=0)
    """λ: weight of the distance to the others' mean features."""
    FEATURE_DIM: ClassVar[str] = "feature_dim"
    feature_dim: int | None = Field(None, ge=1)
    """Common feature dimension d, by a linear layer after each network's features; None for the
    features themselves.
    """

    def stages_in_round(self, t: int) -> int:
        """The local stage, and the transfer stage if it has a weight."""
        return 2 if self.lam else 1

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Once for each public batch."""
        return {"embed": self.tau, "align": self.tau}


class AdaptedFeatures(Features):
    """A network that outputs its features; if a width is given, mapped to it by a linear layer.

    The last layer is then a new one of this input width.
    """

    def __init__(self, network: nn.Module, width: int | None) -> None:
        super().__init__(network)
        self.adaptor: nn.Module = nn.Identity()
        if width is not None:
            head: nn.Linear = self.network.head
            self.adaptor = nn.Linear(head.in_features, width, dtype=head.weight.dtype)
            self.network.head = nn.Linear(
                width, head.out_features, bias=head.bias is not None, dtype=head.weight.dtype
            )

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d)."""
        out: Tensor = self.adaptor(super().forward(x))
        return out


@final
class FedProtoPublicClient(Party[FedProtoPublicConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("local_train", "embed", "align")
    MEANS = ("embed",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network."""
        network = self.context.build()
        with self.seeded("adaptor"):
            self.network(AdaptedFeatures(network, self.cfg.feature_dim), Adam(self.cfg.lr))

    def local_train(self, *, t: int) -> None:
        """Round t's τ steps on own rows."""
        self.train(self.local_loss, self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size))

    def local_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy () on x (B, ...), y (B,)."""
        return self.context.task.loss(linear(self.model(x), self.live), y)

    def embed(self, *, t: int, i: int) -> Tensor:
        """Features (B, d) of the public batch."""
        return self.forward(public_batch(self, t, i))

    def align(self, *, t: int, i: int, n: int, mean: Tensor) -> None:
        """One step of all but the last layer towards the others' features.

        Args:
            t, i: which public batch.
            n: the number of clients in the mean.
            mean: (B, d) their mean features; the target itself, if the run takes another mean than
                that of the paper.
        """
        x = public_batch(self, t, i)
        own = self.forward(x)
        target = mean if self.context.aggregator.even else mean_of_others(clipped(own), mean, n)
        if moving := [k for k in self.params if not k.startswith(f"{HEAD}.")]:
            self.minimize(self.distance, x, target, only=moving)
        if i == self.cfg.tau - 1:
            self.note("feature distance", F.mse_loss(own, target))

    def distance(self, x: Tensor, target: Tensor) -> Tensor:
        """The transfer loss () on x (B, ...), target (B, d) a constant."""
        return self.cfg.lam * F.mse_loss(self.model(x), target)

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K) of the own last layer, constants."""
        return linear(self.net.infer(x), self.params)


@final
class FedProtoPublicServer(Party[FedProtoPublicConfig]):
    """The server, which keeps only the feature dimension."""

    ROLE = "server"
    STATE = ("width",)

    def setup(self) -> None:
        """`width` is d."""
        self.width = self.cfg.feature_dim or Features(self.context.build()).width

    def read(self, n: int, features: Tensor) -> Tensor:
        """A client's features (B, d) within bounds, as a secure sum has them."""
        return clipped(features)


def clipped(features: Tensor) -> Tensor:
    """Features (B, d) within ±`LARGEST`, as they enter the mean."""
    return features.clamp(-LARGEST, LARGEST)


def round(
    fed: Federation,
    server: FedProtoPublicServer,
    clients: Sequence[int],
    cfg: FedProtoPublicConfig,
    t: int,
) -> Iterator[str]:
    """A local stage of τ steps, and a transfer stage of τ exchanges."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    if not cfg.lam:
        return
    for i in range(cfg.tau):
        batch = {"t": t, "i": i}
        template = floats(cfg.batch_size, server.width)
        found = fed.mean(
            chosen, "embed", shared=batch, expect=template, read=server.read, min_replies=2
        )
        if found is not None:
            fed.call(found.ids, "align", shared={**batch, "n": len(found.ids), "mean": found.value})
    yield "transfer"


METHODS = (
    Method(
        name="fedproto-public",
        title="Distillation towards the mean features of the others on public data",
        paper="Y. Tan et al.: FedProto: Federated Prototype Learning across Heterogeneous Clients, "
        "AAAI 2022; as P. Han et al. adapt it in: FedAL: Black-Box Federated Knowledge "
        "Distillation Enabled by Adversarial Learning, JSAC 2024",
        only_classes="it compares prototypes of classes",
        local=EVERY_LOCAL,
        family="distillation",
        config=FedProtoPublicConfig,
        round=round,
        client=FedProtoPublicClient,
        server=FedProtoPublicServer,
        needs=("public rows", "same feature dim"),
        min_clients=2,
    ),
)
