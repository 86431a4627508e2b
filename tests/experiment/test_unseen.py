"""Clients that are in no round and only evaluated, and rows that only the server holds."""

from __future__ import annotations

import csv
import hashlib
import html
import json
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from fedloom import report
from fedloom.core import message
from fedloom.core.errors import CheckpointError, ConfigError, DataError
from fedloom.core.message import leaves
from fedloom.experiment.config.data import DataConfig
from fedloom.experiment.config.pretrained import PretrainedConfig
from fedloom.experiment.config.run import RunConfig
from fedloom.experiment.plan.build import build, data_of
from fedloom.experiment.plan.pretrained import training_of
from fedloom.experiment.plan.pretraining import train
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.compare import summarize
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import RunResult, Stopped, execute
from fedloom.experiment.run.session import Session
from fedloom.report import formatting as fmt
from fedloom.report.formatting import clients_named
from fedloom.report.terminal import show_comparison
from fedloom.report.unseen import in_order

PAGE = """
import torch
from torch.nn import functional as F
from fedloom import Method, MethodConfig, Party
from fedloom.core.message import weighted_mean
from fedloom.core.optim import SGD

class Config(MethodConfig):
    lr: float = 0.1

    @property
    def eval_modes(self):
        return ("1 step", "0 steps", "5 steps")

class Client(Party[Config]):
    STATE = ("params", "opt")

    def setup(self):
        self.network(self.context.build(), SGD(self.cfg.lr))

    def steps(self, t, number):
        for x, y in self.batches(t, steps=number, size=16):
            self.minimize(lambda: F.cross_entropy(self.model(x), y))

    def learn(self, *, t, weights):
        self.params = weights
        self.steps(t, 5)
        return self.params

    def prepare(self, *, eval_mode, broadcast):
        self.params = broadcast
        self.steps(10**6, int(eval_mode.split()[0]) if eval_mode else 0)

class Server(Party[Config]):
    STATE = ("weights",)

    def setup(self):
        self.weights = {k: p.detach() for k, p in self.context.build().named_parameters()}

    def broadcast(self):
        return dict(self.weights)

def round(fed, server, clients, cfg, t):
    replies = fed.call(clients, "learn", shared={"t": t, "weights": server.weights})
    server.weights = weighted_mean([*replies.values()], [1.0] * len(replies))
    yield "round"

METHODS = (Method("steps", "A mean", "nobody", "meta", Config, round, Client, Server, needs=("one network",)),)
"""  # noqa: E501
DATA: dict[str, Any] = {
    "clients": 6,
    "public_rows": 0,
    "test_rows": 60,
    "own_test_rows": 40,
    "partition": "random-classes",
    "unseen": 0.34,
}
AWAY = [{"client": 2, "start": 1, "end": 2}]
WAYS = ["1 step", "0 steps", "5 steps", "1 step training", "0 steps training", "5 steps training"]


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "page.py").write_text(PAGE)
    return str(tmp_path / "page.py")


def run(page: str, data: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "method": page,
        "rounds": 4,
        "models": {"pool": ["linear"]},
        "evaluate": {"points": 2},
        "data": {**DATA, **(data or {})},
    }
    found: RunConfig = check({"run": {**values, **changes}}).run
    return found


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


# -- who is unseen ---------------------------------------------------------------------------------


