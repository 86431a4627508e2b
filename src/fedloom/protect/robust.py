"""Robust aggregation: means of n vectors of which f may be arbitrary.

Sources: median and trimmed mean, D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018;
Krum and multi-Krum, P. Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017;
centered clipping, S. P. Karimireddy, L. He, M. Jaggi, "Learning from History for Byzantine Robust
Optimization", ICML 2021.

A rule sees claims, not rows: it weighs all vectors alike, because a row count is a claim too;
`clip` and `centered` can keep weights that the receiver chose itself. Under skewed data an honest
vector may be the outlier, so a rule costs accuracy where nobody lies. All sums are in float64 in
the order of the vectors, so every engine gives the same result.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor

from fedloom.core.message import leaves, map_tensors

Rule: TypeAlias = Literal["mean", "clip", "median", "trimmed", "krum", "multikrum", "centered"]
CENTERED_STEPS: Final = 3
"""Steps of centered clipping in one aggregation."""


def needed(rule: Rule, f: int) -> int:
    """The smallest number of vectors with which a rule withstands f arbitrary ones; 1
    for `mean`.
    """
    return 1 if rule == "mean" else 2 * f + 3 if rule in ("krum", "multikrum") else 2 * f + 1


def combine(
    rows: Tensor,
    rule: Rule,
    *,
    f: int = 1,
    center: Tensor | None = None,
    radius: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The aggregate (d,) of n vectors.

    Args:
        rows: the vectors (n, d), finite.
        rule: how they are combined; with `mean` the uniform mean.
        f: the number of arbitrary vectors to withstand (trimmed, krum, multikrum).
        center: (d,) the starting point of the clients (clip, centered); None for the median of each
            number.
        radius: largest distance from `center` that counts in full (clip, centered); None for the
            median distance.
        weights: (n,) weights that sum to 1 (clip, centered); None for equal ones.

    Raises:
        ValueError: fewer vectors than `needed(rule, f)`.
    """
    n = len(rows)
    if n < needed(rule, f):
        raise ValueError(f"{rule} with f = {f} needs at least {needed(rule, f)} vectors, not {n}")
    x = rows.double()
    if rule == "median":
        return median(x).to(rows.dtype)
    if rule == "trimmed":
        return x.sort(0).values[f : n - f].mean(0).to(rows.dtype)
    if rule in ("krum", "multikrum"):
        order = krum_scores(x, f).argsort(stable=True)  # ties: the first vector
        return x[order[: 1 if rule == "krum" else n - f].sort().values].mean(0).to(rows.dtype)
    if rule in ("clip", "centered"):
        v = median(x) if center is None else center.double()
        for _ in range(1 if rule == "clip" else CENTERED_STEPS):
            moves = clipped(x - v, radius)
            v = v + (moves.mean(0) if weights is None else weights @ moves)
        return v.to(rows.dtype)
    return x.mean(0).to(rows.dtype)


def median(x: Tensor) -> Tensor:
    """The median (d,) of each number of the vectors x (n, d); the mean of the middle two if n is
    even.
    """
    ordered = x.sort(0).values
    return (ordered[(len(x) - 1) // 2] + ordered[len(x) // 2]) / 2


def krum_scores(x: Tensor, f: int) -> Tensor:
    """The scores (n,): the sum of squared distances of each vector to its n - f - 2
    nearest others.
    """
    squared = torch.stack([(x - row).square().sum(1) for row in x])
    return squared.sort(1).values[:, 1 : len(x) - f - 1].sum(1)  # column 0 is the vector itself


def clipped(x: Tensor, radius: float | None) -> Tensor:
    """The vectors (n, d), each shortened to norm `radius`; None: the median of their norms."""
    norms = x.norm(dim=1)
    limit = norms.median() if radius is None else x.new_tensor(radius)
    shrink: Tensor = limit / norms.clamp(min=limit.clamp(min=torch.finfo(x.dtype).tiny))
    return x * shrink[:, None]


def combine_trees(
    trees: Sequence[Any], rule: Rule, *, f: int, center: Any = None, weights: Tensor | None = None
) -> Any:
    """`combine` over trees of tensors of one structure, each taken as one vector; `center` is such
    a tree, too.
    """
    like = trees[0]
    x = torch.stack([flat(tree, like) for tree in trees])
    start = None if center is None else flat(center, like).to(x.device)
    whole = combine(x, rule, f=f, center=start, weights=weights)
    return shaped(whole, like)


def flat(tree: Any, like: Any) -> Tensor:
    """The tensors of a tree as one vector (d,), in the order of `like`."""
    found = dict(leaves(tree))
    return torch.cat([found[name].flatten() for name, _ in leaves(like)])


def shaped(whole: Tensor, like: Any) -> Any:
    """A vector (d,) as a tree of tensors like those of `like`."""
    parts = iter(torch.split(whole, [x.numel() for _, x in leaves(like)]))
    return map_tensors(lambda x: next(parts).view_as(x).to(x.dtype), like)


# -- answers: clients' outputs for the same rows ---------------------------------------------------


def combine_values(values: Tensor, rule: Rule, *, f: int) -> Tensor:
    """The aggregate (...) of clients' numbers (n, ...): each client's are one vector."""
    return combine(values.flatten(1), rule, f=f).view(values.shape[1:])


def combine_logits(logits: Tensor, rule: Rule, *, f: int) -> Tensor:
    """The aggregate (..., K) of clients' logits (n, ..., K).

    A constant in all logits of a row changes no probability, so the rule sees each row without its
    mean over classes; the median of these means is added again.
    """
    x = logits.double()
    level = x.mean(-1, keepdim=True)
    found = combine_values(x - level, rule, f=f) + median(level)
    return found.to(logits.dtype)


def combine_probabilities(probabilities: Tensor, rule: Rule, *, f: int) -> Tensor:
    """The aggregate (..., K) of clients' probabilities (n, ..., K), which sums to 1 over classes.

    A row of which nothing is left, such as the median of labels that all differ, takes the mean,
    which one client moves by 1 / n at most.
    """
    return normalized(combine_values(probabilities, rule, f=f), probabilities.mean(0))


def normalized(found: Tensor, otherwise: Tensor) -> Tensor:
    """Numbers (..., K) without the negative ones, divided by their sum over classes; `otherwise`
    where it is 0.
    """
    found = found.clamp_min(0)
    left = found.sum(-1, keepdim=True)
    return torch.where(left > 0, found / left.clamp_min(torch.finfo(found.dtype).tiny), otherwise)
