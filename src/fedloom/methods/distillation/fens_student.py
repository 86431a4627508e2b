"""FENS where models stay: a learned aggregator of all models' answers, which each client then
learns from.

After Y. Allouah et al., "Revisiting Ensembling in One-Shot Federated Learning", NeurIPS 2024 (the
page `fens.py`); this form is of this library. A client may be a black box, such as a forest.

    1  every client trains alone
    2  it answers the server's labeled rows and the public rows, once
    3  the server learns the aggregator f on its own rows, and sends f's probabilities of the public
    rows to all 4  each client trains on its own rows and on these, without further messages

So a client needs no other when its model is used. An answer is the logarithm of a model's
probabilities, none below 1e-3. A client that does not answer counts with zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Adam,
    Federation,
    Method,
    Party,
    floats,
    sample_plan,
)
from fedloom.methods.distillation import steps
from fedloom.methods.distillation.fens import (
    AggregatorKind,
    aggregate,
    aggregator_loss,
    init_aggregator,
    learning_steps,
)
from fedloom.methods.steps import label_loss

FLOOR = 1e-3
"""The smallest probability of an answer."""


class FensStudentConfig(steps.TrainingConfig):
    """Settings of `fens-student`."""

    tau: int = Field(25, ge=1)
    """Local steps in a round."""
    local_rounds: int = Field(20, ge=1)
    """Rounds in which clients train alone, before the exchange."""
    aggregator: AggregatorKind = "network"
    """The aggregator f."""
    hidden: int = Field(4, ge=1)
    """Hidden units of the network f for each client (d)."""
    aggregator_steps: int = Field(1000, ge=0)
    """Steps of f at the server."""
    aggregator_batch: int = Field(128, ge=1)
    """Batch size of a step of f."""
    server_lr: float = Field(1e-3, gt=0)
    """Learning rate of the server's Adam."""
    kd: float = Field(1.0, ge=0)
    """Weight of f's answer beside the own labels."""

    def stages_in_round(self, t: int) -> int:
        """The exchange is a stage of its own."""
        return 2 if t == self.local_rounds else 1

    @property
    def min_rounds(self) -> int:
        """One more than the rounds alone."""
        return self.local_rounds + 1


@final
class StudentClient(Party[FensStudentConfig]):
    """A client of `fens-student`: its own network, and f's answer to the public rows."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "targets")
    CALLS = ("train_alone", "answer", "take")
    TELLS = (("answers", ("answer",)),)
    targets: Tensor

    def setup(self) -> None:
        """No answer yet."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.targets = torch.empty(0, device=self.context.device)

    def train_alone(self, *, t: int) -> None:
        """τ steps on own rows, and beside each, once there is an answer of f, one on a public
        batch.
        """
        cfg = self.cfg
        for i, (x, y) in enumerate(self.batches(t, steps=cfg.tau, size=cfg.batch_size)):
            self.minimize(partial(label_loss, self), x, y)
            if len(self.targets) and cfg.kd:
                target = self.targets[steps.public_numbers(self, t, i)]
                self.minimize(self._towards, steps.public_batch(self, t, i), target)

    def _towards(self, x: Tensor, target: Tensor) -> Tensor:
        return self.cfg.kd * self.context.task.distill(target, self.model(x))

    def answer(self, *, x: Tensor) -> dict[str, Tensor]:
        """Answers to the server's rows x (n, ...) and to the public rows: (n, K) and (|P|, K)."""
        return {
            "own": answers(self, self.infer(x)),
            "public": answers(self, self.infer(self.public_set.rows.every)),
        }

    def take(self, *, targets: Tensor) -> None:
        """f's probabilities (|P|, K) of the public rows."""
        self.targets = targets


