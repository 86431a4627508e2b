"""The command `fedloom stats` where rows stay at nodes, which need not allow scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.command import Done, fedloom  # noqa: F401
from tests.net.nodes import federation

SCHEMA = """[data]
name = "stays"
[data.row_schema]
columns = ["age", { name = "ward", categories = ["north", "south"] }]
label = "days"
label_scale = [10.0, 3.0]
"""


def test_statistics_of_rows_at_nodes(tmp_path: Path, fedloom: Callable[..., Done]) -> None:  # noqa: F811
    rng = np.random.default_rng(0)
    ages = [rng.integers(20, 90, 100 + 20 * i) for i in range(3)]

    def own(name: str, **more: Any) -> dict[str, Any]:
        rows = [
            f"{age},{'north' if age % 3 else 'south'},{age / 8:.1f}" for age in ages[int(name[-1])]
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ward,days", *rows, ""]))
        words = {
            "label": "days",
            "label_scale": (10.0, 3.0),
            "categories": {"ward": ("north", "south")},
        }
        return {
            "data": {"stays": {"rows": tmp_path / f"{name}.csv", "keep": ("age", "ward"), **words}},
            **more,
        }

    (tmp_path / "run.toml").write_text(SCHEMA)
    with federation(tmp_path, 3, own) as (path, _):
        found = json.loads(fedloom("stats", "run.toml", "--federation", str(path), "--json").stdout)
    rows = {
        row[0]: dict(zip(found["tables"][0]["columns"], row, strict=True))
        for row in found["tables"][0]["rows"]
    }
    every, age = np.concatenate(ages), rows["age"]
    # a description holds no rows out
    assert age["Rows"] == len(every) and age["Mean"] == pytest.approx(every.mean(), rel=1e-6)
    assert found["row_schema"]["scale"]["age"] == pytest.approx(
        [age["Mean"], age["S.d."]], rel=1e-4
    )

    (other := tmp_path / "other").mkdir()
    with federation(other, 3, lambda name: own(name, min_sum=5)) as (path, _):
        done = fedloom("stats", "run.toml", "--federation", str(path), code=2)
    assert "node-0 refuses the run: this node adds with at least 5 nodes (min_sum)" in done.stderr
