"""AFIND+: decentralized learning in which every peer selects the neighbours that help it.

Paper: L. Wang, Y. Chen, Y. Guo, X. Tang, "Smart Sampling: Helping from Friendly Neighbors for
Decentralized Federated Learning", arXiv 2407.04460. Equation and line numbers below are the
paper's; lines are those of Algorithm 1.

Each peer i has a body w_i, a private head β_i, its rows, and a probability p_ij for each of its
neighbours B_i. A round:

    C_i = {j in B_i : p_ij ≥ θ_i}                                                  the coreset, lines 3-5
    each j in C_i replies, computed from i's body and its own head and rows, on a scratch copy:
        φ_j, the gradient of the body's last layer at w_i                          lines 7, 11
        w_j, trained from w_i: head alone, then body alone                         lines 8, 17-23
        F̃_j = (1 - γ) F_j(after) + γ F_j(before)                                  (15)
    w_i <- Σ_j ϖ_ij w_j,  ϖ_ij ∝ exp(-F̃_j / T)                                    (14), (16), line 13
    p_ij <- softmax_j in C_i (cos(φ_i, φ_j) / υ) · (mass of C_i)                   (8), (9), line 14
    e_ij = (1 + cos) / 2,  h_i = -Σ_j in C_i e_ij ln e_ij                          (10)
    θ_i = τ (1 - sigmoid(h_i))                                                     (11)-(13)

AFIND is the same with equal weights ϖ. `mode="cheap"` (ours) trains every peer once, from its own
body, and requests only φ and F at w_i from neighbours. `threshold="calibrated"` (ours) follows the
paper's prose, which (13) contradicts: θ_i = 2 τ h̄_i with h̄_i = (e / |C_i|) h_i in [0, 1],
compared with p_ij |B_i|, so that all similar neighbours pass.
Both lose them again: as training converges, gradients on similar rows point anywhere, and p
concentrates on few. `threshold="anchored"` (ours) compares φ at the initial network, where all
peers start, once for each pair: C_i are the neighbours above the largest gap in cos(φ_i, φ_j), so
that groups of any size are found in round 0 and kept.

Reading, where the paper is silent or contradicts itself:
    θ starts at 0: the first round selects all neighbours, or `explore_neighbours` random ones, or
        uses probes alone.
    An empty coreset would stay empty: `empty_coreset` says which neighbours replace it.
    (9) sums over the p outside C_i, and (14) normalizes over j.
    Line 13 omits i's own update of line 12, which would be lost: i has a share in ϖ, but not in p
    and h. Line 8 would train j's head once for each request: requests run on a scratch copy, and
    only line 12 changes j. When a peer leaves, the p of the others are normalized; a peer that
    joins gets the mean p. Line 20 takes the head after K_w steps, but there are K_β: the last one
    is meant. All peers start with one network, heads included.
    φ and F are computed on at most `probe_rows` of a peer's rows, the same for all requests of a
    round.

Differs:
    A neighbour that does not reply keeps its old p, as if it had not been in C_i.
    Cheap mode sends three messages per pair instead of two: the trained body follows the probe.
    Privacy (`dp`, Table 4): the paper describes it by quantities that AFIND+ does not have. Here
        noise of standard deviation σ C0 / L is added to φ (the mean of L row gradients, each
        clipped to C0), or to the clipped change of the body. Only the first has an (ε, δ), and only
        with `threshold="anchored"`: it covers φ and the choice of neighbours, which then compares
        what was sent. Bodies and losses are sent without noise. φ is computed at
        the initial head: the own one was trained on the own rows without noise.
"""  # noqa: E501

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, final

import torch
from pydantic import model_validator
from torch import Tensor

from fedloom.core.page import (
    EVERY_LOCAL,
    EVERY_TASK,
    Aggregator,
    Federation,
    Method,
    Template,
    Tree,
    floats,
)
from fedloom.methods import steps
from fedloom.methods.peer import mixing, selection
from fedloom.protect.privacy import clipped_tree, noisy


