"""FENS: one exchange of models, then a small aggregator of all models' answers, learned on rows
that were held out.

Y. Allouah et al., "Revisiting Ensembling in One-Shot Federated Learning", NeurIPS 2024, arXiv
2411.07182; its code sacs-epfl/fens, aggregations.py.

    1  every client trains alone on 90 % of its rows; its model goes to the server, which sends all
    M to all 2  every client answers its own 10 % with all M models: z (rows, M, K) logits
    3  f: R^(M K) -> R^K is learned on (z, y) federatedly: one local step, FedAdam at the server
    use: f(all models' answers to x)

Aggregators f: `mean`, with nothing to learn; `weights`, a weight for each client; `class-weights`,
one for each client and class; `network`, the paper's SmallNN: Linear(M K, M d), ReLU, Linear(M d,
K).

Every client gets every client's model. `fens-student` is a form in which models stay.

Differs:
    Models are sent as float32, not int8. The gate on inputs and the vote by competence are left
    out. Clients train with this family's Adam, for `local_rounds` rounds of τ steps. The first
    round after them exchanges. A client that is away at the exchange has logits 0 in every z, and
    keeps its own model. A client sends the change of f by its step. The server's step is Adam's
    along the mean, weighted by held-out rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias, final

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Adam,
    Aggregator,
    ClientContext,
    Federation,
    Method,
    Network,
    Party,
    Shape,
    Task,
    Template,
    Tree,
    sample_plan,
)
from fedloom.methods.distillation import steps
from fedloom.methods.distillation.feddf import model_of, set_model
from fedloom.methods.steps import label_loss

AggregatorKind: TypeAlias = Literal["mean", "weights", "class-weights", "network"]


class FensConfig(steps.TrainingConfig):
    """Settings of FENS."""

    tau: int = Field(25, ge=1)
    """Local steps in a round."""
    local_rounds: int = Field(20, ge=1)
    """Rounds in which clients train alone, before the exchange."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of a client's rows on which the aggregator is learned."""
    aggregator: AggregatorKind = "network"
    """The aggregator f."""
    hidden: int = Field(4, ge=1)
    """Hidden units of the network f for each client (d)."""
    aggregator_steps: int = Field(50, ge=0)
    """Steps of f in each round after the exchange."""
    aggregator_batch: int = Field(128, ge=1)
    """Batch size of a step of f."""
    aggregator_lr: float = Field(1.0, gt=0)
    """Learning rate of a client's step of f."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server's Adam."""

    def calls_in_round(self, context: ClientContext) -> dict[str, int]:
        """Once for each step of the aggregator."""
        return {"learn_aggregator": self.aggregator_steps}

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: all clients get each client's model."""
        return "each client's model is sent to all clients" if aggregator.hidden else ""

    @property
    def min_rounds(self) -> int:
        """One more than the rounds alone."""
        return self.local_rounds + 1


# -- aggregators -----------------------------------------------------------------------------------


def first_weights(
    kind: AggregatorKind, clients: int, classes: int, hidden: int
) -> dict[str, Tensor]:
    """The initial weights of an aggregator: the weights of the mean, or of a network drawn from
    torch's generator.
    """
    if kind != "network":
        shape = (clients, classes) if kind == "class-weights" else (clients, 1)
        return {"weight": torch.full(shape, 1 / clients), "bias": torch.zeros(classes)}
    layers = {
        "first": nn.Linear(clients * classes, clients * hidden),
        "last": nn.Linear(clients * hidden, classes),
    }
    return {
        f"{name}_{k}": p.detach()
        for name, layer in layers.items()
        for k, p in layer.named_parameters()
    }


def aggregate(weights: Mapping[str, Tensor], z: Tensor) -> Tensor:
    """f: logits (n, M, K) of all models to logits (n, K)."""
    if "weight" in weights:
        return (z * weights["weight"]).sum(1) + weights["bias"]
    hidden = F.relu(F.linear(z.flatten(1), weights["first_weight"], weights["first_bias"]))
    return F.linear(hidden, weights["last_weight"], weights["last_bias"])


def aggregator_loss(task: Task, weights: Mapping[str, Tensor], z: Tensor, y: Tensor) -> Tensor:
    """The loss () of f on answers (n, M, K) with labels (n,)."""
    return task.loss(aggregate(weights, z), y)


class Aggregation(Protocol):
    """Settings of the aggregator, as `FensConfig` describes them."""

    @property
    def aggregator(self) -> AggregatorKind:
        """The aggregator f."""

    @property
    def hidden(self) -> int:
        """Hidden units of the network f for each client."""

    @property
    def aggregator_steps(self) -> int:
        """Steps of f."""

    @property
    def server_lr(self) -> float:
        """Learning rate of the server's Adam."""


def learning_steps(cfg: Aggregation) -> int:
    """`aggregator_steps`, or 0 where f has nothing to learn."""
    return 0 if cfg.aggregator == "mean" else cfg.aggregator_steps


def init_aggregator(server: Party[Aggregation]) -> None:
    """At a server: the first aggregator of all clients, as a network whose parameters are its
    weights; no exchange.
    """
    cfg, context = server.cfg, server.context
    with server.seeded("aggregator"):
        weights = first_weights(cfg.aggregator, context.parties, context.classes, cfg.hidden)
    module = nn.Module()
    for name, value in weights.items():
        module.register_parameter(name, nn.Parameter(value))
    server.network(module, Adam(cfg.server_lr))
    server.exchanged = False


# -- fens: models cross ----------------------------------------------------------------------------


