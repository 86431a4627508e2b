"""What one message of a distillation method can tell at most: so many bytes, by public settings
alone (S6).

Each method of the registry is here; the clients of a run have different numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fedloom.core.faults import Faults
from fedloom.core.federation import Federation
from fedloom.core.ledger import Entry
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run.engine import start
from fedloom.methods import registry
from fedloom.methods.distillation.trust import TrustSettings
from tests.engines.test_every_method import run_of

Bound = Callable[["Sizes"], int]
METHODS = {name: method for name, method in registry().items() if method.family == "distillation"}


class Sizes:
    """Public sizes of a run: B rows of a batch, K classes, P public rows, S rows of the server, the
    largest model.
    """

    def __init__(self, plan: RunPlan) -> None:
        contexts = plan.contexts
        self.B, self.K = getattr(plan.cfg, "batch_size", 0), contexts[0].classes
        self.P = len(contexts[0].public.rows) if contexts[0].public is not None else 0
        self.S = len(plan.server_context.data) if plan.server_context.data is not None else 0
        models = [context.build() for context in contexts]
        self.model = 4 * max(sum(x.numel() for x in m.state_dict().values()) for m in models)
        self.d = 64  # features of the networks here


LOGITS: Mapping[str, Bound] = {"predict": lambda s: 4 * s.B * s.K}
MODEL: Mapping[str, Bound] = {"update": lambda s: s.model + 8}
MOST: dict[str, Mapping[str, Bound]] = {
    **dict.fromkeys(("cfd", "fccl", "fedal", "fedmd", "fedmd-lf"), LOGITS),
    "local": {},
    "fccl-plus": {"predict": lambda s: 4 * s.B * (s.K + s.B - 1)},
    "fd": {"update": lambda s: 4 * s.K * s.K + s.K},
    "fedmosaic": {"vote": lambda s: 6 * s.P},
    "feddf": MODEL,
    "fedavg-adam": MODEL,
    "feddf-al": {**LOGITS, "give": lambda s: s.model + 8},
    "fedproto-public": {"embed": lambda s: 4 * s.B * s.d},
    "fens": {"send": lambda s: s.model, "learn_aggregator": lambda s: s.model},
    "fens-student": {"answer": lambda s: 4 * s.K * (s.S + s.P)},
}
"""Bytes of one message of each kind; of a kind that is not here, none."""
TRUST: dict[str, Bound] = {
    "distance": lambda s: 4 * s.P,
    "select": lambda s: -(-s.P // 8),
    "kernel": lambda s: 2048 + 8,
}
"""Of an introduction, by `trust`."""


def sent(name: str, **params: Any) -> tuple[Sizes, list[Entry]]:
    """What clients send in three rounds of a method."""
    small = run_of(name, "none")
    data = small.data.model_copy(update={"clients": 3})
    changes = {"rounds": 3, "data": data, "faults": Faults(), "params": {**small.params, **params}}
    plan = build(small.model_copy(update=changes))
    rows = [len(context.rows) for context in plan.contexts]
    assert max(rows) > 1.3 * min(rows)
    with start(plan) as engine:
        fed = Federation(engine, seed=0, param_shapes=plan.param_shapes)
        for fed.round in range(3):
            for _ in plan.method.round(fed, plan.server, engine.ids, plan.cfg, fed.round):
                pass
    return Sizes(plan), [entry for entry in fed.ledger if entry.sender != fed.coordinator]


def check(sizes: Sizes, entries: list[Entry], most: Mapping[str, Bound]) -> None:
    found = {entry.kind for entry in entries if entry.bytes}
    assert found == {*most}
    for entry in entries:
        assert entry.bytes <= entry.count * (
            most[entry.kind](sizes) if entry.kind in most else 0
        ), entry


@pytest.mark.parametrize("name", METHODS)
def test_a_message_has_no_more_than_public_settings_say(name: str) -> None:
    assert name in MOST, f"say in MOST how many bytes a message of {name} has at most"
    check(*sent(name), MOST[name])


@pytest.mark.parametrize("trust", TRUST)
def test_so_has_an_introduction(trust: str) -> None:
    sizes, entries = sent("fedmd", trust=trust)
    check(sizes, entries, {**LOGITS, "introduce": TRUST[trust]})
    assert {name for name, one in METHODS.items() if issubclass(one.config, TrustSettings)} <= {
        *MOST
    }


def test_sums_of_answers_count_all_that_was_taught_before() -> None:
    """Steering: see `test_steering.py`. A page whose clients learn from lessons must not say that
    sums stand alone.
    """
    taught = {name for name, one in METHODS.items() if one.client.MEANS}
    assert taught and not [
        name for name in taught if METHODS[name].configure("recommended").sums_stand_alone
    ]
