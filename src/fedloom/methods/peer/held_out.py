"""A share of a peer's rows that is held out from training, for methods that try other peers' models
on them.

Fine-tuning before an evaluation does not use these rows either.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from fedloom.core.page import Party, Tree, epoch_plan
from fedloom.methods import steps
from fedloom.methods.settings import LocalSGD


class HoldingOut(LocalSGD, Protocol):
    """Settings of local training and of held-out rows."""

    @property
    def validation(self) -> float:
        """Share of the own rows that is held out."""


def training_and_held_out(party: Party[HoldingOut]) -> tuple[Tensor, Tensor]:
    """Indices of the rows to train on and of the held-out rows: at least one each, if there are
    two.
    """
    rows = len(party.data)
    order = torch.from_numpy(party.stream("validation").permutation(rows)).to(party.context.device)
    held = min(max(1, int(party.cfg.validation * rows)), max(1, rows - 1))
    return (order[held:] if rows > 1 else order), order[:held]


def train_kept(party: Party[HoldingOut], epochs: Iterable[steps.Epoch]) -> None:
    """SGD as in `steps.sgd_epochs`, on the rows that are not held out."""
    steps.reset_optimizer(party)
    kept = training_and_held_out(party)[0]
    for n, names in epochs:
        plan = epoch_plan(party.stream("batches", n), len(kept), 1, party.cfg.batch_size)
        party.train(partial(steps.label_loss, party), party.data.batches(kept[plan]), only=names)


def validation_loss(party: Party[HoldingOut], model: Mapping[str, Tensor]) -> Tensor:
    """Mean loss () of shared weights on the held-out rows, in evaluation mode, with
    the own head.
    """
    held = training_and_held_out(party)[1]
    with party.scratch():
        steps.set_weights(party, model)
        return party.context.task.loss(party.infer(party.data.x(held)), party.data.y(held))


def prepare(party: Party[HoldingOut], *, eval_mode: str, broadcast: Mapping[str, Tree]) -> None:
    """Before an evaluation: adapt, or fine-tune on the rows that are not held out."""
    steps.adapt(party, steps.steps_of(party.cfg, eval_mode))
    if eval_mode == steps.TUNED:
        train_kept(party, steps.tuning_epochs(party))
