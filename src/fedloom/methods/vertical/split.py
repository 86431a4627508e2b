"""Vertical split learning: embeddings up, their gradients down; with a lower and an upper bound beside it.

P. Vepakomma et al., "Split learning for health: Distributed deep learning without sharing raw patient data", 2018.
Every step is, to rounding, a step of the joint network on the aligned rows: a test holds it to that. It uses no
unaligned row, and it sends each party a gradient for each row, from which labels can be read (docs/vertical.md).

`split` is the Vanilla VFL that other methods are compared with. `active-only` is the active party with its own columns
alone, its Local Model. `pooled` is split learning where every row of every party is aligned and labelled, the Upper
Boundary: the result if nothing had to be hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from fedloom.core.federation import Federation
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods.vertical import steps


@final
class SplitPassive(Party[steps.SplitConfig]):
    """A party's part of the network, below the cut."""

    STATE = ("params", "buffers", "opt")
    ROLE = "party"
    CALLS = ("embed", "update")

    def setup(self) -> None:
        """Its extractor."""
        self.network(steps.extractor(self), self.cfg.optimise())

    def embed(self, *, number: int, step: int) -> Tensor:
        """Forward to the cut: embeddings (B, d) of this batch."""
        return self.forward(steps.aligned_batch(self, number, step))

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient (B, d) of the loss by what was sent."""
        self.descend(steps.aligned_batch(self, number, step), cut)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) for a joint evaluation."""
        return steps.embeddings(self, on)


@final
class SplitActive(Party[steps.SplitConfig]):
    """The active party's part of the network, above the cut, and its labels."""

    STATE = ("params", "opt")
    ROLE = "active"

    def setup(self) -> None:
        """A classifier of all embeddings."""
        self.network(steps.top_model(self, self.context.parties * self.cfg.width), self.cfg.optimise())

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of each party."""
        return self.infer(steps.joint(contributions))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The gradients (N_a, d) that each party would receive for the embeddings (N_a, d) of the aligned people."""
        return steps.exposed_gradients(self, contributions)


@final
class LocalActive(Party[steps.SplitConfig]):
    """The active party of `active-only`, which classifies the embeddings of its own columns alone."""

    STATE = ("params", "opt")
    ROLE = "onitsown"

    def setup(self) -> None:
        """A classifier of the first party's embeddings."""
        self.network(steps.top_model(self, self.cfg.width), self.cfg.optimise())

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from its own embeddings (n, d)."""
        return self.infer(steps.joint({0: contributions[0]}))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Gradients for its own columns; no other party receives a message."""
        return steps.exposed_gradients(self, {0: contributions[0]})


def round(
    fed: Federation, active: SplitActive, parties: Sequence[int], cfg: steps.SplitConfig, t: int
) -> Iterator[str]:
    """Epochs over the aligned rows."""
    numbers = range(t * cfg.epochs, (t + 1) * cfg.epochs)
    steps.passes(fed, active, parties, numbers, width=cfg.width, min_replies=active.context.parties)
    yield "round"


def round_alone(
    fed: Federation, active: LocalActive, parties: Sequence[int], cfg: steps.SplitConfig, t: int
) -> Iterator[str]:
    """Epochs over the aligned rows with the first party alone, if it is present."""
    first = [m for m in parties if m == 0]
    numbers = range(t * cfg.epochs, (t + 1) * cfg.epochs)
    steps.passes(fed, active, first, numbers, width=cfg.width, min_replies=len(first))
    yield "round"


SPLIT = Method(
    name="split",
    title="Split learning: embeddings up, gradients down",
    paper="P. Vepakomma et al.: Split learning for health: Distributed deep learning without sharing raw data, 2018",
    family="vertical",
    config=steps.SplitConfig,
    round=round,
    client=SplitPassive,
    server=SplitActive,
    presets={"paper": {"epochs": 8, "optimiser": "sgd", "lr": 5e-4, "weight_decay": 0.0, "centred": False}},
    setting="vertical",
)

METHODS = (
    SPLIT,
    replace(
        SPLIT,
        name="active-only",
        title="The active party trains on its own columns alone",
        round=round_alone,
        server=LocalActive,
        contributors=(0,),
    ),
    replace(
        SPLIT, name="pooled", title="Split learning as if all rows were aligned and labelled", needs=("pooled rows",)
    ),
)
