"""A hundred further mistakes: each gets a sentence with its mend and exit status 2, before work
starts.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedloom
from fedloom.core.errors import ConfigError, FedloomError
from fedloom.deploy import export, load_model, push
from fedloom.support.paths import locked
from tests.command import Done
from tests.command import fedloom as command

__all__ = ["command"]

FILES = {
    "my.csv": "id,age,ill,site\n"
    + "".join(f"p{i},{i % 7},{'yes' if i % 2 else 'no'},{'abc'[i % 3]}\n" for i in range(60)),
    "empty.csv": "",
    "head.csv": "a,b,c\n",
    "twice.csv": "age,age,ill\n1,2,0\n",
    "notes.txt": "hello\n",
    "bad.toml": "method = fedal\n",
    "typo.toml": 'methd = "fedal"\n',
    "words.toml": 'method = "fedal"\nrounds = "ten"\n',
    "seed.toml": 'method = "fedal"\n[compare]\nmethods = ["fedal"]\nseed = [0]\n',
    "x.yaml": "method: fedal\n",
    "page.py": "METHODS = ()\n",
    "syntax.py": "def f(:\n",
    "needs.py": "import notapackage\n",
}
SHELL = [
    ("run fedal -s data.clients=0", "data.clients: must be greater than or equal to 1, not 0"),
    ("run fedal -s data.clients=three", "data.clients: must be an integer, not 'three'"),
    ("run fedal -s data.clients=100000", "use fewer clients"),
    ("run fedal --seed -1", "seed: must be greater than or equal to 0, not -1"),
    ("run fedal --seed 1.5", "Invalid value for '--seed'"),
    ("run fedal --rounds 1e3", "Invalid value for '--rounds'"),
    ("compare fedmd fedmd --plan", "two runs are called 'fedmd-seed0'"),
    ("run fedal --workers 0", "Invalid value for '--workers'"),
    ("run fedal -s params.lr=fast", "params.lr: must be a number, not 'fast'"),
    ("run fedal -s params.lr=-0.1", "params.lr: must be greater than 0, not -0.1"),
    ("run fedal -s params.lr", "dotted.key=value, not 'params.lr'"),
    ("run fedal -s =3", "dotted.key=value, not '=3'"),
    ("run fedal --out my.csv --rounds 1", "my.csv is a file; --out takes a folder"),
    ("run bad.toml", "bad.toml is not valid TOML"),
    ("run typo.toml", "Did you mean 'method'?"),
    ("run words.toml", "rounds: must be an integer, not 'ten'"),
    ("run seed.toml", "compare.seed: there is no such setting. Did you mean 'seeds'?"),
    ("run x.yaml", "neither a config (.toml) nor a method page (.py)"),
    ("run my.csv", "fedloom data my.csv writes the settings of a run"),
    ("run page.py", "end the page with METHODS"),
    ("run syntax.py", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    ("run needs.py", "No module named 'notapackage'"),
    ("run --method nothere.py", "nothere.py does not exist"),
    ("run fedal,fedmd", "separate methods by spaces"),
    ("run fedal -s data.name=my.csv -s data.label=sick", "has only 'id', 'age', 'ill', 'site'"),
    (
        "run fedal -s data.name=my.csv -s data.label=ill -s data.group=hospital",
        "has only 'id', 'age', 'ill', 'site'",
    ),
    ("run fedal -s data.name=cifar", "Did you mean 'cifar10'?"),
    ("run fedal -s data.name=https://x.org/a.csv", "download the file"),
    ("run fedal -s engine.name=gpu", "must be 'local', 'auto'"),
    ("run fedal -s data.unseen=5", "data.unseen: must be less than 1, not 5\n"),
    ("run fedal -s data.public_rows=100000", "public_rows must be below"),
    ("run fedal -s data.test_fraction=1.5", "must be less than 1, not 1.5"),
    ("run fedal -s data.options.alpha=0", "alpha must be a number above 0, not 0"),
    ("run fedal -s data.options.alhpa=1", "Did you mean 'alpha'?"),
    ("run fedal -s data.partition=pathological -s data.options.classes=99", "use fewer"),
    ("run split -s data.partition=iid", "split shares columns, not rows: leave it out"),
    ("run split -s data.options.alpha=1", "split shares columns, not rows: leave it out"),
    ("run fedal -s aggregate.rule=krumm", "must be 'mean', 'median'"),
    ("run fedal -s aggregate.secure=true", "set params.adv = 0"),
    ("run fedavg -s aggregate.rule=krum -s aggregate.f=5", "add clients, or lower aggregate.f"),
    ("run fedavg -s models.pool=[]", "models.pool: must have at least 1"),
    ("run fedavg -s models.pool=[forest]", "quote it in a shell"),
    ("run fedal -s evaluate.points=-1", "must be greater than or equal to 1, not -1"),
    ("run fedal -s topology.kind=rings", "must be 'full', 'regular', 'ring'"),
    ("run fedal -s faults.dropout=2", "must be less than or equal to 1, not 2"),
    ("run fedglm --rounds 1", "needs at least 2 rounds, not 1"),
    ("run fedal --preset trusted", "write -s preset=VALUE"),
    ("run fedal --epsilon 3", "write -s params.epsilon=VALUE"),
    ("run fedal --quite", "--quiet"),
    ("compare fedal fedal", "name each method and each seed once"),
    ("compare fedal fedmd --seeds 0,0", "name each method and each seed once"),
    ("compare fedal vs fedmd", "unknown method 'vs'. fedloom list methods names all."),
    ("compare fedal fedmb", "Did you mean 'fedmd'?"),
    ("compare fedal split", "compare methods of one kind"),
    ("compare fedal fedmd --seeds 3-1", "a number of seeds, such as 5"),
    ("compare fedal fedmd --seed 3", "write -s seed=VALUE"),
    ("compare --seeds 3", "Missing argument 'METHOD...'"),
    ("trial my.csv", "fedloom data my.csv lists the columns"),
    ("trial my.csv --label ill --group town", "has only 'id', 'age', 'ill', 'site'"),
    ("trial my.csv --label ill --group site --metric f1", "metric must be one of auc"),
    (
        "trial my.csv --label ill --group site --metric rmse",
        "for a label with 2 classes, not 'rmse'",
    ),
    ("trial my.csv --label ill --group site --budget 0", "budget must be above 0 seconds"),
    ("trial my.csv --label ill --group site --methods fedavg", "No such option"),
    ("trial my.csv my.csv --label ill", "name --id, the column that all files have"),
    ("data empty.csv", "it must have a header, and rows below it"),
    ("data head.csv", "must have rows below its header"),
    ("data twice.csv", "rename all but one"),
    ("data notes.txt", "must be a .parquet or .csv file"),
    ("data my.csv --lable ill", "No such option"),
    ("stats my.csv --label ill", "perhaps 'site'"),
    ("report nowhere", "nowhere has no result.json"),
    ("export nowhere", "name the folder that a run wrote"),
    ("list metods", "Did you mean 'methods'?"),
    ("copy fedal my.csv", "FILE must end in .py, not my.csv"),
    ("copy fedall x.py", "Did you mean 'fedal'?"),
    ("check my.csv", "name a file that ends in .py"),
    ("check nothere.py", "name the file of a method page"),
    ("sweep fedal", "has no table [sweep]"),
    ("node nowhere.toml", "fedloom certs writes one"),
    ("certs", "give the names of the nodes"),
    ("certs a/b", "such as hospital-a, not 'a/b'"),
    ("runs fedal", "there is no command 'runs'. Did you mean 'run'?\n"),
    ("quickstart", "write fedloom run quickstart"),
    ("fedavg --rounds 3", "write fedloom run fedavg"),
]


@pytest.fixture
def typed(tmp_path: Path, command: Callable[..., Done]) -> Callable[..., Done]:
    """The command, in a folder with `FILES`."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return command


