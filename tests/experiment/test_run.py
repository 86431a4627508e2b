"""A run on real digits: what it writes, what it repeats, what it survives."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedloom
from fedloom import report
from fedloom.core.context import PublicSet
from fedloom.core.errors import CheckpointError, ConfigError, DataError, MethodError, ModelError
from fedloom.engines import LocalEngine
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check, read
from fedloom.experiment.run import checkpoint
from fedloom.experiment.run.compare import execute_all
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.evaluate import agreement
from fedloom.experiment.run.execute import Stopped, agree, execute
from fedloom.experiment.run.session import Session
from fedloom.methods import registry
from fedloom.support import paths
from tests.engines.test_every_method import THOROUGH

SMALL: dict[str, Any] = {
    "rounds": 6,
    "params": {"tau": 2, "batch_size": 8},
    "data": {"clients": 4, "public_rows": 100, "own_test_rows": 30},
    "models": {"pool": ["mlp", "linear", "cnn-small"], "norm": "batch"},
    "evaluate": {"points": 3},
}


def small(**changes: Any) -> Any:
    return check({"run": {**SMALL, **changes}}).run


def metrics(folder: Path) -> list[list[str]]:
    with (folder / "metrics.csv").open() as file:
        return list(csv.reader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    return folder, execute(small(), folder).summary


def test_the_folder_holds_what_is_promised(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = whole
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.toml",
        "environment.json",
        "partition.json",
        "metrics.csv",
        "ledger.csv",
        "result.json",
    } <= names
    assert len(list((folder / "checkpoints").iterdir())) == 2
    assert json.loads((folder / "result.json").read_text()) == summary
    keys = (
        "method preset seed rounds dataset clients accuracy chance bytes seconds failures "
        "state_sha256"
    )
    assert set(keys.split()) <= set(summary)
    assert (summary["method"], summary["rounds"], summary["dataset"], summary["clients"]) == (
        "fedal",
        6,
        "digits",
        4,
    )
    each = summary["accuracy"]["per_client"]
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(each))
    assert summary["accuracy"]["std"] == pytest.approx(np.std(each))
    assert summary["bytes"]["up"] == 10 * 8 * 4 * 4 * 2 * 6
    assert summary["bytes"]["down"] == 2 * summary["bytes"]["up"]
    assert read(str(folder / "config.toml")).run == small()
    text = "".join(
        (folder / n).read_text() for n in ("environment.json", "config.toml", "result.json")
    )
    assert str(Path.cwd()) not in text


def test_metrics_are_one_tidy_table(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = whole
    header, *rows = metrics(folder)
    assert header == ["round", "iteration", "stage", "party", "metric", "value"]
    assert all(len(r) == 6 and float(r[5]) == float(r[5]) for r in rows)
    assert {r[2] for r in rows} == {"start", "local", "transfer"}
    final = {(r[4], r[3]): float(r[5]) for r in rows if r[0] == "6" and r[2] == "transfer"}
    assert final["accuracy mean", ""] == summary["accuracy"]["mean"]
    assert final["accuracy", "client-3"] == summary["accuracy"]["per_client"][3]
    assert {"discriminator loss", "discriminator accuracy"} <= {
        m for m, p in final if p == "server"
    }
    assert {"gradient norm kd", "gradient norm adv", "gradient norm lf", "agreement"} <= {
        m for m, _ in final
    }
    every = {r[0] for r in rows if r[4] == "discriminator loss"}
    assert every == {str(t) for t in range(1, 7)}  # diagnostics of each round
    looked = {r[0] for r in rows if r[4] == "accuracy mean"}
    assert looked == {"0", "2", "4", "6"}


def test_the_same_config_gives_the_same_bits(whole: tuple[Path, dict[str, Any]]) -> None:
    again = execute(small()).summary
    assert again["state_sha256"] == whole[1]["state_sha256"]
    assert again["accuracy"] == whole[1]["accuracy"]
    assert execute(small(seed=1)).summary["state_sha256"] != again["state_sha256"]


def test_the_strict_engine_gives_the_same_bits(whole: tuple[Path, dict[str, Any]]) -> None:
    strict = execute(small(engine={"name": "isolated"})).summary
    assert strict["state_sha256"] == whole[1]["state_sha256"]
    assert strict["bytes"] == whole[1]["bytes"]


def test_methods_share_splits_weights_and_batches() -> None:
    runs = {n: execute(small(method=n, rounds=0)) for n in ("fedal", "fedmd", "local")}
    assert len({r.summary["public_sha256"] for r in runs.values()}) == 1
    # initial weights
    assert len({tuple(r.summary["accuracy"]["per_client"]) for r in runs.values()}) == 1
    first = []  # and batches: until something is learned from others, the methods are one
    for name in ("fedal", "fedmd-lf", "local"):
        rows = execute(
            small(method=name, rounds=1, evaluate={"points": 1}, params={"tau": 1, "batch_size": 8})
        ).metrics
        first.append([r[5] for r in rows if r[2] == "local" and r[4] in ("accuracy", "loss mean")])
    assert first[0] == first[1] == first[2] and len(first[0]) == 5


@pytest.mark.parametrize("rounds_done", [1, 3, 5])
def test_a_stopped_run_resumes_to_the_same_bits(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, rounds_done: int
) -> None:
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == rounds_done

    with pytest.raises(Stopped):
        execute(small(), tmp_path, stop=stop)
    resumed = execute(small(), tmp_path, resume=True).summary
    assert resumed["state_sha256"] == whole[1]["state_sha256"]
    assert metrics(tmp_path) == metrics(whole[0])
    assert (tmp_path / "ledger.csv").read_text() == (whole[0] / "ledger.csv").read_text()


def test_the_folder_s_own_config_resumes_its_run(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Also where the file says the same in other words: "none", and a preset spelled out."""
    run = small(preset="paper", params={"tau": 2, "batch_size": 8, "gradient_cap": None})
    with pytest.raises(Stopped):
        execute(run, tmp_path, stop=lambda: True)
    resumed = execute(read(str(tmp_path / "config.toml")).run, tmp_path, resume=True).summary
    assert (
        resumed["state_sha256"] == execute(run).summary["state_sha256"] != whole[1]["state_sha256"]
    )


