"""Trees of named tensors and plain numbers. Import the public names from `fedloom.core.message`,
which adds encoding.

A path names a node of a tree: `reply.weights[3]`. The root's path is empty.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeAlias, Union

import torch
from torch import Tensor

from fedloom.core.errors import MessageError

Leaf: TypeAlias = bool | int | float | str | Tensor | None

# The containers are list, tuple (which arrives as a list) and dict with str keys, and nothing else.
# The alias is wider because `dict` is invariant: a `dict[str, Tensor]` is no `dict[str, Tree]`.
# `Union`, because a string cannot be joined to another type with `|` when an annotation is
# evaluated.
Tree: TypeAlias = Union[Leaf, Sequence["Tree"], Mapping[str, "Tree"]]  # noqa: UP007
Template: TypeAlias = Union[
    Tensor, "Shape", type, Sequence["Template"], Mapping[str, "Template"], None
]

DTYPES: Final = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


@dataclass(frozen=True, init=False)
class Shape:
    """A template for a tensor: its dtype and dimensions; None matches any length."""

    dtype: torch.dtype
    dims: tuple[int | None, ...]

    def __init__(self, dtype: str | torch.dtype, *dims: int | None) -> None:
        resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if resolved not in DTYPES:
            raise MessageError(
                f"the dtype of a Shape must be one of {', '.join(map(_word, DTYPES))}, not {dtype}"
            )
        object.__setattr__(self, "dtype", resolved)
        object.__setattr__(self, "dims", dims)

    def __str__(self) -> str:
        return _named(self.dtype, ["?" if d is None else d for d in self.dims])


def floats(*dims: int | None) -> Shape:
    """The template of a float32 tensor of these dimensions; None matches any length."""
    return Shape(torch.float32, *dims)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of the tree `node` with its path, in tree order."""
    if isinstance(node, dict):
        for key, child in node.items():
            yield from leaves(child, join(path, key))
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from leaves(child, f"{path}[{i}]")
    else:
        yield path, node


def digest(tree: Tree) -> str:
    """SHA-256 of a tree: each leaf's path, dtype, shape and bytes, in tree order, on any device."""
    sha = hashlib.sha256()
    for path, leaf in leaves(tree):
        sha.update(f"{path}:".encode())
        if isinstance(leaf, Tensor):
            array = leaf.detach().cpu().contiguous()
            sha.update(f"{array.dtype}{tuple(array.shape)}".encode())
            if array.numel():  # strides of none may be 0, which view refuses
                sha.update(array.flatten().view(torch.uint8).numpy().tobytes())
        else:
            sha.update(repr(leaf).encode())
    return sha.hexdigest()


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The tree with `fn` applied to its tensors; tuples become lists, as in a message."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(fn, child) for key, child in tree.items()}
    if isinstance(tree, list | tuple):
        return [map_tensors(fn, child) for child in tree]
    return tree


def zip_tensors(fn: Callable[[list[Tensor]], Tensor], trees: Sequence[Tree]) -> Tree:
    """One tree whose tensors are `fn` of the corresponding tensors of trees of one structure."""
    return _zip(lambda nodes: fn(nodes) if isinstance(nodes[0], Tensor) else nodes[0], list(trees))


def _zip(fn: Callable[[list[Any]], Leaf], nodes: list[Any]) -> Tree:
    """One tree whose leaves are `fn` of the corresponding leaves of trees of one structure."""
    first = nodes[0]
    if isinstance(first, dict):
        return {key: _zip(fn, [node[key] for node in nodes]) for key in first}
    if isinstance(first, list | tuple):
        return [_zip(fn, [node[i] for node in nodes]) for i in range(len(first))]
    return fn(nodes)


def check_finite(tree: Tree) -> None:
    """Raise MessageError ("not finite at 'logits'", without values) unless all floats and float
    tensors are finite.
    """
    if not _finite(tree):
        path = next(path for path, leaf in leaves(tree) if not _finite(leaf))
        raise MessageError(f"not finite {at(path)}")


def _finite(node: Any) -> bool:
    """Whether all floats and float tensors are finite."""
    if isinstance(node, Tensor):
        if not node.is_floating_point():
            return True
        # a sum is several times faster than isfinite, but may overflow on finite terms
        x = node.detach()
        return math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())
    if isinstance(node, dict):
        return all(map(_finite, node.values()))
    if isinstance(node, list | tuple):
        return all(map(_finite, node))
    return not isinstance(node, float) or math.isfinite(node)


