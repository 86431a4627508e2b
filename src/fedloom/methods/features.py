"""A network's features, the input (B, d) of its last layer, and means of them by class."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import ModelError, Party


class Features(nn.Module):
    """A network that outputs its features (B, d) instead of logits; `linear` applies its last layer
    separately.

    Raises:
        ModelError: the network has no `features` or no linear `head`.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = with_features_and_head(network)
        self.channels_last = getattr(network, "channels_last", False)

    @property
    def width(self) -> int:
        """d."""
        return int(self.network.head.in_features)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, d)."""
        out: Tensor = self.network.features(x)
        return out


HEAD = "network.head"
"""Name of the last layer within `Features`."""


def with_features_and_head(network: nn.Module) -> nn.Module:
    """The network, if it has a method `features` and a linear layer `head`.

    Raises:
        ModelError: it lacks one of them.
    """
    if not callable(getattr(network, "features", None)) or not isinstance(
        getattr(network, "head", None), nn.Linear
    ):
        raise ModelError(
            f"this method needs a network's features, but {type(network).__name__} has no method "
            "`features` or no linear layer `head`: choose another network, such as cnn-small"
        )
    return network


def linear(f: Tensor, weights: Mapping[str, Tensor], name: str = HEAD) -> Tensor:
    """Apply the linear layer of this name to f (n, d); outputs (n, K)."""
    return F.linear(f, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def class_means(
    f: Tensor, y: Tensor, classes: int, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean (K, d) and number (K,) int64 of the rows f (n, d) of each class y (n,); the mean of an
    empty class is 0.

    Rows with `weight` (n,) 0 are padding that an engine added, and are ignored.
    """
    members = y[:, None] == torch.arange(classes, device=y.device)
    if weight is not None:
        members = members & (weight > 0)[:, None]
    counts = members.sum(0)
    return members.to(f).T @ f / counts.clamp(min=1)[:, None], counts


def mask_unknown(scores: Tensor, known: Tensor) -> Tensor:
    """Scores (n, K) in which classes that are not `known` (K,) rank last in every row."""
    return torch.where(known, scores, scores.amin(-1, keepdim=True) - 1)


def gradient_variance(party: Party[object], loss: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """E|g - E g|² () of the gradient g of a mean `loss(*batch)` over B rows, in all weights of the
    party's network.

    Proofs of convergence assume that it is bounded. It is a quarter of the squared distance between
    the gradients of the batch's halves, as each of these varies twice as much as g. Unbiased for
    rows that are drawn independently. The network does not change.
    """
    half = len(batch[0]) // 2
    with party.scratch():
        _, a = party.gradient(loss, *(x[:half] for x in batch))
        _, b = party.gradient(loss, *(x[half : 2 * half] for x in batch))
    return torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum() / 4


def infer(party: Party[object], x: Tensor) -> Tensor:
    """Outputs (n, ...) of the party's network in evaluation mode."""
    return Party.infer(party, x)
