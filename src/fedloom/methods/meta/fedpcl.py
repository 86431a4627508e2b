"""FedPCL: the server's pretrained model as a frozen encoder at every client, and projectors trained
on prototypes.

Paper: Y. Tan, G. Long, J. Ma, L. Liu, T. Zhou, J. Jiang, "Federated Learning from Pre-Trained
Models: A Contrastive Learning Approach", NeurIPS 2022; read with the authors' code,
    github.com/yuetan031/FedPCL.

A client projects the encoder's features e of a row to z = ReLU(W e + c), scaled to length 1. Its
prototype C_i^(j) is the mean of z over its own rows of class j; the global one, C^(j), is the mean
over clients. A participant's round:

    L_g = -log( exp(z·C^(y)/τ) / Σ_{j≠y} exp(z·C^(j)/τ) )
    L_p = mean over clients i of -log( exp(z·C_i^(y)/τ) / Σ_{j≠y} exp(z·C_i^(j)/τ) )
    projector <- Adam on L_g + L_p;    C_i^(j) = mean of z over own rows of class j

where C^(j) replaces the prototype of a class that client i does not have. In the first round there
are no prototypes, and nothing is learned.

Messages: the encoder, without its last layer, once to each client, when it first takes part. So
this method gives the pretrained model away, and the ledger counts it. Then prototypes (K, d) and a
mask of its classes (K,) up, and those of all clients down, (m, K, d).

Nothing but prototypes is ever averaged, so a client that never trained has its own initial
projector, and adapts it by steps on the same loss. Every client, trained or not, predicts by the
nearest prototype (cosine) of its own support half, computed after the adaptation; classes that it
does not have there rank behind all others.

Differs:
    One encoder where the paper blends several, and one view of each row where the code takes two
        augmented ones. So the features of the own rows are constants: a client computes them once.
    The loss is the paper's. The code uses the prototypes as anchors and the rows of a batch as
        candidates, sums over clients and leaves L_g out; the cross-entropy that it also computes is
        not used there either.
    The projector and its 256 units are the code's, for other encoders. Weight decay is decoupled
    from Adam. Prototypes predict as in the code, but there by L2, and with the prototypes of all
    rows that a client trained on. A client that sends nothing in a round counts with the prototypes
    that it sent last.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import (
    LOCAL_STEPS,
    Adam,
    ConfigError,
    Federation,
    Method,
    MethodError,
    ModelError,
    Party,
    Shape,
    Template,
    Tree,
    epoch_plan,
    floats,
)
from fedloom.methods import features, steps
from fedloom.methods.features import class_means, linear, mask_unknown
from fedloom.methods.meta.steps import MetaConfig


class FedPCLConfig(MetaConfig):
    """Defaults are those of the authors' code."""

    epochs: int = Field(1, ge=1)
    """Epochs over the client's own rows in a round."""
    batch_size: int = Field(32, ge=1)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of Adam, which is reset in each round."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of the projector."""
    projection_dim: int = Field(256, ge=1)
    """Dimension of a projection (d)."""
    tau: float = Field(0.07, gt=0)
    """τ: the temperature of the loss."""

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs


def contrast(z: Tensor, y: Tensor, prototypes: Tensor, known: Tensor, tau: float) -> Tensor:
    """L_g or L_p of each row (n,), for one set of prototypes or the mean over several.

    Args:
        z: (n, d) projections.
        y: (n,) their classes.
        prototypes: (m, K, d) sets of prototypes.
        known: (K,) of which classes there are any.
        tau: the temperature.

    A row whose class is not known, or without another known class, gives 0.
    """
    classes = torch.arange(len(known), device=y.device)
    own = y[:, None] == classes  # (n, K)
    others = known & ~own
    s = torch.einsum("nd,mkd->mnk", z, prototypes) / tau
    positive = (s * own).sum(-1)
    negative = torch.where(others, s, torch.finfo(s.dtype).min).logsumexp(-1)
    counts = known[y] & others.any(-1)
    return torch.where(counts, negative - positive, 0.0).mean(0)


