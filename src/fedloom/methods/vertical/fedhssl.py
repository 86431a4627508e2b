"""FedHSSL: each party pretrains a cross encoder on aligned people and a local encoder on unaligned
people.

Y. He, Y. Kang, X. Zhao, J. Luo, L. Fan, Y. Han, Q. Yang, "A Hybrid Self-Supervised Learning
Framework for Vertical Federated Learning", 2022 (arXiv 2208.08934), with SimSiam; read with the
authors' code, github.com/jorghyq2016/FedHSSL (files `main_pretrain.py`, `pretrain_simsiam.py`,
`pretrain_template.py`, `main_cls.py`).

A party has a cross and a local encoder, the latter in two parts, bottom and top, and above each a
projector and a predictor. A round below `pretrain_rounds`:
    1. Cross-party (`step_cross_model`): of each aligned batch every party projects its own columns.
       Each party but the first learns to predict the first party's projections, the first learns to
       predict the projections of all others.
    2. Guided local (`compute_local_loss`): SimSiam on two views of own rows, plus agreement of the
       local prediction of a view with the cross projection of the same view. It moves the local
       encoder alone.
    3. Partial model aggregation (`aggregate_fedavg`): the mean over parties, weighted by rows, of
       tops and local heads.
Later rounds are split learning with both encoders and a fresh optimizer, on the batches that
`split` has from round 0.

Messages of the first phase, all through the active party, which relays them: up, projections (B, p)
of each party for each batch; down, the first party's to all others, and theirs to the first; each
round tops with local heads up, and their mean down. No label and no gradient is sent, and no loss
depends on a label. Projections still reveal something about a party's own people.

Differs:
    The features of the two encoders are averaged, as is the code's default (`pool`), so that the
        classifier gets d numbers of a party as in other methods; `features = "concatenated"` sends
        2d.
    The top is the network's last layer, its module `head`; bottoms may differ, and parties whose
        tops differ in shape are averaged separately. The local encoder begins with weights of its
        own. Both encoders end by centering, whose statistics stay at the party. A party that sends
        no top in a round keeps its own.
    A round makes `epochs` passes over the aligned rows and `steps` local ones; the code makes one
        pass of each. Local rows are the unaligned ones, as the paper says; the code takes all, as
        parties without unaligned rows do here.
    Projectors have one hidden layer where the code has two, as SimSiam has it for small pictures;
    widths are ours. The predictor's rate falls with the others'; batches of the local phase are
        independent draws; gradients are not clipped. `constraint_ratio` is 0 in the code unless
        set, which switches the guidance off.
    Views are those of SS-VFL; the code replaces columns by numbers from their range.
    Fine-tuning has a constant rate, and the last round is reported: the code reports the best on
    the test set.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fedloom.core.page import (
    EVERY_TASK,
    Aggregator,
    Federation,
    MessageError,
    Method,
    MethodError,
    Party,
    Shape,
    Template,
    Tree,
    floats,
)
from fedloom.methods.vertical import self_supervision as selfsup
from fedloom.methods.vertical import steps


class FedHSSLConfig(steps.SplitConfig):
    """Settings of FedHSSL."""

    optimizer: Literal["adamw", "sgd"] = "sgd"
    """Optimizer of all parties, in both phases."""
    lr: float = Field(0.03, gt=0)
    """Learning rate of fine-tuning."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(3e-5, ge=0)
    """Weight decay: decoupled with AdamW, L2 regularization with SGD."""
    pretrain_rounds: int = Field(5, ge=0)
    """Number of pretraining rounds, without labels. A run needs at least one round more."""
    steps: int = Field(50, ge=1)
    """Local steps of a party in each pretraining round."""
    pretrain_lr: float = Field(0.05, gt=0)
    """Learning rate of pretraining for batches of 256 and ratios that sum to 0.5, with cosine
    decay.
    """
    projection_dim: int = Field(64, ge=4)
    """Dimension of a projection and of a projector's hidden layer; a predictor's hidden layer has a
    quarter.
    """
    shift: float = Field(1 / 8, ge=0, le=1)
    """Largest shift of an image view, as a share of its side; at least a pixel unless 0."""
    noise: float = Field(0.1, ge=0)
    """Standard deviation of Gaussian noise on the standardized pixels of an image view."""
    erase: float = Field(0.5, ge=0, le=1)
    """Largest side of the erased rectangle in an image view, as a share of the image's side."""
    corruption_rate: float = Field(0.3, gt=0, le=1)
    """Share of a row's columns that are corrupted in a table view, at least one column."""
    local_ratio: float = Field(0.5, ge=0)
    """Weight of each of SimSiam's two terms in the local loss."""
    constraint_ratio: float = Field(0.5, ge=0)
    """Weight of each of the two terms of agreement with the cross projections in the local loss."""
    aggregate: bool = True
    """Whether tops and local heads are averaged (partial model aggregation)."""
    features: Literal["mean", "concatenated"] = "mean"
    """A party's embedding from its two encoders: their mean (d), or both (2d)."""

    @model_validator(mode="after")
    def _consistent(self) -> "FedHSSLConfig":
        if self.local_ratio + self.constraint_ratio == 0:
            raise ValueError("params.local_ratio or params.constraint_ratio must be above 0")
        if self.features == "concatenated" and self.top_model == "sum":
            raise ValueError(
                'params.top_model = "sum" needs params.features = "mean", not "concatenated"'
            )
        return self

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: tops have means by shape, and embeddings are
        sent one by one.
        """
        if aggregator.hidden:
            return "embeddings are sent one by one, and tops are averaged by their shape"
        return "" if self.aggregate else "no top is averaged: set params.aggregate = true"

    @property
    def min_rounds(self) -> int:
        """Pretraining and one round with labels."""
        return self.pretrain_rounds + 1

    @property
    def sent(self) -> int:
        """Dimension of the embeddings sent in fine-tuning."""
        return self.embedding_dim * (2 if self.features == "concatenated" else 1)

    def rate(self, t: int) -> float:
        """Learning rate in round t of the first phase."""
        scale = self.batch_size / 256 * 0.5 / (self.local_ratio + self.constraint_ratio)
        return self.pretrain_lr * scale * (1 + math.cos(math.pi * t / self.pretrain_rounds)) / 2


class HybridNetwork(nn.Module):
    """Two encoders and their heads: (B, ...) to features (B, 2, d) of the cross and of the local
    one.
    """

    def __init__(
        self,
        cross: nn.Module,
        local: nn.Module,
        principal: steps.PrincipalComponents | None,
        cfg: FedHSSLConfig,
    ) -> None:
        super().__init__()
        self.channels_last = getattr(cross, "channels_last", False)
        self.cross = steps.Extractor(cross, cfg.learned, cfg.centered, principal)
        self.cross_projector, self.cross_predictor = selfsup.heads(cfg.learned, cfg.projection_dim)
        self.local = steps.Extractor(local, cfg.learned, cfg.centered, principal)
        self.local_projector, self.local_predictor = selfsup.heads(cfg.learned, cfg.projection_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, 2, d)."""
        return torch.stack([self.cross(x), self.local(x)], 1)


