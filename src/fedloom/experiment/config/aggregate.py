"""`[aggregate]`: how the means of a run's method are taken."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from fedloom import methods
from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.core.errors import ConfigError
from fedloom.core.method import Method
from fedloom.experiment.config.section import Section
from fedloom.protect.aggregators import Private, Robust, Secure
from fedloom.protect.noise import Draws


class NoiseConfig(Section):
    """`[aggregate.noise]`: differential privacy of each client as a whole, by noise at the server,
    which is trusted (DP-FedAvg).
    """

    sigma: float = Field(1.0, gt=0)
    """Noise multiplier σ: the noise has standard deviation σ C."""
    clip: float = Field(1.0, gt=0)
    """Clipping norm C of a reply's change from what the server sent, or of the reply."""
    delta: float = Field(1e-5, gt=1e-10, lt=1)
    """δ at which ε is reported."""


class AggregateConfig(Section):
    """`[aggregate]`: how means of clients' replies are taken, by every method that takes one."""

    rule: Literal["mean", "median", "trimmed", "krum", "multikrum", "clip", "centered"] = "mean"
    """`mean` is the method's own mean. The other rules count all clients alike and withstand some
    that send arbitrary numbers.
    """
    f: int = Field(1, ge=1)
    """Number of clients with arbitrary numbers that a rule withstands. It needs 2 f + 1 clients,
    Krum 2 f + 3.
    """
    secure: bool = False
    """Whether the server gets the mean and the sum of the weights by secure sums of at least 3
    participants, and no single message, if it follows the protocol; at nodes one that does not can
    learn them. A mean can hold rows.
    """
    colluders: int = Field(0, ge=0)
    """Number of clients that may help the server in a secure sum: more than half of the clients
    besides these must stay to the end.
    """
    noise: NoiseConfig | None = None
    """Noise on the mean; None for no noise."""

    @model_validator(mode="after")
    def _one(self) -> "AggregateConfig":
        if self.secure and self.rule != "mean":
            raise ValueError(
                f"rule = {self.rule!r} compares single replies, which secure = true hides: set "
                "one of the two"
            )
        if self.secure and self.noise is not None:
            raise ValueError(
                "noise needs single replies at the server, which clips each, and secure = true "
                "hides them: set one of the two"
            )
        if self.noise is not None and self.rule != "mean":
            raise ValueError(
                f"how far one client moves the result of rule = {self.rule!r} has no bound from "
                "which noise could hide it: set one of the two"
            )
        if self.colluders and not self.secure:
            raise ValueError("colluders is for secure sums: set secure = true, or leave it out")
        if self.rule == "mean" and self.f != 1:
            raise ValueError('f is for a robust rule: set rule, such as "median", or leave f out')
        return self

    def aggregator(self, draws: Callable[[Sequence[int]], Draws] | None = None) -> Aggregator:
        """The aggregator of these settings; `draws` is the server's noise by key."""
        if self.noise is not None:
            return Private(self.noise.sigma, self.noise.clip, draws)
        if self.secure:
            return Secure(self.colluders)
        return MEAN if self.rule == "mean" else Robust(self.rule, self.f)


def check_aggregate(section: AggregateConfig, method: Method, cfg: Any, participants: int) -> None:
    """Check that a method with these settings takes means that the section applies to.

    Raises:
        ConfigError: it does not, or a round has too few participants.
    """
    how = section.aggregator()
    if how == MEAN:
        return
    if not method.client.MEANS:
        able = [name for name, one in methods.registry().items() if one.client.MEANS]
        raise ConfigError(
            f"aggregate: {method.name} takes no mean of clients' replies: leave the section out, "
            f"or use one of {', '.join(able)}"
        )
    if not cfg.exchanges:
        raise ConfigError(
            f"aggregate: {method.name} with these settings takes no mean: leave the section out"
        )
    if method.server is None and how.hidden:
        raise ConfigError(
            f"aggregate: the peers of {method.name} take means themselves, and see what they "
            "combine: set a rule only"
        )
    if reason := cfg.refuses(how):
        raise ConfigError(f"aggregate: {how} does not go with {method.name}: {reason}")
    if method.server is not None and participants < how.least:
        raise ConfigError(
            f"aggregate: {how} needs {how.least} participants in a round, not {participants}: "
            "add clients" + (", or lower aggregate.f" if section.f > 1 else "")
        )
