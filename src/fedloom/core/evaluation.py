"""Evaluation of parties outside the protocol: predictions on test rows, and their score.

An engine runs each function of `EVALUATIONS` at a party by its name. None is a message of a method,
and none changes a party's state. In a vertical setting pages define the hooks of `PassiveParty` and
`ActiveParty`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from fedloom.core.errors import MethodError
from fedloom.core.message import Tree, map_tensors
from fedloom.core.party import Party
from fedloom.core.scores import number_scores, scored

MAX_LOSS: Final = 10.0
"""Upper clip on losses of private rows."""
MAX_ERROR: Final = 25.0
"""Upper clip on the squared error of each private row, in squared s.d. of the target."""


@runtime_checkable
class PassiveParty(Protocol):
    """A party of a vertical federation that holds columns and no labels. Party 0 holds the active
    party's columns.
    """

    def contribution(self, *, on: str) -> Tree:
        """The input of the active party's prediction for the test rows named `on`, such as
        embeddings (n, d). With `on="aligned"`, the same for the aligned rows as sent in training,
        on which label attacks are based.
        """


@runtime_checkable
class PredictsAlone(PassiveParty, Protocol):
    """A passive party that can predict without the others."""

    def alone(self, embedded: Tensor) -> Tensor:
        """Logits (n, K) from its own network's outputs (n, d)."""


@runtime_checkable
class ActiveParty(Protocol):
    """The party of a vertical federation that holds the labels and runs the rounds."""

    def decide(self, contributions: Mapping[int, Any]) -> Tensor:
        """Logits (n, K) from each party's contribution, by its id."""


@runtime_checkable
class LeaksLabels(ActiveParty, Protocol):
    """An active party that declares which of its messages depend on labels."""

    def exposed(self, contributions: Mapping[int, Tensor]) -> Mapping[str, Mapping[int, Tensor]]:
        """The label-dependent messages that each party would receive next, by kind and party; it
        changes no state.

        `contributions` (N_a, d) are of the aligned rows. Kinds, on which `fedloom.protect.attacks`
        has attacks: "gradients" (N_a, d) of the loss by a contribution; "logit gradients", the same
        where contributions are logits (N_a, K); and "prototypes" (K, d), zeros for a class that has
        none.
        """


@runtime_checkable
class Restorable(Protocol):
    """A party whose exported state has tensors of other shapes than a new party's,
    such as trees.
    """

    def restore(self, state: Any) -> None:
        """Take the state, by name in `EXPORT`, from a folder that anybody may have written.

        Raises:
            MessageError: it is not one that such a party exports.
        """


def predictions(
    party: Party[object],
    *,
    on: str,
    eval_mode: str = "",
    broadcast: Mapping[str, Tree] | None = None,
    probabilities: bool = False,
) -> dict[str, Tensor]:
    """Predicted classes, or standardized numbers, (n,) on the test rows named `on` in
    `ClientContext.tests`, the mean loss () and with `probabilities` the probabilities of all
    classes (n, K), or the outputs for a number (n, W). `Party.prepare` gets the other arguments.
    """
    task, outputs = party.context.task.unweighted, _outputs(party, on, eval_mode, broadcast)
    found = {"predicted": task.predicted(outputs), "loss": task.loss(outputs, _labels(party, on))}
    return {**found, "probabilities": task.soft(outputs)} if probabilities else found


def score(
    party: Party[object],
    *,
    on: str,
    eval_mode: str = "",
    broadcast: Mapping[str, Tree] | None = None,
) -> dict[str, Tree]:
    """Four summary numbers of `predictions`, for test rows whose labels are private; arguments as
    there. Those of numbers are of `number_score`.

    `chance` is the accuracy of always predicting the most frequent class. The loss of each row is
    clipped at `MAX_LOSS` and their mean rounded to three decimals, so that a malicious model cannot
    encode a row in it.
    """
    task = party.context.task.unweighted
    outputs = _outputs(party, on, eval_mode, broadcast)
    labels = _labels(party, on)
    predicted = task.predicted(outputs)
    if party.context.target is not None:
        return number_score(predicted, labels)
    losses = torch.nan_to_num(task.loss(outputs, labels, "none").float(), nan=MAX_LOSS).clamp(
        max=MAX_LOSS
    )
    return {
        "accuracy": (predicted == labels).float().mean(),
        "loss": losses.mean().round(decimals=3),
        "chance": labels.bincount().max() / len(labels),
        "rows": len(party.context.tests[on]),
    }


def worst_score(party: Party[object], *, on: str) -> dict[str, Tree]:
    """The `score` of a model that cannot predict: all rows count most. Whether it can may depend on
    a row.
    """
    labels = _labels(party, on)
    if party.context.target is not None:
        return number_score(torch.full_like(labels, torch.inf), labels)
    chance = labels.bincount().max() / len(labels)
    return {
        "accuracy": torch.tensor(0.0),
        "loss": torch.tensor(MAX_LOSS),
        "chance": chance,
        "rows": len(labels),
    }


