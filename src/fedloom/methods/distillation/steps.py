"""Steps that the pages of this family share: configs, public batches, coding of logits, black boxes.

In a round each client makes τ steps on its own rows, and then
whatever the method adds. One iteration is one local step, so runs of equally many iterations make equally many local
steps, whatever each method's τ. One Adam serves a client for its whole life: in a prototype, a new Adam for each stage
cost more than any term of these methods gained.

A black box is an object with `fit` and `predict_proba` in place of a network. It makes no steps. Every `refit`
iterations it is fitted anew, to its own rows with their labels and to the public rows with the probabilities that it
received last for them; between two fits its answers do not change. Settings of steps (learning rates, batches of own
rows, Adam, less-forgetting) do not apply to it, but τ and the batch size select the public rows of a round. A fitted
object is not state: state is what the fit was made from, and every process fits again when it needs the object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.black_box import BlackBoxModel, CrossFit
from fedloom.core.context import BATCH_CACHE
from fedloom.core.errors import MethodError, NotReady
from fedloom.core.message import Template
from fedloom.core.method import MethodConfig
from fedloom.core.party import Party
from fedloom.protect.coding import Coding, decode, encode, like

UNANSWERED = "tests unanswered"
"""The note of a black box that failed on test rows."""


class TrainingConfig(MethodConfig):
    """The local training of a client. Defaults are those of FedAL's section VI-A."""

    tau: int = Field(1, ge=1)
    """Steps of each stage (τ)."""
    batch_size: int = Field(32, ge=1)
    """Rows of a batch, local and public (B)."""
    lr: float = Field(1e-3, gt=0)
    """Adam's rate at the clients (η_l); one Adam serves all stages."""
    clients_per_round: int | None = Field(None, ge=1)
    """Participants of a round; None for all."""

    @property
    def iterations_per_round(self) -> int:
        """τ: one iteration is one local step, and one transfer step if the method has any."""
        return self.tau


class LogitsConfig(MethodConfig):
    """The local training of a client, and the coding of the logits that it sends.

    A mean is sent back in the coding of the answers, but as float16 with top-k: if only the mean's largest entries
    were sent, a client that removes its own logits from a mean of two would take the wrong class for the other's in
    up to half of the rows.
    """

    tau: int = Field(1, ge=1)
    """Steps of each stage (τ)."""
    batch_size: int = Field(32, ge=1)
    """Rows of a batch, local and public (B)."""
    lr: float = Field(1e-3, gt=0)
    """Adam's rate at the clients (η_l); one Adam serves all stages."""
    clients_per_round: int | None = Field(None, ge=1)
    """Participants of a round; None for all."""
    coding: Coding = "float32"
    """How logits are sent: as float32, float16, int8 (with a scale for each row), or the largest `top_k` of a row. With
    top-k the server's messages are float16."""
    top_k: int | None = Field(None, ge=1)
    """With coding = "top-k": how many logits of a row are sent; the others are sent as one number."""

    @model_validator(mode="after")
    def _check_top_k(self) -> LogitsConfig:
        if (self.coding == "top-k") != (self.top_k is not None):
            raise ValueError('coding = "top-k" and top_k = a number belong together: give both or neither')
        return self

    @property
    def iterations_per_round(self) -> int:
        """τ: one iteration is one local step, and one transfer step."""
        return self.tau

    @property
    def warnings(self) -> Mapping[str, str]:
        """The meaning of the note of a black box."""
        return {UNANSWERED: "its black box fails on test rows; all classes count as equally probable there"}

    def encode(self, logits: Tensor) -> Any:
        """The message for a client's logits (B, K)."""
        return encode(logits, self.coding, self.top_k)

    def decode(self, message: Any, classes: int) -> Tensor:
        """Logits (B, K) from a client's message."""
        return decode(message, self.coding, classes)

    def template(self, classes: int) -> Template:
        """Template of the message for a batch of logits."""
        return like(self.batch_size, classes, self.coding, self.top_k)

    @property
    def dense_coding(self) -> Coding:
        """The coding of rows whose every entry counts (means, gradients, cosines): float16 in place of top-k."""
        return "float16" if self.coding == "top-k" else self.coding

    def encode_dense(self, rows: Tensor) -> Any:
        """The message for rows (B, K) whose every entry counts."""
        return encode(rows, self.dense_coding)

    def decode_dense(self, message: Any, classes: int) -> Tensor:
        """Rows (B, K) from a message of `encode_dense`."""
        return decode(message, self.dense_coding, classes)


# -- training --------------------------------------------------------------------------------------------------------


def public_batch(party: Party[Any], t: int, i: int) -> Tensor:
    """The i-th of round t's τ public batches (B, ...): the same rows at every party, by the shared seed."""
    return party.public(t, steps=party.cfg.tau, size=party.cfg.batch_size)[i]


