"""A plain `pip install fedloom`, without any extra: what needs none works, and the rest names its extra."""

import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import importlib.util, sys
from importlib import metadata
missing = set({missing!r})
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in missing else find(name, package)
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from fedloom.cli.app import main
sys.argv = ["fedloom", *sys.argv[1:]]
main()
"""
MISSING = (
    "grpc",
    "cryptography",
    "ray",
    "datasets",
    "flwr",
    "flwr_datasets",
    "private_set_intersection",
    "ot",
    "networkx",
    "optuna",
    "tensorboard",
    "mlflow",
    "wandb",
    "transformers",
    "numba",
    "polars",
    "statsmodels",
)


def fedloom(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """A command of an installation without extras."""
    code = WITHOUT.format(missing=MISSING)
    return subprocess.run([sys.executable, "-c", code, *words], cwd=at, capture_output=True, text=True, check=False)


def test_a_run_and_its_export_need_no_extra(tmp_path: Path) -> None:
    run = ("run", "fedavg", "--rounds", "1", "-s", "data.test_fraction=0.9", "-s", "models.pool=['mlp']", "--quiet")
    done = fedloom(*run, "--out", "run", at=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "accuracy" in done.stdout
    assert "verified" in fedloom("export", "run", "--out", "models", at=tmp_path).stdout


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("certs", "fed"), "net"),
        (("node", "node.toml"), "net"),
        (("run", "fedavg", "--engine", "ray"), "ray"),
    ],
)
def test_what_needs_an_extra_names_it(words: tuple[str, ...], extra: str, tmp_path: Path) -> None:
    done = fedloom(*words, at=tmp_path)
    assert done.returncode == 2
    assert f"pip install -e '.[{extra}]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
