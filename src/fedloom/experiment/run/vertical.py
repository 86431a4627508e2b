"""Evaluates and summarizes vertical runs: parties with different columns of the same rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedloom.core import message
from fedloom.core.engine import Engine, Failure
from fedloom.core.errors import MessageError, TrainingDiverged
from fedloom.core.evaluation import decide
from fedloom.core.scores import calibration_error
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import numbers
from fedloom.experiment.run.attacks import label_attacks, successes
from fedloom.experiment.run.evaluate import (
    Measured,
    call_all,
    check_predictions,
    classifier_metrics,
    recalls,
)
from fedloom.experiment.run.leaks import of_columns
from fedloom.experiment.run.metrics import GLOBAL, MAIN, OWN, Metric
from fedloom.experiment.run.result import Final, joint_scores
from fedloom.protect.leaks import Leak


class VerticalEvaluation:
    """The evaluation of a vertical run, see `Evaluation`."""

    def main_metric(self, plan: RunPlan) -> Metric:
        """Accuracy of the joint prediction, or its error."""
        return MAIN[plan.data.task.kind][0]

    def party_metrics(self, plan: RunPlan) -> set[Metric]:
        """Accuracy in the method's first evaluation mode, in which parties predict alone."""
        return {
            replace(self.main_metric(plan), mode=eval_mode) for eval_mode in plan.cfg.eval_modes[:1]
        }

    def evaluate(self, plan: RunPlan, engine: Engine, final: bool = False) -> Iterator[Measured]:
        """Evaluate the joint prediction, each party alone in the evaluation modes, and attacks on
        labels.
        """
        labels, classes = plan.data.labels, plan.data.classes
        parts = _contributions(plan, engine, "test")
        if plan.data.target is not None:
            yield from numbers.of_joint(plan, decide(plan.server, parts))
            return
        probabilities = torch.softmax(decide(plan.server, parts), -1).cpu().numpy()
        y = labels["test"][0]
        if not np.isfinite(probabilities).all():
            raise TrainingDiverged(
                "predictions are not finite, as training diverged: lower params.lr"
            )
        found = classifier_metrics(probabilities, y)
        rare = np.isin(y, plan.run.columns.rare_classes)
        yield GLOBAL.mean, found.accuracy, ""
        yield GLOBAL.std, 0.0, ""
        yield "loss mean", found.log_loss, ""
        yield "balanced accuracy", found.balanced, ""
        if np.isfinite(found.auc):
            yield "auc", found.auc, ""
        yield "calibration error", calibration_error(y, probabilities), ""
        if rare.any() and not rare.all():  # a mean over both would hide a recall of 0
            right = probabilities.argmax(1) == y
            yield "seen accuracy", float(right[~rare].mean()), ""
            yield "rare recall", float(right[rare].mean()), ""
        yield from recalls(classes, found.recall)
        for eval_mode in plan.cfg.eval_modes:
            for on, rows in {"test": GLOBAL, "own": OWN}.items():
                if on not in labels:
                    continue
                replies = call_all(
                    engine,
                    "predictions_alone",
                    {"on": on},
                    check_predictions(labels[on]),
                    every=True,
                )
                each = [
                    float((reply["predicted"].cpu().numpy() == y).mean())
                    for reply, y in zip(replies.values(), labels[on], strict=True)
                ]
                metric = replace(rows, mode=eval_mode)
                yield from (
                    (str(metric), value, engine.name(i))
                    for i, value in zip(replies, each, strict=True)
                )
                yield metric.mean, float(np.mean(each)), ""
        if plan.run.evaluate.attack_labels is not None:
            yield from label_attacks(plan, _contributions(plan, engine, "aligned"), engine.name)

    def leaks(self, plan: RunPlan, engine: Engine) -> list[Leak]:
        """Attacks on labels and columns, by the messages of one moment."""
        embedded = _contributions(plan, engine, "aligned")
        return of_columns(plan, embedded, successes(plan, embedded, 1))

    def summarize(self, final: Final, parties: Sequence[str], plan: RunPlan) -> dict[str, Any]:
        """The fields of `RunSummary` for a joint prediction: its scores, each party alone, and
        attacks.
        """
        return joint_scores(final, parties, plan.cfg.eval_modes, plan.data.task.kind)


def _contributions(plan: RunPlan, engine: Engine, on: str) -> dict[int, Any]:
    """The contributions of all parties for the rows `on`; if any party suffices for the method, of
    those that reply. Those of nodes must be like the colocated party's.
    """

    def check(i: int, parts: Mapping[int, Any]) -> None:
        message.check_finite(parts[i])
        colocated = parts[plan.colocated[0]]
        if isinstance(colocated, Failure):
            return
        if "no network" in plan.method.needs:  # each has as many numbers as its party has columns
            message.check_like(parts[i], message.Shape(colocated.dtype, len(colocated), None))
        elif (got := message.describe(parts[i])) != message.describe(colocated):
            raise MessageError(f"expected {message.describe(colocated)}, got {got}")

    return call_all(
        engine, "contribution", {"on": on}, check, every=not plan.method.any_contributor
    )