@final
class StudentBlackBox(steps.BlackBoxParty[FensStudentConfig]):
    """A client of `fens-student` with a black box, which is fitted again to own rows and f's
    answer.
    """

    ROLE = "client"
    STATE = ("targets", "fitted")
    CALLS = StudentClient.CALLS
    TELLS = (("answers", ("answer",)),)

    def train_alone(self, *, t: int) -> None:
        """Fit, at first and again once there is an answer."""
        self.local_train(t=t)

    def answer(self, *, x: Tensor) -> dict[str, Tensor]:
        """As a client's."""
        fit = steps.current_fit(self).odd  # of the first fit, which has seen no public row
        public = fit.outputs(self.public_set.rows.every)
        return {"own": answers(self, fit.outputs(x)), "public": answers(self, public)}

    def take(self, *, targets: Tensor) -> None:
        """As a client's."""
        if steps.black_box(self).learn:
            self.targets = targets


@final
class StudentServer(Party[FensStudentConfig]):
    """The server of `fens-student`: labeled rows, the aggregator, and whether it has
    been learned.
    """

    ROLE = "server"
    STATE = ("params", "opt", "exchanged")
    exchanged: bool

    def setup(self) -> None:
        """The first aggregator."""
        init_aggregator(self)

    def learn(self, replies: Mapping[int, Any]) -> Tensor:
        """Learn f on the own rows; its probabilities (|P|, K) of the public rows."""
        cfg, y = self.cfg, self.data.y(torch.arange(len(self.data), device=self.context.device))
        own, public = (stacked(replies, name, self.context.parties) for name in ("own", "public"))
        size = min(len(y), cfg.aggregator_batch)
        for rows in sample_plan(
            self.stream("aggregator batches"), len(y), learning_steps(cfg), size
        ).to(y.device):
            self.note("aggregator loss", self.minimize(self._loss, own[rows], y[rows]))
        self.exchanged = True
        return self.context.task.soft(aggregate(self.params, public))

    def _loss(self, z: Tensor, y: Tensor) -> Tensor:
        return aggregator_loss(self.context.task, self.live, z, y)


def stacked(replies: Mapping[int, Any], name: str, parties: int) -> Tensor:
    """The answers (n, M, K) of all clients, zeros of those that did not answer."""
    first: Tensor = next(iter(replies.values()))[name]
    z = first.new_zeros(len(first), parties, first.shape[1])
    for n, reply in replies.items():
        z[:, n] = reply[name]
    return z


def answers(party: Party[object], outputs: Tensor) -> Tensor:
    """Log-probabilities (n, K), none below the logarithm of `FLOOR`; of a number the outputs
    themselves.
    """
    return log_probs(outputs) if party.context.target is None else outputs


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities (n, K), none below the logarithm of `FLOOR`."""
    return F.softmax(logits, -1).clamp_min(FLOOR).log()


def round(
    fed: Federation, server: StudentServer, clients: Sequence[int], cfg: FensStudentConfig, t: int
) -> Iterator[str]:
    """A round of local steps, before which, after the rounds alone, the one exchange."""
    if t >= cfg.local_rounds and not server.exchanged:
        x, public, classes = server.data.every, len(server.public_set.rows), server.context.classes
        template = {"own": floats(len(x), classes), "public": floats(public, classes)}
        replies = fed.call(clients, "answer", shared={"x": x}, expect=template)
        if replies:
            fed.call(clients, "take", shared={"targets": server.learn(replies)}, expect=None)
        yield "exchange"
    fed.call(clients, "train_alone", shared={"t": t}, expect=None)
    yield "local"


METHODS = (
    Method(
        name="fens-student",
        title="FENS of answers: the server learns to combine them, and each client learns the "
        "result",
        paper="of this library, after Y. Allouah et al.: Revisiting Ensembling in One-Shot "
        "Federated Learning, NeurIPS 2024",
        family="distillation",
        config=FensStudentConfig,
        round=round,
        client=StudentClient,
        server=StudentServer,
        black_box=StudentBlackBox,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("public rows", "public rows at the server", "server rows"),
        min_clients=2,
    ),
)
