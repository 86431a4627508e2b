"""AFIND+: decentralised learning in which every peer finds the neighbours that help it.

Paper: L. Wang, Y. Chen, Y. Guo, X. Tang, "Smart Sampling: Helping from Friendly Neighbors for Decentralized
Federated Learning", arXiv 2407.04460. Equation and line numbers below are the paper's; lines are those of
Algorithm 1.

Each peer i holds a body w_i, a head β_i that never leaves it, its rows, and a probability p_ij for each of its
neighbours B_i. A round:

    C_i = {j in B_i : p_ij ≥ θ_i}                                                  the coreset, lines 3-5
    each j in C_i answers, from i's body and its own head and rows, on a scratch copy:
        φ_j, the gradient of the body's last layer at w_i                          lines 7, 11
        w_j, trained from w_i: head alone, then body alone                         lines 8, 17-23
        F̃_j = (1 - γ) F_j(after) + γ F_j(before)                                  (15)
    w_i <- Σ_j ϖ_ij w_j,  ϖ_ij ∝ exp(-F̃_j / T)                                    (14), (16), line 13
    p_ij <- softmax_j in C_i (cos(φ_i, φ_j) / υ) · (mass of C_i)                   (8), (9), line 14
    e_ij = (1 + cos) / 2,  h_i = -Σ_j in C_i e_ij ln e_ij                          (10)
    θ_i = τ (1 - sigmoid(h_i))                                                     (11)-(13)

AFIND is the same with equal weights ϖ. `mode="cheap"` (ours) lets every peer train once, from its own body, and asks
neighbours for φ and F at w_i only. `threshold="calibrated"` (ours) follows the paper's prose, which (13) contradicts:
θ_i = 2 τ h̄_i with h̄_i = (e / |C_i|) h_i in [0, 1], held against p_ij |B_i|, so that alike neighbours are all let in.

Reading, where the paper is silent or contradicts itself:
    θ before any answer is 0: the first round asks everybody, or `open_k` random ones, or by probes alone.
    An empty coreset would stay empty for ever: `when_empty` says what then.
    (9) sums over the p outside C_i, and (14) normalises over j.
    Line 13 leaves out i's own update of line 12, which would be lost: i takes part in ϖ, but not in p and h.
    Line 8 would train j's head once for each who asks: requests run on a scratch copy, and only line 12 changes j.
    Who leaves takes its p along and the rest is normalised; who joins gets the mean p.
    Line 20 takes the head after K_w steps, of which there are K_β: it is the last.
    All begin with one network, heads included.
    φ and F are taken on up to `probe_rows` own rows, the same for all who ask in a round.

Differs:
    A neighbour whose answer is missing keeps its old p, as if it had not been in C_i.
    Cheap mode sends three messages a pair instead of two: the trained body goes after the probe.
    Privacy (`dp`, Table 4): the paper's sentence on it speaks of quantities that AFIND+ does not have. Here noise of
        standard deviation σ C0 / L goes on φ (the mean of L row gradients, each clipped to C0), or on the clipped
        change of the body. Only the first has an (ε, δ), and it covers φ alone: bodies and losses cross as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedloom.core.errors import ModelError
from fedloom.core.federation import Federation
from fedloom.core.losses import cap_rows
from fedloom.core.message import Shape, Template, Tree, floats, weighted_mean
from fedloom.core.method import Method
from fedloom.methods.learner import Learner, LearnerConfig, weights_like
from fedloom.protect.privacy import clipped_tree, epsilon, noisy

AT_ONCE = 128
"""Answers that are held at once, where there is one for each pair."""


class Privacy(BaseModel):
    """Noise on what leaves a peer."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    target: Literal["none", "phi", "update"] = "none"
    """What is noised: the feature proxy, or the change of the body."""
    sigma: float = Field(2.0, gt=0)
    """σ2 of Table 4: the noise has standard deviation σ2 C0 / L."""
    clip: float = Field(1.0, gt=0)
    """C0: the largest L2 norm of a row's gradient, or of the whole change."""
    delta: float = Field(1e-5, gt=0, lt=1)
    """δ for which ε is stated."""


