"""Scores of a node's own rows: closed by default, blurred, counted; the attack that read rows by
them learns none.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.evaluation import MAX_LOSS, exact_scores, score
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import for_nodes
from fedloom.experiment.plan.private import PrivateData
from fedloom.methods.tables.steps import layout_tree, trees_tree
from fedloom.remote import payload, rpc_errors
from fedloom.remote.node.budget import FILE
from fedloom.remote.node.looks import SCALE, _keyed, _laplace, blurred
from fedloom.remote.rpc_errors import CallRefused
from fedloom.trees.bins import Bins, keys
from fedloom.trees.model import Trees
from tests.experiment.test_own_data import ALLOWED, rows, run
from tests.node.hosts import RunRequest, doing, node, opening, which

Hosts = Callable[..., RunRequest]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Nodes with a file of 80 rows; further ones share the first one's folder."""
    made: list[RunRequest] = []
    path = rows(tmp_path / "own.csv", 80, 3)

    def make(
        method: str = "fedavg", text: str | None = None, *, secret: bool = True, **data: Any
    ) -> RunRequest:
        allowed = {"rows": path, **ALLOWED, **data}
        cfg = node(
            tmp_path,
            methods=["fedavg", "local", "fedforest"],
            data={"wards": allowed},
            secret_noise=secret,
            max_runs=9,
        )
        made.append(RunRequest(cfg))
        made[-1]("open", opening(text or opened(method)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def opened(method: str = "fedavg", **changes: Any) -> str:
    """The config of a run on these rows."""
    kind: dict[str, Any] = {"method": method, "models": {"pool": ["linear"]}, **changes}
    if method != "local":
        kind["params"] = {"batch_size": 8} if method == "fedavg" else {}
    return for_nodes(build(run(**kind), PrivateData())).model_dump_json()


def looked(ask: RunRequest, call: int, broadcast: Any) -> dict[str, Any]:
    """The score of a broadcast."""
    shared = {"on": "own", "eval_mode": "", "broadcast": broadcast}
    head, rest = payload.unpack(
        ask("do", doing(call, ask.host, method="score", round=-1, shared=shared))
    )
    assert "reply" in head["lines"][0], head["lines"][0]
    found: dict[str, Any] = payload.decoded(rest, head["lines"][0]["reply"])
    return found


def crafted(ask: RunRequest, threshold: float) -> Any:
    """A model that predicts "two" where the first column exceeds a threshold."""
    (run_,) = ask.host._node_runs.values()
    params = {name: torch.zeros_like(x) for name, x in run_.party.params.items()}
    for x in params.values():
        if x.dim() == 2:
            x[1, 0] = 1e4
        else:
            x[1] = -1e4 * threshold
    return params


GRID = np.linspace(-3, 3, 300)


def attack(ask: RunRequest, most: int) -> float:
    """Read the test rows' first column and their labels from jumps of the count; the F1 score of
    what was found.
    """
    (run_,) = ask.host._node_runs.values()
    test = run_.party.context.tests["own"]
    x, y = test.every[:, 0].numpy(), test.y(torch.arange(len(test))).numpy()
    truth = {
        (int(cell), int(label)) for cell, label in zip(np.searchsorted(GRID, x), y, strict=True)
    }
    grid = np.linspace(0, len(GRID) - 1, min(most, len(GRID))).astype(int)
    counts: list[float] = []
    for call, k in enumerate(grid):
        try:
            score = looked(ask, call, crafted(ask, GRID[k]))
        except CallRefused as refusal:
            assert refusal.code == rpc_errors.REFUSED
            break
        counts.append(round(float(score["accuracy"]) * int(score["rows"])))
    found = {
        (int(k), int(step < 0)) for k, step in zip(grid[1:], np.diff(counts), strict=False) if step
    }
    right = len(found & truth)
    return 2 * right / max(len(found) + len(truth), 1)


def test_rows_are_read_from_exact_scores_and_not_from_those_of_a_node(hosts: Hosts) -> None:
    # the attack works where nothing is done
    assert attack(hosts(secret=False, score=True, looks=10_000), 300) > 0.9
    # by the noise alone, without a budget of looks
    assert attack(hosts(score=True, looks=10_000), 300) < 0.2
    assert attack(hosts(), 300) == 0


@pytest.mark.parametrize("odd", [1e4, 3e38, math.inf, math.nan])
def test_one_row_moves_a_loss_by_its_own_share(
    odd: float, hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean that is clipped as a whole would tell exactly whether a row is in a region, whatever
    the noise.
    """
    (run_,) = hosts(score=True).host._node_runs.values()
    party, test = run_.party, run_.party.context.tests["own"]
    logits = torch.zeros(len(test), 2)
    losses = []
    for inside in (False, True):  # a network of which one row's outputs are these
        logits[0] = (
            torch.tensor([odd, -odd]) * (1.0 if test.y(torch.tensor([0])) else -1.0)
            if inside
            else 0.0
        )
        monkeypatch.setattr(type(party), "infer", lambda party, x: logits)
        losses.append(float(score(party, on="own")["loss"]))  # type: ignore[arg-type]
    assert abs(losses[1] - losses[0]) <= MAX_LOSS / len(test) + 1e-3, losses


def test_the_chance_level_has_one_noise_for_all_looks() -> None:
    exact = {"accuracy": 0.5, "loss": 0.7, "chance": 0.5, "rows": 20}
    told: Any = blurred
    shown = [
        [float(told(exact, key, {"t": t}, {})["chance"]) for t in range(3)] for key in range(20)
    ]
    assert all(len({*looks}) == 1 for looks in shown) and len({looks[0] for looks in shown}) > 3
    number = {"squared": 0.5, "absolute": 0.7, "chance": 2.0, "rows": 200}
    assert float(told(number, 3, {}, {})["chance"]) == 1.0


def test_own_rows_are_not_scored_unless_the_node_is_reported(hosts: Hosts) -> None:
    ask = hosts()
    shared = {"on": "own", "eval_mode": "", "broadcast": {}}
    refusal = ask.refused("do", doing(0, ask.host, method="score", round=-1, shared=shared))
    assert refusal.code == rpc_errors.REFUSED and "score = true" in refusal.words
    assert payload.unpack(ask("open", opening(opened())))[0]["evaluates"] is False
    assert not (ask.config.state / FILE).exists()


def test_a_method_without_global_weights_is_not_scored_on_any(hosts: Hosts) -> None:
    ask = hosts("local", score=True)
    assert 0 <= float(looked(ask, 0, {})["accuracy"]) <= 1
    shared = {"on": "own", "eval_mode": "", "broadcast": crafted(ask, 0.0)}
    refusal = ask.refused("do", doing(1, ask.host, method="score", round=-1, shared=shared))
    assert refusal.words == "this method sends clients no model: call score without broadcast"


def test_the_budget_of_looks_outlives_runs_and_restarts(hosts: Hosts, tmp_path: Path) -> None:
    brief = opened(evaluate={"points": 1})
    ask = hosts(score=True, looks=3, text=brief)
    for call in range(2):
        looked(ask, call, crafted(ask, 0.1 * call))
    again = hosts(score=True, looks=3, text=brief)  # as after a restart
    looked(again, 2, crafted(again, 0.5))
    for other in (again, hosts(score=True, looks=3, text=opened(seed=5))):
        shared = {"on": "own", "eval_mode": "", "broadcast": {}}
        refusal = other.refused("do", doing(9, other.host, method="score", round=-1, shared=shared))
        assert (
            refusal.words
            == "the 3 looks at these rows are used up: the node's owner must raise looks"
        )
    assert json.loads((tmp_path / "state" / FILE).read_text())["cohorts"]["wards"]["looks"] == 3


def test_the_chance_level_of_another_split_is_a_look_of_its_own(
    hosts: Hosts, tmp_path: Path
) -> None:
    """A run may choose how many rows are test rows: each choice has another chance level, a third
    number with noise.
    """
    for part, counted in ((0.3, 1), (0.3, 2), (0.4, 4), (0.4, 5)):
        ask = hosts(score=True, text=opened(data={"test_fraction": part}))
        looked(ask, 0, crafted(ask, 0.3))
        record = json.loads((tmp_path / "state" / FILE).read_text())["cohorts"]["wards"]
        assert record["looks"] == counted


def test_a_repeated_look_tells_nothing_new(hosts: Hosts) -> None:
    ask = hosts(score=True)
    first, *others = (looked(ask, call, crafted(ask, 0.3)) for call in range(5))
    assert all(float(x["accuracy"]) == float(first["accuracy"]) for x in others)
    assert all(float(x["loss"]) == float(first["loss"]) for x in others)


def test_exact_scores_of_all_kinds_are_written_for_the_owner_alone(hosts: Hosts) -> None:
    ask = hosts(score=True)
    found = looked(ask, 0, crafted(ask, 0.3))
    assert {*found} == {"accuracy", "loss", "chance", "rows"}
    (run_,) = ask.host._node_runs.values()
    exact = exact_scores(run_.party, on="own", broadcast=crafted(ask, 0.3))
    assert {*exact} == {"rows", "accuracy", "auc", "balanced accuracy", "loss", "calibration error"}
    ask("do", doing(1, ask.host))
    own = exact_scores(run_.party, on="own")
    ask("close", which(finished=True))
    with (run_.store.folder / "scores.csv").open() as file:
        asked, mine = csv.DictReader(file)
    assert (asked.pop("round"), asked.pop("model")) == ("0", "as evaluated")
    assert (mine.pop("round"), mine.pop("model")) == ("1", "this node's model")
    assert {k: float(v) for k, v in asked.items()} == pytest.approx(exact, rel=1e-4)
    assert {k: float(v) for k, v in mine.items()} == pytest.approx(own, rel=1e-4)


def test_scores_that_cannot_be_written_end_no_call(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    ask = hosts(score=True)
    (run_,) = ask.host._node_runs.values()
    (run_.store.folder / "scores.csv").mkdir()
    looked(ask, 0, crafted(ask, 0.3))
    assert "were not written" in caplog.text


def test_the_split_is_the_node_s_own(hosts: Hosts, tmp_path: Path) -> None:
    """No seed of a run moves a row between training and test."""

    def held_out(ask: RunRequest) -> list[list[float]]:
        (run_,) = ask.host._node_runs.values()
        found: list[list[float]] = sorted(run_.party.context.tests["own"].every.tolist())
        return found

    first, second = held_out(hosts(text=opened(seed=1))), held_out(hosts(text=opened(seed=2)))
    assert first == second
    public = [held_out(hosts(text=opened(seed=seed), secret=False)) for seed in (1, 2)]
    assert public[0] != public[1]


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        ({"keep": ["a", "b"]}, "columns 'c' of wards are not allowed here; allowed: a, b"),
        ({"keep": []}, "columns 'a', 'b', 'c' of wards are not allowed here; allowed: none"),
        ({"label": None}, "label 'kind' of wards is not allowed here; allowed: none"),
        (
            {"label": "national_number"},
            "label 'kind' of wards is not allowed here; allowed: national_number",
        ),
    ],
)
def test_a_run_uses_columns_that_the_node_lists(
    allowed: dict[str, Any], words: str, hosts: Hosts
) -> None:
    with pytest.raises(CallRefused) as refusal:
        hosts(**allowed)
    assert refusal.value.code == rpc_errors.REFUSED and refusal.value.words == words


def test_the_noise_has_the_distribution_that_is_stated() -> None:
    draws = np.array([_laplace(_keyed(7, str(n).encode())[:8]) for n in range(20_000)])
    assert abs(draws.mean()) < 0.1 and abs(np.abs(draws).mean() - SCALE) < 0.1
    assert abs((np.abs(draws) > SCALE * np.log(10)).mean() - 0.1) < 0.01
    assert np.isfinite([_laplace(b"\0" * 8), _laplace(b"\xff" * 8)]).all()


def cut_off(at: float) -> Any:
    """A tree over one bin border whose right side is no node."""
    left, child = np.array([[64], [0]], np.uint8), np.array([1, 0], np.int32)
    trees = Trees(
        np.array([0]), np.array([0, -1], np.int16), left, child, np.array([[0, 0], [1, 1]])
    )
    edges = (keys(np.array([at], np.float32)), np.empty(0, np.int64), np.arange(1))
    return layout_tree(Bins(edges, np.array([False, False, True]))), trees_tree(trees)


def test_no_row_decides_whether_a_score_fails(hosts: Hosts) -> None:
    """Crafted trees predict, or fail, as a test row is in a region: an exact answer beside the
    noise of scores.
    """
    told = []
    for at in (-100.0, 100.0):
        ask = hosts("fedforest", score=True)
        layout, trees = cut_off(at)
        (run_,) = ask.host._node_runs.values()
        first = {"layout": layout, "first": 0, "trees": {name: x[:0] for name, x in trees.items()}}
        learned = payload.unpack(ask("do", doing(0, ask.host, method="begin", shared=first)))[0][
            "lines"
        ]
        learned += payload.unpack(
            ask("do", doing(1, ask.host, method="learn", shared={"trees": trees}))
        )[0]["lines"]
        assert "failure" in learned[1], "trees that cannot predict are refused"
        run_.party.trees = trees  # as if they were not
        told.append(sorted(looked(ask, 2, {})))
    assert told[0] == told[1] == ["accuracy", "chance", "loss", "rows"]