def test_the_unseen_are_drawn_from_the_seed_and_nothing_else(page: str) -> None:
    for clients, share, number in (
        (6, 0.34, 2),
        (10, 0.25, 3),
        (50, 0.2, 10),
        (2, 0.5, 1),
        (7, 0.0, 0),
    ):
        data = DataConfig(clients=clients, unseen=share)
        drawn = {data.unseen_clients(seed) for seed in range(20)}
        assert {len(set(those)) for those in drawn} == {number}
        assert all(
            list(those) == sorted(those) and set(those) <= set(range(clients)) for those in drawn
        )
        assert len(drawn) > 1 or number == 0
    chosen = [
        client
        for seed in range(600)
        for client in DataConfig(clients=6, unseen=0.34).unseen_clients(seed)
    ]
    assert np.bincount(chosen) == pytest.approx([200] * 6, abs=50)  # 4.3 s.d.
    plans = [
        build(run(page)),
        build(run("fedavg-ft")),
        build(run(page, {"partition": "iid", "server_rows": 50})),
    ]
    assert len({plan.unseen for plan in plans}) == 1
    assert (
        set(plans[0].training) | set(plans[0].unseen) == set(range(6))
        and len(plans[0].training) == 4
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"unseen": 1.0}, "data.unseen"),
        ({"unseen": -0.1}, "data.unseen"),
        ({"unseen": 0.95}, "unseen = 0.95 of 6 clients leaves no clients to train"),
        ({"unseen": 0.01}, "unseen = 0.01 of 6 clients is less than one client"),
        ({"server_rows": -1}, "data.server_rows"),
    ],
)
def test_a_bad_share_is_reported_before_any_work(
    page: str, data: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        run(page, data, sede=3)
    assert text in str(error.value) and "sede" in str(error.value)


def test_a_round_needs_one_who_trains_and_exists(page: str) -> None:
    training = build(run(page)).training
    everybody = {"away": [{"client": i, "start": 2} for i in training]}
    with pytest.raises(ConfigError, match="no client is present in round 2"):
        run(page, churn=everybody)
    values = run(page).model_dump() | {"churn": everybody}
    with pytest.raises(ConfigError, match="no client is present in round 2"):
        build(RunConfig(**values))
    run(page, churn={"away": everybody["away"][1:]})
    run(page, {"unseen": 0.0}, churn=everybody)  # the others stay


def test_who_holds_columns_has_neither() -> None:
    for data, text in (
        ({"unseen": 0.5}, "data.unseen: split"),
        ({"server_rows": 9}, "data.server_rows: split"),
    ):
        with pytest.raises(ConfigError, match=text):
            check({"run": {"method": "split", "data": {"name": "wine", **data}}})


# -- what happens to them --------------------------------------------------------------------------


@pytest.mark.parametrize("churn", [{}, {"away": AWAY}])
def test_an_unseen_client_keeps_its_state_and_gets_no_message(
    page: str, churn: dict[str, Any]
) -> None:
    plan = build(run(page, churn=churn))
    assert 2 in plan.training
    seen: list[dict[int, Any]] = []
    called: list[tuple[int, ...]] = []
    with start(plan) as engine:

        def look(*_: Any) -> None:
            kept = {
                i: message.map_tensors(torch.Tensor.clone, s) for i, s in engine.states().items()
            }
            seen.append({i: dict(leaves(s)) for i, s in kept.items()})

        session = Session(plan, engine, None)
        session.begin(resume=False)
        call = session.fed.call

        def noted(parties: Sequence[int], *arguments: Any, **more: Any) -> Any:
            called.append(tuple(parties))
            return call(parties, *arguments, **more)

        session.fed.call = noted  # type: ignore[assignment]  # a stand-in that takes anything
        look()
        session.go(look, lambda: False)
    for i in engine.ids:
        still = all(torch.equal(seen[0][i][k], seen[-1][i][k]) for k in seen[0][i])
        assert still == (i in plan.unseen), i
    there = [tuple(i for i in plan.training if not (churn and i == 2 and t == 1)) for t in range(4)]
    assert called == there
    sent = {entry.round: entry.count for entry in session.fed.ledger if entry.receiver == "client"}
    assert sent == {t: len(those) for t, those in enumerate(there)}


def test_unseen_peers_are_asked_by_nobody() -> None:
    plan = build(run("gossip", models={"pool": ["mlp"]}))
    with start(plan) as engine:
        session = Session(plan, engine, None)
        session.begin(resume=False)
        session.go(lambda _: None, lambda: False)
    spoke = {name for pair in session.fed.ledger.pairs for name in pair}
    assert (
        spoke - {session.coordinator} == {engine.name(i) for i in plan.training} and len(spoke) == 5
    )


def test_only_the_server_holds_its_rows_with_their_labels(page: str) -> None:
    plan = build(run(page, {"server_rows": 300}))
    shares = plan.data.split
    assert plan.server is not None
    held = plan.server.context.data
    assert held is not None and held.index.tolist() == shares.server.tolist() and len(held) == 300
    assert held.y(torch.arange(5)).tolist() == plan.data.dataset.y[shares.server[:5]].tolist()
    for make in plan.clients:
        context = make().context
        for rows in (context.rows, *context.tests.values()):
            assert not set(rows.index.tolist()) & set(shares.server.tolist())
    bare = build(run(page))
    assert bare.server is not None and bare.server.context.data is None


def test_columns_are_scaled_by_the_server_s_rows_for_every_seed(page: str) -> None:
    data = {"name": "wine", "clients": 2, "unseen": 0.5, "server_rows": 40, "options": {"rows": 10}}
    plans = [build(run(page, data, seed=seed)) for seed in (0, 1)]
    shift = [plan.data.dataset.shift for plan in plans]
    own = plans[0].data.split.server
    assert np.array_equal(shift[0], shift[1])
    assert shift[0] == pytest.approx(plans[0].data.dataset.x[own].mean(0), rel=1e-5)


# -- what is measured ------------------------------------------------------------------------------


def test_evaluation_modes_are_measured_over_the_unseen_and_over_the_others(
    page: str, tmp_path: Path
) -> None:
    config = run(page, {"server_rows": 100})
    plan = build(config)
    summary = execute(config, tmp_path / "a").summary
    names = {f"client-{i}" for i in plan.unseen}, {f"client-{i}" for i in plan.training}
    rows = table(tmp_path / "a" / "metrics.csv")
    assert [*summary["eval_modes"]] == WAYS
    assert summary["unseen"] == list(plan.unseen)
    for eval_mode, found in summary["eval_modes"].items():
        train = eval_mode.endswith("training")
        last = [
            row
            for row in rows
            if row["metric"] == f"own accuracy {eval_mode}" and row["round"] == "4"
        ]
        each = {row["party"]: float(row["value"]) for row in last}
        assert set(each) == names[train]
        assert found["clients"] == list(plan.training if train else plan.unseen)
        assert found["per_client"] == [each[f"client-{i}"] for i in found["clients"]]
        assert found["mean"] == pytest.approx(np.mean(found["per_client"]))
        assert found["std"] == pytest.approx(np.std(found["per_client"]))
    for found in (summary["accuracy"], summary["own_accuracy"]):
        assert len(found["per_client"]) == 6 and "clients" not in found
    own = summary["own_accuracy"]["per_client"]
    # nothing but the handed out weights: what own accuracy is
    for eval_mode in ("0 steps", "0 steps training"):
        assert summary["eval_modes"][eval_mode]["per_client"] == [
            own[i] for i in summary["eval_modes"][eval_mode]["clients"]
        ]
    most = np.array([np.bincount(labels).max() / len(labels) for labels in plan.data.labels["own"]])
    assert summary["own_chance"] == pytest.approx(most.mean())
    assert summary["own_chances"]["unseen"] == pytest.approx(most[[*plan.unseen]].mean())
    assert summary["own_chances"]["training"] == pytest.approx(most[[*plan.training]].mean())
    held = json.loads((tmp_path / "a" / "partition.json").read_text())
    numbers = plan.data.split.server.astype("<i8")
    assert held["unseen"] == list(plan.unseen) and held["server"] == 100
    assert held["server_sha256"] == hashlib.sha256(numbers.tobytes()).hexdigest()


def test_a_run_in_which_all_take_part_is_as_it_was(page: str) -> None:
    summary = execute(run(page, {"unseen": 0.0})).summary
    assert summary["unseen"] == [] and summary["own_chances"] == {}
    assert [*summary["eval_modes"]] == ["1 step", "0 steps", "5 steps"]
    assert all(
        len(found["per_client"]) == 6 and "clients" not in found
        for found in summary["eval_modes"].values()
    )
    assert summarize("", [RunResult(summary, [], None)])["unseen"] == {}


def test_a_stopped_run_resumes_to_the_same_bits(page: str, tmp_path: Path) -> None:
    config = run(page, {"server_rows": 50}, churn={"away": AWAY})
    whole = execute(config, tmp_path / "a").summary
    asked = iter((False, True))
    with pytest.raises(Stopped):
        execute(config, tmp_path / "b", stop=lambda: next(asked))
    again = execute(config, tmp_path / "b", resume=True).summary
    assert (
        again["state_sha256"] == whole["state_sha256"]
        and again["eval_modes"] == whole["eval_modes"]
    )
    for name in ("metrics.csv", "ledger.csv", "partition.json"):
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    for changed in ({"unseen": 0.2}, {"unseen": 0.0}, {"server_rows": 51}):
        with pytest.raises(CheckpointError, match="another configuration"):
            execute(
                run(page, {"server_rows": 50, **changed}, churn={"away": AWAY}),
                tmp_path / "b",
                resume=True,
            )


# -- comparisons, and what people see --------------------------------------------------------------


def compared(page: str) -> list[RunResult]:
    return [
        execute(run(page, name=name, seed=seed, params={"lr": lr}))
        for name, lr in (("a", 0.1), ("b", 0.5))
        for seed in (0, 1)
    ]


def test_comparisons_pair_the_clients_that_a_metric_is_of(page: str) -> None:
    results = compared(page)
    found = summarize("", results)
    assert found["metric"] == "own accuracy 1 step"
    assert found["unseen"] == {str(seed): results[seed].summary["unseen"] for seed in (0, 1)}
    assert found["unseen"]["0"] != found["unseen"]["1"]
    pairs = {"own accuracy 1 step": found["differences"], **found["further"]}
    for eval_mode, clients in (("1 step", 4), ("1 step training", 8), ("5 steps training", 8)):
        (d,) = pairs[f"own accuracy {eval_mode}"]
        a, b = (
            [r.summary["eval_modes"][eval_mode] for r in results if r.summary["name"] == name]
            for name in "ab"
        )
        each = np.concatenate([one["per_client"] for one in a]) - np.concatenate(
            [one["per_client"] for one in b]
        )
        assert d["clients"] == clients and d["clients_better"] == (each > 0).sum()
        assert d["per_seed"] == pytest.approx(
            [one["mean"] - other["mean"] for one, other in zip(a, b, strict=True)]
        )
        assert d["std_over_clients"] == pytest.approx(np.std(each))
    chances = [r.summary["own_chances"]["unseen"] for r in results[:2]]
    assert chances[0] != chances[1] and found["methods"][0]["own_chances"][
        "unseen"
    ] == pytest.approx(np.mean(chances))


@pytest.mark.parametrize("other", [[0, 1], []])
def test_runs_with_other_unseen_clients_are_not_paired(page: str, other: list[int]) -> None:
    one = execute(run(page, name="one"))
    assert one.summary["unseen"] not in ([0, 1], [])
    two = RunResult({**one.summary, "name": "two", "unseen": other}, [], None)
    with pytest.raises(ConfigError, match="the unseen clients are"):
        summarize("", [one, two])


def test_pages_show_unseen_clients_and_their_accuracy(page: str, tmp_path: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.5)):
        execute(run(page, name=name, params={"lr": lr}), tmp_path / name)
    summary = json.loads((tmp_path / "a" / "result.json").read_text())
    text = report.write(tmp_path / "a").read_text(encoding="utf-8").replace(fmt.NBSP, " ")
    clients = [f"client-{i}" for i in summary["unseen"]]
    assert (
        "Two clients of 6 took part in no round, received no message" in text
        and " and ".join(clients) in text
    )
    assert all(f"{name} · linear · unseen" in text for name in clients)
    reached = {
        eval_mode: f"{100 * found['mean']:.1f} % ± {100 * found['std']:.1f}"
        for eval_mode, found in summary["eval_modes"].items()
    }
    assert (
        f"two unseen clients reached {reached['1 step']} after 1 step, four training clients"
        in text
    )
    assert all(shown in text for shown in reached.values())
    assert text.index(">0 steps<") < text.index(">1 step<") < text.index(">5 steps<")
    assert f"most frequent class gives {100 * summary['own_chances']['unseen']:.1f} %" in text
    pair = report.write_many([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(
        encoding="utf-8"
    )
    assert (
        f"in seed 0, {' and '.join(map(str, summary['unseen']))}." in pair
        and "Training clients: accuracy" in pair
    )
    assert "On own class mix, 1 step, unseen clients: accuracy of the first minus the other" in pair
    assert "always one's own most frequent class, at unseen clients" in html.unescape(text)
    assert "On own class mix, 1 step, training clients" in pair


def test_a_run_in_progress_knows_its_unseen_clients(page: str, tmp_path: Path) -> None:
    asked = iter((False, True))
    with pytest.raises(Stopped):
        execute(run(page), tmp_path / "a", stop=lambda: next(asked))
    text = report.write(tmp_path / "a").read_text(encoding="utf-8")
    assert "This run is unfinished" in text and "two unseen clients reached" in text


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"unseen": [6]}, "client ids must be 0–5"),
        (
            {
                "eval_modes": {
                    "1 step": {"mean": 1, "std": 0, "per_client": [1, 1], "clients": [1, 7]}
                }
            },
            "client ids must be",
        ),
        (
            {"eval_modes": {"1 step": {"mean": 1, "std": 0, "per_client": [1, 1], "clients": [1]}}},
            "must have one value for each of 1 clients",
        ),
        (
            {
                "eval_modes": {
                    "1 step": {"mean": 1, "std": 0, "per_client": [1, 1], "clients": [1, 2]}
                }
            },
            "training clients",
        ),
    ],
)
def test_a_damaged_result_is_reported(
    page: str, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    execute(run(page), tmp_path / "a")
    path = tmp_path / "a" / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=text):
        report.write(tmp_path / "a")


