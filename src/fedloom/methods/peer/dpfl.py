"""DPFL: every peer searches, under a budget, for the set of peers whose average model does best on
its held-out rows.

Paper: S. Kharrat, M. Canini, S. Horváth, "Decentralized Personalized Federated Learning", AISTATS
2025 (PMLR 258), arXiv 2406.06520. The algorithm is that of the authors' code; the double greedy is
that of N. Buchbinder et al., "A Tight Linear Time (1/2)-Approximation for Unconstrained Submodular
Maximization", FOCS 2012.

Peer k holds a share of its rows out of training; the reward of a set S of others is

    R_k(S) = (10 - L_k(Σ_{i in S, k} (n_i/n) w_i)) / 10,  L_k: the mean cross-entropy on the rows
    held out

    greedy (GGC): X = {}, Y = candidates; for each candidate i in random order:
        a = max(R(X + i) - R(X), 0),  b = max(R(Y - i) - R(Y), 0)
        add i to X with probability a / (a + b), or 1 if both are 0; otherwise remove it from Y
        stop at |X| = B, the budget
    before the rounds (BGGC): local training from common weights; greedy over all neighbours, B at a
    time -> pool Ω_k
    a round: local training; every P rounds C_k = greedy over Ω_k; w_k <- Σ_{i in C_k, k} (n_i/n)
        w_i

No gradient and no loss is sent: the receiver tries models on its own rows, as in PENS and FedFomo.

Reading, where paper and code are silent or differ:
    The training before the rounds is the training of the first round, in which peers average with
    their pool. BGGC goes on from the X of the last batch, kept as one mean model, so that at most B
        others are in memory; in a batch, Y has X and the batch.
    The code averages in rounds with a choice only; here every round averages with the last C_k.
    In the code a tie a = b > 0 has the last probability; here 1/2, as the formula gives.
    The budget counts helpers, without k itself. It limits C_k and what is averaged, not what is
        sent: a choice needs the models of all of Ω_k, and the first round the models of all
            neighbours.

Differs:
    With a personal head w is the body, tried with the peer's own head and BatchNorm statistics.
    Fine-tuning before an evaluation does not use the held-out rows.
    A model with a loss that is not finite has the reward of a loss of 10⁶.
    A peer that is absent in the first round is in nobody's pool, and trains alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from pydantic import Field
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    ClientContext,
    Federation,
    Method,
    Party,
    Shape,
    Template,
    Tree,
    weighted_mean,
)
from fedloom.methods import steps
from fedloom.methods.peer import held_out, mixing

WORST = 1e6
"""The loss that stands for one that is not finite."""


class DpflConfig(steps.LocalSGDConfig):
    """Local training as in `LocalSGDConfig`; some rows are held out from training."""

    budget: int = Field(10, ge=0)
    """Largest number of helpers of a peer, without itself (B)."""
    choose_every: int = Field(2, ge=1)
    """Rounds from one choice of helpers to the next (P)."""
    validation: float = Field(0.2, gt=0, lt=1)
    """Share of the own rows that is held out from training, for trying models."""

    def calls_in_round(self, context: ClientContext) -> Mapping[str, int]:
        """In the first round once for each group of peers that is tried."""
        return dict.fromkeys(("batch", "sift"), context.parties)


@final
class DpflPeer(Party[DpflConfig]):
    """A peer, its model, and masks (m,) of those that it has `tried`, of its `pool` (Ω) and its
    `helpers` (C); in the first round also the mean model of the pool so far and its rows, in
    `carried`.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "peers", "carried")
    CALLS = ("update", "batch", "sift", "settle", "pool", "helpers", "select", "mix")
    TO_PEERS = ("give",)
    TELLS = ()

    def setup(self) -> None:
        """The initial network; an empty pool."""
        steps.init_network(self)
        none = torch.zeros(self.context.parties, dtype=torch.bool, device=self.context.device)
        self.peers: dict[str, Tensor] = {"tried": none, "pool": none, "helpers": none}
        self.carried: dict[str, Any] = {}

    def update(self, *, t: int) -> None:
        """Local training on the rows that are not held out."""
        held_out.train_kept(self, steps.local_epochs(self, t))

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights w_i and the number of rows n_i."""
        return {"weights": steps.shared_weights(self), "rows": self.row_count}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode, without the held-out
        rows.
        """
        held_out.prepare(self, eval_mode=eval_mode, broadcast=broadcast)

    # -- the first round: BGGC ---------------------------------------------------------------------

    def batch(self, *, t: int, here: Tensor) -> Tensor:
        """The next B neighbours in random order, as a mask (m,); none if the pool is full."""
        near = sorted(self.context.neighbours)
        order = [near[i] for i in self.stream("batches of peers").permutation(len(near))]
        new = [j for j in order if here[j] and not self.peers["tried"][j]]
        full = int(self.peers["pool"].sum()) >= self.cfg.budget
        chosen = self.mask([] if full else new[: self.cfg.budget])
        self.peers = {**self.peers, "tried": self.peers["tried"] | chosen}
        return chosen

    def sift(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Greedy over a batch, from the pool so far."""
        start = self.carried or self.give(t=t)
        chosen = self.search(start, inbox, self.cfg.budget - int(self.peers["pool"].sum()), t)
        self.carried = average([start, *(inbox[j] for j in chosen)])
        self.peers = {
            **self.peers,
            "pool": self.peers["pool"] | self.mask([int(j) for j in chosen]),
        }

    def settle(self, *, t: int) -> None:
        """The pool is the first C_k: average with it."""
        if self.carried:
            steps.set_weights(self, self.carried["weights"])
        self.peers = {**self.peers, "helpers": self.peers["pool"]}
        self.carried = {}
        self.note("pool", self.peers["pool"].sum())

    # -- every round -------------------------------------------------------------------------------

    def pool(self, *, t: int, here: Tensor) -> Tensor:
        """Ω as a mask (m,)."""
        return self.peers["pool"]

    def helpers(self, *, t: int, here: Tensor) -> Tensor:
        """C as a mask (m,)."""
        return self.peers["helpers"]

    def select(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Greedy over the pool, then the average."""
        chosen = self.search(self.give(t=t), inbox, self.cfg.budget, t)
        self.peers = {**self.peers, "helpers": self.mask([int(j) for j in chosen])}
        self.mix(t=t, inbox={j: inbox[j] for j in chosen})

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """The mean of the own model and those in the inbox, by rows."""
        rows = {
            self.context.id: float(self.row_count),
            **{int(j): float(r["rows"]) for j, r in inbox.items()},
        }
        mixing.average(self, mixing.models_of(self, inbox), rows)
        self.note("helpers", len(inbox))

    # -- the search --------------------------------------------------------------------------------

    def search(
        self, start: Mapping[str, Any], inbox: Mapping[str, Mapping[str, Any]], most: int, t: int
    ) -> list[str]:
        """Greedy among the models of the inbox, each averaged with `start`; at most `most` of them,
        by id.
        """

        def reward(others: Sequence[str]) -> float:
            model: Any = average([start, *(inbox[j] for j in others)])["weights"]
            loss = held_out.validation_loss(self, model).double()
            return (10 - float(torch.nan_to_num(loss, WORST, WORST).clamp_max(WORST))) / 10

        rng = self.stream("greedy", t, int(self.peers["tried"].sum()))
        order = [list(inbox)[i] for i in rng.permutation(len(inbox))]
        return greedy(reward, order, rng.random(len(order)).tolist(), most)

    def mask(self, chosen: Sequence[int]) -> Tensor:
        """Peers (m,) by their ids."""
        mask = torch.zeros_like(self.peers["pool"])
        mask[list(chosen)] = True
        return mask


def average(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of `weights` by `rows`, and the sum of `rows`."""
    rows = [float(model["rows"]) for model in models]
    return {
        "weights": weighted_mean([model["weights"] for model in models], rows),
        "rows": sum(rows),
    }


def greedy(
    reward: Callable[[Sequence[str]], float],
    candidates: Sequence[str],
    draws: Sequence[float],
    most: int,
) -> list[str]:
    """GGC: at most `most` of the candidates, in their order. It computes at most 2 n + 2 rewards.

    Args:
        reward: R of a set.
        candidates: n names, in the order in which they are considered.
        draws: n uniform numbers in [0, 1).
        most: the budget.
    """
    kept: list[str] = []
    left = list(candidates)
    of_kept, of_left = (reward(kept), reward(left)) if most and candidates else (0.0, 0.0)
    for name, draw in zip(candidates, draws, strict=True):
        if len(kept) >= most:
            break
        with_it, rest = [*kept, name], [other for other in left if other != name]
        added, removed = reward(with_it), reward(rest)
        a, b = max(added - of_kept, 0), max(removed - of_left, 0)
        if draw < (a / (a + b) if a + b > 0 else 1.0):
            kept, of_kept = with_it, added
        else:
            left, of_left = rest, removed
    return kept


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: DpflConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    answer: Template = {**steps.weights_template(fed, cfg.personal_head), "rows": Shape("int64")}
    fed.call(peers, "update", shared=now)
    if t == 0:
        for _ in range(-(-(len(peers) - 1) // cfg.budget) if cfg.budget else 0):
            links = {i: near for i, near in fed.choose_peers(peers, "batch", now).items() if near}
            fed.exchange(links, answer="give", take="sift", shared=now, expect=answer)
        fed.call(peers, "settle", shared=now)
    elif t % cfg.choose_every == 0:
        links = fed.choose_peers(peers, "pool", now)
        fed.exchange(links, answer="give", take="select", shared=now, expect=answer)
    else:
        links = fed.choose_peers(peers, "helpers", now)
        fed.exchange(links, answer="give", take="mix", shared=now, expect=answer)
    yield "round"


METHODS = (
    Method(
        name="dpfl",
        title="Peers average with the set of others that does best on held-out rows, under a budget",  # noqa: E501
        paper="S. Kharrat et al.: Decentralized Personalized Federated Learning, AISTATS 2025",
        family="peer",
        config=DpflConfig,
        round=round,
        client=DpflPeer,
        tasks=EVERY_TASK,
        local=EVERY_LOCAL,
        needs=("one network",),
    ),
)