def test_resuming_a_finished_run_changes_nothing(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    execute(small(), tmp_path)
    again = execute(small(), tmp_path, resume=True).summary
    assert again["state_sha256"] == whole[1]["state_sha256"]
    assert metrics(tmp_path) == metrics(whole[0])


COMMAND = [sys.executable, "-m", "fedloom", "run", "fedal", "--resume"]
SETTINGS = [
    "rounds=60",
    "params.tau=2",
    "data.clients=4",
    "models.pool=['mlp','linear']",
    "evaluate.points=40",
]


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_as_if_unbroken(tmp_path: Path) -> None:
    flags = [x for s in SETTINGS for x in ("-s", s)]
    unbroken = execute(read("fedal", SETTINGS).run, tmp_path / "a").summary
    folder = tmp_path / "b"
    kills = 0
    for checkpoints in (1, 8, 20):  # kill right after so many have been written
        process = subprocess.Popen(
            [*COMMAND, *flags, "--out", str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        goal = 60 * checkpoints // 40
        while process.poll() is None:
            done = [int(p.stem.split("-")[1]) for p in folder.glob("checkpoints/round-*.ckpt")]
            if max(done, default=0) >= goal:
                process.send_signal(signal.SIGKILL)
                kills += process.wait() == -signal.SIGKILL
                break
            time.sleep(0.002)
    assert kills >= 2
    assert not (folder / "result.json").exists()
    subprocess.run([*COMMAND, *flags, "--out", str(folder)], check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "result.json").read_text())
    assert result["state_sha256"] == unbroken["state_sha256"]
    assert metrics(folder) == metrics(tmp_path / "a")


def test_a_torn_checkpoint_is_passed_over_and_a_foreign_one_refused(
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fedloom.experiment.run.session.SAVE_RATIO", 0)  # at every milestone
    execute(small(), tmp_path)
    older, newest = sorted((tmp_path / "checkpoints").iterdir())
    newest.write_bytes(newest.read_bytes()[:-100])
    resumed = execute(small(), tmp_path, resume=True).summary
    assert resumed["state_sha256"] == whole[1]["state_sha256"]
    assert "torn" in caplog.text
    with pytest.raises(CheckpointError, match="another configuration"):
        execute(small(seed=5), tmp_path, resume=True)
    for path in (older, newest):
        path.write_bytes(b"PK\x03\x04 not a checkpoint at all, but long enough to hold a digest")
    with pytest.raises(CheckpointError, match="is damaged"):
        execute(small(), tmp_path, resume=True)


def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    import hashlib

    from fedloom.core import message

    data = message.encode({"round": 3})
    body = len(data).to_bytes(8, "little") + data
    path = tmp_path / "round-000000003.ckpt"
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(CheckpointError, match="is not a fedloom checkpoint"):
        checkpoint.load(path, "x")


def test_an_atomic_write_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    paths.write_atomically(path, b"old")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        paths.write_atomically(path, b"new and longer")
    assert path.read_bytes() == b"old"


def test_links_in_a_folder_of_somebody_elses_are_replaced(tmp_path: Path) -> None:
    """Such as that of a run that was sent: a report of it must not write where a link
    in it leads.
    """
    execute(small(rounds=1), tmp_path / "run")
    (precious := tmp_path / "precious").write_text("mine")
    for name in ("report.html", ".report.html.draft", ".live.json.draft"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(precious)
    report.write(tmp_path / "run")
    paths.replace_text(tmp_path / "run" / "live.json", "{}")
    assert (
        precious.read_text() == "mine" and "<html" in (tmp_path / "run" / "report.html").read_text()
    )
    assert not any(path.is_symlink() for path in (tmp_path / "run").iterdir())


def test_faults_are_counted_and_a_faulty_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    faults = {"dropout": 0.1, "nan": 0.1, "crash": 0.1, "late": 0.1}
    a = execute(small(faults=faults), tmp_path / "a")
    assert a.summary["failures"] > 5
    assert set(a.summary["failure_reasons"]) >= {"dropped out", "raised", "late"}
    with pytest.raises(Stopped):
        execute(small(faults=faults), tmp_path / "b", stop=lambda: True)
    b = execute(small(faults=faults), tmp_path / "b", resume=True)
    assert b.summary["state_sha256"] == a.summary["state_sha256"]
    assert b.summary["failure_reasons"] == a.summary["failure_reasons"]
    assert "Crash" in (tmp_path / "a" / "tracebacks.log").read_text()


def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for changes, error in (
        ({"data": {"public_rows": 10_000}}, DataError),
        ({"data": {"clients": 5000}}, DataError),
        ({"data": {"public_rows": 0}}, ConfigError),
        ({"data": {"name": "wine", "public_rows": 20}, "models": {"pool": ["lenet5"]}}, ModelError),
    ):
        with pytest.raises(error):
            execute(small(**changes), tmp_path / "x")
        assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="resume=True"):
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        fedloom.run("fedal", out=tmp_path / "full")


@pytest.mark.each_time(*THOROUGH, "fedboost", "fedglm")
@pytest.mark.parametrize("name", registry())
def test_every_method_runs_with_its_own_defaults(name: str) -> None:
    """Rows and rounds are few, for speed; all else is what the name alone gives."""
    method = registry()[name]
    few_of = {"pretrain": 1, "pretrain_rounds": 1, "local_rounds": 1}
    short: dict[str, Any] = {
        key: number for key, number in few_of.items() if key in method.config.model_fields
    }
    rounds = max(2, method.configure(params=short).min_rounds)
    few: dict[str, Any] = {"test_fraction": 0.8, "test_rows": 60}
    if name == "fedcox":  # which needs two classes and a time
        few = {"name": "breast_cancer", "test_fraction": 0.5, "clients": 10}
        short = {"time": "mean area", "event": "benign", "l2": 1.0}
    result, columns = (
        fedloom.run(name, rounds=rounds, data=few, params=short),
        method.setting == "vertical",
    )  # four parties, and one answer of all
    assert result.summary["clients"] == (4 if columns else 10)
    assert len(result.summary["accuracy"]["per_client"]) == (1 if columns else 10)
    assert result.summary["failures"] == 0
    every = {r[0] for r in result.rows if r[4] == ("balanced accuracy" if columns else "agreement")}
    assert every == set(range(rounds + 1))  # every round, unless it is asked otherwise


@pytest.mark.parametrize("data", ["wine", "breast_cancer"])
def test_tables_work_too(data: str) -> None:
    result = fedloom.run(
        "fedal", iterations=60, data={"name": data, "clients": 4, "public_rows": 30}
    )
    assert result.accuracy > result.summary["chance"]


def test_a_client_with_another_public_set_is_refused() -> None:
    run_plan = build(small())
    contexts = [make.args[1] for make in run_plan.clients]
    other = PublicSet(contexts[1].public.rows, 0, "0123456789abcdef0123456789abcdef")
    parties = [
        run_plan.method.client(run_plan.cfg, replace(s, public=other) if s.id == 1 else s)
        for s in contexts
    ]
    with pytest.raises(
        DataError, match=r"client-1 holds different public rows: their digest is 0123456789abcdef…"
    ):
        agree(LocalEngine(parties), run_plan.data.public_digest)


def test_data_that_changed_is_not_resumed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    rng = np.random.default_rng(0)
    lines = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in rng.normal(size=(200, 2))]
    pytest.importorskip("datasets")
    table.write_text("\n".join(["a,b,label", *lines]))
    run = small(
        data={"name": str(table), "clients": 3, "public_rows": 20}, models={"pool": ["mlp"]}
    )
    with pytest.raises(Stopped):
        execute(run, tmp_path / "run", stop=lambda: True)
    table.write_text("\n".join(["a,b,label", *reversed(lines)]))
    with pytest.raises(CheckpointError, match="other data"):
        execute(run, tmp_path / "run", resume=True)


def test_a_folder_of_other_things_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="has files but no run to resume"):
        fedloom.run("fedal", out=tmp_path, resume=True)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_client_that_diverges_ends_no_run(tmp_path: Path) -> None:
    """All weights become NaN; the run goes on, says so, and has a report."""
    from fedloom import report

    result = execute(small(params={"tau": 2, "batch_size": 8, "lr": 1e30}), tmp_path)
    assert result.summary["failure_reasons"]["not finite"] > 0
    assert report.write(tmp_path).is_file()
    assert (
        execute(
            small(params={"tau": 2, "batch_size": 8, "lr": 1e30}), tmp_path, resume=True
        ).summary["rounds"]
        == 6
    )


def test_a_comparison_by_its_name_from_python() -> None:
    changes: dict[str, Any] = {
        "iterations": 5,
        "models": {"pool": ["linear"]},
        "data": {"clients": 3},
        "evaluate": {"points": 1},
    }
    found = fedloom.compare("quickstart", seeds=[4], **changes)
    assert [(m["name"], m["seeds"]) for m in found["methods"]] == [
        ("fedal", [4]),
        ("fedmd", [4]),
        ("local", [4]),
    ]
    with pytest.raises(ConfigError, match="quickstart is a comparison"):
        fedloom.run("quickstart")
    with pytest.raises(ConfigError, match="fedal is a single run"):
        fedloom.compare("fedal")


def test_a_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="engine: device 'cuda:77' is not available here"):
        small(engine={"device": "cuda:77"})


