"""Mistakes of a new user get a hint that leads to what was meant: in Python's words in Python, else
in the shell's.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.svm import LinearSVC

import fedloom
from fedloom.core.errors import FedloomError
from fedloom.core.vocabulary import SAME, meant
from fedloom.experiment.config.spoken import in_python
from fedloom.methods import registry
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

X, Y = np.random.default_rng(0).normal(size=(60, 4)).astype("f"), np.arange(60) % 2
OWNERS = np.repeat(["a", "b", "c"], 20)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(y=Y, site=OWNERS)

PYTHON: list[tuple[str, dict[str, Any], str]] = [
    (
        "fedavg",
        {"partition": "dirichlet", "alpha": 0.5},
        r'Write options={"alpha": …} or params={"alpha": …}',
    ),
    ("fedal", {"alpha": 0.5}, r'Write options={"alpha": …}\.'),
    ("fedal", {"data": {"alpha": 0.5}}, r'Write options={"alpha": …}'),
    ("fedal", {"partition": "noniid"}, "mean 'dirichlet'"),
    ("fedal", {"partition": "non-iid"}, "mean 'dirichlet'"),
    ("fedal", {"partition": "label skew"}, "mean 'dirichlet'"),
    ("fedal", {"partition": "shards"}, "mean 'pathological'"),
    ("fedal", {"partition": "random"}, "mean 'iid'"),
    ("fedal", {"partition": [[0, 1], [2, 3]]}, r"data=\[\(X1, y1\), \(X2, y2\)\], or group="),
    ("fedal", {"options": {"beta": 0.5}}, "mean 'alpha'"),
    ("fedal", {"models": "resnet"}, "mean 'resnet8'"),
    ("fedal", {"model": "mlp"}, "Write models=…"),
    ("fedal", {"network": "mlp"}, "Write models=…"),
    ("fedal", {"models": []}, "at least one module"),
    ("fedal", {"models": LinearSVC()}, "LinearSVC has no predict_proba"),
    ("fedal", {"params": {"leraning_rate": 0.1}}, "mean 'lr'"),
    ("fedal", {"params": {"learning_rate": 0.1}}, "mean 'lr'"),
    ("fedal", {"params": {"local_epochs": 2}}, "mean 'tau'"),
    ("fedavg", {"params": {"local_epochs": 2}}, "mean 'epochs'"),
    ("fedal", {"params": {"temperature": 2}}, "mean 'kd_temperature'"),
    ("fedavg", {"params": {"fraction_fit": 2}}, "mean 'clients_per_round'"),
    ("fedal", {"params": {"batchsize": 2}}, "mean 'batch_size'"),
    ("fedal", {"lr": 0.1}, r'Write params={"lr": …}\.'),
    ("fedal", {"batch_size": 8}, r'Write params={"batch_size": …}\.'),
    ("fedavg", {"epochs": 8}, r'Write params={"epochs": …}\.'),
    ("fedal", {"device": "cuda"}, r'Write engine={"device": …}\.'),
    ("fedal", {"gpu": True}, r'Write engine={"device": …}\.'),
    ("fedal", {"workers": 2}, r'Write engine={"workers": …}\.'),
    ("fedal", {"n_jobs": 2}, r'Write engine={"workers": …}\.'),
    ("fedal", {"num_clients": 5}, r"Write clients=…\."),
    ("fedal", {"n_clients": 5}, r"Write clients=…\."),
    ("fedal", {"num_rounds": 5}, r"Write rounds=…\."),
    ("fedal", {"random_state": 5}, r"Write seed=…\."),
    ("fedal", {"dataset": "digits"}, r"Write data=…\."),
    ("fedal", {"data": (X, Y), "groups": OWNERS}, r"Write group=…\."),
    ("fedal", {"data": FRAME, "label": "y", "groups": "site"}, r"Write group=…\."),
    ("fedal", {"data": FRAME, "target": "y", "group": "site"}, r"Write label=…\."),
    ("fedal", {"data": FRAME, "label": "yy"}, "only 'a', 'b'"),
    ("fedal", {"X": X, "y": Y}, r"data=\(X, y\)"),
    ("fedal", {"data": {"X": X, "y": Y}}, r"a tuple, data=\(X, y\)"),
    ("fedal", {"data": X}, r"arrays \(X, y\)"),
    ("fedal", {"data": "minst"}, "mean 'mnist'"),
    ("fedal", {"data": "none.csv"}, "there is no file or folder none.csv"),
    ("fedal", {"data": "data/none"}, "there is no file or folder data/none"),
    ("fedal", {"rounds": 1, "iterations": 1}, "rounds or iterations, not both"),
    ("fedal", {"engine": "bached"}, "engine.name"),
    ("mnist", {}, r"a data set, not a method: fedloom.run\('fedal', data='mnist'\)"),
    ("fed_avg", {}, "mean 'fedavg'"),
    ("standalone", {}, "mean 'local'"),
    ("xgboost", {}, "mean 'fedboost'"),
    ("splitnn", {}, "mean 'split'"),
    ("scaffold", {}, "fedloom list methods"),
]


@pytest.mark.parametrize(
    ("method", "settings", "said"), PYTHON, ids=[f"{m}-{[*s]}" for m, s, _ in PYTHON]
)
def test_a_mistake_in_python_gets_one_short_hint_in_its_words(
    method: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(FedloomError, match=said) as found:
        fedloom.run(method, **{"rounds": 1, **settings})
    assert "\n" not in str(found.value) and not re.search(r"-s |--\w", str(found.value))


SHELL = [
    (("run", "fedal", "-s", "alpha=0.5"), "Write data.options.alpha."),
    (("run", "fedal", "-s", "data.alpha=0.5"), "Write data.options.alpha."),
    (("run", "fedal", "-s", "params.leraning_rate=1"), "mean 'lr'"),
    (("run", "fedal", "-s", "models.pool=resnet,mlp"), "such as ['resnet', 'mlp']"),
    (("run", "fedal", "--alpha", "0.5"), "-s data.options.alpha=VALUE"),
    (("run", "fedal", "--lr", "0.5"), "write -s params.lr=VALUE\n"),
    (("run", "fedal", "--epochs", "5"), "write -s params.epochs=VALUE\n"),
    (("run", "fedal", "--dataset", "mnist"), "-s data.name=NAME"),
    (("run", "fedal", "--gpu"), "--device cuda"),
    (("run", "fedal", "--model", "mlp"), "-s models.pool=NAME"),
    (("run", "fedal", "--num-clients", "5"), "-s data.clients=NUMBER"),
    (("run", "fedal", "--n-jobs", "5"), "--workers NUMBER"),
    (("run", "fedal", "fedmd"), "use fedloom compare"),
    (("run", "mnist"), "fedloom run fedal -s data.name=mnist"),
    (("compare", "fedal", "--seeds", "x"), "a number of seeds, such as 5"),
    (("compare", "fedal", "--seeds", "2026"), "list the seeds themselves"),
    (("data", "none.csv"), "there is no file or folder none.csv"),
    (("help", "cmpare"), "mean 'compare'"),
]


@pytest.mark.parametrize(("words", "said"), SHELL, ids=[" ".join(words) for words, _ in SHELL])
def test_a_mistake_in_the_shell_gets_its_words(
    words: tuple[str, ...], said: str, command: Callable[..., Done]
) -> None:
    done = command(*words, code=2)
    assert said in done.stderr and "Traceback" not in done.stderr


def test_help_and_version_are_commands(command: Callable[..., Done]) -> None:
    assert command("version").stdout.strip() == fedloom.__version__
    shown = command("help").stdout
    for group in ("Experiments", "Your own data", "Methods and models", "Between organizations"):
        assert f"─ {group} ─" in shown
    assert "--iterations" in command("help", "compare").stdout


def test_a_config_and_a_table_come_through_standard_input(
    command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('method = "fedal"\nrounds = -1\n'))
    assert "rounds: must be greater" in command("run", "-", code=2).stderr
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(FRAME.to_csv(index=False).encode()))
    )
    shown = command("data", "-").stdout
    assert (
        "site" in shown and "save the rows as stdin.csv" in shown and 'name = "stdin.csv"' in shown
    )
    for words in (
        ("data", "-"),
        ("stats", "-"),
        ("trial", "-"),
        ("align", "-", "x.csv", "--id", "i", "--out", "o"),
    ):
        assert "standard input is empty" in command(*words, code=2).stderr  # which data has read
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BytesIO(FRAME.to_csv(index=False).encode()))
    )
    assert "stdin.csv: 3 owners" in command("stats", "-", "--label", "y", "--group", "site").stdout
    sweep = 'method = "fedmd"\nrounds = 1\n[sweep]\nover = { "params.lr" = [0.1] }\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(sweep))
    assert "in sweeps/sweep" in command("sweep", "-", "--plan").stdout


def test_a_missing_file_of_a_party_is_missing_and_not_unreadable(tmp_path: Path) -> None:
    from fedloom.data.tables import read_csv

    with pytest.raises(FedloomError, match="there is no file"):
        read_csv(tmp_path / "lab.csv")


def test_an_estimator_is_a_black_box_and_a_hub_dataset_a_table() -> None:
    small: dict[str, Any] = {"rounds": 0, "clients": 2, "partition": "iid", "public_rows": 10}
    found = fedloom.run("fedmd", data=(X, Y), models=RandomForestClassifier(5), **small)
    assert found.summary["architectures"][0].startswith("object:RandomForestClassifier")
    datasets = pytest.importorskip("datasets")
    hub = datasets.Dataset.from_pandas(FRAME, preserve_index=False)
    assert fedloom.run("local", data=hub, label="y", group="site", rounds=0).summary["clients"] == 3
    with pytest.raises(FedloomError, match=r"give one, such as data\['train'\]"):
        fedloom.run("local", data=datasets.DatasetDict(train=hub), label="y", rounds=0)


def test_words_of_others_name_what_exists() -> None:
    from fedloom.data.partitions import PARTITIONS
    from fedloom.experiment.config.data import DataConfig
    from fedloom.experiment.config.run import EngineConfig, ModelsConfig, RunConfig
    from fedloom.models import BLACK_BOXES, MODELS

    sections: tuple[Any, ...] = (
        RunConfig,
        DataConfig,
        EngineConfig,
        ModelsConfig,
        *(m.config for m in registry().values()),
    )
    known = {name for section in sections for name in section.model_fields}
    known |= {*registry(), *PARTITIONS, *MODELS, *BLACK_BOXES, "out", "progress", "mu"}
    known |= {option.name for scheme in PARTITIONS.values() for option in scheme.options}
    assert not {name for names in SAME.values() for name in names} - known
    assert meant("leraning_rate", ["lr", "tau"]) == "lr" and meant("xyz", ["lr"]) == ""


def test_sentences_of_the_shell_become_python() -> None:
    assert in_python("add --resume to continue") == "add resume=True to continue"
    assert in_python("add -s 'models.pool=[\"mlp\"]', or") == 'add models=["mlp"], or'
    entries = 'steps write in a file: [compare] methods = [{ method = "fedal", rounds = 2 }]'
    assert in_python(entries) == 'steps give methods=[{ "method": "fedal", "rounds": 2 }]'
    assert (
        in_python("x. Write data.clients or params.tau.")
        == 'x. Write clients=… or params={"tau": …}.'
    )
