"""Optimizers over one flat vector.

A party's parameters are views of one vector (see `fedloom.core.network`), so a step is a handful of
operations on long vectors instead of one per layer. The formulas are `torch.optim`'s, and a test
holds them to it.
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Rate: TypeAlias = float | Tensor
"""A coefficient of one step; a tensor () when parties are batched, each with its own."""


class Optimizer(Protocol):
    """The interface of optimizers: slots for a parameter vector, and an in-place step in two parts.

    Example:
        >>> how, w, g = SGD(lr=0.5), torch.ones(2), torch.tensor([1.0, -1.0])
        >>> slots = how.slots(w)
        >>> how.move(w, g, slots, *how.tick(slots))
        >>> w, how.clip
        (tensor([0.5000, 1.5000]), None)
    """

    @property
    def clip(self) -> float | None:
        """The largest L2 norm of a step's whole gradient, see `clipped`; None for no limit."""

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """New slots for a parameter vector `flat` (P,): named tensors, (P,) or ()."""

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """Begin a step: advance the slots of shape (); returns the coefficients of this step."""

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """Update weights `w` and their slots in place along `g`; elementwise, so on any part of
        `flat`.
        """


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with optional momentum and (coupled) weight decay.

    Example:
        >>> SGD(0.05, momentum=0.9).slots(torch.zeros(2))
        {'velocity': tensor([0., 0.])}
        >>> SGD(0.05).tick({})
        (0.05,)
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """One velocity vector (P,) with momentum, nothing without."""
        return {"velocity": torch.zeros_like(flat)} if self.momentum else {}

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """The learning rate."""
        return (self.lr,)

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """v <- momentum * v + g;  w <- w - lr * v."""
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        if self.momentum:
            g = slots["velocity"].mul_(self.momentum).add_(g)
        _descend(w, g, rates[0])


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), bias-corrected, as `torch.optim.Adam` computes it.

    Weight decay is decoupled from the gradient (Loshchilov and Hutter, 2019), as in
    `torch.optim.AdamW`.

    Example:
        >>> [*Adam(1e-3).slots(torch.zeros(2))]
        ['step', 'mean', 'square']
        >>> Adam(1e-3, weight_decay=0.1).tick(Adam().slots(torch.zeros(2)))[2]
        0.9999
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = None

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The number of steps (), and running means of g and g² (P,)."""
        return {
            "step": torch.zeros((), dtype=torch.int64, device=flat.device),
            "mean": torch.zeros_like(flat),
            "square": torch.zeros_like(flat),
        }

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """Count step t; returns η / (1 - β1^t), √(1 - β2^t), and 1 - ηλ for a weight decay of λ."""
        t = _number(slots["step"].add_(1))
        b1, b2 = self.betas
        return self.lr / (1 - b1**t), (1 - b2**t) ** 0.5, 1 - self.lr * self.weight_decay

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """w <- w - rate * mean / (√square / root + ε), with new running means."""
        (b1, b2), (rate, root, kept) = self.betas, rates
        if self.weight_decay:
            w.mul_(kept)
        mean = slots["mean"].lerp_(g, 1 - b1)
        square = slots["square"].mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = square.sqrt().div_(root).add_(self.eps)
        if isinstance(rate, Tensor):
            w.addcdiv_(mean * rate, denominator, value=-1)
        else:
            w.addcdiv_(mean, denominator, value=-rate)


def clipped(gradients: list[Tensor], most: float | None) -> list[Tensor]:
    """The gradients, scaled down together to a joint L2 norm of at most `most`, as torch's
    `clip_grad_norm_` does; None for no limit.

    Example:
        >>> clipped([torch.tensor([3.0, 4.0])], most=1.0)
        [tensor([0.6000, 0.8000])]
    """
    if most is None or not gradients:
        return gradients
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return [g * factor for g in gradients]


def _number(count: Tensor) -> Rate:
    """A counter as an int on the CPU; on a GPU reading it would wait for all queued work."""
    if count.is_cpu:
        try:
            return int(count)
        except RuntimeError:  # under vmap: one counter for each party
            pass
    return count.double()


def _descend(w: Tensor, g: Tensor, rate: Rate) -> None:
    if isinstance(rate, Tensor):
        w.sub_(g * rate)
    else:
        w.add_(g, alpha=-rate)
