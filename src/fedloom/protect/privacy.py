"""Clipping, and noise that has no (ε, δ) of its own: see `accountant` and `noise` for noise that has."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def clipped_tree(tree: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """The tensors of a message, scaled to a joint L2 norm of at most `most`; a shorter one is unchanged."""
    norm = torch.stack([x.norm() for x in tree.values()]).norm()
    return {k: x * (most / norm.clamp_min(most)) for k, x in tree.items()}


def noisy(x: Tensor, sigma: float, rng: np.random.Generator) -> Tensor:
    """`x` with independent Gaussian noise of standard deviation `sigma`."""
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32))
    return x + sigma * noise.to(x.device, x.dtype)


def clipping(each: Tensor, most: float) -> Tensor:
    """The factors (n,) that shorten vectors (n, d) to norm `most`; 0 for one that is not finite."""
    norms = each.norm(dim=1)
    return torch.where(norms.isfinite(), most / norms.clamp_min(most), 0.0)
