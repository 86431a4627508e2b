"""FD: federated distillation without public data, towards the mean logits of each class.

Paper: E. Jeong, S. Oh, H. Kim, J. Park, M. Bennis and S.-L. Kim, "Communication-Efficient On-Device
Machine Learning: Federated Distillation and Augmentation under Non-IID Private Data", NeurIPS
Workshop on Machine Learning on the Phone and other Consumer Devices, 2018. Its federated
augmentation is not here.

Each client n keeps its network, its rows and its architecture. It sends the server its mean answer
to the rows of each class y, and receives the mean answer of the others, Ĝ_{n,y}. Its own answers p
are pulled towards it:

    V = CE(y, p) + γ CE(softmax(Ĝ_{n,y}), p)

Messages: the means (K, K) and a mask of the classes that have one (K,), up and down. The mask
reveals which classes the client's rows of the round had. Networks are black boxes: only their
answers are used.

What a client receives about classes that it has no rows of does not enter its loss.

Differs:
    Answers are averaged as logits, and softmax makes a target of the mean, as everywhere in this
        family; with `average = "probabilities"` they are averaged after softmax.
    Answers are taken from the forward passes of the local steps: each is the answer of the weights
    before its step. The mean over others is over those that have the class, not over all. A class
        that no other client has in a round has no target in the next, as in the first round: there
        the loss is CE alone. A client that is not sampled in a round keeps its targets.
    A node sends a class of few own rows as absent (`min_class_rows` of its `node.toml`).
    The paper itself was not available: its description here is from memory and from secondary
        sources. γ = 0.15 is our choice, without a source.
    FedAL's paper, which compares with FD, does not give its τ: 1 is our choice.
    The server clips the means, so that no sum overflows: logits to ±1e30, probabilities to 0 and 1.
    No code of the authors is known. HtFLlib's has γ = 1 and a mean that includes the client itself;
        for long it took CE against raw mean logits, as if they were probabilities; later versions
        have the softmax.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    Adam,
    Aggregator,
    Combined,
    Federation,
    Method,
    Party,
    Shape,
    floats,
    kl_gradient,
)
from fedloom.methods.distillation.steps import TrainingConfig
from fedloom.methods.features import class_means
from fedloom.protect.coding import LARGEST


class FDConfig(TrainingConfig):
    """The local training is that of FedAL's section VI-A."""

    gamma: float = Field(0.15, ge=0)
    """γ: weight of the term of the others' mean logits. The default is our choice."""
    average: Literal["logits", "probabilities"] = "logits"
    """Quantity that is averaged by class: logits, or probabilities."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: the server removes each client's own answer."""
        return (
            "each client gets the mean of the others, from single answers"
            if aggregator.hidden
            else ""
        )


@final
class FDClient(Party[FDConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "received")
    CALLS = ("update", "hear")
    MEANS = ("update",)
    TELLS = (("by class", MEANS),)

    def setup(self) -> None:
        """`received`: the others' mean answers (K, K) by class, and a mask (K,) of the classes that
        have one.
        """
        self.network(self.context.build(), Adam(self.cfg.lr))
        classes, device = self.context.classes, self.context.device
        self.received: dict[str, Tensor] = {
            "means": torch.zeros(classes, classes, device=device),
            "known": torch.zeros(classes, dtype=torch.bool, device=device),
        }

    def update(self, *, t: int) -> dict[str, Tensor]:
        """Round t's τ steps on own rows; the mean answer (K, K) by class of their forward passes,
        and a mask (K,).
        """
        batches, answers = self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size), []
        for x, y in batches:
            f = self.forward(x)
            answers.append(f if self.cfg.average == "logits" else F.softmax(f, -1))
            self.descend(x, self.gradient_by_row(f, y) / len(x))
        y = batches.y.flatten()
        means, counts = class_means(torch.cat(answers), y, self.context.classes)
        present = (counts > 0) & self.context.shown_classes
        return {"means": means * present[:, None], "present": present}

    def gradient_by_row(self, f: Tensor, y: Tensor) -> Tensor:
        """Gradient (B, K) per row of V in the logits f (B, K), y (B,)."""
        means, known = self.received["means"], self.received["known"]
        labels = torch.eye(self.context.classes, device=f.device)
        targets = F.softmax(means, -1) if self.cfg.average == "logits" else means
        pull = kl_gradient(targets[y], f) * known[y][:, None]
        return self.context.task.weighed(kl_gradient(labels[y], f), y) + self.cfg.gamma * pull

    def hear(self, *, means: Tensor, known: Tensor) -> None:
        """Keep the others' mean answers."""
        self.received = {"means": means, "known": known}
        self.note("classes with a target", known.sum())


@final
class FDServer(Party[FDConfig]):
    """The server, which has no state."""

    ROLE = "server"

    def read(self, n: int, reply: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A client's mean answers (K, K) by class, within bounds."""
        bounds = (-LARGEST, LARGEST) if self.cfg.average == "logits" else (0, 1)
        return {"means": reply["means"].clamp(*bounds)}

    def teach(self, found: Combined) -> dict[int, dict[str, Tensor]]:
        """For each client the mean (K, K) over the others that have a class, and a mask (K,) of
        classes with one; of all clients, if the run takes another mean, from which no answer can be
        removed.
        """
        if self.context.aggregator.even:
            return {
                n: {"means": found.value["means"], "known": found.weight > 0} for n in found.ids
            }
        replies = found.replies
        present = torch.stack([r["present"] for r in replies.values()])  # (n, K)
        answers = torch.stack([self.read(n, r)["means"] for n, r in replies.items()])
        means = answers * present[..., None]  # (n, K, K)
        others = present.sum(0) - present.long()  # (n, K): how many have the class
        mean = (means.sum(0) - means) / others.clamp(min=1)[..., None]
        return {
            n: {"means": m, "known": k} for n, m, k in zip(replies, mean, others > 0, strict=True)
        }


def round(
    fed: Federation, server: FDServer, clients: Sequence[int], cfg: FDConfig, t: int
) -> Iterator[str]:
    """One round: local training, then the exchange of mean answers."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    classes = server.context.classes
    answer = {"means": floats(classes, classes), "present": Shape("bool", classes)}
    how: dict[str, Any] = {
        "expect": answer,
        "weight": "present",
        "read": server.read,
        "kind": cfg.average,
    }
    found = fed.mean(chosen, "update", shared={"t": t}, **how, min_replies=2)
    if found is not None:
        fed.call(found.ids, "hear", each=server.teach(found))
    yield "round"


METHODS = (
    Method(
        name="fd",
        title="Distillation without public data, towards the others' mean logits of each class",
        paper="E. Jeong et al.: Communication-Efficient On-Device Machine Learning: Federated "
        "Distillation and Augmentation under Non-IID Private Data, 2018",
        only_classes="it exchanges the mean logits of each class",
        local=EVERY_LOCAL,
        family="distillation",
        config=FDConfig,
        round=round,
        client=FDClient,
        server=FDServer,
        min_clients=2,
    ),
)
