"""FCCL+: FCCL's correlation of logits, similarity of rows, and regularization on the classes that
are not the label.

Paper: W. Huang, M. Ye, Z. Shi and B. Du, "Generalizable Heterogeneous Federated Cross-Correlation
and Instance Similarity Learning", TPAMI 2023; read with the authors' code,
github.com/WenkeHuang/FCCL.

Each client n has a network, labeled rows and an architecture of its own; all hold the same
unlabeled public rows P. A round has a private stage on own rows, then a transfer stage on P:

    private:   CE(y, f_n) + T² KL(q_previous || q_n),    q = softmax of f / T over the K - 1 classes that are not y
    transfer:  FCCL's loss of f_n against f̄ + 3 KL(softmax(s̄ / 0.02) || softmax(s_n / 0.02)) over
        the rows of s

s_n (B, B - 1) are the cosines of each public row's features with the other rows' in its batch; f̄
and s̄ are the means of the clients' logits and cosines. The label is left to cross-entropy: a
client learned the other classes from others, so only the proportions of these are preserved.

Messages: logits and cosines on public batches up, their means down, τ B (K + B - 1) numbers each
way. Features are never sent, so they may have any width. A client needs a network with separate
features and head, and reveals how similar its features of two rows are. A round has the steps of
FCCL: see `fedloom.methods.distillation.fccl.round`.

Differs:
    The previous model's part is KL between distributions over the K - 1 classes, as in the paper.
        The code takes their shares in the softmax of all K, which do not sum to 1.
    T is `local_dis_power` in the code, which has no weight but T². The mean includes oneself, as
    there.
    The code has no pretrained model: that term of FCCL is gone.
    For batches, one Adam for the whole run, without weight decay, the order of the stages, τ,
        `EPS`, references and their first step see `fedloom.methods.distillation.fccl`. The code's
        public batches have 128 to 256 rows.
    Cosines are coded as logits are, but as float16 with `coding = "top-k"`, in both directions.
"""  # noqa: E501

from collections.abc import Mapping
from typing import ClassVar, final

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F

from fedloom.core.page import EVERY_LOCAL, Adam, Kinds, Method, Party, Template, Tree, kl
from fedloom.methods.distillation import steps
from fedloom.methods.distillation.fccl import correlation_loss, round
from fedloom.methods.distillation.steps import LogitsConfig, public_batch
from fedloom.methods.features import Features
from fedloom.protect.coding import like

SHORT = 1e-4
"""The smallest norm by which features are divided; shorter features have smaller cosines."""


class FCCLPlusConfig(LogitsConfig):
    """Weights and temperatures are those of the authors' code on digits. The weight `inter` is
    multiplied by T².
    """

    KIND: ClassVar[Kinds] = {"logits": "logits", "cosines": "values"}
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
    inter_temperature: float = Field(3.0, gt=0)
    """T."""
    similarity: float = Field(3.0, ge=0)
    """Weight of the divergence of cosines; at 0 none are sent."""
    similarity_temperature: float = Field(0.02, gt=0)
    """Temperature of the softmax of cosines."""

    @property
    def looks_back(self) -> bool:
        """Whether the term of the previous model has an effect."""
        return self.inter > 0 and self.tau > 1

    @property
    def exchanges(self) -> bool:
        """Whether there is a transfer stage."""
        return self.correlation > 0 or self.similarity > 0

    def stages_in_round(self, t: int) -> int:
        """The local stage, and the transfer stage if there is one."""
        return 2 if self.exchanges else 1

    def answer_template(self, classes: int) -> Template:
        """Template of a client's answer on a batch."""
        size = self.batch_size
        logits: dict[str, Template] = {"logits": self.template(classes)} if self.correlation else {}
        return (
            {**logits, "cosines": like(size, size - 1, self.dense_coding)}
            if self.similarity
            else logits
        )


class FeaturesAndLogits(Features):
    """A network that outputs its features (B, d) and its logits (B, K) side by side: (B, d + K)."""

    def forward(self, x: Tensor) -> Tensor:
        """Features, then logits."""
        f = super().forward(x)
        return torch.cat((f, self.network.head(f)), -1)


