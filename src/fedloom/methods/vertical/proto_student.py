"""Prototype students: Proto-EVFL's messages, with another local training. Ours; docs/vertical.md has what it is worth.

What crosses, and the active party's side, are those of `fedloom.methods.vertical.proto_evfl`: prototypes and a prior
down, embeddings and a prior up, no gradient and no label. What a holder does with its prototypes differs:

    The transport cost moves features towards prototypes, wherever these are, and so blurs what it can't tell apart.
    Here prototypes only name rows: each row gets the nearest prototype's class, and the surest rows of each class are
    a training set, with labels that are often wrong. The extractor learns to tell these classes apart through a head
    of its own, which never leaves; errors that are not systematic average out, so that it comes to know better than
    its teacher (D.-H. Lee, "Pseudo-Label", 2013). Pictures are shifted by up to a pixel.
    Half of an embedding are principal components of the own rows, whitened: they need no labels, make better first
    names than an untrained network, and can't forget. They are linear in the columns, so they tell more of them than
    a network's embeddings do: `principal = 0` sends none.
"""

from __future__ import annotations

from math import ceil
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.method import Method
from fedloom.methods.vertical import proto_evfl
from fedloom.methods.vertical.proto_evfl import Active


class Config(proto_evfl.Config):
    """Settings of Proto-EVFL but for its selection, and how sure a name must be."""

    selection: Literal["both"] = "both"
    """Of no use here: what a holder minimises is cross-entropy."""

    principal: int = Field(32, ge=0)
    """So many numbers of an embedding are principal components of the own rows, whitened."""
    steps: int = Field(50, ge=0)
    """Steps of a holder in a round."""
    lr: float = Field(1e-3, gt=0)
    """Rate of the extractors."""
    prior: Literal["mixed", "local", "uniform"] = "uniform"
    """A holder's class prior, by which prototypes are weighed."""
    adaptor: Literal["residual", "linear", "none"] = "none"
    """What the active party does to each party's embeddings first: embeddings of students need none."""
    gate: Literal["scaled", "plain", "none"] = "none"
    """Weights of the parties' embeddings for each row: likewise."""
    sure: float = Field(0.5, gt=0, le=1)
    """The share of the rows of each class that is learnt from: the surest."""


class Party(proto_evfl.Party):
    """Party m: beside what Proto-EVFL has, a head of its own."""

    cfg: Config

    def head(self) -> nn.Module:
        """What tells the classes apart by which rows are named."""
        with self.seeded("head"):
            return nn.Linear(self.cfg.width, self.site.classes)

    def fit(self, t: int) -> None:
        """In place of lines 5-8: learn the classes that the surest rows are named by."""
        cfg = self.cfg
        x = self.data.every[0 if cfg.local_rows == "all" else self.site.aligned :]
        beliefs = torch.softmax(self.alone(self.infer(x)), -1)
        rows, named = surest(beliefs, cfg.sure)
        plan = self.stream("batches", t).integers(len(rows), size=(cfg.steps, cfg.batch_size))
        for which in torch.from_numpy(plan).to(rows.device):
            self.minimise(self._error, shifted(x[rows[which]]), named[which])

    def _error(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(self.model(x), self.live["head.weight"], self.live["head.bias"]), y)


def surest(beliefs: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Of each class that some row is named by, that share of its rows which is surest.

    Args:
        beliefs: (n, Z) of each row a distribution over classes.
        share: in (0, 1].

    Returns:
        Numbers (k,) of rows, rising, and their classes (k,).
    """
    sure, named = beliefs.max(-1)
    kept = []
    for z in range(beliefs.shape[1]):
        rows = (named == z).nonzero()[:, 0]
        kept.append(rows[sure[rows].argsort(descending=True, stable=True)[: ceil(share * len(rows))]])
    rows = torch.cat(kept).sort().values
    return rows, named[rows]


def shifted(x: Tensor) -> Tensor:
    """Pictures (B, C, H, W), all moved by at most a pixel each way, edges repeated; rows of a table as they are."""
    if x.dim() != 4:
        return x
    down, right = torch.randint(0, 3, (2,)).tolist()
    return F.pad(x, (1, 1, 1, 1), mode="replicate")[..., down : down + x.shape[2], right : right + x.shape[3]]


METHODS = (
    Method(
        name="proto-student",
        title="Proto-EVFL's messages; rows named by prototypes teach the extractors",
        paper="none; of this library, on Proto-EVFL's protocol",
        family="vertical",
        config=Config,
        round=proto_evfl.round,
        client=Party,
        server=Active,
        setting="vertical",
    ),
)
