"""Fault injection: parties that drop out, raise, send invalid replies, or reply too late.

The draw for a call depends only on (seed, round, call, party), so a run with faults is as
reproducible as one without.
"""

from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from fedloom.core import message
from fedloom.core.message import Tree
from fedloom.core.rng import stream


class Faults(BaseModel):
    """The probability of each fault in every call of a party; their sum is at most 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dropout: float = Field(0.0, ge=0, le=1)
    """The party is absent: it neither runs the call nor replies."""
    crash: float = Field(0.0, ge=0, le=1)
    """The party raises an error; its state is as before the call."""
    nan: float = Field(0.0, ge=0, le=1)
    """One number in each float tensor of the reply is NaN; a reply without float tensors is
    unchanged.
    """
    inf: float = Field(0.0, ge=0, le=1)
    """One number in each float tensor of the reply is infinite; a reply without float tensors is
    unchanged.
    """
    shape: float = Field(0.0, ge=0, le=1)
    """The tensors of the reply have wrong shapes."""
    type: float = Field(0.0, ge=0, le=1)
    """The reply is not a message."""
    late: float = Field(0.0, ge=0, le=1)
    """The reply arrives after the deadline."""
    liars: tuple[int, ...] = ()
    """Clients that send false replies: see `lie`. They have no other fault."""
    lie: Literal["flip", "huge", "labels"] = "flip"
    """The part that is false: the sign of all numbers of a reply, their size (a million times), or
    the labels of the liars' own training rows (class k of K becomes K - 1 - k), from which they
    then train honestly.
    """

    @model_validator(mode="after")
    def _together(self) -> "Faults":
        total = sum(self._probabilities.values())
        if total > 1:
            raise ValueError(f"the probabilities must sum to at most 1, not {total:g}")
        return self

    @property
    def _probabilities(self) -> dict[str, float]:
        return {name: value for name, value in vars(self).items() if isinstance(value, float)}

    def mislabels(self, party: int) -> bool:
        """Whether this client trains on false labels."""
        return self.lie == "labels" and party in self.liars

    def draw(self, seed: int, round: int, call: int, party: int) -> str | None:
        """The fault of this party in this call, or None."""
        if party in self.liars:
            return None if self.lie == "labels" else self.lie
        if not any(self._probabilities.values()):
            return None
        u = stream(seed, "faults", round, call, party).random()
        for name, probability in self._probabilities.items():
            if u < probability:
                return name
            u -= probability
        return None


class Crash(Exception):
    """Raised at a party by the `crash` fault."""


def spoil(reply: Tree, fault: str) -> object:
    """The reply after this fault."""
    if fault == "type":
        return object()
    if fault in ("flip", "huge"):
        factor = -1.0 if fault == "flip" else 1e6
        return message.map_tensors(lambda x: x * factor if x.is_floating_point() else x, reply)
    if fault == "shape":
        return message.map_tensors(lambda x: torch.cat([x.flatten(), x.new_zeros(1)]), reply)

    def spoiled(x: Tensor) -> Tensor:
        if x.is_floating_point() and x.numel():
            x = x.clone(memory_format=torch.contiguous_format)
            x.view(-1)[0] = float(fault)
        return x

    return message.map_tensors(spoiled, reply)
