"""Mean embeddings: a client's rows as one vector of fixed length, which can be released once with
noise.

Random Fourier features φ(x) (D,) of length 1 approximate a Gaussian kernel, ⟨φ(x), φ(y)⟩ ≈ exp(-|x
- y|² / 2h²), so the mean μ of φ over a client's rows is a density estimate: ⟨φ(x), μ⟩ is large
where the client has rows near x. Replacing one of n rows moves μ by at most 2 / n, whatever D is.
Sources: A. Rahimi, B. Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007; F.
    Harder, K. Adamczewski, M. Park, "DP-MERF", AISTATS 2021.
"""

import math

import numpy as np
import torch
from torch import Tensor

from fedloom.protect.noise import Draws


def frequencies(inputs: int, size: int, width: float, rng: np.random.Generator) -> Tensor:
    """ω (size / 2, inputs) float64 of the features for a kernel of this width h, from a generator
    that all share.
    """
    return torch.from_numpy(rng.standard_normal((size // 2, inputs))) / width


def features(x: Tensor, omega: Tensor) -> Tensor:
    """φ (n, D) float64 of rows x (n, d); each row has length 1."""
    angles = x.double() @ omega.T
    return torch.cat([angles.cos(), angles.sin()], 1) / math.sqrt(len(omega))


def mean_embedding(x: Tensor, omega: Tensor) -> Tensor:
    """μ (D,) float64: the mean of φ over rows x (n, d)."""
    return features(x, omega).mean(0)


def private_mean(mean: Tensor, rows: int, multiplier: float, draws: Draws) -> Tensor:
    """μ (D,) of this many rows with Gaussian noise of standard deviation `multiplier` times its
    sensitivity, 2 / rows.

    Adjacent data sets differ in one row that is replaced; the number of rows is public.
    """
    return draws.blur(mean, multiplier * 2 / rows, 2 / rows)
