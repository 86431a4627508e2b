"""Models of the user: `package.module:factory`, called as `factory(input_shape, classes)`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.core.errors import ModelError
from fedloom.core.paths import callable_at

PROBE_ROWS = 2


def find(path: str) -> Callable[..., object]:
    """The factory (a function or a class) of that path. Raises ModelError."""
    return callable_at(path, ModelError)


def make(path: str, input_shape: tuple[int, ...], classes: int) -> object:
    """The product of the user's factory. Raises ModelError if the factory fails."""
    factory = find(path)
    try:
        return factory(input_shape, classes)
    except Exception as error:
        raise ModelError(
            f"{path!r}: calling it with ({input_shape}, {classes}) failed "
            f"({type(error).__name__}: {error}); it must take the input shape and the number of classes"
        ) from error


def build(path: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The user's network, tested on a batch of zeros. Raises ModelError unless it outputs logits."""
    model = make(path, input_shape, classes)
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
