"""Every recipe that a trial writes, and every method, exports: the folders predict new rows as the
run does, or one sentence says why there is none.
"""

from __future__ import annotations

import contextlib
import csv
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedloom
from fedloom import methods
from fedloom.cli import main
from fedloom.core.errors import CheckpointError, ModelError
from fedloom.deploy import export, load_model
from fedloom.deploy.export_models import compared_rows
from fedloom.deploy.folder import digest
from fedloom.deploy.models import MODEL, NETWORK, WEIGHTS
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import read
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.session import fingerprint
from fedloom.experiment.run.trained import TrainedModels
from fedloom.experiment.trial.candidates import OWN_KINDS, candidates, obstacle
from tests.engines.test_every_method import run_of
from tests.exported import predict

SITES = ("east", "north", "Süd/1")
FILLS = ("indicator", "median", "most-frequent", "refuse")
QUICK = {"bins": 16, "depth": 3, "lot": 4}
CODE = {"fedproto"}
"""Methods whose predictions are more than a network or a table's models: their folders' code is to
be trusted.
"""


NO_FOLDER = {
    "stats": "its method learns no model of rows: run another one, such as fedforest",
    "fens": "cannot be traced (.*): predict in Python, with the result's models",
}
"""Methods whose clients have no folder, with the reason."""


def write_table(path: Path, task: str, gaps: bool, rich: bool) -> dict[str, np.ndarray]:
    """A table of three owners; `rich` has words, true and false, and dates."""
    rng, n = np.random.default_rng(0), 90
    age, dose = rng.normal(50, 9, n).round(1), rng.integers(0, 5, n)
    told = age / 9 + dose + rng.normal(size=n)
    columns: dict[str, Any] = {"age": age.astype(object), "dose": dose}
    if rich:
        columns["ward"] = rng.choice(["x", "y", "z", ""], n)
        columns["smoker"] = rng.choice(["True", "False"], n)
        columns["seen"] = np.array([f"20{10 + k % 14}-0{1 + k % 9}-{11 + k % 17}" for k in dose])
    # constant at the first owner
    columns["level"] = np.where(np.arange(n) % 3 == 0, 1, rng.normal(size=n).round(2))
    if gaps:
        columns["age"][rng.random(n) < 0.15] = ""
    columns["site"] = np.array(SITES)[np.arange(n) % 3]
    columns["y"] = told.round(2) if task == "number" else np.where(told > 8, "ill", "well")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(values.tolist() for values in columns.values()), strict=True))
    return columns


def recipes() -> list[Any]:
    """Each kind of recipe with each task, and by turns with each filling of gaps and each kind of
    column.
    """
    found: list[Any] = []
    for task in ("classes", "number"):
        names = [
            name
            for name, one in methods.registry().items()
            if not obstacle(one, 3, task)
            and name not in ("fedcox", *NO_FOLDER)
            and ("raw rows" in one.needs or one.trial_rank)
        ]
        kinds = [(c.method, dict(c.params), c.model) for c in candidates(names, ["mlp"], [0.1], 30)]
        kinds += [
            (method, {**params, "own": own, "own_weight": weight}, model)
            for method, params, model in kinds
            if "own" in methods.named(method).config.model_fields
            and "mix" not in methods.named(method).fixed
            for own, weight in [
                (sorted({*OWN_KINDS.values()}), [0.3, 0.5, 0.8]),
                (["boosting"], 0.25),
            ]
        ]
        for k, (method, params, model) in enumerate(kinds):
            missing = FILLS[k % 4]
            fields = methods.named(method).config.model_fields
            few = {name: value for name, value in QUICK.items() if name in fields}
            settings = {
                name: 3 if value is None else value for name, value in {**params, **few}.items()
            }
            what = f"{method}-{task}-{missing}-{k}"
            found.append(pytest.param(task, method, settings, model, missing, k % 3 > 0, id=what))
    return found


