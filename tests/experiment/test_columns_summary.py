"""What runs of parties with different columns come to: result.json, comparisons, and what a person
sees.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import fedloom
from fedloom.cli import main
from fedloom.core.errors import ConfigError, MethodError
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check, read
from fedloom.experiment.run.compare import execute_all, summarize
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.experiment.run.result import Comparison, RunSummary
from fedloom.report.terminal import show_comparison

PARTIES, ALIGNED, WIDTH, CLASSES, ROUNDS = 4, 40, 8, 10, 3
SMALL: dict[str, Any] = {
    "method": "proto-evfl",
    "rounds": ROUNDS,
    "params": {"embedding_dim": WIDTH},
    "data": {"clients": PARTIES, "test_rows": 60},
    "columns": {"aligned": ALIGNED, "unaligned": 30},
    "models": {"pool": ["linear"]},
}


def small(**changes: Any) -> RunResult:
    return execute(check({"run": {**SMALL, **changes}}).run)


@pytest.fixture(scope="module")
def proto() -> RunResult:
    return small(params={"embedding_dim": WIDTH, "steps": 4}, evaluate={"attack_labels": 1})


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Two methods, two seeds."""
    methods = [{"method": "proto-evfl", "params": {"steps": 2}}, "split"]
    return execute_all(
        check({"run": {**SMALL, "rounds": 1}, "compare": {"methods": methods, "seeds": [0, 1]}})
    )


def last(result: RunResult) -> dict[tuple[str, str], float]:
    return {(row[4], row[3]): row[5] for row in result.metrics if row[0] == ROUNDS}


def test_one_answer_of_all_parties_is_the_result(proto: RunResult) -> None:
    s, end = proto.summary, last(proto)
    value = end["accuracy mean", ""]
    assert (
        s["accuracy"] == {"mean": value, "std": 0.0, "per_client": [value]}
        and proto.accuracy == value
    )
    assert s["own_accuracy"] is None and s["eval_modes"] == {} and s["agreement"] is None
    assert s["scores"] == {
        "accuracy": value,
        "balanced accuracy": end["balanced accuracy", ""],
        "auc": end["auc", ""],
        "log loss": end["loss mean", ""],
        "calibration error": end["calibration error", ""],
    }
    assert s["clients"] == PARTIES and 0.1 <= s["chance"] < 0.3
    json.dumps(s)


def test_results_are_what_the_schema_reads_and_writes(
    proto: RunResult, found: dict[str, Any]
) -> None:
    rows: Any = fedloom.run("local", rounds=0, data={"clients": PARTIES, "public_rows": 60})
    for content in (proto.summary, rows.summary):
        assert RunSummary(**content).content() == content
    assert Comparison(**found).content() == found


def test_each_party_alone_stands_beside(proto: RunResult) -> None:
    alone, end = proto.summary["alone"]["alone"], last(proto)
    names = [f"party-{m}" for m in range(PARTIES)]
    for on, metric in {"test": "accuracy alone", "own": "own accuracy alone"}.items():
        each = [end[metric, name] for name in names]
        assert alone[on]["per_client"] == each
        assert (
            alone[on]["mean"]
            == pytest.approx(np.mean(each))
            == pytest.approx(end[f"{metric} mean", ""])
        )
    assert (
        small(method="split", rounds=1, params={"embedding_dim": WIDTH, "epochs": 1}).summary[
            "alone"
        ]
        == {}
    )


def test_pseudo_labels_of_nobody_are_not_measured() -> None:
    columns = {"aligned": ALIGNED, "unaligned": 0}
    alone = small(rounds=1, columns=columns, params={"embedding_dim": WIDTH, "steps": 1}).summary[
        "alone"
    ]["alone"]
    assert alone["own"] is None and len(alone["test"]["per_client"]) == PARTIES


def test_attacks_are_of_parties_without_labels(proto: RunResult) -> None:
    attacks, end = proto.summary["attacks"], last(proto)
    assert {"prototypes", "completion", "chance"} <= set(attacks)
    for name, attack in attacks.items():
        assert set(attack["per_party"]) == {"party-1", "party-2", "party-3"}
        assert attack["per_party"]["party-2"] == end[f"attack {name}", "party-2"]
        assert attack["mean"] == pytest.approx(end[f"attack {name} mean", ""])


