"""What serves tests of fedloom on public data is refused where rows are a node's own: faults, and
hashes of states.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.remote import payload
from fedloom.remote.rpc_errors import REFUSED
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.node.hosts import RunRequest, doing, opening, which

Hosts = Callable[..., RunRequest]


@pytest.fixture
def asked(hosts: Hosts, tmp_path: Path) -> RunRequest:
    return hosts(
        data={"wards": {"rows": rows(tmp_path / "own.csv", 80, 3), "score": True, **ALLOWED}}
    )


def opened(**changes: Any) -> bytes:
    kind = run(method="fedavg", models={"pool": ["linear"]}, params={"batch_size": 8})
    values = json.loads(for_nodes(build(kind, PrivateData())).model_dump_json())
    return opening(json.dumps({**values, **changes}))


@pytest.mark.parametrize("fault", ["flip", "huge", "late", "crash"])
@pytest.mark.parametrize("method", ["update", "score"])
def test_a_fault_is_refused(fault: str, method: str, asked: RunRequest) -> None:
    asked("open", opened())
    task = {"each": None, "reply_refs": {}, "fault": fault, "seed": 7}
    more: dict[str, Any] = (
        {} if method == "update" else {"round": -1, "shared": {"on": "own", "eval_mode": ""}}
    )
    refusal = asked.refused("do", doing(0, asked.host, method=method, tasks=[task], **more))
    assert refusal.code == REFUSED and "faults are for tests" in refusal.words


def test_a_run_with_faults_is_refused(asked: RunRequest) -> None:
    assert (
        "leave [faults] out"
        in asked.refused("open", opened(faults={"liars": [0], "lie": "huge"})).words
    )


def test_the_hash_of_a_state_stays_here(asked: RunRequest) -> None:
    asked("open", opened())
    assert payload.unpack(asked("digest", which()))[0] == {"sha256": ""}
    asked("do", doing(0, asked.host))
    assert payload.unpack(asked("digest", which()))[0] == {"sha256": ""}


def test_a_public_data_set_has_both(hosts: Hosts) -> None:
    ask = hosts()
    ask("open", opening())
    assert len(payload.unpack(ask("digest", which()))[0]["sha256"]) == 64
    ask(
        "do",
        doing(0, ask.host, tasks=[{"each": None, "reply_refs": {}, "fault": "late", "seed": 7}]),
    )
