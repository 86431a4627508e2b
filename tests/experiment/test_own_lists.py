"""Clients' rows as a list of files or tables of any kind, or as a mapping of names to frames."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.core.errors import DataError
from fedloom.core.objects import find
from fedloom.experiment.config.objects import data_settings

ROWS: dict[str, Any] = {
    "x": [row * row % 17 / 4 for row in range(40)],
    "y": ["a", "a", "b", "b"] * 10,
}


def found(data: Any, **options: Any) -> Any:
    return find(data_settings(data, label="y", **options)["name"], DataError)


def test_files_and_tables_of_any_kind_are_one_list(tmp_path: Path) -> None:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame(ROWS)
    frame.to_csv(tmp_path / "a.csv", index=False, sep=";", decimal=",")
    frame.to_parquet(tmp_path / "b.parquet")
    parts = [tmp_path / "a.csv", str(tmp_path / "b.parquet"), frame]
    for names in (["a", "b"], ["b", "a"]):  # each numbers the classes otherwise
        features = datasets.Features(
            {"x": datasets.Value("float64"), "y": datasets.ClassLabel(names=names)}
        )
        codes = [names.index(word) for word in ROWS["y"]]
        parts.append(datasets.Dataset.from_dict({**ROWS, "y": codes}, features=features))
    data = found(parts, columns={"decimal": ","})
    assert data.classes == ("a", "b") and data.owners == tuple(f"client-{k}" for k in range(5))
    assert all((part == data.y[:40]).all() for part in np.split(data.y, 5))
    assert all((part == data.x[:40]).all() for part in np.split(data.x, 5))
    with pytest.raises(DataError, match=r"there is no file nope\.csv"):
        found([tmp_path / "a.csv", "nope.csv"])


def test_a_mapping_names_the_clients() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(ROWS)
    result = fedloom.run(
        "local", data={"north": frame, "south": frame}, label="y", rounds=1, models="linear"
    )
    assert result.summary["clients"] == 2
    assert found({"north": frame, "south": frame}).owners == ("north", "south")
    polars = pytest.importorskip("polars")
    assert found([polars.DataFrame(ROWS).lazy(), frame]).x.shape == (80, 1)


def test_masked_cells_of_arrays_are_missing_and_images_need_one_scale(
    caplog: pytest.LogCaptureFixture,
) -> None:
    x, y = np.arange(80.0).reshape(40, 2) % 7, [0, 1] * 20
    with pytest.raises(DataError, match="not finite"):
        data_settings([(np.ma.masked_where(x > 5, x), y)] * 2)
    images = np.random.default_rng(0).random((40, 1, 4, 4), np.float32)
    with caplog.at_level(logging.WARNING, "fedloom"):
        data_settings([(images, y), (images * 2, y)])
        assert not caplog.records
        data_settings([(images, y), (images * 255, y)])
    assert "give all on one scale" in caplog.text
