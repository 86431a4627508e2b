"""What all methods whose clients share weights have in common: one local training, one fine-tuning, one split in two.

A comparison is fair only where every method trains alike, so this is written once. A client's network has a body,
which is shared, and a head (its module `head`), which with `personal_head` never leaves it. With a personal head the
local training alternates: passes that move the head alone, then passes that move the body alone. Without, all
weights move together and all are shared.

Every local training begins with the optimiser's memory at zero: momentum belongs to a path, and averaging leaves it.
BatchNorm's statistics are of the client's own rows and stay with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import ModelError
from fedloom.core.federation import Federation
from fedloom.core.message import Template, Tree, floats, weighted_mean
from fedloom.core.optim import SGD
from fedloom.methods.adapter import Adapter, AdapterConfig

TUNED = "tuned"
"""The way of evaluation after fine-tuning on one's own rows."""
TUNING = 2**32 - 1
"""In place of a pass's number, counted down: the shuffles of fine-tuning are those of no training pass."""


class LearnerConfig(AdapterConfig):
    """The local training of a client. Defaults are those of AFIND+'s experiments."""

    epochs: int = Field(5, ge=1)
    """Passes over the own rows in a round (K_w)."""
    head_epochs: int = Field(1, ge=0)
    """With a personal head: passes before them that move the head alone (K_β)."""
    batch_size: int = Field(128, ge=1)
    """Rows of a batch. A pass is made of full batches, topped up from its own start."""
    lr: float = Field(0.01, gt=0)
    """Rate of SGD."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of SGD."""
    personal_head: bool = True
    """Whether a client keeps its last layer to itself."""
    finetune_epochs: int = Field(1, ge=0)
    """Passes over the own rows that move all weights, before the evaluation called "tuned"; 0 for none."""

    @property
    def iterations_per_round(self) -> int:
        """Passes over the own rows."""
        return self.epochs

    @property
    def ways(self) -> tuple[str, ...]:
        """After steps of adaptation, and after fine-tuning, if there is any."""
        return (*super().ways, TUNED) if self.finetune_epochs else super().ways


ConfigT = TypeVar("ConfigT", bound=LearnerConfig)


class Learner(Adapter[ConfigT]):
    """A client that trains and shares weights. Pages subclass it; their `setup` begins with `start()`."""

    def start(self) -> None:
        """The network that all begin with, and its optimiser."""
        self.network(self.site.build(), SGD(self.cfg.lr, self.cfg.momentum))
        shared_names(self.params, self.cfg)

    def setup(self) -> None:
        """A page that keeps more than its network overrides this."""
        self.start()

    def local_update(self, t: int) -> None:
        """Round t's training on own rows, from the weights as they are."""
        cfg = self.cfg
        self.rest()
        if not cfg.personal_head:
            self.passes(range(t * cfg.epochs, (t + 1) * cfg.epochs), None)
            return
        body, first = shared_names(self.params, cfg), t * (cfg.head_epochs + cfg.epochs)
        self.passes(range(first, first + cfg.head_epochs), [k for k in self.params if k not in body])
        first += cfg.head_epochs
        self.passes(range(first, first + cfg.epochs), body)

    def passes(self, numbers: range, only: Sequence[str] | None) -> None:
        """One pass over the own rows for each number, which names its shuffle; `only` these parameters move."""
        for n in numbers:
            self.train(self.loss, self.epochs(n, size=self.cfg.batch_size), only=only)

    def rest(self) -> None:
        """Momentum to zero."""
        self.opt = {k: torch.zeros_like(v) for k, v in self.opt.items()}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy () on x (B, ...), y (B,)."""
        return F.cross_entropy(self.model(x), y)

    def shared(self) -> dict[str, Tensor]:
        """The weights that others may see, by name."""
        return {k: self.params[k] for k in shared_names(self.params, self.cfg)}

    def fine_tune(self) -> None:
        """`finetune_epochs` passes over the own rows that move all weights."""
        self.rest()
        self.passes(range(TUNING - self.cfg.finetune_epochs, TUNING), None)

    def prepare(self, *, way: str, handout: Mapping[str, Tree]) -> None:
        """Before an evaluation: take the server's weights, if there is one; adapt or fine-tune, if asked."""
        super().prepare(way=way, handout=handout)
        if way == TUNED:
            self.fine_tune()

    def models(self, inbox: Mapping[str, Mapping[str, Any]]) -> dict[int, dict[str, Tensor]]:
        """The own shared weights, and those of the neighbours that answered, by number."""
        return {self.site.id: self.shared(), **{int(j): reply["weights"] for j, reply in inbox.items()}}

    def average(self, models: Mapping[int, Mapping[str, Tensor]], weights: Mapping[int, float]) -> None:
        """Take over the mean of those models that have a weight, weighed by it, and note whose they are."""
        mean = weighted_mean([dict(models[j]) for j in weights], list(weights.values()))
        self.adopt(mean)  # type: ignore[arg-type]
        total = sum(weights.values())
        self.note_mixing({j: weight / total for j, weight in weights.items()})

    def note_mixing(self, weights: Mapping[int, Tensor | float]) -> None:
        """Note with which weights whose models were mixed, by their numbers."""
        row = torch.zeros(self.site.parties, dtype=torch.float64)
        for i, weight in weights.items():
            row[i] = float(weight)
        self.note("mixing", row)


def shared_names(params: Mapping[str, Tensor], cfg: LearnerConfig) -> list[str]:
    """Names of the weights that clients share: all, or all but those of the module `head`.

    Raises:
        ModelError: the network is not in two parts, as a personal head needs.
    """
    if not cfg.personal_head:
        return list(params)
    body = [k for k in params if not k.startswith("head.")]
    if not body or len(body) == len(params):
        what = "has nothing but a head" if not body else "has no module named `head`"
        raise ModelError(
            f"personal_head keeps a network's last layer, its module `head`, at each client, but this network {what}: "
            "take another in models.pool, or set params.personal_head=false"
        )
    return body


def weights_like(fed: Federation, cfg: LearnerConfig) -> dict[str, Template]:
    """Template of the shared weights in a message."""
    return {k: floats(*fed.form[k].shape) for k in shared_names(fed.form, cfg)}
