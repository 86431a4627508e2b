"""Networks of the user: `package.module:factory`, called as `factory(input_shape, classes)`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError

PROBE_ROWS = 2


def find(path: str) -> Callable[..., object]:
    """The factory (a function or a class) of that path. Raises ModelError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ModelError(f"{path!r} must read package.module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # whatever the user's module does when imported
        raise ModelError(
            f"{path!r}: {module_name} can't be imported ({type(error).__name__}: {error}); "
            "install it or put its folder on PYTHONPATH"
        ) from error
    if callable(factory):
        return cast("Callable[..., object]", factory)
    found = "nothing" if factory is None else f"of type {type(factory).__name__}"
    raise ModelError(f"{path!r}: {name} must be a function or class, but is {found}")


def build(path: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The user's network, tried on a batch of zeros. Raises ModelError unless logits come out."""
    factory = find(path)
    try:
        model = factory(input_shape, classes)
    except Exception as error:
        raise ModelError(
            f"{path!r}: calling it with ({input_shape}, {classes}) failed "
            f"({type(error).__name__}: {error}); it must take the input shape and the number of classes"
        ) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path!r} must return a torch.nn.Module, not a {type(model).__name__}")
    _try_out(path, model, input_shape, classes)
    return model


def _try_out(path: str, model: nn.Module, input_shape: tuple[int, ...], classes: int) -> None:
    model.eval()
    try:
        with torch.no_grad():
            out = model(torch.zeros(PROBE_ROWS, *input_shape))
    except Exception as error:
        raise ModelError(
            f"{path!r}: the network fails on a batch of shape {(PROBE_ROWS, *input_shape)} "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        model.train()
    if not isinstance(out, Tensor) or out.shape != (PROBE_ROWS, classes):
        found = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ModelError(
            f"{path!r}: the network must give logits of shape {(PROBE_ROWS, classes)} for "
            f"{PROBE_ROWS} rows, not {found}"
        )
