"""What Flower cannot protect is refused, at the server and at each node, whatever the
server sends.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("flwr", reason="Flower has an environment of its own")

from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.remote.flower.client import _answered
from fedloom.remote.flower.records import CALLER, pack
from fedloom.remote.flower.server import RunRequest, backend
from fedloom.remote.rpc_errors import REFUSED, CallRefused
from tests.node.hosts import opening

NODE = f"""
name = "alpha"
callers = ["{CALLER}"]
methods = ["fedavg", "gossip"]
[data.digits]
dataset = "digits"
"""


def asked(**settings: Any) -> RunRequest:
    return RunRequest.of({"experiment": "fedavg", "nodes": "alpha beta gamma", **settings})


def test_the_server_refuses_a_secure_sum() -> None:
    with pytest.raises(
        ConfigError, match=r"aggregate\.secure needs certificates .* which SuperNodes lack"
    ):
        asked(**{"aggregate.secure": True})
    assert not asked().run.aggregate.secure


def test_the_server_refuses_peers() -> None:
    request = asked(experiment="gossip", **{"data.clients": 3})
    there = backend(
        request.run,
        None,
        resume=False,
        stop=lambda: False,
        asked=request,
        transport=cast("Any", SimpleNamespace()),
    )
    with pytest.raises(ConfigError, match="gossip needs peers to reach each other"):
        there.start(build(request.run))


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("fedavg", {"aggregate": {"secure": True}}, "aggregate.secure needs"),
        ("gossip", {}, "gossip, whose peers"),
    ],
)
def test_a_node_refuses_what_a_server_sends_all_the_same(
    method: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / "node.toml").write_text(NODE)
    run = check(
        {"run": {"method": method, "data": {"name": "digits", "clients": 3}, **changes}}
    ).run
    body = opening(json.dumps(run.model_dump(mode="json")), members={"1": "beta", "2": "gamma"})
    with pytest.raises(CallRefused, match=f"{words}.* use the engine net") as refusal:
        _answered(
            pack({"kind": "open", "to": "alpha"}, body), {"fedloom": str(tmp_path / "node.toml")}
        )
    assert refusal.value.code == REFUSED
