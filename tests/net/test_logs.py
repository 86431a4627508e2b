"""What a run on own rows leaves behind: no value of a row in any log, audit line, message or
result.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.api import execute
from fedloom.experiment.plan.reading import check
from fedloom.report import write
from tests.net.nodes import federation

ODD = {"x": "0.7771331", "note": "Zyxqvist", "price": "7391.2468"}
"""The values of a row, as nobody else has them."""


def rows_of(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    lines = [
        f"{x:.4f},{z:.4f},n{k},{1000 + 300 * x:.2f}"
        for k, (x, z) in enumerate(rng.normal(size=(120, 2)))
    ]
    odd = f"{ODD['x']},0.5,{ODD['note']},{ODD['price']}"
    path.write_text("\n".join(["x,z,note,price", *lines[:60], odd, *lines[60:], ""]))
    return path


def seen(data: bytes) -> list[str]:
    """The odd values that these bytes have as text or as a number."""
    numbers = [
        (name, struct.pack(f, float(ODD[name]))) for name in ("x", "price") for f in ("<f", "<d")
    ]
    return [
        name
        for name, value in [*((n, v.encode()) for n, v in ODD.items()), *numbers]
        if value in data
    ]


@pytest.mark.parametrize(
    ("method", "secure"), [("fedglm", True), ("fedboost", True), ("fedavg", False)]
)
def test_no_value_of_a_row_is_written_down(
    method: str, secure: bool, tmp_path: Path, caplog: Any
) -> None:
    caplog.set_level("DEBUG")

    def own(name: str) -> dict[str, Any]:
        rows = {
            "rows": rows_of(tmp_path / f"{name}.csv", int(name[-1])),
            "label": "price",
            "label_scale": (1000, 300),
        }
        return {
            "data": {"prices": {**rows, "keep": ("x", "z"), "test": 0.3, "score": True}},
            "secret_noise": True,
        }

    schema = {
        "columns": ["x", "z"],
        "label": "price",
        "label_scale": [1000, 300],
        "scale": {"x": [0, 1], "z": [0, 1]},
    }
    with federation(tmp_path, 3, own) as (path, nodes):
        values: dict[str, Any] = {"method": method, "rounds": 2, "models": {"pool": ["linear"]}}
        values |= {
            "data": {"name": "prices", "clients": 3, "row_schema": schema, "test_fraction": 0.3}
        }
        values |= {
            "aggregate": {"secure": secure},
            "engine": {"name": "net", "federation": str(path)},
        }
        execute(check({"run": values}).run, tmp_path / "run")
        write(tmp_path / "run")
        states = [node.service.config.state for node in nodes]
    assert seen((tmp_path / "node-0.csv").read_bytes()) == [*ODD]
    for folder in (tmp_path / "run", *states):
        for file in (file for file in folder.rglob("*") if file.is_file()):
            assert not seen(file.read_bytes()), file
    assert not seen(caplog.text.encode())