class AfindConfig(selection.SelectionConfig):
    """Local training and neighbour selection as in `SelectionConfig`."""

    mode: Literal["faithful", "cheap"] = "faithful"
    """`faithful`: a neighbour trains from the requesting peer's body. `cheap`: it sends its own
    trained body (ours).
    """

    @model_validator(mode="after")
    def _possible(self) -> "AfindConfig":
        if self.dp.target == "update" and self.mode != "faithful":
            raise ValueError('params.dp.target = "update" needs params.mode = "faithful"')
        return self

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: models are weighed by loss."""
        return selection.refuses(self, aggregator)


@final
class AfindPeer(selection.SelectingPeer[AfindConfig]):
    """A peer. Its state is described in `fedloom.methods.peer.selection`; in faithful mode
    `replies` also has `shares` (m,), the neighbours' shares of ϖ among themselves, their mean body
    by these (`bodies`), and its `mass`.
    """

    ROLE = "peer"
    STATE = ("params", "buffers", "opt", "neighbours", "replies")
    CALLS = ("choose", "candidates", "compare", "estimate", "gather", "update", "train_once", "mix")
    TO_PEERS = ("request", "probe", "anchor", "serve", "give")
    MEANS = ("serve", "give")
    TELLS = ()

    def setup(self) -> None:
        """The initial network; equal p and θ = 0."""
        steps.init_network(self)
        selection.init(self)

    # -- faithful: a neighbour trains from the requesting peer's body ------------------------------

    def serve(self, *, t: int, asked: Mapping[str, Any], by: Tensor) -> dict[str, Tree]:
        """Lines 7-9 and 17-23 at j: φ_j, w_j and F̃_j from w_i, on a scratch copy."""
        with self.scratch():
            steps.set_weights(self, asked["weights"])
            phi, before = selection.proxy(self, t)
            steps.local_sgd(self, t=t)
            loss = selection.smoothed(selection.probe_loss(self, t), before, self.cfg.gamma)
            body = {k: v.clone() for k, v in steps.shared_weights(self).items()}
        if self.cfg.dp.target == "update":
            body = self.private_body(body, asked["weights"], t, by)
        return {"phi": selection.private(self, phi, t, by), "weights": body, "loss": loss}

    def private_body(
        self, body: Mapping[str, Tensor], start: Mapping[str, Tensor], t: int, by: Tensor
    ) -> dict[str, Tensor]:
        """The body with its change from `start` clipped and noised."""
        dp = self.cfg.dp
        change = clipped_tree({k: w - start[k] for k, w in body.items()}, dp.clip)
        sigma = dp.sigma * dp.clip / self.cfg.batch_size
        rng = self.noise([change, sigma], "privacy", t, int(by))
        return {k: start[k] + noisy(c, sigma, rng) for k, c in change.items()}

    def gather(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Lines 13, 14 at i, without its own model: keep the neighbours' mean by ϖ
        until `update`.
        """
        self.estimate(t=t, inbox=inbox)
        if len(inbox) < self.context.aggregator.least:
            return
        losses = torch.stack([r["loss"] for r in inbox.values()])
        shares = selection.weigh(losses, self.cfg)
        dense = losses.new_zeros(len(self.neighbours["p"]))
        dense[[int(j) for j in inbox]] = shares
        sent = [r["weights"] for r in inbox.values()]
        bodies = mixing.mean_of(self, sent, shares.tolist())
        self.replies = {
            **self.replies,
            "shares": dense,
            "bodies": bodies,
            "mass": log_mass(losses, self.cfg),
        }

    def update(self, *, t: int) -> None:
        """Line 12, the own training, and line 13 with it."""
        cfg, replies = self.cfg, self.replies if self.replies["t"] == t else {}
        before = replies["before"] if replies else selection.proxy(self, t)[1]
        steps.local_sgd(self, t=t)
        self.note("trainings", 1 + replies["who"].sum() if replies else 1.0)
        row = self.neighbours["me"].float()
        if "bodies" in replies:
            loss = selection.smoothed(selection.probe_loss(self, t), before, cfg.gamma)
            share = torch.sigmoid(log_mass(loss[None], cfg) - replies["mass"])  # ϖ_ii
            own = steps.shared_weights(self)
            steps.set_weights(
                self, {k: torch.lerp(replies["bodies"][k], w, share) for k, w in own.items()}
            )
            row = share * row + (1 - share) * replies["shares"]
        self.note("mixing", row)
        self.replies = {"t": -1}

    # -- cheap: every peer trains once, from its own body ------------------------------------------

    def train_once(self, *, t: int) -> None:
        """Line 12, for the peer itself and for all requests."""
        steps.local_sgd(self, t=t)
        self.note("trainings", 1.0)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own trained body and F_j(after)."""
        return {"weights": steps.shared_weights(self), "loss": selection.probe_loss(self, t)}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Line 13."""
        mixing.average(self, mixing.models_of(self, inbox), selection.mixing_shares(self, t, inbox))
        self.replies = {"t": -1}

    def prepare(self, *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
        """Before an evaluation: adapt or fine-tune, depending on the mode."""
        steps.prepare(self, eval_mode=eval_mode, broadcast=broadcast)


def log_mass(losses: Tensor, cfg: AfindConfig) -> Tensor:
    """ln Σ_j exp(-F̃_j / T) () of smoothed losses (n,), or ln n where weights are equal."""
    even = cfg.aggregation == "uniform"
    return torch.logsumexp(torch.zeros_like(losses) if even else -losses / cfg.temperature, 0)


def round(
    fed: Federation, server: None, peers: Sequence[int], cfg: AfindConfig, t: int
) -> Iterator[str]:
    """Algorithm 1, lines 2-15, for one t and all peers."""
    mixing.check_models(fed, None)
    now, body = {"t": t}, steps.weights_template(fed, cfg.personal_head)
    links = selection.coresets(fed, peers, cfg, t)  # lines 3-5
    if cfg.mode == "faithful":
        steps_of = {"ask": "request", "answer": "serve", "take": "gather"}  # lines 6-11, 13, 14
        answer: Template = {"phi": selection.proxy_template(fed), **body, "loss": floats()}
        fed.exchange(
            links, **steps_of, shared=now, question=body, expect=answer, at_once=selection.AT_ONCE
        )
        fed.call(peers, "update", shared=now)  # lines 12, 13
    else:
        selection.exchange_probes(fed, links, cfg, t)  # lines 7, 11, 14
        fed.call(peers, "train_once", shared=now)  # line 12
        fed.exchange(
            links, answer="give", take="mix", shared=now, expect={**body, "loss": floats()}
        )
    yield "round"


AFIND_PLUS = Method(
    name="afind-plus",
    title="Peers select similar neighbours and weight their models by loss",
    paper="L. Wang et al.: Smart Sampling: Helping from Friendly Neighbors for Decentralized "
    "Federated Learning, 2024",
    family="peer",
    config=AfindConfig,
    round=round,
    client=AfindPeer,
    presets={
        "calibrated": {"threshold": "calibrated"},
        "cheap": {"threshold": "calibrated", "mode": "cheap"},
        "anchored": {"threshold": "anchored", "mode": "cheap"},
    },
    tasks=EVERY_TASK,
    local=EVERY_LOCAL,
    needs=("one network",),
    quadratic=True,
)

METHODS = (
    replace(AFIND_PLUS, trial_rank=2),
    replace(
        AFIND_PLUS,
        name="afind",
        title="AFIND+ with equal weights",
        fixed={"aggregation": "uniform"},
    ),
    replace(
        AFIND_PLUS,
        name="fedavg-ft-afind",
        title="FedAvg-FT (no personal head) with AFIND+ selecting and weighting neighbours",
        fixed={"personal_head": False},
    ),
)