CROSS = ("cross.", "cross_projector.", "cross_predictor.")
LOCAL = ("local.", "local_projector.", "local_predictor.")
HEAD = "local.body.head."
TOP = (HEAD, "local_projector.", "local_predictor.")
"""Prefixes of parameter names: of the cross part, of the local part, and of the local part that is
averaged.
"""


def top_template(cfg: FedHSSLConfig) -> dict[str, Template]:
    """Template of the parameters to be averaged. The active party does not know the width of the
    bottoms.
    """
    with torch.device("meta"):
        projector, predictor = selfsup.heads(cfg.learned, cfg.projection_dim)
    heads = nn.ModuleDict({"local_projector": projector, "local_predictor": predictor})
    last: dict[str, Template] = {
        f"{HEAD}weight": floats(cfg.learned, None),
        f"{HEAD}bias": floats(cfg.learned),
    }
    return {**last, **{k: p.detach() for k, p in heads.named_parameters()}}


@final
class FedHSSLPassive(Party[FedHSSLConfig]):
    """A party's encoders, below the cut."""

    STATE = ("params", "buffers", "opt", "supervised")
    ROLE = "party"
    CALLS = ("project", "agree", "improve", "top", "share", "embed", "update")
    MEANS = ("top",)
    TELLS = (("passed on", ("project",)),)

    def setup(self) -> None:
        """Two encoders of the party's network, the second with weights of its own, and heads."""
        self.supervised = self.cfg.pretrain_rounds == 0
        cross, local = self.context.build(), self.context.build()
        with self.seeded("heads"):
            for module in local.modules():
                if callable(reinitialize := getattr(module, "reset_parameters", None)):
                    reinitialize()
            network = HybridNetwork(cross, local, steps.principal_components(self), self.cfg)
            self.network(
                network, selfsup.ScheduledOptimizer(self.context.local.applied(self.cfg.optimize()))
            )
        if self.cfg.aggregate and set(self.part((HEAD,))) != {f"{HEAD}weight", f"{HEAD}bias"}:
            raise MethodError(
                "params.aggregate=true needs a network with a linear last layer `head` with a "
                "bias: choose another in models.pool, or set params.aggregate=false"
            )

    def part(self, prefixes: tuple[str, ...]) -> list[str]:
        """Names of the parameters of a part."""
        return [k for k in self.params if k.startswith(prefixes)]

    def learned(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Trained features of the cross and of the local encoder, from features (B, 2, d) with
        principal components.
        """
        cross, local = features[..., self.cfg.pca_dim :].unbind(1)
        return cross, local

    # -- the first phase ---------------------------------------------------------------------------

    def project(self, *, number: int, step: int) -> Tensor:
        """Cross projections (B, p) of this batch."""
        features = self.forward(steps.aligned_batch(self, number, step))
        z: Tensor = self.net.module.cross_projector(self.learned(features)[0])  # type: ignore[operator]
        return z

    def agree(self, *, t: int, number: int, step: int, others: Tensor) -> None:
        """One step of the cross part towards projections (K, B, p) of the same people by others."""
        self.opt = selfsup.at_rate(self.opt, self.cfg.rate(t))
        x = steps.aligned_batch(self, number, step)
        self.note("cross loss", self.minimize(self._cross_loss, x, others, only=self.part(CROSS)))

    def _cross_loss(self, x: Tensor, others: Tensor) -> Tensor:
        heads = self.net.module
        p = heads.cross_predictor(heads.cross_projector(self.learned(self.model(x))[0]))  # type: ignore[operator]
        return torch.stack([selfsup.disagreement(p, z) for z in others]).mean()

    def improve(self, *, t: int) -> None:
        """Steps of the local part on own rows."""
        cfg, names = self.cfg, self.part(LOCAL)
        self.opt = selfsup.at_rate(self.opt, cfg.rate(t))
        all_aligned = len(self.data) == self.context.aligned
        batches = self.context.unlabeled(
            t, steps=cfg.steps, size=cfg.batch_size, aligned=all_aligned
        )
        losses = [
            self.minimize(self._local_loss, *selfsup.views(x, cfg), only=names) for x in batches
        ]
        self.note("local loss", torch.stack(losses).mean())

    def _local_loss(self, one: Tensor, two: Tensor) -> Tensor:
        heads, cfg = self.net.module, self.cfg
        cross, local = zip(*[self.learned(self.model(x)) for x in (one, two)], strict=True)
        z = [heads.local_projector(f) for f in local]  # type: ignore[operator]
        p = [heads.local_predictor(each) for each in z]  # type: ignore[operator]
        loss = 2 * cfg.local_ratio * selfsup.siamese((p[0], p[1]), (z[0], z[1]))
        if cfg.constraint_ratio:
            guides = [heads.cross_projector(f) for f in cross]  # type: ignore[operator]
            apart = [
                selfsup.disagreement(each, guide) for each, guide in zip(p, guides, strict=True)
            ]
            loss = loss + cfg.constraint_ratio * (apart[0] + apart[1])
        return loss

    def top(self) -> dict[str, Tensor | dict[str, Tensor]]:
        """The parameters to be averaged, and the number of own rows () that they were
        trained on.
        """
        unaligned = self.row_count - self.context.aligned
        rows = torch.where(unaligned > 0, unaligned, self.row_count)
        return {"top": {k: self.params[k] for k in self.part(TOP)}, "rows": rows}

    def share(self, *, top: dict[str, Tensor]) -> None:
        """Load the mean.

        Raises:
            MessageError: it is not of the parameters of the top. With other encoders embeddings
                would be the columns.
        """
        if not self.cfg.aggregate or {*top} != {*self.part(TOP)}:
            raise MessageError("the mean has other parameters than this party's top")
        self.params = {**self.params, **top}

    # -- fine-tuning -------------------------------------------------------------------------------

    def embed(self, *, number: int, step: int) -> Tensor:
        """Forward to the cut (B, d) or (B, 2d), at first with a fresh optimizer."""
        if not self.supervised:
            self.supervised, self.opt = True, selfsup.reset(self.opt, self.cfg.lr)
        return self.pooled(self.forward(steps.aligned_batch(self, number, step)))

    def update(self, *, number: int, step: int, cut: Tensor) -> None:
        """Backward from the cut: one step along the gradient of the loss by what was sent."""
        both = (
            cut.view(len(cut), self.cfg.sent)
            .view(len(cut), -1, self.cfg.embedding_dim)
            .expand(-1, 2, -1)
        )
        if self.cfg.features == "mean":
            both = both / 2
        self.descend(steps.aligned_batch(self, number, step), both)

    def contribution(self, *, on: str) -> Tensor:
        """Embeddings (n, d) or (n, 2d) for a joint evaluation."""
        return self.pooled(steps.embeddings(self, on=on))

    def pooled(self, features: Tensor) -> Tensor:
        """The embeddings to send, from features (n, 2, d)."""
        return features.mean(1) if self.cfg.features == "mean" else features.flatten(1)


@final
class FedHSSLActive(Party[FedHSSLConfig]):
    """The active party's classifier and its labels."""

    STATE = ("params", "opt")
    ROLE = "active"

    def setup(self) -> None:
        """A classifier of all that parties send."""
        self.network(
            steps.top_model(self, self.context.parties * self.cfg.sent),
            self.cfg.optimize(active=True),
        )

    def decide(self, contributions: Mapping[int, Tensor]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of each party."""
        return self.infer(steps.joint(contributions))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """The gradients (N_a, d) that each party would receive for the aligned rows."""
        return steps.exposed_gradients(self, contributions)


def top_means(fed: Federation, replies: Mapping[int, Any]) -> dict[int, dict[str, Tree]]:
    """Partial model aggregation: for each party the mean, weighted by rows, of the tops that have
    its shape.
    """
    alike: dict[torch.Size, dict[int, Any]] = {}
    for m, reply in replies.items():
        alike.setdefault(reply["top"][f"{HEAD}weight"].shape, {})[m] = reply
    means = [
        mean for group in alike.values() if (mean := fed.combine(group, weight="rows")) is not None
    ]
    return {m: mean.value for mean in means for m in mean.ids}


# -- the round -------------------------------------------------------------------------------------


def cross(
    fed: Federation, parties: Sequence[int], cfg: FedHSSLConfig, t: int, number: int, step: int
) -> None:
    """Cross-party step on one aligned batch. Without the first party there is no target."""
    which = {"number": number, "step": step}
    z = fed.call(
        parties,
        "project",
        shared=which,
        expect=floats(cfg.batch_size, cfg.projection_dim),
        min_replies=2,
    )
    if 0 in z:
        first, others = z[0][None], torch.stack([projection for m, projection in z.items() if m])
        each = {m: {"others": first if m else others} for m in z}
        fed.call(list(z), "agree", shared={"t": t, **which}, each=each, expect=None)


def round(
    fed: Federation, active: FedHSSLActive, parties: Sequence[int], cfg: FedHSSLConfig, t: int
) -> Iterator[str]:
    """Across parties, within each, and the mean of tops with one shape; later, split learning."""
    if t < cfg.pretrain_rounds:
        for number in range(t * cfg.epochs, (t + 1) * cfg.epochs):
            for step in range(steps.steps_per_pass(active)):
                cross(fed, parties, cfg, t, number, step)
        fed.call(parties, "improve", shared={"t": t}, expect=None)
        if cfg.aggregate:
            template: Template = {"top": top_template(cfg), "rows": Shape("int64")}
            if means := top_means(fed, fed.call(parties, "top", expect=template, min_replies=1)):
                fed.call(list(means), "share", each=means, expect=None)
    else:
        numbers = range(
            (t - cfg.pretrain_rounds) * cfg.epochs, (t - cfg.pretrain_rounds + 1) * cfg.epochs
        )
        steps.passes(
            fed, active, parties, numbers, width=cfg.sent, min_replies=active.context.parties
        )
    yield "round"


METHODS = (
    Method(
        name="fedhssl",
        title="FedHSSL: self-supervision across and within parties, then split learning",
        paper="Y. He et al.: A Hybrid Self-Supervised Learning Framework for Vertical Federated "
        "Learning, 2022",
        family="vertical",
        config=FedHSSLConfig,
        round=round,
        client=FedHSSLPassive,
        server=FedHSSLActive,
        setting="vertical",
        tasks=EVERY_TASK,
        local=("optimizer", "weight_decay", "clip", "class_weights"),
        no_local="its pretraining has learning rates of its own",
    ),
)