def test_bytes_by_kind_are_the_formula(proto: RunResult) -> None:
    """Embeddings and a prior up, prototypes and the prior down, each round; embeddings once before.
    Party 0 is at home.
    """
    s, crossing = proto.summary, PARTIES - 1
    kinds = {(line["sender"], line["kind"]): line for line in s["bytes_by_kind"]}
    up = 4 * crossing * (ALIGNED * WIDTH + CLASSES)
    down = 4 * crossing * (CLASSES * WIDTH + CLASSES)
    first = 4 * crossing * ALIGNED * WIDTH
    assert kinds["party", "improve"]["by_round"] == [up] * ROUNDS
    assert kinds["active", "improve"]["by_round"] == [down] * ROUNDS
    assert kinds["party", "introduce"]["by_round"] == [first] + [0] * (ROUNDS - 1)
    assert sum(kinds["active", "introduce"]["by_round"]) == 0
    assert s["bytes"] == {"up": first + ROUNDS * up, "down": ROUNDS * down, "across": 0}
    assert all(line["bytes"] == sum(line["by_round"]) for line in kinds.values())
    assert kinds["party", "improve"]["messages"] == crossing * ROUNDS
    assert sum(line["messages"] for line in kinds.values()) == s["messages"]


def test_bytes_by_kind_of_methods_that_share_rows() -> None:
    settings: dict[str, Any] = {
        "data": {"clients": 3},
        "models": {"pool": ["linear"]},
        "evaluate": {"points": 1},
    }
    s = fedloom.run("fedal", rounds=2, **settings).summary
    eval_modes = {"up": "client", "down": "server"}
    for eval_mode, sender in eval_modes.items():
        assert s["bytes"][eval_mode] == sum(
            line["bytes"] for line in s["bytes_by_kind"] if line["sender"] == sender
        )
    assert "scores" not in s


def test_scores_are_paired(found: dict[str, Any]) -> None:
    first, other = found["methods"]
    assert found["metric"] == "accuracy" and found["lower_is_better"] == [
        "log loss",
        "calibration error",
    ]
    assert set(found["further"]) == {"balanced accuracy", "auc", "log loss", "calibration error"}
    for name, (d,) in {"accuracy": found["differences"], **found["further"]}.items():
        assert d["mean"] == pytest.approx(
            first["scores"][name]["mean"] - other["scores"][name]["mean"]
        )
        assert (
            d["std_over_seeds"] == pytest.approx(np.std(d["per_seed"], ddof=1))
            and d["clients"] == 2
        )
        better = np.array(d["per_seed"]) * (-1 if name in found["lower_is_better"] else 1) > 0
        assert d["clients_better"] == better.sum()
    assert first["accuracy"] == first["scores"]["accuracy"] and other["alone"] == {}
    assert set(first["alone"]["alone"]) == {"test", "own"}


def test_columns_and_rows_are_not_compared(proto: RunResult, tmp_path: Path) -> None:
    mixed = check({"run": {"rounds": 1}, "compare": {"methods": ["split", "fedal"]}})
    with pytest.raises(
        ConfigError, match="split cannot be compared with fedal: its parties hold different columns"
    ):
        execute_all(mixed, tmp_path / "x")
    assert not (tmp_path / "x").exists()  # before any work
    rows: Any = fedloom.run("local", rounds=0, data={"clients": PARTIES, "public_rows": 60})
    with pytest.raises(ConfigError, match="compare methods of one kind"):
        summarize("", [proto, rows])


def test_other_test_people_are_not_compared(proto: RunResult) -> None:
    other = small(method="split", rounds=0, data={**SMALL["data"], "test_rows": 50})
    with pytest.raises(ConfigError, match="test_sha256"):
        summarize("", [proto, other])
    same = small(method="pooled", rounds=0)  # holds more, and is tested on the same
    assert summarize("", [proto, same])["differences"]


