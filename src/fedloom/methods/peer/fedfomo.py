"""FedFomo among peers: every peer weights its neighbours' models by how much each lowers its loss
on held-out rows.

Paper: M. Zhang, K. Sapra, S. Fidler, S. Yeung, J. M. Alvarez, "Personalized Federated Learning with
First Order Model Optimization", ICLR 2021. AFIND+ (its Figure 5) can select the neighbours: see
`neighbour_selection`.

Each peer i holds a share of its rows out of training; L_i is the loss on them, x_i its weights at
the start of the round. A round:

    select up to `neighbours` peers j: with probability ε random ones, else those with the largest
    p_ij x̃_i = local training from x_i; the neighbours' x̃_j likewise
    w_ij = (L_i(x_i) - L_i(x̃_j)) / |x̃_j - x_i|,  j = i included
    p_ij <- p_ij + w_ij
    x_i <- x_i + Σ_j ŵ_ij (x̃_j - x_i),  ŵ_ij ∝ max(w_ij, 0), summing to 1

If no weight is positive, x_i is kept: local training that does not lower the held-out loss is
discarded too. The formula gives that, and the code of DisPFL's authors does it.

Differs:
    No server selects and sends models: a peer selects among its neighbours, and its p is private.
    With a personal head x is the body; all L_i of a round are computed with the peer's own head
    after its training. p starts at 0 and adds unclipped weights; ties are broken at random.
    A model at distance 0, or whose loss is not finite, has weight 0.
    Fine-tuning before an evaluation does not use the held-out rows either.
    With AFIND+ the neighbours are its coreset, and the weights are those above.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.page import EVERY_LOCAL, EVERY_TASK, Federation, Method, Tree, weighted_mean
from fedloom.methods import steps
from fedloom.methods.meta.steps import norm_of
from fedloom.methods.peer import held_out, mixing, selection


class FedFomoConfig(selection.SelectionConfig):
    """Local training and AFIND+'s neighbour selection as in `SelectionConfig`; some rows are held
    out from training.
    """

    neighbour_selection: Literal["random", "afind"] = "random"
    """Neighbour selection: FedFomo's own rule, random with probability `epsilon`; or AFIND+'s
    coreset.
    """
    neighbours: int | None = Field(5, ge=0)
    """Number of neighbours that FedFomo's own rule selects in a round (M); None for all."""
    epsilon: float = Field(0.5, ge=0, le=1)
    """Probability that FedFomo's own rule selects at random in a round."""
    validation: float = Field(0.2, gt=0, lt=1)
    """Share of the own rows that is held out from training, for the weights of models."""

    _possible = model_validator(mode="after")(selection.refuse_update_noise)


@final
class FedFomoPeer(selection.SelectingPeer[FedFomoConfig]):
    """A peer, its model, p (m,) in `helped`, and its shared weights at the start of the round in
    `began`.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "neighbours", "replies", "helped", "began")
    CALLS = ("choose", "candidates", "compare", "estimate", "pick", "update", "mix")
    TO_PEERS = ("request", "probe", "anchor", "give")
    TELLS = ()

    def setup(self) -> None:
        """The initial network; p = 0."""
        steps.init_network(self)
        selection.init(self)
        self.helped: dict[str, Any] = {"p": torch.zeros_like(self.neighbours["p"])}
        self.began: dict[str, Tensor] = {}

    # -- a round -----------------------------------------------------------------------------------

    def pick(self, *, t: int, here: Tensor) -> Tensor:
        """The neighbours to ask as a mask (m,), given which peers are available (m,)."""
        near, rng, cfg = self.neighbours["near"], self.stream("pick", t), self.cfg
        near = here.to(near.device) & near
        explores = rng.random() < cfg.epsilon
        order = near.nonzero().flatten().cpu()
        order = order[torch.from_numpy(rng.permutation(len(order)))]
        if not explores:
            order = order[self.helped["p"].cpu()[order].argsort(descending=True, stable=True)]
        chosen = torch.zeros_like(near)
        chosen[order[: cfg.neighbours]] = True
        return chosen

    def update(self, *, t: int) -> None:
        """Local training on the rows that are not held out."""
        self.began = {k: v.clone() for k, v in steps.shared_weights(self).items()}
        held_out.train_kept(self, steps.local_epochs(self, t))

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights."""
        return {"weights": steps.shared_weights(self)}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Move towards each model, the own trained one included, by how much it lowers the held-out
        loss.
        """
        me = self.context.id
        models = mixing.models_of(self, inbox)
        start = self.began or {k: v.clone() for k, v in models[me].items()}
        base, *losses = (
            held_out.validation_loss(self, model) for model in (start, *models.values())
        )
        distances = torch.stack([distance(model, start) for model in models.values()])
        w = first_order(base, torch.stack(losses), distances)
        p = self.helped["p"].clone()
        p[[*models]] += w.double()
        self.helped = {"p": p}
        shares = dict(zip(models, normalized(w).tolist(), strict=True))
        helps = any(shares.values())
        mean = weighted_mean([models[j] for j in shares], list(shares.values())) if helps else start
        steps.set_weights(self, mean)  # type: ignore[arg-type]
        mixing.note_mixing(self, shares if helps else {me: 1.0})
        self.note("no model lowered the loss", float(not helps))
        self.began, self.replies = {}, {"t": -1}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode, without the held-out
        rows.
        """
        held_out.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


# -- the equations ---------------------------------------------------------------------------------


def first_order(base: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """w (n,): how far each loss (n,) is below `base` (), per distance (n,); 0 where that is not
    finite.
    """
    w = (base - losses) / distances
    return torch.where(w.isfinite(), w, 0.0)


def normalized(w: Tensor) -> Tensor:
    """ŵ (n,): w with negative entries set to 0, divided by its sum; all 0 if none is positive."""
    positive = w.clamp_min(0).double()
    return positive / torch.where(positive.any(), positive.sum(), 1.0)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """L2 distance () of two models."""
    return norm_of({k: x - b[k] for k, x in a.items()})


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: FedFomoConfig, t: int
) -> Iterator[str]:
    """One round of all peers at once."""
    now = {"t": t}
    afind = cfg.neighbour_selection == "afind"
    links = selection.links(fed, peers, cfg, t) if afind else fed.choose_peers(peers, "pick", now)
    fed.call(peers, "update", shared=now)
    fed.exchange(
        links,
        answer="give",
        take="mix",
        shared=now,
        expect=steps.weights_template(fed, cfg.personal_head),
    )
    yield "round"


FEDFOMO = Method(
    name="fedfomo",
    title="Peers weight each other's models by the gain on held-out rows",
    paper="M. Zhang et al.: Personalized Federated Learning with First Order Model Optimization, "
    "ICLR 2021",
    family="peer",
    config=FedFomoConfig,
    round=round,
    client=FedFomoPeer,
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
)

METHODS = (
    FEDFOMO,
    replace(
        FEDFOMO,
        name="fedfomo-afind",
        title="FedFomo with AFIND+ selecting neighbours",
        fixed={"neighbour_selection": "afind"},
    ),
)
