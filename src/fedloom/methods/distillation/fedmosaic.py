"""FedMosaic: co-training on public rows, whose labels are the votes of clients by their expertise.

Paper: A. Abourayya, J. Kleesiek, B. Rao and M. Kamp, "Whom to Trust? Adaptive Collaboration in
Personalized Federated Learning" (first "Who Should I Listen To?"), arXiv:2507.00259, 2025.

Each client i keeps its network, its rows and its architecture. All parties hold the same unlabeled
public rows U. In a round (Algorithm 1) client i makes its local steps (lines 3-7) on

    ℓ = ℓ_priv + α ℓ_pseudo,    α = exp(-(ℓ_pseudo - ℓ_priv) / ℓ_priv)

where ℓ_priv is the cross-entropy on own rows, and ℓ_pseudo that on public rows with the labels of
the last round. α is
a constant of the step: it is near 0 where the public labels contradict the client's rows, and at
most e. Then it sends (lines 9-10) the class L_i that it predicts for each public row, as a one-hot
row, and its expertise E_i there. The server labels each row j (lines 14-18) by

    S = Σ_i diag(E_i) L_i,    label_j = argmax_c S_jc

and clients take these labels (line 12). Expertise is ln K - H(p), H the entropy of the client's
prediction, or the share of the predicted class in its own rows.

Messages: up the class and the expertise of each public row, down its label. Networks are black
boxes: only their predictions are used.

Differs:
    The paper itself was not available: equations and lines are from its abstract and from a public
        implementation that cites them by line. The numbers of steps, the period of the exchange and
        the optimizer are this family's.
    α is computed in each step, from the losses of its batch of own rows and its batch of public
    rows. A public row for which nobody has any expertise has no label in the next round, nor has
    any row before the first. An own class of fewer than `min_class_rows` rows has a share of 0 at a
    node.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    EVERY_LOCAL,
    Adam,
    Aggregator,
    Combined,
    Federation,
    MessageError,
    Method,
    Party,
    Shape,
    floats,
    kl_gradient,
)
from fedloom.methods.distillation.steps import TrainingConfig, public_batch, public_numbers

NONE = -1
"""The label of a public row that has none."""


class FedMosaicConfig(TrainingConfig):
    """The local training is that of FedAL's section VI-A."""

    expertise: Literal["entropy", "frequency"] = "entropy"
    """E_i: ln K less the entropy of a prediction, or the predicted class's share in the own rows,
    which tells the server the client's class mix. The default is our choice.
    """

    def stages_in_round(self, t: int) -> int:
        """The local stage, and the vote."""
        return 2

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: votes are read one by one."""
        return "each client's classes and expertise are read" if aggregator.hidden else ""


@final
class FedMosaicClient(Party[FedMosaicConfig]):
    """A client. Its network may differ from all others, and is never sent."""

    ROLE = "client"
    STATE = ("params", "buffers", "opt", "labels")
    CALLS = ("local_train", "vote", "hear")
    MEANS = ("vote",)
    TELLS = ()

    def setup(self) -> None:
        """`labels` (|U|,): the last labels of the public rows, -1 for none."""
        self.network(self.context.build(), Adam(self.cfg.lr))
        self.labels = torch.full((len(self.public_set.rows),), NONE, device=self.context.device)

    def local_train(self, *, t: int) -> None:
        """Lines 3-7: round t's τ steps on own and public rows."""
        for i, (x, y) in enumerate(self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)):
            rows = torch.cat([x, public_batch(self, t, i)])
            self.descend(
                rows,
                self.loss_gradient(self.forward(rows), y, self.labels[public_numbers(self, t, i)]),
            )

    def loss_gradient(self, f: Tensor, y: Tensor, labels: Tensor) -> Tensor:
        """The gradient (B + B', K) of ℓ in the logits f (B + B', K) of B own rows with classes y
        (B,), and of B' public rows with these labels (B',).
        """
        f_own, f_public = f[: len(y)], f[len(y) :]
        known = labels != NONE
        classes = torch.eye(self.context.classes, dtype=f.dtype, device=f.device)
        weigh, count = self.context.task.weighed, known.sum().clamp(min=1)
        private = weigh(F.cross_entropy(f_own, y, reduction="none")[:, None], y).mean()
        pseudo = (
            F.cross_entropy(f_public, labels.clamp(min=0), reduction="none") * known
        ).sum() / count
        tiny = torch.finfo(f.dtype).tiny
        alpha = torch.exp((private - pseudo) / private.clamp(min=tiny)) * known.any()
        self.note("alpha", alpha)
        own = weigh(kl_gradient(classes[y], f_own), y) / len(y)
        public = kl_gradient(classes[labels.clamp(min=0)], f_public) * known[:, None] / count
        return torch.cat([own, alpha * public])

    def vote(self) -> dict[str, Tensor]:
        """Lines 9-10: the predicted class (|U|,) of each public row, and the expertise (|U|,)
        there.
        """
        every = torch.arange(len(self.labels), device=self.context.device)
        logits = self.infer(self.public_set.rows.x(every))
        classes = logits.argmax(-1)
        return {"classes": classes.to(torch.int16), "expertise": self.expertise(logits, classes)}

    def expertise(self, logits: Tensor, classes: Tensor) -> Tensor:
        """E_i (|U|,), from logits (|U|, K) and the classes (|U|,) that they predict."""
        if self.cfg.expertise == "entropy":
            log_p = F.log_softmax(logits, -1)
            return (math.log(self.context.classes) + (log_p.exp() * log_p).sum(-1)).clamp(min=0)
        y = self.data.y(torch.arange(len(self.data), device=logits.device))
        shares = (
            torch.bincount(y, minlength=self.context.classes) * self.context.shown_classes / len(y)
        )
        return shares.to(logits.dtype)[classes]

    def hear(self, *, labels: Tensor) -> None:
        """Line 12: take these labels (|U|,)."""
        self.labels = labels.long()


