"""A live `nn.Module` whose parameters are views of one flat vector.

One vector makes the optimiser step, a snapshot and a copy a few operations each, whatever the number of layers:
on a LeNet-5 this loop costs about three quarters of `torch.optim` on separate tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from fedloom.errors import ModelError, StateError
from fedloom.optim import Optimiser

INFERENCE_ROWS = 256
"""Rows per forward pass in `infer`: larger batches fall out of the CPU's cache and are slower."""


class Network:
    """A module, its flat parameter and gradient vectors, and its optimiser's slots.

    Attributes:
        flat: (P,) all trainable parameters; the module's own are views of it.
        grad: (P,) their gradients, likewise.
        slots: the optimiser's named memory.
    """

    def __init__(self, module: nn.Module, optimiser: Optimiser) -> None:
        self.module = module
        self.optimiser = optimiser
        parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError(f"{type(module).__name__} has no trainable parameter: nothing to learn")
        if len({(p.dtype, p.device) for p in parameters.values()}) > 1:
            raise ModelError(
                f"all parameters of {type(module).__name__} must have one dtype and device; "
                "call .float() and .to(device) on it first"
            )
        self.flat = torch.cat([p.detach().reshape(-1) for p in parameters.values()])
        self.grad = torch.zeros_like(self.flat)
        self._views: dict[str, Tensor] = {}
        start = 0
        for name, p in parameters.items():
            end = start + p.numel()
            p.data = self._views[name] = self.flat[start:end].view(p.shape)
            p.grad = self.grad[start:end].view(p.shape)
            start = end
        self._buffers = dict(module.named_buffers())
        self.slots = optimiser.slots(self.flat)
        self._sent: tuple[Tensor, Tensor] | None = None  # the last `forward`: its input and outputs
        self._before: dict[str, dict[str, Tensor]] | None = None
        module.train()

    # -- passes ----------------------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs `(B, ...)` in training mode, with their graph. BatchNorm statistics move."""
        if self._buffers:
            self._keep()
        self._mode(True)
        out: Tensor = self.module(x)
        return out

    def infer(self, x: Tensor) -> Tensor:
        """Outputs `(n, ...)` in evaluation mode, without a graph, in chunks of rows."""
        self._mode(False)
        with torch.no_grad():
            parts = [self.module(part) for part in x.split(INFERENCE_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs `(B, ...)`, detached; their graph is remembered for `descend`."""
        self._sent = (x, self(x))
        return self._sent[1].detach()

    def minimise(self, loss: Callable[..., Tensor], *batch: object) -> Tensor:
        """One optimiser step on `loss(*batch)`, a scalar; returns its value () before the step."""
        value = loss(*batch)
        self._step(value, None)
        return value.detach()

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimiser step along Jᵀ `gradient`, J the Jacobian of the outputs at `x`.

        When `x` is the batch of the last `forward` and nothing moved since, its graph is used;
        otherwise the pass is made again, with the same result.
        """
        if self._sent is not None and self._sent[0] is x:
            outputs = self._sent[1]
        else:
            statistics = {k: b.clone() for k, b in self._buffers.items()}
            outputs = self(x)  # the first pass has already moved the BatchNorm statistics
            _copy(self._buffers, statistics, "buffers")
        self._step(outputs, gradient)

    def _step(self, outputs: Tensor, gradient: Tensor | None) -> None:
        self._keep()
        self._sent = None
        self.grad.zero_()
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        self.optimiser.step(self.flat, self.grad, self.slots)

    def _mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """`params`, `buffers` and `opt` as trees of named tensors: views, not copies."""
        return {"params": self._views, "buffers": self._buffers, "opt": self.slots}

    def load(self, part: str, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into one part of the state; names and shapes must be the same."""
        self._keep()
        self._sent = None
        _copy(self.state()[part], values, part)

    def forget(self) -> None:
        """Drop the remembered pass: what an engine may do between any two calls."""
        self._sent = None

    # -- a call that fails changes nothing ---------------------------------------------------------

    def begin(self) -> None:
        """A call begins: from here `rollback` undoes all changes."""
        self._before = {}

    def end(self) -> None:
        """The call is done: what it changed stays."""
        self._before = None

    def rollback(self) -> None:
        """Undo what the call that is under way has changed."""
        for part, values in (self._before or {}).items():
            _copy(self.state()[part], values, part)
        self._before = self._sent = None

    def _keep(self) -> None:
        """Copy on first write, so that calls which only predict cost nothing."""
        if self._before is not None and not self._before:
            self._before = {
                part: {k: v.clone() for k, v in values.items()}
                for part, values in self.state().items()
            }


@torch.no_grad()
def _copy(to: Mapping[str, Tensor], values: Mapping[str, Tensor], part: str) -> None:
    if to.keys() != values.keys():
        wrong = sorted(to.keys() ^ values.keys())[0]
        raise StateError(f"{part} must have the names of this network: {wrong!r} is on one side only")
    for name, tensor in to.items():
        if tensor.shape != values[name].shape:
            raise StateError(
                f"{part}[{name!r}] must have shape {tuple(tensor.shape)}, "
                f"not {tuple(values[name].shape)}"
            )
        tensor.copy_(values[name])