def shown(found: dict[str, Any]) -> str:
    text = io.StringIO()
    show_comparison(found, Console(file=text, width=80))
    return text.getvalue()


def test_a_comparison_fits_80_columns(found: dict[str, Any]) -> None:
    text = shown(found)
    lines = text.splitlines()
    # tables; the verdict is a sentence, which the terminal wraps
    wide = [line for line in lines if len(line) > 80 and "No clear winner" not in line]
    assert not wide
    row = next(line for line in lines if line.startswith(" split "))
    score = found["methods"][1]["scores"]
    for part in (
        f"{score['accuracy']['mean']:.1%} ±{100 * score['accuracy']['std_over_seeds']:.1f}",
        f"{score['balanced accuracy']['mean']:.1%}",
        f"{score['auc']['mean']:.3f}",
        f"{score['log loss']['mean']:.3f}",
        f"{score['calibration error']['mean']:.3f}",
    ):
        assert part in row
    assert (
        "log-loss and calibration error: lower is better" in text
        and "always predicting the most frequent class" in text
    )
    assert "proto-evfl - split" in text and "proto-evfl, each party alone: " in text


def test_a_difference_that_rounds_to_zero_has_no_minus(found: dict[str, Any]) -> None:
    d = {**found["further"]["auc"][0], "mean": -0.0001, "std_over_seeds": 0.0}
    text = shown({**found, "further": {**found["further"], "auc": [d]}})
    assert " 0.000 ±0.000" in text


def test_failures_have_a_column_where_there_are_some(found: dict[str, Any]) -> None:
    failed = [{**m, "failures": 17} for m in found["methods"]]
    assert "Failures" not in shown(found)
    assert "Failures" in shown({**found, "methods": failed}) and " 17 " in shown(
        {**found, "methods": failed}
    )


@pytest.mark.parametrize("data", ["digits", "breast_cancer"])
def test_the_command_line_from_end_to_end(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"data.name={data}", "params.steps=2", "columns.aligned=40", "evaluate.points=1"]
    settings = [word for flag in flags for word in ("-s", flag)]
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "fedloom",
            "run",
            "proto-evfl",
            "--rounds",
            "1",
            *settings,
            "--out",
            str(tmp_path / "run"),
        ],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    assert "log-loss" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Balanced accuracy" in page and "Calibration error" in page
    assert "Data of each party" in page and "Each party alone" in page


@pytest.mark.slow
def test_rare_classes_are_judged_apart() -> None:
    """No method finds a class that nobody was shown; a mean over all classes would hide it."""
    overrides = [
        "rounds=10",
        "columns.aligned=100",
        "columns.rare_classes=[3]",
        "evaluate.points=1",
        "data.test_rows=200",
    ]
    scores = execute(read("split", overrides).run).summary["scores"]
    assert scores["rare recall"] == 0 and scores["seen accuracy"] > 0.3
    few = execute(read("split", [*overrides, "columns.rare_rows=5"]).run).summary["scores"]
    assert few["rare recall"] >= 0
    y = build(read("split", overrides).run).data.labels["test"][0]
    seen = scores["seen accuracy"] * (y != 3).mean()
    assert scores["accuracy"] == pytest.approx(seen)
    assert "rare recall" not in execute(read("split", overrides[:2]).run).summary["scores"]


def test_training_that_has_diverged_is_reported() -> None:
    wild = [
        "rounds=2",
        "params.optimizer=sgd",
        "params.lr=1e6",
        "params.centered=false",
        "data.test_rows=60",
    ]
    with pytest.raises(MethodError, match="diverged: lower params"):
        execute(read("split", wild).run)


@pytest.mark.parametrize("method", ["ss-vfl", "fedhssl"])
def test_a_run_needs_rounds_with_labels(method: str) -> None:
    with pytest.raises(ConfigError, match="needs at least 6 rounds"):
        read(method, ["rounds=5"])
    assert read(method, ["rounds=6"]).run.rounds == 6
    assert read(method, ["rounds=0"]).run.rounds == 0
