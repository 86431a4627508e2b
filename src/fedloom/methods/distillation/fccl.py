"""FCCL: classes should go with the same classes of the mean answer, and a client should not forget itself.

Paper: W. Huang, M. Ye and B. Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022;
read with the authors' code, github.com/WenkeHuang/FCCL.

Each client n has a network, labelled rows and an architecture of its own; all hold the same unlabelled public rows P.
A round has a private stage on own rows, then a transfer stage on P:

    private:   CE(y, f_n) + KL(p_previous || p_n) + KL(p_pretrained || p_n)
    transfer:  Σ_i (C_ii - 1)² + 0.0051 Σ_{i≠j} (C_ij + 1)²,    C = Z_nᵀ Z̄ / B

Two classes are to have correlation -1, in paper and code alike, though no three can have that with each other.
p_previous are the client's own answers as the stage begins: after the last transfer stage, they know of others.
p_pretrained are those of its pretrained model, which knows own rows alone. Z_n (B, K) are its logits on a public batch,
each class standardised over the batch, and Z̄ likewise those of the mean answer.

What crosses: logits on public batches up, their mean down, τ K B numbers each way. A client answers rows, and is
a black box to everybody else. It keeps the weights of its pretrained model beside its own.

Before its first round each client pretrains on own rows, `pretrain` steps of cross-entropy. They are not counted as
iterations: a comparison by iterations gives FCCL that much more local work.

Differs:
    The mean is that of all clients, oneself included, as in the second version of the code. The first puts the
        client's model of the round before in its own place.
    Every standard deviation has `EPS` in it, so that a class which all rows have alike gives no NaN. It is the unbiased
        one while C divides by B, so that even equal answers give C_ii = 1 - 1/B.
    The authors begin from fully trained models and have public batches of 128 to 512. Here a model is pretrained for
        100 steps, and one B serves both stages: correlations of 32 rows have an error of about 0.2. Mend it with
        `batch_size`.
    One Adam serves pretraining and both stages for good. The code makes a new one for each public batch, whose steps
        have the size of the rate whatever the gradient, and one for each private stage.
    Who fails in a private stage sits out the transfer. Standardised logits give the last layer's bias no gradient but
        rounding errors, which an Adam that has seen nothing else makes full steps of.
    The private stage comes first, as in all methods of this family. The code has it last and takes p_previous from the
        end of the round before, so that its previous model has not seen the transfer which came in between.
    References are evaluation-mode outputs on the stage's batches, made once at its start. The stage's first step is
        taken at p_previous itself, where that term has gradient zero: it is not computed, so that with τ = 1 it changes
        no bit. FedAL's paper, which compares with FCCL, does not state its τ: here it is FedAL's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.losses import kl
from fedloom.core.message import Template, Tree
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.distiller import CodedConfig, Distiller, copied

EPS = 1e-5
"""Added to a variance before it divides."""
FIRST = 2**32 - 1
"""In place of a round's number, counted down: the batches of pretraining are those of no round."""


class CorrelatedConfig(CodedConfig):
    """What both FCCL and FCCL+ have."""

    tau: int = Field(5, ge=1)
    """Steps of each stage (τ). With 1 the previous model's term does nothing."""
    batch_size: int = Field(32, ge=2)
    """Rows of a batch, local and public (B). The authors' public batches have 128 to 512."""
    inter: float = Field(1.0, ge=0)
    """Weight of the divergence from the previous model."""
    correlation: float = Field(1.0, ge=0)
    """Weight of the cross-correlation loss; at 0 no logits cross."""
    off_diagonal: float = Field(0.0051, ge=0)
    """Weight in it of pairs of different classes."""

    @property
    def looks_back(self) -> bool:
        """Whether the previous model's term does anything."""
        return self.inter > 0 and self.tau > 1

    @property
    def exchanges(self) -> bool:
        """Whether anything is learnt from others at all."""
        return self.correlation > 0

    def answer_like(self, classes: int) -> Template:
        """Template of what goes up for a batch."""
        return self.encoded_like(classes)


class Config(CorrelatedConfig):
    """Weights are those of the paper."""

    pretrain: int = Field(100, ge=0)
    """Steps on own rows before a client's first round. With 0 there is no pretrained model, nor its term."""
    intra: float = Field(1.0, ge=0)
    """Weight of the divergence from the pretrained model."""

    @property
    def remembers(self) -> bool:
        """Whether the pretrained model is needed."""
        return self.intra > 0 and self.pretrain > 0


