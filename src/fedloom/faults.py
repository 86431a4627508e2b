"""Faults on purpose: parties that drop out, raise, answer rubbish, or answer too late.

The draw for one call depends on (seed, round, call, party) alone, so a run with faults is as repeatable as one
without.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from fedloom import message
from fedloom.errors import ConfigError
from fedloom.message import Tree
from fedloom.rng import stream


@dataclass(frozen=True)
class Faults:
    """The probability of each fault, for every call of a party.

    Attributes:
        dropout: the party is not there: it neither works nor answers.
        crash: it raises while it works; its state stays as before the call.
        nan, inf: it works, but a number in each tensor of its answer is NaN or infinite.
        shape: it works, but answers a tensor of another shape.
        type: it works, but answers something that is not a message.
        late: it works, but the answer comes after the deadline.
    """

    dropout: float = 0.0
    crash: float = 0.0
    nan: float = 0.0
    inf: float = 0.0
    shape: float = 0.0
    type: float = 0.0
    late: float = 0.0

    def __post_init__(self) -> None:
        values = asdict(self)
        bad = [k for k, p in values.items() if not 0 <= p <= 1]
        if bad or sum(values.values()) > 1:
            raise ConfigError(
                "faults are probabilities: each in [0, 1] and at most 1 together, not "
                f"{ {k: values[k] for k in bad} or sum(values.values()) }"
            )

    def draw(self, seed: int, round: int, call: int, party: int) -> str | None:
        """The fault of this call at this party, or None."""
        if self == NONE:
            return None
        u = stream(seed, "faults", round, call, party).random()
        for name, probability in asdict(self).items():
            if u < probability:
                return name
            u -= probability
        return None


NONE = Faults()


class Crash(Exception):
    """Raised at a party by the `crash` fault."""


def spoil(reply: Tree, fault: str) -> object:
    """What a party with this fault answers instead of `reply`."""
    if fault == "type":
        return object()
    if fault == "shape":
        return message.map_tensors(lambda x: torch.cat([x.flatten(), x.new_zeros(1)]), reply)
    return message.map_tensors(lambda x: _with_first(x, float(fault)), reply)


def _with_first(x: Tensor, value: float) -> Tensor:
    if x.is_floating_point() and x.numel():
        x = x.clone()
        x.view(-1)[0] = value
    return x
