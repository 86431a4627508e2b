"""What a run asks in all, at a node that is asked directly: beside another run, after a restart of
the coordinator, and without an end.
"""

from pathlib import Path
from typing import Any

import pytest

from fedloom.core.method import MethodConfig
from fedloom.core.templates import spell
from fedloom.experiment.config.aggregate import AggregateConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.methods import registry
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.terms import summary
from tests.experiment.test_own_data import ALLOWED, run
from tests.node.hosts import RUN, RunRequest, config, doing, fetched, node, opening, which
from tests.node.test_looks import Hosts, crafted, hosts, looked, opened

__all__ = ["hosts"]
OTHER = RUN[::-1]


def test_two_runs_that_fit_alone_do_not_begin_together(hosts: Hosts) -> None:
    """A run of three rounds takes four looks."""
    ask = hosts(score=True, looks=7)
    second = opening(opened(seed=5), run=OTHER)
    refusal = ask.refused("open", second)
    assert refusal.code == rpc_errors.REFUSED
    assert "this run takes 4 looks, and 3 of the 7 looks at these rows are left" in refusal.words
    ask("close", which(finished=False))
    ask("open", second)


def test_a_run_that_resumes_needs_what_is_left_of_it(hosts: Hosts) -> None:
    ask = hosts(score=True, looks=4)
    looked(ask, 0, crafted(ask, 0.1))
    ask("do", doing(1, ask.host))
    looked(ask, 2, crafted(ask, 0.2))
    for start, round, fits in ((2, 1, True), (3, 0, False)):
        ask("open", opening(opened(), start=start, resume=True))
        body = which(start=start, round=round)
        if fits:
            ask("restore", body)
        else:
            assert "2 of the 4 looks" in ask.refused("restore", body).words


def test_a_run_that_is_given_up_leaves_no_model(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    ask = hosts(score=True)
    ask("do", doing(0, ask.host))
    ask("close", which(finished=False))
    assert not (ask.config.state / f"run-{RUN}" / "model.safetensors").exists()
    assert "so no model is written" in caplog.text


def test_a_refused_call_is_in_the_log_with_the_repair(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask = RunRequest(node(tmp_path, peers=["b", "c"]))
    try:
        text = config(aggregate={"secure": True}, params={"clients_per_round": None})
        words = ask.refused("open", opening(text, members={"1": "b", "2": "c"})).words
        assert "this node adds with at least 5 nodes (min_sum), and this run has sums of 3" in words
        assert "set min_sum = 3 in node.toml" in caplog.text and "node.toml" not in words
    finally:
        ask.close()


def test_a_reply_for_a_peer_outlives_the_node(tmp_path: Path) -> None:
    cfg = node(tmp_path, methods=["gossip"], peers=["peer"])
    params = {"batch_size": 8, "personal_head": False}
    text = config(method="gossip", params=params)
    first, again = RunRequest(cfg), RunRequest(cfg)
    try:
        first("open", opening(text, members={"1": "peer"}))
        how: dict[str, Any] = {"shared": {"t": 0}, "leave": True, "expect": spell(object)}
        (line,) = payload.unpack(first("do", doing(0, first.host, method="give", **how)))[0][
            "lines"
        ]
        key = line["reply_ref"]
        assert fetched(again, key) == fetched(first, key)
        left = cfg.state / f"run-{RUN}"
        assert [path.name for path in left.glob("left-*")] == ["left-0"]
        again("do", doing(1, again.host, method="update", shared={"t": 0}, floor=1))
        assert not [*left.glob("left-*")]
    finally:
        first.close()
        again.close()


@pytest.mark.parametrize("secret", [True, False])
@pytest.mark.parametrize("name", sorted(registry()))
def test_an_approval_claims_no_noise_that_is_not_there(
    name: str, secret: bool, tmp_path: Path
) -> None:
    method = registry()[name]
    models: dict[str, Any] = {"pool": ["mlp"]} if not method.without_network else {}
    changes: dict[str, Any] = {"method": name, "params": {}, "models": models}
    plain: Any = run(method="fedavg", params={}, models={"pool": ["mlp"]})
    if "secure sums" in method.needs:
        changes["aggregate"] = AggregateConfig(secure=True)
    try:
        cfg: MethodConfig = method.configure()
    except Exception:
        pytest.skip("it has settings that a run must choose")
    rounds = max(3, cfg.min_rounds)
    changes |= {"models": plain.models, "rounds": rounds}
    kind: RunConfig = plain.model_copy(update=changes)
    rows = tmp_path / "rows.csv"
    wards = {"rows": rows, "score": True, **ALLOWED}
    at = node(tmp_path, methods=[name], data={"wards": wards}, secret_noise=secret)
    text = summary(at, "hub", kind, method, cfg, rounds)
    assert "?" not in text
    (scores,) = [line for line in text.splitlines() if line.startswith("Scores of models")]
    if method.setting == "vertical":
        assert "without noise" in scores and "run ends" not in scores
    else:
        assert ("with noise" in scores) == secret and ("exact" in scores) != secret
    sends = {"one network", "architecture groups", "pretrained encoder"} & {*method.needs}
    assert ("A model that is sent" in text) == bool(sends)