@final
class FedMosaicServer(Party[FedMosaicConfig]):
    """The server, which has no state."""

    ROLE = "server"

    def check(self, n: int, vote: Mapping[str, Tensor]) -> None:
        """Check that client n's vote has classes.

        Raises:
            MessageError: it does not.
        """
        classes = vote["classes"]
        if len(classes) and (int(classes.min()) < 0 or int(classes.max()) >= self.context.classes):
            raise MessageError(
                f"classes must be 0 to {self.context.classes - 1}, not {classes.min()} to "
                f"{classes.max()}"
            )

    def read(self, n: int, vote: Mapping[str, Tensor]) -> Tensor:
        """diag(E_i) L_i (|U|, K); expertise is at most ln K, which bounds what one
        client can do.
        """
        expertise = vote["expertise"].clamp(0, math.log(self.context.classes))
        return F.one_hot(vote["classes"].long(), self.context.classes) * expertise[:, None]

    def label(self, found: Combined) -> Tensor:
        """Lines 14-18: the labels (|U|,) by the mean of all votes, S / n; -1 where it is 0."""
        votes: Tensor = found.value
        best, labels = votes.max(-1)
        return labels.where(best > 0, labels.new_full((), NONE)).to(torch.int16)


def round(
    fed: Federation, server: FedMosaicServer, clients: Sequence[int], cfg: FedMosaicConfig, t: int
) -> Iterator[str]:
    """One round: local steps, then votes and labels."""
    chosen = fed.sample(clients, cfg.clients_per_round, t)
    fed.call(chosen, "local_train", shared={"t": t})
    yield "local"
    rows = len(server.public_set.rows)
    how: dict[str, Any] = {"expect": {"classes": Shape("int16", rows), "expertise": floats(rows)}}
    found = fed.mean(chosen, "vote", **how, check=server.check, read=server.read)
    if found is not None:
        fed.call(found.ids, "hear", shared={"labels": server.label(found)})
    yield "round"


METHODS = (
    Method(
        name="fedmosaic",
        title="Co-training on public rows, labeled by votes that count by expertise",
        paper="A. Abourayya, J. Kleesiek, B. Rao, M. Kamp: Whom to Trust? Adaptive Collaboration "
        "in Personalized Federated Learning, 2025",
        only_classes="it exchanges classes",
        local=EVERY_LOCAL,
        family="distillation",
        config=FedMosaicConfig,
        round=round,
        client=FedMosaicClient,
        server=FedMosaicServer,
        needs=("public rows", "public rows at the server"),
    ),
)