class EncodedNetwork(nn.Module):
    """A frozen encoder, (B, ...) to features (B, d'), the projector, and the prototypes that
    predict.

    The encoder's tensors are buffers: part of the client's state, but not trained. It is always in
    evaluation mode.
    """

    def __init__(self, encoder: nn.Module, like: Tensor, width: int, classes: int) -> None:
        """`like` (1, ...) is an input."""
        super().__init__()
        network: Any = encoder.eval()
        if not hasattr(network, "features"):
            raise ModelError(
                "fedpcl needs a pretrained model with a method `features`: choose another in "
                "[pretrained]"
            )
        self.encoder = network
        with torch.no_grad():
            self.projector = nn.Linear(network.features(like).shape[1], width)
        for module in encoder.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, p.detach())
        # of the client's support half
        self.register_buffer("prototypes", torch.zeros(classes, width))
        self.register_buffer("known", torch.zeros(classes, dtype=torch.bool))

    def train(self, mode: bool = True) -> "EncodedNetwork":
        """Set the mode of all but the encoder."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d')."""
        out: Tensor = self.encoder.features(x)
        return out


@final
class FedPCLClient(Party[FedPCLConfig]):
    """A client: the encoder, a projector, and the encoder's features of its own rows."""

    STATE = ("params", "buffers", "opt", "features")
    ROLE = "client"
    CALLS = ("equip", "update")
    TELLS = (("passed on", ("update",)), ("by class", ("update",)))

    def setup(self) -> None:
        """A projector of its own. `features` (n, d') of the own rows are computed once the encoder
        is received.
        """
        cfg, context = self.cfg, self.context
        if context.encoder is None:
            raise MethodError(
                "fedpcl needs a pretrained model at every client: name one in [pretrained]"
            )
        with self.seeded("projector"):
            like = self.data.x(torch.zeros(1, dtype=torch.int64, device=context.device))
            module = EncodedNetwork(
                context.encoder().to(context.device), like, cfg.projection_dim, context.classes
            )
        self.network(module, Adam(cfg.lr, weight_decay=cfg.weight_decay))
        self.features = torch.empty(0, device=context.device)

    def equip(self, *, encoder: dict[str, Tensor]) -> None:
        """Load the encoder, and compute its features of all own rows."""
        self._load_encoder(encoder)
        self.features = features.infer(
            self, self.data.x(torch.arange(len(self.data), device=self.context.device))
        )

    def _load_encoder(self, encoder: Mapping[str, Tensor]) -> None:
        """Load the encoder's weights and statistics."""
        self.buffers = {**self.buffers, **{f"encoder.{k}": v for k, v in encoder.items()}}

    def update(self, *, t: int, received: dict[str, Tensor]) -> dict[str, Tree]:
        """Learn from the prototypes `received`, if there are any, and compute own ones."""
        cfg = self.cfg
        steps.reset_optimizer(self)
        y = self.data.y(torch.arange(len(self.data), device=self.context.device))
        for n in range(t * cfg.epochs, (t + 1) * cfg.epochs) if received else ():
            for which in epoch_plan(self.stream("batches", n), len(y), 1, cfg.batch_size).to(
                y.device
            ):
                share = torch.full(which.shape, 1 / len(which), device=y.device)
                self.minimize(self._loss, self.features[which], y[which], share, received)
        means, _ = class_means(project(self.params, self.features), y, self.context.classes)
        known = self.context.shown_classes
        return {"prototypes": means * known[:, None], "known": known}

    def _loss(self, e: Tensor, y: Tensor, weight: Tensor, received: Mapping[str, Tensor]) -> Tensor:
        """L_g + L_p () on features e (n, d') of classes y (n,), whose rows count by
        `weight` (n,).
        """
        z, known = project(self.live, e), received["known"]
        sets = (received["mean"][None], received["each"])
        return (
            torch.stack([contrast(z, y, c, known, self.cfg.tau) for c in sets]).sum(0) * weight
        ).sum()

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Any]) -> None:
        """Before an evaluation: load the encoder, adapt the projector, and compute the prototypes
        that predict.
        """
        if broadcast:
            self._load_encoder(broadcast["encoder"])
        x, y, weight = self.context.support
        e, received = features.infer(self, x), broadcast.get("received")
        count = steps.steps_of(self.cfg, eval_mode) if received else 0
        steps.gradient_descent(self, count, self._loss, e, y, weight, received)
        means, counts = class_means(project(self.params, e), y, self.context.classes, weight)
        self.buffers = {**self.buffers, "prototypes": means, "known": counts > 0}

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K): cosines with the prototypes over τ. Classes without one rank behind all
        others.
        """
        z = project(self.params, features.infer(self, x))
        cosines = z @ F.normalize(self.buffers["prototypes"], dim=-1).T
        return mask_unknown(cosines / self.cfg.tau, self.buffers["known"])


def project(weights: Mapping[str, Tensor], e: Tensor) -> Tensor:
    """Projections (n, d) of length 1 of features e (n, d')."""
    return F.normalize(F.relu(linear(e, weights, "projector")), dim=-1)


@final
class FedPCLServer(Party[FedPCLConfig]):
    """The server: each client's last prototypes, and which clients have the encoder."""

    STATE = ("prototypes", "known", "equipped")
    ROLE = "server"

    def setup(self) -> None:
        """No prototypes yet; no client has the encoder."""
        if self.context.pretrained is None:
            raise ConfigError("fedpcl needs a pretrained model: name one in [pretrained]")
        parties, classes = self.context.parties, self.context.classes
        self.prototypes = torch.zeros(
            parties, classes, self.cfg.projection_dim, device=self.context.device
        )
        self.known = torch.zeros(parties, classes, dtype=torch.bool, device=self.context.device)
        self.equipped = torch.zeros(parties, dtype=torch.bool)

    def encoder(self) -> dict[str, Tensor]:
        """The pretrained model's weights and statistics, without its last layer."""
        model: Any = self.context.teacher()
        last = {id(p) for p in ([] if model.head is None else model.head.parameters())}
        return {
            k: v.detach() for k, v in model.state_dict(keep_vars=True).items() if id(v) not in last
        }

    def broadcast(self) -> dict[str, Tree]:
        """The encoder, and the prototypes."""
        return {"encoder": self.encoder(), "received": self.all_prototypes()}

    def all_prototypes(self) -> dict[str, Tensor]:
        """The mean prototypes (K, d), those of each client (m, K, d) with the mean where it has
        none, and of which classes there are any (K,); empty before the first round.
        """
        seen = self.known.any(1)
        if not seen.any():
            return {}
        has = self.known[seen][..., None]  # (m, K, 1)
        each = self.prototypes[seen]
        mean = (each * has).sum(0) / has.sum(0).clamp(min=1)
        return {"mean": mean, "each": torch.where(has, each, mean), "known": self.known.any(0)}

    def store(self, replies: Mapping[int, Any]) -> None:
        """Store the prototypes of these clients."""
        prototypes, known = self.prototypes.clone(), self.known.clone()
        for i, reply in replies.items():
            prototypes[i], known[i] = reply["prototypes"], reply["known"]
        self.prototypes, self.known = prototypes, known


def round(
    fed: Federation, server: FedPCLServer, clients: Sequence[int], cfg: FedPCLConfig, t: int
) -> Iterator[str]:
    """Algorithm 1 for one t, once a participant has the encoder."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    new = [i for i in chosen if not server.equipped[i]]
    if new:
        replies = fed.call(new, "equip", shared={"encoder": server.encoder()}, expect=None)
        server.equipped = server.equipped.index_fill(
            0, torch.tensor(list(replies), dtype=torch.int64), True
        )
    ready = [i for i in chosen if server.equipped[i]]
    classes = server.context.classes
    template: Template = {
        "prototypes": floats(classes, cfg.projection_dim),
        "known": Shape("bool", classes),
    }
    shared = {"t": t, "received": server.all_prototypes()}
    server.store(fed.call(ready, "update", shared=shared, expect=template, min_replies=1))
    yield "round"


METHODS = (
    Method(
        name="fedpcl",
        title="Projectors trained on prototypes, behind the server's pretrained encoder, which is "
        "sent to every client",
        paper="Y. Tan et al.: Federated Learning from Pre-Trained Models: A Contrastive Learning "
        "Approach, 2022",
        only_classes="it compares prototypes of classes",
        local=LOCAL_STEPS,
        no_local="its loss contrasts prototypes, each of which counts once",
        family="meta",
        config=FedPCLConfig,
        round=round,
        client=FedPCLClient,
        server=FedPCLServer,
        needs=("pretrained encoder",),
    ),
)
