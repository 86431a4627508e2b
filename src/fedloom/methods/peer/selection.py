"""AFIND+'s neighbour selection, as functions for AFIND+'s page and for the methods that can use it.

Paper: L. Wang, Y. Chen, Y. Guo, X. Tang, "Smart Sampling: Helping from Friendly Neighbors for Decentralized Federated
Learning", arXiv 2407.04460; `fedloom.methods.peer.afind` has the algorithm and what differs from the paper. Numbers in
parentheses are the paper's equations, lines those of its Algorithm 1.

A page with this selection keeps two names in its STATE:

    friends: p (m,) and θ; masks (m,) of the party itself, of its neighbours, and of those last available; the number of
        φ sent.
    heard: results of round `t` that the same round uses later: the party's own F(before), a mask (m,) of the neighbours
        that replied, and their losses (m,); {"t": -1} otherwise.

Its `choose`, `request`, `probe` and `reckon` are messages that `coresets` and `exchange_probes` send.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ModelError
from fedloom.core.federation import Federation
from fedloom.core.losses import cap_rows
from fedloom.core.message import Shape, Template, Tree, floats
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.methods import steps
from fedloom.protect.privacy import epsilon, noisy

AT_ONCE = 128
"""Maximum number of replies held in memory at once in an exchange."""


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


class SelectionConfig(MethodConfig):
    """Local training as in `LocalSGDConfig`, and neighbour selection. The paper gives τ, γ and T, but not υ."""

    alpha: float = Field(0.03, ge=0)
    """Step size of adaptation (α)."""
    adapt_steps: steps.AdaptSteps = ()
    """Numbers of adaptation steps on the support half after which clients are evaluated; the first is reported."""
    batchnorm: Literal["own", "batch"] = "own"
    """BatchNorm statistics for prediction, which never leave a client: `own` takes its running statistics, as usual;
    `batch` takes those of the rows to predict, so that a prediction depends on the other rows."""
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
    threshold: Literal["eq13", "calibrated"] = "eq13"
    """θ as printed in (13), or as the paper's prose describes it (our extension)."""
    when_empty: Literal["top1", "self", "reopen"] = "top1"
    """Replacement of an empty coreset: the likeliest neighbour (top1), none (self), or all (reopen)."""
    open_every: int | None = Field(None, ge=1)
    """Interval of open rounds, which select all neighbours; None for the first round only."""
    open_k: int | None = Field(None, ge=1)
    """Number of random neighbours selected in an open round; None for all."""
    open_by: Literal["train", "probe"] = "train"
    """Open rounds request training from all selected neighbours (train), or first only φ and F, and training from those
    that then pass θ (probe)."""
    probe_rows: int = Field(100, ge=1)
    """Number of own rows on which φ and F are computed."""
    gamma: float = Field(0.9, ge=0, le=1)
    """γ of (15): the weight of the loss before training."""
    temperature: float = Field(1.0, gt=0)
    """T of (14)."""
    aggregation: Literal["boltzmann", "uniform"] = "boltzmann"
    """Mixing weights: (14), or equal weights."""
    dp: ProbePrivacy = ProbePrivacy()
    """Differential privacy: target (none, phi, update), sigma (σ2 of Table 4), clip (C0), delta (δ)."""

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the client's own rows."""
        return self.epochs

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """After adaptation, and after fine-tuning if `finetune_epochs` > 0."""
        return steps.eval_modes(self.adapt_steps, self.finetune_epochs)

    def opens(self, t: int) -> bool:
        """Whether round t ignores θ."""
        return t == 0 or (self.open_every is not None and t % self.open_every == 0)


ConfigT = TypeVar("ConfigT", bound=SelectionConfig)


def refuse_update_noise(cfg: ConfigT) -> ConfigT:
    """Config validator of methods that use the selection."""
    if cfg.dp.target == "update":
        raise ValueError('params.dp.target = "update" is available in afind-plus only: use "phi" or "none"')
    return cfg


# -- lines 3-5: the coreset ----------------------------------------------------------------------------------------


def init_friends(party: Party[Any]) -> dict[str, Any]:
    """Equal p, and θ = 0."""
    proxy_names(party.params)
    context = party.context
    near, me = torch.zeros(2, context.parties, dtype=torch.bool, device=context.device)
    near[list(context.neighbours)] = True
    me[context.id] = True
    return {
        "p": near.double() / max(1, len(context.neighbours)),
        "theta": near.new_zeros((), dtype=torch.float64),
        "me": me,
        "near": near,
        "here": near,
        "sent": near.new_zeros((), dtype=torch.int64),
    }