@pytest.mark.parametrize(("line", "said"), SHELL, ids=[line for line, _ in SHELL])
def test_a_mistake_in_the_shell(line: str, said: str, typed: Callable[..., Done]) -> None:
    done = typed(*line.split(), code=2)
    assert said in done.stderr and "Traceback" not in done.stderr and not done.stdout
    assert len(done.stderr.rstrip().splitlines()) <= 4  # a usage error has four


X, Y = np.random.default_rng(0).normal(size=(60, 4)).astype("f"), np.arange(60) % 2
OWNERS = np.repeat(["a", "b", "c"], 20)
FRAME = pd.DataFrame(X, columns=list("abcd")).assign(y=Y, site=OWNERS)
ARRAYS: dict[str, Any] = {"data": (X, Y), "rounds": 1, "models": "mlp"}
run: Any = fedloom.run
compare: Any = fedloom.compare
trial: Any = fedloom.trial
load: Any = fedloom.load
split: Any = fedloom.split
stats: Any = fedloom.stats
read: Any = fedloom.read
Classifier: Any = fedloom.FederatedClassifier
Regressor: Any = fedloom.FederatedRegressor

PYTHON: list[tuple[Callable[[], object], str]] = [
    (lambda: run("fedal", seed="one"), "seed: must be an integer, not 'one'"),
    (lambda: run("fedal", rounds=2.5), "rounds: must be an integer, not 2.5"),
    (
        lambda: run(None),
        "run takes the name or file of a method, a Method or a RunConfig, not a NoneType",
    ),
    (lambda: run(fedloom.Party), "not the class Party"),
    (lambda: run("fedal", round=3), "Did you mean 'rounds'?"),
    (lambda: run("fedal", params=[1]), "params: must be a mapping"),
    (lambda: run("fedavg", aggregate="median"), "aggregate: must be a mapping"),
    (
        lambda: run("fedavg", local={"optimizer": torch.optim.Adam}),
        "local.optimizer: must be 'sgd' or 'adam'",
    ),
    (lambda: run("fedal", progress="yes", rounds=1), "progress must be True, or a function"),
    (lambda: run("fedal", engine="multiprocess"), "must be 'local', 'auto'"),
    (lambda: run("fedal", data="https://x.org/a.csv"), "download the file"),
    (lambda: run("fedal", **{**ARRAYS, "data": (X, Y[:5])}), "give one label for each row"),
    (lambda: run("fedal", **{**ARRAYS, "data": (X, Y * 0)}), "it needs at least 2 classes"),
    (lambda: run("fedal", **{**ARRAYS, "data": (X, None)}), "must have one value for each row"),
    (
        lambda: run("fedal", **{**ARRAYS, "data": (np.full((60, 1), "a"), Y)}),
        "encode categories first",
    ),
    (lambda: run("fedal", **{**ARRAYS, "data": (np.where(X > 2, np.nan, X), Y)}), "impute or drop"),
    (
        lambda: run("fedal", **{**ARRAYS, "data": torch.utils.data.DataLoader(FRAME)}),
        "not a DataLoader",
    ),
    (lambda: run("fedal", data=FRAME, label="y", group="Site"), "has only 'a', 'b'"),
    (lambda: run("fedal", data=FRAME, label=FRAME["y"]), "the name of one column, not a Series"),
    (lambda: run("fedal", group=OWNERS[:10], **ARRAYS), "group has 10 owners for 60 rows"),
    (lambda: run("fedal", group=OWNERS, clients=5, **ARRAYS), "use fewer clients"),
    (lambda: run("fedavg", **{**ARRAYS, "models": nn.Linear(9, 2)}), "correct its forward"),
    (
        lambda: run("fedavg", **{**ARRAYS, "models": nn.Linear(4, 1)}),
        "must return logits of shape (2, 2)",
    ),
    (
        lambda: run("fedmd", clients=3, **{**ARRAYS, "models": ["mlp", "mlp"]}),
        "2 networks for 3 clients",
    ),
    (lambda: run("fedavg", **{**ARRAYS, "models": {"a": 1}}), "models.a: there is no such setting"),
    (lambda: compare("fedal"), "list several methods, such as ['fedal', 'local']"),
    (lambda: compare([]), "must have at least 1"),
    (
        lambda: compare([1, 2]),
        "an entry of methods is a name, a file, a Method or a mapping, not a int",
    ),
    (lambda: compare({"fedal"}), "methods must be a list"),
    (lambda: compare(["fedal", "fedmd"], seeds=2.5), "seeds must be a number of seeds, or a list"),
    (lambda: compare(["fedal", "fedmd"], seeds="many"), "a number of seeds, such as 5"),
    (lambda: compare([{"method": "fedal", "parms": {}}]), "Did you mean 'params'?"),
    (lambda: read(3), "read takes the name or file of an experiment, not a int"),
    (lambda: read("none.toml"), "there is no file none.toml"),
    (lambda: load("digit"), "Did you mean 'digits'?"),
    (lambda: load(None), "load takes the name or path of a data set as text"),
    (
        lambda: split("digits", clients=3, seed=0),
        "split takes a data set that load returned, not a str",
    ),
    (lambda: split(load("digits"), clients=0, seed=0), "clients must be at least 1, not 0"),
    (
        lambda: split(load("digits"), clients=3, seed=0, partition="dirichlt"),
        "Did you mean 'dirichlet'?",
    ),
    (lambda: stats((X, Y), group=OWNERS), "give a data frame, and the column's name as group"),
    (lambda: stats(FRAME, label="yy", group="site"), "has only 'a', 'b'"),
    (lambda: trial(FRAME, label="y"), "perhaps 'site'"),
    (lambda: trial((X, Y), group=["a"] * 60), "at least 2 owners"),
    (
        lambda: trial((X, Y), group=OWNERS, methods="fedglm"),
        "methods must be a list, such as ['fedglm']",
    ),
    (lambda: trial((X, Y), group=OWNERS, methods=["fedavgg"]), "Did you mean 'fedavg'?"),
    (lambda: trial((X, Y), group=OWNERS, alone=("xgb",)), "alone must name some of"),
    (lambda: trial((X, Y), group=OWNERS, metric="F1"), "metric must be one of auc"),
    (lambda: trial((X, Y), group=OWNERS, worth=5), "worth must be above 0 and below 1, not 5"),
    (lambda: load_model("nofolder"), "name the folder of one model"),
    (lambda: push("nofolder", "a/b"), "name the folder of one model"),
    (lambda: export("nofolder"), "name the folder that a run wrote"),
    (lambda: Classifier("fedavgg").fit(X, Y), "Did you mean 'fedavg'?"),
    (lambda: Classifier("split").fit(X, Y), "choose a method of rows"),
    (lambda: Classifier("fedglm", iterations=5).fit(X, Y), "needs at least 2 rounds"),
    (lambda: Classifier(models="mpl").fit(X, Y), "Did you mean 'mlp'?"),
    (lambda: Classifier(params={"learning_rate": 1}).fit(X, Y), "Did you mean 'lr'?"),
    (lambda: Classifier(settings={"lr": 1}).fit(X, Y), 'Write params={"lr": …}'),
    (lambda: Regressor().fit(X, np.where(Y, "yes", "no")), "y must have numbers, not text"),
]


