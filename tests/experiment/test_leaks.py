"""`evaluate.leaks`: runs whose messages tell something, and runs whose messages tell nothing."""

from __future__ import annotations

from typing import Any

import pytest

from fedloom.api import execute
from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.reading import check

DATA = {
    "name": "digits",
    "clients": 6,
    "public_rows": 60,
    "test_rows": 300,
    "options": {"alpha": 0.1},
}


def run_of(method: str, rounds: int = 3, leaks: bool = True, **changes: Any) -> Any:
    values = {
        "method": method,
        "rounds": rounds,
        "data": DATA,
        "models": {"pool": ["mlp"], "norm": "none"},
        "evaluate": {"points": 1, "leaks": leaks},
    }
    return check({"run": {**values, **changes}}).run


def told(method: str, **changes: Any) -> dict[tuple[str, str], dict[str, Any]]:
    found = execute(run_of(method, **changes)).summary["leaks"]
    return {(one["message"], one["attack"]): one for one in found}


def test_weights_of_skewed_clients_tell_their_classes() -> None:
    found = told("fedavg", params={"epochs": 2, "personal_head": False})
    labels, shares = found["update", "labels"], found["update", "class shares"]
    assert labels["parties"] == 6
    assert labels["success"] > labels["chance"] and shares["gain"][0] > 0


def test_row_counts_tell_everything_of_classes() -> None:
    found = told("fedproto")
    assert found["update", "labels"]["success"] == found["update", "class shares"]["success"] == 1.0
    assert ("update", "membership") not in found


def test_answers_tell_classes_by_the_public_rows_that_they_belong_to() -> None:
    found = told("fedmd", params={"tau": 5})
    shares = found["predict", "class shares"]
    assert shares["gain"][0] > 0
    assert 0.3 < found["predict", "membership"]["success"] < 0.8


def test_a_model_that_has_not_learned_tells_nothing() -> None:
    """Weights after no learning are those that the server sent."""
    found = told("fedavg", rounds=1, params={"epochs": 1, "lr": 1e-12, "personal_head": False})
    shares, membership = found["update", "class shares"], found["update", "membership"]
    assert shares["success"] == pytest.approx(shares["chance"], abs=1e-3)
    assert membership["success"] == pytest.approx(0.5)


def test_memorized_rows_are_found() -> None:
    """Clients with some twenty rows each, on which they train for long."""
    data = {
        **DATA,
        "clients": 8,
        "test_fraction": 0.9,
        "test_rows": 200,
        "partition": "iid",
        "options": {},
    }
    found = told(
        "gossip", rounds=1, data=data, params={"epochs": 60, "lr": 0.1, "personal_head": False}
    )
    assert found["give", "membership"]["gain"][0] > 0.05


def test_a_secure_sum_shows_no_single_message() -> None:
    assert told("fedavg", aggregate={"secure": True}) == {}


def test_measuring_changes_nothing() -> None:
    with_, without = (
        execute(run_of("fedal", leaks=leaks, params={"tau": 2})).summary for leaks in (True, False)
    )
    assert with_["state_sha256"] == without["state_sha256"] and with_["bytes"] == without["bytes"]
    assert with_["leaks"] and "leaks" not in without


def test_a_vertical_run_tells_labels_and_columns() -> None:
    values = {
        "method": "split",
        "rounds": 1,
        "columns": {"aligned": 100},
        "evaluate": {"points": 1, "leaks": True},
    }
    result = execute(check({"run": {**values, "data": {"name": "digits"}}}).run)
    found = {(one["message"], one["attack"]): one for one in result.summary["leaks"]}
    assert (
        found["gradients nearest", "row labels"]["success"]
        > found["gradients nearest", "row labels"]["chance"]
    )
    assert found["embeddings", "reconstruction"]["success"] > 0.2
    assert ("no message (completion)", "row labels") in found


@pytest.mark.parametrize("engine", [{"name": "batched"}, {"name": "isolated"}, {"workers": 2}])
def test_other_engines_are_refused(engine: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"evaluate.leaks reads every message in one process.*engine.workers = 1"
    ):
        execute(run_of("fedavg", engine=engine))
