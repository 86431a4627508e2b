"""FedCP: a policy splits the features of each row between the client's head and the global one.

Paper: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedCP: Separating Feature
Information for Personalized Federated Learning via Conditional Policy", KDD 2023; read with the
authors' code, github.com/TsingZ0/FedCP.

A client has a feature extractor, a head of its own, a copy of the global head, and a conditional
policy network. With features h (d,) of a row and v, the sum over classes of the own head's weights,
scaled to length 1:

    (a, b) = ReLU(LayerNorm(W (h ⊙ v) + c)), each (d,);    π = softmax of each pair (a, b) + Gumbel noise, for a
    logits = own head(π ⊙ h) + global head((1 - π) ⊙ h)
    loss   = cross-entropy + λ MMD(h, features of the same rows by the received extractor)

Extractor, own head and policy are trained; the global head is fixed. A round broadcasts extractor,
global head and policy, and averages them, weighted by rows; for the global head a client sends the
mean of its own and the global one.

A client that has not trained yet uses the global head for its own one. It adapts like the others:
steps on the loss above, with the received extractor for reference.

Differs:
    There is noise in training alone: evaluation and adaptation use the plain softmax. The code has
    noise there too. v is computed from the own head, as in the paper; published versions of the
    code differ here and in the head sent up. Features of the received extractor are computed before
    the training, in evaluation mode; no copy is kept. MMD is a mean over all pairs of rows under a
        sum of four Gaussian kernels, whose widths are the code's; λ = 5 is what the authors set for
        MNIST, and 0 the code's default.
    BatchNorm's statistics stay at the client.
"""  # noqa: E501

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    SGD,
    Federation,
    Method,
    Party,
    Shape,
    Template,
    Tree,
)
from fedloom.methods import features, steps
from fedloom.methods.features import HEAD, Features, linear
from fedloom.methods.meta.steps import MetaConfig

WIDTHS = (10.0, 15.0, 20.0, 50.0)
"""Variances of the kernels of MMD."""
GLOBAL = "global_head"
"""Name of the global head within `ConditionalNetwork`."""


class FedCPConfig(MetaConfig):
    """Defaults are those of the authors' code."""

    epochs: int = Field(1, ge=1)
    """Epochs over the client's own rows in a round."""
    batch_size: int = Field(10, ge=1)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    lr: float = Field(0.005, gt=0)
    """Learning rate of SGD."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD, reset to zero in each round."""
    lam: float = Field(5.0, ge=0)
    """λ: weight of MMD."""
    tau: float = Field(1.0, gt=0)
    """Temperature τ of the policy's softmax."""

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs


class ConditionalNetwork(Features):
    """A network with the client's own head, the global head, and the policy network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.global_head = copy.deepcopy(self.network.head)
        self.policy = nn.Linear(self.width, 2 * self.width)
        self.norm = nn.LayerNorm(2 * self.width)


# -- pure functions: w weights by the names of `ConditionalNetwork`, h (n, d) features, v (d,) -----


def context(w: Mapping[str, Tensor]) -> Tensor:
    """v (d,)."""
    return F.normalize(w[f"{HEAD}.weight"].sum(0), dim=0)


def policy(
    w: Mapping[str, Tensor], h: Tensor, v: Tensor, tau: float, noise: Tensor | None
) -> Tensor:
    """π (n, d). `noise` (n, 2, d) is Gumbel's, or none."""
    hidden = linear(h * v, w, "policy")
    pairs = F.relu(F.layer_norm(hidden, hidden.shape[-1:], w["norm.weight"], w["norm.bias"])).view(
        -1, 2, len(v)
    )
    return torch.softmax((pairs if noise is None else pairs + noise) / tau, 1)[:, 0]


def logits(
    w: Mapping[str, Tensor], h: Tensor, v: Tensor, tau: float, noise: Tensor | None = None
) -> Tensor:
    """The sum of both heads' logits (n, K). No gradient flows into the global one."""
    pi = policy(w, h, v, tau, noise)
    fixed = {k: p.detach() for k, p in w.items() if k.startswith(GLOBAL)}
    return linear(pi * h, w) + linear((1 - pi) * h, fixed, GLOBAL)


