"""What methods share that look at a network's features, the input of its last layer: (B, ...) to (B, d)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import ModelError


class Features(nn.Module):
    """A network in two parts, which answers with its features (B, d). Pages put what they need beside it.

    Its last layer takes no part in a pass: `linear` applies it, to the weights of the moment.

    Raises:
        ModelError: the network is not in two parts.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = in_two_parts(network)
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
"""What the last layer is called within `Features`."""


def in_two_parts(network: nn.Module) -> nn.Module:
    """The network, or an error if it does not tell its features from its last layer."""
    if not callable(getattr(network, "features", None)) or not isinstance(getattr(network, "head", None), nn.Linear):
        raise ModelError(
            f"this method needs a network's features, but {type(network).__name__} has no method `features` or no "
            "linear layer `head`: take another network, such as cnn-small"
        )
    return network


def linear(f: Tensor, weights: Mapping[str, Tensor], name: str = HEAD) -> Tensor:
    """The outputs (n, K) of a linear layer of this name for f (n, d)."""
    return F.linear(f, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def class_means(f: Tensor, y: Tensor, weight: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean (K, d) of the rows f (n, d) of each class y (n,), 0 where there are none, and their numbers (K,) int64.

    Rows of weight (n,) 0 do not count: an engine has put them in to fill up.
    """
    members = (y[:, None] == torch.arange(classes, device=y.device)) & (weight > 0)[:, None]
    counts = members.sum(0)
    return members.to(f).T @ f / counts.clamp(min=1)[:, None], counts


def behind(scores: Tensor, known: Tensor) -> Tensor:
    """Scores (n, K) in which the classes that are not `known` (K,) stand behind all others of their row."""
    return torch.where(known, scores, scores.amin(-1, keepdim=True) - 1)
