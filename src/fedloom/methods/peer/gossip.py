"""Gossip averaging: every peer trains, then averages its weights with some random neighbours'
weights.

Paper: S. Boyd et al., "Randomized Gossip Algorithms", IEEE Transactions on Information Theory 2006;
in learning, e.g. M. Blot et al., "Gossip Training for Deep Learning", 2016. Here as the baseline of
AFIND+ (its section 4.1): each round every peer pulls the models of k random neighbours, all trained
in that round, and takes the mean of theirs and its own.

With k = 0 every peer trains alone, which is the lower bound of the family. With all neighbours on a
complete graph all
peers have one model after each round: FedAvg with equal weights and full participation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from pydantic import Field

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    ClientContext,
    Federation,
    Guarantee,
    Method,
    Party,
    Tree,
)
from fedloom.methods import steps
from fedloom.methods.averaging import private
from fedloom.methods.peer import mixing


class GossipConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    neighbours: int | None = Field(10, ge=0)
    """Number of random neighbours that a peer averages with in a round (k); None for all."""
    dp: private.OptionalRowPrivacy = private.OptionalRowPrivacy()
    """Differential privacy: unit (none, rows), sigma (noise multiplier), clip (C), delta (δ)."""

    @property
    def exchanges(self) -> bool:
        """Whether peers send their models."""
        return self.neighbours != 0

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """That of the weights, if `dp` is set: a mean of weights reads no rows."""
        return private.guarantees(self)

    def charges(self, party: Any, rounds: Sequence[int]) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`."""
        return private.charges(self, party, rounds)

    def least_in_sum(self, context: ClientContext) -> int:
        """See `MethodConfig.least_in_sum`: each peer's noise hides it by itself."""
        return 0


@final
class GossipPeer(Party[GossipConfig]):
    """A peer and its model."""

    ROLE = "peer"
    STATE = ("params", "buffers", "opt")
    CALLS = ("update", "mix")
    TO_PEERS = ("give",)
    MEANS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network."""
        steps.init_network(self)
        private.check(self)

    def update(self, *, t: int) -> None:
        """Train on own rows, with noise if `dp` is set."""
        private.train(self, t=t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights."""
        return {"weights": steps.shared_weights(self)}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own model and the models of the neighbours that replied."""
        models = mixing.models_of(self, inbox)
        mixing.average(self, models, dict.fromkeys(models, 1.0))

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode."""
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: GossipConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    fed.call(peers, "update", shared=now)
    mixing.check_models(fed, cfg.neighbours)
    links = fed.sample_peers(peers, cfg.neighbours, t)
    fed.exchange(
        links,
        answer="give",
        take="mix",
        shared=now,
        expect=steps.weights_template(fed, cfg.personal_head),
    )
    yield "round"


GOSSIP = Method(
    name="gossip",
    title="Every peer averages with random neighbours",
    paper="M. Blot et al.: Gossip Training for Deep Learning, 2016; S. Boyd et al.: Randomized "
    "Gossip Algorithms, 2006",
    family="peer",
    config=GossipConfig,
    round=round,
    client=GossipPeer,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
    linear=True,
)

METHODS = (
    GOSSIP,
    replace(
        GOSSIP,
        name="alone",
        title="Every peer trains alone: the lower bound",
        trial_alone=True,
        fixed={"neighbours": 0},
    ),
)
