"""A live `nn.Module` whose state is one block of memory, with its parameters as views of one flat
vector.

With one vector, an optimizer step takes a few operations whatever the number of layers. With one
block, a snapshot is one copy, and an engine can place the state in shared memory, on disk, or
beside other parties' for batching.
"""

import contextlib
import struct
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

try:
    from torch.autograd.graph import _engine_run_backward
except ImportError:  # another torch
    _engine_run_backward = None  # type: ignore[assignment]

from fedloom.core._layout import ALIGNMENT, fast_format, flattened, layout, lent, places, unflatten
from fedloom.core.context import Batches
from fedloom.core.errors import ModelError, StateError
from fedloom.core.optim import SGD, Adam, Optimizer, clipped

INFERENCE_ROWS = 256
"""Rows per forward pass in `infer`: larger batches fall out of the CPU's cache and are slower."""
Keep: TypeAlias = Callable[[Tensor], Tensor]
"""Copies a block before its first change in a call."""
Only: TypeAlias = Collection[str] | Mapping[str, Tensor] | None
"""The parameters that a step updates: names, or masks of gradients by name; None for all."""
Loss: TypeAlias = Callable[..., Tensor]
"""A function of a batch, such as (x, y), that returns a scalar with its graph."""
Graded: TypeAlias = tuple[Tensor, dict[str, Tensor]]
"""A scalar () and its gradient by parameter name."""
Product: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""A matrix-vector product, by parameter names."""


class Network:
    """A module, its flat parameter and gradient vectors, and its optimizer's slots.

    Attributes:
        memory: (nbytes,) uint8, the whole state: parameters, slots, buffers.
        fields: the layout of `memory`.
        flat: (P,) all trainable parameters; the module's own are views of it.
        slots: the optimizer's state by name.
        in_loss: whether a loss is being computed.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self.module = module
        self.optimizer = self._first_optimizer = optimizer
        parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError(
                f"{type(module).__name__} has no trainable parameters; set requires_grad on some"
            )
        if len({(p.dtype, p.device) for p in parameters.values()}) > 1:
            raise ModelError(
                f"all parameters of {type(module).__name__} must have the same dtype and device; "
                "call .float() and .to(device) on it first"
            )
        self.parameters = parameters
        self._places = list(places(module, parameters))
        self.format = fast_format(module, next(iter(parameters.values())))
        first = {k: p.detach().clone() for k, p in parameters.items()}
        flat = torch.cat([p.reshape(-1) for p in first.values()])
        buffers = dict(module.named_buffers())
        every = {id(b): name for name, b in buffers.items()}
        self.owners = [
            (module.get_submodule(path)._buffers, key, every[id(b)])
            for name, b in module.named_buffers(remove_duplicate=False)
            for path, _, key in [name.rpartition(".")]
        ]
        slots = optimizer.slots(flat)
        self.fields = layout({"params": {"": flat}, "opt": slots, "buffers": buffers})
        size = max(f.start + f.nbytes for f in self.fields)
        self._bind(
            torch.zeros(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=flat.device)
        )
        for part, values in {"params": first, "opt": slots, "buffers": buffers}.items():
            copy_state(self.state()[part], values, part)
        self._point(self._buffers)
        self._sent: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None  # the cached pass
        self._at: dict[str, Tensor] | None = None  # weights of a gradient_at, if one is running
        self._scratch = False
        self._keeper: Keep | None = None
        self._before: Tensor | None = None
        self.in_loss = False
        every_module = list(module.modules())
        plain = all(type(m).train is nn.Module.train for m in every_module)
        self._modes = [vars(m) for m in every_module] if plain else []
        self._has_group_norm = any(isinstance(m, nn.GroupNorm) for m in every_module)
        self._has_dropout = any(
            isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules()
        )
        module.train()

    def move(self, memory: Tensor) -> None:
        """Move the state to this block (nbytes,)."""
        memory.copy_(self.memory)
        self._bind(memory)
        self._point(self._buffers)

    def _bind(self, memory: Tensor) -> None:
        """Make the whole state views of this block."""
        self.memory = memory
        views: dict[str, dict[str, Tensor]] = {"params": {}, "opt": {}, "buffers": {}}
        for f in self.fields:
            # autograd then tracks the version of each separately
            views[f.part][f.name] = f.view(memory).data
        self.flat = views["params"].pop("")
        self.slots, self._buffers = views["opt"], views["buffers"]
        self._views: dict[str, Tensor] = {}
        self._moving: dict[str, dict[str, Tensor]] = {}  # each parameter's part of the slots
        start = 0
        for name, p in self.parameters.items():
            part = slice(start, start + p.numel())
            self._views[name] = unflatten(self.flat[part], p.shape, self.format)
            self._moving[name] = {
                k: unflatten(x[part], p.shape, self.format)
                for k, x in self.slots.items()
                if x.dim()
            }
            p.data = self._views[name]
            start = part.stop

    # -- passes ----------------------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...) with their graph. BatchNorm statistics are updated."""
        if self._buffers:
            self._keep()
        self._mode(True)
        out: Tensor = self.module(self._laid_out(x))
        return out

    def infer(self, x: Tensor, *, batch_statistics: bool = False) -> Tensor:
        """Evaluation-mode outputs (n, ...) without a graph, in chunks of rows.

        With `batch_statistics` BatchNorm uses the statistics of all of `x` and leaves its running
        statistics unchanged.
        """
        self._mode(False)
        x = self._laid_out(x)
        with torch.no_grad():
            if batch_statistics and self._buffers:
                with of_the_batch(self.module):
                    out: Tensor = self.module(x)
                    return out
            return chunked(self.module, x)

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...), detached. The pass is cached until the weights change.

        BatchNorm statistics are updated in `descend`, so the result does not depend on whether the
        engine cached the pass or repeats it.
        """
        return self._pass(x)[1].detach()

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, with their graph, for use in a loss."""
        return self._at or self.parameters

    def minimize(self, loss: Loss, *batch: object, only: Only = None) -> Tensor:
        """One optimizer step on the scalar `loss(*batch)`; returns its value () before the step."""
        if only is None:
            value = self._value(loss, batch)
            self._step(value)
            return value.detach()
        value, gradients = self.gradient(loss, *batch, of=only)
        self._keep()
        if isinstance(only, Mapping):
            gradients = {name: g * only[name] for name, g in gradients.items()}
        rates = self.optimizer.tick(self.slots)
        for name, g in zip(
            gradients, clipped([*gradients.values()], self.optimizer.clip), strict=True
        ):
            self.optimizer.move(self._views[name], g, self._moving[name], *rates)
        return value

    def _value(self, loss: Loss, batch: tuple[object, ...]) -> Tensor:
        """The value of a loss; `in_loss` is true meanwhile."""
        self.in_loss = True
        try:
            return loss(*batch)
        finally:
            self.in_loss = False

    def gradient(self, loss: Loss, *batch: object, of: Collection[str] | None = None) -> Graded:
        """The scalar `loss(*batch)` () and its gradient by name; no step. BatchNorm statistics are
        updated.
        """
        self._sent = None
        names = list(self.parameters if of is None else of)
        inputs = [*names, *self._extra_input(names)]
        with self._learning(inputs):  # a frozen body then costs no graph
            value = self._value(loss, batch)
            grads = torch.autograd.grad(
                value, [self.parameters[k] for k in inputs], allow_unused=True
            )
        return value.detach(), _whole({k: self.parameters[k] for k in names}, grads[: len(names)])

    def gradient_at(self, weights: Mapping[str, Tensor], loss: Loss, *batch: object) -> Graded:
        """The scalar `loss(*batch)` () and its gradient by name at `weights`. BatchNorm statistics
        are updated.
        """
        value, _, gradient = self._graded_at(weights, loss, batch, graph=False)
        return value, gradient

    def curvature_at(
        self, weights: Mapping[str, Tensor], loss: Loss, *batch: object
    ) -> tuple[Tensor, dict[str, Tensor], Product]:
        """As `gradient_at`, and the Hessian-vector product there, which may be called once."""
        value, at, gradient = self._graded_at(weights, loss, batch, graph=True)

        def product(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            nonlinear = [k for k, g in gradient.items() if g.requires_grad]
            grads = torch.autograd.grad(
                [gradient[k] for k in nonlinear],
                list(at.values()),
                [vectors[k] for k in nonlinear],
                allow_unused=True,
            )
            return _whole(at, grads)

        return value, {k: g.detach() for k, g in gradient.items()}, product

    def _graded_at(
        self, weights: Mapping[str, Tensor], loss: Loss, batch: tuple[object, ...], *, graph: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """A loss at `weights`, these weights as leaves, and the gradient, itself differentiable if
        `graph`.
        """
        self._sent = None
        at = {
            k: _formatted(weights[k], self.format).detach().requires_grad_()
            for k in self.parameters
        }
        self._at = at
        try:
            with lent(self._places, at):
                value = self._value(loss, batch)
            grads = torch.autograd.grad(
                value, list(at.values()), create_graph=graph, allow_unused=True
            )
        finally:
            self._at = None
        return value.detach(), at, _whole(at, grads)

    def row_gradients(
        self, loss: Loss, x: Tensor, y: Tensor, of: Collection[str]
    ) -> dict[str, Tensor]:
        """Per-row gradients (B, ...) of `loss` by name; no step."""
        where = [place for place in self._places if place[2] in of]

        def row_loss(params: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            with lent(where, params):
                return loss(row[None], label[None])

        before, self.format = self.format, torch.contiguous_format  # vmap supports no other
        weights = {k: self._views[k] for k in of}
        try:
            with torch.no_grad():  # of the other parameters
                rows: dict[str, Tensor] = vmap(grad(row_loss), in_dims=(None, 0, 0))(weights, x, y)
            return rows
        finally:
            self.format = before

    def _extra_input(self, names: Collection[str]) -> list[str]:
        """A further parameter to differentiate by, to avoid a crash in torch.

        torch 2.13 crashes in a GroupNorm of channels-last images if the gradient of its weights is
        needed but not that of its input.
        """
        if self.format != torch.channels_last or not self._has_group_norm:
            return []
        every = list(self.parameters)
        first = next((k for k in every if k in names), every[0])
        owner = self.module.get_submodule(first.rpartition(".")[0])
        return every[:1] if isinstance(owner, nn.GroupNorm) and first != every[0] else []

    @contextlib.contextmanager
    def _learning(self, names: Collection[str]) -> Iterator[None]:
        """A context in which only these parameters require gradients."""
        frozen = [p for k, p in self.parameters.items() if k not in names]
        for p in frozen:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)

    def train(self, loss: Loss, batches: Batches, *, only: Only = None) -> Tensor:
        """One step on `loss(x, y)` for each batch; returns the mean loss ()."""
        return torch.stack([self.minimize(loss, x, y, only=only) for x, y in batches]).mean()

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimizer step along Jᵀ `gradient`, J the Jacobian of the outputs at `x`.

        Raises ValueError if `gradient` does not have the outputs' shape.
        """
        _, outputs, moved = self._pass(x)
        if gradient.shape != outputs.shape:
            raise ValueError(
                f"gradient of shape {(*gradient.shape,)} for outputs of shape {(*outputs.shape,)}"
            )
        self._step(outputs, gradient.detach())
        copy_state(self._buffers, moved, "buffers")

    def _pass(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`x`, the outputs with their graph, and the buffers after the pass."""
        if self._sent is None or self._sent[0] is not x:
            moved = {name: b.clone() for name, b in self._buffers.items()}
            self._point(moved)
            try:
                with self._fixed_dropout(x):
                    self._sent = (x, self(x), moved)
            finally:
                self._point(self._buffers)
        return self._sent

    @contextlib.contextmanager
    def _fixed_dropout(self, x: Tensor) -> Iterator[None]:
        """A context in which dropout depends on weights and rows only, so that a repeated pass
        drops the same units.
        """
        if not self._has_dropout:
            yield
            return
        before = torch.get_rng_state()
        content = float(self.flat.double().sum()) + float(x.double().sum())
        # torch.manual_seed is slow, and needed only if the device has a generator of its own
        generator = torch.default_generator if x.device.type == "cpu" else torch
        generator.manual_seed(int.from_bytes(struct.pack("<d", content), "little") >> 1)
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def _point(self, buffers: Mapping[str, Tensor]) -> None:
        """Make the module read and write these buffers."""
        for owner, key, name in self.owners:
            owner[key] = buffers[name]

    def _step(self, outputs: Tensor, gradient: Tensor | None = None) -> None:
        """One optimizer step along the gradient of a scalar, or along that of `outputs` times a
        `gradient`.
        """
        self._keep()
        self._sent = None
        _backward(outputs, gradient)
        grads = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()
        ]
        for p in self.parameters.values():
            p.grad = None
        grads = clipped(grads, self.optimizer.clip)
        rates = self.optimizer.tick(self.slots)
        if self.slots:  # several operations, each on one vector
            flat = self.flat
            vector = _scratch(flat.numel(), flat.dtype, flat.device, threading.get_ident())
            torch.cat([flattened(g, self.format) for g in grads], out=vector)
            self.optimizer.move(flat, vector, self.slots, *rates)
        else:  # one operation, for which copying the gradients does not pay
            for w, g in zip(self._views.values(), grads, strict=True):
                self.optimizer.move(w, g, {}, *rates)

    def scale_rate(self, factor: float) -> None:
        """Set the learning rate to this factor of its first value."""
        if isinstance(self._first_optimizer, SGD | Adam):
            self.optimizer = replace(self._first_optimizer, lr=self._first_optimizer.lr * factor)

    def _laid_out(self, x: Tensor) -> Tensor:
        """`x` in the memory format of the weights if it is a batch of images."""
        return x.contiguous(memory_format=self.format) if x.dim() == 4 else x

    def _mode(self, training: bool) -> None:
        if self.module.training == training:
            return
        # as `train` does, whose checks of each attribute take longer than a small pass
        for values in self._modes:
            values["training"] = training
        if not self._modes:
            self.module.train(training)

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, Tensor]]:
        """`params`, `buffers` and `opt` as trees of named tensors: views, not copies."""
        return {"params": self._views, "buffers": self._buffers, "opt": self.slots}

    def load(self, part: str, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into one part of the state; names and shapes must be the same."""
        self._keep()
        self._sent = None
        copy_state(self.state()[part], values, part)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """A context in which the network may be changed; on exit its state is restored
        bit for bit.
        """
        before, outer = self.memory.clone(), self._scratch
        self._scratch = True
        try:
            yield
        finally:
            self.memory.copy_(before)
            self._scratch = outer
            self._sent = None

    def forget(self) -> None:
        """Drop the cached pass, which an engine may do between any two calls."""
        self._sent = None

    # -- transactions: a call that fails changes nothing -------------------------------------------

    def begin(self, keep: Keep = torch.clone) -> None:
        """Begin a call, whose changes `rollback` undoes. `keep` copies the block before the first
        change.
        """
        self._keeper = keep

    def end(self) -> None:
        """End a call and keep its changes."""
        self._keeper = self._before = None

    def rollback(self) -> None:
        """Undo the changes of the current call."""
        if self._before is not None:
            self.memory.copy_(self._before)
        self._sent = None

    @property
    def changed(self) -> bool:
        """Whether the current call has changed the state."""
        return self._before is not None

    def _keep(self) -> None:
        """Copy on first write, so that calls that only predict make no copy."""
        if self._keeper is not None and self._before is None and not self._scratch:
            self._before = self._keeper(self.memory)


def _whole(like: Mapping[str, Tensor], grads: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients by name, 0 for parameters that the loss does not depend on."""
    return {
        k: torch.zeros_like(p) if g is None else g
        for (k, p), g in zip(like.items(), grads, strict=True)
    }


def _formatted(x: Tensor, format: torch.memory_format) -> Tensor:
    """A parameter in this memory format, with the strides of our own parameters: torch also chooses
    kernels by the strides of single channels, which differ in decoded tensors.
    """
    return unflatten(flattened(x, format), x.shape, format) if x.dim() == 4 else x


def chunked(infer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The outputs for rows x (n, ...), by `INFERENCE_ROWS` at a time."""
    parts = [infer(x[i : i + INFERENCE_ROWS]) for i in range(0, max(len(x), 1), INFERENCE_ROWS)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@contextlib.contextmanager
def of_the_batch(module: nn.Module) -> Iterator[None]:
    """A context in which BatchNorm in evaluation mode uses the statistics of its batch and stores
    none.
    """
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    own = [(m._buffers["running_mean"], m._buffers["running_var"]) for m in norms]
    for m in norms:
        m._buffers["running_mean"] = m._buffers["running_var"] = None
    try:
        yield
    finally:
        for m, (mean, var) in zip(norms, own, strict=True):
            m._buffers["running_mean"], m._buffers["running_var"] = mean, var


def _backward(outputs: Tensor, gradient: Tensor | None) -> None:
    """As `outputs.backward(gradient)`, which imports SymPy where there is a gradient, half a second
    in each process, and checks shapes by it at each call.
    """
    if gradient is None:
        outputs.backward()  # type: ignore[no-untyped-call]
    elif _engine_run_backward is None:
        (outputs * gradient).sum().backward()
    else:
        _engine_run_backward(
            (outputs,), (gradient.to(outputs.dtype),), False, False, (), True, accumulate_grad=True
        )


@lru_cache(maxsize=8)
def _scratch(numel: int, dtype: torch.dtype, device: torch.device, thread: int) -> Tensor:
    """One gradient vector (P,) for all networks of a size in a thread; every step overwrites it."""
    return torch.zeros(numel, dtype=dtype, device=device)


@torch.no_grad()
def copy_state(to: Mapping[str, Tensor], values: Mapping[str, Tensor], part: str) -> None:
    """Copy `values` into one part of a state. Raises StateError unless names and shapes are the
    same.
    """
    if to.keys() != values.keys():
        name = sorted(to.keys() ^ values.keys())[0]
        problem = "is missing" if name in to else "is unknown"
        raise StateError(f"{part} must have exactly the names of this network: {name!r} {problem}")
    for name, tensor in to.items():
        if tensor.shape != values[name].shape:
            raise StateError(
                f"{part}[{name!r}] must have shape {tuple(tensor.shape)}, not "
                f"{tuple(values[name].shape)}"
            )
        tensor.copy_(values[name])
