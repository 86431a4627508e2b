"""A run at two sites, as their coordinator sees it: it waits for approval, and goes on without a
site that stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedloom.api import execute
from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import EngineConfig
from fedloom.remote.node import approval
from fedloom.remote.node.decision import What
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.net.nodes import federation
from tests.net.processes import until

NAMES = ["node-0", "node-1"]


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Path]:
    """Two nodes whose sites are asked; the folder of the federation's file and of their states."""

    def own(name: str) -> dict[str, Any]:
        file = rows(tmp_path / f"{name}.csv", 60, int(name[-1]))
        return {
            "approve": "ask",
            "min_rows": 4,
            "data": {"wards": {"rows": file, "score": True, **ALLOWED}},
        }

    with federation(tmp_path, 2, own):
        yield tmp_path


@pytest.fixture
def begun(sites: Path) -> Iterator[Any]:
    """Starts a run in another thread."""
    with ThreadPoolExecutor(1) as worker:

        def start(rounds: int) -> Future[Any]:
            given = run(
                method="fedavg",
                rounds=rounds,
                models={"pool": ["linear"]},
                params={"batch_size": 8},
            )
            engine = EngineConfig(name="net", federation=str(sites / "federation.toml"))
            data = given.data.model_copy(update={"clients": 2})
            return worker.submit(execute, given.model_copy(update={"engine": engine, "data": data}))

        yield start
        for name in NAMES:  # a run of a test that failed would wait for ever
            for shown, _ in approval.runs(sites / name):
                approval.decide(sites / name, shown, "stop", None)


def log(site: Path) -> str:
    path = site / "audit.jsonl"
    return path.read_text() if path.exists() else ""


def decide(state: Path, what: What) -> None:
    (shown,) = until(lambda: [one for one, _ in approval.runs(state)], "a run that waits")
    approval.decide(state, shown, what, None)


def test_a_run_begins_when_the_last_site_has_approved_it(sites: Path, begun: Any) -> None:
    work = begun(2)
    decide(sites / "node-0", "approve")
    until(lambda: "opened" in log(sites / "node-0"), "the first node")
    assert not work.done() and "opened" not in log(sites / "node-1")
    decide(sites / "node-1", "approve")
    assert work.result(120).summary["rounds"] == 2


def test_a_site_that_refuses_ends_the_start_also_while_others_wait(sites: Path, begun: Any) -> None:
    work = begun(2)
    decide(sites / "node-1", "stop")
    with pytest.raises(ConfigError, match="node-1 refuses the run: this site has stopped run"):
        work.result(120)


def test_a_run_goes_on_without_a_site_that_stops_it(sites: Path, begun: Any) -> None:
    work = begun(60)
    for name in NAMES:
        decide(sites / name, "approve")
    until(lambda: "answered" in log(sites / "node-1"), "a call")
    decide(sites / "node-1", "stop")
    summary = work.result(120).summary
    assert summary["rounds"] == 60 and summary["failures"]
