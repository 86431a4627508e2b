"""AFIND+'s neighbour selection, which `afind.py` and other methods share: a base class of their
peers, and functions.

Paper: L. Wang, Y. Chen, Y. Guo, X. Tang, "Smart Sampling: Helping from Friendly Neighbors for
Decentralized Federated Learning", arXiv 2407.04460; `fedloom.methods.peer.afind` has the algorithm
and what differs from the paper. Numbers in parentheses are the paper's equations, lines those of
its Algorithm 1.

A page's peer derives from `SelectingPeer` and keeps two names in its STATE:

    neighbours: p (m,) and θ; masks (m,) of the party itself, of its neighbours, and of those last
        available; the number of φ sent; if anchored, the cosines (m,) and a mask (m,) of the
        neighbours that have one, and the own φ once it was sent or compared.
    replies: results of round `t` that the same round uses later: the party's own F(before), a mask
        (m,) of the neighbours that replied, and their losses (m,); {"t": -1} otherwise.

`coresets` and `exchange_probes` send the messages.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import (
    Aggregator,
    ClientContext,
    Federation,
    Guarantee,
    MethodConfig,
    ModelError,
    Party,
    Shape,
    Template,
    Tree,
    floats,
)
from fedloom.methods import steps
from fedloom.protect.accountant import REPLACED, Releases, epsilon
from fedloom.protect.noise import charge, draws
from fedloom.protect.privacy import clipped_rows

SIMILAR = 0.5
"""Smallest cosine of a neighbour that an anchored peer selects."""
AT_ONCE = 128
"""Maximum number of replies held in memory at once in an exchange."""

SHORTCUTS = ("shortcut", "downsample")
"""Names of the layers beside a residual block's own. They are registered after it, but come before
its output.
"""

SENT = "releases of phi"
"""The note of the number of φ that a peer has sent so far, with noise."""


class ProbePrivacy(BaseModel):
    """Differential privacy of the messages that a peer sends."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    target: Literal["none", "phi", "update"] = "none"
    """The message that gets noise: the feature proxy φ, or the update of the body."""
    sigma: float = Field(2.0, gt=0)
    """σ2 of Table 4: the noise has standard deviation σ2 C0 / L."""
    clip: float = Field(1.0, gt=0)
    """Clipping norm C0 of a row's gradient, or of the whole update."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """δ at which ε is reported."""

    def epsilon(self, releases: int) -> float:
        """ε of this many φ, for one row that is replaced: it moves a mean of L clipped gradients by
        2 C0 / L.
        """
        return epsilon([Releases(self.sigma / 2, releases)], self.delta)


class SelectionConfig(MethodConfig):
    """Local training as in `LocalSGDConfig`, and neighbour selection. The paper gives τ, γ and T,
    but not υ.
    """

    alpha: float = Field(0.03, ge=0)
    """Step size of adaptation (α)."""
    adapt_steps: steps.AdaptSteps = ()
    """Numbers of adaptation steps on the support half after which clients are evaluated; the first
    is reported.
    """
    batchnorm: Literal["own", "batch"] = "own"
    """BatchNorm statistics for prediction, which never leave a client: `own` takes its running
    statistics, as usual; `batch` takes those of the rows to predict, so that a prediction depends
    on the other rows.
    """
    TRIAL = (("personal_head", False),)
    epochs: int = Field(5, ge=1)
    """Epochs over the client's own rows in a round (K_w)."""
    head_epochs: int = Field(1, ge=0)
    """With a personal head: epochs before them that update only the head (K_β)."""
    batch_size: int = Field(128, ge=1)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    lr: float = Field(0.01, gt=0)
    """Learning rate of SGD."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    personal_head: bool = True
    """Whether the last layer is private to each client."""
    finetune_epochs: int = Field(1, ge=0)
    """Epochs of fine-tuning all weights before the evaluation mode "tuned"; 0 skips it."""
    tau: float = Field(0.5, gt=0)
    """τ of (13)."""
    upsilon: float = Field(0.1, gt=0)
    """υ of (8): smaller values prefer similar neighbours more. More neighbours need a smaller υ."""
    threshold: Literal["eq13", "calibrated", "anchored", "top"] = "eq13"
    """θ as printed in (13), or as the paper's prose describes it (calibrated, ours); or no θ: the
    coreset is the neighbours whose φ at the initial network is similar, which training does not
    change (anchored, ours), or a fixed number of the likeliest (top, part i of Table 2).
    """
    top: int = Field(3, ge=1)
    """Number of neighbours of `threshold = "top"`."""
    empty_coreset: Literal["top1", "self", "all"] = "top1"
    """Replacement of an empty coreset: the neighbour with the largest p (top1), none (self), or
    all.
    """
    explore_every: int | None = Field(None, ge=1)
    """Interval of exploring rounds, which ignore θ; None for the first round only."""
    explore_neighbours: int | None = Field(None, ge=1)
    """Number of random neighbours that an exploring round selects; None for all."""
    explore_by: Literal["train", "probe"] = "train"
    """Exploring rounds request training from all selected neighbours (train), or first only φ and
    F, and training from those that then pass θ (probe).
    """
    probe_rows: int = Field(100, ge=1)
    """Number of own rows on which φ and F are computed."""
    gamma: float = Field(0.9, ge=0, le=1)
    """γ of (15): the weight of the loss before training."""
    temperature: float = Field(1.0, gt=0)
    """T of (14)."""
    aggregation: Literal["boltzmann", "uniform"] = "boltzmann"
    """Mixing weights: (14), or equal weights."""
    dp: ProbePrivacy = ProbePrivacy()
    """Differential privacy: target (none, phi, update), sigma (σ2 of Table 4), clip (C0), delta
    (δ).
    """

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """After adaptation, and after fine-tuning if `finetune_epochs` > 0."""
        return steps.eval_modes(self.adapt_steps, self.finetune_epochs)

    @property
    def guarantees(self) -> tuple[Guarantee, ...]:
        """The privacy guarantee of φ and of the choice of neighbours, if φ has noise and is
        compared at the initial network. Bodies and losses have none.

        With another threshold the choice depends on the own φ at a body that was trained without
        noise, which one row moves by any amount.
        """
        if self.dp.target != "phi" or self.threshold != "anchored":
            return ()
        note = lambda sent: self.dp.epsilon(round(max(sent)))
        # own, and for each asking peer
        each = lambda party, rounds: [float(rounds * party.context.parties)]
        what = "feature proxy φ and choice of neighbours"
        return (Guarantee(what, REPLACED, self.dp.delta, SENT, note, planned=each),)

    def charges(self, party: Any, rounds: Sequence[int]) -> list[tuple[float, ...]]:
        """See `MethodConfig.charges`: φ for each neighbour that asks, and anchored the own."""
        if self.dp.target != "phi":
            return []
        twice = self.threshold != "anchored" and self.explore_by == "probe"
        asks = sum(1 + (twice and self.explores(t)) for t in rounds)
        own = bool(rounds) and self.threshold == "anchored"
        count = asks * len(party.context.neighbours) + own
        return [(self.dp.sigma, count, 1.0)] if count else []

    def calls_in_round(self, context: ClientContext) -> Mapping[str, int]:
        """Twice in a round that explores by probing."""
        return {"choose": 2, "estimate": 2}

    def least_in_sum(self, context: ClientContext) -> int:
        """See `MethodConfig.least_in_sum`: noise hides φ, which enters no sum."""
        return 0

    def explores(self, t: int) -> bool:
        """Whether round t ignores θ."""
        return t == 0 or (self.explore_every is not None and t % self.explore_every == 0)


SelectionT = TypeVar("SelectionT", bound=SelectionConfig)
SelectionT_co = TypeVar("SelectionT_co", bound=SelectionConfig, covariant=True)


def refuse_update_noise(cfg: SelectionT) -> SelectionT:
    """Config validator of methods that use the selection."""
    if cfg.dp.target == "update":
        raise ValueError(
            'params.dp.target = "update" is available in afind-plus only: use "phi" or "none"'
        )
    return cfg


def refuses(cfg: SelectionConfig, aggregator: Aggregator) -> str:
    """See `MethodConfig.refuses`: models are weighed by loss, unless their weights are equal."""
    if cfg.aggregation == "uniform" or aggregator.weighs:
        return ""
    return (
        'models are weighed by loss: choose rule = "clip" or "centered", or set '
        'params.aggregation = "uniform"'
    )


# -- the messages of the selection -----------------------------------------------------------------


class SelectingPeer(Party[SelectionT_co]):
    """A peer that selects its neighbours, for pages to derive from: the messages of the selection,
    and its state.
    """

    neighbours: dict[str, Tensor]
    replies: dict[str, Any]

    def choose(self, *, here: Tensor, open: bool) -> Tensor:
        """Lines 3-5: C_i as a mask (m,), given the available peers (m,). With `open` all of them
        are taken.
        """
        cfg, neighbours = self.cfg, self.neighbours
        here = here.to(neighbours["near"].device) & neighbours["near"]
        p = after_churn(neighbours["p"], neighbours["here"], here)
        if cfg.threshold == "anchored":
            self.neighbours = {**neighbours, "p": p, "here": here}
            met = here & neighbours["met"]
            similar: Tensor = met & (
                neighbours["cosines"] >= largest_gap(neighbours["cosines"][met])
            )
            return similar
        passing = here & (
            p * (here.sum() if cfg.threshold == "calibrated" else 1) >= neighbours["theta"]
        )
        if cfg.threshold == "top":
            best = torch.where(here, p, -1.0).topk(min(cfg.top, len(p))).indices
            passing = here & torch.zeros_like(here).index_fill(0, best, True)
        likeliest = F.one_hot(torch.where(here, p, -1.0).argmax(), len(p)).bool()
        instead = {"top1": likeliest, "self": torch.zeros_like(here), "all": here}[
            cfg.empty_coreset
        ]
        self.note("empty coreset", 0.0 if open else (~passing.any()).float())
        self.neighbours = {**neighbours, "p": p, "here": here}
        return here if open else torch.where(passing.any(), passing, instead & here)

    def request(self, *, t: int) -> dict[str, Tree]:
        """The own shared weights w_i, at which neighbours compute φ and F."""
        return {"weights": steps.shared_weights(self)}

    def probe(self, *, t: int, asked: Mapping[str, Any], by: Tensor) -> dict[str, Tree]:
        """Lines 7, 11: φ_j and F_j(before) at the requesting peer's shared weights, on a scratch
        copy.
        """
        with self.scratch():
            steps.set_weights(self, asked["weights"])
            phi, loss = proxy(self, t)
        return {"phi": private(self, phi, t, by), "loss": loss}

    def estimate(self, *, t: int, inbox: Mapping[str, Any]) -> None:
        """Line 14, (8)-(13): new p and θ from the φ of the neighbours that replied; their F in
        `replies`.
        """
        cfg, neighbours, replies = self.cfg, self.neighbours, self.replies
        own, before = proxy(self, t)
        ids = torch.tensor([int(j) for j in inbox], dtype=torch.int64, device=own.device)
        losses, replied = own.new_zeros(len(neighbours["p"])), torch.zeros_like(neighbours["me"])
        probes = 1 + len(ids) + (replies["probes"] if replies["t"] == t else 0)
        self.replies = {
            "t": t,
            "before": before,
            "losses": losses,
            "who": replied,
            "probes": probes,
        }
        self.note("coreset", len(ids))
        self.note("probes", probes)
        if not inbox:
            return
        losses[ids] = torch.stack([r["loss"] for r in inbox.values()])
        replied[ids] = True
        s = cosine(torch.stack([r["phi"] for r in inbox.values()]), own).double()
        p, h = probabilities(neighbours["p"], ids, s, cfg.upsilon), entropy(s)
        theta = threshold(h, len(ids), cfg)
        self.neighbours = {**neighbours, "p": p, "theta": theta}
        self.note("entropy", h)
        self.note("theta", theta)
        self.note("effective neighbours of p", 1 / (p**2).sum())
        self.note("similarity of the coreset", s.mean())

    def candidates(self, *, here: Tensor) -> Tensor:
        """The available neighbours that the peer has not been compared with, as a mask (m,)."""
        neighbours = self.neighbours
        unmet: Tensor = here.to(neighbours["near"].device) & neighbours["near"] & ~neighbours["met"]
        return unmet

    def anchor(self, *, t: int) -> dict[str, Tree]:
        """φ_j at the initial network, on the rows of round 0: the same for every peer that asks, in
        every round.
        """
        return {"phi": own_anchor(self, t)}

    def compare(self, *, t: int, inbox: Mapping[str, Any]) -> None:
        """The cosines of the own φ and the φ of the neighbours that replied, all at the initial
        network.
        """
        if inbox:
            ids, own = [int(j) for j in inbox], own_anchor(self, t)
            cosines, met = self.neighbours["cosines"].clone(), self.neighbours["met"].clone()
            cosines[ids] = cosine(torch.stack([r["phi"] for r in inbox.values()]), own).double()
            met[ids] = True
            self.neighbours = {**self.neighbours, "cosines": cosines, "met": met}


def init(party: SelectingPeer[SelectionConfig]) -> None:
    """Set `neighbours` with equal p and θ = 0, and an empty `replies`."""
    proxy_names(party.params)
    context = party.context
    near, me = torch.zeros(2, context.parties, dtype=torch.bool, device=context.device)
    near[list(context.neighbours)] = True
    me[context.id] = True
    party.neighbours = {
        "p": near.double() / max(1, len(context.neighbours)),
        "theta": near.new_zeros((), dtype=torch.float64),
        "me": me,
        "near": near,
        "here": near,
        "sent": near.new_zeros((), dtype=torch.int64),
    }
    if party.cfg.threshold == "anchored":
        unmet = torch.zeros_like(near)
        party.neighbours = {**party.neighbours, "met": unmet, "cosines": unmet.double()}
    party.replies = {"t": -1}


def proxy(party: Party[SelectionConfig], t: int) -> tuple[Tensor, Tensor]:
    """φ (d,) and F () at the party's current weights.

    With noise on φ, its head is the initial one: the own head was trained on the own rows without
    noise, so a single row would move the gradients of all others, which clipping does not bound.
    """
    cfg, names = party.cfg, proxy_names(party.params)
    loss_of = partial(steps.label_loss, party)
    x, y = party.sample_batch(t, size=cfg.probe_rows)
    with party.scratch():
        loss, gradients = party.gradient(loss_of, x, y, of=names)
        if cfg.dp.target == "phi":
            if cfg.personal_head:
                initial = party.context.build().named_parameters()
                steps.set_weights(
                    party, {k: p.detach() for k, p in initial if k.startswith("head.")}
                )
            rows = party.row_gradients(loss_of, x, y, of=names)
            each = torch.cat([g.flatten(1) for g in rows.values()], 1)  # (L, d)
            return clipped_rows(each, cfg.dp.clip).mean(0), loss
    return torch.cat([g.flatten() for g in gradients.values()]), loss


def initial_proxy(party: Party[SelectionConfig]) -> Tensor:
    """φ (d,) at the initial network, with which all peers start."""
    network = party.context.build()
    with party.scratch():
        party.params = {k: p.detach() for k, p in network.named_parameters() if k in party.params}
        party.buffers = dict(network.named_buffers())
        return proxy(party, 0)[0]


def own_anchor(party: SelectingPeer[SelectionConfig], t: int) -> Tensor:
    """The own φ (d,) at the initial network. Noise is drawn once, so that what is compared is what
    is sent.
    """
    if party.cfg.dp.target != "phi":
        return initial_proxy(party)
    if "phi" not in party.neighbours:
        phi = private(party, initial_proxy(party), t, torch.tensor(party.context.id))
        party.neighbours = {**party.neighbours, "phi": phi}
    return party.neighbours["phi"]


def private(party: SelectingPeer[SelectionConfig], phi: Tensor, t: int, by: Tensor) -> Tensor:
    """φ (d,) with noise if `dp` is set; `neighbours` counts it. A row that counts as nothing moves
    it by C0 / L.
    """
    dp = party.cfg.dp
    if dp.target != "phi":
        return phi
    sent = party.neighbours["sent"] + 1
    party.neighbours = {**party.neighbours, "sent": sent}
    charge(party, dp.sigma)
    party.note(SENT, float(sent))
    if party.cfg.promises:
        party.note("epsilon of phi", dp.epsilon(int(sent)))
    bound = dp.clip / min(party.cfg.probe_rows, len(party.data))
    return draws(party, "privacy", t, int(by)).blur(phi, dp.sigma * bound, 2 * bound)


def probe_loss(party: Party[SelectionConfig], t: int) -> Tensor:
    """F () at the party's current weights, on the rows of the proxy."""
    x, y = party.sample_batch(t, size=party.cfg.probe_rows)
    with party.scratch(), torch.no_grad():
        return steps.label_loss(party, x, y)


