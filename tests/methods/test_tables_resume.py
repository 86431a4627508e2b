"""Every page of tables, stopped after any round and resumed from its saved state: the same bits as
an unbroken run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedloom.core.message import decode, digest, encode
from fedloom.methods import registry
from fedloom.protect.aggregators import Secure
from tests.methods.tables import federation, owners, table
from tests.toy import Toy

ROUNDS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "fedboost": {"depth": 3, "bins": 8, "own_trees": 2},
    "fedboost-mix": {"depth": 3, "bins": 8},
    "fedforest": {"depth": 4, "bins": 8, "lot": 2},
    "fedforest-mix": {"depth": 4, "bins": 8, "lot": 2},
    "fedextra": {"depth": 3, "bins": 8},
    "fedglm": {"l2": 1.0},
    "fedcox": {"l2": 1.0, "time": "x0", "times": 20},
    "stats": {},
}
PAGES = sorted(
    name for name, method in registry().items() if method.family == "tables" and name != "exchange"
)
"""Pages of sums; exchange keeps models, and has one round."""


def toy(name: str) -> Toy:
    """Four owners, on secure sums, whose contexts are new, so that nothing is remembered from
    another run.
    """
    x, y = table(300)
    if name == "fedcox":
        x = np.nan_to_num(x)
        x[:, 0] = np.abs(x[:, 0]) + 1
    return federation(
        registry()[name], owners(x, y, [100, 180, 250]), means=Secure(), **SETTINGS[name]
    )


def everything(run: Toy) -> list[Any]:
    """All states, all messages, what was learned, and predictions of an owner."""
    found = [
        digest(run.server.state()),
        {i: digest(state) for i, state in run.engine.states().items()},
    ]
    sent = [(e.round, e.kind, e.what, e.count) for e in run.fed.ledger]
    party = run.party(1)
    return [*found, sent, run.server.findings(), digest(party.infer(party.context.rows.every))]


@pytest.mark.parametrize("name", PAGES)
def test_a_stopped_run_resumes_to_the_same_bits(name: str) -> None:
    whole = everything(toy(name).run(ROUNDS))
    for stop in (1, 3):
        first = toy(name).run(stop)
        server, states = (
            decode(encode(s))
            for s in (first.server.state(), {str(i): s for i, s in first.engine.states().items()})
        )
        again = toy(name)
        again.server.load(server)
        again.engine.load({int(i): state for i, state in states.items()})
        again.fed.ledger.load(first.fed.ledger.state())
        again.run(ROUNDS - stop, start=stop)
        assert everything(again) == whole