def check_like(node: Any, want: Any, path: str = "") -> None:
    """Raise MessageError, with the path of the first difference, unless the tree `node` fits the
    template `want`.

    A template is a tree whose leaves are tensors (`device="meta"` saves memory), `Shape`s, the
    types int, float, bool and str, or None; the type `object` matches anything. A tree fits if it
    has the same keys in any order, and the same lengths, dtypes, shapes and types. It may
    come from another party, so a refusal names kinds, and no value of it but a few keys.
    """
    if want is object:
        return

    # containers: first their own keys or length, then each child; a tuple arrives as a list
    if isinstance(want, dict):
        if not isinstance(node, dict) or node.keys() != want.keys():
            refuse(path, f"expected the keys {_keys(want)}, got {_keys(node)}")
        for key, child in want.items():
            check_like(node[key], child, join(path, key))
    elif isinstance(want, list | tuple):
        if not isinstance(node, list | tuple) or len(node) != len(want):
            got = f"{len(node)}" if isinstance(node, list | tuple) else kind(node)
            refuse(path, f"expected a list of {len(want)}, got {got}")
        for i, child in enumerate(want):
            check_like(node[i], child, f"{path}[{i}]")

    # tensors: the dtype and the number of axes, then each length; None in a Shape is any length
    elif isinstance(want, Tensor | Shape):
        dims = want.shape if isinstance(want, Tensor) else want.dims
        alike = (
            isinstance(node, Tensor) and node.dtype == want.dtype and len(node.shape) == len(dims)
        )
        if not alike or any(
            length is not None and length != own
            for own, length in zip(node.shape, dims, strict=True)
        ):
            refuse(
                path,
                f"expected {kind(want) if isinstance(want, Tensor) else want}, got {kind(node)}",
            )

    # Plain leaves. Another template is a mistake of whoever wrote it. Types must be equal, not only
    # fit: to Python True is an int, too. None stands for its own type.
    elif want is not None and not isinstance(want, type):
        refuse(path, f"a template holds tensors, Shapes, types and None, not {kind(want)}")
    elif type(node) is not (want or type(None)):
        refuse(path, f"expected {want.__name__ if want else 'none'}, got {kind(node)}")


def _keys(node: Any) -> str:
    """The first keys of a dict, for a message: another party chose them, so few and short."""
    if not isinstance(node, dict):
        return kind(node)
    shown = [f"{str(key)[:40]!a}" for key in list(node)[:12]]
    return ", ".join([*shown, "…"] if len(node) > 12 else shown) or "none"


def weighted_mean(trees: Sequence[Tree], weights: Sequence[float]) -> Tree:
    """The mean Σᵢ wᵢ xᵢ / Σ w of each float tensor, and the maximum of each integer tensor.

    Integers are counters, such as BatchNorm's `num_batches_tracked`. Weights are first divided by
    their sum: then the mean of one tree is exact and half floats do not overflow; then the trees
    are added in order in each tensor's dtype. The result is detached and shares no memory with the
    trees. Raises MessageError if the trees differ (with the first differing path); a leaf is no
    float or integer tensor; or weights are negative, not finite, all 0, or not one per tree.
    """
    if not trees or len(trees) != len(weights):
        raise MessageError(
            f"a mean needs trees and one weight for each: {len(trees)} trees, {len(weights)} "
            "weights"
        )
    total = sum(weights)
    if not all(0 <= w < math.inf for w in weights) or not 0 < total < math.inf:
        raise MessageError(
            f"weights must be finite, at least 0, and not all 0: {list(weights)[:8]}"
        )
    for path, leaf in leaves(trees[0]):
        if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool or leaf.is_complex():
            refuse(path, f"only float and integer tensors have a mean, not {kind(leaf)}")
    for other in trees[1:]:
        check_like(other, trees[0])
    shares = [weight / total for weight in weights]
    return _zip(lambda nodes: _mean(nodes, shares), list(trees))


def _mean(tensors: list[Tensor], shares: list[float]) -> Tensor:
    result = tensors[0].detach().clone()
    if result.is_floating_point():
        result.mul_(shares[0])
        for tensor, share in zip(tensors[1:], shares[1:], strict=True):
            result.add_(tensor.detach(), alpha=share)
        return result
    for tensor in tensors[1:]:
        torch.maximum(result, tensor, out=result)
    return result


def join(path: str, key: str) -> str:
    """The path of a dict's entry."""
    # Keys come from other parties and are printed in logs and terminals: escape control characters.
    name = key if key.isprintable() else ascii(key)[1:-1]
    return f"{path}.{name}" if path else name


def at(path: str) -> str:
    """The path as text for a message."""
    return f"at {path!r}" if path else "at the root"


def refuse(path: str, why: str) -> NoReturn:
    """Raise MessageError about the node at this path."""
    raise MessageError(f"{at(path)}: {why}")


def kind(leaf: Any) -> str:
    """The type of a leaf, without its value: "float32[32,10]", "int", "none"."""
    if isinstance(leaf, Tensor):
        return _named(leaf.dtype, leaf.shape)
    return "none" if leaf is None else type(leaf).__name__


def _named(dtype: torch.dtype, dims: Sequence[int | str]) -> str:
    return f"{_word(dtype)}[{','.join(map(str, dims))}]"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
