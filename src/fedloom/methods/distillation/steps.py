"""Steps that the pages of this family share: configs, public batches, coding of logits, black
boxes.

In a round each client makes τ steps on its own rows, then the steps that the method adds. One
iteration is one local step, so runs with equal iterations make equally many local steps, whatever
their τ. A client keeps one Adam for the
whole run: in early experiments, a new Adam for each stage cost more accuracy than any term of these
    methods gained.

A black box is an object with `fit` and `predict_proba` in place of a network. It makes no steps.
Every `refit` iterations it is fitted again, to its own labeled rows and to the public rows with the
probabilities that it received last; between two fits its predictions do not change. Optimizer
settings (learning rates, Adam, less-forgetting) do not apply to it, but τ and the batch size select
the public rows of a round. The state holds the inputs of a fit, not the
fitted object: every process fits again when it needs the object.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedloom.core.page import (
    BATCH_CACHE,
    Aggregator,
    BlackBoxModel,
    ClientContext,
    CrossFit,
    MethodConfig,
    MethodError,
    NotReady,
    Party,
    Template,
    Tree,
)
from fedloom.protect.coding import Coding, decode, encode, like

UNANSWERED = "failed test predictions"
"""The note of a black box that failed on test rows."""


class TrainingConfig(MethodConfig):
    """The local training of a client. Defaults are those of FedAL's section VI-A."""

    tau: int = Field(1, ge=1)
    """Steps of each stage (τ)."""
    batch_size: int = Field(32, ge=1)
    """Batch size of local and public batches (B)."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the clients' Adam (η_l), which is shared by all stages."""
    clients_per_round: int | None = Field(None, ge=1)
    """Number of participants in a round; None for all clients."""

    @property
    def iterations_per_round(self) -> int:
        """τ: one iteration is one local step, and one transfer step if the method has a transfer
        stage.
        """
        return self.tau


class LogitsConfig(MethodConfig):
    """The local training of a client, and the coding of the logits that it sends.

    The mean is sent back in the same coding, but with top-k as float16: from the largest entries of
    a mean of two, a client that removes its own logits would take the wrong class for the other's
    in up to half of the rows.
    """

    tau: int = Field(1, ge=1)
    """Steps of each stage (τ)."""
    batch_size: int = Field(32, ge=1)
    """Batch size of local and public batches (B)."""
    lr: float = Field(1e-3, gt=0)
    """Learning rate of the clients' Adam (η_l), which is shared by all stages."""
    clients_per_round: int | None = Field(None, ge=1)
    """Number of participants in a round; None for all clients."""
    coding: Coding = "float32"
    """Coding of logits: float32, float16, int8 (with a scale for each row), or the `top_k` largest
    of a row (top-k). With top-k the server's messages are float16.
    """
    top_k: int | None = Field(None, ge=1)
    """With coding = "top-k": number of logits sent per row; the others are summarized by one
    number.
    """

    @model_validator(mode="after")
    def _check_top_k(self) -> "LogitsConfig":
        if (self.coding == "top-k") != (self.top_k is not None):
            raise ValueError(
                'coding = "top-k" needs top_k, and top_k needs coding = "top-k": set both or '
                "neither"
            )
        return self

    def calls_in_round(self, context: ClientContext) -> Mapping[str, int]:
        """Once for each public batch."""
        return {"predict": self.tau, "distil": self.tau}

    def refuses(self, aggregator: Aggregator) -> str:
        """See `MethodConfig.refuses`: coded answers cannot be added."""
        if aggregator.secure and self.coding != "float32":
            return (
                'no single answer is there to be decoded: set params.coding = "float32", not '
                f'"{self.coding}"'
            )
        return super().refuses(aggregator)

    @property
    def iterations_per_round(self) -> int:
        """τ: one iteration is one local step, and one transfer step."""
        return self.tau

    @property
    def warnings(self) -> Mapping[str, str]:
        """The warning for a black box that fails on test rows."""
        return {
            UNANSWERED: "its black box fails on test rows, where all classes count as equally probable"  # noqa: E501
        }

    def encode(self, logits: Tensor) -> Tree:
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
        """The coding of dense rows (means, gradients, cosines): float16 in place of top-k."""
        return "float16" if self.coding == "top-k" else self.coding

    def encode_dense(self, rows: Tensor) -> Tree:
        """The message for dense rows (B, K)."""
        return encode(rows, self.dense_coding)

    def decode_dense(self, message: Any, classes: int) -> Tensor:
        """Rows (B, K) from a message of `encode_dense`."""
        return decode(message, self.dense_coding, classes)


# -- training: these steps read a config's τ, batch size and iterations ----------------------------


class Stages(Protocol):
    """Settings of a round's stages, as `TrainingConfig` describes them."""

    @property
    def tau(self) -> int:
        """Steps of each stage."""

    @property
    def batch_size(self) -> int:
        """Batch size of local and public batches."""

    @property
    def iterations_per_round(self) -> int:
        """Iterations of a round."""


StagesT_co = TypeVar("StagesT_co", bound=Stages, covariant=True)


