"""Vertical split learning: embeddings up, their gradients down; with the two ends of the scale beside it.

P. Vepakomma et al., "Split learning for health: Distributed deep learning without sharing raw patient data", 2018.
Every step is, to rounding, a step of the joint network on the aligned rows: a test holds it to that. It needs no
unaligned row, and it sends each party a gradient for each row, from which labels can be read (docs/vertical.md).

`split` is the Vanilla VFL that other methods are compared with. `active-only` is the active party with its own columns
alone, its Local Model. `pooled` is split learning where every row of every party is aligned and labelled, the Upper
Boundary: what could be had if there were nothing to hide and everybody knew everybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import MethodError
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.method import Method
from fedloom.core.optim import SGD, Adam, Optimiser
from fedloom.methods.holder import Holder, HolderConfig, Home, classifier


class SplitConfig(HolderConfig):
    """Settings of split learning, and of the last phase of methods that end with it."""

    epochs: int = Field(3, ge=1)
    """Passes over the aligned rows in a round."""
    optimiser: Literal["adamw", "sgd"] = "adamw"
    """Of all parties."""
    lr: float = Field(1e-3, gt=0)
    """Rate of all parties."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled with AdamW, part of the loss with SGD."""
    top: Literal["network", "sum"] = "network"
    """What the active party makes of the embeddings: a network; or their sum and a bias, where they are logits."""

    @property
    def iterations_per_round(self) -> int:
        """Passes over the aligned rows."""
        return self.epochs

    def optimise(self) -> Optimiser:
        """What every party trains with."""
        if self.optimiser == "sgd":
            return SGD(self.lr, self.momentum, self.weight_decay)
        return Adam(self.lr, weight_decay=self.weight_decay)


class Party(Holder[SplitConfig]):
    """A party's part of the network, below the cut."""

    CALLS: ClassVar[tuple[str, ...]] = ("embed", "update")

    def setup(self) -> None:
        """Its extractor."""
        self.extractor(self.cfg.optimise())

    def embed(self, *, number: int, step: int) -> Tensor:
        """Forward to the cut: embeddings (B, d) of the people whose turn it is."""
        return self.forward(self.site.aligned_batch(number, step, size=self.cfg.batch_size))

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient (B, d) of the loss by what was sent."""
        self.descend(self.site.aligned_batch(number, step, size=self.cfg.batch_size), cut)


class Sum(nn.Module):
    """The sum of all parties' logits (B, M, Z), and a bias."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, Z)."""
        return x.sum(1) + self.bias


class Active(Home[SplitConfig]):
    """The active party's part of the network, above the cut, and its labels."""

    STATE = ("params", "opt")

    def setup(self) -> None:
        """A classifier of all embeddings."""
        self.classify(self.site.parties)

    def classify(self, parties: int) -> None:
        """Make the network for embeddings of so many parties."""
        classes, cfg = self.site.classes, self.cfg
        if cfg.top == "sum" and cfg.width != classes:
            raise MethodError(f"params.top = sum adds up logits: set params.width to {classes}, one for each class")
        with self.seeded("top"):
            top = (
                Sum(classes)
                if cfg.top == "sum"
                else nn.Sequential(nn.Flatten(), classifier(parties * cfg.width, classes))
            )
        self.network(top, cfg.optimise())

    def learn(self, parts: Mapping[int, Tensor], number: int, step: int) -> dict[int, dict[str, Tensor]]:
        """One step; for each party the gradient (B, d) of the loss by what it sent."""
        joint, labels = torch.stack(list(parts.values()), 1).requires_grad_(), self.labels(self.rows(number, step))
        self.note("loss", self.minimise(lambda: F.cross_entropy(self.model(joint), labels)))
        assert joint.grad is not None
        cuts = [cut.contiguous() for cut in joint.grad.unbind(1)]  # as they come off a wire: then sums are the same
        return {m: {"cut": cut} for m, cut in zip(parts, cuts, strict=True)}

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The gradients (N_a, d) of a pass that began now, each row's as in a batch."""
        joint = torch.stack(list(contributions.values()), 1).requires_grad_()
        with self.scratch():
            loss = F.cross_entropy(self.model(joint), self.labels(), reduction="sum") / self.cfg.batch_size
            (cut,) = torch.autograd.grad(loss, joint)
        kind = "logit gradients" if self.cfg.top == "sum" else "gradients"
        return {kind: dict(zip(contributions, cut.unbind(1), strict=True))}


class OnItsOwn(Active):
    """The same for `active-only`: of its own embeddings alone."""

    def setup(self) -> None:
        """A classifier of the first party's embeddings."""
        self.classify(1)

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from its own embeddings."""
        return super().decide({0: contributions[0]})

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Nobody else is told anything."""
        return super().exposed({0: contributions[0]})


def passes(fed: Federation, active: Active, parties: Sequence[int], cfg: SplitConfig, numbers: range) -> None:
    """Passes over the aligned rows. A batch for which a party is silent is left out: nobody can stand in."""
    everybody = len(parties) if isinstance(active, OnItsOwn) else active.site.parties
    template = floats(cfg.batch_size, cfg.width)
    for number in numbers:
        for step in range(active.steps()):
            which = {"number": number, "step": step}
            parts = fed.call(parties, "embed", shared=which, expect=template, need=everybody)
            if parts:
                fed.call(parts, "update", shared=which, each=active.learn(parts, number, step), expect=None)


def round(fed: Federation, active: Active, parties: Sequence[int], cfg: SplitConfig, t: int) -> Iterator[str]:
    """Some passes over the aligned rows."""
    who = [m for m in parties if m == 0] if isinstance(active, OnItsOwn) else parties
    passes(fed, active, who, cfg, range(t * cfg.epochs, (t + 1) * cfg.epochs))
    yield "round"


SPLIT = Method(
    name="split",
    title="Split learning: embeddings up, gradients down",
    paper="P. Vepakomma et al.: Split learning for health: Distributed deep learning without sharing raw data, 2018",
    family="vertical",
    config=SplitConfig,
    round=round,
    client=Party,
    server=Active,
    presets={"paper": {"epochs": 8, "optimiser": "sgd", "lr": 5e-4, "weight_decay": 0.0, "centred": False}},
    setting="vertical",
)

METHODS = (
    SPLIT,
    replace(
        SPLIT,
        name="active-only",
        title="The active party learns from its own columns alone",
        server=OnItsOwn,
    ),
    replace(
        SPLIT, name="pooled", title="Split learning as if all rows were aligned and labelled", needs=("pooled rows",)
    ),
)
