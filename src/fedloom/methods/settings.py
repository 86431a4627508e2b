"""The settings that shared steps read, of any config that has them: types only, without code."""

from typing import Protocol


class Adaptation(Protocol):
    """Settings of adaptation."""

    @property
    def alpha(self) -> float:
        """Step size of adaptation (α)."""

    @property
    def adapt_steps(self) -> tuple[int, ...]:
        """Numbers of adaptation steps after which clients are evaluated."""


class LocalSGD(Adaptation, Protocol):
    """Settings of adaptation and of local SGD, as `LocalSGDConfig` describes them."""

    @property
    def lr(self) -> float:
        """Learning rate of SGD."""

    @property
    def momentum(self) -> float:
        """Momentum of SGD."""

    @property
    def batch_size(self) -> int:
        """Batch size."""

    @property
    def epochs(self) -> int:
        """Epochs over the client's own rows in a round."""

    @property
    def head_epochs(self) -> int:
        """With a personal head: epochs before them that update only the head."""

    @property
    def personal_head(self) -> bool:
        """Whether the last layer is private to each client."""

    @property
    def finetune_epochs(self) -> int:
        """Epochs of fine-tuning all weights before the evaluation mode "tuned"."""
