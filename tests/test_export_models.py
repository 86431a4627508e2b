"""Horizontal runs as folders that plain PyTorch opens."""

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.cli import main
from fedloom.core.errors import CheckpointError, ConfigError, DataError, FedloomError
from fedloom.data.encoder import OneHot, RawNumber, TableEncoder
from fedloom.data.sources import load_raw
from fedloom.data.tables import RawTable
from fedloom.data.text_and_dates import DateParts, HashedText
from fedloom.deploy import export, load_model, pull, push
from fedloom.deploy.models import MODEL, NETWORK, PREDICT, WEIGHTS, ModelInputs, write_model
from fedloom.deploy.source import source
from tests.exported import predict

DATA = {
    "name": "breast_cancer",
    "clients": 2,
    "partition": "iid",
    "public_rows": 40,
    "own_test_rows": 20,
}
PLAIN = """
import runpy, sys
sys.modules["fedloom"] = None  # importing it would raise ImportError
sys.path.insert(0, ".")
sys.argv = ["predict.py", *sys.argv[1:]]
runpy.run_path("predict.py", run_name="__main__")
"""


def trained(folder: Path, method: str, **settings: Any) -> fedloom.Result:
    values = {"data": DATA, "models": {"pool": ["mlp"]}, "rounds": 2, **settings}
    return fedloom.run(method, out=folder, **values)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of FedAvg and its export."""
    folder = tmp_path_factory.mktemp("runs") / "fedavg"
    trained(folder, "fedavg")
    export(folder)
    return folder


@pytest.fixture
def model(averaged: Path, tmp_path: Path) -> Path:
    """A copy of a model's folder, to be damaged."""
    return Path(shutil.copytree(averaged / "export" / "server", tmp_path / "server"))


def write_rows(path: Path, count: int = 30) -> RawTable:
    """A CSV file of the data set's first rows, with their columns in another order."""
    table = load_raw("breast_cancer")
    assert isinstance(table, RawTable)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        columns = dict(reversed([*table.columns.items()]))
        writer.writerow(["patient", *columns])
        rows = zip(*(values[:count].tolist() for values in columns.values()), strict=True)
        writer.writerows([f"p{n}", *row] for n, row in enumerate(rows))
    return table


