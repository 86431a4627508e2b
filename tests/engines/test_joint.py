"""Parties of one process that answer as one, against parties that are rebuilt for every call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.aggregate import MEAN
from fedloom.core.engine import run_task
from fedloom.core.errors import MethodError
from fedloom.core.faults import Faults
from fedloom.core.message import digest
from fedloom.core.page import Party, Shape
from fedloom.engines import joint
from fedloom.methods.tables.fedboost import FEDBOOST
from fedloom.methods.tables.fedforest import FEDFOREST
from fedloom.protect.aggregators import Secure
from tests.methods.tables import federation, owners, table
from tests.toy import Toy

SETTINGS: dict[str, dict[str, Any]] = {
    "fedboost": {"depth": 3, "bins": 8},
    "fedforest": {"depth": 4, "bins": 8, "lot": 2},
}


def made(name: str, *, isolated: bool = False, classes: int = 3, **more: Any) -> Toy:
    """Five owners, one with a single row and one without any."""
    x, y = table(300, classes)
    method = FEDBOOST if name == "fedboost" else FEDFOREST
    contexts = owners(x, y, [100, 101, 101, 250], classes=classes)
    return federation(method, contexts, isolated=isolated, **{**SETTINGS[name], **more})


def everything(toy: Toy) -> list[Any]:
    """All states, all messages, and all failures."""
    states = {i: digest(state) for i, state in toy.engine.states().items()}
    failures = [(f.round, f.party, f.kind, f.reason) for f in toy.fed.failures]
    return [digest(toy.server.state()), states, toy.fed.ledger.state(), failures]


@pytest.mark.parametrize("how", [MEAN, Secure()], ids=["plain", "secure"])
@pytest.mark.parametrize("name", SETTINGS)
def test_states_and_messages_are_those_of_isolated_parties(
    name: str, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    monkeypatch.setattr(
        joint, "run_task", lambda party, *task: rows.append(len(party.data)) or RUN(party, *task)
    )
    toy = made(name, means=how).run(2)
    assert set(rows) == {300}  # all calls were of one party with all rows
    assert everything(toy) == everything(made(name, isolated=True, means=how).run(2))


RUN = run_task


@pytest.mark.parametrize(
    "more",
    [
        {"faults": Faults(dropout=0.03, crash=0.03, late=0.03)},
        {"owner_column": True},
        {"classes": 2},
    ],
    ids=["faults", "an owner column", "two classes"],
)
def test_calls_that_differ_between_parties_are_of_each(more: dict[str, Any]) -> None:
    assert everything(made("fedboost", **more).run(6)) == everything(
        made("fedboost", isolated=True, **more).run(6)
    )


def test_participants_may_change_between_rounds() -> None:
    a, b = made("fedboost"), made("fedboost", isolated=True)
    for t, present in enumerate([[0, 1, 4], [0, 1, 2, 3, 4], [0, 3], [0, 1, 2, 3, 4]]):
        a.run(1, start=t, present=present)
        b.run(1, start=t, present=present)
        assert everything(a) == everything(b)


def test_a_party_whose_state_differs_runs_alone() -> None:
    a, b = made("fedboost").run(1), made("fedboost", isolated=True).run(1)
    for toy in (a, b):
        party = toy.party(1)
        party.trees = {**party.trees, "value": party.trees["value"] + 1}
        toy.run(1, start=1)
    assert everything(a) == everything(b)


class Broken(Party[Any]):
    """Sums its rows, but fails where there is a negative one."""

    STATE = ("seen",)
    CALLS = MEANS = ("sum",)
    ROWS = ("seen",)

    def setup(self) -> None:
        self.seen = torch.zeros(len(self.data), dtype=torch.int64)

    def sum(self) -> dict[str, Any]:
        """The sum of all labels."""
        self.seen = self.seen + 1
        y = self.data.y(torch.arange(len(self.data)))
        if (y < 0).any():
            raise ValueError("negative")
        return {"sum": y.sum()}

    def answer(self) -> Any:
        """A reply though the page has rows."""
        return {"n": len(self.data)}


def test_where_the_joint_rows_fail_each_party_fails_by_itself() -> None:
    x, y = table(90)
    y[5] = -1
    toy = federation(replace(FEDBOOST, client=Broken), owners(x, y, [30, 60]))
    found = toy.fed.total([0, 1, 2], "sum", expect={"sum": Shape("int64")})
    assert (
        found is not None and found.ids == (1, 2) and int(found.value["sum"]) == int(y[30:].sum())
    )
    assert [state["seen"].sum().item() for state in toy.engine.states().values()] == [0, 30, 30]


def test_a_page_with_rows_answers_by_sums_alone() -> None:
    x, y = table(90)
    toy = federation(replace(FEDBOOST, client=Broken), owners(x, np.abs(y), [30, 60]))
    with pytest.raises(MethodError, match="'answer', not in MEANS, must answer None"):
        toy.fed.call([0, 1, 2], "answer")
