"""FD: federated distillation without public data, by the mean answer to each class.

Paper: E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis and S.-L. Kim, "Communication-Efficient On-Device Machine Learning:
Federated Distillation and Augmentation under Non-IID Private Data", NeurIPS Workshop on Machine Learning on the Phone
and other Consumer Devices, 2018. Its federated augmentation is not here.

Each client n keeps its network, its rows and its architecture to itself. It tells the server what it answers, on
average, to rows of each class y, and hears what the others answer, Ĝ_{n,y}. This pulls its own answers p:

    V = CE(y, p) + γ CE(softmax(Ĝ_{n,y}), p)

What crosses: the means (K, K) and which classes there are (K,), up and down. The second says of each client which
classes its rows of the round had. Networks are black boxes: nothing but their answers is asked for.

A client that has only some of the classes hears nothing about the others that its loss would use.

Differs:
    Answers are averaged as logits, and softmax makes a target of the mean, as everywhere in this family; with
        `average = "probabilities"` they are averaged after softmax.
    They come from the passes that the steps make anyway: each is that of the weights before its step.
    The mean over others is over those that have the class, not over all. A class that no other client has in a round
        has no target in the next, as in the first round: there the loss is CE alone. Who is not among a round's
        participants keeps what it last heard.
    The paper itself was not at hand: what is said of it here is from memory, and from others' accounts of it. γ = 0.15
        is our choice, for which there is no source.
    FedAL's paper, which compares with FD, does not give its τ: that of 1 is ours.
    The server bounds what it is told, so that no sum overflows: logits by ±1e30, probabilities by 0 and 1.
    No code of the authors is known. HtFLlib's has γ = 1, a mean that includes the client itself, and for long took
        CE against raw mean logits, as if they were probabilities; later versions have the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.losses import kl_gradient
from fedloom.core.message import Shape, floats
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.distiller import Distiller, DistillerConfig
from fedloom.methods.features import class_means
from fedloom.protect.coding import LARGEST


class Config(DistillerConfig):
    """The local training is that of FedAL's section VI-A."""

    gamma: float = Field(0.15, ge=0)
    """γ: weight of the others' mean answer. The value is our choice."""
    average: Literal["logits", "probabilities"] = "logits"
    """What is averaged by class: logits, or probabilities."""


class Client(Distiller[Config]):
    """A client. Its network may differ from all others, and never leaves."""

    STATE = ("params", "buffers", "opt", "heard")
    CALLS = ("update", "hear")

    def setup(self) -> None:
        """`heard` are the others' mean answers (K, K) by class, and of which classes there are any (K,)."""
        self.start(self.site.build())
        classes, device = self.site.classes, self.site.device
        self.heard: dict[str, Tensor] = {
            "means": torch.zeros(classes, classes, device=device),
            "known": torch.zeros(classes, dtype=torch.bool, device=device),
        }

    def update(self, *, t: int) -> dict[str, Tensor]:
        """Round t's τ steps on own rows, and the mean (K, K) by class of what the network answered on the way."""
        batches, answers = self.own_batches(t), []
        for x, y in batches:
            f = self.forward(x)
            answers.append(f if self.cfg.average == "logits" else F.softmax(f, -1))
            self.descend(x, self.gradient_by_row(f, y) / len(x))
        y = batches.y.flatten()
        means, counts = class_means(torch.cat(answers), y, torch.ones_like(y), self.site.classes)
        return {"means": means, "present": counts > 0}

    def gradient_by_row(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient (B, K) per row of V in the logits f (B, K), y (B,)."""
        means, known = self.heard["means"], self.heard["known"]
        labels = torch.eye(self.site.classes, device=f.device)
        targets = F.softmax(means, -1) if self.cfg.average == "logits" else means
        pull = kl_gradient(targets[y], f) * known[y][:, None]
        return kl_gradient(labels[y], f) + self.cfg.gamma * pull

    def hear(self, *, means: Tensor, known: Tensor) -> None:
        """Keep the others' mean answers."""
        self.heard = {"means": means, "known": known}
        self.note("classes with a target", known.sum())


class Server(Party[Config]):
    """The server. It remembers nothing."""

    def teach(self, replies: Mapping[int, Any]) -> dict[int, dict[str, Tensor]]:
        """For each client the mean over the others that have a class (K, K), and whether there is one (K,)."""
        bounds = (-LARGEST, LARGEST) if self.cfg.average == "logits" else (0, 1)
        present = torch.stack([r["present"] for r in replies.values()])  # (n, K)
        told = torch.stack([r["means"] for r in replies.values()]).clamp(*bounds)
        means = told * present[..., None]  # (n, K, K)
        others = present.sum(0) - present.long()  # (n, K): how many have the class
        mean = (means.sum(0) - means) / others.clamp(min=1)[..., None]
        return {n: {"means": m, "known": k} for n, m, k in zip(replies, mean, others > 0, strict=True)}


def round(fed: Federation, server: Server, clients: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Train, tell, hear."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    classes = server.site.classes
    answer = {"means": floats(classes, classes), "present": Shape("bool", classes)}
    replies = fed.call(chosen, "update", shared={"t": t}, expect=answer, need=2)
    if replies:  # else there is nobody to learn from
        fed.call(replies, "hear", each=server.teach(replies))
    yield "round"


METHODS = (
    Method(
        name="fd",
        title="Distillation without public data: towards the others' mean answer to each class",
        paper="E. Jeong et al.: Communication-Efficient On-Device Machine Learning: Federated Distillation and "
        "Augmentation under Non-IID Private Data, 2018",
        family="distillation",
        config=Config,
        round=round,
        client=Client,
        server=Server,
        min_clients=2,
    ),
)
