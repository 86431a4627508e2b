"""Party: what one client, peer, server or column holder remembers and can do.

A method page subclasses `Party` once per role and writes ordinary methods; each is called by a message and
answers with one. What survives between two messages is declared in `STATE`. Assigning anything else is refused,
because an engine may hold a party in another process, rebuild it from its state, or resume it next week.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.context import Batches, ClientContext, PublicSet, Rows
from fedloom.core.errors import MessageError, MethodError, StateError
from fedloom.core.message import Tree
from fedloom.core.network import Keep, Network, Only, Product
from fedloom.core.optim import Optimiser

NETWORK_STATE = ("params", "buffers", "opt")
_OWN = ("cfg", "context", "_network", "_notes")
ConfigT = TypeVar("ConfigT")
Note: TypeAlias = float | list[float]
"""What a party noted, as the experiment reads it."""


class Party(Generic[ConfigT]):
    """One participant. Subclasses declare `STATE`, and set themselves up in `setup`.

    Attributes:
        STATE: names of what survives between messages. `params`, `buffers` and `opt` belong to the network
            given to `network()`; any other name is a tree of tensors and plain numbers.
        EXPORT: which of STATE is used after training: what an export of the party holds (see `fedloom.deploy`).
        ROLE: what the ledger calls such a party; "" for the class's own name.
        CALLS: methods that the home's messages may call: what a round gives `fed.call` and `fed.asked`, and an
            `exchange` as `take`.
        TO_PEERS: methods whose replies are for peers alone: what an `exchange` asks and answers. At a node of its own
            a party never gives them to the home, and answers nothing that is in neither list, whatever that asks for.
        cfg: the method's config.
        site: the party's data and equipment. It never changes.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    EXPORT: ClassVar[tuple[str, ...]] = ("params", "buffers")
    ROLE: ClassVar[str] = ""
    CALLS: ClassVar[tuple[str, ...]] = ()
    TO_PEERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cfg: ConfigT, context: ClientContext) -> None:
        self._network: Network | None = None
        self._notes: dict[str, Tensor | float] = {}
        self.cfg = cfg
        self.context = context
        self.setup()
        missing = [name for name in self.STATE if name not in NETWORK_STATE and name not in vars(self)]
        if missing:
            raise MethodError(f"{type(self).__name__} declares {missing[0]!r} in STATE but setup() does not set it")
        if self._network is None and set(self.STATE) & set(NETWORK_STATE):
            raise MethodError(
                f"{type(self).__name__} declares params in STATE; call self.network(module, optimiser) in setup()"
            )

    def setup(self) -> None:
        """Give every name in STATE its first value. Runs once, before the first message."""

    # -- the network -----------------------------------------------------------------------------

    def network(self, module: nn.Module, optimiser: Optimiser) -> None:
        """Make `module` this party's network. Only `setup` may call it."""
        needed = {"params", "opt"} | ({"buffers"} if any(True for _ in module.buffers()) else set())
        if not needed <= set(self.STATE):
            raise MethodError(
                f"{type(self).__name__} trains a network: its STATE must name {sorted(needed)}, "
                f"not only {list(self.STATE)}"
            )
        self._network = Network(module.to(self.context.device), optimiser)

    @property
    def net(self) -> Network:
        """The network, or an error that says how to get one."""
        if self._network is None:
            raise MethodError(f"{type(self).__name__} has no network: call self.network(...) in setup()")
        return self._network

    def model(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...) with their graph, for use in a loss."""
        return self.net(x)

    def infer(self, x: Tensor) -> Tensor:
        """Evaluation-mode outputs (n, ...), constants. BatchNorm takes its running statistics, or those of `x` where
        the config has `batchnorm = "batch"`.

        A page overrides this where others are evaluated: logits of a network that outputs features, or those of a
        black box.
        """
        return self.net.infer(x, batch_statistics=getattr(self.cfg, "batchnorm", "own") == "batch")

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...), constants to send; `descend(x, …)` may follow."""
        return self.net.forward(x)

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimiser step along Jᵀ `gradient` (B, ...), J the Jacobian of the outputs at `x`."""
        self.net.descend(x, gradient)

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, for use in a loss: with their graph."""
        return self.net.live

    def minimise(self, loss: Callable[..., Tensor], *batch: object, only: Only = None) -> Tensor:
        """One optimiser step on the scalar `loss(*batch)`; returns its value before the step.

        Args:
            loss: gives a scalar with its graph.
            batch: what it is called with.
            only: names of the parameters that move, None for all; the others stay bit for bit what they were. With
                masks by name the gradient is multiplied by them: an entry at 0 stays too, unless momentum from before
                or weight decay moves it.
        """
        return self.net.minimise(loss, *batch, only=only)

    def gradient(
        self, loss: Callable[..., Tensor], *batch: object, of: Collection[str] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar `loss(*batch)` () and its gradient by the names `of` (None: all) the parameters; no step.

        The passes are in training mode: BatchNorm statistics move.
        """
        return self.net.gradient(loss, *batch, of=of)

    def gradient_at(
        self, weights: Mapping[str, Tensor], loss: Callable[..., Tensor], *batch: object
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The scalar `loss(*batch)` () and its gradient by name, both at `weights` in place of the own parameters.

        Within the loss `self.model` and `self.live` are at those weights. BatchNorm statistics move.
        """
        return self.net.gradient_at(weights, loss, *batch)

    def curvature_at(
        self, weights: Mapping[str, Tensor], loss: Callable[..., Tensor], *batch: object
    ) -> tuple[Tensor, dict[str, Tensor], Product]:
        """As `gradient_at`, and a function that multiplies the loss's Hessian at `weights` with vectors by name.

        The product is exact, costs one more pass back through the graph that the gradient left, and can be had once.
        """
        return self.net.curvature_at(weights, loss, *batch)

    def row_gradients(
        self, loss: Callable[..., Tensor], x: Tensor, y: Tensor, *, of: Collection[str]
    ) -> dict[str, Tensor]:
        """The gradient (B, ...) of `loss(x, y)` on each row of x (B, ...), y (B,) alone, by the names `of` parameters.

        For what must be clipped row by row. A network whose rows don't stand alone (BatchNorm) is refused by torch.
        """
        return self.net.row_gradients(loss, x, y, of)

    def train(self, loss: Callable[..., Tensor], batches: Batches, *, only: Only = None) -> Tensor:
        """One step of `loss(x, y)` for each batch; returns the mean loss (). `only` as in `minimise`."""
        return self.net.train(loss, batches, only=only)

    def scratch(self) -> AbstractContextManager[None]:
        """Within it the network, if any, may be changed at will: at its end it is, bit for bit, what it was."""
        return contextlib.nullcontext() if self._network is None else self._network.scratch()

    @property
    def params(self) -> dict[str, Tensor]:
        """The network's parameters by name. Assign a tree of the same names and shapes to change them."""
        return self.net.state()["params"]

    @params.setter
    def params(self, values: Mapping[str, Tensor]) -> None:
        self.net.load("params", values)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The network's buffers (BatchNorm statistics) by name; assignable like `params`."""
        return self.net.state()["buffers"]

    @buffers.setter
    def buffers(self, values: Mapping[str, Tensor]) -> None:
        self.net.load("buffers", values)

    @property
    def opt(self) -> dict[str, Tensor]:
        """The optimiser's slots by name; assignable like `params`."""
        return self.net.state()["opt"]

    @opt.setter
    def opt(self, values: Mapping[str, Tensor]) -> None:
        self.net.load("opt", values)

    # -- data and chance -------------------------------------------------------------------------

    @property
    def data(self) -> Rows:
        """The party's own rows, or an error."""
        return self.context.rows

    @property
    def row_count(self) -> Tensor:
        """How many own rows, () int64: to weigh with. A tensor, so that parties can be done together."""
        return self.context.row_count

    def stream(self, purpose: str, *keys: int) -> np.random.Generator:
        """Random numbers of this party for this purpose: the same wherever and whenever it runs."""
        return self.context.stream(purpose, *keys)

    def noise(self, on: Tree, purpose: str, *keys: int) -> np.random.Generator:
        """The same for numbers that hide `on`, tensors and the scale of the noise. If the party's place has a secret,
        nobody else can make them, and they are the same again for the same `on` and purpose, whatever the keys."""
        return self.context.noise(on, purpose, *keys)

    @contextlib.contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Within it torch's global generator is this party's own, for initialising a network."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(self.stream(purpose).integers(2**62)))
            yield

    def batches(self, t: int, *, steps: int, size: int) -> Batches:
        """Round t's `steps` independent batches of `size` own rows."""
        return self.context.batches(t, steps=steps, size=size)

    def epochs(self, t: int, *, epochs: int = 1, size: int) -> Batches:
        """Round t's shuffled passes over the own rows, in full batches of `size`."""
        return self.context.epochs(t, epochs=epochs, size=size)

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """One batch of round t: x (b, ...), y (b,) of b = `size` different own rows, or of all if there are fewer."""
        return self.context.sample_batch(t, size=size)

    def public(self, t: int, *, steps: int, size: int) -> tuple[Tensor, ...]:
        """Round t's public batches, each (B, ...), the same at every party."""
        return self.public_set.batches(t, steps, size)

    def public_rows(self, t: int, *, steps: int, size: int) -> Tensor:
        """The numbers (T, B) of the rows in round t's public batches."""
        return self.public_set.plan(t, steps, size)

    @property
    def public_set(self) -> PublicSet:
        """The public set, or an error."""
        if self.context.public is None:
            raise MethodError(f"{type(self).__name__} needs a public set: set data.public to its size")
        return self.context.public

    def public_digest(self) -> str | None:
        """What the public set that this party holds comes to: parties with different ones can't work together."""
        return None if self.context.public is None else self.context.public.digest

    # -- what the experiment reads; nothing here is a message ------------------------------------------

    def note(self, name: str, value: Tensor | float) -> None:
        """Keep a diagnostic of this round at this place, a number or a vector. The last value of a name counts.

        "mixing" is the vector (m,) of the weights with which this party mixed the models of all m parties.
        """
        self._notes[name] = value

    def take_notes(self) -> dict[str, Note]:
        """The notes since the last call, as floats or lists of them."""
        notes: dict[str, Note] = {}
        for name, value in self._notes.items():
            notes[name] = value.tolist() if isinstance(value, Tensor) and value.dim() else float(value)
        self._notes.clear()
        return notes

    def broadcast(self) -> dict[str, Tree]:
        """At a home: what every client would fetch before its model is used, such as today's global weights."""
        return {}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: make the network what is to be evaluated. It is undone afterwards.

        Args:
            way: one of the config's `eval_modes`, or "".
            handout: the home's, if there is one.
        """

    # -- state -----------------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN and vars(self).get(name) is None  # set once, by the core
        if name not in self.STATE and not own:
            raise StateError(
                f"{type(self).__name__} assigns self.{name}, which is not in its STATE {self.STATE}: it would be "
                f"lost between messages. Add {name!r} to STATE, or use a local variable; what never changes belongs "
                "in the config or on the class."
            )
        if name in self.STATE and name not in NETWORK_STATE:
            value = _as_state(value, f"{type(self).__name__}.{name}")
        object.__setattr__(self, name, value)

    def state(self) -> dict[str, Tree]:
        """All that survives between messages, in the order of STATE: views, not copies."""
        return {name: getattr(self, name) for name in self.STATE}

    def load(self, state: Mapping[str, Tree]) -> None:
        """Take over a state that `state()` gave, here or elsewhere."""
        if tuple(state) != self.STATE:
            raise StateError(
                f"{type(self).__name__} keeps {self.STATE}, but the state to load has {tuple(state)}: "
                "it comes from another method or version"
            )
        for name, value in state.items():
            setattr(self, name, message.map_tensors(lambda x: x.to(self.context.device), value))

    def own_state(self) -> dict[str, Tree]:
        """The part of the state that is not the network's: views, not copies."""
        return {name: vars(self)[name] for name in self.STATE if name not in NETWORK_STATE}

    @contextlib.contextmanager
    def transaction(self, keep: Keep = torch.clone) -> Iterator[None]:
        """Within it an exception undoes every change of state: a call that fails changes nothing.

        Args:
            keep: how to copy the network's memory before its first change.
        """
        own = {name: message.map_tensors(torch.Tensor.clone, value) for name, value in self.own_state().items()}
        if self._network is not None:
            self._network.begin(keep)
        try:
            yield
        except BaseException:
            vars(self).update(own)
            if self._network is not None:
                self._network.rollback()
            raise
        finally:
            if self._network is not None:
                self._network.end()


def _as_state(value: Tree, where: str) -> Tree:
    try:
        message.check(value)
    except MessageError as error:
        raise StateError(
            f"{where} must be a tree of tensors and plain numbers to survive between messages: {error}"
        ) from None
    return message.map_tensors(torch.Tensor.detach, value)