def number_score(predicted: Tensor, y: Tensor) -> dict[str, Tree]:
    """Four summary numbers of standardized predictions (n,) of y (n,), for test rows whose labels
    are private: the mean squared and the mean absolute error, the mean squared error of the best
        constant, and the rows.

    Each row counts at most `MAX_ERROR`, and means are rounded to three decimals, so that a
    malicious model cannot encode a row in them.
    """
    squared = torch.nan_to_num((predicted - y) ** 2, nan=MAX_ERROR).clamp(max=MAX_ERROR)
    around = torch.nan_to_num((y - y.mean()) ** 2, nan=MAX_ERROR).clamp(max=MAX_ERROR)
    means = {"squared": squared.mean(), "absolute": squared.sqrt().mean(), "chance": around.mean()}
    return {**{k: v.round(decimals=3) for k, v in means.items()}, "rows": len(y)}


def exact_scores(
    party: Party[object],
    *,
    on: str,
    eval_mode: str = "",
    broadcast: Mapping[str, Tree] | None = None,
) -> dict[str, float]:
    """The number of rows and their scores: the accuracy and those of `fedloom.core.scores.scored`,
    or those of `fedloom.core.task.number_scores` in the number's unit; arguments as in
    `predictions`.

    They are for the owner of the rows: no engine runs this for a coordinator.
    """
    found = predictions(party, on=on, eval_mode=eval_mode, broadcast=broadcast, probabilities=True)
    y, p = _labels(party, on).cpu().numpy(), found["probabilities"].double().cpu().numpy()
    if (target := party.context.target) is not None:
        predicted = found["predicted"].cpu().numpy()
        return {"rows": len(y), **number_scores(target.in_unit(y), target.in_unit(predicted))}
    return {"rows": len(y), "accuracy": float((p.argmax(1) == y).mean()), **scored(y, p)}


def prepared_state(
    party: Party[object], names: Sequence[str], *, eval_mode: str, broadcast: Mapping[str, Tree]
) -> dict[str, Tree]:
    """A copy of these parts of a party's state, in the model that an evaluation in this mode
    uses.
    """
    # as an engine begins a call outside of rounds: training before a mode may draw
    (torch.default_generator if party.context.device == "cpu" else torch).manual_seed(0)
    party.at_round(-1)
    with party.scratch():
        party.prepare(eval_mode=eval_mode, broadcast=broadcast)
        state = party.state()
        return {name: map_tensors(torch.clone, state[name]) for name in names}


def predictions_alone(party: Party[object], *, on: str) -> dict[str, Tensor]:
    """The classes (n,) that a passive party predicts alone on the test rows named `on`."""
    if not isinstance(party, PredictsAlone):
        raise MethodError(f"{type(party).__name__} cannot predict alone; define alone()")
    return {"predicted": party.alone(party.infer(party.context.tests[on].every)).argmax(-1)}


def contribution(party: Party[object], *, on: str) -> Tree:
    """A passive party's contribution to the joint prediction of the test rows named `on`: zeros for
    those it lacks.
    """
    if not isinstance(party, PassiveParty):
        raise MethodError(
            f"{type(party).__name__} cannot contribute to joint predictions; define contribution()"
        )
    found = party.contribution(on=on)
    present = party.context.tests[on].present if on in party.context.tests else None
    if present is None:
        return found
    return map_tensors(lambda x: x * present.view(-1, *[1] * (x.dim() - 1)), found)


def decide(server: Party[object] | None, contributions: Mapping[int, Any]) -> Tensor:
    """The active party's logits (n, K) from all parties' contributions."""
    if not isinstance(server, ActiveParty):
        raise MethodError(
            f"{type(server).__name__} cannot predict from contributions; define decide()"
        )
    return server.decide(contributions)


EVALUATIONS: Final[Mapping[str, Callable[..., Tree]]] = {
    "predictions": predictions,
    "score": score,
    "predictions_alone": predictions_alone,
    "contribution": contribution,
}
"""The evaluations that an engine runs at a party, by name. No method of a page may have one of
these names.
"""


def _outputs(
    party: Party[object], on: str, eval_mode: str, broadcast: Mapping[str, Tree] | None
) -> Tensor:
    """The outputs (n, W) for the test rows named `on`."""
    with party.scratch():
        party.prepare(eval_mode=eval_mode, broadcast=broadcast or {})
        return party.infer(party.context.tests[on].every)


def _labels(party: Party[object], on: str) -> Tensor:
    rows = party.context.tests[on]
    return rows.y(torch.arange(len(rows), device=party.context.device))
