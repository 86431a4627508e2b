"""The parts that the networks of this package share: body, head, and normalization.

By convention a network has a method `features(x)`, the input `(B, d)` of its last layer, and has
that layer as `head`, an `nn.Linear`; its output is `head(features(x))`. Methods that share a body,
fit a head or compare prototypes accept any module with these two names.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

Norm = Literal["group", "batch", "none"]
MAX_GROUPS = 8


class Classifier(nn.Module):
    """A body and a linear head; the networks of this package differ only in these."""

    channels_last = True
    """It supports this memory format, which is faster on a CPU: see `fedloom.core.network`."""

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
    """A convolution that keeps the size, except for its stride.

    It has a bias only if no normalization follows, which would remove the bias.
    """
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=norm == "none")


def normalize(norm: Norm, channels: int, dims: Literal[1, 2] = 2) -> nn.Module:
    """The layer that normalizes `(B, channels)` for `dims` 1, or `(B, channels, H, W)` for 2."""
    if norm == "group":
        return nn.GroupNorm(norm_groups(channels), channels)
    if norm == "batch":
        return nn.BatchNorm1d(channels) if dims == 1 else nn.BatchNorm2d(channels)
    return nn.Identity()


def norm_groups(channels: int) -> int:
    """The number of GroupNorm's groups: the largest divisor of `channels` that is at most 8.

    Each group has at least two channels: one channel of a 1x1 image would always be normalized to
    0.
    """
    most = max(1, min(MAX_GROUPS, channels // 2))
    return next(g for g in range(most, 0, -1) if channels % g == 0)


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Within it torch's CPU generator is seeded, unless the seed is None. Generators of other
    devices do not change.
    """
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
