"""Runs that predict a number: their unit, their scale, engines, and methods that refuse."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedloom
from fedloom.cli.app import app
from fedloom.core import evaluation
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.own import read_data
from fedloom.deploy.models import load_model
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import PLANNERS
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check
from fedloom.experiment.plan.weights import read_card
from fedloom.methods import registry
from fedloom.report.formatting import metric
from tests.exported import predict

OWNERS, ROWS = 3, 40


def prices(shift: float = 1e9, scale: float = 1000.0) -> dict[str, Any]:
    """A table whose price is nearly linear in two columns, with one owner for each third of the
    rows.
    """
    rng = np.random.default_rng(0)
    size, age = rng.normal(size=(2, OWNERS * ROWS))
    price = shift + scale * (3 * size - 2 * age + 0.1 * rng.normal(size=len(size)))
    return {"size": size, "age": age, "owner": np.repeat(["a", "b", "c"], ROWS), "price": price}


def run(method: str = "fedavg", **settings: Any) -> fedloom.Result:
    import pandas as pd

    given = {
        "data": pd.DataFrame(prices()),
        "label": "price",
        "group": "owner",
        "rounds": 8,
        "public_rows": 0,
    }
    return fedloom.run(
        method, **{**given, "models": {"pool": ["linear"]}, "params": {"lr": 0.2}, **settings}
    )


@pytest.fixture(scope="module")
def averaged() -> fedloom.Result:
    return run()


def test_errors_are_in_the_unit_of_the_label(averaged: fedloom.Result) -> None:
    s = averaged.summary
    assert s["task"] == "number" and s["label"] == "price" and "accuracy" not in s
    assert s["chance"] == pytest.approx(3600, rel=0.3)  # the s.d. of the price
    assert averaged.rmse < 0.3 * s["chance"] and averaged.rmse == s["rmse"]["mean"]
    assert (
        s["client_scores"]["r2"]["mean"] > 0.9 and s["client_scores"]["mae"]["mean"] < averaged.rmse
    )
    assert "RMSE on the global test set" in repr(averaged) and "%" not in repr(averaged)
    with pytest.raises(ConfigError, match=r"result\.rmse"):
        _ = averaged.accuracy


def test_a_constant_predictor_is_chance() -> None:
    found = run(rounds=0, models={"pool": ["mlp"]})
    # an untrained network says about the mean
    assert found.rmse == pytest.approx(found.summary["chance"], rel=0.3)


@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "isolated"}, {"name": "batched"}])
def test_engines_agree(averaged: fedloom.Result, engine: dict[str, Any]) -> None:
    found = run(engine=engine)
    assert found.rmse == pytest.approx(averaged.rmse, rel=1e-4)
    if engine.get("name") == "batched":
        assert not any("in turn" in remark for remark in found.summary["engine"]["remarks"])
    else:
        assert found.summary["state_sha256"] == averaged.summary["state_sha256"]


def test_another_unit_learns_the_same(averaged: fedloom.Result) -> None:
    import pandas as pd

    found = run(data=pd.DataFrame(prices(scale=1.0)))
    assert found.rmse == pytest.approx(averaged.rmse / 1000, rel=1e-3)


def test_an_agreed_scale_takes_the_place_of_that_of_the_rows(averaged: fedloom.Result) -> None:
    found = run(label_scale=(1e9, 30000.0))
    assert found.rmse != averaged.rmse and found.rmse < 0.5 * found.summary["chance"]
    with pytest.raises(ConfigError, match=r"mean and an s\.d\. above 0"):
        run(label_scale=(0.0, 0.0))
    # a row moves the others' labels
    with pytest.raises(ConfigError, match=r"fedavg-dp promises .* data\.label_scale"):
        run("fedavg-dp", params={"lr": 0.05, "dp": {"sigma": 1.0}})
    with pytest.raises(
        ConfigError, match=r"fedmd promises differential privacy \(params\.trust_epsilon\)"
    ):
        run("fedmd", preset="trusted", public_rows=20, params={})


def test_a_variance_is_learned_beside_the_mean(averaged: fedloom.Result) -> None:
    found = run(models={"pool": ["linear"], "variance": True}, rounds=30, params={"lr": 0.05})
    assert found.rmse < 0.5 * found.summary["chance"]
    assert found.models[0](torch.zeros(1, 2)).shape == (1, 2)


def test_clients_of_a_partition_hold_parts_of_the_range() -> None:
    data = read_data(prices(), label="price")
    strata, names = data.strata
    assert len(names) == 10 and np.bincount(strata).tolist() == [12] * 10
    assert data.y[strata == 3].max() < data.y[strata == 4].min()
    assert len({*names}) == 10  # also of prices around 1e9 that differ in the sixth digit


def test_an_exported_model_predicts_in_the_unit_everywhere(tmp_path: Path) -> None:
    import pandas as pd

    rows, models = pd.DataFrame(prices()).head(7), {"pool": ["linear"], "variance": True}
    trained = run(out=tmp_path / "run", models=models, params={"lr": 0.05})
    rows.to_csv(tmp_path / "rows.csv", index=False)
    folder = trained.export(tmp_path / "models") / "a"
    found = load_model(folder).predict(rows)
    assert found.shape == (7, 2) and (found[:, 1] > 0).all()
    assert float(np.abs(found[:, 0] - rows["price"]).mean()) < trained.summary["chance"]
    header, *answer = predict(folder, tmp_path / "rows.csv").splitlines()
    assert header == "price,s.d."
    said = [[float(word) for word in line.split(",")] for line in answer]
    np.testing.assert_allclose(said, found, rtol=1e-8)
    asked = ["predict", str(folder), str(tmp_path / "rows.csv"), "--out", str(tmp_path / "p.csv")]
    assert CliRunner().invoke(app, asked).exit_code == 0
    assert [line.split(",")[1:] for line in (tmp_path / "p.csv").read_text().splitlines()] == [
        line.split(",") for line in [header, *answer]
    ]


ROUNDS = {"fens": 21, "fens-student": 21, "fedhssl": 6, "ss-vfl": 6}
"""The least numbers of rounds, where two are too few."""


@pytest.mark.parametrize("name", registry())
def test_every_method_predicts_a_number_or_says_why_not(name: str, tmp_path: Path) -> None:
    import pandas as pd

    method = registry()[name]
    given: dict[str, Any] = {"rounds": ROUNDS.get(name, 2), "seed": 1}
    table = pd.DataFrame(prices())
    if method.setting == "vertical":
        table.to_csv(tmp_path / "prices.csv", index=False)
        given |= {
            "data": {
                "name": str(tmp_path / "prices.csv"),
                "label": "price",
                "drop": ["owner"],
                "clients": 2,
            }
        }
        given |= {"columns": {"aligned": 40}}
    else:
        rows = (
            10
            if {"server rows", "pretrained server model", "pretrained encoder"} & {*method.needs}
            else 0
        )
        given |= {
            "data": table,
            "label": "price",
            "group": "owner",
            "public_rows": 20,
            "server_rows": rows,
        }
    if {"pretrained server model", "pretrained encoder"} & {*method.needs}:
        given |= {"pretrained": {"model": "mlp", "epochs": 1}}
    if "number" not in method.tasks:
        with pytest.raises(
            ConfigError, match=f"{name} cannot predict a number.*Methods that can: .*"
        ):
            fedloom.run(name, **given)
        return
    if "secure sums" in method.needs:
        given |= {"aggregate": {"secure": True}}
    if method.configure().promises:
        given |= {"params": {"dp": {"sigma": 1.0}}, "label_scale": [0, 1000]}
    found = fedloom.run(name, **given)
    assert found.summary["task"] == "number" and 0 < found.rmse < np.inf


@pytest.mark.each_time("split", "vertical-forest")
@pytest.mark.parametrize("method", ["split", "laser-vfl", "fedhssl", "vertical-forest"])
def test_parties_with_files_of_their_own_predict_a_number(method: str, tmp_path: Path) -> None:
    """The price depends on the columns of both; a row without a price is unaligned."""
    rng = np.random.default_rng(0)
    size, age = rng.normal(size=(2, 160))
    price = [f"{1e6 + 1000 * (2 * a + b):.1f}" for a, b in zip(size, age, strict=True)]
    price[3] = ""
    own = [f"{i},{size[i]},{price[i]}" for i in range(160)]
    other = [f"{i},{age[i]}" for i in reversed(range(160))]
    for name, lines in {"a": ["id,size,price", *own], "b": ["id,age", *other]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    columns = {
        "files": [str(tmp_path / f"{name}.csv") for name in "ab"],
        "id": "id",
        "label": "price",
    }
    network: dict[str, Any] = {} if method == "vertical-forest" else {"models": {"pool": ["mlp"]}}
    found = fedloom.run(method, columns=columns, rounds=15, out=tmp_path / "run", **network)
    s = found.summary
    assert s["task"] == "number" and s["label"] == "price" and found.rmse < 0.8 * s["chance"]
    rows = json.loads((tmp_path / "run" / "partition.json").read_text())["parties"]
    assert sum(rows["aligned_counts"]) == 119 and len(rows["classes"]) == 10
    (tmp_path / "a.csv").write_text(
        "\n".join(["id,size,price", *(f"{i},{size[i]},7.5" for i in range(160))])
    )
    with pytest.raises(DataError, match="at least 2 different numbers, but has 1"):
        fedloom.run(method, columns=columns)


@pytest.mark.parametrize("incomplete", ["drop", "zeros", "mix"])
def test_rows_that_a_party_lacks_predict_a_number_in_every_way(
    incomplete: str, tmp_path: Path
) -> None:
    """Mixed, prices are averaged as classes are (Entity Augmentation)."""
    import pandas as pd

    pd.DataFrame(prices()).drop(columns="owner").to_csv(tmp_path / "prices.csv", index=False)
    found = fedloom.run(
        "split",
        data={"name": str(tmp_path / "prices.csv"), "label": "price", "clients": 2},
        columns={"aligned": 60, "unaligned": 0, "missing": 0.2},
        params={"incomplete": incomplete, "lr": 0.05},
        models={"pool": ["mlp"]},
        rounds=20,
    )
    assert found.rmse < 0.9 * found.summary["chance"]


@pytest.mark.parametrize("method", ["fedmd", "fedal"])
def test_black_boxes_are_regressors(method: str) -> None:
    given = {
        "public_rows": 20,
        "params": {},
        "rounds": 4,
        "models": {"pool": ["forest", "ridge", "knn"]},
    }
    found = run(method, **given, seed=2)
    assert found.rmse < 0.8 * found.summary["chance"]


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("fedlp", {"lr": 0.05}),
        ("augfl", {"meta_lr": 0.02}),
        ("augfl", {"meta_lr": 0.02, "crd": 0.0, "kl": 0.2, "ce": 0.2}),
    ],
)
def test_a_pretrained_model_predicts_a_number(method: str, params: dict[str, Any]) -> None:
    """It is trained on the server's 60 rows, whose scale is that of the run."""
    given: dict[str, Any] = {
        "models": {"pool": ["mlp"]},
        "server_rows": 60,
        "params": params,
        "rounds": 20,
    }
    found = run(method, **given, pretrained={"epochs": 30})
    assert found.rmse < 0.8 * found.summary["chance"]