def mixing_shares(
    party: SelectingPeer[SelectionConfig], t: int, inbox: Mapping[str, Mapping[str, Any]]
) -> dict[int, float]:
    """ϖ by id, the party's own first. A neighbour whose F_j(before) or F_j(after) is unknown has no
    share.
    """
    gamma, after, replies = party.cfg.gamma, probe_loss(party, t), party.replies
    fresh = replies["t"] == t
    known = [j for j in inbox if fresh and replies["who"][int(j)]]
    own = smoothed(after, replies["before"] if fresh else after, gamma)
    losses = [own, *(smoothed(inbox[j]["loss"], replies["losses"][int(j)], gamma) for j in known)]
    shares = weigh(torch.stack(losses), party.cfg).tolist()
    return dict(zip([party.context.id, *map(int, known)], shares, strict=True))


def smoothed(after: Tensor, before: Tensor, gamma: float) -> Tensor:
    """F̃ () of (15)."""
    return (1 - gamma) * after + gamma * before


def weigh(losses: Tensor, cfg: SelectionConfig) -> Tensor:
    """(14): ϖ (n,) of smoothed losses F̃ (n,), or equal weights."""
    if cfg.aggregation == "uniform":
        return torch.full_like(losses, 1 / len(losses))
    return boltzmann(losses, cfg.temperature)


