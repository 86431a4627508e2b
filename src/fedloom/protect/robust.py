"""Robust aggregation: means of n vectors of which f may be arbitrary.

Sources: median and trimmed mean, D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018; Krum and
multi-Krum, P. Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017; centered clipping, S. P.
Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021.

A rule sees claims, not rows: it weighs all vectors alike, because a row count is a claim too. Under skewed data an
honest vector may be the outlier, so a rule costs accuracy where nobody lies. All sums are in float64 in the order of
the vectors, so every engine gives the same result.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias

import torch
from torch import Tensor

Rule: TypeAlias = Literal["none", "clip", "median", "trimmed", "krum", "multikrum", "centered"]
CENTERED_STEPS: Final = 3
"""Steps of centered clipping in one aggregation."""


def needed(rule: Rule, f: int) -> int:
    """The smallest number of vectors with which a rule withstands f arbitrary ones; 1 for `none`."""
    return 1 if rule == "none" else 2 * f + 3 if rule in ("krum", "multikrum") else 2 * f + 1


def combine(rows: Tensor, rule: Rule, *, f: int = 1, center: Tensor, radius: float | None = None) -> Tensor:
    """The aggregate (d,) of n vectors.

    Args:
        rows: the vectors (n, d), finite.
        rule: how they are combined; with `none` the uniform mean.
        f: the number of arbitrary vectors to withstand (trimmed, krum, multikrum).
        center: (d,) what the clients started from (clip, centered).
        radius: largest distance from `center` that counts in full (clip, centered); None for the median distance.

    Raises:
        ValueError: fewer vectors than `needed(rule, f)`.
    """
    n = len(rows)
    if n < needed(rule, f):
        raise ValueError(f"{rule} with f = {f} needs at least {needed(rule, f)} vectors, not {n}")
    x = rows.double()
    if rule == "median":
        ordered = x.sort(0).values
        return ((ordered[(n - 1) // 2] + ordered[n // 2]) / 2).to(rows.dtype)
    if rule == "trimmed":
        return x.sort(0).values[f : n - f].mean(0).to(rows.dtype)
    if rule in ("krum", "multikrum"):
        order = krum_scores(x, f).argsort(stable=True)  # ties: the first vector
        return x[order[: 1 if rule == "krum" else n - f].sort().values].mean(0).to(rows.dtype)
    if rule in ("clip", "centered"):
        v = center.double()
        for _ in range(1 if rule == "clip" else CENTERED_STEPS):
            v = v + clipped(x - v, radius).mean(0)
        return v.to(rows.dtype)
    return x.mean(0).to(rows.dtype)


def krum_scores(x: Tensor, f: int) -> Tensor:
    """The scores (n,): the sum of squared distances of each vector to its n - f - 2 nearest others."""
    squared = torch.stack([(x - row).square().sum(1) for row in x])
    return squared.sort(1).values[:, 1 : len(x) - f - 1].sum(1)  # column 0 is the vector itself


def clipped(x: Tensor, radius: float | None) -> Tensor:
    """The vectors (n, d), each shortened to norm `radius`; None: the median of their norms."""
    norms = x.norm(dim=1)
    limit = norms.median() if radius is None else x.new_tensor(radius)
    shrink: Tensor = limit / norms.clamp(min=limit.clamp(min=torch.finfo(x.dtype).tiny))
    return x * shrink[:, None]


def combine_trees(
    trees: Sequence[Mapping[str, Tensor]], rule: Rule, *, f: int, center: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """`combine` over trees of named tensors of equal names and shapes, each taken as one vector."""
    names = list(center)
    flat = torch.stack([torch.cat([tree[k].flatten() for k in names]) for tree in trees])
    whole = combine(flat, rule, f=f, center=torch.cat([center[k].flatten() for k in names]))
    parts = torch.split(whole, [center[k].numel() for k in names])
    return {k: part.view_as(center[k]) for k, part in zip(names, parts, strict=True)}
