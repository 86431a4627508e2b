"""FCCL+: FCCL's correlation of answers, likeness of rows as others see it, and no forgetting of the other classes.

Paper: W. Huang, M. Ye, Z. Shi and B. Du, "Generalizable Heterogeneous Federated Cross-Correlation and Instance
Similarity Learning", TPAMI 2023; read with the authors' code, github.com/WenkeHuang/FCCL.

Each client n has a network, labelled rows and an architecture of its own; all hold the same unlabelled public rows P.
A round has a private stage on own rows, then a transfer stage on P:

    private:   CE(y, f_n) + T² KL(q_previous || q_n),    q = softmax of f / T over the K - 1 classes that are not y
    transfer:  FCCL's loss of f_n against f̄ + 3 KL(softmax(s̄ / 0.02) || softmax(s_n / 0.02)) over the rows of s

s_n (B, B - 1) are the cosines of each public row's features with those of the others in its batch; f̄ and s̄ are the
means of the clients' logits and cosines. The label is left to cross-entropy: what a client learnt from others are the
other classes, so only these are kept, as they stand to each other.

What crosses: logits and cosines on public batches up, their means down, τ B (K + B - 1) numbers each way. No features
leave, so they may have any width. A client needs a network in two parts, and tells what its features are like: it is
not quite a black box. The steps of a round are FCCL's: see `fedloom.methods.distillation.fccl.round`.

Differs:
    The previous model's part is KL between distributions over the K - 1 classes, as in the paper. The code takes their
        shares in the softmax of all K, which do not sum to 1.
    T is `local_dis_power` in the code, which has no weight but T². The mean includes oneself, as there.
    The code has no pretrained model: that term of FCCL is gone.
    For batches, one Adam for good and without weight decay, the order of the stages, τ, `EPS`, references and their
        first step see `fedloom.methods.distillation.fccl`. The code's public batches have 128 to 256 rows.
    Cosines cross as logits do, but with `coding = "top-k"` as float16, both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from fedloom.core.losses import kl
from fedloom.core.message import Template, Tree
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.distillation.fccl import CorrelatedConfig, correlation_loss, round
from fedloom.methods.distiller import Distiller
from fedloom.methods.features import Features
from fedloom.protect.coding import like

SHORT = 1e-4
"""Features shorter than this have less than a direction: their cosines are smaller."""


class Config(CorrelatedConfig):
    """Weights and temperatures are those of the authors' code on digits. The weight `inter` has T² beside it."""

    inter_temperature: float = Field(3.0, gt=0)
    """T."""
    similarity: float = Field(3.0, ge=0)
    """Weight of the divergence of cosines; at 0 none cross."""
    similarity_temperature: float = Field(0.02, gt=0)
    """What cosines are divided by."""

    @property
    def exchanges(self) -> bool:
        """Whether anything is learnt from others at all."""
        return self.correlation > 0 or self.similarity > 0

    def answer_like(self, classes: int) -> Template:
        """Template of what goes up for a batch."""
        size = self.batch_size
        found: dict[str, Template] = {"logits": self.encoded_like(classes)} if self.correlation else {}
        return {**found, "cosines": like(size, size - 1, self.coding_whole)} if self.similarity else found


class Both(Features):
    """A network that answers with its features (B, d) and its logits (B, K) side by side: (B, d + K)."""

    def forward(self, x: Tensor) -> Tensor:
        """Features, then logits."""
        f = super().forward(x)
        return torch.cat((f, self.network.head(f)), -1)


