"""A method that diverges or fails does not end a comparison: the others finish, and the page names
it.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedloom as library
from fedloom.core.errors import ConfigError, TrainingDiverged
from fedloom.experiment.run.compare import compare
from fedloom.experiment.run.result import RunSummary
from fedloom.report.terminal import line
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

HOT = {"lr": 1e30}
SMALL: dict[str, Any] = {"clients": 3, "rounds": 2, "models": "mlp", "evaluate": {"points": 1}}


def test_a_command_finishes_the_others_and_names_the_diverged_one(
    command: Callable[..., Done], tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text(
        'method = "local"\nrounds = 1\n[data]\nclients = 3\n[models]\npool = '
        '["mlp"]\n[compare]\nseeds = [0, 1]\nmethods = [{ method = "alone", name = "hot", params '
        '= { lr = 1e30 } }, "local", "fedmd"]\n'
    )
    done = command("run", "c.toml", "--out", "out", code=1)
    assert "hot diverged with seeds 0, 1: no client's predictions are finite" in done.stdout
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [m["name"] for m in found["methods"]] == ["local", "fedmd"] and found[
        "reference"
    ] == "local"
    assert {(one["name"], one["seed"], one["diverged"]) for one in found["left_out"]} == {
        ("hot", 0, True),
        ("hot", 1, True),
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Hot diverged with seeds 0, 1" in page or "hot diverged with seeds 0, 1" in page


def test_an_error_in_the_middle_of_a_run_is_the_divergence_that_caused_it() -> None:
    found = library.compare(
        [{"method": "dispfl-afind", "name": "hot", "params": HOT}, "gossip", "alone"], **SMALL
    )
    assert (
        found["reference"] == "gossip"
        and "hot diverged with seed 0: weights are not finite" in found["remarks"][0]
    )
    frame = found.to_frame()
    assert frame["method"].tolist() == ["gossip", "alone", "hot"] and frame["seeds"].tolist() == [
        1,
        1,
        0,
    ]
    assert "hot & diverged & -- & --" in found.to_latex() and "diverged" in found._repr_html_()


def test_a_joint_prediction_that_diverged_is_left_out() -> None:
    small: dict[str, Any] = {"clients": 2, "rounds": 1, "evaluate": {"points": 1}}
    found = library.compare(["split", {"method": "split", "name": "hot", "params": HOT}], **small)
    assert [m["name"] for m in found["methods"]] == ["split"]
    assert (
        found["left_out"][0]["reason"]
        == "predictions are not finite, as training diverged: lower params.lr"
    )
    with pytest.raises(TrainingDiverged, match=r"predictions are not finite"):
        library.compare(["split"], params=HOT, **small)


def test_a_comparison_in_which_all_diverged_says_so() -> None:
    with pytest.raises(
        TrainingDiverged,
        match=r"every run diverged or failed; the first: .* lower the learning rate",
    ):
        library.compare(["local", "fedavg"], params=HOT, **SMALL)


def test_a_method_without_some_seeds_is_no_equal_comparison() -> None:
    summaries = [RunSummary(**library.run("local", seed=seed, **SMALL).summary) for seed in (0, 1)]
    other = [
        one.model_copy(update={"name": "mine", "diverged": "why" * one.seed}) for one in summaries
    ]
    found = compare("", [*summaries, *other], [None] * 4)
    assert line(found.content()).startswith("Not an equal comparison (mine without 1 of 2 seeds)")
    assert found.methods[1].seeds == [0] and found.remarks[0] == "mine diverged with seed 1: why"


def test_a_mistake_in_the_config_still_ends_the_command() -> None:
    with pytest.raises(ConfigError):
        library.compare(["fedavg", {"method": "fedmd", "params": {"no_such": 1}}], **SMALL)
