"""The network of parties that run a method together under `vmap`."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import grad, vjp, vmap

from fedloom.core._layout import Field, lent, places, unflatten
from fedloom.core.context import Batches
from fedloom.core.errors import FedloomError
from fedloom.core.network import (
    Graded,
    Loss,
    Network,
    Only,
    Product,
    chunked,
    copy_state,
    of_the_batch,
)
from fedloom.core.optim import Optimizer, clipped


class NotBatchable(FedloomError):
    """A method cannot run for many parties at once, so it runs for each party in turn."""


class Uneven(NotBatchable):
    """A method needs batches, of which its parties have different numbers, outside of `train`."""


class VmapNetwork:
    """Replaces `Network` inside `vmap`: the same passes and steps on one slice of a stacked state.

    The module of `like` is used with other weights, of which `fields` has the current tensors;
    `changed` tells whether the method has changed them. Notes made in a loss are returned from its
    gradient.
    """

    def __init__(
        self,
        like: Network,
        state: Mapping[Field, Tensor],
        notes: dict[str, Tensor | float],
        optimizer: Optimizer | None = None,
    ) -> None:
        self._like = like
        self._optimizer = optimizer or like.optimizer
        self.fields = dict(state)
        self._notes = notes
        self.changed = False
        self._live: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None  # inside a gradient
        self._sent: tuple[Tensor, Tensor, Callable[..., Any], dict[str, Tensor]] | None = None
        self._places = list(places(like.module, like.parameters))
        self._make_views()

    def _make_views(self) -> None:
        """Make the views by name that passes and steps use."""
        parts: dict[str, dict[str, Tensor]] = {"params": {}, "opt": {}, "buffers": {}}
        for field, x in self.fields.items():
            parts[field.part][field.name] = x
        flat = parts["params"].pop("")
        self._params = self._pieces(flat)
        self._slots, self._buffers = parts["opt"], parts["buffers"]
        self._counters = {k: x for k, x in self._slots.items() if x.dim() == 0}
        moving = {k: self._pieces(x) for k, x in self._slots.items() if x.dim()}
        self._moving = {
            name: {k: pieces[name] for k, pieces in moving.items()} for name in self._params
        }

    def _pieces(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [p.numel() for p in self._like.parameters.values()]
        named = zip(self._like.parameters.items(), torch.split(flat, sizes), strict=True)
        return {name: unflatten(piece, p.shape, self._like.format) for (name, p), piece in named}

    # -- the interface of Network ------------------------------------------------------------------

    def __call__(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...). BatchNorm statistics are updated."""
        if self._live is None and self._buffers:
            self._own()
        params, buffers = self._live or (self._params, self._buffers)
        return self._through(params, buffers, x, training=True)

    def infer(self, x: Tensor, *, batch_statistics: bool = False) -> Tensor:
        """Evaluation-mode outputs (n, ...), as of `Network.infer`."""
        if batch_statistics and self._buffers:
            with of_the_batch(self._like.module):
                kept = {
                    k: b
                    for k, b in self._buffers.items()
                    if not k.rpartition(".")[2].startswith("running_")
                }
                return self._through(self._params, kept, x, training=False)
        return chunked(
            lambda rows: self._through(self._params, self._buffers, rows, training=False), x
        )

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...), detached. The pass is cached until the method ends or the
        weights change.
        """
        return self._pass(x)[0]

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, for use in a loss."""
        return self._live[0] if self._live else self._params

    @property
    def in_loss(self) -> bool:
        """Whether a loss is being computed."""
        return self._live is not None

    def minimize(self, loss: Loss, *batch: object, only: Only = None) -> Tensor:
        """One optimizer step on the scalar `loss(*batch)`; its value before the step."""
        value, gradients, buffers = self._loss_and_gradient(loss, batch, only)
        if isinstance(only, Mapping):
            gradients = {k: g * only[k] for k, g in gradients.items()}
        self._step(gradients, buffers)
        return value

    def gradient(self, loss: Loss, *batch: object, of: Collection[str] | None = None) -> Graded:
        """The scalar `loss(*batch)` and its gradient by name; no step. BatchNorm statistics are
        updated.
        """
        value, gradients, buffers = self._loss_and_gradient(loss, batch, of)
        return self._store_pass(value, buffers, {}), gradients

    def gradient_at(self, weights: Mapping[str, Tensor], loss: Loss, *batch: object) -> Graded:
        """The scalar `loss(*batch)` and its gradient by name at `weights`. BatchNorm statistics are
        updated.
        """
        gradients, seen = grad(self._value_of(loss, batch), has_aux=True)(
            {k: weights[k] for k in self._params}
        )
        return self._store_pass(*seen), gradients

    def curvature_at(
        self, weights: Mapping[str, Tensor], loss: Loss, *batch: object
    ) -> tuple[Tensor, dict[str, Tensor], Product]:
        """As `gradient_at`, and the Hessian-vector product there."""
        value = grad(self._value_of(loss, batch), has_aux=True)
        gradients, pull, seen = vjp(value, {k: weights[k] for k in self._params}, has_aux=True)  # type: ignore[misc]
        return self._store_pass(*seen), gradients, lambda vectors: pull(dict(vectors))[0]

    def _store_pass(
        self, value: Tensor, buffers: dict[str, Tensor], notes: Mapping[str, Tensor | float]
    ) -> Tensor:
        """Store the buffers and notes of a pass; returns its value."""
        if buffers:
            self.load("buffers", buffers)
        self._notes.update(notes)
        return value

    def row_gradients(
        self, loss: Loss, x: Tensor, y: Tensor, of: Collection[str]
    ) -> dict[str, Tensor]:
        """Per-row gradients (B, ...) of `loss` by name; no step."""

        def row_loss(params: dict[str, Tensor], row: Tensor, label: Tensor) -> Tensor:
            self._live = (
                {**self._params, **params},
                {k: b.clone() for k, b in self._buffers.items()},
            )
            try:
                return loss(row[None], label[None])
            finally:
                self._live = None

        weights = {k: self._params[k] for k in of}
        return vmap(grad(row_loss), in_dims=(None, 0, 0))(weights, x, y)  # type: ignore[no-any-return]

    def _loss_and_gradient(
        self, loss: Loss, batch: tuple[object, ...], of: Collection[str] | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """A loss, its gradient, and the buffers after its pass."""
        chosen = self._params if of is None else {k: self._params[k] for k in of}
        gradients, (value, buffers, notes) = grad(self._value_of(loss, batch), has_aux=True)(chosen)
        self._notes.update(notes)
        return value, gradients, buffers

    def _value_of(self, loss: Loss, batch: tuple[object, ...]) -> Callable[..., tuple[Tensor, Any]]:
        """A loss as a function of parameters, with auxiliary outputs: its detached value, buffers
        and notes.
        """

        def value_of(params: dict[str, Tensor]) -> tuple[Tensor, Any]:
            buffers = {k: b.clone() for k, b in self._buffers.items()}
            self._live = {**self._params, **params}, buffers
            before = dict(self._notes)
            self._notes.clear()
            try:
                value = loss(*batch)
                return value, (value.detach(), buffers, dict(self._notes))
            finally:
                self._live = None
                self._notes.clear()
                self._notes.update(before)

        return value_of

    def train(self, loss: Loss, batches: "Batches | PaddedBatches", *, only: Only = None) -> Tensor:
        """One step on `loss(x, y)` for each batch; the mean loss (). Parties with fewer batches
        skip the last steps.
        """
        if not isinstance(batches, PaddedBatches):
            return torch.stack([self.minimize(loss, x, y, only=only) for x, y in batches]).mean()
        total = torch.zeros((), device=batches.x.device)
        for i, all_active in enumerate(batches.all_active):
            active = batches.active[i]
            if all_active:
                value = self.minimize(loss, batches.x[i], batches.y[i], only=only)
            else:
                before = {field: x.clone() for field, x in self.fields.items()}
                notes = dict(self._notes)
                value = self.minimize(loss, batches.x[i], batches.y[i], only=only)
                for field, x in self.fields.items():
                    x.copy_(torch.where(active, x, before[field]))
                for name, old in notes.items():
                    self._notes[name] = torch.where(
                        active, torch.as_tensor(self._notes[name]), torch.as_tensor(old)
                    )
            total = total + torch.where(active, value, torch.zeros_like(value))
        return total / batches.active.sum()

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimizer step along Jᵀ `gradient`, J the Jacobian of the outputs at `x`."""
        _, pull, buffers = self._pass(x)
        (gradients,) = pull(gradient)
        self._step(gradients, buffers)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """`params`, `buffers` and `opt` as trees of named tensors."""
        return {"params": self._params, "buffers": self._buffers, "opt": self._slots}

    def load(self, part: str, values: Mapping[str, Tensor]) -> None:
        """Copy `values` into one part of the state; names and shapes must be the same."""
        self._own()
        copy_state(self.state()[part], values, part)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[None]:
        """A context in which the network may be changed; on exit its state is restored."""
        before, self.changed = (self.fields, self.changed), False
        self._own()
        try:
            yield
        finally:
            self.fields, self.changed = before
            self._sent = None
            self._make_views()

    # -- implementation ----------------------------------------------------------------------------

    def _own(self) -> None:
        """Copy on first write."""
        self._sent = None
        if not self.changed:
            self.fields = {field: x.clone() for field, x in self.fields.items()}
            self._make_views()
            self.changed = True

    def _step(self, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._own()
        rates = self._optimizer.tick(self._counters)
        for name, g in zip(
            gradients, clipped([*gradients.values()], self._optimizer.clip), strict=True
        ):
            w, moving = self._params[name], self._moving[name]
            _Move.apply(self._optimizer, w, g, moving, rates)  # type: ignore[no-untyped-call]
        for name, b in self._buffers.items():
            b.copy_(buffers[name])

    def _pass(self, x: Tensor) -> tuple[Tensor, Callable[..., Any], dict[str, Tensor]]:
        """The outputs, the function that maps their gradient to the parameters', and the buffers
        after the pass.
        """
        if self._sent is None or self._sent[0] is not x:

            def outputs(params: dict[str, Tensor]) -> Graded:
                buffers = {k: b.clone() for k, b in self._buffers.items()}
                return self._through(params, buffers, x, training=True), buffers

            out, pull, buffers = vjp(outputs, self._params, has_aux=True)  # type: ignore[misc]
            self._sent = (x, out, pull, buffers)
        return self._sent[1:]

    def _through(
        self,
        params: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        x: Tensor,
        *,
        training: bool,
    ) -> Tensor:
        """The module's outputs with these weights."""
        module = self._like.module
        module.train(training)
        owners = [place for place in self._like.owners if place[2] in buffers]
        with lent(self._places, params), lent(owners, buffers):
            out: Tensor = module(x)
        return out


class _Move(torch.autograd.Function):
    """An optimizer's `move` for all parties at once. torch has no batching rules for many in-place
    operations; as `move` is elementwise, it can be applied to the stacked tensors directly.
    """

    @staticmethod
    def forward(*_: Any) -> NoReturn:
        """Never called: a step always runs under vmap."""
        raise AssertionError("a stacked step outside of vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Saves nothing, as steps are not differentiated."""

    @staticmethod
    def vmap(
        info: Any,
        dims: Any,
        optimizer: Optimizer,
        w: Tensor,
        g: Tensor,
        slots: dict[str, Tensor],
        rates: tuple[Any, ...],
    ) -> tuple[Tensor, int]:
        """Move the stacked weights, with each party's own rates broadcast over its weights."""
        _, w_dim, g_dim, slot_dims, rate_dims = dims
        w, g = w.movedim(w_dim, 0), g[None] if g_dim is None else g.movedim(g_dim, 0)
        slots = {k: x.movedim(slot_dims[k], 0) for k, x in slots.items()}
        wide = (-1, *[1] * (w.dim() - 1))
        each = [
            r.view(wide).to(w.dtype) if d is not None else r
            for r, d in zip(rates, rate_dims, strict=True)
        ]
        optimizer.move(w, g, slots, *each)
        return w.new_empty(info.batch_size), 0


class PaddedBatches:
    """Batches x (T, B, ...), y (T, B) of parties that have different numbers of them, for `train`
    alone. T is the largest; `active` (T,) bool are the steps that this party takes, `all_active`
    those that all parties take.
    """

    def __init__(self, x: Tensor, y: Tensor, active: Tensor, all_active: list[bool]) -> None:
        self.x, self.y, self.active, self.all_active = x, y, active, all_active

    def __iter__(self) -> NoReturn:
        raise Uneven("it iterates over batches, of which the parties have different numbers")

    __len__ = __getitem__ = __iter__
