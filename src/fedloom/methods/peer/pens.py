"""PENS: peers whose models do well on one's own rows become friends, and gossip goes on among friends.

Paper: N. Onoszko, G. Karlsson, O. Mogren, E. Listo Zec, "Decentralized federated learning of deep neural networks on
non-iid data", 2021. Here as a baseline of AFIND+ (its section 4.1).

Stage 1, the first rounds: a peer asks n random neighbours, takes the loss of each of their models on its own rows,
and averages its own model with the m of the lowest loss. It counts whom it took. Stage 2: its friends are those that
it took more often than chance would have it, which is m times out of n asked, and gossip goes on among friends alone.

With m = n, stage 1 is gossip, but it tells nobody from anybody: no friends come of it.

Reading, where the papers are silent:
    How long stage 1 lasts in AFIND+'s comparison: `first_rounds`, by default a fifth of its 500 rounds.
    n is how many answers came in a round: who did not answer was not compared.
    A peer without friends, or whose friends are all away, stays alone in that round.
    Who joins in stage 2 has compared nobody, and so has no friends.

Differs:
    Rounds are synchronous and models are pulled; in the original they are pushed, and a peer acts whenever n came.
    The own model always takes part in the average, with the weight of any other.
    With a personal head a neighbour's body is judged under the own head; BatchNorm's statistics are one's own too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.federation import Federation
from fedloom.core.message import Tree
from fedloom.core.method import Method
from fedloom.core.party import Party
from fedloom.methods import steps

ROUNDING = 1e-6
"""A count must be above the expected one by more than this: sums of m / n are not exact."""


class PensConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    neighbours: int | None = Field(10, ge=0)
    """Neighbours that a peer asks in a round (n): random ones in stage 1, at most so many friends in stage 2; None for
    all."""
    top: int = Field(3, ge=1)
    """Models that it takes in stage 1 (m). Friends are found only where it is less than `neighbours`."""
    first_rounds: int = Field(100, ge=1)
    """Rounds of stage 1. AFIND+'s paper does not say how many of its 500; a shorter run needs fewer."""
    loss_rows: int | None = Field(None, ge=1)
    """Own rows on which models are compared, others in each round; None for all."""


@final
class PensPeer(Party[PensConfig]):
    """A peer and its model.

    Its state `counts` has for each of m parties (m,) how often its model was taken, and how often that was to be
    expected by chance.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "counts")
    CALLS = ("update", "select", "choose", "mix")
    TO_PEERS = ("give",)

    def setup(self) -> None:
        """The initial network; no counts."""
        steps.init_network(self)
        taken, expected = torch.zeros(2, self.site.parties, dtype=torch.float64, device=self.site.device)
        self.counts: dict[str, Any] = {"taken": taken, "expected": expected}

    def update(self, *, t: int) -> None:
        """Train on own rows, from the own weights."""
        steps.local_sgd(self, t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own weights, to whoever asks."""
        return {"weights": steps.shared_weights(self)}

    # -- stage 1 -----------------------------------------------------------------------------------

    def select(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the models of the lowest loss, and count."""
        best = lowest(self.losses(t, inbox), self.cfg.top)
        ids = [int(j) for j in inbox]
        taken, expected = self.counts["taken"].clone(), self.counts["expected"].clone()
        taken[[ids[n] for n in best]] += 1
        expected[ids] += len(best) / max(1, len(ids))
        self.counts = {"taken": taken, "expected": expected}
        self.note("friends", self.friends().sum())
        self.mix(t=t, inbox={str(ids[n]): inbox[str(ids[n])] for n in best})

    def losses(self, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> Tensor:
        """The mean loss (n,) of each model on own rows, in evaluation mode."""
        x, y = self.some(t, size=self.cfg.loss_rows or len(self.data))
        found = x.new_zeros(len(inbox))
        with self.scratch():
            for n, reply in enumerate(inbox.values()):
                steps.set_weights(self, reply["weights"])
                found[n] = F.cross_entropy(self.infer(x), y)
        return found

    # -- stage 2 -----------------------------------------------------------------------------------

    def friends(self) -> Tensor:
        """Those that were taken more often than chance would have it, as a mask (m,)."""
        more: Tensor = self.counts["taken"] - self.counts["expected"] > ROUNDING
        return more

    def choose(self, *, t: int, here: Tensor) -> Tensor:
        """Some random friends, as a mask (m,), given who is there (m,)."""
        friends, most = self.friends(), self.cfg.neighbours
        chosen = (friends & here.to(friends.device)).nonzero().flatten().tolist()
        self.note("friends", friends.sum())
        self.note("no friend there", 0.0 if chosen else 1.0)
        if most is not None and most < len(chosen):
            chosen = self.stream("friends", t).choice(chosen, most, replace=False).tolist()
        mask = torch.zeros_like(friends)
        mask[chosen] = True
        return mask

    # -- both --------------------------------------------------------------------------------------

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The plain mean of the own weights and those in the inbox."""
        models = steps.models_of(self, inbox)
        steps.average(self, models, dict.fromkeys(models, 1.0))

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune."""
        steps.prepare(self, way, handout)


def lowest(losses: Tensor, top: int) -> list[int]:
    """The places of the `top` lowest of losses (n,), rising; of equal ones the first. NaN is the highest."""
    return sorted(losses.argsort(stable=True)[:top].tolist())


def round(fed: Federation, server: None, peers: Sequence[int], cfg: PensConfig, t: int) -> Iterator[str]:
    """One round of all peers at once."""
    now, answer = {"t": t}, steps.weights_template(fed, cfg.personal_head)
    fed.call(peers, "update", shared=now)
    if t < cfg.first_rounds:
        links = fed.links(peers, cfg.neighbours, t)
        fed.exchange(links, answer="give", take="select", shared=now, expect=answer)
    else:
        fed.exchange(fed.asked(peers, "choose", now), answer="give", take="mix", shared=now, expect=answer)
    yield "round"


METHODS = (
    Method(
        name="pens",
        title="Peers befriend those whose models do well on their rows, and gossip among friends",
        paper="N. Onoszko et al.: Decentralized federated learning of deep neural networks on non-iid data, 2021",
        family="peer",
        config=PensConfig,
        round=round,
        client=PensPeer,
        needs=("one network",),
    ),
)
