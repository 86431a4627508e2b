"""Gaussian noise and random subsets for differential privacy, and the budget that each release is
charged to.

A guarantee holds only if nobody can guess the draws. A party with a secret, such as one at a node,
takes them fresh from the generator of the operating system. Without a secret, as in a simulation on
one machine, they come from the run's seed: the run can be repeated, has the same statistics, and
protects nobody.

Fresh draws differ each time, also for the same content: equal replies to two questions would tell
that their contents are equal, which may depend on a single row. Averaging many replies is what the
budget bounds.

The last bits of a floating-point number can tell which sums are possible (I. Mironov, "On
Significance of the Least Significant Bits for Differential Privacy", CCS 2012). So sum and noise
are rounded to one lattice before they are added. Rounding the noise is post-processing; rounding
the sum adds at most √d steps to the sensitivity of d numbers, and the noise grows with it.
"""

import logging
import math
import os
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedloom.core.party import Party
from fedloom.protect.skellam import skellam

SIMULATED: Final = "simulated noise"
"""The note of a party whose draws come from the run's seed."""
LATTICE: Final = 2.0**-30
"""The step of the lattice, as a part of the sensitivity."""
_log = logging.getLogger("fedloom.node")


class Draws:
    """The random numbers of one private release.

    Attributes:
        simulated: whether they come from the run's seed.
    """

    def __init__(self, rng: np.random.Generator | None) -> None:
        self.simulated = rng is not None
        self._rng = rng

    def included(self, rows: int, rate: float) -> Tensor:
        """The numbers (k,) of the rows of a random subset, each included independently with
        probability `rate`.
        """
        u = 1 - _uniform(rows) if self._rng is None else self._rng.random(rows)
        return torch.from_numpy(np.flatnonzero(u < rate))

    def uniform(self, count: int) -> np.ndarray:
        """Numbers (count,) float64 in [0, 1)."""
        return 1 - _uniform(count) if self._rng is None else self._rng.random(count)

    def skellam(self, half: int, count: int) -> Tensor:
        """Skellam noise (count,) int64 of variance 2 · `half`: see `fedloom.protect.skellam`."""
        if self._rng is None:
            return torch.from_numpy(skellam(half, count))
        return torch.from_numpy(self._rng.poisson(half, count) - self._rng.poisson(half, count))

    def blur(self, x: Tensor, deviation: float, sensitivity: float) -> Tensor:
        """`x` with independent Gaussian noise of this standard deviation on every number.

        Args:
            x: the vector that a release hides.
            deviation: σ times the sensitivity.
            sensitivity: the largest distance, in L2 norm, that adjacent data sets move it by.
        """
        if self._rng is not None:
            single = x.dtype == torch.float32
            drawn = self._rng.standard_normal(
                tuple(x.shape), dtype=np.float32 if single else np.float64
            )
            return x + deviation * torch.from_numpy(drawn).to(x.device, x.dtype)
        step, grown = sensitivity * LATTICE, 1 + math.sqrt(x.numel()) * LATTICE
        noise = torch.from_numpy(_normal(x.numel()).reshape(tuple(x.shape)))
        steps = (x.detach().cpu().double() / step).round() + (
            noise * (deviation * grown / step)
        ).round()
        return (steps * step).to(x.device, x.dtype)


def draws(party: Party[object], purpose: str, *keys: int) -> Draws:
    """The draws of a party's release: fresh ones if it has a secret, otherwise those
    of its stream.
    """
    found = Draws(None if party.context.secret is not None else party.stream(purpose, *keys))
    party.note(SIMULATED, float(found.simulated))
    return found


def charge(
    party: Party[object], sigma: float, count: int = 1, rate: float = 1.0, excess: float = 0.0
) -> None:
    """Charge releases to the budget of the party's rows, if it has one. Call it before they are
    made.

    Noise of a party without a secret protects nobody, so it is not a release that a budget could
    allow.

    Args:
        party: makes them.
        sigma: standard deviation of the noise over the sensitivity, where adjacent data sets differ
            in one row that counts as nothing in one of them.
        count: their number.
        rate: the probability with which each row is included.
        excess: see `Releases`.

    Raises:
        PrivacyBudgetSpent: the budget does not allow them.
    """
    if party.context.privacy_budget is not None and party.context.secret is not None:
        party.context.privacy_budget(sigma, count, rate, *([excess] if excess else []))


def or_nothing(party: Party[object], compute: Callable[[], Tensor], nothing: Tensor) -> Tensor:
    """The result of `compute`, which reads the party's rows and gets noise; `nothing` if it fails
    at a party with a secret, as a failure that others see may tell of a row. The node's log has the
    reason.
    """
    try:
        return compute()
    except Exception:
        if party.context.secret is None:
            raise
        _log.exception("a private step failed, so it has noise alone")
        return nothing


def _uniform(count: int) -> np.ndarray:
    """Numbers (count,) float64 in (0, 1], from the generator of the operating system."""
    return (
        (np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)) + 1.0
    ) * 2.0**-53


def _normal(count: int) -> np.ndarray:
    """Standard normal numbers (count,) float64, likewise: the transform of Box and Muller."""
    u, v = _uniform(2 * (-(-count // 2))).reshape(2, -1)
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
