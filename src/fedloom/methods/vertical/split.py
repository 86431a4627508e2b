"""Vertical split learning: embeddings up, their gradients down; with a lower and an upper bound
beside it.

P. Vepakomma et al., "Split learning for health: Distributed deep learning without sharing raw
patient data", 2018. Every step is, to rounding, a step of the joint network on the aligned rows: a
test holds it to that. It uses no unaligned row, and it sends each party a gradient for each row,
from which labels can be read (docs/vertical.md).

Rows that some party lacks are left out of training, or `params.incomplete` uses them: with zeros
for an absent embedding, or mixed, which is Entity Augmentation. A slot of a batch then has the
row's embeddings where parties have it, other people's embeddings elsewhere, and the mixture of all
these people's labels. With complete rows only, both are split learning.

A. Amalanshu et al., "Entity Augmentation for Efficient Classification of Vertically Partitioned
Data with Limited Overlap", GLOW@IJCAI 2024, arXiv 2406.17899. Differs: the paper's label formula
was not available; each of M parties counts 1/M here. A party names its people by their numbers
among the aligned rows.

`split` is the Vanilla VFL that other methods are compared with. `active-only` is the active party
with its own columns alone, its Local Model. `pooled` is split learning where every row of every
party is aligned and labeled, the Upper
Boundary: the result if nothing had to be hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, final

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    BATCH_CACHE,
    EVERY_LOCAL,
    EVERY_TASK,
    Federation,
    MessageError,
    Method,
    MethodError,
    Party,
    Shape,
    floats,
)
from fedloom.methods.vertical import steps


class SplitLearningConfig(steps.SplitConfig):
    """Settings of split learning, and the use of incomplete rows."""

    incomplete: Literal["drop", "zeros", "mix"] = "drop"
    """Rows that a party lacks: left out of training; or used, with zeros for the absent embedding,
    or with another person in its place and mixed labels (Entity Augmentation). In use an absent
    embedding is zeros.
    """


@final
class SplitPassive(Party[steps.SplitConfig]):
    """A party's part of the network, below the cut."""

    STATE = ("params", "buffers", "opt")
    ROLE = "party"
    CALLS = ("embed", "update", "embed_mixed", "update_mixed")
    TELLS = ()

    def setup(self) -> None:
        """Its extractor."""
        self.network(steps.extractor(self), self.cfg.optimize())

    def embed(self, *, number: int, step: int) -> Tensor:
        """Forward to the cut: embeddings (B, d) of this batch."""
        return steps.embed_batch(self, number, step)

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient (B, d) of the loss by
        what was sent.
        """
        steps.backward(self, number=number, step=step, cut=cut)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) for a joint evaluation."""
        return steps.embeddings(self, on=on)

    def embed_mixed(self, *, number: int, step: int) -> dict[str, Tensor]:
        """Embeddings (B, d) of this batch with other people in the place of those it lacks, and who
        they are (B,).
        """
        people = self._people(number, step)
        return {"embedded": self.forward(self._inputs(people, number, step)), "people": people}

    def update_mixed(self, *, number: int, step: int, cut: Tensor) -> None:
        """A step along the gradient (B, d) of the loss by what it sent in `embed_mixed`."""
        self.descend(self._inputs(self._people(number, step), number, step), cut)

    def _people(self, number: int, step: int) -> Tensor:
        """(B,) the batch's aligned rows, or one drawn from those that it has."""
        rows, present = steps.batch_indices(self, number, step), self.data.present
        if present is None:
            return rows
        own = present[: self.context.aligned].nonzero()[:, 0]
        if not len(own):
            raise MethodError(
                f"party {self.context.id} lacks every aligned row: leave it out of the run"
            )
        drawn = self.stream("entities", number, step).integers(len(own), size=len(rows))
        return torch.where(present[rows], rows, own[torch.from_numpy(drawn).to(own.device)])

    def _inputs(self, people: Tensor, number: int, step: int) -> Tensor:
        """Inputs (B, ...) of these people; the same object in both calls of a step, so that its
        pass is remembered.
        """
        return BATCH_CACHE.get(
            self.context, ("entities", number, step), lambda: self.data.x(people)
        )


