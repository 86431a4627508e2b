"""The aggregators that a run's `[aggregate]` names: robust rules, secure sums, and means with
noise.

`Private` is DP-FedAvg: H. B. McMahan, D. Ramage, K. Talwar, L. Zhang, "Learning Differentially
Private Recurrent Language Models", ICLR 2018. Each reply's change is clipped to norm C, noise of
standard deviation σ C is added to their sum, and the sum is divided by their number. All that the
server publishes is then private for each client as a whole; the server itself sees the replies.

Differs:
    A fixed number of participants, which the run's seed chooses: no amplification by sampling
        counts, and ε of a client grows only with the means that it takes part in. Replies have
        equal weights.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.core.aggregate import Kinds, Mean, Weights
from fedloom.core.errors import MethodError
from fedloom.core.fixed_point import LEAST, threshold
from fedloom.core.message import leaves, zip_tensors
from fedloom.protect.noise import Draws
from fedloom.protect.privacy import clipped_rows
from fedloom.protect.robust import (
    Rule,
    combine_logits,
    combine_probabilities,
    combine_trees,
    flat,
    needed,
    normalized,
    shaped,
)


@dataclass(frozen=True)
class Robust:
    """A robust rule, which counts all replies alike at a server: see `fedloom.protect.robust`.

    Attributes:
        rule: its name.
        f: the number of replies with arbitrary numbers to withstand.
    """

    rule: Rule
    f: int = 1
    secure = hidden = False
    even = True
    colluders: ClassVar[int] = 0

    @property
    def weighs(self) -> bool:
        """See `Aggregator.weighs`."""
        return self.rule in ("clip", "centered")

    @property
    def least(self) -> int:
        """See `Aggregator.least`."""
        return needed(self.rule, self.f)

    def combine(
        self,
        replies: Sequence[Any],
        weights: Weights = None,
        *,
        around: Any = None,
        kind: Kinds = "values",
        key: Sequence[int] = (),
    ) -> Any:
        """See `Aggregator.combine`. Without `around`, `clip` and `centered` start at the median. Of
        weights by class
        only counts whether they are 0: each class is combined over the replies that have it, if
            they are enough.
        """
        if isinstance(weights, Tensor):
            return zip_tensors(
                lambda each: self._by_class(torch.stack(each), weights > 0, kind), replies
            )
        if isinstance(kind, Mapping):
            return {
                k: self.combine([reply[k] for reply in replies], kind=kind[k]) for k in replies[0]
            }
        if kind != "values":
            rule = combine_logits if kind == "logits" else combine_probabilities
            return rule(torch.stack([*replies]), self.rule, f=self.f)
        shares = None
        if weights is not None and self.weighs:
            _, first = next(leaves(replies[0]))
            shares = torch.tensor(weights, dtype=torch.float64, device=first.device)
            shares = shares / shares.sum()
        return combine_trees(replies, self.rule, f=self.f, center=around, weights=shares)

    def _by_class(self, values: Tensor, present: Tensor, kind: Kinds) -> Tensor:
        """The aggregate (K, ...) of values (n, K, ...), by the mask `present` (n, K); 0 where too
        few have a class.
        """
        found = torch.zeros_like(values[0])
        for k in (present.sum(0) >= self.least).nonzero().flatten().tolist():
            found[k] = self.combine([*values[present[:, k], k]], kind=kind)
        return found

    def __str__(self) -> str:
        return f"rule = {self.rule!r} with f = {self.f}"


@dataclass(frozen=True)
class Secure(Mean):
    """A secure sum: see `fedloom.protect.masks`. The coordinator gets no reply that it could
    combine here.

    Attributes:
        colluders: the number of parties that may help the coordinator.
    """

    colluders: int = 0  # type: ignore[misc]
    secure = hidden = True

    @property
    def least(self) -> int:  # type: ignore[override]
        """See `Aggregator.least`: the smallest number that reaches its own threshold."""
        return next(n for n in count(LEAST) if threshold(n, self.colluders) <= n)

    def __str__(self) -> str:
        return "secure = true"


@dataclass(frozen=True)
class Private:
    """The mean of clipped changes, with noise.

    Attributes:
        sigma: noise multiplier σ.
        clip: C, the largest norm of a reply's change from `around`, or of the reply if there is
            none.
        draws: the noise of a key; None at clients, which add none.
    """

    sigma: float
    clip: float
    draws: Callable[[Sequence[int]], Draws] | None = field(default=None, compare=False)
    secure = weighs = False
    hidden = even = True
    least = 1
    colluders: ClassVar[int] = 0

    def combine(
        self,
        replies: Sequence[Any],
        weights: Weights = None,
        *,
        around: Any = None,
        kind: Kinds = "values",
        key: Sequence[int] = (),
    ) -> Any:
        """See `Aggregator.combine`. Probabilities are divided by their sum after the noise.

        Raises:
            MethodError: weights by class, as nothing hides which replies have a class; or no draws.
        """
        if isinstance(weights, Tensor) or self.draws is None:
            raise MethodError("aggregate.noise is for means of whole replies at a server")
        like = replies[0]
        sent = torch.stack([flat(reply, like) for reply in replies]).double()
        old = torch.zeros_like(sent[0]) if around is None else flat(around, like).to(sent)
        total = clipped_rows(sent - old, self.clip).sum(0)
        new = old + self.draws(key).blur(total, self.sigma * self.clip, self.clip) / len(replies)
        mean = shaped(new, like)
        kinds = {"": kind} if isinstance(kind, str) else kind
        if "probabilities" not in kinds.values():
            return mean
        fitted = {
            k: _distribution(mean[k] if k else mean)
            for k, one in kinds.items()
            if one == "probabilities"
        }
        return {**mean, **fitted} if isinstance(mean, dict) else fitted[""]

    def __str__(self) -> str:
        return "noise"


def _distribution(noisy: Tensor) -> Tensor:
    """Probabilities (..., K) from noisy ones: equal where nothing is left."""
    return normalized(noisy, torch.full_like(noisy, 1 / noisy.shape[-1]))