def mmd(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """The squared maximum mean discrepancy () of x (n, d) and y (n, d), whose rows count by
    `weight` (n,).
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        apart = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.T
        return torch.stack([torch.exp(-apart / (2 * s)) for s in WIDTHS]).sum(0)

    return weight @ (kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)) @ weight


# -- the parties -----------------------------------------------------------------------------------


@final
class FedCPClient(Party[FedCPConfig]):
    """A client: the global parts, and a head of its own."""

    STATE = ("params", "buffers", "opt", "trained")
    ROLE = "client"
    CALLS = ("update",)
    MEANS = ("update",)
    TELLS = ()

    def setup(self) -> None:
        """All parts, and whether the own head has ever been trained."""
        with self.seeded("policy"):
            self.network(
                ConditionalNetwork(self.context.build()), SGD(self.cfg.lr, self.cfg.momentum)
            )
        self.trained = False

    def _receive(self, weights: Mapping[str, Any]) -> None:
        """Load the global parts; if the own head was never trained, the global one in its place
        too.
        """
        first = (
            {}
            if self.trained
            else {k.replace(GLOBAL, HEAD): p for k, p in weights.items() if k.startswith(GLOBAL)}
        )
        steps.set_weights(self, {**weights, **first})

    def update(self, *, t: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """Train from the server's parts; reply with the trained ones."""
        cfg, rng = self.cfg, self.stream("gumbel", t)
        self._receive(weights)
        steps.reset_optimizer(self)
        v, passes = context(self.params), range(t * cfg.epochs, (t + 1) * cfg.epochs)
        batches = [batch for n in passes for batch in self.epochs(n, size=cfg.batch_size)]
        before = [features.infer(self, x) for x, _ in batches]
        for (x, y), h in zip(batches, before, strict=True):
            noise = torch.from_numpy(rng.gumbel(size=(len(h), 2, h.shape[1]))).to(h)
            self.minimize(
                self._loss, x, y, torch.full_like(y, 1 / len(y), dtype=h.dtype), h, v, noise
            )
        self.trained = True
        return {"weights": self._sent(), "rows": self.row_count}

    def _loss(
        self,
        x: Tensor,
        y: Tensor,
        weight: Tensor,
        before: Tensor,
        v: Tensor,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The loss () on x (n, ...), y (n,).

        Args:
            x, y: rows.
            weight: (n,) each row's share in the means.
            before: (n, d) their features by the received extractor.
            v: (d,).
            noise: (n, 2, d) of the policy, or none.
        """
        h = self.model(x)
        each = self.context.task.loss(logits(self.live, h, v, self.cfg.tau, noise), y, "none")
        loss = (each * weight).sum()
        return loss + self.cfg.lam * mmd(h, before, weight) if self.cfg.lam else loss

    def _sent(self) -> dict[str, Tensor]:
        """The parts that are sent: extractor, policy, and the mean of both heads."""
        own = {k.replace(HEAD, GLOBAL): p for k, p in self.params.items() if k.startswith(HEAD)}
        return {
            k: (p + own[k]) / 2 if k in own else p
            for k, p in self.params.items()
            if not k.startswith(HEAD)
        }

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: load the global parts, and adapt by full-batch steps on the support
        half, all with the first step's v and features for reference.
        """
        if broadcast:
            self._receive(broadcast)
        x, y, weight = self.context.support
        before, v = features.infer(self, x), context(self.params)
        steps.gradient_descent(
            self, steps.steps_of(self.cfg, eval_mode), self._loss, x, y, weight, before, v
        )

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K)."""
        return logits(self.params, features.infer(self, x), context(self.params), self.cfg.tau)


@final
class FedCPServer(Party[FedCPConfig]):
    """The server and the global parts."""

    ROLE = "server"
    STATE = ("weights",)
    broadcast = steps.broadcast

    def setup(self) -> None:
        """The first extractor, global head and policy."""
        with self.seeded("policy"):
            params = steps.trainable_weights(ConditionalNetwork(self.context.build()))
        self.weights = {k: p for k, p in params.items() if not k.startswith(HEAD)}


def round(
    fed: Federation, server: FedCPServer, clients: Sequence[int], cfg: FedCPConfig, t: int
) -> Iterator[str]:
    """One round of the chosen clients."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    sent = {"weights": server.weights}
    template: Template = {**sent, "rows": Shape("int64")}
    mean = fed.mean(
        chosen, "update", shared={"t": t, **sent}, expect=template, weight="rows", around=sent
    )
    if mean is not None:
        server.weights = mean.value["weights"]
    yield "round"


METHODS = (
    Method(
        name="fedcp",
        title="A policy splits each row's features between the client's head and the global one",
        paper="J. Zhang et al.: FedCP: Separating Feature Information for Personalized FL via "
        "Conditional Policy, 2023",
        family="meta",
        config=FedCPConfig,
        round=round,
        client=FedCPClient,
        server=FedCPServer,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
    ),
)
