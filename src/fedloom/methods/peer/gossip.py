"""Gossip averaging: every peer trains, then averages its weights with those of some random neighbours.

Paper: S. Boyd et al., "Randomized Gossip Algorithms", IEEE Transactions on Information Theory 2006; in learning,
e.g. M. Blot et al., "Gossip Training for Deep Learning", 2016. Here as the baseline of AFIND+ (its section 4.1):
each round every peer pulls the models of k random neighbours, all trained in that round, and takes the mean of theirs
and its own.

With k = 0 every peer trains alone, which is the lower bound of the family. With all neighbours on a complete graph all
peers have one model after each round: FedAvg with equal weights and full participation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from pydantic import Field

from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods import steps


class GossipConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    neighbours: int | None = Field(10, ge=0)
    """Number of random neighbours that a peer averages with in a round (k); None for all."""


@final
class GossipPeer(Party[GossipConfig]):
    """A peer and its model."""

    ROLE = "peer"
    STATE = ("params", "buffers", "opt")
    CALLS = ("update", "mix")
    TO_PEERS = ("give",)

    def setup(self) -> None:
        """The initial network."""
        steps.init_network(self)

    def update(self, *, t: int) -> None:
        """Local training."""
        steps.local_sgd(self, t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights."""
        return {"weights": steps.shared_weights(self)}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own model and those of the neighbours that replied."""
        models = steps.models_of(self, inbox)
        steps.average(self, models, dict.fromkeys(models, 1.0))

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune."""
        steps.prepare(self, eval_mode, broadcast)


def round(fed: Federation, server: None, peers: Sequence[int], cfg: GossipConfig, t: int) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    fed.call(peers, "update", shared=now)
    links = fed.sample_peers(peers, cfg.neighbours, t)
    fed.exchange(links, answer="give", take="mix", shared=now, expect=steps.weights_template(fed, cfg.personal_head))
    yield "round"


GOSSIP = Method(
    name="gossip",
    title="Every peer averages with random neighbours",
    paper="M. Blot et al.: Gossip Training for Deep Learning, 2016; S. Boyd et al.: Randomized Gossip Algorithms, 2006",
    family="peer",
    config=GossipConfig,
    round=round,
    client=GossipPeer,
    needs=("one network",),
)

METHODS = (
    GOSSIP,
    replace(GOSSIP, name="alone", title="Every peer trains alone: the lower bound", fixed={"neighbours": 0}),
)
