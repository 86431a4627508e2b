"""What a run asks of a party, counted from its config before it begins."""

from collections.abc import Sequence

from fedloom.core.federation import participants
from fedloom.core.method import MethodConfig
from fedloom.experiment.config.run import RunConfig

POINTS = 100
"""Rounds after which a run is evaluated, unless `evaluate.points` says otherwise."""


def evenly(points: int, rounds: int) -> set[int]:
    """At most `points` evenly spaced round numbers, the last one included."""
    points = min(points, rounds)
    return {round(rounds * k / points) for k in range(1, points + 1)}


def evaluated(run: RunConfig, rounds: int) -> set[int]:
    """The rounds, counted from 1, after whose stages a run is evaluated."""
    return evenly(run.evaluate.points or POINTS, rounds)


def evaluations(run: RunConfig, cfg: MethodConfig, rounds: int, done: int = 0) -> int:
    """How often a run is evaluated after so many rounds are done, its start included."""
    later = (t for t in evaluated(run, rounds) if t > done)
    more = run.resolve()[0].extra_stages
    return (done == 0) + sum(max(1, cfg.stages_in_round(t - 1)) + more for t in later)


def taking_part(
    run: RunConfig, cfg: MethodConfig, number: int, rounds: int, done: int = 0
) -> Sequence[int]:
    """The rounds, from `done` on, that a party takes part in if all parties reply."""
    unseen = run.data.unseen_clients(run.seed)
    training = [i for i in range(run.data.clients) if i not in unseen]
    k = getattr(cfg, "clients_per_round", None)
    return [
        t
        for t in range(done, rounds)
        if number in participants(run.seed, run.churn.present(training, t), k, t)
    ]


def members_of_rounds(run: RunConfig, cfg: MethodConfig, rounds: int) -> list[int]:
    """How many parties take part in each round, if all reply."""
    unseen = run.data.unseen_clients(run.seed)
    training = [i for i in range(run.data.clients) if i not in unseen]
    return [cfg.participants(len(run.churn.present(training, t))) for t in range(rounds)]