def in_a_process(folder: Path, rows: Path) -> str:
    """What `predict.py` prints in a process that cannot import fedloom."""
    command = [sys.executable, "-c", PLAIN, str(rows)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def plain_predictions(
    folder: Path, rows: Path, predict: Callable[[Path, Path], str] = predict
) -> tuple[list[str], np.ndarray]:
    """The words and numbers that `predict.py` prints."""
    header, *lines = csv.reader(predict(folder, rows).splitlines())
    assert header[0] == "predicted"
    return [line[0] for line in lines], np.array([[float(p) for p in line[1:]] for line in lines])


def test_a_folder_needs_no_fedloom(averaged: Path, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "new.csv")
    folders = sorted(path.name for path in (averaged / "export").iterdir())
    assert folders == ["client-0", "client-1", "server"]
    server = averaged / "export" / "server"
    assert {path.name for path in server.iterdir()} == {MODEL, WEIGHTS, NETWORK, PREDICT}
    loaded = load_model(server)
    expected = loaded.predict(tmp_path / "new.csv")
    predicted, probabilities = plain_predictions(server, tmp_path / "new.csv", in_a_process)
    np.testing.assert_allclose(probabilities, expected, atol=2e-6)
    assert predicted == [loaded.classes[k] for k in expected.argmax(1)]
    assert (expected.argmax(1) == table.y[:30]).mean() > 0.6
    np.testing.assert_array_equal(
        loaded.predict({k: v[:30] for k, v in table.columns.items()}), expected
    )
    assert load_file(server / WEIGHTS).keys() == loaded.network.state_dict().keys()


def test_the_shared_model_scores_as_the_run_did(averaged: Path, tmp_path: Path) -> None:
    """On all rows of the data set that were test rows."""
    from fedloom.experiment.plan.build import data_of
    from fedloom.experiment.plan.reading import read

    data, split = data_of(read(str(averaged / "config.toml")).run)
    x = torch.from_numpy((data.x[split.test] - data.shift) / data.scale)
    logits = load_model(averaged / "export" / "server").network(x)
    accuracy = float((logits.argmax(1).numpy() == data.y[split.test]).mean())
    measured = json.loads((averaged / "result.json").read_text())["accuracy"]["mean"]
    assert abs(accuracy - measured) < 1e-9


PUBLIC = {"pretrained": {"iterations": 5}}
METHODS: list[tuple[str, dict[str, Any], bool]] = [
    ("fedavg-ft", {}, True),
    ("cfd", {}, False),
    ("fccl-plus", {}, False),
    ("fedal", {}, False),
    ("feddf", {}, True),
    ("fedproto-public", {}, False),
    ("fedcp", {}, False),
    ("fedproto", {}, False),
    ("per-fedavg", {}, True),
    ("afind-plus", {"params": {"personal_head": False}}, False),
    ("ditto", {}, False),
    ("dispfl", {}, False),
    ("augfl", {"data": {**DATA, "server_rows": 60}, "rounds": 1}, True),
    ("fedpcl", {"data": {**DATA, "server_rows": 60}, "rounds": 1}, False),
    ("fedboost", {}, True),
    ("fedforest", {"params": {"lot": 5}}, True),
    ("fedextra", {}, True),
    ("fedboost-mix", {"params": {"mix": 6}}, False),
    ("fedforest-mix", {"params": {"lot": 4, "mix": 6}}, False),
    ("fedboost", {"params": {"own_trees": 5, "owner_column": True}}, False),
]


@pytest.mark.each_time("fedavg-ft-*", "fedal-*", "ditto-*", "augfl-*", "fedboost-mix-*")
@pytest.mark.parametrize(
    ("method", "settings", "shared"),
    [pytest.param(*m, id=f"{m[0]}-{n}") for n, m in enumerate(METHODS)],
)
def test_every_family_comes_back(
    method: str, settings: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    """`export` itself compares both readings of each folder with the run."""
    trained(tmp_path / "run", method, **settings)
    found = export(tmp_path / "run")
    names = [name for name in found.sizes if name != "server"]
    assert len(names) == 2 and set(found.skipped) <= {"server"} and found.tried >= 127
    assert ("server" in found.sizes) == shared
    write_rows(tmp_path / "new.csv", 5)
    folder = found.folder / names[-1]
    _, plain = plain_predictions(folder, tmp_path / "new.csv")
    np.testing.assert_allclose(
        plain, load_model(folder, trust=[NETWORK]).predict(tmp_path / "new.csv"), atol=2e-6
    )


@pytest.mark.parametrize(
    "params", [{}, {"owners": "fixed"}, {"owners": "random"}, {"family": "poisson"}, {"l2": 1.0}]
)
def test_linear_models_have_folders(params: dict[str, Any], tmp_path: Path) -> None:
    """With gaps and words; `export` compares each folder with the run."""
    rng = np.random.default_rng(0)
    age, ward = rng.normal(50, 9, 120).round(1), rng.choice(["x", "y", ""], 120)
    y = (
        rng.poisson(np.exp(age / 40))
        if "family" in params
        else (age / 9 + (ward == "y") + rng.normal(size=120)).round(2)
    )
    words = np.where(y > np.median(y), "high", "low") if "l2" in params else y
    cells = zip(
        np.where(rng.random(120) < 0.1, "", age.astype(str)), ward, "ABC" * 40, words, strict=True
    )
    (tmp_path / "t.csv").write_text(
        "\n".join(["age,ward,site,y", *(",".join(map(str, row)) for row in cells), ""])
    )
    task = "classes" if "l2" in params else "number"
    data = {
        "name": str(tmp_path / "t.csv"),
        "label": "y",
        "group": "site",
        "missing": "median",
        "task": task,
    }
    trained(tmp_path / "run", "fedglm", data=data, params=params, rounds=20)
    done = export(tmp_path / "run")
    assert done.tried > 0 and (done.folder / "server").exists() == ("owners" not in params)
    (tmp_path / "new.csv").write_text("age,ward\n40,y\n,\n50,new\n")
    found = load_model(done.folder / "A").predict(tmp_path / "new.csv")
    _, *lines = predict(done.folder / "A", tmp_path / "new.csv").splitlines()
    plain = np.array(
        [[float(word) for word in line.split(",")[-found.shape[1] :]] for line in lines]
    )
    np.testing.assert_allclose(plain, found, atol=1e-5)


def test_images(tmp_path: Path) -> None:
    from PIL import Image

    data = {"name": "digits", "clients": 2, "partition": "iid"}
    trained(
        tmp_path / "run",
        "fedavg",
        data=data,
        models={"pool": ["resnet8"], "norm": "batch"},
        rounds=1,
    )
    folder = export(tmp_path / "run").folder / "client-1"
    whole = load_raw("digits").x[:4]
    loaded = load_model(folder)
    expected = loaded.predict(whole)
    for n, pixels in enumerate(whole):
        Image.fromarray(pixels[0]).save(tmp_path / f"{n}.png")
    _, plain = plain_predictions(folder, tmp_path / "3.png")
    np.testing.assert_allclose(plain[0], expected[3], atol=1e-5)
    turned = Image.fromarray(np.rot90(whole[3][0]))
    exif = turned.getexif()
    exif[0x0112] = 6  # of a camera that was turned
    turned.save(tmp_path / "turned.png", exif=exif)
    np.testing.assert_array_equal(plain_predictions(folder, tmp_path / "turned.png")[1], plain)
    Image.fromarray(whole[3][0].astype(np.uint16)).save(tmp_path / "deep.png")
    for odd, problem in (
        ("deep.png", "8 bits per channel"),
        ("rows.npy", "cannot be read as an image"),
    ):
        with pytest.raises(SystemExit, match=problem):
            plain_predictions(folder, tmp_path / odd)
    np.testing.assert_allclose(
        loaded.predict([tmp_path / f"{n}.png" for n in range(4)]), expected, atol=1e-6
    )
    np.save(tmp_path / "rows.npy", whole)
    np.testing.assert_array_equal(loaded.predict(tmp_path / "rows.npy"), expected)
    with pytest.raises(DataError, match="Images must be"):
        loaded.predict(whole[:, :, :4])
    with pytest.raises(DataError, match="takes images"):
        loaded.predict({"a": [1]})


def test_gaps_words_texts_and_dates_are_read_alike(tmp_path: Path) -> None:
    """`network.py` encodes a file as `TableEncoder` does, whose rules it is given."""
    rules = (
        RawNumber("size", True, True),
        OneHot("color", ("?", "blue", "red")),
        HashedText("note", 8),
        DateParts("seen", "day", True, True),
    )
    columns = TableEncoder(rules).to_dict()["columns"]
    inputs = ModelInputs(
        kind="table",
        shape=(23,),
        columns=tuple(columns),
        fill=(0.5, *[0.0] * 22),
        mean=(1.0,) * 23,
        scale=(2.0,) * 23,
    )
    layer = torch.nn.Linear(23, 2)
    values = {
        "fedloom": "0",
        "owner": "client-0",
        "method": "fedavg",
        "eval_mode": "",
        "round": 1,
        "norm": None,
    }
    values |= {"classes": ("a", "b"), "model": None, "inputs": inputs}
    code = source(torch.fx.symbolic_trace(torch.nn.Sequential(layer)))
    state = torch.nn.Sequential(layer).state_dict()
    write_model(tmp_path / "model", values, state, code)
    rows = {
        "size": ["1.5", "", "NA"],
        "color": ["red", "", "green"],
        "note": ["a red Tie", "", "a, a b"],
        "seen": ["31.01.2022", "NA", "2022-01-31 10:00Z"],
    }
    with (tmp_path / "my.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows)
        writer.writerows(zip(*rows.values(), strict=True))
    _, plain = plain_predictions(tmp_path / "model", tmp_path / "my.csv")
    loaded = load_model(tmp_path / "model", trust=[NETWORK])
    np.testing.assert_allclose(plain, loaded.predict(tmp_path / "my.csv"), atol=2e-6)
    x = loaded.encode(tmp_path / "my.csv")
    np.testing.assert_allclose(x[:, 0], [0.25, -0.25, -0.25])
    np.testing.assert_allclose(x[:, 1], [-0.5, 0, 0])  # the indicator of a missing number
    np.testing.assert_allclose(x[:, 2:5] * 2 + 1, [[0, 0, 1], [1, 0, 0], [0, 0, 0]])
    assert np.isclose(np.linalg.norm(x[0, 5:13] * 2 + 1), 1)
    np.testing.assert_allclose(x[:, 22] * 2 + 1, [0, 1, 0])
    (tmp_path / "my.csv").write_text("size,color,note,seen\n1,red,a,01/31/2022\n")
    with pytest.raises(DataError, match="must hold a date, the day first"):
        loaded.predict(tmp_path / "my.csv")
    with pytest.raises(SystemExit, match="must hold a date in each row, but has '01/31/2022'"):
        plain_predictions(tmp_path / "model", tmp_path / "my.csv")


def test_a_table_of_the_user(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    color = rng.choice(["red", "blue"], 120)
    with (tmp_path / "my.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "color", "label"])
        writer.writerows(
            zip(
                rng.normal(size=120).round(3),
                color,
                np.where(color == "red", "yes", "no"),
                strict=True,
            )
        )
    data = {"name": str(tmp_path / "my.csv"), "clients": 2, "partition": "iid"}
    trained(tmp_path / "run", "fedavg", data=data, rounds=5)
    folder = export(tmp_path / "run").folder / "client-0"
    loaded = load_model(folder)
    expected = loaded.predict(tmp_path / "my.csv")
    _, plain = plain_predictions(folder, tmp_path / "my.csv")
    np.testing.assert_allclose(plain, expected, atol=2e-6)
    assert ((expected.argmax(1) == 1) == (color == "red")).mean() > 0.8 and loaded.classes == (
        "no",
        "yes",
    )


@pytest.mark.parametrize("method", ["fedavg", "fedboost"])
def test_a_table_with_texts_and_dates(method: str, tmp_path: Path) -> None:
    """Also where no date is missing in training, or each text is another one."""
    rng = np.random.default_rng(0)
    seen = [
        f"{1 + k % 28:02}.{1 + k % 12:02}.{2000 + k % 20}" for k in rng.integers(10**4, size=120)
    ]
    ill = rng.random(120) > 0.5
    texts = [f"{'fever and cough' if sick else 'sleeps well'} {k}" for k, sick in enumerate(ill)]
    rows = [*zip(seen, ["", *seen[1:]], texts, np.where(ill, "ill", "well"), strict=True)]
    with (tmp_path / "my.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("seen", "left", "text", "label"), *rows])
    data = {
        "name": str(tmp_path / "my.csv"),
        "clients": 2,
        "partition": "iid",
        "missing": "indicator",
    }
    trained(tmp_path / "run", method, data=data, rounds=5)
    folder = export(tmp_path / "run").folder / ("server" if method == "fedboost" else "client-0")
    expected = load_model(folder, trust=[NETWORK]).predict(tmp_path / "my.csv")
    _, plain = plain_predictions(folder, tmp_path / "my.csv")
    np.testing.assert_allclose(plain, expected, atol=2e-6)
    assert ((expected.argmax(1) == 0) == ill).mean() > 0.9


def test_trees_of_a_user_s_table_with_words_and_gaps(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    color = rng.choice(["red", "blue", "green", ""], 300)
    size = rng.normal(size=300).round(3).astype(object)
    label = np.where((color == "red") | (size > 0.5), "yes", "no")
    size[rng.random(300) < 0.2] = ""
    with (tmp_path / "my.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "color", "label"])
        writer.writerows(zip(size, color, label, strict=True))
    data = {"name": str(tmp_path / "my.csv"), "clients": 2, "partition": "iid", "missing": "median"}
    trained(tmp_path / "run", "fedboost", data=data, rounds=20)
    found = export(tmp_path / "run")
    loaded = load_model(found.folder / "server")
    expected = loaded.predict(tmp_path / "my.csv")
    _, plain = plain_predictions(found.folder / "server", tmp_path / "my.csv")
    np.testing.assert_allclose(plain, expected, atol=2e-6)
    assert found.tried > 20 and ((expected.argmax(1) == 1) == (label == "yes")).mean() > 0.85


@pytest.mark.parametrize("method", ["fedboost", "fedglm"])
def test_folders_subtract_what_was_subtracted_from_a_column(method: str, tmp_path: Path) -> None:
    rng, n = np.random.default_rng(0), np.arange(240)
    near = {
        "word": np.array(["u", "v", "w"])[n % 3],
        "x": rng.integers(0, 30, 240),
        "z": rng.normal(size=240).round(3),
    }
    ill, site = np.where(near["x"] + 5 * near["z"] > 15, "yes", "no"), np.array(["a", "b"])[n % 2]
    far = {**near, "x": near["x"] + 10**9}
    with (tmp_path / "far.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*far, "ill", "site"])
        writer.writerows(
            zip(*(v.tolist() for v in far.values()), ill.tolist(), site.tolist(), strict=True)
        )
    data = {"name": str(tmp_path / "far.csv"), "label": "ill", "group": "site"}
    fedloom.run(method, data=data, rounds=8, out=tmp_path / "run")
    folder = export(tmp_path / "run").folder / "server"
    found = load_model(folder, trust=[NETWORK]).predict(
        {name: values.tolist() for name, values in far.items()}
    )
    assert (found.argmax(1) == (ill == "yes")).mean() > 0.9
    _, plain = plain_predictions(folder, tmp_path / "far.csv")
    np.testing.assert_allclose(plain, found, atol=2e-6)


# -- refusals --------------------------------------------------------------------------------------


def test_predictions_from_statistics_of_the_rows_are_refused(tmp_path: Path) -> None:
    models, params = {"pool": ["mlp"], "norm": "batch"}, {"batchnorm": "batch"}
    trained(tmp_path / "run", "fedavg", models=models, params=params)
    with pytest.raises(CheckpointError, match=r"does not predict as the run did: .*batchnorm"):
        export(tmp_path / "run")
    assert not (tmp_path / "run" / "export").exists()


def test_force_replaces_the_folders_of_an_earlier_export(averaged: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(averaged / "export", tmp_path / "out"))
    shutil.copytree(out / "client-0", out / "client-7")
    (out / "client-7" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="add --force"):
        export(averaged, out)
    export(averaged, out, force=True)
    assert [path.name for path in (out / "client-7").iterdir()] == ["notes.txt"]
    for name in (MODEL, WEIGHTS, NETWORK):
        assert (out / "server" / name).read_bytes() == (
            averaged / "export" / "server" / name
        ).read_bytes()


def change(folder: Path, **values: Any) -> None:
    content = json.loads((folder / MODEL).read_text())
    (folder / MODEL).write_text(json.dumps({**content, **values}))


INPUTS = {
    "kind": "table",
    "shape": [30],
    "columns": [],
    "fill": [],
    "mean": [0.0] * 30,
    "scale": [1.0] * 30,
}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"format": "fedloom-model/9"}, "format"),
        ({"extra": 1}, "no such setting"),
        ({"model": "no-such"}, "there is no model"),
        ({"model": "os:system"}, "not a network of fedloom"),
        ({"model": "linear"}, "is inconsistent"),
        ({"classes": ["a", "b", "c"]}, "is inconsistent"),
        ({"inputs": {**INPUTS, "shape": [31]}}, "is inconsistent"),
        ({"inputs": INPUTS}, "do not give the 30 numbers"),
        ({"inputs": {**INPUTS, "columns": [{"nam": "a"}]}}, "is inconsistent"),
        ({"inputs": {**INPUTS, "scale": [0.0] * 30}}, "above 0"),
        ({"inputs": {**INPUTS, "mean": [0.0]}}, "mean has 1 numbers"),
        ({"state_sha256": "0" * 64}, "is not the file that model.json describes"),
        ({"state_bytes": 10**12}, "state_bytes"),
    ],
)
def test_a_manifest_that_lies(values: dict[str, Any], text: str, model: Path) -> None:
    change(model, **values)
    with pytest.raises(FedloomError, match=text):
        load_model(model)


def test_code_of_a_folder_runs_only_if_it_is_trusted(model: Path) -> None:
    (model / NETWORK).write_text("raise SystemExit('executed')")
    load_model(model)  # a network of fedloom: the file is not read
    change(model, model=None)
    with pytest.raises(ConfigError, match="if you trust it, add --trust network"):
        load_model(model)
    with pytest.raises(
        CheckpointError, match=r"network\.py is not the file that model.json describes"
    ):
        load_model(model, trust=[NETWORK])


def test_torn_files(model: Path) -> None:
    whole = (model / WEIGHTS).read_bytes()
    for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        (model / WEIGHTS).write_bytes(data)
        with pytest.raises(CheckpointError, match="is not the file that"):
            load_model(model)
    for text in (b"", b"{", b"[1]", b"\xff", b"null"):
        (model / MODEL).write_bytes(text)
        with pytest.raises(CheckpointError, match=r"model\.json"):
            load_model(model)


def test_rows_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    loaded = load_model(model)
    table = write_rows(tmp_path / "new.csv")
    rows = {name: values[:3].tolist() for name, values in table.columns.items()}
    first = next(iter(rows))
    bad: Any
    for bad, text in [
        ({**rows, first: ["1", "two", "3"]}, "a finite number"),
        ({**rows, first: [1]}, "same number of rows"),
        (
            {name: values for name, values in rows.items() if name != first},
            "'mean radius' is missing",
        ),
        ({name: [] for name in rows}, "At least one row"),
        (np.zeros((3, 30), np.float32), "rows of a table"),
        (tmp_path / "none.csv", "is no file; name a CSV or Parquet file"),
    ]:
        with pytest.raises(DataError, match=text):
            loaded.predict(bad)


def test_the_commands(
    averaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "new.csv")

    def call(line: str, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["fedloom", *line.split()])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        assert (stop.value.code or 0) == code, out + err
        return str(out + err)

    text = call(f"export {averaged} --out models")
    assert [line.split()[0] for line in text.splitlines()[1:4]] == [
        "client-0",
        "client-1",
        "server",
    ]
    assert "predictions match the run on 142 test rows" in text
    text = call("predict models/server new.csv --id patient --out p.csv")
    assert "server, fedavg: 30 rows" in text
    with Path("p.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert (
        header == ["patient", "predicted", "p malignant", "p benign"]
        and rows[0][0] == "p0"
        and len(rows) == 30
    )
    assert "predicts from rows" in call("predict models/server", code=2)
    text = " ".join(call("predict models new.csv", code=2).split())
    assert "models is not a party's folder: it has no party.json" in text
    assert "choose one of its folders: client-0, client-1, server" in text
    text = " ".join(call("predict models/client-2 new.csv", code=2).split())
    assert "client-2 is not a party's folder: it does not exist" in text
    assert "choose one of the folders in models: client-0, client-1, server" in text


def test_a_model_goes_to_the_hub_and_back(
    model: Path, averaged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder stands in for the hub, and links into it for its cache of downloads."""
    hub = pytest.importorskip("huggingface_hub")
    remote, asked = tmp_path / "hub", {}
    (model / "rows.csv").write_text("secret\n")

    class Api:
        def create_repo(self, repo_id: str, **words: Any) -> None:
            asked[repo_id] = words
            (remote / repo_id).mkdir(parents=True)

        def upload_folder(
            self, folder_path: Path, repo_id: str, allow_patterns: list[str], commit_message: str
        ) -> str:
            for name in hub.utils.filter_repo_objects(
                (p.name for p in folder_path.iterdir()), allow_patterns=allow_patterns
            ):
                shutil.copy(folder_path / name, remote / repo_id / name)
            return f"https://hub/{repo_id}: {commit_message}"

    def download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        if not (remote / repo_id).exists():
            raise ValueError(f"no {repo_id}")
        cache = tmp_path / "cache"
        cache.mkdir()
        for name in allow_patterns:
            (cache / name).symlink_to(remote / repo_id / name)
        return str(cache)

    monkeypatch.setattr(hub, "HfApi", Api)
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert "owner/heart: fedavg" in push(model, "owner/heart") and asked == {
        "owner/heart": {"private": True, "exist_ok": True}
    }
    assert not (remote / "owner" / "heart" / "rows.csv").exists()
    found, here = pull("owner/heart"), load_model(averaged / "export" / "server")
    write_rows(tmp_path / "new.csv")
    np.testing.assert_array_equal(
        found.predict(tmp_path / "new.csv"), here.predict(tmp_path / "new.csv")
    )
    with pytest.raises(CheckpointError, match="the hub did not give owner/none"):
        pull("owner/none")
    with pytest.raises(CheckpointError, match=MODEL):
        push(tmp_path, "owner/none")