class Client(Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    CALLS = ("local_train", "predict", "distil")

    def setup(self) -> None:
        """Its network, in two parts."""
        self.start(Both(self.site.build()))

    def local_train(self, *, t: int) -> None:
        """The private stage: τ steps on own rows."""
        batches = self.own_batches(t)
        previous = self.outputs_of(batches.x) if self.cfg.looks_back else None
        for i, (x, y) in enumerate(batches):
            self.minimise(self.private_loss, x, y, previous[i] if previous is not None and i else None)

    def private_loss(self, x: Tensor, y: Tensor, previous: Tensor | None) -> Tensor:
        """The loss () on x (B, ...), y (B,), with the previous model's logits (B, K) where they count."""
        cfg, f = self.cfg, self.model(x)[..., -self.site.classes :]
        loss = F.cross_entropy(f, y)
        return loss if previous is None else loss + cfg.inter * others_kl(previous, f, y, cfg.inter_temperature)

    def predict(self, *, t: int, i: int) -> dict[str, Tree]:
        """Logits (B, K) and cosines (B, B - 1) on the public batch."""
        cfg, sent = self.cfg, {}
        features, logits = parted(self.forward(self.public_batches(t)[i]), self.site.classes)
        if cfg.correlation:
            sent["logits"] = cfg.encoded(logits)
        if cfg.similarity:
            sent["cosines"] = cfg.encoded_whole(cosines(features))
        return sent

    def distil(self, *, t: int, i: int, mean: dict[str, Tree]) -> None:
        """One step of the transfer stage: public batch i, and the mean answer to it, encoded."""
        cfg, x = self.cfg, self.public_batches(t)[i]
        widths = {"logits": self.site.classes, "cosines": cfg.batch_size - 1}
        target = {name: cfg.decoded_whole(z, widths[name]) for name, z in mean.items()}
        gradient, (_, terms) = grad_and_value(self.transfer_loss, has_aux=True)(self.forward(x), target)
        self.descend(x, gradient)
        for name, loss in terms.items():
            self.note(f"{name} loss", loss)

    def transfer_loss(self, out: Tensor, mean: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss () of features and logits (B, d + K) against the means, and its terms before their weights."""
        cfg, terms = self.cfg, {}
        features, logits = parted(out, self.site.classes)
        if cfg.correlation:
            terms["correlation"] = correlation_loss(logits, mean["logits"], cfg.off_diagonal)
        if cfg.similarity:
            target = F.softmax(mean["cosines"] / cfg.similarity_temperature, -1)
            terms["similarity"] = kl(target, cosines(features), cfg.similarity_temperature)
        return torch.stack([getattr(cfg, name) * loss for name, loss in terms.items()]).sum(), terms

    def infer(self, x: Tensor) -> Tensor:
        """Evaluation-mode logits (n, K), constants."""
        return parted(super().infer(x), self.site.classes)[1]


class Server(Party[Config]):
    """The server, which keeps nothing."""

    def mean(self, answers: Mapping[int, Any]) -> dict[str, Tree]:
        """The means of the clients' encoded logits and cosines by number, encoded for the way down."""
        cfg, found = self.cfg, {}
        if cfg.correlation:
            logits = [cfg.decoded(answer["logits"], self.site.classes) for answer in answers.values()]
            found["logits"] = cfg.encoded_whole(torch.stack(logits).mean(0))
        if cfg.similarity:
            cosines = [cfg.decoded_whole(answer["cosines"], cfg.batch_size - 1) for answer in answers.values()]
            found["cosines"] = cfg.encoded_whole(torch.stack(cosines).mean(0))
        return found


def parted(out: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Features (B, d) and logits (B, K) of what `Both` answers (B, d + K)."""
    return out[..., :-classes], out[..., -classes:]


def cosines(features: Tensor) -> Tensor:
    """The cosine of each row of features (B, d) with each other row, in their order: (B, B - 1)."""
    f = F.normalize(features, dim=-1, eps=SHORT)
    rows = len(f)
    every = (f @ f.mT).flatten()[1:].view(rows - 1, rows + 1)  # the diagonal is the last column
    return every[:, :-1].reshape(rows, rows - 1)


def others(f: Tensor, y: Tensor) -> Tensor:
    """The logits (B, K - 1) of the classes that are not y (B,), of f (B, K), in turn from the one after y."""
    classes = f.shape[-1]
    step = torch.arange(1, classes, device=f.device)
    return f.gather(-1, (y[:, None] + step) % classes)


def others_kl(previous: Tensor, f: Tensor, y: Tensor, temperature: float) -> Tensor:
    """T² KL(q_previous || q), the mean over rows: q (B, K - 1) is softmax(f / T) over the classes that are not y (B,).

    Args:
        previous: (B, K) logits, constants.
        f: (B, K) logits.
        y: (B,) labels.
        temperature: T.
    """
    target = F.softmax(others(previous, y) / temperature, -1)
    return temperature**2 * kl(target, others(f, y), temperature)


METHODS = (
    Method(
        name="fccl-plus",
        title="FCCL with likeness of rows, and memory of the classes that are not the label",
        paper="W. Huang, M. Ye, Z. Shi, B. Du: Generalizable Heterogeneous Federated Cross-Correlation and Instance "
        "Similarity Learning",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        needs=("public rows",),
        min_clients=2,
    ),
)
