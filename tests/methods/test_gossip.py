"""Gossip's page: who mixes whose models, what crosses, and its two ends, all
neighbours and none.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom import methods
from fedloom.cli import main
from fedloom.core.errors import ModelError
from fedloom.core.faults import Faults
from fedloom.methods import steps
from tests.toy import Toy, common, equal

GOSSIP, ALONE = (methods.find(n) for n in ("gossip", "alone"))
BODY = [k for k, _ in common().named_parameters() if k.startswith("body.")]
BYTES = 4 * sum(p.numel() for k, p in common().named_parameters() if k in BODY)
RING = {i: ((i - 1) % 5, (i + 1) % 5) for i in range(5)}


def trained(toy: Toy, t: int) -> list[dict[str, Tensor]]:
    """All peers' weights after their own training of round t, tried on a scratch copy."""
    found = []
    for i in toy.engine.ids:
        party = toy.party(i)
        with party.scratch():
            steps.local_sgd(party, t=t)
            found.append({k: v.clone() for k, v in party.params.items()})
    return found


def mixed(
    models: Sequence[Mapping[str, Tensor]], links: Mapping[int, Sequence[int]]
) -> list[dict[str, Tensor]]:
    """The plain mean of the own body and the neighbours'; the own head."""
    return [
        {
            k: torch.stack([models[j][k].double() for j in (i, *links[i])]).mean(0).float()
            if k in BODY
            else own[k]
            for k in own
        }
        for i, own in enumerate(models)
    ]


def holds(toy: Toy, expected: Sequence[Mapping[str, Tensor]]) -> bool:
    return all(
        torch.allclose(toy.party(i).params[k], v, rtol=0, atol=1e-6)
        for i, model in enumerate(expected)
        for k, v in model.items()
    )


@pytest.mark.parametrize("batched", [False, True], ids=["loop", "batched"])
@pytest.mark.parametrize(("graph", "k"), [(None, 2), (None, None), (RING, None), (RING, 1)])
def test_a_round_is_training_and_then_the_plain_mean_with_neighbours(
    graph: Any, k: int | None, batched: bool
) -> None:
    toy = Toy(
        GOSSIP, 5, graph=graph, neighbours=k, batched=batched, batch_size=8, epochs=1, lr=0.05
    )
    for t in range(3):
        links = toy.fed.sample_peers(range(5), k, t)
        expected = mixed(trained(toy, t), links)
        toy.run(1, start=t)
        assert holds(toy, expected)
        for i, notes in toy.engine.notes().items():
            row = [1 / (1 + len(links[i])) if j == i or j in links[i] else 0.0 for j in range(5)]
            assert notes["mixing"] == pytest.approx(row)
    if graph:
        assert all(set(links[i]) <= set(RING[i]) for i in links)


def test_with_all_neighbours_all_models_are_one() -> None:
    """The plain mean of all, on the complete graph and nothing personal."""
    toy = Toy(GOSSIP, neighbours=None, personal_head=False, batch_size=8, lr=0.05)
    for t in range(2):
        models = trained(toy, t)
        toy.run(1, start=t)
        mean = {k: torch.stack([m[k].double() for m in models]).mean(0).float() for k in models[0]}
        assert holds(toy, [mean] * 4)
        assert not torch.allclose(models[0]["head.bias"], models[1]["head.bias"], atol=1e-4)


def test_bytes_are_one_body_a_link() -> None:
    toy = Toy(GOSSIP, 5, neighbours=2, batch_size=8).run(3)
    assert all(toy.fed.ledger.received(toy.engine.name(i)) == 3 * 2 * BYTES for i in toy.engine.ids)
    assert toy.fed.ledger.sent("server") == toy.fed.ledger.received("server") == 0
    assert {(e.kind, e.count, e.bytes) for e in toy.fed.ledger if e.kind == "give"} == {
        ("give", 10, 10 * BYTES)
    }


