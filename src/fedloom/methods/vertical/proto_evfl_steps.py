"""Settings and functions of Proto-EVFL, for its page and for prototype students. Equations are the paper's.

Shapes: f (n, d) embeddings, mu (Z, d) prototypes, p (Z,) prior, s (n, Z) similarities.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import MethodError
from fedloom.core.method import MethodConfig
from fedloom.core.optim import SGD, Adam, Optimiser
from fedloom.core.party import Party
from fedloom.methods.steps import class_means
from fedloom.methods.vertical.steps import aligned_rows, calibrate, check_principal, sample_rows

ALONE = "alone"
"""The evaluation mode in which each party predicts by itself, from its prototypes."""
TOO_ALIKE = 0.95
"""The mean cosine of the pseudo-classes' mean embeddings that means collapse."""


class ProtoEVFLConfig(MethodConfig):
    """Settings of Proto-EVFL."""

    width: int = Field(64, ge=1)
    """Numbers of an embedding (d)."""
    principal: int = Field(0, ge=0)
    """So many of them are the first principal components of the own rows, whitened, which no training moves. They are
    linear in the columns: who gets them, and knows some raw rows, can solve for what they hold of the others."""
    centred: bool = True
    """Whether an extractor ends by centring."""
    batch_size: int = Field(64, ge=2)
    """Rows of a batch. A pass is made of full batches, topped up from its own start."""
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

    @model_validator(mode="after")
    def _check_principal(self) -> Self:
        check_principal(self.principal, self.width)
        return self

    @property
    def learnt(self) -> int:
        """Numbers of an embedding that come from the network."""
        return self.width - self.principal

    @property
    def iterations_per_round(self) -> int:
        """Passes of the active party over the aligned rows, as in split learning."""
        return max(1, self.epochs)

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """Each party alone, from its prototypes."""
        return (ALONE,)

    @property
    def warnings(self) -> dict[str, str]:
        """A collapse, with what happened then and a repair."""
        then = "its extractor of before is back" if self.rollback else "params.rollback=true would go back"
        mend = "lower params.lr" if self.centred else "set params.centred=true"
        return {"collapsed": f"its embeddings came to look alike, which is the cheapest way to please; {then}; {mend}"}


def optimiser(cfg: ProtoEVFLConfig, lr: float, weight_decay: float = 0.0) -> Optimiser:
    """The optimiser of extractors, or of the active party."""
    kind = Adam if cfg.optimiser == "adamw" else SGD
    return kind(lr=lr, weight_decay=weight_decay)


# -- equations -----------------------------------------------------------------------------------------------------


def similarities(f: Tensor, mu: Tensor, cfg: ProtoEVFLConfig) -> Tensor:
    """The exponents (n, Z) in equations 4 and 6."""
    return (cosine(f, mu) if cfg.similarity == "cosine" else f @ mu.T) / cfg.temperature


def cosine(f: Tensor, mu: Tensor) -> Tensor:
    """Cosines (n, Z)."""
    return F.normalize(f, dim=-1) @ F.normalize(mu, dim=-1).T


def logits(f: Tensor, mu: Tensor, p: Tensor, cfg: ProtoEVFLConfig) -> Tensor:
    """Logits (n, Z) of a party alone, from its prototypes and prior."""
    return similarities(f, mu, cfg) + p.log()


def to_prototypes(s: Tensor, p: Tensor) -> Tensor:
    """Equation 4: for each row a distribution over classes."""
    return torch.softmax(s + p.log(), -1)


def to_rows(s: Tensor) -> Tensor:
    """Equation 6: for each class a distribution over the rows of the batch."""
    return torch.softmax(s, 0)


def transport_cost(f: Tensor, mu: Tensor, p: Tensor, cfg: ProtoEVFLConfig) -> Tensor:
    """Equation 8 without its last term, the optimiser's weight decay: the cost () that a passive party minimises."""
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


def likeness(mu: Tensor) -> Tensor:
    """Mean cosine () of two different rows of mu (k, d); 0 for a single one."""
    k = len(mu)
    alike = cosine(mu, mu)
    return (alike.sum() - alike.trace()) / max(1, k * (k - 1))


