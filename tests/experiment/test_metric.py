"""Metrics as values, and their text in files."""

from typing import Any

import pytest

from fedloom.experiment.run.metrics import GLOBAL, OWN, SCORES, Metric, parse, prepared
from fedloom.experiment.run.result import Comparison

TUNED = Metric("accuracy", "tuned", own=True)
TEXTS = {
    "accuracy": GLOBAL,
    "own accuracy": OWN,
    "own accuracy tuned": TUNED,
    "own accuracy 5 steps training": Metric("accuracy", "5 steps", "training", own=True),
    "accuracy alone": Metric("accuracy", "alone"),
    "own auc": Metric("auc", own=True),
    "attack gradients nearest": Metric("attack", "gradients nearest"),
    "own accuracy pretraining": Metric("accuracy", "pretraining", own=True),
    "accuracyish": Metric("accuracyish"),
    "own goal": Metric("own goal"),
    "loss mean": Metric("loss mean"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_and_its_metric(text: str) -> None:
    assert parse(text) == TEXTS[text] and str(TEXTS[text]) == text


def test_a_mode_in_result_json_names_its_clients() -> None:
    assert prepared("tuned") == TUNED and prepared("tuned training") == TUNED.training
    assert [m.eval_mode for m in (TUNED, TUNED.training)] == ["tuned", "tuned training"]
    assert [m.clients for m in (OWN, TUNED, TUNED.training)] == ["", "unseen", "training"]


def test_lower_is_better_of_losses_and_errors_alone() -> None:
    found = [str(score) for score in SCORES if score.lower_is_better]
    assert (
        found
        == ["log loss", "calibration error", "rmse", "mae"]
        == [str(m) for m, score in SCORES.items() if score.lower]
    )


def test_a_comparison_keeps_the_text_of_its_metrics() -> None:
    over: dict[str, Any] = {"mean": 0.5, "std_over_seeds": None, "std_over_clients": 0.0}
    method: dict[str, Any] = {
        "name": "a",
        "method": "a",
        "preset": "p",
        "seeds": [0],
        "accuracy": over,
        "own_accuracy": None,
    }
    method |= {
        "eval_modes": {"tuned training": over},
        "scores": {"auc": over},
        "chance": 0.1,
        "own_chance": None,
    }
    method |= {"bytes": {"up": 0, "down": 0, "across": 0}, "seconds": 0.0, "failures": 0}
    content: dict[str, Any] = {
        "title": "",
        "reference": "a",
        "methods": [method],
        "metric": "own accuracy tuned",
        "differences": [],
    }
    content |= {"further": {"accuracy": []}, "lower_is_better": ["log loss"], "runs": []}
    found = Comparison(**content)
    assert (
        found.metric == TUNED
        and found.further == {GLOBAL: []}
        and found.methods[0].eval_modes.keys() == {TUNED.training}
    )
    assert found.content() == content
