"""Settings and functions of Proto-EVFL, for its page and for prototype students. Equations are the
paper's.

Shapes: f (n, d) embeddings, mu (Z, d) prototypes, p (Z,) prior, s (n, Z) similarities.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.page import SGD, Adam, Aggregator, MethodConfig, MethodError, Optimizer, Party
from fedloom.methods.features import class_means
from fedloom.methods.vertical.steps import aligned_rows, calibrate, check_principal, sample_rows

ALONE = "alone"
"""The evaluation mode in which each party predicts alone, from its prototypes."""
TOO_ALIKE = 0.95
"""Threshold of collapse for the mean cosine between the pseudo-classes' mean embeddings."""


class ProtoEVFLConfig(MethodConfig):
    """Settings of Proto-EVFL."""

    FEATURE_DIM = "embedding_dim"
    embedding_dim: int = Field(64, ge=1)
    """Dimension of an embedding (d)."""
    pca_dim: int = Field(0, ge=0)
    """How many of them are fixed, whitened principal components of the own rows. They are linear in
    the columns: a receiver that knows some raw rows can solve for those columns of the others.
    """
    centered: bool = True
    """Whether an extractor ends with a centering layer."""
    batch_size: int = Field(64, ge=2)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    steps: int = Field(25, ge=0)
    """Local steps of a passive party in a round; 0 keeps the initial extractors."""
    local_epochs: int | Literal["epochs"] | None = None
    """τ of a passive party: as many steps as this many epochs over the rows that it draws from.
    `epochs` for as many epochs as the active party makes (Table I); None for `steps`.
    """
    epochs: int = Field(3, ge=0)
    """Epochs of the active party over the aligned rows in a round."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of the extractors and of the active party."""
    lr: float = Field(1e-4, gt=0)
    """Learning rate of the extractors (η)."""
    active_lr: float = Field(1e-3, gt=0)
    """Learning rate of adaptors, gate and classifier (η')."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay of the extractors (φ): decoupled with AdamW, L2 regularization with SGD."""
    transport: Literal["both", "forward", "nearest", "optimal"] = "both"
    """Local loss of a passive party: the transport cost in both directions, or only from rows to
    prototypes (forward); the cosine cost to the nearest prototype; or the cost of an `optimal` plan
    (extra `ot`).
    """
    similarity: Literal["cosine", "dot"] = "cosine"
    """Similarity of an embedding and a prototype."""
    temperature: float = Field(0.1, gt=0)
    """Temperature of similarities."""
    local_rows: Literal["all", "unaligned"] = "all"
    """Rows on which a passive party trains."""
    prior: Literal["mixed", "local", "uniform"] = "mixed"
    """Class prior of a passive party: its estimate mixed with the global prior, its estimate alone,
    or uniform.
    """
    prior_rows: int = Field(1500, ge=1)
    """Maximum number of own rows from which the prior is estimated."""
    gamma: float | None = Field(None, ge=0, le=1)
    """Weight of the global prior (γ); None for the share of the rarest pseudo-class."""
    smoothing: float = Field(1.0, ge=0)
    """Additive smoothing of the pseudo-class counts for γ."""
    adapter: Literal["residual", "linear", "none"] = "residual"
    """The active party's adaptor for each party's embeddings."""
    gate: Literal["scaled", "plain", "none"] = "scaled"
    """Gate weights of the parties' embeddings: times M, plain, or no gate."""
    rho: float = Field(0.1, ge=0, le=1)
    """Update rate of prototypes (ρ)."""
    prototypes: Literal["mean", "sum", "fixed"] = "mean"
    """Update of prototypes: running mean, sum as printed in the paper, or none."""
    embedding_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on sent embeddings (κ). Centered embeddings have
    standard deviation 1.
    """
    prototype_noise: float = Field(0.0, ge=0)
    """Standard deviation of Gaussian noise on sent prototypes."""
    rollback: bool = True
    """Whether a passive party restores its previous extractor if the new one collapses."""

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: embeddings are sent one by one."""
        return (
            "embeddings are sent one by one" if aggregator.hidden and not aggregator.secure else ""
        )

    @field_validator("local_epochs", mode="before")
    @classmethod
    def _check_local_epochs(cls, epochs: Any) -> Any:
        if epochs not in ("epochs", None) and (type(epochs) is not int or epochs < 1):
            raise ValueError('must be a number of epochs of at least 1, or "epochs"')
        return epochs

    @model_validator(mode="after")
    def _check_principal(self) -> Self:
        check_principal(self.pca_dim, self.embedding_dim)
        return self

    @property
    def learned(self) -> int:
        """Number of trained dimensions of an embedding."""
        return self.embedding_dim - self.pca_dim

    @property
    def iterations_per_round(self) -> int:
        """Epochs of the active party over the aligned rows, as in split learning."""
        return max(1, self.epochs)

    @property
    def eval_modes(self) -> tuple[str, ...]:
        """Each party alone, from its prototypes."""
        return (ALONE,)

    @property
    def warnings(self) -> dict[str, str]:
        """The warning for a collapse, with its consequence and a remedy."""
        undone = (
            "its previous extractor was restored"
            if self.rollback
            else "set params.rollback=true to undo this"
        )
        remedy = "lower params.lr" if self.centered else "set params.centered=true"
        return {
            "collapsed": f"its embeddings collapsed: they are nearly equal for all rows; {undone}; "
            f"{remedy}"
        }


