"""Contrastive representation distillation: two networks' features of one row against the features
of other classes.

Papers: Y. Tian, D. Krishnan, P. Isola, "Contrastive Representation Distillation", ICLR 2020;
section V of AugFL, where any two different rows are a negative pair. Both networks' features are
mapped to unit vectors of one width. An anchor is compared with the other network's vectors of all n
rows, which two banks store:

    e = exp(<anchor, bank row> / τ) / Z,    h = e / (e + N / n),    -E log h - N E log(1 - h)

the first mean over an anchor's own row, the second over its negative rows. With Z, n times the mean
of the first batch's e, the loss begins near log N + 1 for each network; without it, at τ = 0.07,
near N.

The state has `maps` and `banks` by network, and `z`, log Z by network, empty until the first batch.

Differs:
    Negative rows are those of other classes, which uses the server's labels; the paper's are all
        with i ≠ j, as here for a number to predict.
    All negative rows are scored at once by one product, where the paper draws N of them for each
        anchor: the sum over the draws is replaced by its expectation.
    The maps learn by plain gradient descent. The authors' code has momentum, but resets it in every
    round.
"""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BOTH = ("student", "teacher")
Maps: TypeAlias = Mapping[str, Mapping[str, Tensor]]
"""The linear maps of both networks: their weight and bias by name."""


def init(rows: int, student: int, teacher: int, width: int) -> dict[str, Any]:
    """The first state for features of these widths and unit vectors of `width`: maps with the
    initial weights of linear layers, random banks of `rows` vectors.
    """
    layers = dict(zip(BOTH, (nn.Linear(student, width), nn.Linear(teacher, width)), strict=True))
    maps = {
        net: {k: p.detach() for k, p in layer.named_parameters()} for net, layer in layers.items()
    }
    banks = {net: F.normalize(torch.randn(rows, width), dim=-1) for net in BOTH}
    return {"maps": maps, "banks": banks, "z": {}}


def embed(maps: Maps, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Both networks' features (B, d) as unit vectors (B, width)."""
    return {net: F.normalize(F.linear(features[net], **maps[net]), dim=-1) for net in BOTH}


def scores(
    banks: Mapping[str, Tensor], vectors: Mapping[str, Tensor], temperature: float
) -> dict[str, Tensor]:
    """For each network <anchor, bank row> / τ (B, n) of its vectors with the other's bank."""
    others = {"student": banks["teacher"], "teacher": banks["student"]}
    return {net: (vectors[net] / temperature) @ others[net].T for net in BOTH}


def loss(
    state: Mapping[str, Any],
    vectors: Mapping[str, Tensor],
    which: Tensor,
    negative_rows: Tensor,
    temperature: float,
    negatives: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum () of both networks' losses, and log Z by network, which the first batch sets.

    Args:
        state: see above.
        vectors: (B, width) of both networks.
        which: (B,) the row of each anchor.
        negative_rows: (B, n) bool, the rows of other classes.
        temperature: τ.
        negatives: N.
    """
    logits = scores(state["banks"], vectors, temperature)
    z = state["z"] or {
        net: normalizer(x.detach(), which, negative_rows) for net, x in logits.items()
    }
    return torch.stack(
        [contrast(x - z[net], which, negative_rows, negatives) for net, x in logits.items()]
    ).sum(), z


def descend(maps: Maps, gradients: Maps, lr: float, decay: float) -> dict[str, dict[str, Tensor]]:
    """The maps after a step of gradient descent with weight decay."""
    return {
        net: {k: w - lr * (gradients[net][k] + decay * w) for k, w in maps[net].items()}
        for net in BOTH
    }


def update_banks(
    banks: Mapping[str, Tensor], which: Tensor, vectors: Mapping[str, Tensor], momentum: float
) -> dict[str, Tensor]:
    """The banks with the vectors (B, width) of rows `which` (B,) mixed in; `momentum` is the old
    entries' share.
    """
    mixed = {
        net: momentum * bank[which] + (1 - momentum) * vectors[net].detach()
        for net, bank in banks.items()
    }
    return {
        net: bank.index_copy(0, which, F.normalize(mixed[net], dim=-1))
        for net, bank in banks.items()
    }


def normalizer(scores: Tensor, which: Tensor, negative_rows: Tensor) -> Tensor:
    """log Z (): n times the mean of exp(scores) (B, n) of the anchors' own rows `which` (B,) and of
    `negative_rows`.
    """
    taken = negative_rows.clone()
    taken[torch.arange(len(which)), which] = True
    return (scores[taken].exp().mean() * scores.shape[1]).log()


def contrast(scores: Tensor, which: Tensor, negative_rows: Tensor, negatives: int) -> Tensor:
    """The loss (), a mean over anchors. h is the logistic function of log e - log(N / n).

    Args:
        scores: (B, n) log e.
        which: (B,) the row of each anchor.
        negative_rows: (B, n) bool, the rows of other classes.
        negatives: N.
    """
    logits = scores - math.log(negatives / scores.shape[1])
    own = F.softplus(-logits.gather(1, which[:, None])[:, 0])
    apart = (F.softplus(logits) * negative_rows).sum(1) / negative_rows.sum(1).clamp_min(1)
    return (own + negatives * apart).mean()
