"""Evaluation of parties outside the protocol: predictions on test rows, and their score.

An engine runs each function of `EVALUATIONS` at a party by its name. None is a message of a method, and none changes a
party's state. In a vertical setting pages define the hooks of `PassiveParty` and `ActiveParty`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom.core.errors import MethodError
from fedloom.core.message import Tree
from fedloom.core.party import Party

MAX_LOSS: Final = 10.0
"""Upper clip on losses of rows that nobody else may see."""


@runtime_checkable
class PassiveParty(Protocol):
    """A party of a vertical federation, which holds columns and no labels. Party 0 has the active party's own."""

    def contribution(self, *, on: str) -> Tree:
        """What the active party needs to predict the test rows named `on`, such as embeddings (n, d). With "aligned",
        the same of the aligned rows, as the party sends it to learn from: what attacks on labels begin with."""


@runtime_checkable
class PredictsAlone(PassiveParty, Protocol):
    """A passive party that can predict without the others."""

    def alone(self, embedded: Tensor) -> Tensor:
        """Logits (n, K) from its own network's outputs (n, d)."""


@runtime_checkable
class ActiveParty(Protocol):
    """The party of a vertical federation that holds the labels and runs the rounds."""

    def decide(self, contributions: Mapping[int, Any]) -> Tensor:
        """Logits (n, K) from what each party contributes, by its number."""


@runtime_checkable
class LeaksLabels(ActiveParty, Protocol):
    """An active party that declares what others could learn about labels from its messages."""

    def exposed(self, contributions: Mapping[int, Tensor]) -> Mapping[str, Mapping[int, Tensor]]:
        """What each party would receive next that depends on labels, by kind and party; it changes no state.

        `contributions` are those of the aligned rows, (N_a, d). Kinds, on which `fedloom.protect.attacks` has attacks:
        "gradients" (N_a, d) of the loss by a contribution; "logit gradients", the same where contributions are logits
        (N_a, K); and "prototypes" (K, d), zeros for a class that has none.
        """


def predictions(
    party: Party[Any], *, on: str, eval_mode: str = "", broadcast: Mapping[str, Tree] | None = None
) -> dict[str, Tree]:
    """Predicted classes (n,) on the test rows named `on`, and their mean cross-entropy ().

    Args:
        party: the party to evaluate.
        on: a name in `Site.tests`.
        way: how the party prepares its network before, one of the config's `eval_modes`; "" for no way.
        handout: what the server hands out to everybody before.
    """
    with party.scratch():
        party.prepare(eval_mode=eval_mode, broadcast=broadcast or {})
        logits = party.infer(party.context.tests[on].every)
    return {"predicted": logits.argmax(-1), "loss": F.cross_entropy(logits, _labels(party, on))}


def score(
    party: Party[Any], *, on: str, eval_mode: str = "", broadcast: Mapping[str, Tree] | None = None
) -> dict[str, Tree]:
    """How good `predictions` are where nobody else may see labels, in four numbers; arguments as there.

    `chance` is the accuracy of always predicting the most frequent class. The loss is clipped at `MAX_LOSS` and has
    three decimals, so that a model made for it can't read a row from it.
    """
    found: Any = predictions(party, on=on, eval_mode=eval_mode, broadcast=broadcast)
    labels = _labels(party, on)
    return {
        "accuracy": (found["predicted"] == labels).float().mean(),
        "loss": found["loss"].float().clamp(max=MAX_LOSS).round(decimals=3),
        "chance": labels.bincount().max() / len(labels),
        "rows": len(party.context.tests[on]),
    }


def predictions_alone(party: Party[Any], *, on: str) -> dict[str, Tree]:
    """The classes (n,) that a party with columns predicts alone on the test rows named `on`."""
    if not isinstance(party, PredictsAlone):
        raise MethodError(f"{type(party).__name__} can't predict alone: define alone()")
    return {"predicted": party.alone(party.infer(party.context.tests[on].every)).argmax(-1)}


def contribution(party: Party[Any], *, on: str) -> Tree:
    """What a party with columns contributes to a joint prediction of the test rows named `on`."""
    if not isinstance(party, PassiveParty):
        raise MethodError(f"{type(party).__name__} has nothing to contribute: define contribution()")
    return party.contribution(on=on)


def decide(server: Party[Any] | None, contributions: Mapping[int, Any]) -> Tensor:
    """The active party's logits (n, K) from what all parties contribute."""
    if not isinstance(server, ActiveParty):
        raise MethodError(f"{type(server).__name__} decides nothing: define decide()")
    return server.decide(contributions)


EVALUATIONS: Final[Mapping[str, Callable[..., Tree]]] = {
    "predictions": predictions,
    "score": score,
    "predictions_alone": predictions_alone,
    "contribution": contribution,
}
"""The evaluations that an engine runs at a party, by name. No message of a page may have one of these names."""


def _labels(party: Party[Any], on: str) -> Tensor:
    rows = party.context.tests[on]
    return rows.y(torch.arange(len(rows), device=party.context.device))