class Choice(LearnerConfig):
    """How neighbours are chosen. The paper gives τ, γ and T; υ it does not."""

    tau: float = Field(0.5, gt=0)
    """τ of (13)."""
    upsilon: float = Field(0.1, gt=0)
    """υ of (8): the smaller, the more a similar neighbour is preferred. More neighbours need a smaller one."""
    threshold: Literal["eq13", "calibrated"] = "eq13"
    """θ as (13) prints it, or as the paper's prose describes it (our extension)."""
    when_empty: Literal["top1", "self", "reopen"] = "top1"
    """Nobody above θ: ask the likeliest, nobody, or everybody."""
    open_every: int | None = Field(None, ge=1)
    """Every so many rounds all neighbours are asked again; None for the first round only."""
    open_k: int | None = Field(None, ge=1)
    """So many random neighbours are asked in such a round; None for all."""
    open_by: Literal["train", "probe"] = "train"
    """Whether they are asked in full, or first for φ and F alone, and in full only those that pass θ then."""
    probe_rows: int = Field(100, ge=1)
    """Own rows on which φ and F are taken."""
    gamma: float = Field(0.9, ge=0, le=1)
    """γ of (15): the weight of the loss before training."""
    temperature: float = Field(1.0, gt=0)
    """T of (14)."""
    aggregation: Literal["boltzmann", "uniform"] = "boltzmann"
    """Weights by (14), or equal ones."""
    dp: Privacy = Privacy()
    """Noise on what leaves a peer: target none, phi or update; sigma (σ2 of Table 4), clip (C0), delta (of ε)."""

    def opens(self, t: int) -> bool:
        """Whether round t asks without regard to θ."""
        return t == 0 or (self.open_every is not None and t % self.open_every == 0)


class Host(Choice):
    """Settings of another method that can ask random neighbours, or those that AFIND+ chooses."""

    friends: Literal["random", "afind"] = "random"
    """Who is asked."""
    neighbours: int | None = Field(10, ge=0)
    """Random neighbours that a peer asks in a round; None for all."""

    @model_validator(mode="after")
    def _possible(self) -> Host:
        if self.dp.target == "update":
            raise ValueError('dp.target = "update" is defined for AFIND+ alone; "phi" works here')
        return self


class Config(Choice):
    """AFIND+'s own settings."""

    mode: Literal["faithful", "cheap"] = "faithful"
    """Whether a neighbour trains from the asker's body, or sends what it trained from its own (our extension)."""

    @model_validator(mode="after")
    def _possible(self) -> Config:
        if self.dp.target == "update" and self.mode != "faithful":
            raise ValueError('dp.target = "update" clips the change from the asker\'s body: it needs mode = "faithful"')
        return self


ConfigT = TypeVar("ConfigT", bound=Choice)


