"""FENS: aggregators in closed form, FedAdam on held-out rows against Adam on all of them, forests,
what crosses.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedloom import methods
from fedloom.core.errors import ConfigError
from fedloom.core.federation import Federation
from fedloom.core.message import leaves
from fedloom.core.page import Classes
from fedloom.experiment.plan.build import build
from fedloom.experiment.plan.reading import check
from fedloom.experiment.run.engine import start
from fedloom.experiment.run.execute import execute
from fedloom.methods.distillation.fens import aggregate, aggregator_loss, first_weights
from fedloom.methods.distillation.fens_student import log_probs, stacked
from tests.toy import CLASSES, Toy

FENS, STUDENT = (methods.find(n) for n in ("fens", "fens-student"))
ALL = 10_000  # a batch of all held-out rows


def trained(
    kind: Any, z: Tensor, y: Tensor, steps: int = 800, lr: float = 0.01, hidden: int = 4
) -> dict[str, Tensor]:
    """An aggregator learned centrally, by Adam on all rows."""
    torch.manual_seed(0)
    first = first_weights(kind, z.shape[1], z.shape[2], hidden)
    weights = {k: w.clone().requires_grad_() for k, w in first.items()}
    adam = torch.optim.Adam(weights.values(), lr)
    for _ in range(steps):
        adam.zero_grad()
        aggregator_loss(Classes(z.shape[-1]), weights, z, y).backward()
        adam.step()
    return {k: w.detach() for k, w in weights.items()}


def accuracy(weights: dict[str, Tensor], z: Tensor, y: Tensor) -> float:
    return float((aggregate(weights, z).argmax(1) == y).float().mean())


@pytest.mark.parametrize("kind", ["mean", "weights", "class-weights"])
def test_an_aggregator_begins_as_the_mean_of_logits(kind: Any) -> None:
    z = torch.randn(20, 4, CLASSES)
    assert torch.equal(aggregate(first_weights(kind, 4, CLASSES, 4), z), z.sum(1) / 4)


def test_a_network_has_the_paper_s_sizes() -> None:
    assert sum(w.numel() for w in first_weights("network", 20, 10, 2).values()) == 8450


@pytest.mark.parametrize("kind", ["weights", "class-weights", "network"])
def test_federated_steps_are_adam_s_on_all_held_out_rows(kind: str) -> None:
    """A full-batch step at rate 1 at each client, weighted by rows: the mean moves along the pooled
    gradient.
    """
    toy = Toy(
        FENS,
        local_rounds=1,
        aggregator=kind,
        aggregator_steps=7,
        aggregator_batch=ALL,
        held_out=0.4,
    ).run(2)
    clients = [toy.party(i) for i in toy.engine.ids]
    parts = [(c.answers, c.data.y(c.split()[1])) for c in clients]
    z, y = (torch.cat(part) for part in zip(*parts, strict=True))
    first = Toy(FENS, local_rounds=1, aggregator=kind).server.params
    weights = {k: w.clone().requires_grad_() for k, w in first.items()}
    adam = torch.optim.Adam(weights.values(), 1e-3)
    for _ in range(7):
        adam.zero_grad()
        aggregator_loss(Classes(z.shape[-1]), weights, z, y).backward()
        adam.step()
    for name, found in toy.server.params.items():
        assert torch.allclose(found, weights[name], atol=2e-6), name
        assert torch.equal(clients[0].aggregator[name], found)


def test_a_client_that_is_always_right_outweighs_one_that_guesses() -> None:
    torch.manual_seed(1)
    y = torch.randint(CLASSES, (600,))
    right = 6.0 * F.one_hot(y, CLASSES)
    guess = 6.0 * F.one_hot(torch.randint(CLASSES, (600,)), CLASSES)
    weight = trained("weights", torch.stack([right, guess], 1), y)["weight"][:, 0]
    assert weight[0] > 10 * weight[1].abs()


def test_experts_that_are_sure_everywhere_need_a_learned_aggregator() -> None:
    """Six experts of two neighbouring classes each, which answer one of theirs for every row, and
    the surer the farther the row is from their classes, as networks do: the mean fails, the network
    learns who knows.
    """
    torch.manual_seed(2)
    classes, rows = 12, 1200
    y = torch.randint(classes, (rows,))
    noise = torch.randint(2, (rows, 6))
    z = torch.zeros(rows, 6, classes)
    for m in range(6):
        mine = y // 2 == m
        said = torch.where(mine, y, 2 * m + noise[:, m])
        sure = torch.where(mine, 5.0, 6.0 + 3 * torch.rand(rows))
        z[torch.arange(rows), m, said] = sure
    mean, network = first_weights("mean", 6, classes, 4), trained("network", z[:800], y[:800])
    assert accuracy(mean, z[800:], y[800:]) <= 0.4
    assert accuracy(network, z[800:], y[800:]) >= 0.95


def test_a_client_that_was_away_has_logits_of_zero() -> None:
    toy = Toy(FENS, local_rounds=1, aggregator_steps=2).run(1)
    toy.run(1, start=1, present=[0, 2])
    held = toy.party(0).answers
    assert held[:, 0].abs().sum() > 0 and held[:, 2].abs().sum() > 0 and not held[:, [1, 3]].any()
    away = toy.party(1)
    assert torch.equal(away.infer(away.data.every), away.net.infer(away.data.every))
    z = stacked({1: {"own": torch.ones(3, CLASSES)}}, "own", 3)
    assert z.shape == (3, 3, CLASSES) and z[:, 1].all() and not z[:, [0, 2]].any()


def test_models_and_weights_of_f_cross_and_no_answer_or_label() -> None:
    toy = Toy(FENS, local_rounds=1, aggregator_steps=3).run(2)
    up = {e.kind: e.what for e in toy.fed.ledger if e.receiver == "server"}
    assert set(up) == {"train_alone", "send", "take", "learn_aggregator", "take_aggregator"}
    assert up["train_alone"] == up["take"] == up["take_aggregator"] == "none"
    size = sum(w.numel() for w in toy.server.params.values())
    learn = [e for e in toy.fed.ledger if e.kind == "learn_aggregator" and e.receiver == "server"]
    assert {e.bytes // e.count for e in learn} == {4 * size + 8}


def test_in_fens_student_answers_cross_once_and_no_model() -> None:
    values: dict[str, Any] = {
        "method": "fens-student",
        "rounds": 4,
        "data": {
            "name": "digits",
            "clients": 3,
            "public_rows": 60,
            "server_rows": 40,
            "test_rows": 50,
        },
        "models": {"pool": ["mlp", "forest"]},
        "params": {"local_rounds": 1, "tau": 5, "aggregator_steps": 200},
        "evaluate": {"points": 4},
    }
    plan = build(check({"run": values}).run)
    with start(plan) as engine:
        fed = Federation(engine)
        for t in range(4):
            fed.round = t
            for _ in plan.method.round(fed, plan.server, engine.ids, plan.cfg, t):
                pass
    what = {
        (e.sender.split("-")[0], e.kind, e.what, e.round)
        for e in fed.ledger
        if e.what not in ("none", "t int")
    }
    assert what == {
        ("server", "answer", "x float32[40,1,8,8]", 1),
        ("client", "answer", "own float32[40,10]; public float32[60,10]", 1),
        ("server", "take", "targets float32[60,10]", 1),
    }


def test_forests_of_few_classes_learn_those_of_others() -> None:
    values: dict[str, Any] = {
        "method": "fens-student",
        "rounds": 2,
        "data": {
            "name": "digits",
            "clients": 5,
            "public_rows": 200,
            "server_rows": 100,
            "test_rows": 200,
            "partition": "dirichlet",
            "options": {"alpha": 0.1},
        },
        "models": {"pool": ["forest"]},
        "params": {"local_rounds": 1},
        "evaluate": {"points": 2},
    }
    found = [
        row[-1] for row in execute(check({"run": values}).run).metrics if row[4] == "accuracy mean"
    ]
    assert found[-1] > found[-2] + 0.2


def test_answers_have_a_floor() -> None:
    found = log_probs(torch.tensor([[50.0, 0, 0], [1, 1, 1]]))
    assert torch.allclose(found.exp(), torch.tensor([[1, 1e-3, 1e-3], [1 / 3] * 3]))


def test_settings() -> None:
    with pytest.raises(ConfigError, match=r"params\.aggregator"):
        FENS.configure(params={"aggregator": "vote"})
    assert FENS.configure().min_rounds == 21 and "server rows" in STUDENT.needs
    assert all(isinstance(leaf, Tensor | bool) for _, leaf in leaves(Toy(FENS).server.state()))
