"""What all distillation methods have in common: one local training, one draw of public batches, one Adam.

A comparison is fair only where every method trains alike, so this is written once. A round is τ steps on own rows,
and whatever the method does then; one iteration is one local step. So runs of equal iterations make equally many
local steps, whatever each method's τ.

One Adam serves a client for its whole life: a prototype found that a new one for each stage costs more than any term
of these methods gains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from fedloom.core.context import Batches
from fedloom.core.message import Template
from fedloom.core.method import MethodConfig
from fedloom.core.optim import Adam
from fedloom.core.party import Party
from fedloom.protect.coding import Coding, decode, encode, like

UNANSWERED = "tests unanswered"
"""The note of a black box that could not answer for test rows."""


class DistillerConfig(MethodConfig):
    """The local training of a client. Defaults are those of FedAL's section VI-A."""

    tau: int = Field(1, ge=1)
    """Steps of each stage (τ)."""
    batch_size: int = Field(32, ge=1)
    """Rows of a batch, local and public (B)."""
    lr: float = Field(1e-3, gt=0)
    """Adam's rate at the clients (η_l); one Adam serves all stages."""
    clients_per_round: int | None = Field(None, ge=1)
    """Participants of a round; None for all."""

    @property
    def iterations_per_round(self) -> int:
        """τ: one iteration is one local step, and one transfer step where a method has such."""
        return self.tau

    @property
    def warnings(self) -> Mapping[str, str]:
        """What a black box notes."""
        return {UNANSWERED: "its black box fails on test rows; all classes count as equally probable there"}


class CodedConfig(DistillerConfig):
    """Of a method whose clients send logits: how these cross, and what comes back for them.

    A mean comes down as the answers went up, but with top-k as float16. Its largest entries alone would not do: a
    client that takes itself out of a mean of two would then take the wrong class for the other's in up to half of
    the rows.
    """

    coding: Coding = "float32"
    """How logits cross: as float32, float16, int8 (a scale for each row), or the largest `top_k` of a row. With top-k
    what comes down is float16."""
    top_k: int | None = Field(None, ge=1)
    """With coding = "top-k": how many logits of a row go up; what is left goes up as one number."""

    @model_validator(mode="after")
    def _belongs(self) -> CodedConfig:
        if (self.coding == "top-k") != (self.top_k is not None):
            raise ValueError('coding = "top-k" and top_k = a number belong together: give both or neither')
        return self

    def encoded(self, logits: Tensor) -> Any:
        """What goes up for logits (B, K)."""
        return encode(logits, self.coding, self.top_k)

    def decoded(self, message: Any, classes: int) -> Tensor:
        """Logits (B, K) from what went up."""
        return decode(message, self.coding, classes)

    def encoded_like(self, classes: int) -> Template:
        """Template of what goes up for a batch."""
        return like(self.batch_size, classes, self.coding, self.top_k)

    @property
    def coding_whole(self) -> Coding:
        """How rows cross of which every number counts, as of a mean, a gradient, cosines: with top-k, as float16."""
        return "float16" if self.coding == "top-k" else self.coding

    def encoded_whole(self, rows: Tensor) -> Any:
        """What crosses for rows (B, K) of any numbers, every one of them."""
        return encode(rows, self.coding_whole)

    def decoded_whole(self, message: Any, classes: int) -> Tensor:
        """Rows (B, K) from what crossed so."""
        return decode(message, self.coding_whole, classes)


ConfigT = TypeVar("ConfigT", bound=DistillerConfig)


class OnPublicRows(Party[ConfigT]):
    """A party that works on the public batches of a round: the same τ of B rows for all, by the shared seed."""

    def public_batches(self, t: int) -> tuple[Tensor, ...]:
        """The τ public batches (B, ...) of round t."""
        return self.public(t, steps=self.cfg.tau, size=self.cfg.batch_size)

    def public_numbers(self, t: int, i: int) -> Tensor:
        """The numbers (B,) of the rows in the i-th of them."""
        plan = self.public_rows(t, steps=self.cfg.tau, size=self.cfg.batch_size)
        return plan[i].to(self.site.device)


class Distiller(OnPublicRows[ConfigT]):
    """A client that learns from own rows and from what crosses. Its network may differ from all others."""

    STATE: ClassVar[tuple[str, ...]] = ("params", "buffers", "opt")

    def setup(self) -> None:
        """A page that keeps more than its network overrides this."""
        self.start(self.site.build())

    def start(self, network: nn.Module) -> None:
        """The client's network and its Adam."""
        self.network(network, Adam(self.cfg.lr))

    def local_train(self, *, t: int) -> None:
        """Round t's τ steps on own rows."""
        for x, y in self.own_batches(t):
            self.minimise(self.local_loss, x, y)

    def local_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy () on x (B, ...), y (B,)."""
        return F.cross_entropy(self.model(x), y)

    def own_batches(self, t: int) -> Batches:
        """The τ batches of own rows of round t."""
        return self.batches(t, steps=self.cfg.tau, size=self.cfg.batch_size)

    def outputs_of(self, x: Tensor) -> Tensor:
        """Constant logits (τ, B, K) on all batches x (τ, B, ...) of a stage, in one pass and in evaluation mode."""
        return self.infer(x.flatten(0, 1)).view(*x.shape[:2], -1)

    def rest(self) -> None:
        """Adam's memory to zero."""
        self.opt = {k: torch.zeros_like(v) for k, v in self.opt.items()}


def without(own: Tensor, mean: Tensor, n: int) -> Tensor:
    """The mean (...) of the n - 1 others, given that of all n and one's own."""
    return (n * mean - own) / (n - 1)


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of their own."""
    return {k: x.clone() for k, x in values.items()}