def test_a_variance_that_fits_few_rows_does_not_diverge_later() -> None:
    models = {"pool": ["mlp"], "variance": True}
    found = run(
        "fedlp",
        models=models,
        server_rows=60,
        params={"lr": 0.05},
        rounds=10,
        pretrained={"epochs": 30},
    )
    assert found.rmse < 0.8 * found.summary["chance"]


def test_a_pretrained_file_says_its_number(tmp_path: Path) -> None:
    table = tmp_path / "prices.csv"
    cells = [[*map(str, row)] for row in zip(*prices().values(), strict=True)]
    table.write_text("\n".join(",".join(row) for row in [[*prices()], *cells]))
    data = [f"data.name={table}", "data.label=price", "data.group=owner", "data.server_rows=40"]
    settings = [word for setting in data for word in ("-s", setting)]
    file = tmp_path / "server.safetensors"
    asked = ["pretrain", "--model", "mlp", "--epochs", "20", "--out", str(file), *settings]
    answer = CliRunner().invoke(app, asked)
    assert answer.exit_code == 0 and re.search(r"RMSE [\d.]+ on 80 rows not used", answer.output)
    card = read_card(file)
    assert (
        card is not None and card.classes == 0 and card.target is not None and card.accuracy is None
    )
    again = CliRunner().invoke(
        app, ["run", "fedlp", "--rounds", "1", "-s", f"pretrained.file={file}", *settings]
    )
    assert again.exit_code == 0
    scaled = [
        "-s",
        "data.task=number",
        "-s",
        "data.label_scale=[1e9, 9.0]",
        "-s",
        f"pretrained.file={file}",
    ]
    wrong = CliRunner().invoke(app, ["run", "fedlp", "--rounds", "1", *scaled, *settings])
    assert "not (2,) and a number of mean 1e+09 and s.d. 9; pretrain" in str(wrong.exception)