class Chooser(Learner[ConfigT]):
    """A peer that chooses its neighbours as AFIND+ does. The pages of other methods use it to lend them the choice.

    Its state `friends`: p (m,) and θ; masks (m,) of oneself, of the neighbours, and of those who were there last; how
    many φ have been sent. `heard` is what was learnt in round t for use in the same round: one's own F(before); for
    each neighbour whether it answered, its loss and its share of ϖ (m,); their mean body and its mass.
    """

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt", "friends", "heard")
    CALLS: ClassVar[tuple[str, ...]] = ("choose", "reckon")
    TO_PEERS: ClassVar[tuple[str, ...]] = ("request", "probe")

    def setup(self) -> None:
        """A page that keeps more overrides this."""
        self.start()
        self.befriend()

    def befriend(self) -> None:
        """Equal p, and θ = 0."""
        proxy_names(self.params)
        near, me = torch.zeros(2, self.site.parties, dtype=torch.bool, device=self.site.device)
        near[list(self.site.neighbours)] = True
        me[self.site.id] = True
        self.friends: dict[str, Any] = {
            "p": near.double() / max(1, len(self.site.neighbours)),
            "theta": near.new_zeros((), dtype=torch.float64),
            "me": me,
            "near": near,
            "here": near,
            "sent": near.new_zeros((), dtype=torch.int64),
        }
        self.heard: dict[str, Any] = {"t": -1}

    # -- lines 3-5: whom to ask --------------------------------------------------------------------

    def choose(self, *, here: Tensor, open: bool) -> Tensor:
        """C_i as a mask (m,), given who is there (m,). An open round asks all neighbours."""
        f, cfg = self.friends, self.cfg
        here = here.to(f["near"].device) & f["near"]
        p = renewed(f["p"], f["here"], here)
        self.friends = {**f, "p": p, "here": here}
        passing = here & (p * (here.sum() if cfg.threshold == "calibrated" else 1) >= f["theta"])
        likeliest = torch.nn.functional.one_hot(torch.where(here, p, -1.0).argmax(), len(p)).bool()
        instead = {"top1": likeliest, "self": torch.zeros_like(here), "reopen": here}[cfg.when_empty]
        chosen = here if open else torch.where(passing.any(), passing, instead & here)
        self.note("coreset was empty", 0.0 if open else (~passing.any()).float())
        return chosen

    # -- lines 7, 11: φ and F alone -------------------------------------------------------------

    def request(self, *, t: int) -> dict[str, Tree]:
        """The own body w_i."""
        return {"weights": self.shared()}

    def probe(self, *, t: int, asked: Mapping[str, Any], by: Tensor) -> dict[str, Tree]:
        """φ_j and F_j(before) at the asker's body, on a scratch copy."""
        with self.scratch():
            self.adopt(asked["weights"])
            phi, loss = self.proxy(t)
        return {"phi": self.private(phi, t, by), "loss": loss}

    def proxy(self, t: int) -> tuple[Tensor, Tensor]:
        """φ (d,) and F (), at the weights as they are."""
        cfg, names = self.cfg, proxy_names(self.params)
        x, y = self.some(t, size=cfg.probe_rows)
        with self.scratch():
            loss, gradients = self.gradient(self.loss, x, y, of=names)
            if cfg.dp.target == "phi":
                rows = self.row_gradients(self.loss, x, y, of=names)
                each = torch.cat([g.flatten(1) for g in rows.values()], 1)  # (L, d)
                return cap_rows(each, cfg.dp.clip).mean(0), loss
        return flat(gradients), loss

    def private(self, phi: Tensor, t: int, by: Tensor) -> Tensor:
        """φ as it may leave."""
        dp = self.cfg.dp
        if dp.target != "phi":
            return phi
        rows = min(self.cfg.probe_rows, len(self.data))
        self.friends = {**self.friends, "sent": self.friends["sent"] + 1}
        self.note("epsilon of phi", epsilon(dp.sigma, int(self.friends["sent"]), dp.delta))
        sigma = dp.sigma * dp.clip / rows
        return noisy(phi, sigma, self.noise([phi, sigma], "privacy", t, int(by)))

    # -- line 14: how like oneself they are ----------------------------------------------------------

    def reckon(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """(8)-(13): new p and θ from the φ of those who answered; their F is kept for this round."""
        f, cfg = self.friends, self.cfg
        own, before = self.proxy(t)
        ids = torch.tensor([int(j) for j in inbox], dtype=torch.int64, device=own.device)
        losses = own.new_zeros(len(f["p"]))
        probes = 1 + len(ids) + (self.heard["probes"] if self.heard["t"] == t else 0)
        self.heard = {"t": t, "before": before, "losses": losses, "who": torch.zeros_like(f["me"]), "probes": probes}
        self.note("coreset", len(ids))
        self.note("probes", probes)
        if not inbox:
            return
        losses[ids] = torch.stack([r["loss"] for r in inbox.values()])
        self.heard["who"][ids] = True
        s = cosine(torch.stack([r["phi"] for r in inbox.values()]), own).double()
        p, h = probabilities(f["p"], ids, s, cfg.upsilon), entropy(s)
        theta = threshold(h, len(ids), cfg)
        self.friends = {**f, "p": p, "theta": theta}
        self.note("entropy", h)
        self.note("theta", theta)
        self.note("effective neighbours of p", 1 / (p**2).sum())
        self.note("similarity of the coreset", s.mean())

    # -- line 13: with which weights to mix ----------------------------------------------------------

    def shares(self, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
        """ϖ by number, one's own first, for those whose trained body and F_j(after) are here; F_j(before) is known
        from the probe, and who did not answer that has no share."""
        gamma, after, heard = self.cfg.gamma, self.own_loss(t), self.heard
        fresh = heard["t"] == t
        known = [j for j in inbox if fresh and heard["who"][int(j)]]
        own = (1 - gamma) * after + gamma * (heard["before"] if fresh else after)
        losses = [own, *((1 - gamma) * inbox[j]["loss"] + gamma * heard["losses"][int(j)] for j in known)]
        shares = self.weigh(torch.stack(losses)).tolist()
        return dict(zip([self.site.id, *map(int, known)], shares, strict=True))

    def weigh(self, losses: Tensor) -> Tensor:
        """(14): ϖ (n,) for smoothed losses F̃ (n,)."""
        if self.cfg.aggregation == "uniform":
            return torch.full_like(losses, 1 / len(losses))
        return boltzmann(losses, self.cfg.temperature)

    def own_loss(self, t: int) -> Tensor:
        """F () on the rows of the proxy."""
        x, y = self.some(t, size=self.cfg.probe_rows)
        with self.scratch(), torch.no_grad():
            return self.loss(x, y)


class Peer(Chooser[Config]):
    """A peer of AFIND+."""

    CALLS = (*Chooser.CALLS, "gather", "update", "train_once", "mix")
    TO_PEERS = (*Chooser.TO_PEERS, "serve", "give")

    # -- faithful: a neighbour trains from the asker's body ------------------------------------------

    def serve(self, *, t: int, asked: Mapping[str, Any], by: Tensor) -> dict[str, Tree]:
        """Lines 7-9 and 17-23 at j: φ_j, w_j and F̃_j from w_i, on a scratch copy."""
        with self.scratch():
            self.adopt(asked["weights"])
            phi, before = self.proxy(t)
            self.local_update(t)
            loss = self.smoothed(self.own_loss(t), before)
            body = {k: v.clone() for k, v in self.shared().items()}
        if self.cfg.dp.target == "update":
            body = self.private_body(body, asked["weights"], t, by)
        return {"phi": self.private(phi, t, by), "weights": body, "loss": loss}

    def private_body(
        self, body: Mapping[str, Tensor], start: Mapping[str, Tensor], t: int, by: Tensor
    ) -> dict[str, Tensor]:
        """The body as it may leave: its change clipped, and with noise."""
        dp = self.cfg.dp
        change = clipped_tree({k: w - start[k] for k, w in body.items()}, dp.clip)
        sigma = dp.sigma * dp.clip / self.cfg.batch_size
        rng = self.noise([change, sigma], "privacy", t, int(by))
        return {k: start[k] + noisy(c, sigma, rng) for k, c in change.items()}

    def gather(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Lines 13, 14 at i, but for its own part: the others' mean by ϖ waits until all have asked."""
        self.reckon(t=t, inbox=inbox)
        if not inbox:
            return
        losses = torch.stack([r["loss"] for r in inbox.values()])
        shares = self.weigh(losses)
        dense = losses.new_zeros(len(self.friends["p"]))
        dense[[int(j) for j in inbox]] = shares
        bodies = weighted_mean([r["weights"] for r in inbox.values()], shares.tolist())
        self.heard = {**self.heard, "shares": dense, "bodies": bodies, "mass": self.mass(losses)}

    def update(self, *, t: int) -> None:
        """Line 12, the own training, and line 13 with it."""
        heard = self.heard if self.heard["t"] == t else {}
        before = heard["before"] if heard else self.proxy(t)[1]
        self.local_update(t)
        self.note("trainings", 1 + heard["who"].sum() if heard else 1.0)
        row = self.friends["me"].float()
        if "bodies" in heard:
            share = torch.sigmoid(self.mass(self.smoothed(self.own_loss(t), before)[None]) - heard["mass"])  # ϖ_ii
            self.adopt({k: torch.lerp(heard["bodies"][k], w, share) for k, w in self.shared().items()})
            row = share * row + (1 - share) * heard["shares"]
        self.note("mixing", row)
        self.heard = {"t": -1}

    def smoothed(self, after: Tensor, before: Tensor) -> Tensor:
        """F̃ () of (15)."""
        return (1 - self.cfg.gamma) * after + self.cfg.gamma * before

    def mass(self, losses: Tensor) -> Tensor:
        """ln Σ_j exp(-F̃_j / T) (), or the logarithm of their number where weights are equal."""
        even = self.cfg.aggregation == "uniform"
        return torch.logsumexp(torch.zeros_like(losses) if even else -losses / self.cfg.temperature, 0)

    # -- cheap: every peer trains once, from its own body ---------------------------------------------

    def train_once(self, *, t: int) -> None:
        """Line 12, for oneself and for all who ask."""
        self.local_update(t)
        self.note("trainings", 1.0)

    def give(self, *, t: int) -> dict[str, Tree]:
        """The own trained body and F_j(after)."""
        return {"weights": self.shared(), "loss": self.own_loss(t)}

    def mix(self, *, t: int, inbox: Mapping[str, Mapping[str, Any]]) -> None:
        """Line 13."""
        self.average(self.models(inbox), self.shares(t, inbox))
        self.heard = {"t": -1}


# -- the equations ------------------------------------------------------------------------------------


def cosine(phis: Tensor, own: Tensor) -> Tensor:
    """Cosines (n,) of proxies (n, d) with one's own (d,); 0 where one is 0."""
    return torch.nn.functional.normalize(phis, dim=-1) @ torch.nn.functional.normalize(own, dim=-1)


def probabilities(p: Tensor, ids: Tensor, s: Tensor, upsilon: float) -> Tensor:
    """(8), (9): the mass (m,) of `ids` (n,) is shared out anew by their similarities s (n,); all else is stale."""
    new = p.clone()
    new[ids] = torch.softmax(s / upsilon, -1) * p[ids].sum()
    return new


def entropy(s: Tensor) -> Tensor:
    """(10): h = -Σ e ln e with e = (1 + s) / 2, for similarities s (n,)."""
    e = ((1 + s) / 2).clamp(0, 1)
    return -torch.xlogy(e, e).sum()


def threshold(h: Tensor, n: int, cfg: Choice) -> Tensor:
    """θ from the entropy of n neighbours: (11)-(13), or 2 τ (e / n) h, to be held against p |B|."""
    if cfg.threshold == "calibrated":
        return 2 * cfg.tau * (math.e / n) * h
    return cfg.tau * torch.sigmoid(-h)  # 1 - sigmoid(h), without its rounding


def boltzmann(losses: Tensor, temperature: float) -> Tensor:
    """(14): weights (n,) ∝ exp(-F̃ / T)."""
    return torch.softmax(-losses / temperature, -1)


def renewed(p: Tensor, before: Tensor, here: Tensor) -> Tensor:
    """p (m,) after some have left and some have come: who is new gets the mean of those who stayed."""
    stayed = before & here
    mean = (p * stayed).sum() / stayed.sum().clamp_min(1)
    row = torch.where(here & ~before, torch.where(mean > 0, mean, 1.0), p * stayed)
    return torch.where((here == before).all(), p, row / row.sum().clamp_min(torch.finfo(p.dtype).tiny))


def proxy_names(params: Mapping[str, Tensor]) -> list[str]:
    """The parameters of the body's output layer: the last before `head` that has a matrix or kernel.

    Raises:
        ModelError: there is none.
    """
    body = [k for k in params if not k.startswith("head.")]
    layers = [k.rpartition(".")[0] for k in body if params[k].dim() > 1]
    if not layers or len(body) == len(params):
        raise ModelError(
            "AFIND+ compares peers by the last layer before a network's module `head`, and this network has none: "
            "take another in models.pool"
        )
    return [k for k in body if k.rpartition(".")[0] == layers[-1]]


def flat(tree: Mapping[str, Tensor]) -> Tensor:
    """All tensors as one vector (d,)."""
    return torch.cat([x.flatten() for x in tree.values()])


# -- the round ----------------------------------------------------------------------------------------


def coresets(fed: Federation, peers: Sequence[int], cfg: Choice, t: int) -> dict[int, list[int]]:
    """Lines 3-5: whom each peer asks in round t."""
    opens = cfg.opens(t)
    if opens and cfg.open_by == "probe":
        fed.asked(peers, "choose", {"open": True})
        examine(fed, fed.links(peers, cfg.open_k, t), cfg, t)
        opens = False
    chosen = fed.asked(peers, "choose", {"open": opens})
    if opens and cfg.open_k:
        return {i: asked for i, asked in fed.links(peers, cfg.open_k, t).items() if i in chosen}
    return chosen


def found(fed: Federation, peers: Sequence[int], cfg: Host, t: int) -> dict[int, list[int]]:
    """Whom each peer of another method asks in round t; where AFIND+ chooses, φ and F have been exchanged then."""
    if cfg.friends == "random":
        return fed.links(peers, cfg.neighbours, t)
    links = coresets(fed, peers, cfg, t)
    examine(fed, links, cfg, t)
    return links


def examine(fed: Federation, links: Mapping[int, Sequence[int]], cfg: Choice, t: int) -> None:
    """Lines 7, 11 and 14 with probes alone: φ and F at the asker's body, and no training."""
    question: Template = {"weights": weights_like(fed, cfg)}
    answer: Template = {"phi": proxy_like(fed), "loss": floats()}
    asked = {"ask": "request", "answer": "probe", "take": "reckon"}
    fed.exchange(links, **asked, shared={"t": t}, question=question, expect=answer, at_once=AT_ONCE)


def proxy_like(fed: Federation) -> Shape:
    """Template of φ."""
    return floats(sum(fed.form[k].numel() for k in proxy_names(fed.form)))


def round(fed: Federation, server: None, peers: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Algorithm 1, lines 2-15, for one t and all peers."""
    now, body = {"t": t}, weights_like(fed, cfg)
    links = coresets(fed, peers, cfg, t)  # lines 3-5
    if cfg.mode == "faithful":
        asked = {"ask": "request", "answer": "serve", "take": "gather"}  # lines 6-11, 13, 14
        answer: Template = {"phi": proxy_like(fed), "weights": body, "loss": floats()}
        fed.exchange(links, **asked, shared=now, question={"weights": body}, expect=answer, at_once=AT_ONCE)
        fed.call(peers, "update", shared=now)  # lines 12, 13
    else:
        examine(fed, links, cfg, t)  # lines 7, 11, 14
        fed.call(peers, "train_once", shared=now)  # line 12
        fed.exchange(links, answer="give", take="mix", shared=now, expect={"weights": body, "loss": floats()})
    yield "round"


AFIND_PLUS = Method(
    name="afind-plus",
    title="Peers find friendly neighbours and weigh them by their loss",
    paper="L. Wang et al.: Smart Sampling: Helping from Friendly Neighbors for Decentralized Federated Learning",
    family="peer",
    config=Config,
    round=round,
    client=Peer,
    presets={"calibrated": {"threshold": "calibrated"}, "cheap": {"threshold": "calibrated", "mode": "cheap"}},
    needs=("one network",),
)

METHODS = (
    AFIND_PLUS,
    replace(AFIND_PLUS, name="afind", title="AFIND+ with equal weights", fixed={"aggregation": "uniform"}),
    replace(
        AFIND_PLUS,
        name="fedavg-ft-afind",
        title="FedAvg-FT (no personal head) whose neighbours AFIND+ chooses and weighs",
        fixed={"personal_head": False},
    ),
)