def cosine(phis: Tensor, own: Tensor) -> Tensor:
    """Cosine similarities (n,) of proxies (n, d) to the party's own (d,); 0 for a zero vector."""
    return F.normalize(phis, dim=-1) @ F.normalize(own, dim=-1)


def probabilities(p: Tensor, ids: Tensor, s: Tensor, upsilon: float) -> Tensor:
    """(8), (9): p (m,), where the mass of `ids` (n,) is redistributed by their
    similarities s (n,).
    """
    new = p.clone()
    new[ids] = torch.softmax(s / upsilon, -1) * p[ids].sum()
    return new


def entropy(s: Tensor) -> Tensor:
    """(10): h = -Σ e ln e with e = (1 + s) / 2, for similarities s (n,)."""
    e = ((1 + s) / 2).clamp(0, 1)
    return -torch.xlogy(e, e).sum()


def threshold(h: Tensor, n: int, cfg: SelectionConfig) -> Tensor:
    """θ from the entropy of n neighbours: (11)-(13), or 2 τ (e / n) h, which is compared with p
    |B|.
    """
    if cfg.threshold == "calibrated":
        return 2 * cfg.tau * (math.e / n) * h
    return cfg.tau * torch.sigmoid(-h)  # 1 - sigmoid(h), without its rounding


