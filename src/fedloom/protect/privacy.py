"""Clipping and Gaussian noise, and the differential privacy that they give.

The accountant is Rényi's: I. Mironov, "Rényi Differential Privacy", CSF 2017; its conversion to (ε, δ) is that of
B. Balle et al., "Hypothesis Testing Interpretations and Renyi Differential Privacy", AISTATS 2020, Theorem 21.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 257), *(2.0**k for k in range(9, 21)))
"""Rényi orders that are tried."""


def clipped_tree(tree: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """The tensors of a message, scaled to a joint L2 norm of at most `most`; a shorter one is unchanged."""
    norm = torch.stack([x.norm() for x in tree.values()]).norm()
    return {k: x * (most / norm.clamp_min(most)) for k, x in tree.items()}


def noisy(x: Tensor, sigma: float, rng: np.random.Generator) -> Tensor:
    """`x` with independent Gaussian noise of standard deviation `sigma`."""
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32))
    return x + sigma * noise.to(x.device, x.dtype)


def epsilon(multiplier: float, releases: int, delta: float) -> float:
    """ε of (ε, δ)-differential privacy after `releases` Gaussian releases, without subsampling.

    Args:
        multiplier: noise multiplier: standard deviation of the noise over the sensitivity; > 0.
        releases: their number; the same row may be in all.
        delta: δ in (0, 1).

    Returns:
        The smallest ε that the tried orders prove; 0 for no release.
    """
    if not releases:
        return 0.0
    # One release has the Rényi divergence α / 2σ²; divergences of several add up.
    best = math.inf
    for order in ORDERS:
        divergence = releases * order / (2 * multiplier**2)
        bound = divergence + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
        best = min(best, bound)
    return max(best, 0.0)
