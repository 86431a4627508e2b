"""Runs whose parties have rows of their own: at a node each, seen by nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.evaluation import EVALUATIONS, predictions, score
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.node_party import (
    NodeParty,
    build_party,
    differences,
    expected,
    for_nodes,
)
from fedloom.experiment.plan.private import PrivateData
from fedloom.experiment.plan.reading import check, read
from fedloom.experiment.plan.run_plan import RunPlan
from fedloom.experiment.run import execute as runs
from fedloom.experiment.run.engine import Backend
from fedloom.experiment.run.execute import execute
from fedloom.remote import rpc_errors
from fedloom.report import write
from tests.experiment.nodes import Nodes
from tests.node.hosts import RunRequest, node, opening

FORM: dict[str, Any] = {
    "columns": ["a", "b", {"name": "c", "categories": ["x", "y"]}],
    "label": "kind",
    "classes": ["one", "two"],
}
ALLOWED: dict[str, Any] = {
    "keep": ["a", "b", "c"],
    "label": "kind",
    "classes": ["one", "two"],
    "categories": {"c": ["x", "y"]},
}
RUN: dict[str, Any] = {
    "rounds": 3,
    "params": {"tau": 2, "batch_size": 8},
    "data": {"name": "wards", "clients": 3, "row_schema": FORM},
    "models": {"pool": ["mlp", "linear"]},
}


def run(**changes: Any) -> Any:
    values = {**RUN, **changes}
    return check({"run": {**values, "data": {**RUN["data"], **changes.get("data", {})}}}).run


def rows(path: Path, count: int, seed: int, *, labels: bool = True) -> Path:
    rng = np.random.default_rng(seed)
    y = rng.integers(2, size=count)
    a, b = rng.normal(loc=3 * y), rng.normal(loc=10, scale=5, size=count)
    lines = [
        f"{a[i]:.4f},{b[i]:.4f},{'xy'[rng.integers(2)]}" + f",{('one', 'two')[y[i]]}" * labels
        for i in range(count)
    ]
    path.write_text("\n".join(["a,b,c" + ",kind" * labels, *lines, ""]))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Path]:
    """Each party's file, the server's, and the public one."""
    found = {str(n): rows(tmp_path / f"{n}.csv", 30 + 10 * n, n) for n in range(3)}
    return {
        **found,
        "server": rows(tmp_path / "server.csv", 40, 8),
        "public": rows(tmp_path / "p.csv", 50, 9, labels=False),
    }


@pytest.fixture
def federation(
    disk: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Nodes]]:
    """Let runs have their parties at nodes, each beside its own file."""

    def begin(files: PrivateData, **options: Any) -> list[Nodes]:
        engines: list[Nodes] = []

        def at(sent: Any, number: int) -> NodeParty:
            return build_party(
                sent, number, PrivateData(rows=disk[str(number)], public=files.public)
            )

        def start(run_plan: RunPlan) -> Nodes:
            engines.append(Nodes(run_plan, at, {}, **options))
            return engines[-1]

        monkeypatch.setitem(
            runs.execute.__kwdefaults__, "backend", lambda *_, **__: Backend(start, files)
        )
        return engines

    return begin


def test_a_party_s_rows_are_at_its_node_alone(disk: dict[str, Path]) -> None:
    run_plan = build(run(), PrivateData(public=disk["public"]))
    sent = type(run_plan.run).model_validate_json(for_nodes(run_plan).model_dump_json())
    assert str(disk["public"].parent) not in sent.model_dump_json()
    assert run_plan.data.labels == {} and run_plan.chance is None and run_plan.server is not None
    assert run_plan.server.context.data is None
    there = build_party(sent, 1, PrivateData(rows=disk["1"], public=disk["public"]))
    context = there.party.context
    assert context.data is not None and context.public is not None
    assert len(context.data) + len(context.tests["own"]) == 40 and set(context.tests) == {"own"}
    assert not set(context.data.index.tolist()) & set(context.tests["own"].index.tolist())
    assert there.facts == expected(run_plan, 1) and there.facts["columns"] == [
        "a",
        "b",
        "c=x",
        "c=y",
    ]
    assert "40" not in json.dumps(there.facts["classes"])
    public = context.public.rows
    # what all hold scales the columns of all
    assert torch.allclose(public.every.mean(0), torch.zeros(4), atol=1e-5)
    other = build_party(
        sent, 2, PrivateData(rows=disk["2"], public=disk["public"])
    ).party.context.data
    assert other is not None and torch.equal(other.shift, context.data.shift)


def test_without_public_rows_each_scales_by_its_own(disk: dict[str, Path]) -> None:
    run_plan = build(run(method="local"), PrivateData())
    one, two = (
        build_party(for_nodes(run_plan), n, PrivateData(rows=disk[str(n)])).party.context.data
        for n in (1, 2)
    )
    assert one is not None and two is not None
    assert torch.allclose(one.every.mean(0), torch.zeros(4), atol=1e-5)
    assert not torch.equal(one.shift, two.shift)


def test_missing_numbers_are_filled_at_each_node(disk: dict[str, Path]) -> None:
    for name in ("1", "2", "public"):
        lines = disk[name].read_text().splitlines()
        disk[name].write_text(
            "\n".join([*lines[:3], "," + lines[3].partition(",")[2], *lines[4:], ""])
        )
    for public in (None, disk["public"]):
        run_plan = build(
            run(method="local", data={"missing": "indicator"}), PrivateData(public=public)
        )
        for n in (1, 2):
            there = build_party(
                for_nodes(run_plan), n, PrivateData(rows=disk[str(n)], public=public)
            )
            context = there.party.context
            assert there.facts["columns"] == ["a", "a missing", "b", "b missing", "c=x", "c=y"]
            assert context.data is not None and torch.isfinite(context.data.every).all()
            assert torch.isfinite(context.tests["own"].every).all()
            assert context.data.pool[:, 1].sum() == 1 and context.data.pool[:, 3].sum() == 0
            if public is None:
                assert torch.allclose(context.data.every.mean(0), torch.zeros(6), atol=1e-5)
    with pytest.raises(DataError, match=r"'a' must hold a finite number"):
        build_party(
            for_nodes(build(run(method="local"), PrivateData())), 1, PrivateData(rows=disk["1"])
        )
    with pytest.raises(ConfigError, match="group does not apply with row_schema"):
        run(data={"group": "a"})


@pytest.mark.parametrize("method", ["fedal", "fedmd", "fedavg", "gossip", "feddf", "ditto"])
def test_a_run_learns_and_is_judged_where_the_rows_are(
    method: str, federation: Any, disk: dict[str, Path], tmp_path: Path
) -> None:
    engines = federation(PrivateData(public=disk["public"]))
    one = {"pool": ["mlp"]} if method in ("fedavg", "gossip", "ditto") else RUN["models"]
    params = {k: v for k, v in RUN["params"].items() if method in ("fedal", "fedmd")}
    out = tmp_path / "out"
    result = execute(run(method=method, params=params, models=one), out)
    s = result.summary
    each: dict[int, Any] = {
        e.party.context.id: score(e.party, on="own") for e in engines[0].places.values()
    }
    # whose clients are handed weights before they are judged
    if method not in ("fedavg", "feddf", "ditto"):
        assert s["accuracy"]["per_client"] == pytest.approx(
            [float(found["accuracy"]) for found in each.values()]
        )
    assert s["chance"] == pytest.approx(
        np.mean([float(found["chance"]) for found in each.values()])
    )
    assert s["own_accuracy"] is None and s["test_sha256"] is None and s["private_rows"] is True
    assert "score" in engines[0].calls and "predictions" not in engines[0].calls
    assert read(str(out / "config.toml")).run == run(method=method, params=params, models=one)
    held = json.loads((out / "partition.json").read_text())
    assert held["private_clients"] == 3 and "counts" not in held and held["public"] == 50
    text = write(out).read_text()
    assert "rows of each client are private" in text and "global test set" not in text


def test_a_loss_tells_no_row(disk: dict[str, Path]) -> None:
    """Only a coarse number leaves, however loud the model is."""
    party = build_party(
        for_nodes(build(run(method="local"), PrivateData())), 0, PrivateData(rows=disk["0"])
    ).party
    judged: Any = score(party, on="own")
    exact, messages = predictions(party, on="own")["loss"], judged["loss"]
    assert messages != exact and messages.item() == pytest.approx(round(exact.item(), 3), abs=1e-6)
    party.params = {name: 1e6 * value for name, value in party.params.items()}
    judged = score(party, on="own")
    assert predictions(party, on="own")["loss"] > 10 > judged["loss"]  # each row counts at most 10
    party.params = {name: 1e38 * torch.sign(value) for name, value in party.params.items()}
    judged = score(party, on="own")
    assert judged["accuracy"] <= 1


@pytest.mark.parametrize(
    ("data", "rows_each", "refused"),
    [
        ({}, 100, False),
        ({"test_rows": 19}, 100, True),
        ({"test_rows": 20}, 100, False),
        ({"test_fraction": 0.81}, 100, True),
        ({"test_fraction": 0.8}, 100, False),
        ({}, 40, True),
    ],
)
def test_a_node_s_policy_has_enough_rows_on_both_sides(
    data: dict[str, Any], rows_each: int, refused: bool, tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    text = for_nodes(build(run(method="local", data=data), PrivateData())).model_dump_json()
    rows(path, rows_each, 3)
    asked = RunRequest(node(tmp_path, methods=["local"], data={"wards": {"rows": path, **ALLOWED}}))
    try:
        if refused:
            found = asked.refused("open", opening(text))
            assert found.code == rpc_errors.REFUSED and "at least 20 rows" in found.words
            assert not any(word.isdigit() and word != "20" for word in found.words.split())
            assert not list(asked.config.state.glob("run-*"))
        else:
            asked("open", opening(text))
    finally:
        asked.close()


def test_the_server_has_a_file_of_its_own(federation: Any, disk: dict[str, Path]) -> None:
    changes: dict[str, Any] = {"method": "augfl", "params": {}, "models": {"pool": ["mlp"]}}
    changes |= {"pretrained": {"model": "mlp", "epochs": 1}}
    files = PrivateData(rows=disk["server"], public=disk["public"])
    federation(files)
    found = execute(run(**changes)).summary
    assert found["pretrained"]["model"] == "mlp" and 0 <= found["accuracy"]["mean"] <= 1
    with pytest.raises(ConfigError, match="rows of the server"):
        build(run(**changes), PrivateData(public=disk["public"]))
    run_plan, other = (
        build(run(**changes), files),
        build(run(**changes), PrivateData(rows=disk["2"], public=disk["public"])),
    )
    assert run_plan.data.digest != other.data.digest and run_plan.data.common == other.data.common
    assert expected(run_plan, 0) == expected(other, 0)  # the server's rows are no node's affair


def test_parties_that_hold_other_public_rows_are_reported(
    disk: dict[str, Path], tmp_path: Path
) -> None:
    run_plan = build(run(), PrivateData(public=disk["public"]))
    other = build_party(
        for_nodes(run_plan),
        0,
        PrivateData(rows=disk["0"], public=rows(tmp_path / "q.csv", 50, 10, labels=False)),
    )
    mine = expected(run_plan, 0)
    assert [line.split(":")[0] for line in differences(mine, other.facts)] == ["public", "data"]
    both = f"({mine['public'][:8]}… here, {other.facts['public'][:8]}… there)"
    mend = "copy the file of [data.wards] public again"
    messages = f"its public rows are not the coordinator's: {mend} {both}"
    assert differences(mine, other.facts, "wards") == [messages]
    assert differences(mine, {**other.facts, "role": "X"}, "wards") == [
        messages,
        f"role: {mine['role']!r} here, 'X' there",
    ]
    first = build(run(data={"public_rows": 20}), PrivateData(public=disk["public"]))
    assert (
        len(
            build_party(
                for_nodes(first), 0, PrivateData(rows=disk["0"], public=disk["public"])
            ).party.public_set.rows
        )
        == 20
    )
    with pytest.raises(DataError, match="must hold 51 rows"):
        build(run(data={"public_rows": 51}), PrivateData(public=disk["public"]))


def test_a_file_or_form_that_is_missing_is_named(disk: dict[str, Path]) -> None:
    for data in ({}, {"public_rows": 20}):
        with pytest.raises(
            ConfigError,
            match=r'^fedal learns .*in federation\.toml, \[data\.wards\] public = "public',
        ):
            build(run(method="fedal", data=data), PrivateData())
    sent = for_nodes(build(run(), PrivateData(public=disk["public"])))
    with pytest.raises(ConfigError, match=r"in node\.toml, \[data\.wards\] public"):
        build_party(sent, 0, PrivateData(rows=disk["0"]))
    unformed = {**RUN, "data": {"name": "wards", "clients": 3}}
    with pytest.raises(
        ConfigError,
        match=r"neither .* If 'wards' is the nodes' own rows, describe them with "
        r"\[data\.row_schema\]",
    ):
        check({"run": {**unformed, "engine": {"name": "net"}}})
    with pytest.raises(ConfigError, match="neither") as alone:
        check({"run": unformed})
    assert "data.row_schema" not in str(alone.value)


def test_what_cannot_be_is_refused(disk: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="--engine net"):
        execute(run())
    with pytest.raises(ConfigError, match=r"data\.public_rows"):
        build(run(data={"public_rows": 0}), PrivateData(public=disk["public"]))
    with pytest.raises(ConfigError, match="rows of party 0"):
        build_party(for_nodes(build(run(method="local"), PrivateData())), 0)
    with pytest.raises(ConfigError, match=r"set columns\.private=true"):
        build(run(method="split", params={}, models={}), PrivateData())
    for wrong, why in (
        ({"partition": "iid"}, "partition does not apply with row_schema"),
        ({"validation": 0.2}, "validation does not apply with row_schema"),
        ({"server_rows": 10}, "come from a file"),
        ({"row_schema": {**FORM, "classes": ["one"]}}, "at least two classes"),
        ({"row_schema": {**FORM, "classes": ["one", "one"]}}, "has a duplicate value"),
        ({"row_schema": {**FORM, "label": "a"}}, "must not include the label"),
        ({"row_schema": {"kind": "image", "classes": ["one", "two"]}}, "kind image needs a shape"),
    ):
        with pytest.raises(ConfigError, match=why):
            run(data=wrong)


def test_too_few_rows_are_refused(disk: dict[str, Path], tmp_path: Path) -> None:
    sent = for_nodes(build(run(method="local"), PrivateData()))
    with pytest.raises(DataError, match="too few"):
        build_party(sent, 0, PrivateData(rows=rows(tmp_path / "few.csv", 1, 0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"accuracy": torch.tensor(1.5)},
        {"accuracy": torch.tensor(float("nan"))},
        {"rows": 0},
        {"rows": "many"},
    ],
)
def test_a_score_that_cannot_be_is_left_out(
    wrong: dict[str, Any], federation: Any, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lies = {1: wrong}
    lying = lambda party, **how: {**score(party, **how), **lies.get(party.context.id, {})}
    monkeypatch.setitem(EVALUATIONS, "score", lying)
    federation(PrivateData())
    found = execute(run(method="local", params={})).summary
    assert found["accuracy"]["clients"] == [0, 2]
    assert "client-1 is left out of an evaluation: invalid reply" in caplog.text