class Client(Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    STATE = ("params", "buffers", "opt", "pretrained")
    CALLS = ("local_train", "predict", "distil")

    def setup(self) -> None:
        """Its network as it was made; the pretrained model comes with the first round."""
        self.start(self.site.build())
        self.pretrained: dict[str, Any] = {}  # whether it is done, and then its weights if they are needed

    def local_train(self, *, t: int) -> None:
        """The private stage: τ steps on own rows; before the first, pretraining."""
        if not self.pretrained:
            self._pretrain()
        cfg, batches = self.cfg, self.own_batches(t)
        previous = self.outputs_of(batches.x) if cfg.looks_back else None
        pretrained = self._pretrained_logits(batches.x) if cfg.remembers else None
        for i, (x, y) in enumerate(batches):
            before = previous[i] if previous is not None and i else None
            first = pretrained[i] if pretrained is not None else None
            self.minimise(self.private_loss, x, y, before, first)

    def private_loss(self, x: Tensor, y: Tensor, previous: Tensor | None, pretrained: Tensor | None) -> Tensor:
        """The loss () on x (B, ...), y (B,), with the logits (B, K) of both references, where they count."""
        cfg, f = self.cfg, self.model(x)
        loss = F.cross_entropy(f, y)
        if previous is not None:
            loss = loss + cfg.inter * kl(F.softmax(previous, -1), f)
        if pretrained is not None:
            loss = loss + cfg.intra * kl(F.softmax(pretrained, -1), f)
        return loss

    def predict(self, *, t: int, i: int) -> Tree:
        """Logits (B, K) on the public batch."""
        sent: Tree = self.cfg.encoded(self.forward(self.public_batches(t)[i]))
        return sent

    def distil(self, *, t: int, i: int, mean: Tree) -> None:
        """One step of the transfer stage: public batch i, and the mean answer (B, K) to it, encoded."""
        cfg, x = self.cfg, self.public_batches(t)[i]
        target = cfg.decoded_whole(mean, self.site.classes)
        gradient, loss = grad_and_value(correlation_loss)(self.forward(x), target, cfg.off_diagonal)
        self.descend(x, cfg.correlation * gradient)
        self.note("correlation loss", loss)

    def _pretrain(self) -> None:
        """Steps of cross-entropy on own rows."""
        for k in range(self.cfg.pretrain):
            for x, y in self.batches(FIRST - k, steps=1, size=self.cfg.batch_size):
                self.minimise(self.local_loss, x, y)
        weights = {"params": self.params, "buffers": self.buffers} if self.cfg.remembers else {}
        self.pretrained = {"done": True, **{part: copied(of) for part, of in weights.items()}}

    def _pretrained_logits(self, x: Tensor) -> Tensor:
        """The pretrained model's logits (τ, B, K) on all batches x (τ, B, ...) of a stage."""
        with self.scratch():
            self.params, self.buffers = self.pretrained["params"], self.pretrained["buffers"]
            return self.outputs_of(x)


class Server(Party[Config]):
    """The server, which keeps nothing."""

    def mean(self, answers: Mapping[int, Tree]) -> Tree:
        """The mean (B, K) of the clients' encoded logits by number, encoded for the way down."""
        f = torch.stack([self.cfg.decoded(z, self.site.classes) for z in answers.values()])
        sent: Tree = self.cfg.encoded_whole(f.mean(0))
        return sent


def standardised(f: Tensor) -> Tensor:
    """Each column of f (B, K) with mean 0 and unbiased standard deviation 1 over the rows; a constant one is 0.

    The deviation is that of the very numbers which it divides. So what rounding leaves of a huge constant column can't
    come out beyond sqrt(B - 1), and a square beyond all bounds makes zeros.
    """
    f = f - f.mean(0)
    return f * (f.square().sum(0) / (len(f) - 1) + EPS).rsqrt()


def correlation_loss(f: Tensor, mean: Tensor, off_diagonal: float) -> Tensor:
    """The transfer loss () of logits f (B, K) against the mean answer (B, K), a constant."""
    c = standardised(f).mT @ standardised(mean) / len(f)  # (K, K): own classes with the mean's
    same = torch.eye(len(c), dtype=torch.bool, device=c.device)
    return torch.where(same, (c - 1).square(), off_diagonal * (c + 1).square()).sum()


def round(fed: Federation, server: Any, clients: Sequence[int], cfg: CorrelatedConfig, t: int) -> Iterator[str]:
    """One communication round, also of FCCL+: the private stage, then τ exchanges among those who had it."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    trained = fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    if not cfg.exchanges:
        return
    answer = cfg.answer_like(server.site.classes)
    for i in range(cfg.tau):
        batch = {"t": t, "i": i}
        answers = fed.call(trained, "predict", shared=batch, expect=answer, need=2)
        if answers:
            fed.call(answers, "distil", shared={**batch, "mean": server.mean(answers)})
    yield "transfer"


METHODS = (
    Method(
        name="fccl",
        title="Cross-correlation with the mean answer, and two memories of oneself",
        paper="W. Huang, M. Ye, B. Du: Learn from Others and Be Yourself in Heterogeneous Federated Learning",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        needs=("public rows",),
        min_clients=2,
    ),
)
