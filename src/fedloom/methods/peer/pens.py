"""PENS: gossip averaging among peers whose models have a low loss on each other's rows.

Paper: N. Onoszko, G. Karlsson, O. Mogren, E. Listo Zec, "Decentralized federated learning of deep
neural networks on non-iid data", 2021. Here as a baseline of AFIND+ (its section 4.1).

Stage 1, the first rounds: a peer requests the models of n random neighbours, computes the loss of
each on its own rows, and averages its own model with the m of the lowest loss. It counts how often
it selects each neighbour. Stage 2: its selected peers are the neighbours that it selected more
often than expected by chance, which is m out of n, and it averages with random ones of these only.

With m = n, stage 1 is gossip averaging and selects no peers.

Reading, where the papers are silent:
    The length of stage 1 in AFIND+'s comparison is `stage1_rounds`, by default a fifth of its 500
    rounds.
    n is the number of replies in a round: a neighbour that did not reply was not compared.
    A peer none of whose selected peers is available keeps its model in that round.
    A peer that joins in stage 2 has no selected peers.

Differs:
    Rounds are synchronous and models are pulled; in the original they are pushed, and a peer acts
    on every n models. The average always includes the peer's own model, with equal weight.
    With a personal head a neighbour's body is evaluated with the peer's own head and BatchNorm
    statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import EVERY_LOCAL, EVERY_TASK, Federation, Method, Party, Tree
from fedloom.methods import steps
from fedloom.methods.peer import mixing

ROUNDING = 1e-6
"""A count must be above the expected one by more than this: sums of m / n are not exact."""


class PensConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`."""

    neighbours: int | None = Field(10, ge=0)
    """Neighbours that a peer requests models from in a round (n): random ones in stage 1, at most n
    selected ones in stage 2; None for all.
    """
    top_m: int = Field(3, ge=1)
    """Number of models that a peer averages with in stage 1 (m). Stage 2 needs m < n."""
    stage1_rounds: int = Field(100, ge=1)
    """Rounds of stage 1. The AFIND+ paper does not state them for its 500 rounds; a shorter run
    needs fewer.
    """
    loss_rows: int | None = Field(None, ge=1)
    """Number of own rows on which models are compared, drawn anew in each round; None for all."""


@final
class PensPeer(Party[PensConfig]):
    """A peer, its model, and `counts` (m,): how often it selected each peer's model, and the
    expectation by chance.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "counts")
    CALLS = ("update", "select", "choose", "mix")
    TO_PEERS = ("give",)
    MEANS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network; no counts."""
        steps.init_network(self)
        taken, expected = torch.zeros(
            2, self.context.parties, dtype=torch.float64, device=self.context.device
        )
        self.counts: dict[str, Any] = {"taken": taken, "expected": expected}

    def update(self, *, t: int) -> None:
        """Local training."""
        steps.local_sgd(self, t=t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights."""
        return {"weights": steps.shared_weights(self)}

    # -- stage 1 -----------------------------------------------------------------------------------

    def select(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Stage 1: average with the models of lowest loss, and count them."""
        best = lowest(self.losses(t, inbox), self.cfg.top_m)
        ids = [int(j) for j in inbox]
        taken, expected = self.counts["taken"].clone(), self.counts["expected"].clone()
        taken[[ids[n] for n in best]] += 1
        expected[ids] += len(best) / max(1, len(ids))
        self.counts = {"taken": taken, "expected": expected}
        self.note("selected peers", self.selected().sum())
        self.mix(t=t, inbox={str(ids[n]): inbox[str(ids[n])] for n in best})

    def losses(self, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> Tensor:
        """Mean loss (n,) of each model on own rows, in evaluation mode."""
        x, y = self.sample_batch(t, size=self.cfg.loss_rows or len(self.data))
        losses = x.new_zeros(len(inbox))
        with self.scratch():
            for n, reply in enumerate(inbox.values()):
                steps.set_weights(self, reply["weights"])
                losses[n] = self.context.task.loss(self.infer(x), y)
        return losses

    # -- stage 2 -----------------------------------------------------------------------------------

    def selected(self) -> Tensor:
        """The peers that were selected more often than expected by chance, as a mask (m,)."""
        more: Tensor = self.counts["taken"] - self.counts["expected"] > ROUNDING
        return more

    def choose(self, *, t: int, here: Tensor) -> Tensor:
        """Stage 2: random selected peers as a mask (m,), given the available peers (m,)."""
        selected, most = self.selected(), self.cfg.neighbours
        chosen = (selected & here.to(selected.device)).nonzero().flatten().tolist()
        self.note("selected peers", selected.sum())
        self.note("no selected peer present", 0.0 if chosen else 1.0)
        if most is not None and most < len(chosen):
            chosen = self.stream("friends", t).choice(chosen, most, replace=False).tolist()
        mask = torch.zeros_like(selected)
        mask[chosen] = True
        return mask

    # -- both --------------------------------------------------------------------------------------

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own model and those in the inbox."""
        models = mixing.models_of(self, inbox)
        mixing.average(self, models, dict.fromkeys(models, 1.0))

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode."""
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


def lowest(losses: Tensor, top: int) -> list[int]:
    """Indices of the `top` lowest losses (n,), ascending; of equal losses the first. NaN is the
    highest.
    """
    return sorted(losses.argsort(stable=True)[:top].tolist())


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: PensConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now, answer = {"t": t}, steps.weights_template(fed, cfg.personal_head)
    mixing.check_models(fed, cfg.top_m)
    fed.call(peers, "update", shared=now)
    if t < cfg.stage1_rounds:
        links = fed.sample_peers(peers, cfg.neighbours, t)
        fed.exchange(links, answer="give", take="select", shared=now, expect=answer)
    else:
        fed.exchange(
            fed.choose_peers(peers, "choose", now),
            answer="give",
            take="mix",
            shared=now,
            expect=answer,
        )
    yield "round"


METHODS = (
    Method(
        name="pens",
        title="Peers gossip with the peers whose models have a low loss on their rows",
        paper="N. Onoszko et al.: Decentralized federated learning of deep neural networks on "
        "non-iid data, 2021",
        family="peer",
        config=PensConfig,
        round=round,
        client=PensPeer,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
    ),
)
