"""What a federation predicts, a class or a number: losses, distillation and predictions from a
network's outputs.

A page asks `self.context.task`, so it is written once for both. A method whose mathematics fits
numbers, too, declares `tasks=EVERY_TASK` where it is registered; another says in `only_classes` why
it does not: see `fedloom.core.method`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ConfigError
from fedloom.core.losses import kl, kl_gradient, reverse_kl_gradient

TaskKind: TypeAlias = Literal["classes", "number"]
"""What the label is: the name of a class, or a number."""
EVERY_TASK: Final[tuple[TaskKind, ...]] = ("classes", "number")
"""For methods that work with classes and with numbers."""
Reduction: TypeAlias = Literal["mean", "sum", "none"]
"""Whether a loss is the mean over rows, their sum, or one value for each row."""
_SPREAD = 10.0
"""Limit of a predicted log variance, on both sides: a factor of 150 in the s.d. of a standardized
target.
"""


@dataclass(frozen=True)
class Classes:
    """One of K classes. Outputs are logits (B, K), labels their numbers (B,) int64.

    Attributes:
        width: K.
        weights: (K,) how much a row of each class counts in `loss`; None if all count alike.
    """

    width: int
    weights: Tensor | None = field(default=None, compare=False)
    kind: ClassVar[TaskKind] = "classes"

    @property
    def unweighted(self) -> "Classes":
        """The same, with all classes alike: for evaluations."""
        return Classes(self.width)

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Cross-entropy in nats, times each row's weight: (), or (B,) without reduction. A mean is
        over the number of rows, not over their weights, so a row has the same pull in every batch.
        """
        if self.weights is None:
            return F.cross_entropy(outputs, y, reduction=reduction)
        each = self.weighed(F.cross_entropy(outputs, y, reduction="none"), y)
        return each if reduction == "none" else each.sum() if reduction == "sum" else each.mean()

    def weighed(self, each: Tensor, y: Tensor) -> Tensor:
        """Values (B, ...) of rows with labels y (B,), times the weights of their classes."""
        if self.weights is None:
            return each
        return each * self.weights.to(each.device)[y].view(-1, *[1] * (each.dim() - 1))

    def soft(self, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """What a student learns from a teacher's outputs: probabilities (B, K)."""
        return F.softmax(outputs / temperature, -1)

    def distill(self, target: Tensor, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """Mean over rows of KL(target || softmax(outputs / temperature)), target as from `soft`."""
        return kl(target, outputs, temperature)

    def distill_gradient(
        self, target: Tensor, outputs: Tensor, temperature: float = 1.0, *, reverse: bool = False
    ) -> Tensor:
        """Gradient (B, K) of `distill` by the outputs, for each row; `reverse`: of
        KL(p || target).
        """
        return (reverse_kl_gradient if reverse else kl_gradient)(target, outputs, temperature)

    def certainty(self, outputs: Tensor) -> Tensor:
        """(...) how sure outputs (..., K) are: the negative entropy of their probabilities in nats,
        float64.
        """
        log_p = F.log_softmax(outputs.double(), -1)
        return (log_p.exp() * log_p).sum(-1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """(B,) int64 most probable classes."""
        return outputs.argmax(-1)


@dataclass(frozen=True)
class Number:
    """A number, standardized as (number - shift) / scale. Outputs are (B, 1) standardized numbers,
    labels (B,) float32.

    With `variance` outputs are (B, 2): the mean and the logarithm of the variance of a Gaussian.
    Gradients are then times the variance if it is below 1.

    Attributes:
        shift, scale: agreed by all parties, in the unit of the number. scale > 0.
        variance: whether the network also predicts how uncertain it is.
    """

    shift: float = 0.0
    scale: float = 1.0
    variance: bool = False
    kind: ClassVar[TaskKind] = "number"

    @property
    def width(self) -> int:
        """Outputs for each row: 1, or 2 with `variance`."""
        return 2 if self.variance else 1

    @property
    def unweighted(self) -> "Number":
        """The same: rows have no weights."""
        return self

    def weighed(self, each: Tensor, y: Tensor) -> Tensor:
        """Values (B, ...) of rows with labels y (B,) as they are."""
        return each

    def standardized(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers (n,) float64 as the labels (n,) float32 of a network; infinity
        beyond its range.
        """
        with np.errstate(over="ignore"):
            return ((numbers - self.shift) / self.scale).astype(np.float32)

    def in_unit(self, standardized: np.ndarray) -> np.ndarray:
        """Standardized numbers (n,) in their own unit, float64."""
        return standardized.astype(np.float64) * self.scale + self.shift

    def loss(self, outputs: Tensor, y: Tensor, reduction: Reduction = "mean") -> Tensor:
        """Half the squared error of standardized numbers, a Gaussian's negative log-likelihood with
        variance 1; or with `variance` that of its own, without the constant: (), or (B,) without
        reduction.
        """
        error = (outputs[..., 0] - y) ** 2 / 2
        if self.variance:
            spread = _log_variance(outputs)
            error = _steady(spread / 2 + error * torch.exp(-spread), spread)
        return error if reduction == "none" else error.sum() if reduction == "sum" else error.mean()

    def soft(self, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """What a student learns from a teacher's outputs: the outputs (B, W). Numbers have no
        temperature.
        """
        return outputs

    def distill(self, target: Tensor, outputs: Tensor, temperature: float = 1.0) -> Tensor:
        """Mean over rows of half the squared error: KL(target || outputs) of two Gaussians of
        variance 1, or with `variance` of their own.
        """
        apart = (target[..., 0] - outputs[..., 0]) ** 2
        if not self.variance:
            return apart.mean() / 2
        of, by = _log_variance(target), _log_variance(outputs)
        return _steady((by - of + (torch.exp(of) + apart) * torch.exp(-by) - 1) / 2, by).mean()

    def distill_gradient(
        self, target: Tensor, outputs: Tensor, temperature: float = 1.0, *, reverse: bool = False
    ) -> Tensor:
        """Gradient (B, W) of `distill` by the outputs, for each row; `reverse`: of KL(outputs ||
        target), which is `distill` with its arguments exchanged.
        """
        apart = outputs[..., :1] - target[..., :1]
        if not self.variance:
            return apart
        of, by = _log_variance(target)[..., None], _log_variance(outputs)[..., None]
        inside = outputs[..., 1:].abs() <= _SPREAD
        if reverse:
            found = torch.cat([apart * torch.exp(-of), (torch.exp(by - of) - 1) / 2 * inside], -1)
            return found * torch.exp(of.clamp(max=0))
        spread = (1 - (torch.exp(of) + apart**2) * torch.exp(-by)) / 2 * inside
        return torch.cat([apart * torch.exp(-by), spread], -1) * torch.exp(by.clamp(max=0))

    def certainty(self, outputs: Tensor) -> Tensor:
        """(...) how sure outputs (..., W) are: the negative entropy of their Gaussians without its
        constant, float64.

        Raises:
            ConfigError: the network says no variance.
        """
        if not self.variance:
            raise ConfigError(
                "confidence in a number needs networks that predict its variance: set "
                "models.variance = true, or weigh answers in another way"
            )
        return -_log_variance(outputs.double()) / 2

    def predicted(self, outputs: Tensor) -> Tensor:
        """(B,) standardized numbers."""
        return outputs[..., 0]


Task: TypeAlias = Classes | Number
"""What is predicted. Both have the same methods; B rows, outputs (B, `width`)."""


def refusal(
    name: str, kind: TaskKind, tasks: Mapping[str, tuple[TaskKind, ...]], reason: str
) -> str:
    """Why the method `name` cannot predict a number or classes, with the methods that can; "" if it
    can. `tasks` are those of all methods by name.
    """
    if kind in tasks[name]:
        return ""
    what = "a number" if kind == "number" else "classes"
    able = ", ".join(other for other, known in tasks.items() if kind in known)
    why = f", as {reason}" if reason else ""
    return f"{name} cannot predict {what}{why}. Methods that can: {able}"


def _log_variance(outputs: Tensor) -> Tensor:
    return outputs[..., 1].clamp(-_SPREAD, _SPREAD)


def _steady(values: Tensor, spread: Tensor) -> Tensor:
    """The values (B,) of Gaussians with log variances `spread` (B,); gradients are times the
    variance if it is below 1.

    The minimum of each row stays (Seitzer et al. 2022, arXiv:2203.09168, with beta = 1). Without it
    a network that is sure of the few rows that it has seen takes steps up to e^10 times as long on
    others, and diverges.
    """
    return values.detach() + (values - values.detach()) * spread.detach().clamp(max=0).exp()
