"""FedProto: clients with models of their own, which agree on one prototype of each class.

Paper: Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang, "FedProto: Federated Prototype
Learning across Heterogeneous Clients", AAAI 2022, Algorithm 1; read with the authors' code,
github.com/yuetan031/FedProto.

A prototype C^(j) is the mean of the features of the rows of class j. A round:

    f_i <- SGD on cross-entropy + λ MSE(f_i(x), C^(y)), C^(y) the global prototype of the row's own
    class C_i^(j) = mean of f_i(x) over own rows of class j
    C^(j)   = mean of the C_i^(j), weighted by their numbers of rows

Messages: prototypes (K, d) and numbers of rows (K,) up, prototypes down. Models are never averaged,
so networks may differ, but all must give features of one width. The numbers of rows tell the server
each client's class mix.

A client that never trained has only its own initial network and the global prototypes: after 0
steps it predicts by chance, and all that it learns comes from its steps of adaptation, on the same
loss.

Differs:
    The regularizer compares each row's features with the prototype, as the code does; the paper
        compares prototypes of batches. A row whose class has no global prototype adds 0.
    The paper's (6) divides the weighted mean by the number of clients once more, which is taken for
        a slip. The code takes the plain mean over clients.
    Prototypes are made of all own rows after the training, in evaluation mode; the code collects
    features on the way. `predict = "prototype"` takes the nearest of all global prototypes, in L2.
        The code looks only at those of the client's own classes, and reports the classifier's
        answers too.
    A client that sends nothing in a round does not count in it; a class that no client sends keeps
    its prototype. A node sends a class of few own rows as absent (`min_class_rows` of its
        `node.toml`). With secure sums a class counts if two clients have it, which a first sum
        tells: that of one would be its prototype.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor, nn

from fedloom.core.page import (
    EVERY_LOCAL,
    SGD,
    Aggregator,
    Federation,
    Method,
    ModelError,
    Party,
    Shape,
    Tree,
    floats,
)
from fedloom.methods import features, steps
from fedloom.methods.features import Features, class_means, linear, mask_unknown
from fedloom.methods.meta.steps import MetaConfig

LEAST_CLIENTS = 2
"""The fewest clients with a class whose prototypes a secure sum may hold."""


class FedProtoConfig(MetaConfig):
    """Defaults are those of the authors' code."""

    epochs: int = Field(1, ge=1)
    """Epochs over the client's own rows in a round."""
    batch_size: int = Field(4, ge=1)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    lr: float = Field(0.01, gt=0)
    """Learning rate of SGD."""
    momentum: float = Field(0.5, ge=0, lt=1)
    """Momentum of SGD, reset to zero in each round."""
    lam: float = Field(1.0, ge=0)
    """λ: weight of the distance to the global prototypes."""
    predict: Literal["prototype", "classifier"] = "prototype"
    """Prediction by the nearest global prototype, or by the network's last layer."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: the mean of a class shows whether a client has it."""
        return (
            "who has a class is not hidden" if aggregator.hidden and not aggregator.secure else ""
        )

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs


class PrototypedNetwork(Features):
    """A network, and the global prototypes that its client received last."""

    def __init__(self, network: nn.Module, classes: int) -> None:
        super().__init__(network)
        self.register_buffer("prototypes", torch.zeros(classes, self.width))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))


