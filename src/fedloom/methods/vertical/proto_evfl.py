"""Proto-EVFL: vertical learning with unaligned rows, by class prototypes instead of gradients.

Paper: W. Guo, Y. Duan et al., "Proto-EVFL: Enhanced Vertical Federated Learning via Dual Prototype
with Extremely Unaligned Data". Lines are those of its Algorithm 1. The dual transport cost is that
of K. Tanwisuth et al., "A Prototype-Oriented Framework for Unsupervised Domain Adaptation", NeurIPS
2021.

A round: the active party sends each passive party its class prototypes and the mean class prior.
The passive party estimates its own prior, moves its extractor so that its unlabeled rows come
nearer to prototypes, and replies with its prior and the embeddings of the aligned people. From
these the active party learns adaptors, gate and classifier, and new prototypes. It sends no
gradient and no label; docs/vertical.md has what prototypes reveal of labels all the same.

Differs (preset `recommended`; `paper` is the printed form where there is one):
    Equation 6 is printed with p(μ_n) below the line; p(μ_z) is meant, and cancels: a softmax over
    the batch. Equation 13 is printed for each party alone; the softmax here is over all parties, of
        weights that all parties' embeddings give.
    Equation 10 counts rounds back by two; the prototypes and the prior at hand are used.
    Prototypes of round 0, which the paper leaves open, are class means of the first embeddings.
    Extractors end by centering (`steps.Extractor`), measured before round 0: without it all
    features collapse. Similarity is cosine over a temperature. Prototypes are running means:
    equation 15 as printed grows without bound. Adaptors begin as the identity, so that prototypes
    and embeddings live in one space. The gate's weights are
        multiplied by M: a gate that has learned nothing is plain concatenation.
    Equation 9 takes many rows, not one batch, and the aligned ones among them, and forgets the last
        estimate; the counts behind γ have one added, or one empty class would make γ 0.
    Local training takes the aligned rows as well, whose labels it does not need.
    A class without aligned rows has no prototype, and prior 0: so parties learn which classes are
    missing. τ is a number of steps in lines 6 and 17 and of passes in Table I. Here passive parties
        make `steps`, the active party `epochs`. `paper` has the tables' values for Fashion-MNIST;
        for Credit and Adult set `active_lr` to 3e-3, and τ to 9 and 6.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import EVERY_LOCAL, Federation, Method, Party, floats
from fedloom.methods.features import class_means
from fedloom.methods.vertical import proto_evfl_steps as proto
from fedloom.methods.vertical import steps

LEAST = 1e-7
"""The smallest mean prior of a class with aligned rows: where it is 0 there is no prototype. A
secure sum has steps of 6e-8, and a median may be 0.
"""


@final
class ProtoEVFLPassive(proto.PrototypeParty[proto.ProtoEVFLConfig]):
    """Party m: an extractor, and its prototypes and prior."""

    STATE = ("params", "buffers", "opt", "prototypes", "prior")
    EXPORT = ("params", "buffers", "prototypes", "prior")
    ROLE = "party"
    CALLS = ("introduce", "improve", "estimate")
    MEANS = ("estimate",)
    TELLS = ()

    def setup(self) -> None:
        """No prototypes yet; all classes are equally likely."""
        self.network(
            steps.extractor(self), proto.optimizer(self.cfg, self.cfg.lr, self.cfg.weight_decay)
        )
        self.prototypes = torch.zeros(
            self.context.classes, self.cfg.embedding_dim, device=self.context.device
        )
        self.prior = torch.full(
            (self.context.classes,), 1 / self.context.classes, device=self.context.device
        )

    def improve(self, *, t: int, prototypes: Tensor, prior: Tensor) -> dict[str, Tensor]:
        """Lines 2-10."""
        cfg = self.cfg
        self.prototypes = prototypes  # line 2
        self.prior = proto.mixed_prior(self, t, prototypes, self.prior, prior)  # line 4
        with proto.rollback_on_collapse(self, t, self.prototypes, self.prior):  # lines 5-8
            number, everybody = proto.local_steps(self), cfg.local_rows == "all"
            for x in self.context.unlabeled(
                t, steps=number, size=cfg.batch_size, aligned=everybody
            ):
                self.minimize(self._cost, x)
        return self.improved(t)

    def _cost(self, x: Tensor) -> Tensor:
        return proto.transport_cost(self.model(x), self.prototypes, self.prior, self.cfg)


# -- the active party ------------------------------------------------------------------------------


class Fusion(nn.Module):
    """Adaptors R, gate G and classifier C: embeddings (B, M, d) to logits (B, Z)."""

    def __init__(self, parties: int, width: int, classes: int, cfg: proto.ProtoEVFLConfig) -> None:
        super().__init__()
        linear = cfg.adapter == "linear"
        adaptors = [nn.Linear(width, width) if linear else Residual(width) for _ in range(parties)]
        self.adaptors = nn.ModuleList([] if cfg.adapter == "none" else adaptors)
        self.gate = None if cfg.gate == "none" else nn.Linear(parties * width, parties, bias=False)
        if self.gate is not None:
            nn.init.zeros_(self.gate.weight)
        self.scale = parties if cfg.gate == "scaled" else 1
        self.classifier = steps.classifier(parties * width, classes)

    def adapt(self, f: Tensor) -> Tensor:
        """Equation 12: (B, M, d)."""
        return (
            torch.stack([r(f[:, m]) for m, r in enumerate(self.adaptors)], 1)
            if len(self.adaptors)
            else f
        )

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


@final
class ProtoEVFLActive(Party[proto.ProtoEVFLConfig]):
    """The party with the labels: the last replies of all parties, and the prototypes of each."""

    STATE = ("params", "opt", "embedded", "priors", "prototypes", "prior", "begun")
    ROLE = "active"

    def setup(self) -> None:
        """No replies yet: uniform priors, no prototypes."""
        context, cfg = self.context, self.cfg
        parties, classes, width = context.parties, context.classes, cfg.embedding_dim
        with self.seeded("fusion"):
            fusion = Fusion(parties, width, classes, cfg)
        self.network(fusion, proto.optimizer(cfg, cfg.active_lr))
        self.embedded = torch.zeros(context.aligned, parties, width, device=context.device)
        present = torch.bincount(steps.labels(self), minlength=classes) > 0
        self.prior = present / present.sum()
        self.priors = self.prior.repeat(parties, 1)
        self.prototypes = torch.zeros(parties, classes, width, device=context.device)
        self.begun = False

    def begin(self, replies: Mapping[int, Tensor]) -> None:
        """The first prototypes: class means of the first embeddings."""
        self.store(replies, {})
        self.prototypes = self._class_means(self.embedded)
        self.begun = True

    def _class_means(self, embedded: Tensor) -> Tensor:
        """Class means (M, Z, d) of embeddings (N_a, M, d)."""
        return torch.stack(
            [
                class_means(f, steps.labels(self), self.context.classes)[0]
                for f in embedded.unbind(1)
            ]
        )

    def store(self, embedded: Mapping[int, Tensor], priors: Mapping[int, Tensor]) -> None:
        """Line 11. A party that does not reply counts with its last reply, and with its last valid
        prior.
        """
        latest, latest_priors = self.embedded.clone(), self.priors.clone()
        for m, f in embedded.items():
            latest[:, m] = f
        for m, p in priors.items():
            if (p >= 0).all() and p.sum() > 0:
                latest_priors[m] = p / p.sum()
        self.embedded, self.priors = latest, latest_priors

    def learn(self, t: int) -> None:
        """Lines 12-20: passes over the aligned rows; embeddings are constants."""
        for number in range(t * self.cfg.epochs, (t + 1) * self.cfg.epochs):
            for step in range(steps.steps_per_pass(self)):
                rows = steps.batch_indices(self, number, step)
                self.note(
                    "loss", self.minimize(self._loss, self.embedded[rows], steps.labels(self, rows))
                )

    def _loss(self, f: Tensor, y: Tensor) -> Tensor:
        return self.context.task.loss(self.model(f), y)  # equation 14

    def move_prototypes(self) -> None:
        """Lines 21, 22: equation 15 for the classes that have aligned rows, and the mean prior."""
        with torch.no_grad():
            adapted = self.net.module.adapt(self.embedded)  # type: ignore[operator]
        rho, moved = self.cfg.rho, []
        for mu, f in zip(self.prototypes, adapted.unbind(1), strict=True):
            means, counts = class_means(f, steps.labels(self), self.context.classes)
            following = (
                mu + rho * means if self.cfg.prototypes == "sum" else torch.lerp(mu, means, rho)
            )
            moved.append(torch.where(counts[:, None] > 0, following, mu))
        if self.cfg.prototypes != "fixed":
            self.prototypes = torch.stack(moved)
        self.prior = self.mean_prior()

    def mean_prior(self) -> Tensor:
        """The mean prior (Z,), as the run takes means. No class with aligned rows may disappear,
        and no other appear.

        It is over all parties: one that does not reply counts with its last prior, and the own
            columns' is here.
        """
        present, how = self.prior > 0, self.context.aggregator
        found = how.combine(list(self.priors), kind="probabilities")
        return torch.where(present, found.clamp_min(LEAST), 0.0)

    def prototypes_for(self, t: int) -> dict[int, dict[str, Tensor]]:
        """The prototypes (Z, d) that each party is sent in round t."""
        kappa = self.cfg.prototype_noise
        sent = proto.perturbed(
            self.prototypes, kappa, self.noise([self.prototypes, kappa], "prototype noise", t)
        )
        return {m: {"prototypes": mu} for m, mu in enumerate(sent)}

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of each party."""
        return self.infer(steps.joint(contributions))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The prototypes (Z, d) that each party would receive, with noise, from the embeddings
        (N_a, d) of the aligned people; zeros for classes without aligned rows, which the prior
        reveals.
        """
        means = self.prototypes if self.begun else self._class_means(steps.joint(contributions))
        kappa = self.cfg.prototype_noise
        sent = proto.perturbed(means, kappa, self.noise([means, kappa], "exposed prototypes"))
        return {
            "prototypes": dict(zip(contributions, sent * (self.prior > 0)[:, None], strict=True))
        }


def mean_priors(
    fed: Federation, active: ProtoEVFLActive, parties: Sequence[int]
) -> dict[int, Tensor]:
    """With secure sums: the mean prior (Z,) of the other organizations in place of each one's; and
    that of the active party's own columns.
    """
    expect = floats(active.context.classes)
    near = fed.call([m for m in parties if m in fed.colocated], "estimate", expect=expect)
    found = fed.mean([m for m in parties if m not in fed.colocated], "estimate", expect=expect)
    return near if found is None else {**near, **dict.fromkeys(found.ids, found.value.clamp_min(0))}


def round(
    fed: Federation,
    active: ProtoEVFLActive,
    parties: Sequence[int],
    cfg: proto.ProtoEVFLConfig,
    t: int,
) -> Iterator[str]:
    """Algorithm 1 for one t, once all parties have introduced themselves."""
    classes, aligned = active.context.classes, active.context.aligned
    embeddings, secure = floats(aligned, cfg.embedding_dim), fed.aggregator.secure
    if not active.begun:
        first = fed.call(
            parties, "introduce", expect=embeddings, min_replies=active.context.parties
        )
        if not first:
            yield "round"
            return
        active.begin(first)
    prototypes = active.prototypes_for(t)
    replies = fed.call(  # lines 2-11
        parties,
        "improve",
        shared={"t": t, "prior": active.prior},
        each={m: prototypes[m] for m in parties},
        expect={"embedded": embeddings}
        if secure
        else {"embedded": embeddings, "prior": floats(classes)},
    )
    priors = (
        mean_priors(fed, active, parties) if secure else {m: r["prior"] for m, r in replies.items()}
    )
    active.store({m: r["embedded"] for m, r in replies.items()}, priors)
    active.learn(t)
    active.move_prototypes()
    yield "round"


PAPER_TRAINING = {
    "local_epochs": 8,
    "epochs": 8,
    "optimizer": "sgd",
    "lr": 1e-5,
    "active_lr": 5e-4,
    "weight_decay": 0.1,
}
PAPER_LOCAL = {
    "centered": False,
    "local_rows": "unaligned",
    "prior_rows": 64,
    "smoothing": 0.0,
    "rollback": False,
}
PAPER_MODEL = {
    "similarity": "dot",
    "temperature": 1.0,
    "adapter": "linear",
    "gate": "plain",
    "prototypes": "sum",
}

METHODS = (
    Method(
        name="proto-evfl",
        title="Proto-EVFL: prototypes down, embeddings up, and unaligned rows used",
        paper="W. Guo et al.: Proto-EVFL: Enhanced Vertical Federated Learning via Dual Prototype "
        "with Extremely Unaligned Data, 2025",
        only_classes="it compares prototypes of classes",
        local=EVERY_LOCAL,
        family="vertical",
        config=proto.ProtoEVFLConfig,
        round=round,
        client=ProtoEVFLPassive,
        server=ProtoEVFLActive,
        presets={"paper": {**PAPER_TRAINING, **PAPER_LOCAL, **PAPER_MODEL}},
        setting="vertical",
    ),
)
