"""`[columns]`: what is refused and how to mend it, and what holds where nothing is said."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from fedloom.core.errors import ConfigError, DataError
from fedloom.experiment.config import run as config
from fedloom.experiment.config.sections import ColumnsConfig
from fedloom.experiment.plan.build import build, parties_of
from fedloom.experiment.plan.reading import check, read
from fedloom.experiment.plan.settings.vertical import ALIGNED
from fedloom.experiment.run.execute import execute
from fedloom.methods import registry, source_of

FILES = {"files": ["a.csv", "b.csv"], "id": "id", "label": "y"}
SPLIT_SETTINGS: dict[str, Any] = {
    "unaligned": 5, "blocks_per_party": 1, "grid": [2, 2], "balanced": True, "imbalance_ratio": 2.0,
    "majority_classes": 2, "rare_classes": [0], "rare_rows": 3,
}  # fmt: skip
VERTICAL = [name for name, method in registry().items() if method.setting == "vertical"]


def problems(**run: Any) -> list[str]:
    """What is wrong with this run."""
    with pytest.raises(ConfigError) as error:
        check({"run": {"method": "proto-evfl", **run}})
    return str(error.value).splitlines()


# -- defaults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", VERTICAL)
def test_four_parties_share_the_columns_where_nothing_is_reported(method: str) -> None:
    assert read(method).run.data.clients == 4
    assert read(method, ["data.name=wine", "rounds=20"]).run.data.clients == 4
    assert read(method, flags={"data": {"name": "wine"}}).run.data.clients == 4
    assert check({"run": {"method": method}}).run.data.clients == 4


def test_who_says_how_many_gets_them() -> None:
    assert read("split", ["data.clients=3"]).run.data.clients == 3
    # also where that is the others' default
    assert read("split", ["data.clients=10"]).run.data.clients == 10
    assert read("fedavg").run.data.clients == 10


def test_of_a_comparison_the_first_method_counts(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    for first, clients in (
        ('"split", "active-only"', 4),
        ('{ method = "pooled" }, "split"', 4),
        ('"fedavg"', 10),
    ):
        file.write_text(f"rounds = 1\n[compare]\nmethods = [{first}]\n")
        assert {run.data.clients for run in read(str(file)).runs()} == {clients}
    file.write_text(
        'method = "split"\n[compare]\nmethods = [{ preset = "paper" }, "active-only"]\n'
    )
    assert {run.data.clients for run in read(str(file)).runs()} == {4}
    assert {
        run.data.clients for run in check({"compare": {"methods": ["proto-evfl", "split"]}}).runs()
    } == {4}


def test_there_are_as_many_parties_as_files() -> None:
    section = {"files": ["a.csv", "b.csv"], "id": "id", "label": "y"}
    assert check({"run": {"method": "split", "columns": section}}).run.data.clients == 2


def write_manifest(path: Path, parties: int) -> str:
    rows = [f"car_{n},{party},{party},{n}.png," for n in range(3) for party in range(parties)]
    path.write_text("\n".join(["sample_id,party,view,path,label", *rows]) + "\n")
    return str(path)


def test_there_are_as_many_parties_as_in_the_manifest(tmp_path: Path) -> None:
    section = {"manifest": write_manifest(tmp_path / "m.csv", 3)}
    assert check({"run": {"method": "split", "columns": section}}).run.data.clients == 3
    assert (
        check(
            {"run": {"method": "split", "columns": section, "data": {"clients": 3}}}
        ).run.data.clients
        == 3
    )
    assert problems(columns=section, data={"clients": 4}) == [
        "data.clients: columns.manifest has 3 parties, not 4: leave clients out"
    ]
    torn = tmp_path / "torn.csv"
    torn.write_text("sample_id,view\n")
    (found,) = problems(columns={"manifest": str(torn)})
    assert found.startswith("columns.manifest: ") and "torn.csv" in found


def test_a_manifest_that_is_still_to_come_is_missed_before_any_work(tmp_path: Path) -> None:
    run = check(
        {"run": {"method": "split", "columns": {"manifest": str(tmp_path / "none.csv")}}}
    ).run
    with pytest.raises(DataError, match=r"there is no file .*none\.csv"):
        build(run)


def test_other_parties_than_files_are_refused() -> None:
    assert problems(columns=FILES, data={"clients": 3}) == [
        "data.clients: columns.files has 2 parties, not 3: leave clients out"
    ]


@pytest.mark.parametrize("source", ["files", "manifest"])
def test_paths_are_stored_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    write_manifest(tmp_path / "m.csv", 2)
    of_files = {"files": ["a.csv", "~/b.csv"], "id": ["id", "person"], "label": "y"}
    section = of_files if source == "files" else {"manifest": "m.csv"}
    run = check({"run": {"method": "split", "columns": section}}).run
    if source == "files":
        assert run.columns.files == (str(tmp_path / "a.csv"), "/home/somebody/b.csv")
    else:
        assert run.columns.manifest == str(tmp_path / "m.csv")
    (tmp_path / "x.toml").write_text(config.toml(run))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read(str(tmp_path / "x.toml")).run == run


def test_files_are_matched_by_a_column_of_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lab = tmp_path / "lab.csv"
    (tmp_path / "clinic.csv").write_text(
        "\n".join(["patient,age,y", *(f"{n},{n},{n % 2}" for n in range(20))])
    )
    lab.write_text("\n".join(["subject,dose", *(f"{n},{n}" for n in range(20))]))
    files = [str(tmp_path / "clinic.csv"), str(lab)]
    section = {"files": files, "id": ["patient", "subject"], "label": "y"}
    run = check({"run": {"method": "split", "columns": section}}).run
    with caplog.at_level(logging.INFO, logger="fedloom"):
        parties = parties_of(run)
    assert [view.name for view in parties.views] == ["clinic", "lab"] and len(parties.labels) > 0
    assert any("lab" in record.getMessage() for record in caplog.records)
    lab.write_text(lab.read_text() + "\n7,1\n")
    with pytest.raises(DataError, match=r"lab: 2 of 21 rows share an id .*'7'"):
        parties_of(run)


def test_the_usual_section_is_that_of_the_paper() -> None:
    section = ColumnsConfig()
    assert (
        not section.own_data
        and section.aligned is None
        and section.imbalance_ratio == 1.0
        and section.backend == "plain"
    )
    parties = parties_of(check({"run": {"method": "split", "data": {"test_rows": 20}}}).run)
    assert len(parties.labels) == ALIGNED == 200 and len(parties.views) == 4
    assert {v.x.shape[1:] for v in parties.views} == {(2, 4, 4)}  # two quadrants of 8x8 digits


def test_a_config_goes_through_its_file_and_back(tmp_path: Path) -> None:
    section = {
        "aligned": 60,
        "unaligned": 30,
        "imbalance_ratio": [1.0, 2.0, 3.0],
        "grid": [2, 2],
        "rare_classes": [3],
        "rare_rows": 2,
    }
    run = check({"run": {"method": "split", "data": {"clients": 3}, "columns": section}}).run
    (tmp_path / "x.toml").write_text(config.toml(run))
    assert read(str(tmp_path / "x.toml")).run == run


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"alined": 5}, "columns.alined: there is no such setting. Did you mean 'aligned'?"),
        ({"aligned": 0}, "columns.aligned: must be greater than or equal to 1"),
        ({"unaligned": -1}, "columns.unaligned: must be greater than or equal to 0"),
        ({"align": "psi"}, "columns.align: must be 'plain' or 'openmined'"),
        ({"files": ["a.csv"], "manifest": "m.csv"}, "columns: set files or manifest, not both"),
        (
            {"files": ["a.csv", "b.csv"]},
            "columns: files need id (the column that identifies a row) and label",
        ),
        ({"files": ["a.csv", "b.csv"], "id": "id"}, "columns: files need id"),
        ({"label": "y"}, "columns: id and label are columns of files: set files too"),
        (
            {**FILES, "id": ["id"]},
            "columns: id must be one name, or one for each of 2 files, not 1",
        ),
        *(
            ({**source, name: value}, f"columns: {name} cannot be set with ")
            for source in (FILES, {"manifest": "m.csv"})
            for name, value in SPLIT_SETTINGS.items()
        ),
        (
            {**FILES, "blocks_per_party": 1, "rare_classes": [0]},
            "columns: blocks_per_party, rare_classes cannot be set",
        ),
        (3, "columns: "),
    ],
)
def test_a_mistake_is_named_with_its_mend(section: Any, text: str) -> None:
    found = problems(columns=section)
    assert any(line.startswith(text) for line in found), found


def test_all_problems_come_at_once() -> None:
    found = problems(
        columns={"aligned": 0, "grid": [2]}, rounds=-1, params={"lr": 0, "embeding_dim": 3}
    )
    for part in (
        "columns.aligned",
        "columns.grid",
        "rounds",
        "params.lr",
        "Did you mean 'embedding_dim'?",
    ):
        assert any(part in line for line in found), part


def test_a_method_that_shares_rows_has_no_columns_to_cut() -> None:
    found = problems(method="fedavg", columns={"aligned": 50})
    assert found == ["columns: fedavg shares rows, not columns: leave the section out"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"columns": {"aligned": 10_000}}, "aligned"),
        ({"columns": {"blocks_per_party": 9}}, "blocks_per_party must be from 1 to 4"),
        (
            {"columns": {"imbalance_ratio": [2.0, 1.0]}},
            "imbalance_ratio must be one number of at least 1, or one for each of 4",
        ),
        (
            {"columns": {"rare_classes": [10]}},
            "rare_classes must be a proper subset of the classes",
        ),
        ({"columns": {"grid": [2, 2]}, "data": {"name": "wine"}}, "grid applies to images"),
        ({"data": {"clients": 1}}, "parties must be at least 2"),
        ({"data": {"name": "wine", "clients": 30}}, "need at least 30 columns"),
    ],
)
def test_numbers_that_the_data_cannot_meet_are_refused_before_any_work(
    values: dict[str, Any], text: str
) -> None:
    with pytest.raises(DataError, match=text):
        build(check({"run": {"method": "split", **values}}).run)


def test_what_is_pooled_must_be_known_in_full(tmp_path: Path) -> None:
    section = {
        "files": [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")],
        "id": "id",
        "label": "y",
    }
    with pytest.raises(ConfigError, match="files do not have all columns"):
        build(check({"run": {"method": "pooled", "columns": section}}).run)


# -- what a run makes of it ------------------------------------------------------------------------


def test_parties_and_places_are_those_of_the_section() -> None:
    section = {"aligned": 40, "unaligned": 30, "blocks_per_party": 1}
    plan = build(
        check({"run": {"method": "proto-evfl", "data": {"test_rows": 20}, "columns": section}}).run
    )
    assert plan.colocated == (0,) and len(plan.clients) == 4 and plan.graph is None
    for make in plan.clients:
        context = make().context
        assert (len(context.rows), context.aligned, context.parties, context.classes) == (
            70,
            40,
            4,
            10,
        )
        assert (len(context.tests["test"]), len(context.tests["own"])) == (20, 30)
        assert context.rows.every.shape[1:] == (1, 4, 4)


@pytest.mark.parametrize("method", ["proto-evfl", "split"])
@pytest.mark.parametrize("name", ["wine", "breast_cancer"])
def test_tables_run_as_pictures_do(method: str, name: str) -> None:
    values = {
        "method": method,
        "rounds": 1,
        "data": {"name": name, "clients": 3},
        "columns": {"aligned": 30},
    }
    metrics = {row[4]: row[-1] for row in execute(check({"run": values}).run).metrics}
    assert {"accuracy mean", "balanced accuracy", "auc", "loss mean"} <= set(metrics)
    assert 0 <= metrics["accuracy mean"] <= 1 and metrics["loss mean"] > 0
    assert ("accuracy alone mean" in metrics) == (method == "proto-evfl")


def test_zero_shot_is_seen_in_the_recall_of_the_class() -> None:
    """Nothing gives the classifier an example of a class that no aligned row has."""
    values = {
        "method": "proto-evfl",
        "rounds": 2,
        "params": {"epochs": 10, "active_lr": 0.01, "steps": 2},
        "columns": {"aligned": 60, "unaligned": 20, "rare_classes": [3]},
        "models": {"pool": ["mlp"]},
        "evaluate": {"points": 1},
    }
    metrics = {row[4]: row[-1] for row in execute(check({"run": values}).run).metrics}
    assert metrics["recall 3"] == 0.0 and metrics["accuracy mean"] > 0.3


def test_a_page_of_the_user_has_few_parties_too(tmp_path: Path) -> None:
    page = tmp_path / "mine.py"
    page.write_text(source_of("proto-evfl").read_text())
    assert read(str(page)).run.data.clients == 4


def test_columns_of_a_file_are_cut_though_its_rows_would_be_dealt_at_random(tmp_path: Path) -> None:
    file = tmp_path / "my.csv"
    file.write_text("a,b,ill\n" + "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(90)))
    for more in ({}, {"group": "a"}):
        assert check(
            {"run": {"method": "split", "data": {"name": str(file), "label": "ill", **more}}}
        ).run.data.partition
    refused = problems(method="split", data={"partition": "iid"})
    assert refused == ["data.partition: split shares columns, not rows: leave it out"]