def choose(party: Party[Any], friends: Mapping[str, Any], here: Tensor, *, open: bool) -> tuple[dict[str, Any], Tensor]:
    """C_i as a mask (m,), given which peers are available (m,), and the new `friends`. An open round takes all."""
    cfg, here = party.cfg, here.to(friends["near"].device) & friends["near"]
    p = after_churn(friends["p"], friends["here"], here)
    passing = here & (p * (here.sum() if cfg.threshold == "calibrated" else 1) >= friends["theta"])
    likeliest = F.one_hot(torch.where(here, p, -1.0).argmax(), len(p)).bool()
    instead = {"top1": likeliest, "self": torch.zeros_like(here), "reopen": here}[cfg.when_empty]
    chosen = here if open else torch.where(passing.any(), passing, instead & here)
    party.note("coreset was empty", 0.0 if open else (~passing.any()).float())
    return {**friends, "p": p, "here": here}, chosen


# -- lines 7, 11: φ and F ------------------------------------------------------------------------------------------


def probe(
    party: Party[Any], friends: Mapping[str, Any], t: int, asked: Mapping[str, Any], by: Tensor
) -> tuple[dict[str, Any], dict[str, Tree]]:
    """φ_j and F_j(before) at the requesting peer's shared weights, on a scratch copy; and the new `friends`."""
    with party.scratch():
        steps.set_weights(party, asked["weights"])
        phi, loss = proxy(party, t)
    friends, phi = private(party, friends, phi, t, by)
    return friends, {"phi": phi, "loss": loss}


def proxy(party: Party[Any], t: int) -> tuple[Tensor, Tensor]:
    """φ (d,) and F () at the party's current weights."""
    cfg, names = party.cfg, proxy_names(party.params)
    loss_of = partial(steps.cross_entropy, party)
    x, y = party.sample_batch(t, size=cfg.probe_rows)
    with party.scratch():
        loss, gradients = party.gradient(loss_of, x, y, of=names)
        if cfg.dp.target == "phi":
            rows = party.row_gradients(loss_of, x, y, of=names)
            each = torch.cat([g.flatten(1) for g in rows.values()], 1)  # (L, d)
            return cap_rows(each, cfg.dp.clip).mean(0), loss
    return torch.cat([g.flatten() for g in gradients.values()]), loss


def private(
    party: Party[Any], friends: Mapping[str, Any], phi: Tensor, t: int, by: Tensor
) -> tuple[dict[str, Any], Tensor]:
    """φ (d,) with noise if `dp` is set, and the new `friends`."""
    dp = party.cfg.dp
    if dp.target != "phi":
        return dict(friends), phi
    sent = friends["sent"] + 1
    party.note("epsilon of phi", epsilon(dp.sigma, int(sent), dp.delta))
    sigma = dp.sigma * dp.clip / min(party.cfg.probe_rows, len(party.data))
    return {**friends, "sent": sent}, noisy(phi, sigma, party.noise([phi, sigma], "privacy", t, int(by)))


def probe_loss(party: Party[Any], t: int) -> Tensor:
    """F () at the party's current weights, on the rows of the proxy."""
    x, y = party.sample_batch(t, size=party.cfg.probe_rows)
    with party.scratch(), torch.no_grad():
        return steps.cross_entropy(party, x, y)


# -- line 14: similarity -------------------------------------------------------------------------------------------


