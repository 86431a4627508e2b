"""Owners with different columns: what one lacks is missing there, in every form of the data and
after training.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom.core.errors import DataError
from fedloom.data.own import read_data
from fedloom.deploy import load_model
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.stats import stats
from tests.exported import predict

pandas = pytest.importorskip("pandas")
KNOWN: dict[str, Any] = {"label": "ill", "missing_columns": "allow"}


def frames() -> list[Any]:
    """Two owners: the first lacks `ward` and `seen`, the second `age`."""
    rng = np.random.default_rng(0)
    parts = []
    for site in ("east", "west"):
        ill = rng.integers(2, size=60)
        columns = {
            "site": [site] * 60,
            "age": rng.normal(50 + 9 * ill, 8).round(1),
            "dose": rng.normal(ill, 1).round(2),
            "ward": rng.choice(["north", "south"], 60),
            "note": [f"{'fever' if sick else 'well'} {k}" for k, sick in enumerate(ill)],
            "seen": pandas.date_range("2024-01-01", periods=60, freq="13h"),
            "ill": np.where(ill, "yes", "no"),
        }
        parts.append(
            pandas.DataFrame(columns).drop(columns=["ward", "seen"] if site == "east" else ["age"])
        )
    return parts


def test_files_frames_and_one_file_with_empty_cells_are_one_data_set(tmp_path: Path) -> None:
    east, west = frames()
    both = pandas.concat([east, west], ignore_index=True)
    for ending in ("csv", "parquet"):
        (tmp_path / ending).mkdir()
        for name, part in (("a", east), ("b", west)):
            write = part.to_parquet if ending == "parquet" else part.to_csv
            write(tmp_path / ending / f"{name}.{ending}", index=False)
    both.to_csv(tmp_path / "both.csv", index=False)
    forms = [both, tmp_path / "both.csv", tmp_path / "csv", tmp_path / "parquet"]
    first, *others = (read_data(form, group="site", name="t", **KNOWN) for form in forms)
    by_name = [dict(zip(data.columns, data.x.T, strict=True)) for data in (first, *others)]
    for columns in by_name:
        assert columns.keys() == by_name[0].keys()
        assert all(
            np.array_equal(columns[name], x, equal_nan=True) for name, x in by_name[0].items()
        )
    assert {*first.recipe["optional"]} == {"age", "ward", "seen"}
    assert "Owner 'west' lacks 'age': values are missing there." in first.notes
    assert {"age missing", "ward=?", "seen missing"} <= {*first.columns}


def test_different_columns_are_refused_with_the_setting(tmp_path: Path) -> None:
    for name, part in zip("ab", frames(), strict=True):
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(DataError, match=r'Set data\.missing_columns = "allow"'):
        read_data(tmp_path, label="ill", group="site")
    with pytest.raises(DataError, match=r'Set data\.missing_columns = "allow"'):
        fedloom.run(
            "local", data=[part.drop(columns="site") for part in frames()], label="ill", rounds=1
        )
    parts = [part.drop(columns="site") for part in frames()]
    result = fedloom.run("fedavg", data=parts, rounds=1, models="linear", **KNOWN)
    assert result.summary["clients"] == 2
    assert DataConfig(missing_columns="allow").missing == "indicator"
    with pytest.raises(ValueError, match="makes missing values"):
        DataConfig(missing_columns="allow", missing="refuse")


def test_columns_that_all_owners_lack_are_dropped() -> None:
    data = read_data(
        {
            "x": [row % 9 for row in range(40)],
            "z": [None] * 40,
            "t": [""] * 40,
            "s": ["a", "b"] * 20,
            "ill": ["y", "n", "n", "y"] * 10,
        },
        group="s",
        **KNOWN,
    )
    assert data.columns == ("x",) and "optional" not in data.recipe


def test_an_indicator_says_at_an_owner_that_lacks_a_column_that_it_does() -> None:
    data = read_data(pandas.concat(frames()), group="site", **KNOWN)
    scaled = dict(zip(data.columns, data.standardized_by_owner(np.arange(120)).x.T, strict=True))
    west = data.groups == data.owners.index("west")
    assert (scaled["age missing"] == west).all() and (scaled["ward=?"] == ~west).all()
    assert not scaled["age"][west].any() and scaled["age"][~west].std() == pytest.approx(
        1, abs=1e-4
    )


def test_statistics_count_who_has_a_column() -> None:
    found = stats(pandas.concat(frames()), label="ill", group="site")
    numbers, _ = found.tables
    assert {row[0]: row[1:3] for row in numbers.rows} == {"age": (60, 60), "dose": (120, 0)}
    assert "Columns of texts and dates are left out: note, seen." in found.notes


@pytest.mark.parametrize("method", ["fedavg", "fedboost"])
def test_a_file_without_a_column_that_an_owner_lacked_predicts(method: str, tmp_path: Path) -> None:
    data = pandas.concat(frames())
    more: dict[str, Any] = {**KNOWN, **({"models": "linear"} if method == "fedavg" else {})}
    result = fedloom.run(
        method, data=data, group="site", rounds=3, out=str(tmp_path / "run"), **more
    )
    result.export(tmp_path / "models")
    folder = tmp_path / "models" / ("west" if method == "fedavg" else "server")
    folder = folder if folder.is_dir() else tmp_path / "models" / "west"
    rows = data.drop(columns=["site", "ill"])
    model = load_model(folder, trust=["network.py"])
    for lacking in (["age"], ["ward", "seen"]):
        part = rows.drop(columns=lacking)
        part.to_csv(tmp_path / "rows.csv", index=False)
        expected = model.predict(rows.assign(**dict.fromkeys(lacking)))
        np.testing.assert_array_equal(model.predict(part), expected)
        np.testing.assert_allclose(model.predict(tmp_path / "rows.csv"), expected, atol=1e-6)
        np.testing.assert_allclose(plain(folder, tmp_path / "rows.csv"), expected, atol=2e-6)
    rows.drop(columns="dose").to_csv(tmp_path / "rows.csv", index=False)
    with pytest.raises(DataError, match="'dose'"):
        model.predict(rows.drop(columns="dose"))
    with pytest.raises(DataError, match="'dose'"):
        model.predict(tmp_path / "rows.csv")
    with pytest.raises(
        SystemExit, match="must have the columns of this model, but 'dose' is missing"
    ):
        plain(folder, tmp_path / "rows.csv")


def plain(folder: Path, rows: Path) -> np.ndarray:
    return np.array(
        [
            [float(p) for p in line[1:]]
            for line in list(csv.reader(predict(folder, rows).splitlines()))[1:]
        ]
    )
