"""Functions that the pages of vertical methods call: extractors, aligned rows, split learning,
self-supervision.

Vertical parties hold different columns of the same people. Each embeds its columns with an
extractor. The active party has the labels of the aligned people and classifies the embeddings of
all parties; its own columns are party 0's, which runs beside it. Every function that takes a party
works on that party alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, Protocol, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.page import (
    SGD,
    Adam,
    ClientContext,
    Federation,
    MethodConfig,
    MethodError,
    Party,
    aligned_plan,
    floats,
)

PRINCIPAL_ROWS = 2000
"""Maximum number of rows for estimating principal components."""
HIDDEN = 64
"""Units of the classifier's hidden layers."""


# -- networks --------------------------------------------------------------------------------------


class Extractor(nn.Module):
    """A network and the centering of its outputs: (B, ...) to (B, d).

    Centering is a BatchNorm layer without weights. Without it all embeddings of an untrained
    network share one large mean. Proto-EVFL measures its statistics on the party's rows before
    anything is sent; split learning uses each batch's statistics, and their running means for
    prediction.
    """

    def __init__(
        self,
        body: nn.Module,
        width: int,
        centered: bool,
        principal: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """`body` gives (B, width); `principal`, if any, gives numbers that come first; `head` is
        for the page.
        """
        super().__init__()
        self.principal = principal
        self.channels_last = getattr(body, "channels_last", False)
        self.body = body
        self.centre = nn.BatchNorm1d(width, affine=False) if centered else nn.Identity()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (B, d)."""
        out: Tensor = self.centre(self.body(x))
        return out if self.principal is None else torch.cat([self.principal(x), out], -1)


class PrincipalComponents(nn.Module):
    """Principal components of rows, each scaled to variance 1: (B, ...) to (B, k), without
    gradient.

    Args:
        x: (n, ...) the rows to estimate them from; with none, all components are 0 until a state is
            loaded.
        k: their number. Components without variance are 0.
    """

    def __init__(self, x: Tensor, k: int) -> None:
        super().__init__()
        flat = (x if len(x) else x.new_zeros(1, *x.shape[1:])).flatten(1).double()
        mean = flat.mean(0)
        variances, directions = torch.linalg.eigh(
            torch.cov((flat - mean).T, correction=0).reshape(len(mean), -1)
        )
        variances, directions = variances.flip(0)[:k], directions.flip(1)[:, :k]
        scale = torch.where(variances > 1e-6 * variances[0], variances.clamp(min=0).rsqrt(), 0.0)
        self.register_buffer("mean", mean.to(x))
        self.register_buffer("directions", F.pad(directions * scale, (0, k - len(scale))).to(x))

    def forward(self, x: Tensor) -> Tensor:
        """Components (B, k)."""
        out: Tensor = (x.flatten(1) - self.mean) @ self.directions  # type: ignore[operator]
        return out


class Extraction(Protocol):
    """Settings of an extractor and of batches of aligned rows, as `SplitConfig` describes them."""

    @property
    def embedding_dim(self) -> int:
        """Dimension of an embedding (d)."""

    @property
    def learned(self) -> int:
        """Number of trained dimensions of an embedding."""

    @property
    def pca_dim(self) -> int:
        """Number of dimensions that are principal components."""

    @property
    def centered(self) -> bool:
        """Whether an extractor ends with a centering layer."""

    @property
    def batch_size(self) -> int:
        """Batch size."""


def extractor(party: Party[Extraction], head: nn.Module | None = None) -> Extractor:
    """A party's extractor as its config describes it, with a head that stays at the party if the
    page needs one.
    """
    cfg = party.cfg
    return Extractor(
        party.context.build(), cfg.learned, cfg.centered, principal_components(party), head
    )


def principal_components(party: Party[Extraction]) -> PrincipalComponents | None:
    """The principal components of a sample of the party's rows, if `pca_dim` > 0."""
    k = party.cfg.pca_dim
    return (
        PrincipalComponents(sample_rows(party, PRINCIPAL_ROWS, "principal rows"), k) if k else None
    )


def classifier(inputs: int, classes: int) -> nn.Sequential:
    """MLP with three layers: (B, inputs) to logits (B, Z)."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, classes),
    )


# -- rows of a passive party -----------------------------------------------------------------------


def aligned_rows(party: Party[object]) -> Tensor:
    """Inputs (N_a, ...) of the aligned people, in the order that all parties share."""
    return party.data.every[: party.context.aligned]


def aligned_batch(party: Party[Extraction], number: int, step: int) -> Tensor:
    """Inputs (B, ...) of one step of pass `number` over the aligned rows: the same people at every
    party, without those that this party lacks.
    """
    return party.context.aligned_batch(number, step, size=party.cfg.batch_size)


def held(party: Party[Extraction], number: int, step: int) -> Tensor:
    """(B,) bool, which rows of that batch the party has. A single one does not count: it has no
    batch statistics.
    """
    rows = batch_indices(party, number, step)
    present = party.data.present
    if present is None:
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    return present[rows] & (present[rows].sum() > 1)


def embed_batch(party: Party[Extraction], number: int, step: int) -> Tensor:
    """Forward to the cut: embeddings (B, d) of that batch, zeros for the rows that the
    party lacks.
    """
    here = held(party, number, step)
    if here.all():
        return party.forward(aligned_batch(party, number, step))
    out = torch.zeros(len(here), party.cfg.embedding_dim, device=here.device)
    if here.any():
        out[here] = party.forward(aligned_batch(party, number, step))
    return out


def sample_rows(
    party: Party[object], size: int, purpose: str, t: int = 0, *, aligned: bool = True
) -> Tensor:
    """At most `size` different rows (n, ...) for this purpose and round; without the aligned ones
    if not `aligned`.
    """
    rows, first = party.data, 0 if aligned else party.context.aligned
    if rows.present is not None:
        rows = replace(rows, index=rows.index[rows.present], present=None)
    if len(rows) - first <= size:
        return rows.every[first:]
    which = party.stream(purpose, t).choice(len(rows) - first, size, replace=False) + first
    return rows.x(torch.from_numpy(which).to(party.context.device))


def calibrate(party: Party[Extraction]) -> None:
    """Measure the statistics of the centering on all rows of the party, with the extractor as it
    is.
    """
    if not party.cfg.centered:
        return
    # normalization layers inside measure theirs first
    if any(k.startswith("body.") for k in party.buffers):
        with torch.no_grad():
            for x in party.data.every.chunk(max(1, len(party.data) // 256)):
                party.model(x)
    buffers, eps = party.buffers, float(party.net.module.centre.eps)  # type: ignore[union-attr, arg-type]
    mean, var = buffers["centre.running_mean"], buffers["centre.running_var"]
    raw = party.infer(party.data.every)[:, party.cfg.pca_dim :] * (var + eps).sqrt() + mean
    party.buffers = {
        **buffers,
        "centre.running_mean": raw.mean(0),
        "centre.running_var": raw.var(0, correction=min(1, len(raw) - 1)),
    }


def embeddings(party: Party[Extraction], *, on: str) -> Tensor:
    """Embeddings (n, ...) for a joint evaluation: of the test rows named `on`, or, if `on` is
    "aligned", of the aligned people as a pass sends them, with the centering of each batch.
    """
    if on != "aligned":
        return party.infer(party.context.tests[on].every)
    plan = aligned_plan(party.context.seed, 0, party.context.aligned, party.cfg.batch_size)
    with party.scratch():
        outputs = [embed_batch(party, 0, step) for step in range(len(plan))]
    # a pass begins with each of them once
    order = plan.flatten()[: party.context.aligned].argsort()
    return torch.cat(outputs)[order.to(party.context.device)]


# -- the active party: its labels and its classifier -----------------------------------------------


def steps_per_pass(active: Party[Extraction]) -> int:
    """Number of batches in a pass over the aligned rows."""
    return math.ceil(active.context.aligned / active.cfg.batch_size)


def batch_indices(active: Party[Extraction], number: int, step: int) -> Tensor:
    """Indices (B,) of the aligned rows in a step of pass `number`: the same at every party."""
    context = active.context
    return aligned_plan(context.seed, number, context.aligned, active.cfg.batch_size)[step].to(
        context.device
    )


def labels(active: Party[object], rows: Tensor | None = None) -> Tensor:
    """Classes (B,) of these aligned rows, or of all of them (N_a,)."""
    context = active.context
    return active.data.y(
        torch.arange(context.aligned, device=context.device) if rows is None else rows
    )


def joint(parts: Mapping[int, Tensor]) -> Tensor:
    """Embeddings (n, M, d) from each party's (n, d)."""
    return torch.stack(list(parts.values()), 1)


# -- split learning --------------------------------------------------------------------------------


class SplitConfig(MethodConfig):
    """Settings of split learning, and of the last phase of methods that end with it."""

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
    epochs: int = Field(3, ge=1)
    """Epochs over the aligned rows in a round."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimizer of all parties."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of extractors, and of the active party unless active_lr is set."""
    active_lr: float | None = Field(None, gt=0)
    """Learning rate of the active party's model; None for lr."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay: decoupled with AdamW, L2 regularization with SGD."""
    top_model: Literal["network", "sum"] = "network"
    """The active party's model: a network on all embeddings, or the sum of the parties' logits and
    a bias.
    """

    @model_validator(mode="after")
    def _check_principal(self) -> Self:
        check_principal(self.pca_dim, self.embedding_dim)
        return self

    @property
    def learned(self) -> int:
        """Number of trained dimensions of an embedding."""
        return self.embedding_dim - self.pca_dim

    def calls_in_round(self, context: ClientContext) -> Mapping[str, int]:
        """Once for each batch of aligned rows in an epoch."""
        batches = self.epochs * math.ceil(context.aligned / self.batch_size)
        return dict.fromkeys(("embed", "update", "update_mixed", "project", "agree"), batches)

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the aligned rows."""
        return self.epochs

    def optimize(self, *, active: bool = False) -> SGD | Adam:
        """The optimizer of a passive party, or of the active one."""
        rate = self.active_lr if active and self.active_lr is not None else self.lr
        if self.optimizer == "sgd":
            return SGD(rate, self.momentum, self.weight_decay)
        return Adam(rate, weight_decay=self.weight_decay)


def check_principal(principal: int, width: int) -> None:
    """Check that an extractor has trainable dimensions."""
    if principal >= width:
        raise ValueError(
            f"params.pca_dim must be below params.embedding_dim = {width}, not {principal}"
        )


class LogitSum(nn.Module):
    """The sum of all parties' logits (B, M, Z) and a bias."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, Z)."""
        return x.sum(1) + self.bias


def top_model(active: Party[SplitConfig], inputs: int) -> nn.Module:
    """The network above the cut, with `inputs` inputs: embeddings (B, M, d) to logits (B, Z).

    Raises:
        MethodError: `top_model` is "sum", but `embedding_dim` is not the number of classes.
    """
    classes, cfg = active.context.classes, active.cfg
    if cfg.top_model == "sum" and cfg.embedding_dim != classes:
        raise MethodError(
            f"params.top_model=sum needs params.embedding_dim={classes}, the number of classes, "
            f"not {cfg.embedding_dim}"
        )
    with active.seeded("top"):
        return (
            LogitSum(classes)
            if cfg.top_model == "sum"
            else nn.Sequential(nn.Flatten(), classifier(inputs, classes))
        )


def learn(
    active: Party[Extraction], parts: Mapping[int, Tensor], number: int, step: int
) -> dict[int, dict[str, Tensor]]:
    """One step of the active party; the gradient (B, d) of the loss in each party's embeddings."""
    sent, y = joint(parts).requires_grad_(), labels(active, batch_indices(active, number, step))
    active.note("loss", active.minimize(lambda: active.context.task.loss(active.model(sent), y)))
    assert sent.grad is not None
    # as a decoded message has them: the same sums
    cuts = [cut.contiguous() for cut in sent.grad.unbind(1)]
    return {m: {"cut": cut} for m, cut in zip(parts, cuts, strict=True)}


def passes(
    fed: Federation,
    active: Party[Extraction],
    parties: Sequence[int],
    numbers: range,
    *,
    width: int,
    min_replies: int,
) -> None:
    """Passes of split learning over the aligned rows.

    Args:
        fed: the federation.
        active: the active party.
        parties: the passive parties that take part.
        numbers: the numbers of the epochs.
        width: dimension of the sent embeddings.
        min_replies: number of parties that must reply; otherwise the batch is skipped.
    """
    template = floats(active.cfg.batch_size, width)
    for number in numbers:
        for step in range(steps_per_pass(active)):
            which = {"number": number, "step": step}
            parts = fed.call(
                parties, "embed", shared=which, expect=template, min_replies=min_replies
            )
            if parts:
                fed.call(
                    parts,
                    "update",
                    shared=which,
                    each=learn(active, parts, number, step),
                    expect=None,
                )


def backward(party: Party[Extraction], *, number: int, step: int, cut: Tensor) -> None:
    """A party's step of split learning: along the gradient (B, d) of the loss by what it sent for
    this batch. Rows that it lacks do not count; if it lacks all, it makes no step.
    """
    here = held(party, number, step)
    if here.any():
        party.descend(aligned_batch(party, number, step), cut if here.all() else cut[here])


def exposed_gradients(
    active: Party[SplitConfig], contributions: Mapping[int, Tensor]
) -> dict[str, dict[int, Tensor]]:
    """The label-dependent messages that each party would receive: gradients (N_a, d) of the aligned
    rows at the current state, which does not change.
    """
    sent = joint(contributions).requires_grad_()
    with active.scratch():
        loss = (
            active.context.task.loss(active.model(sent), labels(active), "sum")
            / active.cfg.batch_size
        )
        (cut,) = torch.autograd.grad(loss, sent)
    kind = "logit gradients" if active.cfg.top_model == "sum" else "gradients"
    return {kind: dict(zip(contributions, cut.unbind(1), strict=True))}
