"""Shorter messages: rows of numbers (B, K) as float16, as int8, or by their largest entries.

`encode` gives what crosses, `decode` what the receiver takes it for. A sender that has to know what the others saw of
its rows decodes its own. The ledger counts the bytes of what crosses, for each row of K numbers:

    float32  4 K
    float16  2 K       relative error 2^-11
    int8     K + 4     error of half a step, the row's largest absolute value / 127
    top-k    3 k + 2   (4 k + 2 where K > 256, 6 k + 2 where K > 32,768): k logits as float16 with their places, and
                       the log of the mean exponential of all others, so that softmax gives the k and the rest
                       together their true shares; how the rest share theirs is lost

A number that float16 can't hold, beyond 65,504, is infinite in it: as any reply that is not finite, it is refused. What
a receiver decodes is finite whatever finite message came, and so is a mean of many.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedloom.core.message import Shape, Template, floats

Coding: TypeAlias = Literal["float32", "float16", "int8", "top-k"]
LARGEST = 1e30
"""The largest absolute value that a receiver believes: sums and differences of many such are finite."""


def encode(rows: Tensor, coding: Coding, top_k: int | None = None) -> Any:
    """What crosses for rows (B, K).

    Args:
        rows: logits, or with any coding but top-k any numbers.
        coding: how.
        top_k: k of top-k; with k >= K all cross, and nothing is left.
    """
    if coding == "float32":
        return rows
    if coding == "float16":
        return rows.half()
    if coding == "int8":
        scale = (rows.abs().amax(-1) / 127).clamp_min(torch.finfo(rows.dtype).tiny)  # a row of zeros has one too
        return {"steps": (rows / scale[..., None]).round().clamp(-127, 127).to(torch.int8), "scale": scale}
    k = min(top_k or 1, rows.shape[-1])
    values, places = rows.topk(k, -1)
    left = values[..., -1]  # with k >= K no entry is left to average
    if k < rows.shape[-1]:  # exact for equal entries on every processor: exp(0) = 1 and log(1) = 0
        rest = rows.scatter(-1, places, -torch.inf)
        left = rest.amax(-1)
        left = left + ((rest - left[..., None]).exp().sum(-1) / (rows.shape[-1] - k)).log()
    return {"values": values.half(), "places": places.to(_places(rows.shape[-1])), "left": left.half()}


def decode(message: Any, coding: Coding, width: int) -> Tensor:
    """Rows (B, K) float32 from what crossed; `width` is K. A place beyond a row counts from its start again."""
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
    """Template of what crosses for `size` rows of `width` numbers."""
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
    """The smallest type that holds a place in a row."""
    return torch.uint8 if width <= 256 else torch.int16 if width <= 1 << 15 else torch.int32
