"""`fed.sum`: the mean of fixed-point numbers, with the same bits on every engine, whoever fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedloom.api import execute
from fedloom.core import fixed_point
from fedloom.core.errors import ConfigError, MessageError, MethodError
from fedloom.core.fixed_point import FRACTION, LARGEST, MOST_WEIGHT, decoded, encoded
from fedloom.core.message import Shape, floats
from fedloom.experiment.reading import check
from fedloom.methods import find

LIKE = {"weights": {"a": floats(2, 3), "b": floats()}, "rows": Shape("int64")}


def reply(seed: int, rows: int, scale: float = 1.0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, 3, generator=draw) * scale, torch.randn((), generator=draw) * scale
    return {"weights": {"a": a, "b": b}, "rows": torch.tensor(rows)}


def test_the_mean_is_that_of_rounded_numbers_to_the_bit() -> None:
    replies, rows = [reply(k, 10 + k) for k in range(5)], [10 + k for k in range(5)]
    xs = [encoded(r, "rows", 5) for r in replies]
    whole, mean = decoded(sum(xs[1:], xs[0]), LIKE, "rows")
    other, again = decoded(sum(xs[-2::-1], xs[-1]), LIKE, "rows")
    assert whole == other == sum(rows) and torch.equal(mean["weights"]["a"], again["weights"]["a"])
    step = 2.0**FRACTION
    exact = sum((r["weights"]["a"].double() * step).round() * n for r, n in zip(replies, rows, strict=True))
    assert torch.equal(mean["weights"]["a"], (exact / (whole * step)).float())
    plain = sum(r["weights"]["b"].double() * n for r, n in zip(replies, rows, strict=True)) / whole
    assert abs(float(mean["weights"]["b"]) - float(plain)) < 2.0**-FRACTION
    assert list(mean) == ["weights"]


def test_no_sum_leaves_the_ring() -> None:
    huge = {
        "weights": {"a": torch.full((2, 3), -3e38), "b": torch.tensor(3e38)},
        "rows": torch.tensor(MOST_WEIGHT // 2),
    }
    x = encoded(huge, "rows", 2)
    whole, mean = decoded(x + x, LIKE, "rows")
    assert whole == MOST_WEIGHT and mean["weights"]["a"].eq(-LARGEST).all()
    for rows in (-1, MOST_WEIGHT // 2 + 1):
        with pytest.raises(MessageError, match="a weight must be"):
            encoded({**huge, "rows": torch.tensor(rows)}, "rows", 2)
    with pytest.raises(MessageError, match="floats"):
        encoded({"x": torch.tensor([1, 2])}, None, 3)
    with pytest.raises(MessageError, match="every dimension"):
        fixed_point.size(floats(None, 3), None)
    with pytest.raises(MessageError, match="weight above 0"):
        decoded(np.zeros(8, np.uint64), LIKE, "rows")


def run(engine: str = "local", method: str = "fedavg", **changes: Any) -> Any:
    values = {
        "method": method,
        "rounds": 2,
        "data": {"clients": 5, "public_rows": 40, "test_rows": 60, "own_test_rows": 10},
        "models": {"pool": ["linear"], "norm": "none"},
        "params": {"secure": True},
        "engine": {"name": engine},
        **changes,
    }
    return execute(check({"run": values}).run)


def test_every_engine_gives_the_bits_of_the_loop_also_with_failures() -> None:
    faults = {"faults": {"dropout": 0.15, "nan": 0.1}}
    results = {engine: run(engine, **faults) for engine in ("local", "isolated", "batched")}
    local = results["local"].summary
    assert local["failures"] > 0
    assert local["state_sha256"] == results["isolated"].summary["state_sha256"]
    assert abs(local["accuracy"]["mean"] - results["batched"].summary["accuracy"]["mean"]) < 0.02


def test_the_secure_mean_is_the_plain_one_up_to_its_steps() -> None:
    secure, plain = run(), run(params={"secure": False})
    assert abs(secure.summary["accuracy"]["mean"] - plain.summary["accuracy"]["mean"]) < 0.01


def test_the_ledger_shows_masked_integers_and_nothing_else_going_up() -> None:
    found = run()
    assert found.summary["bytes"]["up"] > 0
    plain = run(params={"secure": False})
    assert 1.9 < found.summary["bytes"]["up"] / plain.summary["bytes"]["up"] < 2.6  # 8 bytes a number, and masks


PAGES = {
    "fedavg": {},
    "fedavg-ft": {},
    "per-fedavg": {},
    "fedcp": {},
    "fedmd": {},
    "fedmd-lf": {"tau": 2},
    "augfl": {},
}


@pytest.mark.parametrize("method", PAGES)
def test_each_page_gives_nearly_the_plain_result_and_the_same_bits_isolated(method: str) -> None:
    def of(engine: str, secure: bool) -> dict[str, Any]:
        return run(engine, method, params={"secure": secure, **PAGES[method]}).summary  # type: ignore[no-any-return]

    secure, plain = of("local", True), of("local", False)
    assert of("isolated", True)["state_sha256"] == secure["state_sha256"] != plain["state_sha256"]
    assert abs(secure["accuracy"]["mean"] - plain["accuracy"]["mean"]) < 0.02


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("fedal", {}),
        ("fedmd", {"trust": "distance"}),
        ("fedmd", {"coding": "int8"}),
        ("fedmd", {"average": "probabilities"}),
        ("augfl", {"clients_per_round": 4}),
    ],
)
def test_what_needs_single_contributions_is_refused(method: str, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="secure sums hide"):
        find(method).configure(params={"secure": True, **params})


def test_rules_that_compare_single_weights_are_refused() -> None:
    for rule in ("krum", "median", "clip"):
        with pytest.raises(ConfigError, match="secure sums hide the single"):
            find("fedavg").configure(params={"secure": True, "robust": rule})
    with pytest.raises(MethodError, match="at least 3 parties"):
        run(params={"secure": True, "clients_per_round": 2})
