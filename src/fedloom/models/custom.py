"""Models of the user: `package.module:factory`, called as `factory(input_shape, classes)`."""

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.core.errors import ModelError
from fedloom.core.objects import find as find_object
from fedloom.core.objects import is_object
from fedloom.support.paths import callable_at

PROBE_ROWS = 2


def find(path: str) -> Callable[..., object]:
    """The factory (a function or a class) of that path, or of an object. Raises ModelError."""
    if is_object(path):
        return find_object(path, ModelError)  # type: ignore[no-any-return]
    return callable_at(path, ModelError)


def make(path: str, input_shape: tuple[int, ...], classes: int) -> object:
    """The product of the user's factory. Raises ModelError if the factory fails."""
    factory = find(path)
    try:
        return factory(input_shape, classes)
    except Exception as error:
        raise ModelError(
            f"{path!r} failed when called with ({input_shape}, {classes}) "
            f"({type(error).__name__}: {error}); it must accept the input shape and the number "
            "of classes."
        ) from error


class Logits(nn.Module):
    """A model of another library, such as transformers, whose output has `logits`, as a network of
    logits (B, K).

    Attributes:
        model: the model as it was given.
        tokens: whether it takes token ids: the rows are then ids, stored as float32, and the
            model's padding id is masked.
    """

    def __init__(self, model: nn.Module, tokens: bool = False) -> None:
        super().__init__()
        self.model, self.tokens = model, tokens

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K)."""
        if not self.tokens:
            out = self.model(x)
        else:
            padding = getattr(getattr(self.model, "config", None), "pad_token_id", None)
            mask = {} if padding is None else {"attention_mask": (x != padding).long()}
            out = self.model(x.long(), **mask)
        return out if isinstance(out, Tensor) else out.logits


def takes_tokens(model: nn.Module) -> bool:
    """Whether the first argument of a model's forward is named `input_ids`."""
    return next(iter(inspect.signature(model.forward).parameters), "") == "input_ids"


def build(path: str, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The user's network, tested on a batch of zeros. Raises ModelError unless it
    outputs logits.
    """
    model = make(path, input_shape, classes)
    if not isinstance(model, nn.Module):
        raise ModelError(f"{path!r} must return a torch.nn.Module, not a {type(model).__name__}.")
    if takes_tokens(model):
        model = Logits(model, tokens=True)
    model.eval()
    try:
        with torch.no_grad():
            out = model(torch.zeros(PROBE_ROWS, *input_shape))
            if isinstance(getattr(out, "logits", None), Tensor):
                model, out = Logits(model), out.logits
    except Exception as error:
        raise ModelError(
            f"{path!r}: the network fails on a batch of shape {(PROBE_ROWS, *input_shape)} "
            f"({type(error).__name__}: {error}); correct its forward."
        ) from error
    finally:
        model.train()
    if not isinstance(out, Tensor) or out.shape != (PROBE_ROWS, classes):
        actual = tuple(out.shape) if isinstance(out, Tensor) else f"a {type(out).__name__}"
        raise ModelError(
            f"{path!r}: the network must return logits of shape {(PROBE_ROWS, classes)} for "
            f"{PROBE_ROWS} rows, not {actual}."
        )
    return model
