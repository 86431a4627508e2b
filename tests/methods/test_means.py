"""Every method that takes a mean, by every way that its settings allow, on every engine of one
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.aggregate import MEAN, Aggregator
from fedloom.methods import registry
from fedloom.protect.aggregators import Private, Robust, Secure
from fedloom.protect.noise import Draws
from fedloom.protect.robust import Rule
from tests.methods.columns import Columns
from tests.methods.test_robust import PEERS, SERVERS, whole
from tests.test_secure_sum import PAGES
from tests.toy import Toy, common, contexts

RULES: tuple[Rule, ...] = ("median", "trimmed", "krum", "multikrum", "clip", "centered")
WAYS: dict[str, Aggregator] = {
    **{rule: Robust(rule) for rule in RULES},
    "secure": Secure(),
    "noise": Private(0.5, 1.0, lambda key: Draws(np.random.default_rng([*key]))),
}
SMALL: dict[str, dict[str, Any]] = {
    **PAGES,
    **SERVERS,
    **PEERS,
    "fens": {"local_rounds": 1, "aggregator_steps": 2, "tau": 2, "aggregator": "weights"},
    "fedhssl": {"steps": 2, "epochs": 1, "pretrain_rounds": 1, "projection_dim": 8},
    "afind-plus": {"epochs": 1},
    "fedavg-ft-afind": {"epochs": 1},
}
NAMES = [
    name
    # sums of integers, of methods of tables, are in tests/test_secure_sum.py
    for name, method in registry().items()
    if method.client.MEANS and method.configure().exchanges and method.family != "tables"
]


def after(name: str, how: Aggregator, **engine: Any) -> dict[str, torch.Tensor]:
    """All tensors of everybody's state after a round; of FENS, FD and FedMosaic after more, which
    use means late.
    """
    method, params = registry()[name], SMALL.get(name, {})
    if method.setting == "vertical":
        make: dict[str, Any] = {"make": whole} if name == "fedhssl" else {}
        states = Columns(method, 5, means=how, **make, **params, **engine).run(1).states()
        return {k: x for k, x in states.items() if isinstance(x, torch.Tensor)}
    places = contexts(6, make=common)
    server = {
        "public": places[0].public,
        "groups": [0] * 6,
        "group_networks": [common],
        "pretrained": common,
    }
    return (
        Toy(method, client_contexts=places, server_side=server, means=how, **params, **engine)
        .run({"fens": 2, "fd": 2, "fedmosaic": 4}.get(name, 1))
        .tensors()
    )


@pytest.mark.each_time("fedavg", "fccl", "proto-student")
@pytest.mark.parametrize("name", NAMES)
def test_a_method_has_every_way_of_a_mean_that_its_settings_allow_on_every_engine(
    name: str,
) -> None:
    method = registry()[name]
    cfg, plain = method.configure(params=SMALL.get(name, {})), after(name, MEAN)
    allowed = {
        way: how
        for way, how in WAYS.items()
        if not cfg.refuses(how) and not (how.hidden and method.server is None)
    }
    assert {"clip", "centered"} <= allowed.keys()
    for way, how in allowed.items():
        loop, isolated = after(name, how), after(name, how, isolated=True)
        assert all(torch.equal(x, isolated[k]) for k, x in loop.items()), way
        assert any(not torch.equal(x, plain[k]) for k, x in loop.items()), way
        assert all(x.isfinite().all() for x in loop.values()), way
        if method.setting == "horizontal" and way in ("median", "secure", "clip"):
            batched = after(name, how, batched=True)
            assert all(
                torch.allclose(x.float(), batched[k].float(), atol=1e-3) for k, x in loop.items()
            ), way
