"""The privacy budget of a node's own rows: it outlives runs, callers and restarts, and closes when
it is unreadable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import PrivacyBudgetSpent
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.protect.accountant import Releases, epsilon
from fedloom.remote import rpc_errors
from fedloom.remote.node.budget import FILE, Budget
from fedloom.remote.node.privacy_ledger import charge, lines
from fedloom.remote.rpc_errors import CallRefused
from tests.experiment.test_own_data import ALLOWED, FORM, rows, run
from tests.node.hosts import RunRequest, doing, node, opening

Hosts = Callable[..., RunRequest]
DP = {"sigma": 4.0, "clip": 1.0}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Nodes with a file of 80 rows; further ones share the first one's folder."""
    made: list[RunRequest] = []
    path = rows(tmp_path / "own.csv", 80, 3)
    form = {**FORM, "scale": {"a": [1.5, 2.0], "b": [10.0, 5.0]}}

    def make(
        seed: int = 0, *, caller: str = "hub", run_id: str = "", secret: bool = True, **data: Any
    ) -> RunRequest:
        allowed = {"rows": path, **ALLOWED, **data}
        cfg = node(
            tmp_path,
            methods=["fedavg-dp"],
            data={"wards": allowed},
            max_runs=9,
            secret_noise=secret,
        )
        made.append(RunRequest(cfg))
        params = {"batch_size": 8, "epochs": 1, "dp": DP}
        kind = run(
            method="fedavg-dp",
            models={"pool": ["linear"]},
            params=params,
            seed=seed,
            data={"row_schema": form},
        )
        made[-1]("open", opening(for_nodes(build(kind, PrivateData())).model_dump_json()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def spent_by(ask: RunRequest) -> list[Releases]:
    return ask.host.budget.spent("wards").all_releases()


def update(ask: RunRequest, call: int) -> bytes:
    return ask("do", doing(call, ask.host, round=call))


def test_every_call_is_charged_once_and_a_repeated_one_not_again(
    hosts: Hosts, tmp_path: Path
) -> None:
    ask = hosts()
    first = update(ask, 0)
    after_one = spent_by(ask)
    (party,) = (r.party for r in ask.host._node_runs.values())
    count = len(party.data)
    assert after_one == [Releases(4.0, -(-count // 8), 8 / count)]
    assert update(ask, 0) == first and spent_by(ask) == after_one
    update(ask, 1)
    assert spent_by(ask) == [Releases(4.0, 2 * -(-count // 8), 8 / count)]
    assert party.context.secret is not None and party.context.privacy_budget is not None


def test_noise_from_the_seed_protects_nobody_and_is_refused(hosts: Hosts, tmp_path: Path) -> None:
    """An officer who approved it would read an ε that it has not."""
    with pytest.raises(CallRefused, match="this node's owner must set secret_noise = true"):
        hosts(secret=False)


def test_the_budget_outlives_runs_and_restarts_and_refuses_before_any_work(
    hosts: Hosts, tmp_path: Path
) -> None:
    ask = hosts()
    update(ask, 0)
    spent = epsilon(spent_by(ask), 1e-5)
    again = hosts(seed=1, epsilon=1.01 * spent)  # another run after a restart
    (node_run,) = again.host._node_runs.values()
    before = {k: v.clone() for k, v in node_run.party.params.items()}
    for _ in range(2):
        refusal = again.refused("do", doing(1, again.host, round=1))
        assert (
            refusal.code == rpc_errors.REFUSED and "privacy budget of these rows" in refusal.words
        )
    (node_run,) = again.host._node_runs.values()
    assert all(v.equal(before[k]) for k, v in node_run.party.params.items())
    assert epsilon(spent_by(again), 1e-5) == spent
    name, line = "wards", next(lines(again.host.budget, {"wards": (1.01 * spent, 1e-5)}))
    assert line.startswith(f"{name}: ε = {spent:.3f} of ") and "δ = 1e-05" in line


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"x": [{"sigma": -1, "rate": 1, "count": 1}]}', '{"x": 3}']
)
def test_an_unreadable_record_stops_all_releases(
    content: str, hosts: Hosts, tmp_path: Path
) -> None:
    ask = hosts()
    (tmp_path / "state" / FILE).write_text(content)
    refusal = ask.refused("do", doing(0, ask.host, round=0))
    assert refusal.code == rpc_errors.REFUSED and f"must restore {FILE}" in refusal.words
    assert (tmp_path / "state" / FILE).read_text() == content


def test_releases_of_two_cohorts_are_apart_and_those_of_one_add_up(tmp_path: Path) -> None:
    one, two = tmp_path / "a.csv", tmp_path / "b.csv"
    one.write_text("1"), two.write_text("2")
    ledger = Budget(tmp_path)
    for _ in range(3):
        charge(ledger, "a", one, Releases(10.0), 2.0, 1e-5)
    charge(ledger, "b", two, Releases(3.0), 2.0, 1e-5)
    assert Budget(tmp_path).spent("a").all_releases() == [Releases(10.0, 3)]
    found = json.loads((tmp_path / FILE).read_text())
    assert found["number"] == 4 and found["cohorts"]["b"]["releases"] == [
        {"sigma": 3.0, "rate": 1.0, "count": 1, "excess": 0.0}
    ]
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(
        PrivacyBudgetSpent, match=r"ε = 2 at δ = 1e-05, and this call would make it \d"
    ):
        charge(ledger, "b", two, Releases(1.0), 2.0, 1e-5)
    assert (tmp_path / FILE).read_bytes() == before
    charge(ledger, "b", two, Releases(1.0), float("inf"), 1e-5)