def public_numbers(party: Party[Any], t: int, i: int) -> Tensor:
    """The row numbers (B,) of the i-th of round t's public batches."""
    return party.public_rows(t, steps=party.cfg.tau, size=party.cfg.batch_size)[i].to(party.context.device)


def stage_logits(party: Party[Any], x: Tensor) -> Tensor:
    """Constant evaluation-mode logits (τ, B, K) on all batches x (τ, B, ...) of a stage, in one pass."""
    return party.infer(x.flatten(0, 1)).view(*x.shape[:2], -1)


def mean_of_others(own: Tensor, mean: Tensor, n: int) -> Tensor:
    """The mean (...) of the n - 1 others, from the mean of all n and one's own value."""
    return (n * mean - own) / (n - 1)


# -- black boxes -----------------------------------------------------------------------------------------------------


def black_box(party: Party[Any]) -> BlackBoxModel:
    """The black box of a party.

    Raises:
        MethodError: it has none.
    """
    if party.context.black_box is None:
        raise MethodError(f"party {party.context.id} was given no black box: name one in models.pool")
    return party.context.black_box


def black_box_state(party: Party[Any]) -> tuple[Tensor, dict[str, Any]]:
    """The first state of a black-box client.

    Returns:
        `targets`: the probabilities (|P|, K) received last for each public row, zeros where there are none yet.
        `fitted`: the `targets` of the present fit, and its `iteration`; -1 before the first fit.
    """
    rows = len(party.public_set.rows) if black_box(party).learn else 0
    targets = torch.zeros(rows, party.context.classes, device=party.context.device)
    return targets, {"iteration": -1, "targets": targets.clone()}


def refit(party: Party[Any], fitted: dict[str, Any], targets: Tensor, t: int) -> dict[str, Any]:
    """The state `fitted` after round t's local stage.

    The black box is fitted if it never was, or if `refit` iterations have passed and `targets` have changed since.
    """
    now, last = t * party.cfg.iterations_per_round, fitted["iteration"]
    due = now - last >= black_box(party).refit and not torch.equal(targets, fitted["targets"])
    if last >= 0 and not due:
        return fitted
    fitted = {"iteration": now, "targets": targets.clone()}
    current_fit(party, fitted)
    return fitted


def current_fit(party: Party[Any], fitted: Mapping[str, Any]) -> CrossFit:
    """The fitted objects of this state: fitted now, unless this process has them."""
    box, targets = black_box(party), fitted["targets"]

    def fit() -> CrossFit:
        own, known = torch.arange(len(party.data)), targets.any(-1).nonzero()[:, 0]
        x, y = party.data.x(own), party.data.y(own)
        if not len(known):
            return CrossFit(*[box.fit(x, y)] * 2)
        halves = known[known % 2 == 1], known[known % 2 == 0]
        return CrossFit(*(box.fit(x, y, party.public_set.rows.x(half), targets[half]) for half in halves))

    return box.cached(hashlib.blake2b(targets.cpu().numpy().tobytes()).digest(), fit)


def public_log_probs(party: Party[Any], fitted: Mapping[str, Any], t: int, i: int) -> Tensor:
    """Log-probabilities (B, K) on the i-th public batch of round t. All batches of a round are predicted at once.

    Raises:
        NotReady: the black box was never fitted, and its answer would only add noise to the mean.
    """
    if fitted["iteration"] < 0:
        raise NotReady(f"the black box of party {party.context.id} is not fitted yet, so it has no answer")
    fit, size = current_fit(party, fitted), {"steps": party.cfg.tau, "size": party.cfg.batch_size}

    def predict() -> Tensor:
        plan = party.public_rows(t, **size)
        return fit.public_log_probs(torch.cat(party.public(t, **size)), plan.flatten()).view(*plan.shape, -1)

    return BATCH_CACHE.get(fit, ("public", t, *size.values()), predict)[i]


def evaluation_log_probs(party: Party[Any], fitted: Mapping[str, Any], x: Tensor) -> Tensor:
    """Log-probabilities (n, K) on test rows x (n, ...), predicted once for each fit.

    All classes are equally probable before the first fit, and where the black box fails. A failure is noted and does
    not end the run of the other clients.
    """
    if fitted["iteration"] >= 0:
        try:
            return current_fit(party, fitted).log_probs(x)
        except Exception:
            party.note(UNANSWERED, 1.0)
    return x.new_zeros(len(x), party.context.classes).log_softmax(-1)


def with_targets(party: Party[Any], targets: Tensor, new: Tensor, t: int, i: int) -> Tensor:
    """The state `targets` with probabilities `new` (B, K) for the i-th public batch of round t."""
    if not black_box(party).learn:
        return targets
    return targets.index_copy(0, public_numbers(party, t, i).to(new.device), new)
