"""How a run's parties train their own networks, in one place for all methods: `[local]` of a run's
config.

A page names its own optimizer in `self.network(…)` and takes the loss of labels from
`self.context.task`. The core then puts the run's settings in their place. A method declares in
`local` which settings it takes, and says in `no_local` why
it does not take the others: see `fedloom.core.method`. What is not set is the page's own, with the
    same bits.

The state of an optimizer, such as momentum, is state of the page: `steps.reset_optimizer` begins
anew in each round, as pages that average weights do; otherwise it lasts as long as the party.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from fedloom.core.optim import SGD, Adam

LocalSetting: TypeAlias = Literal["optimizer", "weight_decay", "clip", "schedule", "class_weights"]
"""A setting of local training that a method may take."""
EVERY_LOCAL: Final[tuple[LocalSetting, ...]] = get_args(LocalSetting)
"""For methods that take all settings."""
LOCAL_STEPS: Final[tuple[LocalSetting, ...]] = EVERY_LOCAL[:4]
"""The settings of steps alone, for methods without a loss of labels at clients."""
Schedule: TypeAlias = Literal["constant", "cosine", "step"]
"""How the learning rate falls over the rounds."""
FALLS: Final = (5, 6, 7)
"""The eighths of a training after which a rate in steps is divided by ten."""


@dataclass(frozen=True)
class LocalTraining:
    """Settings of local training; None for the page's own.

    Attributes:
        optimizer: `sgd` or `adam`, at the page's learning rate.
        momentum: of SGD, with `optimizer`.
        weight_decay: λ: added to the gradient as λ w with SGD, decoupled from it with Adam (AdamW).
        clip: the largest L2 norm of a step's gradient.
        schedule: the factor of the learning rate in each round, see `factor`.
        rounds: of the run, for the schedule.
        class_weights: one for each class, or those of the party's own training rows, see
            `balanced`.
    """

    optimizer: Literal["sgd", "adam"] | None = None
    momentum: float = 0.0
    weight_decay: float | None = None
    clip: float | None = None
    schedule: Schedule = "constant"
    rounds: int = 0
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None

    def applied(self, own: SGD | Adam) -> SGD | Adam:
        """The page's optimizer with these settings over its own."""
        chosen = own
        if self.optimizer == "sgd":
            chosen = SGD(own.lr, self.momentum, own.weight_decay)
        elif self.optimizer == "adam" and not isinstance(own, Adam):
            chosen = Adam(own.lr, weight_decay=own.weight_decay)
        if self.weight_decay is not None:
            chosen = replace(chosen, weight_decay=self.weight_decay)
        return chosen if self.clip is None else replace(chosen, clip=self.clip)

    def factor(self, t: int) -> float:
        """The learning rate of round t over that of round 0; 1 outside of rounds (t < 0), as before
        an evaluation.

        `cosine`: (1 + cos(π t / T)) / 2 for T rounds (Loshchilov and Hutter, 2017). `step`: a tenth
        after each of 5/8, 6/8 and 7/8 of the rounds.
        """
        if t < 0 or self.schedule == "constant":
            return 1.0
        return (
            falling(t, self.rounds)
            if self.schedule == "step"
            else (1 + math.cos(math.pi * t / self.rounds)) / 2
        )

    def weights(self, labels: Tensor, classes: int) -> Tensor | None:
        """The weights (K,) of the classes in the loss of rows with these labels (n,); None if all
        count alike.
        """
        if self.class_weights is None:
            return None
        if self.class_weights == "balanced":
            return balanced(labels, classes)
        return torch.tensor(self.class_weights, dtype=torch.float32, device=labels.device)


OWN: Final = LocalTraining()
"""Every page trains as it says itself."""


def falling(t: int, total: int) -> float:
    """The factor 0.1^k at t of `total` rounds or epochs, after k of the falls."""
    return 0.1 ** sum(8 * t >= eighths * total for eighths in FALLS)


def balanced(labels: Tensor, classes: int) -> Tensor:
    """Weights (K,) float32 of classes from labels (n,): n / (number of classes that have rows ×
    rows of the class).

    So each of these classes has the same weight in all, and the mean weight of a row is 1. A class
    without rows has 1.
    """
    counts = torch.bincount(labels, minlength=classes).double()
    present = counts > 0
    weights = len(labels) / (present.sum() * counts.clamp_min(1))
    return torch.where(present, weights, 1.0).float()