def test_agreement_counts_equal_pairs() -> None:
    predicted = np.array([[0, 1, 2], [0, 1, 0], [0, 2, 1]])
    pairs = [(a == b).mean() for i, a in enumerate(predicted) for b in predicted[i + 1 :]]
    assert agreement(predicted, 3) == pytest.approx(np.mean(pairs))


# -- comparisons, and the learning bar on real data ------------------------------------------------


@pytest.mark.slow
def test_fedal_and_fedmd_learn_what_a_client_alone_can_not(tmp_path: Path) -> None:
    """At alpha = 0.1 both are at least 20 points over Local. Nothing is said of one against the
    other.
    """
    found = fedloom.compare(
        ["fedal", "fedmd", "local"],
        seeds=[0, 1],
        iterations=150,
        data={"options": {"alpha": 0.1}, "clients": 6},
        models={"pool": ["mlp", "mlp-deep", "linear"]},
        evaluate={"points": 1},
    )
    mean = {m["name"]: m["accuracy"]["mean"] for m in found["methods"]}
    assert mean["fedal"] > mean["local"] + 0.2
    assert mean["fedmd"] > mean["local"] + 0.2
    (to_fedmd, to_local) = found["differences"]
    assert to_local["mean"] == pytest.approx(mean["fedal"] - mean["local"])
    assert len(to_local["per_seed"]) == 2 and to_local["clients"] == 12
    assert to_fedmd["std_over_seeds"] == pytest.approx(np.std(to_fedmd["per_seed"], ddof=1))