@final
class FensClient(Party[FensConfig]):
    """A client: its own model, and after the exchange all models and the aggregator."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "members", "aggregator", "answers")
    EXPORT = ("params", "buffers", "members", "aggregator")
    CALLS = ("train_alone", "send", "take", "learn_aggregator", "take_aggregator")
    MEANS = ("learn_aggregator",)
    TELLS = (("passed on", ("send",)),)
    members: dict[str, Any]
    aggregator: dict[str, Tensor]
    answers: Tensor

    def setup(self) -> None:
        """No other models yet. `answers` (n, M, K) are all models' answers to the held-out rows."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.members, self.aggregator = {}, {}
        self.answers = torch.empty(0, device=self.context.device)

    def split(self) -> tuple[Tensor, Tensor]:
        """Indices of the rows to train on and of the held-out rows: at least one each, if there are
        two.
        """
        rows = len(self.data)
        order = torch.from_numpy(self.stream("held out").permutation(rows)).to(self.context.device)
        held = min(max(1, int(self.cfg.held_out * rows)), max(1, rows - 1))
        return (order[held:] if rows > 1 else order), order[:held]

    def train_alone(self, *, t: int) -> None:
        """Line 1: τ steps on the rows that are not held out."""
        kept, size, steps_ = self.split()[0], self.cfg.batch_size, self.cfg.tau
        draws = self.stream("batches", t).integers(len(kept), size=(steps_, size))
        plan = kept[torch.from_numpy(draws).to(kept.device)]
        self.train(partial(label_loss, self), self.data.batches(plan))

    def send(self) -> dict[str, Tree]:
        """Its weights and statistics."""
        return {**model_of(self.net)}

    def take(self, *, members: dict[str, Any]) -> None:
        """Lines 1-2: all models, and their answers to the held-out rows."""
        self.members = members
        self.answers = self._all(self.data.x(self.split()[1]))

    def _all(self, x: Tensor) -> Tensor:
        """Logits (n, M, K) of all models on x (n, ...); zeros of those that were away."""
        z = x.new_zeros(len(x), self.context.parties, self.context.classes)
        for n, member in self.members.items():
            with self.scratch():
                set_model(self.net, **member)
                z[:, int(n)] = self.net.infer(x)
        return z

    def learn_aggregator(self, *, t: int, i: int, weights: dict[str, Tensor]) -> dict[str, Tree]:
        """Line 3: what one step on the held-out rows, or a batch of them, takes from f; and their
        number.
        """
        rows = self.split()[1]
        size = min(len(rows), self.cfg.aggregator_batch)
        which = sample_plan(self.stream("held-out batches", t, i), len(rows), 1, size)[0].to(
            rows.device
        )
        gradient = grad(partial(aggregator_loss, self.context.task))(
            weights, self.answers[which], self.data.y(rows[which])
        )
        change = {k: self.cfg.aggregator_lr * g for k, g in gradient.items()}
        return {"change": change, "rows": torch.tensor(len(rows), device=rows.device)}

    def take_aggregator(self, *, weights: dict[str, Tensor]) -> None:
        """The aggregator to use."""
        self.aggregator = weights

    def infer(self, x: Tensor) -> Tensor:
        """Logits (n, K): its own model's, after the exchange f of all models'."""
        return aggregate(self.aggregator, self._all(x)) if self.members else self.net.infer(x)


@final
class FensServer(Party[FensConfig]):
    """The server: the aggregator, and whether models were exchanged."""

    ROLE = "server"
    STATE = ("params", "opt", "exchanged")
    exchanged: bool

    def setup(self) -> None:
        """The first aggregator."""
        init_aggregator(self)

    def like(self) -> dict[str, Any]:
        """Template of a client's model."""
        return {**model_of(Network(self.context.build(), Adam()))}

    def step(self, change: Mapping[str, Tensor]) -> None:
        """FedAdam: a step of Adam along the clients' mean change of f, over their rate."""
        gradient = {k: c / self.cfg.aggregator_lr for k, c in change.items()}
        self.minimize(
            lambda: torch.stack([(self.live[k] * g).sum() for k, g in gradient.items()]).sum()
        )


def round(
    fed: Federation, server: FensServer, clients: Sequence[int], cfg: FensConfig, t: int
) -> Iterator[str]:
    """Local training; after `local_rounds` rounds the exchange, once, and then steps of the
    aggregator.
    """
    if t < cfg.local_rounds:
        fed.call(clients, "train_alone", shared={"t": t}, expect=None)  # line 1
        yield "local"
        return
    if not server.exchanged:
        models = fed.call(clients, "send", expect=server.like())
        members = {str(n): model for n, model in models.items()}
        fed.call(clients, "take", shared={"members": members}, expect=None)  # line 2
        server.exchanged = True
    template: Template = {"change": server.params, "rows": Shape("int64")}
    for i in range(learning_steps(cfg)):  # line 3
        shared = {"t": t, "i": i, "weights": server.params}
        still = {"change": {k: torch.zeros_like(w) for k, w in server.params.items()}}
        how: dict[str, Any] = {"expect": template, "weight": "rows", "around": still}
        mean = fed.mean(clients, "learn_aggregator", shared=shared, **how)
        if mean is not None:
            server.step(mean.value["change"])
    fed.call(clients, "take_aggregator", shared={"weights": server.params}, expect=None)
    yield "aggregator"


METHODS = (
    Method(
        name="fens",
        title="FENS: one exchange of models, then a learned aggregator of their answers",
        paper="Y. Allouah et al.: Revisiting Ensembling in One-Shot Federated Learning, NeurIPS "
        "2024",
        family="distillation",
        config=FensConfig,
        round=round,
        client=FensClient,
        server=FensServer,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
        min_clients=2,
    ),
)
