"""Clipping, and noise that has no (ε, δ) of its own: see `accountant` and `noise` for noise that
has.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def clipped_tree(tree: Mapping[str, Tensor], most: float) -> dict[str, Tensor]:
    """The tensors of a message, scaled to a joint L2 norm of at most `most`; a shorter one is
    unchanged.
    """
    norm = torch.stack([x.norm() for x in tree.values()]).norm()
    return {k: x * (most / norm.clamp_min(most)) for k, x in tree.items()}


def clipped_rows(each: Tensor, most: float) -> Tensor:
    """Vectors (n, d), each shortened to norm `most`; a shorter one is unchanged, one that is not
    finite becomes zeros.

    It is chosen, not multiplied by 0, as 0 times infinity is NaN, and a NaN in the sum would tell
    of the row.
    """
    norm = torch.linalg.vector_norm(each, dim=1, keepdim=True)
    return torch.where(norm.isfinite(), each * (most / norm.clamp_min(most)), 0.0)


def noisy(x: Tensor, sigma: float, rng: np.random.Generator) -> Tensor:
    """`x` with independent Gaussian noise of standard deviation `sigma`."""
    noise = torch.from_numpy(rng.standard_normal(tuple(x.shape), dtype=np.float32))
    return x + sigma * noise.to(x.device, x.dtype)
