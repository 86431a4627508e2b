"""Models that owners send once: their arrays predict as the models, bad arrays are refused, weights
mix own models.
"""

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.context import ClientContext, Rows
from fedloom.core.errors import ConfigError, MessageError
from fedloom.core.task import Number
from fedloom.methods import registry
from fedloom.methods.tables import own_models
from fedloom.methods.tables.exchange import ExchangeClient, check


def party(labels: np.ndarray, number: bool = False, **params: Any) -> ExchangeClient:
    """An owner of rows with two numbers, one of which may be missing, a constant, and a word of
    three.
    """
    rng, n = np.random.default_rng(0), len(labels)
    x = np.c_[
        rng.normal(size=n), rng.normal(size=n), np.full(n, 2.0), rng.integers(3, size=n)
    ].astype(np.float32)
    x[::7, 1] = np.nan
    y = torch.from_numpy(labels.astype(np.float32 if number else np.int64))
    pool = torch.from_numpy(x)
    rows = Rows(pool, y, torch.arange(n), torch.zeros(4), torch.ones(4))
    target = Number(0.0, 1.0) if number else None
    context = ClientContext(
        0, parties=2, classes=1 if number else 4, target=target, data=rows,
        columns=("a", "b", "c", "d"), words=((), (), (), ("x", "y", "z")),
    )  # fmt: skip
    return ExchangeClient(registry()["exchange"].configure(params=params), context)


CLASSES = {
    "two of four": np.arange(30) % 2 + 1,
    "three of four": np.arange(30) % 3,
    "one": np.full(30, 3),
}


@pytest.mark.parametrize("kind", ["linear", "forest"])
@pytest.mark.parametrize("labels", [*CLASSES, "number"])
def test_arrays_predict_as_the_model(kind: str, labels: str) -> None:
    number = labels == "number"
    owner = party(np.random.default_rng(1).normal(size=30) if number else CLASSES[labels], number)
    K = 1 if number else 4
    model, x = own_models.fitted(owner, kind), own_models.columns(owner, owner.context.rows.every)
    arrays = own_models.sent(kind, model, K)
    assert not own_models.problem(kind, arrays, own_models.count(owner))
    found = own_models.prediction_of(kind, arrays, x)
    np.testing.assert_allclose(found, own_models.predicted(model, x, K), atol=1e-6)


def test_a_model_that_cannot_predict_is_refused() -> None:
    owner = party(CLASSES["two of four"])
    good = owner.give()
    check(owner, good)
    nodes = len(good["forest"]["feature"])
    for name, value in (("left", 0), ("right", nodes), ("feature", 99), ("root", nodes)):
        bad = {kind: {key: x.clone() for key, x in one.items()} for kind, one in good.items()}
        bad["forest"][name][0] = value
        with pytest.raises(MessageError, match="forest: "):
            owner.take(models=[bad])
    short = {**good, "forest": {**good["forest"], "value": good["forest"]["value"][1:]}}
    with pytest.raises(MessageError, match="one length"):
        owner.take(models=[short])


def test_own_weight_1_is_training_alone() -> None:
    owner = party(CLASSES["three of four"], kinds=["linear"], own=["linear"], own_weight=1.0)
    owner.take(models=[party(np.arange(30) % 4, kinds=["linear"]).give()])
    x = owner.context.rows.every
    alone = own_models.predicted(
        own_models.fitted(owner, "linear"), own_models.columns(owner, x), 4
    )
    np.testing.assert_allclose(torch.softmax(owner.infer(x), -1).numpy(), alone, atol=1e-6)


def test_settings_that_say_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="own and mix"):
        registry()["fedboost"].configure(params={"own": ["linear"], "mix": 3})
    with pytest.raises(ConfigError, match="from 0 to 1"):
        registry()["fedglm"].configure(params={"own": ["linear"], "own_weight": 2})
    with pytest.raises(ConfigError, match="kinds"):
        registry()["exchange"].configure(params={"kinds": []})
