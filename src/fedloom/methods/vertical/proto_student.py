"""Prototype students: Proto-EVFL's messages with another local training. Ours; docs/vertical.md has
its accuracy.

Messages and the active party are those of Proto-EVFL (proto_evfl.py): prototypes and a prior down,
embeddings and a prior up, no gradient and no label. The local training of a passive party differs:

    The transport cost moves features towards prototypes, wherever these are, and so blurs classes
    that it cannot distinguish. Here prototypes only give pseudo-labels: each row gets the nearest
    prototype's class, and the most confident rows of each class are a training set, with labels
    that are often wrong. The extractor learns to separate these classes through a head of its own,
    which never leaves; errors that are not systematic average out, so that it becomes better than
    its teacher (D.-H. Lee, "Pseudo-Label", 2013). Pictures are shifted by up to a pixel. Half of an
    embedding are principal components of the party's own rows, whitened: they need no labels, give
    better first pseudo-labels than an untrained network, and cannot forget. They are linear in the
    columns, so they reveal more of them than a network's embeddings do: `pca_dim = 0` sends none.
"""

from math import ceil
from typing import Literal, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import EVERY_LOCAL, Method
from fedloom.methods.vertical import proto_evfl, steps
from fedloom.methods.vertical import proto_evfl_steps as proto


class ProtoStudentConfig(proto.ProtoEVFLConfig):
    """Settings of Proto-EVFL without `transport`, and the confidence of pseudo-labels."""

    transport: Literal["both"] = "both"
    """Unused: a passive party minimizes cross-entropy."""
    pca_dim: int = Field(32, ge=0)
    """Number of dimensions of an embedding that are fixed, whitened principal components of the own
    rows.
    """
    steps: int = Field(50, ge=0)
    """Local steps of a passive party in a round."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the extractors."""
    prior: Literal["mixed", "local", "uniform"] = "uniform"
    """Class prior of a passive party, as in Proto-EVFL."""
    adapter: Literal["residual", "linear", "none"] = "none"
    """The active party's adaptor for each party's embeddings."""
    gate: Literal["scaled", "plain", "none"] = "none"
    """Gate weights of the parties' embeddings."""
    confident_share: float = Field(0.5, gt=0, le=1)
    """Share of each pseudo-class's rows to train on, the most confident first."""


@final
class ProtoStudentPassive(proto.PrototypeParty[ProtoStudentConfig]):
    """Party m: as in Proto-EVFL, and a head of its own."""

    STATE = ("params", "buffers", "opt", "prototypes", "prior")
    EXPORT = ("params", "buffers", "prototypes", "prior")
    ROLE = "party"
    CALLS = ("introduce", "improve", "estimate")
    MEANS = ("estimate",)
    TELLS = ()

    def setup(self) -> None:
        """No prototypes yet; all classes are equally likely."""
        context, cfg = self.context, self.cfg
        with self.seeded("head"):
            head = nn.Linear(cfg.embedding_dim, context.classes)
        self.network(steps.extractor(self, head), proto.optimizer(cfg, cfg.lr, cfg.weight_decay))
        self.prototypes = torch.zeros(context.classes, cfg.embedding_dim, device=context.device)
        self.prior = torch.full((context.classes,), 1 / context.classes, device=context.device)

    def improve(self, *, t: int, prototypes: Tensor, prior: Tensor) -> dict[str, Tensor]:
        """Lines 2-10 of Proto-EVFL's Algorithm 1, with training on pseudo-labels in place of lines
        5-8.
        """
        self.prototypes = prototypes
        self.prior = proto.mixed_prior(self, t, prototypes, self.prior, prior)
        with proto.rollback_on_collapse(self, t, self.prototypes, self.prior):
            self._fit(t)
        return self.improved(t)

    def _fit(self, t: int) -> None:
        """Learn the pseudo-labels of the most confident rows."""
        cfg = self.cfg
        x = self.data.every[0 if cfg.local_rows == "all" else self.context.aligned :]
        rows, labels = most_confident(
            torch.softmax(self.alone(self.infer(x)), -1), cfg.confident_share
        )
        plan = self.stream("batches", t).integers(
            len(rows), size=(proto.local_steps(self), cfg.batch_size)
        )
        for which in torch.from_numpy(plan).to(rows.device):
            self.minimize(self._error, shifted_together(x[rows[which]]), labels[which])

    def _error(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(self.model(x), self.live["head.weight"], self.live["head.bias"]), y
        )


def most_confident(probabilities: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Pseudo-labels of the most confident rows: this share of the rows of each predicted class.

    Args:
        probabilities: (n, Z) a distribution over classes for each row.
        share: in (0, 1].

    Returns:
        Indices (k,) of rows, ascending, and their classes (k,).
    """
    confidence, labels = probabilities.max(-1)
    kept = []
    for z in range(probabilities.shape[1]):
        rows = (labels == z).nonzero()[:, 0]
        kept.append(
            rows[confidence[rows].argsort(descending=True, stable=True)[: ceil(share * len(rows))]]
        )
    rows = torch.cat(kept).sort().values
    return rows, labels[rows]


def shifted_together(x: Tensor) -> Tensor:
    """Pictures (B, C, H, W), all moved by at most a pixel each way, edges repeated; rows of a table
    as they are.
    """
    if x.dim() != 4:
        return x
    down, right = torch.randint(0, 3, (2,)).tolist()
    return F.pad(x, (1, 1, 1, 1), mode="replicate")[
        ..., down : down + x.shape[2], right : right + x.shape[3]
    ]


METHODS = (
    Method(
        name="proto-student",
        title="Proto-EVFL's messages; extractors trained on pseudo-labels from prototypes",
        paper="none; of this library, on Proto-EVFL's protocol",
        only_classes="it compares prototypes of classes",
        local=EVERY_LOCAL,
        family="vertical",
        config=ProtoStudentConfig,
        round=proto_evfl.round,
        client=ProtoStudentPassive,
        server=proto_evfl.ProtoEVFLActive,
        setting="vertical",
    ),
)