def test_a_comparison_resumes_and_keeps_what_is_done(tmp_path: Path) -> None:
    experiment = check({"run": SMALL, "compare": {"methods": ["fedal", "local"], "seeds": [0]}})
    whole = execute_all(experiment, tmp_path / "a")
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        return calls == 8  # in the second run

    with pytest.raises(Stopped):
        execute_all(experiment, tmp_path / "b", stop=stop)
    resumed = execute_all(experiment, tmp_path / "b", resume=True)
    assert [m["accuracy"] for m in resumed["methods"]] == [m["accuracy"] for m in whole["methods"]]
    assert json.loads((tmp_path / "b" / "comparison.json").read_text()) == resumed


def test_runs_on_different_data_are_not_compared() -> None:
    from fedloom.experiment.run.compare import summarize

    a = execute(small(rounds=0))
    b = execute(small(rounds=0, data={**SMALL["data"], "public_rows": 50}))
    with pytest.raises(ConfigError, match="public_sha256"):
        summarize("", [a, b])


def test_a_round_that_yields_no_name_is_an_error() -> None:
    def nameless(*_: Any) -> Iterator[Any]:
        yield

    plan = build(small())
    plan = replace(plan, method=replace(plan.method, round=nameless))
    with (
        start(plan) as engine,
        pytest.raises(MethodError, match=r"round 0 of fedal yielded None: yield the stage's name"),
    ):
        Session(plan, engine, None).go(lambda _: None, lambda: False)
