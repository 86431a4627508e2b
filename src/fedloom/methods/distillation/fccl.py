"""FCCL: class-wise correlation with the mean logits, and regularization towards a client's earlier
models.

Paper: W. Huang, M. Ye and B. Du, "Learn from Others and Be Yourself in Heterogeneous Federated
Learning", CVPR 2022; read with the authors' code, github.com/WenkeHuang/FCCL.

Each client n has a network, labeled rows and an architecture of its own; all hold the same
unlabeled public rows P. A round has a private stage on own rows, then a transfer stage on P:

    private:   CE(y, f_n) + KL(p_previous || p_n) + KL(p_pretrained || p_n)
    transfer:  Σ_i (C_ii - 1)² + 0.0051 Σ_{i≠j} (C_ij + 1)²,    C = Z_nᵀ Z̄ / B

Two classes should have correlation -1, in paper and code alike, though no three classes can have it
pairwise. p_previous are the client's own answers at the start of the stage: after the last transfer
stage, they hold what it learned from others. p_pretrained are its pretrained model's answers, which
has seen own rows only. Z_n (B, K) are its logits on a public batch, each class standardized over
the batch, and Z̄ likewise the mean answer's logits.

Messages: logits on public batches up, their mean down, τ K B numbers each way. Others see only a
client's answers. It keeps the weights of its pretrained model beside its own.

Before its first round each client pretrains on its own rows with `pretrain_steps` steps of
cross-entropy. They are not
counted as iterations: a comparison by iterations gives FCCL that much more local work.

Differs:
    The mean is over all clients, including the receiver, as in the second version of the code. The
        first version replaces the receiver's answer by the answer of its model of the previous
        round.
    Every standard deviation includes `EPS`, so that a class whose logits are constant gives no NaN.
        It is the unbiased one while C divides by B, so that even equal answers give C_ii = 1 - 1/B.
    The authors start from fully trained models and use public batches of 128 to 512. Here a model
    is pretrained for
        100 steps, and one B serves both stages: correlations over 32 rows have an error of about
        0.2. A larger `batch_size` reduces it.
    One Adam serves pretraining and both stages in the whole run. The code makes a new one for each
        public batch, whose steps have the size of the rate whatever the gradient, and one for each
        private stage.
    A client that fails in a private stage skips the transfer stage. Standardized logits give the
        last layer's bias only rounding errors as gradient, which a fresh Adam turns into full
        steps.
    The private stage comes first, as in all methods of this family. The code has it last and takes
        p_previous from the end of the previous round, so that its previous model has not seen the
        transfer stage in between.
    References are evaluation-mode outputs on the stage's batches, made once at its start. The
        stage's first step is taken at p_previous itself, where that term has gradient zero: it is
        not computed, so with τ = 1 it changes no bit. FedAL's paper, which compares with FCCL, does
        not state its τ: here it is FedAL's.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol, final

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    Adam,
    ClientContext,
    Federation,
    Kinds,
    Method,
    Party,
    Template,
    Tree,
    kl,
    map_tensors,
)
from fedloom.methods.distillation import steps
from fedloom.methods.distillation.steps import LogitsConfig, public_batch
from fedloom.methods.steps import label_loss

EPS = 1e-5
"""Added to a variance before it divides."""
FIRST = 2**32 - 1
"""Counts down in place of the round number, so that pretraining shares no batch with a round."""


class FCCLConfig(LogitsConfig):
    """Weights are those of the paper."""

    KIND: ClassVar[Kinds] = "logits"
    """What the numbers of an answer are."""
    tau: int = Field(5, ge=1)
    """Steps of each stage (τ). With 1 the term of the previous model has no effect."""
    batch_size: int = Field(32, ge=2)
    """Batch size of local and public batches (B). The authors' public batches have 128 to 512 rows.
    """
    inter: float = Field(1.0, ge=0)
    """Weight of the divergence from the previous model."""
    correlation: float = Field(1.0, ge=0)
    """Weight of the cross-correlation loss; at 0 no logits are sent."""
    off_diagonal: float = Field(0.0051, ge=0)
    """Weight of pairs of different classes in the cross-correlation loss."""
    pretrain_steps: int = Field(100, ge=0)
    """Steps on own rows before a client's first round; 0 for no pretrained model and no term of it.
    """
    intra: float = Field(1.0, ge=0)
    """Weight of the divergence from the pretrained model."""

    @property
    def looks_back(self) -> bool:
        """Whether the term of the previous model has an effect."""
        return self.inter > 0 and self.tau > 1

    @property
    def remembers(self) -> bool:
        """Whether the pretrained model is needed."""
        return self.intra > 0 and self.pretrain_steps > 0

    @property
    def exchanges(self) -> bool:
        """Whether there is a transfer stage."""
        return self.correlation > 0

    def stages_in_round(self, t: int) -> int:
        """The local stage, and the transfer stage if there is one."""
        return 2 if self.exchanges else 1

    def answer_template(self, classes: int) -> Template:
        """Template of a client's answer on a batch."""
        return self.template(classes)


