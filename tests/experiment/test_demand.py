"""What a run will ask, counted before it begins, against what it asks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fedloom.core.faults import Faults
from fedloom.experiment.config.run import EvaluateConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.demand import evaluations, taking_part
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import execute
from fedloom.experiment.run.session import Session
from fedloom.methods import registry
from tests.engines.test_every_method import run_of

METHODS = sorted(name for name, method in registry().items() if method.setting == "horizontal")


@pytest.mark.each_time("fedal", "fedavg")
@pytest.mark.parametrize("points", [None, 2])
@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_evaluated_as_often_as_its_config_says(
    name: str, points: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(name, "none").model_copy(
        update={"faults": Faults(), "evaluate": EvaluateConfig(points=points)}
    )
    made: list[int] = []
    evaluate = Session._evaluate

    def counted(self: Session, round: int, *more: Any) -> None:
        made.append(round)
        evaluate(self, round, *more)

    monkeypatch.setattr(Session, "_evaluate", counted)
    execute(run)
    method, cfg, rounds = run.resolve()
    assert method.name == name
    for done in range(rounds + 1):
        later = [t for t in made if t > done or (t == 0 and done == 0)]
        assert evaluations(run, cfg, rounds, done) == len(later)


PRIVATE: dict[str, dict[str, Any]] = {
    "fedavg-dp": {"clients_per_round": 2, "batch_size": 8},
    "fedlp-dp": {"batch_size": 8},
    "gossip": {"dp": {"unit": "rows"}, "batch_size": 8},
    "fedal": {"trust": "kernel", "trust_epsilon": 2.0, "tau": 2, "batch_size": 8, "adv": 0.0},
    "afind-plus": {"threshold": "anchored", "mode": "cheap", "dp": {"target": "phi"}},
    "ditto-afind": {
        "threshold": "calibrated",
        "explore_by": "probe",
        "dp": {"target": "phi"},
        "epochs": 1,
    },
}
"""Settings with which parties charge a budget."""
ALL_ASK = ("fedavg", "fedavg-ft", "gossip", "fedal")
"""Methods whose parties charge as much as they may; of the others each peer asks whom it likes."""


@pytest.mark.parametrize("name", PRIVATE)
def test_no_party_charges_more_than_its_run_was_counted_for(name: str) -> None:
    small = run_of(name, "none")
    models = {"pool": ["linear"]} if name in ("fedavg-dp", "gossip") else {}
    if models:
        PRIVATE[name]["personal_head"] = False
    run = small.model_copy(
        update={
            "faults": Faults(),
            "params": PRIVATE[name],
            "models": small.models.model_copy(update=models and {"pool": ("linear",)}),
        }
    )
    plan = build(run)
    charged: dict[int, list[tuple[float, ...]]] = {}
    for i, context in enumerate(plan.contexts):
        book = charged.setdefault(i, [])
        plan.contexts[i] = replace(
            context, secret=7, privacy_budget=lambda *release, book=book: book.append(release)
        )
    with start(plan) as engine:
        session = Session(plan, engine, None)
        session.begin(False)
        session.go(lambda _: None, lambda: False)
    for i, book in charged.items():
        party = plan.clients[i]()
        turns = taking_part(run, plan.cfg, i, plan.rounds)
        counted, spent = (added(found) for found in (plan.cfg.charges(party, turns), book))
        assert spent and spent.keys() <= counted.keys()
        assert all(count <= counted[release] for release, count in spent.items())
        if name in ALL_ASK:
            assert spent == counted


def added(releases: Sequence[tuple[float, ...]]) -> dict[tuple[float, ...], int]:
    """The number of equal releases."""
    found: dict[tuple[float, ...], int] = {}
    for sigma, *more in releases:
        count, rate, *excess = (*more, *(1.0, 1.0)[len(more) :])
        key = (sigma, rate, *excess)
        found[key] = found.get(key, 0) + int(count)
    return found