@final
class FCCLPlusClient(Party[FCCLPlusConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt")
    CALLS = ("local_train", "predict", "distil")
    MEANS = ("predict",)
    TELLS = ()

    def setup(self) -> None:
        """Its network, with separate features and head."""
        self.network(FeaturesAndLogits(self.context.build()), Adam(self.cfg.lr))

    def local_train(self, *, t: int) -> None:
        """The private stage: τ steps on own rows."""
        batches = self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)
        previous = steps.stage_logits(self, batches.x) if self.cfg.looks_back else None
        for i, (x, y) in enumerate(batches):
            self.minimize(
                self.private_loss, x, y, previous[i] if previous is not None and i else None
            )

    def private_loss(self, x: Tensor, y: Tensor, previous: Tensor | None) -> Tensor:
        """The loss () on x (B, ...), y (B,), with the previous model's logits (B, K), or None
        without.
        """
        cfg, f = self.cfg, self.model(x)[..., -self.context.classes :]
        loss = self.context.task.loss(f, y)
        return (
            loss
            if previous is None
            else loss + cfg.inter * others_kl(previous, f, y, cfg.inter_temperature)
        )

    def predict(self, *, t: int, i: int) -> dict[str, Tree]:
        """Logits (B, K) and cosines (B, B - 1) on the public batch."""
        cfg, sent = self.cfg, {}
        features, logits = parted(self.forward(public_batch(self, t, i)), self.context.classes)
        if cfg.correlation:
            sent["logits"] = cfg.encode(logits)
        if cfg.similarity:
            sent["cosines"] = cfg.encode_dense(cosines(features))
        return sent

    def distil(self, *, t: int, i: int, mean: dict[str, Tree]) -> None:
        """One step of the transfer stage: public batch i, and the mean answer to it, encoded."""
        cfg, x = self.cfg, public_batch(self, t, i)
        widths = {"logits": self.context.classes, "cosines": cfg.batch_size - 1}
        target = {name: cfg.decode_dense(z, widths[name]) for name, z in mean.items()}
        gradient, (_, terms) = grad_and_value(self.transfer_loss, has_aux=True)(
            self.forward(x), target
        )
        self.descend(x, gradient)
        for name, loss in terms.items():
            self.note(f"{name} loss", loss)

    def transfer_loss(
        self, out: Tensor, mean: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss () of features and logits (B, d + K) against the means, and its terms before
        their weights.
        """
        cfg, terms = self.cfg, {}
        features, logits = parted(out, self.context.classes)
        if cfg.correlation:
            terms["correlation"] = correlation_loss(logits, mean["logits"], cfg.off_diagonal)
        if cfg.similarity:
            target = F.softmax(mean["cosines"] / cfg.similarity_temperature, -1)
            terms["similarity"] = kl(target, cosines(features), cfg.similarity_temperature)
        return torch.stack([getattr(cfg, name) * loss for name, loss in terms.items()]).sum(), terms

    def infer(self, x: Tensor) -> Tensor:
        """Evaluation-mode logits (n, K), constants."""
        return parted(self.net.infer(x), self.context.classes)[1]


@final
class FCCLPlusServer(Party[FCCLPlusConfig]):
    """The server, which has no state."""

    ROLE = "server"

    def read(self, n: int, answer: Mapping[str, Tree]) -> dict[str, Tensor]:
        """The logits (B, K) and the cosines (B, B - 1) of an answer."""
        cfg, found = self.cfg, {}
        if "logits" in answer:
            found["logits"] = cfg.decode(answer["logits"], self.context.classes)
        if "cosines" in answer:
            found["cosines"] = cfg.decode_dense(answer["cosines"], cfg.batch_size - 1)
        return found

    def write(self, mean: Mapping[str, Tensor]) -> dict[str, Tree]:
        """The encoded means of the clients' logits and cosines."""
        return {k: self.cfg.encode_dense(x) for k, x in mean.items()}


def parted(out: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Features (B, d) and logits (B, K) of the outputs of `FeaturesAndLogits` (B, d + K)."""
    return out[..., :-classes], out[..., -classes:]


def cosines(features: Tensor) -> Tensor:
    """The cosine of each row of features (B, d) with each other row, in their order: (B, B - 1)."""
    f = F.normalize(features, dim=-1, eps=SHORT)
    rows = len(f)
    every = (f @ f.mT).flatten()[1:].view(rows - 1, rows + 1)  # the diagonal is the last column
    return every[:, :-1].reshape(rows, rows - 1)


def others(f: Tensor, y: Tensor) -> Tensor:
    """The logits (B, K - 1) in f (B, K) of all classes but y (B,), cyclically from the class after
    y.
    """
    classes = f.shape[-1]
    step = torch.arange(1, classes, device=f.device)
    return f.gather(-1, (y[:, None] + step) % classes)


def others_kl(previous: Tensor, f: Tensor, y: Tensor, temperature: float) -> Tensor:
    """T² KL(q_previous || q), the mean over rows: q (B, K - 1) is softmax(f / T) over the classes
    that are not y (B,).

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
        title="FCCL with similarity of rows, and distillation on the classes that are not the label",  # noqa: E501
        paper="W. Huang, M. Ye, Z. Shi, B. Du: Generalizable Heterogeneous Federated "
        "Cross-Correlation and Instance Similarity Learning, TPAMI 2023",
        only_classes="it correlates the logits of classes",
        local=EVERY_LOCAL,
        family="distillation",
        config=FCCLPlusConfig,
        round=round,
        client=FCCLPlusClient,
        server=FCCLPlusServer,
        needs=("public rows",),
        min_clients=2,
    ),
)