def collapse_share(prior: Tensor) -> float:
    """The share of the rows in one pseudo-class that means collapse: more than the prior (Z,) of the present classes
    makes likely. One of two classes may well be rare."""
    return max(0.6 if len(prior) > 2 else 0.98, (1 + float(prior.max())) / 2)


# -- steps of a passive party --------------------------------------------------------------------------------------


def mixed_prior(party: Party[Any], t: int, mu: Tensor, p: Tensor, overall: Tensor) -> Tensor:
    """Equations 9-11: the party's new prior (Z,) from its last one, p, and the global one, `overall`. Where that is 0
    there is no prototype."""
    cfg, there = party.cfg, overall > 0
    if cfg.prior == "uniform":
        return there / there.sum()
    known = torch.where(there, p, 0.0)
    s = similarities(party.infer(prior_sample(party, t)), mu, cfg)
    belongs = to_prototypes(s, known / known.sum())
    estimate = belongs.mean(0)
    counts = torch.bincount(belongs.argmax(-1), minlength=len(there))[there]
    gamma = share_of_rarest(counts, cfg.smoothing) if cfg.gamma is None else torch.tensor(cfg.gamma)
    party.note("gamma", gamma)
    return estimate if cfg.prior == "local" else gamma * overall + (1 - gamma) * estimate


def prior_sample(party: Party[Any], t: int) -> Tensor:
    """Rows (n, ...) to estimate from, of those that the party trains on."""
    return sample_rows(party, party.cfg.prior_rows, "prior rows", t, aligned=party.cfg.local_rows == "all")


@contextlib.contextmanager
def rollback_on_collapse(party: Party[Any], t: int, mu: Tensor, p: Tensor) -> Iterator[None]:
    """Check the training within for collapse, and undo it if the config says so."""
    before = [{k: v.clone() for k, v in part.items()} for part in (party.params, party.buffers, party.opt)]
    yield
    if party.cfg.steps and collapsed(party, t, mu, p) and party.cfg.rollback:
        party.params, party.buffers, party.opt = before


def collapsed(party: Party[Any], t: int, mu: Tensor, p: Tensor) -> bool:
    """Whether most rows fall in one pseudo-class, or the pseudo-classes look alike. The figures are noted."""
    there, f = p > 0, party.infer(prior_sample(party, t))
    means, counts = class_means(f, logits(f, mu, p, party.cfg).argmax(-1), len(there))
    share, alike = counts.max() / counts.sum(), likeness(means[counts > 0])
    found = bool(share > collapse_share(p[there]) or alike > TOO_ALIKE)
    party.note("largest pseudo-class", share)
    party.note("likeness of pseudo-classes", alike)
    party.note("likeness of prototypes", likeness(mu[there]))
    party.note("length of prototypes", mu[there].norm(dim=-1).mean())
    party.note("collapsed", float(found))
    return found


def sent_embeddings(party: Party[Any], purpose: str, t: int = 0) -> Tensor:
    """Embeddings (N_a, d) of the aligned people, with noise."""
    return with_noise(party, party.infer(aligned_rows(party)), purpose, t)


def with_noise(party: Party[Any], f: Tensor, purpose: str, t: int = 0) -> Tensor:
    """Embeddings f (n, d) as they leave the party, with `embedding_noise`."""
    kappa = party.cfg.embedding_noise
    return perturbed(f, kappa, party.noise([f, kappa], purpose, t))


def perturbed(x: Tensor, kappa: float, rng: Any) -> Tensor:
    """x with Gaussian noise of standard deviation κ on each number."""
    return x + kappa * torch.from_numpy(rng.standard_normal(x.shape)).to(x) if kappa else x


def contribution(party: Party[Any], on: str, *, begun: bool) -> Tensor:
    """Embeddings (n, d) for a joint evaluation, with noise; of the aligned people without it, since that is what the
    party itself would attack with. Before it has `begun`, the party has not calibrated yet."""
    if on != "aligned":
        return with_noise(party, party.infer(party.context.tests[on].every), f"{on} embeddings")
    with party.scratch():
        if not begun:
            calibrate(party)
        return party.infer(aligned_rows(party))
