"""Prototype students, and the principal components that they begin with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.experiment.plan.reading import read
from fedloom.experiment.run.execute import execute
from fedloom.methods.vertical.proto_evfl_steps import similarities
from fedloom.methods.vertical.proto_student import most_confident, shifted_together
from fedloom.methods.vertical.steps import PrincipalComponents
from tests.methods.columns import CLASSES, WIDTH, Columns, extractor

STUDENT = methods.find("proto-student")
SMALL: dict[str, Any] = {
    "pca_dim": 2,
    "steps": 3,
    "epochs": 1,
    "make": lambda m: extractor(m, WIDTH - 2),
}


# -- principal components --------------------------------------------------------------------------


def test_components_are_those_of_a_singular_value_decomposition() -> None:
    x = (
        torch.randn(60, 2, 3, generator=torch.Generator().manual_seed(0)).double()
        @ torch.diag(torch.tensor([3.0, 1, 2])).double()
    )
    flat = x.flatten(1).numpy()
    left, _, _ = np.linalg.svd(flat - flat.mean(0), full_matrices=False)
    found = PrincipalComponents(x, 4)(x).numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(left[:, :4]) * np.sqrt(len(flat)), atol=1e-9)
    np.testing.assert_allclose(
        found.T @ found / len(flat), np.eye(4), atol=1e-9
    )  # each of variance 1, none like another


def test_where_fewer_vary_the_rest_is_nothing() -> None:
    x = torch.zeros(10, 3)
    x[:, 1] = torch.arange(10.0)
    found = PrincipalComponents(x, 5)(x)
    assert found.shape == (10, 5) and found.isfinite().all()
    assert found[:, 0].var(correction=0) == pytest.approx(1, abs=1e-5) and not found[:, 1:].any()


def test_components_come_first_and_no_training_moves_them() -> None:
    toy = Columns(STUDENT, **SMALL)
    party = toy.party(1)
    before = {k: v.clone() for k, v in party.buffers.items() if k.startswith("principal.")}
    toy.run(2)
    after = {k: v for k, v in party.buffers.items() if k.startswith("principal.")}
    assert before and all(torch.equal(before[k], after[k]) for k in before)
    x = party.data.every
    embedded = party.infer(x)
    assert embedded.shape[1] == WIDTH
    torch.testing.assert_close(
        embedded[:, :2], (x - after["principal.mean"]) @ after["principal.directions"]
    )


def test_components_are_of_own_rows_and_differ_between_parties() -> None:
    toy = Columns(STUDENT, **SMALL)
    assert not torch.equal(
        toy.party(1).buffers["principal.mean"], toy.party(2).buffers["principal.mean"]
    )
    x = toy.party(1).data.every
    torch.testing.assert_close(toy.party(1).buffers["principal.mean"], x.mean(0))


@pytest.mark.parametrize("method", ["proto-evfl", "split", "proto-student"])
def test_some_numbers_must_be_left_to_learn(method: str) -> None:
    with pytest.raises(
        ConfigError, match=r"params\.pca_dim must be below params\.embedding_dim = 8"
    ):
        methods.find(method).configure(params={"embedding_dim": 8, "pca_dim": 8})


# -- what is learned from --------------------------------------------------------------------------


def test_the_surest_rows_of_each_class() -> None:
    beliefs = torch.tensor(
        [[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3], [0.2, 0.8], [0.55, 0.45], [0.1, 0.9]]
    )
    rows, named = most_confident(beliefs, 0.5)
    # 2 of 4, and 2 of 3 rounded up
    assert rows.tolist() == [0, 3, 4, 6] and named.tolist() == [0, 0, 1, 1]
    rows, named = most_confident(beliefs, 1.0)
    assert rows.tolist() == list(range(7)) and torch.equal(named, beliefs.argmax(1))
    rows, named = most_confident(beliefs[:2], 0.01)
    # a class that nobody is named by has none
    assert rows.tolist() == [0] and named.tolist() == [0]


def test_pictures_are_shifted_and_tables_are_not() -> None:
    table = torch.randn(4, 7)
    assert shifted_together(table) is table
    pictures = torch.arange(2 * 16.0).view(2, 1, 4, 4)
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        moved = shifted_together(pictures)
        assert moved.shape == pictures.shape
        assert torch.equal(moved[1] - moved[0], torch.full((1, 4, 4), 16.0))  # all alike
        seen.add(tuple(moved[0].flatten().tolist()))
    assert len(seen) == 9 and tuple(pictures[0].flatten().tolist()) in seen


def test_a_round_is_steps_of_cross_entropy_on_the_surest_rows() -> None:
    toy = Columns(STUDENT, **{**SMALL, "steps": 4, "weight_decay": 0.01})
    party = toy.party(1)
    other = Columns(STUDENT, **{**SMALL, "steps": 4, "weight_decay": 0.01}).party(1)
    mu = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(1))
    party.improve(t=0, prototypes=mu, prior=torch.full((CLASSES,), 1 / CLASSES))
    net, x = other.net.module, other.data.every
    beliefs = torch.softmax(similarities(other.infer(x), mu, other.cfg), -1)
    rows, named = most_confident(beliefs, 0.5)
    plan = torch.from_numpy(other.stream("batches", 0).integers(len(rows), size=(4, 8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=other.cfg.lr, weight_decay=0.01)
    net.train()
    for which in plan:
        optimizer.zero_grad()
        F.cross_entropy(net.head(net(x[rows[which]])), named[which]).backward()
        optimizer.step()
    for k, p in net.named_parameters():
        torch.testing.assert_close(party.params[k], p.detach(), atol=1e-6, rtol=1e-5)


# -- what crosses ----------------------------------------------------------------------------------


def test_messages_are_those_of_proto_evfl_and_the_head_stays() -> None:
    params: dict[str, Any] = {**SMALL, "rollback": False}
    ours = Columns(STUDENT, isolated=True, **params).run(2)
    theirs = Columns(methods.find("proto-evfl"), isolated=True, **params).run(2)
    entries = [
        [(e.round, e.sender, e.receiver, e.kind, e.what, e.count) for e in w.fed.ledger]
        for w in (ours, theirs)
    ]
    assert entries[0] == entries[1] and entries[0]
    assert all("head" not in what for *_, what, _ in entries[0])


def test_labels_reach_a_party_by_prototypes_and_no_other_way() -> None:
    def first_reply(relabel: bool) -> tuple[list[torch.Tensor], list[Any]]:
        mix = torch.roll if relabel else (lambda y, _: y)
        toy = Columns(STUDENT, relabel=lambda y: mix(y, 1), **SMALL).run(1)
        return [h.reply for h in toy.heard if h.method == "introduce"], [
            h.reply for h in toy.heard if h.method == "improve"
        ]

    (introduced, improved), (same, other) = first_reply(False), first_reply(True)
    assert all(torch.equal(a, b) for a, b in zip(introduced, same, strict=True))
    assert not all(
        torch.equal(a["embedded"], b["embedded"]) for a, b in zip(improved, other, strict=True)
    )


# -- learning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns(seed: int) -> None:
    overrides = [
        f"seed={seed}",
        "rounds=4",
        "data.test_rows=200",
        "evaluate.points=1",
        "models.pool=['mlp']",
    ]
    run = read("proto-student", [*overrides, "columns.aligned=100", "params.steps=30"]).run
    result = execute(run)
    last = {metric: value for round, _, _, _, metric, value in result.metrics if round == 4}
    # 0.74 and 0.70; chance is 0.1
    assert last["accuracy mean"] > 0.5 and last["own accuracy alone mean"] > 0.5
