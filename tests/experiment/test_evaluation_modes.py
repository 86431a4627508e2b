"""A method whose clients mix each other's models, and are looked at after tuning too."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom import report
from fedloom.engines import Lost
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.compare import summarize
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import RunResult, Stopped, execute
from fedloom.experiment.run.session import Session

PAGE = """
import torch
from torch.nn import functional as F
from fedloom import Method, MethodConfig, Party
from fedloom.core.message import weighted_mean
from fedloom.core.optim import SGD

class Config(MethodConfig):
    tune: bool = True

    @property
    def eval_modes(self):
        return ("tuned",) if self.tune else ()

class Client(Party[Config]):
    STATE = ("params", "opt")

    def setup(self):
        self.network(self.context.build(), SGD(0.1))

    def learn(self, *, t):
        self.train(lambda x, y: F.cross_entropy(self.model(x), y), self.epochs(t, epochs=1, size=16))

    def share(self, *, t):
        return self.params

    def mix(self, *, t, inbox):
        self.params = weighted_mean([self.params, *inbox.values()], [3.0] + [1.0] * len(inbox))
        weights = torch.zeros(self.context.parties)
        weights[[self.context.id, *map(int, inbox)]] = torch.tensor([3.0] + [1.0] * len(inbox)) / (3 + len(inbox))
        self.note("mixing", weights)
        self.note("other vector", weights)
        self.note("taken", float(len(inbox)))

    def prepare(self, *, eval_mode, broadcast):
        if eval_mode == "tuned":
            self.learn(t=0)

def round(fed, server, clients, cfg, t):
    fed.call(clients, "learn", shared={"t": t})
    ring = {i: [clients[i - 1]] for i in clients}
    fed.exchange(ring, answer="share", take="mix", shared={"t": t})
    yield "mix"