@pytest.mark.parametrize(("task", "method", "params", "model", "missing", "rich"), recipes())
def test_the_recipe_of_a_trial_predicts_new_rows_as_its_run(
    task: str,
    method: str,
    params: dict[str, Any],
    model: str,
    missing: str,
    rich: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In Python, by the command and by `predict.py`, of a file without label, with its columns in
    another order.
    """
    columns = write_table(tmp_path / "t.csv", task, missing != "refuse", rich)
    data: dict[str, Any] = {"name": str(tmp_path / "t.csv"), "label": "y", "group": "site"}
    data |= {"task": task, "public_rows": 0, "missing": missing}
    models = {"pool": [model]} if model else {}
    fedloom.run(method, data=data, params=params, models=models, rounds=2, out=tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "out")
    assert [*done.sizes][:3] == ["Süd_1", "east", "north"]
    whole = methods.named(method).every_row  # a regression holds no rows out
    assert done.tried > 0 and done.on == ("training rows" if whole else "test rows")
    assert {*done.skipped} <= {"server"}

    plan = build(read(str(tmp_path / "run" / "config.toml")).run)
    saved, _ = checkpoint.newest(tmp_path / "run" / "checkpoints", fingerprint(plan))
    assert saved is not None and plan.data.split is not None
    broadcast: Any = {}
    if plan.server is not None:
        plan.server.load(saved[1][plan.planner.server_name(plan)])
        broadcast = plan.server.broadcast()
    rows = plan.data.split.test
    names = [name for name in columns if name not in ("site", "y")][::-1]
    with (tmp_path / "new.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["patient", *names])
        writer.writerows([f"p{row}", *(columns[name][row] for name in names)] for row in rows)
    for i, name in enumerate([*done.sizes][:3]):
        party = TrainedModels(plan, saved[1]).party(i)
        with party.scratch():
            mode = next(iter(plan.cfg.eval_modes), "")
            party.prepare(eval_mode=mode, broadcast=broadcast)
            out = party.infer(party.context.tests["test"].every).double()
        target = plan.data.target
        want = torch.softmax(out, -1).numpy() if target is None else target.in_unit(out.numpy())
        # a network scales the rows of another owner otherwise
        own = np.array(
            [bool(not model or columns["site"][row].startswith(name[:3])) for row in rows]
        )
        folder = tmp_path / "out" / name
        trust = [NETWORK] if method in CODE else []
        found = load_model(folder, trust=trust).predict(tmp_path / "new.csv")
        np.testing.assert_allclose(found[own], want[own], rtol=1e-4, atol=1e-4)
        text = predict(folder, tmp_path / "new.csv")
        np.testing.assert_allclose(
            numbers(text, found.shape[1])[own], want[own], rtol=1e-4, atol=1e-4
        )
        if name == "east":
            line = f"predict {folder} {tmp_path / 'new.csv'} --out {tmp_path / 'p.csv'}"
            call(line + " --trust network.py" * bool(trust), monkeypatch)
            text = (tmp_path / "p.csv").read_text()
            np.testing.assert_allclose(
                numbers(text, found.shape[1])[own], want[own], rtol=1e-4, atol=1e-4
            )


def numbers(text: str, count: int) -> np.ndarray:
    """The last numbers of each row of a CSV file."""
    _, *lines = csv.reader(text.splitlines())
    return np.array([[float(word) for word in line[-count:]] for line in lines])


def call(line: str, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
    monkeypatch.setattr(sys, "argv", ["fedloom", *line.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code or 0) == code


@pytest.mark.parametrize("name", methods.registry())
def test_every_method_exports_or_says_why_not(name: str, tmp_path: Path) -> None:
    """`export` compares each folder with the run."""
    run = run_of(name, "none").model_dump(mode="json", exclude_unset=True)
    fedloom.run(run.pop("method"), out=tmp_path / "run", **run)
    if name in NO_FOLDER:
        with (
            pytest.raises(CheckpointError, match=NO_FOLDER[name])
            if name == "stats"
            else contextlib.nullcontext()
        ):
            done = export(tmp_path / "run", tmp_path / "out")
            reasons = [why for name, why in done.skipped.items() if name != "server"]
            assert reasons and all(re.search(NO_FOLDER[name], why) for why in reasons)
        return
    done = export(tmp_path / "run", tmp_path / "out")
    assert {*done.skipped} <= {"server"} and len(done.sizes) > 1 and done.tried > 0
    assert {*done.sizes} == {path.name for path in (tmp_path / "out").iterdir()}


# -- runs without test rows, without a folder, or with a folder for some ---------------------------


def test_no_folder_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_table(tmp_path / "t.csv", "classes", gaps=False, rich=False)
    data = {"name": str(tmp_path / "t.csv"), "label": "y", "group": "site"}
    fedloom.run("stats", data=data, rounds=1, out=tmp_path / "run")
    call(f"export {tmp_path / 'run'} --out {tmp_path / 'out'}", monkeypatch, code=2)
    out, err = capsys.readouterr()
    assert "verified" not in out and not (tmp_path / "out").exists()
    for name in ("Süd_1", "east", "north"):
        assert f"no folder for {name}: {NO_FOLDER['stats']}" in " ".join(err.split())


@pytest.mark.parametrize("method", ["fedavg", "fedforest"])
def test_training_rows_are_named_where_there_are_no_test_rows(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    party = compared_rows
    monkeypatch.setattr(
        "fedloom.deploy.export_models.compared_rows", lambda one: party(without_tests(one))
    )
    write_table(tmp_path / "t.csv", "classes", gaps=False, rich=False)
    data = {"name": str(tmp_path / "t.csv"), "label": "y", "group": "site", "public_rows": 0}
    fedloom.run(method, data=data, rounds=2, out=tmp_path / "run")
    call(f"export {tmp_path / 'run'} --out {tmp_path / 'out'}", monkeypatch)
    assert re.search(r"match the run on \d\d training rows", capsys.readouterr().out)


def without_tests(party: Any) -> Any:
    return SimpleNamespace(context=replace(party.context, tests={}))


def test_a_party_without_rows_has_no_folder() -> None:
    with pytest.raises(ModelError, match=r"no row on which its folder can be compared"):
        compared_rows(SimpleNamespace(context=SimpleNamespace(tests={}, data=None)))  # type: ignore[arg-type]


def test_a_client_without_a_folder_does_not_keep_others_from_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one has a black box that is no tree."""
    data = {"name": "breast_cancer", "clients": 4, "partition": "iid", "public_rows": 40}
    models = {"each": ["knn", "forest", "boosting", "logistic"]}
    fedloom.run("fedal", data=data, models=models, rounds=30, out=tmp_path / "run")
    done = export(tmp_path / "run")
    assert [*done.sizes] == ["client-1", "client-2", "client-3"] and done.tried > 100
    assert "black box (knn), which cannot be written" in done.skipped["client-0"]


@pytest.mark.parametrize("task", ["classes", "number"])
def test_a_black_box_that_comes_first(task: str, tmp_path: Path) -> None:
    write_table(tmp_path / "t.csv", task, gaps=True, rich=True)
    data = {"name": str(tmp_path / "t.csv"), "label": "y", "clients": 2, "partition": "iid"}
    data |= {"missing": "indicator", "public_rows": 20, "drop": ["site"], "task": task}
    run: dict[str, Any] = {"models": {"each": ["forest", "mlp"]}, "rounds": 30}
    fedloom.run("fedal", data=data, out=tmp_path / "run", **run)
    done = export(tmp_path / "run")
    assert [*done.sizes] == ["client-0", "client-1"]
    found = load_model(done.folder / "client-0").predict(tmp_path / "t.csv")
    text = predict(done.folder / "client-0", tmp_path / "t.csv")
    np.testing.assert_allclose(numbers(text, found.shape[1]), found, rtol=1e-5, atol=2e-6)


def test_trees_that_lie_are_refused(tmp_path: Path) -> None:
    """A child that is its own parent would be walked forever."""
    data = {"name": "breast_cancer", "clients": 2, "public_rows": 0}
    fedloom.run("fedforest", data=data, params=QUICK, rounds=1, out=tmp_path / "run")
    folder = export(tmp_path / "run").folder / "server"
    state = load_file(folder / WEIGHTS)
    state["bins0_left"][0] = 0
    save_file(state, folder / WEIGHTS)
    text = (folder / WEIGHTS).read_bytes()
    values = json.loads((folder / MODEL).read_text())
    values["state_sha256"], values["state_bytes"] = digest(text), len(text)
    (folder / MODEL).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="children must come after their node"):
        load_model(folder)
    values["table"]["columns"] = values["table"]["columns"][1:]
    (folder / MODEL).write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="its columns do not give the 30 numbers"):
        load_model(folder)
