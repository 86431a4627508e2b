"""Self-supervision, for pages that pretrain without labels: views of rows, losses and heads, an
optimizer with a rate.

p, z (B, d) are predictions and projections. Views come from torch's generator, which engines seed
for each call.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.optim import SGD, Adam, Rate


def disagreement(p: Tensor, z: Tensor) -> Tensor:
    """SimSiam's D () of equations 1 and 3: minus the mean cosine of predictions and projections,
    held constant.
    """
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def siamese(p: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Tensor:
    """SimSiam's equation 4 (): each view predicts the other's projection."""
    return disagreement(p[0], z[1]) / 2 + disagreement(p[1], z[0]) / 2


def heads(inputs: int, width: int) -> tuple[nn.Sequential, nn.Sequential]:
    """A projector and a predictor."""
    return projector(inputs, width), predictor(width)


def projector(inputs: int, width: int) -> nn.Sequential:
    """Features (B, inputs) to projections (B, width)."""
    return nn.Sequential(*_normalized(inputs, width), nn.ReLU(), *_normalized(width, width))


def predictor(width: int) -> nn.Sequential:
    """Projections (B, width) to predictions (B, width), through a bottleneck."""
    return nn.Sequential(*_normalized(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width))


def _normalized(inputs: int, outputs: int) -> list[nn.Module]:
    """A layer without bias and a BatchNorm that keeps no statistics, since heads are not used for
    prediction.
    """
    return [
        nn.Linear(inputs, outputs, bias=False),
        nn.BatchNorm1d(outputs, track_running_stats=False),
    ]


class Views(Protocol):
    """Settings of views, as `SSVFLConfig` describes them."""

    @property
    def shift(self) -> float:
        """Largest shift of a picture, as a share of its side."""

    @property
    def noise(self) -> float:
        """Standard deviation of Gaussian noise on a picture's pixels."""

    @property
    def erase(self) -> float:
        """Largest side of the erased rectangle, as a share of the picture's side."""

    @property
    def corruption_rate(self) -> float:
        """Share of a row's columns that are corrupted."""


def views(x: Tensor, cfg: Views) -> tuple[Tensor, Tensor]:
    """Two views of a batch of pictures (B, C, H, W), or of rows of a table (B, F), of which the
    first is x itself.
    """
    return (
        (picture_view(x, cfg), picture_view(x, cfg))
        if x.dim() == 4
        else (x, corrupted(x, cfg.corruption_rate))
    )


def picture_view(x: Tensor, cfg: Views) -> Tensor:
    """A view (B, C, H, W) of pictures."""
    x = erased(shifted(x, cfg.shift), cfg.erase)
    return x + cfg.noise * torch.randn_like(x)


def shifted(x: Tensor, share: float) -> Tensor:
    """Each picture moved vertically and horizontally by its own offset, with its edge repeated
    outwards.
    """
    rows, _, height, width = x.shape
    down, right = math.ceil(height * share), math.ceil(width * share)
    wide = F.pad(x, (right, right, down, down), mode="replicate")
    top = torch.randint(2 * down + 1, (rows, 1), device=x.device) + torch.arange(
        height, device=x.device
    )
    left = torch.randint(2 * right + 1, (rows, 1), device=x.device) + torch.arange(
        width, device=x.device
    )
    row = torch.arange(rows, device=x.device)
    return wide[row[:, None, None], :, top[:, :, None], left[:, None, :]].movedim(-1, 1)


def erased(x: Tensor, share: float) -> Tensor:
    """Each picture with one rectangle set to the mean of its channel."""

    def covered(side: int) -> Tensor:
        """Positions of a side (B, side) that an interval of random length covers."""
        length = torch.randint(math.ceil(side * share) + 1, (len(x), 1), device=x.device)
        start = (torch.rand(len(x), 1, device=x.device) * (side - length + 1)).floor()
        position = torch.arange(side, device=x.device)
        return (position >= start) & (position < start + length)

    hole = covered(x.shape[2])[:, None, :, None] & covered(x.shape[3])[:, None, None, :]
    return torch.where(hole, x.mean((2, 3), keepdim=True), x)


def corrupted(x: Tensor, share: float) -> Tensor:
    """Each row (B, F) with this share of its columns, at least one, replaced by values of random
    rows of the batch.
    """
    which = torch.rand_like(x).argsort(1) < max(1, int(share * x.shape[1]))
    return torch.where(which, x.gather(0, torch.randint(len(x), x.shape, device=x.device)), x)


@dataclass(frozen=True)
class ScheduledOptimizer:
    """An optimizer with the learning rate in its state, so that a party can change it."""

    base: SGD | Adam

    @property
    def clip(self) -> float | None:
        """See `Optimizer.clip`."""
        return self.base.clip

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The slots of the optimizer and the rate ()."""
        rate = torch.tensor(self.base.lr, dtype=torch.float64, device=flat.device)
        return {**self.base.slots(flat), "rate": rate}

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """The rate, and the other numbers of this step."""
        rate = float(slots["rate"])
        return rate, *replace(self.base, lr=rate).tick(slots)

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """A step of the optimizer at this rate."""
        rate, *others = rates
        replace(self.base, lr=float(rate)).move(w, g, slots, *others)


def at_rate(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """These optimizer slots with another rate."""
    return {**opt, "rate": torch.full_like(opt["rate"], rate)}


def reset(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """Optimizer slots set to zero, with this rate."""
    return at_rate({k: torch.zeros_like(x) for k, x in opt.items()}, rate)