def test_a_terminal_shows_the_unseen_first(page: str) -> None:
    out = StringIO()
    found = summarize("", compared(page))
    show_comparison(found, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines[2:])) <= 80  # below the verdict
    head = " ".join(" ".join(lines[:6]).split())
    assert (
        "1 step" in head
        and "training" in head
        and "global" not in head
        and "b +48.8 over a in accuracy on own class mix, 1 step, unseen clients, 95% +48.8" in head
    )
    mean = found["methods"][0]["eval_modes"]["1 step"]["mean"]
    assert any(line.split()[:2] == ["a", f"{mean:.1%}"] for line in lines)
    assert (
        f"seed 0: unseen in training: clients {', '.join(map(str, found['unseen']['0']))}"
        in out.getvalue()
    )
    named = StringIO()
    show_comparison(found, Console(file=named, width=80), ["va", "ohio"])
    assert "seed 0: unseen in training: va and ohio" in named.getvalue()
    chance = found["methods"][0]["own_chances"]["unseen"]
    assert f"(on the own mix: {chance:.1%})" in " ".join(out.getvalue().split())


@pytest.mark.parametrize("failures", [0, 17])
def test_where_there_is_no_room_costs_are_left_to_the_report(page: str, failures: int) -> None:
    found = summarize("", compared(page))
    found["methods"] = [{**m, "failures": failures} for m in found["methods"]]
    for width in (80, 60):
        out = StringIO()
        show_comparison(found, Console(file=out, width=width))
        head = " ".join(" ".join(out.getvalue().splitlines()[:6]).split())
        assert ("Sent up" in head) is (width == 80)
        assert ("Failures" in head) is bool(failures) and "training" in head


