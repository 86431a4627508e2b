"""Objects and files that cannot be used get one sentence before work starts, and no traceback."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import fedloom
from fedloom.core.errors import DataError, FedloomError
from fedloom.data.images import decode_images
from fedloom.report.files import parsed
from tests.exported import predict

X = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(int)


class Sparse:
    """As SciPy's: it becomes an array of one object."""

    def toarray(self) -> np.ndarray:
        return X


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        (
            TensorDataset(torch.from_numpy(X), torch.eye(2)[Y]),
            {},
            "one class, not 2 numbers: use argmax",
        ),
        ((X, np.eye(2)[Y]), {}, "use argmax for one-hot labels"),
        (((X, Y), (X, Y)), {}, "give the clients' rows as a list"),
        ((X, Y, Y), {}, "give the clients' rows as a list"),
        ((Sparse(), Y), {}, "X is sparse"),
        ([(X, Y), (X[:0], Y[:0])], {}, "client-1 has no rows"),
        ([], {}, "empty list"),
        ((X, Y), {"label": ["a"]}, "label must be the name of one column"),
        ((X, Y), {"group": [None, *"ab" * 29, "a"]}, "must name an owner for each row"),
        (
            [(np.zeros((9, 1, 8, 8), np.uint8), Y[:9]), (np.zeros((9, 1, 8, 8)), Y[:9])],
            {},
            "give all in one type",
        ),
        ((X, Y), {"models": nn.Sequential(nn.LazyLinear(2))}, "lazy layers"),
    ],
)
def test_an_object_that_cannot_be_used(data: Any, more: dict[str, Any], message: str) -> None:
    with pytest.raises(FedloomError, match=message):
        fedloom.run("fedavg", data=data, rounds=1, **more)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module() -> None:
    with pytest.raises(FedloomError, match="is scripted"):
        fedloom.run(
            "fedavg",
            data=(X, Y),
            rounds=1,
            models=torch.jit.trace(nn.Linear(3, 2), torch.zeros(1, 3)),
        )


def test_a_trial_of_owners_with_one_class_each_does_not_begin() -> None:
    with pytest.raises(DataError, match="rows of one class only"):
        fedloom.trial((X, Y), group=Y, repeats=1, methods=["fedavg-ft"])


def test_a_very_large_picture_and_a_turned_one(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("1", (30_000, 30_000)).save(file, "PNG")
    with pytest.raises(DataError, match="at most 89,478,485 are read"):
        decode_images([file.getvalue()])
    turned, about = image.fromarray(np.array([[0, 255]], np.uint8)), image.Exif()
    about[0x0112] = 6  # a quarter to the right
    turned.save(tmp_path / "turned.png", exif=about)
    assert decode_images([tmp_path / "turned.png"])[0, 0].tolist() == [[0], [255]]


def test_a_deeply_nested_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(DataError, match="not valid JSON"):
        parsed(tmp_path / "result.json")


def test_a_narrow_encoding_replaces_signs() -> None:
    narrow = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "fedloom", "list", "fedal"], capture_output=True, env=narrow
    )
    assert done.returncode == 0 and b"?" in done.stdout, done.stderr


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(torch.tanh(self.a(x))))


def test_tied_weights_are_exported(tmp_path: Path) -> None:
    result = fedloom.run(
        "fedavg", data=(X, Y), clients=2, rounds=1, models=Tied(), out=tmp_path / "run"
    )
    folder = result.export(tmp_path / "models") / "server"
    (tmp_path / "rows.csv").write_text(
        "\n".join(["x0,x1,x2", *(",".join(map(str, row)) for row in X.tolist())])
    )
    said = predict(folder, tmp_path / "rows.csv").splitlines()
    shares = np.array([line.split(",")[1:] for line in said[1:]], dtype=float)
    assert result.model is not None
    with torch.inference_mode():
        np.testing.assert_allclose(
            shares, result.model(torch.from_numpy(X)).softmax(-1).numpy(), atol=1e-5
        )
    assert json.loads((folder / "model.json").read_text())["model"] is None