@final
class FCCLClient(Party[FCCLConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "pretrained")
    CALLS = ("local_train", "predict", "distil")
    MEANS = ("predict",)
    TELLS = ()

    def setup(self) -> None:
        """The network; `pretrained` is empty before the first round, then "done", with the weights
        if needed.
        """
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.pretrained: dict[str, Any] = {}

    def local_train(self, *, t: int) -> None:
        """The private stage: τ steps on own rows; before the first, pretraining."""
        if not self.pretrained:
            self.pretrained = pretrain(self)
        cfg, batches = self.cfg, self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)
        previous = steps.stage_logits(self, batches.x) if cfg.looks_back else None
        pretrained = pretrained_logits(self, self.pretrained, batches.x) if cfg.remembers else None
        for i, (x, y) in enumerate(batches):
            before = previous[i] if previous is not None and i else None
            first = pretrained[i] if pretrained is not None else None
            self.minimize(self.private_loss, x, y, before, first)

    def private_loss(
        self, x: Tensor, y: Tensor, previous: Tensor | None, pretrained: Tensor | None
    ) -> Tensor:
        """The loss () on x (B, ...), y (B,), with the logits (B, K) of both references, or None
        without their term.
        """
        cfg, f = self.cfg, self.model(x)
        loss = self.context.task.loss(f, y)
        if previous is not None:
            loss = loss + cfg.inter * kl(F.softmax(previous, -1), f)
        if pretrained is not None:
            loss = loss + cfg.intra * kl(F.softmax(pretrained, -1), f)
        return loss

    def predict(self, *, t: int, i: int) -> Tree:
        """Logits (B, K) on the public batch."""
        return self.cfg.encode(self.forward(public_batch(self, t, i)))

    def distil(self, *, t: int, i: int, mean: Tree) -> None:
        """One step of the transfer stage: public batch i, and the mean answer (B, K) to it,
        encoded.
        """
        cfg, x = self.cfg, public_batch(self, t, i)
        target = cfg.decode_dense(mean, self.context.classes)
        gradient, loss = grad_and_value(correlation_loss)(self.forward(x), target, cfg.off_diagonal)
        self.descend(x, cfg.correlation * gradient)
        self.note("correlation loss", loss)


@final
class FCCLServer(Party[FCCLConfig]):
    """The server, which has no state."""

    ROLE = "server"

    def read(self, n: int, answer: Tree) -> Tensor:
        """The logits (B, K) of an answer."""
        return self.cfg.decode(answer, self.context.classes)

    def write(self, mean: Tensor) -> Tree:
        """The encoded mean (B, K) of the clients' logits."""
        return self.cfg.encode_dense(mean)


