"""FedFomo among peers: every peer weighs others' models by how much each lowers its loss on held-out rows.

Paper: M. Zhang, K. Sapra, S. Fidler, S. Yeung, J. M. Alvarez, "Personalized Federated Learning with First Order
Model Optimization", ICLR 2021. Here as a host of AFIND+ (its Figure 5): `friends` says who is asked.

Each peer i keeps a share of its rows out of training; L_i is the loss on them, x_i its weights at the round's start.
A round:

    ask up to `neighbours` peers j: with probability ε random ones, else those with the largest p_ij
    x̃_i = local training from x_i; the neighbours' x̃_j likewise
    w_ij = (L_i(x_i) - L_i(x̃_j)) / |x̃_j - x_i|,  j = i included
    p_ij <- p_ij + w_ij
    x_i <- x_i + Σ_j ŵ_ij (x̃_j - x_i),  ŵ_ij ∝ max(w_ij, 0), summing to 1

Where no weight is positive x_i stays what it was at the round's start: own training that does not lower the held-out
loss is dropped too. That is the formula's value, and what the code of DisPFL's authors does.

Differs:
    No server picks and sends models: a peer chooses among its neighbours, and keeps p to itself.
    With a personal head x is the body; all L_i of a round are taken with the own head as just trained, which stays.
    p begins at 0, takes unclipped weights, and ties are broken by chance.
    A model at distance 0, or whose loss is not finite, has weight 0.
    Fine-tuning before an evaluation leaves the held-out rows out as well.
    With AFIND+ the neighbours asked are its coreset, and the weights remain those above.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.context import epoch_plan
from fedloom.core.federation import Federation
from fedloom.core.message import Tree, weighted_mean
from fedloom.core.method import Method
from fedloom.methods.learner import weights_like
from fedloom.methods.peer.afind import Chooser, Host, found


class Config(Host):
    """The local training is `LearnerConfig`'s, but for the rows held out."""

    friends: Literal["random", "afind"] = "random"
    """Who is asked: by FedFomo's own rule, which is random with probability `epsilon`, or AFIND+'s coreset."""
    neighbours: int | None = Field(5, ge=0)
    """Neighbours that a peer asks in a round by FedFomo's own rule (M); None for all."""
    epsilon: float = Field(0.5, ge=0, le=1)
    """Probability that these are random in a round."""
    validation: float = Field(0.2, gt=0, lt=1)
    """Share of the own rows that is held out from training, to weigh models with."""


