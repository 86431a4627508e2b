"""What all methods whose parties hold different columns have in common: one extractor, one classifier, one evaluation.

A `Holder` has columns of all people that it knows, and no labels. It embeds them with an extractor. The home is the
active party: it has the labels of the aligned people, and classifies what all holders embed. Holder 0 lives in its
house: those are the active party's own columns.

An extractor ends by centring: a BatchNorm without weights. Without it all embeddings of an untrained network share one
large mean. Proto-EVFL measures its statistics on the own rows before anything is sent; split learning takes those of
each batch, and their running means to predict.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.context import aligned_plan
from fedloom.core.method import MethodConfig
from fedloom.core.optim import Optimiser
from fedloom.core.party import Party

PRINCIPAL_ROWS = 2000
"""From so many own rows the principal components are taken."""
HIDDEN = 64
"""Units of the classifier's hidden layers."""


class HolderConfig(MethodConfig):
    """What extractors and batches are like."""

    width: int = Field(64, ge=1)
    """Numbers of an embedding (d)."""
    principal: int = Field(0, ge=0)
    """So many of them are the first principal components of the own rows, whitened, which no training moves. They are
    linear in the columns: who gets them, and knows some raw rows, can solve for what they hold of the others."""
    centred: bool = True
    """Whether an extractor ends by centring."""
    batch_size: int = Field(64, ge=2)
    """Rows of a batch. A pass is made of full batches, topped up from its own start."""

    @model_validator(mode="after")
    def _some_learnt(self) -> Self:
        if self.principal >= self.width:
            raise ValueError(f"principal must leave some of the {self.width} numbers to learn, so be below width")
        return self

    @property
    def learnt(self) -> int:
        """Numbers of an embedding that the network gives."""
        return self.width - self.principal


ConfigT = TypeVar("ConfigT", bound=HolderConfig)


class Extractor(nn.Module):
    """A body, and perhaps the centring of what it gives: (B, ...) to (B, d)."""

    def __init__(
        self,
        body: nn.Module,
        width: int,
        centred: bool,
        principal: nn.Module | None = None,
        head: nn.Module | None = None,
    ) -> None:
        """`body` gives (B, width); `principal`, if any, numbers that come first; `head` is for the page to use."""
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


class Principal(nn.Module):
    """Principal components of rows, each of variance 1: (B, ...) to (B, k), constants.

    Args:
        x: (n, ...) the rows that they are of; without any all components are 0, until a state is loaded.
        k: how many. Where there are fewer that vary, the rest is 0.
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


def classifier(inputs: int, classes: int) -> nn.Sequential:
    """MLP-3: (B, inputs) to logits (B, Z)."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)
    )


class Holder(Party[ConfigT]):
    """A party with columns and no labels. Pages subclass it; their `setup` calls `extractor` with an optimiser."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt")

    def extractor(self, optimiser: Optimiser, head: nn.Module | None = None) -> None:
        """The network of this party, with a head of its own beside, if the page has use for one."""
        cfg = self.cfg
        self.network(Extractor(self.site.build(), cfg.learnt, cfg.centred, self.components(), head), optimiser)

    def components(self) -> Principal | None:
        """The principal components of some own rows, if they are wanted."""
        if not self.cfg.principal:
            return None
        return Principal(self.some_rows(PRINCIPAL_ROWS, "principal rows"), self.cfg.principal)

    def some_rows(self, most: int, purpose: str, t: int = 0, *, aligned: bool = True) -> Tensor:
        """At most so many own inputs (n, ...), drawn for this purpose and round; if not `aligned`, of the others."""
        rows, first = self.data, 0 if aligned else self.site.aligned
        if len(rows) - first <= most:
            return rows.every[first:]
        which = self.stream(purpose, t).choice(len(rows) - first, most, replace=False) + first
        return rows.x(torch.from_numpy(which).to(self.site.device))

    def calibrate(self) -> None:
        """Measure the centring's statistics on the own rows with the extractor as it is."""
        if not self.cfg.centred:
            return
        if any(k.startswith("body.") for k in self.buffers):  # a normalisation within has statistics to measure first
            with torch.no_grad():
                for x in self.data.every.chunk(max(1, len(self.data) // 256)):
                    self.model(x)
        found, eps = self.buffers, float(self.net.module.centre.eps)  # type: ignore[union-attr, arg-type]
        mean, var = found["centre.running_mean"], found["centre.running_var"]
        raw = self.infer(self.data.every)[:, self.cfg.principal :] * (var + eps).sqrt() + mean
        self.buffers = {
            **found,
            "centre.running_mean": raw.mean(0),
            "centre.running_var": raw.var(0, correction=min(1, len(raw) - 1)),
        }

    def aligned_rows(self) -> Tensor:
        """Inputs (N_a, ...) of the people whom all parties hold, in the order of all."""
        return self.data.every[: self.site.aligned]

    def contribution(self, *, on: str) -> Tensor:
        """For a joint evaluation: embeddings (n, d); of the aligned people as they are sent to learn from."""
        return self._forwarded() if on == "aligned" else self.infer(self.site.tests[on].every)

    def _forwarded(self) -> Tensor:
        """What `forward` gives for the aligned people (N_a, ...), batch by batch: with centring by the batch."""
        size = self.cfg.batch_size
        plan = aligned_plan(self.site.seed, 0, self.site.aligned, size)
        with self.scratch():
            outputs = [self.forward(self.site.aligned_batch(0, step, size=size)) for step in range(len(plan))]
        order = plan.flatten()[: self.site.aligned].argsort()  # a pass begins with each of them once
        return torch.cat(outputs)[order.to(self.site.device)]


class Home(Party[ConfigT]):
    """The active party's labels and classifier. Pages subclass it; their network takes embeddings (B, M, d)."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt")

    def steps(self) -> int:
        """Batches of a pass over the aligned rows."""
        return -(-self.site.aligned // self.cfg.batch_size)

    def rows(self, number: int, step: int) -> Tensor:
        """Which aligned rows (B,) a step of pass `number` takes: the same everywhere."""
        return aligned_plan(self.site.seed, number, self.site.aligned, self.cfg.batch_size)[step].to(self.site.device)

    def labels(self, rows: Tensor | None = None) -> Tensor:
        """The classes (B,) of these aligned rows, or of all (N_a,)."""
        return self.data.y(torch.arange(self.site.aligned, device=self.site.device) if rows is None else rows)

    def decide(self, contributions: Mapping[int, Any]) -> Tensor:
        """Logits (n, Z) from the embeddings (n, d) of each party."""
        return self.infer(torch.stack(list(contributions.values()), 1))

    def exposed(self, contributions: Mapping[int, Tensor]) -> dict[str, dict[int, Tensor]]:
        """For measuring what leaks: what each party would be told next that depends on labels, by kind and party.

        `contributions` are the embeddings (N_a, d) of the aligned people. Kinds are "gradients" (N_a, d) of the loss by
        what was sent, and "prototypes" (Z, d), zeros for a class that has none. It changes no state.
        """
        return {}
