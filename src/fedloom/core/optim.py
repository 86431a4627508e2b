"""Optimisers over one flat vector.

A party's parameters are views of one vector (see `fedloom.core.network`), so a step is a handful of operations on
long vectors instead of one per layer. The formulas are those of `torch.optim`, and a test holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

Rate: TypeAlias = float | Tensor
"""A number of one step; a tensor () if many parties step at once, each with its own."""


class Optimiser(Protocol):
    """What a network needs of an optimiser: new slots, and a step in place, in two parts."""

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The optimiser's memory for a parameter vector `flat (P,)`: named tensors, (P,) or ()."""
        ...

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """Begin a step: advance the slots of shape (), which all weights share; returns the numbers of this step."""
        ...

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """Update weights `w` along `g`, and their part of the slots, in place: elementwise, so any part of `flat`."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with optional momentum and (coupled) weight decay."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """One velocity vector `(P,)` when there is momentum, nothing otherwise."""
        return {"velocity": torch.zeros_like(flat)} if self.momentum else {}

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """Nothing to advance."""
        return ()

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """v <- momentum * v + g;  w <- w - lr * v."""
        if self.weight_decay:
            g = g.add(w, alpha=self.weight_decay)
        if self.momentum:
            g = slots["velocity"].mul_(self.momentum).add_(g)
        w.add_(g, alpha=-self.lr)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), bias-corrected, as `torch.optim.Adam` computes it.

    With weight decay it is decoupled from the gradient (Loshchilov and Hutter, 2019), as in `torch.optim.AdamW`.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The number of steps taken (), and running means of g and g² `(P,)`."""
        return {
            "step": torch.zeros((), dtype=torch.int64, device=flat.device),
            "mean": torch.zeros_like(flat),
            "square": torch.zeros_like(flat),
        }

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """Count the step t; η / (1 - β1^t), and √(1 - β2^t)."""
        t = _number(slots["step"].add_(1))
        b1, b2 = self.betas
        return self.lr / (1 - b1**t), (1 - b2**t) ** 0.5

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """w <- w - rate * mean / (√square / root + ε), with new running means."""
        (b1, b2), (rate, root) = self.betas, rates
        if self.weight_decay:
            w.mul_(1 - self.lr * self.weight_decay)
        mean = slots["mean"].lerp_(g, 1 - b1)
        square = slots["square"].mul_(b2).addcmul_(g, g, value=1 - b2)
        denominator = square.sqrt().div_(root).add_(self.eps)
        if isinstance(rate, Tensor):
            w.addcdiv_(mean * rate, denominator, value=-1)
        else:
            w.addcdiv_(mean, denominator, value=-rate)


def _number(count: Tensor) -> Rate:
    """A counter as a plain number if that is free; on a GPU reading it would wait for all queued work."""
    if count.device.type == "cpu":
        try:
            return int(count)
        except RuntimeError:  # under vmap: one counter for each party
            pass
    return count.double()