def test_a_node_reads_a_number_by_the_agreed_scale(tmp_path: Path) -> None:
    import pandas as pd

    pd.DataFrame(prices()).to_csv(tmp_path / "own.csv", index=False)
    form = {"columns": ["size", "age"], "label": "price", "label_scale": [1e9, 3600.0]}
    config = RunConfig(
        method="fedavg", rounds=1, data={"name": "own", "clients": 3, "row_schema": form}
    )
    method, cfg, rounds = config.resolve()
    plan = PLANNERS["horizontal"].build(
        config, method, cfg, rounds, PrivateData(rows=tmp_path / "own.csv"), at=1
    )
    labels = plan.contexts[1].data.labels
    np.testing.assert_allclose(labels.numpy(), (prices()["price"] - 1e9) / 3600, rtol=1e-5)
    score: Any = evaluation.score(plan.clients[1](), on="own")
    assert score.keys() == {"squared", "absolute", "chance", "rows"} and 0 < score["squared"] < 25
    with pytest.raises(ConfigError, match="at least two classes, or give label_scale"):
        check({"run": {"data": {"row_schema": {**form, "label_scale": None}}}})


def test_the_table_of_methods_is_the_registry_s() -> None:
    text = (Path(__file__).parents[2] / "docs" / "numbers.md").read_text()
    rows = [
        line.rsplit("|", 2) for line in text.splitlines() if line.startswith("| ") and "`" in line
    ]
    said = {
        name: verdict.strip()
        for names, verdict, _ in rows
        for name in re.findall(r"`([\w-]+)`", names)
    }
    for name, method in registry().items():
        assert said[name].startswith(
            "yes" if "number" in method.tasks else f"no: {method.only_classes}"
        ), name


def test_a_comparison_of_numbers_speaks_of_their_unit() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = 100 * x[:, 0] + 10 * rng.normal(size=240)
    found = fedloom.compare(
        ["fedavg", "local"],
        data=(x, y),
        clients=3,
        partition="iid",
        models="linear",
        rounds=2,
        seeds=2,
    )
    (difference,) = found["differences"]
    size = metric(abs(difference["mean"]), share=False)
    assert f"fedavg is on average {size} " in repr(found) and "points" not in repr(found)
    latex = found.to_latex()
    assert "{RMSE on the global test set, mean" in latex and "Accuracy" not in latex
