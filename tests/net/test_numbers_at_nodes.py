"""A number to predict with differential privacy at nodes that gRPC reaches: scale, ε, and who has
another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.api import execute
from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.reading import check
from fedloom.report import write
from tests.net.nodes import federation

SCALE = (1000.0, 300.0)
DP: dict[str, Any] = {"clip": 1.0, "sigma": 1.5}


def rows_of(path: Path, seed: int) -> Path:
    """900 prices, near 1000 + 300 x."""
    rng = np.random.default_rng(seed)
    x, z = rng.normal(size=(2, 900))
    y = 1000 + 300 * x + rng.normal(0, 30, 900)
    path.write_text(
        "\n".join(
            [
                "x,z,price",
                *(f"{a:.4f},{b:.4f},{c:.2f}" for a, b, c in zip(x, z, y, strict=True)),
                "",
            ]
        )
    )
    return path


def run_of(path: Path, **changes: Any) -> Any:
    schema = {
        "columns": ["x", "z"],
        "label": "price",
        "label_scale": list(SCALE),
        "scale": {"x": [0, 1], "z": [0, 1]},
    }
    values: dict[str, Any] = {
        "method": "fedavg-dp",
        "rounds": 4,
        "data": {"name": "prices", "clients": 3, "row_schema": schema, "test_fraction": 0.3},
        "models": {"pool": ["linear"]},
        "params": {"batch_size": 32, "epochs": 1, "lr": 0.5, "clients_per_round": 3, "dp": DP},
        "engine": {"name": "net", "federation": str(path)},
    }
    return check({"run": {**values, **changes}}).run


def test_noise_on_a_number_at_nodes(tmp_path: Path) -> None:
    def own(name: str) -> dict[str, Any]:
        number = int(name[-1])
        scale = SCALE if number < 3 else (0.0, 1.0)
        rows = {
            "rows": rows_of(tmp_path / f"{name}.csv", number),
            "label": "price",
            "label_scale": scale,
        }
        return {
            "data": {"prices": {**rows, "keep": ("x", "z"), "epsilon": 100.0, "score": True}},
            "secret_noise": True,
        }

    with federation(tmp_path, 4, own) as (path, _):
        path.write_text(path.read_text().replace('[[nodes]]\nname = "node-3"', ""))
        found = execute(run_of(path), tmp_path / "run").summary
        assert "RMSE" in write(tmp_path / "run").read_text()
        path.write_text(path.read_text().replace("node-2", "node-3"))
        with pytest.raises(ConfigError, match=r"label_scale of prices must be that of this node"):
            execute(run_of(path))
    (spent,) = found["privacy"]
    assert spent["message"] == "weights" and all(
        0 < epsilon < 10 for epsilon in spent["epsilon"]["per_client"]
    )
    scores = sorted(
        found["rmse"]["per_client"]
    )  # in the number's unit; the noise is secret, and so another in each run
    assert scores[0] >= 0 and scores[1] < found["chance"]
