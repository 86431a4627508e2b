"""What a comparison leads with: own rows, each method in its main mode, named and recomputed."""

from __future__ import annotations

import csv
import json
from io import StringIO
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from benchmarks.gpu import small_run
from rich.console import Console

import fedloom
from fedloom import report
from fedloom.core.errors import ConfigError
from fedloom.experiment.run.compare import compare, summarize
from fedloom.experiment.run.execute import RunResult, execute
from fedloom.experiment.run.metrics import MAIN_MODE
from fedloom.experiment.run.result import Comparison, RunSummary
from fedloom.methods import registry
from fedloom.report import paper
from fedloom.report.quick import comparison_card
from fedloom.report.results import EVERYBODY, better_at, conclusions, verdict
from fedloom.report.terminal import show_comparison

ALONE = ("fedcox", "stats", "exchange")
"""Methods on other data than the digits, or whose answer is no prediction of them."""


SERVER = {"server_rows": 200}


def archive(folder: Path, name: str) -> RunSummary:
    """A small run of a method, and its result as its folder has it."""
    run = small_run(name, {})  # all on the rows that those with a pretrained server have
    execute(run.model_copy(update={"data": run.data.model_copy(update=SERVER)}), folder / name)
    return RunSummary(**json.loads((folder / name / "result.json").read_text()))


