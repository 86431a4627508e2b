"""The number of a cell, from a run's folder."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.run.execute import execute
from fedloom.experiment.run.metrics import GLOBAL, OWN, Metric
from fedloom.report.metrics import RunMetric, curve, value_of
from fedloom.report.read import Run, read_run

SETTINGS: dict[str, Any] = {
    "rounds": 2,
    "models": {"pool": ["mlp"]},
    "data": {"clients": 4, "options": {"alpha": 5.0}},
    "evaluate": {"points": 2},
}


def number(run: Run, metric: str) -> float | None:
    """A number of a run by its text."""
    return value_of(run, RunMetric.parse(metric))


def value(folder: Path, metric: str) -> float | None:
    """A number of a run's folder."""
    return number(read_run(folder), metric)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of clients that test their own models, tuned, too."""
    folder = tmp_path_factory.mktemp("afind") / "run"
    execute(RunConfig(method="afind", params={"epochs": 1}, **SETTINGS), folder)
    return folder


@pytest.fixture(scope="module")
def written(folder: Path) -> Run:
    """A run with values that are easy to compute with: an evaluation at the start and after 5, 10
    and 15 iterations, of which 5 make a round and take 2 seconds; 100, 200, 300 bytes sent.
    """
    run = read_run(folder)
    at = [5, 10, 15]

    def series(
        name: str, start: float, *rest: float
    ) -> dict[tuple[str, str, str], tuple[list[int], list[float]]]:
        return {(name, "", "start"): ([0], [start]), (name, "", "round"): (at, list(rest))}

    measured = {
        **series("accuracy mean", 0.1, 0.5, 0.7, 0.6),
        **series("loss mean", 2.0, 1.0, 0.5, 0.75),
        **series("bytes up", 0, 0, 0, 0),
        **series("bytes down", 0, 7, 7, 7),
        **series("bytes across", 0, 100, 200, 300),
        ("own accuracy", run.names[1], "start"): ([0], [0.0]),
        ("own accuracy", run.names[1], "round"): (at, [0.3, 0.4, 0.8]),
        ("noted", run.names[0], "round"): (at, [1.0, 2.0, 3.0]),
        ("noted", run.names[1], "round"): (at[1:], [4.0, 6.0]),
    }
    seconds = {"setup": 50.0, "round": 6.0, "evaluate": 20.0, "save": 1.0, "total": 80.0}
    summary = run.summary.model_copy(update={"rounds": 3, "iterations": 15, "seconds": seconds})
    return replace(run, measured=measured, summary=summary)


def test_what_the_summary_has_is_shown_as_it_is(folder: Path) -> None:
    found = json.loads((folder / "result.json").read_text())
    sent = found["bytes"]
    assert value(folder, "accuracy") == found["accuracy"]["mean"]
    assert value(folder, "own accuracy") == found["own_accuracy"]["mean"]
    assert value(folder, "own accuracy tuned") == found["eval_modes"]["tuned"]["mean"]
    assert value(folder, "seconds") == found["seconds"]["total"]
    assert value(folder, "bytes across") == sent["across"] > 0
    assert value(folder, "bytes") == sum(sent.values())
    assert value(folder, "agreement") == found["agreement"]
    assert value(folder, "no such metric") is None


def test_an_unfinished_run_is_summarized_as_a_finished_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    whole, part = read_run(folder).summary.content(), read_run(tmp_path / "run").summary.content()
    measured = (
        "accuracy",
        "own_accuracy",
        "eval_modes",
        "bytes",
        "chance",
        "own_chance",
        "messages",
    )
    assert {key: part[key] for key in measured} == {key: whole[key] for key in measured}
    assert whole["eval_modes"]


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("loss mean", 0.75),
        ("best accuracy", 0.7),
        ("best loss mean", 0.5),
        ("mean over rounds of accuracy", 0.6),
        ("largest loss mean", 1.0),
        ("first accuracy", 0.5),
        ("gain of accuracy", 0.1),
        ("noted", 4.5),
        ("own accuracy of client 1", 0.8),
        ("own accuracy of client 9", None),
        ("bytes until 60 %", 200.0),
        ("rounds until 60 %", 2.0),
        ("iterations until 62.5 % accuracy", 10.0),
        ("rounds until best", 2.0),
        ("seconds until best", 4.0),
        ("seconds until 71 %", math.inf),
        ("bytes until 5 %", 0.0),
        ("bytes until 71 %", math.inf),
        ("bytes until 10 % no such", None),
        ("best no such", None),
    ],
)
def test_what_follows_from_the_evaluations(
    written: Run, metric: str, expected: float | None
) -> None:
    assert number(written, metric) == (expected if expected is None else pytest.approx(expected))


def test_a_note_of_some_parties_is_their_mean_at_each_evaluation(written: Run) -> None:
    x, y = curve(written, RunMetric.parse("noted"))
    assert (x.tolist(), y.tolist()) == ([5, 10, 15], [1, 3, 4.5])


def test_a_run_without_evaluation_modes_shows_its_own_accuracy(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    execute(RunConfig(method="local", **SETTINGS), folder)
    assert not read_run(folder).summary.eval_modes
    own = value(folder, "own accuracy")
    eval_modes = ("tuned", "1 step", "5 steps training")
    assert [value(folder, f"own accuracy {eval_mode}") for eval_mode in eval_modes] == [own] * 3
    assert (
        value(folder, "own accuracy std") not in (own, None)
        and value(folder, "own accuracy tunned") is None
    )


def test_scores_and_attacks_of_parties_with_columns(written: Run) -> None:
    kinds = {"prototypes": 0.6, "gradients nearest": 0.4, "completion": 0.9, "chance": 0.2}
    attacks = {name: {"mean": mean, "per_party": {}} for name, mean in kinds.items()}
    values = written.summary.model_dump() | {
        "scores": {"auc": 0.9, "accuracy": 0.6},
        "attacks": attacks,
    }
    run = replace(written, summary=type(written.summary)(**values))
    assert (number(run, "AUC"), number(run, "auc")) == (0.9, 0.9)
    assert (number(run, "attack completion"), number(run, "attack on messages")) == (0.9, 0.6)
    assert number(run, "bytes until 60 %") == 207  # what parties were sent counts too
    assert number(written, "attack on messages") is None


def test_the_skew_is_the_distance_from_the_mix_of_all(written: Run) -> None:
    held = written.partition.model_copy(update={"counts": ((4, 0), (0, 4), (0, 0))})
    assert number(replace(written, partition=held), "skew") == 0.5
    held = written.partition.model_copy(update={"counts": ((2, 2), (1, 1))})
    assert number(replace(written, partition=held), "skew") == 0


def test_the_class_mix_of_vertical_parties(tmp_path: Path) -> None:
    """With two classes MID follows from the ratio r alone: 1 - H(r / (r + 1)) / ln 2."""
    columns = {"imbalance_ratio": [4.0, 1.5], "aligned": 50, "unaligned": 50}
    data, models = {"name": "breast_cancer", "clients": 2, "test_rows": 50}, {"pool": ["linear"]}
    execute(
        RunConfig(method="active-only", rounds=0, data=data, models=models, columns=columns),
        tmp_path / "run",
    )
    mid, other = (1 + p * np.log2(p) + (1 - p) * np.log2(1 - p) for p in (0.8, 0.6))
    found = {
        name: value(tmp_path / "run", name)
        for name in ("class ratio of client 0", "imbalance degree of client 0")
    }
    assert [*found.values()] == pytest.approx([4.0, mid])
    assert value(tmp_path / "run", "imbalance degree") == pytest.approx((mid + other) / 2)
    assert value(tmp_path / "run", "class cosine of client 2") is None
    assert RunMetric.parse("class cosine of client 1").exact


def test_a_run_without_rounds_has_the_skew_of_its_split(tmp_path: Path) -> None:
    data = {"clients": 4, "partition": "pathological", "options": {"classes": 1}}
    models = {"pool": ["linear"]}
    execute(RunConfig(method="local", rounds=0, data=data, models=models), tmp_path / "run")
    assert 0.5 < (value(tmp_path / "run", "skew") or 0) <= 1


def test_of_which_metrics_less_is_better() -> None:
    less = (
        "bytes up",
        "mean over rounds of bytes up",
        "best seconds",
        "rounds until best",
        "seconds until best",
        "attack on messages",
        "loss mean",
        "calibration error",
    )
    more = ("accuracy", "best own accuracy", "largest agreement", "mean over rounds of coreset")
    assert [text for text in (*less, *more) if RunMetric.parse(text).lower] == [*less]


def test_a_curve_of_bytes_is_one_of_the_accuracy() -> None:
    curves = {
        "bytes": "accuracy",
        "best own accuracy": "own accuracy",
        "bytes until 60 %": "accuracy",
        "auc": "auc",
    }
    curves |= {
        "rounds until 5 % auc": "auc",
        "first own accuracy of client 1": "own accuracy of client 1",
    }
    assert {text: str(RunMetric.parse(text).drawn) for text in curves} == curves


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auc", RunMetric(Metric("auc"))),
        ("best own accuracy", RunMetric(OWN, "best")),
        (
            "gain of own accuracy 1 step training",
            RunMetric(Metric("accuracy", "1 step", "training", own=True), "gain of"),
        ),
        (
            "own accuracy tuned of client 1",
            RunMetric(Metric("accuracy", "tuned", own=True), client=1),
        ),
        ("attack gradients direct", RunMetric(Metric("attack", "gradients direct"))),
        ("seconds until best", RunMetric(GLOBAL, cost="seconds")),
        ("bytes until 62.5 % own accuracy", RunMetric(OWN, cost="bytes", level=0.625)),
        ("a note of the method", RunMetric(Metric("a note of the method"))),
    ],
)
def test_a_number_is_written_as_it_is_read(text: str, expected: RunMetric) -> None:
    assert RunMetric.parse(text) == expected and str(expected) == text