def update_probabilities(
    party: Party[Any], friends: Mapping[str, Any], heard: Mapping[str, Any], t: int, inbox: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(8)-(13): `friends` with p and θ from the φ of the neighbours that replied, and `heard` with their F."""
    cfg, m = party.cfg, len(friends["p"])
    own, before = proxy(party, t)
    ids = torch.tensor([int(j) for j in inbox], dtype=torch.int64, device=own.device)
    losses, replied = own.new_zeros(m), torch.zeros_like(friends["me"])
    probes = 1 + len(ids) + (heard["probes"] if heard["t"] == t else 0)
    heard = {"t": t, "before": before, "losses": losses, "who": replied, "probes": probes}
    party.note("coreset", len(ids))
    party.note("probes", probes)
    if not inbox:
        return dict(friends), heard
    losses[ids] = torch.stack([r["loss"] for r in inbox.values()])
    replied[ids] = True
    s = cosine(torch.stack([r["phi"] for r in inbox.values()]), own).double()
    p, h = probabilities(friends["p"], ids, s, cfg.upsilon), entropy(s)
    theta = threshold(h, len(ids), cfg)
    party.note("entropy", h)
    party.note("theta", theta)
    party.note("effective neighbours of p", 1 / (p**2).sum())
    party.note("similarity of the coreset", s.mean())
    return {**friends, "p": p, "theta": theta}, heard


# -- line 13: mixing weights ---------------------------------------------------------------------------------------


def mixing_shares(
    party: Party[Any], heard: Mapping[str, Any], t: int, inbox: Mapping[str, Mapping[str, Any]]
) -> dict[int, float]:
    """ϖ by id, the party's own first. A neighbour whose F_j(before) or F_j(after) is unknown has no share."""
    gamma, after, fresh = party.cfg.gamma, probe_loss(party, t), heard["t"] == t
    known = [j for j in inbox if fresh and heard["who"][int(j)]]
    own = smoothed(after, heard["before"] if fresh else after, gamma)
    losses = [own, *(smoothed(inbox[j]["loss"], heard["losses"][int(j)], gamma) for j in known)]
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


# -- the equations -------------------------------------------------------------------------------------------------


def cosine(phis: Tensor, own: Tensor) -> Tensor:
    """Cosine similarities (n,) of proxies (n, d) to the party's own (d,); 0 for a zero vector."""
    return F.normalize(phis, dim=-1) @ F.normalize(own, dim=-1)


def probabilities(p: Tensor, ids: Tensor, s: Tensor, upsilon: float) -> Tensor:
    """(8), (9): p (m,), where the mass of `ids` (n,) is redistributed by their similarities s (n,)."""
    new = p.clone()
    new[ids] = torch.softmax(s / upsilon, -1) * p[ids].sum()
    return new


def entropy(s: Tensor) -> Tensor:
    """(10): h = -Σ e ln e with e = (1 + s) / 2, for similarities s (n,)."""
    e = ((1 + s) / 2).clamp(0, 1)
    return -torch.xlogy(e, e).sum()


def threshold(h: Tensor, n: int, cfg: SelectionConfig) -> Tensor:
    """θ from the entropy of n neighbours: (11)-(13), or 2 τ (e / n) h, which is compared with p |B|."""
    if cfg.threshold == "calibrated":
        return 2 * cfg.tau * (math.e / n) * h
    return cfg.tau * torch.sigmoid(-h)  # 1 - sigmoid(h), without its rounding


def boltzmann(losses: Tensor, temperature: float) -> Tensor:
    """(14): weights (n,) ∝ exp(-F̃ / T)."""
    return torch.softmax(-losses / temperature, -1)


def after_churn(p: Tensor, before: Tensor, here: Tensor) -> Tensor:
    """p (m,) after peers have left or joined; a peer that joined gets the mean p of those that stayed."""
    stayed = before & here
    mean = (p * stayed).sum() / stayed.sum().clamp_min(1)
    row = torch.where(here & ~before, torch.where(mean > 0, mean, 1.0), p * stayed)
    return torch.where((here == before).all(), p, row / row.sum().clamp_min(torch.finfo(p.dtype).tiny))


def proxy_names(params: Mapping[str, Tensor]) -> list[str]:
    """The parameters of the body's output layer: the last before `head` with a matrix or kernel.

    Raises:
        ModelError: the network has no such layer.
    """
    body = [k for k in params if not k.startswith("head.")]
    layers = [k.rpartition(".")[0] for k in body if params[k].dim() > 1]
    if not layers or len(body) == len(params):
        raise ModelError(
            "AFIND+ needs a network with a layer before its module `head`, which this network lacks: choose another in "
            "models.pool"
        )
    return [k for k in body if k.rpartition(".")[0] == layers[-1]]


# -- the round -----------------------------------------------------------------------------------------------------


def coresets(fed: Federation, peers: Sequence[int], cfg: SelectionConfig, t: int) -> dict[int, list[int]]:
    """Lines 3-5: the neighbours that each peer selects in round t."""
    opens = cfg.opens(t)
    if opens and cfg.open_by == "probe":
        fed.choose_peers(peers, "choose", {"open": True})
        exchange_probes(fed, fed.sample_peers(peers, cfg.open_k, t), cfg, t)
        opens = False
    chosen = fed.choose_peers(peers, "choose", {"open": opens})
    if opens and cfg.open_k:
        return {i: near for i, near in fed.sample_peers(peers, cfg.open_k, t).items() if i in chosen}
    return chosen


def links(fed: Federation, peers: Sequence[int], cfg: Any, t: int) -> dict[int, list[int]]:
    """The neighbours that each peer selects in round t: random ones, or with `friends="afind"` AFIND+'s coreset, after
    an exchange of φ and F."""
    if cfg.friends == "random":
        return fed.sample_peers(peers, cfg.neighbours, t)
    links = coresets(fed, peers, cfg, t)
    exchange_probes(fed, links, cfg, t)
    return links


def exchange_probes(fed: Federation, links: Mapping[int, Sequence[int]], cfg: SelectionConfig, t: int) -> None:
    """Lines 7, 11 and 14 without training: exchange φ and F at the requesting peer's body."""
    question: Template = steps.weights_template(fed, cfg.personal_head)
    answer: Template = {"phi": proxy_template(fed), "loss": floats()}
    steps_of = {"ask": "request", "answer": "probe", "take": "reckon"}
    fed.exchange(links, **steps_of, shared={"t": t}, question=question, expect=answer, at_once=AT_ONCE)


def proxy_template(fed: Federation) -> Shape:
    """Template of φ."""
    return floats(sum(fed.param_shapes[k].numel() for k in proxy_names(fed.param_shapes)))
