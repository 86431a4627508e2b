"""Regressions of rows at nodes: all rows, the named event, and the words that have rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.duration.hazard_regression import PHReg

from fedloom.api import execute
from fedloom.core.errors import FedloomError
from fedloom.experiment.plan.reading import check
from tests.net.nodes import federation


def rows_of(number: int) -> pd.DataFrame:
    """60 rows of a node; those of the ward east lack x."""
    rng = np.random.default_rng(number)
    x, ward = (
        rng.normal(size=60).round(3),
        rng.permutation(np.repeat(["east", "north", "west"], 20)),
    )
    died = np.where(rng.random(60) < 0.6, "yes", "no")
    time = np.ceil(rng.exponential(np.exp(-0.7 * x)) * 40)
    x[ward == "east"] = np.nan
    return pd.DataFrame({"x": x, "time": time, "ward": ward, "died": died})


def run_of(path: Path, **params: Any) -> Any:
    columns = ["x", "time", {"name": "ward", "categories": ["east", "north", "west"]}]
    schema = {"columns": columns, "label": "died", "classes": ["no", "yes"]}
    values = {
        "method": "fedcox",
        "rounds": 12,
        "data": {"name": "deaths", "clients": 2, "row_schema": schema, "missing": "median"},
        "params": {"times": 200, "owners": "fixed", **params},
        "engine": {"name": "net", "federation": str(path)},
    }
    return check({"run": values}).run


def test_hazards_at_nodes_are_those_of_all_rows(tmp_path: Path) -> None:
    def own(name: str) -> dict[str, Any]:
        rows_of(int(name[-1])).to_csv(tmp_path / f"{name}.csv", index=False)
        data = {"rows": tmp_path / f"{name}.csv", "label": "died", "keep": ("x", "time", "ward")}
        data |= {"classes": ("no", "yes"), "categories": {"ward": ("east", "north", "west")}}
        return {"data": {"deaths": {**data, "missing": "median", "score": True}}}

    with federation(tmp_path, 2, own) as (path, _):
        with pytest.raises(FedloomError, match=r"params\.event is needed.*'no' or 'yes'"):
            execute(run_of(path))
        found = execute(run_of(path, event="yes")).summary
    whole = pd.concat([rows_of(0).assign(node=0.0), rows_of(1).assign(node=1.0)]).dropna()
    x = np.c_[whole["x"], whole["ward"] == "west", whole["node"]].astype(float)
    ref = PHReg(whole["time"], x, (whole["died"] == "yes").astype(int), ties="breslow").fit()
    table, fit = found["learned"]
    assert [row[0] for row in table["rows"]] == ["x", "ward=west", "owner node-1"]
    assert [row[1] for row in table["rows"]] == pytest.approx(list(ref.params), rel=1e-6)
    said = dict(fit["rows"])
    assert (said["rows"], said["rows left out, with missing values"]) == (80, 40)
    assert said["event"] == "yes" and said["reference of ward"] == "north" and found["fitted"]