ProtoT_co = TypeVar("ProtoT_co", bound=ProtoEVFLConfig, covariant=True)


def optimizer(cfg: ProtoEVFLConfig, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """The optimizer of extractors, or of the active party."""
    kind = Adam if cfg.optimizer == "adamw" else SGD
    return kind(lr=lr, weight_decay=weight_decay)


def local_steps(party: Party[ProtoEVFLConfig]) -> int:
    """Steps of a passive party in a round."""
    cfg, left_out = party.cfg, 0 if party.cfg.local_rows == "all" else party.context.aligned
    if cfg.local_epochs is None:
        return cfg.steps
    epochs = cfg.epochs if cfg.local_epochs == "epochs" else cfg.local_epochs
    return math.ceil(epochs * (len(party.data) - left_out) / cfg.batch_size)


# -- equations -------------------------------------------------------------------------------------


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
    """Equation 8 without its last term, the optimizer's weight decay: the cost () that a passive
    party minimizes.
    """
    c, s = 1 - cosine(f, mu), similarities(f, mu, cfg)
    if cfg.transport == "nearest":
        return c[:, p > 0].min(-1).values.mean()
    if cfg.transport == "optimal":
        return (optimal_plan(c.detach(), p) * c).sum()
    forward = (to_prototypes(s, p) * c).sum(-1).mean()  # equation 5
    if cfg.transport == "forward":
        return forward
    return forward + (p * (to_rows(s) * c).sum(0)).sum()  # equation 7


def optimal_plan(c: Tensor, p: Tensor) -> Tensor:
    """The optimal transport plan (n, Z) from rows of equal weight to prototypes of weight p (Z,) at
    cost c (n, Z).
    """
    try:
        import ot
    except ImportError:
        raise MethodError(
            'params.transport="optimal" needs the package POT, which is not installed: pip '
            'install -e ".[ot]"'
        ) from None
    rows = torch.full((len(c),), 1 / len(c), dtype=torch.float64)
    target = p.double().cpu()
    plan = ot.emd(rows.numpy(), (target / target.sum()).numpy(), c.double().cpu().numpy())
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
    """Threshold of collapse for the share of rows in one pseudo-class: more than the prior (Z,) of
    the present classes makes likely. One of two classes may well be rare.
    """
    return max(0.6 if len(prior) > 2 else 0.98, (1 + float(prior.max())) / 2)


# -- steps of a passive party ----------------------------------------------------------------------


def mixed_prior(
    party: Party[ProtoEVFLConfig], t: int, mu: Tensor, p: Tensor, overall: Tensor
) -> Tensor:
    """Equations 9-11: the party's new prior (Z,) from its last one, p, and the global one,
    `overall`. Where that is 0 there is no prototype.
    """
    cfg, present = party.cfg, overall > 0
    if cfg.prior == "uniform":
        return present / present.sum()
    known = torch.where(present, p, 0.0)
    s = similarities(party.infer(prior_sample(party, t)), mu, cfg)
    posterior = to_prototypes(s, known / known.sum())
    estimate = posterior.mean(0)
    counts = torch.bincount(posterior.argmax(-1), minlength=len(present))[present]
    gamma = share_of_rarest(counts, cfg.smoothing) if cfg.gamma is None else torch.tensor(cfg.gamma)
    party.note("gamma", gamma)
    return estimate if cfg.prior == "local" else gamma * overall + (1 - gamma) * estimate


def prior_sample(party: Party[ProtoEVFLConfig], t: int) -> Tensor:
    """Rows (n, ...) for estimates, a sample of those that the party trains on."""
    return sample_rows(
        party, party.cfg.prior_rows, "prior rows", t, aligned=party.cfg.local_rows == "all"
    )


@contextlib.contextmanager
def rollback_on_collapse(
    party: Party[ProtoEVFLConfig], t: int, mu: Tensor, p: Tensor
) -> Iterator[None]:
    """Check the training within for collapse, and undo it if the config says so."""
    before = [
        {k: v.clone() for k, v in part.items()} for part in (party.params, party.buffers, party.opt)
    ]
    yield
    if local_steps(party) and collapsed(party, t, mu, p) and party.cfg.rollback:
        party.params, party.buffers, party.opt = before


def collapsed(party: Party[ProtoEVFLConfig], t: int, mu: Tensor, p: Tensor) -> bool:
    """Whether most rows fall in one pseudo-class, or the pseudo-classes are too similar. The
    figures are noted.
    """
    present, f = p > 0, party.infer(prior_sample(party, t))
    means, counts = class_means(f, logits(f, mu, p, party.cfg).argmax(-1), len(present))
    share, alike = counts.max() / counts.sum(), likeness(means[counts > 0])
    result = bool(share > collapse_share(p[present]) or alike > TOO_ALIKE)
    party.note("share of the largest pseudo-class", share)
    party.note("cosine between pseudo-classes", alike)
    party.note("cosine between prototypes", likeness(mu[present]))
    party.note("norm of prototypes", mu[present].norm(dim=-1).mean())
    party.note("collapsed", float(result))
    return result


def sent_embeddings(party: Party[ProtoEVFLConfig], purpose: str, t: int = 0) -> Tensor:
    """Embeddings (N_a, d) of the aligned people, with noise."""
    return with_noise(party, party.infer(aligned_rows(party)), purpose, t)


def with_noise(party: Party[ProtoEVFLConfig], f: Tensor, purpose: str, t: int = 0) -> Tensor:
    """Embeddings f (n, d) with `embedding_noise`, as they are sent."""
    kappa = party.cfg.embedding_noise
    return perturbed(f, kappa, party.noise([f, kappa], purpose, t))


def perturbed(x: Tensor, kappa: float, rng: np.random.Generator) -> Tensor:
    """x with Gaussian noise of standard deviation κ on each number."""
    return x + kappa * torch.from_numpy(rng.standard_normal(x.shape)).to(x) if kappa else x


# -- the passive party -----------------------------------------------------------------------------


class PrototypeParty(Party[ProtoT_co]):
    """A passive party with prototypes (Z, d) and a prior (Z,), for pages to derive from."""

    prototypes: Tensor
    prior: Tensor

    def introduce(self) -> Tensor:
        """Round 0: calibrate the centering, and embed the aligned people (N_a, d)."""
        calibrate(self)
        return sent_embeddings(self, "first embeddings")

    def improved(self, t: int) -> dict[str, Tensor]:
        """The reply after local training: embeddings (N_a, d), and the prior (Z,), unless secure
        sums add priors up.
        """
        embedded = {"embedded": sent_embeddings(self, "embeddings", t)}
        return embedded if self.context.aggregator.secure else {**embedded, "prior": self.prior}

    def estimate(self) -> Tensor:
        """The prior (Z,), to be added up."""
        return self.prior

    def alone(self, embedded: Tensor) -> Tensor:
        """Logits (n, Z) of this party alone from its embeddings (n, d)."""
        return logits(embedded, self.prototypes, self.prior, self.cfg)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) for a joint evaluation, with noise. The aligned people's are without
        noise, because the party itself would attack with them. Before it has received prototypes,
        the party has not calibrated yet.
        """
        if on != "aligned":
            return with_noise(self, self.infer(self.context.tests[on].every), f"{on} embeddings")
        with self.scratch():
            if not self.prototypes.any():
                calibrate(self)
            return self.infer(aligned_rows(self))
