"""A node that does not say how good its model is: it is left out of the means, and the report can
do with that.
"""

from __future__ import annotations

import json
from pathlib import Path

from fedloom import report
from fedloom.api import execute
from tests.net.nodes import federation
from tests.net.processes import run_of


def test_a_node_that_tells_no_scores_changes_no_number_but_the_means(tmp_path: Path) -> None:
    run = run_of("fedal", rounds=2)
    here = execute(run)
    with federation(tmp_path, 3, lambda name: {"evaluate": name != "node-1"}) as (path, _):
        net = run.engine.model_copy(update={"name": "net", "federation": str(path)})
        there = execute(run.model_copy(update={"engine": net}), tmp_path / "out")
    assert there.summary["state_sha256"] == here.summary["state_sha256"]
    first, _, last = here.summary["accuracy"]["per_client"]
    assert there.summary["accuracy"]["per_client"] == [first, last]
    assert there.summary["accuracy"]["clients"] == [0, 2]
    text = report.write(tmp_path / "out").read_text()
    shown = [
        party["name"]
        for party in json.loads((tmp_path / "out" / "live.json").read_text())["parties"]
    ]
    assert {"node-0", "node-1", "node-2"} <= {*shown} and not any(
        name.startswith("client-") for name in shown
    )
    assert "node-0 ·" in text and "node-2 ·" in text and "client-0 ·" not in text
