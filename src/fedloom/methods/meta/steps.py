"""Steps that methods of this family share: the gradient of a loss after adaptation."""

from collections.abc import Mapping
from functools import partial
from typing import Literal, TypeAlias

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import MethodConfig, Party
from fedloom.methods.settings import Adaptation
from fedloom.methods.steps import AdaptSteps, eval_modes, weighted_loss

Hessian: TypeAlias = Literal["exact", "fd", "fd_normalized", "first_order"]
"""How a Hessian-vector product is computed: exactly, by a second backward pass; by a central
difference of gradients along the vector (`fd`) or along its direction (`fd_normalized`), where each
pass draws its own dropout mask; or omitted (`first_order`).
"""


class MetaConfig(MethodConfig):
    """Adaptation and participation in the methods of the family `meta`."""

    alpha: float = Field(0.03, ge=0)
    """Step size of adaptation (α)."""
    adapt_steps: AdaptSteps = (1, 5, 0)
    """Numbers of adaptation steps on the support half after which clients are evaluated; the first
    is reported.
    """
    batchnorm: Literal["own", "batch"] = "own"
    """BatchNorm statistics for prediction, which never leave a client: `own` takes its running
    statistics, as usual; `batch` takes those of the rows to predict, so that a prediction depends
    on the other rows.
    """
    clients_per_round: int | None = Field(None, ge=1)
    """Number of participants in a round; None for all clients."""

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """After each number of adaptation steps."""
        return eval_modes(self.adapt_steps)


def norm_of(weights: Mapping[str, Tensor]) -> Tensor:
    """Joint L2 norm () of all tensors."""
    return torch.stack([x.square().sum() for x in weights.values()]).sum().sqrt()


def meta_gradient(
    party: Party[Adaptation], weights: Mapping[str, Tensor], hvp: Hessian, delta: float
) -> dict[str, Tensor]:
    """The gradient by name of L(θ - α ∇L(θ, D^s), D^q) at θ = `weights`: r - α ∇²L(θ, D^s) r.

    L is `weighted_loss`, D^s and D^q are the support and the query half. The cost in gradient
    evaluations is 4 by differences, 2 in first order, and 2 plus a second backward pass if exact.

    Args:
        party: the party, with its network and both halves.
        weights: θ.
        hvp: how ∇²L(θ, D^s) r is computed.
        delta: distance of the two gradients of a difference (δ).
    """
    loss, alpha, support = partial(weighted_loss, party), party.cfg.alpha, party.context.support
    product = None
    if hvp == "exact":
        _, s, product = party.curvature_at(weights, loss, *support)
    else:
        _, s = party.gradient_at(weights, loss, *support)
    phi = {k: w.sub(s[k], alpha=alpha) for k, w in weights.items()}
    _, r = party.gradient_at(phi, loss, *party.context.query)
    if hvp == "first_order":
        return r
    g = (
        product(r)
        if product
        else hvp_by_difference(party, weights, r, delta, unit=hvp == "fd_normalized")
    )
    return {k: r[k].sub(g[k], alpha=alpha) for k in r}


def hvp_by_difference(
    party: Party[object],
    weights: Mapping[str, Tensor],
    r: Mapping[str, Tensor],
    delta: float,
    *,
    unit: bool,
) -> dict[str, Tensor]:
    """[∇L(θ + δ r, D^s) - ∇L(θ - δ r, D^s)] / 2δ by name at θ = `weights`, with δ over the norm of
    r if `unit`.
    """
    loss = partial(weighted_loss, party)
    step = delta / (norm_of(r).clamp_min(1e-12) if unit else 1.0)
    ahead, behind = (
        party.gradient_at(
            {k: w + sign * step * r[k] for k, w in weights.items()}, loss, *party.context.support
        )[1]
        for sign in (1, -1)
    )
    return {k: (ahead[k] - behind[k]) / (2 * step) for k in r}
