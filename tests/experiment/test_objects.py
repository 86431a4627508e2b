"""Runs of what a notebook holds: arrays, Datasets, modules, factories, methods; and the models that
come back.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset

import fedloom
from fedloom.core.errors import ConfigError, DataError, FedloomError, ModelError
from fedloom.deploy.models import load_model
from fedloom.experiment.config import objects
from fedloom.methods import find

RNG = np.random.default_rng(0)
X = RNG.standard_normal((240, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0.5)
SMALL: dict[str, Any] = {"rounds": 2, "clients": 3, "public_rows": 20, "partition": "iid"}


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def factory(input_shape: tuple[int], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*input_shape, 5), nn.Tanh(), nn.Linear(5, classes))


def accuracy(model: nn.Module, x: np.ndarray = X, y: np.ndarray = Y) -> float:
    with torch.no_grad():
        return float((model(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


@pytest.mark.parametrize("method", ["fedal", "fedavg", "local", "feddf", "fedavg-ft"])
def test_the_models_that_come_back_are_those_that_were_evaluated(method: str) -> None:
    result = fedloom.run(
        method, data=(X[:180], Y[:180]), test=(X[180:], Y[180:]), models=[factory], **SMALL
    )
    assert len(result.models) == 3 and all(isinstance(model, nn.Module) for model in result.models)
    metrics = result.summary["accuracy"]["per_client"]
    plain = [result._trained.client(i, "") for i in range(3)]
    assert [accuracy(model, X[180:], Y[180:]) for model in plain] == pytest.approx(
        metrics, abs=1e-6
    )
    assert all(type(model) is nn.Sequential for model in result.models)
    if method == "fedavg-ft":
        assert any(
            not torch.equal(a, b)
            for a, b in zip(result.models[0].parameters(), plain[0].parameters(), strict=True)
        )


def test_the_server_s_model_comes_back_where_clients_share_one() -> None:
    average = fedloom.run("fedavg", data=(X, Y), models=factory, **SMALL)
    assert average.model is not None
    for model in average.models:
        assert all(
            torch.equal(a, b)
            for a, b in zip(model.parameters(), average.model.parameters(), strict=True)
        )
    assert fedloom.run("local", data=(X, Y), models=factory, **SMALL).model is None


def test_clients_start_with_a_module_s_weights_which_stay_as_they_are() -> None:
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    untrained = fedloom.run("local", data=(X, Y), models=net, **{**SMALL, "rounds": 0})
    trained = fedloom.run("local", data=(X, Y), models=net, **{**SMALL, "rounds": 40})
    for name, value in before.items():
        assert torch.equal(net.state_dict()[name], value)
        assert all(torch.equal(model.state_dict()[name], value) for model in untrained.models)
    assert all(type(model) is Net and accuracy(model) > accuracy(net) for model in trained.models)
    parameters = [p for model in trained.models for p in model.parameters()]
    # as safetensors requires
    assert len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


def test_one_model_for_each_client() -> None:
    result = fedloom.run("fedmd", data=(X, Y), models=[Net(4), factory, "mlp"], **SMALL)
    assert [type(model).__name__ for model in result.models] == ["Net", "Sequential", "Classifier"]
    with pytest.raises(ConfigError, match=r"models\.each: there are 2 networks for 3 clients"):
        fedloom.run("fedmd", data=(X, Y), models=[Net(), factory], **SMALL)


@pytest.mark.parametrize("engine", [{"workers": 2}, {"name": "isolated"}, {"name": "batched"}])
def test_every_engine_trains_the_same_models(engine: dict[str, Any]) -> None:
    net = Net()
    loop, other = (
        fedloom.run("fedavg", data=(X, Y), models=net, seed=3, engine=e, **SMALL)
        for e in ({}, engine)
    )
    for a, b in zip(loop.models, other.models, strict=True):
        torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()))


class Mappings(TorchDataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"pixel_values": torch.from_numpy(X[i]), "labels": int(Y[i])}


def test_forms_of_data() -> None:
    arrays = objects.data_settings((X, Y))["name"]
    tensors = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert objects.data_settings(tensors)["name"] == arrays
    assert objects.data_settings((X.tolist(), Y.tolist()))["name"] == arrays
    assert (
        objects.data_settings((X, Y + 0))["name"]
        == arrays
        != objects.data_settings((X, 2 - Y))["name"]
    )
    few = objects.data_settings((X[:60], Y[:60]))["name"]
    assert (
        objects.data_settings(Subset(tensors, range(60)))["name"]
        == few
        == objects.data_settings(Mappings())["name"]
    )
    words = fedloom.load(objects.data_settings((X, np.array(["low", "mid", "top"])[Y]))["name"])
    assert words.classes == ("low", "mid", "top") and np.array_equal(words.y, Y)


def test_images_of_bytes_reach_networks_as_0_to_1_and_floats_as_they_are() -> None:
    pixels = RNG.integers(256, size=(40, 8, 8, 3), dtype=np.uint8)
    data = fedloom.load(objects.data_settings((pixels, np.arange(40) % 2))["name"])
    assert (
        data.x.shape == (40, 3, 8, 8)
        and data.scale.tolist() == [255.0] * 3
        and not data.shift.any()
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    floats = (pixels / 255).astype(np.float32).transpose(0, 3, 1, 2)
    both = [
        fedloom.run(
            "local", data=(x, np.arange(40) % 2), models=net, rounds=1, clients=2, partition="iid"
        ).models[0]
        for x in (pixels, floats)
    ]
    torch.testing.assert_close(both[0].state_dict(), both[1].state_dict())


def test_a_list_has_one_entry_for_each_client_and_a_group_one_client_for_each_owner() -> None:
    parts = [
        (X[:50], Y[:50]),
        (X[50:80], Y[50:80]),
        TensorDataset(torch.from_numpy(X[80:]), torch.from_numpy(Y[80:])),
    ]
    by_list = objects.data_settings(parts)
    owners = np.array(["a", "b", "c"])[np.repeat([0, 1, 2], [50, 30, 160])]
    by_group = objects.data_settings((X, Y), group=owners)
    assert by_list == by_group and by_list["clients"] == 3
    result = fedloom.run(
        "fedavg", data=parts, test=(X[:40], Y[:40]), models=Net(), rounds=1, public_rows=0
    )
    assert result.clients["rows"].tolist() == [50, 30, 160]
    assert result.clients["network"].str.startswith("object:Net-").all()
    result = fedloom.run(
        "fedavg", data=(X, Y), group=owners, test=0.5, models=Net(), rounds=1, public_rows=0
    )
    assert 115 <= result.clients["rows"].sum() <= 125


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class Transformer(nn.Module):
    """As a classifier of transformers: token ids in, an object with logits out."""

    class Config:
        pad_token_id = 0

    config = Config()

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Answer:
        assert attention_mask is not None and input_ids.dtype == torch.int64
        weight = attention_mask.float()[..., None]
        return Answer(
            self.head((self.embedding(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1))
        )


class Vision(Net):
    def forward(self, pixel_values: Tensor) -> Answer:  # type: ignore[override]
        return Answer(self.layers(pixel_values))


def test_models_whose_output_has_logits_work_as_they_are() -> None:
    ids = RNG.integers(1, 20, size=(200, 5))
    ids[:, 4] = 0
    y = (ids.sum(1) > 38).astype(int)
    result = fedloom.run(
        "fedavg",
        data=(ids, y),
        models=Transformer(),
        clients=2,
        rounds=40,
        params={"lr": 1.0},
        partition="iid",
    )
    assert result.accuracy > 0.8 and type(result.model) is Transformer
    assert type(fedloom.run("fedal", data=(X, Y), models=[Vision()], **SMALL).models[0]) is Vision


def test_a_method_object_and_its_place_in_a_comparison(tmp_path: Path) -> None:
    from dataclasses import replace

    mine = replace(find("fedavg"), name="mine", fixed={"epochs": 2})
    result = fedloom.run(mine, data=(X, Y), models=Net(), out=tmp_path / "run", **SMALL)
    assert (result.summary["method"], result.summary["params"]["epochs"]) == ("mine", 2)
    assert objects.method_name(find("fedavg")) == "fedavg"
    found = fedloom.compare(
        [mine, "local", {"method": mine, "name": "faster", "params": {"lr": 0.5}}],
        data=(X, Y),
        **SMALL,
    )
    assert [m["name"] for m in found["methods"]] == ["mine", "local", "faster"]


def test_a_pretrained_module_is_the_server_s() -> None:
    teacher = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    start = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    result = fedloom.run(
        "fedlp", data=(X, Y), models=start, pretrained=teacher, **{**SMALL, "rounds": 0}
    )
    assert (
        result.summary["pretrained"]["model"].startswith("object:Sequential-")
        and result.model is not None
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(result.model.parameters(), teacher.parameters(), strict=True)
    )
    with pytest.raises(
        ModelError, match="must be a trained module, a name or settings, not a function"
    ):
        fedloom.run("fedavg", data=(X, Y), pretrained=factory)  # type: ignore[arg-type]


def test_the_folder_says_what_the_objects_were_and_the_script_resumes(tmp_path: Path) -> None:
    net, folder = Net(), tmp_path / "run"

    def start(resume: bool = False, data: Any = (X, Y)) -> fedloom.Result:
        models: list[Any] = [net, net, factory][:1]
        return fedloom.run("fedavg", data=data, models=models, out=folder, resume=resume, **SMALL)

    first = start()
    about = json.loads((folder / "objects.json").read_text())
    (data,), (model,) = (
        [v for k, v in about.items() if k.startswith(f"object:{w}-")] for w in ("data", "Net")
    )
    assert (data["rows"], data["shape"], data["classes"]) == (240, [6], ["0", "1", "2"])
    assert (
        model["parameters"] == sum(p.numel() for p in net.parameters())
        and len(model["sha256"]) == 64
    )
    (folder / "result.json").unlink()
    assert start(resume=True).summary["state_sha256"] == first.summary["state_sha256"]
    with pytest.raises(FedloomError, match="another configuration"):
        start(resume=True, data=(X + 1, Y))
    command = [
        sys.executable,
        "-m",
        "fedloom",
        "run",
        str(folder / "config.toml"),
        "--out",
        str(tmp_path / "b"),
    ]
    other = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (
        other.returncode == 2
        and "is an object of the script that started the run: run that script again" in other.stderr
    )


def test_a_result_prints_in_five_lines_and_has_frames_and_a_page(tmp_path: Path) -> None:
    result = fedloom.run("fedal", data=(X, Y), models=[factory], out=tmp_path / "run", **SMALL)
    assert len(repr(result).splitlines()) == 5 and repr(result).startswith(
        "fedal on arrays: 3 clients, 2 rounds"
    )
    assert list(result.metrics.columns) == [
        "round",
        "iteration",
        "stage",
        "party",
        "metric",
        "value",
    ]
    assert result.clients["accuracy"].mean() == pytest.approx(result.accuracy)
    assert result.report() == tmp_path / "run" / "report.html" and result.report().is_file()
    with pytest.raises(ConfigError, match="this run wrote no folder: repeat it with out=FOLDER"):
        fedloom.run("local", data=(X, Y), **SMALL).report()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"data": (X, Y[:9])}, DataError, "X has 240 rows, but y has 9 labels"),
        ({"data": (X, X[:, 0]), "task": "classes"}, DataError, "y has fractions"),
        ({"data": (np.array([["a"], ["b"]]), [0, 1])}, DataError, "X must have numbers"),
        ({"data": 3}, DataError, "not a int"),
        ({"data": []}, DataError, "empty list"),
        ({"data": [(X, Y), (X[:, :3], Y)]}, DataError, "differ in shape"),
        ({"data": (X, Y), "group": [0, 1]}, DataError, "group has 2 owners for 240 rows"),
        (
            {"data": (X, Y), "models": [3]},
            ModelError,
            "must be a module, an estimator, a factory or a name, not a int",
        ),
        (
            {"data": (X, Y), "models": lambda one: None},
            ModelError,
            "must take \\(input_shape, classes\\)",
        ),
        (
            {"data": (X, Y), "models": nn.Linear(6, 2)},
            ModelError,
            "must return logits of shape \\(2, 3\\)",
        ),
        ({"data": "digits", "test": (X, Y)}, DataError, "test needs training rows"),
        (
            {"data": {"name": np.zeros((3, 2))}},
            ConfigError,
            "name: must be a string, not a ndarray$",
        ),
        ({"data": (X, Y), "cleints": 3}, ConfigError, "cleints: there is no such setting"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_sentence(
    arguments: dict[str, Any], error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        fedloom.run("local", **{"rounds": 1, **arguments})


def test_a_number_of_seeds_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="seeds"):
        fedloom.compare(["local"], data=(X, Y), seeds=0)


def test_columns_of_very_different_scale_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    objects.data_settings((X * [1, 1, 1, 1, 1, 1e5], Y))
    assert "standardize them, or give a data frame" in caplog.text


def test_a_network_that_predicts_by_more_than_its_logits_comes_back_as_the_party_predicts() -> None:
    for method, model in (("fedproto", "mlp"), ("fedmd", "forest")):
        result = fedloom.run(
            method, data=(X[:180], Y[:180]), test=(X[180:], Y[180:]), models=[model], **SMALL
        )
        found = [accuracy(result._trained.client(i, ""), X[180:], Y[180:]) for i in range(3)]
        assert found == pytest.approx(result.summary["accuracy"]["per_client"], abs=1e-6)


def test_a_frame_has_a_label_and_perhaps_an_owner() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({f"x{k}": X[:, k] for k in range(6)})
    frame["site"], frame["sick"] = (
        np.array(["a", "b"])[np.arange(240) % 3 // 2],
        np.array(["no", "maybe", "yes"])[Y],
    )
    by_site = objects.data_settings(frame, label="sick", group="site")
    assert by_site["clients"] == 2 and fedloom.load(by_site["name"]).classes == (
        "maybe",
        "no",
        "yes",
    )
    tested = fedloom.load(
        objects.data_settings(frame[:200], test=frame[200:], label="sick")["name"]
    )
    assert tested.test is not None and tested.test.tolist() == list(range(200, 240))
    assert objects.data_settings([frame[:100], frame[100:]], label="sick")["clients"] == 2
    result = fedloom.run(
        "fedavg", data=frame, label="sick", group="site", models="mlp", rounds=1, public_rows=10
    )
    assert result.clients["rows"].min() > 40
    with pytest.raises(DataError, match="is for data frames and files"):
        fedloom.run("local", data=(X, Y), label="sick")


def test_models_of_a_frame_are_exported_with_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"age": X[:, 0], "sex": np.where(X[:, 1] > 0, "f", "m"), "sick": np.array([0, 1])[Y % 2]}
    )
    result = fedloom.run(
        "fedavg", data=frame, label="sick", models="mlp", rounds=1, clients=2, out=tmp_path / "run"
    )
    folder = result.export(tmp_path / "models")
    model = load_model(folder / "server")
    assert [column["name"] for column in model.manifest.inputs.columns] == ["age", "sex"]
    with pytest.raises(ConfigError, match="force"):
        result.export(folder)
    with pytest.raises(ConfigError, match="repeat it with out=FOLDER"):
        fedloom.run("local", data=(X, Y), **SMALL).export(folder)


def test_clients_of_one_row_are_evaluated() -> None:
    result = fedloom.run(
        "fedavg", data=(X[:24], Y[:24]), models="linear", rounds=1, clients=12, seed=1
    )
    assert len(result.clients) == 12 and result.clients["rows"].min() == 1


def test_frames_have_nullable_types_and_names_of_any_type() -> None:
    pandas = pytest.importorskip("pandas")
    plain = pandas.DataFrame(
        {"age": np.arange(240) % 50 + 0.0, "on": np.arange(240) % 3 > 1, "sick": Y % 2}
    )
    plain = plain.astype({"on": float})
    plain.loc[3, ["age", "on"]] = np.nan
    nullable = plain.convert_dtypes().astype({"on": "boolean"})
    assert [str(kind) for kind in nullable.dtypes] == ["Int64", "boolean", "Int64"]
    first, second = (
        fedloom.load(
            objects.data_settings(frame, label="sick", columns={"missing": "median"})["name"]
        )
        for frame in (plain, nullable)
    )
    assert first.columns == second.columns == ("age", "on") and np.isnan(second.x[3]).all()
    np.testing.assert_array_equal(first.x, second.x)
    numbered = fedloom.load(
        objects.data_settings(pandas.DataFrame({0: X[:, 0], 1: Y % 2}), label="1")["name"]
    )
    assert numbered.columns == ("0",)
    twice = pandas.concat([plain, plain[["age"]]], axis=1)
    for message, frame in {"'age' repeats; rename": twice, "has no rows": plain[:0]}.items():
        with pytest.raises(DataError, match=message):
            objects.data_settings(frame, label="sick")


def test_the_settings_of_a_file_s_columns_hold_for_a_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({f"x{k}": X[:, k] for k in range(6)})
    frame["site"], frame["sick"] = (
        np.array(["a", "b", "c"])[np.arange(240) % 3],
        np.array(["no", "yes"])[Y % 2],
    )
    frame["part"], frame.loc[::7, "x0"] = np.where(np.arange(240) % 4, "train", "test"), np.nan
    settings: dict[str, Any] = {"label": "sick", "group": "site", "models": "mlp", "rounds": 1}
    with pytest.raises(DataError, match="lacks 35 of 240 numbers"):
        fedloom.run("fedavg", data=frame, **settings)
    filled = fedloom.run(
        "fedavg", data=frame, missing="indicator", drop=["x1"], test="part", **settings
    )
    assert filled.clients["rows"].sum() == 180 and filled.models[0](torch.zeros(1, 6)).shape == (
        1,
        2,
    )
    away = fedloom.run(
        "fedavg", data=frame, missing="median", drop=["part"], unseen=["b"], **settings
    )
    assert away.clients[["client", "unseen"]].values.tolist() == [
        ["a", False],
        ["c", False],
        ["b", True],
    ]
    tested = fedloom.run(
        "fedavg", data=frame, missing="median", drop=["part"], test=["c"], **settings
    )
    assert tested.clients[["client", "rows"]].values.tolist() == [["a", 80], ["b", 80]]
    named = [
        objects.data_settings(frame, columns={"missing": how})["name"]
        for how in ("median", "most-frequent")
    ]
    assert named[0] != named[1]
    with pytest.raises(ConfigError, match="missing: must be 'refuse'"):
        fedloom.run("fedavg", data=frame, missing="mean", **settings)
    with pytest.raises(DataError, match=r"drop=\['x1'\] is for data frames and files"):
        fedloom.run("local", data=(X, Y), drop=["x1"])


def test_progress_is_a_bar_over_the_rounds_or_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.progress import Progress

    seen: list[Any] = []
    small: dict[str, Any] = {"clients": 2, "models": "mlp", "rounds": 2, "public_rows": 20}
    fedloom.run("fedmd", progress=lambda status: seen.append(status.round), **small)
    assert seen == [1, 2]
    totals, bars = list[Any](), list[dict[str, Any]]()
    monkeypatch.setattr(Progress, "add_task", lambda self, text, total: totals.append(total))
    monkeypatch.setattr(Progress, "update", lambda self, task, **words: bars.append(words))
    fedloom.compare(["fedmd", "local"], progress=True, **small)
    assert totals == [4] and [bar["advance"] for bar in bars] == [1] * 4
    assert bars[0]["description"].startswith("fedmd seed 0: accuracy ")
