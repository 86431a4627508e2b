"""Each release with noise is charged to the budget of its rows before it is drawn, whatever method
makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fedloom.core.errors import FedloomError, PrivacyBudgetSpent
from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.experiment.plan.build import build, with_secret
from fedloom.experiment.run.engine import start
from fedloom.methods import registry
from fedloom.protect import noise
from tests.engines.test_every_method import run_of
from tests.privacy.test_noninterference import DP, WAYS

SHARES = {"dp": DP}
METHODS = {
    "weights": "fedavg-dp",
    "weights of peers": "gossip",
    "φ": "afind-plus",
    "mean embedding": "fedmd",
    "leaves": "fedextra",
}
EACH = [*((METHODS[way], params) for way, params in WAYS.items()), ("fedsgd-dp", SHARES)]
"""A method of each way to promise an ε."""
SOURCES = ("_normal", "_uniform", "skellam")


def events(
    name: str,
    params: dict[str, Any],
    allows: Callable[[int], bool],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:
    """The charges and draws of a round, in their order."""
    small, found = run_of(name, "none"), list[str]()
    how = small.aggregate.model_copy(update={"secure": params is SHARES})
    data = small.data.model_copy(update={"clients": 3})
    changes = {"data": data, "faults": Faults(), "params": small.params | params, "aggregate": how}
    plan = with_secret(build(small.model_copy(update=changes)), 7)

    def budget(*_: float) -> None:
        found.append("charge")
        if not allows(found.count("charge")):
            raise PrivacyBudgetSpent("spent")

    plan.contexts[:] = [replace(context, privacy_budget=budget) for context in plan.contexts]
    for source in SOURCES:
        drawn = getattr(noise, source)
        monkeypatch.setattr(
            noise, source, lambda *of, drawn=drawn: found.append("noise") or drawn(*of)
        )
    with start(plan) as engine, contextlib.suppress(FedloomError):
        graph = None if plan.graph is None else dict(enumerate(plan.graph))
        fed = Federation(
            engine,
            seed=0,
            graph=graph,
            aggregator=plan.contexts[0].aggregator,
            param_shapes=plan.param_shapes,
        )
        for _ in registry()[name].round(fed, plan.server, engine.ids, plan.cfg, 0):
            pass
    return found


@pytest.mark.parametrize(
    ("name", "params"), EACH, ids=[f"{name} {[*params]}" for name, params in EACH]
)
def test_noise_is_drawn_after_its_charge_and_not_where_the_budget_refuses(
    name: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        order = events(name, params, lambda _: True, patch)
    assert order[0] == "charge" and order[-1] == "noise" and order.count("charge") >= 3
    with monkeypatch.context() as patch:
        assert {*events(name, params, lambda _: False, patch)} == {"charge"}
