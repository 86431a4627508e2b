"""What clients with a black box in the place of a network have in common: when they are fitted, and to what.

A box makes no steps, so it does once in `refit` iterations what networks do in each: it is fitted anew, to its own
rows with their labels and to the public rows with the probabilities that it heard for them last. In between it answers
as it was fitted. Settings of steps (rates, batches of own rows, Adam, less-forgetting) mean nothing to it, but τ and
the batch size say which public rows a round has.

Half of the public rows are fitted to at a time, and a row is answered by the fit that did not hear of it: see `Folds`.

No fitted object is state. State is what the fit came from; each process makes the object again when it needs it.
"""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from fedloom.core.black_box import Box, Folds
from fedloom.core.context import RECENT
from fedloom.core.errors import MethodError, NotReady
from fedloom.core.party import Party
from fedloom.methods.distiller import UNANSWERED, DistillerConfig

ConfigT = TypeVar("ConfigT", bound=DistillerConfig)


class Boxed(Party[ConfigT]):
    """A client that fits and predicts. A page adds its messages: `predict` from `outputs`, `distil` to `learn`."""

    STATE: ClassVar[tuple[str, ...]] = ("targets", "fitted")
    ROLE = "client"

    def setup(self) -> None:
        """`targets`: the probabilities (|P|, K) heard last for each public row, zeros where none were. `fitted`: what
        they were at the present fit, and the `iteration` of that; -1 before the first."""
        rows = len(self.public_set.rows) if self.box.learn else 0
        self.targets = torch.zeros(rows, self.site.classes, device=self.site.device)
        self.fitted: dict[str, Any] = {"iteration": -1, "targets": self.targets.clone()}

    @property
    def box(self) -> Box:
        """The black box, or an error."""
        if self.site.box is None:
            raise MethodError(f"party {self.site.id} was given no black box: name one in models.pool")
        return self.site.box

    def local_train(self, *, t: int) -> None:
        """Round t's fit, if it is time for one: the first, or `refit` iterations after the last and with news."""
        now, before = t * self.cfg.iterations_per_round, self.fitted["iteration"]
        if before < 0 or (now - before >= self.box.refit and not torch.equal(self.targets, self.fitted["targets"])):
            self.fitted = {"iteration": now, "targets": self.targets.clone()}
            self.present()

    def present(self) -> Folds:
        """The fitted objects: made now, unless this process has them."""
        targets = self.fitted["targets"]
        key = hashlib.blake2b(targets.cpu().numpy().tobytes()).digest()
        return self.box.present(key, lambda: self._fit(targets))

    def _fit(self, targets: Tensor) -> Folds:
        own, known = torch.arange(len(self.data)), targets.any(-1).nonzero()[:, 0]
        x, y = self.data.x(own), self.data.y(own)
        if not len(known):
            return Folds(*[self.box.fit(x, y)] * 2)
        halves = known[known % 2 == 1], known[known % 2 == 0]
        return Folds(*(self.box.fit(x, y, self.public_set.rows.x(half), targets[half]) for half in halves))

    def infer(self, x: Tensor) -> Tensor:
        """Log-probabilities (n, K) of rows x (n, ...); before the first fit, of equal ones."""
        if self.fitted["iteration"] < 0:
            return x.new_zeros(len(x), self.site.classes).log_softmax(-1)
        return self.present().log_probs(x)

    def test_logits(self, on: str) -> Tensor:
        """Log-probabilities (n, K), computed once for each fit. A box that fails counts as equal probabilities and is
        noted: it must not end the run of all others."""
        try:
            if self.fitted["iteration"] < 0:
                return super().test_logits(on)
            kept = self.present().replies
            if on not in kept:
                kept[on] = super().test_logits(on)
            return kept[on]
        except Exception:
            self.note(UNANSWERED, 1.0)
            return torch.zeros(len(self.site.tests[on]), self.site.classes, device=self.site.device)

    def outputs(self, t: int, i: int) -> Tensor:
        """Log-probabilities (B, K) on the i-th public batch of round t: the round's are asked for at once.

        Raises:
            NotReady: nothing was fitted yet, and an answer would be no more than noise in others' mean.
        """
        if self.fitted["iteration"] < 0:
            raise NotReady(f"the black box of party {self.site.id} was not fitted yet: it has nothing to tell")

        def ask() -> Tensor:
            plan = self.public_rows(t, steps=self.cfg.tau, size=self.cfg.batch_size)
            return folds.public_log_probs(torch.cat(self._batches(t)), plan.flatten()).view(*plan.shape, -1)

        folds = self.present()
        return RECENT.get(folds, ("public", t, self.cfg.tau, self.cfg.batch_size), ask)[i]

    def learn(self, target: Tensor, t: int, i: int) -> None:
        """Keep probabilities (B, K) as what the rows of the i-th public batch of round t should have."""
        if not self.box.learn:
            return
        rows = self.public_rows(t, steps=self.cfg.tau, size=self.cfg.batch_size)[i].to(target.device)
        self.targets = self.targets.index_copy(0, rows, target)

    def _batches(self, t: int) -> tuple[Tensor, ...]:
        return self.public(t, steps=self.cfg.tau, size=self.cfg.batch_size)