@final
class SplitActive(Party[steps.SplitConfig]):
    """The active party's part of the network, above the cut, and its labels."""

    STATE = ("params", "opt")
    ROLE = "active"

    def setup(self) -> None:
        """A classifier of all embeddings."""
        self.network(
            steps.top_model(self, self.context.parties * self.cfg.embedding_dim),
            self.cfg.optimize(active=True),
        )

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of each party."""
        return self.infer(steps.joint(contributions))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The gradients (N_a, d) that each party would receive for the aligned rows."""
        return steps.exposed_gradients(self, contributions)

    def learn_mixed(
        self, parts: Mapping[int, Tensor], people: Mapping[int, Tensor], number: int, step: int
    ) -> dict[int, dict[str, Tensor]]:
        """One step on mixed labels; the gradient (B, d) of the loss in each party's embeddings."""
        rows = steps.batch_indices(self, number, step)
        if all(torch.equal(who, rows) for who in people.values()):
            return steps.learn(self, parts, number, step)
        sent = steps.joint(parts).requires_grad_()
        labels = torch.stack([steps.labels(self, who) for who in people.values()], 1)
        number = self.context.target is not None
        target = labels.mean(1) if number else mixed_labels(labels, self.context.classes)
        self.note("loss", self.minimize(lambda: self.context.task.loss(self.model(sent), target)))
        assert sent.grad is not None
        return {
            m: {"cut": cut.contiguous()} for m, cut in zip(parts, sent.grad.unbind(1), strict=True)
        }


def mixed_labels(labels: Tensor, classes: int) -> Tensor:
    """The mean (B, Z) of the one-hot labels (B, M) of a slot's people."""
    return F.one_hot(labels, classes).float().mean(1)


@final
class LocalActive(Party[steps.SplitConfig]):
    """The active party of `active-only`, which classifies the embeddings of its own
    columns alone.
    """

    STATE = ("params", "opt")
    ROLE = "onitsown"

    def setup(self) -> None:
        """A classifier of the first party's embeddings."""
        self.network(steps.top_model(self, self.cfg.embedding_dim), self.cfg.optimize(active=True))

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from its own embeddings (n, d)."""
        return self.infer(steps.joint({0: contributions[0]}))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Gradients for its own columns; no other party receives a message."""
        return steps.exposed_gradients(self, {0: contributions[0]})


def round(
    fed: Federation, active: SplitActive, parties: Sequence[int], cfg: SplitLearningConfig, t: int
) -> Iterator[str]:
    """Epochs over the aligned rows."""
    numbers = range(t * cfg.epochs, (t + 1) * cfg.epochs)
    if cfg.incomplete == "mix":
        mixed_passes(fed, active, parties, numbers)
        yield "round"
        return
    steps.passes(
        fed, active, parties, numbers, width=cfg.embedding_dim, min_replies=active.context.parties
    )
    yield "round"


def mixed_passes(
    fed: Federation, active: SplitActive, parties: Sequence[int], numbers: range
) -> None:
    """Passes over the aligned rows in which each party has other people in the place of those it
    lacks.
    """
    size, aligned = active.cfg.batch_size, active.context.aligned
    template = {
        "embedded": floats(size, active.cfg.embedding_dim),
        "people": Shape(torch.int64, size),
    }

    def check(_: int, reply: Mapping[str, Tensor]) -> None:
        if not ((reply["people"] >= 0) & (reply["people"] < aligned)).all():
            raise MessageError(f"people must be numbers of aligned rows, 0 to {aligned - 1}")

    for number in numbers:
        for step in range(steps.steps_per_pass(active)):
            which = {"number": number, "step": step}
            replies = fed.call(
                parties,
                "embed_mixed",
                shared=which,
                expect=template,
                check=check,
                min_replies=active.context.parties,
            )
            if replies:
                parts, people = (
                    {m: r[name] for m, r in replies.items()} for name in ("embedded", "people")
                )
                cuts = active.learn_mixed(parts, people, number, step)
                fed.call(parts, "update_mixed", shared=which, each=cuts, expect=None)


def round_alone(
    fed: Federation, active: LocalActive, parties: Sequence[int], cfg: steps.SplitConfig, t: int
) -> Iterator[str]:
    """Epochs over the aligned rows with the first party alone, if it is present."""
    first = [m for m in parties if m == 0]
    numbers = range(t * cfg.epochs, (t + 1) * cfg.epochs)
    steps.passes(fed, active, first, numbers, width=cfg.embedding_dim, min_replies=len(first))
    yield "round"


PAPER = {
    "epochs": 8,
    "optimizer": "sgd",
    "lr": 1e-5,
    "active_lr": 5e-4,
    "weight_decay": 0.0,
    "centered": False,
}
SPLIT = Method(
    name="split",
    title="Split learning: embeddings up, gradients down",
    paper="P. Vepakomma et al.: Split learning for health: Distributed deep learning without "
    "sharing raw data, 2018",
    family="vertical",
    config=SplitLearningConfig,
    round=round,
    client=SplitPassive,
    server=SplitActive,
    presets={"paper": PAPER},
    setting="vertical",
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
)

METHODS = (
    SPLIT,
    replace(
        SPLIT,
        name="active-only",
        title="The active party trains on its own columns alone",
        config=steps.SplitConfig,
        round=round_alone,
        server=LocalActive,
        contributors=(0,),
    ),
    replace(
        SPLIT,
        name="pooled",
        title="Split learning as if all rows were aligned and labeled",
        needs=("pooled rows",),
    ),
)
