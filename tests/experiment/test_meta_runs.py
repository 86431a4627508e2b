"""Runs of the family `meta` from end to end: a server with rows and a pretrained model of its own,
unseen clients.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import ConfigError
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.execute import Stopped, execute


def run(method: str = "augfl", **more: Any) -> RunConfig:
    values: dict[str, Any] = {
        "method": method,
        "rounds": 6,
        "data": {
            "name": "digits",
            "clients": 8,
            "partition": "random-classes",
            "options": {"rows": 10},
            "server_rows": 120,
            "unseen": 0.25,
            "public_rows": 0,
            "test_rows": 40,
            "own_test_rows": 30,
        },
        "models": {"pool": ["mlp"]},
        "pretrained": {"model": "mlp-deep", "epochs": 2},
        **more,
    }
    return check({"run": values}).run


def test_a_stopped_run_resumes_with_its_duals_banks_and_maps(tmp_path: Path) -> None:
    every: dict[str, dict[str, int]] = {"all": {}, "some": {"clients_per_round": 3}}
    for name, params in every.items():
        config = run(params={"server_batch_size": 32, "kl": 0.5, **params})
        whole = execute(config, tmp_path / name / "a").summary
        asked = iter((False, False, True))
        with pytest.raises(Stopped):
            execute(config, tmp_path / name / "b", stop=partial(next, asked))
        again = execute(config, tmp_path / name / "b", resume=True).summary
        assert (
            again["state_sha256"] == whole["state_sha256"]
            and again["eval_modes"] == whole["eval_modes"]
        )


def test_nobody_else_holds_what_the_server_holds(tmp_path: Path) -> None:
    plan = build(run())
    shares = plan.data.split
    parts = [shares.server, shares.test, *shares.shards]
    rows = np.concatenate(parts)
    assert len(np.unique(rows)) == len(rows) and len(shares.server) == 120
    assert plan.server is not None and plan.server.context.pretrained is not None
    clients = [make() for make in plan.clients]
    assert all(c.context.pretrained is None and c.context.encoder is None for c in clients)


def test_statistics_of_batchnorm_need_a_word_where_clients_are_unseen() -> None:
    with pytest.raises(ConfigError, match="no BatchNorm statistics"):
        build(run(models={"pool": ["mlp"], "norm": "batch"}))
    summary = execute(
        run(models={"pool": ["mlp"], "norm": "batch"}, params={"batchnorm": "batch"})
    ).summary
    assert set(summary["eval_modes"]) >= {"1 step", "1 step training"} and not summary["failures"]
    several = {"pool": ["mlp"], "norm": "batch"}
    assert not execute(run(models=several, data={"name": "digits", "server_rows": 120})).summary[
        "failures"
    ]


def test_the_same_numbers_with_workers_and_nearly_so_batched() -> None:
    found = {
        name: execute(run(engine=engine)).summary
        for name, engine in {"loop": {}, "two": {"workers": 2}, "many": {"name": "batched"}}.items()
    }
    assert found["loop"]["state_sha256"] == found["two"]["state_sha256"]
    for eval_mode, spread in found["loop"]["eval_modes"].items():
        assert found["many"]["eval_modes"][eval_mode]["mean"] == pytest.approx(
            spread["mean"], abs=0.02
        )


def test_every_method_of_the_family_is_judged_by_the_same_clients_and_rows(tmp_path: Path) -> None:
    names = (
        "augfl",
        "kd-only",
        "server-ce-only",
        "local-only",
        "per-fedavg",
        "fedproto",
        "fedcp",
        "fedpcl",
        "fedavg",
    )
    seen = set()
    for name in names:
        more: dict[str, Any] = {"params": {"adapt_steps": [1, 0]}} if name == "fedavg" else {}
        summary = execute(run(name, **more, rounds=1), tmp_path / name).summary
        assert next(iter(summary["eval_modes"])) == "1 step"
        held = json.loads((tmp_path / name / "partition.json").read_text())
        seen.add(
            (
                tuple(summary["unseen"]),
                held["server_sha256"],
                summary["test_sha256"],
                json.dumps(held["counts"]),
            )
        )
        assert len(summary["eval_modes"]["1 step"]["per_client"]) == 2
    assert len(seen) == 1


def test_a_pretrained_model_that_will_not_do_is_refused_before_it_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # any training would fail
    monkeypatch.setattr("fedloom.experiment.plan.pretrained.trained_file", None)
    with pytest.raises(ConfigError, match="needs a pretrained model with the architecture"):
        build(run(params={"l2": 1.0, "crd": 0.0}))
    build(run(params={"l2": 1.0, "crd": 0.0}, pretrained={"model": "mlp"}))
