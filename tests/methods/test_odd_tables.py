"""Every page of sums on tables as nobody wants them: finite predictions, also of rows that nobody
had.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from fedloom import methods
from fedloom.core.errors import MethodError
from tests.methods.tables import federation, owners, table

SETTINGS: dict[str, dict[str, Any]] = {
    "fedboost": {"depth": 3, "bins": 8, "mix": 2},
    "fedforest": {"depth": 4, "bins": 8, "lot": 2, "mix": 2},
    "fedextra": {"depth": 3, "bins": 8},
    "fedglm": {"l2": 1.0, "missing": "indicator"},
    "stats": {},
}
CUTS = {"one row each": [1, 2], "no row": [80, 80], "two owners": [45], "three": [30, 60]}


def odd(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """90 rows in the order of their classes, so that owners have few of them."""
    x, y = table(90, classes=3, seed=1)
    if kind == "nothing known":
        x[:] = np.nan
    if kind == "one value":
        x[:] = 1.0
    if kind == "huge":
        x[:, 0] = np.where(y == 1, 3e38, -3e38)
        x[:, 2] *= np.float32(1e-42)
    order = np.argsort(y, kind="stable")
    return x[order], y[order]


@pytest.mark.parametrize("name", SETTINGS)
def test_predictions_are_finite(name: str) -> None:
    new = torch.from_numpy(table(8, seed=2)[0])
    new[0], new[1, 3], new[2, 0], new[3] = float("nan"), 99, 3e38, -1e30
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in ("plain", "nothing known", "one value", "huge"):
            for cuts in CUTS.values():
                toy = federation(
                    methods.find(name), owners(*odd(kind), cuts, classes=3), **SETTINGS[name]
                ).run(3)
                assert not toy.fed.failures
                for i in toy.engine.ids:
                    found = toy.party(i).infer(new)
                    assert found.shape == (8, 3) and torch.isfinite(found).all(), (kind, cuts)


def test_owners_without_any_row() -> None:
    x, y = odd("plain")
    for name, settings in SETTINGS.items():
        toy = federation(methods.find(name), owners(x[:0], y[:0], [0], classes=3), **settings)
        try:
            toy.run(1)
        except MethodError as error:
            assert "no row" in str(error)
