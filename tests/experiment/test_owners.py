"""Runs on a file whose rows have owners: clients, unseen owners, standardizing, sentences and
refusals.
"""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.core.errors import ConfigError, DataError, warn_once
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.objects import data_settings
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build, data_of
from fedloom.experiment.plan.reading import read
from fedloom.experiment.plan.settings import rows as settings_rows
from fedloom.experiment.run.execute import execute

SIZES = {"north": 40, "south": 24, "east": 16}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """80 rows of three hospitals, one of which measures in other units; one number is missing."""
    rng = np.random.default_rng(0)
    lines = ["hospital,age,dose,disease"]
    for name, size in SIZES.items():
        for row in range(size):
            dose = (
                ""
                if (name, row) == ("south", 0)
                else f"{rng.normal() * (1000 if name == 'east' else 1):.3f}"
            )
            lines.append(f"{name},{rng.integers(20, 90)},{dose},{'yes' if row % 3 == 0 else 'no'}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def configured(path: Path, *more: str, method: str = "fedavg") -> RunConfig:
    settings = [
        f"data.name={path}",
        "data.label=disease",
        "data.group=hospital",
        "data.missing=median",
        *more,
    ]
    return read(method, settings, {"rounds": 1}).run


def test_each_owner_is_a_client(table: Path) -> None:
    run = configured(table)
    assert (run.data.partition, run.data.clients, run.data.public_rows) == ("natural", 3, 0)
    dataset, split = data_of(run)
    assert dataset.groups is not None and dataset.owners == ("east", "north", "south")
    assert settings_rows.owner_names(dataset, split) == dataset.owners
    for client, (shard, own) in enumerate(zip(split.shards, split.own_test, strict=True)):
        assert set(dataset.groups[shard]) == set(dataset.groups[own]) == {client}
        assert (
            len(shard) + len(own) == SIZES[dataset.owners[client]] and len(own) == len(shard) // 3
        )


def test_columns_are_standardized_by_each_owner_s_training_rows(table: Path) -> None:
    dataset, split = data_of(configured(table))
    assert (
        settings_rows.basis(dataset, split) == "each owner's own training rows"
        and dataset.fill == ""
    )
    for shard in split.shards:
        np.testing.assert_allclose(dataset.x[shard].mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(dataset.x[shard].std(0), 1, atol=1e-5)
    run = configured(table, method="fedal")  # which needs public rows
    assert run.data.public_rows is None
    dataset, split = data_of(run)
    assert settings_rows.basis(dataset, split) == "the public rows"
    x = (dataset.x[split.public] - dataset.shift) / dataset.scale
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)


def test_the_other_owners_do_not_change_an_owner_s_inputs(table: Path) -> None:
    """An owner's inputs are a function of its own rows: nothing is fitted on pooled ones."""
    dataset, split = data_of(configured(table))
    lines = table.read_text().splitlines()
    table.write_text("\n".join(line.replace("north,2", "north,9") for line in lines) + "\n")
    other, again = data_of(configured(table))
    for client, name in enumerate(dataset.owners):
        same = np.array_equal(dataset.x[split.shards[client]], other.x[again.shards[client]])
        assert same == (name != "north")


def test_named_owners_are_unseen(table: Path) -> None:
    run = configured(table, 'data.unseen=["north"]')
    plan = build(run)
    assert plan.unseen == (2,) and run.data.training == 2
    dataset, split = data_of(run)
    assert settings_rows.owner_names(dataset, split) == ("east", "south", "north")
    with pytest.raises(DataError, match="no owner 'nroth'"):
        data_of(configured(table, 'data.unseen=["nroth"]'))
    with pytest.raises(ConfigError, match="unseen names owners: name their column as group"):
        read("fedavg", [f"data.name={table}", 'data.unseen=["north"]'], {})


def test_the_folder_says_who_is_who_and_what_was_fitted_on_what(
    table: Path, tmp_path: Path
) -> None:
    execute(configured(table), tmp_path / "out")
    partition = json.loads((tmp_path / "out" / "partition.json").read_text())
    assert partition["owners"] == ["east", "north", "south"]
    assert partition["standardized_by"] == "each owner's own training rows"
    text = (tmp_path / "out" / "config.toml").read_text()
    assert 'group = "hospital"' in text and 'missing = "median"' in text


def test_a_share_a_column_or_owners_are_tested(table: Path) -> None:
    assert configured(table, "data.test=0.5").data.test_fraction == 0.5
    run = configured(table, 'data.test=["south"]')
    assert run.data.clients == 2
    dataset, split = data_of(run)
    assert dataset.groups is not None and {
        dataset.owners[k] for k in dataset.groups[split.test]
    } == {"south"}
    assert settings_rows.owner_names(dataset, split) == ("east", "north")
    with pytest.raises(ConfigError, match="set test or test_fraction, not both"):
        configured(table, "data.test=0.5", "data.test_fraction=0.2")


def test_small_owners_are_refused_or_left_out(table: Path) -> None:
    with table.open("a") as file:
        file.write("west,50,1.0,yes\nwest,51,1.0,no\n")
    with pytest.raises(
        DataError,
        match=r"at least 4 rows.*west \(2\)\. Leave them out with data\.options\.min_rows = 4",
    ):
        data_of(configured(table))
    run = configured(table, "data.options.min_rows=4", "data.partition=natural")
    assert run.data.clients == 3 and len(data_of(run)[1].shards) == 3


def test_a_file_without_owners_is_dealt_at_random_and_a_default_that_separates_classes_is_reported(
    table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    settings = [
        f"data.name={table}",
        "data.label=disease",
        "data.missing=median",
        "data.drop=['hospital']",
    ]
    assert read("fedavg", settings, {}).run.data.partition == "iid"
    with caplog.at_level(logging.WARNING):
        data_of(read("fedavg", [*settings, "data.partition=dirichlet", "data.clients=20"], {}).run)
    assert any(
        "clients have rows of one class, by the default partition" in text
        for text in caplog.messages
    )
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        data_of(read("fedavg", ["data.name=digits"], {}).run)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("values", "partition"),
    [
        ({}, "dirichlet"),
        ({"name": "wine"}, "dirichlet"),
        ({"name": "wine", "group": "g"}, "natural"),
        ({"name": "wine", "group": "g", "partition": "iid"}, "iid"),
    ],
)
def test_the_partition_is_a_setting_like_others(values: dict[str, Any], partition: str) -> None:
    assert DataConfig(**values).partition == partition


def test_settings_of_files_do_not_fit_known_data_sets() -> None:
    with pytest.raises(DataError, match="registered data set"):
        data_of(RunConfig(data=DataConfig(name="wine", label="y")))


def test_a_frame_with_owners_gives_no_rows_away(table: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table).dropna()
    run = read("fedavg", (), {"data": data_settings(frame, label="disease", group="hospital")}).run
    assert (run.data.clients, run.data.public_rows) == (3, 0)
    dataset, split = data_of(run)
    assert settings_rows.basis(dataset, split) == "each owner's own training rows"
    assert (
        read(
            "fedal", (), {"data": run.data.model_dump(include={"name", "partition", "clients"})}
        ).run.data.public_rows
        is None
    )
