"""What the networks of this package share: body and head, and their normalisation.

By convention a network here answers `features(x)`, the input `(B, d)` of its last layer, and has that
layer as `head`, an `nn.Linear`; its output is `head(features(x))`. Methods that share a body, fit a
head or compare prototypes need no more than this, so any module with the two names will do.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor, nn

Norm = Literal["group", "batch", "none"]
MOST_GROUPS = 8


class HasHead(Protocol):
    """A network in two parts: `(B, ...)` → features `(B, d)` → logits `(B, K)`."""

    @property
    def head(self) -> nn.Linear:
        """The last layer."""

    def features(self, x: Tensor) -> Tensor:
        """The input `(B, d)` of the last layer."""

    def __call__(self, x: Tensor) -> Tensor:
        """Logits `(B, K)`."""


class Classifier(nn.Module):
    """A body and a linear head, which is all that the networks here differ in."""

    channels_last = True
    """It works in this memory format as well, which is faster on a CPU: see `fedloom.core.network`."""

    def __init__(self, body: nn.Module, width: int, classes: int) -> None:
        """`body` maps `(B, ...)` to `(B, width)`."""
        super().__init__()
        self.body = body
        self.head = nn.Linear(width, classes)

    def features(self, x: Tensor) -> Tensor:
        """The input `(B, d)` of the last layer."""
        out: Tensor = self.body(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(B, K)`."""
        out: Tensor = self.head(self.body(x))
        return out


def conv(inputs: int, outputs: int, kernel: int, norm: Norm, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the size, save by its stride.

    It has a bias only where no normalisation follows, which would take the bias out again.
    """
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=norm == "none")


def normalise(norm: Norm, channels: int, dims: Literal[1, 2] = 2) -> nn.Module:
    """The layer that normalises `(B, channels)` for `dims` 1, or `(B, channels, H, W)` for 2."""
    if norm == "group":
        return nn.GroupNorm(groups(channels), channels)
    if norm == "batch":
        return nn.BatchNorm1d(channels) if dims == 1 else nn.BatchNorm2d(channels)
    return nn.Identity()


def groups(channels: int) -> int:
    """The number of GroupNorm's groups: the largest divisor of `channels` that is at most 8.

    Each group has two channels or more: a group of one value, as a 1x1 image has, would be all 0.
    """
    most = max(1, min(MOST_GROUPS, channels // 2))
    return next(g for g in range(most, 0, -1) if channels % g == 0)
