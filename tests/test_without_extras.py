"""The commands work in an installation without extras, such as that of `make demo`; what needs one
names it.
"""

import json
import subprocess
import sys
from pathlib import Path

HIDDEN = (
    *(
        "grpc",
        "cryptography",
        "datasets",
        "huggingface_hub",
        "flwr",
        "flwr_datasets",
        "ray",
        "optuna",
        "networkx",
    ),
    *(
        "openmined_psi",
        "ot",
        "tensorboard",
        "mlflow",
        "wandb",
        "torchvision",
        "transformers",
        "lightgbm",
        "xgboost",
    ),
    *("catboost", "tabicl", "numba", "pandas", "polars", "statsmodels", "sqlalchemy", "alembic"),
)
"""Packages of extras, and pandas, which no requirement brings."""
SMALL = "-s data.clients=2 -s models.pool=mlp -s data.public_rows=20 -s evaluate.points=1"
LINES = {
    f"run fedmd --rounds 1 {SMALL} --out run": "",
    f"compare fedmd local --rounds 1 {SMALL} --out both --latex": "",
    "report run": "",
    "export run --out models": "",
    "data digits": "",
    "list methods": "",
    "certs a b --out fed": "pip install -e '.[net]'",
    f"run fedmd --rounds 1 {SMALL} --engine ray": "pip install -e '.[ray]'",
    "node node.toml": "pip install -e '.[net]'",
    "run fedmd -s data.name=mnist": "is not installed; run: pip install -e",
    "run gossip --rounds 1 -s topology.kind=regular": 'pip install -e ".[graphs]"',
}
"""A line of the command, and what it says if it cannot run; "" if it can."""
CODE = """
import contextlib, importlib.util, io, json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

HIDDEN, lines = set(json.loads(sys.argv[1])), json.loads(sys.argv[2])
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.partition(".")[0] in HIDDEN else find(name, *more)
sys.meta_path.insert(0, Hidden())
from fedloom.cli import main

for line in lines:
    sys.argv = ["fedloom", *line.split()]
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([line, code, said.getvalue()]))
import fedloom
result = fedloom.run("fedmd", rounds=1, clients=2, models="mlp", public_rows=20)
print(json.dumps(["latex", 0, result.to_latex() + result._repr_html_() + repr(result.plot())]))
"""  # noqa: E501


def test_commands_without_extras(tmp_path: Path) -> None:
    words = [json.dumps(HIDDEN), json.dumps([*LINES])]
    ran = subprocess.run(
        [sys.executable, "-c", CODE, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    *done, latex = map(json.loads, ran.stdout.splitlines())
    for line, code, said in done:
        assert code == (2 if LINES[line] else 0) and LINES[line] in said, (line, code, said)
        assert bool(said) == bool(LINES[line]) and "Traceback" not in said
    assert len(done) == len(LINES) and "Accuracy" in latex[2]
