"""A run that a site's limits do not allow to end does not begin; with exactly what it needs, it
ends.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedloom.api import execute
from fedloom.core.errors import ConfigError, MethodError
from fedloom.experiment.config.run import EngineConfig
from fedloom.remote.node import privacy_ledger
from fedloom.remote.node.budget import FILE
from fedloom.report import write
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.net.nodes import federation

DP: dict[str, Any] = {
    "method": "fedavg-dp",
    "models": {"pool": ["linear"]},
    "params": {"batch_size": 20, "epochs": 1, "dp": {"sigma": 1.5}},
}
CASES: dict[str, tuple[dict[str, Any], str, Callable[[dict[str, Any]], Any]]] = {
    "looks": (
        {"method": "fedal", "params": {"tau": 2, "batch_size": 8}},
        "looks",
        lambda spent: spent["looks"],
    ),
    "looks of one stage": (
        {"method": "fedavg", "params": {"batch_size": 8}, "models": {"pool": ["linear"]}},
        "looks",
        lambda spent: spent["looks"],
    ),
    "answers": (
        {"method": "fens-student", "params": {"local_rounds": 1}, "models": {"pool": ["mlp"]}},
        "max_answers",
        lambda spent: spent["answers"],
    ),
}
"""By name: the changes of a run, the limit, and what of it was spent."""


def world(
    folder: Path, changes: dict[str, Any], **limits: Any
) -> tuple[Callable[[str], dict[str, Any]], Any]:
    """What each node has, and the run."""
    public = rows(folder / "public.csv", 50, 9, labels=False)
    server = rows(folder / "server.csv", 40, 8)

    def own(name: str) -> dict[str, Any]:
        file = rows(folder / f"{name}.csv", 80, int(name[-1]))
        wards = {"rows": file, "public": public, "score": True, **ALLOWED, **limits}
        return {"data": {"wards": wards}, "secret_noise": True, "min_rows": 5}

    def coordinator(path: Path) -> Any:
        files = f'[data.wards]\npublic = "{public}"\nrows = "{server}"\n'
        path.write_text(path.read_text() + "\n" + files)
        return run(**changes).model_copy(
            update={"engine": EngineConfig(name="net", federation=str(path))}
        )

    return own, coordinator


def spent(folder: Path) -> dict[str, Any]:
    """What was let out at one node."""
    found: dict[str, Any] = json.loads((folder / "node-0" / FILE).read_text())["cohorts"]["wards"]
    return found


@pytest.mark.parametrize("name", CASES)
def test_one_more_than_allowed_does_not_begin_and_exactly_that_ends(
    name: str, tmp_path: Path
) -> None:
    changes, limit, took = CASES[name]
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    own, begin = world(roomy, changes)
    with federation(roomy, 3, own) as (path, _):
        execute(begin(path))
    needed = took(spent(roomy))
    for allowed in (needed - 1, needed):
        folder = tmp_path / str(allowed)
        folder.mkdir()
        own, begin = world(folder, changes, **{limit: allowed})
        with federation(folder, 3, own) as (path, _):
            if allowed < needed:
                with pytest.raises(ConfigError, match=f"set {limit} = {needed}"):
                    execute(begin(path), folder / "run")
                assert not (folder / "node-0" / FILE).exists()
                assert not (folder / "run").exists()
                assert not [*(folder / "node-0").glob("run-*")]
            else:
                execute(begin(path))
                assert took(spent(folder)) == needed


def test_a_budget_that_a_run_would_exceed_is_not_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, begin = world(tmp_path, DP, epsilon=3.0)
    with federation(tmp_path, 3, own) as (path, _):
        with pytest.raises(ConfigError) as refused:
            execute(begin(path))
        assert not (tmp_path / "node-0" / FILE).exists()
        said = "node-0 refuses the run: the privacy budget of these rows is ε = 3 at δ = 1e-05, and"
        assert said in str(refused.value) and "this whole run would make it" in str(refused.value)
        assert "refused a call of coordinator: the privacy budget" in caplog.text  # at the node
    needed = float(str(refused.value).split("make it ")[1].split(":")[0])
    roomy = tmp_path / "roomy"
    roomy.mkdir()
    own, begin = world(roomy, DP, epsilon=needed)
    with federation(roomy, 3, own) as (path, _):
        one = begin(path)
        execute(one)
        # all of it is spent, so nothing more begins
        with pytest.raises(ConfigError, match="would make it"):
            execute(one)


def test_too_few_nodes_for_a_sum_are_named_before_the_first_round(tmp_path: Path) -> None:
    changes = {
        "method": "fedavg",
        "models": {"pool": ["linear"]},
        "params": {"batch_size": 8, "clients_per_round": None},
        "aggregate": {"secure": True},
    }
    own, begin = world(tmp_path, changes)
    with (
        federation(tmp_path, 3, lambda name: {**own(name), "min_sum": 5}) as (path, _),
        pytest.raises(ConfigError, match=r"sums of 3: .*set min_sum = 3"),
    ):
        execute(begin(path))


def test_a_refusal_within_a_run_is_said_at_both_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a node whose owner lowers a limit meanwhile."""
    own, begin = world(tmp_path, DP, epsilon=100.0)
    caplog.set_level(logging.WARNING)
    with federation(tmp_path, 3, own) as (path, _):
        take = privacy_ledger.take
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                privacy_ledger,
                "take",
                lambda spent, **how: take(
                    spent, **{**how, "limit": 100.0 if how.get("what") else 0.1}
                ),
            )
            with pytest.raises(MethodError, match="'update' is refused by all nodes:\nnode-0: the"):
                execute(begin(path), tmp_path / "run")
    with (tmp_path / "run" / "failures.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["party"] != "server"]
    assert len(found) == 3 and {row["reason"] for row in found} == {"refused"}
    assert all("privacy budget of these rows is ε = 0.1" in row["why"] for row in found)
    assert "refused a call of coordinator: the privacy budget" in caplog.text
    assert "privacy budget of these rows" in write(tmp_path / "run").read_text()
