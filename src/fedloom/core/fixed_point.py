"""Numbers as integers modulo 2^64: their sum has the same bits in any order, on any engine, with
masks or without.

Tensors of int64 are added as they are: see `Federation.total`.

A number x with |x| <= LARGEST becomes round(x 2^24), an exact integer in float64; a contribution
with weight w has w times these, and w itself, or a weight for each class. The sum of all weights
may be at most `MOST_WEIGHT`, so that no sum leaves the ring.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from fedloom.core._trees import Shape, Template, Tree, join, leaves, zip_tensors
from fedloom.core.errors import MessageError

FRACTION: Final = 24
"""Bits behind the point: a step is 6e-8."""
LARGEST: Final = 2.0**13
"""Numbers beyond ± this are clipped to it."""
MOST_WEIGHT: Final = 2**26
"""Limit of the sum of all weights: 2^26 times 2^13 times 2^24 is 2^63."""

NOT_WHOLE: Final = "a total is of int64 tensors alone"
LEAST: Final = 3
"""The minimum number of parties in a sum that hides their contributions: a sum of two reveals to
each the other's.
"""


def threshold(n: int, colluders: int = 0) -> int:
    """The number of the n parties that must stay to the end of a secure sum: more than two thirds,
    and more than half of them besides the `colluders`, who may sign and open whatever the
    coordinator wants.
    """
    return max(LEAST, 2 * n // 3 + 1, n // 2 + colluders + 1)


def encoded(reply: Any, weight: str | None, parties: int) -> np.ndarray:
    """The integers (d + k,) uint64 of a contribution: its numbers times its weight, by name, then
    the weight.

    Args:
        reply: a tree of finite tensors of floats, besides the weight; or, without a weight, of
            int64.
        weight: the name of its weight, a whole number such as `rows`, or whole numbers (k,) by
            class, each of which weighs the numbers of its class in tensors (k, ...); None for 1.
        parties: the maximum number of contributions to the sum; each may have an equal share of
            `MOST_WEIGHT`.

    Raises:
        MessageError: a weight is negative or too large, or a tensor is of neither.
    """
    w = (
        np.array([1])
        if weight is None
        else torch.as_tensor(reply[weight]).cpu().numpy().astype(np.int64).reshape(-1)
    )
    if w.min(initial=0) < 0 or w.max(initial=0) > MOST_WEIGHT // parties:
        raise MessageError(
            f"a weight must be 0 to {MOST_WEIGHT // parties} in a sum of {parties}, not "
            f"{w.tolist()}"
        )
    numbers = [np.empty(0, dtype=np.int64)]
    for path, x in _summed(reply, weight):
        if isinstance(x, Tensor) and x.dtype == torch.int64 and weight is None:
            numbers.append(x.detach().cpu().flatten().numpy())
            continue
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise MessageError(f"{path} must be a tensor of floats to be summed")
        clipped = x.detach().cpu().double().flatten().clamp(-LARGEST, LARGEST)
        numbers.append(
            (clipped * 2.0**FRACTION).round().to(torch.int64).numpy() * _spread(w, x.numel())
        )
    return np.append(np.concatenate(numbers), w).view(np.uint64)


def decoded(total: np.ndarray, like: Template, weight: str | None) -> tuple[Any, Any]:
    """The sum of all weights, and the weighted mean as a float32 tree without the weight.

    Args:
        total: the sum (d + k,) uint64 of contributions.
        like: the template of a reply; every dimension must be known.
        weight: the name of the weight.

    Returns:
        The sum of the weights, a number or a tensor (k,) int64; and the mean, which is 0 for a
        class without a weight.

    Raises:
        MessageError: the sum does not have the template's size, or all weights are 0.
    """
    if any(
        isinstance(x, Shape | Tensor) and x.dtype == torch.int64 for _, x in _summed(like, weight)
    ):
        raise MessageError("integers have a total, not a mean: call fed.total")
    whole, k = total.view(np.int64), weight_count(like, weight)
    if len(whole) != size(like, weight) or not (whole[-k:] >= 0).all() or not whole[-k:].any():
        raise MessageError("a sum must have the template's size and a weight above 0")
    w, parts, start = whole[-k:], [], 0
    for _, leaf in _summed(like, weight):
        numbers = whole[start : start + (count := _count(leaf))].astype(np.float64)
        parts.append(
            torch.from_numpy(numbers / (_spread(w, count).clip(1) * 2.0**FRACTION)).float()
        )
        start += count
    tree: Any = like
    scalar = weight is None or not _dims(tree[weight])
    return (int(w[0]) if scalar else torch.from_numpy(w.copy())), _filled(like, weight, iter(parts))


def totaled(total: np.ndarray, like: Template) -> Any:
    """The sum of replies as a tree of int64 tensors; arguments as in `decoded`.

    Raises:
        MessageError: the sum does not have the template's size, or a tensor is not of int64.
    """
    if any(getattr(x, "dtype", None) != torch.int64 for _, x in _summed(like, None)):
        raise MessageError(NOT_WHOLE)
    if len(total) != size(like, None):
        raise MessageError("a sum must have the template's size")
    whole = torch.from_numpy(total[:-1].view(np.int64))
    return _filled(
        like, None, iter(torch.split(whole, [_count(x) for _, x in _summed(like, None)]))
    )


def added(replies: Sequence[Tree]) -> Any:
    """The sum of replies as a tree of int64 tensors, modulo 2^64.

    Raises:
        MessageError: a tensor is not of int64.
    """
    if any(getattr(x, "dtype", None) != torch.int64 for _, x in leaves(replies[0])):
        raise MessageError(NOT_WHOLE)
    return (
        replies[0]
        if len(replies) == 1
        else zip_tensors(lambda each: torch.stack(each).sum(0), replies)
    )


def size(like: Template, weight: str | None) -> int:
    """The number d + k of integers of a contribution.

    Raises:
        MessageError: a dimension is unknown.
    """
    return weight_count(like, weight) + sum(_count(x) for _, x in _summed(like, weight))


def weight_count(like: Any, weight: str | None) -> int:
    """The number k of weights of a contribution."""
    if weight is None:
        return 1
    if not isinstance(like, Mapping) or weight not in like:
        raise MessageError(f"the template of a sum has no weight {weight!a}")
    return _count(like[weight])


def _spread(w: np.ndarray, count: int) -> np.ndarray:
    """The weight of each of `count` numbers, from weights (k,) of as many equal parts of them."""
    if count % len(w):
        raise MessageError(f"{count} numbers have no means by {len(w)} classes")
    return np.repeat(w, count // len(w))


def _summed(tree: Any, weight: str | None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf besides the weight, with its path; the entries of a dict by name, in whatever order
    they were made.
    """
    if isinstance(tree, Mapping):
        for key in sorted(tree):
            if key != weight:
                yield from _summed(tree[key], None, join(path, key))
    elif isinstance(tree, list | tuple):
        for k, child in enumerate(tree):
            yield from _summed(child, None, f"{path}[{k}]")
    else:
        yield path, tree


def _dims(leaf: Any) -> Sequence[int]:
    dims = (
        leaf.dims
        if isinstance(leaf, Shape)
        else tuple(leaf.shape)
        if isinstance(leaf, Tensor)
        else (None,)
    )
    if None in dims:
        raise MessageError("the template of a sum must give every dimension of its tensors")
    return [int(n) for n in dims]  # type: ignore[arg-type]


def _count(leaf: Any) -> int:
    return int(np.prod(_dims(leaf), dtype=np.int64))


def _filled(like: Any, weight: str | None, parts: Iterator[Tensor]) -> Any:
    if isinstance(like, Mapping):
        found = {key: _filled(like[key], None, parts) for key in sorted(like) if key != weight}
        return {key: found[key] for key in like if key in found}
    if isinstance(like, list | tuple):
        return [_filled(leaf, None, parts) for leaf in like]
    return next(parts).reshape(_dims(like)).clone()
