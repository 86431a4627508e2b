"""What a node says of its model and notes beside it: it may spoil its own numbers, and nobody
else's.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedloom
from fedloom.core.engine import Failure
from fedloom.core.errors import MethodError
from fedloom.core.party import Note, Party
from fedloom.experiment.plan.node_party import build_party
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.evaluate import RESERVED
from fedloom.experiment.run.execute import execute
from fedloom.remote import rpc_errors
from fedloom.report import write
from tests.experiment.nodes import Nodes
from tests.experiment.test_nodes import COLUMNS, ROWS, run

LOCAL = {**ROWS, "method": "local"}
ATTACKED = {**COLUMNS, "evaluate": {"attack_labels": 2}}
ZEROS = torch.zeros(60, dtype=torch.int64)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let runs have their parties at nodes from now on, of which one says and notes what a test
    lets it.
    """

    def begin(
        liar: int,
        says: Callable[..., Any] = lambda _, reply: reply,
        notes: dict[str, Note] | None = None,
    ) -> None:
        class Lying(Nodes):
            def _done(self, task: Any) -> Any:
                reply = super()._done(task)
                return says(task, reply) if task.party == liar else reply

            def notes(self) -> dict[int, dict[str, Note]]:
                return {**super().notes(), **({liar: notes} if notes else {})}

        def start(run_plan: RunPlan) -> Nodes:
            return Lying(run_plan, partial(build_party), {})

        monkeypatch.setitem(runs.execute.__kwdefaults__, "backend", lambda *_, **__: Backend(start))

    return begin


@pytest.mark.parametrize(
    "reply",
    [
        "text",
        {"predicted": ZEROS},
        {"predicted": ZEROS[:3], "loss": torch.tensor(1.0)},
        {"predicted": ZEROS.float(), "loss": torch.tensor(1.0)},
        {"predicted": ZEROS, "loss": "much"},
        Failure("raised", "(the log of b has it)"),
        Failure(rpc_errors.STALE),
    ],
)
def test_an_answer_that_cannot_be_is_left_out(
    reply: Any, nodes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    nodes(
        1,
        lambda task, honest: (
            reply if task.method == "predictions" and task.shared["on"] == "test" else honest
        ),
    )
    found = execute(run(LOCAL)).summary
    assert found["accuracy"]["clients"] == [0, 2] and len(found["own_accuracy"]["per_client"]) == 3
    assert "client-1 is left out of an evaluation: " in caplog.text


@pytest.mark.parametrize("on", ["test", "aligned"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda x: "text",
        lambda x: x[:3],
        lambda x: x[:, :1],
        lambda x: x.double(),
        lambda x: x * float("nan"),
    ],
    ids=["text", "few", "narrow", "double", "nan"],
)
def test_without_one_party_s_part_columns_are_not_evaluated(
    wrong: Any, on: str, nodes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []

    def says(task: Any, reply: Any) -> Any:
        looks.extend([task] if task.method == "contribution" and task.shared["on"] == on else [])
        return wrong(reply) if looks and task is looks[-1] and len(looks) == 2 else reply

    nodes(2, says)
    result = execute(run(ATTACKED))
    assert "party-2 is left out of an evaluation: invalid reply" in caplog.text
    assert "round 1, " in caplog.text and "not evaluated: cannot evaluate party-2" in caplog.text
    assert {row[0] for row in result.metrics if row[4] == "accuracy mean"} == {0, 2, 3, 4}


def test_a_mistake_in_a_page_is_seen_where_it_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Party, "infer", lambda self, x: 1 / 0)
    with pytest.raises(MethodError, match="ZeroDivisionError"):
        execute(run(LOCAL))


@pytest.mark.parametrize("values", [ROWS, ATTACKED], ids=["rows", "columns"])
def test_what_a_run_measures_is_known_by_how_it_begins(values: dict[str, Any]) -> None:
    found = {row[4] for row in execute(run(values, rounds=1)).metrics if row[0] == 0}
    assert len(found) > 5 and all(name.startswith(RESERVED) for name in found)


def test_a_note_is_no_metric(nodes: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes(1)
    honest = execute(run(LOCAL)).summary
    lies = dict.fromkeys(
        ("accuracy mean", "own accuracy std", "agreement", "chance", "loss mean", "bytes up"), 0.999
    )
    nodes(1, notes={**lies, "mixing": [1.0] * 50, "temperature": 0.5})
    result = execute(run(LOCAL), tmp_path)
    for key in ("accuracy", "own_accuracy", "agreement", "chance"):
        assert result.summary[key] == honest[key]
    assert {row[5] for row in result.metrics if row[4] == "temperature"} == {0.5}
    assert caplog.text.count("ignored note") == 1
    assert not (tmp_path / "mixing.csv").exists() and write(tmp_path).is_file()


def test_weights_of_all_parties_are_taken(nodes: Any, tmp_path: Path) -> None:
    nodes(1, notes={"mixing": [0.5, 0.5, 0.0]})
    execute(run(LOCAL), tmp_path)
    with (tmp_path / "mixing.csv").open() as file:
        assert {tuple(row[1:]) for row in csv.reader(file)} == {
            ("party", "weights"),
            ("client-1", "0:0.5 1:0.5"),
        }


def test_every_client_has_its_scores_at_the_end_on_global_and_on_own_rows() -> None:
    """They are those of scikit-learn for the models that come back, and the same on
    every engine.
    """
    from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 4)).astype(np.float32)
    y = (x[:, 0] + rng.standard_normal(200) > 0).astype(int)
    settings: dict[str, Any] = {
        "rounds": 2,
        "clients": 2,
        "partition": "iid",
        "public_rows": 0,
        "models": "linear",
    }
    result = fedloom.run("local", data=(x[:100], y[:100]), test=(x[100:], y[100:]), **settings)
    scores = result.summary["client_scores"]
    for i, model in enumerate(result.models):
        with torch.no_grad():
            p = torch.softmax(model(torch.from_numpy(x[100:])), -1).numpy()
        assert scores["auc"]["per_client"][i] == pytest.approx(
            roc_auc_score(y[100:], p[:, 1]), abs=1e-6
        )
        assert scores["loss"]["per_client"][i] == pytest.approx(log_loss(y[100:], p), abs=1e-5)
        balanced = balanced_accuracy_score(y[100:], p.argmax(1))
        assert scores["balanced accuracy"]["per_client"][i] == pytest.approx(balanced, abs=1e-6)
    assert {"own auc", "own calibration error"} <= scores.keys() and 0 < scores[
        "calibration error"
    ]["mean"] < 1
    again = fedloom.run(
        "local", data=(x[:100], y[:100]), test=(x[100:], y[100:]), engine={"workers": 2}, **settings
    )
    assert again.summary["client_scores"] == scores
    one_class = fedloom.run(
        "local", data=[(x[y == 0], y[y == 0]), (x[y == 1], y[y == 1])], rounds=1, models="linear"
    )
    assert "own auc" not in one_class.summary["client_scores"]  # a client's own rows have one class