def public_batch(party: Party[Stages], t: int, i: int) -> Tensor:
    """The i-th of round t's τ public batches (B, ...): the same rows at every party, by the shared
    seed.
    """
    return party.public(t, steps=party.cfg.tau, size=party.cfg.batch_size)[i]


def public_numbers(party: Party[Stages], t: int, i: int) -> Tensor:
    """The row numbers (B,) of the i-th of round t's public batches."""
    return party.public_rows(t, steps=party.cfg.tau, size=party.cfg.batch_size)[i].to(
        party.context.device
    )


def stage_logits(party: Party[object], x: Tensor) -> Tensor:
    """Constant evaluation-mode logits (τ, B, K) on all batches x (τ, B, ...) of a stage, in one
    pass.
    """
    return party.infer(x.flatten(0, 1)).view(*x.shape[:2], -1)


def mean_of_others(own: Tensor, mean: Tensor, n: int) -> Tensor:
    """The mean (...) of the n - 1 others, from the mean of all n and one's own value."""
    return (n * mean - own) / (n - 1)


# -- black boxes -----------------------------------------------------------------------------------


def black_box(party: Party[object]) -> BlackBoxModel:
    """The black box of a party.

    Raises:
        MethodError: the party has no black box.
    """
    if party.context.black_box is None:
        raise MethodError(f"party {party.context.id} has no black box: name one in models.pool")
    return party.context.black_box


class BlackBoxParty(Party[StagesT_co]):
    """A client with a black box instead of a network, for pages to derive from.

    Its state: `targets`, the last received probabilities (|P|, K) of each public row, zeros before
    the first; `fitted`, the `targets` of the current fit and its `iteration`, -1 before the first
    fit.
    """

    targets: Tensor
    fitted: dict[str, Any]

    def setup(self) -> None:
        """No targets and no fit yet."""
        rows = len(self.public_set.rows) if black_box(self).learn else 0
        self.targets = torch.zeros(rows, self.context.classes, device=self.context.device)
        self.fitted = {"iteration": -1, "targets": self.targets.clone()}

    def local_train(self, *, t: int) -> None:
        """Round t's local stage: fit the black box in its first round, and again once `refit_every`
        iterations have passed and `targets` changed.
        """
        now, last = t * self.cfg.iterations_per_round, self.fitted["iteration"]
        due = now - last >= black_box(self).refit_every and not torch.equal(
            self.targets, self.fitted["targets"]
        )
        if last < 0 or due:
            self.fitted = {"iteration": now, "targets": self.targets.clone()}
            current_fit(self)

    def infer(self, x: Tensor) -> Tensor:
        """Log-probabilities (n, K) on test rows x (n, ...), predicted once for each fit.

        All classes are equally probable before the first fit, and where the black box fails. A
        failure is noted and does not stop the run.
        """
        if self.fitted["iteration"] >= 0:
            try:
                return current_fit(self).log_probs(x)
            except Exception:
                self.note(UNANSWERED, 1.0)
        return x.new_zeros(len(x), self.context.classes).log_softmax(-1)


def current_fit(party: BlackBoxParty[Stages]) -> CrossFit:
    """The fitted objects of the state `fitted`, from the cache of this process or fitted now."""
    box, targets = black_box(party), party.fitted["targets"]

    def fit() -> CrossFit:
        own, known = torch.arange(len(party.data)), targets.any(-1).nonzero()[:, 0]
        x, y = party.data.x(own), party.data.y(own)
        if not len(known):
            return CrossFit(*[box.fit(x, y)] * 2)
        halves = known[known % 2 == 1], known[known % 2 == 0]
        return CrossFit(
            *(box.fit(x, y, party.public_set.rows.x(half), targets[half]) for half in halves)
        )

    return box.cached(hashlib.blake2b(targets.cpu().numpy().tobytes()).digest(), fit)


def public_log_probs(party: BlackBoxParty[Stages], t: int, i: int) -> Tensor:
    """Log-probabilities (B, K) on the i-th public batch of round t. All batches of a round are
    predicted at once.

    Raises:
        NotReady: the black box is not fitted yet, and its predictions would only add noise to the
            mean.
    """
    if party.fitted["iteration"] < 0:
        raise NotReady(f"the black box of party {party.context.id} is not fitted yet")
    fit, size = current_fit(party), {"steps": party.cfg.tau, "size": party.cfg.batch_size}

    def predict() -> Tensor:
        plan = party.public_rows(t, **size)
        return fit.public_log_probs(torch.cat(party.public(t, **size)), plan.flatten()).view(
            *plan.shape, -1
        )

    return BATCH_CACHE.get(fit, ("public", t, *size.values()), predict)[i]


def outputs_of(party: BlackBoxParty[Stages], target: Tensor, temperature: float) -> Tensor:
    """The outputs (B, K) whose answer at this temperature is `target` (B, K); a number is its own
    answer.
    """
    if party.context.target is not None:
        return target
    return temperature * target.clamp_min(black_box(party).min_probability).log()


def set_targets(party: BlackBoxParty[Stages], new: Tensor, t: int, i: int) -> None:
    """Keep probabilities `new` (B, K) for the i-th public batch of round t, for the next fit."""
    if black_box(party).learn:
        party.targets = party.targets.index_copy(0, public_numbers(party, t, i).to(new.device), new)
