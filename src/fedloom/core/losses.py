"""Losses and their gradients in the logits: pure functions, B rows, K classes.

A gradient "per row" is the gradient of the row's own loss; divide by B for the gradient of the
batch mean.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def kl(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Mean over rows of KL(target || softmax(logits / temperature)), in nats.

    Args:
        target: (B, K) probabilities, a constant.
        logits: (B, K).
        temperature: E > 0. The loss is not multiplied by E².
    """
    return F.kl_div(F.log_softmax(logits / temperature, -1), target, reduction="batchmean")


def kl_gradient(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Gradient (B, K) per row of KL(target || p), p = softmax(logits / E): (p - target) / E."""
    return (F.softmax(logits / temperature, -1) - target) / temperature


def reverse_kl_gradient(target: Tensor, logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Gradient (B, K) per row of KL(p || target): p (log p/target - KL) / E."""
    log_p = F.log_softmax(logits / temperature, -1)
    ratio = log_p - target.clamp_min(torch.finfo(target.dtype).tiny).log()
    p = log_p.exp()
    return p * (ratio - (p * ratio).sum(-1, keepdim=True)) / temperature


def cap_rows(gradient: Tensor, cap: float) -> Tensor:
    """Rows (B, K) scaled down to an L2 norm of at most `cap`; shorter rows stay as they are."""
    norm: Tensor = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (cap / norm.clamp_min(cap))
