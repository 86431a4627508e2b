"""Gossip averaging: every peer trains, then averages its weights with those of some random neighbours.

Paper: S. Boyd et al., "Randomized Gossip Algorithms", IEEE Transactions on Information Theory 2006; in learning,
e.g. M. Blot et al., "Gossip Training for Deep Learning", 2016. Here as the baseline of AFIND+ (its section 4.1):
each round every peer pulls the models of k random neighbours, all trained in that round, and takes the plain mean
of theirs and its own.

With k = 0 every peer is alone, which is the lower bound of the family. With all neighbours on a complete graph all
peers hold one model after each round: FedAvg with equal weights and full participation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.methods.learner import Learner, LearnerConfig, weights_like


class Config(LearnerConfig):
    """The local training is `LearnerConfig`'s."""

    neighbours: int | None = Field(10, ge=0)
    """Random neighbours that a peer asks in a round (k); None for all."""


class Peer(Learner[Config]):
    """A peer and its model."""

    CALLS = ("update", "mix")
    TO_PEERS = ("give",)

    def update(self, *, t: int) -> None:
        """Train on own rows, from the own weights."""
        self.local_update(t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own weights, to whoever asks."""
        return {"weights": self.shared()}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The plain mean of the own weights and those of the neighbours that answered."""
        models = self.models(inbox)
        self.average(models, dict.fromkeys(models, 1.0))


def round(fed: Federation, server: None, peers: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    fed.call(peers, "update", shared=now)
    links = fed.links(peers, cfg.neighbours, t)
    fed.exchange(links, answer="give", take="mix", shared=now, expect={"weights": weights_like(fed, cfg)})
    yield "round"


GOSSIP = Method(
    name="gossip",
    title="Every peer averages with random neighbours",
    paper="M. Blot et al.: Gossip Training for Deep Learning, 2016; S. Boyd et al.: Randomized Gossip Algorithms, 2006",
    family="peer",
    config=Config,
    round=round,
    client=Peer,
    needs=("one network",),
)

METHODS = (
    GOSSIP,
    replace(GOSSIP, name="alone", title="Every peer for itself: the lower bound", fixed={"neighbours": 0}),
)
