"""Proto-EVFL: vertical learning with unaligned rows, by class prototypes instead of gradients.

Paper: W. Guo, Y. Duan et al., "Proto-EVFL: Enhanced Vertical Federated Learning via Dual Prototype with Extremely
Unaligned Data". Lines are those of its Algorithm 1. The dual transport cost is that of K. Tanwisuth et al., "A
Prototype-Oriented Framework for Unsupervised Domain Adaptation", NeurIPS 2021.

A round: the active party sends each holder its class prototypes and the mean class prior. The holder estimates its own
prior, moves its extractor so that its unlabelled rows come nearer to prototypes, and sends back its prior and the
embeddings of the aligned people. From these the active party learns adaptors, gate and classifier, and new prototypes.
No gradient and no label goes down. What prototypes tell of labels all the same: see docs/vertical.md.

Differs (preset `recommended`; `paper` is the printed form where there is one):
    Equation 6 is printed with p(μ_n) below the line; p(μ_z) is meant, and cancels: a softmax over the batch.
    Equation 10 counts rounds back by two; the prototypes and the prior at hand are meant.
    Prototypes of round 0, which the paper leaves open, are class means of the first embeddings.
    Extractors end by centring (`fedloom.methods.holder`), measured before round 0: without it all features collapse.
    Similarity is cosine over a temperature. Prototypes are running means: equation 15 as printed grows without bound.
    Adaptors begin as the identity, so that prototypes and embeddings live in one space. The gate's weights are
        multiplied by M: a gate that has learnt nothing is plain concatenation.
    Equation 9 takes many rows, not one batch, and the aligned ones among them, and forgets the last estimate; the
        counts behind γ have one added, or one empty class would make γ 0.
    Local training takes the aligned rows as well, whose labels it does not need.
    A class without aligned rows has no prototype, and prior 0: so parties learn which classes are missing.
    τ is a number of steps in lines 6 and 17 and of passes in Table I. Here holders make `steps`, the active party
        `epochs`. `paper` has what the tables give for Fashion-MNIST; for Credit and Adult set `active_lr` to 3e-3,
        and τ to 9 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.errors import MethodError
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.method import Method
from fedloom.core.optim import SGD, Adam, Optimiser
from fedloom.methods.holder import Holder, HolderConfig, Home, classifier

ALONE = "alone"
"""The way of evaluation in which each party answers by itself, from its prototypes."""


class Config(HolderConfig):
    """Settings of Proto-EVFL."""

    steps: int = Field(25, ge=0)
    """Steps of a holder in a round (τ); 0 leaves extractors as they began."""
    epochs: int = Field(3, ge=0)
    """Passes of the active party over the aligned rows in a round."""
    optimiser: Literal["adamw", "sgd"] = "adamw"
    """Of extractors, and of the active party."""
    lr: float = Field(1e-4, gt=0)
    """Rate of the extractors (η)."""
    active_lr: float = Field(1e-3, gt=0)
    """Rate of adaptors, gate and classifier (η')."""
    weight_decay: float = Field(1e-4, ge=0)
    """Of the extractors (φ): decoupled with AdamW, part of the loss with SGD."""
    selection: Literal["both", "forward", "nearest", "transport"] = "both"
    """What a holder minimises: both directions of the transport cost; from rows to prototypes alone; the cosine cost to
    the nearest prototype; or an optimal transport plan's cost (extra `ot`)."""
    similarity: Literal["cosine", "dot"] = "cosine"
    """Of an embedding and a prototype."""
    temperature: float = Field(0.1, gt=0)
    """By which a similarity is divided."""
    local_rows: Literal["all", "unaligned"] = "all"
    """What a holder trains on."""
    prior: Literal["mixed", "local", "uniform"] = "mixed"
    """A holder's class prior: its estimate mixed with the global one, its estimate alone, or none."""
    prior_rows: int = Field(1500, ge=1)
    """Own rows that the prior is estimated from; all, if there are fewer."""
    gamma: float | None = Field(None, ge=0, le=1)
    """The weight of the global prior; None: the share of the rarest pseudo-class."""
    smoothing: float = Field(1.0, ge=0)
    """Added to the number of rows of each pseudo-class, for γ."""
    adaptor: Literal["residual", "linear", "none"] = "residual"
    """What the active party does to each party's embeddings first."""
    gate: Literal["scaled", "plain", "none"] = "scaled"
    """Weights of the parties' embeddings for each row: times M, as they are, or none."""
    rho: float = Field(0.1, ge=0, le=1)
    """The rate of prototypes (ρ)."""
    prototypes: Literal["mean", "sum", "fixed"] = "mean"
    """How they go on: a running mean, the printed sum, or not at all."""
    embedding_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on each number of an embedding that the active party gets (κ). Centred
    numbers have 1 themselves."""
    prototype_noise: float = Field(0.0, ge=0)
    """The same on prototypes that go down."""
    rollback: bool = True
    """Whether a holder whose extractor collapses in a round goes back to the one before."""

    @property
    def iterations_per_round(self) -> int:
        """Passes of the active party over the aligned rows, as in split learning."""
        return max(1, self.epochs)

    @property
    def ways(self) -> tuple[str, ...]:
        """Each party alone, from its prototypes."""
        return (ALONE,)

    @property
    def warnings(self) -> dict[str, str]:
        """What the monitor sees."""
        then = "its extractor of before is back" if self.rollback else "params.rollback=true would go back"
        mend = "lower params.lr" if self.centred else "set params.centred=true"
        return {"collapsed": f"its embeddings came to look alike, which is the cheapest way to please; {then}; {mend}"}


# -- pure functions: f (n, d) embeddings, mu (Z, d) prototypes, p (Z,) prior, s (n, Z) similarities ----------------


def similarities(f: Tensor, mu: Tensor, cfg: Config) -> Tensor:
    """What the exponents of equations 4 and 6 hold."""
    return (cosine(f, mu) if cfg.similarity == "cosine" else f @ mu.T) / cfg.temperature


def cosine(f: Tensor, mu: Tensor) -> Tensor:
    """Cosines (n, Z)."""
    return F.normalize(f, dim=-1) @ F.normalize(mu, dim=-1).T


def to_prototypes(s: Tensor, p: Tensor) -> Tensor:
    """Equation 4: for each row a distribution over classes."""
    return torch.softmax(s + p.log(), -1)


def to_rows(s: Tensor) -> Tensor:
    """Equation 6: for each class a distribution over the rows of the batch."""
    return torch.softmax(s, 0)


def transport_cost(f: Tensor, mu: Tensor, p: Tensor, cfg: Config) -> Tensor:
    """Equation 8 without its last term, which is the optimiser's: the cost () that a holder minimises."""
    c, s = 1 - cosine(f, mu), similarities(f, mu, cfg)
    if cfg.selection == "nearest":
        return c[:, p > 0].min(-1).values.mean()
    if cfg.selection == "transport":
        return (optimal_plan(c.detach(), p) * c).sum()
    forward = (to_prototypes(s, p) * c).sum(-1).mean()  # equation 5
    if cfg.selection == "forward":
        return forward
    return forward + (p * (to_rows(s) * c).sum(0)).sum()  # equation 7


def optimal_plan(c: Tensor, p: Tensor) -> Tensor:
    """The plan (n, Z) that moves rows of equal weight to prototypes of weight p at the least cost c (n, Z)."""
    try:
        import ot
    except ImportError:
        raise MethodError('selection "transport" needs POT: pip install "fedloom[ot]"') from None
    rows = torch.full((len(c),), 1 / len(c), dtype=torch.float64)
    to = p.double().cpu()
    plan = ot.emd(rows.numpy(), (to / to.sum()).numpy(), c.double().cpu().numpy())
    return torch.from_numpy(plan).to(c)


def share_of_rarest(counts: Tensor, smoothing: float) -> Tensor:
    """γ () from the numbers of rows (Z') of the pseudo-classes that can occur: at most 1 / Z'."""
    return (counts.min() + smoothing) / (counts.sum() + smoothing * len(counts))


def class_means(f: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The mean (Z, d) of the rows of each class y (n,), 0 where there are none, and the numbers of rows (Z,)."""
    members = F.one_hot(y, classes).to(f)
    counts = members.sum(0)
    return members.T @ f / counts.clamp(min=1)[:, None], counts


def likeness(mu: Tensor) -> Tensor:
    """Mean cosine () of two different rows of mu (k, d); 0 for a single one."""
    k = len(mu)
    alike = cosine(mu, mu)
    return (alike.sum() - alike.trace()) / max(1, k * (k - 1))


def too_much(prior: Tensor) -> float:
    """The share of the rows in one pseudo-class that means collapse, beyond what the prior (Z,) of the classes that
    there are makes likely. Of two classes one may well be rare."""
    return max(0.6 if len(prior) > 2 else 0.98, (1 + float(prior.max())) / 2)


TOO_ALIKE = 0.95
"""The mean cosine of the pseudo-classes' mean embeddings that means collapse."""


# -- a party with columns ------------------------------------------------------------------------------------------


class Party(Holder[Config]):
    """Party m: an extractor, the prototypes and the prior that it holds."""

    STATE = ("params", "buffers", "opt", "prototypes", "prior")
    CALLS = ("introduce", "improve")

    def setup(self) -> None:
        """No prototypes yet; all classes are as likely."""
        self.extractor(optimiser(self.cfg, self.cfg.lr, self.cfg.weight_decay), self.head())
        self.prototypes = torch.zeros(self.site.classes, self.cfg.width, device=self.site.device)
        self.prior = torch.full((self.site.classes,), 1 / self.site.classes, device=self.site.device)

    def head(self) -> nn.Module | None:
        """What stands on the extractor and never leaves: nothing."""
        return None

    def introduce(self) -> Tensor:
        """Round 0: centre, and embed the aligned people (N_a, d)."""
        self.calibrate()
        return self._perturbed(self.infer(self.aligned_rows()), "first embeddings")

    def improve(self, *, t: int, prototypes: Tensor, prior: Tensor) -> dict[str, Tensor]:
        """Lines 2-10."""
        cfg = self.cfg
        self.prototypes = prototypes  # line 2
        self.prior = self._mixed(t, prior)  # line 4
        before = [{k: v.clone() for k, v in part.items()} for part in (self.params, self.buffers, self.opt)]
        self.fit(t)  # lines 5-8
        if cfg.steps and self._collapsed(t) and cfg.rollback:
            self.params, self.buffers, self.opt = before
        return {"embedded": self._perturbed(self.infer(self.aligned_rows()), "embeddings", t), "prior": self.prior}

    def fit(self, t: int) -> None:
        """Lines 5-8: steps along the transport cost of own rows, aligned and not, or not alone."""
        cfg = self.cfg
        for x in self.site.unlabelled(t, steps=cfg.steps, size=cfg.batch_size, aligned=cfg.local_rows == "all"):
            self.minimise(self._cost, x)

    def _cost(self, x: Tensor) -> Tensor:
        return transport_cost(self.model(x), self.prototypes, self.prior, self.cfg)

    def _sample(self, t: int) -> Tensor:
        """Own rows (n, ...) to estimate from, of those that are trained on."""
        return self.some_rows(self.cfg.prior_rows, "prior rows", t, aligned=self.cfg.local_rows == "all")

    def _mixed(self, t: int, overall: Tensor) -> Tensor:
        """Equations 9-11: this party's prior (Z,). Where the global one is 0 there is no prototype."""
        cfg, there = self.cfg, overall > 0
        if cfg.prior == "uniform":
            return there / there.sum()
        known = torch.where(there, self.prior, 0.0)
        belongs = to_prototypes(
            similarities(self.infer(self._sample(t)), self.prototypes, cfg),
            known / known.sum(),
        )
        estimate = belongs.mean(0)
        counts = torch.bincount(belongs.argmax(-1), minlength=len(there))[there]
        gamma = share_of_rarest(counts, cfg.smoothing) if cfg.gamma is None else torch.tensor(cfg.gamma)
        self.note("gamma", gamma)
        return estimate if cfg.prior == "local" else gamma * overall + (1 - gamma) * estimate

    def _collapsed(self, t: int) -> bool:
        """Whether most rows look like one class, or the classes like each other. Noted for all to see."""
        there = self.prior > 0
        f = self.infer(self._sample(t))
        pseudo = self.alone(f).argmax(-1)
        means, counts = class_means(f, pseudo, len(there))
        share, alike = counts.max() / counts.sum(), likeness(means[counts > 0])
        collapsed = bool(share > too_much(self.prior[there]) or alike > TOO_ALIKE)
        self.note("largest pseudo-class", share)
        self.note("likeness of pseudo-classes", alike)
        self.note("likeness of prototypes", likeness(self.prototypes[there]))
        self.note("length of prototypes", self.prototypes[there].norm(dim=-1).mean())
        self.note("collapsed", float(collapsed))
        return collapsed

    def alone(self, embedded: Tensor) -> Tensor:
        """Logits (n, Z) from prototypes and prior."""
        return similarities(embedded, self.prototypes, self.cfg) + self.prior.log()

    def contribution(self, *, on: str) -> Tensor:
        """For a joint evaluation: embeddings (n, d), perturbed like all that leave; of the aligned people as the party
        has them for itself, which is what it attacks with."""
        if on != "aligned":
            return self._perturbed(self.infer(self.site.tests[on].every), f"{on} embeddings")
        with self.scratch():
            if not self.prototypes.any():  # as it will introduce itself
                self.calibrate()
            return self.infer(self.aligned_rows())

    def _perturbed(self, f: Tensor, purpose: str, t: int = 0) -> Tensor:
        kappa = self.cfg.embedding_noise
        return perturbed(f, kappa, self.noise([f, kappa], purpose, t))


def perturbed(x: Tensor, kappa: float, rng: Any) -> Tensor:
    """x with Gaussian noise of standard deviation κ on each number."""
    return x + kappa * torch.from_numpy(rng.standard_normal(x.shape)).to(x) if kappa else x


def optimiser(cfg: Config, lr: float, weight_decay: float = 0.0) -> Optimiser:
    """What extractors, or the active party, train with."""
    kind = Adam if cfg.optimiser == "adamw" else SGD
    return kind(lr=lr, weight_decay=weight_decay)


# -- the active party ----------------------------------------------------------------------------------------------


class Fusion(nn.Module):
    """Adaptors R, gate G and classifier C: embeddings (B, M, d) to logits (B, Z)."""

    def __init__(self, parties: int, width: int, classes: int, cfg: Config) -> None:
        super().__init__()
        linear = cfg.adaptor == "linear"
        adaptors = [nn.Linear(width, width) if linear else Residual(width) for _ in range(parties)]
        self.adaptors = nn.ModuleList([] if cfg.adaptor == "none" else adaptors)
        self.gate = None if cfg.gate == "none" else nn.Linear(parties * width, parties, bias=False)
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
        self.scale = parties if cfg.gate == "scaled" else 1
        self.classifier = classifier(parties * width, classes)

    def adapt(self, f: Tensor) -> Tensor:
        """Equation 12: (B, M, d)."""
        return torch.stack([r(f[:, m]) for m, r in enumerate(self.adaptors)], 1) if len(self.adaptors) else f

    def forward(self, f: Tensor) -> Tensor:
        """Logits (B, Z)."""
        adapted = self.adapt(f)
        if self.gate is not None:
            weights = torch.softmax(self.gate(adapted.flatten(1)), -1)  # equation 13
            adapted = self.scale * weights[..., None] * adapted
        out: Tensor = self.classifier(adapted.flatten(1))
        return out


class Residual(nn.Module):
    """x + g(x), which begins as x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, d) to (B, d)."""
        out: Tensor = x + self.outer(F.relu(self.inner(x)))
        return out


class Active(Home[Config]):
    """The party with the labels: what it last heard of everybody, and everybody's prototypes."""

    STATE = ("params", "opt", "embedded", "priors", "prototypes", "prior", "begun")

    def setup(self) -> None:
        """Nothing heard yet: uniform priors, no prototypes."""
        site, cfg = self.site, self.cfg
        parties, classes, width = site.parties, site.classes, cfg.width
        with self.seeded("fusion"):
            fusion = Fusion(parties, width, classes, cfg)
        self.network(fusion, optimiser(cfg, cfg.active_lr))
        self.embedded = torch.zeros(site.aligned, parties, width, device=site.device)
        present = torch.bincount(self.labels(), minlength=classes) > 0
        self.prior = present / present.sum()
        self.priors = self.prior.repeat(parties, 1)
        self.prototypes = torch.zeros(parties, classes, width, device=site.device)
        self.begun = False

    def begin(self, replies: Mapping[int, Tensor]) -> None:
        """The first prototypes: class means of the first embeddings."""
        self.hear(replies, {})
        self.prototypes = self._first(self.embedded)
        self.begun = True

    def _first(self, embedded: Tensor) -> Tensor:
        """Class means (M, Z, d) of embeddings (N_a, M, d)."""
        return torch.stack([class_means(f, self.labels(), self.site.classes)[0] for f in embedded.unbind(1)])

    def hear(self, embedded: Mapping[int, Tensor], priors: Mapping[int, Tensor]) -> None:
        """Line 11. What a silent party sent before goes on to count, and so does a prior before one that is none."""
        known, beliefs = self.embedded.clone(), self.priors.clone()
        for m, f in embedded.items():
            known[:, m] = f
        for m, p in priors.items():
            if (p >= 0).all() and p.sum() > 0:
                beliefs[m] = p / p.sum()
        self.embedded, self.priors = known, beliefs

    def learn(self, t: int) -> None:
        """Lines 12-20: passes over the aligned rows; embeddings are constants."""
        for number in range(t * self.cfg.epochs, (t + 1) * self.cfg.epochs):
            for step in range(self.steps()):
                rows = self.rows(number, step)
                self.note("loss", self.minimise(self._loss, self.embedded[rows], self.labels(rows)))

    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(f), y)  # equation 14

    def move_prototypes(self) -> None:
        """Lines 21, 22: equation 15 for the classes that have aligned rows, and the mean prior."""
        with torch.no_grad():
            adapted = self.net.module.adapt(self.embedded)  # type: ignore[operator]
        rho, moved = self.cfg.rho, []
        for mu, f in zip(self.prototypes, adapted.unbind(1), strict=True):
            means, counts = class_means(f, self.labels(), self.site.classes)
            following = mu + rho * means if self.cfg.prototypes == "sum" else torch.lerp(mu, means, rho)
            moved.append(torch.where(counts[:, None] > 0, following, mu))
        if self.cfg.prototypes != "fixed":
            self.prototypes = torch.stack(moved)
        self.prior = self.priors.mean(0)

    def prototypes_for(self, t: int) -> dict[int, dict[str, Tensor]]:
        """What each party is sent in round t: its prototypes (Z, d)."""
        kappa = self.cfg.prototype_noise
        sent = perturbed(self.prototypes, kappa, self.noise([self.prototypes, kappa], "prototype noise", t))
        return {m: {"prototypes": mu} for m, mu in enumerate(sent)}

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The prototypes (Z, d), perturbed like those that go down; the prior tells which classes have none."""
        told = self.prototypes if self.begun else self._first(torch.stack(list(contributions.values()), 1))
        kappa = self.cfg.prototype_noise
        sent = perturbed(told, kappa, self.noise([told, kappa], "exposed prototypes"))
        return {"prototypes": dict(zip(contributions, sent * (self.prior > 0)[:, None], strict=True))}


# -- the round -----------------------------------------------------------------------------------------------------


def round(fed: Federation, active: Active, parties: Sequence[int], cfg: Config, t: int) -> Iterator[str]:
    """Algorithm 1 for one t. Until all have introduced themselves there is nothing to learn from."""
    classes, aligned = active.site.classes, active.site.aligned
    embeddings = floats(aligned, cfg.width)
    if not active.begun:
        replies = fed.call(parties, "introduce", expect=embeddings, need=active.site.parties)
        if not replies:
            yield "round"
            return
        active.begin(replies)
    told = active.prototypes_for(t)
    found = fed.call(  # lines 2-11
        parties,
        "improve",
        shared={"t": t, "prior": active.prior},
        each={m: told[m] for m in parties},
        expect={"embedded": embeddings, "prior": floats(classes)},
    )
    active.hear({m: r["embedded"] for m, r in found.items()}, {m: r["prior"] for m, r in found.items()})
    active.learn(t)
    active.move_prototypes()
    yield "round"


PAPER = {
    "steps": 8,
    "epochs": 8,
    "optimiser": "sgd",
    "lr": 1e-5,
    "active_lr": 5e-4,
    "weight_decay": 0.1,
    "centred": False,
    "similarity": "dot",
    "temperature": 1.0,
    "local_rows": "unaligned",
    "prior_rows": 64,
    "smoothing": 0.0,
    "adaptor": "linear",
    "gate": "plain",
    "prototypes": "sum",
    "rollback": False,
}

METHODS = (
    Method(
        name="proto-evfl",
        title="Proto-EVFL: prototypes down, embeddings up, and unaligned rows used",
        paper="W. Guo et al.: Enhanced Vertical Federated Learning via Dual Prototype with Extremely Unaligned Data",
        family="vertical",
        config=Config,
        round=round,
        client=Party,
        server=Active,
        presets={"paper": PAPER},
        setting="vertical",
    ),
)
