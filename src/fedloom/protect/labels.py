"""Soft labels in few bits: probabilities (B, K) as multiples of 1 / (2^b - 1), b from 1 to 8.

Labels here are (B, K) uint8, each row with the sum 2^b - 1; for b = 1 they are one-hot. They are
sent as packed bits: ceil(B K b / 8) bytes. A receiver that holds earlier labels of the same rows is
sent only the rows that changed, and a mask of one bit per row. A row is never all zeros, so zeros
mean an unknown label.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import MessageError


def quantized(p: Tensor, bits: int) -> Tensor:
    """Labels (B, K) nearest to probabilities (B, K) in L1: all rounded down, then those with the
    largest error up.

    A row that is not finite becomes zeros, which every receiver refuses.
    """
    steps = 2**bits - 1
    scaled = p * steps
    whole = scaled.floor()
    missing = steps - whole.sum(-1, keepdim=True)
    rank = (scaled - whole).argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    labels = whole + (rank < missing)
    return torch.where(labels.sum(-1, keepdim=True) == steps, labels, 0.0).to(torch.uint8)


def probabilities(labels: Tensor) -> Tensor:
    """Probabilities (B, K) float32 of labels (B, K)."""
    return labels / labels.sum(-1, keepdim=True)


def checked(labels: Tensor, bits: int) -> Tensor:
    """The labels (B, K), if every row has the right sum.

    Raises:
        MessageError: a row has another sum.
    """
    if (labels.sum(-1) != 2**bits - 1).any():
        raise MessageError(
            f"rows of {bits}-bit labels must sum to {2**bits - 1}, but some row does not"
        )
    return labels


def size_of(numbers: int, bits: int) -> int:
    """Bytes of packed numbers."""
    return -(-numbers * bits // 8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers (n, K) below 2^bits in ceil(n K bits / 8) bytes, row by row, the highest bit first;
    padded with 0.
    """
    taken = (numbers[..., None] >> _places(bits, numbers)) & 1
    whole = size_of(numbers.numel(), bits)
    eights = F.pad(taken.flatten(), (0, 8 * whole - taken.numel())).view(whole, 8)
    return (eights << _places(8, numbers)).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, n: int, width: int) -> Tensor:
    """The numbers (n, width) from their bytes.

    Raises:
        MessageError: the number of bytes is wrong.
    """
    if len(packed) != size_of(n * width, bits):
        raise MessageError(
            f"{n * width} numbers of {bits} bits take {size_of(n * width, bits)} bytes: not "
            f"{len(packed)}"
        )
    taken = (
        ((packed[:, None] >> _places(8, packed)) & 1)
        .flatten()[: n * width * bits]
        .view(n, width, bits)
    )
    return (taken << _places(bits, packed)).sum(-1).to(torch.uint8)


def _places(bits: int, like: Tensor) -> Tensor:
    """bits - 1, ..., 0."""
    return torch.arange(bits - 1, -1, -1, dtype=torch.uint8, device=like.device)


def changes(labels: Tensor, known: Tensor, bits: int) -> dict[str, Tensor]:
    """Labels (B, K) for a receiver that holds `known` ones: a mask of the `changed` rows, and these
    `rows`, packed.
    """
    changed = (labels != known).any(-1)
    return {
        "changed": pack(changed[:, None].to(torch.uint8), 1),
        "rows": pack(labels[changed], bits),
    }


def merged(message: Mapping[str, Tensor], known: Tensor, bits: int) -> Tensor:
    """Labels (B, K) from the `known` ones (B, K) and a message of `changes`.

    Raises:
        MessageError: the message is inconsistent, or lacks a row that is not known.
    """
    changed = unpack(message["changed"], 1, len(known), 1)[:, 0].bool()
    labels = known.clone()
    labels[changed] = unpack(message["rows"], bits, int(changed.sum()), known.shape[1])
    return checked(labels, bits)