def largest_gap(cosines: Tensor) -> Tensor:
    """A cut () through cosines (n,): the middle of the largest gap between 1, those above 0 in
    order, and 0, but at least `SIMILAR`. So a group of any size is above it, all neighbours if they
    are alike, and none if none is.
    """
    ordered = torch.cat(
        [
            cosines.new_ones(1),
            cosines.clamp(0, 1).sort(descending=True).values,
            cosines.new_zeros(1),
        ]
    )
    first = (ordered[:-1] - ordered[1:]).argmax()
    return ((ordered[first] + ordered[first + 1]) / 2).clamp_min(SIMILAR)


def boltzmann(losses: Tensor, temperature: float) -> Tensor:
    """(14): weights (n,) ∝ exp(-F̃ / T)."""
    return torch.softmax(-losses / temperature, -1)


def after_churn(p: Tensor, before: Tensor, here: Tensor) -> Tensor:
    """p (m,) after peers have left or joined; a peer that joined gets the mean p of those that
    stayed.
    """
    stayed = before & here
    mean = (p * stayed).sum() / stayed.sum().clamp_min(1)
    row = torch.where(here & ~before, torch.where(mean > 0, mean, 1.0), p * stayed)
    return torch.where(
        (here == before).all(), p, row / row.sum().clamp_min(torch.finfo(p.dtype).tiny)
    )