def test_alone_is_own_training_and_no_message() -> None:
    toy = Toy(ALONE, batch_size=8)
    twins = Toy(GOSSIP, batch_size=8)
    for t in range(3):
        toy.run(1, start=t)
        for i in twins.engine.ids:
            steps.local_sgd(twins.party(i), t=t)
    assert equal(toy.tensors(), twins.tensors())
    assert not [pair for pair in toy.fed.ledger.pairs if not any("server" in name for name in pair)]
    # the calls to begin
    assert all(e.bytes == 0 and e.what in ("t int", "none") for e in toy.fed.ledger)
    for i, notes in toy.engine.notes().items():
        assert notes["mixing"] == [float(i == j) for j in range(4)]
    assert equal(toy.tensors(), Toy(GOSSIP, neighbours=0, batch_size=8).run(3).tensors())


def test_a_neighbour_that_does_not_answer_is_left_out() -> None:
    toy = Toy(GOSSIP, 5, neighbours=3, batch_size=8, faults=Faults(dropout=0.2, nan=0.2))
    asked = heard = 0
    for t in range(4):
        links = toy.fed.sample_peers(range(5), 3, t)
        toy.run(1, start=t)
        for i, notes in toy.engine.notes().items():
            if "mixing" in notes:  # it was there when it had to mix
                row = torch.tensor(notes["mixing"])
                assert float(row.sum()) == pytest.approx(1.0)
                others = set(row.nonzero().flatten().tolist()) - {i}
                assert others <= set(links[i]) and row[i] == row.max()
                asked, heard = asked + 3, heard + len(others)
    assert 0 < heard < asked
    assert all(torch.isfinite(v).all() for v in toy.tensors().values())


def test_only_those_present_are_asked() -> None:
    toy = Toy(GOSSIP, 5, neighbours=None, batch_size=8).run(1, present=(0, 2, 3))
    mixing = {i: n["mixing"] for i, n in toy.engine.notes().items() if n}
    third = pytest.approx([1 / 3, 0, 1 / 3, 1 / 3, 0])
    assert mixing == {0: third, 2: third, 3: third}


# -- in a run --------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "rounds": 2,
    "data": {"clients": 4, "test_fraction": 0.8, "test_rows": 40, "own_test_rows": 10},
    "models": {"pool": ["mlp"]},
    "params": {"epochs": 1, "batch_size": 16, "lr": 0.1},
    "churn": {"away": [{"client": 1, "start": 1}]},
}


def test_a_run_measures_accuracy_as_it_is_and_tuned() -> None:
    tuned = fedloom.run("gossip", **SMALL)
    plain = fedloom.run("gossip", **{**SMALL, "params": {**SMALL["params"], "finetune_epochs": 0}})
    metrics = {row[4] for row in tuned.rows}
    assert {
        "accuracy mean",
        "own accuracy mean",
        "own accuracy tuned mean",
        "own accuracy tuned std",
    } <= metrics
    assert not [m for m in {row[4] for row in plain.rows} if "tuned" in m]
    assert len([row for row in tuned.rows if row[4] == "own accuracy tuned" and row[0] == 2]) == 4
    assert tuned.summary["state_sha256"] == plain.summary["state_sha256"]  # to look changes nothing


@pytest.mark.parametrize("name", ["gossip", "alone", "afind-plus"])
def test_a_network_with_nothing_but_a_head_is_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError, match="needs a network with a body and a module `head`"):
        fedloom.run(name, **{**SMALL, "models": {"pool": ["linear"]}}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    monkeypatch.chdir(tmp_path)
    arguments = [
        "run",
        name,
        "--out",
        "r",
        "--set",
        "models.pool=['linear']",
        "--set",
        "data.clients=3",
    ]
    monkeypatch.setattr(sys, "argv", ["fedloom", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    shown = capsys.readouterr().err
    assert stop.value.code == 2 and "Traceback" not in shown and "round" not in shown
    assert "params.personal_head=false" in " ".join(shown.split())
    assert not (tmp_path / "r").exists()


def test_without_a_personal_head_it_will_do() -> None:
    params = {**SMALL["params"], "personal_head": False}
    assert (
        fedloom.run(
            "gossip", **{**SMALL, "models": {"pool": ["linear"]}, "params": params}
        ).accuracy
        > 0.1
    )
