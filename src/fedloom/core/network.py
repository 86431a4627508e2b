"""A live `nn.Module` whose whole state lies in one block of memory, its parameters as views of one flat vector.

One vector makes the optimiser step a few operations, whatever the number of layers. One block makes a snapshot one
copy, and lets an engine choose where the state lives: in memory that processes share, on disk, or beside the state
of others, to be worked on together.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from fedloom.core._layout import ALIGNMENT, fast_format, flattened, layout, lent, places, unflatten
from fedloom.core.context import Batches
from fedloom.core.errors import ModelError, StateError
from fedloom.core.optim import Optimiser

INFERENCE_ROWS = 256
"""Rows per forward pass in `infer`: larger batches fall out of the CPU's cache and are slower."""
Keep: TypeAlias = Callable[[Tensor], Tensor]
"""Copies a block before its first change in a call, to wherever it is safe."""
Only: TypeAlias = Collection[str] | Mapping[str, Tensor] | None
"""Which parameters a step moves: those of these names, with their gradients times masks if any; or all (None)."""

Product: TypeAlias = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
"""Multiplies a matrix with a vector, both by the parameters' names."""


class Network:
    """A module, its flat parameter and gradient vectors, and its optimiser's slots.

    Attributes:
        memory: (nbytes,) uint8, everything that survives: parameters, slots, buffers.
        fields: what lies where in it.
        flat: (P,) all trainable parameters; the module's own are views of it.
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
        self.parameters = parameters
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
        slots = optimiser.slots(flat)
        self.fields = layout({"params": {"": flat}, "opt": slots, "buffers": buffers})
        size = max(f.start + f.nbytes for f in self.fields)
        self._lie(torch.zeros(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=flat.device))
        for part, values in {"params": first, "opt": slots, "buffers": buffers}.items():
            _copy(self.state()[part], values, part)
        self._point(self._buffers)
        self._sent: tuple[Tensor, Tensor, dict[str, Tensor]] | None = None  # the pass that is remembered
        self._at: dict[str, Tensor] | None = None  # the weights that a gradient is taken at, if not its own
        self._scratch = False
        self._keeper: Keep | None = None
        self._before: Tensor | None = None
        self._chance = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in module.modules())
        module.train()

    def move(self, memory: Tensor) -> None:
        """Let the state live in this block (nbytes,) from now on."""
        memory.copy_(self.memory)
        self._lie(memory)
        self._point(self._buffers)

    def _lie(self, memory: Tensor) -> None:
        """Make everything a view of this block."""
        self.memory = memory
        views: dict[str, dict[str, Tensor]] = {"params": {}, "opt": {}, "buffers": {}}
        for f in self.fields:
            views[f.part][f.name] = f.view(memory).data  # autograd counts the changes of each by itself
        self.flat = views["params"].pop("")
        self.slots, self._buffers = views["opt"], views["buffers"]
        self._gradient = _scratch(self.flat.numel(), self.flat.dtype, self.flat.device)
        self._views: dict[str, Tensor] = {}
        self._moving: dict[str, dict[str, Tensor]] = {}  # each parameter's part of the slots
        start = 0
        for name, p in self.parameters.items():
            part = slice(start, start + p.numel())
            self._views[name] = unflatten(self.flat[part], p.shape, self.format)
            self._moving[name] = {k: unflatten(x[part], p.shape, self.format) for k, x in self.slots.items() if x.dim()}
            p.data = self._views[name]
            start = part.stop

    # -- passes ----------------------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs `(B, ...)` in training mode, with their graph. BatchNorm statistics move."""
        if self._buffers:
            self._keep()
        self._mode(True)
        out: Tensor = self.module(self._laid_out(x))
        return out

    def infer(self, x: Tensor, *, batch_statistics: bool = False) -> Tensor:
        """Outputs `(n, ...)` in evaluation mode, without a graph, in chunks of rows.

        With `batch_statistics` BatchNorm takes those of `x`, all at once; its own stay what they are.
        """
        self._mode(False)
        x = self._laid_out(x)
        if batch_statistics and self._buffers:
            with torch.no_grad(), of_the_batch(self.module):
                out: Tensor = self.module(x)
                return out
        with torch.no_grad():
            parts = [self.module(x[i : i + INFERENCE_ROWS]) for i in range(0, max(len(x), 1), INFERENCE_ROWS)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs `(B, ...)`, detached. The pass is remembered until the weights move.

        BatchNorm statistics move when `descend` uses the pass, so that it does not matter whether an engine
        remembered it or makes it again.
        """
        return self._pass(x)[1].detach()

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, for use in a loss: with their graph."""
        return self._at or self.parameters

    def minimise(self, loss: Callable[..., Tensor], *batch: object, only: Only = None) -> Tensor:
        """One optimiser step on `loss(*batch)`, a scalar; returns its value () before the step."""
        if only is None:
            value = loss(*batch)
            self._step(value, None)
            return value.detach()
        value, gradients = self.gradient(loss, *batch, of=only)
        self._keep()
        rates = self.optimiser.tick(self.slots)
        for name, g in gradients.items():
            masked = g * only[name] if isinstance(only, Mapping) else g
            self.optimiser.move(self._views[name], masked, self._moving[name], *rates)
        return value

    def gradient(
        self, loss: Callable[..., Tensor], *batch: object, of: Collection[str] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar `loss(*batch)` () and its gradient by the parameters' names; no step. Statistics move."""
        self._sent = None
        names = list(self.parameters if of is None else of)
        through = [*names, *self._through(names)]
        with self._learning(through):  # a frozen body then costs no graph
            value = loss(*batch)
            found = torch.autograd.grad(value, [self.parameters[k] for k in through], allow_unused=True)
        gradients = [
            torch.zeros_like(self.parameters[k]) if g is None else g for k, g in zip(names, found, strict=False)
        ]
        return value.detach(), dict(zip(names, gradients, strict=True))

    def gradient_at(
        self, weights: Mapping[str, Tensor], loss: Callable[..., Tensor], *batch: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar `loss(*batch)` () and its gradient by name at other weights. Statistics move."""
        value, _, gradient = self._graded_at(weights, loss, batch, graph=False)
        return value, gradient

    def curvature_at(
        self, weights: Mapping[str, Tensor], loss: Callable[..., Tensor], *batch: object
    ) -> tuple[Tensor, dict[str, Tensor], Product]:
        """As `gradient_at`, and what multiplies the Hessian there with a tree of vectors: once, by a pass back."""
        value, at, gradient = self._graded_at(weights, loss, batch, graph=True)

        def product(vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
            through = [k for k, g in gradient.items() if g.requires_grad]  # linear in the rest
            found = torch.autograd.grad(
                [gradient[k] for k in through], list(at.values()), [vectors[k] for k in through], allow_unused=True
            )
            return _whole(at, found)

        return value, {k: g.detach() for k, g in gradient.items()}, product

    def _graded_at(
        self, weights: Mapping[str, Tensor], loss: Callable[..., Tensor], batch: tuple[object, ...], *, graph: bool
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """A loss at other weights, these as leaves, and its gradient, differentiable itself if `graph`."""
        self._sent = None
        at = {k: _formatted(weights[k], self.format).detach().requires_grad_() for k in self.parameters}
        self._at = at
        try:
            with lent(list(places(self.module, self.parameters)), at):
                value = loss(*batch)
            found = torch.autograd.grad(value, list(at.values()), create_graph=graph, allow_unused=True)
        finally:
            self._at = None
        return value.detach(), at, _whole(at, found)

    def row_gradients(
        self, loss: Callable[..., Tensor], x: Tensor, y: Tensor, of: Collection[str]
    ) -> dict[str, Tensor]:
        """The gradient (B, ...) of `loss` on each row alone, by the parameters' names; no step."""
        held = list(places(self.module, {k: self.parameters[k] for k in of}))

        def one(params: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            with lent(held, params):
                return loss(row[None], label[None])

        before, self.format = self.format, torch.contiguous_format  # vmap knows no other
        try:
            with torch.no_grad():  # of the other parameters
                rows: dict[str, Tensor] = vmap(grad(one), in_dims=(None, 0, 0))({k: self._views[k] for k in of}, x, y)
            return rows
        finally:
            self.format = before

    def _through(self, names: Collection[str]) -> list[str]:
        """A further parameter to differentiate by, where torch would crash.

        A GroupNorm of channels-last images does so (torch 2.13) where its own weights' gradient is wanted, and no
        gradient of its input.
        """
        every = list(self.parameters)
        first = next((k for k in every if k in names), every[0])
        owner = self.module.get_submodule(first.rpartition(".")[0])
        crashes = self.format == torch.channels_last and isinstance(owner, nn.GroupNorm) and first != every[0]
        return every[:1] if crashes else []

    @contextlib.contextmanager
    def _learning(self, names: Collection[str]) -> Iterator[None]:
        """Within it only these parameters take part in a graph."""
        frozen = [p for k, p in self.parameters.items() if k not in names]
        for p in frozen:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in frozen:
                p.requires_grad_(True)

    def train(self, loss: Callable[..., Tensor], batches: Batches, *, only: Only = None) -> Tensor:
        """One step of `loss(x, y)` for each batch; returns the mean loss ()."""
        return torch.stack([self.minimise(loss, x, y, only=only) for x, y in batches]).mean()

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimiser step along Jᵀ `gradient`, J the Jacobian of the outputs at `x`."""
        _, outputs, moved = self._pass(x)
        self._step(outputs, gradient)
        _copy(self._buffers, moved, "buffers")

    def _pass(self, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`x`, the outputs with their graph, and the buffers as the pass would leave them."""
        if self._sent is None or self._sent[0] is not x:
            moved = {name: b.clone() for name, b in self._buffers.items()}
            self._point(moved)
            try:
                with self._own_chance(x):
                    self._sent = (x, self(x), moved)
            finally:
                self._point(self._buffers)
        return self._sent

    @contextlib.contextmanager
    def _own_chance(self, x: Tensor) -> Iterator[None]:
        """Within it dropout draws what it always draws for these weights and rows.

        So a pass that is made again, because an engine did not remember it, drops the same units.
        """
        if not self._chance:
            yield
            return
        before = torch.get_rng_state()
        content = float(self.flat.double().sum()) + float(x.double().sum())
        # torch.manual_seed is slow, and needed only where chance has a generator of the device's own
        chance = torch.default_generator if x.device.type == "cpu" else torch
        chance.manual_seed(int.from_bytes(struct.pack("<d", content), "little") >> 1)
        try:
            yield
        finally:
            torch.set_rng_state(before)

    def _point(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the module read and write these buffers."""
        for owner, key, name in self.owners:
            owner[key] = buffers[name]

    def _step(self, outputs: Tensor, gradient: Tensor | None) -> None:
        self._keep()
        self._sent = None
        outputs.backward(gradient)  # type: ignore[no-untyped-call]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters.values()]
        for p in self.parameters.values():
            p.grad = None
        rates = self.optimiser.tick(self.slots)
        if self.slots:  # one vector: several operations, each once
            torch.cat([flattened(g, self.format) for g in grads], out=self._gradient)
            self.optimiser.move(self.flat, self._gradient, self.slots, *rates)
        else:  # one operation, not worth a copy of the gradients
            for w, g in zip(self._views.values(), grads, strict=True):
                self.optimiser.move(w, g, {}, *rates)

    def _laid_out(self, x: Tensor) -> Tensor:
        """`x` in the memory format that the weights have, where it is a batch of images."""
        return x.contiguous(memory_format=self.format) if x.dim() == 4 else x

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

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """Within it the network may be changed at will: at its end it is, bit for bit, what it was."""
        before, outer = self.memory.clone(), self._scratch
        self._scratch = True
        try:
            yield
        finally:
            self.memory.copy_(before)
            self._scratch = outer
            self._sent = None

    def forget(self) -> None:
        """Drop the remembered pass: what an engine may do between any two calls."""
        self._sent = None

    # -- a call that fails changes nothing ---------------------------------------------------------

    def begin(self, keep: Keep = torch.clone) -> None:
        """A call begins: from here `rollback` undoes all changes. `keep` copies the block before the first."""
        self._keeper = keep

    def end(self) -> None:
        """The call is done: what it changed stays."""
        self._keeper = self._before = None

    def rollback(self) -> None:
        """Undo what the call that is under way has changed."""
        if self._before is not None:
            self.memory.copy_(self._before)
        self._sent = None

    @property
    def changed(self) -> bool:
        """Whether the call that is under way has changed the state."""
        return self._before is not None

    def _keep(self) -> None:
        """Copy on first write, so that calls which only predict cost nothing."""
        if self._keeper is not None and self._before is None and not self._scratch:
            self._before = self._keeper(self.memory)


def _whole(like: Mapping[str, Tensor], found: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Gradients by name, 0 where a loss does not depend on a parameter."""
    return {k: torch.zeros_like(p) if g is None else g for (k, p), g in zip(like.items(), found, strict=True)}


def _formatted(x: Tensor, format: torch.memory_format) -> Tensor:
    """A parameter in this memory format, with the very strides that our own have: torch picks kernels by those of
    single channels, too, and what was decoded has others."""
    return unflatten(flattened(x, format), x.shape, format) if x.dim() == 4 else x


@contextlib.contextmanager
def of_the_batch(module: nn.Module) -> Iterator[None]:
    """Within it BatchNorm in evaluation mode takes the statistics of the rows that it sees, and keeps none."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    own = [(m._buffers["running_mean"], m._buffers["running_var"]) for m in norms]
    for m in norms:
        m._buffers["running_mean"] = m._buffers["running_var"] = None
    try:
        yield
    finally:
        for m, (mean, var) in zip(norms, own, strict=True):
            m._buffers["running_mean"], m._buffers["running_var"] = mean, var


@lru_cache(maxsize=8)
def _scratch(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """One gradient vector (P,) for all networks of a size: it is overwritten by every step."""
    return torch.zeros(numel, dtype=dtype, device=device)


@torch.no_grad()
def _copy(to: Mapping[str, Tensor], values: Mapping[str, Tensor], part: str) -> None:
    if to.keys() != values.keys():
        wrong = sorted(to.keys() ^ values.keys())[0]
        raise StateError(f"{part} must have the names of this network: {wrong!r} is on one side only")
    for name, tensor in to.items():
        if tensor.shape != values[name].shape:
            raise StateError(f"{part}[{name!r}] must have shape {tuple(tensor.shape)}, not {tuple(values[name].shape)}")
        tensor.copy_(values[name])