METHODS = (Method("ring", "A ring", "nobody", "peer", Config, round, Client),)
"""  # noqa: E501


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "page.py").write_text(PAGE)
    return str(tmp_path / "page.py")


def run(page: str, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "method": page,
        "rounds": 4,
        "data": {"clients": 3, "public_rows": 50, "own_test_rows": 30},
        "models": {"pool": ["mlp"]},
        "evaluate": {"points": 2},
    }
    return check({"run": {**values, **changes}}).run


def table(path: Path) -> list[list[str]]:
    with path.open() as file:
        return list(csv.reader(file))


def test_each_evaluation_mode_is_evaluated_and_leaves_nothing(page: str, tmp_path: Path) -> None:
    whole = execute(run(page), tmp_path / "a").summary
    (eval_mode,) = whole["eval_modes"]
    assert eval_mode == "tuned" and len(whole["eval_modes"]["tuned"]["per_client"]) == 3
    assert whole["eval_modes"]["tuned"]["mean"] == pytest.approx(
        np.mean(whole["eval_modes"]["tuned"]["per_client"])
    )
    assert whole["eval_modes"]["tuned"]["mean"] > whole["own_chance"] > whole["chance"]
    start_, end = whole["own_accuracy"], whole["eval_modes"]["tuned"]
    assert start_["per_client"] != end["per_client"]
    rows = table(tmp_path / "a" / "metrics.csv")
    looked = {r[0] for r in rows if r[4] == "own accuracy tuned"}
    assert looked == {r[0] for r in rows if r[4] == "own accuracy tuned mean"} == {"0", "2", "4"}
    untuned = execute(run(page, params={"tune": False})).summary
    assert untuned["eval_modes"] == {} and untuned["state_sha256"] == whole["state_sha256"]
    assert (
        untuned["own_accuracy"] == whole["own_accuracy"]
        and untuned["accuracy"] == whole["accuracy"]
    )


def test_without_own_rows_an_evaluation_mode_is_measured_on_the_global_test(page: str) -> None:
    data = {"clients": 3, "public_rows": 50, "own_test_rows": 0}
    summary = execute(run(page, data=data)).summary
    assert summary["own_accuracy"] is None and summary["own_chance"] is None
    assert 0 < summary["eval_modes"]["tuned"]["mean"] < 1


def test_mixing_is_written_at_the_rounds_that_are_evaluated(page: str, tmp_path: Path) -> None:
    execute(run(page), tmp_path / "a")
    header, *rows = table(tmp_path / "a" / "mixing.csv")
    assert header == ["round", "party", "weights"]
    assert rows[:3] == [
        ["2", "client-0", "0:0.75 2:0.25"],
        ["2", "client-1", "0:0.25 1:0.75"],
        rows[2],
    ]
    assert [row[0] for row in rows] == ["2"] * 3 + ["4"] * 3
    metrics = {row[4] for row in table(tmp_path / "a" / "metrics.csv")}
    assert "taken" in metrics and not metrics & {"mixing", "other vector"}
    text = report.write(tmp_path / "a").read_text(encoding="utf-8")
    assert "Mixing weights" in text and "unadapted" in text
    execute(run("local", params={}), tmp_path / "local")
    assert not (tmp_path / "local" / "mixing.csv").exists()


@pytest.mark.parametrize("engine", ["isolated", "batched"])
def test_engines_agree_on_notes_and_evaluation_modes(
    page: str, tmp_path: Path, engine: str
) -> None:
    loop = execute(run(page), tmp_path / "a").summary
    other = execute(run(page, engine={"name": engine}), tmp_path / "b").summary
    assert (tmp_path / "a" / "mixing.csv").read_text() == (
        tmp_path / "b" / "mixing.csv"
    ).read_text()
    assert other["eval_modes"]["tuned"]["mean"] == pytest.approx(
        loop["eval_modes"]["tuned"]["mean"], abs=0.05
    )


def test_a_stopped_run_resumes_with_its_mixing(page: str, tmp_path: Path) -> None:
    execute(run(page), tmp_path / "a")
    count = 0

    def stop() -> bool:
        nonlocal count
        count += 1
        return count == 3

    with pytest.raises(Stopped):
        execute(run(page), tmp_path / "b", stop=stop)
    execute(run(page), tmp_path / "b", resume=True)
    for name in ("mixing.csv", "metrics.csv"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()


def test_a_round_that_is_lost_leaves_no_second_mixing(
    page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = build(run(page))
    with start(plan) as engine:
        monkeypatch.setattr(engine, "durable", False)
        session = Session(plan, engine, None)
        session.begin(resume=False)
        note, lost = session._record_notes, 0

        def lose_one(*arguments: Any) -> None:
            nonlocal lost
            note(*arguments)
            lost += 1
            if lost == 2:
                raise Lost("gone")

        monkeypatch.setattr(session, "_record_notes", lose_one)
        session.go(lambda _: None, lambda: False)
    assert lost == 5
    assert [row[0] for row in session.record.mixing] == [2, 2, 2, 4, 4, 4]


def test_a_comparison_leads_with_an_evaluation_mode_that_all_have(page: str) -> None:
    ring, local = execute(run(page)), execute(run("local", params={}))
    other = RunResult({**ring.summary, "name": "other"}, [], None)
    same = summarize("", [ring, other])
    assert same["metric"] == "own accuracy tuned" and set(same["further"]) == {
        "accuracy",
        "own accuracy",
    }
    assert (
        same["methods"][0]["eval_modes"]["tuned"]["mean"]
        == ring.summary["eval_modes"]["tuned"]["mean"]
    )
    mixed = summarize("", [ring, local])
    assert mixed["metric"] == "own accuracy main mode"
    assert [m["mode"] for m in mixed["methods"]] == ["tuned", ""]
    assert set(mixed["further"]) == {"own accuracy", "accuracy"}
    (lead,), (own,) = mixed["differences"], mixed["further"]["own accuracy"]
    alone = local.summary["own_accuracy"]["mean"]
    assert lead["mean"] == pytest.approx(ring.summary["eval_modes"]["tuned"]["mean"] - alone)
    assert own["mean"] == pytest.approx(ring.summary["own_accuracy"]["mean"] - alone)
