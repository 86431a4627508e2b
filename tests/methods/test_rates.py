"""The learning rates that methods declare: `--tune` scales each, with equal effort for all."""

from __future__ import annotations

import pytest

from fedloom import methods
from fedloom.core.method import Method
from fedloom.experiment.config.run import CompareConfig, Experiment
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.tuning import FACTORS, trials

WITHOUT = {
    "active-forest",
    "exchange",
    "fedcox",
    "fedforest",
    "fedforest-mix",
    "fedglm",
    "stats",
    "vertical-forest",
}
"""Methods that have no learning rate."""
SERVERS = ("server", "disc", "crd", "aggregator", "active", "pretrain", "kd")
"""What a rate of other training than the clients' begins with."""


def has_rate(method: Method) -> list[str]:
    """The settings that are described as the learning rate of a client's training."""
    fields = method.config.model_fields.items()
    return [
        name
        for name, field in fields
        if (field.description or "").startswith(("Learning rate", "The share of a leaf's Newton"))
        and not name.startswith(SERVERS)
    ]


def test_methods_without_a_rate_are_those_that_have_none() -> None:
    found = {name for name, m in methods.registry().items() if not m.configure().rates}
    assert found == WITHOUT
    assert not any(has_rate(methods.registry()[name]) for name in found)


@pytest.mark.parametrize("name", sorted(methods.registry().keys() - WITHOUT))
def test_each_method_is_tuned_at_multiples_of_its_own_rate(name: str) -> None:
    method = methods.registry()[name]
    own = method.configure()
    assert own.rates == tuple(has_rate(method))
    pool = {"pool": ["mlp"]} if "one network" in method.needs else {}
    secure = {"aggregate": {"secure": True}} if "secure sums" in method.needs else {}
    run = check({"run": {"method": name, "rounds": 100, "models": pool, **secure}}).run
    compared = CompareConfig(methods=(name,), seeds=(0,))
    (tried,) = trials(Experiment(run=run, compare=compared))
    assert 1.0 in tried and len(tried) >= len(FACTORS) - 1
    for factor, one in tried.items():
        there = one.resolve()[1]
        changed = {k for k, v in there.model_dump().items() if v != own.model_dump()[k]}
        assert changed == ({*own.rates} if factor != 1 else set())
        for rate in own.rates:
            assert getattr(there, rate) == pytest.approx(factor * getattr(own, rate))
