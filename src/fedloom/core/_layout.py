"""The layout of a module's tensors in one block of bytes, and temporary replacement of
its tensors.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64
"""Alignment in bytes of each tensor in a block."""


@dataclass(frozen=True)
class Field:
    """One tensor of a block: `part` and `name` as in the state, and the position of its bytes."""

    part: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def view(self, memory: Tensor) -> Tensor:
        """The tensor, in a block (nbytes,) or in all blocks (G, nbytes) of a group, with the
        group's axis first.
        """
        raw = memory[..., self.start : self.start + self.nbytes]
        return raw.view(self.dtype).view((*memory.shape[:-1], *self.shape))


def layout(state: Mapping[str, Mapping[str, Tensor]]) -> tuple[Field, ...]:
    """The fields of a block that holds these tensors one after the other."""
    fields, start = [], 0
    for part, values in state.items():
        for name, x in values.items():
            fields.append(Field(part, name, x.dtype, tuple(x.shape), start, x.nbytes))
            start += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(fields)


def fast_format(module: nn.Module, parameter: Tensor) -> torch.memory_format:
    """Channels last on a CPU for modules with `channels_last = True`: up to 1.6 times faster.

    It is opt-in, as a module that calls `view` on the output of a convolution would fail.
    """
    supported = getattr(module, "channels_last", False) and parameter.device.type == "cpu"
    return torch.channels_last if supported else torch.contiguous_format


def unflatten(flat: Tensor, shape: torch.Size, format: torch.memory_format) -> Tensor:
    """A piece of a flat vector as a tensor of this shape and memory format."""
    if len(shape) == 4 and format == torch.channels_last:
        o, i, h, w = shape
        return flat.view(o, h, w, i).permute(0, 3, 1, 2)
    return flat.view(shape)


def flattened(g: Tensor, format: torch.memory_format) -> Tensor:
    """A layer's gradient (numel,) in the order of the flat vector."""
    return (g.permute(0, 2, 3, 1) if g.dim() == 4 and format == torch.channels_last else g).reshape(
        -1
    )


def places(
    module: nn.Module, parameters: Mapping[str, Tensor]
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """For each of these parameters, the module's dict that holds it, its key there, and its full
    name.
    """
    first = {id(p): name for name, p in parameters.items()}
    for name, p in module.named_parameters(remove_duplicate=False):
        if id(p) in first:
            path, _, key = name.rpartition(".")
            yield module.get_submodule(path)._parameters, key, first[id(p)]


@contextlib.contextmanager
def lent(
    where: Sequence[tuple[dict[str, Any], str, str]], values: Mapping[str, Tensor]
) -> Iterator[None]:
    """A context in which these places of a module hold other tensors."""
    own = [place[key] for place, key, _ in where]
    for place, key, name in where:
        place[key] = values[name]
    try:
        yield
    finally:
        for (place, key, _), value in zip(where, own, strict=True):
            place[key] = value
