"""What methods have in common whose model is adapted by a few gradient steps before use.

A client's rows come in two halves. Adapting a model means full-batch steps on its support half, at one rate for every
method that is compared, at clients that took part in the training and at those that never did:

    φ = θ - α ∇L(θ, D^s)

L is cross-entropy, unless a page trains on a loss of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, TypeAlias, TypeVar

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.message import Tree
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party

Hessian: TypeAlias = Literal["exact", "fd", "fd_normalised", "first_order"]
"""How a Hessian-vector product is had: exactly, by a second pass back through the graph of the gradient; by a central
difference of gradients along the vector, or along its direction (each pass of a network with dropout then drops units
of its own); or not at all, as if it were 0."""


class AdapterConfig(MethodConfig):
    """How a client adapts what it is given."""

    alpha: float = Field(0.03, ge=0)
    """Rate of a step of adaptation (α)."""
    adapt_steps: tuple[int, ...] = ()
    """After how many steps of adaptation on its support half a client's own accuracy is measured; the first counts."""
    batchnorm: Literal["own", "batch"] = "own"
    """BatchNorm's statistics, which never leave a client: `own` predicts with those that its passes have left, as is
    usual. `batch` predicts with those of the rows asked about, so that an answer depends on the others."""

    @field_validator("adapt_steps")
    @classmethod
    def _different(cls, steps: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(steps)) < len(steps) or min(steps, default=0) < 0:
            raise ValueError("adapt_steps must be different numbers from 0, such as [1, 5, 0]")
        return steps

    @property
    def ways(self) -> tuple[str, ...]:
        """After each number of steps."""
        return tuple(map(after, self.adapt_steps))

    def steps_of(self, way: str) -> int:
        """How many steps a way of evaluation has."""
        return next((n for n in self.adapt_steps if after(n) == way), 0)


class MetaConfig(AdapterConfig):
    """What the methods of the family `meta` have in common."""

    adapt_steps: tuple[int, ...] = (1, 5, 0)
    """After how many steps of adaptation on its support half a client's own accuracy is measured; the first counts."""
    clients_per_round: int | None = Field(None, ge=1)
    """Participants of a round; None for all."""


ConfigT = TypeVar("ConfigT", bound=AdapterConfig)


class Adapter(Party[ConfigT]):
    """A client whose model is adapted. Pages subclass it, and give it a network in `setup`."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt")

    def loss_of(self, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """Mean cross-entropy () on x (n, ...), y (n,), where each row has a share `weight` (n,) in the mean."""
        return (F.cross_entropy(self.model(x), y, reduction="none") * weight).sum()

    def meta_gradient(self, weights: Mapping[str, Tensor], hvp: Hessian, delta: float) -> dict[str, Tensor]:
        """The gradient by name of L(θ - α ∇L(θ, D^s), D^q) at θ = `weights`: r - α ∇²L(θ, D^s) r.

        In gradient evaluations it costs 4 by differences, 2 in first order, and exactly 2 and a pass back through the
        graph of the first one.

        Args:
            weights: θ.
            hvp: how ∇²L(θ, D^s) r is had.
            delta: how far apart gradients are taken, for the differences.
        """
        alpha, support = self.cfg.alpha, self.site.support
        product = None
        if hvp == "exact":
            _, s, product = self.curvature_at(weights, self.loss_of, *support)
        else:
            _, s = self.gradient_at(weights, self.loss_of, *support)
        phi = {k: w.sub(s[k], alpha=alpha) for k, w in weights.items()}
        _, r = self.gradient_at(phi, self.loss_of, *self.site.query)
        if hvp == "first_order":
            return r
        g = product(r) if product else self._difference(weights, r, delta, unit=hvp == "fd_normalised")
        return {k: r[k].sub(g[k], alpha=alpha) for k in r}

    def _difference(
        self, weights: Mapping[str, Tensor], r: Mapping[str, Tensor], delta: float, *, unit: bool
    ) -> dict[str, Tensor]:
        """[∇L(θ + δ r, D^s) - ∇L(θ - δ r, D^s)] / 2δ, with δ over the norm of r if `unit`."""
        length = torch.stack([x.square().sum() for x in r.values()]).sum().sqrt().clamp_min(1e-12) if unit else 1.0
        step, support = delta / length, self.site.support

        def moved(sign: int) -> dict[str, Tensor]:
            at = {k: w + sign * step * r[k] for k, w in weights.items()}
            return self.gradient_at(at, self.loss_of, *support)[1]

        ahead, behind = moved(1), moved(-1)
        return {k: (ahead[k] - behind[k]) / (2 * step) for k in r}

    def adapt(self, steps: int) -> None:
        """So many full-batch steps on the support half."""
        self.descend_on(steps, self.loss_of, *self.site.support)

    def descend_on(self, steps: int, loss: Callable[..., Tensor], *batch: object) -> None:
        """So many steps of plain gradient descent at rate α on `loss(*batch)`."""
        for _ in range(steps):
            _, gradient = self.gradient(loss, *batch)
            self.params = {k: w.sub(gradient[k], alpha=self.cfg.alpha) for k, w in self.params.items()}

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take over weights by name; those that are not named stay."""
        self.params = {**self.params, **weights}

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """Before an evaluation: take the server's weights, if there is one, and adapt them."""
        if handout:
            self.adopt(handout)  # type: ignore[arg-type]
        self.adapt(self.cfg.steps_of(way))


def after(steps: int) -> str:
    """What the evaluation after so many steps is called."""
    return f"{steps} step" if steps == 1 else f"{steps} steps"
