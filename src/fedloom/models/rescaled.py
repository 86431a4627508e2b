"""A network whose inputs are standardized differently from its training."""

from typing import Any

import torch
from torch import Tensor, nn

Level = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of each channel or column: a network receives (value - mean) / std.
"""


class Rescaled(nn.Module):
    """`net` for inputs of another standardization."""

    factor: Tensor
    offset: Tensor

    def __init__(self, net: nn.Module, given: Level, wanted: Level, dims: int) -> None:
        """`given` is the standardization of the inputs, `wanted` that of training; an input has
        `dims` dimensions.
        """
        super().__init__()
        self.net: Any = net
        (shift, scale), (own_shift, own_scale) = (
            torch.tensor(level, dtype=torch.float64) for level in (given, wanted)
        )
        form = (-1, *[1] * (dims - 1))
        factor, offset = scale / own_scale, (shift - own_shift) / own_scale
        self.register_buffer("factor", factor.float().view(form), persistent=False)
        self.register_buffer("offset", offset.float().view(form), persistent=False)

    @property
    def head(self) -> nn.Linear:
        """The last layer."""
        head: nn.Linear = self.net.head
        return head

    def features(self, x: Tensor) -> Tensor:
        """The input `(B, d)` of the last layer."""
        out: Tensor = self.net.features(x * self.factor + self.offset)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(B, K)`."""
        out: Tensor = self.net(x * self.factor + self.offset)
        return out
