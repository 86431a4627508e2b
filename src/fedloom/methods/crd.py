"""Contrastive representation distillation: two networks' features of one row should know each other among strangers.

Papers: Y. Tian, D. Krishnan, P. Isola, "Contrastive Representation Distillation", ICLR 2020; section V of AugFL, whose
pairs of strangers are rows of different classes. Both networks' features are mapped to unit vectors of one width. An
anchor is compared with the other network's vectors of all n rows, which two banks remember:

    e = exp(<anchor, bank row> / τ) / Z,    h = e / (e + N / n),    -E log h - N E log(1 - h)

the first mean over an anchor's own row, the second over its strangers. With Z, n times the mean of the first batch's
e, the loss begins near log N + 1 for each network; without it, at τ = 0.07, near N.

Differs:
    All strangers are scored at once by one product, where the paper draws N of them for each anchor: the sum over the
        draws is replaced by its expectation.
    The maps learn by plain gradient descent. The authors' code has momentum, but begins it anew in every round.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BOTH = ("student", "teacher")


@dataclass(frozen=True)
class CRD:
    """The settings, which are AugFL's.

    Attributes:
        width: of the unit vectors.
        temperature: τ.
        negatives: N.
        keep: how much of a bank's entry stays when its row is seen.
        lr, decay: of the maps.
    """

    width: int
    temperature: float
    negatives: int
    keep: float
    lr: float
    decay: float

    def begin(self, rows: int, student: int, teacher: int) -> dict[str, Any]:
        """A fresh state for so many rows and features of these widths: maps as linear layers begin, banks by chance."""
        layers = dict(zip(BOTH, (nn.Linear(student, self.width), nn.Linear(teacher, self.width)), strict=True))
        maps = {who: {k: p.detach() for k, p in layer.named_parameters()} for who, layer in layers.items()}
        banks = {who: F.normalize(torch.randn(rows, self.width), dim=-1) for who in BOTH}
        return {"maps": maps, "banks": banks, "z": {}}

    def embed(self, maps: Mapping[str, Mapping[str, Tensor]], features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Both networks' features (B, d) as unit vectors (B, width)."""
        return {who: F.normalize(F.linear(features[who], **maps[who]), dim=-1) for who in BOTH}

    def scores(self, state: Mapping[str, Any], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For each network <anchor, bank row> / τ (B, n) of its vectors with the other's bank."""
        banks = dict(zip(BOTH, (state["banks"]["teacher"], state["banks"]["student"]), strict=True))
        return {who: (vectors[who] / self.temperature) @ banks[who].T for who in BOTH}

    def learn(
        self,
        state: Mapping[str, Any],
        which: Tensor,
        vectors: Mapping[str, Tensor],
        slopes: Mapping[str, Mapping[str, Tensor]],
    ) -> dict[str, Any]:
        """The state after a step of the maps along `slopes`, with the rows' vectors mixed into both banks."""
        maps = {
            who: {k: w - self.lr * (slopes[who][k] + self.decay * w) for k, w in state["maps"][who].items()}
            for who in BOTH
        }
        banks = {}
        for who, bank in state["banks"].items():
            mixed = self.keep * bank[which] + (1 - self.keep) * vectors[who].detach()
            banks[who] = bank.index_copy(0, which, F.normalize(mixed, dim=-1))
        return {**state, "maps": maps, "banks": banks}


def normaliser(scores: Tensor, which: Tensor, strangers: Tensor) -> Tensor:
    """log Z (): n times the mean of exp(scores) (B, n) of the anchors' own rows `which` (B,) and of their strangers."""
    taken = strangers.clone()
    taken[torch.arange(len(which)), which] = True
    return (scores[taken].exp().mean() * scores.shape[1]).log()


def contrast(scores: Tensor, which: Tensor, strangers: Tensor, negatives: int) -> Tensor:
    """The loss (), a mean over anchors. h is the logistic function of log e - log(N / n).

    Args:
        scores: (B, n) log e.
        which: (B,) the row that each anchor is of.
        strangers: (B, n) bool, the rows of other classes.
        negatives: N.
    """
    logits = scores - math.log(negatives / scores.shape[1])
    own = F.softplus(-logits.gather(1, which[:, None])[:, 0])
    apart = (F.softplus(logits) * strangers).sum(1) / strangers.sum(1).clamp_min(1)
    return (own + negatives * apart).mean()
