"""Functions that the pages of vertical methods call: extractors, aligned rows, split learning, self-supervision.

Vertical parties hold different columns of the same people. Each embeds its columns with an extractor. The active party
has the labels of the aligned people and classifies the embeddings of all parties; its own columns are those of party 0,
which runs beside it. Every function that takes a party works on that party alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.context import aligned_plan
from fedloom.core.errors import MethodError
from fedloom.core.federation import Federation
from fedloom.core.message import floats
from fedloom.core.method import MethodConfig
from fedloom.core.optim import SGD, Adam, Optimiser, Rate
from fedloom.core.party import Party

PRINCIPAL_ROWS = 2000
"""Maximum number of rows for estimating principal components."""
HIDDEN = 64
"""Units of the classifier's hidden layers."""


# -- networks ------------------------------------------------------------------------------------------------------


class Extractor(nn.Module):
    """A network and the centring of its outputs: (B, ...) to (B, d).

    Centring is a BatchNorm layer without weights. Without it all embeddings of an untrained network share one large
    mean. Proto-EVFL measures its statistics on the party's rows before anything is sent; split learning uses those of
    each batch, and their running means for prediction.
    """

    def __init__(
        self,
        body: nn.Module,
        width: int,
        centred: bool,
        principal: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """`body` gives (B, width); `principal`, if any, gives numbers that come first; `head` is for the page."""
        super().__init__()
        self.principal = principal
        self.channels_last = getattr(body, "channels_last", False)
        self.body = body
        self.centre = nn.BatchNorm1d(width, affine=False) if centred else nn.Identity()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (B, d)."""
        out: Tensor = self.centre(self.body(x))
        return out if self.principal is None else torch.cat([self.principal(x), out], -1)


class PrincipalComponents(nn.Module):
    """Principal components of rows, each scaled to variance 1: (B, ...) to (B, k), without gradient.

    Args:
        x: (n, ...) the rows to estimate them from; with none, all components are 0 until a state is loaded.
        k: their number. Components without variance are 0.
    """

    def __init__(self, x: Tensor, k: int) -> None:
        super().__init__()
        flat = (x if len(x) else x.new_zeros(1, *x.shape[1:])).flatten(1).double()
        mean = flat.mean(0)
        variances, directions = torch.linalg.eigh(torch.cov((flat - mean).T, correction=0).reshape(len(mean), -1))
        variances, directions = variances.flip(0)[:k], directions.flip(1)[:, :k]
        scale = torch.where(variances > 1e-6 * variances[0], variances.clamp(min=0).rsqrt(), 0.0)
        self.register_buffer("mean", mean.to(x))
        self.register_buffer("directions", F.pad(directions * scale, (0, k - len(scale))).to(x))

    def forward(self, x: Tensor) -> Tensor:
        """Components (B, k)."""
        out: Tensor = (x.flatten(1) - self.mean) @ self.directions  # type: ignore[operator]
        return out


def extractor(party: Party[Any], head: nn.Module | None = None) -> Extractor:
    """A party's extractor as its config describes it, with a head that stays at the party if the page needs one."""
    cfg = party.cfg
    return Extractor(party.context.build(), cfg.learnt, cfg.centred, principal_components(party), head)


def principal_components(party: Party[Any]) -> PrincipalComponents | None:
    """The principal components of a sample of the party's rows, if `principal` > 0."""
    k = party.cfg.principal
    return PrincipalComponents(sample_rows(party, PRINCIPAL_ROWS, "principal rows"), k) if k else None


def classifier(inputs: int, classes: int) -> nn.Sequential:
    """MLP with three layers: (B, inputs) to logits (B, Z)."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


# -- rows of a passive party ---------------------------------------------------------------------------------------


def aligned_rows(party: Party[Any]) -> Tensor:
    """Inputs (N_a, ...) of the aligned people, in the order that all parties share."""
    return party.data.every[: party.context.aligned]


def aligned_batch(party: Party[Any], number: int, step: int) -> Tensor:
    """Inputs (B, ...) of one step of pass `number` over the aligned rows: the same people at every party."""
    return party.context.aligned_batch(number, step, size=party.cfg.batch_size)


def sample_rows(party: Party[Any], size: int, purpose: str, t: int = 0, *, aligned: bool = True) -> Tensor:
    """At most `size` different rows (n, ...) for this purpose and round; without the aligned ones if not `aligned`."""
    rows, first = party.data, 0 if aligned else party.context.aligned
    if len(rows) - first <= size:
        return rows.every[first:]
    which = party.stream(purpose, t).choice(len(rows) - first, size, replace=False) + first
    return rows.x(torch.from_numpy(which).to(party.context.device))


def calibrate(party: Party[Any]) -> None:
    """Measure the statistics of the centring on all rows of the party, with the extractor as it is."""
    if not party.cfg.centred:
        return
    if any(k.startswith("body.") for k in party.buffers):  # normalisation layers inside measure theirs first
        with torch.no_grad():
            for x in party.data.every.chunk(max(1, len(party.data) // 256)):
                party.model(x)
    buffers, eps = party.buffers, float(party.net.module.centre.eps)  # type: ignore[union-attr, arg-type]
    mean, var = buffers["centre.running_mean"], buffers["centre.running_var"]
    raw = party.infer(party.data.every)[:, party.cfg.principal :] * (var + eps).sqrt() + mean
    party.buffers = {
        **buffers,
        "centre.running_mean": raw.mean(0),
        "centre.running_var": raw.var(0, correction=min(1, len(raw) - 1)),
    }


def embeddings(party: Party[Any], on: str) -> Tensor:
    """Embeddings (n, ...) for a joint evaluation: of the test rows named `on`, or, if `on` is "aligned", of the aligned
    people as a pass sends them, with the centring of each batch."""
    if on != "aligned":
        return party.infer(party.context.tests[on].every)
    plan = aligned_plan(party.context.seed, 0, party.context.aligned, party.cfg.batch_size)
    with party.scratch():
        outputs = [party.forward(aligned_batch(party, 0, step)) for step in range(len(plan))]
    order = plan.flatten()[: party.context.aligned].argsort()  # a pass begins with each of them once
    return torch.cat(outputs)[order.to(party.context.device)]


# -- the active party: its labels and its classifier ---------------------------------------------------------------


def steps_per_pass(active: Party[Any]) -> int:
    """Number of batches in a pass over the aligned rows."""
    return math.ceil(active.context.aligned / int(active.cfg.batch_size))


def batch_indices(active: Party[Any], number: int, step: int) -> Tensor:
    """Indices (B,) of the aligned rows in a step of pass `number`: the same at every party."""
    context = active.context
    return aligned_plan(context.seed, number, context.aligned, active.cfg.batch_size)[step].to(context.device)


def labels(active: Party[Any], rows: Tensor | None = None) -> Tensor:
    """Classes (B,) of these aligned rows, or of all of them (N_a,)."""
    context = active.context
    return active.data.y(torch.arange(context.aligned, device=context.device) if rows is None else rows)


def joint(parts: Mapping[int, Tensor]) -> Tensor:
    """Embeddings (n, M, d) from those of each party (n, d)."""
    return torch.stack(list(parts.values()), 1)


# -- split learning ------------------------------------------------------------------------------------------------


class SplitConfig(MethodConfig):
    """Settings of split learning, and of the last phase of methods that end with it."""

    width: int = Field(64, ge=1)
    """Dimension of an embedding (d)."""
    principal: int = Field(0, ge=0)
    """How many of them are fixed, whitened principal components of the own rows. They are linear in the columns: a
    receiver that knows some raw rows can solve for those columns of the others."""
    centred: bool = True
    """Whether an extractor ends with a centring layer."""
    batch_size: int = Field(64, ge=2)
    """Batch size. An epoch's last batch is filled with rows from the epoch's start."""
    epochs: int = Field(3, ge=1)
    """Epochs over the aligned rows in a round."""
    optimiser: Literal["adamw", "sgd"] = "adamw"
    """Optimiser of all parties."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of all parties."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum of SGD."""
    weight_decay: float = Field(1e-4, ge=0)
    """Weight decay: decoupled with AdamW, L2 regularisation with SGD."""
    top: Literal["network", "sum"] = "network"
    """The active party's model: a network on all embeddings, or the sum of the parties' logits and a bias."""

    @model_validator(mode="after")
    def _check_principal(self) -> Self:
        check_principal(self.principal, self.width)
        return self

    @property
    def learnt(self) -> int:
        """Number of trained dimensions of an embedding."""
        return self.width - self.principal

    @property
    def iterations_per_round(self) -> int:
        """Epochs over the aligned rows."""
        return self.epochs

    def optimise(self) -> Optimiser:
        """The optimiser of every party."""
        if self.optimiser == "sgd":
            return SGD(self.lr, self.momentum, self.weight_decay)
        return Adam(self.lr, weight_decay=self.weight_decay)


def check_principal(principal: int, width: int) -> None:
    """Check that an extractor has trainable dimensions."""
    if principal >= width:
        raise ValueError(f"params.principal must be below params.width = {width}, not {principal}")


class LogitSum(nn.Module):
    """The sum of all parties' logits (B, M, Z) and a bias."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, Z)."""
        return x.sum(1) + self.bias


def top_model(active: Party[Any], inputs: int) -> nn.Module:
    """The network above the cut, with `inputs` inputs: embeddings (B, M, d) to logits (B, Z).

    Raises:
        MethodError: `top` is "sum", but `width` is not the number of classes.
    """
    classes, cfg = active.context.classes, active.cfg
    if cfg.top == "sum" and cfg.width != classes:
        raise MethodError(f"params.top=sum needs params.width={classes}, the number of classes, not {cfg.width}")
    with active.seeded("top"):
        return LogitSum(classes) if cfg.top == "sum" else nn.Sequential(nn.Flatten(), classifier(inputs, classes))


def learn(active: Party[Any], parts: Mapping[int, Tensor], number: int, step: int) -> dict[int, dict[str, Tensor]]:
    """One step of the active party; the gradient (B, d) of the loss in each party's embeddings."""
    sent, y = joint(parts).requires_grad_(), labels(active, batch_indices(active, number, step))
    active.note("loss", active.minimise(lambda: F.cross_entropy(active.model(sent), y)))
    assert sent.grad is not None
    cuts = [cut.contiguous() for cut in sent.grad.unbind(1)]  # as a decoded message has them: the same sums
    return {m: {"cut": cut} for m, cut in zip(parts, cuts, strict=True)}


def passes(
    fed: Federation, active: Party[Any], parties: Sequence[int], numbers: range, *, width: int, min_replies: int
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
            parts = fed.call(parties, "embed", shared=which, expect=template, min_replies=min_replies)
            if parts:
                fed.call(parts, "update", shared=which, each=learn(active, parts, number, step), expect=None)


def exposed_gradients(active: Party[Any], contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
    """The label-dependent messages that each party would receive: gradients (N_a, d) of the aligned rows at the current
    state, which does not change."""
    sent = joint(contributions).requires_grad_()
    with active.scratch():
        loss = F.cross_entropy(active.model(sent), labels(active), reduction="sum") / active.cfg.batch_size
        (cut,) = torch.autograd.grad(loss, sent)
    kind = "logit gradients" if active.cfg.top == "sum" else "gradients"
    return {kind: dict(zip(contributions, cut.unbind(1), strict=True))}


# -- self-supervision: p, z (B, d) predictions and projections -----------------------------------------------------


def disagreement(p: Tensor, z: Tensor) -> Tensor:
    """SimSiam's D () of equations 1 and 3: minus the mean cosine of predictions and projections, held constant."""
    return -F.cosine_similarity(p, z.detach(), dim=-1).mean()


def siamese(p: tuple[Tensor, Tensor], z: tuple[Tensor, Tensor]) -> Tensor:
    """SimSiam's equation 4 (): each view predicts the other's projection."""
    return disagreement(p[0], z[1]) / 2 + disagreement(p[1], z[0]) / 2


def heads(inputs: int, width: int) -> tuple[nn.Sequential, nn.Sequential]:
    """A projector and a predictor."""
    return projector(inputs, width), predictor(width)


def projector(inputs: int, width: int) -> nn.Sequential:
    """Features (B, inputs) to projections (B, width)."""
    return nn.Sequential(*_normalised(inputs, width), nn.ReLU(), *_normalised(width, width))


def predictor(width: int) -> nn.Sequential:
    """Projections (B, width) to predictions (B, width), through a bottleneck."""
    return nn.Sequential(*_normalised(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width))


def _normalised(inputs: int, outputs: int) -> list[nn.Module]:
    """A layer without bias and a BatchNorm that keeps no statistics, since heads are not used for prediction."""
    return [nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs, track_running_stats=False)]


def views(x: Tensor, cfg: Any) -> tuple[Tensor, Tensor]:
    """Two views of a batch of pictures (B, C, H, W), or of rows of a table (B, F); the table's first one is x itself.

    They come from torch's generator, which engines seed for each call. `cfg` has `shift`, `noise`, `erase`, `corrupt`.
    """
    return (picture_view(x, cfg), picture_view(x, cfg)) if x.dim() == 4 else (x, corrupted(x, cfg.corrupt))


def picture_view(x: Tensor, cfg: Any) -> Tensor:
    """A view (B, C, H, W) of pictures."""
    x = erased(shifted(x, cfg.shift), cfg.erase)
    noise: Tensor = cfg.noise * torch.randn_like(x)
    return x + noise


def shifted(x: Tensor, share: float) -> Tensor:
    """Each picture moved vertically and horizontally by its own offset, with its edge repeated outwards."""
    rows, _, height, width = x.shape
    down, right = math.ceil(height * share), math.ceil(width * share)
    wide = F.pad(x, (right, right, down, down), mode="replicate")
    top = torch.randint(2 * down + 1, (rows, 1), device=x.device) + torch.arange(height, device=x.device)
    left = torch.randint(2 * right + 1, (rows, 1), device=x.device) + torch.arange(width, device=x.device)
    row = torch.arange(rows, device=x.device)
    return wide[row[:, None, None], :, top[:, :, None], left[:, None, :]].movedim(-1, 1)


def erased(x: Tensor, share: float) -> Tensor:
    """Each picture with one rectangle set to the mean of its channel."""

    def covered(side: int) -> Tensor:
        """Positions of a side (B, side) that an interval of random length covers."""
        length = torch.randint(math.ceil(side * share) + 1, (len(x), 1), device=x.device)
        start = (torch.rand(len(x), 1, device=x.device) * (side - length + 1)).floor()
        position = torch.arange(side, device=x.device)
        return (position >= start) & (position < start + length)

    hole = covered(x.shape[2])[:, None, :, None] & covered(x.shape[3])[:, None, None, :]
    return torch.where(hole, x.mean((2, 3), keepdim=True), x)


def corrupted(x: Tensor, share: float) -> Tensor:
    """Each row (B, F) with this share of its columns, at least one, replaced by values of random rows of the batch."""
    which = torch.rand_like(x).argsort(1) < max(1, int(share * x.shape[1]))
    return torch.where(which, x.gather(0, torch.randint(len(x), x.shape, device=x.device)), x)


@dataclass(frozen=True)
class ScheduledOptimiser:
    """The optimiser of a config with the learning rate in its state, so that a party can change it."""

    cfg: SplitConfig

    def slots(self, flat: Tensor) -> dict[str, Tensor]:
        """The slots of the optimiser and the rate ()."""
        rate = torch.tensor(self.cfg.lr, dtype=torch.float64, device=flat.device)
        return {**self.cfg.optimise().slots(flat), "rate": rate}

    def tick(self, slots: dict[str, Tensor]) -> tuple[Rate, ...]:
        """The rate, and the other numbers of this step."""
        rate = float(slots["rate"])
        return rate, *_at(self.cfg, rate).tick(slots)

    def move(self, w: Tensor, g: Tensor, slots: dict[str, Tensor], *rates: Rate) -> None:
        """A step of the optimiser at this rate."""
        rate, *others = rates
        _at(self.cfg, float(rate)).move(w, g, slots, *others)


@lru_cache(maxsize=64)
def _at(cfg: SplitConfig, rate: float) -> Optimiser:
    return cfg.model_copy(update={"lr": rate}).optimise()


def at_rate(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """These optimiser slots with another rate."""
    return {**opt, "rate": torch.full_like(opt["rate"], rate)}


def reset(opt: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
    """Optimiser slots set to zero, with this rate."""
    return at_rate({k: torch.zeros_like(x) for k, x in opt.items()}, rate)