@final
class FedProtoClient(Party[FedProtoConfig]):
    """A client with a network of its own."""

    STATE = ("params", "buffers", "opt")
    ROLE = "client"
    CALLS = ("claim", "update")
    MEANS = ("claim", "update")
    TELLS = (("by class", MEANS),)

    def setup(self) -> None:
        """Its initial weights; no prototypes yet."""
        network = PrototypedNetwork(self.context.build(), self.context.classes)
        self.network(network, SGD(self.cfg.lr, self.cfg.momentum))

    def claim(self) -> dict[str, Tensor]:
        """Which classes this client has, as 0 or 1 (K,), for a secure sum."""
        return {"clients": self.context.shown_classes.long()}

    def update(
        self, *, t: int, received: dict[str, Tensor], counted: Tensor | None = None
    ) -> dict[str, Tree]:
        """LocalUpdate: train near the global prototypes `received`, if there are any, and compute
        own ones, of the classes `counted` (K,) alone if these are given.
        """
        cfg = self.cfg
        self._receive(received)
        steps.reset_optimizer(self)
        for n in range(t * cfg.epochs, (t + 1) * cfg.epochs):
            self.train(self._batch_loss, self.epochs(n, size=cfg.batch_size))
        prototypes, counts = self._own_prototypes()
        sent = self.context.shown_classes
        if counted is not None:
            sent = sent & counted
        return {"prototypes": prototypes * sent[:, None], "counts": counts * sent}

    def _receive(self, prototypes: Mapping[str, Any]) -> None:
        """Store the global prototypes, if there are any."""
        if prototypes and prototypes["prototypes"].shape != self._global[0].shape:
            raise ModelError(unequal(prototypes["prototypes"].shape[1], self._global[0].shape[1]))
        self.buffers = {**self.buffers, **prototypes}

    @property
    def _global(self) -> tuple[Tensor, Tensor]:
        """The global prototypes (K, d), and of which classes there are any (K,)."""
        return self.buffers["prototypes"], self.buffers["known"]

    def _batch_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """(7): the mean over x (B, ...), y (B,)."""
        return self._loss(x, y, torch.full(y.shape, 1 / len(y), device=y.device))

    def _loss(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """(7) on x (n, ...), y (n,), where each row has a share `weight` (n,) in the mean."""
        f, (prototypes, known) = self.model(x), self._global
        each = self.context.task.loss(linear(f, self.live), y, "none")
        if self.cfg.lam:
            each = each + self.cfg.lam * (f - prototypes[y]).square().mean(-1) * known[y]
        return (each * weight).sum()

    def _own_prototypes(self) -> tuple[Tensor, Tensor]:
        """(3): means (K, d) of the features of all own rows by class, and how many rows (K,)."""
        x, y, weight = (
            torch.cat(parts) for parts in zip(self.context.support, self.context.query, strict=True)
        )
        return class_means(features.infer(self, x), y, self.context.classes, weight)

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: store the global prototypes, and adapt the network on the same
        loss.
        """
        self._receive(broadcast)
        steps.gradient_descent(
            self, steps.steps_of(self.cfg, eval_mode), self._loss, *self.context.support
        )

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K): with prototypes minus the squared distances, up to a term of the row's.

        A class without a prototype ranks behind all others.
        """
        f = features.infer(self, x)
        if self.cfg.predict == "classifier":
            return linear(f, self.params)
        prototypes, known = self._global
        return mask_unknown(2 * f @ prototypes.T - prototypes.square().sum(-1), known)


@final
class FedProtoServer(Party[FedProtoConfig]):
    """The server: the global prototypes (K, d) and a mask (K,) of the classes that have one; empty
    at first.
    """

    STATE = ("prototypes",)
    ROLE = "server"

    def setup(self) -> None:
        """No prototypes yet."""
        self.prototypes: dict[str, Tensor] = {}

    def broadcast(self) -> dict[str, Tree]:
        """The global prototypes."""
        return dict(self.prototypes)

    def keep(self, mean: Tensor, rows: Tensor) -> None:
        """(6): replace the prototypes of the classes with `rows` (K,) by their means (K, d) over
        clients.
        """
        found = rows > 0
        before = self.prototypes or {
            "prototypes": torch.zeros_like(mean),
            "known": torch.zeros_like(found),
        }
        self.prototypes = {
            "prototypes": torch.where(found[:, None], mean, before["prototypes"]),
            "known": before["known"] | found,
        }


def unequal(a: int, b: int) -> str:
    """Error message for feature dimensions a and b."""
    return (
        f"fedproto needs one feature dimension at all clients, but some have {a} and some {b}: "
        "choose networks of one feature dimension in models.pool"
    )


def round(
    fed: Federation, server: FedProtoServer, clients: Sequence[int], cfg: FedProtoConfig, t: int
) -> Iterator[str]:
    """Algorithm 1 for one t."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    classes = server.context.classes
    width = Features(server.context.build()).width
    template = {"prototypes": floats(classes, width), "counts": Shape("int64", classes)}
    shared: dict[str, Any] = {"t": t, "received": server.prototypes}
    if fed.aggregator.secure:
        claims = fed.total(chosen, "claim", expect={"clients": Shape("int64", classes)})
        if claims is None:
            yield "round"
            return
        shared["counted"] = claims.value["clients"] >= LEAST_CLIENTS
    found = fed.mean(chosen, "update", shared=shared, expect=template, weight="counts")
    if found is not None:
        server.keep(found.value["prototypes"], found.weight)
    yield "round"


METHODS = (
    Method(
        name="fedproto",
        title="Clients with networks of their own agree on class prototypes",
        paper="Y. Tan et al.: FedProto: Federated Prototype Learning across Heterogeneous Clients, "
        "AAAI 2022",
        only_classes="it compares prototypes of classes",
        local=EVERY_LOCAL,
        family="meta",
        config=FedProtoConfig,
        round=round,
        client=FedProtoClient,
        server=FedProtoServer,
        needs=("same feature dim",),
        trial_rank=4,
    ),
)
