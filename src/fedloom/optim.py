"""Optimisers over one flat vector.

A party's parameters are views of one vector (see `fedloom.network`), so a step is a handful of operations on
long vectors instead of one per layer. The formulas are those of `torch.optim`, and a test holds them to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Optimiser(Protocol):
    """What a network needs of an optimiser: fresh slots, and one step in place."""

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The optimiser's memory for a parameter vector `flat (P,)`, as named tensors."""
        ...

    def step(self, flat: Tensor, grad: Tensor, slots: dict[str, Tensor]) -> None:
        """Move `flat (P,)` along `grad (P,)` and update `slots`, all in place."""
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

    def step(self, flat: Tensor, grad: Tensor, slots: dict[str, Tensor]) -> None:
        """v <- momentum * v + g;  w <- w - lr * v."""
        if self.weight_decay:
            grad = grad.add(flat, alpha=self.weight_decay)
        if self.momentum:
            grad = slots["velocity"].mul_(self.momentum).add_(grad)
        flat.add_(grad, alpha=-self.lr)


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba, 2015), bias-corrected, as `torch.optim.Adam` computes it."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The number of steps taken (), and running means of g and g² `(P,)`."""
        return {
            "step": torch.zeros((), dtype=torch.int64),
            "mean": torch.zeros_like(flat),
            "square": torch.zeros_like(flat),
        }

    def step(self, flat: Tensor, grad: Tensor, slots: dict[str, Tensor]) -> None:
        """One step; the counter is a tensor so that it travels with the other slots."""
        b1, b2 = self.betas
        step = int(slots["step"].add_(1))
        mean = slots["mean"].lerp_(grad, 1 - b1)
        square = slots["square"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        denominator = square.sqrt().div_((1 - b2**step) ** 0.5).add_(self.eps)
        flat.addcdiv_(mean, denominator, value=-self.lr / (1 - b1**step))