@pytest.mark.parametrize(("wrong", "said"), PYTHON, ids=[said for _, said in PYTHON])
def test_a_mistake_in_python(
    wrong: Callable[[], object], said: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FedloomError, ValueError)) as found:
        wrong()
    text = str(found.value)
    assert said in text and "\n" not in text and "--" not in text and len(text) < 500


SMALL = [
    "--rounds",
    "2",
    "-s",
    "data.clients=2",
    "-s",
    "models.pool=mlp",
    "-s",
    "evaluate.points=1",
    "-s",
    "data.public_rows=20",
    "--quiet",
]


def test_a_full_disk_and_a_folder_that_cannot_be_made(
    typed: Callable[..., Done], monkeypatch: Any
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/config.toml")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        said = typed("run", "fedmd", *SMALL, "--out", "run", code=2).stderr
    hint = "free some space and repeat the command, a run with --resume"
    assert said == f"error  No space left on device: run/config.toml; {hint}\n"
    assert (
        "name another file or folder"
        in typed("run", "fedmd", *SMALL, "--out", "/proc/x", code=2).stderr
    )


def test_an_interrupted_run_resumes_and_a_folder_has_one_run_at_a_time(
    typed: Callable[..., Done], tmp_path: Path, monkeypatch: Any
) -> None:
    from fedloom.experiment.run import session

    words = ("run", "fedmd", *SMALL, "--out", "run")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_round", interrupted)
        assert "Traceback" not in typed(*words, code=130).stderr
    assert "add --resume to continue its run" in typed(*words, code=2).stderr
    with locked(tmp_path / "run" / ".running") as free:
        assert free
        assert "another process is running in run" in typed(*words, "--resume", code=2).stderr
    whole = typed(*words, "--resume").stdout
    assert (
        whole == typed("run", "fedmd", *SMALL, "--out", "again").stdout
        and not (tmp_path / "run/.running").exists()
    )
    other = typed(*words, "--resume", "--seed", "1", code=2).stderr
    assert "another configuration, other data or another version of fedloom" in other
    with pytest.raises(ConfigError, match="add resume=True"):
        run("fedmd", out="run", rounds=1)


def test_results_have_no_other_keys() -> None:
    found = fedloom.api.CompareResult(differences=[])
    with pytest.raises(KeyError, match="Did you mean 'differences'"):
        found["diffs"]
    assert found.get("diffs") is None and sys.getsizeof(found)
