"""Runs on a real SuperLink with TLS, SuperNode authentication and two SuperNodes, all on this
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from fedloom.experiment.plan import reading
from fedloom.experiment.run.execute import execute
from tests.flower.federation import BIN, Federation, federation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BIN / "flower-superlink").exists(), reason=f"Flower is not installed in {BIN.parent}"
    ),
]
RUN = """
method = "augfl"
rounds = 2
evaluate.points = 1
data = { name = "digits", clients = 2, own_test_rows = 0 }
models.pool = ["mlp"]
params = { adapt_steps = [1] }
"""


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(tmp_path_factory.mktemp("flower"), ["alpha", "beta"]) as running:
        (running.folder / "run.toml").write_text(RUN)
        yield running


def test_a_run_on_flower_gives_the_same_states_as_the_loop(flower: Federation) -> None:
    folder = flower.folder / "run"
    status, log = flower.run(experiment=str(flower.folder / "run.toml"), rounds=2, out=str(folder))
    assert status == "finished:completed", log
    found = json.loads((folder / "result.json").read_text())
    local = execute(reading.read(str(flower.folder / "run.toml")).run).summary
    assert found["state_sha256"] == local["state_sha256"]
    assert found["accuracy"] == local["accuracy"] and found["failures"] == local["failures"]
    assert f"state_sha256 {local['state_sha256']}" in log
    for name in ("alpha", "beta"):
        audit = (flower.folder / f"node-{name}" / "state" / "audit.jsonl").read_text()
        lines = [json.loads(line) for line in audit.splitlines()]
        assert {line["caller"] for line in lines} == {"superlink"}
        updates = [line["round"] for line in lines if line.get("method") == "update"]
        assert updates == [0, 1]


def test_what_goes_wrong_at_a_node_is_reported_in_fixed_words(flower: Federation) -> None:
    config = flower.folder / "node-beta" / "node.toml"
    sound = config.read_text()
    config.write_text('private = "nobody else reads this"')
    try:
        status, log = flower.run(experiment=str(flower.folder / "run.toml"))
    finally:
        config.write_text(sound)
    assert status == "finished:failed"
    assert "beta refuses the run: this node failed to answer; the reason is in its log" in log
    assert "private" not in log and "private" not in flower.log("superlink")
    assert "private" in flower.log("beta")


def test_peers_are_refused_before_any_work(flower: Federation) -> None:
    before = flower.log("alpha").count("Receiving")
    status, log = flower.run(experiment="gossip")
    assert status == "finished:failed"
    assert (
        "gossip needs peers to reach each other, which SuperNodes cannot: use the engine net" in log
    )
    assert flower.log("alpha").count("Receiving") == before
