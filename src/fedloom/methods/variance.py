"""How much a gradient varies from batch to batch: what proofs of convergence assume a bound of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedloom.core.party import Party


def variance(party: Party[Any], loss: Callable[..., Tensor], *batch: Tensor) -> Tensor:
    """E|g - E g|² () of the gradient g of a mean `loss(*batch)` over B rows, in all weights of the party's network.

    It is a quarter of the squared distance between the gradients of the batch's halves, as each of these varies twice
    as much as g. Unbiased for rows that are drawn independently. The network stays what it is.
    """
    half = len(batch[0]) // 2
    with party.scratch():
        _, a = party.gradient(loss, *(x[:half] for x in batch))
        _, b = party.gradient(loss, *(x[half : 2 * half] for x in batch))
    return torch.stack([(a[name] - b[name]).square().sum() for name in a]).sum() / 4
