"""Party: the base class of clients, peers, servers and column holders.

A method page subclasses `Party` once per role. Each method of the subclass handles one message and
returns the reply. `STATE` declares the attributes that persist between messages. Assigning any
other attribute raises an error, because an engine may move a party to another process, rebuild it
from its state, or resume it later.
"""

import contextlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.core import message
from fedloom.core.context import Batches, ClientContext, PublicSet, Rows
from fedloom.core.errors import MessageError, MethodError, StateError, warn_once
from fedloom.core.message import Tree
from fedloom.core.network import Graded, Keep, Loss, Network, Only, Product
from fedloom.core.optim import SGD, Adam, Optimizer

NETWORK_STATE = ("params", "buffers", "opt")
_OWN = ("cfg", "context", "_network", "_notes")
ConfigT_co = TypeVar("ConfigT_co", covariant=True)  # sound, because `cfg` is set only once
Note: TypeAlias = float | list[float]
"""A diagnostic of a party: a number or a vector."""
Fact: TypeAlias = Literal["passed on", "by class", "introduces", "answers"]
"""What a page declares of replies: see `Party.TELLS`."""


@dataclass(frozen=True)
class LearnedTable:
    """A table for a report.

    Attributes:
        title: a line.
        columns: headings.
        rows: values: text in the first column, then text, numbers or None.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


class Party(Generic[ConfigT_co]):
    """One participant. Subclasses declare `STATE` and initialize it in `setup`.

    Example:
        >>> class Client(Party):
        ...     STATE = ("params", "opt", "seen")
        ...
        ...     def setup(self):
        ...         self.network(self.context.build(), SGD(0.1))
        ...         self.seen = 0
        ...
        ...     def update(self, *, t):
        ...         batches = self.batches(t, steps=2, size=8)
        ...         loss = self.train(lambda x, y: nn.functional.cross_entropy(self.model(x), y), batches)
        ...         self.seen = self.seen + 2
        ...         self.note("loss", loss)
        ...         return {"weights": self.params, "rows": self.row_count}
        >>> rows = Rows(torch.randn(20, 3), torch.arange(20) % 2, torch.arange(20), torch.zeros(1), torch.ones(1))
        >>> public = PublicSet(rows, 0, "a digest")
        >>> context = ClientContext(id=0, classes=2, data=rows, public=public, network=lambda: nn.Linear(3, 2))
        >>> party = Client(None, context)
        >>> reply = party.update(t=0)
        >>> reply["rows"], party.seen, [*party.take_notes()]
        (tensor(20), 2, ['loss'])
        >>> party.state_names, [*party.params], party.opt, party.buffers
        (('params', 'opt', 'seen'), ['weight', 'bias'], {}, {})

    Attributes:
        STATE: names of the attributes that persist between messages. `params`, `buffers` and `opt`
            belong to the network given to `network()`; any other name is a tree of tensors and
            plain numbers.
        EXPORT: the names in STATE that `fedloom export` writes (see `fedloom.deploy`).
        ROLE: the role in the party's ledger name; "" for the class name in lower case.
        CALLS: methods that the coordinator may call: those named in `fed.call`, in
            `fed.choose_peers`, and as `take` in `fed.exchange`.
        TO_PEERS: methods whose replies go to peers only: those named as `ask` and `answer` in
            `fed.exchange`. A node never sends these replies to the coordinator, and refuses every
            method that is in neither list.
        MEANS: methods in CALLS whose replies only enter a mean: those named in `fed.mean`; among
            peers, methods in TO_PEERS. A run may then name a robust rule, secure sums or noise in
            `[aggregate]`. With secure sums a node never sends one of these replies to the
            coordinator unmasked.
        ROWS: names in STATE of tensors (..., n) with an entry for each own row, at a page without a
            network that treats
            each row by itself: replies of methods in MEANS are sums over rows, as int64; other
            methods in CALLS answer None; parties that got the same messages differ in their rows
            alone; and no tensor of the state is changed in place. Parties of one process then
            answer as one party with all rows. `MethodConfig.rows_add_up` may except some settings.
        TELLS: which methods in CALLS have replies of which more is known than that rows are in them:
            "passed on", the server sends one party's reply to others as it is; "by class", counts,
            sums or means for each class or cell, in which few rows are seen; "introduces", own rows
            are compared with public ones, which a node does with one set of settings in all runs
            (`MethodConfig.introduction`); "answers", the arguments are rows to be predicted, which
            a node counts over all runs. () says that there are none. A page that does not declare
            it (None) is taken at its worst: its terms name all weaknesses, and each limit holds for
            each method.
        cfg: the method's config.
        context: the party's rows, network, neighbours and seed. It never changes.
    """  # noqa: E501

    STATE: ClassVar[tuple[str, ...]] = ()
    EXPORT: ClassVar[tuple[str, ...]] = ("params", "buffers")
    ROLE: ClassVar[str] = ""
    CALLS: ClassVar[tuple[str, ...]] = ()
    TO_PEERS: ClassVar[tuple[str, ...]] = ()
    MEANS: ClassVar[tuple[str, ...]] = ()
    ROWS: ClassVar[tuple[str, ...]] = ()
    TELLS: ClassVar[tuple[tuple[Fact, tuple[str, ...]], ...] | None] = None

    def __init__(self, cfg: ConfigT_co, context: ClientContext) -> None:
        self._network: Network | None = None
        self._notes: dict[str, Tensor | float] = {}
        self.cfg = cfg
        self.context = context
        self.setup()
        missing = [
            name
            for name in self.state_names
            if name not in NETWORK_STATE and name not in vars(self)
        ]
        if missing:
            raise MethodError(
                f"{type(self).__name__} declares {missing[0]!r} in STATE but setup() does not "
                "set it"
            )
        if self._network is None and set(self.STATE) & set(NETWORK_STATE):
            raise MethodError(
                f"{type(self).__name__} declares params in STATE; call self.network(module, "
                "optimizer) in setup()"
            )

    def setup(self) -> None:
        """Set the initial value of every name in STATE. Called once, before the first message."""

    # -- the network -----------------------------------------------------------------------------

    def network(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Make `module` this party's network. Call it in `setup` only."""
        needed = {"params", "opt"} | ({"buffers"} if any(True for _ in module.buffers()) else set())
        if not needed <= set(self.STATE):
            raise MethodError(
                f"{type(self).__name__} trains a network: its STATE must name {sorted(needed)}, "
                f"not only {list(self.STATE)}"
            )
        if not hasattr(optimizer, "slots"):
            raise MethodError(
                "the optimizer of self.network must be one of fedloom.core.optim, such as "
                f"SGD(0.05), not {type(optimizer).__name__} of {type(optimizer).__module__}"
            )
        if isinstance(optimizer, SGD | Adam):
            optimizer = self.context.local.applied(optimizer)
        self._network = Network(module.to(self.context.device), optimizer)

    def at_round(self, t: int) -> None:
        """Set the learning rate of round t, -1 outside of rounds, by the run's schedule. For
        engines, before a call.
        """
        if self._network is not None and self.context.local.schedule != "constant":
            self._network.scale_rate(self.context.local.factor(t))

    @property
    def net(self) -> Network:
        """The network. Raises MethodError if `setup` did not create one.

        Example:
            >>> type(party.net).__name__
            'Network'
        """
        if self._network is None:
            raise MethodError(
                f"{type(self).__name__} has no network: call self.network(...) in setup()"
            )
        return self._network

    def model(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...) with their graph, for use in a loss.

        Example:
            >>> party.model(torch.ones(4, 3)).requires_grad
            True
        """
        return self.net(x)

    def infer(self, x: Tensor) -> Tensor:
        """Evaluation-mode outputs (n, ...), detached. BatchNorm uses its running statistics, or the
        statistics of `x` if the config has `batchnorm = "batch"`. Override it if evaluation needs
        other outputs, such as a black box's.

        Example:
            >>> party.infer(torch.ones(4, 3)).requires_grad
            False
        """
        return self.net.infer(x, batch_statistics=getattr(self.cfg, "batchnorm", "own") == "batch")

    def forward(self, x: Tensor) -> Tensor:
        """Training-mode outputs (B, ...), detached; `descend(x, …)` may follow.

        Example:
            >>> party.forward(torch.ones(4, 3)).shape
            torch.Size([4, 2])
        """
        return self.net.forward(x)

    def descend(self, x: Tensor, gradient: Tensor) -> None:
        """One optimizer step along Jᵀ `gradient` (B, ...), J the Jacobian of the outputs at `x`.

        Example:
            >>> x = torch.ones(4, 3)
            >>> z = party.forward(x)
            >>> party.descend(x, z / len(x))  # one step towards outputs of 0
            >>> bool(party.infer(x).norm() < z.norm())
            True
        """
        self.net.descend(x, gradient)

    @property
    def live(self) -> Mapping[str, Tensor]:
        """The trainable parameters by name, with their graph, for use in a loss.

        Example:
            >>> party.minimize(lambda: party.live["bias"].square().sum()).shape  # one step of a penalty
            torch.Size([])
        """  # noqa: E501
        return self.net.live

    def minimize(self, loss: Loss, *batch: object, only: Only = None) -> Tensor:
        """One optimizer step on the scalar `loss(*batch)`; returns its value before the step.

        `only` names the parameters to update; the others stay bit-identical. If it maps names to
        masks, gradients are multiplied by the masks: an entry with mask 0 moves only by earlier
        momentum or weight decay.

        Example:
            >>> x, y = party.sample_batch(0, size=8)
            >>> loss = lambda x, y: nn.functional.cross_entropy(party.model(x), y)
            >>> before, after = (party.minimize(loss, x, y, only=["weight"]) for _ in range(2))
            >>> bool(after < before)
            True
        """
        return self.net.minimize(loss, *batch, only=only)

    def gradient(self, loss: Loss, *batch: object, of: Collection[str] | None = None) -> Graded:
        """The scalar `loss(*batch)` () and its gradient for the parameters named in `of` (None:
        all); no step. BatchNorm statistics are updated.

        Example:
            >>> loss = lambda: party.live["bias"].square().sum()
            >>> party.gradient(loss, of=["bias"])[1]["bias"].equal(2 * party.params["bias"])
            True
        """
        return self.net.gradient(loss, *batch, of=of)

    def gradient_at(self, weights: Mapping[str, Tensor], loss: Loss, *batch: object) -> Graded:
        """As `gradient` of all parameters, at `weights`, which `self.model` and `self.live` use
        within the loss.

        Example:
            >>> zeros = {name: torch.zeros_like(p) for name, p in party.params.items()}
            >>> value, slope = party.gradient_at(zeros, lambda x: party.model(x).sum(), torch.ones(4, 3))
            >>> value.item(), slope["bias"]
            (0.0, tensor([4., 4.]))
        """  # noqa: E501
        return self.net.gradient_at(weights, loss, *batch)

    def curvature_at(
        self, weights: Mapping[str, Tensor], loss: Loss, *batch: object
    ) -> tuple[Tensor, dict[str, Tensor], Product]:
        """As `gradient_at`, and the exact Hessian-vector product at `weights`, a function of
        vectors by name. It costs one backward pass and may be called once.

        Example:
            >>> ones = {name: torch.ones_like(p) for name, p in party.params.items()}
            >>> value, slope, product = party.curvature_at(ones, lambda: party.live["bias"].pow(3).sum())
            >>> slope["bias"], product(ones)["bias"]  # 3 b² and 6 b
            (tensor([3., 3.]), tensor([6., 6.]))
        """  # noqa: E501
        return self.net.curvature_at(weights, loss, *batch)

    def row_gradients(
        self, loss: Loss, x: Tensor, y: Tensor, *, of: Collection[str]
    ) -> dict[str, Tensor]:
        """Gradients (B, ...) of `loss(x, y)` for each row of x (B, ...), y (B,), by the parameters
        named in `of`, to clip row by row. torch refuses networks whose rows depend on each other
        (BatchNorm).

        Example:
            >>> x, y = party.sample_batch(0, size=5)
            >>> loss = lambda x, y: nn.functional.cross_entropy(party.model(x), y)
            >>> party.row_gradients(loss, x, y, of=["bias"])["bias"].shape
            torch.Size([5, 2])
        """
        return self.net.row_gradients(loss, x, y, of)

    def train(self, loss: Loss, batches: Batches, *, only: Only = None) -> Tensor:
        """One step of `loss(x, y)` for each batch; returns the mean loss (). `only` as in
        `minimize`.

        Example:
            >>> loss = lambda x, y: nn.functional.cross_entropy(party.model(x), y)
            >>> party.train(loss, party.epochs(0, size=8)).shape
            torch.Size([])
        """
        return self.net.train(loss, batches, only=only)

    def scratch(self) -> AbstractContextManager[None]:
        """A context in which the network may be changed; on exit its state is restored bit for bit.

        Example:
            >>> before = party.params["bias"].clone()
            >>> with party.scratch():
            ...     party.params = {name: torch.zeros_like(p) for name, p in party.params.items()}
            >>> party.params["bias"].equal(before)
            True
        """
        return contextlib.nullcontext() if self._network is None else self._network.scratch()

    @property
    def params(self) -> dict[str, Tensor]:
        """The network's parameters by name, without a graph: use `live` in a loss. Assign a tree of
        the same names and shapes to replace them.
        """
        if self.net.in_loss:
            warn_once(
                f"{type(self).__name__} reads self.params in a loss, where it is a constant "
                "without a gradient: use self.live; if a constant is meant, read self.params "
                "before the loss"
            )
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
        """The optimizer's slots by name; assignable like `params`."""
        return self.net.state()["opt"]

    @opt.setter
    def opt(self, values: Mapping[str, Tensor]) -> None:
        self.net.load("opt", values)

    # -- data and random numbers -----------------------------------------------------------------

    @property
    def data(self) -> Rows:
        """The party's own rows. Raises MethodError if it has none."""
        return self.context.rows

    @property
    def row_count(self) -> Tensor:
        """The number of own rows, () int64, as a weight. A tensor, so that parties can
        be batched.
        """
        return self.context.row_count

    def stream(self, purpose: str, *keys: int) -> np.random.Generator:
        """A generator for this party and purpose; its numbers do not depend on the engine or on
        earlier draws.

        Example:
            >>> first, again = (party.stream("mixup", 3).random() for _ in range(2))
            >>> first == again
            True
        """
        return self.context.stream(purpose, *keys)

    def noise(self, on: Tree, purpose: str, *keys: int) -> np.random.Generator:
        """As `stream`, for noise that hides `on` (tensors and the noise scale): see
        `ClientContext.noise`.

        Example:
            >>> party.noise({"weights": party.params, "scale": 1.0}, "weights").normal(size=2).shape
            (2,)
        """
        return self.context.noise(on, purpose, *keys)

    @contextlib.contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Within it torch's global generator is this party's own, for initializing a network.

        Example:
            >>> with party.seeded("head"):
            ...     first = torch.randn(2)
            >>> with party.seeded("head"):
            ...     print(torch.randn(2).equal(first))
            True
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(self.stream(purpose).integers(2**62)))
            yield

    def batches(self, t: int, *, steps: int, size: int) -> Batches:
        """Round t's `steps` independent batches of `size` own rows."""
        return self.context.batches(t, steps=steps, size=size)

    def epochs(self, t: int, *, epochs: int = 1, size: int) -> Batches:
        """Round t's shuffled epochs over the own rows, in full batches of `size`."""
        return self.context.epochs(t, epochs=epochs, size=size)

    def sample_batch(self, t: int, *, size: int) -> tuple[Tensor, Tensor]:
        """One batch of round t: x (b, ...), y (b,) of b = `size` distinct own rows, or of all if
        there are fewer.
        """
        return self.context.sample_batch(t, size=size)

    def public(self, t: int, *, steps: int, size: int) -> tuple[Tensor, ...]:
        """Round t's public batches, each (B, ...), the same at every party.

        Example:
            >>> [x.shape for x in party.public(0, steps=2, size=5)], party.public_rows(0, steps=2, size=5).shape
            ([torch.Size([5, 3]), torch.Size([5, 3])], torch.Size([2, 5]))
        """  # noqa: E501
        return self.public_set.batches(t, steps, size)

    def public_rows(self, t: int, *, steps: int, size: int) -> Tensor:
        """The row numbers (T, B) of round t's public batches."""
        return self.public_set.plan(t, steps, size)

    @property
    def public_set(self) -> PublicSet:
        """The public set. Raises MethodError if the party has none."""
        if self.context.public is None:
            raise MethodError(
                f"{type(self).__name__} needs public rows: set data.public_rows to their number"
            )
        return self.context.public

    def public_digest(self) -> str | None:
        """The digest of the party's public set, which must be equal at all parties."""
        return None if self.context.public is None else self.context.public.digest

    # -- for the experiment; none of this is sent as a message -------------------------------------

    def note(self, name: str, value: Tensor | float) -> None:
        """Record a diagnostic of this round, a number or a vector; a later value of the same name
        replaces it. "mixing" is the vector (m,) of this party's mixing weights for the models of
        all m parties.
        """
        self._notes[name] = value

    def take_notes(self) -> dict[str, Note]:
        """Return and clear the notes, as floats or lists of floats."""
        notes = {
            k: v.tolist() if isinstance(v, Tensor) and v.dim() else float(v)
            for k, v in self._notes.items()
        }
        self._notes.clear()
        return notes

    def broadcast(self) -> dict[str, Tree]:
        """At a server: what every client receives before it is evaluated, such as the current
        global weights.
        """
        return {}

    def findings(self) -> Sequence[LearnedTable]:
        """At a server: what it has learned so far, such as coefficients, for the run's result and
        report.

        Example:
            >>> class Server(Party):
            ...     def findings(self):
            ...         return [LearnedTable("Coefficients", ("column", "value"), (("age", 0.3),))]
            >>> Server(None, ClientContext(id=0)).findings()[0].rows
            (('age', 0.3),)
        """
        return ()

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Prepare the network for an evaluation, such as by fine-tuning; the change is undone
        afterwards.

        `eval_mode` is one of the config's `eval_modes`, or ""; `broadcast` the result of the
        server's `broadcast()`.
        """

    # -- state -----------------------------------------------------------------------------------

    @property
    def state_names(self) -> tuple[str, ...]:
        """The names of the state: STATE, unless the config decides about some of them."""
        return self.STATE

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in _OWN and vars(self).get(name) is None  # set once, by the core
        if not own and name not in self.state_names:
            raise StateError(
                f"{type(self).__name__} assigns self.{name}, which is not in its STATE "
                f"{self.state_names} and would be lost between messages. Add {name!r} to STATE, "
                "or use a local variable; put constants in the config or on the class."
            )
        if not own and name not in NETWORK_STATE:
            try:
                message.check(value)
            except MessageError as error:
                raise StateError(
                    f"{type(self).__name__}.{name} is in STATE and must be a tree of tensors and "
                    f"plain numbers: {error}"
                ) from None
            value = message.map_tensors(torch.Tensor.detach, value)
        object.__setattr__(self, name, value)

    def state(self) -> dict[str, Tree]:
        """The attributes named in STATE, in that order: views, not copies."""
        return {name: getattr(self, name) for name in self.state_names}

    def load(self, state: Mapping[str, Tree]) -> None:
        """Load a state that `state()` returned, in this process or another. Raises StateError if
        its names or shapes differ from this party's.

        Example:
            >>> state = {name: message.map_tensors(torch.clone, tree) for name, tree in party.state().items()}
            >>> [*state], [*party.own_state()]
            (['params', 'opt', 'seen'], ['seen'])
            >>> reply = party.update(t=1)
            >>> party.load(state)
            >>> party.seen
            2
        """  # noqa: E501
        if tuple(state) != self.state_names:
            raise StateError(
                f"{type(self).__name__} has the state {self.state_names}, but the state to load "
                f"has {tuple(state)}: load a state of the same method and version"
            )
        for name, value in state.items():
            setattr(self, name, message.map_tensors(lambda x: x.to(self.context.device), value))

    def own_state(self) -> dict[str, Tree]:
        """The state outside the network: views, not copies."""
        return {name: vars(self)[name] for name in self.state_names if name not in NETWORK_STATE}

    @contextlib.contextmanager
    def transaction(self, keep: Keep = torch.clone) -> Iterator[None]:
        """A context that restores the state if an exception is raised. `keep` copies the network's
        memory before its first change.

        Example:
            >>> with contextlib.suppress(KeyboardInterrupt), party.transaction():
            ...     party.seen = 99
            ...     raise KeyboardInterrupt
            >>> party.seen
            2
        """
        own = self.own_state()
        if not self.ROWS:  # such a page changes no tensor in place
            own = {
                name: message.map_tensors(torch.Tensor.clone, value) for name, value in own.items()
            }
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


def answers_nothing(kind: type[Party[Any]], method: str) -> bool:
    """Whether the replies to a method of a party's page have no content: it is annotated to return
    None."""
    return inspect.signature(getattr(kind, method)).return_annotation in (None, "None")


def telling(kind: type[Party[Any]], fact: Fact) -> tuple[str, ...]:
    """The methods of a party's page of whose replies this is so: all, if it does not say."""
    facts = dict(kind.TELLS or ())
    return kind.CALLS + kind.TO_PEERS if kind.TELLS is None else facts.get(fact, ())
