"""Evaluates and summarizes horizontal runs: parties with different rows of the same columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedloom.core.engine import Engine
from fedloom.core.scores import NUMBER_SCORED, SCORED
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import numbers
from fedloom.experiment.run.evaluate import (
    CHANCE,
    Measured,
    call_all,
    check_score,
    client_metrics,
    client_scores,
    client_spread,
    clients_by_metric,
    recalls,
)
from fedloom.experiment.run.leaks import of_clients
from fedloom.experiment.run.metrics import GLOBAL, MAIN, OWN, Metric
from fedloom.experiment.run.result import Final, over_clients, over_groups
from fedloom.protect.leaks import Leak


class HorizontalEvaluation:
    """The evaluation of a horizontal run, see `Evaluation`."""

    def main_metric(self, plan: RunPlan) -> Metric:
        """The main metric of the task on own rows in the method's first evaluation mode, or on the
        global test set.
        """
        on_test, own = MAIN[plan.data.task.kind]
        mode = plan.method.main_mode(plan.cfg)
        return replace(own, mode=mode) if mode else on_test

    def party_metrics(self, plan: RunPlan) -> set[Metric]:
        """The main metric, over unseen and over training clients."""
        main = self.main_metric(plan)
        return {main, main.training}

    def evaluate(self, plan: RunPlan, engine: Engine, final: bool = False) -> Iterator[Measured]:
        """Evaluate each client on the global test set and on its own rows, the latter also in each
        evaluation mode. With private rows, clients compute their scores.
        """
        broadcast = plan.server.broadcast() if plan.server is not None else {}
        if plan.data.target is not None:
            yield from (
                numbers.by_scores(plan, engine, broadcast)
                if plan.run.data.own
                else numbers.by_predictions(plan, engine, broadcast, final)
            )
            return
        if plan.run.data.own:
            yield from _by_scores(plan, engine, broadcast)
            return
        yield from _by_predictions(plan, engine, broadcast)
        for on in plan.data.labels if final else ():
            found = client_scores(
                engine, plan.data.labels[on], len(plan.data.classes), on, broadcast
            )
            for name, each in found.items():
                for metric, value, party in client_spread(
                    Metric(name, own=on != "test"), each, engine.name
                ):
                    if metric != "loss mean":  # which every evaluation has
                        yield metric, value, party

    def leaks(self, plan: RunPlan, engine: Engine) -> list[Leak]:
        """Attacks on all messages that clients sent."""
        return of_clients(plan, engine)

    def summarize(self, final: Final, parties: Sequence[str], plan: RunPlan) -> dict[str, Any]:
        """The main metrics of `RunSummary`, without and in each evaluation mode."""
        names = SCORED if plan.data.target is None else NUMBER_SCORED
        scores = (Metric(name, own=own) for own in (False, True) for name in names)
        return {
            **over_groups(final, parties, plan.cfg.eval_modes, plan.unseen, plan.data.task.kind),
            "client_scores": {
                str(score): found
                for score in scores
                if (found := over_clients(final, score, parties)) is not None
            },
        }


def _by_predictions(
    plan: RunPlan, engine: Engine, broadcast: Mapping[str, Any]
) -> Iterator[Measured]:
    labels, classes = plan.data.labels, plan.data.classes
    looks = [(on, "", GLOBAL if on == "test" else OWN) for on in labels]
    looks += [
        (list(labels)[-1], eval_mode, replace(OWN, mode=eval_mode))
        for eval_mode in plan.cfg.eval_modes
    ]
    for on, eval_mode, metric in looks:
        seen = client_metrics(engine, labels[on], len(classes), on, eval_mode, broadcast)
        accuracy = dict(zip(seen.clients, seen.accuracy, strict=True))
        for called, group in clients_by_metric(metric, plan).items():
            yield from client_spread(
                called, {i: accuracy[i] for i in group if i in accuracy}, engine.name
            )
        if metric == GLOBAL:
            yield "loss mean", float(seen.loss.mean()), ""
            if np.isfinite(seen.agreement):
                yield "agreement", seen.agreement, ""
            yield from recalls(classes, seen.recall)


def _by_scores(plan: RunPlan, engine: Engine, broadcast: Mapping[str, Any]) -> Iterator[Measured]:
    for eval_mode in ("", *plan.cfg.eval_modes):
        scores = call_all(
            engine,
            "score",
            {"on": "own", "eval_mode": eval_mode, "broadcast": broadcast},
            check_score,
        )
        metric = replace(OWN, mode=eval_mode) if eval_mode else GLOBAL
        for called, group in clients_by_metric(metric, plan).items():
            yield from client_spread(
                called, {i: float(scores[i]["accuracy"]) for i in group if i in scores}, engine.name
            )
        if not eval_mode:
            yield (
                "loss mean",
                float(np.mean([float(score["loss"]) for score in scores.values()])),
                "",
            )
            yield CHANCE, float(np.mean([float(score["chance"]) for score in scores.values()])), ""
