"""Evaluates horizontal runs that predict a number: errors in its own unit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.core import message
from fedloom.core.engine import Engine
from fedloom.core.errors import MessageError, TrainingDiverged
from fedloom.core.message import Template, Tree, floats
from fedloom.core.scores import NUMBER_SCORED, number_scores
from fedloom.core.task import Number
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.evaluate import (
    CHANCE,
    Measured,
    call_all,
    client_spread,
    clients_by_metric,
)
from fedloom.experiment.run.metrics import OWN_RMSE, RMSE, Metric

SCORE: Template = {"squared": floats(), "absolute": floats(), "chance": floats(), "rows": int}
"""Template of the reply of a client whose labels are private: see
`fedloom.core.evaluation.number_score`.
"""


def check_score(i: int, scores: Mapping[int, Any]) -> None:
    """A `Check` of `SCORE`."""
    message.check_like(scores[i], SCORE)
    score = {name: float(value) for name, value in scores[i].items()}
    if not all(np.isfinite(value) and value >= 0 for value in score.values()) or score["rows"] < 1:
        raise MessageError("errors must be finite and at least 0, rows at least 1")


def by_predictions(
    plan: RunPlan, engine: Engine, broadcast: Mapping[str, Tree], final: bool
) -> Iterator[Measured]:
    """The root mean squared error of each client on each set of test rows, in all evaluation modes;
    the mean loss; at the end (`final`) the other scores of numbers, too.
    """
    labels, target = plan.data.labels, _target(plan)
    looks = [(on, "", RMSE if on == "test" else OWN_RMSE) for on in labels]
    looks += [
        (list(labels)[-1], eval_mode, replace(OWN_RMSE, mode=eval_mode))
        for eval_mode in plan.cfg.eval_modes
    ]
    for on, eval_mode, metric in looks:
        scores, losses = client_errors(engine, labels[on], target, on, eval_mode, broadcast)
        for called, group in clients_by_metric(metric, plan).items():
            yield from client_spread(
                called, {i: scores[i]["rmse"] for i in group if i in scores}, engine.name
            )
        if metric == RMSE:
            yield "loss mean", float(np.mean([*losses.values()])), ""
        if final and not eval_mode:
            for name in NUMBER_SCORED:
                known = {i: found[name] for i, found in scores.items() if np.isfinite(found[name])}
                yield from client_spread(Metric(name, own=metric.own), known, engine.name)


def by_scores(plan: RunPlan, engine: Engine, broadcast: Mapping[str, Tree]) -> Iterator[Measured]:
    """The same errors of clients that keep their rows and compute their scores."""
    target = _target(plan)
    for eval_mode in ("", *plan.cfg.eval_modes):
        asked = {"on": "own", "eval_mode": eval_mode, "broadcast": dict(broadcast)}
        scores = call_all(engine, "score", asked, check_score)
        metric = replace(OWN_RMSE, mode=eval_mode) if eval_mode else RMSE
        errors = {i: float(score["squared"]) for i, score in scores.items()}
        for called, group in clients_by_metric(metric, plan).items():
            each = {i: target.scale * float(np.sqrt(errors[i])) for i in group if i in errors}
            yield from client_spread(called, each, engine.name)
        if not eval_mode:
            yield "loss mean", float(np.mean([*errors.values()])) / 2, ""
            chances = [float(np.sqrt(float(score["chance"]))) for score in scores.values()]
            yield CHANCE, target.scale * float(np.mean(chances)), ""


def of_joint(plan: RunPlan, outputs: Tensor) -> Iterator[Measured]:
    """The scores of a joint prediction from the active party's outputs (n, W).

    Raises:
        TrainingDiverged: the outputs are not finite.
    """
    target, y = _target(plan), plan.data.labels["test"][0]
    if not outputs.isfinite().all():
        raise TrainingDiverged("predictions are not finite, as training diverged: lower params.lr")
    labels = torch.from_numpy(target.standardized(y)).to(outputs.device)
    found = number_scores(y, target.in_unit(target.predicted(outputs).cpu().numpy()))
    yield RMSE.mean, found["rmse"], ""
    yield RMSE.std, 0.0, ""
    yield "loss mean", float(target.loss(outputs, labels)), ""
    yield from ((name, found[name], "") for name in NUMBER_SCORED if np.isfinite(found[name]))


def client_errors(
    engine: Engine,
    labels: Sequence[np.ndarray],
    target: Number,
    on: str,
    eval_mode: str,
    broadcast: Mapping[str, Tree],
) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """`number_scores` and the mean loss of every reachable client on its test rows `on`.

    Args:
        engine: of the run.
        labels: (n,) numbers for each client, in their unit.
        target: their scale.
        on: a name in `ClientContext.tests`.
        eval_mode: one of the method's `eval_modes`; "" for the unchanged model.
        broadcast: of the server.
    """

    def check(i: int, replies: Mapping[int, Tree]) -> None:
        message.check_like(replies[i], {"predicted": floats(len(labels[i])), "loss": floats()})

    arguments: dict[str, Tree] = {"on": on, "eval_mode": eval_mode, "broadcast": dict(broadcast)}
    replies = call_all(engine, "predictions", arguments, check)
    predicted = {
        i: target.in_unit(reply["predicted"].cpu().numpy()) for i, reply in replies.items()
    }
    return (
        {i: number_scores(labels[i], found) for i, found in predicted.items()},
        {i: float(reply["loss"]) for i, reply in replies.items()},
    )


def _target(plan: RunPlan) -> Number:
    assert plan.data.target is not None
    return plan.data.target