def recomputed(folder: Path, s: RunSummary, metric: str) -> dict[str, float]:
    """The last value of a metric by number of the party, from `metrics.csv` alone."""
    with (folder / s.name / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    parties = [r for r in rows if r["metric"] == metric and r["party"]]
    return {r["party"].rpartition("-")[2]: float(r["value"]) for r in parties}


def own(mode: str) -> str:
    return f"own accuracy {mode}".strip()


def test_the_verdict_of_every_pair_names_what_it_measures_and_archives_agree(
    tmp_path: Path,
) -> None:
    """Every pair of horizontal methods that can run on one tiny federation."""
    names = [n for n, m in registry().items() if m.setting == "horizontal" and n not in ALONE]
    ran = {name: archive(tmp_path, name) for name in names}
    seen = set()
    for a, b in combinations(ran.values(), 2):
        try:
            found = compare("", [a, b], [None, None])
        except ConfigError as error:
            assert "cannot be compared" in str(error)
            continue
        best = verdict(found)
        assert best is not None
        modes = [next((m.mode for m in s.eval_modes), "") for s in (a, b)]
        personal = any(modes)
        metrics = [own(mode) for mode in modes] if personal else ["accuracy", "accuracy"]
        x, y = (recomputed(tmp_path, s, m) for s, m in zip((a, b), metrics, strict=True))
        assert x.keys() == y.keys()
        lead = np.mean([*x.values()]) - np.mean([*y.values()])
        (d,) = found.differences
        assert d.mean == pytest.approx(lead)
        assert d.clients_better == sum(x[i] > y[i] for i in x) and d.clients == len(x)
        if abs(lead) > 1e-9:
            assert best.winner == (a if lead > 0 else b).name
        rows = "on own class mix" if personal else "on the global test set"
        assert f" in accuracy {rows}" in best.text
        if modes[0] != modes[1]:
            assert str(found.metric) == f"own accuracy {MAIN_MODE}"
            for s, mode in zip((a, b), modes, strict=True):
                assert f"{s.name}: {mode or 'unadapted'}" in best.text
        elif personal:
            assert f"{rows}, {modes[0]}," in best.text
        seen.add((*modes,))
        if personal:
            assert found.for_everybody == found.further[found.on_test]
    assert {("", ""), ("", "tuned"), ("1 step", "tuned"), ("tuned", "tuned")} <= seen


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    small: dict[str, Any] = {"clients": 3, "models": "mlp", "rounds": 1, "test_rows": 50}
    fedloom.compare(["fedavg-ft", "fedproto", "fedavg"], out=folder / "c", **small)
    return folder / "c"


def test_every_table_names_the_mode_of_each_method_and_asks_for_one_model(mixed: Path) -> None:
    content = json.loads((mixed / "comparison.json").read_text())
    found, out = Comparison(**content), StringIO()
    assert found.by_mode == {
        "tuned": ["fedavg-ft"],
        "1 step": ["fedproto"],
        "unadapted": ["fedavg"],
    }
    show_comparison(content, Console(file=out, width=100))
    page = report.write(mixed).read_text(encoding="utf-8")
    for text in (out.getvalue(), page, paper.latex(found), comparison_card(found, found.measured)):
        assert "each in its main mode" in text
    for text in (out.getvalue(), page, paper.latex(found)):
        assert "fedavg-ft: tuned; fedproto: 1 step; fedavg: unadapted" in text
    for text in (out.getvalue(), page):
        assert EVERYBODY in text
    told = fedloom.CompareResult(content)
    assert told.to_frame()["mode"].tolist() == ["tuned", "1 step", ""]
    assert all(
        "in accuracy on own class mix, each in its main mode" in t for t in conclusions(found)
    )


def owners() -> pd.DataFrame:
    """Three owners whose labels contradict each other: one model for all has nobody's answer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    who = np.arange(240) % 3
    y = (x[:, 0] * np.where(who == 0, -1, 1) > 0).astype(int)
    return pd.DataFrame({"a": x[:, 0], "b": x[:, 1], "c": x[:, 2], "who": who, "y": y})


def test_natural_owners_are_compared_on_their_own_rows() -> None:
    found = fedloom.compare(
        ["fedavg", "local"], data=owners(), label="y", group="who", models="linear", rounds=3
    )
    assert found["metric"] == "own accuracy" and found["natural"]
    assert "in accuracy on own test rows, 1 seed" in found.verdict
    assert "accuracy" in found["further"]


def test_a_lower_error_is_better_in_the_verdict_its_words_and_the_tuning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedloom.experiment.run import tuning

    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = x @ [1.0, 2.0, 3.0] + 5
    # a rate that learns nothing, and one that learns
    monkeypatch.setattr(tuning, "FACTORS", (1e-6, 1.0))
    found = fedloom.compare(
        ["fedavg", "fedglm"],
        data=(x, y),
        task="number",
        clients=2,
        partition="iid",
        models="linear",
        rounds=5,
        tune=True,
    )
    assert "fedavg 0.01" in found["remarks"][0]
    assert "no learning rate to tune: fedglm" in found["remarks"]
    assert not any("--tune" in text for text in found["remarks"])
    assert found.verdict.startswith("fedglm lower by") and "in RMSE on the global" in found.verdict
    assert " worse than fedglm in RMSE" in repr(found) and "above" not in repr(found)


def result(name: str, seed: int, each: list[float]) -> RunResult:
    """A run by hand."""
    spread = {"mean": float(np.mean(each)), "std": 0.0, "per_client": each}
    none = {"up": 0, "down": 0, "across": 0}
    return RunResult(
        {
            "name": name,
            "method": name,
            "title": "",
            "preset": "recommended",
            "seed": seed,
            "rounds": 1,
            "iterations": 1,
            "dataset": "d",
            "clients": len(each),
            "engine": None,
            "accuracy": spread,
            "eval_modes": {},
            "agreement": None,
            "chance": 0.5,
            "bytes": none,
            "messages": 0,
            "seconds": {"total": 1.0},
            "failures": 0,
            "public_sha256": None,
            "state_sha256": None,
        },
        [],
        None,
    )


def test_a_missing_seed_turns_no_verdict() -> None:
    """A is better than b in each seed that both have; b alone has the easy seed."""
    runs = [result("a", seed, [0.5 + 0.01 * seed]) for seed in (0, 1)]
    runs += [result("b", seed, [0.4 + 0.01 * seed]) for seed in (0, 1)] + [result("b", 2, [0.99])]
    for order in (runs, runs[::-1]):
        best = verdict(Comparison(**summarize("", order)))
        assert best is not None and best.winner == "a" and "a +10.0 over b" in best.text


def test_ties_are_level_and_no_lead() -> None:
    found = Comparison(
        **summarize("", [result("a", 0, [0.5, 0.5, 0.2]), result("b", 0, [0.5, 0.2, 0.5])])
    )
    best = verdict(found)
    assert best is not None and "level with" in best.text and "+" not in best.text
    assert better_at(found.differences[0]) == "better at 1 and level at 1 of 3 clients"


def test_clients_that_only_one_run_evaluated_are_left_out_and_counted() -> None:
    whole, part = result("a", 0, [0.5, 0.9, 0.1]), result("b", 0, [0.4, 0.2, 0.3])
    some = {"mean": 0.3, "std": 0.0, "per_client": [0.4, 0.2], "clients": [0, 1]}
    part.summary["accuracy"] = some
    found = Comparison(**summarize("", [whole, part]))
    (d,) = found.differences
    assert d.mean == pytest.approx(0.4) and d.clients == 2
    assert found.unequal == ["clients that were evaluated: a 3, b 2"]
