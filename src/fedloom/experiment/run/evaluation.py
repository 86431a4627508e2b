"""How a run is evaluated: by `Method.setting`."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from fedloom.core.engine import Engine
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.evaluate import Measured
from fedloom.experiment.run.horizontal import HorizontalEvaluation
from fedloom.experiment.run.metrics import Metric
from fedloom.experiment.run.result import Final
from fedloom.experiment.run.vertical import VerticalEvaluation
from fedloom.protect.leaks import Leak


class Evaluation(Protocol):
    """Evaluates and summarizes horizontal, or vertical, runs."""

    def main_metric(self, plan: RunPlan) -> Metric:
        """The main metric."""

    def party_metrics(self, plan: RunPlan) -> set[Metric]:
        """The metrics of a single party's accuracy."""

    def evaluate(self, plan: RunPlan, engine: Engine, final: bool = False) -> Iterator[Measured]:
        """All metrics of the current models; `final` adds those that only the end of a run has.

        Raises:
            PartiesMissing: no party can be evaluated, or one cannot where all are needed.
            MethodError: a party in this process fails.
        """

    def leaks(self, plan: RunPlan, engine: Engine) -> list[Leak]:
        """The success of the attacks on this run's messages."""

    def summarize(self, final: Final, parties: Sequence[str], plan: RunPlan) -> dict[str, Any]:
        """The fields of `RunSummary` that depend on the setting, from the final metrics and the
        parties' names.
        """


EVALUATIONS: dict[str, Evaluation] = {
    "horizontal": HorizontalEvaluation(),
    "vertical": VerticalEvaluation(),
}


def evaluation_of(plan: RunPlan) -> Evaluation:
    """The evaluation of a run's setting."""
    return EVALUATIONS[plan.method.setting]
