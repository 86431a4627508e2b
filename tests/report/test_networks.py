"""What each kind of client reaches: in `comparison.json`, in the terminal, and in both kinds of
report.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedloom import report
from fedloom.core.errors import DataError
from fedloom.experiment.run.compare import network_means, summarize
from fedloom.experiment.run.execute import RunResult
from fedloom.experiment.run.metrics import parse
from fedloom.experiment.run.result import RunSummary
from fedloom.report.terminal import show_comparison
from tests.report.test_report import write_run

KINDS = ["forest", "mlp", "forest"]


def mixed(folder: Path, method: str = "fedal", **values: object) -> Path:
    """A run written by hand, two of whose three clients are forests."""
    write_run(folder, **values)  # type: ignore[arg-type]
    for name in ("partition.json", "result.json"):
        held = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(held | {"architectures": KINDS, "method": method}))
    return folder


def content(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def gains(
    runs: Sequence[dict[str, Any]], metric: str, baseline: Sequence[dict[str, Any]] = ()
) -> dict[str, dict[str, Any]]:
    group, against = ([RunSummary(**run) for run in some] for some in (runs, baseline))
    return {
        name: found.model_dump()
        for name, found in network_means(group, parse(metric), against).items()
    }


def test_the_mean_over_the_clients_of_each_kind(tmp_path: Path) -> None:
    runs = [
        content(mixed(tmp_path / f"{seed}", seed=seed, accuracy=(0.5, 0.8, 0.7 - seed / 10)))
        for seed in (0, 1)
    ]
    found = gains(runs, "accuracy")
    assert found == {
        "forest": {"clients": 4, "mean": pytest.approx((0.5 + 0.7 + 0.5 + 0.6) / 4), "gain": None},
        "mlp": {"clients": 2, "mean": pytest.approx(0.8), "gain": None},
    }
    of_some = {"per_client": [0.9, 0.3], "clients": [1, 2], "mean": 0.6, "std": 0.3}
    assert gains([{**runs[0], "accuracy": of_some}], "accuracy")["mlp"] == {
        "clients": 1,
        "mean": 0.9,
        "gain": None,
    }
    alike = {**runs[0], "architectures": ["mlp"] * 3}
    older = {k: v for k, v in runs[0].items() if k != "architectures"}
    assert gains([alike], "accuracy") == gains([older], "accuracy") == {}


def test_gains_are_over_the_same_clients_of_the_same_seeds(tmp_path: Path) -> None:
    accuracy = {
        ("local", 0): (0.1, 0.3, 0.2),
        ("fedal", 0): (0.5, 0.2, 0.4),
        ("fedal", 1): (0.9, 0.9, 0.9),
    }
    runs = {
        key: content(
            mixed(tmp_path / f"{key}", name=key[0], method=key[0], seed=key[1], accuracy=each)
        )
        for key, each in accuracy.items()
    }
    local, *fedal = runs.values()
    found = gains(fedal, "accuracy", [local])
    assert found["forest"]["gain"] == pytest.approx((0.4 + 0.2) / 2)
    assert found["mlp"]["gain"] == pytest.approx(-0.1) and found["mlp"]["mean"] == pytest.approx(
        0.55
    )
    other = {**local, "architectures": ["mlp", "mlp", "forest"]}
    # client 2 alone is one in both
    assert gains(fedal, "accuracy", [other])["forest"]["gain"] == pytest.approx(0.2)


def test_the_method_compared_with_is_local_or_the_first(tmp_path: Path) -> None:
    def over(*names: str) -> tuple[str, list[float]]:
        runs = [
            mixed(tmp_path / f"{len(names)}{n}", name=n, method=n, accuracy=(0.5, 0.5, 0.5))
            for n in names
        ]
        found = summarize("T", [RunResult(content(run), [], run) for run in runs])
        return found["gains_over"], [m["networks"]["mlp"]["gain"] for m in found["methods"]]

    assert over("fedal", "local", "cfd") == ("local", [0.0, 0.0, 0.0])
    assert over("cfd", "fedal") == ("cfd", [0.0, 0.0])


def test_clients_that_never_learned_are_left_out(tmp_path: Path) -> None:
    run = {**content(mixed(tmp_path / "one", accuracy=(0.5, 0.8, 0.1))), "unseen": [2]}
    assert gains([run], "accuracy")["forest"] == {"clients": 1, "mean": 0.5, "gain": None}


def test_the_terminal_shows_it_at_any_width(tmp_path: Path) -> None:
    each = {"fedal": (0.5, 0.8, 0.7), "local": (0.5, 0.7, 0.7)}
    runs = [mixed(tmp_path / name, name=name, method=name, accuracy=a) for name, a in each.items()]
    found = summarize("T", [RunResult(content(run), [], run) for run in runs])

    def shown(width: int) -> str:
        out = io.StringIO()
        show_comparison(found, Console(file=out, width=width))
        return out.getvalue()

    lines = [line.split() for line in shown(100).splitlines()]
    assert ["model", "clients", "fedal", "local"] in lines
    assert ["forest", "2", "60.0%", "(0.0)", "60.0%"] in lines and [
        "mlp",
        "1",
        "80.0%",
        "(+10.0)",
        "70.0%",
    ] in lines
    assert "in brackets: gain over local in points" in shown(100)
    assert {"forest", "mlp", "60.0%", "80.0%"} <= {*shown(25).split()}


def test_reports_of_one_run_and_of_several_show_it(tmp_path: Path) -> None:
    runs = [
        mixed(tmp_path / name, name=name, accuracy=(0.5, 0.8, 0.7)) for name in ("fedal", "local")
    ]
    for text in (page(runs[:1], tmp_path / "one.html"), page(runs, tmp_path / "two.html")):
        assert "by the clients" in text and "<td" in text
        assert "forest" in text and "60.0" in text and "Model" in text
    assert "gain in points over fedal" in text and "(0.0)" in text
    with pytest.raises(DataError):
        report.write_many([], tmp_path / "none.html")


def page(runs: list[Path], target: Path) -> str:
    written = report.write(runs[0]) if len(runs) == 1 else report.write_many(runs, target)
    return Path(written).read_text(encoding="utf-8")
