"""Compression of messages: rows of numbers (B, K) as float16, as int8, or by their largest entries.

`encode` makes the message, `decode` the receiver's rows. A sender that needs the receiver's view of
its rows decodes its own message. The ledger counts these bytes for each row of K numbers:

    float32  4 K
    float16  2 K       relative error 2^-11
    int8     K + 4     error of half a step, the row's largest absolute value / 127
    top-k    3 k + 2   (4 k + 2 if K > 256, 6 k + 2 if K > 32,768): k logits as float16 with their indices, and the
                       log of the mean exponential of all others, so that softmax gives the k
                       entries and the sum of the others their true probabilities; the distribution
                       among the others is lost

A number beyond 65,504 overflows float16 to infinity, and a reply that is not finite is refused. The
rows decoded from any finite message are finite, and so is a mean of many.
"""  # noqa: E501

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedloom.core.message import Shape, Template, Tree, floats

Coding: TypeAlias = Literal["float32", "float16", "int8", "top-k"]
LARGEST = 1e30
"""Decoded values are clipped to ± this, so that sums and differences of many are finite."""


def encode(rows: Tensor, coding: Coding, top_k: int | None = None) -> Tree:
    """The message for rows (B, K).

    Args:
        rows: logits; with any coding but top-k, any numbers.
        coding: the coding.
        top_k: k of top-k; with k >= K all entries are sent.
    """
    if coding == "float32":
        return rows
    if coding == "float16":
        return rows.half()
    if coding == "int8":
        # above 0 also for a row of zeros
        scale = (rows.abs().amax(-1) / 127).clamp_min(torch.finfo(rows.dtype).tiny)
        return {
            "steps": (rows / scale[..., None]).round().clamp(-127, 127).to(torch.int8),
            "scale": scale,
        }
    k = min(top_k or 1, rows.shape[-1])
    values, places = rows.topk(k, -1)
    left = values[..., -1]  # with k >= K no entry is left to average
    if k < rows.shape[-1]:  # exact for equal entries on every processor: exp(0) = 1 and log(1) = 0
        rest = rows.scatter(-1, places, -torch.inf)
        left = rest.amax(-1)
        left = left + ((rest - left[..., None]).exp().sum(-1) / (rows.shape[-1] - k)).log()
    return {
        "values": values.half(),
        "places": places.to(_places(rows.shape[-1])),
        "left": left.half(),
    }


def decode(message: Any, coding: Coding, width: int) -> Tensor:
    """Rows (B, K) float32 of a message; `width` is K. An index beyond K - 1 is taken modulo K."""
    rows: Tensor
    if coding == "float32":
        rows = message
    elif coding == "float16":
        rows = message.float()
    elif coding == "int8":
        rows = message["steps"] * message["scale"][..., None]
    else:
        left = message["left"].float()[..., None].expand(*message["left"].shape, width)
        rows = left.scatter(-1, message["places"].long() % width, message["values"].float())
    return rows.clamp(-LARGEST, LARGEST)


def like(size: int, width: int, coding: Coding, top_k: int | None = None) -> Template:
    """Template of the message for `size` rows of `width` numbers."""
    if coding == "float32":
        return floats(size, width)
    if coding == "float16":
        return Shape("float16", size, width)
    if coding == "int8":
        return {"steps": Shape("int8", size, width), "scale": floats(size)}
    k = min(top_k or 1, width)
    return {
        "values": Shape("float16", size, k),
        "places": Shape(str(_places(width)).removeprefix("torch."), size, k),
        "left": Shape("float16", size),
    }


def _places(width: int) -> torch.dtype:
    """The smallest type that holds an index into a row."""
    return torch.uint8 if width <= 256 else torch.int16 if width <= 1 << 15 else torch.int32