def test_evaluation_modes_stand_in_the_order_of_their_steps() -> None:
    assert in_order(["1 step", "50 steps", "0 steps", "5 steps"]) == [
        "0 steps",
        "1 step",
        "5 steps",
        "50 steps",
    ]
    assert in_order(["tuned", "as it is"]) == ["tuned", "as it is"]


def test_runs_on_other_rows_stand_side_by_side_with_their_unseen(page: str, tmp_path: Path) -> None:
    for name, partition in (("a", "random-classes"), ("b", "iid")):
        execute(run(page, {"partition": partition}, name=name), tmp_path / name)
    text = report.write_many([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(
        encoding="utf-8"
    )
    assert "The runs cannot be paired" in text and "hold different rows" in text
    assert (
        "On own class mix, 1 step, training clients" in text
        and "used for evaluation only: in seed 0" in text
    )


def test_evaluation_modes_over_other_clients_do_not_stand_side_by_side(
    page: str, tmp_path: Path
) -> None:
    for name, seed, share in (("a", 0, 0.34), ("b", 0, 0.0), ("b", 1, 0.0)):
        execute(run(page, {"unseen": share}, name=name, seed=seed), tmp_path / f"{name}{seed}")
    for other, problem in (
        ("b0", "the unseen clients are"),
        ("b1", "some have unseen clients, others none"),
    ):
        both = report.write_many([tmp_path / "a0", tmp_path / other], tmp_path / "both.html")
        text = both.read_text(encoding="utf-8")
        assert (
            "The runs cannot be paired" in text
            and problem in text
            and "further evaluation modes are omitted" in text
        )
        body = text[text.index("<h2") :]
        assert "1 step" not in body and "unseen clients" not in body
    assert "On own class mix, 1 step" in report.write(tmp_path / "b0").read_text(encoding="utf-8")


@pytest.mark.parametrize("share", [0.34, 0.0])
def test_without_own_rows_pages_name_the_global_test_set(
    page: str, tmp_path: Path, share: float
) -> None:
    for name in "ab":
        execute(run(page, {"own_test_rows": 0, "unseen": share}, name=name), tmp_path / name)
    summary = json.loads((tmp_path / "a" / "result.json").read_text())
    text = report.write(tmp_path / "a").read_text(encoding="utf-8").replace(fmt.NBSP, " ")
    pair = report.write_many([tmp_path / "a", tmp_path / "b"], tmp_path / "c.html").read_text(
        encoding="utf-8"
    )
    messages = html.unescape(text + pair)
    assert (
        "one's own most frequent" not in messages and "always the most frequent class" in messages
    )
    first = summary["eval_modes"]["1 step"]
    who = "two unseen clients" if share else "six clients"
    reached = f"{100 * first['mean']:.1f} % ± {100 * first['std']:.1f}"
    assert f"On the global test set of digits, {who} reached {reached}" in text
    assert (
        f"always predicting the most frequent class gives {100 * summary['chance']:.1f} %" in text
    )


def test_one_client_is_named_in_the_singular() -> None:
    assert clients_named((1,)) == "client 1" and clients_named([1, 4]) == "clients 1, 4"


# -- the server's pretrained model -----------------------------------------------------------------


def test_results_say_which_pretrained_model_it_was(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert execute(run(page)).summary["pretrained"] is None
    config = run(page, {"server_rows": 100}, pretrained={"model": "auto", "epochs": 1})
    first = execute(config, tmp_path / "a").summary["pretrained"]
    assert first == {
        "digest": build(config).pretrained,
        "model": "linear",
        "norm": "none",
        "file": None,
    }
    text = report.write(tmp_path / "a").read_text(encoding="utf-8")
    messages = "pretrained model is linear (norm none)"
    assert (
        html.unescape(text).count(
            f"The server's {messages}; its digest starts with {first['digest'][:12]}."
        )
        == 1
    )
    file, (dataset, shares) = tmp_path / "own.safetensors", data_of(config)
    other = {"model": "mlp", "epochs": 1}
    train(
        training_of(PretrainedConfig(**other), dataset, shares.server, "cpu"), file, lambda *_: None
    )
    config = run(page, {"server_rows": 100}, pretrained={"file": str(file)}, name="other")
    second = execute(config, tmp_path / "b").summary["pretrained"]
    assert second == {
        "digest": build(config).pretrained,
        "model": "mlp",
        "norm": "none",
        "file": str(file),
    }
    assert f"{messages.replace('linear', 'mlp')}, from the file {file};" in report.write(
        tmp_path / "b"
    ).read_text("utf-8")
    pair = report.write_many([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html").read_text(
        encoding="utf-8"
    )
    assert (
        f"pretrained models at the server: linear ({first['digest'][:12]}), mlp "
        f"({second['digest'][:12]})." in pair
    )
    assert "The runs cannot be paired" not in pair


def test_a_comparison_remarks_on_other_pretrained_models_and_still_pairs(page: str) -> None:
    one, own = execute(run(page)), {"digest": "ab" * 32, "model": "mlp", "norm": None, "file": None}

    def found(*others: dict[str, Any]) -> dict[str, Any]:
        more = [
            RunResult({**one.summary, "name": str(i), **other}, [], None)
            for i, other in enumerate(others)
        ]
        return summarize("", [one, *more])

    compared = found({"pretrained": own})
    assert compared["remarks"] == [
        "runs of steps with seed 0 have different pretrained models at the server: none, mlp "
        f"({'ab' * 6})"
    ]
    assert compared["differences"][0]["mean"] == 0
    out = StringIO()
    show_comparison(compared, Console(file=out, width=80))
    assert compared["remarks"][0] in out.getvalue().splitlines()
    apart = found({"pretrained": own, "method": "fedlp"}, {"pretrained": own, "seed": 1}, {})
    assert apart["remarks"] == []