class Peer(Chooser[Config]):
    """A peer, its model, how much each neighbour has helped so far (p), and its weights before training (`began`)."""

    STATE: ClassVar[tuple[str, ...]] = (*Chooser.STATE, "helped", "began")
    CALLS = (*Chooser.CALLS, "pick", "update", "mix")
    TO_PEERS: ClassVar[tuple[str, ...]] = (*Chooser.TO_PEERS, "give")

    def setup(self) -> None:
        """Nobody has helped yet."""
        self.start()
        self.befriend()
        self.helped: dict[str, Any] = {"p": torch.zeros_like(self.friends["p"])}
        self.began: dict[str, Tensor] = {}

    # -- rows ----------------------------------------------------------------------------------------

    def split(self) -> tuple[Tensor, Tensor]:
        """Numbers of the own rows to train on, and of those held out: at least one each, if there are two."""
        rows = len(self.data)
        order = torch.from_numpy(self.stream("validation").permutation(rows)).to(self.site.device)
        held = min(max(1, int(self.cfg.validation * rows)), max(1, rows - 1))
        return (order[held:] if rows > 1 else order), order[:held]

    def passes(self, numbers: range, only: Sequence[str] | None) -> None:
        """As every learner's, over the rows that are not held out."""
        kept, size = self.split()[0], self.cfg.batch_size
        for n in numbers:
            plan = epoch_plan(self.stream("batches", n), len(kept), 1, size)
            self.train(self.loss, self.data.batches(kept[plan]), only=only)

    # -- a round -------------------------------------------------------------------------------------

    def pick(self, *, t: int, here: Tensor) -> Tensor:
        """Whom to ask as a mask (m,), given who is there (m,)."""
        near, rng, cfg = here.to(self.friends["near"].device) & self.friends["near"], self.stream("pick", t), self.cfg
        explores = rng.random() < cfg.epsilon
        order = near.nonzero().flatten().cpu()
        order = order[torch.from_numpy(rng.permutation(len(order)))]
        if not explores:
            order = order[self.helped["p"].cpu()[order].argsort(descending=True, stable=True)]
        chosen = torch.zeros_like(near)
        chosen[order[: cfg.neighbours]] = True
        return chosen

    def update(self, *, t: int) -> None:
        """Train on own rows, from the own weights."""
        self.began = {k: v.clone() for k, v in self.shared().items()}
        self.local_update(t)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own weights, to whoever asks."""
        return {"weights": self.shared()}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Towards each model, own training included, by how much it lowers the loss on the rows held out."""
        me = self.site.id
        models = {me: self.shared(), **{int(j): reply["weights"] for j, reply in inbox.items()}}
        start = self.began or {k: v.clone() for k, v in models[me].items()}
        losses = torch.stack([self.judged(model) for model in models.values()])
        w = first_order(self.judged(start), losses, torch.stack([apart(m, start) for m in models.values()]))
        p = self.helped["p"].clone()
        p[[*models]] += w.double()
        self.helped = {"p": p}
        shares = dict(zip(models, normalised(w).tolist(), strict=True))
        helps = any(shares.values())
        mean = weighted_mean([models[j] for j in shares], list(shares.values())) if helps else start
        self.adopt(mean)  # type: ignore[arg-type]
        self.note_mixing(shares if helps else {me: 1.0})
        self.note("nothing helped", float(not helps))
        self.began, self.heard = {}, {"t": -1}

    def judged(self, model: Mapping[str, Tensor]) -> Tensor:
        """L_i () of shared weights: mean cross-entropy on the rows held out, in evaluation mode."""
        held = self.split()[1]
        with self.scratch():
            self.adopt(model)
            return F.cross_entropy(self.infer(self.data.x(held)), self.data.y(held))


# -- the equations ------------------------------------------------------------------------------------


def first_order(base: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """w (n,): by how much each loss (n,) is below `base` (), per distance (n,); 0 where that is no number."""
    w = (base - losses) / distances
    return torch.where(w.isfinite(), w, 0.0)


def normalised(w: Tensor) -> Tensor:
    """ŵ (n,): negative weights as 0, and the sum 1; all 0 where none is positive."""
    positive = w.clamp_min(0).double()
    return positive / torch.where(positive.any(), positive.sum(), 1.0)


def apart(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """L2 distance () of two models."""
    return torch.stack([(x - b[k]).square().sum() for k, x in a.items()]).sum().sqrt()


# -- the round ----------------------------------------------------------------------------------------


def round(fed: Federation, server: None, peers: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    links = found(fed, peers, cfg, t) if cfg.friends == "afind" else fed.asked(peers, "pick", now)
    fed.call(peers, "update", shared=now)
    fed.exchange(links, answer="give", take="mix", shared=now, expect={"weights": weights_like(fed, cfg)})
    yield "round"


FEDFOMO = Method(
    name="fedfomo",
    title="Peers weigh each other's models by what they gain on held-out rows",
    paper="M. Zhang et al.: Personalized Federated Learning with First Order Model Optimization, ICLR 2021",
    family="peer",
    config=Config,
    round=round,
    client=Peer,
    needs=("one network",),
)

METHODS = (
    FEDFOMO,
    replace(
        FEDFOMO,
        name="fedfomo-afind",
        title="FedFomo whose neighbours AFIND+ chooses",
        fixed={"friends": "afind"},
    ),
)
