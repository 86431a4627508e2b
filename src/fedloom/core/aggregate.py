"""How a mean of replies is taken. A page says that it wants one (`fed.mean`); the run says how, in
`[aggregate]`.

`Mean` is the default. `fedloom.protect.aggregators` has robust rules, secure sums, and means with
noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fedloom.core.errors import MethodError
from fedloom.core.message import weighted_mean, zip_tensors

Kind: TypeAlias = Literal["values", "logits", "probabilities"]
"""What the numbers of a reply are: any values, logits (..., K), or probabilities (..., K) that sum
to 1.
"""
Kinds: TypeAlias = Kind | Mapping[str, Kind]
"""The kind of a reply, or of each of its parts by name, which are then aggregated each by itself.
"""
Weights: TypeAlias = Sequence[float] | Tensor | None
"""The weights of n replies; a tensor (n, K) of weights for each of K classes; or None for equal
weights.
"""


class Aggregator(Protocol):
    """A way to take a mean of replies. Aggregators are frozen, and compared by value."""

    @property
    def secure(self) -> bool:
        """Whether parties send masked replies only, of which the coordinator learns the sum."""

    @property
    def hidden(self) -> bool:
        """Whether a page may use nothing of a single reply but its part in the mean."""

    @property
    def even(self) -> bool:
        """Whether a server counts all replies alike, whatever weights they claim. The result is
        then no weighted mean, and no party can remove its own reply from it.
        """

    @property
    def weighs(self) -> bool:
        """Whether `combine` keeps weights that the receiver of the replies chose itself."""

    @property
    def least(self) -> int:
        """The smallest number of replies."""

    @property
    def colluders(self) -> int:
        """The number of parties that a secure sum expects to help the coordinator."""

    def combine(
        self,
        replies: Sequence[Any],
        weights: Weights = None,
        *,
        around: Any = None,
        kind: Kinds = "values",
        key: Sequence[int] = (),
    ) -> Any:
        """The mean of at least `least` replies, trees of tensors of one structure.

        Args:
            replies: n trees.
            weights: see `Weights`.
            around: a tree of that structure from which the replies differ, such as the weights that
                the server sent; None if there is none.
            kind: what the numbers are.
            key: numbers that belong to no other mean of the run; noise is drawn from them.
        """


@dataclass(frozen=True)
class Mean:
    """The weighted mean of each number."""

    secure = hidden = even = False
    weighs = True
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
        """See `Aggregator.combine`. With weights by class, tensors are (K, ...), and 0 for a class
        without a weight.

        Raises:
            MessageError: see `weighted_mean`.
        """
        if weights is None:
            return zip_tensors(lambda each: torch.stack(each).mean(0), replies)
        if not isinstance(weights, Tensor):
            return weighted_mean(replies, weights)
        return zip_tensors(lambda each: _by_class(torch.stack(each), weights), replies)


MEAN: Final = Mean()


def _by_class(values: Tensor, weights: Tensor) -> Tensor:
    """The mean (K, ...) of values (n, K, ...) by weights (n, K)."""
    weights = weights.view(*weights.shape, *[1] * (values.dim() - 2))
    mean: Tensor = (values * weights).sum(0) / weights.sum(0).clamp(min=1)
    return mean


@dataclass(frozen=True)
class Combined:
    """A mean of replies, as the run takes it.

    Attributes:
        value: a tree like a reply, without the weight.
        weight: the sum of the replies' weights, or their number if all count alike. With weights by
            class a tensor (K,), which is 0 for a class of which there is no mean.
        ids: the parties whose replies are part of it.
        seen: the single replies by id, as they came; None where the run hides them.
    """

    value: Any
    weight: Any
    ids: tuple[int, ...]
    seen: Mapping[int, Any] | None = None

    @property
    def replies(self) -> Mapping[int, Any]:
        """The single replies by id.

        Raises:
            MethodError: the run hides them.
        """
        if self.seen is None:
            raise MethodError(
                "this run's [aggregate] hides single replies, which the page reads: refuse it in "
                "the config's refuses()"
            )
        return self.seen