def proxy_names(params: Mapping[str, Tensor]) -> list[str]:
    """The parameters of the body's output layer: the last before `head` with a matrix or kernel,
    beside shortcuts.

    Raises:
        ModelError: the network has no such layer.
    """
    body = [k for k in params if not k.startswith("head.")]
    layers = [
        k.rpartition(".")[0]
        for k in body
        if params[k].dim() > 1 and not {*SHORTCUTS} & {*k.split(".")}
    ]
    if not layers or len(body) == len(params):
        raise ModelError(
            "AFIND+ needs a network with a layer before its module `head`, which this network "
            "lacks: choose another in models.pool"
        )
    return [k for k in body if k.rpartition(".")[0] == layers[-1]]


def coresets(
    fed: Federation, peers: Sequence[int], cfg: SelectionConfig, t: int
) -> dict[int, list[int]]:
    """Lines 3-5: the neighbours that each peer selects in round t."""
    if cfg.threshold == "anchored":
        new = fed.choose_peers(peers, "candidates", {})
        expect: Template = {"phi": proxy_template(fed)}
        fed.exchange(
            new, answer="anchor", take="compare", shared={"t": t}, expect=expect, at_once=AT_ONCE
        )
        return fed.choose_peers(peers, "choose", {"open": False})
    opens = cfg.explores(t)
    if opens and cfg.explore_by == "probe":
        fed.choose_peers(peers, "choose", {"open": True})
        exchange_probes(fed, fed.sample_peers(peers, cfg.explore_neighbours, t), cfg, t)
        opens = False
    chosen = fed.choose_peers(peers, "choose", {"open": opens})
    if opens and cfg.explore_neighbours:
        return {
            i: near
            for i, near in fed.sample_peers(peers, cfg.explore_neighbours, t).items()
            if i in chosen
        }
    return chosen


def links(
    fed: Federation, peers: Sequence[int], cfg: SelectionConfig, t: int
) -> dict[int, list[int]]:
    """AFIND+'s coresets of round t, after an exchange of φ and F."""
    links = coresets(fed, peers, cfg, t)
    exchange_probes(fed, links, cfg, t)
    return links


def exchange_probes(
    fed: Federation, links: Mapping[int, Sequence[int]], cfg: SelectionConfig, t: int
) -> None:
    """Lines 7, 11 and 14 without training: exchange φ and F at the requesting peer's body."""
    question: Template = steps.weights_template(fed, cfg.personal_head)
    answer: Template = {"phi": proxy_template(fed), "loss": floats()}
    steps_of = {"ask": "request", "answer": "probe", "take": "estimate"}
    fed.exchange(
        links, **steps_of, shared={"t": t}, question=question, expect=answer, at_once=AT_ONCE
    )


def proxy_template(fed: Federation) -> Shape:
    """Template of φ."""
    return floats(sum(fed.param_shapes[k].numel() for k in proxy_names(fed.param_shapes)))