def pretrain(client: Party[FCCLConfig]) -> dict[str, Any]:
    """Steps of cross-entropy on own rows; the state `pretrained` after them."""
    cfg = client.cfg
    for k in range(cfg.pretrain_steps):
        client.train(
            partial(label_loss, client), client.batches(FIRST - k, steps=1, size=cfg.batch_size)
        )
    weights: Any = {"params": client.params, "buffers": client.buffers} if cfg.remembers else {}
    return {"done": True, **map_tensors(torch.clone, weights)}  # type: ignore[dict-item]


def pretrained_logits(
    client: Party[FCCLConfig], pretrained: Mapping[str, Any], x: Tensor
) -> Tensor:
    """The pretrained model's logits (τ, B, K) on all batches x (τ, B, ...) of a stage."""
    with client.scratch():
        client.params, client.buffers = pretrained["params"], pretrained["buffers"]
        return steps.stage_logits(client, x)


def standardized(f: Tensor) -> Tensor:
    """Each column of f (B, K) with mean 0 and unbiased standard deviation 1 over the rows; a
    constant one is 0.

    The deviation is computed from the very numbers that it divides. So the rounding errors of a
    huge constant column stay within sqrt(B - 1), and a square that overflows gives zeros.
    """
    f = f - f.mean(0)
    return f * (f.square().sum(0) / (len(f) - 1) + EPS).rsqrt()


def correlation_loss(f: Tensor, mean: Tensor, off_diagonal: float) -> Tensor:
    """The transfer loss () of logits f (B, K) against the mean answer (B, K), a constant."""
    c = standardized(f).mT @ standardized(mean) / len(f)  # (K, K): own classes against the mean's
    same = torch.eye(len(c), dtype=torch.bool, device=c.device)
    return torch.where(same, (c - 1).square(), off_diagonal * (c + 1).square()).sum()


class Exchanging(Protocol):
    """Settings of a round's exchanges, as `FCCLConfig` describes them."""

    KIND: ClassVar[Kinds]
    tau: int
    clients_per_round: int | None

    @property
    def exchanges(self) -> bool:
        """Whether there is a transfer stage."""

    def answer_template(self, classes: int) -> Template:
        """Template of a client's answer on a batch."""


class Translator(Protocol):
    """A server that reads clients' answers and writes their mean, as `FCCLServer` does."""

    @property
    def context(self) -> ClientContext:
        """The number of classes, among others."""

    def read(self, n: int, answer: Any) -> Tree:
        """The numbers of an answer."""

    def write(self, mean: Any) -> Tree:
        """The encoded mean."""


def round(
    fed: Federation, server: Translator, clients: Sequence[int], cfg: Exchanging, t: int
) -> Iterator[str]:
    """One round, also of FCCL+: the private stage, then τ exchanges among the clients that
    completed it.
    """
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    trained = fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    if not cfg.exchanges:
        return
    answer = cfg.answer_template(server.context.classes)
    for i in range(cfg.tau):
        batch = {"t": t, "i": i}
        mean = fed.mean(
            trained,
            "predict",
            shared=batch,
            expect=answer,
            read=server.read,
            kind=cfg.KIND,
            min_replies=2,
        )
        if mean is not None:
            fed.call(mean.ids, "distil", shared={**batch, "mean": server.write(mean.value)})
    yield "transfer"


METHODS = (
    Method(
        name="fccl",
        title="Cross-correlation with the mean logits; regularized by previous and pretrained model",  # noqa: E501
        paper="W. Huang, M. Ye, B. Du: Learn from Others and Be Yourself in Heterogeneous "
        "Federated Learning, CVPR 2022",
        only_classes="it correlates the logits of classes",
        local=EVERY_LOCAL,
        family="distillation",
        config=FCCLConfig,
        round=round,
        client=FCCLClient,
        server=FCCLServer,
        needs=("public rows",),
        min_clients=2,
    ),
)
