"""Runs and comparisons whose logits cross in few bytes, as a user asks for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import fedloom
from fedloom import report
from fedloom.cli import main
from fedloom.experiment.plan.reading import read

BATCH, CLASSES, CLIENTS, TAU = 32, 10, 3, 5


def test_int8_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = [
        "-s",
        "models.pool=['linear']",
        "-s",
        f"data.clients={CLIENTS}",
        "-s",
        "evaluate.points=1",
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        ["fedloom", "run", "fedal", "--rounds", "1", *small, "-s", "params.coding=int8"],
    )
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    result = json.loads((tmp_path / "runs" / "fedal" / "result.json").read_text())
    row = CLASSES + 4
    assert result["bytes"]["up"] == row * BATCH * CLIENTS * TAU
    assert result["bytes"]["down"] == 2 * row * BATCH * CLIENTS * TAU
    again = read(str(tmp_path / "runs" / "fedal" / "config.toml")).run
    assert again.params["coding"] == "int8"


def test_a_comparison_of_codings(tmp_path: Path) -> None:
    file = tmp_path / "codings.toml"
    file.write_text("""
        rounds = 1
        [models]
        pool = ["linear"]
        [data]
        clients = 3
        [evaluate]
        points = 1
        [compare]
        methods = [
            { method = "fedmd", params = { tau = 5 } },
            { method = "fedmd", name = "fedmd-int8", params = { tau = 5, coding = "int8" } },
            { method = "fedmd", name = "fedmd-top3", params = { tau = 5, coding = "top-k", top_k = 3 } },
        ]
    """)  # noqa: E501
    found = fedloom.compare(str(file), out=tmp_path / "out")
    batches = BATCH * CLIENTS * TAU
    assert {m["name"]: (m["bytes"]["up"], m["bytes"]["down"]) for m in found["methods"]} == {
        "fedmd": (40 * batches, 40 * batches),
        "fedmd-int8": (14 * batches, 14 * batches),
        "fedmd-top3": (11 * batches, 20 * batches),
    }
    runs = [tmp_path / "out" / run["folder"] for run in found["runs"]]
    page = report.write_many(runs, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "fedmd-int8" in page and "sent up by all clients" in page


def test_the_shipped_comparison_of_codings_distinguishes_its_runs() -> None:
    runs = [run for run in read("fedal-bytes").runs() if run.seed == 0]
    assert len({run.name for run in runs}) == len(runs) == 10
    asked = {
        (run.method, run.params.get("coding", "float32"), run.params.get("top_k")) for run in runs
    }
    eval_modes = [("float32", None), ("float16", None), ("int8", None), ("top-k", 1), ("top-k", 3)]
    assert asked == {
        (method, *eval_mode) for method in ("fedmd", "fedal") for eval_mode in eval_modes
    }
    assert {run.resolve()[1].tau for run in runs} == {5}
